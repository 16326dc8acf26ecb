"""What callers write and see of runs: answers to pending calls, and `Run`, a stored run with its history.

Not here: stored runs (`store`), checking answers (`answer_checks`), storing them (`resuming`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from ..chat import PendingCall, ToolExecutionResult
from .store import RunStatus

T_co = TypeVar("T_co", covariant=True)

AnswerKind: TypeAlias = Literal["approve", "reject", "respond", "fail", "retry"]

KINDS: Mapping[str, tuple[AnswerKind, ...]] = {
    "approval": ("approve", "reject"),
    "deferred": ("respond", "fail"),
    "unknown_outcome": ("respond", "retry", "fail"),
}
"""The answers that each kind of pending call accepts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one pending call; create it with `approve`, `reject`, `respond`, `fail` or `retry`.

    `arguments` replaces the arguments of an approved call. `value` is the result of a `respond`. `reason` is what the
    model reads after a `reject` or `fail`. `remember` is that of `approve`.
    """

    kind: AnswerKind
    arguments: Mapping[str, Any] | None = field(default=None, hash=False)
    value: Any = field(default=None, hash=False)
    reason: str | None = None
    remember: Literal["conversation"] | None = None


def approve(arguments: Mapping[str, Any] | None = None, *, remember: Literal["conversation"] | None = None) -> Answer:
    """Let the call run. `arguments` are all of its arguments, of which those that differ from the shown ones change.

    These are validated, and guardrails run again; the others keep the values that were shown.

    With `remember="conversation"`, further calls of the tool in the same conversation, for the user who started this
    one, need no approval. The tool must have `may_remember=True`. Raises `TypeError` if `arguments` is not a mapping,
    and `ValueError` for any other `remember`.
    """
    if remember not in (None, "conversation"):
        raise ValueError(f'approve(remember={remember!r}): use "conversation", or None')
    if arguments is None:
        return Answer("approve", remember=remember)
    if not isinstance(arguments, Mapping):
        raise TypeError(f"approve(arguments=…): expected a dictionary of all arguments, got {type(arguments).__name__}")
    return Answer("approve", dict(arguments), remember=remember)


def reject(reason: str = "The call was rejected.") -> Answer:
    """Do not run the call; the model reads `reason` as an error result. Raises `TypeError` if `reason` is not text."""
    return Answer("reject", reason=_reason("reject", reason))


def respond(value: Any = None) -> Answer:
    """Give the result of a deferred call, or of a call whose outcome is unknown. `value` must be a JSON value.

    Raises `TypeError` for a `ToolExecutionResult`: give its value, or use `fail` for an error.
    """
    if isinstance(value, ToolExecutionResult):
        raise TypeError("respond(value): expected the tool's value, got ToolExecutionResult; use fail(…) for an error")
    return Answer("respond", value=value)


def fail(reason: str = "The call failed.") -> Answer:
    """End a deferred call, or a call whose outcome is unknown, as failed; the model reads `reason`.

    Raises `TypeError` if `reason` is not text.
    """
    return Answer("fail", reason=_reason("fail", reason))


def retry() -> Answer:
    """Run a call whose outcome is unknown again."""
    return Answer("retry")


def _reason(function: str, reason: object) -> str:
    if not isinstance(reason, str):
        raise TypeError(f"{function}(reason): expected a string for the model, got {type(reason).__name__}")
    return reason


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One answer that a run received; or, without a call, that it was cancelled or retried (`"cancel"`, `"retry"`).

    `at` is in UTC. `by` is the name of the person, or None. `answer` is the name of the function that created it.
    `remembered` is True for an approval with `remember="conversation"`, and for a call that needed no answer because of
    such an approval: then `by` is the person who gave it.
    """

    at: datetime
    by: str | None
    call_id: str | None
    tool_name: str | None
    answer: str
    reason: str | None = None
    remembered: bool = False


@dataclass(frozen=True, slots=True)
class Run(Generic[T_co]):
    """A run as it is stored: `await runs.get(run_id)`. The type parameter is the type of its result.

    - `service`: the stored name of the service, by default `module.Class`; `method`: the name of the method.
    - `status`: `"running"`, `"suspended"`, `"completed"`, `"failed"` or `"cancelled"`.
    - `pending`: the calls that wait for an answer. `history`: the answers so far, oldest first.
    - `error`: type and text of the error of a failed run, or of the last try of a run that waits for its next one; the
      reason of a cancelled run; else None. Also why this program cannot read the run: then `pending` and `history` are
      empty, and the run can still be cancelled.
    - `started_by`: the name of the identity that asked for it; None for an anonymous one.
    - `memory_id`: the conversation's id as text; None for a method without one.
    - `attempts`: how often it was executed, without executions that only continued after an answer.
    - `identity_attributes`: those attributes of that identity that `Container(run_identity=…)` names, as JSON values.
    """

    id: str
    service: str
    method: str
    status: RunStatus
    pending: tuple[PendingCall, ...]
    created_at: datetime
    updated_at: datetime
    history: tuple[HistoryEntry, ...] = ()
    error: str | None = None
    started_by: str | None = None
    memory_id: str | None = None
    attempts: int = 1
    identity_attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
