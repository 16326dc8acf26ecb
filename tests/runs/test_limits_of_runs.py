"""The limits of a `usage_limits` block, or of the service whose tool starts a run, hold for the run too."""

from decimal import Decimal
from typing import Any, Protocol

import pytest

from toolbox import Container, Inject, ModelConnectionError, Result, register_ai_service, tool
from toolbox.errors import OutputParsingError, RunStoreError
from toolbox.limits import CostEstimator, UsageLimitExceededError, UsageLimits, current_usage, usage_limits
from toolbox.runs import RunFailedError, RunId, Runs, RunStore, approve
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks, ran, says
from .test_durable import Kept

pytestmark = pytest.mark.anyio


@tool
def look() -> str:
    ran.append("look")
    return "seen"


@tool(requires_approval=True)
def pay() -> str:
    ran.append("pay")
    return "paid"


LOOK, PAY = asks(tool_call("look", {})), asks(tool_call("pay", {}))


@register_ai_service(tools=[look, pay])
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


class Prices(CostEstimator):
    def estimate(self, model: str, usage: Any) -> Decimal:
        return Decimal("0.25")


def container(*replies: Any, services: Any = (Desk,), **options: Any) -> Container:
    return Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"model_calls": 3}, "model_calls=2: 2 used"),
        ({"tool_calls": 1}, "tool_calls=1: 1 used"),
        ({"total_tokens": 36}, "total_tokens=21 was exceeded: 22 used"),
        ({"cost": Decimal("0.70")}, "cost=0.45 was exceeded: 0.50 used"),
    ],
    ids=lambda each: next(iter(each), "") if isinstance(each, dict) else "",
)
async def test_a_started_run_gets_what_is_left_of_the_block(limits: Any, text: str) -> None:
    async with container(says("used"), LOOK, LOOK, LOOK, services=(Desk, Prices)) as here:
        with usage_limits(**limits):
            await here.get(Desk).ask("x")
            run = await here.runs.start(Desk.ask, "x")
        with pytest.raises(RunFailedError, match=f"UsageLimitExceededError.*{text}"):
            await here.runs.result(run, timeout=60)


@pytest.mark.parametrize("limits", [{"model_calls": 1}, {"total_tokens": 15}, {"cost": Decimal("0.25")}])
async def test_nothing_left_raises_where_the_run_would_start(limits: Any) -> None:
    async with container(says("used"), services=(Desk, Prices)) as here:
        with usage_limits(**limits):
            await here.get(Desk).ask("x")
            with pytest.raises(UsageLimitExceededError, match=next(iter(limits))):
                await here.runs.start(Desk.ask, "x")
        assert await here.runs.list() == []


