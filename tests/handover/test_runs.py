"""Hand-overs in runs: calls that wait, that continue in another process, and that are followed."""

from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.listening import Events
from toolbox import (
    AiMessage,
    Container,
    HandedOver,
    HandedOverEvent,
    InputGuardrailError,
    MemoryId,
    ModelHttpError,
    Result,
    UserMessage,
    compensate_for,
    register_ai_service,
    sql,
    tool,
)
from toolbox.conversations.stores import InMemoryChatMemoryStore
from toolbox.errors import RunFailedError, RunIncompatibleError
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.handover import hands_over_to
from toolbox.runs import IdentityLoader, InMemoryRunStore, RunId, approve
from toolbox.security import ForbiddenError, SecurityIdentity, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

TO_BILLING = tool_call("transfer_to_billing", {})
refunded: list[int] = []


@tool(requires_approval=True)
def refund(order: int) -> str:
    """Refund an order."""
    refunded.append(order)
    return f"refunded {order}"


@register_ai_service(tools=refund, model="large")
class Billing(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service
class Desk(Protocol):
    @hands_over_to(Billing.chat)
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name=f"{__name__}.Desk")
class DeskAlone(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


class Process:
    """A program with the stores that outlive it."""

    def __init__(self) -> None:
        self.runs, self.chats = InMemoryRunStore(), InMemoryChatMemoryStore()

    def start(self, *replies: Any, services: tuple[Any, ...] = (Desk, Billing)) -> Container:
        self.small, self.large = ScriptedChatModel([]), ScriptedChatModel([])
        for to_large, reply in replies:
            (self.large if to_large else self.small).will_reply(reply)
        container = Container(models={"default": self.small, "large": self.large})
        container.register(*services)
        container.register_instance(self.runs)
        container.register_instance(self.chats)
        return container


async def test_a_call_of_the_target_waits_and_continues_in_another_process() -> None:
    refunded.clear()
    process = Process()
    async with process.start((False, TO_BILLING), (True, tool_call("refund", {"order": 7}))) as container:
        waiting = await container.get(Desk).chat("ada", "Money back")
        assert waiting.answered_by == "Billing.chat"
        [call] = waiting.pending
        assert (call.tool_name, call.service) == ("refund", f"{__name__}.Billing")
    async with process.start((True, "Done."), (True, "You are welcome.")) as container:
        run = await container.runs.get(waiting.run_id or "")
        assert run.service == f"{__name__}.Desk"
        result = await container.runs.resume(waiting.run_id or "", {call.id: approve()})
        assert (result.content, result.answered_by) == ("Done.", "Billing.chat")
        assert refunded == [7]
        assert [each.request.name for each in result.tool_executions] == ["transfer_to_billing", "refund"]
        assert (await container.runs.resume(waiting.run_id or "", {})).answered_by == "Billing.chat"
        assert (await container.get(Desk).chat("ada", "Thanks")).answered_by == "Billing.chat"


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_the_target_stays_in_charge_after_its_run_was_ended(how: str) -> None:
    process = Process()
    replies = ((False, TO_BILLING), (True, tool_call("refund", {"order": 7})), (True, "Yes?"))
    async with process.start(*replies) as container:
        waiting = await container.get(Desk).chat("ada", "Money back")
        room = container.conversations.of(Desk, "ada")
        await (room.stop() if how == "stop" else container.runs.cancel(waiting.run_id or ""))
        assert [each.get("in_charge") for each in (await room.export())["turns"]] == ["Billing.chat"]
        assert (await container.get(Desk).chat("ada", "Again")).answered_by == "Billing.chat"


async def test_a_call_beside_the_hand_over_that_waits_for_approval_waits_first() -> None:
    @register_ai_service(tools=refund)
    class Cashier(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    process = Process()
    both = AiMessage(tool_execution_requests=[TO_BILLING, tool_call("refund", {"order": 1})])
    async with process.start((False, both), (True, "Done."), services=(Cashier, Billing)) as container:
        waiting = await container.get(Cashier).chat("ada", "Money back")
        assert [each.tool_name for each in waiting.pending] == ["refund"]
        assert waiting.answered_by == "Cashier.chat"
        result = await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
        assert (result.content, result.answered_by) == ("Done.", "Billing.chat")


async def test_a_run_whose_target_is_gone_does_not_fit() -> None:
    process = Process()
    async with process.start((False, TO_BILLING), (True, tool_call("refund", {"order": 7}))) as container:
        waiting = await container.get(Desk).chat("ada", "Money back")
    async with process.start(services=(DeskAlone,)) as container:
        with pytest.raises(RunIncompatibleError):
            await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
    # A program that has the target for others, but does not hand over to it.
    async with process.start(services=(DeskAlone, Billing)) as container:
        with pytest.raises(RunIncompatibleError, match=r"Billing\.chat"):
            await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
        run = await container.runs.get(waiting.run_id or "")
        assert (run.status, len(run.pending)) == ("suspended", 1)


@register_ai_service(tools=refund)
class DurableBilling(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(durable=True)
class DurableDesk(Protocol):
    @hands_over_to(DurableBilling.chat)
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


async def test_a_durable_call_is_handed_over_and_its_events_say_so(tmp_path: Path) -> None:
    from toolbox import ToolboxSettings
    from toolbox.settings import SqlSettings

    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{tmp_path}/runs.db"))
    model = ScriptedChatModel([tool_call("transfer_to_durable_billing", {}), "Done.", "Again."])
    container = Container(models={"default": model}, settings=settings)
    container.register(DurableDesk, DurableBilling, sql.engine, sql.SqlRunStore, sql.SqlChatMemoryStore)
    async with container:
        await container.runs.start(DurableDesk.chat, run="r1", room="ada", text="Hi")
        seen = [each async for each in container.runs.events("r1")]
        assert [each.event for each in seen if isinstance(each.event, HandedOver)] == [
            HandedOver("DurableDesk.chat", "DurableBilling.chat")
        ]
        result = await container.get(DurableDesk).chat("r1", "ada", "Hi")
        assert (result.content, result.answered_by) == ("Done.", "DurableBilling.chat")
        assert (await container.conversations.of(DurableDesk, "ada").info()).in_charge == "DurableBilling.chat"
        assert (await container.get(DurableDesk).chat("r2", "ada", "Hi")).answered_by == "DurableBilling.chat"


async def test_a_run_that_failed_after_the_hand_over_goes_on_with_the_target() -> None:
    judged: list[str] = []

    class Masking(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            judged.append(request.user_message.text)
            return self.success_with(request.user_message.text.replace("1234", "****"))

    @register_ai_service(model="large")
    class Expert(Protocol):
        """Knows cards."""

        @input_guardrails(Masking)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Front(Protocol):
        @hands_over_to(Expert.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    process, to_expert = Process(), tool_call("transfer_to_expert", {})
    services = (Front, Expert, Events)
    replies = [(False, to_expert), (True, ModelHttpError(500, "broken"))]
    async with process.start(*replies, services=services) as container:
        started = await container.runs.start(Front.chat, room="ada", text="Card 1234")
        with pytest.raises(RunFailedError):
            await container.runs.result(started.id)
        assert len(container.get(Events).of(HandedOverEvent)) == 1
    async with process.start((True, "Blocked."), services=services) as container:
        result = await container.runs.retry(started.id)
        assert (result.content, result.answered_by) == ("Blocked.", "Expert.chat")
        assert judged == ["Card 1234"]
        assert process.small.requests == []
        assert container.get(Events).of(HandedOverEvent) == []
        assert process.large.requests[0].messages[0].text == "Card ****"


async def test_guardrails_of_the_one_in_charge_judge_a_run_before_it_is_stored_or_when_that_has_changed() -> None:
    judged: list[str] = []

    class NoDigits(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            judged.append(request.user_message.text)
            has_digits = any(each.isdigit() for each in request.user_message.text)
            return self.fatal("digits") if has_digits else self.success()

    @register_ai_service
    class Expert(Protocol):
        """Knows cards."""

        @input_guardrails(NoDigits)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Front(Protocol):
        @hands_over_to(Expert.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel(["Expert.", "Expert."])
    async with Container(models={"default": model}).register(Front, Expert) as container:
        room = await container.conversations.create(Front, "ada")
        waits = await container.runs.start(Front.chat, "ada", "one")
        assert judged == []
        await room.put_in_charge(Expert.chat)
        assert (await container.runs.execute(waits.id)).status == "completed"
        assert judged == ["one"]
        with pytest.raises(InputGuardrailError):
            await container.runs.start(Front.chat, "ada", "2")
        started = await container.runs.start(Front.chat, "ada", "three")
        assert (await container.runs.execute(started.id)).status == "completed"
        assert judged == ["one", "2", "three"]


async def test_a_message_for_a_run_passes_the_guardrails_of_the_one_in_charge() -> None:
    class NoDigits(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            has_digits = any(each.isdigit() for each in request.user_message.text)
            return self.fatal("digits") if has_digits else self.success()

    @register_ai_service(tools=refund)
    class Expert(Protocol):
        """Knows cards."""

        @input_guardrails(NoDigits)
        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service(tools=refund)
    class Front(Protocol):
        @hands_over_to(Expert.chat)
        async def chat(self, text: str) -> Result[str]: ...

    refund_7 = tool_call("refund", {"order": 7})
    model = ScriptedChatModel([refund_7, tool_call("transfer_to_expert", {}), refund_7, "Done."])
    async with Container(models={"default": model}).register(Front, Expert) as container:
        first = await container.get(Front).chat("Hi")
        run_id = first.run_id or ""
        await container.runs.tell(run_id, "order 7")
        second = await container.runs.resume(run_id, {first.pending[0].id: approve()})
        assert second.answered_by == "Expert.chat"
        with pytest.raises(InputGuardrailError):
            await container.runs.tell(run_id, "order 8")
        await container.runs.tell(run_id, "hurry")
        done = await container.runs.resume(run_id, {second.pending[0].id: approve()})
        assert done.content == "Done."
        texts = [each.text for each in done.messages if isinstance(each, UserMessage)]
        assert texts == ["Hi", "order 7", "hurry"]


async def test_the_target_s_guardrails_judge_messages_from_the_hand_over_on() -> None:
    class NoDigits(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            has_digits = any(each.isdigit() for each in request.user_message.text)
            return self.fatal("digits") if has_digits else self.success()

    @register_ai_service
    class Expert(Protocol):
        """Knows cards."""

        @input_guardrails(NoDigits)
        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service
    class Front(Protocol):
        @hands_over_to(Expert.chat)
        async def chat(self, text: str) -> Result[str]: ...

    container: Container

    async def first(request: Any) -> Any:
        await container.runs.tell(run_id, "order 7")  # Front is in charge
        return tool_call("transfer_to_expert", {})

    async def second(request: Any) -> Any:  # the first request of the target
        with pytest.raises(InputGuardrailError):
            await container.runs.tell(run_id, "order 8")
        return "Done."

    container = Container(models={"default": ScriptedChatModel([first, second])}).register(Front, Expert)
    async with container:
        run = await container.runs.start(Front.chat, "Hi")
        run_id = run.id
        result = await container.runs.result(run_id)
        assert [each.text for each in result.messages if isinstance(each, UserMessage)] == ["Hi", "order 7"]


async def test_a_failed_run_whose_target_is_gone_stays_as_it_is() -> None:
    process = Process()
    async with process.start((False, TO_BILLING), (True, tool_call("refund", {"order": 7}))) as container:
        waiting = await container.get(Desk).chat("ada", "Money back")
        process.large.will_reply(ModelHttpError(500, "broken"))
        with pytest.raises(ModelHttpError):
            await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
    async with process.start(services=(DeskAlone,)) as container:
        failed = await container.runs.get(waiting.run_id or "")
        with pytest.raises(RunIncompatibleError, match=r"Billing\.chat"):
            await container.runs.retry(waiting.run_id or "")
        now = await container.runs.get(waiting.run_id or "")
        assert (now.status, now.error, now.history) == ("failed", failed.error, failed.history)
        with pytest.raises(RunFailedError, match="broken"):
            await container.runs.result(waiting.run_id or "")
    async with process.start((True, "Done.")) as container:
        assert (await container.runs.retry(waiting.run_id or "")).content == "Done."


async def test_a_run_whose_target_is_gone_before_its_first_reply_does_not_fit_either() -> None:
    process = Process()
    async with process.start((False, TO_BILLING), (True, ModelHttpError(500, "broken"))) as container:
        started = await container.runs.start(Desk.chat, "ada", "Money back")
        with pytest.raises(RunFailedError):
            await container.runs.result(started.id)
    async with process.start((False, "Hello."), services=(DeskAlone,)) as container:
        with pytest.raises(RunIncompatibleError, match=r"Billing\.chat"):
            await container.runs.retry(started.id)
        assert (await container.runs.get(started.id)).status == "failed"
    async with process.start((True, "Done.")) as container:
        assert (await container.runs.retry(started.id)).answered_by == "Billing.chat"


async def test_a_run_goes_on_only_for_an_identity_that_may_call_the_one_in_charge() -> None:
    roles = {"clerk"}

    class Directory(IdentityLoader):
        def load(self, identity: SecurityIdentity) -> SecurityIdentity:
            return SecurityIdentity(identity.name, roles=roles)

    @register_ai_service(tools=refund)
    class Cashier(Protocol):
        """Pays."""

        @roles_allowed("clerk")
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Shop(Protocol):
        @hands_over_to(Cashier.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    refunded.clear()
    refund_7 = tool_call("refund", {"order": 7})
    replies = [tool_call("transfer_to_cashier", {}), refund_7, ModelHttpError(500, "broken"), "Done."]
    container = Container(models={"default": ScriptedChatModel(replies)}, seeds=[SecurityIdentity])
    async with container.register(Shop, Cashier, Directory):
        async with container.request_scope({SecurityIdentity: SecurityIdentity("eve", roles=roles)}):
            waiting = await container.get(Shop).chat("ada", "Money back")
        run_id, answers = waiting.run_id or "", {waiting.pending[0].id: approve()}
        roles.clear()
        with pytest.raises(ForbiddenError, match=r"Cashier\.chat"):
            await container.runs.resume(run_id, answers)
        assert ((await container.runs.get(run_id)).status, refunded) == ("suspended", [])
        roles.add("clerk")
        with pytest.raises(ModelHttpError):
            await container.runs.resume(run_id, answers)
        roles.clear()
        with pytest.raises(ForbiddenError, match=r"Cashier\.chat"):
            await container.runs.retry(run_id)
        roles.add("clerk")
        assert (await container.runs.retry(run_id)).content == "Done."


async def test_a_cancelled_run_undoes_the_tools_of_all_who_were_in_charge() -> None:
    undone: list[str] = []

    class Orders:
        @tool
        def book(self, order: int) -> str:
            """Book."""
            return "booked"

        @compensate_for("book")
        def unbook(self, order: int) -> None:
            undone.append(f"book {order}")

    class Payments:
        @tool
        def reserve(self, euros: int) -> str:
            """Reserve money."""
            return "reserved"

        @compensate_for("reserve")
        def release(self, euros: int) -> None:
            undone.append(f"reserve {euros}")

    @register_ai_service(tools=[Payments, refund])
    class Cashier(Protocol):
        """Pays."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service(tools=Orders, compensate_on_failure=True)
    class Shop(Protocol):
        @hands_over_to(Cashier.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    book, reserve = tool_call("book", {"order": 7}), tool_call("reserve", {"euros": 20})
    to_cashier = tool_call("transfer_to_cashier", {})
    model = ScriptedChatModel([book, to_cashier, reserve, tool_call("refund", {"order": 7})])
    async with Container(models={"default": model}).register(Shop, Cashier) as container:
        waiting = await container.get(Shop).chat("ada", "Buy it")
        run = await container.runs.cancel(waiting.run_id or "")
        assert run.status == "cancelled"
        assert undone == ["reserve 20", "book 7"]
        log = await container.conversations.of(Shop, "ada").history()
        assert {each.state for each in log} == {"stopped"}
        assert (await container.conversations.of(Shop, "ada").info()).in_charge == "Cashier.chat"
