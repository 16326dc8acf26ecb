"""Another version of the program continues a run: recorded results come first, and what does not fit stays."""

import asyncio
import json
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any, Protocol
from uuid import uuid4

import pytest
from pydantic import AfterValidator, Field

from toolbox import (
    Container,
    Result,
    ToolRetry,
    application_scoped,
    compensate_for,
    register_ai_service,
    return_to_model,
    tool,
    user_message,
)
from toolbox.errors import IllegalConfigurationError, RunIncompatibleError, RunStoreError
from toolbox.guardrails import (
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.interceptors import (
    ModelInterceptor,
    ModelInvocation,
    ToolInterceptor,
    ToolInvocation,
    interceptors,
)
from toolbox.runs import InMemoryRunStore, RunId, RunStore, approve
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.store_clock import skip
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


class Kept(InMemoryRunStore):
    """A store whose process dies before it writes a record named `dies_on`, or after the one named `dies_after`."""

    persistent = True
    dies_on = dies_after = ""
    is_dead = False

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        names = [f"{each.kind}:{each.key}" for each in records]
        if self.is_dead or self.dies_on in names:
            self.is_dead = True
            raise ConnectionError("the process died")
        await super().append(run_id, generation, records, *args)
        if self.dies_after in names:
            self.is_dead = True
            raise ConnectionError("the process died")

    async def release(self, run_id: str, generation: int) -> None:
        if not self.is_dead:
            await super().release(run_id, generation)

    def restarted(self) -> "Kept":
        """Return the store for another process, after the lease of the dead one has ended."""
        self.is_dead, self.dies_on, self.dies_after = False, "", ""
        skip([self.clock], timedelta(seconds=self.lease))
        return self


def program(
    store: Any,
    *replies: Any,
    tools: Any,
    around: Any = (),
    model: Any = None,
    take_over_runs: bool = False,
    **options: Any,
) -> tuple[Container, Any]:
    """Return a version of the program, and its service, which has the same name in all of them."""

    @register_ai_service(tools=tools, durable=True, **options)
    class Till(Protocol):
        @user_message("{text}")
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    Till.__module__, Till.__qualname__ = "shop", "Till"
    service = interceptors(*around)(Till) if around else Till
    models = {"default": model or ScriptedChatModel(replies)}
    made = Container(models=models, take_over_runs=take_over_runs, seeds=[SecurityIdentity])
    return made.register(service).register_instance(store, RunStore), service


async def dies(container: Container, service: Any) -> None:
    async with container as here:
        with pytest.raises(RunStoreError):
            await here.get(service).ask("r", "x")


@tool
async def pay(euros: int) -> str:
    ran.append(("pay", euros))
    return f"paid {euros}"


PAY = tool_call("pay", {"euros": 7})


# --- recorded results come first


async def paid_once(**options: Any) -> Kept:
    """Return a store with a run that has paid, and whose process died before the next reply."""
    store = Kept()
    store.dies_on = "reply:#r1"
    await dies(*program(store, asks(PAY), says("lost"), tools=pay, **options))
    assert ran == [("pay", 7)]
    return store.restarted()


async def continued(store: Kept, *replies: Any, **options: Any) -> Result[str]:
    container, _ = program(store, *replies, **options)
    async with container as here:
        result: Result[str] = await here.runs.resume("r", {})
        return result


@tool
async def other() -> str:
    return "other"


@tool(name="pay")
async def pay_for(order: int) -> str:
    raise AssertionError("it runs")


@tool(name="pay", requires_approval=True)
async def approved_pay(euros: int) -> str:
    raise AssertionError("it runs")


@roles_allowed("cashier")
@tool(name="pay")
async def cashiers_pay(euros: int) -> str:
    raise AssertionError("it runs")


class Refusing(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> Any:
        return self.failure("no")


@tool(name="pay")
@tool_input_guardrails(Refusing)
async def guarded_pay(euros: int) -> str:
    raise AssertionError("it runs")


@pytest.mark.parametrize("present", [other, pay_for, approved_pay, cashiers_pay, guarded_pay])
async def test_a_recorded_result_counts_whatever_the_tool_has_become(present: Any) -> None:
    result = await continued(await paid_once(), says("done"), tools=present)

    [execution] = result.tool_executions
    assert (execution.result, execution.is_error) == ("paid 7", False)
    assert result.content == "done"


async def test_a_recorded_failure_reaches_the_handler_though_the_tool_is_gone() -> None:
    @tool
    async def broken() -> str:
        raise LookupError("no such room")

    store = Kept()
    store.dies_on = "reply:#r1"
    await dies(*program(store, asks(tool_call("broken")), says("lost"), tools=broken))
    result = await continued(store.restarted(), says("done"), tools=other)

    assert (result.tool_executions[0].result, result.tool_executions[0].is_error) == ("no such room", True)


async def test_interceptors_know_that_a_call_and_a_reply_are_replayed() -> None:
    seen: list[tuple[str, bool]] = []

    @application_scoped
    class Watching(ToolInterceptor, ModelInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: Any) -> Any:
            seen.append(("tool", call.replayed))
            return await proceed(call)

        async def around_model(self, call: ModelInvocation, proceed: Any) -> Any:
            seen.append(("model", call.replayed))
            return await proceed(call)

    store = await paid_once(around=[Watching])
    assert seen == [("model", False), ("tool", False), ("model", False)]
    seen.clear()
    result = await continued(store, says("done"), tools=pay, around=[Watching])

    assert seen == [("model", True), ("tool", True), ("model", False)]
    assert result.tool_executions[0].result == "paid 7"
    assert ran == [("pay", 7)]


async def test_finished_rounds_are_restored_with_what_their_interceptors_returned() -> None:
    """The model has replied to these results: they must not change any more, and nothing is asked for again."""
    seen: list[tuple[str, bool]] = []

    @application_scoped
    class Numbering(ToolInterceptor, ModelInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: Any) -> Any:
            seen.append((str(call.arguments["euros"]), call.replayed))
            return replace(await proceed(call), text=f"result {len(seen)}")

        async def around_model(self, call: ModelInvocation, proceed: Any) -> Any:
            seen.append(("model", call.replayed))
            return await proceed(call)

    store = Kept()
    store.dies_on = "reply:#r2"
    two = asks(tool_call("pay", {"euros": 8}))
    await dies(*program(store, asks(PAY), two, says("lost"), tools=pay, around=[Numbering]))
    seen.clear()
    result = await continued(store.restarted(), says("done"), tools=pay, around=[Numbering])

    assert seen == [("model", True), ("8", True), ("model", False)]
    assert result.tool_executions[0].result == "result 2"
    assert ran == [("pay", 7), ("pay", 8)]


async def test_interceptors_do_not_see_a_result_whose_tool_is_gone() -> None:
    @application_scoped
    class Refused(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: Any) -> Any:
            raise AssertionError("it runs")

    result = await continued(await paid_once(), says("done"), tools=[other, pay_for], around=[Refused])
    assert result.tool_executions[0].result == "paid 7"


async def test_what_a_model_interceptor_returns_around_a_recorded_reply_is_ignored() -> None:
    @application_scoped
    class Again(ModelInterceptor):
        async def around_model(self, call: ModelInvocation, proceed: Any) -> Any:
            reply = await proceed(call)
            return asks(tool_call("pay", {"euros": 1000})) if call.replayed else reply

    result = await continued(await paid_once(), says("done"), tools=pay, around=[Again])
    assert [each.request.arguments for each in result.tool_executions] == [PAY.arguments]
    assert ran == [("pay", 7)]


async def test_changed_arguments_have_no_effect_on_a_recorded_call() -> None:
    @application_scoped
    class Doubling(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: Any) -> Any:
            return await proceed(call.with_arguments(euros=call.arguments["euros"] * 2))

    store = Kept()
    store.dies_on = "reply:#r1"
    await dies(*program(store, asks(PAY), says("lost"), tools=pay, around=[Doubling]))
    result = await continued(store.restarted(), says("done"), tools=approved_pay, around=[Doubling])

    assert ran == [("pay", 14)]
    assert result.tool_executions[0].result == "paid 14"


async def test_a_compensation_gets_the_arguments_that_a_guardrail_wrote_also_after_a_crash() -> None:
    class Halving(ToolInputGuardrail):
        def validate(self, request: ToolInputGuardrailRequest) -> Any:
            return self.success_with({"euros": request.arguments["euros"] // 2})

    class Bank:
        @tool
        @tool_input_guardrails(Halving)
        async def debit(self, euros: int) -> str:
            ran.append(("debit", euros))
            return "debited"

        @compensate_for(debit)
        async def undo(self, euros: int) -> None:
            ran.append(("undo", euros))

        @tool
        async def fail(self) -> str:
            raise LookupError("no")

    both = [tool_call("debit", {"euros": 8}), tool_call("fail")]
    store = Kept()
    store.dies_on = "start:1#start"
    options: Any = {"tools": Bank, "compensate_on_tool_errors": True}
    await dies(*program(store, asks(*both), says("lost"), **options))
    await continued(store.restarted(), says("done"), **options)

    assert ran == [("debit", 4), ("undo", 4)]


# --- calls without a result


TELLING: Any = {"on_unknown_tool": return_to_model, "on_tool_arguments_error": return_to_model}


async def died_before(call: Any, tools: Any, *, dies_on: str = "start:0#start", **options: Any) -> Kept:
    store = Kept()
    store.dies_on = dies_on
    await dies(*program(store, asks(*call), says("lost"), tools=tools, **options))
    return store.restarted()


@pytest.mark.parametrize("present", [[other], [other, pay_for]])
async def test_a_stored_call_that_does_not_fit_stays_for_other_workers(present: Any) -> None:
    store = await died_before([tool_call("other"), PAY], [other, pay])
    container, _ = program(store, tools=present)
    async with container as here:
        with pytest.raises(RunIncompatibleError, match="pay"):
            await here.runs.resume("r", {})
        run = await here.runs.get("r")

    assert run.status == "running"
    assert ran == []
    assert not any(each.key.startswith(("0", "1")) for each in await store.records("r"))
    result = await continued(store, says("done"), tools=[other, pay])
    assert [each.result for each in result.tool_executions] == ["other", "paid 7"]


async def test_a_run_that_does_not_fit_is_released_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    store = await died_before([PAY], pay)
    tries: list[str] = []

    class Watched(Kept):
        async def acquire(self, run_id: str, owner: str) -> Any:
            tries.append(run_id)
            return await super().acquire(run_id, owner)

    watched = Watched()
    watched._runs, watched.clock = store._runs, store.clock
    container, _ = program(watched, tools=other, take_over_runs=True)
    with caplog.at_level(logging.ERROR, "toolbox.runs"):
        async with container:
            for _ in range(3):
                await skip_time(container, timedelta(minutes=1))
    stored = await store.load("r")
    assert stored is not None
    assert (stored.status, stored.owner) == ("running", None)
    assert tries == ["r"]
    assert len([each for each in caplog.records if "does not fit" in each.getMessage()]) == 1


@pytest.mark.parametrize("made_up", [tool_call("pays", {"euros": 7}), tool_call("pay", {"euros": "many"})])
async def test_calls_that_were_refused_when_the_reply_came_are_refused_again(made_up: Any) -> None:
    store = await died_before([made_up, PAY], pay, dies_on="start:1#start", **TELLING)
    result = await continued(store, says("done"), tools=pay, **TELLING)

    assert [each.is_error for each in result.tool_executions] == [True, False]


async def test_records_of_a_newer_format_stay_for_newer_workers() -> None:
    store = await paid_once()
    kept = store._runs["r"]
    for key in ("#r0", "0"):
        older = kept.records[key]
        kept.records[key] = type(older)(key, older.kind, json.dumps({**json.loads(older.data), "version": 99}))
        with pytest.raises(RunIncompatibleError, match="99"):
            await continued(store, says("done"), tools=pay)
        kept.records[key] = older
    assert (await continued(store, says("done"), tools=pay)).content == "done"


def nested(store: Any, *replies: Any, tools: Any) -> tuple[Container, Any]:
    """Return a version of a program whose service asks another one, which has the tools."""

    @register_ai_service(tools=tools)
    class Cashier(Protocol):
        @tool
        async def settle(self, text: str) -> str: ...

    @register_ai_service(tools=[other, Cashier], durable=True)
    class Desk(Protocol):
        @user_message("{text}")
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    for each in (Cashier, Desk):
        each.__module__, each.__qualname__ = "shop", each.__name__
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(Cashier, Desk).register_instance(store, RunStore), Desk


async def test_a_call_inside_of_a_service_that_is_a_tool_stays_for_other_workers_too() -> None:
    store = Kept()
    store.dies_on = "start:1/0#start"
    calls = asks(tool_call("other"), tool_call("settle", {"text": "7"}))
    await dies(*nested(store, calls, asks(PAY), tools=pay))
    store.restarted()
    async with nested(store, tools=other)[0] as here:
        with pytest.raises(RunIncompatibleError, match=r"Cashier\.settle does not offer the tool 'pay'"):
            await here.runs.resume("r", {})
        assert (await here.runs.get("r")).status == "running"
    async with nested(store, says("settled"), says("done"), tools=pay)[0] as here:
        result = await here.runs.resume("r", {})

    assert [each.result for each in result.tool_executions] == ["other", "settled"]
    assert ran == [("pay", 7)]


@pytest.mark.parametrize("present", [pay, other])
async def test_a_cancelled_run_undoes_what_is_recorded_also_if_its_tools_have_changed(present: Any) -> None:
    class Bank:
        @tool
        async def debit(self, euros: int) -> str:
            ran.append(("debit", euros))
            return "debited"

        @compensate_for(debit)
        async def undo(self, euros: int) -> None:
            ran.append(("undo", euros))

    store = Kept()
    store.dies_on = "start:1#start"
    options: Any = {"compensate_on_failure": True}
    calls = asks(tool_call("debit", {"euros": 8}), PAY)
    await dies(*program(store, calls, tools=[Bank, pay], **options))
    store.restarted()
    container, _ = program(store, tools=[Bank, present], **options)
    async with container as here:
        run = await here.runs.cancel("r", "no longer wanted")

    assert (run.status, ran) == ("cancelled", [("debit", 8), ("undo", 8)])


# --- renamed tools


@tool(former_names=("pay",))
async def transfer(euros: int) -> str:
    ran.append(("transfer", euros))
    return f"transferred {euros}"


async def test_a_stored_call_runs_under_the_new_name_of_its_tool() -> None:
    store = await died_before([PAY], pay)
    result = await continued(store, says("done"), tools=transfer)

    assert ran == [("transfer", 7)]
    assert result.tool_executions[0].result == "transferred 7"


async def test_the_model_is_offered_the_new_name_and_a_live_call_of_the_old_one_is_unknown() -> None:
    store = await died_before([PAY], pay)
    again = asks(tool_call("pay", {"euros": 1}), tool_call("transfer", {"euros": 2}))
    model = ScriptedChatModel([again, says("done")])
    container, _ = program(store, tools=transfer, model=model, **TELLING)
    async with container as here:
        result = await here.runs.resume("r", {})

    assert [each.name for each in model.requests[0].tool_specifications] == ["transfer"]
    assert [each.is_error for each in result.tool_executions] == [False, True, False]
    assert ran == [("transfer", 7), ("transfer", 2)]


async def test_former_names_that_clash_are_problems() -> None:
    @tool(former_names=["pay"])
    async def send(euros: int) -> str:
        return ""

    @tool(former_names=("itself",))
    async def itself() -> str:
        return ""

    for tools, fact in (
        ([transfer, pay], "'pay' of transfer is also a name of pay"),
        ([transfer, send], "'pay' of send is also a name of transfer"),
        ([itself], "'itself' of itself is also a name of itself"),
    ):
        container, _ = program(Kept(), tools=tools)
        with pytest.raises(IllegalConfigurationError, match=fact):
            async with container:
                pass


@pytest.mark.parametrize("given", ["pay", ("",), (3,), None])
def test_former_names_are_a_tuple_or_list_of_names(given: Any) -> None:
    with pytest.raises(TypeError, match="former_names"):
        tool(former_names=given)


# --- approvals


@tool(name="pay", requires_approval=True)
async def waits(euros: int) -> str:
    ran.append(("pay", euros))
    return f"paid {euros}"


@tool(name="pay", requires_approval=True)
async def waits_longer(euros: int, note: str = "none", key: str = Field(default_factory=lambda: uuid4().hex)) -> str:
    ran.append(("pay", euros, note))
    return f"paid {euros}"


@tool(former_names=("pay",), requires_approval=True)
async def renamed(euros: int, note: str = "none") -> str:
    ran.append(("renamed", euros, note))
    return f"paid {euros}"


async def suspended(tools: Any, call: Any = PAY) -> tuple[Kept, Any]:
    store = Kept()
    container, service = program(store, asks(call), tools=tools)
    async with container as here:
        result = await here.get(service).ask("r", "x")
    return store, result.pending[0]


@pytest.mark.parametrize(
    ("present", "expected"), [(waits_longer, ("pay", 7, "none")), (renamed, ("renamed", 7, "none"))]
)
async def test_a_new_parameter_with_a_default_and_a_new_name_void_no_approval(present: Any, expected: Any) -> None:
    store, call = await suspended(waits)
    container, _ = program(store, says("done"), tools=present)
    async with container as here:
        result = await here.runs.resume("r", {call.id: approve()})

    assert (result.content, ran) == ("done", [expected])


async def test_a_default_that_is_made_for_each_call_voids_no_approval() -> None:
    made: list[str] = []

    @tool(name="pay", requires_approval=True)
    async def keyed(euros: int, key: str = Field(default_factory=lambda: uuid4().hex)) -> str:
        made.append(key)
        return "paid"

    store, call = await suspended(keyed)
    container, _ = program(store, says("done"), tools=keyed)
    async with container as here:
        assert (await here.runs.resume("r", {call.id: approve()})).content == "done"
    assert made == [call.arguments["key"]]


async def test_a_value_that_the_person_did_not_see_needs_another_approval() -> None:
    store, call = await suspended(waits, tool_call("pay", {"euros": 7, "note": "made up"}))
    container, _ = program(store, says("done"), tools=waits_longer)
    async with container as here:
        result = await here.runs.resume("r", {call.id: approve()})

    assert ran == []
    assert result.pending[0].arguments["note"] == "made up"


async def test_an_answered_call_that_does_not_fit_another_worker_stays() -> None:
    store, call = await suspended(waits)
    store.dies_on = "start:0#start"
    container, _ = program(store, says("lost"), tools=waits)
    async with container as here:
        with pytest.raises(RunStoreError):
            await here.runs.resume("r", {call.id: approve()})
    store.restarted().lease = 0.05
    store._runs["r"].lease_until = 0.0
    with pytest.raises(RunIncompatibleError, match="pay"):
        await continued(store, says("lost"), tools=other)
    assert (await continued(store, says("done"), tools=waits)).content == "done"
    assert ran == [("pay", 7)]


def _refuse(euros: int) -> int:
    raise ToolRetry("say it in cents")


@tool(name="pay", requires_approval=True)
async def refuses(euros: Annotated[int, AfterValidator(_refuse)]) -> str:
    return "never"


async def test_a_pending_call_that_a_type_refuses_with_an_error_of_tools_does_not_fit_and_can_be_cancelled() -> None:
    store, call = await suspended(waits)
    container, _ = program(store, tools=refuses, compensate_on_failure=True)
    async with container as here:
        with pytest.raises(RunIncompatibleError, match=r"no longer accepts the arguments .* \(say it in cents\)"):
            await here.runs.resume("r", {call.id: approve()})
        assert (await here.runs.cancel("r")).status == "cancelled"


# --- output guardrails


judged: list[str] = []


class Masking(ToolOutputGuardrail):
    def validate(self, request: ToolOutputGuardrailRequest) -> Any:
        judged.append(request.result.text)
        return self.success_with(request.result.text.replace("7", "*"))


@tool(name="pay")
@tool_output_guardrails(Masking)
async def masked(euros: int) -> str:
    ran.append(("pay", euros))
    return f"paid {euros}"


@pytest.fixture(autouse=True)
def _nothing_judged() -> None:
    judged.clear()


async def test_a_record_has_what_output_guardrails_let_the_model_read() -> None:
    @application_scoped
    class Shouting(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: Any) -> Any:
            result = await proceed(call)
            return type(result)(result.text + "!")

    store = Kept()
    store.dies_on = "reply:#r1"
    await dies(*program(store, asks(PAY), says("lost"), tools=masked, around=[Shouting]))
    assert judged == ["paid 7!"]
    assert "paid 7" not in "".join(each.data for each in await store.records("r"))
    result = await continued(store.restarted(), says("done"), tools=masked, around=[Shouting])

    assert judged == ["paid 7!"]
    assert result.tool_executions[0].result == "paid *!"
    assert ran == [("pay", 7)]


async def test_a_result_whose_guardrail_was_interrupted_is_judged_again() -> None:
    class Interrupted(ToolOutputGuardrail):
        async def validate(self, request: ToolOutputGuardrailRequest) -> Any:
            judged.append(request.result.text)
            if len(judged) == 1:
                reached.set()
                await asyncio.Event().wait()
            return self.success()

    @tool(name="pay")
    @tool_output_guardrails(Interrupted)
    async def slow(euros: int) -> str:
        ran.append(("pay", euros))
        return f"paid {euros}"

    store, reached = Kept(), asyncio.Event()
    container, service = program(store, asks(PAY), tools=slow)
    async with container as here:
        run = await here.runs.start(here.get(service).ask, "r", "x")
        await reached.wait()
    assert (await store.load(run.id)).status == "running"  # type: ignore[union-attr]
    result = await continued(store, says("done"), tools=slow)

    assert (ran, judged) == ([("pay", 7)], ["paid 7", "paid 7"])
    assert result.tool_executions[0].result == "paid 7"
