"""Streams that are closed, cancelled or never read, and the scope, context and time limit of a stream."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from tests.services.streaming import ADD, Streaming, streaming
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    IntermediateResponse,
    InvocationContext,
    InvocationTimeoutError,
    PartialResponse,
    StreamEvent,
    TokenStream,
    ToolExecuted,
    create_ai_service,
    invocation_attributes,
    invocation_record,
    register_ai_service,
    request_scoped,
    time_limit,
    tool,
)
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


# --- starting and closing


async def test_streams_that_are_never_iterated_start_nothing() -> None:
    service, model = streaming("a")
    service.text("x")
    stream = service.events("x")
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    gc.collect()
    assert model.requests == []


class Watched:
    """A model with an endless stream that signals when it is closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        raise AssertionError("not asked for")

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        try:
            while True:
                yield PartialResponse("x ")
                await asyncio.sleep(0)
        finally:
            self.closed.set()


@pytest.mark.parametrize("method", ["text", "events"])
async def test_closing_a_stream_closes_the_model_stream(method: str) -> None:
    model = Watched()
    service: Any = create_ai_service(Streaming, chat_model=model)
    stream = getattr(service, method)("x")
    async for _ in stream:
        break
    assert not model.closed.is_set()
    await stream.aclose()
    assert model.closed.is_set()


async def test_streams_are_context_managers() -> None:
    model = Watched()
    service: Any = create_ai_service(Streaming, chat_model=model)
    async with service.events("x") as events:
        await anext(events)
    assert model.closed.is_set()


def waiting_tool() -> tuple[asyncio.Event, asyncio.Event, Any]:
    """Return a tool that does not end, and the events that it was entered and cancelled."""
    entered, cancelled = asyncio.Event(), asyncio.Event()

    @tool
    async def slow() -> str:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "never"

    return entered, cancelled, slow


async def test_cancelling_the_reader_cancels_its_tools() -> None:
    entered, cancelled, slow = waiting_tool()

    for together in (False, True):
        entered.clear()
        cancelled.clear()
        model = ScriptedChatModel([tool_call("slow")])
        service: Any = create_ai_service(Streaming, chat_model=model, tools=(slow,), concurrent_tools=together)
        stream = service.events("x")

        async def consume(stream: Any = stream) -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(consume())
        await asyncio.wait_for(entered.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled.is_set()


async def test_closing_a_stream_cancels_tools_that_started_early() -> None:
    entered, cancelled, slow = waiting_tool()

    model = ScriptedChatModel([tool_call("slow")])
    service: Any = create_ai_service(Streaming, chat_model=model, tools=(slow,), concurrent_tools=True)
    stream = service.events("x")
    async for event in stream:
        if isinstance(event, IntermediateResponse):
            break
    await asyncio.wait_for(entered.wait(), 60)
    await stream.aclose()
    assert cancelled.is_set()


# --- context and limits


variable: ContextVar[str] = ContextVar("variable", default="unset")


@request_scoped
class Session:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.number = self.made
        self.stopped = False

    @tool
    def number_of(self) -> int:
        assert not self.stopped
        return self.number

    def stop(self) -> None:
        self.stopped = True


async def test_streams_use_the_scope_and_attributes_of_their_call() -> None:
    seen: list[Any] = []

    @tool
    def note(context: InvocationContext) -> str:
        seen.append((variable.get(), dict(context.attributes)))
        return "noted"

    @register_ai_service(tools=(note, Session))
    class Scoped(Protocol):
        def events(self, text: str) -> TokenStream: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("note"), tool_call("number_of")]), "done"])
    async with Container(models={"default": model}).register(Scoped) as container, container.request_scope():
        session = container.get(Session)
        variable.set("at the call")
        with invocation_attributes(tenant="a"):
            stream = container.get(Scoped).events("x")
        variable.set("afterwards")
        async with container.request_scope():
            results = [each.execution.result async for each in stream if isinstance(each, ToolExecuted)]
    assert seen == [("at the call", {"tenant": "a"})]
    assert results == ["noted", str(session.number)]


async def test_consumers_of_a_stream_do_not_see_the_invocation_context() -> None:
    service, _ = streaming(ADD, "a b c")
    async for _ in service.events("x"):
        assert InvocationContext.current() is None


async def test_time_limit_of_the_call_ends_the_stream(clock: Clock) -> None:
    model = Watched()
    service: Any = create_ai_service(Streaming, chat_model=model)
    with time_limit(100):
        stream = service.text("x")
    with pytest.raises(InvocationTimeoutError):
        async for _ in stream:
            clock.advance(60)
    assert model.closed.is_set()


async def test_timeout_of_the_service_ends_the_stream(clock: Clock) -> None:
    model = Watched()
    service: Any = create_ai_service(Streaming, chat_model=model, timeout=100)
    with pytest.raises(InvocationTimeoutError) as raised:
        async for _ in service.events("x"):
            clock.advance(60)
    assert isinstance(raised.value, TimeoutError)
    assert model.closed.is_set()


async def test_an_error_of_the_reader_is_not_replaced_by_one_of_the_call(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave_with(error: BaseException) -> None:
        model = Watched()
        service: Any = create_ai_service(Streaming, chat_model=model, timeout=100)
        async with service.text("x") as stream:
            await anext(stream)
            clock.advance(101)
            await model.closed.wait()
            raise error

    with pytest.raises(KeyError, match="mine"):
        await leave_with(KeyError("mine"))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "Streaming.text" in record.getMessage()
    assert record.exc_info
    assert isinstance(record.exc_info[1], InvocationTimeoutError)
    with pytest.raises(asyncio.CancelledError):
        await leave_with(asyncio.CancelledError())


async def test_timeout_of_a_stream_with_roles_begins_at_its_first_step(clock: Clock) -> None:
    @register_ai_service(timeout=100)
    class Guarded(Protocol):
        @roles_allowed("reader")
        def text(self, text: str) -> AsyncIterator[str]: ...

    reader = SecurityIdentity("ada", roles=frozenset({"reader"}))
    container = Container(models={"default": ScriptedChatModel(["a b"])}, seeds=[SecurityIdentity])
    async with container.register(Guarded), container.request_scope({SecurityIdentity: reader}):
        stream = container.get(Guarded).text("x")
        clock.advance(101)
        assert [each async for each in stream] == ["a ", "b"]


def test_timeout_of_a_synchronous_stream_begins_at_its_first_step(clock: Clock) -> None:
    class Sync(Protocol):
        def text(self, text: str) -> Iterator[str]: ...

    stream = create_ai_service(Sync, chat_model=ScriptedChatModel(["a b"]), timeout=100).text("x")
    clock.advance(101)
    assert list(stream) == ["a ", "b"]


def test_time_limit_of_the_call_counts_before_the_first_step_of_a_stream(clock: Clock) -> None:
    class Sync(Protocol):
        def text(self, text: str) -> Iterator[str]: ...

    with time_limit(100):
        stream = create_ai_service(Sync, chat_model=ScriptedChatModel(["a b"]), timeout=200).text("x")
    clock.advance(101)
    with pytest.raises(InvocationTimeoutError):
        list(stream)


async def test_time_limit_around_the_iteration_does_not_apply_to_the_call() -> None:
    service, _ = streaming("a b c")
    stream = service.text("x")
    with time_limit(1000):
        assert [each async for each in stream] == ["a ", "b ", "c"]


async def test_records_around_the_call_include_the_stream() -> None:
    service, _ = streaming(ADD, "done")
    with invocation_record() as record:
        stream = service.text("x")
    async for _ in stream:
        pass
    assert [each.result for each in record.tool_executions] == ["3"]
