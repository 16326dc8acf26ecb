"""An answer beside calls that wait for a person, in output mode `tool`: nothing is asked, run or lost twice."""

from typing import Any, Protocol

import pytest

from tests.runs.crashing import CrashedError, Crashing, Kept
from toolbox import (
    AiMessage,
    CompleteResponse,
    CompleteToolCall,
    Container,
    IntermediateResponse,
    PartialToolCall,
    Result,
    ToolExecutionResultMessage,
    compensate_for,
    register_ai_service,
    tool,
)
from toolbox.errors import RunCancelledError, RunSuspendedError
from toolbox.guardrails import GuardrailResult, OutputGuardrail, OutputGuardrailRequest, output_guardrails
from toolbox.runs import InMemoryRunStore, RunId, RunStore, approve, reject
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import LOOK, REFUND, Refunds, asks, ran

pytestmark = pytest.mark.anyio

FIRST_LOOK = tool_call("look", {"order": 1})


def answer(value: Any) -> Any:
    return tool_call("final_answer", {"value": value})


@register_ai_service(tools=Refunds, output_mode="tool")
class Desk(Protocol):
    async def ask(self, text: str) -> Result[int]: ...

    async def plain(self, text: str) -> int: ...


@register_ai_service(tools=Refunds, output_mode="tool", durable=True)
class DurableDesk(Protocol):
    async def ask(self, run: RunId, text: str) -> Result[int]: ...


def container(store: RunStore, *replies: Any, services: Any = (Desk,)) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(*services, Refunds).register_instance(store, RunStore)


@pytest.mark.parametrize("given", [approve(), reject("no")])
@pytest.mark.parametrize("order", [0, 1, 2])
async def test_an_approval_beside_the_answer_is_asked_for_and_the_answer_stays_valid(given: Any, order: int) -> None:
    calls = [FIRST_LOOK, REFUND]
    calls.insert(order, answer(7))
    store = InMemoryRunStore()
    async with container(store, asks(*calls)) as here:
        waiting = await here.get(Desk).ask("x")
        [pending] = waiting.pending
        assert pending.tool_name == "refund"
        assert waiting.run_id is not None
    async with container(store) as here:  # another process
        result = await here.runs.resume(waiting.run_id, {pending.id: given})

    assert result.content == 7
    refunded = given.kind == "approve"
    assert [each[0] for each in ran] == (["look", "refund"] if refunded else ["look"])
    assert [each.request.name for each in result.tool_executions] == ["look", "refund"]
    texts = [each.text for each in result.messages if isinstance(each, ToolExecutionResultMessage)]
    assert texts == ["order 1 is paid", "refunded 7" if refunded else "no"]
    assert result.messages[-1] == AiMessage('{"value": 7}')


async def test_a_plain_method_raises_the_suspension_and_the_run_has_the_answer() -> None:
    async with container(InMemoryRunStore(), asks(answer(7), REFUND)) as here:
        with pytest.raises(RunSuspendedError) as caught:
            await here.get(Desk).plain("x")
        [pending] = caught.value.pending
        assert (await here.runs.resume(caught.value.run_id, {pending.id: approve()})).content == 7


