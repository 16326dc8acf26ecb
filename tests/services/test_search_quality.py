"""The strategies of the tool search find the right one of the 1,000 tools that published MCP servers list."""

from typing import Any

import pytest

from benchmarks.search import GOAL, quality, questions, tools
from toolbox.search import Bm25ToolSearch, KeywordToolSearch


@pytest.mark.parametrize("strategy", [KeywordToolSearch, Bm25ToolSearch])
def test_the_right_tool_is_among_the_first_eight_for_most_questions(strategy: Any) -> None:
    found = quality(strategy(max_results=8))
    assert found.among_first >= GOAL, found.missed


def test_every_question_has_a_tool_and_every_tool_another_name() -> None:
    names = [tool.name for tool in tools()]
    assert len(names) == len(set(names)) == 1000
    assert len({row["tool"] for row in questions()} & set(names)) == len(questions()) == 100
