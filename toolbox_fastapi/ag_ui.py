"""The protocol of AG-UI 1.0: `RunInput`, `respond` and `stop`. Needs the extra `ag-ui`.

Not here: reading the events of a run, and the chats to which runs belong (`front_ends`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, assert_never

try:
    from ag_ui.core import PROTOCOL_VERSION
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox_fastapi.ag_ui needs ag-ui-protocol; install it with: pip install 'toolbox-di[ag-ui]'", name=_error.name
    ) from None
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.responses import Response

from toolbox.chat import PendingCall, TokenUsage, ToolSpecification, UserMessage
from toolbox.contents import (
    AudioContent,
    Content,
    ImageContent,
    PdfContent,
    TextContent,
    base64_of,
    joined_text,
    media_in,
    media_type_of,
    url_of,
)
from toolbox.conversations.conversations_bean import Conversation
from toolbox.errors import ConversationNotFoundError
from toolbox.passages import Passage
from toolbox.runs import run_answers
from toolbox.runs.run_answers import Answer
from toolbox.runs.runs_bean import Runs
from toolbox.service_events import HandedOver

from .front_ends.bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatId,
    ClientBody,
    Short,
    make_message,
    read_media,
    read_text,
    read_value,
)
from .front_ends.chats import (
    Chat,
    ClientReply,
    NewMessage,
    RefusedError,
    StreamPlace,
    WhileWaiting,
    find_newest_answer,
    invalid,
    shown_messages,
    stop_chat,
    waits_for_client,
)
from .front_ends.part_streams import PartStream
from .front_ends.room_reading import ShownMessage, read_room
from .front_ends.run_reading import answer_id
from .front_ends.states import with_state
from .front_ends.stream_parts import (
    AddedMessage,
    BeanValues,
    BlockEnd,
    BlockPiece,
    BlockStart,
    Broken,
    BrokenCall,
    CallEnd,
    CallPiece,
    CallProgress,
    CallReady,
    CallStart,
    Completed,
    Part,
    RoundEnd,
    RoundStart,
    ServiceEnd,
    ServiceStart,
    ServiceText,
    Sources,
    Stopped,
    Waits,
)

__all__ = ["InputMessage", "InputTool", "ResumeInput", "RunInput", "history", "respond", "stop"]

Event = dict[str, Any]

APPROVAL_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "approved": {"type": "boolean"},
        "editedArgs": {"type": "object"},
        "reason": {"type": "string"},
    },
    "required": ["approved"],
}
"""The JSON schema of an answer to an approval, for clients that make a form of it."""

REMEMBER_SCHEMA: Mapping[str, Any] = {"enum": ["conversation"]}
"""That of its property `remember`, for calls whose tool has `may_remember=True`."""

MAX_TOOLS = 128
MAX_SCHEMA = 100_000  # characters of JSON


# --- what the client sends


class _Input(BaseModel):
    model_config = ConfigDict(extra="ignore", alias_generator=to_camel, populate_by_name=True)


class InputMessage(_Input):
    """A message of the client. Its content is read only where it counts."""

    id: Annotated[str, Short] | None = None
    role: Annotated[str, Field(max_length=50)]
    content: Any = None
    tool_call_id: Annotated[str, Short] | None = None
    error: str | None = None


class InputTool(_Input):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: Annotated[str, Field(max_length=10_000)] = ""
    parameters: Any = None


class ResumeInput(_Input):
    """The answer to an interrupt."""

    interrupt_id: Annotated[str, Short]
    status: Literal["resolved", "cancelled"]
    payload: Any = None


class RunInput(ClientBody, _Input):
    """The body that an AG-UI client posts.

    The conversation of the service is what counts. Of the client's messages, only the last one is read, and results of
    tools that the client runs. `state` and `context` are not read.
    """

    thread_id: ChatId
    run_id: Annotated[str, Short]
    parent_run_id: Annotated[str, Short] | None = None
    messages: Annotated[list[InputMessage], Field(max_length=MAX_MESSAGES)]
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS)] | None = None
    resume: Annotated[list[ResumeInput], Field(max_length=1000)] | None = None


_MEDIA = {"image": "image/png", "audio": "audio/", "document": "application/pdf"}
"""The parts of a message with a file, and the media type of those that name none."""


def _read_user_message(message: InputMessage) -> UserMessage:
    given = message.content
    parts: Any = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list) or len(parts) > MAX_PARTS or not all(isinstance(each, dict) for each in parts):
        raise invalid("The content of the message must be a string or a list of parts.")
    contents: list[Content] = []
    for each in parts:
        kind = each.get("type")
        if kind == "text":
            contents.append(TextContent(read_text(each.get("text"))))
        elif isinstance(kind, str) and kind in _MEDIA:
            contents.append(_read_media(kind, each.get("source")))
        else:
            raise invalid(f"A user message cannot have a part of the type {str(kind)[:50]!r}.")
    return make_message(contents)


def _read_media(kind: str, source: Any) -> Content:
    given: Mapping[str, Any] = source if isinstance(source, dict) else {}
    value, media_type = given.get("value"), given.get("mimeType") or _MEDIA[kind]
    if not isinstance(media_type, str) or not media_type.startswith(_MEDIA[kind].partition("/")[0]):
        raise invalid(f"A part of the type {kind!r} has another media type.")
    match given.get("type"):
        case "data" if isinstance(value, str):
            return read_media(media_type, f"data:{media_type};base64,{value}")
        case "url":
            return read_media(media_type, value)
    raise invalid(f"A part of the type {kind!r} needs a source with its data or its address.")


def _read_replies(body: RunInput) -> Iterator[ClientReply]:
    """Yield the answers to interrupts, and the results of the client's tools. Raises `RefusedError`."""
    for each in body.resume or ():
        yield _read_resume(each)
    for message in _messages_of_turn(body.messages):
        if message.role == "tool" and message.tool_call_id is not None:
            yield _read_result(message.tool_call_id, message)