async def test_an_answer_that_does_not_fit_is_asked_for_after_the_approval() -> None:
    model = ScriptedChatModel([asks(answer("no"), REFUND), asks(answer(8))])
    made = Container(models={"default": model}).register(Desk, Refunds)
    async with made as here:
        waiting = await here.get(Desk).ask("x")
        result = await here.runs.resume(str(waiting.run_id), {each.id: approve() for each in waiting.pending})

    assert (result.content, len(ran)) == (8, 1)
    read = [each for each in model.requests[1].messages if isinstance(each, ToolExecutionResultMessage)]
    assert [each.text.partition("\n")[0] for each in read] == ["Your answer is not valid:", "refunded 7"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("is_first_valid", [False, True])
async def test_a_crash_at_any_write_changes_neither_the_answer_nor_what_ran(is_first_valid: bool, after: bool) -> None:
    replies = [asks(FIRST_LOOK, answer(7 if is_first_valid else "no"), LOOK, REFUND)]
    replies += [] if is_first_valid else [asks(LOOK, answer(7))]

    class Model(ScriptedChatModel):
        """Replies by what the conversation has, like a model."""

        async def chat(self, request: Any) -> Any:
            asked = sum(isinstance(each, AiMessage) for each in request.messages)
            self.requests.append(request)
            return replies[asked]

    def program(store: Any) -> Container:
        made = Container(models={"default": Model([])}, take_over_runs=False)
        return made.register(DurableDesk, Refunds).register_instance(store, RunStore)

    async def settle(store: Any) -> Result[int]:
        async with program(store) as here:
            result = await here.get(DurableDesk).ask("r", "x")
            while result.pending:
                result = await here.runs.resume("r", {each.id: approve() for each in result.pending})
            return result

    counting = Crashing(Kept(lease=0.02), 0, False)
    whole = await settle(counting)
    told, effects = whole.messages, sorted(ran, key=str)
    assert counting.writes > 6
    for at in range(1, counting.writes + 1):
        ran.clear()
        kept = Kept(lease=0.02)
        with pytest.raises(Exception):  # noqa: B017 - each layer wraps the crash differently
            await settle(Crashing(kept, at, after))
        result = await settle(kept)

        assert result.content == 7, at
        # A call that had started has an unknown outcome, which the model reads.
        unknown = [each for each in result.tool_executions if "unknown" in each.result]
        assert len(unknown) <= 1, at
        if not unknown:
            assert result.messages == told, at
            assert sorted(ran, key=str) == effects, at


async def test_events_of_a_run_have_the_round_without_the_answer_and_no_unjudged_answer() -> None:
    class Other(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            return self.success_with(1)

    @register_ai_service(tools=Refunds, output_mode="tool", durable=True)
    @output_guardrails(Other())
    class Judged(Protocol):
        async def ask(self, run: RunId, text: str) -> int: ...

    async with container(Kept(), asks(LOOK, answer(777)), services=(Judged,)) as here:
        await here.runs.start(Judged.ask, "r", "x")
        assert await here.runs.result("r") == 1
        events = [each.event async for each in here.runs.events("r")]

    [between] = [each for each in events if isinstance(each, IntermediateResponse)]
    assert [each.name for each in between.response.ai_message.tool_execution_requests] == ["look"]
    assert not [each for each in events if isinstance(each, (PartialToolCall, CompleteToolCall)) and "777" in str(each)]
    [end] = [each for each in events if isinstance(each, CompleteResponse)]
    assert "777" not in str(end)


async def test_a_run_that_was_cancelled_after_all_its_calls_had_run_undoes_them() -> None:
    class Bookings:
        @tool
        async def book(self) -> str:
            ran.append("book")
            return "booked"

        @compensate_for(book)
        async def unbook(self) -> None:
            ran.append("unbook")

    @register_ai_service(tools=Bookings, output_mode="tool", durable=True, compensate_on_failure=True)
    class Trips(Protocol):
        async def ask(self, run: RunId, text: str) -> int: ...

    class Ends(Kept):
        dies = True

        async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
            if self.dies and not records and args:
                raise CrashedError
            await super().append(run_id, generation, records, *args)

        async def release(self, run_id: str, generation: int) -> None:
            if not self.dies:
                await super().release(run_id, generation)

    def program(store: RunStore, *replies: Any) -> Container:
        made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
        return made.register(Trips, Bookings).register_instance(store, RunStore)

    store = Ends(lease=0.02)
    async with program(store, asks(tool_call("book"), answer(7))) as here:
        with pytest.raises(Exception):  # noqa: B017 - as above
            await here.get(Trips).ask("r", "x")
    store.dies = False
    async with program(store) as here:
        await here.runs.cancel("r")
        assert (await here.runs.get("r")).status == "cancelled"
        with pytest.raises(RunCancelledError):
            await here.runs.result("r")
    assert ran == ["book", "unbook"]
