"""`runs.tell`: a message of the user for a run under way, read once, in order, in whatever process."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    EventListener,
    IllegalConfigurationError,
    ImageContent,
    InputGuardrailError,
    IntermediateResponse,
    InvocationEvent,
    MemoryId,
    PartialResponse,
    Result,
    TextContent,
    TokenUsage,
    ToldEvent,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    input_guardrails,
    output_guardrails,
)
from toolbox.limits import UsageLimits
from toolbox.runs import InMemoryRunStore, RunEnded, RunId, RunNotFoundError, RunStateError, RunStore, approve, durable
from toolbox.security import SecurityIdentity
from toolbox.services.outputs import ANSWER_TOOL
from toolbox.store_clock import skip
from toolbox.testing import ScriptedChatModel, tool_call

from .crashing import Crashing, Kept, writes_of

pytestmark = pytest.mark.anyio


class Gated:
    """A model that says what it is asked, and waits before each reply until the test lets it go on."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.requests = list(replies), list[ChatRequest]()
        self.asked: asyncio.Queue[ChatRequest] = asyncio.Queue()
        self.may_reply: asyncio.Queue[None] = asyncio.Queue()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.requests.append(request)
        self.asked.put_nowait(request)
        await self.may_reply.get()
        reply = self.replies.pop(0)
        message = AiMessage(reply) if isinstance(reply, str) else AiMessage(None, (reply,))
        return ChatResponse(message, TokenUsage(1, 1))

    async def next_request(self) -> ChatRequest:
        return await asyncio.wait_for(self.asked.get(), 30)

    def go_on(self) -> None:
        self.may_reply.put_nowait(None)


def said(request: ChatRequest) -> list[str]:
    """Return who says what in a request, results of tools without their text."""
    names = {"UserMessage": "user", "AiMessage": "model", "ToolExecutionResultMessage": "tool"}
    return [f"{names[type(each).__name__]}: {getattr(each, 'text', None) or ''}" for each in request.messages]


@tool
async def look(place: str) -> str:
    return f"{place} is sunny"


LOOK = tool_call("look", {"place": "Rome"})


@register_ai_service(tools=look)
class Guide(Protocol):
    @durable
    async def ask(self, run: RunId, text: str) -> Result[str]: ...

    @durable
    async def chat(self, room: MemoryId[str], run: RunId, text: str) -> str: ...


def program(model: Any, *services: Any, store: Any = None, listener: EventListener | None = None) -> Container:
    container = Container(models={"default": model}).register(*(services or (Guide,)))
    container.register_instance(Kept() if store is None else store, RunStore)
    return container if listener is None else container.register_instance(listener)


async def test_a_message_stands_in_front_of_the_next_request() -> None:
    model = Gated(LOOK, "Rome it is.")
    async with program(model) as here:
        run = await here.runs.start(Guide.ask, "r", "Where?")
        await model.next_request()
        await here.runs.tell(run.id, "Only sunny places.", by="ann")
        model.go_on()
        request = await model.next_request()
        model.go_on()
        result = await here.runs.result(run)

    assert said(request) == ["user: Where?", "model: ", "tool: Rome is sunny", "user: Only sunny places."]
    assert [type(each).__name__ for each in result.messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "UserMessage",
        "AiMessage",
    ]


async def test_several_messages_are_one_message_in_their_order() -> None:
    model = Gated(LOOK, "Rome it is.")
    async with program(model) as here:
        run = await here.runs.start(Guide.ask, "r", "Where?")
        await model.next_request()
        for text in ("one", "two", "three"):
            await here.runs.tell(run.id, text)
        model.go_on()
        last = (await model.next_request()).messages[-1]
        model.go_on()
        result = await here.runs.result(run)

    assert isinstance(last, UserMessage)
    assert last.contents == (TextContent("one"), TextContent("two"), TextContent("three"))
    assert [each.text for each in result.messages if isinstance(each, UserMessage)] == ["Where?", "one", "two", "three"]


