"""A process is killed before each write of a hand-over, or while it adds a message, and another one goes on."""

import json
import os
from collections import Counter
from typing import Any

import pytest

from toolbox import ToolExecutionResultMessage, UserMessage
from toolbox.transcripts import messages_from_json

from . import handed_over
from .forge import LEASE, Forge, prepared, rows

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts many processes
]


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the programs and those of the runs."""
    return prepared(database_url, handed_over.TABLES)


def run(forge: Forge, url: str, name: str, *arguments: Any) -> None:
    forge.begin(name, url, LEASE, *arguments)
    assert forge.wait() == [0], name


def number_of_steps(url: str) -> int:
    [(number,)] = rows(url, "SELECT MIN(taken) FROM steps")
    assert number > 1
    return int(number)


def check_rooms(url: str) -> dict[str, list[str]]:
    """Each run has ended with one turn that the target answered; returns the messages of the user, by room."""
    assert {status for (status,) in rows(url, "SELECT status FROM toolbox_runs")} == {"completed"}
    runs = {each for (each,) in rows(url, "SELECT id FROM toolbox_runs")}
    said: dict[str, list[str]] = {}
    for room, messages, details in rows(url, TURNS):
        assert room not in said, room
        turn = messages_from_json(messages)
        said[room] = [each.text for each in turn if isinstance(each, UserMessage)]
        results = [each.tool_name for each in turn if isinstance(each, ToolExecutionResultMessage)]
        assert results[:3] == ["find", "transfer_to_billing", "find"], room
        about = json.loads(details)
        assert (about["answered_by"], about["in_charge"]) == ("Billing.chat", "Billing.chat"), room
        assert (turn[-1].text or "").startswith("done"), room
    assert {*said} == runs
    events = (
        (run_id, json.loads(data)["type"]) for run_id, data in rows(url, "SELECT run_id, data FROM toolbox_runs_events")
    )
    assert Counter(run_id for run_id, kind in events if kind == "HandedOver") == dict.fromkeys(runs, 1)
    return said


TURNS = """
SELECT memory_id, messages, details FROM toolbox_conversations_turns AS turns
JOIN toolbox_conversations AS heads ON heads.id = turns.conversation
"""


def test_a_killed_hand_over_happens_once_and_no_message_beside_it_is_lost(forge: Forge, url: str) -> None:
    run(forge, url, "hand_over", "whole", "hi", None)
    every = 1 if url.startswith("sqlite") else 2  # both write the same records
    for begun, step in enumerate(range(1, number_of_steps(url) + 1, every), 1):
        forge.begin("hand_over", url, LEASE, f"killed-at-{step}", "hi", step, True)
        forge.begin("tell_much", url, LEASE, f"killed-at-{step}")
        if begun % 4 == 0:
            assert set(forge.wait()) <= {-9, 0}
    assert set(forge.wait()) <= {-9, 0}
    run(forge, url, "finish_all")
    accepted: dict[str, list[str]] = {}
    for run_id, message in rows(url, "SELECT run, message FROM accepted"):
        accepted.setdefault(run_id, []).append(message)
    assert accepted
    for room, said in check_rooms(url).items():
        assert said == ["hi", *accepted.get(room, [])], room


def test_a_message_of_a_killed_process_is_read_once_or_not_at_all(forge: Forge, url: str) -> None:
    run(forge, url, "hand_over", "whole", "refund", None)
    run(forge, url, "tell_once", "whole", None)
    steps = range(1, number_of_steps(url) + 1)  # those of the message: the call has more
    for step in steps:
        forge.begin("hand_over", url, LEASE, f"killed-at-{step}", "refund", None)
    assert set(forge.wait()) == {0}
    for step in steps:
        forge.begin("tell_once", url, LEASE, f"killed-at-{step}", step)
    assert set(forge.wait()) == {-9}
    run(forge, url, "finish_all")
    found = check_rooms(url)
    assert found.pop("whole") == ["refund", "m0", "last"]
    assert {*map(tuple, found.values())} <= {("refund", "m0", "last"), ("refund", "last")}