def _messages_of_turn(messages: Sequence[InputMessage]) -> Sequence[InputMessage]:
    """Return the messages since the user's last one, without a new one that stands last: calls before have ended."""
    end = len(messages) - (bool(messages) and messages[-1].role == "user")
    start = max((index + 1 for index in range(end) if messages[index].role == "user"), default=0)
    return messages[start:end]


def _read_result(call_id: str, message: InputMessage) -> ClientReply:
    answer = run_answers.respond(read_value(message.content))
    if message.error is not None:
        answer = run_answers.fail(message.error)
    return ClientReply(call_id, lambda _: answer, is_result=True)


def _read_resume(entry: ResumeInput) -> ClientReply:
    payload = read_value(entry.payload)

    def answer_interrupt(call: PendingCall) -> Answer:
        if call.kind == "approval":
            return run_answers.reject() if entry.status == "cancelled" else _read_approval(payload)
        return run_answers.fail() if entry.status == "cancelled" else run_answers.respond(payload)

    return ClientReply(entry.interrupt_id, answer_interrupt)


def _read_approval(payload: Any) -> Answer:
    """Return the answer in a payload. Only `true`, and `approved: true`, approve. Raises `RefusedError`."""
    given = {"approved": payload} if isinstance(payload, bool) else payload
    approved = given.get("approved") if isinstance(given, dict) else None
    if approved is True:
        edited, remember = given.get("editedArgs"), given.get("remember")
        if isinstance(edited, dict | None) and remember in (None, "conversation"):
            return run_answers.approve(edited, remember=remember)
    if approved is False:
        reason = given.get("reason")
        if reason is None:
            return run_answers.reject()
        if isinstance(reason, str):
            return run_answers.reject(reason)
    raise invalid('The payload of an approval must be true, or an object such as {"approved": true}.')


def _read_tools(tools: Sequence[InputTool]) -> list[ToolSpecification]:
    found = []
    for each in tools:
        parameters = {"type": "object", "properties": {}} if each.parameters is None else read_value(each.parameters)
        if not isinstance(parameters, dict) or parameters.get("type") != "object":
            raise invalid(f"The parameters of the tool {each.name!r} must be a JSON schema of an object.")
        if len(json.dumps(parameters)) > MAX_SCHEMA:
            raise invalid(f"The parameters of the tool {each.name!r} have more than {MAX_SCHEMA:,} characters.")
        found.append(ToolSpecification(each.name, each.description, parameters))
    return found


# --- what the client gets