async def test_a_message_before_the_first_request_joins_the_users() -> None:
    """Nobody executes the run when it gets the message: another container does later."""
    store = Kept()
    async with program(Gated(), store=store) as here:
        run = await here.runs.start(Guide.ask, "r", "Where?")
        image = ImageContent("https://example.com/a.png")
        await here.runs.tell(run.id, UserMessage([TextContent("Like this."), image]))
    skip([store.clock], timedelta(seconds=store.lease))
    model = ScriptedChatModel(["There."])
    async with program(model, store=store) as here:
        await here.runs.execute("r")

    [message] = model.requests[0].messages
    assert isinstance(message, UserMessage)
    assert message.contents == (TextContent("Where?"), TextContent("Like this."), image)


class Weather(Protocol):
    """Returns structured answers."""

    @durable
    async def ask(self, run: RunId, text: str) -> list[str]: ...


@pytest.mark.parametrize("mode", ["prompt", "tool", "schema"])
async def test_the_instructions_about_the_answer_stay_the_last(mode: str) -> None:
    @register_ai_service(output_mode=mode)  # type: ignore[call-overload]  # parametrized
    class Guide(Weather, Protocol): ...

    store = Kept()
    async with program(Gated(), Guide, store=store) as here:
        await here.runs.start(Guide.ask, "r", "Where?")
        await here.runs.tell("r", "Hurry.")
    skip([store.clock], timedelta(seconds=store.lease))
    answer = tool_call(ANSWER_TOOL, {"value": ["Rome"]}) if mode == "tool" else '["Rome"]'
    model = ScriptedChatModel([answer, answer])
    async with program(model, Guide, store=store) as here:
        await here.runs.execute("r")

    [message] = model.requests[0].messages
    assert isinstance(message, UserMessage)
    assert message.text.startswith("Where?")
    assert "Hurry." in message.text
    assert message.text.endswith("Hurry.") is (mode != "prompt")


# --- answers that are not the last


async def test_an_answer_beside_a_message_is_an_intermediate_one() -> None:
    model = Gated("Oslo.", "Rome.")
    async with program(model) as here:
        run = await here.runs.start(Guide.ask, "r", "Where?")
        await model.next_request()
        await here.runs.tell(run.id, "Sunny, please.")
        model.go_on()
        request = await model.next_request()
        model.go_on()
        result = await here.runs.result(run)

    assert said(request) == ["user: Where?", "model: Oslo.", "user: Sunny, please."]
    assert result.content == "Rome."


judged: list[str] = []


class Judge(OutputGuardrail):
    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        judged.append(request.text)
        return self.success()


@pytest.mark.parametrize("mode", ["prompt", "tool"])
async def test_an_intermediate_answer_is_neither_parsed_nor_judged(mode: str) -> None:
    @register_ai_service(output_mode=mode, tools=look)  # type: ignore[call-overload]  # parametrized
    class Guide(Protocol):
        @durable
        @output_guardrails(Judge)
        async def ask(self, run: RunId, text: str) -> Result[list[str]]: ...

    def answer(*places: str) -> Any:
        given = {"value": list(places)}
        return tool_call(ANSWER_TOOL, given) if mode == "tool" else str(list(places)).replace("'", '"')

    judged.clear()
    model = Gated("not JSON" if mode == "prompt" else tool_call(ANSWER_TOOL, {"x": 1}), answer("Rome"))
    async with program(model, Guide, Judge) as here:
        run = await here.runs.start(Guide.ask, "r", "Where?")
        await model.next_request()
        await here.runs.tell(run.id, "Sunny, please.")
        model.go_on()
        request = await model.next_request()
        model.go_on()
        result = await here.runs.result(run)

    assert result.content == ["Rome"]
    assert len(judged) == 1
    assert said(request)[-1] == "user: Sunny, please."
    assert not any(getattr(each, "tool_execution_requests", ()) for each in request.messages)


