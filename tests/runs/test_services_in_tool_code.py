"""Services that are suspended although a tool's own code, a guardrail or an interceptor called them."""

from typing import Protocol

import pytest

from toolbox import (
    ChatResponse,
    IllegalConfigurationError,
    Result,
    TokenStream,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed, interceptors
from toolbox.runs import RunSuspendedError, approve
from toolbox.testing import ScriptedChatModel, tool_call

from .approved_refunds import REFUND, Clerk, container, refund
from .replies import asks, says

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("catches", [False, True])
async def test_a_service_called_in_a_tools_own_code_raises_its_suspension_there(catches: bool, grouped: bool) -> None:
    seen: list[str] = []

    class Office:
        def __init__(self, clerk: Clerk) -> None:
            self.clerk = clerk

        @tool
        async def forward(self, text: str) -> str:
            try:
                return await self.clerk.do(text)
            except RunSuspendedError as error:
                seen.append(error.run_id)
                if not catches and grouped:
                    raise ExceptionGroup("both", [ExceptionGroup("inner", [error]), ValueError()]) from None
                if not catches:
                    raise
                return f"waiting: {error.run_id}"

    @register_ai_service(tools=[Office, refund])
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...

    replies = asks(tool_call("forward", {"text": "x"})), asks(REFUND), says("forwarded")
    async with container(*replies, services=(Front, Clerk)) as here:
        if catches:
            assert await here.get(Front).ask("x") == "forwarded"
        else:
            with pytest.raises(IllegalConfigurationError, match="list Clerk as a tool") as raised:
                await here.get(Front).ask("x")
            assert raised.value.problems[0].where.endswith("Office.forward")
        assert (await here.runs.get(seen[0])).status == ("suspended" if catches else "cancelled")


async def test_a_suspended_result_that_a_tool_returns_is_cancelled_like_a_suspension() -> None:
    @register_ai_service(tools=refund)
    class Teller(Protocol):
        async def do(self, text: str) -> Result[str]: ...

    class Office:
        def __init__(self, teller: Teller) -> None:
            self.teller = teller

        @tool
        async def forward(self, text: str) -> Result[str]:
            return await self.teller.do(text)

    @register_ai_service(tools=Office)
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...

    replies = asks(tool_call("forward", {"text": "x"})), asks(REFUND), says("never")
    async with container(*replies, services=(Front, Teller)) as here:
        with pytest.raises(IllegalConfigurationError, match="list Teller as a tool"):
            await here.get(Front).ask("x")
        assert [each.status for each in await here.runs.list()] == ["cancelled"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("place", ["guardrail", "interceptor"])
async def test_a_service_that_suspends_in_a_guardrail_or_an_interceptor_is_cancelled(
    place: str, streamed: bool
) -> None:
    class Asking(InputGuardrail, ModelInterceptor):
        def __init__(self, clerk: Clerk) -> None:
            self.clerk = clerk

        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            await self.clerk.do("x")
            return self.success()

        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
            await self.clerk.do("x")
            return await proceed(call)

    decorate = input_guardrails(Asking) if place == "guardrail" else interceptors(Asking)

    @register_ai_service
    @decorate
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...
        def events(self, text: str) -> TokenStream: ...

    async with container(asks(REFUND), says("never"), services=(Front, Clerk)) as here:
        with pytest.raises(RunSuspendedError):
            if streamed:
                _ = [event async for event in here.get(Front).events("x")]
            else:
                await here.get(Front).ask("x")
        [run] = await here.runs.list()
        assert (run.service.rpartition(".")[2], run.status) == ("Clerk", "cancelled")


async def test_a_suspended_run_of_another_host_does_not_hide_the_error() -> None:
    outside = create_ai_service(Clerk, chat_model=ScriptedChatModel([asks(REFUND)]), tools=[refund])

    @tool
    async def forward() -> str:
        return await outside.do("x")

    @register_ai_service(tools=forward)
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...

    async with container(asks(tool_call("forward")), services=(Front,)) as here:
        with pytest.raises(IllegalConfigurationError, match="list Clerk as a tool") as raised:
            await here.get(Front).ask("x")
        assert isinstance(raised.value.__cause__, RunSuspendedError)


async def test_errors_about_another_run_fail_the_run_whose_tool_raised_them() -> None:
    from toolbox.errors import RunStoreError

    @tool(requires_approval=True)
    def other() -> str:
        raise RunStoreError("another run", "its database is down")

    @register_ai_service(tools=other)
    class Other(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("other")), services=(Other,)) as here:
        run_id = (await here.get(Other).ask("x")).run_id or ""
        with pytest.raises(RunStoreError):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "failed"
