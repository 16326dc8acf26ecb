"""Interceptors together with approval and limits, and calls after an interceptor has returned."""

from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    Result,
    ToolExecutionResult,
    register_ai_service,
    tool,
)
from toolbox.interceptors import (
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    interceptors,
)
from toolbox.testing import tool_call

from .intercepted import (
    PLUS,
    around,
    execution,
    plus,
    scripted,
    swallowing,
)
from .log import LOG

pytestmark = pytest.mark.anyio


# --- after the end


async def test_proceed_cannot_be_called_after_the_interceptor_has_returned() -> None:
    kept: list[Any] = []

    async def keep(call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        kept.append((call, proceed))
        return ToolExecutionResult("skipped")

    assert (await execution(around(keep))).result == "skipped"
    [(call, proceed)] = kept
    with pytest.raises(IllegalConfigurationError, match="after the interceptor had returned"):
        await proceed(call)
    assert LOG == []


# --- with approval


async def test_arguments_changed_after_an_approval_need_another_approval() -> None:
    from toolbox.runs import approve

    class Raising(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            return await proceed(call.with_arguments(euros=call.arguments["euros"] * 10))

    @tool(requires_approval=True)
    @interceptors(around(swallowing), Raising)
    def refund(euros: int) -> str:
        LOG.append(f"refund {euros}")
        return f"{euros} refunded"

    @register_ai_service(tools=[refund])
    class Refunds(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    model = scripted(tool_call("refund", {"euros": 5}), "done")
    async with Container(models={"default": model}).register(Refunds) as container:
        first = await container.get(Refunds).ask("x")
        [asked] = first.pending
        assert (asked.arguments, LOG) == ({"euros": 5}, [])
        second = await container.runs.resume(first.run_id, {asked.id: approve()})
        [again] = second.pending
        assert again.arguments == {"euros": 50}
        assert "refund 50" not in LOG
        third: Any = await container.runs.resume(first.run_id, {again.id: approve()})
    assert third.content == "done"
    assert LOG[-1] == "refund 50"
    assert third.tool_executions[0].result == "50 refunded"


# --- with limits


async def test_a_limit_that_an_interceptors_own_service_reaches_ends_the_invocation() -> None:
    from toolbox.limits import UsageLimitExceededError, UsageLimits

    @register_ai_service
    class Helper(Protocol):
        async def help(self, question: str) -> str: ...

    class Asking(ToolInterceptor):
        def __init__(self, helper: Helper) -> None:
            self.helper = helper

        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            try:
                await self.helper.help("x")
            except BaseException as error:
                LOG.append(type(error).__name__)
            return ToolExecutionResult("swallowed")

    @register_ai_service(tools=[plus], limits=UsageLimits(model_calls=1))
    @interceptors(Asking)
    class Limited(Protocol):
        async def ask(self, question: str) -> str: ...

    model = scripted(PLUS, "never", "never")
    async with Container(models={"default": model}).register(Limited, Helper) as container:
        with pytest.raises(UsageLimitExceededError):
            await container.get(Limited).ask("x")
    assert len(model.requests) == 1
