"""`InjectedModel`, which beans get as `ChatModel`, and the requests that a program sends to it.

Such a request has limits, events, fallbacks and a deadline like one of a service. Not here: which model a name means
(`hosts.model_beans`), asking it (`model_calls`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, Message, StreamEvent
from ..chat_streams import answer_stream
from ..context import (
    InvocationContext,
    current_attributes,
    current_bean_caller,
    current_invocation,
    current_limit,
)
from ..events import ModelSkippedEvent
from ..execution.runners import LoopRunner
from ..limits import Account, CostEstimator, current_account
from .bean_calls import call_with_beans
from .host_needs import ServiceHost
from .interruptions import ModelCall, find_deadlines, within_limits
from .model_calls import ask_model, is_inside_model, model_stream
from .usage_layers import count_reply, refuse_exceeded, reserve_request, reserve_tool_calls


class InjectedModel(ChatModel):
    """A model of a container, as beans get it by its name. Attributes that it does not have are the model's own."""

    def __init__(
        self,
        name: str,
        host: ServiceHost,
        find_own: Callable[[], ChatModel],
        find_chain: Callable[[InvocationContext | None], Awaitable[ChatModel]],
    ) -> None:
        self._name, self._host, self._find_own, self._find_chain = name, host, find_own, find_chain

    def is_called(self, name: str, host: ServiceHost) -> bool:
        """Return True if this is the model of that name in that container."""
        return (self._name, self._host) == (name, host)

    @property
    def own_model(self) -> ChatModel:
        """The model itself, without limits, events and fallbacks."""
        return self._find_own()

    @property
    def model(self) -> str:
        """The server's name of the model, or the name of its class."""
        own = self.own_model
        name = getattr(own, "model", None)
        return name if isinstance(name, str) else type(own).__name__

    @property
    def supports_response_format(self) -> bool:
        """True if the model respects `ChatRequest.response_format`."""
        return bool(getattr(self.own_model, "supports_response_format", False))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by `copy` and `pickle`, also before the object is complete
            raise AttributeError(name)
        return getattr(self.own_model, name)

    def __repr__(self) -> str:
        return f"<ChatModel {self._name!r}: {self.own_model!r}>"

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the whole reply. Raises `ModelError`, and `UsageLimitExceededError` for a limit around the call."""
        if is_inside_model():
            return await (await self.with_fallbacks()).chat(request)
        call = _DirectCall(self._name, self._host, request)
        async with call.open(), call.part():
            return await call.ask(await self.with_fallbacks(call.context))

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the reply as events; the last is `CompleteResponse`. Raises the errors of `chat`."""
        if is_inside_model():
            async with aclosing(answer_stream(await self.with_fallbacks(), request)) as events:
                async for event in events:
                    yield event
            return
        call = _DirectCall(self._name, self._host, request)
        async with call.open():
            async with call.part():
                call.model = await self.with_fallbacks(call.context)
                estimator = await call.begin()
                asked = await model_stream(call, request)
            async with aclosing(asked) as events:
                while True:
                    # One step at a time: between two of them, the reader's code runs in the same task and context.
                    async with call.part():
                        following = await anext(events, None)
                        if isinstance(following, CompleteResponse):
                            await call.end(following.response, estimator)
                    if following is None:
                        return
                    yield following

    async def with_fallbacks(self, context: InvocationContext | None = None) -> ChatModel:
        """Return the model itself, or a chain of it and its fallbacks. `context` is that of their events."""
        return await self._find_chain(context)


def tell_skipped(host: ServiceHost, context: InvocationContext | None) -> Callable[[str, datetime], None]:
    """Return a function that sends the event of a model that is skipped."""

    def tell(model: str, until: datetime) -> None:
        if host.listeners is not None:
            host.listeners.tell(ModelSkippedEvent(context or context_here(), model, until))

    return tell


def context_here() -> InvocationContext:
    """Return the current invocation, or the context of a request outside of invocations."""
    if (around := current_invocation.get()) is not None:
        return around
    limit = current_limit.get()
    deadline = None if limit is None else limit.deadline
    return InvocationContext(ChatModel, "chat", attributes=current_attributes.get(), deadline=deadline)


class _DirectCall(ModelCall):
    """One request to an injected model."""

    where = "ChatModel.chat"

    def __init__(self, name: str, host: ServiceHost, request: ChatRequest) -> None:
        self.model_name, self.host, self._request = name, host, request
        self.runner = LoopRunner(host.workers)
        self.context = context_here()
        self.deadline, _ = find_deadlines(None, current_invocation.get())
        account = current_account.get()
        self.account = None if account is None else Account(None, account, self)

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The messages of the request."""
        return tuple(self._request.messages)

    def count_tool_calls(self, response: ChatResponse) -> int:
        """Return the number of tool calls in a reply."""
        return len(response.ai_message.tool_execution_requests)

    # --- the request

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Let the request draw on its account inside the block."""
        if current_invocation.get() is None:
            await self.host.note_caller(self.context)
        if self.account is not None:
            self.account.is_running = True
        try:
            yield
        finally:
            if self.account is not None:
                self.account.stop()

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Run a part of the request inside the block: with its account, its deadline, and beans for functions."""
        async with AsyncExitStack() as after:
            if self.account is not None:
                token = current_account.set(self.account)
                after.callback(current_account.reset, token)
            if current_bean_caller.get() is None:
                # Not a method: timers of the request keep this context, and would keep the model.
                call = partial(call_with_beans, scope=self.host.scope, runner=self.runner)
                caller = current_bean_caller.set(call)
                after.callback(current_bean_caller.reset, caller)
            await after.enter_async_context(within_limits(self))
            yield

    async def ask(self, model: ChatModel) -> ChatResponse:
        """Return the reply of the model."""
        self.model = model
        estimator = await self.begin()
        response = await ask_model(self, self._request)
        await self.end(response, estimator)
        return response

    async def begin(self) -> CostEstimator | None:
        """Check and count the request before it is sent."""
        if self.account is None:
            return None
        await refuse_exceeded(self)
        return await reserve_request(self)

    async def end(self, response: ChatResponse, estimator: CostEstimator | None) -> None:
        """Count the reply."""
        if self.account is not None:
            count_reply(self, response, estimator)
            await reserve_tool_calls(self, response)
