"""A request that is too long for the model is sent again without earlier turns, then without results of tools."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import pytest

from tests.conversations.made_logs import check_alternation, check_pairs
from tests.conversations.three_methods import ThreeMethods
from tests.listening import Events
from toolbox import (
    AiMessage,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    ContextLengthError,
    InMemoryChatMemoryStore,
    MemoryId,
    Message,
    MessageWindow,
    ModelFailedEvent,
    PartialResponse,
    Result,
    TokenUsage,
    TokenWindow,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.conversations import FullHistory, Summary
from toolbox.limits import UsageLimitExceededError, usage_limits
from toolbox.models import fallback
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

FULL = ContextLengthError(400, "prompt is too long")
LONG = "x" * 5000


class Files:
    @tool
    def read(self, name: str) -> str:
        return f"{name} {LONG}"

    @tool
    def short(self) -> str:
        return "ok"


@register_ai_service(tools=Files, chat_memory=FullHistory())
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...
    async def once(self, text: str) -> str: ...
    async def ask(self, room: MemoryId[str], history: list[Message], text: str) -> str: ...
    def stream(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...


def sent_by(model: ScriptedChatModel, index: int = -1) -> list[str]:
    check_pairs(model.requests[index].messages)
    check_alternation(model.requests[index].messages)
    return [each.text or "" for each in model.requests[index].messages]


async def talk(assistant: Any, *numbers: int) -> None:
    for each in numbers:
        await assistant.chat("7", f"q{each}")


def answers(*numbers: int) -> list[Any]:
    return [f"a{each}" for each in numbers]


def container(model: Any, service: type[Any] = Assistant, store: Any = None, **models: Any) -> Container:
    made = Container(models={"default": model, **models}).register(service, Events)
    return made.register_instance(store or InMemoryChatMemoryStore(), ChatMemoryStore)


# --- earlier turns


def service_with(view: Any) -> type[Any]:
    @register_ai_service(tools=Files, chat_memory=view)
    class Viewed(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    return Viewed


@pytest.mark.parametrize(
    "view", [FullHistory(), MessageWindow(30), TokenWindow(3000)], ids=["all", "messages", "tokens"]
)
async def test_the_older_half_of_the_turns_is_left_out_and_the_cut_is_stored(view: Any) -> None:
    model = ScriptedChatModel([*answers(1, 2, 3), FULL, *answers(4, 5)])
    service = service_with(view)
    async with container(model, service) as app:
        await talk(app.get(service), 1, 2, 3, 4)
        assert sent_by(model, 3) == ["q1", "a1", "q2", "a2", "q3", "a3", "q4"]
        assert sent_by(model) == ["q3", "a3", "q4"]

        await talk(app.get(service), 5)
        assert sent_by(model) == ["q3", "a3", "q4", "a4", "q5"]
        assert len(await app.chat_memory(service, "7").messages()) == 10


async def test_of_one_turn_nothing_stays_and_the_third_refusal_is_raised() -> None:
    model = ScriptedChatModel([*answers(1, 2, 3), FULL, FULL, FULL, "a4"])
    async with container(model) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1, 2, 3)
        with pytest.raises(ContextLengthError):
            await talk(assistant, 4)
        assert [sent_by(model, at)[0] for at in (3, 4, 5)] == ["q1", "q3", "q4"]

        await talk(assistant, 4)  # what was left out stays out
    assert sent_by(model) == ["q4"]


async def test_a_cut_stays_for_the_rest_of_the_call() -> None:
    model = ScriptedChatModel([*answers(1, 2), FULL, tool_call("short", {}), "a3"])
    async with container(model) as app:
        await talk(app.get(Assistant), 1, 2, 3)

    assert sent_by(model) == ["q2", "a2", "q3", "", "ok"]


async def test_a_full_context_is_summarized_by_a_summary() -> None:
    view = Summary(TokenWindow(100_000), keep_messages=2, model="small")
    model = ScriptedChatModel([*answers(1, 2, 3), FULL, FULL, *answers(4, 5)])
    small = ScriptedChatModel(["They met.", "They met, and ate."])
    service = service_with(view)
    async with container(model, service, small=small) as app:
        await talk(app.get(service), 1, 2, 3, 4)

        assert sent_by(small, 0)[:-1] == ["q1", "a1", "q2", "a2"]
        assert sent_by(model, 4) == ["Summary of the conversation so far:\nThey met.\nq3", "a3", "q4"]
        assert sent_by(small, 1)[:-1] == ["Summary of the conversation so far:\nThey met.\nq3", "a3"]
        assert sent_by(model, 5) == ["Summary of the conversation so far:\nThey met, and ate.\nq4"]
        stored = await app.chat_memory(service, "7").messages()
        assert [each.text for each in stored] == ["q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4"]
        await talk(app.get(service), 5)
    assert sent_by(model) == ["Summary of the conversation so far:\nThey met, and ate.\nq4", "a4", "q5"]


async def test_without_a_summary_a_full_context_is_halved() -> None:
    view = Summary(TokenWindow(100_000), keep_messages=2, model="small")
    model = ScriptedChatModel([*answers(1, 2), FULL, *answers(3, 4)])
    service = service_with(view)
    async with container(model, service, small=ScriptedChatModel([FULL])) as app:
        await talk(app.get(service), 1, 2, 3, 4)

    assert sent_by(model, 3) == ["q2", "a2", "q3"]
    assert sent_by(model) == ["q2", "a2", "q3", "a3", "q4"]


async def test_a_window_that_has_cut_in_place_of_a_summary_is_halved() -> None:
    view = Summary(MessageWindow(8), keep_messages=4, model="small")
    model = ScriptedChatModel([*answers(1, 2, 3, 4, 5), FULL, *answers(6)])
    service = service_with(view)
    async with container(model, service, small=ScriptedChatModel([FULL, FULL])) as app:
        await talk(app.get(service), 1, 2, 3, 4, 5, 6)

    assert sent_by(model, 5) == ["q4", "a4", "q5", "a5", "q6"]
    assert sent_by(model) == ["q5", "a5", "q6"]


async def test_a_store_with_three_methods_keeps_what_was_left_out() -> None:
    model = ScriptedChatModel([*answers(1, 2, 3), FULL, FULL, *answers(4)])
    async with container(model, store=ThreeMethods()) as app:
        await talk(app.get(Assistant), 1, 2, 3, 4)
        assert [sent_by(model, at)[0] for at in (3, 4, 5)] == ["q1", "q3", "q4"]

        assert len(await app.chat_memory(Assistant, "7").messages()) == 8


async def test_of_what_a_view_of_the_programs_own_has_chosen_half_is_left_out() -> None:
    class Newest:
        def newest(self, messages: Sequence[Message]) -> Sequence[Message]:
            return messages[-4:]

    service = service_with(Newest())
    model = ScriptedChatModel([*answers(1, 2, 3), FULL, FULL, *answers(4, 5, 6)])
    async with container(model, service) as app:
        await talk(app.get(service), 1, 2, 3, 4, 5, 6)

    assert sent_by(model, 3) == ["q2", "a2", "q3", "a3", "q4"]
    assert sent_by(model, 4) == ["q3", "a3", "q4"]
    assert sent_by(model, 5) == ["q4"]
    assert sent_by(model, 6) == ["q4", "a4", "q5"]
    assert sent_by(model, 7) == ["q4", "a4", "q5", "a5", "q6"]


# --- results of tools


async def test_then_results_of_the_calls_tools_are_replaced_by_notes() -> None:
    asked = [tool_call("read", {"name": "a"}), tool_call("short", {})]
    model = ScriptedChatModel(["a1", AiMessage(None, asked), FULL, FULL, tool_call("short", {}), "a2"])
    async with container(model) as app:
        await talk(app.get(Assistant), 1, 2)
        assert sent_by(model, 2) == ["q1", "a1", "q2", "", f"a {LONG}", "ok"]
        assert sent_by(model, 3) == ["q2", "", f"a {LONG}", "ok"]
        note = sent_by(model, 4)[2]
        assert "read" in note
        assert "5002" in note
        assert sent_by(model, 5) == ["q2", "", note, "ok", "", "ok"]

        stored = await app.chat_memory(Assistant, "7").messages()
    assert f"a {LONG}" in [each.text for each in stored]


async def test_a_call_without_memory_leaves_out_results_alone() -> None:
    model = ScriptedChatModel([tool_call("read", {"name": "a"}), FULL, tool_call("read", {"name": "b"}), FULL, "done"])
    async with container(model) as app:
        assert await app.get(Assistant).once("q") == "done"
    assert all(LONG not in each for each in sent_by(model))


@pytest.mark.parametrize("replies", [[FULL], [tool_call("short", {}), FULL]], ids=["nothing", "short"])
async def test_where_nothing_can_be_left_out_the_refusal_is_raised(replies: list[Any]) -> None:
    model = ScriptedChatModel(replies)
    async with container(model) as app:
        with pytest.raises(ContextLengthError) as raised:
            await app.get(Assistant).once("q")
    assert raised.value is FULL
    assert len(model.requests) == len(replies)


async def test_messages_of_parameters_stay() -> None:
    model = ScriptedChatModel(["a1", FULL, "a2"])
    async with container(model) as app:
        assistant = app.get(Assistant)
        await talk(assistant, 1)
        assert await assistant.ask("7", [UserMessage("given"), AiMessage("said")], "q2") == "a2"

    assert sent_by(model) == ["given", "said", "q2"]


# --- streams, limits, fallbacks


async def test_a_stream_goes_on_if_its_reader_has_nothing_of_the_reply() -> None:
    model = ScriptedChatModel(["a1", tool_call("read", {"name": "a"}), FULL, FULL, "a2 is here"])
    async with container(model) as app:
        await talk(app.get(Assistant), 1)

        assert "".join([each async for each in app.get(Assistant).stream("7", "q2")]) == "a2 is here"
    assert sent_by(model)[0] == "q2"


async def test_a_stream_whose_reader_has_a_part_of_the_reply_ends_with_the_refusal() -> None:
    class Breaks:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            return ChatResponse(AiMessage("a1"))

        async def stream(self, request: ChatRequest) -> AsyncIterator[Any]:
            yield PartialResponse("par")
            raise FULL

    async with container(Breaks()) as app:
        await talk(app.get(Assistant), 1)
        said = []
        with pytest.raises(ContextLengthError):
            async for text in app.get(Assistant).stream("7", "q2"):
                said.append(text)
    assert said == ["par"]


async def test_each_request_has_its_events_and_counts() -> None:
    model = ScriptedChatModel(["a1", FULL, "a2", FULL])
    async with container(model) as app:
        await talk(app.get(Assistant), 1)
        with usage_limits(model_calls=2):
            await talk(app.get(Assistant), 2)
        [failed] = app.get(Events).of(ModelFailedEvent)
        assert failed.error is FULL
        with pytest.raises(UsageLimitExceededError), usage_limits(model_calls=1):
            await talk(app.get(Assistant), 3)


async def test_no_fallback_is_asked() -> None:
    @register_ai_service
    class Desk(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

        @fallback(chat)
        @staticmethod
        def offline(text: str) -> str:
            return "offline"

    class First(ScriptedChatModel):
        fallback = ("second",)

    first, second = First(["a1", FULL, "a2", FULL, FULL, FULL]), ScriptedChatModel()
    async with container(first, Desk, second=second) as app:
        await talk(app.get(Desk), 1)
        assert await app.get(Desk).chat("7", "q2") == "a2"
        with pytest.raises(ContextLengthError):
            await app.get(Desk).chat("7", "q3")
    assert second.requests == []


async def test_tokens_of_the_call_and_of_the_conversation_include_the_summary() -> None:
    @register_ai_service(chat_memory=Summary(TokenWindow(100_000), keep_messages=2))
    class Counted(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    def says(text: str, tokens: int) -> ChatResponse:
        return ChatResponse(AiMessage(text), TokenUsage(tokens, 0))

    store = InMemoryChatMemoryStore()
    model = ScriptedChatModel([says("a1", 1), says("a2", 1), FULL, says("They met.", 10), says("a3", 100)])
    async with container(model, Counted, store) as app:
        await talk(app.get(Counted), 1, 2)
        result = await app.get(Counted).chat("7", "q3")

    [head] = await store.find_heads(limit=1)
    assert result.token_usage == TokenUsage(110, 0)
    assert head.usage.total_tokens == 112


async def test_a_prompt_about_the_answer_stays_in_the_last_message() -> None:
    @register_ai_service(chat_memory=Summary(TokenWindow(100_000), keep_messages=2, model="small"))
    class Numbers(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> list[int]: ...

    model, small = ScriptedChatModel(["[1]", FULL, "[2]"]), ScriptedChatModel(["One."])
    async with container(model, Numbers, small=small) as app:
        await talk(app.get(Numbers), 1, 2)
        stored = await app.chat_memory(Numbers, "7").messages()

    [text] = sent_by(model)
    assert text.startswith("Summary of the conversation so far:\nOne.\nq2\n")
    assert "JSON" in text
    assert [each.text for each in stored] == ["q1", "[1]", "q2", "[2]"]
