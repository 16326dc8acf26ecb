"""Streams of events: which events a call sends, in which order, and when its tools start."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest

from tests.services.streaming import ADD, Streaming, names, streaming
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
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    ReturnBehavior,
    StreamEvent,
    TokenUsage,
    ToolAbort,
    ToolExecuted,
    ToolExecutionResultMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


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
