"""The scripted model returns its replies and keeps the requests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    Container,
    FinishReason,
    ImageContent,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.chat_streams import stream_of
from toolbox.testing import ScriptedChatModel, text_of, tool_call

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


# --- a script for each service


@register_ai_service
class Waiter(Protocol):
    async def serve(self, wish: str) -> str: ...


@register_ai_service
class Cook(Protocol):
    @tool
    async def cook(self, dish: str) -> str:
        """Cook a dish."""
        ...


@register_ai_service(tools=Cook, concurrent_tools=True)
class Chef(Protocol):
    async def plan(self, wish: str) -> str: ...

    def tell(self, wish: str) -> AsyncIterator[str]: ...


@register_ai_service
class Guest(Protocol):
    async def ask(self, text: str) -> str: ...


async def test_services_that_run_at_the_same_time_have_scripts_of_their_own() -> None:
    met = asyncio.Barrier(2)

    async def waits(request: ChatRequest) -> str:
        await met.wait()
        return "second"

    model = ScriptedChatModel({Waiter: ["first", waits], Cook: [waits, "third"]})
    async with Container(models={"default": model}).register(Waiter, Cook) as container:
        waiter, cook = container.get(Waiter), container.get(Cook)
        assert await waiter.serve("a") == "first"
        assert await asyncio.gather(waiter.serve("b"), cook.cook("c")) == ["second", "second"]
        assert await cook.cook("d") == "third"

    assert len(model.requests) == 4


async def test_the_innermost_service_asks() -> None:
    calls = AiMessage(None, [tool_call("cook", {"dish": "soup"}), tool_call("cook", {"dish": "cake"})])
    model = ScriptedChatModel({Chef: [calls, "Dinner.", calls, "Supper."], Cook: ["soup", "cake", "soup", "cake"]})
    async with Container(models={"default": model}).register(Chef) as container:
        assert await container.get(Chef).plan("dinner") == "Dinner."
        assert "".join([each async for each in container.get(Chef).tell("supper")]) == "Supper."


@pytest.mark.parametrize("script", [{}, {Cook: []}], ids=["no script", "no more replies"])
async def test_a_missing_reply_of_a_service_that_is_a_tool_reaches_the_test(script: Any) -> None:
    model = ScriptedChatModel({Chef: [tool_call("cook", {"dish": "soup"}), "Dinner."], **script})
    async with Container(models={"default": model}).register(Chef) as container:
        with pytest.raises(AssertionError, match="Cook"):
            await container.get(Chef).plan("dinner")


async def test_a_service_without_a_script_and_a_request_of_no_service_are_named() -> None:
    model = ScriptedChatModel({Waiter: "hello", Cook: []})
    async with Container(models={"default": model}).register(Guest, Cook, Waiter) as container:
        with pytest.raises(AssertionError, match="no script for the service Guest; there are scripts for Waiter, Cook"):
            await container.get(Guest).ask("?")
        with pytest.raises(AssertionError, match="no scripted reply for request 2 of Cook"):
            await container.get(Cook).cook("soup")
        assert await container.get(Waiter).serve("soup") == "hello"
    with pytest.raises(AssertionError, match="comes from no service"):
        await model.chat(HI)


async def test_replies_are_added_to_the_script_of_one_service() -> None:
    model = ScriptedChatModel({Waiter: []})
    model.will_reply("one", service=Waiter)
    model.will_reply("two", service=Guest)
    service = create_ai_service(Waiter, chat_model=model)

    assert await service.serve("?") == "one"
    assert await create_ai_service(Guest, chat_model=model).ask("?") == "two"
    with pytest.raises(TypeError, match="pass service="):
        model.will_reply("three")
    with pytest.raises(TypeError, match="invalid service="):
        model.will_reply("three", service=service)


async def test_a_service_gets_a_script_at_any_time_and_the_others_keep_the_common_one() -> None:
    model = ScriptedChatModel(["one", "two"])
    waiter, guest = create_ai_service(Waiter, chat_model=model), create_ai_service(Guest, chat_model=model)
    assert await waiter.serve("?") == "one"

    model.will_reply("mine", service=Waiter)
    model.will_reply("three")

    assert [await guest.ask("?"), await waiter.serve("?"), await guest.ask("?")] == ["two", "mine", "three"]
    with pytest.raises(AssertionError, match="no scripted reply for request 5 of Waiter"):
        await waiter.serve("?")
    with pytest.raises(AssertionError, match="no scripted reply for request 6, "):
        await guest.ask("?")
    model.will_reply("by name", service=f"{Guest.__module__}.{Guest.__qualname__}")
    assert await guest.ask("?") == "by name"


async def test_the_innermost_service_gets_its_script_and_direct_requests_the_common_one() -> None:
    @register_ai_service(tools=Cook)
    class Head(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("cook", {"dish": "soup"}), "served"])
    model.will_reply("soup", service=Cook)
    async with Container(models={"default": model}).register(Cook, Head) as container:
        assert await container.get(Head).ask("?") == "served"
    model.will_reply("direct")
    assert (await model.chat(ChatRequest([UserMessage("?")]))).ai_message.text == "direct"
    assert [text_of(each.messages[-1]) for each in model.requests[:3]] == ["?", "soup", "soup"]


# --- text_of


def test_text_of_is_all_that_messages_say_in_order() -> None:
    call = tool_call("look")
    messages = [
        SystemMessage("Be brief."),
        UserMessage(["What is", ImageContent(url="https://example.com/a.png"), "this?"]),
        AiMessage(None, [call], reasoning="hm"),
        ToolExecutionResultMessage.of(call, "a lake"),
        AiMessage("A lake."),
    ]

    assert [text_of(each) for each in messages] == ["Be brief.", "What is\nthis?", "", "a lake", "A lake."]
    assert text_of(messages) == "Be brief.\nWhat is\nthis?\na lake\nA lake."
    assert text_of(iter(messages[3:])) == "a lake\nA lake."
    assert text_of(ChatRequest(messages)) == text_of(tuple(messages))
    assert text_of([]) == ""


async def test_text_of_a_model_is_its_last_request() -> None:
    model = ScriptedChatModel(["one"])
    await model.chat(HI)

    assert text_of(model) == text_of(model.requests[0]) == "Hi"
