"""Input guardrails of durable and started calls run before the run is stored, and decide what it stores."""

from typing import Any, ClassVar, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatRequestParameters,
    Container,
    InputGuardrailError,
    MemoryId,
    Message,
    Result,
    UserMessage,
    register_ai_service,
    system_message,
    tool,
    user_message,
)
from toolbox.events import EventListener, InvocationEvent, ServiceFailedEvent, ServiceStartedEvent
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.limits import usage_limits
from toolbox.runs import RunConflictError, RunFailedError, RunId, RunStore, approve
from toolbox.security import ForbiddenError, SecurityIdentity, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import ANN, asks, says
from .test_durable import Kept

pytestmark = pytest.mark.anyio

SECRET = "4111 1111"


class MaskCards(InputGuardrail):
    """Refuses `bad` messages, and hides card numbers."""

    seen: ClassVar[list[tuple[str, tuple[Message, ...]]]] = []

    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        text = request.user_message.text
        self.seen.append((text, tuple(request.messages)))
        if "bad" in text:
            return self.failure("no")
        return self.success_with(text.replace(SECRET, "CARD")) if SECRET in text else self.success()


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    MaskCards.seen.clear()


@tool(requires_approval=True)
def pay(euros: int) -> str:
    return "paid"


@register_ai_service(tools=pay, durable=True)
@input_guardrails(MaskCards)
class Shop(Protocol):
    async def ask(self, run: RunId, text: str) -> Result[str]: ...

    async def talk(self, room: MemoryId[str], text: str) -> str: ...

    @system_message("Answer in {language}.")
    @user_message("{name} says: {text}")
    async def tell(
        self,
        run: RunId,
        room: MemoryId[str],
        name: str,
        text: str,
        language: str,
        earlier: list[Message],
        parameters: ChatRequestParameters,
    ) -> str: ...

    @roles_allowed("manager")
    async def manage(self, run: RunId, text: str) -> str: ...


@register_ai_service(tools=pay)
@input_guardrails(MaskCards)
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


class Seen(EventListener):
    def __init__(self) -> None:
        self.kinds: list[type[InvocationEvent]] = []

    def on_event(self, event: InvocationEvent) -> None:
        self.kinds.append(type(event))


def container(store: RunStore, *replies: Any, model: ScriptedChatModel | None = None) -> Container:
    models = {"default": model or ScriptedChatModel(replies)}
    made = Container(models=models, seeds=(SecurityIdentity,), take_over_runs=False)
    return made.register(Shop, Desk, MaskCards).register_instance(store, RunStore)


async def stored(store: Kept, run_id: str = "r") -> str:
    """Return everything that is stored of a run."""
    run = await store.load(run_id)
    assert run is not None
    events = await store.events(run_id, 0)
    return "".join(
        [run.document, *(each.data for each in await store.records(run_id)), *(each.data for each in events)]
    )


async def test_a_refused_message_stores_no_run() -> None:
    store, seen = Kept(), Seen()
    async with container(store).register_instance(seen, EventListener) as here:
        with pytest.raises(InputGuardrailError):
            await here.get(Shop).ask("r", "bad")
        with pytest.raises(InputGuardrailError):
            await here.runs.start(here.get(Shop).ask, "r", "bad")
        with pytest.raises(InputGuardrailError):
            await here.runs.start(here.get(Desk).ask, "bad")

        assert await here.runs.list() == []
        assert seen.kinds.count(ServiceStartedEvent) == seen.kinds.count(ServiceFailedEvent) == 3


async def test_a_run_stores_the_rewritten_message_only() -> None:
    store = Kept()
    async with container(store, asks(tool_call("pay", {"euros": 1}))) as here:
        result = await here.get(Shop).ask("r", f"Pay with {SECRET}")

        assert [each.text for each in result.messages if isinstance(each, UserMessage)] == ["Pay with CARD"]
        assert SECRET not in await stored(store)
    model = ScriptedChatModel([says("done")])
    async with container(store.restarted(), model=model) as there:
        assert (await there.runs.resume("r", {"0": approve()})).content == "done"
    assert model.requests[0].messages[0] == UserMessage("Pay with CARD")
    assert len(MaskCards.seen) == 1


async def test_a_started_run_stores_the_rewritten_message_and_runs_no_guardrail_again() -> None:
    store = Kept()
    async with container(store, says("done")) as here:
        run = await here.runs.start(here.get(Desk).ask, f"Pay with {SECRET}")
        result = await here.runs.result(run)

        assert result.content == "done"
        assert result.messages[0] == UserMessage("Pay with CARD")
        assert SECRET not in await stored(store, run.id)
    assert len(MaskCards.seen) == 1