class EventWriter:
    """Writes the parts of an answer as events, from `RUN_STARTED` to `RUN_FINISHED` or `RUN_ERROR`.

    Each round is a message of the assistant; its id is made of the run and the number of the round.
    """

    last = b""

    def __init__(self, run_id: str, ids: Mapping[str, str], client_tools: Collection[str]) -> None:
        self._run_id, self._ids, self._client_tools = run_id, ids, client_tools
        self._round, self._has_started = 0, False
        self._services: list[str] = []  # those that work now
        self._ended_services: set[str] = set()
        self.known_results: frozenset[str | None] = frozenset()
        """The client has the results of the tools that it runs: it would show them twice."""
        self.snapshot: list[Event] | None = None
        """The messages that stand before this stream, for a client that asks for them."""

    def write(self, part: Part) -> Iterator[Event]:
        """Yield the events of a part; the first is `RUN_STARTED`."""
        if not self._has_started:
            self._has_started = True
            yield {"type": "RUN_STARTED", **self._ids, "protocolVersion": PROTOCOL_VERSION}
            if self.snapshot is not None:
                yield {"type": "MESSAGES_SNAPSHOT", "messages": self.snapshot}
        yield from self._write(part)

    @property
    def _message_id(self) -> str:
        return f"{self._run_id}#{self._round}" if self._round else self._run_id

    def _write(self, part: Part) -> Iterator[Event]:
        match part:
            case RoundStart(number):
                self._round = number
            case BlockStart("thought", number):
                thought = self._thought_id(number)
                yield {"type": "REASONING_START", "messageId": thought}
                yield {"type": "REASONING_MESSAGE_START", "messageId": thought, "role": "reasoning"}
            case BlockPiece("thought", number, text):
                yield {"type": "REASONING_MESSAGE_CONTENT", "messageId": self._thought_id(number), "delta": text}
            case BlockEnd("thought", number):
                yield {"type": "REASONING_MESSAGE_END", "messageId": self._thought_id(number)}
                yield {"type": "REASONING_END", "messageId": self._thought_id(number)}
            case BlockStart():
                yield {"type": "TEXT_MESSAGE_START", "messageId": self._message_id, "role": "assistant"}
            case BlockPiece(_, _, text):
                yield {"type": "TEXT_MESSAGE_CONTENT", "messageId": self._message_id, "delta": text}
            case BlockEnd():
                yield {"type": "TEXT_MESSAGE_END", "messageId": self._message_id}
            case HandedOver(source, target):
                yield {"type": "CUSTOM", "name": "handed_over", "value": {"source": source, "target": target}}
            case CallStart(call_id, name):
                parent = {"parentMessageId": self._message_id}
                yield {"type": "TOOL_CALL_START", "toolCallId": call_id, "toolCallName": name, **parent}
            case CallPiece(call_id, text):
                yield {"type": "TOOL_CALL_ARGS", "toolCallId": call_id, "delta": text}
            case CallReady(call_id):
                yield {"type": "TOOL_CALL_END", "toolCallId": call_id}
            case CallEnd(call_id, _, text):
                if call_id not in self.known_results:
                    yield _write_result(call_id, text)
            case BrokenCall(call_id, _, _, text):
                yield {"type": "TOOL_CALL_END", "toolCallId": call_id}
                yield _write_result(call_id, text)
            case CallProgress(call_id, name, done, total, text):
                value = {"toolCallId": call_id, "toolName": name, "done": done, "total": total, "message": text}
                yield {"type": "CUSTOM", "name": "tool_progress", "value": value}
            case Sources(passages):
                yield {"type": "CUSTOM", "name": "sources", "value": [*_write_sources(passages)]}
            case AddedMessage(message, by):
                yield {"type": "CUSTOM", "name": "told", "value": {"text": message.text, "by": by}}
            case ServiceStart():
                yield from self._start_service(part)
            case ServiceText(service_id, number, text) if service_id in self._services:
                said = {"messageId": f"{service_id}#{number}", "subagentRunId": service_id}
                yield {"type": "TEXT_MESSAGE_START", "role": "assistant", **said}
                yield {"type": "TEXT_MESSAGE_CONTENT", "delta": text, **said}
                yield {"type": "TEXT_MESSAGE_END", **said}
            case ServiceEnd(service_id, error) if service_id in self._services:
                about = {"outcome": {"type": "success"}} if error is None else {"message": error}
                yield self._end_service(service_id, "FINISHED" if error is None else "ERROR", about)
            case BeanValues(values):
                yield {"type": "STATE_SNAPSHOT", "snapshot": values}
            case Waits(pending):
                outcome = self._write_pending(pending)
                yield from self._suspend_services([each["id"] for each in outcome.get("interrupts", ())])
                yield {"type": "RUN_FINISHED", **self._ids, "outcome": outcome}
            case Completed(usage):
                counted = {} if usage is None else {"usage": [_write_usage(usage)]}
                yield {"type": "RUN_FINISHED", **self._ids, "outcome": {"type": "success"}, **counted}
            case Stopped():
                yield {"type": "RUN_FINISHED", **self._ids, "outcome": {"type": "cancelled"}}
            case Broken(text, code):
                yield {"type": "RUN_ERROR", "message": text, "code": code}
            case RoundEnd() | ServiceText() | ServiceEnd():
                pass  # the start of the next round ends it; a service that the client does not have
            case _:
                assert_never(part)

    def _start_service(self, start: ServiceStart) -> Iterator[Event]:
        # Clients refuse an id that is used twice, and a parent that they do not know.
        if start.id in self._services or start.id in self._ended_services:
            return
        self._services.append(start.id)
        known = {*self._services, *self._ended_services}
        parents = {"parentSubagentRunId": start.parent_id} if start.parent_id in known else {}
        if start.call_id:
            parents["parentToolCallId"] = start.call_id
        if not start.parent_id:
            parents["parentMessageId"] = self._message_id
        yield {"type": "SUBAGENT_STARTED", "subagentRunId": start.id, "name": start.service, **parents}

    def _suspend_services(self, interrupts: Sequence[str]) -> Iterator[Event]:
        """End the services that wait, the innermost first, each with the interrupts of the calls that it made."""
        for service_id in self._services[::-1]:
            own = [each for each in interrupts if _service_of(each) == service_id]
            outcome = {"type": "suspended", "interruptIds": own}
            yield self._end_service(service_id, "FINISHED", {"outcome": outcome})

    def _end_service(self, service_id: str, how: str, about: Event) -> Event:
        self._services.remove(service_id)
        self._ended_services.add(service_id)
        return {"type": f"SUBAGENT_{how}", "subagentRunId": service_id, **about}

    def _thought_id(self, number: int) -> str:
        return f"{self._run_id}#thought{number}"

    def _write_pending(self, pending: Mapping[str, PendingCall]) -> Event:
        """Return how a run ends that waits: for persons, or only for results of the client's tools."""
        waiting = {each: call for each, call in pending.items() if not waits_for_client(call, self._client_tools)}
        if not waiting:
            return {"type": "success", "pendingToolCallIds": [*pending]}
        interrupts = [_write_interrupt(each, call) for each, call in waiting.items()]
        for each in interrupts:
            if (service_id := _service_of(each["id"])) in self._services:
                each["subagentRunId"] = service_id
        return {"type": "interrupt", "interrupts": interrupts}


