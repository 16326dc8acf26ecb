"""Interceptors around model requests, also in streams, and tools that they take out of a request."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    EventListener,
    IllegalConfigurationError,
    InvocationEvent,
    MemoryId,
    ModelRequestEvent,
    PartialResponse,
    StreamEvent,
    TokenStream,
    ToolExecutionResultMessage,
    UnknownToolError,
    application_scoped,
    create_ai_service,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.interceptors import (
    ModelInterceptor,
    ModelInvocation,
    ModelProceed,
    interceptors,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .intercepted import (
    PLUS,
    Stop,
    assistant,
    look,
    scripted,
)
from .log import LOG

pytestmark = pytest.mark.anyio


def asking(function: Any) -> ModelInterceptor:
    """Return an interceptor with this function as its `around_model`."""

    class Asking(ModelInterceptor):
        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
            return await function(call, proceed)  # type: ignore[no-any-return]  # of a test

    return Asking()


# --- models


async def test_a_model_interceptor_may_change_the_request_and_the_reply() -> None:
    async def change(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        request = replace(call.request, temperature=0.5)
        response = await proceed(replace(call, request=request))
        return replace(response, ai_message=AiMessage(f"{response.ai_message.text}!"))

    model = scripted("done")
    result = await assistant(asking(change), model=model).ask("x")
    assert result.content == "done!"
    assert result.messages[-1] == AiMessage("done!")
    assert model.requests[0].temperature == 0.5


async def test_a_model_interceptor_sees_the_configured_name_and_the_context() -> None:
    seen: list[ModelInvocation] = []

    async def look(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        seen.append(call)
        return await proceed(call)

    @register_ai_service(model="clever")
    @interceptors(asking(look))
    class Clever(Protocol):
        async def ask(self, question: str) -> str: ...

    async with Container(models={"default": scripted(), "clever": scripted("hi")}).register(Clever) as container:
        await container.get(Clever).ask("x")
    assert [(each.model, each.context.service) for each in seen] == [("clever", Clever)]


async def test_what_a_model_interceptor_raises_ends_the_invocation() -> None:
    async def fail(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        raise LookupError("no model today")

    with pytest.raises(LookupError):
        await assistant(asking(fail)).ask("x")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_model_interceptor_may_answer_from_a_cache_or_ask_again(streamed: bool) -> None:
    replies: dict[str, ChatResponse] = {}

    async def cached(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        key = repr(call.request)
        if key not in replies:
            replies[key] = await proceed(call)
        return replies[key]

    async def until_done(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        while "done" not in str((response := await proceed(call)).ai_message.text):
            pass
        return response

    model = scripted("not yet", "done now")
    used = assistant(asking(cached), asking(until_done), model=model)
    for number in range(2):
        if not streamed:
            assert (await used.ask("x")).content == "done now"
            continue
        events = [each async for each in used.events("x")]
        texts = [each.text for each in events if isinstance(each, PartialResponse)]
        # The pieces of the first try were sent; a reply from the cache is one piece.
        assert texts == (["not ", "yet", "done ", "now"] if number == 0 else ["done now"])
        assert isinstance(events[-1], CompleteResponse)
        assert events[-1].response.ai_message.text == "done now"
    assert len(model.requests) == 2


async def test_in_a_stream_proceed_returns_when_the_reply_is_complete_and_pieces_stay_sent() -> None:
    gate = asyncio.Event()

    class Slow:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("streams only")

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            yield PartialResponse("one ")
            await gate.wait()
            yield PartialResponse("two")
            yield CompleteResponse(ChatResponse(AiMessage("one two")))

    async def change(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        response = await proceed(call)
        LOG.append("complete")
        return replace(response, ai_message=AiMessage("three"))

    @register_ai_service
    @interceptors(asking(change))
    class Streaming(Protocol):
        def events(self, room: MemoryId[str], question: str) -> TokenStream: ...

    container = Container(models={"default": Slow()}).register(Streaming)
    async with container:
        events: list[Any] = []
        async for event in container.get(Streaming).events("r", "x"):
            events.append(event)
            if not gate.is_set():
                assert LOG == []
                gate.set()
        messages = await container.chat_memory(Streaming, "r").messages()

    assert [each.text for each in events[:-1]] == ["one ", "two"]
    assert events[-1].response.ai_message == AiMessage("three")
    assert messages[-1] == AiMessage("three")


async def test_with_a_model_interceptor_no_tool_starts_before_the_reply_is_final() -> None:
    async def without_tools(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        response = await proceed(call)
        return replace(response, ai_message=AiMessage("no tools"))

    calls = AiMessage(None, (PLUS, PLUS))
    used = assistant(asking(without_tools), model=scripted(calls), concurrent_tools=True)
    _ = [each async for each in used.events("x")]
    assert LOG == []


async def test_a_model_interceptor_cannot_swallow_errors_that_end_the_invocation() -> None:
    class Broken:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise Stop("stop")

    async def swallow(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        try:
            return await proceed(call)
        except BaseException:
            return ChatResponse(AiMessage("swallowed"))

    with pytest.raises(Stop):
        await assistant(asking(swallow), model=Broken()).ask("x")


@pytest.mark.parametrize("value", [None, "text", AiMessage("x")])
async def test_a_model_interceptor_that_returns_something_else_is_a_mistake(value: Any) -> None:
    async def wrong(call: ModelInvocation, proceed: ModelProceed) -> Any:
        return value

    with pytest.raises(IllegalConfigurationError, match="return a ChatResponse"):
        await assistant(asking(wrong)).ask("x")


async def test_a_model_interceptor_cannot_choose_another_model() -> None:
    async def other(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        return await proceed(replace(call, model="other"))

    with pytest.raises(IllegalConfigurationError, match="change only its request"):
        await assistant(asking(other)).ask("x")


async def test_a_reply_from_an_interceptor_causes_no_model_event() -> None:
    @application_scoped
    class Requests(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, ModelRequestEvent):
                LOG.append("request")

    async def cached(call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        return ChatResponse(AiMessage("cached"))

    @register_ai_service
    @interceptors(asking(cached))
    class Quick(Protocol):
        async def ask(self, question: str) -> str: ...

    async with Container(models={"default": scripted()}).register(Quick, Requests) as container:
        assert await container.get(Quick).ask("x") == "cached"
    assert LOG == []


class WithoutDelete(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        left = [each for each in call.request.tool_specifications if each.name != "delete"]
        return await proceed(replace(call, request=replace(call.request, tool_specifications=left)))


class FromCache(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        if len(call.request.messages) > 1:
            return ChatResponse(AiMessage("cached"))
        return ChatResponse(AiMessage(None, (tool_call("delete"),)))


class FirstOfTwo(ModelInterceptor):
    """Asks twice, the second time without tools, and returns the first reply."""

    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        first = await proceed(call)
        await proceed(replace(call, request=replace(call.request, tool_specifications=())))
        return first


@tool
def delete() -> str:
    LOG.append("deleted")
    return "deleted"


# --- tools that an interceptor takes out of the request


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("concurrent", [False, True])
async def test_a_tool_that_was_taken_out_of_the_request_does_not_run(streamed: bool, concurrent: bool) -> None:
    @register_ai_service(tools=[delete, look], concurrent_tools=concurrent)
    @interceptors(WithoutDelete)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...
        def events(self, text: str) -> TokenStream: ...

    reply = ChatResponse(AiMessage(None, (tool_call("look"), tool_call("delete"))))
    model = ScriptedChatModel([reply])
    desk = create_ai_service(Desk, chat_model=model)
    with pytest.raises(UnknownToolError) as raised:
        _ = [event async for event in desk.events("x")] if streamed else await desk.ask("x")
    assert raised.value.tool_names == ("look",)
    assert "deleted" not in LOG


async def test_the_model_sees_which_tools_were_sent() -> None:
    @register_ai_service(tools=[delete, look], on_unknown_tool=return_to_model)
    @interceptors(WithoutDelete)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("delete"), "sorry"])
    assert await create_ai_service(Desk, chat_model=model).ask("x") == "sorry"
    [*_, result] = model.requests[1].messages
    assert isinstance(result, ToolExecutionResultMessage)
    assert "look" in result.text
    assert LOG == []


@pytest.mark.parametrize(
    ("interceptor", "replies"), [(FromCache, []), (FirstOfTwo, [tool_call("delete"), "b", "c", "d"])]
)
async def test_the_tools_of_the_request_whose_reply_is_used_count(interceptor: Any, replies: Any) -> None:
    @register_ai_service(tools=[delete, look])
    @interceptors(interceptor)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    await create_ai_service(Desk, chat_model=ScriptedChatModel(replies)).ask("x")
    assert LOG == ["deleted"]
