"""Approval among guardrails, interceptors and concurrent tools."""

from typing import Any, Protocol

import pytest

from toolbox import (
    Result,
    TokenStream,
    application_scoped,
    register_ai_service,
    tool,
    tool_executor_from,
    tool_specification_from,
)
from toolbox.interceptors import interceptors
from toolbox.runs import RunSuspended, approve, reject
from toolbox.testing import tool_call

from .approved_refunds import REFUND, Desk, container, refund
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


async def test_guardrails_see_edited_arguments_but_not_the_original_ones_again() -> None:
    from toolbox.guardrails import (
        ToolInputGuardrail,
        ToolOutputGuardrail,
        tool_input_guardrails,
        tool_output_guardrails,
    )

    seen: list[Any] = []

    class Known(ToolInputGuardrail):
        async def validate(self, request: Any) -> Any:
            seen.append(dict(request.arguments))
            return self.failure("unknown") if request.arguments["euros"] > 100 else self.success()

    class Loud(ToolOutputGuardrail):
        async def validate(self, request: Any) -> Any:
            return self.success_with(request.result.text + "!")

    @tool(requires_approval=True)
    @tool_input_guardrails(Known)
    @tool_output_guardrails(Loud)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    calls = [tool_call("pay", {"euros": euros}) for euros in (5, 500, 6)]
    async with container(asks(*calls), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        assert [each.id for each in waiting.pending] == ["0", "2"]
        assert seen == [{"euros": 5}, {"euros": 500}, {"euros": 6}]
        seen.clear()
        answers = {"0": approve(arguments={"euros": 7}), "2": approve(arguments={"euros": 700})}
        result = await here.runs.resume(waiting.run_id or "", answers)

    assert seen == [{"euros": 7}, {"euros": 700}]
    assert ran == [7]
    assert [each.result for each in result.tool_executions] == [
        "paid!",
        "Input validation failed: unknown",
        "Input validation failed: unknown",
    ]


async def test_arguments_that_an_interceptor_changes_need_approval_again() -> None:
    from toolbox.interceptors import ToolInterceptor

    @application_scoped
    class Doubling(ToolInterceptor):
        async def around_tool(self, call: Any, proceed: Any) -> Any:
            ran.append("around")
            return await proceed(call.with_arguments(euros=call.arguments["euros"] * 2))

    @tool(requires_approval=True)
    @interceptors(Doubling)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay", {"euros": 5})), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        assert (ran, [each.arguments for each in waiting.pending]) == ([], [{"euros": 5}])
        waiting = await here.runs.resume(waiting.run_id or "", {"0": approve()})
        assert (ran, [each.arguments for each in waiting.pending]) == (["around"], [{"euros": 10}])
        result = await here.runs.resume(waiting.run_id or "", {"0": approve()})

    assert result.content == "done"
    assert ran == ["around", "around", 10]


async def test_a_rejection_does_not_reach_interceptors() -> None:
    from toolbox.interceptors import ToolInterceptor

    @application_scoped
    class Around(ToolInterceptor):
        async def around_tool(self, call: Any, proceed: Any) -> Any:
            ran.append("around")
            return await proceed(call)

    @tool(requires_approval=True)
    @interceptors(Around)
    def pay() -> str:
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay")), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        await here.runs.resume(waiting.run_id or "", {"0": reject("no")})
    assert ran == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_concurrent_tools_are_suspended_and_continued(streamed: bool) -> None:
    @tool
    async def look(n: int) -> int:
        ran.append(("look", n))
        return n

    @register_ai_service(tools=[refund, look], concurrent_tools=True)
    class Many(Protocol):
        async def ask(self, text: str) -> Result[str]: ...
        def events(self, text: str) -> TokenStream: ...

    calls = [REFUND, tool_call("look", {"n": 1}), tool_call("refund", {"order": 8}), tool_call("look", {"n": 2})]
    async with container(asks(*calls), says("done"), services=(Many,)) as here:
        if streamed:
            events = [each async for each in here.get(Many).events("x")]
            last = events[-1]
            assert isinstance(last, RunSuspended)
            run_id, pending = last.run_id, last.pending
            assert sum(type(each).__name__ == "BeforeToolExecution" for each in events) == 4
        else:
            result = await here.get(Many).ask("x")
            run_id, pending = result.run_id or "", result.pending
        assert [each.id for each in pending] == ["0", "2"]
        assert sorted(ran) == [("look", 1), ("look", 2)]
        result = await here.runs.resume(run_id, {"2": approve()})
        result = await here.runs.resume(run_id, {"0": approve()})

    assert [each.result for each in result.tool_executions] == ["refunded 7", "1", "refunded 8", "2"]
    assert ran[2:] == [8, 7]


async def test_tools_that_need_approval_do_not_run_outside_of_services() -> None:
    from toolbox.hosts.hosting import ContainerHost

    async with container(says("x")) as here, here.request_scope() as scope:
        host: ContainerHost = here._internals.host
        tools = host.plans[Desk]["events"].toolset.by_name
        outcome = await host.execute(scope, tools, REFUND, Desk, host.failures)
    assert outcome.execution.is_error
    assert "approval" in outcome.execution.result
    assert ran == []


async def test_executors_refuse_calls_that_need_approval_unless_a_service_makes_them() -> None:
    @tool(requires_approval=True)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @tool(requires_approval=lambda arguments, context: False)
    async def pay_later(euros: int) -> str:
        return "paid later"

    execute, call = tool_executor_from(pay), tool_call("pay", {"euros": 5})
    refused = execute(call, None)
    assert refused.is_error
    assert "approval" in refused.text
    assert ran == []
    assert (await tool_executor_from(pay_later)(call, None)).text == "paid later"

    @register_ai_service(tools={tool_specification_from(pay): execute})
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(call), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        assert (len(waiting.pending), ran) == (1, [])
        await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert ran == [5]
