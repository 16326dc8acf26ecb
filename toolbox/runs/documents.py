"""The contents of a stored run as versioned JSON: its header, its records, the values of a program, a suspended call.

Everything here is plain data, and nothing is pickled. A value that no longer fits its type raises
`RunIncompatibleError`. Not here: storing (`store`), writing records in time (`run_session`), continuing a run
(`run_execution`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from secrets import token_hex
from typing import Any, Protocol

from pydantic import ValidationError

from ..chat import AiMessage, FinishReason, PendingCall, ToolExecutionResultMessage, UserMessage
from ..context import ActiveScope, headers_of_current_span
from ..deferred_answers import ToolOrigin
from ..errors import (
    EndsInvocation,
    IllegalConfigurationError,
    Problem,
    RunAnswerError,
    RunIncompatibleError,
    ScopeNotActiveError,
    ToolRetry,
    TranscriptError,
)
from ..introspection import type_name
from ..limits import UsageLimits
from ..safe_text import faults_of
from ..services.answers import restored_result
from ..services.loop import ModelReplied
from ..services.memory import ChatMemoryKey
from ..services.outputs import Kind, Result, Shape
from ..services.plans import MethodPlan, Template
from ..services.state import State
from ..tools.codec import Encoded, EncodedInFull
from ..tools.failures import message_of
from ..transcripts import message_from_dict, message_to_dict
from .store import Answer, HistoryEntry, RunStore, StoredRun

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
    `origin` is where the tool comes from, if that is another server. `since` is the time since when it waits; None if
    that is the last change of the header.
    """

    call: PendingCall
    method: str
    approvers: tuple[str, ...] = ()
    not_self: bool = False
    outer: tuple[OuterCall, ...] = ()
    origin: ToolOrigin | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """An answer as it is stored: `asked` are the arguments that the person saw, `by` the person's JSON form.

    `origin` is where the tool came from that the person saw.
    """

    call_id: str
    answer: Answer
    asked: Mapping[str, Any]
    by: Any = None
    origin: ToolOrigin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """The JSON of a run's header.

    - `arguments`: of the method, as JSON values by name. `unwritten` names those that pydantic cannot write, `dropped`
      those that an input guardrail kept out of the run. `digest`: a salted hash of all arguments of the call.
    - `is_checked`: the input guardrails have judged the message. `message`: what they made of it, as JSON values.
    - `output`: a fingerprint of the method's return type.
    - `seeds`: by the qualified name of their type. `identity`: who asked. `attributes`: of the `InvocationContext`.
    - `waiting`: the pending calls; `answers`: all answers so far; `history`: for people.
    - `result`: the JSON value of a completed run. `error_type`, `error_text`: of a failed one; `reason`: of a
      cancelled one.
    - `follows`: its events are stored, for readers in other processes.
    - `added_by`: the endpoint whose `@toolbox` adds tools to the call, or an empty text.
    - `cancels`: the run was cancelled, and its tools are being undone; then it ends.
    - `limits`: what the limits around the call that started the run left for it; they are the run's own.
    - `memory_id`: the conversation's id as text.
    - `details`: of the `Result` of a completed run, if its method returns one. See `write_details`.
    - `trace`: the headers of the span in which the run was created or suspended last, such as `traceparent`.
    - `is_reduced`: the run has ended, and its store keeps only the outcome: see `reduced_document`.
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
    limits: UsageLimits | None = None
    memory_id: str | None = None
    details: Mapping[str, Any] | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    digest: str = ""
    is_checked: bool = False
    message: Mapping[str, Any] | None = None
    is_reduced: bool = False

    @property
    def started_by(self) -> str | None:
        """The name of the identity that asked for the run; None for an anonymous one."""
        return _name_of(self.identity)

    @property
    def pending(self) -> tuple[PendingCall, ...]:
        """The calls that wait for an answer."""
        return tuple(each.call for each in self.waiting)

    @property
    def waiting_since(self) -> datetime | None:
        """The time since when the oldest of them waits; None if that is the last change of the header."""
        return min((each.since for each in self.waiting if each.since is not None), default=None)

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
                "limits": _limits_to_dict(self.limits),
                "memory_id": self.memory_id,
                "details": self.details,
                "trace": dict(self.trace),
                "dropped": list(self.dropped),
                "digest": self.digest,
                "is_checked": self.is_checked,
                "message": self.message,
                "is_reduced": self.is_reduced,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RunDocument:
        """Read a document written by `to_json`. Raises `UnreadableDocumentError`."""
        written = read(text)
        if (reason := written.get("unreadable")) is not None:
            raise UnreadableDocumentError(reason)
        try:
            return cls(
                arguments=written["arguments"],
                unwritten=tuple(written["unwritten"]),
                output=written["output"],
                seeds=written["seeds"],
                identity=written["identity"],
                attributes=written["attributes"],
                waiting=tuple(_waiting(each, written["identity"]) for each in written["waiting"]),
                answers=tuple(_given(each) for each in written["answers"]),
                history=tuple(_entry(each) for each in written["history"]),
                result=written["result"],
                error_type=written["error_type"],
                error_text=written["error_text"],
                reason=written["reason"],
                follows=written["follows"],
                added_by=written.get("added_by", ""),  # runs of earlier versions have none
                cancels=written.get("cancels", False),
                limits=_limits(written.get("limits")),
                memory_id=written.get("memory_id"),
                details=written.get("details"),
                trace=written.get("trace", {}),
                dropped=tuple(written.get("dropped", ())),
                digest=written.get("digest", ""),
                is_checked=written.get("is_checked", False),
                message=written.get("message"),
                is_reduced=written.get("is_reduced", False),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableDocumentError(f"invalid document of a run: {error!r}") from error


_NOT_SHOWN: dict[str, Any] = {
    "arguments": {},
    "seeds": {},
    "attributes": {},
    "answers": [],
    "result": None,
    "details": None,
    "message": None,
}
"""Fields of a document that no list shows and that can be large, with what they are without a value."""


def shown_document(text: str) -> str:
    """Return a document with only what lists show, for stores that keep it apart. It is read as any document.

    Of a document that cannot be read, the reason stays.
    """
    try:
        written = read(text)
    except UnreadableDocumentError as error:
        return json.dumps({"version": VERSION, "unreadable": str(error)})
    shown = {name: _NOT_SHOWN.get(name, value) for name, value in written.items()}
    if (identity := shown.get("identity")) is not None:
        shown["identity"] = {**identity, "attributes": {}}
    return json.dumps(shown)


def reduced_document(text: str) -> str:
    """Return the document of a run that has ended, for stores that keep only the outcome.

    Content, usage, finish reason, error, history, who asked and the id of the conversation stay. Of what was asked,
    only salted hashes stay, which tell later calls with the id apart.
    """
    try:
        document = RunDocument.from_json(text)
    except UnreadableDocumentError:
        return shown_document(text)
    digest = document.digest or digest_of(document.arguments)
    identity = document.identity
    if identity is not None:
        hashed = _hashed(digest, identity["attributes"])
        identity = {"name": identity["name"], "roles": [], "attributes": hashed}
    return RunDocument(
        output=document.output,
        seeds=_hashed(digest, document.seeds),
        identity=identity,
        attributes=_hashed(digest, document.attributes),
        history=document.history,
        result=document.result,
        error_type=document.error_type,
        error_text=document.error_text,
        reason=document.reason,
        follows=document.follows,
        memory_id=document.memory_id,
        details=_reduced_details(document.details),
        digest=digest,
        is_reduced=True,
    ).to_json()


def comparable(document: RunDocument, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values of a call as the document of a run has them: hashed if it is reduced."""
    return _hashed(document.digest, values) if document.is_reduced else values


