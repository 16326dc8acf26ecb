"""The scripted model returns its replies and keeps the requests."""

import json

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    ModelHttpError,
    PartialResponse,
    TokenUsage,
    ToolExecutionRequest,
    UserMessage,
)
from toolbox.chat_streams import stream_of
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])


async def test_replies_of_every_kind_are_returned_in_order() -> None:
    call = tool_call("add", {"a": 1}, id="c")
    whole = ChatResponse(AiMessage("whole"), TokenUsage(1, 2), FinishReason.LENGTH)

    async def later(request: ChatRequest) -> str:
        return f"heard {request.messages[0].text}"  # type: ignore[union-attr]  # a UserMessage

    model = ScriptedChatModel(
        ["text", AiMessage(None, [call]), whole, lambda _: AiMessage("called"), later, call, ModelHttpError(500, "no")]
    )
    replies = [await model.chat(HI) for _ in range(6)]

    assert [each.ai_message.text for each in replies] == ["text", None, "whole", "called", "heard Hi", None]
    assert replies[1].finish_reason is FinishReason.TOOL_EXECUTION
    assert replies[2] is whole
    assert replies[5].ai_message.tool_execution_requests == (call,)
    with pytest.raises(ModelHttpError):
        await model.chat(HI)
    assert model.requests == [HI] * 7


async def test_a_missing_reply_is_reported_with_the_request_number() -> None:
    model = ScriptedChatModel(["one"])
    await model.chat(HI)

    with pytest.raises(AssertionError, match="no scripted reply for request 2"):
        await model.chat(HI)


async def test_replies_are_streamed_word_by_word_and_then_the_calls() -> None:
    reply = AiMessage("Hello my friend", [tool_call("add", {"a": 1}, id="c")])

    events = [event async for event in stream_of(ScriptedChatModel([reply]), HI)]

    assert [each.text for each in events if isinstance(each, PartialResponse)] == ["Hello ", "my ", "friend"]
    assert CompleteToolCall(0, ToolExecutionRequest("c", "add", '{"a": 1}')) in events
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message == reply


async def test_an_exception_is_raised_in_the_iteration() -> None:
    events = stream_of(ScriptedChatModel([ModelHttpError(500, "no")]), HI)

    with pytest.raises(ModelHttpError):
        await anext(events)


def test_calls_have_unique_ids_and_arguments_as_json() -> None:
    first, second = tool_call("add", {"city": "Nürnberg"}), tool_call("add")

    assert first.id != second.id
    assert json.loads(first.arguments) == {"city": "Nürnberg"}
    assert "ü" in first.arguments
    assert second.arguments == "{}"
    assert tool_call("add", "{broken").arguments == "{broken"
