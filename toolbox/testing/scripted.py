"""A model that follows a script, and the calls it asks for.

Not here: a model that answers by itself without a network (`demo`), what was asked of it (`assertions`).
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ..chat import AiMessage, ChatRequest, ChatResponse, FinishReason, StreamEvent, ToolExecutionRequest
from ..chat_streams import events_of, words

Reply: TypeAlias = (
    str
    | AiMessage
    | ChatResponse
    | ToolExecutionRequest
    | BaseException
    | type[BaseException]
    | Callable[[ChatRequest], "Reply | Awaitable[Reply]"]
)

_numbers = itertools.count(1)


def tool_call(
    name: str,
    arguments: Mapping[str, Any] | str | None = None,
    *,
    id: str | None = None,  # noqa: A002 - the contract's word
) -> ToolExecutionRequest:
    """A request for tool `name`; `arguments` as an object or as the JSON text itself. Without `id` one is made."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False, default=str)
    return ToolExecutionRequest(id if id is not None else f"call_{next(_numbers)}", name, arguments)


class ScriptedChatModel:
    """A model that gives the replies it was given, one per request, and keeps the requests.

    A reply is a `str`, an `AiMessage`, a `ChatResponse`, one `tool_call(…)`, an exception to raise, or a callable that
    takes the request and returns (or awaits) any of these. Out of replies it raises `AssertionError`.
    """

    def __init__(self, replies: Iterable[Reply] = (), *, supports_response_format: bool = False) -> None:
        self._replies: Iterator[Reply] = iter([replies] if isinstance(replies, str) else replies)
        self.supports_response_format = supports_response_format
        self.requests: list[ChatRequest] = []

    def will_reply(self, *replies: Reply) -> None:
        """Adds replies to the end of the script."""
        self._replies = itertools.chain(self._replies, replies)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """The next reply."""
        self.requests.append(request)
        for reply in self._replies:
            return await _response(reply, request)
        raise AssertionError(
            f"request {len(self.requests)} has no scripted reply; it ends with {request.messages[-1:]!r}; add a reply"
        )

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """The next reply, word by word."""
        for event in events_of(await self.chat(request), words):
            yield event


async def _response(reply: object, request: ChatRequest) -> ChatResponse:
    if isinstance(reply, BaseException) or (isinstance(reply, type) and issubclass(reply, BaseException)):
        raise reply
    if isinstance(reply, ChatResponse):
        return reply
    if isinstance(reply, str):
        reply = AiMessage(reply)
    elif isinstance(reply, ToolExecutionRequest):
        reply = AiMessage(tool_execution_requests=(reply,))
    if isinstance(reply, AiMessage):
        asks = reply.has_tool_execution_requests
        return ChatResponse(reply, finish_reason=FinishReason.TOOL_EXECUTION if asks else FinishReason.STOP)
    if callable(reply):
        made = reply(request)
        return await _response(await made if inspect.isawaitable(made) else made, request)
    raise AssertionError(f"{reply!r} is no reply; give a str, AiMessage, ChatResponse, exception or callable")
