"""Streams of services: text, items, events and synchronous iterators; order, errors, closing and context."""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    BeforeToolExecution,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    Container,
    FinishReason,
    IntermediateResponse,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    OutputParsingError,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    ReturnBehavior,
    StreamEvent,
    TokenStream,
    TokenUsage,
    ToolAbort,
    ToolArgumentsError,
    ToolExecuted,
    ToolExecutionResultMessage,
    UnknownToolError,
    create_ai_service,
    invocation_attributes,
    invocation_record,
    register_ai_service,
    request_scoped,
    system_message,
    time_limit,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class City(BaseModel):
    name: str


class Streaming(Protocol):
    def text(self, text: str) -> AsyncIterator[str]: ...

    def events(self, text: str) -> TokenStream: ...

    def items(self, text: str) -> AsyncIterator[City]: ...

    def numbers(self, text: str) -> AsyncIterator[int]: ...


@tool
async def add(a: int, b: int) -> int:
    return a + b


@tool
def block(text: str = "") -> str:
    return text


@tool
def fail() -> str:
    raise ValueError("broken")


def streaming(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    return create_ai_service(Streaming, chat_model=model, tools=(add, block, fail), **options), model


ADD = tool_call("add", {"a": 1, "b": 2})


async def names(stream: AsyncIterator[Any]) -> list[str]:
    return [type(each).__name__ async for each in stream]


# --- text


async def test_text_is_streamed_in_pieces() -> None:
    service, _ = streaming("Hello there, Ada")
    assert [each async for each in service.text("x")] == ["Hello ", "there, ", "Ada"]


async def test_text_of_all_rounds_is_streamed() -> None:
    service, _ = streaming(AiMessage("Let me see.", [ADD]), "It is 3.")
    assert "".join([each async for each in service.text("x")]) == "Let me see.It is 3."


async def test_reasoning_is_not_part_of_the_text() -> None:
    service, _ = streaming(AiMessage("Hi", reasoning="He says hello"))
    assert [each async for each in service.text("x")] == ["Hi"]


async def test_empty_replies_are_empty_streams() -> None:
    service, _ = streaming(AiMessage(None))
    assert [each async for each in service.text("x")] == []


async def test_models_without_stream_send_the_whole_reply_at_once() -> None:
    class Plain:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            return ChatResponse(AiMessage("Hello there"))

    service: Any = create_ai_service(Streaming, chat_model=Plain())
    assert [each async for each in service.text("x")] == ["Hello there"]
    assert await names(service.events("x")) == ["PartialResponse", "CompleteResponse"]


async def test_streams_are_async_iterators_with_aclose() -> None:
    service, _ = streaming("a", "b")
    for stream in (service.text("x"), service.events("x")):
        assert aiter(stream) is stream
        assert hasattr(stream, "aclose")
        async for _ in stream:
            pass
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()


async def test_async_generator_and_async_iterable_are_text_streams() -> None:
    class Spelled(Protocol):
        def generator(self, text: str) -> AsyncGenerator[str, None]: ...

        def iterable(self, text: str) -> AsyncIterable[str]: ...

    service: Any = create_ai_service(Spelled, chat_model=ScriptedChatModel(["a b", "c d"]))
    assert [each async for each in service.generator("x")] == ["a ", "b"]
    assert [each async for each in service.iterable("x")] == ["c ", "d"]


# --- items


async def test_items_are_yielded_as_soon_as_they_are_complete() -> None:
    gate = asyncio.Event()

    class Slow:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("not asked for")

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            yield PartialResponse('{"value": [{"name": "Bern"}')
            yield PartialResponse(', {"name"')
            await gate.wait()
            yield PartialResponse(': "Basel"}]}')
            yield CompleteResponse(ChatResponse(AiMessage("…")))

    service: Any = create_ai_service(Streaming, chat_model=Slow())
    stream = service.items("x")
    assert await anext(stream) == City(name="Bern")
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    assert await waiting == City(name="Basel")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("[1, 2, 3]", [1, 2, 3]),
        ("[]", []),
        ('{"value": [1]}', [1]),
        ('{"value":[]}', []),
        ("```json\n[1, 2]\n```", [1, 2]),
        ("```\n[1]\n```", [1]),
        ('```json\n{"value": [1]}\n```', [1]),
        (' \n [ "4" ,5] ', [4, 5]),
        ("Here you are:\n\n```json\n[1, 2]\n```\nEnjoy!", [1, 2]),
    ],
)
async def test_lists_are_parsed_with_and_without_a_wrapper(reply: str, found: list[int]) -> None:
    service, _ = streaming(reply)
    assert [each async for each in service.numbers("x")] == found


