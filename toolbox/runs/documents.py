"""The document of a run: what its header keeps as versioned JSON, and the parts that a store shows or keeps at the end.

Pydantic writes and reads the data classes here, as their fields say; a new field needs a default. Not here: making the
document of a new run (`new_documents`), values of the program in it (`program_values`), records (`record_contents`),
storing (`store`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from secrets import token_hex
from typing import Annotated, Any, TypeAlias, cast

from pydantic import BeforeValidator, PlainSerializer, SerializerFunctionWrapHandler, ValidationInfo, WrapSerializer

from ..chat import PendingCall, UserMessage
from ..deferred_answers import ToolOrigin
from ..errors import TranscriptError
from ..limits import UsageLimits
from ..security import without_token
from ..services.recording_needs import ToldMessage
from ..services.state import State
from ..services.stored_forms import fields_from_dict, fields_to_dict
from ..transcripts import message_from_dict, message_to_dict, read_field
from .run_answers import Answer, HistoryEntry

VERSION = 1


class UnreadableDocumentError(ValueError):
    """A stored text has another format or version."""


def read_stored_json(text: str) -> dict[str, Any]:
    """Return a JSON object of this version: a document or a record. Raises `UnreadableDocumentError`."""
    try:
        written = json.loads(text)
    except ValueError as error:
        raise UnreadableDocumentError("the stored text is not JSON") from error
    except RecursionError:
        raise UnreadableDocumentError("the stored text is nested too deeply") from None
    version = written.get("version") if isinstance(written, dict) else None
    if version != VERSION:
        raise UnreadableDocumentError(f"the stored run has format version {version!r}; this program reads {VERSION}")
    return cast("dict[str, Any]", written)


# --- pending calls and answers


def _drop_token(person: Any) -> Any:
    """Return the JSON form of a person without the token, which earlier releases have written."""
    if not isinstance(person, Mapping) or not isinstance(person.get("attributes"), Mapping):
        return person
    return {**person, "attributes": without_token(person["attributes"])}


StoredTime: TypeAlias = Annotated[datetime, PlainSerializer(datetime.isoformat)]
StoredDuration: TypeAlias = Annotated[timedelta, PlainSerializer(timedelta.total_seconds)]


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
    that is the last change of the header. `requested` are the arguments as the model wrote them; an empty text in runs
    of earlier versions. `expires_after` is the tool's `approval_expires`.
    """

    call: PendingCall
    method: str
    approvers: tuple[str, ...] = ()
    not_self: bool = False
    outer: tuple[OuterCall, ...] = ()
    origin: ToolOrigin | None = None
    since: StoredTime | None = None
    requested: str = ""
    expires_after: StoredDuration | None = None


def with_expiries(waiting: Iterable[WaitingCall], now: datetime) -> tuple[WaitingCall, ...]:
    """Return pending calls, of which those that can expire and have begun to wait at `now` have the time."""
    return tuple(
        each
        if each.expires_after is None or each.call.expires_at is not None
        else replace(each, call=replace(each.call, expires_at=now + each.expires_after))
        for each in waiting
    )


def next_expiry(waiting: Iterable[WaitingCall]) -> datetime | None:
    """Return the time at which the first of these calls expires; None if none does."""
    return min((each.call.expires_at for each in waiting if each.call.expires_at is not None), default=None)


def find_expired(waiting: Iterable[WaitingCall], now: datetime) -> list[WaitingCall]:
    """Return the calls that have expired."""
    return [each for each in waiting if each.call.expires_at is not None and each.call.expires_at <= now]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """An answer as it is stored: `asked` are the arguments that the person saw, `by` the person's JSON form.

    `origin` is where the tool came from that the person saw.
    """

    call_id: str
    answer: Answer
    asked: Mapping[str, Any]
    by: Annotated[Any, BeforeValidator(_drop_token)] = None
    origin: ToolOrigin | None = None


def stored_call_to_dict(call: PendingCall) -> dict[str, Any]:
    """Return a pending call as JSON values for a store. Older programs refuse fields that they do not know."""
    newer = ("started_by", "call_id", "expires_at", "may_remember")
    return {name: value for name, value in fields_to_dict(call).items() if name not in newer}


def call_from_dict(written: Mapping[str, Any], **newer: Any) -> PendingCall:
    """Return a pending call that `stored_call_to_dict` wrote, with the fields that it left out."""
    return fields_from_dict(PendingCall, {**written, **newer})


def write_expiry(call: PendingCall) -> str | None:
    """Return the time at which a pending call expires, as a text."""
    return None if call.expires_at is None else call.expires_at.isoformat()


