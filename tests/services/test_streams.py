"""Streams of services: what they yield, when they start, and what becomes of them when they are left."""

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    BeforeToolExecution,
    BlockingCallNotAllowedError,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    IntermediateResponse,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    MemoryInUseError,
    OutputParsingError,
    PartialResponse,
    ReturnBehavior,
    StreamEvent,
    TokenStream,
    ToolCallsLimitExceededError,
    ToolExecuted,
    UserMessage,
    create_ai_service,
    invocation_attributes,
    time_limit,
    tool,
)
from toolbox.services.standalone import _process
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class City(BaseModel):
    name: str


class Streaming(Protocol):
    def text(self, question: str) -> AsyncIterator[str]: ...
    def cities(self, question: str) -> AsyncIterator[City]: ...
    def events(self, question: str) -> TokenStream: ...
    def remembered(self, session: MemoryId[str], question: str) -> AsyncIterator[str]: ...
    def lines(self, question: str) -> Iterator[str]: ...
    async def chat(self, session: MemoryId[str], question: str) -> str: ...


@tool
def add(a: int, b: int) -> int:
    return a + b


def asks(**arguments: Any) -> AiMessage:
    return AiMessage("Let me see. ", [tool_call("add", arguments)])


def service(*replies: Any, tools: Any = (add,), **options: Any) -> Streaming:
    return create_ai_service(Streaming, chat_model=ScriptedChatModel(replies), tools=tools, **options)


async def test_the_text_of_all_rounds_is_streamed() -> None:
    pieces = [piece async for piece in service(asks(a=1, b=2), "It is three.").text("q")]

    assert "".join(pieces) == "Let me see. It is three."
    assert len(pieces) > 2


async def test_a_model_without_stream_streams_its_whole_reply() -> None:
    class Whole:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            return ChatResponse(AiMessage("all at once"))

    stream = create_ai_service(Streaming, chat_model=Whole()).text("q")

    assert [piece async for piece in stream] == ["all at once"]


async def test_events_come_in_order_and_the_last_is_the_whole() -> None:
    events = [event async for event in service(asks(a=1, b=2), "three").events("q")]
    kinds = [type(each) for each in events if not isinstance(each, PartialResponse)]

    assert kinds[-4:] == [IntermediateResponse, BeforeToolExecution, ToolExecuted, CompleteResponse]
    assert CompleteToolCall in kinds
    executed = next(each for each in events if isinstance(each, ToolExecuted))
    assert executed.execution.result == "3"
    last = events[-1]
    assert isinstance(last, CompleteResponse)
    assert last.response.ai_message.text == "three"


async def test_items_come_one_by_one() -> None:
    stream = service(asks(a=1, b=2), '{"value": [{"name": "Bern"}, {"name": "Basel"}]}').cities("q")

    assert [city async for city in stream] == [City(name="Bern"), City(name="Basel")]