async def test_a_run_that_exists_is_returned_also_if_nothing_is_left() -> None:
    @register_ai_service
    class Named(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    async with container(says("done"), services=(Named,)) as here:
        first = await here.runs.start(Named.ask, "r", "x")
        with usage_limits(model_calls=0):
            assert (await here.runs.start(Named.ask, "r", "x")).id == first.id


async def test_a_tool_that_starts_a_run_gives_it_what_is_left_of_its_service() -> None:
    @register_ai_service(tools=look, model="helper")
    class Helper(Protocol):
        async def ask(self, text: str) -> str: ...

    @tool
    async def delegate(runs: Inject[Runs]) -> str:
        return (await runs.start(Helper.ask, "x")).id

    @register_ai_service(tools=delegate, limits=UsageLimits(model_calls=2))
    class Manager(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    models = {
        "default": ScriptedChatModel([asks(tool_call("delegate", {})), says("ok")]),
        "helper": ScriptedChatModel([LOOK, LOOK]),
    }
    async with Container(models=models).register(Helper, Manager) as here:
        [execution] = (await here.get(Manager).ask("x")).tool_executions
        with pytest.raises(RunFailedError, match="model_calls=1"):
            await here.runs.result(execution.result, timeout=60)


async def test_wrong_arguments_are_a_type_error_and_start_nothing() -> None:
    async with container() as here:
        for arguments in [(), ("x", "y")]:
            with pytest.raises(TypeError, match=r"Desk\.ask"):
                await here.runs.start(Desk.ask, *arguments)
        with pytest.raises(TypeError, match=r"Desk\.ask"):
            await here.runs.start(Desk.ask, other="x")
        with pytest.raises(TypeError, match=r"Desk\.ask\(\): text must be str, got int"):
            await here.runs.start(Desk.ask, 5)
        assert await here.runs.list() == []


# --- calls that continue when their block has ended


async def test_a_suspended_call_keeps_the_limits_of_its_block_and_what_it_has_used() -> None:
    async with container(LOOK, PAY, LOOK, LOOK) as here:
        with usage_limits(model_calls=3):
            run_id = (await here.get(Desk).ask("x")).run_id or ""
        with pytest.raises(UsageLimitExceededError, match="model_calls=1: 1 used"):
            await here.runs.resume(run_id, {"1": approve()})
    assert ran == ["look", "pay", "look"]


async def test_a_suspended_call_with_limits_of_its_own_counts_its_usage_once() -> None:
    @register_ai_service(tools=[look, pay], limits=UsageLimits(model_calls=10))
    class Limited(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(LOOK, PAY, LOOK, LOOK, services=(Limited,)) as here:
        with usage_limits(model_calls=3):
            run_id = (await here.get(Limited).ask("x")).run_id or ""
        with pytest.raises(UsageLimitExceededError, match="model_calls=3: 3 used"):
            await here.runs.resume(run_id, {"1": approve()})


async def test_a_durable_call_draws_on_its_block_and_keeps_the_limit_after_a_crash() -> None:
    @register_ai_service(tools=look, durable=True)
    class Durable(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    kept = Kept()
    kept.dies_on = "reply:#r1"
    first = container(LOOK, LOOK, services=(Durable,), take_over_runs=False).register_instance(kept, RunStore)
    async with first as here:
        with usage_limits(model_calls=3):
            with pytest.raises(RunStoreError):
                await here.get(Durable).ask("r", "x")
            assert current_usage().model_calls == 2
    second = container(LOOK, LOOK, LOOK, services=(Durable,), take_over_runs=False)
    async with second.register_instance(kept.restarted(), RunStore) as here:
        with pytest.raises(UsageLimitExceededError, match="model_calls=3: 3 used"):
            await here.runs.resume("r", {})


# --- services within that have used something before a crash


@register_ai_service(tools=[look, pay])
class Inner(Protocol):
    @tool
    async def delegate(self, text: str) -> str:
        """Delegate."""
        ...


LIMITS = UsageLimits(model_calls=6)
DELEGATE = asks(tool_call("delegate", {"text": "q"}))


@register_ai_service(tools=Inner, durable=True, limits=LIMITS)
class Outer(Protocol):
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


@pytest.mark.parametrize(
    ("dies_on", "first", "second"),
    [
        # The inner service has asked three times, and continues with its last reply.
        ("reply:0#r3", [DELEGATE, LOOK, LOOK, LOOK, LOOK], [LOOK] * 3),
        # The inner service has ended with its third reply.
        ("reply:#r1", [DELEGATE, LOOK, LOOK, says("inner"), LOOK], [DELEGATE, LOOK, LOOK]),
    ],
)
async def test_the_replies_of_an_inner_service_count_after_a_crash(dies_on: str, first: Any, second: Any) -> None:
    kept = Kept()
    kept.dies_on = dies_on
    async with container(*first, services=(Outer, Inner), take_over_runs=False).register_instance(
        kept, RunStore
    ) as here:
        with pytest.raises(RunStoreError):
            await here.get(Outer).ask("r", "x")
    again = kept.restarted()
    made = container(*second, services=(Outer, Inner), take_over_runs=False).register_instance(again, RunStore)
    async with made as here:
        with pytest.raises(UsageLimitExceededError, match="model_calls=6: 6 used"):
            await here.runs.resume("r", {})

    assert sum("#r" in each.key for each in await again.records("r")) == LIMITS.model_calls


async def test_what_an_inner_service_has_used_before_a_suspension_is_counted_once() -> None:
    kept = Kept()
    kept.dies_on = "reply:0#r4"
    first = [DELEGATE, LOOK, PAY, LOOK, LOOK, LOOK]
    async with container(*first, services=(Outer, Inner), take_over_runs=False).register_instance(
        kept, RunStore
    ) as here:
        waiting = await here.get(Outer).ask("r", "x")
        with pytest.raises(RunStoreError):
            await here.runs.resume("r", {waiting.pending[0].id: approve()})
    again = kept.restarted()
    made = container(LOOK, LOOK, services=(Outer, Inner), take_over_runs=False).register_instance(again, RunStore)
    async with made as here:
        with pytest.raises(UsageLimitExceededError, match="model_calls=6: 6 used"):
            await here.runs.resume("r", {})

    assert sum("#r" in each.key for each in await again.records("r")) == LIMITS.model_calls


@pytest.mark.parametrize("limits", [UsageLimits(tool_calls=2), UsageLimits(total_tokens=25)], ids=["calls", "tokens"])
@pytest.mark.parametrize("service", [Inner, None], ids=["inner", "outer"])
async def test_no_call_of_a_refused_reply_runs_when_its_run_is_retried(limits: Any, service: Any) -> None:
    @register_ai_service(tools=service or look, limits=limits, durable=True)
    class Limited(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    replies = [DELEGATE, LOOK, LOOK] if service else [LOOK, LOOK, LOOK]
    made = container(*replies, services=(Limited,)).register_instance(Kept(), RunStore)
    async with made as here:
        with pytest.raises(UsageLimitExceededError) as failed:
            await here.get(Limited).ask("r", "x")
        before = list(ran)

        with pytest.raises(UsageLimitExceededError) as again:
            await here.runs.retry("r")

    assert ran == before
    assert (again.value.limit, again.value.used) == (failed.value.limit, failed.value.used)


async def test_the_replies_of_an_inner_service_that_goes_on_are_counted_once() -> None:
    def fail(error: Exception, _: Any) -> str:
        raise error

    @register_ai_service(tools=Inner, limits=UsageLimits(model_calls=4), durable=True, on_tool_execution_error=fail)
    class Strict(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    replies = [DELEGATE, LOOK, ModelConnectionError("down"), says("inner"), says("done")]
    async with container(*replies, services=(Strict,)).register_instance(Kept(), RunStore) as here:
        with pytest.raises(ModelConnectionError):
            await here.get(Strict).ask("r", "x")

        assert (await here.runs.retry("r")).content == "done"
    assert ran == ["look"]


async def test_a_reply_of_an_inner_service_that_is_asked_for_again_was_paid() -> None:
    def fail(error: Exception, _: Any) -> str:
        raise error

    @register_ai_service(max_output_retries=0)
    class Counting(Protocol):
        @tool
        async def count(self, text: str) -> int:
            """Count."""
            ...

    @register_ai_service(tools=Counting, limits=UsageLimits(model_calls=3), durable=True, on_tool_execution_error=fail)
    class Strict(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    replies = [asks(tool_call("count", {"text": "x"})), says("no number"), says("5"), says("done")]
    async with container(*replies, services=(Strict,)).register_instance(Kept(), RunStore) as here:
        with pytest.raises(OutputParsingError):
            await here.get(Strict).ask("r", "x")

        with pytest.raises(UsageLimitExceededError, match="model_calls=3"):
            await here.runs.retry("r")
