"""What services need from the run that records them, as Protocols; the package `runs` implements them.

A call that can be suspended, or is recorded, has a place in a run. Services never ask how or where a run is stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol

from ..chat import ChatResponse, PendingCall
from ..context import CallPlace
from ..limits import Account, UsageLimits
from ..tools.tool_calls import ToolCall, ToolStep
from .state import State


class StoredInvocation(Protocol):
    """An invocation as a run has stored it: its state, the seconds until its deadline, and its notes."""

    @property
    def state(self) -> State:
        """The state from which the invocation continues."""
        ...

    @property
    def remaining(self) -> float | None:
        """The seconds until its deadline; None without one."""
        ...

    @property
    def notes(self) -> Mapping[str, Any]:
        """`InvocationContext.notes`."""
        ...

    def account_for(self, account: Account) -> None:
        """Let an account with limits continue with the usage of the invocation so far."""
        ...


class Recorder(Protocol):
    """One run while this process executes it. A `path` is that of an invocation; the outermost has ""."""

    @property
    def id(self) -> str:
        """The id of the run."""
        ...

    @property
    def generation(self) -> int | None:
        """Counts who took the stored run; None until the run is stored."""
        ...

    @property
    def has_left(self) -> bool:
        """True after the write that suspends or ends the stored run: this process no longer owns it."""
        ...

    @property
    def has_new_records(self) -> bool:
        """True if this process has written a record: then no process before it has reached the end of the run."""
        ...

    @property
    def cancels(self) -> bool:
        """True if the run was cancelled: what is recorded is undone, and nothing else happens."""
        ...

    @property
    def pending(self) -> tuple[PendingCall, ...]:
        """The calls that wait for an answer, after the run was suspended."""
        ...

    @property
    def wants_result(self) -> bool:
        """True if the caller gets a suspension as a `Result`, not as an error."""
        ...

    def restored(self, path: str) -> StoredInvocation | None:
        """Return the stored invocation; None if it begins now."""
        ...

    def replies_within(self, path: str) -> Iterable[tuple[ChatResponse, str | None]]:
        """Yield the replies that services within an invocation got after its own last record, with their models' names.

        Not those that are replayed. The recorded usage of the invocation does not contain them.
        """
        ...

    def limits_of(self, path: str, own: UsageLimits | None) -> UsageLimits | None:
        """Return the limits of an invocation: its own, for the outermost one also those of the run.

        They become one, so a refusal does not tell whether the limit was the invocation's own.
        """
        ...

    def pending_below(self, path: str) -> tuple[PendingCall, ...]:
        """Return the pending calls of an invocation, and of services within."""
        ...

    async def suspend(self, invocation: Any, /) -> None:
        """Store the run of an `Invocation` that was suspended; an inner invocation waits for the outermost one."""
        ...

    def model_at(self, path: str) -> str | None:
        """Return the recorded name of the model that a router has chosen for an invocation."""
        ...

    async def record_model(self, path: str, name: str) -> None:
        """Record the model that a router has chosen for an invocation, before it is asked."""
        ...

    def failure_at(self, path: str) -> Mapping[str, Any] | None:
        """Return the recorded failure of an invocation, with the executions to undo."""
        ...

    async def record_failure(self, path: str, error: Exception, undo: list[dict[str, Any]]) -> None:
        """Record that an invocation fails, before its tools are undone."""
        ...

    def stays_after(self, error: BaseException) -> bool:
        """Return True for an error after which the run stays as it is, so that it can be continued."""
        ...

    def raise_failure(self, path: str) -> None:
        """Raise the recorded failure of an invocation, if there is one."""
        ...

    def run_tool(self, step: ToolStep, call: ToolCall) -> Awaitable[Any]:
        """Run a tool at the place in the call's context and record its result, or give the recorded result."""
        ...


class PlaceInRun(CallPlace, Protocol):
    """The place of a tool call, or of a service called as a tool, in its run."""

    @property
    def session(self) -> Recorder:
        """The run."""
        ...

    def enter(self) -> PlaceInRun | None:
        """Return the place of a service that runs as the tool here; None if one already does."""
        ...

    def to_undo(self, position: int) -> PlaceInRun:
        """Return the place of the compensation of a tool call of this invocation."""
        ...
