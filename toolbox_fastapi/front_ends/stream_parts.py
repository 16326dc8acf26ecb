"""The parts of an answer as front ends show them: rounds, blocks of text, calls, and how the answer ends.

They belong to no protocol. Not here: reading them from the events of a run (`run_reading`), writing them (`vercel_ai`,
`ag_ui`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from toolbox.chat import FinishReason, PendingCall, TokenUsage, ToolExecution, UserMessage
from toolbox.passages import Passage
from toolbox.service_events import HandedOver

BlockKind: TypeAlias = Literal["text", "thought"]

CallOutcome: TypeAlias = Literal["result", "error", "denied", "unknown"]
"""`error` is a result that the model reads as an error, `denied` that of a rejected call. `unknown` is the result of a
call inside a service, which no event has."""


@dataclass(frozen=True, slots=True)
class RoundStart:
    """The model begins to reply; `number` counts from 0 in the run."""

    number: int


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The reply is complete, and its calls have results or wait."""

    number: int


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A text or a thought begins; `number` counts the blocks of the run."""

    kind: BlockKind
    number: int


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """A piece of the open block."""

    kind: BlockKind
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The open block ends."""

    kind: BlockKind
    number: int


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model begins to write a call; `id` is that of the wire."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call's arguments, as the model writes them."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class CallReady:
    """The arguments of a call are complete; `arguments` is their JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended. `text` is what the model reads, `execution` None for a call inside a service."""

    id: str
    outcome: CallOutcome
    text: str
    execution: ToolExecution | None = None


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call has ended before its arguments were complete. `arguments` are those so far, `text` says why."""

    id: str
    name: str
    arguments: str
    text: str


@dataclass(frozen=True, slots=True)
class CallProgress:
    """A running call reports its progress."""

    id: str
    name: str
    done: float
    total: float | None
    message: str | None


@dataclass(frozen=True, slots=True)
class ServiceStart:
    """A service within the answer begins to work, or goes on after it has waited.

    `id` is that of the wire: the id of the call, if the service is the tool. `service` is its stored name. `call_id` is
    the call in which it works, and `parent_id` the service that made this call; both are empty texts if there is none.
    """

    id: str
    service: str
    call_id: str = ""
    parent_id: str = ""


@dataclass(frozen=True, slots=True)
class ServiceText:
    """The model of a service within has replied with a text; `number` counts those of the service from 1."""

    id: str
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """A service within has ended; `error` says what went wrong, for a person."""

    id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BeanValues:
    """The values of conversation-scoped beans, by the names of their classes."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sources:
    """Retrievers have found these passages for the user's message."""

    passages: Sequence[Passage]


@dataclass(frozen=True, slots=True)
class AddedMessage:
    """The user has added a message to the run; `by` is the person. With a `client_id`, another answer begins.

    `entry_id` is that of the log, if the message was read there.
    """

    message: UserMessage
    by: str | None = None
    client_id: str | None = None
    entry_id: str | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """The answer waits for other people: the calls that are pending, by their ids on the wire."""

    pending: Mapping[str, PendingCall]


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is complete."""

    usage: TokenUsage | None
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer has failed. `text` says why, for a person; `code` is the type of the error."""

    text: str
    code: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody has stopped the answer."""

    reason: str | None


Part: TypeAlias = (
    RoundStart
    | RoundEnd
    | BlockStart
    | BlockPiece
    | BlockEnd
    | HandedOver
    | CallStart
    | CallPiece
    | CallReady
    | CallEnd
    | BrokenCall
    | CallProgress
    | ServiceStart
    | ServiceText
    | ServiceEnd
    | BeanValues
    | Sources
    | AddedMessage
    | Waits
    | Completed
    | Broken
    | Stopped
)
