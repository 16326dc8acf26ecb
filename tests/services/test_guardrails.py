"""Tests guardrails of messages and answers: order, retries, memory, streams, errors, events, problems at start."""

import asyncio
import threading
import time
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    ChatResponse,
    CompleteResponse,
    Container,
    EventListener,
    GuardrailExecutedEvent,
    IllegalConfigurationError,
    ImageContent,
    IntermediateResponse,
    InvocationContext,
    InvocationEvent,
    InvocationTimeoutError,
    MemoryId,
    PartialReasoning,
    PartialResponse,
    Result,
    ReturnBehavior,
    SystemMessage,
    TextContent,
    TokenStream,
    TokenUsage,
    ToolAbort,
    ToolRoundsExceededError,
    UserMessage,
    application_scoped,
    create_ai_service,
    register_ai_service,
    request_scoped,
    system_message,
    time_limit,
    tool,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailError,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailError,
    OutputGuardrailRequest,
    ToolInputGuardrail,
    ToolOutputGuardrail,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG

pytestmark = pytest.mark.anyio


@application_scoped
class Events(EventListener):
    def __init__(self) -> None:
        self.guardrails: list[tuple[str, str]] = []
        self.all: list[GuardrailExecutedEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, GuardrailExecutedEvent):
            self.guardrails.append((event.guardrail.__name__, event.outcome))
            self.all.append(event)


# --- input


