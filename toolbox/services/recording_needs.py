"""What services need from the run that records them: their place in it, and what of a call is stored and comes back.

A call that can be suspended, or is recorded, has a place in a run. Services never ask how or where a run is stored; the
package `runs` implements `PlaceInRun`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from ..chat import ChatResponse, PendingCall, UserMessage
from ..context import CallPlace
from ..conversations.log import KeptApproval
from ..di.stored_beans import StoredBeans
from ..errors import EndsInvocation
from ..limits import Usage, UsageLimits
from ..tools.failures import message_of
from ..tools.tool_calls import ToolCall, ToolStep
from ..transcripts import message_from_dict, message_to_dict
from .state import State
from .stored_forms import response_from_dict, response_to_dict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EffectForm(Generic[T]):
    """A kind of effect of an invocation, and the JSON values of what it gave.

    `fact` is its name in the keys of records: a `RecordedFact` of `runs.places`.
    """

    fact: str
    write: Callable[[T], Mapping[str, Any]]
    read: Callable[[Mapping[str, Any]], T]


# --- failures


class _RecordedError(Exception):
    """An exception that was recorded, with the same text. `.type_name` is the name of the original exception's type."""

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(type_name, text)
        self.type_name, self.text = type_name, text

    def __str__(self) -> str:
        return self.text


class RecordedToolError(_RecordedError):
    """The exception of a tool call that was recorded; error handlers get it after a restart."""


class RecordedFailureError(_RecordedError, EndsInvocation):
    """An error that had ended an invocation and all outer ones when it was recorded."""


def type_name_of(error: BaseException) -> str:
    """Return the name of an exception's type, or of the recorded type that it replaces."""
    return error.type_name if isinstance(error, _RecordedError) else type(error).__name__


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    """The error with which an invocation fails, and the executions to undo, as JSON values."""

    error: str
    text: str
    ends: bool
    undo: list[dict[str, Any]]

    @classmethod
    def of(cls, error: Exception, undo: list[dict[str, Any]]) -> RecordedFailure:
        """Return the failure with an error."""
        return cls(type_name_of(error), message_of(error), isinstance(error, EndsInvocation), undo)

    def make_error(self) -> Exception:
        """Return an error in place of the one that was recorded."""
        return (RecordedFailureError if self.ends else RecordedToolError)(self.error, self.text)


FAILURE: EffectForm[RecordedFailure] = EffectForm(
    "failed",
    lambda failure: {"error": failure.error, "text": failure.text, "ends": failure.ends, "undo": failure.undo},
    lambda written: RecordedFailure(written["error"], written["text"], written["ends"], written["undo"]),
)
"""An invocation fails: recorded before the first of its tools is undone, so that it cannot succeed after a crash."""


@dataclass(frozen=True, slots=True)
class SummaryReply:
    """The reply to a request for a summary. `asked` stands for the messages of the request."""

    asked: str
    response: ChatResponse

    def write(self) -> Mapping[str, Any]:
        """Return the JSON values of a record."""
        return {"asked": self.asked, "response": response_to_dict(self.response)}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> SummaryReply:
        """Read what `write` wrote."""
        return cls(written["asked"], response_from_dict(written["response"]))


MODEL_CHOICE: EffectForm[str] = EffectForm("model", lambda name: {"model": name}, lambda written: str(written["model"]))
"""A router has chosen a model, by its name. Before a run is stored, the state has the name."""


SUMMARY: EffectForm[SummaryReply] = EffectForm("summary", SummaryReply.write, SummaryReply.read)
"""A model has summarized a part of the conversation."""


HANDOVER: EffectForm[tuple[str, UserMessage]] = EffectForm(
    "handover",
    lambda taken: {"method": taken[0], "asked": message_to_dict(taken[1])},
    lambda written: (written["method"], cast("UserMessage", message_from_dict(written["asked"], "asked"))),
)
"""A call was handed over: the method that has taken it over, and the user message after its input guardrails."""


# --- the place in a run


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInvocation:
    """An invocation as a run has stored it.

    `remaining` are the seconds until its deadline; None without one. `notes` are those of the context. `usage` is what
    it has used so far, if it has limits. That does not contain `inner_replies`, which services within it got after its
    own last record, with the names of their models, and which are not replayed; they can be read once. `dropped`
    has its last reply, which was paid too, if the model is asked again for it. `failure` is the one with which it has
    failed.
    """

    state: State
    remaining: float | None = None
    notes: Mapping[str, Any]
    usage: Usage | None = None
    inner_replies: Iterable[tuple[ChatResponse, str | None]] = ()
    dropped: Sequence[tuple[ChatResponse, str | None]] = ()
    failure: RecordedFailure | None = None


@dataclass(frozen=True, slots=True)
class ToldMessage:
    """A message that the user has added to a run, the name of the person, and the id that a client gave to it."""

    message: UserMessage
    by: str | None = None
    client_id: str | None = None


