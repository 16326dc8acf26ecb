"""The protocol of Vercel's `useChat` (AI SDK 6 and 7): `ChatBody`, `respond`, `reconnect` and `stop`.

Not here: reading the events of a run, and the chats to which runs belong (`front_ends`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from toolbox.chat import FinishReason, PendingCall, TokenUsage, UserMessage
from toolbox.contents import Content, TextContent
from toolbox.runs import run_answers
from toolbox.runs.run_answers import Answer
from toolbox.runs.runs_bean import Runs
from toolbox.service_events import HandedOver

from .front_ends.bodies import MAX_MESSAGES, MAX_PARTS, ChatId, Short, make_message, read_media, read_text, read_value
from .front_ends.chats import Chat, ClientReply, RefusedError, StreamPlace, invalid, shown_value
from .front_ends.part_streams import PartStream
from .front_ends.run_reading import find_passed, follow_run
from .front_ends.stream_parts import (
    BlockEnd,
    BlockPiece,
    BlockStart,
    Broken,
    CallEnd,
    CallPiece,
    CallProgress,
    CallReady,
    CallStart,
    Completed,
    Part,
    RoundEnd,
    RoundStart,
    Stopped,
    Waits,
)

__all__ = ["ChatBody", "ChatMessage", "reconnect", "respond", "stop"]

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

    model_config = ConfigDict(extra="ignore", strict=True)

    id: Annotated[str, Short] | None = None
    role: Annotated[str, Field(max_length=50)]
    parts: Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] = Field(default_factory=list)


class ChatBody(BaseModel):
    """The body that `useChat` posts: with all `messages`, or with the last one alone as `message`.

    The conversation of the service is what counts. Of the client's messages, only the last one is read, or the one with
    answers to pending calls.
    """

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)

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
        known: list[ChatMessage] = [*(self.messages or ()), *([self.message] if self.message is not None else ())]
        named = (each for each in known if each.id == self.message_id and each.role == "assistant")
        last = known[-1]
        return last if self.message_id is None else next(named, last)


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

    def __init__(self, message_id: str, chat: Chat, *, continues: bool = False) -> None:
        self._message_id, self._chat, self._continues = message_id, chat, continues
        self._has_started = self._is_in_step = False

    def write(self, part: Part) -> Iterator[Chunk]:
        """Yield the chunks of a part; the first is `start`."""
        if not self._has_started:
            self._has_started = True
            yield {"type": "start", "messageId": self._message_id}
        yield from self._write(part)

    def _write(self, part: Part) -> Iterator[Chunk]:
        match part:
            case RoundStart():
                self._is_in_step = True
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
                yield from self._write_result(part)
            case CallProgress(call_id, name, done, total, message):
                data = {"toolCallId": call_id, "toolName": name, "done": done, "total": total, "message": message}
                yield {"type": "data-tool-progress", "id": call_id, "data": data}
            case Waits(pending):
                for call_id, call in pending.items():
                    yield from self._write_pending(call_id, call)
                yield from self._end_step()
                yield {"type": "finish", "finishReason": "tool-calls"}
            case Completed(usage, reason):
                known = {"finishReason": "other" if reason is None else _REASONS.get(reason, "other")}
                metadata = {} if usage is None else {"messageMetadata": {"usage": _write_usage(usage)}}
                yield {"type": "finish", **known, **metadata}
            case Stopped(reason):
                yield {"type": "abort"} if reason is None else {"type": "abort", "reason": reason}
            case Broken(problem):
                yield {"type": "error", "errorText": str(problem.get("detail") or problem["title"])}

    def _end_step(self) -> Iterator[Chunk]:
        if self._is_in_step:  # else the client has got its beginning in an earlier stream
            self._is_in_step = False
            yield {"type": "finish-step"}

    def _write_result(self, end: CallEnd) -> Iterator[Chunk]:
        match end.outcome:
            case "denied":
                if not self._continues:  # the client of the stream that asked knows the request
                    yield {"type": "tool-approval-request", "toolCallId": end.id, "approvalId": end.id}
                yield {"type": "tool-output-denied", "toolCallId": end.id}
            case "error":
                yield {"type": "tool-output-error", "toolCallId": end.id, "errorText": end.text}
            case _:
                value = None if end.execution is None else shown_value(end.execution)
                yield {"type": "tool-output-available", "toolCallId": end.id, "output": value}

    def _write_pending(self, call_id: str, call: PendingCall) -> Iterator[Chunk]:
        if call.kind == "approval":
            reason = {} if call.reason is None else {"reason": call.reason}  # AI SDK 6 ignores it
            yield {"type": "tool-approval-request", "toolCallId": call_id, "approvalId": call_id, **reason}
        elif not self._chat.waits_for_client(call):
            data = {"toolCallId": call_id, "toolName": call.tool_name, "kind": call.kind, "reason": call.reason}
            yield {"type": "data-pending-call", "id": call_id, "data": data}


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


# --- endpoints


async def respond(
    runs: Runs,
    method: Callable[..., Any],
    body: ChatBody,
    *,
    arguments: Mapping[str, Any] | None = None,
    client_tools: Collection[str] = (),
) -> Response:
    """Return the stream that answers a request of `useChat`: of a new message, or of answers to pending calls.

        @app.post("/api/chat")
        async def chat(body: vercel_ai.ChatBody, runs: Inject[Runs]) -> Response:
            return await vercel_ai.respond(runs, Desk.chat, body)

    `method` is one that `runs.start` takes. Its memory id is the id of the chat, its user message the last message, and
    a `RunId` is a new one; `arguments` are all others, by name. The run goes on when the client leaves; `reconnect`
    sends its stream again.

    `client_tools` are the names of deferred tools whose results the client sends. Results of other tools are not read.

    What is found before the first byte is an HTTP problem: 422 for a message that cannot be read, 404 for another's
    conversation or run, 409 while calls wait, and with `"code": "not_pending"` for an answer to a call that has never
    waited. Raises the errors of `runs.start`, and `TypeError` for a method without a user message.
    """
    try:
        chat = await Chat.open(runs, method, body.id, client_tools)
        message = body.find_message()
        if message.role == "assistant":
            found = await chat.answer([*_read_replies(message)])
            if found is None:
                raise invalid("The last message has no answer to a pending call.")
            if isinstance(found, Response):
                return found
            return _stream(chat, found, message.id or found.run_id, continues=True)
        if message.role != "user":
            raise invalid(f"The last message has the role {message.role!r}; expected user.")
        if body.message_id is not None or body.trigger == "regenerate-message":
            raise RefusedError(409, "The conversation has no message with this id.")
        position = await chat.start(_read_user_message(message), arguments or {})
        return _stream(chat, position, position.run_id)
    except RefusedError as error:
        return error.response()


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
        return _stream(chat, StreamPlace(run.id, 0, await find_passed(runs, run.id)), run.id)
    except RefusedError as error:
        return error.response()


async def stop(runs: Runs, method: Callable[..., Any], room: Any) -> bool:
    """Stop the answer that is not complete yet, also one that waits. Return False if there is none.

    Its stream ends with `abort`. Raises `RunNotFoundError` if it is another's.
    """
    return await (await Chat.open(runs, method, room)).stop()


def _stream(chat: Chat, position: StreamPlace, message_id: str, *, continues: bool = False) -> Response:
    parts = follow_run(
        chat.runs, position.run_id, after=position.after, passed=position.passed, holds_text=chat.holds_text
    )
    return PartStream(parts, ChunkWriter(message_id, chat, continues=continues), HEADERS)
