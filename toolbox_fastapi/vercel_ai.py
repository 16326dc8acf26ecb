"""The protocol of Vercel's `useChat` (AI SDK 6 and 7): `ChatBody`, `respond`, `reconnect` and `stop`.

Not here: reading the events of a run, and the chats to which runs belong (`front_ends`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from toolbox.chat import FinishReason, PendingCall, TokenUsage, UserMessage
from toolbox.contents import AudioContent, Content, ImageContent, PdfContent, TextContent, media_type_of, url_of
from toolbox.conversations.conversations_bean import Conversation
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
    shown_value,
    stop_chat,
    waits_for_client,
)
from .front_ends.going_back import find_question, go_back, unknown_message
from .front_ends.part_streams import PartStream
from .front_ends.room_reading import ShownMessage, read_room
from .front_ends.run_reading import answer_id
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

__all__ = ["ChatBody", "ChatMessage", "history", "reconnect", "respond", "stop"]

Chunk = dict[str, Any]

HEADERS = {"x-vercel-ai-ui-message-stream": "v1"}

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_EXECUTION: "tool-calls",
    FinishReason.CONTENT_FILTER: "content-filter",
}
_BLOCKS = {"text": "text", "thought": "reasoning"}


# --- what the client sends


class ChatMessage(BaseModel):
    """A message of the client. Its parts are read only where they count."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Short] | None = None
    role: Annotated[str, Field(max_length=50)]
    parts: Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] = Field(default_factory=list)


class ChatBody(ClientBody):
    """The body that `useChat` posts: with all `messages`, or with the last one alone as `message`.

    The conversation of the service is what counts. Of the client's messages, only the last one is read, or the one with
    answers to pending calls.
    """

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    id: ChatId
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    message: ChatMessage | None = None
    trigger: Literal["submit-message", "regenerate-message"] = "submit-message"
    message_id: Annotated[str, Short] | None = Field(None, alias="messageId")

    @model_validator(mode="after")
    def _require_message(self) -> ChatBody:
        if self.messages is None and self.message is None:
            raise ValueError("messages is missing, and so is message")
        return self

    def find_message(self) -> ChatMessage:
        """Return the message that `message_id` names if it is the assistant's, else the last one."""
        known = _posted_messages(self)
        named = (each for each in known if each.id == self.message_id and each.role == "assistant")
        last = known[-1]
        return last if self.message_id is None else next(named, last)


def _posted_messages(body: ChatBody) -> list[ChatMessage]:
    return [*(body.messages or ()), *([body.message] if body.message is not None else ())]


def _read_user_message(message: ChatMessage) -> UserMessage:
    contents: list[Content] = []
    for each in message.parts:
        match each.get("type"):
            case "text":
                contents.append(TextContent(read_text(each.get("text"))))
            case "file":
                name = each.get("filename")
                file = read_media(each.get("mediaType"), each.get("url"), name if isinstance(name, str) else None)
                contents.append(file)
            case other:
                raise invalid(f"A user message cannot have a part of the type {str(other)[:50]!r}.")
    return make_message(contents)


def _read_replies(message: ChatMessage) -> Iterator[ClientReply]:
    """Yield the answers and results in the parts of an assistant's message. Raises `RefusedError`."""
    for each in message.parts:
        kind, call_id = each.get("type"), each.get("toolCallId")
        if not isinstance(kind, str) or not (kind.startswith("tool-") or kind == "dynamic-tool"):
            continue
        match each.get("state"):
            case "approval-requested" if isinstance(call_id, str):
                yield ClientReply(call_id, None)
            case "approval-responded":
                yield _read_approval(each.get("approval"))
            case "output-available" if isinstance(call_id, str):
                yield _result(call_id, run_answers.respond(read_value(each.get("output"))))
            case "output-error" if isinstance(call_id, str):
                text = each.get("errorText")
                yield _result(call_id, run_answers.fail(text) if isinstance(text, str) else run_answers.fail())