@dataclass(frozen=True, slots=True)
class TurnWrite:
    """The write of a turn into its conversation, which the run of the turn may do in one transaction with its own.

    `store` is that of conversations. `write` may be awaited again, if the transaction is repeated. `end` is called once
    afterwards, with False if nothing was written. With `may_fail`, the run is written alone if the turn cannot be.
    """

    store: Any
    write: Callable[[], Awaitable[None]]
    end: Callable[[bool], None] = lambda is_written: None
    may_fail: bool = False


FindApprovals: TypeAlias = Callable[[], Awaitable[Sequence[KeptApproval]]]
"""Reads what a conversation remembers for calls in the name of its caller."""


class RunOfCall(Protocol):
    """The run of a call as a whole, which all places in it share."""

    beans: StoredBeans | None
    """The conversation's beans; how they change is recorded."""
    find_approvals: FindApprovals | None
    """Reads what the conversation remembers: tools run with these approvals."""

    @property
    def is_stored(self) -> bool:
        """True if the run is stored, and each effect is recorded before the next one; else its first suspension is."""
        ...

    @property
    def has_new_records(self) -> bool:
        """True if this process has written a record: then no process before it has reached the end of the run."""
        ...

    @property
    def has_left(self) -> bool:
        """True after the write that suspends or ends the run: this process no longer owns it."""
        ...

    def stay_in(self, conversation: AsyncExitStack, /) -> None:
        """Leave the conversation only after that write, if there is a turn to write."""
        ...

    @property
    def recorded_beans(self) -> Mapping[str, Any]:
        """The JSON values of the conversation's beans that the run has recorded and not stored, by name."""
        ...

    @property
    def suspensions(self) -> int:
        """The number of suspensions so far."""
        ...

    @property
    def cancels(self) -> bool:
        """True if the run was cancelled: what is recorded is undone, and nothing else happens."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """True if the run ends as cancelled: now, or when its tools are undone."""
        ...

    @property
    def stop(self) -> Callable[[str | None], None]:
        """Lets the stored run end as cancelled, in the name of a person, if this process executes it.

        Called on the run's own loop.
        """
        ...

    def stays_after(self, error: BaseException) -> bool:
        """Return True for an error after which the run stays as it is, so that it can be continued."""
        ...


class PlaceInRun(CallPlace, Protocol):
    """The place of an invocation, or of a tool call, in its run. The outermost invocation has the path ""."""

    @property
    def run(self) -> RunOfCall:
        """The run."""
        ...

    def take_turn(self, turn: TurnWrite, /) -> bool:
        """Write a turn in one transaction with what the run writes next: its suspension, or its end.

        Returns False, and does nothing, if the two have no transaction in common.
        """
        ...

    def drop_turn(self) -> None:
        """Do not write the turn that was taken, if it is not written yet: another one takes its place."""
        ...

    async def settle(self) -> None:
        """Call what waits for the success of a stored run, before its turn is stored. Raises what that raises."""
        ...

    def ends_with(self, error: BaseException, plan: Any) -> bool:
        """Return True for an error with which a stored run ends as failed or cancelled, and is not tried again."""
        ...

    def is_tried_again(self, error: BaseException, plan: Any) -> bool:
        """Return True for an error after which a stored run waits for its next try."""
        ...

    @property
    def has_recorded_reply(self) -> bool:
        """True if the reply to the next model request of this invocation is recorded."""
        ...

    def has_result(self, position: int) -> bool:
        """Return True if the result of a tool call of this invocation is recorded."""
        ...

    @property
    def limits(self) -> UsageLimits | None:
        """The limits of the run itself, at its outermost invocation."""
        ...

    @property
    def pending(self) -> tuple[PendingCall, ...]:
        """The calls of this invocation, and of services within, that wait for an answer."""
        ...

    @property
    def takes_messages(self) -> bool:
        """True if the user may add messages: to the outermost invocation of a stored run."""
        ...

    async def messages_after(self, count: int) -> Sequence[ToldMessage]:
        """Return the messages that the user has added after the first `count`, oldest first."""
        ...

    async def client_ids(self, added: int) -> Sequence[str | None]:
        """Return the ids that a client gave to the message of the call, and to the first `added` ones after it."""
        ...

    async def close_messages(self, count: int) -> bool:
        """Let the user add no more messages. Returns False, and changes nothing, if there are more than `count`."""
        ...

    def enter(self) -> PlaceInRun | None:
        """Return the place of a service that runs as the tool here; None if one already does."""
        ...

    def to_undo(self, position: int) -> PlaceInRun:
        """Return the place of the compensation of a tool call of this invocation."""
        ...

    def restored(self) -> StoredInvocation | None:
        """Return the invocation as it is stored; None if it begins now."""
        ...

    async def effect(self, form: EffectForm[T], run: Callable[[], Awaitable[T]], number: int = 1) -> T:
        """Return the recorded value of an effect of this invocation; else run it, and record its value.

        `number` counts the effects of one form from 1.
        """
        ...

    def run_tool(self, step: ToolStep, call: ToolCall) -> Awaitable[Any]:
        """Run a tool at the place in the call's context and record its result, or give the recorded result."""
        ...

    async def suspend(self, invocation: Any, /) -> None:
        """Store the run of an `Invocation` that was suspended; an inner invocation waits for the outermost one."""
        ...
