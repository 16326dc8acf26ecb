"""Readers of streams: closing, cancelling, several readers, and the conversation of a stream."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    BlockingCallNotAllowedError,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    FinishReason,
    InvocationTimeoutError,
    MemoryId,
    MemoryInUseError,
    OutputParsingError,
    PartialResponse,
    StreamEvent,
    TokenStream,
    ToolExecuted,
    UserMessage,
    create_ai_service,
    time_limit,
    tool,
)
from toolbox.hosts.standalone import _process
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("only_new_garbage")]


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


async def test_each_step_of_a_stream_may_run_in_another_task() -> None:
    stream = service(asks(a=1, b=2), "It is three.").text("q")
    pieces = []
    while True:
        try:
            pieces.append(await asyncio.create_task(anext(stream)))  # type: ignore[arg-type]  # a coroutine
        except StopAsyncIteration:
            break

    assert "".join(pieces) == "Let me see. It is three."


async def test_time_limit_ends_a_stream_that_waits_for_a_tool() -> None:
    @tool
    async def wait() -> None:
        await asyncio.Event().wait()

    with time_limit(0.05):
        stream = service(AiMessage(None, [tool_call("wait")]), tools=[wait]).text("q")
    with pytest.raises(InvocationTimeoutError):
        _ = [piece async for piece in stream]


class Slow:
    """A model with an endless stream that signals when it is closed."""

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


async def test_slow_consumers_slow_down_the_model_stream() -> None:
    model = Slow()
    stream = create_ai_service(Streaming, chat_model=model).text("q")
    for _ in range(3):
        await anext(stream)
        for _ in range(20):
            await asyncio.sleep(0)

    assert model.yielded == 3
    await stream.aclose()  # type: ignore[attr-defined]  # every stream has it


async def test_closing_a_stream_closes_the_model_stream_and_frees_the_conversation() -> None:
    model = Slow()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # every stream has it

    assert model.closed.is_set()
    assert await made.chat("s", "again") == "whole"


async def test_dropped_streams_are_closed() -> None:
    model = Slow()
    made = create_ai_service(Streaming, chat_model=model)
    async for _ in made.remembered("s", "q"):
        break
    gc.collect()
    await model.closed.wait()

    assert await made.chat("s", "again") == "whole"


async def test_cancelling_the_consumer_closes_the_model_stream() -> None:
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


async def test_synchronous_streams_are_rejected_on_the_event_loop() -> None:
    model = ScriptedChatModel(["x"])
    with pytest.raises(BlockingCallNotAllowedError):
        create_ai_service(Streaming, chat_model=model).lines("q")
    assert model.requests == []


# --- one reader at a time


class Waiting:
    """A model whose stream yields one piece and then waits for `go_on`."""

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


async def test_a_second_reader_is_rejected_and_the_first_continues() -> None:
    model = Waiting()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    first = await waiting_for_the_next(stream)

    with pytest.raises(RuntimeError, match="one reader at a time"):
        await anext(stream)
    model.go_on.set()

    assert await first == "b"
    assert [piece async for piece in stream] == []
    assert await made.chat("s", "again") == "whole"


@pytest.mark.parametrize("closers", [1, 2])
async def test_readers_of_a_closed_stream_reach_its_end(closers: int) -> None:
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


async def test_readers_cancelled_during_close_stay_cancelled() -> None:
    stream: Any = create_ai_service(Streaming, chat_model=Waiting()).text("q")
    await anext(stream)
    reader = await waiting_for_the_next(stream)
    reader.cancel()
    await stream.aclose()

    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_closing_a_stream_waits_for_tools_that_ignore_cancellation() -> None:
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


async def test_tools_cannot_close_the_stream_that_runs_them() -> None:
    streams: list[Any] = []

    @tool
    async def leave() -> None:
        await streams[0].aclose()

    streams.append(service(AiMessage(None, [tool_call("leave")]), "end", tools=[leave]).events("q"))
    [executed] = [event async for event in streams[0] if isinstance(event, ToolExecuted)]

    assert "ToolAbort" in executed.execution.result


# --- calls in the conversation of an open stream


async def test_calls_in_the_conversation_of_an_open_stream_raise_memory_in_use_error() -> None:
    made = create_ai_service(Streaming, chat_model=Waiting())
    async with made.remembered("s", "q") as stream:  # type: ignore[attr-defined]  # every stream has it
        await anext(stream)
        with pytest.raises(MemoryInUseError, match="aclose"):
            await made.chat("s", "and?")
        assert await made.chat("other", "and?") == "whole"

    assert await made.chat("s", "and now?") == "whole"


async def test_other_tasks_wait_for_the_stream_to_end() -> None:
    model = Waiting()
    made = create_ai_service(Streaming, chat_model=model)
    stream = made.remembered("s", "q")
    await anext(stream)
    other = asyncio.create_task(made.chat("s", "and?"))
    await asyncio.sleep(0)
    model.go_on.set()

    assert [piece async for piece in stream] == ["b"]
    assert await other == "whole"


async def test_tasks_that_handed_over_a_stream_wait_for_its_end() -> None:
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


def test_threads_that_read_a_stream_cannot_call_in_its_conversation() -> None:
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


def test_iterators_collected_on_the_event_loop_do_not_block_it() -> None:
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

        assert collected.wait(60)
    finally:
        gc.enable()
    assert next(iter(service("still there").lines("q")))


@pytest.mark.parametrize("reply", ['[{"name": "Bern"}', "no list", ""])
async def test_streams_of_items_that_fail_are_not_remembered(reply: str) -> None:
    class Listing(Protocol):
        def cities(self, session: MemoryId[str], question: str) -> AsyncIterator[City]: ...

    model = ScriptedChatModel([reply, "[]"])
    made = create_ai_service(Listing, chat_model=model)
    with pytest.raises(OutputParsingError):
        [city async for city in made.cities("s", "first")]
    assert [city async for city in made.cities("s", "second")] == []

    assert next(each.text for each in model.requests[1].messages if isinstance(each, UserMessage)).startswith("second")