async def test_a_message_that_comes_while_the_answer_is_judged_is_read_too() -> None:
    """The answer arrived before it, so it was judged; it is not the last one."""

    class Slow(OutputGuardrail):
        async def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            judged.append(request.text)
            if len(judged) == 1:
                await runs.tell("r", "Wait, sunny.")
            return self.success()

    @register_ai_service
    class Guide(Protocol):
        @durable
        @output_guardrails(Slow)
        async def ask(self, run: RunId, text: str) -> str: ...

    judged.clear()
    model = ScriptedChatModel(["Oslo.", "Rome."])
    async with program(model, Guide, Slow) as here:
        runs = here.runs
        assert await here.get(Guide).ask("r", "Where?") == "Rome."

    assert judged == ["Oslo.", "Rome."]
    assert said(model.requests[1]) == ["user: Where?", "model: Oslo.", "user: Wait, sunny."]


async def test_a_message_of_a_tool_of_the_run_is_in_the_next_request() -> None:
    @tool
    async def interrupt(runs: Any = None) -> str:
        await here.runs.tell("r", "Also Oslo.")
        return "done"

    @register_ai_service(tools=interrupt)
    class Guide(Protocol):
        @durable
        async def ask(self, run: RunId, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("interrupt"), "Rome and Oslo."])
    async with program(model, Guide) as here:
        await here.get(Guide).ask("r", "Where?")

    assert said(model.requests[1])[-1] == "user: Also Oslo."


# --- suspended and ended runs


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    return "paid"


@register_ai_service(tools=pay)
class Shop(Protocol):
    async def buy(self, text: str) -> Result[str]: ...


async def test_a_suspended_run_reads_it_after_the_answers() -> None:
    store = Kept()
    model = ScriptedChatModel([tool_call("pay", {"amount": 3})])
    async with program(model, Shop, store=store) as here:
        waiting = await here.get(Shop).buy("Buy it")
        await here.runs.tell(waiting.run_id or "", "And wrap it.")
    model = ScriptedChatModel(["Wrapped."])
    async with program(model, Shop, store=store) as here:
        result = await here.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})

    assert said(model.requests[0]) == ["user: Buy it", "model: ", "tool: paid", "user: And wrap it."]
    assert result.content == "Wrapped."


async def test_an_ended_run_takes_no_message() -> None:
    async with program(ScriptedChatModel(["Rome."])) as here:
        await here.get(Guide).ask("r", "Where?")
        with pytest.raises(RunStateError, match="completed"):
            await here.runs.tell("r", "Hello?")
        with pytest.raises(RunNotFoundError):
            await here.runs.tell("unknown", "Hello?")


@pytest.mark.parametrize("wrong", [None, 3, ["text"]])
async def test_only_texts_and_user_messages_of_persons_are_taken(wrong: Any) -> None:
    async with program(ScriptedChatModel([])) as here:
        with pytest.raises(TypeError, match="expected a str or a UserMessage"):
            await here.runs.tell("r", wrong)
        with pytest.raises(TypeError, match="SecurityIdentity"):
            await here.runs.tell("r", "text", by=3)


async def test_a_failed_run_that_goes_on_reads_what_came_before_its_end() -> None:
    store = Kept()

    @register_ai_service
    class Guide(Protocol):
        @durable
        async def ask(self, run: RunId, text: str) -> str: ...

    async def fail(request: ChatRequest) -> ChatResponse:
        await here.runs.tell("r", "Sunny, please.")
        raise ValueError("broken")

    class Broken:
        chat = staticmethod(fail)

    async with program(Broken(), Guide, store=store) as here:
        with pytest.raises(ValueError, match="broken"):
            await here.get(Guide).ask("r", "Where?")
    model = ScriptedChatModel(["Rome."])
    async with program(model, Guide, store=store) as here:
        await here.runs.retry("r")
        with pytest.raises(RunStateError):
            await here.runs.tell("r", "late")

    assert len(model.requests[0].messages) == 1
    assert "Sunny, please." in said(model.requests[0])[0]


