"""Streams of text and synchronous streams of services: pieces, errors, and where streams are not allowed.

Not here: items (`test_stream_items`), events (`test_stream_events`), and how streams end (`test_closed_streams`).
"""

import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from typing import Any, Protocol

import pytest

from tests.services.streaming import ADD, Streaming, names, streaming
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    PartialResponse,
    StreamEvent,
    ToolAbort,
    ToolArgumentsError,
    ToolExecuted,
    UnknownToolError,
    create_ai_service,
    register_ai_service,
    system_message,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


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
