"""The scripted model returns its replies and keeps the requests."""

import asyncio
from typing import Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    TokenUsage,
    ToolExecutionRequest,
    UserMessage,
    create_ai_service,
)
from toolbox.chat_streams import stream_of
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])


async def test_a_missing_reply_is_reported_with_the_request_number() -> None:
    model = ScriptedChatModel(["one"])
    await model.chat(HI)

    with pytest.raises(AssertionError, match="no scripted reply for request 2"):
        await model.chat(HI)
    with pytest.raises(AssertionError):
        await anext(stream_of(model, HI))


async def test_replies_are_streamed_word_by_word_and_then_the_calls() -> None:
    reply = AiMessage("Hello my friend", [tool_call("add", {"a": 1}, id="c")])

    events = [event async for event in stream_of(ScriptedChatModel([reply]), HI)]

    assert [each.text for each in events if isinstance(each, PartialResponse)] == ["Hello ", "my ", "friend"]
    assert CompleteToolCall(0, ToolExecutionRequest("c", "add", '{"a": 1}')) in events
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message == reply


async def test_scripts_accept_every_kind_of_reply() -> None:
    request = tool_call("add", {"a": 1}, id="7")
    whole = ChatResponse(AiMessage("whole"), TokenUsage(1, 2), FinishReason.LENGTH)

    async def later(asked: ChatRequest) -> str:
        await asyncio.sleep(0)
        return f"later {asked.messages[-1].text}"  # type: ignore[union-attr]

    model = ScriptedChatModel(
        [
            "text",
            AiMessage("message"),
            AiMessage(None, [request]),
            whole,
            ValueError("broken"),
            lambda asked: f"called {len(asked.messages)}",
            lambda asked: AiMessage("made"),
            lambda asked: whole,
            later,
        ]
    )
    assert (await model.chat(HI)).ai_message == AiMessage("text")
    assert (await model.chat(HI)).ai_message == AiMessage("message")
    asked = await model.chat(HI)
    assert asked.ai_message.tool_execution_requests == (request,)
    assert asked.finish_reason is FinishReason.TOOL_EXECUTION
    assert await model.chat(HI) is whole
    with pytest.raises(ValueError, match="broken"):
        await model.chat(HI)
    assert (await model.chat(HI)).ai_message.text == "called 1"
    assert (await model.chat(HI)).ai_message.text == "made"
    assert await model.chat(HI) is whole
    assert (await model.chat(HI)).ai_message.text == "later Hi"
    assert model.requests == [HI] * 9


async def test_the_scripted_model_streams_its_reply() -> None:
    request = tool_call("add", {"a": 1})
    message = AiMessage("a b", [request], reasoning="r")
    model = ScriptedChatModel([message, ValueError("broken")])
    events = [each async for each in model.stream(HI)]
    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == "a b"
    assert "".join(each.text for each in events if isinstance(each, PartialReasoning)) == "r"
    pieces = [each.partial_arguments for each in events if isinstance(each, PartialToolCall)]
    assert "".join(pieces) == request.arguments
    assert CompleteToolCall(0, request) in events
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message == message
    with pytest.raises(ValueError, match="broken"):
        async for _ in model.stream(HI):
            pass
    assert len(model.requests) == 2


def test_tool_call_returns_a_tool_execution_request() -> None:
    assert tool_call("add", {"a": 1}, id="x") == ToolExecutionRequest("x", "add", '{"a": 1}')
    assert tool_call("add").arguments == "{}"
    assert "ü" in tool_call("add", {"city": "Nürnberg"}).arguments
    assert tool_call("add", "raw {", id="y").arguments == "raw {"
    assert tool_call("add").id != tool_call("add").id
    assert isinstance(tool_call("add").id, str)


async def test_scripted_errors_reach_the_caller_of_a_service_unchanged() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    error = KeyError("x")
    with pytest.raises(KeyError) as raised:
        await create_ai_service(Assistant, chat_model=ScriptedChatModel([error])).chat("x")
    assert raised.value is error
