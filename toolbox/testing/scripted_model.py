"""A model that answers with the replies of a test, and what its requests contained.

Not here: the calls in these requests (`call_assertions`).
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ..chat import (
    AiMessage,
    ChatModel,
    ChatRequest,
    ChatResponse,
    FinishReason,
    Message,
    StreamEvent,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from ..chat_streams import events_of, words
from ..context import InvocationContext
from ..errors import EndsInvocation

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


class ScriptError(AssertionError, EndsInvocation):
    """The script of a test does not fit its program.

    It ends the outer calls too. As the failure of a tool it would only be a text that the outer script never reads.
    """


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


class ScriptedChatModel(ChatModel):
    """Answers each request with the next reply of a script, and keeps the requests in `requests`.

        model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), "The sum is 3."])
        container = Container(models={"default": model})

    A mapping has a script for each service, `{Waiter: ["…"], Cook: ["…"]}`, for services that run at the same time: the
    innermost service that asks gets its next reply. `will_reply(…, service=Waiter)` gives a service its own script at
    any time; the others go on with the common one.

    A reply is a `str`, an `AiMessage`, a `ChatResponse`, one `tool_call(…)`, an exception to raise, or a function that
    takes the request and returns (or awaits) any of these. The model raises `AssertionError` when the script has no
    more replies, and for a service without a script. It reaches the test also from a service that is a tool of another.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | Mapping[type[Any], Iterable[Reply]] = (),
        *,
        supports_response_format: bool = False,
    ) -> None:
        scripts: Mapping[Any, Any] = replies if isinstance(replies, Mapping) else {None: replies}
        self._scripts: dict[type[Any] | str | None, Iterator[Reply]] = {
            service: iter([script] if isinstance(script, str) else script) for service, script in scripts.items()
        }
        self.supports_response_format = supports_response_format
        self.requests: list[ChatRequest] = []

    def will_reply(self, *replies: Reply, service: type[Any] | str | None = None) -> None:
        """Add replies to the end of the script, or to that of `service`: a class, or its name with its module.

        Raises `TypeError` without `service` for a model that was created with a script for each service.
        """
        if service is None and None not in self._scripts:
            raise TypeError("will_reply: pass service= with the class of one service")
        if not (service is None or isinstance(service, (type, str))):
            raise TypeError(f"will_reply: invalid service={service!r}; use the class of the service")
        self._scripts[service] = itertools.chain(self._scripts.get(service, ()), replies)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next reply. Raises `AssertionError` if there is none."""
        self.requests.append(request)
        service = self._find_service()
        for reply in self._scripts[service]:
            return await _make_scripted_response(reply, request)
        whose = "" if service is None else f" of {getattr(service, '__name__', service)}"
        raise ScriptError(
            f"no scripted reply for request {len(self.requests)}{whose}, which ends with {request.messages[-1:]!r}; "
            "add a reply with will_reply(…)"
        )

    def _find_service(self) -> type[Any] | str | None:
        """Return the asking service, or one of its bases, if it has a script; None for the common script.

        Raises `AssertionError` without a script.
        """
        context = InvocationContext.current()
        for each in context.service.__mro__ if context is not None else ():
            for key in (each, f"{each.__module__}.{each.__qualname__}"):
                if key in self._scripts:
                    return key
        if None in self._scripts:
            return None
        known = ", ".join(getattr(each, "__name__", str(each)) for each in self._scripts) or "no service"
        if context is None:
            raise ScriptError(f"request {len(self.requests)} comes from no service; there are scripts for {known}")
        raise ScriptError(f"no script for the service {context.service.__name__}; there are scripts for {known}")

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the next reply as stream events, word by word. Raises `AssertionError` if there is none."""
        for event in events_of(await self.chat(request), words):
            yield event


async def _make_scripted_response(reply: object, request: ChatRequest) -> ChatResponse:
    if isinstance(reply, BaseException) or (isinstance(reply, type) and issubclass(reply, BaseException)):
        raise reply
    if isinstance(reply, ChatResponse):
        return reply
    if isinstance(reply, str):
        reply = AiMessage(reply)
    elif isinstance(reply, ToolExecutionRequest):
        reply = AiMessage(tool_execution_requests=(reply,))
    if isinstance(reply, AiMessage):
        asks = bool(reply.tool_execution_requests)
        return ChatResponse(reply, finish_reason=FinishReason.TOOL_EXECUTION if asks else FinishReason.STOP)
    if callable(reply):
        made = reply(request)
        return await _make_scripted_response(await made if inspect.isawaitable(made) else made, request)
    expected = "a str, AiMessage, ChatResponse, tool_call(…), exception or function"
    raise ScriptError(f"invalid scripted reply {reply!r}; expected {expected}")


# --- the requests that a model received


def offered_tools(request: ChatRequest | ScriptedChatModel) -> list[str]:
    """Return the names of the tools in a request, or in the last request of a scripted model.

    Raises `AssertionError` if the model has received no request.
    """
    return [each.name for each in last_request(request).tool_specifications]


def system_text(request: ChatRequest | ScriptedChatModel) -> str | None:
    """Return the text of the system message of a request, or of the last request of a scripted model; None without one.

    Raises `AssertionError` if the model has received no request.
    """
    return next((each.text for each in last_request(request).messages if isinstance(each, SystemMessage)), None)


def user_text(request: ChatRequest | ScriptedChatModel) -> str | None:
    """Return the text of the last user message of a request, or of the last request of a scripted model.

    None without a user message. Raises `AssertionError` if the model has received no request.
    """
    messages = reversed(last_request(request).messages)
    return next((each.text for each in messages if isinstance(each, UserMessage)), None)


def text_of(said: Message | Iterable[Message] | ChatRequest | ScriptedChatModel) -> str:
    """Return the texts of a message, of several messages or of a request, in order, joined by line breaks.

        assert "soup" in text_of(model.requests[0])

    Unlike `.text` it is never None: a message without text gives `""`. Of a scripted model, its last request is read.
    Raises `AssertionError` if the model has received no request.
    """
    if isinstance(said, (ChatRequest, ScriptedChatModel)):
        said = last_request(said).messages
    elif isinstance(said, (SystemMessage, UserMessage, AiMessage, ToolExecutionResultMessage)):
        said = [said]
    return "\n".join(each.text for each in said if each.text)


def last_request(request: ChatRequest | ScriptedChatModel) -> ChatRequest:
    """Return a request, or the last one of a scripted model. Raises `AssertionError` if it has received none."""
    if not isinstance(request, ScriptedChatModel):
        return request
    if not request.requests:
        raise AssertionError("the model has received no request; call the service first")
    return request.requests[-1]
