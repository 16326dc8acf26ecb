"""Return types that a model cannot answer with, and templates that ask for what is sent anyway."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    AudioContent,
    Container,
    ImageContent,
    PdfContent,
    Problem,
    Result,
    TextContent,
    register_ai_service,
    user_message,
)
from toolbox.testing import ScriptedChatModel


def problems_of(returns: Any, template: str = "{it}") -> list[Problem]:
    class Painter(Protocol):
        @user_message(template)
        def paint(self, text: str) -> Any: ...

    Painter.paint.__annotations__["return"] = returns
    model = {"default": ScriptedChatModel(["x"])}
    return Container(models=model).register(register_ai_service(Painter)).check()


@pytest.mark.parametrize("content", [ImageContent, PdfContent, AudioContent, TextContent])
def test_contents_as_return_types_are_problems_that_name_a_tool(content: type[Any]) -> None:
    for returns in (content, Result[content], list[content], content | None, str | content, AsyncIterator[content]):
        [problem] = problems_of(returns)

        assert problem.where == "Painter.paint"
        assert f"so it would invent the {content.__name__}" in problem.what
        assert problem.fix == f"write a tool that returns it, `-> {content.__name__}`"


def test_a_template_with_the_response_schema_is_a_problem_that_says_why() -> None:
    [problem] = problems_of(dict[str, int], "{text} {response_schema}")
    [other] = problems_of(dict[str, int], "{text} {schema}")

    assert "is not needed: the schema of the return type is sent with each request" in problem.what
    assert problem.fix == "remove it"
    assert "not needed" not in other.what