class Upper(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        LOG.append(("Upper", request.user_message.text))
        return self.success_with(request.user_message.text.upper())


class NoDigits(InputGuardrail):
    async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        LOG.append(("NoDigits", request.user_message.text))
        if any(each.isdigit() for each in request.user_message.text):
            return self.failure("digits")
        return self.success()


class NoQuestions(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.failure("a question") if "?" in request.user_message.text else self.success()


class NoAttack(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        if "ATTACK" in request.user_message.text:
            return self.fatal("refused", KeyError("cause"))
        return self.success()


@register_ai_service
@input_guardrails(Upper, NoDigits)
class Desk(Protocol):
    @input_guardrails(NoQuestions, NoAttack)
    async def ask(self, room: MemoryId[str], text: str) -> str: ...

    async def plain(self, text: str) -> str: ...

    @input_guardrails(NoQuestions)
    def wait(self, text: str) -> str: ...

    @input_guardrails(NoQuestions)
    def events(self, text: str) -> TokenStream: ...


def started(model: ScriptedChatModel, *classes: type) -> Container:
    return Container(models={"default": model}).register(*classes)


async def test_input_guardrails_of_the_class_run_before_those_of_the_method_and_see_changes() -> None:
    model = ScriptedChatModel(["hello", "bye"])
    async with started(model, Desk, Events) as container:
        desk = container.get(Desk)
        assert await desk.ask("r", "abc") == "hello"
        assert await desk.plain("what?") == "bye"
        messages = await container.chat_memory(Desk, "r").messages()

        assert LOG == [("Upper", "abc"), ("NoDigits", "ABC"), ("Upper", "what?"), ("NoDigits", "WHAT?")]
        assert [each.messages[-1] for each in model.requests] == [UserMessage("ABC"), UserMessage("WHAT?")]
        assert messages == [UserMessage("ABC"), AiMessage("hello")]
        assert container.get(Events).guardrails[:4] == [
            ("Upper", "modified"),
            ("NoDigits", "success"),
            ("NoQuestions", "success"),
            ("NoAttack", "success"),
        ]


async def test_failures_of_input_guardrails_are_collected_and_nothing_is_sent_or_remembered() -> None:
    model = ScriptedChatModel([])
    async with started(model, Desk) as container:
        with pytest.raises(InputGuardrailError) as caught:
            await container.get(Desk).ask("r", "how many? 7")
        assert await container.chat_memory(Desk, "r").messages() == []

    assert caught.value.failures == ((NoDigits, "digits"), (NoQuestions, "a question"))
    assert str(caught.value) == "the input was refused by a guardrail"
    assert not model.requests


async def test_a_fatal_input_guardrail_stops_the_chain_and_keeps_its_cause() -> None:
    async with started(ScriptedChatModel([]), Desk) as container:
        with pytest.raises(InputGuardrailError) as caught:
            await container.get(Desk).ask("r", "attack 1")

    assert caught.value.failures == ((NoDigits, "digits"), (NoAttack, "refused"))
    assert isinstance(caught.value.__cause__, KeyError)


async def test_streams_and_synchronous_methods_have_input_guardrails_too() -> None:
    async with started(ScriptedChatModel(["fine"]), Desk) as container:
        desk = container.get(Desk)
        with pytest.raises(InputGuardrailError):
            _ = [each async for each in desk.events("who?")]
        with pytest.raises(InputGuardrailError):
            await asyncio.to_thread(desk.wait, "who?")
        assert await asyncio.to_thread(desk.wait, "fine") == "fine"


async def test_input_guardrails_see_the_conversation_so_far_and_the_context() -> None:
    seen: list[InputGuardrailRequest] = []

    class Seeing(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            seen.append(request)
            return self.success()

    @register_ai_service
    @input_guardrails(Seeing())
    @system_message("Be short.")
    class Seen(Protocol):
        async def ask(self, room: MemoryId[str], text: str) -> str: ...

    async with started(ScriptedChatModel(["one", "two"]), Seen) as container:
        await container.get(Seen).ask("r", "first")
        await container.get(Seen).ask("r", "second")

    assert seen[0].messages == ()
    assert [each for each in seen[1].messages if not isinstance(each, SystemMessage)] == [
        UserMessage("first"),
        AiMessage("one"),
    ]
    assert seen[1].user_message == UserMessage("second")
    assert (seen[1].context.memory_id, seen[1].context.method) == ("r", "ask")


async def test_a_text_as_replacement_keeps_the_images_of_the_message() -> None:
    picture = ImageContent(data=b"x", mime_type="image/png")

    @register_ai_service
    @input_guardrails(Upper)
    class Looking(Protocol):
        async def look(self, message: UserMessage) -> str: ...

    model = ScriptedChatModel(["done"])
    message = UserMessage([TextContent("what"), picture, TextContent("is it")], name="ada")
    await create_ai_service(Looking, chat_model=model).look(message)
    assert model.requests[0].messages == (UserMessage([TextContent("WHAT\nIS IT"), picture], name="ada"),)


async def test_tools_see_the_message_that_a_guardrail_changed() -> None:
    @tool
    def look(context: InvocationContext) -> str:
        assert context.user_message is not None
        return context.user_message.text

    model = ScriptedChatModel([tool_call("look"), "done"])
    assert await create_ai_service(Desk, chat_model=model, tools=[look]).plain("abc") == "done"

    result: Any = model.requests[-1].messages[-1]
    assert result.text == "ABC"


@pytest.mark.parametrize(
    "value",
    [None, "yes", True, GuardrailResult("retry", "again"), GuardrailResult("ok"), GuardrailResult("modified", value=3)],  # type: ignore[arg-type]
)
async def test_a_guardrail_that_returns_something_else_refuses(value: Any) -> None:
    class Wrong(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return value  # type: ignore[no-any-return]  # the mistake

    desk = create_ai_service(guarded(Wrong()), chat_model=ScriptedChatModel([]))
    with pytest.raises(InputGuardrailError) as caught:
        await desk.ask("hello")
    assert isinstance(caught.value.__cause__, TypeError)


def guarded(*guardrails: Any, **options: Any) -> Any:
    @register_ai_service(**options)
    @input_guardrails(*guardrails)
    class Guarded(Protocol):
        async def ask(self, text: str) -> str: ...
        def wait(self, text: str) -> str: ...

    return Guarded


async def test_a_guardrail_that_raises_refuses_with_the_exception_as_cause() -> None:
    class Broken(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise ZeroDivisionError("secret detail")

    class After(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise AssertionError("must not run")

    desk = create_ai_service(guarded(Broken, After), chat_model=ScriptedChatModel([]))
    with pytest.raises(InputGuardrailError) as caught:
        await desk.ask("hello")

    assert caught.value.failures == ((Broken, "secret detail"),)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "secret" not in str(caught.value)


async def test_errors_that_end_the_invocation_pass_through_a_guardrail() -> None:
    class Aborting(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise ToolAbort("stop")

    desk = create_ai_service(guarded(Aborting), chat_model=ScriptedChatModel([]))
    with pytest.raises(ToolAbort, match="stop"):
        await desk.ask("hello")


async def test_errors_that_end_the_invocation_pass_inside_a_group_too() -> None:
    class Grouping(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise ExceptionGroup("several", [ValueError(), ToolAbort("stop")])

    desk = create_ai_service(guarded(Grouping), chat_model=ScriptedChatModel([]))
    with pytest.raises(ExceptionGroup):
        await desk.ask("hello")


async def test_a_slow_guardrail_does_not_block_the_event_loop_and_the_deadline_bounds_it() -> None:
    release = threading.Event()

    class Slow(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            release.wait(60)
            return self.success()

    class Hanging(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            await asyncio.Event().wait()
            return self.success()

    model = ScriptedChatModel(["done"])
    desk = create_ai_service(guarded(Slow), chat_model=model)
    waiting = asyncio.create_task(desk.ask("hello"))
    await asyncio.sleep(0.01)  # the loop is free
    assert not waiting.done()
    release.set()
    assert await waiting == "done"

    release.clear()
    began = time.monotonic()
    for guardrail in (Slow, Hanging):
        bounded = create_ai_service(guarded(guardrail, timeout=0.05), chat_model=model)
        with pytest.raises(InvocationTimeoutError):
            await bounded.ask("hello")
        with pytest.raises(InvocationTimeoutError):
            await asyncio.to_thread(bounded.wait, "hello")
    assert time.monotonic() - began < 5
    release.set()


async def test_a_def_guardrail_of_a_synchronous_method_runs_on_the_callers_thread() -> None:
    class Where(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            LOG.append(threading.current_thread())
            return self.success()

    desk = create_ai_service(guarded(Where), chat_model=ScriptedChatModel(["done", "done"]))

    def call() -> threading.Thread:
        desk.wait("hello")
        return threading.current_thread()

    assert [await asyncio.to_thread(call)] == LOG
    await desk.ask("hello")
    assert LOG[-1] not in (threading.main_thread(), LOG[0])


async def test_a_guardrail_can_ask_another_service() -> None:
    @register_ai_service
    class Judge(Protocol):
        async def is_attack(self, text: str) -> bool: ...

    class NoInjection(InputGuardrail):
        def __init__(self, judge: Judge) -> None:
            self.judge = judge

        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            if await self.judge.is_attack(request.user_message.text):
                return self.fatal("refused")
            return self.success()

    model = ScriptedChatModel(['{"value": false}', "hello", '{"value": true}'])
    service = guarded(NoInjection)
    async with started(model, service, Judge) as container:
        assert await container.get(service).ask("hi") == "hello"
        with pytest.raises(InputGuardrailError):
            await container.get(service).ask("attack")


async def test_guardrails_have_the_scope_that_they_are_marked_with_and_can_be_overridden() -> None:
    @request_scoped
    class PerRequest(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            LOG.append(self)
            return self.success()

    class Replaced(PerRequest):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.failure("replaced")

    service = guarded(PerRequest, NoDigits)
    async with started(ScriptedChatModel(["a", "b", "c"]), service) as container:
        for _ in range(2):
            async with container.request_scope():
                await container.get(service).ask("x")
                if not LOG[2:]:
                    await container.get(service).ask("x")
        instances = [each for each in LOG if isinstance(each, PerRequest)]
        assert instances[0] is instances[1]
        assert instances[1] is not instances[2]
        assert container.get(NoDigits) is container.get(NoDigits)
        async with container.request_scope():
            with container.override(PerRequest, Replaced()), pytest.raises(InputGuardrailError) as caught:
                await container.get(service).ask("x")
    assert caught.value.failures == ((PerRequest, "replaced"),)


# --- output


class Polite(OutputGuardrail):
    """Judges by words in the answer."""

    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        LOG.append(request)
        for word in ("failure", "fatal", "retry"):
            if word in request.text:
                return getattr(self, word)(f"it says {word}")  # type: ignore[no-any-return]
        if "reprompt" in request.text:
            return self.reprompt("it says reprompt", "Say it differently.")
        return self.success_with(f"{request.text}!") if "loud" not in request.text else self.success()


class NoCompetitors(OutputGuardrail):
    async def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        return self.failure("a competitor") if "ACME" in request.text else self.success()


class Item(BaseModel):
    name: str


@tool
def price(item: str) -> str:
    return f"{item} costs 3"


@register_ai_service(tools=[price])
@output_guardrails(Polite)
class Shop(Protocol):
    @output_guardrails(NoCompetitors)
    async def ask(self, room: MemoryId[str], text: str) -> str: ...

    async def result(self, text: str) -> Result[str]: ...

    async def message(self, text: str) -> AiMessage: ...

    async def nothing(self, text: str) -> None: ...

    @output_guardrails(NoCompetitors, max_retries=4)
    async def patient(self, text: str) -> str: ...

    def events(self, text: str) -> TokenStream: ...


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


# --- services as tools


async def test_a_refusal_of_a_service_that_is_a_tool_is_a_failure_without_details() -> None:
    @register_ai_service
    class Inner(Protocol):
        @tool
        @input_guardrails(NoDigits)
        async def inner(self, text: str) -> str:
            """Answer."""
            ...

    @register_ai_service(tools=[Inner])
    class Outer(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("inner", {"text": "secret 7"}), "I cannot"])
    async with started(model, Inner, Outer) as container:
        assert await container.get(Outer).ask("go") == "I cannot"

    result: Any = model.requests[-1].messages[-1]
    assert result.is_error
    assert result.text == "the input was refused by a guardrail"
    assert LOG == [("NoDigits", "secret 7")]


# --- events


async def test_each_run_of_a_guardrail_is_one_event() -> None:
    async with started(ScriptedChatModel(["retry", "reprompt", "failure"]), Shop, Events) as container:
        with pytest.raises(OutputGuardrailError):
            await container.get(Shop).result("x")
        events = container.get(Events)

    assert events.guardrails == [("Polite", "retry"), ("Polite", "reprompt"), ("Polite", "failure")]
    assert all(each.duration > 0 and each.context.method == "result" for each in events.all)
    assert {each.invocation_id for each in events.all} == {events.all[0].context.invocation_id}


async def test_a_guardrail_that_raises_or_is_cancelled_has_a_fatal_event(clock: Clock) -> None:
    class Hanging(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            if request.user_message.text == "raise":
                raise ValueError
            clock.advance(101)
            await asyncio.Event().wait()
            return self.success()

    service = guarded(Hanging)
    async with started(ScriptedChatModel([]), service, Events) as container:
        with pytest.raises(InputGuardrailError):
            await container.get(service).ask("raise")
        with pytest.raises(InvocationTimeoutError), time_limit(100):
            await container.get(service).ask("hang")
        assert container.get(Events).guardrails == [("Hanging", "fatal")] * 2


# --- problems at start


class Needy(InputGuardrail):
    def __init__(self, missing: Item) -> None: ...

    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.success()


def problems_of(*classes: Any) -> list[str]:
    return [str(each) for each in started(ScriptedChatModel([]), *classes).check()]


def test_a_guardrail_of_a_wrong_kind_is_a_problem_at_start() -> None:
    [problem] = problems_of(guarded(Polite))
    assert problem == "Guarded, @input_guardrails: Polite is not an InputGuardrail; inherit from InputGuardrail"


@pytest.mark.parametrize(
    ("decorator", "kind"),
    [
        (input_guardrails, InputGuardrail),
        (output_guardrails, OutputGuardrail),
        (tool_input_guardrails, ToolInputGuardrail),
        (tool_output_guardrails, ToolOutputGuardrail),
    ],
)
def test_an_abstract_guardrail_without_a_bean_is_a_problem_at_start(decorator: Any, kind: Any) -> None:
    @register_ai_service(tools=price)
    @decorator(kind)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    expected = f"Desk, @{decorator.__name__}: no bean provides {kind.__name__}, which is abstract"
    assert problems_of(Desk) == [f"{expected}; name a class that implements validate"]
    with pytest.raises(IllegalConfigurationError, match=f"{kind.__name__} is abstract; name a subclass or an instance"):
        create_ai_service(Desk, chat_model=ScriptedChatModel([]))


def test_a_guardrail_with_other_parameters_is_a_problem_at_start() -> None:
    class Short(InputGuardrail):
        def validate(self) -> GuardrailResult:  # type: ignore[override]  # the mistake
            raise AssertionError

    class Long(Short):
        async def validate(self, *requests: Any, strict: bool = True) -> GuardrailResult:  # type: ignore[override]
            raise AssertionError

    assert problems_of(guarded(Long)) == []
    expected = "Short.validate: does not take one argument, the InputGuardrailRequest"
    assert problems_of(guarded(Short)) == [f"{expected}; declare it `def validate(self, request)`"]
    with pytest.raises(IllegalConfigurationError, match=r"Short\.validate: does not take one argument"):
        create_ai_service(guarded(Short), chat_model=ScriptedChatModel([]))


def test_a_guardrail_with_a_missing_dependency_is_a_problem_at_start() -> None:
    [problem] = problems_of(guarded(Needy))
    assert "Needy" in problem
    assert "no bean provides Item" in problem


def test_an_abstract_guardrail_needs_a_bound_implementation() -> None:
    class Policy(InputGuardrail): ...

    class Open(Policy):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.success()

    service = guarded(Policy)
    [problem] = problems_of(service)
    assert "no bean provides Policy" in problem
    container = started(ScriptedChatModel([]), service).bind(Policy, Open)
    assert container.check() == []


def test_a_service_guardrail_on_a_tool_is_a_problem_at_start() -> None:
    @tool
    @input_guardrails(NoDigits)
    def find(text: str) -> str:
        return text

    @register_ai_service(tools=[find])
    class Finder(Protocol):
        async def ask(self, text: str) -> str: ...

    [problem] = problems_of(Finder)
    assert "@input_guardrails: has no effect on a tool; use @tool_input_guardrails" in problem


def test_a_service_whose_guardrail_calls_it_is_a_problem_at_start() -> None:
    @register_ai_service
    @input_guardrails(NoDigits)
    class Loop(Protocol):
        async def ask(self, text: str) -> str: ...

    class Asking(InputGuardrail):
        def __init__(self, loop: Loop) -> None: ...

        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.success()

    service = input_guardrails(Asking)(Loop)
    [problem] = [str(each) for each in started(ScriptedChatModel([]), service, Asking).check()]
    assert "Asking" in problem
    assert "Loop" in problem


def test_without_a_container_a_guardrail_that_needs_arguments_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="Needy needs arguments, so it needs a container"):
        create_ai_service(guarded(Needy), chat_model=ScriptedChatModel([]))


def test_decorators_without_names_or_parentheses_are_rejected() -> None:
    with pytest.raises(TypeError, match="needs at least one class or instance"):
        input_guardrails()
    with pytest.raises(TypeError, match="with parentheses"):

        class Desk(Protocol):
            @input_guardrails  # type: ignore[arg-type]  # the mistake
            async def ask(self, text: str) -> str: ...

    with pytest.raises(TypeError, match="@output_guardrails: expected a function, a method or a class, got 3"):
        output_guardrails(Polite)(3)


def test_tool_guardrails_of_a_method_without_tools_are_a_problem() -> None:
    from toolbox.guardrails import MaxLength

    @register_ai_service
    class NoTools(Protocol):
        @tool_input_guardrails(MaxLength(3))
        async def ask(self, text: str) -> str: ...

    [problem] = problems_of(NoTools)
    assert "the method offers no tools" in problem