def _hashed(digest: str, values: Mapping[str, Any]) -> dict[str, str]:
    salt = digest.partition(":")[0]
    return {name: digest_of({name: value}, salt) for name, value in values.items()}


def _reduced_details(details: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a `Result` has besides its content: only the usage and the finish reason."""
    if details is None:
        return None
    usage = State.from_dict(details["state"]).token_usage
    state = State(None, (), (), token_usage=usage)
    return {"state": json.loads(state.to_json()), "finish_reason": details["finish_reason"]}


def read(text: str) -> dict[str, Any]:
    """Return a JSON object of this version. Raises `UnreadableDocumentError`."""
    try:
        written = json.loads(text)
    except ValueError as error:
        raise UnreadableDocumentError("the stored text is not JSON") from error
    except RecursionError:
        raise UnreadableDocumentError("the stored text is nested too deeply") from None
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
        "started_by": call.started_by,
        "call_id": call.call_id,
    }


def stored_call_to_dict(call: PendingCall) -> dict[str, Any]:
    """Return a pending call as JSON values for a store. Older programs refuse fields that they do not know."""
    return {name: value for name, value in call_to_dict(call).items() if name not in ("started_by", "call_id")}


def call_from_dict(written: Mapping[str, Any], started_by: str | None, call_id: str = "") -> PendingCall:
    """Return a pending call that `stored_call_to_dict` wrote, without fields of newer programs."""
    known = {name: value for name, value in written.items() if name in PendingCall.__slots__}
    return PendingCall(**{**known, "started_by": started_by, "call_id": call_id})


def _waiting_to_dict(waiting: WaitingCall) -> dict[str, Any]:
    return {
        "call": stored_call_to_dict(waiting.call),
        "call_id": waiting.call.call_id,
        "method": waiting.method,
        "approvers": list(waiting.approvers),
        "not_self": waiting.not_self,
        "outer": [asdict(each) for each in waiting.outer],
        "origin": _origin_to_dict(waiting.origin),
        "since": None if waiting.since is None else waiting.since.isoformat(),
    }


def _origin_to_dict(origin: ToolOrigin | None) -> dict[str, str] | None:
    return None if origin is None else asdict(origin)


def _read_origin(written: Mapping[str, Any]) -> ToolOrigin | None:
    origin = written.get("origin")  # runs of earlier versions have none
    return None if origin is None else ToolOrigin(**origin)


def _waiting(written: Any, identity: Mapping[str, Any] | None) -> WaitingCall:
    return WaitingCall(
        call=call_from_dict(written["call"], _name_of(identity), written.get("call_id", "")),
        method=written["method"],
        approvers=tuple(written["approvers"]),
        not_self=written["not_self"],
        outer=tuple(OuterCall(**each) for each in written.get("outer", ())),
        origin=_read_origin(written),
        since=None if written.get("since") is None else datetime.fromisoformat(written["since"]),
    )


def _limits_to_dict(limits: UsageLimits | None) -> dict[str, Any] | None:
    if limits is None:
        return None
    return {**asdict(limits), "cost": None if limits.cost is None else str(limits.cost)}


def _limits(written: Any) -> UsageLimits | None:
    if written is None:
        return None
    return UsageLimits(**{**written, "cost": None if written["cost"] is None else Decimal(written["cost"])})


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
        "origin": _origin_to_dict(given.origin),
    }


def _given(written: Any) -> GivenAnswer:
    answer = Answer(written["kind"], written["arguments"], written["value"], written["reason"])
    return GivenAnswer(
        call_id=written["call_id"],
        answer=answer,
        asked=written["asked"],
        by=written["by"],
        origin=_read_origin(written),
    )


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
    state = State.from_dict(written["state"])
    if before is None:
        return state
    changes: dict[str, Any] = {name: getattr(before, name) for name in written["kept"]}
    for name, count in written["shared"].items():
        changes[name] = (*getattr(before, name)[:count], *getattr(state, name))
    return state.changed(**changes)


def reply_to_json(
    state: State,
    before: State | None,
    replied: ModelReplied,
    usage: Mapping[str, Any] | None = None,
    unfit: Sequence[int] = (),
) -> str:
    """Write the state before a model's reply, the usage counted before it, and the reply.

    `unfit` are the positions of its calls that the program refused when the reply came.
    """
    reply = State(None, (), tuple(replied.aside), response=replied.response, sent=replied.sent).to_json()
    counted = json.dumps(usage)
    about = f'"version":{VERSION},"usage":{counted},"unfit":{json.dumps([*unfit])}'
    return f'{{{about},"before":{state_to_json(state, before)},"reply":{reply}}}'


def reply_from_dict(written: Mapping[str, Any]) -> ModelReplied:
    """Read the reply in a record written by `reply_to_json`."""
    reply = State.from_dict(written["reply"])
    assert reply.response is not None
    return ModelReplied(reply.response, reply.messages, sent=reply.sent)


def model_to_json(name: str) -> str:
    """Write the name of the model that a router has chosen for an invocation."""
    return json.dumps({"version": VERSION, "model": name})


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


def result_to_json(
    result: Encoded | Exception, arguments: Mapping[str, Any] | None = None, *, is_judged: bool = False
) -> str:
    """Write the result of a tool call, or its exception.

    `arguments` are those that the tool had, if they are not the model's. `is_judged`: output guardrails have accepted
    or written the result, so it is what the model reads.
    """
    about = {"version": VERSION, "arguments": arguments, "judged": is_judged}
    if isinstance(result, Exception):
        kind = "ToolRetry" if isinstance(result, ToolRetry) else type_name_of(result)
        return json.dumps({**about, "error": kind, "text": message_of(result)})
    message = ToolExecutionResultMessage(
        "", "", result.text, result.is_error, dict(result.attributes or {}), tuple(result.contents)
    )
    return json.dumps({**about, "message": message_to_dict(message), "value": json_or_none(result.value)})


def result_from_dict(written: Mapping[str, Any]) -> Encoded | Exception:
    """Return the result in a record written by `result_to_json`, or the exception that was recorded."""
    if "error" in written:
        if written["error"] == "ToolRetry":
            return ToolRetry(written["text"])
        return RecordedToolError(written["error"], written["text"])
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


# --- values of a program


def qualified(cls: type[Any]) -> str:
    """Return the qualified name of a class: `module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def adapter_of(annotation: Any) -> Any:
    """Return pydantic's adapter for a type. Raises whatever pydantic raises for types that it does not know."""
    try:
        return _adapter(annotation)
    except TypeError:  # an annotation that cannot be hashed
        return _adapter.__wrapped__(annotation)


def _write_and_read(annotation: Any, value: Any) -> tuple[Any, Any]:
    """Return the JSON form of a value, and the value that is read from it."""
    adapter = adapter_of(annotation)
    text = adapter.dump_json(value, by_alias=True, warnings="error")
    again = adapter.validate_json(text)
    _refuse_secret(value, text)
    return json.loads(text), again


def _refuse_secret(value: Any, text: bytes) -> None:
    """Raise `ValueError` for a `SecretStr` and the like in a value: pydantic writes stars, and the value is lost."""
    from pydantic import Secret, SecretBytes, SecretStr

    if b"*" * 10 not in text:
        return
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        here = todo.pop()
        if isinstance(here, (SecretStr, SecretBytes, Secret)):
            raise ValueError(f"it contains a {type(here).__name__}, which pydantic writes without its value")
        if id(here) in seen or isinstance(here, (str, bytes, int, float)):
            continue
        seen.add(id(here))
        if isinstance(here, Mapping):
            todo += [*here, *here.values()]
        elif isinstance(here, Iterable) and isinstance(here, Sized):
            todo += here
        names = (*getattr(here, "__dict__", ()), *getattr(type(here), "__slots__", ()))
        todo += [getattr(here, name, None) for name in names]


def _read(annotation: Any, written: Any) -> Any:
    return adapter_of(annotation).validate_json(json.dumps(written))


def json_value(value: Any) -> Any:
    """Return a value as JSON values. Raises whatever the value's serializers raise."""
    from pydantic_core import to_jsonable_python

    return json.loads(json.dumps(to_jsonable_python(value, by_alias=True)))


def reason_of(error: Exception) -> str:
    """Return pydantic's faults in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{path}: {message}" if path else message for path, message in faults_of(error))
    return str(error).split("\n", 1)[0]


# --- arguments of the method


def _write_arguments(plan: MethodPlan, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments as JSON values, and as they are read again; without those that pydantic cannot write."""
    written, read_again = {}, {}
    for name, value in arguments.items():
        with suppress(Exception):  # pydantic and serializers raise many kinds of exceptions
            written[name], read_again[name] = _write_and_read(plan.annotations.get(name, Any), value)
    return written, read_again


def digest_of(arguments: Mapping[str, Any], salt: str | None = None) -> str:
    """Return a hash of JSON values with its salt, by default a new one: two texts with the same salt are comparable."""
    salt = salt or token_hex(16)
    text = json.dumps(arguments, sort_keys=True)
    return f"{salt}:{hashlib.sha256(f'{salt}:{text}'.encode()).hexdigest()}"


def are_arguments_of(document: RunDocument, arguments: Mapping[str, Any]) -> bool:
    """Return True if a run was asked with these arguments, as JSON values."""
    if not document.digest:  # a run of an earlier version
        return document.arguments == arguments
    return digest_of(arguments, document.digest.partition(":")[0]) == document.digest


def with_message(
    document: RunDocument, plan: MethodPlan, arguments: Mapping[str, Any], message: UserMessage
) -> RunDocument:
    """Return a document with the message that input guardrails have written in place of the user's.

    What the user has said is not stored then: of the arguments, the document keeps those that are used elsewhere.
    """
    system = plan.system.variables if isinstance(plan.system, Template) else frozenset()
    needed = {plan.memory_parameter, plan.run_id_parameter, plan.call_options, *plan.history, *plan.contents}
    needed |= {plan.values[each] for each in system}
    kept = {name: value for name, value in document.arguments.items() if name in needed}
    if plan.continues_history:
        name = next(each for each in reversed(plan.history) if arguments[each])
        kept[name], _ = _write_and_read(plan.annotations[name], [*arguments[name][:-1], message])
    dropped = tuple(name for name in document.arguments if name not in kept)
    return document.changed(arguments=kept, dropped=dropped, message=message_to_dict(message))


def read_user_message(run_id: str, document: RunDocument) -> UserMessage | None:
    """Return the message of `with_message`; None if the arguments have it. Raises `RunIncompatibleError`."""
    if document.message is None:
        return None
    try:
        message = message_from_dict(document.message)
    except TranscriptError as error:
        raise RunIncompatibleError(run_id, f"its user message cannot be read: {error}") from error
    assert isinstance(message, UserMessage)
    return message


def refuse_other_type(plan: MethodPlan, name: str, value: Any) -> None:
    """Raise `TypeError` if an argument is not of the type that the method declares."""
    annotation = plan.annotations.get(name, Any)
    try:
        is_of_type = type(adapter_of(annotation).validate_python(value, strict=True)) is type(value)
    except ValidationError:
        is_of_type = False
    except Exception:  # a type that pydantic does not know, or a validator that fails
        return
    if not is_of_type:
        raise TypeError(f"{plan.where}(): {name} must be {type_name(annotation)}, got {type(value).__name__}")


def read_arguments(run_id: str, plan: MethodPlan, document: RunDocument) -> dict[str, Any]:
    """Return the arguments of the method; None for those that were not stored. Raises `RunIncompatibleError`."""
    arguments: dict[str, Any] = {}
    stored = {*document.arguments, *document.unwritten, *document.dropped}
    parameters = plan.signature.parameters
    if gone := sorted(stored - {*parameters}):
        raise RunIncompatibleError(run_id, f"{plan.where} has no parameter {gone[0]!r} any more")
    for name, parameter in parameters.items():
        if name in document.unwritten or name in document.dropped:
            arguments[name] = None
        elif name in document.arguments:
            try:
                arguments[name] = _read(plan.annotations.get(name, Any), document.arguments[name])
            except Exception as error:  # as above
                reason = f"the argument {name!r} of {plan.where} is no longer valid: {reason_of(error)}"
                raise RunIncompatibleError(run_id, reason) from error
        elif parameter.default is parameter.empty:
            raise RunIncompatibleError(run_id, f"{plan.where} has the new parameter {name!r}")
        else:
            arguments[name] = parameter.default
    return arguments


def output_fingerprint(plan: MethodPlan) -> str:
    """Return a text that changes with the method's return type."""
    output = plan.output
    text: str = output.kind.value
    if output.kind is Kind.STRUCTURED:
        text += json.dumps(adapter_of(output.type).json_schema(), sort_keys=True)
    is_list = output.shape is Shape.ITEM_STREAM
    return hashlib.sha256(f"{text}{is_list}".encode()).hexdigest()[:16]


# --- results


def write_value(plan: MethodPlan, value: Any) -> Any:
    """Return the JSON form of the method's value: a list with it, or an empty one for None."""
    if value is None:
        return []
    if isinstance(value, AiMessage):
        return [message_to_dict(value)]
    return [json.loads(_value_adapter(plan).dump_json(value, by_alias=True))]


def read_value(plan: MethodPlan, written: Any) -> Any:
    """Return the value that `write_value` wrote."""
    if not written:
        return None
    if plan.output.kind is Kind.MESSAGE:
        return message_from_dict(written[0])
    return _value_adapter(plan).validate_json(json.dumps(written[0]))


def _value_adapter(plan: MethodPlan) -> Any:
    """Return the adapter of the method's value, which writes and reads the kinds of unions."""
    structure = plan.output.structure
    return adapter_of(str) if structure is None else structure.type.adapter


def write_details(result: Result[Any]) -> dict[str, Any]:
    """Return what a `Result` has besides its content, as JSON values."""
    state = State(
        None,
        (),
        tuple(result.messages),
        executions=tuple(result.tool_executions),
        token_usage=result.token_usage,
        compensations=tuple(result.compensations),
    )
    facts = {"finish_reason": result.finish_reason, "response_id": result.response_id}
    return {"state": json.loads(state.to_json()), **facts}


def read_details(plan: MethodPlan, content: Any, written: Mapping[str, Any] | None) -> Result[Any]:
    """Return the `Result` with this content and the details that `write_details` wrote."""
    if written is None:
        return Result(content)
    reason = written["finish_reason"]
    state = with_restored_results(plan, State.from_dict(written["state"]))
    result = state.result(content, None if reason is None else FinishReason(reason))
    return replace(result, response_id=written.get("response_id"))


def with_restored_results(plan: MethodPlan, state: State) -> State:
    """Return a state that was stored, with the results of tools in their types."""

    def read_result(name: str, value: Any) -> Any:
        tool = plan.toolset.stored(name)
        return value if tool is None else restored_result(tool.returns, value)

    return state.with_results(read_result)


# --- seeds and attributes


async def _write_seeds(scope: ActiveScope, types: Iterable[Any], where: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return the kept seeds of the active request scope as JSON by name, and by type as they are read again.

    Raises `IllegalConfigurationError` for a seed that cannot be written.
    """
    written, seeds = {}, {}
    for each in types:
        try:
            value = await scope.find(each)
        except ScopeNotActiveError:
            continue
        if value is None:
            continue
        try:
            written[qualified(each)], seeds[each] = _write_and_read(each, value)
        except Exception as error:  # pydantic and serializers raise many kinds of exceptions
            fact = f"the seed {type_name(each)} cannot be stored with the run: {reason_of(error)}"
            fix = "let the seed contain only values that pydantic can write and read"
            raise IllegalConfigurationError([Problem(where, fact, fix)]) from error
    return written, seeds


def read_seeds(run_id: str, types: Iterable[Any], document: RunDocument) -> dict[Any, Any]:
    """Return the seeds of a run. Raises `RunIncompatibleError`."""
    by_name = {qualified(each): each for each in types}
    seeds: dict[Any, Any] = {}
    for name, written in document.seeds.items():
        if name not in by_name:
            raise RunIncompatibleError(run_id, f"it has the seed {name}, which is not in run_seeds= any more")
        try:
            seeds[by_name[name]] = _read(by_name[name], written)
        except Exception as error:  # as above
            raise RunIncompatibleError(run_id, f"the seed {name} is no longer valid: {reason_of(error)}") from error
    return seeds


def write_attributes(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the attributes of an invocation as JSON values. Raises `IllegalConfigurationError`, naming the key."""
    from pydantic_core import to_jsonable_python

    written = {}
    for name, value in attributes.items():
        try:
            text = json.dumps(to_jsonable_python(value))
            _refuse_secret(value, text.encode())
            written[name] = json.loads(text)
        except Exception as error:  # any exception of the value's own serializers
            fact = f"the attribute {name!r} is a {type(value).__name__}, which cannot be stored with the run"
            fix = "use a value that pydantic can write as JSON in invocation_attributes(…)"
            raise IllegalConfigurationError([Problem(where, fact, fix)]) from error
    return written


_TRACE_HEADERS = ("traceparent", "tracestate")


def current_trace() -> dict[str, str]:
    """Return the headers of the current span that identify it, without baggage, which may be about persons."""
    return {name: value for name, value in headers_of_current_span().items() if name in _TRACE_HEADERS}


# --- identities


async def current_identity(scope: ActiveScope) -> Any:
    """Return the identity of the active scope; the anonymous one without any."""
    from ..security import identity_in

    return await identity_in(scope)


def write_identity(identity: Any) -> dict[str, Any] | None:
    """Return an identity as JSON values; None for an anonymous one."""
    if identity is None or identity.is_anonymous:
        return None
    return {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "attributes": write_attributes(identity.attributes, "SecurityIdentity.attributes"),
    }


def _name_of(identity: Mapping[str, Any] | None) -> str | None:
    return None if identity is None else str(identity["name"])


def read_identity(written: Mapping[str, Any] | None) -> Any:
    """Return the identity that `write_identity` wrote."""
    from ..security import SecurityIdentity

    if written is None:
        return SecurityIdentity.anonymous()
    return SecurityIdentity(written["name"], frozenset(written["roles"]), written["attributes"])


def write_person(run_id: str, by: Any) -> Any:
    """Return the JSON form of the person who answers: a name, an identity, or None. Raises `RunAnswerError`."""
    if by is None or isinstance(by, str):
        return by
    if not hasattr(by, "is_anonymous"):
        raise RunAnswerError(run_id, f"by= must be a str or a SecurityIdentity, got {type(by).__name__}")
    if by.is_anonymous:
        return None
    return {"name": by.name, "roles": sorted(by.roles), "attributes": writable(by.attributes)}


def writable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that have a JSON form, and leave out the others."""
    written = {}
    for name, value in dict(values).items():
        with suppress(Exception):  # any exception of the value's own serializers
            written[str(name)] = json_value(value)
    return written


def read_person(written: Any) -> Any:
    """Return the person that `write_person` wrote."""
    return read_identity(written) if isinstance(written, dict) else written


def person_name(by: Any) -> str | None:
    """Return the name of a person for the history."""
    if by is None or isinstance(by, str):
        return by
    return str(by.name) or None


# --- suspended calls


class StoringHost(Protocol):
    """Hosts services, and provides their store of runs."""

    scope: ActiveScope
    run_seeds: tuple[Any, ...]
    run_identity: tuple[str, ...]

    async def run_store(self) -> RunStore:
        """Return the store of the runs."""
        ...


def header(run_id: str, plan: MethodPlan, conversation: ChatMemoryKey | None, document: RunDocument) -> StoredRun:
    """Return the header of a new run."""
    now = datetime.now(UTC)
    return StoredRun(
        id=run_id,
        service=qualified(plan.service),
        method=plan.name,
        status="running",
        document=document.to_json(),
        created_at=now,
        updated_at=now,
        conversation=None if conversation is None else conversation_key(conversation),
        started_by=_text_or_none(document.started_by),
        memory_id=_text_or_none(document.memory_id),
    )


def is_text(given: str) -> bool:
    """Return True for a text that a database can store."""
    return "\0" not in given and not any("\ud800" <= each <= "\udfff" for each in given)


def _text_or_none(given: str | None) -> str | None:
    return given if given is not None and is_text(given) else None


def conversation_key(key: ChatMemoryKey) -> str:
    """Return the key of a conversation for stores of runs, which has 64 characters."""
    return hashlib.sha256(f"{key.service}\0{key.memory_id}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class DescribedRun:
    """The document of a new run, with all arguments. `arguments` and `seeds` are what is read from it."""

    document: RunDocument
    arguments: Mapping[str, Any]
    seeds: Mapping[Any, Any]


async def describe(
    plan: MethodPlan,
    host: StoringHost,
    arguments: Any,
    attributes: Any,
    added_by: str,
    limits: UsageLimits | None,
) -> DescribedRun:
    """Describe a new run, from the active scope. `added_by` is the endpoint that adds tools to the call.

    `limits` are what is left for the run.

    Raises `IllegalConfigurationError` for seeds and attributes that pydantic cannot write.
    """
    written, read_again = _write_arguments(plan, arguments)
    memory_id = None if plan.memory_parameter is None else arguments[plan.memory_parameter]
    written_seeds, seeds = await _write_seeds(host.scope, host.run_seeds, plan.where)
    document = RunDocument(
        arguments=written,
        unwritten=tuple(name for name in arguments if name not in read_again),
        output=output_fingerprint(plan),
        seeds=written_seeds,
        identity=write_identity(await current_identity(host.scope)),
        attributes=write_attributes(attributes, plan.where),
        added_by=added_by,
        limits=limits,
        memory_id=None if memory_id is None else str(memory_id),
        trace=current_trace(),
        digest=digest_of(written),
    )
    return DescribedRun(document, read_again, seeds)
