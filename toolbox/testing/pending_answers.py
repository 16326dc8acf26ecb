"""Answers for the pending calls of suspended runs, and assertions on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..chat import PendingCall, ToolExecutionRequest
from ..runs.run_answers import Answer, approve

if TYPE_CHECKING:
    from ..runs.runs_bean import Runs
    from ..services.outputs import Result


class HasPending(Protocol):
    """A `Result`, a `Run`, a `RunSuspended` event or a `RunSuspendedError`."""

    @property
    def pending(self) -> Sequence[PendingCall]:
        """The calls that wait for an answer."""
        ...


Suspended: TypeAlias = HasPending | Iterable[PendingCall]
Answers: TypeAlias = Mapping[str, Answer | Sequence[Answer]]
"""Answers by the name of the tool: one for all of its calls, or one after another."""


def approve_all(suspended: Suspended) -> dict[str, Answer]:
    """Return an approval for each pending call: `runs.resume(result.run_id, approve_all(result))`.

    Raises `AssertionError` if there are no pending calls, or if one of them does not wait for approval.
    """
    pending = _find_pending(suspended)
    if not pending:
        raise AssertionError("there are no pending calls to approve")
    for call in pending:
        if call.kind != "approval":
            raise AssertionError(f"{call.tool_name} ({call.id}) is of kind {call.kind!r}; answer it with respond(…)")
    return {call.id: approve() for call in pending}


async def resume_until_done(runs: Runs, result: Result[Any], answers: Answers | None = None, by: Any = None) -> Any:
    """Answer pending calls and continue the run until none is left. Return the last `Result`.

    `answers` are those of each tool, by its name; without it every call is approved. Raises `AssertionError` for a
    pending call without an answer.
    """
    left = {name: each if isinstance(each, Answer) else list(each) for name, each in (answers or {}).items()}
    while result.pending:
        assert result.run_id is not None
        given = (
            approve_all(result) if answers is None else {call.id: _choose_next(call, left) for call in result.pending}
        )
        result = await runs.resume(result.run_id, given, by=by)
    return result


def _choose_next(call: PendingCall, left: Mapping[str, Answer | list[Answer]]) -> Answer:
    found = left.get(call.tool_name)
    if isinstance(found, list):
        found = found.pop(0) if found else None
    if found is None:
        raise AssertionError(f"no answer for the pending call {call.tool_name} ({call.id}) {dict(call.arguments)}")
    return found


def assert_pending(suspended: Suspended, *expected: str | ToolExecutionRequest) -> None:
    """Assert that exactly these calls wait for an answer, in this order: names of tools, or `tool_call(…)`s.

    Raises `AssertionError` with the expected and the actual calls.
    """
    pending = _find_pending(suspended)
    wanted = [(each, None) if isinstance(each, str) else (each.name, json.loads(each.arguments)) for each in expected]
    found = [
        (call.tool_name, None if index >= len(wanted) or wanted[index][1] is None else dict(call.arguments))
        for index, call in enumerate(pending)
    ]
    if found != wanted:
        shown = ", ".join(f"{call.tool_name} {dict(call.arguments)}" for call in pending) or "none"
        names = ", ".join(each if isinstance(each, str) else f"{each.name} {each.arguments}" for each in expected)
        raise AssertionError(f"pending calls: expected {names or 'none'}; got {shown}")


def _find_pending(suspended: Suspended) -> Sequence[PendingCall]:
    found: Any = suspended
    return tuple(getattr(found, "pending", found))