def _read_approval(given: Any) -> ClientReply:
    approval: Mapping[str, Any] = given if isinstance(given, dict) else {}
    call_id, approved, reason = approval.get("id"), approval.get("approved"), approval.get("reason")
    if not isinstance(call_id, str) or not isinstance(approved, bool) or not isinstance(reason, str | None):
        raise invalid("An answer to an approval needs an id, and approved.")
    refused = run_answers.reject() if reason is None else run_answers.reject(reason)
    answer = run_answers.approve() if approved else refused

    def answer_approval(call: PendingCall) -> Answer | None:
        return answer if call.kind == "approval" else None

    return ClientReply(call_id, answer_approval)


def _result(call_id: str, answer: Answer) -> ClientReply:
    return ClientReply(call_id, lambda _: answer, is_result=True)


# --- what the client gets


class ChunkWriter:
    """Writes the parts of an answer as chunks that AI SDK 6 and 7 both know. Other facts are parts of type `data-…`.

    `message_id` is the id of the message of this answer. With `continues`, the client has its beginning.
    """

    last = b"data: [DONE]\n\n"

    def __init__(self, message_id: str, client_tools: Collection[str], *, continues: bool = False) -> None:
        self._message_id, self._client_tools, self._continues = message_id, client_tools, continues
        self._has_started = self._is_in_step = self._has_results = False
        self._services: dict[str, dict[str, str]] = {}  # that work now, and what the client has of them

    def write(self, part: Part) -> Iterator[Chunk]:
        """Yield the chunks of a part; the first is `start`."""
        if not self._has_started:
            self._has_started = True
            yield {"type": "start", "messageId": self._message_id}
        yield from self._write(part)

    def _write(self, part: Part) -> Iterator[Chunk]:
        match part:
            case RoundStart():
                self._is_in_step, self._has_results = True, False
                yield {"type": "start-step"}
            case RoundEnd():
                yield from self._end_step()
            case BlockStart(kind, number):
                yield {"type": f"{_BLOCKS[kind]}-start", "id": str(number)}
            case BlockPiece(kind, number, text):
                yield {"type": f"{_BLOCKS[kind]}-delta", "id": str(number), "delta": text}
            case BlockEnd(kind, number):
                yield {"type": f"{_BLOCKS[kind]}-end", "id": str(number)}
            case HandedOver(source, target):
                yield {"type": "data-handed-over", "data": {"source": source, "target": target}}
            case CallStart(call_id, name):
                yield {"type": "tool-input-start", "toolCallId": call_id, "toolName": name}
            case CallPiece(call_id, text):
                yield {"type": "tool-input-delta", "toolCallId": call_id, "inputTextDelta": text}
            case CallReady(call_id, name, arguments):
                given = _read_arguments(arguments)
                yield {"type": "tool-input-available", "toolCallId": call_id, "toolName": name, "input": given}
            case CallEnd():
                self._has_results = True
                yield from self._write_result(part)
            case BrokenCall(call_id, name, arguments, text):
                about = {"toolCallId": call_id, "toolName": name}
                yield {"type": "tool-input-error", **about, "input": arguments, "errorText": text}
            case ServiceStart(service_id, service, call_id, parent_id):
                parent = {"parentId": parent_id} if parent_id else {}
                yield self._write_service(service_id, toolCallId=call_id, service=service, **parent, state="running")
            case ServiceText(service_id, _, text) if service_id in self._services:
                yield self._write_service(service_id, text=text)
            case ServiceEnd(service_id, error) if service_id in self._services:
                yield self._write_service(service_id, state="finished" if error is None else "error")
                del self._services[service_id]
            case CallProgress(call_id, name, done, total, message):
                data = {"toolCallId": call_id, "toolName": name, "done": done, "total": total, "message": message}
                yield {"type": "data-tool-progress", "id": call_id, "data": data}
            case Sources(passages):
                for number, passage in enumerate(passages, 1):
                    yield _write_source(str(number), passage)
            case AddedMessage(message, by):
                data = {"text": message.text, "by": by}
                yield {"type": "data-told", "data": data}
            case Waits(pending):
                for call_id, call in pending.items():
                    yield from self._write_pending(call_id, call)
                for service_id in self._services:
                    yield self._write_service(service_id, state="suspended")
                yield from self._end_step()
                yield {"type": "finish", "finishReason": "tool-calls"}
            case Completed(usage, reason):
                yield from self._end_with_step()
                known = {"finishReason": "other" if reason is None else _REASONS.get(reason, "other")}
                metadata = {} if usage is None else {"messageMetadata": {"usage": _write_usage(usage)}}
                yield {"type": "finish", **known, **metadata}
            case Stopped(reason):
                yield from self._end_with_step()
                yield {"type": "abort"} if reason is None else {"type": "abort", "reason": reason}
            case Broken(text):
                yield {"type": "error", "errorText": text}
            case BeanValues() | ServiceText() | ServiceEnd():
                pass  # a chat of this protocol has no state; a service that the client does not have
            case _:
                assert_never(part)

    def _write_service(self, service_id: str, **changes: str) -> Chunk:
        """Return the part of a service with these changes: a client replaces the whole part."""
        data = self._services[service_id] = {**self._services.get(service_id, {}), **changes}
        return {"type": "data-subagent", "id": service_id, "data": data}

    def _end_step(self) -> Iterator[Chunk]:
        if self._is_in_step:  # else the client has got its beginning in an earlier stream
            self._is_in_step = False
            yield {"type": "finish-step"}

    def _end_with_step(self) -> Iterator[Chunk]:
        """End with an empty step if the last one has results: a page that has tools would send them again."""
        if self._has_results and self._client_tools:
            yield {"type": "start-step"}
            yield {"type": "finish-step"}
            # The client shows the step with the next change of the message, so there is one.
            yield {"type": "message-metadata", "messageMetadata": {}}

    def _write_result(self, end: CallEnd) -> Iterator[Chunk]:
        match end.outcome:
            case "denied":
                if not self._continues:  # the client of the stream that asked knows the request
                    yield {"type": "tool-approval-request", "toolCallId": end.id, "approvalId": end.id}
                yield {"type": "tool-output-denied", "toolCallId": end.id}
            case "error":
                yield {"type": "tool-output-error", "toolCallId": end.id, "errorText": end.text}
            case "result" | "unknown":
                value = shown_value(end)
                yield {"type": "tool-output-available", "toolCallId": end.id, "output": value}

    def _write_pending(self, call_id: str, call: PendingCall) -> Iterator[Chunk]:
        if call.kind == "approval":
            reason = {} if call.reason is None else {"reason": call.reason}  # AI SDK 6 ignores it
            yield {"type": "tool-approval-request", "toolCallId": call_id, "approvalId": call_id, **reason}
        elif not waits_for_client(call, self._client_tools):
            data = {"toolCallId": call_id, "toolName": call.tool_name, "kind": call.kind, "reason": call.reason}
            yield {"type": "data-pending-call", "id": call_id, "data": data}


