"""Output guardrails: rewritten answers, retries, memory, structured answers and streams."""

from typing import Any, Protocol

import pytest

from tests.services.guarded import Item, NoCompetitors, Polite, Shop, price, started
from toolbox import (
    AiMessage,
    ChatResponse,
    CompleteResponse,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    Result,
    ReturnBehavior,
    SystemMessage,
    TokenStream,
    TokenUsage,
    ToolRoundsExceededError,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.guardrails import (
    GuardrailResult,
    OutputGuardrail,
    OutputGuardrailError,
    OutputGuardrailRequest,
    output_guardrails,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG

pytestmark = pytest.mark.anyio


PRICE = tool_call("price", {"item": "tea"})


async def test_an_answer_is_rewritten_before_it_is_returned_and_remembered() -> None:
    async with started(ScriptedChatModel([PRICE, "Tea costs 3"]), Shop) as container:
        assert await container.get(Shop).ask("r", "price?") == "Tea costs 3!"
        messages = await container.chat_memory(Shop, "r").messages()

    assert [type(each).__name__ for each in messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
    ]
    assert messages[-1] == AiMessage("Tea costs 3!")
    [judged] = LOG
    assert (judged.text, judged.response.ai_message.text) == ("Tea costs 3", "Tea costs 3")
    assert judged.messages == tuple(messages[:-1])


async def test_retry_asks_again_with_the_same_messages() -> None:
    model = ScriptedChatModel(["retry", "retry again", "fine"])
    shop = create_ai_service(Shop, chat_model=model)

    assert (await shop.result("hello")).content == "fine!"
    assert [each.messages for each in model.requests] == [(UserMessage("hello"),)] * 3


async def test_reprompt_adds_the_answer_and_the_prompt_and_tools_work_again() -> None:
    model = ScriptedChatModel([PRICE, "reprompt me", PRICE, "fine"])
    async with started(model, Shop) as container:
        assert await container.get(Shop).ask("r", "hello") == "fine!"
        messages = await container.chat_memory(Shop, "r").messages()

    sent = model.requests[2].messages
    assert sent[-2:] == (AiMessage("reprompt me"), UserMessage("Say it differently."))
    assert model.requests[2].tool_specifications
    texts = [each.text for each in messages if not isinstance(each, SystemMessage)]
    assert texts == ["hello", None, "tea costs 3", None, "tea costs 3", "fine!"]


async def test_rejected_answers_count_as_usage_and_their_messages_are_not_in_the_result() -> None:
    def says(text: str) -> ChatResponse:
        return ChatResponse(AiMessage(text), TokenUsage(10, 5))

    shop = create_ai_service(Shop, chat_model=ScriptedChatModel([says("reprompt"), says("fine")]))
    result = await shop.result("hello")

    assert result.token_usage == TokenUsage(20, 10)
    assert result.messages == (UserMessage("hello"), AiMessage("fine!"))


@pytest.mark.parametrize("word", ["retry", "reprompt"])
async def test_the_budget_of_retries_is_one_for_the_whole_call(word: str) -> None:
    model = ScriptedChatModel([word, "retry", f"last {word}"])
    shop = create_ai_service(Shop, chat_model=model)
    with pytest.raises(OutputGuardrailError) as caught:
        await shop.result("hello")

    assert len(model.requests) == 3
    assert caught.value.failures == ((Polite, f"it says {word}"),)
    assert caught.value.text == f"last {word}"
    assert str(caught.value) == "the answer was refused by a guardrail"


async def test_the_largest_declared_budget_counts() -> None:
    model = ScriptedChatModel([*["retry"] * 4, "fine"])
    assert await create_ai_service(Shop, chat_model=model).patient("hello") == "fine!"


async def test_a_retry_budget_of_zero_disables_retries() -> None:
    @register_ai_service
    class Strict(Protocol):
        @output_guardrails(Polite, max_retries=0)
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel(["retry"])
    with pytest.raises(OutputGuardrailError):
        await create_ai_service(Strict, chat_model=model).ask("hello")
    with pytest.raises(ValueError, match="invalid max_retries=-1"):
        output_guardrails(Polite, max_retries=-1)


async def test_tool_rounds_are_counted_over_retries() -> None:
    @register_ai_service(tools=[price], max_tool_rounds=2)
    @output_guardrails(Polite)
    class Limited(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([PRICE, "retry", PRICE, "retry", PRICE])
    with pytest.raises(ToolRoundsExceededError):
        await create_ai_service(Limited, chat_model=model).ask("hello")


async def test_failures_are_collected_and_memory_is_unchanged() -> None:
    async with started(ScriptedChatModel(["failure of ACME"]), Shop) as container:
        with pytest.raises(OutputGuardrailError) as caught:
            await container.get(Shop).ask("r", "hello")
        assert await container.chat_memory(Shop, "r").messages() == []

    assert caught.value.failures == ((Polite, "it says failure"), (NoCompetitors, "a competitor"))
    assert caught.value.text == "failure of ACME"


async def test_a_fatal_output_guardrail_stops_the_chain() -> None:
    shop = create_ai_service(Shop, chat_model=ScriptedChatModel(["fatal ACME"]))
    with pytest.raises(OutputGuardrailError) as caught:
        await shop.ask("r", "hello")
    assert caught.value.failures == ((Polite, "it says fatal"),)


async def test_an_output_guardrail_that_raises_is_fatal() -> None:
    class Broken(OutputGuardrail):
        async def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            raise LookupError("gone")

    @register_ai_service
    @output_guardrails(Broken)
    class Guarded(Protocol):
        async def ask(self, text: str) -> str: ...

    with pytest.raises(OutputGuardrailError) as caught:
        await create_ai_service(Guarded, chat_model=ScriptedChatModel(["hello"])).ask("x")
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.failures == ((Broken, "gone"),)


@pytest.mark.parametrize("mode", ["prompt", "tool", "schema"])
async def test_structured_answers_are_parsed_before_they_are_judged_and_changed(mode: Any) -> None:
    class Renaming(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            LOG.append(request.text)
            if "worst" in request.text:
                return self.reprompt("bad", "Another one.")
            return self.success_with(request.text.replace("bad", "good"))

    @register_ai_service(output_mode=mode)
    @output_guardrails(Renaming)
    class Names(Protocol):
        async def ask(self, text: str) -> Item: ...

    def answer(text: str) -> Any:
        return tool_call("final_answer", text) if mode == "tool" else text

    model = ScriptedChatModel([answer('{"name": "worst"}'), answer('{"nam": 1}'), answer('{"name": "bad"}')])
    assert await create_ai_service(Names, chat_model=model).ask("x") == Item(name="good")
    assert LOG == ['{"name": "worst"}', '{"name": "bad"}']  # a reply that does not fit is asked again, not judged
    assert model.requests[1].messages[-2:] == (AiMessage('{"name": "worst"}'), UserMessage("Another one."))


async def test_messages_and_methods_without_a_value_are_judged_too() -> None:
    shop = create_ai_service(Shop, chat_model=ScriptedChatModel(["fine", "failure"]))
    assert await shop.message("x") == AiMessage("fine!")
    with pytest.raises(OutputGuardrailError):
        await shop.nothing("x")


async def test_a_changed_answer_loses_what_may_repeat_the_old_text() -> None:
    reply = ChatResponse(
        AiMessage("my key", reasoning="the key", attributes={"raw": "my key"}), attributes={"logprobs": "my key"}
    )
    shop = create_ai_service(Shop, chat_model=ScriptedChatModel([reply, reply]))
    assert await shop.message("x") == AiMessage("my key!")
    *_, last = [each async for each in shop.events("x")]
    assert isinstance(last, CompleteResponse)
    assert last.response == ChatResponse(AiMessage("my key!"))


async def test_output_guardrails_do_not_run_for_an_immediate_return() -> None:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now() -> str:
        return "failure"

    @register_ai_service(tools=[now])
    @output_guardrails(Polite)
    class Quick(Protocol):
        async def result(self, text: str) -> Result[str]: ...

    result = await create_ai_service(Quick, chat_model=ScriptedChatModel([tool_call("now")])).result("x")
    assert result.content is None
    assert not LOG


async def test_a_stream_holds_back_its_text_until_the_answer_has_passed() -> None:
    first = ChatResponse(AiMessage("let me look", (PRICE,), reasoning="hm"))
    model = ScriptedChatModel([first, "retry one", "so loud that nothing changes"])
    events = [each async for each in create_ai_service(Shop, chat_model=model).events("x")]

    texts = [each.text for each in events if isinstance(each, (PartialResponse, PartialReasoning))]
    assert "".join(texts) == "so loud that nothing changes"
    assert len(texts) > 1
    [between] = [each for each in events if isinstance(each, IntermediateResponse)]
    assert between.response.ai_message == AiMessage(None, (PRICE,))
    assert isinstance(events[-1], CompleteResponse)


async def test_a_changed_or_refused_answer_of_a_stream_never_shows_its_old_text() -> None:
    shop = create_ai_service(Shop, chat_model=ScriptedChatModel(["fine", "failure"]))
    events = [each async for each in shop.events("x")]
    assert [each.text for each in events if isinstance(each, PartialResponse)] == ["fine!"]
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message.text == "fine!"

    seen = []
    with pytest.raises(OutputGuardrailError):
        async for event in shop.events("x"):
            seen.append(event)
    assert seen == []


async def test_streams_of_texts_and_items_hold_back_too() -> None:
    from collections.abc import AsyncIterator

    @register_ai_service(tools=[price])
    @output_guardrails(Polite)
    class Streams(Protocol):
        def texts(self, text: str) -> AsyncIterator[str]: ...
        def items(self, text: str) -> AsyncIterator[Item]: ...

    loud = '[{"name": "loud"}, {"name": "tea"}]'
    streams = create_ai_service(Streams, chat_model=ScriptedChatModel(["fine", PRICE, "retry", loud]))
    assert [each async for each in streams.texts("x")] == ["fine!"]
    assert [each async for each in streams.items("x")] == [Item(name="loud"), Item(name="tea")]


async def test_concurrent_tools_start_only_when_the_reply_is_complete_if_answers_are_judged() -> None:
    @register_ai_service(tools=[price], concurrent_tools=True)
    @output_guardrails(Polite)
    class Together(Protocol):
        def events(self, text: str) -> TokenStream: ...

    model = ScriptedChatModel([AiMessage(None, (PRICE, tool_call("price", {"item": "milk"}))), "loud"])
    kinds = [type(each).__name__ async for each in create_ai_service(Together, chat_model=model).events("x")]
    assert kinds.index("IntermediateResponse") < kinds.index("BeforeToolExecution")


async def test_a_request_takes_its_fields_in_the_order_of_earlier_releases() -> None:
    seen: list[OutputGuardrailRequest] = []

    class Noting(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            seen.append(request)
            return self.success()

    @output_guardrails(Noting())
    class Counting(Protocol):
        async def count(self, text: str) -> int: ...

    await create_ai_service(Counting, chat_model=ScriptedChatModel(["7"])).count("x")

    [request] = seen
    four = request.response, request.text, request.messages, request.context
    assert OutputGuardrailRequest(*four, 7) == request
    assert OutputGuardrailRequest(*four).messages == (UserMessage("x"),)
    assert OutputGuardrailRequest(*four).value is None