async def test_a_bad_item_is_raised_where_it_stands() -> None:
    stream = service('[{"name": "Bern"}, {"nme": "Basel"}]').cities("q")

    assert await anext(stream) == City(name="Bern")
    with pytest.raises(OutputParsingError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reply_without_a_list_is_an_error() -> None:
    with pytest.raises(OutputParsingError):
        _ = [city async for city in service("none").cities("q")]


async def test_an_immediate_round_ends_the_stream_with_its_reply() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now() -> int:
        return 1

    reply = AiMessage(None, [tool_call("now")])

    class Events(Protocol):
        def events(self, question: str) -> TokenStream: ...

    made = create_ai_service(Events, chat_model=ScriptedChatModel([reply]), tools=[now])
    events = [event async for event in made.events("q")]

    assert [type(each) for each in events][-3:] == [BeforeToolExecution, ToolExecuted, CompleteResponse]
    assert not any(isinstance(each, IntermediateResponse) for each in events)
    last = events[-1]
    assert isinstance(last, CompleteResponse)
    assert last.response.ai_message == reply


async def test_limits_and_errors_are_raised_in_the_iteration() -> None:
    two = AiMessage(None, [tool_call("add", {"a": 1, "b": 1}, id="1"), tool_call("add", {"a": 1, "b": 1}, id="2")])
    stream = service(two, max_tool_calls_per_response=1).text("q")
    with pytest.raises(ToolCallsLimitExceededError):
        _ = [piece async for piece in stream]

    with pytest.raises(RuntimeError, match="down"):
        _ = [piece async for piece in service(RuntimeError("down")).text("q")]


async def test_nothing_starts_before_the_first_step() -> None:
    model = ScriptedChatModel(["a"])
    stream = create_ai_service(Streaming, chat_model=model).text("q")
    await stream.aclose()  # type: ignore[attr-defined]  # every stream has it

    assert model.requests == []
    assert [piece async for piece in stream] == []


async def test_context_attributes_and_limit_are_those_of_the_call_that_made_it() -> None:
    seen: list[tuple[str, Any]] = []

    @tool
    async def look(context: InvocationContext) -> str:
        seen.append((variable.get(), dict(context.attributes)))
        return "ok"

    variable.set("made")
    with invocation_attributes(tenant="acme"):
        stream = service(AiMessage(None, [tool_call("look")]), "done", tools=[look]).text("q")
    variable.set("later")

    async def consume() -> str:
        return "".join([piece async for piece in stream])

    assert await asyncio.create_task(consume()) == "done"
    assert seen == [("made", {"tenant": "acme"})]
    assert InvocationContext.current() is None


async def test_a_stream_may_be_consumed_by_another_task_at_each_step() -> None:
    stream = service(asks(a=1, b=2), "It is three.").text("q")
    pieces = []
    while True:
        try:
            pieces.append(await asyncio.create_task(anext(stream)))  # type: ignore[arg-type]  # a coroutine
        except StopAsyncIteration:
            break

    assert "".join(pieces) == "Let me see. It is three."


async def test_a_limit_ends_the_stream() -> None:
    @tool
    async def wait() -> None:
        await asyncio.Event().wait()

    with time_limit(0.05):
        stream = service(AiMessage(None, [tool_call("wait")]), tools=[wait]).text("q")
    with pytest.raises(InvocationTimeoutError):
        _ = [piece async for piece in stream]


class Slow:
    """A model whose stream never ends, and which tells when it is closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.yielded = 0

    async def chat(self, request: ChatRequest) -> ChatResponse:
        return ChatResponse(AiMessage("whole"), finish_reason=FinishReason.STOP)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        try:
            while True:
                self.yielded += 1
                yield PartialResponse("x")
                await asyncio.sleep(0)
        finally:
            self.closed.set()


async def test_a_slow_consumer_slows_the_reading() -> None:
    model = Slow()
    stream = create_ai_service(Streaming, chat_model=model).text("q")
    for _ in range(3):
        await anext(stream)
        for _ in range(20):
            await asyncio.sleep(0)

    assert model.yielded == 3
    await stream.aclose()  # type: ignore[attr-defined]  # every stream has it


async def test_a_stream_that_is_left_closes_the_models_and_gives_the_turn_back() -> None:
    model = Slow()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # every stream has it

    assert model.closed.is_set()
    assert await made.chat("s", "again") == "whole"


async def test_a_stream_that_is_dropped_is_closed() -> None:
    model = Slow()
    made = create_ai_service(Streaming, chat_model=model)
    async for _ in made.remembered("s", "q"):
        break
    gc.collect()
    await model.closed.wait()

    assert await made.chat("s", "again") == "whole"


async def test_cancelling_the_consumer_closes_the_models_stream() -> None:
    model = Slow()
    made = create_ai_service(Streaming, chat_model=model)
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in made.remembered("s", "q"):
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gc.collect()
    await model.closed.wait()

    assert await made.chat("s", "again") == "whole"


async def test_together_a_tool_starts_as_soon_as_its_call_is_complete() -> None:
    release = asyncio.Event()
    order: list[str] = []

    class Early:
        asked = 0

        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            self.asked += 1
            if self.asked == 2:
                yield CompleteResponse(ChatResponse(AiMessage("done")))
                return
            call = tool_call("early", {}, id="1")
            yield CompleteToolCall(0, call)
            await release.wait()
            order.append("reply complete")
            yield CompleteResponse(ChatResponse(AiMessage(None, [call])))

    @tool
    async def early() -> str:
        order.append("tool ran")
        release.set()
        return "early"

    made = create_ai_service(Streaming, chat_model=Early(), tools=[early], concurrent_tools=True)
    events = [event async for event in made.events("q")]

    assert order == ["tool ran", "reply complete"]
    assert sum(isinstance(each, ToolExecuted) for each in events) == 1


async def test_blocking_tools_leave_the_loop_by_themselves() -> None:
    threads: list[threading.Thread] = []

    @tool
    def block() -> str:
        threads.append(threading.current_thread())
        return "x"

    stream = service(AiMessage(None, [tool_call("block")]), "done", tools=[block]).text("q")
    assert "".join([piece async for piece in stream]) == "done"
    assert threads[0] is not threading.current_thread()


def test_a_synchronous_stream_serves_its_tools_on_the_callers_thread() -> None:
    threads: list[threading.Thread] = []

    @tool
    def block() -> str:
        threads.append(threading.current_thread())
        return "x"

    stream = service(AiMessage(None, [tool_call("block")]), "all done", tools=[block]).lines("q")

    assert "".join(stream) == "all done"
    assert threads == [threading.current_thread()]


async def test_a_synchronous_stream_is_refused_on_a_loops_thread() -> None:
    model = ScriptedChatModel(["x"])
    with pytest.raises(BlockingCallNotAllowedError):
        create_ai_service(Streaming, chat_model=model).lines("q")
    assert model.requests == []


def test_a_synchronous_stream_that_is_left_is_closed() -> None:
    stream = service("a b c d").lines("q")
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator

    with pytest.raises(StopIteration):
        next(stream)


# --- one reader at a time, and who leaves from elsewhere


class Waiting:
    """A model whose stream gives a piece and waits to be let go on."""

    def __init__(self) -> None:
        self.go_on, self.closed = asyncio.Event(), asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        return ChatResponse(AiMessage("whole"))

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        try:
            yield PartialResponse("a")
            await self.go_on.wait()
            yield PartialResponse("b")
            yield CompleteResponse(ChatResponse(AiMessage("ab")))
        finally:
            self.closed.set()


async def waiting_for_the_next(stream: AsyncIterator[Any]) -> "asyncio.Task[Any]":
    async def following() -> Any:
        return await anext(stream, None)

    task = asyncio.create_task(following())
    await asyncio.sleep(0)
    return task


async def test_a_second_reader_is_refused_and_the_first_reads_on() -> None:
    model = Waiting()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    first = await waiting_for_the_next(stream)

    with pytest.raises(RuntimeError, match="one at a time"):
        await anext(stream)
    model.go_on.set()

    assert await first == "b"
    assert [piece async for piece in stream] == []
    assert await made.chat("s", "again") == "whole"


@pytest.mark.parametrize("closers", [1, 2])
async def test_who_waits_for_the_next_item_of_a_stream_that_is_left_finds_its_end(closers: int) -> None:
    model = Waiting()
    made = create_ai_service(Streaming, chat_model=model)
    stream: Any = made.remembered("s", "q")
    await anext(stream)
    reader = await waiting_for_the_next(stream)

    await asyncio.gather(*(stream.aclose() for _ in range(closers)))

    assert model.closed.is_set()
    assert await reader is None
    assert reader.cancelling() == 0
    assert await made.chat("s", "again") == "whole"


async def test_a_reader_who_is_cancelled_while_the_stream_is_left_stays_cancelled() -> None:
    stream: Any = create_ai_service(Streaming, chat_model=Waiting()).text("q")
    await anext(stream)
    reader = await waiting_for_the_next(stream)
    reader.cancel()
    await stream.aclose()

    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_a_tool_that_heeds_no_cancellation_ends_before_a_left_stream_does() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn() -> str:
        begun.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                go_on.set()
        return "done"

    stream: Any = service(AiMessage(None, [tool_call("stubborn")]), "end", tools=[stubborn]).events("q")

    async def read() -> list[Any]:
        return [event async for event in stream]

    reader = asyncio.create_task(read())
    await begun.wait()
    await stream.aclose()

    assert not any(isinstance(event, CompleteResponse) for event in await reader)


async def test_a_tool_cannot_leave_the_stream_that_runs_it() -> None:
    streams: list[Any] = []

    @tool
    async def leave() -> None:
        await streams[0].aclose()

    streams.append(service(AiMessage(None, [tool_call("leave")]), "end", tools=[leave]).events("q"))
    [executed] = [event async for event in streams[0] if isinstance(event, ToolExecuted)]

    assert "ToolAbort" in executed.execution.result


# --- who reads a conversation's stream, and asks in the same conversation


async def test_a_reader_that_asks_in_the_conversation_it_reads_is_told_at_once() -> None:
    made = create_ai_service(Streaming, chat_model=Waiting())
    async with made.remembered("s", "q") as stream:  # type: ignore[attr-defined]  # every stream has it
        await anext(stream)
        with pytest.raises(MemoryInUseError, match="aclose"):
            await made.chat("s", "and?")
        assert await made.chat("other", "and?") == "whole"

    assert await made.chat("s", "and now?") == "whole"


async def test_another_task_than_the_reader_waits_for_its_turn() -> None:
    model = Waiting()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    other = asyncio.create_task(made.chat("s", "and?"))
    await asyncio.sleep(0)
    model.go_on.set()

    assert [piece async for piece in stream] == ["b"]
    assert await other == "whole"


async def test_who_has_handed_a_stream_over_waits_for_its_turn() -> None:
    model = Waiting()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    reader = await waiting_for_the_next(stream)
    asyncio.get_running_loop().call_soon(model.go_on.set)
    asking = asyncio.create_task(made.chat("s", "and?"))

    assert await reader == "b"
    assert await waiting_for_the_next(stream)
    assert await asking == "whole"


def test_a_thread_that_asks_in_the_conversation_it_reads_is_told_at_once() -> None:
    class Lines(Protocol):
        def lines(self, session: MemoryId[str], question: str) -> Iterator[str]: ...
        def chat(self, session: MemoryId[str], question: str) -> str: ...

    made = create_ai_service(Lines, chat_model=ScriptedChatModel(["one two", "three"]))
    lines = made.lines("s", "q")
    next(lines)
    with pytest.raises(MemoryInUseError):
        made.chat("s", "and?")

    assert [*lines]
    assert made.chat("s", "and now?") == "three"


def test_a_plain_iterator_dropped_by_the_garbage_collector_on_the_loop_holds_nothing_up() -> None:
    class Held:
        lines: Iterator[str]
        itself: Any

    model, collected = Slow(), threading.Event()
    made = create_ai_service(Streaming, chat_model=model)
    held = Held()
    held.itself, held.lines = held, made.lines("q")

    def collect() -> None:
        gc.collect()
        collected.set()

    next(held.lines)
    gc.disable()
    try:
        del held
        _process.loop().call_soon_threadsafe(collect)

        assert collected.wait(10)
    finally:
        gc.enable()
    assert next(iter(service("still there").lines("q")))


@pytest.mark.parametrize("reply", ['[{"name": "Bern"}', "no list", ""])
async def test_a_stream_of_items_that_ends_badly_is_not_remembered(reply: str) -> None:
    class Listing(Protocol):
        def cities(self, session: MemoryId[str], question: str) -> AsyncIterator[City]: ...

    model = ScriptedChatModel([reply, "[]"])
    made = create_ai_service(Listing, chat_model=model)
    with pytest.raises(OutputParsingError):
        [city async for city in made.cities("s", "first")]
    assert [city async for city in made.cities("s", "second")] == []

    assert next(each.text for each in model.requests[1].messages if isinstance(each, UserMessage)).startswith("second")