def _write_source(source_id: str, passage: Passage) -> Chunk:
    title = {} if passage.title is None else {"title": passage.title}
    if passage.source is not None and passage.source.lower().startswith(("http://", "https://")):
        return {"type": "source-url", "sourceId": source_id, "url": passage.source, **title}
    named = {"title": passage.title or passage.source or f"[{source_id}]"}
    file = {} if passage.source is None else {"filename": passage.source}
    return {"type": "source-document", "sourceId": source_id, "mediaType": "text/plain", **named, **file}


def _read_arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # as the model wrote it; the result of the call says what is wrong


def _write_usage(usage: TokenUsage) -> dict[str, int]:
    return {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_tokens,
        "reasoningTokens": usage.reasoning_tokens,
        "cachedInputTokens": usage.cached_input_tokens,
    }


# --- the messages of a conversation


async def history(room: Conversation, *, client_tools: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the messages of a conversation as `useChat` has them, for its `messages` when a page loads.

        return await vercel_ai.history(conversations.of(Desk, room))

    Those of the log, and of runs that have not ended: the question, and if the run waits, the answer with its requests
    for approval. The answer of a run that goes on comes from `reconnect`. `client_tools` are those of `respond`. Raises
    `ConversationNotFoundError` if the conversation is another's.
    """
    return shown_messages([_write_message(each, client_tools) for each in await read_room(room, running=False)])


def _write_message(shown: ShownMessage, client_tools: Collection[str]) -> dict[str, Any]:
    if shown.user is not None:
        return {"id": shown.id, "role": "user", "parts": [_write_content(each) for each in shown.user.contents]}
    writer, message = ChunkWriter(shown.id, client_tools), MessageReading(shown.id)
    for part in shown.parts:
        for chunk in writer.write(part):
            message.take(chunk)
        if isinstance(part, CallEnd) and part.outcome == "denied":
            message.take_reason(part.id, part.text)
    return message.written


def _write_content(content: Content) -> dict[str, Any]:
    match content:
        case TextContent():
            return {"type": "text", "text": content.text}
        case PdfContent():
            name = {} if content.name is None else {"filename": content.name}
            return {"type": "file", "mediaType": media_type_of(content), "url": url_of(content), **name}
        case ImageContent() | AudioContent():
            return {"type": "file", "mediaType": media_type_of(content), "url": url_of(content)}
        case _:
            assert_never(content)


class MessageReading:
    """The message that a client makes of the chunks of an answer: `written`."""

    def __init__(self, message_id: str) -> None:
        self._parts: list[dict[str, Any]] = []
        self._blocks: dict[str, dict[str, Any]] = {}
        self._calls: dict[str, dict[str, Any]] = {}
        self.written: dict[str, Any] = {"id": message_id, "role": "assistant", "parts": self._parts}

    def take(self, chunk: Chunk) -> None:
        """Change the message as a chunk says."""
        match chunk["type"]:
            case "start-step":
                self._parts.append({"type": "step-start"})
            case "text-start" | "reasoning-start" as kind:
                self._blocks[chunk["id"]] = {"type": kind.removesuffix("-start"), "text": ""}
                self._parts.append(self._blocks[chunk["id"]])
            case "text-delta" | "reasoning-delta":
                self._blocks[chunk["id"]]["text"] += chunk["delta"]
            case "tool-input-available":
                call = {"type": f"tool-{chunk['toolName']}", "toolCallId": chunk["toolCallId"]}
                self._calls[chunk["toolCallId"]] = {**call, "state": "input-available", "input": chunk["input"]}
                self._parts.append(self._calls[chunk["toolCallId"]])
            case "tool-approval-request":
                reason = {"requestReason": chunk["reason"]} if "reason" in chunk else {}
                self._change(chunk, state="approval-requested", approval={"id": chunk["approvalId"], **reason})
            case "tool-output-available":
                self._change(chunk, state="output-available", output=chunk["output"])
            case "tool-output-error":
                self._change(chunk, state="output-error", errorText=chunk["errorText"])
            case "tool-output-denied":
                self._change(chunk, state="output-denied", approval={"id": chunk["toolCallId"], "approved": False})
            case "finish" if "messageMetadata" in chunk:
                self.written["metadata"] = chunk["messageMetadata"]
            case kind if kind.startswith("source-"):
                self._parts.append(chunk)
            case kind if kind.startswith("data-"):
                self._take_data(chunk)

    def take_reason(self, call_id: str, reason: str) -> None:
        """Add why a person has rejected a call: the client knows it, and no chunk has it."""
        if reason and call_id in self._calls:
            self._calls[call_id]["approval"]["reason"] = reason

    def _change(self, chunk: Chunk, **changes: Any) -> None:
        if (call := self._calls.get(chunk["toolCallId"])) is not None:
            call |= changes

    def _take_data(self, chunk: Chunk) -> None:
        """Replace the part with the same id, or add one."""
        named = (each for each in self._parts if each["type"] == chunk["type"] and "id" in chunk)
        known = next((each for each in named if each.get("id") == chunk["id"]), None)
        if known is None:
            self._parts.append(dict(chunk))
        else:
            known["data"] = chunk["data"]


# --- endpoints


async def respond(
    runs: Runs,
    method: Callable[..., Any],
    body: ChatBody,
    *,
    arguments: Mapping[str, Any] | None = None,
    client_tools: Collection[str] = (),
    while_waiting: WhileWaiting = "reject",
) -> Response:
    """Return the stream that answers a request of `useChat`: of a new message, or of answers to pending calls.

        @app.post("/api/chat")
        async def chat(body: vercel_ai.ChatBody, runs: Inject[Runs]) -> Response:
            return await vercel_ai.respond(runs, Desk.chat, body)

    `method` is one that `runs.start` takes. Its memory id is the id of the chat, its user message the last message, and
    a `RunId` is a new one; `arguments` are all others, by name. The run goes on when the client leaves; `reconnect`
    sends its stream again.

    `client_tools` are the names of deferred tools whose results the client sends. Results of other tools are not read.

    A message that replaces an earlier one, and one that is answered again, go back to before it: what was said since
    then is hidden. With `while_waiting="reject"`, a new message while calls wait rejects those that this person may
    answer, and is added to the run; with `"refuse"`, and while others have to answer, the response is 409.

    What is found before the first byte is an HTTP problem: 422 for a message that cannot be read, 404 for another's
    conversation or run, 409 for unknown messages and while calls wait, and with `"code": "not_pending"` for an answer
    to a call that has never waited. Raises the errors of `runs.start`, and `TypeError` for a method without a user
    message.
    """
    try:
        chat = await Chat.open(runs, method, body.id, client_tools)
        message = body.find_message()
        if body.trigger == "regenerate-message":
            said = await _find_regenerated(chat, body)
        elif message.role == "assistant":
            found = await chat.answer([*_read_replies(message)])
            if found is None:
                raise invalid("The last message has no answer to a pending call.")
            if isinstance(found, Response):
                return found
            return _stream(chat, found, message.id or found.run_id, continues=True)
        else:
            said = await _find_submitted(chat, body, message)
        place = await chat.say(NewMessage(*said, arguments or {}, while_waiting=while_waiting))
        if isinstance(place, Response):
            return place
        return _stream(chat, place, answer_id(place.run_id, place.answer))
    except RefusedError as error:
        return error.response()


async def _find_submitted(chat: Chat, body: ChatBody, message: ChatMessage) -> tuple[UserMessage, str | None]:
    """Return the new message and its id. One that replaces an earlier one goes back to before that."""
    if message.role != "user":
        raise invalid(f"The last message has the role {message.role!r}; expected user.")
    written = _read_user_message(message)
    if body.message_id is None:
        return written, message.id
    if (edited := await find_question(chat, body.message_id, answers=False)) is None:
        raise unknown_message()
    await go_back(chat, edited)
    return written, message.id or body.message_id


async def _find_regenerated(chat: Chat, body: ChatBody) -> tuple[UserMessage, str | None]:
    """Return the message that is to be answered again, and its id, after going back to before it if it is stored."""
    last = next((each for each in reversed(_posted_messages(body)) if each.role == "user"), None)
    wanted = body.message_id
    if wanted is None and last is not None:
        wanted = last.id
    question = await find_question(chat, wanted, answers=True)
    if question is not None and question.user is not None:
        await go_back(chat, question)
        return question.user, question.id
    if body.message_id is not None or chat.keeps_no_log:
        raise unknown_message()
    if last is None:
        raise invalid("There is no message of the user to answer again.")
    return _read_user_message(last), last.id  # its call has failed, and is not in the log


async def reconnect(
    runs: Runs, method: Callable[..., Any], room: Any, *, client_tools: Collection[str] = ()
) -> Response:
    """Return the stream of the answer that is not complete yet, from its beginning; 204 if there is none.

        @app.get("/api/chat/{room}/stream")
        async def reconnect(room: str, runs: Inject[Runs]) -> Response:
            return await vercel_ai.reconnect(runs, Desk.chat, room)

    Also of an answer that waits for answers to its pending calls. 404 if it is another's.
    """
    try:
        chat = await Chat.open(runs, method, room, client_tools)
        run = await chat.find_open_run()
        if run is None:
            return Response(status_code=204)
        place = await find_newest_answer(runs, run.id)
        return _stream(chat, place, answer_id(run.id, place.answer))
    except RefusedError as error:
        return error.response()


async def stop(runs: Runs, method: Callable[..., Any], room: Any) -> bool:
    """Stop the answer that is under way in a conversation, also one that waits. Return False if there is none.

    It is what `Conversation.stop` does, as the identity of the request: also for a call that is not a run. The stream
    ends with `abort`. Raises `ConversationNotFoundError` if the conversation is another's.
    """
    return await stop_chat(runs, method, room)


def _stream(chat: Chat, position: StreamPlace, message_id: str, *, continues: bool = False) -> Response:
    writer = ChunkWriter(message_id, chat.client_tools, continues=continues)
    return PartStream(chat.follow(position), writer, HEADERS)