async def test_a_call_that_is_suspended_stores_the_rewritten_message_only() -> None:
    store = Kept()
    async with container(store, asks(tool_call("pay", {"euros": 1}))) as here:
        result = await here.get(Desk).ask(f"Pay with {SECRET}")
        assert SECRET not in await stored(store, result.run_id or "")


async def test_arguments_that_are_used_elsewhere_are_stored() -> None:
    store = Kept()
    model = ScriptedChatModel([asks(tool_call("pay", {"euros": 1})), says("done")])
    async with container(store, model=model) as here:
        parameters = ChatRequestParameters(temperature=0.5)
        history: list[Message] = [UserMessage("Hi"), AiMessage("Hello")]
        run = await here.runs.start(
            here.get(Shop).tell, "r", "7", "Ann Smith", f"Pay with {SECRET}", "English", history, parameters
        )
        async for event in here.runs.events(run):
            if type(event.event).__name__ == "RunSuspended":
                break
        assert await here.runs.resume("r", {"0": approve()})

        text = await stored(store)
        assert SECRET not in text
        assert '"Ann Smith"' not in text  # the name is part of the message, and not stored a second time
        for request in model.requests:
            assert request.messages[0].text == "Answer in English."  # type: ignore[union-attr]  # a system message
            assert request.temperature == 0.5
        assert [each.text for each in model.requests[0].messages[1:]] == [
            "Hi",
            "Hello",
            "Ann Smith says: Pay with CARD",
        ]  # type: ignore[union-attr]  # texts
        # The same call finds its run by the hash of its arguments, and another one does not.
        again = (f"Pay with {SECRET}", "English", history, parameters)
        assert (await here.runs.start(here.get(Shop).tell, "r", "7", "Ann Smith", *again)).id == "r"
        with pytest.raises(RunConflictError, match="other arguments"):
            await here.runs.start(here.get(Shop).tell, "r", "7", "Bob", *again)


async def test_all_arguments_are_stored_if_no_guardrail_rewrote_the_message() -> None:
    store = Kept()
    async with container(store, says("done")) as here:
        await here.get(Shop).ask("r", "Pay")
        document = (await store.load("r")).document  # type: ignore[union-attr]  # it is there
        assert '"text": "Pay"' in document


async def test_an_existing_run_asks_no_guardrail() -> None:
    store = Kept()
    async with container(store, says("done")) as here:
        first = await here.get(Shop).ask("r", f"Pay with {SECRET}")
        assert await here.get(Shop).ask("r", f"Pay with {SECRET}") == first
        assert (await here.runs.start(here.get(Shop).ask, "r", f"Pay with {SECRET}")).id == "r"
        for other in ("bad", "Pay with CARD", "Pay"):
            with pytest.raises(RunConflictError, match="other arguments"):
                await here.get(Shop).ask("r", other)
    assert len(MaskCards.seen) == 1


async def test_roles_come_before_the_guardrails() -> None:
    async with container(Kept()) as here, here.request_scope({SecurityIdentity: ANN}):
        with pytest.raises(ForbiddenError):
            await here.get(Shop).manage("r", "bad")
    assert MaskCards.seen == []


async def test_the_guardrails_see_the_conversation_without_waiting_for_its_turn() -> None:
    store = Kept()
    async with container(store, says("one"), says("two")) as here:
        await here.get(Shop).talk("7", "first")
        run = await here.runs.start(here.get(Shop).talk, "7", "second")
        assert await here.runs.result(run) == "two"

    assert [text for text, _ in MaskCards.seen] == ["first", "second"]
    assert [each.text for each in MaskCards.seen[1][1]] == ["first", "one"]  # type: ignore[union-attr]  # texts


async def test_a_guardrail_that_asks_a_model_draws_on_the_limits_of_the_block_around_the_start() -> None:
    @register_ai_service(model="judge")
    class Judge(Protocol):
        async def judge(self, text: str) -> str: ...

    class Judging(InputGuardrail):
        def __init__(self, judge: Judge) -> None:
            self._judge = judge

        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            await self._judge.judge(request.user_message.text)
            return self.success()

    @tool
    def look() -> str:
        return "seen"

    @register_ai_service(tools=look)
    @input_guardrails(Judging)
    class Careful(Protocol):
        async def ask(self, text: str) -> str: ...

    look_twice = ScriptedChatModel([tool_call("look", {}), tool_call("look", {})])
    made = Container(models={"default": look_twice, "judge": ScriptedChatModel(["fine"])}, take_over_runs=False)
    async with made.register(Judge, Careful, Judging).register_instance(Kept(), RunStore) as here:
        with usage_limits(model_calls=2):
            run = await here.runs.start(Careful.ask, "x")
        with pytest.raises(RunFailedError, match="model_calls=1"):
            await here.runs.result(run, timeout=60)
