"""A process is killed before each write while it suspends, answers or cancels a call of a conversation that goes on."""

import json
import os
from typing import Any

import pytest

from . import rooms
from .forge import LEASE, Forge, end_leases, prepared, rows

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts many processes
]


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the rooms and those of the runs."""
    return prepared(database_url, rooms.TABLES)


@pytest.mark.parametrize("program", ["ask", "answer", "cancel"])
def test_the_log_and_the_runs_agree_wherever_a_process_was_killed(forge: Forge, url: str, program: str) -> None:
    def run(name: str, *arguments: Any) -> None:
        forge.begin(name, url, LEASE, *arguments)
        assert forge.wait() == [0], name

    if program != "ask":
        run("ask_first", ["whole"])
    run(program, "whole", None)
    [(number,)] = rows(url, "SELECT taken FROM steps")
    assert number > 3
    names = {f"killed-at-{step}": step for step in range(1, number + 1)}
    if program != "ask":
        run("ask_first", [*names])
    exits: list[int] = []
    for started, (name, step) in enumerate(names.items(), 1):
        forge.begin(program, url, LEASE, name, step)
        if started % 4 == 0:
            exits += forge.wait()
    exits += forge.wait()
    assert set(exits) <= {-9, 0}  # renewals of the lease are writes too, so the last steps may not be reached

    end_leases(url)
    run("go_on_talking", [*names])
    shown = turns_of(url)
    found = {(room, run_id): status for room, run_id, status in rows(url, RUNS)}
    for room in names:
        states = {run_id: state for _, run_id, state in shown[room]}
        waits = {run_id for run_id, state in states.items() if state == "waiting"}
        runs = {run_id: status for (of, run_id), status in found.items() if of == room}
        # The run and its turn are in one transaction, whatever happens to the run.
        going_on = {run_id for run_id, status in runs.items() if status in ("suspended", "running")}
        assert going_on == waits, (room, shown[room])
        ended = {"cancel": ("cancelled", "stopped"), "answer": ("completed", "answered")}
        assert {(runs[each], states[each]) for each in runs if each not in waits} <= {ended.get(program)}

    run("answer_all", [*names, "whole"])
    for room, turns in turns_of(url).items():
        if room == "whole":
            continue
        states = {asked: state for asked, _, state in turns}
        assert len(states) == len(turns), (room, turns)  # nothing is there twice
        assert states.pop("after") == "answered"
        assert states.pop("before", None) == (None if program == "ask" else "answered")
        assert program == "ask" or "refund" in states
        ends = {"ask": {"answered"}, "answer": {"answered"}, "cancel": {"stopped", "answered"}}
        assert {*states.values()} <= ends[program], (room, turns)
    assert {status for (status,) in rows(url, "SELECT status FROM toolbox_runs")} <= {"completed", "cancelled"}


RUNS = "SELECT memory_id, id, status FROM toolbox_runs"
TURNS = """
SELECT memory_id, messages, run_id, details FROM toolbox_conversations_turns AS turns
JOIN toolbox_conversations AS heads ON heads.id = turns.conversation ORDER BY turns.number
"""


def turns_of(url: str) -> dict[str, list[tuple[str, str | None, str]]]:
    """Return the turns of each room: what was asked, the run, and the state."""
    found: dict[str, list[tuple[str, str | None, str]]] = {}
    for room, messages, run_id, details in rows(url, TURNS):
        asked = json.loads(messages)["messages"][0]["contents"][0]["text"]
        found.setdefault(room, []).append((asked, run_id, json.loads(details)["state"]))
    return found