async def test_invalid_items_raise_at_their_position() -> None:
    service, _ = streaming('[{"name": "Bern"}, {"nome": "Basel"}, {"name": "Genf"}]')
    stream = service.items("x")
    assert await anext(stream) == City(name="Bern")
    with pytest.raises(OutputParsingError) as raised:
        await anext(stream)
    assert "nome" in raised.value.text
    assert raised.value.problems[0][0] == "name"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("reply", ["no list", "[1, 2", "", '{"values": [1]}', "[1 2]", "[1, x]"])
async def test_incomplete_and_missing_lists_are_rejected(reply: str) -> None:
    service, _ = streaming(reply)
    with pytest.raises(OutputParsingError):
        async for _ in service.numbers("x"):
            pass


async def test_items_are_requested_as_a_list() -> None:
    service, model = streaming("[]")
    async for _ in service.items("x"):
        pass
    assert "JSON" in model.requests[0].messages[0].text  # type: ignore[union-attr]

    model = ScriptedChatModel(["[]"], supports_response_format=True)
    service = create_ai_service(Streaming, chat_model=model)
    async for _ in service.items("x"):
        pass
    schema = model.requests[0].response_format.schema  # type: ignore[union-attr]
    assert schema["properties"]["value"]["type"] == "array"


async def test_items_are_yielded_after_tool_rounds() -> None:
    service, _ = streaming(AiMessage("Let me look.", [ADD]), "[1, 2]")
    assert [each async for each in service.numbers("x")] == [1, 2]


# --- events


async def test_events_of_a_reply_without_tools() -> None:
    response = ChatResponse(AiMessage("a b", reasoning="r"), TokenUsage(1, 2), FinishReason.STOP)
    service, _ = streaming(response)
    assert [each async for each in service.events("x")] == [
        PartialReasoning("r"),
        PartialResponse("a "),
        PartialResponse("b"),
        CompleteResponse(response),
    ]


async def test_events_of_a_tool_round_are_in_order() -> None:
    first = AiMessage("See:", [ADD, tool_call("block", {"text": "t"})])
    service, _ = streaming(first, "done")
    events = [each async for each in service.events("x")]

    kinds = [type(each).__name__ for each in events if not isinstance(each, PartialToolCall)]
    assert kinds == [
        "PartialResponse",
        "CompleteToolCall",
        "CompleteToolCall",
        "IntermediateResponse",
        "BeforeToolExecution",
        "ToolExecuted",
        "BeforeToolExecution",
        "ToolExecuted",
        "PartialResponse",
        "CompleteResponse",
    ]
    intermediate = next(each for each in events if isinstance(each, IntermediateResponse))
    assert intermediate.response.ai_message == first
    befores = [each.request for each in events if isinstance(each, BeforeToolExecution)]
    assert befores == list(first.tool_execution_requests)
    executed = [each.execution for each in events if isinstance(each, ToolExecuted)]
    assert [each.result for each in executed] == ["3", "t"]
    partial = [each for each in events if isinstance(each, PartialToolCall)]
    assert {each.index for each in partial} == {0, 1}
    assert "".join(each.partial_arguments for each in partial if each.index == 0) == ADD.arguments
    assert partial[0].id == ADD.id
    assert partial[0].name == "add"
    complete = [each for each in events if isinstance(each, CompleteToolCall)]
    assert [(each.index, each.request) for each in complete] == list(enumerate(first.tool_execution_requests))


async def test_concurrent_results_are_streamed_as_they_finish_and_sent_in_call_order() -> None:
    gate = asyncio.Event()

    @tool
    async def slow() -> str:
        await gate.wait()
        return "slow"

    @tool
    async def quick() -> str:
        return "quick"

    model = ScriptedChatModel([AiMessage(None, [tool_call("slow"), tool_call("quick")]), "done"])
    service = create_ai_service(Streaming, chat_model=model, tools=(slow, quick), concurrent_tools=True)
    executed = []
    async for event in service.events("x"):
        if isinstance(event, ToolExecuted):
            executed.append(event.execution.result)
            gate.set()
    assert executed == ["quick", "slow"]
    results = [each.text for each in model.requests[1].messages if isinstance(each, ToolExecutionResultMessage)]
    assert results == ["slow", "quick"]


