"""The header document of a run and the contents of its records, as versioned JSON.

Everything here is plain data, and nothing is pickled. Not here: storing them (`store`), writing them in time
(`places`), the values of a program (`codecs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from ..chat import AiMessage, PendingCall, ToolExecutionResultMessage
from ..errors import EndsInvocation, ToolRetry
from ..services.loop import ModelReplied
from ..services.state import State
from ..tools.codec import Encoded, EncodedInFull
from ..tools.failures import message_of
from ..transcripts import message_from_dict, message_to_dict
from .answers import Answer, HistoryEntry

VERSION = 1


class UnreadableDocumentError(ValueError):
    """A stored text has another format or version."""


# --- the header


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterCall:
    """A call of a service as a tool, inside of which another call waits: as the model wrote it.

    `service` and `method` asked for it.
    """

    id: str
    service: str
    method: str
    tool_name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCall:
    """A pending call, with what is needed to check an answer.

    `method` is the service method that asked for it. `outer` are the calls that it is part of, outermost first.
    """

    call: PendingCall
    method: str
    approvers: tuple[str, ...] = ()
    not_self: bool = False
    outer: tuple[OuterCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """An answer as it is stored: `asked` are the arguments that the person saw, `by` the person's JSON form."""

    call_id: str
    answer: Answer
    asked: Mapping[str, Any]
    by: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """The JSON of a run's header.

    - `arguments`: of the method, as JSON values by name; `unwritten` names those that pydantic cannot write.
    - `output`: a fingerprint of the method's return type.
    - `seeds`: by the qualified name of their type. `identity`: who asked. `attributes`: of the `InvocationContext`.
    - `waiting`: the pending calls; `answers`: all answers so far; `history`: for people.
    - `result`: the JSON value of a completed run. `error_type`, `error_text`: of a failed one; `reason`: of a
      cancelled one.
    - `follows`: its events are stored, for readers in other processes.
    - `added_by`: the endpoint whose `@toolbox` adds tools to the call, or an empty text.
    - `cancels`: the run was cancelled, and its tools are being undone; then it ends.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    output: str = ""
    seeds: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    waiting: tuple[WaitingCall, ...] = ()
    answers: tuple[GivenAnswer, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    result: Any = None
    error_type: str | None = None
    error_text: str | None = None
    reason: str | None = None
    follows: bool = False
    added_by: str = ""
    cancels: bool = False

    @property
    def pending(self) -> tuple[PendingCall, ...]:
        """The calls that wait for an answer."""
        return tuple(each.call for each in self.waiting)

    def changed(self, **changes: Any) -> RunDocument:
        """Return a changed copy."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Write the document as JSON text."""
        return json.dumps(
            {
                "version": VERSION,
                "arguments": dict(self.arguments),
                "unwritten": list(self.unwritten),
                "output": self.output,
                "seeds": dict(self.seeds),
                "identity": self.identity,
                "attributes": dict(self.attributes),
                "waiting": [_waiting_to_dict(each) for each in self.waiting],
                "answers": [_given_to_dict(each) for each in self.answers],
                "history": [_entry_to_dict(each) for each in self.history],
                "result": self.result,
                "error_type": self.error_type,
                "error_text": self.error_text,
                "reason": self.reason,
                "follows": self.follows,
                "added_by": self.added_by,
                "cancels": self.cancels,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RunDocument:
        """Read a document written by `to_json`. Raises `UnreadableDocumentError`."""
        written = read(text)
        try:
            return cls(
                arguments=written["arguments"],
                unwritten=tuple(written["unwritten"]),
                output=written["output"],
                seeds=written["seeds"],
                identity=written["identity"],
                attributes=written["attributes"],
                waiting=tuple(_waiting(each) for each in written["waiting"]),
                answers=tuple(_given(each) for each in written["answers"]),
                history=tuple(_entry(each) for each in written["history"]),
                result=written["result"],
                error_type=written["error_type"],
                error_text=written["error_text"],
                reason=written["reason"],
                follows=written["follows"],
                added_by=written.get("added_by", ""),  # runs of earlier versions have none
                cancels=written.get("cancels", False),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableDocumentError(f"invalid document of a run: {error!r}") from error


def read(text: str) -> dict[str, Any]:
    """Return a JSON object of this version. Raises `UnreadableDocumentError`."""
    try:
        written = json.loads(text)
    except ValueError as error:
        raise UnreadableDocumentError("the stored text is not JSON") from error
    version = written.get("version") if isinstance(written, dict) else None
    if version != VERSION:
        raise UnreadableDocumentError(f"the stored run has format version {version!r}; this program reads {VERSION}")
    return dict(written)


def call_to_dict(call: PendingCall) -> dict[str, Any]:
    """Return a pending call as JSON values."""
    return {
        "id": call.id,
        "tool_name": call.tool_name,
        "arguments": dict(call.arguments),
        "service": call.service,
        "kind": call.kind,
        "reason": call.reason,
        "attributes": dict(call.attributes),
    }


def _waiting_to_dict(waiting: WaitingCall) -> dict[str, Any]:
    return {
        "call": call_to_dict(waiting.call),
        "method": waiting.method,
        "approvers": list(waiting.approvers),
        "not_self": waiting.not_self,
        "outer": [asdict(each) for each in waiting.outer],
    }


def _waiting(written: Any) -> WaitingCall:
    return WaitingCall(
        call=PendingCall(**written["call"]),
        method=written["method"],
        approvers=tuple(written["approvers"]),
        not_self=written["not_self"],
        outer=tuple(OuterCall(**each) for each in written.get("outer", ())),
    )


def _given_to_dict(given: GivenAnswer) -> dict[str, Any]:
    answer = given.answer
    return {
        "call_id": given.call_id,
        "kind": answer.kind,
        "arguments": None if answer.arguments is None else dict(answer.arguments),
        "value": answer.value,
        "reason": answer.reason,
        "asked": dict(given.asked),
        "by": given.by,
    }


def _given(written: Any) -> GivenAnswer:
    answer = Answer(written["kind"], written["arguments"], written["value"], written["reason"])
    return GivenAnswer(call_id=written["call_id"], answer=answer, asked=written["asked"], by=written["by"])


def _entry_to_dict(entry: HistoryEntry) -> dict[str, Any]:
    return {
        "at": entry.at.isoformat(),
        "by": entry.by,
        "call_id": entry.call_id,
        "tool_name": entry.tool_name,
        "answer": entry.answer,
        "reason": entry.reason,
    }


def _entry(written: Any) -> HistoryEntry:
    return HistoryEntry(**{**written, "at": datetime.fromisoformat(written["at"])})


# --- records: states and replies

_WHOLE = ("system", "history", "prompted", "response")
"""Fields of a state that are large and rarely change: a record leaves them out if they are the same as before."""
_GROWING = ("messages", "executions")
"""Fields of a state that grow: a record contains only the new part."""


def state_to_json(state: State, before: State | None) -> str:
    """Write a state as JSON text, without what it shares with `before`."""
    if before is None:
        return f'{{"kept":[],"shared":{{}},"state":{state.to_json()}}}'
    empty: dict[str, Any] = {"history": (), "system": None, "prompted": None, "response": None}
    kept = [name for name in _WHOLE if getattr(state, name) is getattr(before, name)]
    changes: dict[str, Any] = {name: empty[name] for name in kept}
    shared: dict[str, int] = {}
    for name in _GROWING:
        now, earlier = getattr(state, name), getattr(before, name)
        count = len(earlier)
        if len(now) >= count and all(new is old for new, old in zip(now, earlier, strict=False)):
            shared[name], changes[name] = count, now[count:]
    trimmed = state.changed(**changes).to_json()
    return f'{{"kept":{json.dumps(kept)},"shared":{json.dumps(shared)},"state":{trimmed}}}'


def state_from_dict(written: Mapping[str, Any], before: State | None) -> State:
    """Read a state written by `state_to_json`."""
    state = State.from_json(json.dumps(written["state"]))
    if before is None:
        return state
    changes: dict[str, Any] = {name: getattr(before, name) for name in written["kept"]}
    for name, count in written["shared"].items():
        changes[name] = (*getattr(before, name)[:count], *getattr(state, name))
    return state.changed(**changes)


def reply_to_json(
    state: State, before: State | None, replied: ModelReplied, usage: Mapping[str, Any] | None = None
) -> str:
    """Write the state before a model's reply, the usage counted before it, and the reply."""
    reply = State(None, (), tuple(replied.aside), response=replied.response).to_json()
    counted = json.dumps(usage)
    return f'{{"version":{VERSION},"usage":{counted},"before":{state_to_json(state, before)},"reply":{reply}}}'


def reply_from_dict(written: Mapping[str, Any]) -> ModelReplied:
    """Read the reply in a record written by `reply_to_json`."""
    reply = State.from_json(json.dumps(written["reply"]))
    assert reply.response is not None
    return ModelReplied(reply.response, reply.messages)


def snapshot_to_json(
    state: State,
    replies: int,
    remaining: float | None,
    notes: Mapping[str, Any],
    usage: Mapping[str, Any] | None = None,
) -> str:
    """Write an invocation that is suspended.

    `replies` counts the replies of the model so far; `remaining` are the seconds until its deadline.
    """
    about = json.dumps({"replies": replies, "remaining": remaining, "notes": dict(notes), "usage": usage})
    return f'{{"version":{VERSION},"about":{about},"state":{state_to_json(state, None)}}}'


# --- records: results of tools


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


def failure_to_json(error: Exception, undo: list[dict[str, Any]]) -> str:
    """Write the error that ends an invocation, and the executions to undo."""
    ends = isinstance(error, EndsInvocation)
    facts = {"error": type_name_of(error), "text": message_of(error), "ends": ends, "undo": undo}
    return json.dumps({"version": VERSION, **facts})


def result_to_json(result: Encoded | Exception) -> str:
    """Write the result of a tool call, or its exception."""
    if isinstance(result, Exception):
        kind = "ToolRetry" if isinstance(result, ToolRetry) else type_name_of(result)
        return json.dumps({"version": VERSION, "error": kind, "text": message_of(result)})
    message = ToolExecutionResultMessage(
        "", "", result.text, result.is_error, dict(result.attributes or {}), tuple(result.contents)
    )
    return json.dumps({"version": VERSION, "message": message_to_dict(message), "value": json_or_none(result.value)})


def result_from_json(text: str) -> Encoded:
    """Return the result in a record. Raises the exception that was recorded."""
    written = read(text)
    if "error" in written:
        if written["error"] == "ToolRetry":
            raise ToolRetry(written["text"])
        raise RecordedToolError(written["error"], written["text"])
    message = message_from_dict(written["message"])
    assert isinstance(message, ToolExecutionResultMessage)
    return EncodedInFull(
        message.text,
        written["value"],
        is_error=message.is_error,
        contents=message.contents,
        attributes=message.attributes,
    )


def json_or_none(value: object) -> Any:
    """Return the JSON form of a value; None if it has none."""
    from pydantic_core import to_jsonable_python

    try:
        return to_jsonable_python(value, by_alias=True)
    except Exception:  # any exception of the value's own serializers
        return None


def ai_message_to_dict(message: AiMessage) -> dict[str, Any]:
    """Return a model's message as JSON values."""
    return dict(message_to_dict(message))


def place_order(path: str) -> tuple[int, ...]:
    """Return a key that sorts places as calls were made: `0`, `0/1`, `0.2/0`, `2`, `10`."""
    return tuple(int(part) for step in path.split("/") for part in (*step.split("."), "1")[:2]) if path else ()