def _service_of(call_id: str) -> str:
    """Return the id of the service within that has made a call; an empty text for a call of the answer itself."""
    return call_id.rpartition("/")[0]


def _write_result(call_id: str, text: str) -> Event:
    message = {"messageId": f"{call_id}#result", "role": "tool", "content": text}
    return {"type": "TOOL_CALL_RESULT", "toolCallId": call_id, **message}


def _write_interrupt(call_id: str, call: PendingCall) -> Event:
    is_approval = call.kind == "approval"
    asked = f"Approve {call.tool_name}?" if is_approval else f"{call.tool_name} waits for an answer."
    return {
        "id": call_id,
        "reason": "tool_call" if is_approval else "input_required",
        "message": call.reason or asked,
        "toolCallId": call_id,
        "responseSchema": _make_approval_schema(call) if is_approval else _find_schema(call),
        **({} if call.expires_at is None else {"expiresAt": call.expires_at.isoformat()}),
    }


def _make_approval_schema(call: PendingCall) -> Mapping[str, Any]:
    if not call.may_remember:
        return APPROVAL_SCHEMA
    return {**APPROVAL_SCHEMA, "properties": {**APPROVAL_SCHEMA["properties"], "remember": REMEMBER_SCHEMA}}


def _write_sources(passages: Iterable[Passage]) -> Iterator[Event]:
    for number, each in enumerate(passages, 1):
        about = {"title": each.title, "source": each.source}
        yield {"sourceId": str(number), **{name: value for name, value in about.items() if value is not None}}


