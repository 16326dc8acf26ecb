"""What a suspension stores: the calls that wait, the states of their invocations, and results within suspended calls.

Reads what is known about a run, and changes nothing. Not here: when a run is suspended, and writing it (`run_session`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from .documents import OuterCall, WaitingCall
from .places import (
    RecordKey,
    calls_around,
    invocation_of,
    is_within,
    place_below,
    place_order,
    position_of,
    without_attempt,
)
from .program_values import qualified, writable_values
from .record_contents import snapshot_to_json
from .run_records import RunRecords, write_usage
from .store import StoredRecord


def collect_waiting(run: RunRecords) -> dict[str, WaitingCall]:
    """Return the calls that wait, those of earlier suspensions too, in the order in which they were made."""
    started_by = None if run.document is None else run.document.started_by
    waiting = {each.call.id: each for each in (run.document.waiting if run.document is not None else ())}
    for path, place in run.places.items():
        if (new := place.waiting) is not None:
            since = waiting[path].since if path in waiting else None
            waiting[path] = replace(new, call=replace(new.call, started_by=started_by), since=since)
    return {place: waiting[place] for place in sorted(waiting, key=place_order)}


def with_outer_calls(waiting: WaitingCall, run: RunRecords) -> WaitingCall:
    """Return a pending call with the calls of services that it is part of."""
    if waiting.outer:
        return waiting
    outer = []
    for attempt in calls_around(waiting.call.id)[:-1]:
        invocation = run.at(invocation_of(attempt)).suspended
        assert invocation is not None
        request = invocation.state.pending_at(position_of(attempt)).request
        outer.append(
            OuterCall(
                id=without_attempt(attempt),
                service=qualified(invocation.context.service),
                method=invocation.context.method,
                tool_name=request.name,
                arguments=request.arguments,
            )
        )
    return replace(waiting, outer=tuple(outer))


def make_snapshots(run: RunRecords) -> list[StoredRecord]:
    """Return the states of the invocations that were suspended."""
    records = []
    for path, place in run.places.items():
        if (invocation := place.suspended) is None:
            continue
        deadline = invocation.deadline
        left = None if deadline is None else max(deadline.at - time.monotonic(), 0.0)
        notes = writable_values(invocation.context.notes)
        data = snapshot_to_json(invocation.state, place.next_reply, left, notes, write_usage(invocation))
        key = RecordKey(path, "s", len(place.snapshots) + 1)
        records.append(StoredRecord(str(key), "snapshot", data))
    return records


def collect_unstored_results(run: RunRecords) -> list[StoredRecord]:
    """Return the records of results within suspended calls; the states contain all others."""
    calls = [
        place_below(path, place.suspended.state.position_of(index))
        for path, place in run.places.items()
        if place.suspended is not None
        for index, each in enumerate(place.suspended.state.pending)
        if each.status == "suspended"
    ]
    return [
        place.unstored
        for path, place in run.places.items()
        if place.unstored is not None and any(is_within(path, call) for call in calls)
    ]
