"""Summaries in calls: one request before the first one, which is a model request of the call like any other."""

import logging
from typing import Any, Protocol

import pytest

from tests.conversations.three_methods import ThreeMethods
from tests.listening import Events
from toolbox import (
    AiMessage,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    FinishReason,
    InMemoryChatMemoryStore,
    MemoryId,
    MessageWindow,
    ModelHttpError,
    ModelRequestEvent,
    Result,
    ServiceCompletedEvent,
    TokenStream,
    TokenUsage,
    TokenWindow,
    register_ai_service,
    tool,
)
from toolbox.conversations import FullHistory, Summary
from toolbox.guardrails import (
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    input_guardrails,
    output_guardrails,
)
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed, interceptors
from toolbox.limits import UsageLimitExceededError, UsageLimits, usage_limits
from toolbox.models import ModelRouter
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

SHORT = Summary(MessageWindow(4), keep_messages=2, model="small")


@register_ai_service(chat_memory=SHORT)
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...
    async def tell(self, room: MemoryId[str], text: str) -> Result[str]: ...
    def stream(self, room: MemoryId[str], text: str) -> TokenStream: ...


def says(text: str, total: int = 10) -> ChatResponse:
    return ChatResponse(AiMessage(text), TokenUsage(total, 0), FinishReason.STOP)


def answers(count: int) -> list[ChatResponse]:
    return [says(f"a{each}") for each in range(1, count + 1)]


def sent_by(model: ScriptedChatModel, index: int = -1) -> list[str]:
    return [each.text or "" for each in model.requests[index].messages]


async def talk(assistant: Any, *numbers: int) -> None:
    for each in numbers:
        await assistant.chat("7", f"q{each}")


def container(main: Any, small: Any = (), service: type[Any] = Assistant, store: Any = None) -> Container:
    models = {"default": main, "small": small if small != () else ScriptedChatModel()}
    made = Container(models=models).register(service, Events)
    return made.register_instance(store or InMemoryChatMemoryStore(), ChatMemoryStore)


# --- what is asked and sent


async def test_what_the_window_would_leave_out_is_summarized_by_one_request() -> None:
    main = ScriptedChatModel(answers(6))
    small = ScriptedChatModel([says("They met."), says("They met, and ate.")])
    async with container(main, small) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        assert small.requests == []
        await talk(assistant, 4)

        assert sent_by(main) == ["Summary of the conversation so far:\nThey met.\nq3", "a3", "q4"]
        assert sent_by(small)[:-1] == ["q1", "a1", "q2", "a2"]
        assert "Summarize" in sent_by(small)[-1]
        assert (small.requests[0].tool_specifications, small.requests[0].parameters) == ((), {})

        await talk(assistant, 5)
        assert len(small.requests) == 1
        await talk(assistant, 6)
        assert len(small.requests) == 2
        assert sent_by(small)[:2] == ["Summary of the conversation so far:\nThey met.\nq3", "a3"]
        assert sent_by(main)[0] == "Summary of the conversation so far:\nThey met, and ate.\nq5"
        assert len(await app.chat_memory(Assistant, "7").messages()) == 12