# --- guardrails, events, conversations, stores


class Polite(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        if "damn" in request.user_message.text:
            return self.failure("be polite")
        return self.success_with(request.user_message.text.replace("4242", "****"))


@register_ai_service(tools=look)
class Guarded(Protocol):
    @durable
    @input_guardrails(Polite)
    async def ask(self, run: RunId, text: str) -> str: ...


async def test_input_guardrails_judge_and_rewrite_it() -> None:
    model = Gated(LOOK, "Rome.")
    async with program(model, Guarded, Polite) as here:
        run = await here.runs.start(Guarded.ask, "r", "Where?")
        await model.next_request()
        with pytest.raises(InputGuardrailError, match="refused"):
            await here.runs.tell(run.id, "damn slow")
        await here.runs.tell(run.id, "Card 4242.")
        model.go_on()
        request = await model.next_request()
        model.go_on()
        await here.runs.result(run)

    assert said(request)[-1] == "user: Card ****."


class Heard(EventListener):
    def __init__(self) -> None:
        self.told: list[ToldEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, ToldEvent):
            self.told.append(event)


async def test_listeners_and_followers_get_an_event() -> None:
    model, listener = Gated("Oslo.", LOOK, "Rome."), Heard()
    async with program(model, listener=listener) as here:
        run = await here.runs.start(Guide.ask, "r", "Where?")
        await model.next_request()
        await here.runs.tell(run.id, "Sunny.", by=SecurityIdentity("ann"))
        model.go_on()
        await model.next_request()
        await here.runs.tell(run.id, "Near the sea.")
        model.go_on()
        await model.next_request()
        model.go_on()
        await here.runs.result(run)
        events = [each.event async for each in here.runs.events(run.id)]

    for told in (listener.told, [each for each in events if isinstance(each, ToldEvent)]):
        assert [(each.message.text, each.by) for each in told] == [("Sunny.", "ann"), ("Near the sea.", None)]
        assert {(each.context.service, each.context.method) for each in told} == {(Guide, "ask")}
    kinds = [type(each) for each in events if not isinstance(each, PartialResponse)]
    assert kinds.index(IntermediateResponse) < kinds.index(ToldEvent)  # the answer before it is not the last
    assert isinstance(events[-1], RunEnded)


async def test_the_log_of_the_conversation_has_it() -> None:
    model = Gated(LOOK, "Rome.", "Again.")
    async with program(model) as here:
        run = await here.runs.start(Guide.chat, "room", "r", "Where?")
        await model.next_request()
        await here.runs.tell(run.id, "Sunny.")
        model.go_on()
        await model.next_request()
        model.go_on()
        await here.runs.result(run)
        messages = await here.chat_memory(Guide, "room").messages()
        model.go_on()
        await here.get(Guide).chat("room", "r2", "And now?")

    assert [each.text for each in messages if isinstance(each, UserMessage)] == ["Where?", "Sunny."]
    assert said(model.requests[-1])[-3:] == ["user: Sunny.", "model: Rome.", "user: And now?"]


async def test_a_message_that_waits_at_a_limit_stays_unanswered_in_the_log() -> None:
    @register_ai_service(tools=look, max_tool_rounds=0, on_limit="answer")
    class Guide(Protocol):
        @durable
        async def chat(self, room: MemoryId[str], run: RunId, text: str) -> Result[str]: ...

    model = Gated(LOOK, "Rome.")
    async with program(model, Guide) as here:
        run = await here.runs.start(Guide.chat, "room", "r", "Where?")
        await model.next_request()
        await here.runs.tell(run.id, "before")
        model.go_on()
        request = await model.next_request()
        await here.runs.tell(run.id, "meanwhile")
        model.go_on()
        result = await here.runs.result(run)
        messages = await here.chat_memory(Guide, "room").messages()

    assert request.tool_choice == "none"
    assert "before" in said(request)[0]
    assert (result.content, result.stopped_by, len(model.requests)) == ("Rome.", "max_tool_rounds", 2)
    assert [type(each).__name__ for each in messages] == ["UserMessage", "UserMessage", "AiMessage", "UserMessage"]


class Old(InMemoryRunStore):
    """A store of the program's own, of an earlier release."""

    persistent = True
    supports = frozenset({"retries"})


async def test_a_store_that_keeps_no_messages_is_a_configuration_error() -> None:
    async with program(ScriptedChatModel(["Rome."]), store=Old()) as here:
        with pytest.raises(IllegalConfigurationError, match="Old does not keep messages"):
            await here.runs.tell("r", "Hello?")
        assert (await here.get(Guide).ask("r", "Where?")).content == "Rome."


# --- crashes


class Counting:
    """Calls the tool until it has seen three results; then says which messages of the user it has read."""

    def __init__(self, during: Callable[[int], Any] | None = None) -> None:
        self.during = during

    async def chat(self, request: ChatRequest) -> ChatResponse:
        done = sum(isinstance(each, ToolExecutionResultMessage) for each in request.messages)
        if self.during is not None:
            await self.during(len(request.messages))
        users = [each.text for each in request.messages if isinstance(each, UserMessage)]
        if done < 2:
            return ChatResponse(AiMessage(None, (tool_call("look", {"place": f"{done}"}),)), TokenUsage(1, 1))
        return ChatResponse(AiMessage(" | ".join(users)), TokenUsage(1, 1))


@pytest.mark.parametrize("limits", [None, UsageLimits(model_calls=2)])
@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_at_any_write_loses_and_repeats_no_message(after: bool, limits: UsageLimits | None) -> None:
    @register_ai_service(tools=look, limits=limits, on_limit="answer")
    class Guide(Protocol):
        @durable
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    async def call(store: Any, taken: list[str]) -> Any:
        async def tell(number: int) -> None:
            text = f"m{len(taken) + 1}"
            if len(taken) < 4:
                await here.runs.tell("r", text)
                taken.append(text)

        async with program(Counting(tell), Guide, store=store) as here:
            return await here.get(Guide).ask("r", "start")

    count = await writes_of(Kept(), lambda store: call(store, []))
    assert count > 10
    for at in range(1, count + 1):
        kept, taken = Kept(), list[str]()
        with pytest.raises(Exception):  # noqa: B017 - each layer wraps the crash differently
            await call(Crashing(kept, at, after), taken)
        skip([kept.clock], timedelta(seconds=kept.lease))
        result = await call(kept, taken)

        users = [each.text for each in result.messages if isinstance(each, UserMessage)]
        stored = await kept.messages("r")
        assert len(users) - 1 == len(stored), f"write {at}"
        assert users[1:] == sorted(users[1:]), f"write {at}"
        assert set(taken) <= set(users), f"write {at}"


async def test_messages_of_many_writers_at_once_are_all_read_once() -> None:
    @register_ai_service(tools=look)
    class Guide(Protocol):
        @durable
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    taken: list[str] = []

    async def write(here: Container, number: int) -> None:
        for index in range(20):
            try:
                await here.runs.tell("r", f"{number}.{index}")
            except (RunStateError, RunNotFoundError):
                return
            taken.append(f"{number}.{index}")
            await asyncio.sleep(0)

    async with program(Counting(lambda _: asyncio.sleep(0)), Guide) as here:
        run = await here.runs.start(Guide.ask, "r", "start")
        await asyncio.gather(*(write(here, number) for number in range(5)))
        result = await here.runs.result(run)

    users = [each.text for each in result.messages if isinstance(each, UserMessage)]
    assert sorted(users[1:]) == sorted(taken)
    for number in range(5):
        own = [text for text in users[1:] if text.startswith(f"{number}.")]
        assert own == [f"{number}.{index}" for index in range(len(own))]