def _find_schema(call: PendingCall) -> Mapping[str, Any]:
    """Return the schema of the answer to a question of a server; one that admits everything for all other calls."""
    requests = call.attributes.get("requests")
    asked = [*requests.values()] if isinstance(requests, Mapping) else []
    schema = asked[0].get("schema") if len(asked) == 1 and isinstance(asked[0], Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _write_usage(usage: TokenUsage) -> dict[str, int]:
    return {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_tokens,
        "reasoningTokens": usage.reasoning_tokens,
        "cachedInputTokens": usage.cached_input_tokens,
        "cacheWriteInputTokens": usage.cache_write_tokens,
    }


# --- the messages of a conversation


async def history(room: Conversation) -> list[Event]:
    """Return the messages of a conversation as an AG-UI client has them, for its messages when a page loads.

        return await ag_ui.history(conversations.of(Desk, room))

    Those of the log, and of runs that have not ended: the question, and if the run waits, the answer with its calls.
    The answer of a run that goes on, and the interrupts of one that waits, come from `respond`. Raises
    `ConversationNotFoundError` if the conversation is another's.
    """
    return shown_messages(_write_messages(await read_room(room, running=False)))


def _write_messages(shown: Iterable[ShownMessage]) -> list[Event]:
    messages: list[Event] = []
    for each in shown:
        if each.user is not None:
            messages.append({"id": each.id, "role": "user", "content": _write_contents(each.user.contents)})
            continue
        writer, reading = EventWriter(each.base, {}, ()), MessagesReading(messages)
        for part in each.parts:
            if isinstance(part, AddedMessage):
                message_id = part.entry_id or f"{each.id}#added{len(messages)}"
                messages.append({"id": message_id, "role": "user", "content": _write_contents(part.message.contents)})
            for event in writer.write(part):
                reading.take(event)
    return messages


def _write_contents(contents: Sequence[Content]) -> Any:
    return [*map(_write_content, contents)] if media_in(contents) else joined_text(contents)


def _write_content(content: Content) -> Event:
    match content:
        case TextContent():
            return {"type": "text", "text": content.text}
        case ImageContent():
            kind = "image"
        case AudioContent():
            kind = "audio"
        case PdfContent():
            kind = "document"
        case _:
            assert_never(content)
    value, media_type = base64_of(content), media_type_of(content)
    if value is None:
        return {"type": kind, "source": {"type": "url", "value": url_of(content), "mimeType": media_type}}
    return {"type": kind, "source": {"type": "data", "value": value, "mimeType": media_type}}


class MessagesReading:
    """Adds the messages that a client makes of the events of an answer to `messages`."""

    def __init__(self, messages: list[Event]) -> None:
        self._messages = messages
        self._by_id: dict[str, Event] = {}
        self._calls: dict[str, Event] = {}

    def take(self, event: Event) -> None:
        """Change the messages as an event says."""
        match event["type"]:
            case "TEXT_MESSAGE_START" | "REASONING_MESSAGE_START":
                within = {key: event[key] for key in ("subagentRunId",) if key in event}
                self._message(event["messageId"], event["role"]).update(content="", **within)
            case "TEXT_MESSAGE_CONTENT" | "REASONING_MESSAGE_CONTENT":
                self._by_id[event["messageId"]]["content"] += event["delta"]
            case "TOOL_CALL_START":
                function = {"name": event["toolCallName"], "arguments": ""}
                self._calls[event["toolCallId"]] = function
                call = {"id": event["toolCallId"], "type": "function", "function": function}
                self._message(event["parentMessageId"], "assistant").setdefault("toolCalls", []).append(call)
            case "TOOL_CALL_ARGS":
                self._calls[event["toolCallId"]]["arguments"] += event["delta"]
            case "TOOL_CALL_RESULT":
                result = {"toolCallId": event["toolCallId"], "content": event["content"]}
                self._messages.append({"id": event["messageId"], "role": "tool", **result})

    def _message(self, message_id: str, role: str) -> Event:
        if message_id not in self._by_id:
            self._by_id[message_id] = {"id": message_id, "role": role}
            self._messages.append(self._by_id[message_id])
        return self._by_id[message_id]


# --- endpoints


async def respond(
    runs: Runs,
    method: Callable[..., Any],
    body: RunInput,
    *,
    arguments: Mapping[str, Any] | None = None,
    client_tools: Collection[str] = (),
    while_waiting: WhileWaiting = "reject",
    state: Collection[type[Any]] = (),
) -> Response:
    """Return the stream that answers a request of an AG-UI client: of a new message, or of answers to interrupts.

        @app.post("/agui")
        async def agui(body: ag_ui.RunInput, runs: Inject[Runs]) -> Response:
            return await ag_ui.respond(runs, Desk.chat, body)

    `method` is one that `runs.start` takes. Its memory id is the thread, its user message the last message, and a
    `RunId` is a new one; `arguments` are all others, by name. The run goes on when the client leaves; a body without a
    new message and without answers gets its stream again.

    `client_tools` are the names of tools that the client may offer and runs; with others, the response is 422. A call
    of one suspends the run until the client sends its result.

    With `while_waiting="reject"`, a new message while calls wait rejects those that this person may answer, unless the
    body answers them, and is added to the run; with `"refuse"`, and while others have to answer, the response is 409.

    `state` are conversation-scoped classes. Their values are sent as `STATE_SNAPSHOT`, such as `{"Reservation": {…}}`:
    at the start of each stream, and after each round that has changed one.

    What is found before the first byte is an HTTP problem: 422 for a body that cannot be read, 404 for another's
    conversation or run, 409 while calls wait, and with `"code": "not_pending"` for an answer to a call that has never
    waited. Raises the errors of `runs.start`, and `TypeError` for a method without a user message.
    """
    try:
        chat = await Chat.open(runs, method, body.thread_id, client_tools)
        offered = _read_tools(body.tools or ())
        chat.check_offered(offered)
        replies = [*_read_replies(body)]
        if (new := await _find_new(chat, body)) is not None:
            said = NewMessage(*new, arguments or {}, offered, while_waiting)
            found: StreamPlace | Response | None = await chat.say(said, replies)
        else:
            found = await chat.answer(replies)
        if isinstance(found, Response):
            return found
        snapshot = None
        if found is None:
            found, snapshot = await _find_stream(chat)
        return _stream(chat, found, body, state, snapshot)
    except RefusedError as error:
        return error.response()


async def _find_new(chat: Chat, body: RunInput) -> tuple[UserMessage, str | None] | None:
    """Return the new message of the user, the one that stands last, and its id.

    It is a known one in the body of a page that was loaded again, or has lost its connection, while its answer is under
    way, and it may be one beside a resume.
    """
    last = body.messages[-1] if body.messages else None
    if last is None or last.role != "user":
        return None
    written = _read_user_message(last)
    if not body.resume:
        return None if await chat.is_under_way(written, last.id) else (written, last.id)
    if chat.room is None:
        return None
    try:
        shown = await read_room(chat.room)
    except ConversationNotFoundError:  # who may answer calls of others may not write in their conversations
        return None
    is_known = any(each.id == last.id and each.user == written for each in shown)
    return None if is_known else (written, last.id)


async def _find_stream(chat: Chat) -> tuple[StreamPlace, list[Event]]:
    """Return the newest answer that is not complete yet, and the messages before it."""
    run = await chat.find_open_run()
    if run is None:
        raise invalid("The body has neither a new message nor answers, and no answer is under way.")
    shown = [] if chat.room is None else await read_room(chat.room)
    place = await find_newest_answer(chat.runs, run.id)
    sent = answer_id(run.id, place.answer)
    shown = [each for each in shown if each.user is not None or each.id != sent]
    return place, _write_messages(shown)


async def stop(runs: Runs, method: Callable[..., Any], room: Any) -> bool:
    """Stop the answer that is under way in a conversation, also one that waits. Return False if there is none.

    It is what `Conversation.stop` does, as the identity of the request: also for a call that is not a run. The stream
    ends with the outcome `cancelled`. Raises `ConversationNotFoundError` if the conversation is another's.
    """
    return await stop_chat(runs, method, room)


def _stream(
    chat: Chat, place: StreamPlace, body: RunInput, state: Collection[type[Any]], snapshot: list[Event] | None
) -> Response:
    writer = EventWriter(place.run_id, {"threadId": body.thread_id, "runId": body.run_id}, chat.client_tools)
    writer.snapshot = snapshot
    if snapshot is None:
        writer.known_results = frozenset(each.tool_call_id for each in body.messages if each.role == "tool")
    parts = chat.follow(place)
    return PartStream(with_state(chat.runs, place.run_id, parts, state) if state else parts, writer, {})