async def test_by_default_the_models_of_the_service_is_asked_with_the_own_prompt() -> None:
    @register_ai_service(model="large", chat_memory=Summary(MessageWindow(2), 1, prompt="In one line."))
    class Own(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    large = ScriptedChatModel(["a1", "a2", "Short.", "a3"])
    async with Container(models={"large": large}).register(Own) as app:
        await talk(app.get(Own), 1, 2, 3)

    assert sent_by(large, 2) == ["q1", "a1", "In one line."]
    assert sent_by(large, 3) == ["Summary of the conversation so far:\nShort.\nq2", "a2", "q3"]


async def test_calls_of_tools_are_texts_in_the_request() -> None:
    class Clock:
        @tool
        def time(self, city: str) -> str:
            return "12:00"

    @register_ai_service(tools=Clock, chat_memory=Summary(MessageWindow(5), keep_messages=2, model="small"))
    class Own(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    main = ScriptedChatModel([tool_call("time", {"city": "Rome"}), "Noon.", "a2", "a3"])
    small = ScriptedChatModel(["It was noon."])
    async with Container(models={"default": main, "small": small}).register(Own) as app:
        await talk(app.get(Own), 1, 2, 3)

    roles = [type(each).__name__ for each in small.requests[0].messages]
    assert roles == ["UserMessage", "AiMessage", "UserMessage", "AiMessage", "UserMessage"]
    assert sent_by(small)[1] == '[Called the tool time with {"city": "Rome"}]'
    assert sent_by(small)[2] == "[The tool time returned: 12:00]"
    assert not any(each.tool_execution_requests for each in small.requests[0].messages if isinstance(each, AiMessage))


async def test_a_summary_is_stored_at_once_also_if_the_call_fails() -> None:
    store = InMemoryChatMemoryStore()
    failed = ModelHttpError(500, "down")
    main = ScriptedChatModel([*answers(3), failed, says("a4")])
    small = ScriptedChatModel([says("They met.", 7)])
    async with container(main, small, store=store) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        with pytest.raises(ModelHttpError):
            await talk(assistant, 4)

        [head] = await store.find_heads(limit=1)
        assert (head.notes.summary, head.usage.total_tokens, head.messages) == ("They met.", 37, 6)
        await talk(assistant, 4)
    assert len(small.requests) == 1
    assert sent_by(main)[0].endswith("They met.\nq3")


async def test_a_store_with_three_methods_keeps_the_summary_as_its_first_message() -> None:
    store = ThreeMethods()
    main, small = ScriptedChatModel(answers(5)), ScriptedChatModel(["They met."])
    async with container(main, small, store=store) as app:
        await talk(app.get(Assistant), 1, 2, 3, 4, 5)

        stored = await app.chat_memory(Assistant, "7").messages()
    assert len(small.requests) == 1
    assert sent_by(main)[0] == "Summary of the conversation so far:\nThey met.\nq3"
    assert [each.text for each in stored][:2] == ["They met.", "q3"]


# --- a model request of the call


async def test_its_tokens_count_for_the_call_and_once_for_the_conversation() -> None:
    store = InMemoryChatMemoryStore()
    main = ScriptedChatModel([*answers(3), says("a4", 100)])
    async with container(main, ScriptedChatModel([says("They met.", 7)]), store=store) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        result = await assistant.tell("7", "q4")
        completed = app.get(Events).of(ServiceCompletedEvent)[-1]

    [head] = await store.find_heads(limit=1)
    assert (result.token_usage, completed.token_usage) == (TokenUsage(107, 0), TokenUsage(107, 0))
    assert head.usage.total_tokens == 30 + 107


async def test_tokens_of_a_summary_that_was_cut_off_count_too() -> None:
    store = InMemoryChatMemoryStore()
    cut = ChatResponse(AiMessage("They m"), TokenUsage(7, 0), FinishReason.LENGTH)
    async with container(ScriptedChatModel(answers(4)), ScriptedChatModel([cut]), store=store) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        result = await assistant.tell("7", "q4")

    [head] = await store.find_heads(limit=1)
    assert (result.token_usage, head.usage) == (TokenUsage(17, 0), TokenUsage(47, 0))


async def test_listeners_get_its_events_as_those_of_the_call() -> None:
    main, small = ScriptedChatModel(answers(4)), ScriptedChatModel(["They met."])
    async with container(main, small) as app:
        await talk(app.get(Assistant), 1, 2, 3, 4)
        asked = app.get(Events).of(ModelRequestEvent)

    assert [each.model for each in asked[-2:]] == [small, main]
    assert asked[-2].context.invocation_id == asked[-1].context.invocation_id
    assert asked[-2].streaming is False


seen: list[tuple[str, str | None]] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


class Watching(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        seen.append(("model", call.model))
        return await proceed(call)


class Input(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> Any:
        seen.append(("input", request.user_message.text))
        return self.success()


class Output(OutputGuardrail):
    def validate(self, request: OutputGuardrailRequest) -> Any:
        seen.append(("output", request.text))
        return self.success()


@register_ai_service(chat_memory=SHORT)
@interceptors(Watching)
@input_guardrails(Input)
@output_guardrails(Output)
class Watched(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


async def test_interceptors_see_it_and_guardrails_do_not() -> None:
    main, small = ScriptedChatModel(answers(4)), ScriptedChatModel(["They met."])
    async with container(main, small, Watched) as app:
        await talk(app.get(Watched), 1, 2, 3)
        seen.clear()
        await talk(app.get(Watched), 4)

    assert seen == [("input", "q4"), ("model", "small"), ("model", "default"), ("output", "a4")]


@pytest.mark.parametrize("watched", [True, False])
async def test_a_limit_ends_the_call(watched: bool) -> None:
    @register_ai_service(chat_memory=SHORT, limits=UsageLimits(model_calls=1))
    @(interceptors(Watching) if watched else lambda cls: cls)
    class Limited(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    main, small = ScriptedChatModel(answers(4)), ScriptedChatModel(["They met."])
    async with container(main, small, Limited) as app:
        limited = app.get(Limited)
        await talk(limited, 1, 2, 3)
        with pytest.raises(UsageLimitExceededError):
            await talk(limited, 4)
        assert (len(main.requests), len(small.requests)) == (3, 1)
        await talk(limited, 4)  # the summary is there


async def test_a_limit_that_the_summary_itself_exceeds_ends_the_call_before_it_is_sent() -> None:

    main, small = ScriptedChatModel(answers(4)), ScriptedChatModel(["They met."])
    async with container(main, small) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2)
        with pytest.raises(UsageLimitExceededError), usage_limits(model_calls=1):
            await talk(assistant, 3, 4)
    assert small.requests == []


async def test_readers_of_a_stream_get_nothing_of_it() -> None:
    main, small = ScriptedChatModel(answers(4)), ScriptedChatModel(["They met."])
    async with container(main, small) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        events = [each async for each in assistant.stream("7", "q4")]

    assert "".join(getattr(each, "text", "") for each in events[:-1]) == "a4"
    assert len(small.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        ModelHttpError(500, "down"),
        "",
        ChatResponse(AiMessage("They m"), None, FinishReason.LENGTH),
        tool_call("time", {}),
        RuntimeError("broken"),
    ],
    ids=["refused", "empty", "cut off", "a call", "broken"],
)
async def test_without_a_summary_the_window_cuts_and_a_warning_says_so(
    reply: Any, caplog: pytest.LogCaptureFixture
) -> None:
    main, small = ScriptedChatModel(answers(5)), ScriptedChatModel([reply, "They met."])
    async with container(main, small) as app:
        assistant = app.get(Assistant)
        with caplog.at_level(logging.WARNING, "toolbox.services"):
            await talk(assistant, 1, 2, 3, 4)
        assert sent_by(main) == ["q3", "a3", "q4"]
        [warning] = [each for each in caplog.records if each.name == "toolbox.services"]
        assert "Assistant.chat" in warning.getMessage()

        await talk(assistant, 5)  # the next call asks again, for all of it
    assert sent_by(small)[:2] == ["q1", "a1"]


async def test_a_cancelled_summary_ends_the_call() -> None:
    import anyio

    begun = anyio.Event()

    class Slow:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            begun.set()
            await anyio.sleep_forever()
            raise AssertionError

    main = ScriptedChatModel(answers(4))
    async with container(main, Slow()) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        async with anyio.create_task_group() as group:
            group.start_soon(talk, assistant, 4)
            await begun.wait()
            group.cancel_scope.cancel()
    assert len(main.requests) == 3


# --- routers, and what is wrong


class BySize(ModelRouter):
    names = ("large",)

    def choose(self, request: ChatRequest, context: Any) -> str:
        seen.append(("router", request.messages[0].text))
        return "large"


async def test_a_router_sees_what_is_sent() -> None:
    @register_ai_service(model=BySize, chat_memory=SHORT)
    class Routed(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    large, small = ScriptedChatModel(answers(4)), ScriptedChatModel(["They met."])
    async with Container(models={"large": large, "small": small}).register(Routed) as app:
        await talk(app.get(Routed), 1, 2, 3, 4)

    assert seen[-1] == ("router", "Summary of the conversation so far:\nThey met.\nq3")


@pytest.mark.parametrize(
    ("view", "router", "fact"),
    [
        (Summary(MessageWindow(10), model="smal"), False, "unknown model 'smal'; did you mean 'small'?"),
        (Summary(MessageWindow(20)), True, "Summary has no model"),
        (Summary(MessageWindow(10), keep_messages=10), False, "is not smaller than MessageWindow(10)"),
        (Summary(FullHistory()), False, "invalid Summary(window=FullHistory())"),  # type: ignore[arg-type]
        (Summary(Summary(TokenWindow(9))), False, "invalid Summary(window="),  # type: ignore[arg-type]
        (Summary(TokenWindow(9), model=""), False, "invalid Summary(model='')"),
        (Summary(TokenWindow(9), prompt=5), False, "invalid Summary(prompt=5)"),  # type: ignore[arg-type]
    ],
    ids=["unknown", "router", "keep", "all", "summary", "no name", "prompt"],
)
def test_a_summary_that_cannot_work_is_a_problem_at_start(view: Summary, router: bool, fact: str) -> None:
    @register_ai_service(model=BySize if router else None, chat_memory=view)
    class Wrong(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel()
    models = {"default": model, "large": model, "small": model}
    problems = Container(models=models).register(Wrong).check()

    assert any(fact in each.what for each in problems), problems


async def test_what_the_program_reads_asks_no_model() -> None:
    main, small = ScriptedChatModel(answers(3)), ScriptedChatModel()
    async with container(main, small) as app:
        await talk(app.get(Assistant), 1, 2, 3)

        assert len(await app.chat_memory(Assistant, "7").messages()) == 6