async def test_concurrent_tools_start_as_soon_as_their_call_is_complete() -> None:
    started = asyncio.Event()

    @tool
    async def early() -> str:
        started.set()
        return "early"

    first, second = tool_call("early"), tool_call("early")

    class Model:
        def __init__(self) -> None:
            self.rounds = 0

        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("not asked for")

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            self.rounds += 1
            if self.rounds > 1:
                yield CompleteResponse(ChatResponse(AiMessage("done")))
                return
            yield CompleteToolCall(0, first)
            await asyncio.wait_for(started.wait(), 60)  # before the reply is complete
            yield CompleteToolCall(1, second)
            yield CompleteResponse(ChatResponse(AiMessage(None, [first, second])))

    service: Any = create_ai_service(Streaming, chat_model=Model(), tools=(early,), concurrent_tools=True)
    events = [each async for each in service.events("x")]
    kinds = [type(each).__name__ for each in events]
    assert kinds.count("ToolExecuted") == 2
    assert kinds.index("BeforeToolExecution") < kinds.index("IntermediateResponse")
    for request in (first, second):
        before = next(n for n, e in enumerate(events) if isinstance(e, BeforeToolExecution) and e.request is request)
        after = next(n for n, e in enumerate(events) if isinstance(e, ToolExecuted) and e.execution.request is request)
        assert before < after


async def test_concurrent_tools_start_while_the_consumer_handles_the_call_event() -> None:
    started = asyncio.Event()

    @tool
    async def early() -> str:
        started.set()
        return "early"

    model = ScriptedChatModel([tool_call("early"), "done"])
    service = create_ai_service(Streaming, chat_model=model, tools=(early,), concurrent_tools=True)
    async for event in service.events("x"):
        if isinstance(event, CompleteToolCall):
            await asyncio.wait_for(started.wait(), 60)


async def test_an_abort_of_a_concurrent_tool_ends_the_model_stream() -> None:
    model_closed = asyncio.Event()

    @tool
    async def stop() -> str:
        raise ToolAbort("stop")

    class Model:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("not asked for")

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            try:
                yield CompleteToolCall(0, tool_call("stop"))
                while True:
                    await asyncio.sleep(0)
                    yield PartialResponse("x")
            finally:
                model_closed.set()

    service: Any = create_ai_service(Streaming, chat_model=Model(), tools=(stop,), concurrent_tools=True)
    with pytest.raises(ToolAbort):
        async for _ in service.text("x"):
            pass
    assert model_closed.is_set()


async def test_sequential_tools_start_after_the_reply_is_complete() -> None:
    started: list[str] = []

    @tool
    async def early() -> str:
        started.append("early")
        return "early"

    model = ScriptedChatModel([tool_call("early"), "done"])
    service = create_ai_service(Streaming, chat_model=model, tools=(early,))
    async for event in service.events("x"):
        if isinstance(event, (CompleteToolCall, IntermediateResponse)):
            assert started == []
    assert started == ["early"]


async def test_event_streams_can_be_declared_by_event_type() -> None:
    from toolbox import ServiceEvent

    class Spelled(Protocol):
        def events(self, text: str) -> AsyncIterator[ServiceEvent]: ...

    service: Any = create_ai_service(Spelled, chat_model=ScriptedChatModel(["a"]))
    assert await names(service.events("x")) == ["PartialResponse", "CompleteResponse"]


async def test_immediate_rounds_end_the_stream_with_their_reply() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now() -> str:
        return "now"

    for together in (False, True):
        model = ScriptedChatModel([tool_call("now")])
        service = create_ai_service(Streaming, chat_model=model, tools=(now,), concurrent_tools=together)
        kinds = await names(service.events("x"))
        assert kinds[-3:] == ["BeforeToolExecution", "ToolExecuted", "CompleteResponse"]
        assert "IntermediateResponse" not in kinds


