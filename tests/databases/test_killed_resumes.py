"""A process is killed before each write of the database between the answers to a suspended run and its end."""

import json
import os

import pytest

from . import suspensions
from .forge import LEASE, Forge, end_leases, prepared, rows

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts many processes
]


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the office and those of the runs."""
    return prepared(database_url, suspensions.TABLES)


def test_a_run_goes_on_wherever_the_process_that_resumed_it_was_killed(forge: Forge, url: str) -> None:
    forge.begin("suspend", url, LEASE, ["whole"])
    assert forge.wait() == [0]
    forge.begin("resume", url, LEASE, "whole", None)
    assert forge.wait() == [0]
    [(number,)] = rows(url, "SELECT taken FROM steps")
    assert number > 15
    steps = {f"killed-at-{step}": step for step in range(1, number + 1)}
    names = [*steps]
    forge.begin("suspend", url, LEASE, names)
    assert forge.wait() == [0]
    ended: list[int] = []
    for started, (name, step) in enumerate(steps.items(), 1):
        forge.begin("resume", url, LEASE, name, step)
        if started % 4 == 0:
            ended += forge.wait()
    ended += forge.wait()
    assert set(ended) <= {-9, 0}  # renewals of the lease are writes too, so the last steps may not be reached

    # Each run is suspended with the same calls, running, or completed just before the kill.
    for status, document in rows(url, "SELECT status, document FROM toolbox_runs"):
        waiting = [each["call"]["tool_name"] for each in json.loads(document)["waiting"]]
        assert (status, waiting) in (("suspended", ["book", "risky"]), ("running", []), ("completed", []))
    end_leases(url)
    forge.begin("finish", url, LEASE, names)
    assert forge.wait() == [0]

    assert rows(url, "SELECT status, COUNT(*) FROM toolbox_runs GROUP BY status") == [("completed", len(names) + 1)]
    ran = {(name, tool): count for name, tool, count in rows(url, COUNTED)}
    starts = {(name, place): count for name, place, count in starts_in(url)}
    results = {(name, place): data for name, place, data in rows(url, RESULTS)}
    unknown = set()
    for name in ("whole", *names):
        assert ran[name, "book"] == 1, name  # in the transaction of its record
        for tool, place in (("note", "1"), ("again", "2"), ("risky", "0/1")):
            count, outcome = ran.get((name, tool), 0), json.loads(results[name, place])["message"]
            if "is unknown" in json.dumps(outcome):
                unknown.add(tool)
                assert count <= 1, (name, tool)
            else:
                assert 1 <= count <= starts[name, place], (name, tool)  # each further start is a record
                assert count == 1 or tool == "again", (name, tool)
    # Each was killed between the record of its start and that of its result.
    assert unknown == {"note", "risky"}


COUNTED = "SELECT name, tool, COUNT(*) FROM effects GROUP BY name, tool"
RESULTS = """
SELECT name, key, data FROM toolbox_runs_records JOIN suspended ON run = run_id WHERE kind = 'result'
"""


def starts_in(url: str) -> list[tuple[str, str, int]]:
    """Return how often each place of each run was started, as recorded."""
    statement = "SELECT name, key FROM toolbox_runs_records JOIN suspended ON run = run_id WHERE kind = 'start'"
    counts: dict[tuple[str, str], int] = {}
    for name, key in rows(url, statement):
        place = key.partition("#")[0]
        counts[name, place] = counts.get((name, place), 0) + 1
    return [(name, place, count) for (name, place), count in counts.items()]