def _waiting_to_dict(waiting: WaitingCall, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
    written: dict[str, Any] = to_dict(waiting)
    del written["call"]["started_by"]  # the name in the document's `identity`
    del written["call"]["expires_at"]
    if written["call"].pop("may_remember"):
        written["may_remember"] = True
    return {**written, "call_id": written["call"].pop("call_id"), "expires_at": write_expiry(waiting.call)}


def _waiting_from_dict(written: Any, document: ValidationInfo) -> dict[str, Any]:
    about = {
        "call_id": read_field(written, "call_id", str, "", ""),  # runs of earlier versions have none
        "started_by": _name_of(document.data.get("identity")),
        "expires_at": read_field(written, "expires_at", (str, type(None)), "", None),
        "may_remember": read_field(written, "may_remember", bool, "", False),
    }
    return {**written, "call": {**read_field(written, "call", dict, ""), **about}}


def _answer_to_dict(given: GivenAnswer, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
    written: dict[str, Any] = to_dict(given)
    answer = written.pop("answer")
    del answer["remember"]  # the conversation has it
    return {**answer, **written}


def _answer_from_dict(written: Any) -> Any:
    return {**written, "answer": written} if isinstance(written, Mapping) else written


def _entry_to_dict(entry: HistoryEntry, to_dict: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    written = to_dict(entry)
    if not entry.remembered:
        del written["remembered"]
    return {**written, "at": entry.at.isoformat()}


def _limits_to_dict(limits: UsageLimits, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
    return {**to_dict(limits), "cost": None if limits.cost is None else str(limits.cost)}


# These functions keep the form of the first release where the classes have another one.
StoredWaitingCall: TypeAlias = Annotated[
    WaitingCall, WrapSerializer(_waiting_to_dict), BeforeValidator(_waiting_from_dict)
]
StoredAnswer: TypeAlias = Annotated[GivenAnswer, WrapSerializer(_answer_to_dict), BeforeValidator(_answer_from_dict)]
StoredEntry: TypeAlias = Annotated[HistoryEntry, WrapSerializer(_entry_to_dict)]
StoredLimits: TypeAlias = Annotated[UsageLimits, WrapSerializer(_limits_to_dict)]


# --- the document


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """The JSON of a run's header.

    - `arguments`: of the method, as JSON values by name. `unwritten` names those that pydantic cannot write, `dropped`
      those that an input guardrail kept out of the run. `digest`: a salted hash of all arguments of the call.
    - `is_checked`: the input guardrails have judged the message. `message`: what they made of it, as JSON values.
      `checked_by`: the method that was in charge then, whose guardrails have judged it too; None without hand-overs.
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
    - `trace`: the headers of the span in which the run was created, suspended or ended last, such as `traceparent`.
    - `is_reduced`: the run has ended, and its store keeps only the outcome: see `reduced_document`.
    - `identity_attributes`: those of the identity that `run_identity=` names. They stay where the others are left out.
      None in runs of earlier releases.
    - `attempts`: the executions so far, without those that only continue after an answer. In a run of `runs.start`,
      they are counted when they begin.
    - `beans_until`: the key of the last record with beans of the conversation when those were stored with a turn,
      although the run has not completed: what is recorded until there is not stored again.
    - `failures`: how many of them have failed, before the run went on. `asks_again`: the last one failed with the reply
      of its model, so that the next one must not use it.
    - `client_tools`: the tools that the client of the call has, as `write_client_tool` writes them. `client_id`: the id
      that it gave to the user's message. `front_end`: a front end has started the run, and shows the services within.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    output: str = ""
    seeds: Mapping[str, Any] = field(default_factory=dict)
    identity: Annotated[Mapping[str, Any] | None, BeforeValidator(_drop_token)] = None  # `waiting` is read with it
    attributes: Mapping[str, Any] = field(default_factory=dict)
    waiting: tuple[StoredWaitingCall, ...] = ()
    answers: tuple[StoredAnswer, ...] = ()
    history: tuple[StoredEntry, ...] = ()
    result: Any = None
    error_type: str | None = None
    error_text: str | None = None
    reason: str | None = None
    follows: bool = False
    added_by: str = ""
    cancels: bool = False
    limits: StoredLimits | None = None
    memory_id: str | None = None
    details: Mapping[str, Any] | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    digest: str = ""
    is_checked: bool = False
    checked_by: str | None = None
    message: Mapping[str, Any] | None = None
    is_reduced: bool = False
    identity_attributes: Mapping[str, Any] | None = None
    attempts: int = 1
    failures: int = 0
    asks_again: bool = False
    client_tools: tuple[Mapping[str, Any], ...] = ()
    beans_until: str = ""
    client_id: str | None = None
    front_end: bool = False

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
        written = fields_to_dict(self)
        for name in ("checked_by", "front_end"):  # most runs have none, and earlier releases know none
            if not written[name]:
                del written[name]
        return json.dumps({"version": VERSION, **written})

    @classmethod
    def from_json(cls, text: str) -> RunDocument:
        """Read a document written by `to_json`. Raises `UnreadableDocumentError`."""
        written = read_stored_json(text)
        if (reason := written.get("unreadable")) is not None:
            raise UnreadableDocumentError(reason)
        if "output" not in written:  # the JSON of something else: no field is required, and new ones have defaults
            raise UnreadableDocumentError("invalid document of a run: output: missing required field")
        try:
            return fields_from_dict(cls, written)
        except TranscriptError as error:
            place = f"{error.path}: " if error.path else ""
            raise UnreadableDocumentError(f"invalid document of a run: {place}{error.what}") from error


def with_cancellation(document: RunDocument, entry: HistoryEntry, waiting: tuple[WaitingCall, ...] = ()) -> RunDocument:
    """Return the document of a run that is cancelled; `entry` says who wants it, and why. `waiting` calls stay."""
    return document.changed(
        waiting=waiting,
        error_type=None,  # of a try before
        error_text=None,
        reason=entry.reason,
        history=(*document.history, entry),
    )


def told_to_json(added: ToldMessage) -> str:
    """Write a message that the user adds to a run."""
    written = {"version": VERSION, "message": message_to_dict(added.message), "by": added.by}
    return json.dumps(written if added.client_id is None else {**written, "client_id": added.client_id})


def told_from_json(text: str) -> ToldMessage:
    """Read a message that `told_to_json` wrote. Raises `TranscriptError` and `UnreadableDocumentError`."""
    written = read_stored_json(text)
    message = message_from_dict(written["message"], "message")
    if not isinstance(message, UserMessage):
        raise TranscriptError("message", "expected a user message")
    return ToldMessage(message, written.get("by"), written.get("client_id"))


def cancellation_to_json(entry: HistoryEntry) -> str:
    """Write the wish that the owner of a run ends it as cancelled."""
    return json.dumps({"version": VERSION, **_entry_to_dict(entry, fields_to_dict)})


def cancellation_from_json(text: str) -> HistoryEntry | None:
    """Read a wish that `cancellation_to_json` wrote; None for one that only a later release knows."""
    try:
        entry = fields_from_dict(HistoryEntry, read_stored_json(text))
    except (UnreadableDocumentError, TranscriptError):
        return None
    return entry if entry.answer == "cancel" else None


def _name_of(identity: Mapping[str, Any] | None) -> str | None:
    return None if identity is None else cast("str", read_field(identity, "name", str, "identity"))


# --- parts of a document


_NOT_SHOWN: dict[str, Any] = {
    "arguments": {},
    "seeds": {},
    "attributes": {},
    "answers": [],
    "result": None,
    "details": None,
    "message": None,
    "client_tools": [],
}
"""Fields of a document that no list shows and that can be large, with what they are without a value."""


def shown_document(text: str) -> str:
    """Return a document with only what lists show, for stores that keep it apart. It is read as any document.

    Of a document that cannot be read, the reason stays.
    """
    try:
        written = read_stored_json(text)
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
        hashed = _hash_values(digest, identity["attributes"])
        identity = {"name": identity["name"], "roles": [], "attributes": hashed}
    return RunDocument(
        output=document.output,
        seeds=_hash_values(digest, document.seeds),
        identity=identity,
        attributes=_hash_values(digest, document.attributes),
        history=document.history,
        result=document.result,
        error_type=document.error_type,
        error_text=document.error_text,
        reason=document.reason,
        follows=document.follows,
        memory_id=document.memory_id,
        details=_reduce_details(document.details),
        digest=digest,
        is_reduced=True,
        identity_attributes=document.identity_attributes,
        attempts=document.attempts,
    ).to_json()


def _reduce_details(details: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a `Result` has besides its content: only the usage and the finish reason."""
    if details is None:
        return None
    usage = State.from_dict(details["state"]).token_usage
    state = State(None, (), (), token_usage=usage)
    kept = {name: details.get(name) for name in ("finish_reason", "stopped_by")}
    return {"state": state.to_dict(), **kept}


# --- hashes: which call a run was created for


def digest_of(arguments: Mapping[str, Any], salt: str | None = None) -> str:
    """Return a hash of JSON values with its salt, by default a new one: two texts with the same salt are comparable."""
    salt = salt or token_hex(16)
    text = json.dumps(arguments, sort_keys=True)
    return f"{salt}:{hashlib.sha256(f'{salt}:{text}'.encode()).hexdigest()}"


def _hash_values(digest: str, values: Mapping[str, Any]) -> dict[str, str]:
    salt = digest.partition(":")[0]
    return {name: digest_of({name: value}, salt) for name, value in values.items()}


def make_comparable(document: RunDocument, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values of a call as the document of a run has them: hashed if it is reduced."""
    return _hash_values(document.digest, values) if document.is_reduced else values


def are_arguments_of(document: RunDocument, arguments: Mapping[str, Any]) -> bool:
    """Return True if a run was asked with these arguments, as JSON values."""
    if not document.digest:  # a run of an earlier version
        return document.arguments == arguments
    return digest_of(arguments, document.digest.partition(":")[0]) == document.digest