@pytest.mark.parametrize("together", [False, True])
async def test_streams_of_text_send_the_value_of_each_immediate_tool_as_one_piece(together: bool) -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now() -> str:
        return "a long text"

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def price() -> dict[str, int]:
        return {"euros": 3}

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def nothing() -> None: ...

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def maybe() -> str | None:
        return None

    @tool
    def other() -> str:
        return "other"

    @tool(return_behavior=ReturnBehavior.IMMEDIATE_IF_LAST)
    def last() -> int:
        return 7

    every: Any = (now, price, nothing, maybe, other, last)

    async def pieces(*calls: Any) -> list[str]:
        reply = AiMessage("Look: ", calls)
        given = {"chat_model": ScriptedChatModel([reply]), "tools": every, "concurrent_tools": together}
        return [each async for each in create_ai_service(Streaming, **given).text("x")]

    assert await pieces(tool_call("now")) == ["Look: ", "a long text"]
    assert await pieces(*map(tool_call, ("price", "nothing", "maybe", "now"))) == [
        "Look: ",
        '{"euros":3}',
        "a long text",
    ]
    assert await pieces(tool_call("other"), tool_call("last")) == ["Look: ", "7"]


def test_synchronous_streams_of_text_send_the_values_of_immediate_tools() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now() -> str:
        return "now"

    @register_ai_service(tools=now)
    class Reading(Protocol):
        def text(self, text: str) -> Iterator[str]: ...

    with Container(models={"default": ScriptedChatModel([tool_call("now")])}).register(Reading) as container:
        assert list(container.get(Reading).text("x")) == ["now"]


# --- errors


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (tool_call("unknown"), UnknownToolError),
        (tool_call("add", "{"), ToolArgumentsError),
        (ConnectionError("gone"), ConnectionError),
    ],
)
@pytest.mark.parametrize("method", ["text", "events", "items"])
@pytest.mark.parametrize("together", [False, True])
async def test_errors_are_raised_in_the_iteration(
    reply: Any, error: type[Exception], method: str, together: bool
) -> None:
    service, _ = streaming(reply, concurrent_tools=together)
    stream = getattr(service, method)("x")
    with pytest.raises(error):
        async for _ in stream:
            pass
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_aborts_are_raised_unchanged_in_the_iteration() -> None:
    error = ToolAbort("stop")

    @tool
    def stop() -> str:
        raise error

    service: Any = create_ai_service(Streaming, chat_model=ScriptedChatModel([tool_call("stop")]), tools=(stop,))
    seen = []
    with pytest.raises(ToolAbort) as raised:
        async for event in service.events("x"):
            seen.append(type(event).__name__)
    assert raised.value is error
    assert "BeforeToolExecution" in seen
    assert "ToolExecuted" not in seen


async def test_tool_failures_do_not_end_the_stream() -> None:
    service, _ = streaming(tool_call("fail"), "done")
    events = [each async for each in service.events("x")]
    [executed] = [each.execution for each in events if isinstance(each, ToolExecuted)]
    assert executed.is_error
    assert executed.result == "broken"


async def test_wrong_arguments_are_rejected_at_the_call() -> None:
    service, _ = streaming("a")
    with pytest.raises(TypeError, match="text"):
        service.events()


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


# --- synchronous streams


class Sync(Protocol):
    @system_message("Be brief.")
    def text(self, text: str) -> Iterator[str]: ...


def test_synchronous_streams_are_iterators_that_run_tools_on_the_callers_thread() -> None:
    threads = []

    @tool
    def where() -> str:
        threads.append(threading.current_thread())
        return "here"

    model = ScriptedChatModel([AiMessage("See: ", [tool_call("where")]), "a b"])
    service: Any = create_ai_service(Sync, chat_model=model, tools=(where,))
    stream = service.text("x")
    assert isinstance(stream, Iterator)
    assert model.requests == []
    assert list(stream) == ["See: ", "a ", "b"]
    assert threads == [threading.current_thread()]


def test_closing_a_synchronous_stream_closes_the_model_stream() -> None:
    closed = threading.Event()

    class Model:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("not asked for")

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            try:
                while True:
                    yield PartialResponse("x")
            finally:
                closed.set()

    service: Any = create_ai_service(Sync, chat_model=Model())
    stream = service.text("x")
    assert next(stream) == "x"
    stream.close()
    assert closed.wait(60)


def test_synchronous_streams_raise_errors_in_the_iteration() -> None:
    service: Any = create_ai_service(Sync, chat_model=ScriptedChatModel([ConnectionError("gone")]))
    with pytest.raises(ConnectionError):
        list(service.text("x"))


# --- streams as tools


async def test_streaming_methods_cannot_be_tools() -> None:
    @register_ai_service
    class Inner(Protocol):
        @tool
        def tell(self, about: str) -> AsyncIterator[str]: ...

    @register_ai_service(tools=(Inner,))
    class Outer(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Outer)
    [problem] = container.check()
    assert problem.where == "Inner.tell"
    assert "stream" in problem.what
