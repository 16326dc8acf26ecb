"""Undoing the tools of a durable run in processes that are killed at every step of it."""

import os
from collections import Counter

import pytest

from . import trips
from .forge import LEASE, Forge, end_leases, prepared, rows

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts many processes
]


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the bookings and those of the runs."""
    return prepared(database_url, trips.TABLES)


def test_a_process_that_is_killed_while_it_undoes_leaves_no_tool_undone_twice_or_forgotten(
    forge: Forge, url: str
) -> None:
    forge.begin("count_trip", url, LEASE)
    assert forge.wait() == [0]
    failed, failed_last, waiting, waiting_last = (
        each for (each,) in rows(url, "SELECT results FROM trips_asked WHERE run = 'steps'")
    )
    killed, every = 0, 1 if url.startswith("sqlite") else 3  # both write the same records at the same steps
    for step in range(failed, failed_last + 1, every):
        forge.begin("trip", url, LEASE, f"killed at {step}", step)
        killed += 1
        if killed % 6 == 0:
            forge.wait()
    forge.wait()
    for step in range(1, waiting_last - waiting + 1, every):
        forge.begin("cancel_trip", url, LEASE, f"waiting, killed at {step}", step)
        killed += 1
        if killed % 6 == 0:
            forge.wait()
    forge.wait()
    assert killed > 20 / every
    end_leases(url)
    forge.begin("finish_trips", url, LEASE)
    forge.begin("finish_trips", url, LEASE)
    assert forge.wait() == [0, 0]

    statuses = dict(rows(url, "SELECT id, status FROM toolbox_runs"))
    bookings = Counter(rows(url, "SELECT run, what FROM bookings"))
    undone = Counter(rows(url, "SELECT run, what FROM undone"))
    assert set(undone.values()) == {1}
    assert len(statuses) == killed + 2
    for run, status in statuses.items():
        booked = {what for of, what in bookings if of == run}
        given_back = {what for of, what in undone if of == run}
        whole = set(trips.PARTS)
        if status == "completed":  # killed before the failure was recorded
            assert (booked, given_back) == (whole, set()), run
        else:
            assert status == ("cancelled" if run.startswith("waiting") else "failed"), run
            assert (booked, given_back) == (set(), whole), run
    documents = rows(url, "SELECT document FROM toolbox_runs WHERE status = 'failed'")
    assert all('"error_type": "ConnectionError"' in each and "the model is away" in each for (each,) in documents)
    assert Counter(statuses.values())["failed"] > 8 / every
    assert Counter(statuses.values())["cancelled"] > 8 / every
