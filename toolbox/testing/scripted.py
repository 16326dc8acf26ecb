"""`ScriptedChatModel`, a model that follows a script, and `tool_call`, which writes the tool calls of a script.

Not here: a model that answers by rules (`demo`), assertions on requests and calls (`assertions`).
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
    id: str | None = None,  # noqa: A002 - public name
) -> ToolExecutionRequest:
    """Return a request to call the tool `name`, for a script or an assertion.

    `arguments` is a mapping, or the JSON text itself (also invalid JSON). Without `id`, an id is generated.
    """
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False, default=str)
    return ToolExecutionRequest(id if id is not None else f"call_{next(_numbers)}", name, arguments)


class ScriptedChatModel:
    """Answers each request with the next reply of a script, and keeps the requests in `requests`.

        model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "The sum is 3."])
        container = Container(models={"default": model})

    A reply is a `str`, an `AiMessage`, a `ChatResponse`, one `tool_call(…)`, an exception to raise, or a function that
    takes the request and returns (or awaits) any of these. The model raises `AssertionError` when the script has no
    more replies.
    """

    def __init__(self, replies: Iterable[Reply] = (), *, supports_response_format: bool = False) -> None:
        self._replies: Iterator[Reply] = iter([replies] if isinstance(replies, str) else replies)
        self.supports_response_format = supports_response_format
        self.requests: list[ChatRequest] = []

    def will_reply(self, *replies: Reply) -> None:
        """Add replies to the end of the script."""
        self._replies = itertools.chain(self._replies, replies)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next reply. Raises `AssertionError` if there is none."""
        self.requests.append(request)
        for reply in self._replies:
            return await _response(reply, request)
        raise AssertionError(
            f"no scripted reply for request {len(self.requests)}, which ends with {request.messages[-1:]!r}; "
            "add a reply with will_reply(…)"
        )

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the next reply as stream events, word by word."""
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
    expected = "a str, AiMessage, ChatResponse, tool_call(…), exception or function"
    raise AssertionError(f"invalid scripted reply {reply!r}; expected {expected}")
