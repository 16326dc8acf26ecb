"""Approval of tools that a provider adds during the call."""

from typing import Any, Protocol

import pytest

from toolbox import MemoryId, Result, ToolProviderResult, register_ai_service, system_message, tool
from toolbox.runs import ConversationSuspendedError, RunAnswerError, approve
from toolbox.testing import tool_call

from .approved_refunds import REFUND, container, refund
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


@tool(name="pay", requires_approval=True)
def pay_euros(euros: int) -> str:
    ran.append(("pay", euros))
    return "paid"


async def test_replaced_arguments_of_a_providers_tool_are_checked_before_anything_changes() -> None:
    class Provider:
        async def provide_tools(self, request: Any) -> ToolProviderResult:
            return ToolProviderResult([pay_euros])

    @register_ai_service(tool_provider=Provider)
    class Paying(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay", {"euros": 5})), says("done"), services=(Paying,)) as here:
        run_id = (await here.get(Paying).ask("x")).run_id or ""
        with pytest.raises(RunAnswerError, match="euros") as raised:
            await here.runs.resume(run_id, {"0": approve(arguments={"euros": "many"})})
        assert raised.value.problems
        run = await here.runs.get(run_id)
        assert (run.status, len(run.pending), run.history) == ("suspended", 1, ())
        assert (await here.runs.resume(run_id, {"0": approve(arguments={"euros": 7})})).content == "done"
    assert ran == [("pay", 7)]


async def test_replaced_arguments_of_a_nested_providers_tool_are_checked_before_anything_changes() -> None:
    seen: list[str] = []

    class Provider:
        def provide_tools(self, request: Any) -> ToolProviderResult:
            seen.append(request.user_message.text)

            return ToolProviderResult([pay_euros])

    @register_ai_service(tool_provider=Provider)
    class Paying(Protocol):
        @tool
        @system_message("Pay in {currency}.")
        async def order(self, room: MemoryId[str | None], text: str, currency: str = "EUR") -> str: ...

    @register_ai_service(tools=Paying)
    class Outer(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    replies = [asks(tool_call("order", {"text": "tea"})), asks(tool_call("pay", {"euros": 5})), says("in"), says("out")]
    async with container(*replies, services=(Outer,)) as here:
        run_id = (await here.get(Outer).ask("x")).run_id or ""
        [call] = (await here.runs.get(run_id)).pending
        with pytest.raises(RunAnswerError, match="euros") as raised:
            await here.runs.resume(run_id, {call.id: approve(arguments={"euros": "many"})})
        assert raised.value.problems
        run = await here.runs.get(run_id)
        assert (run.status, len(run.pending), run.history) == ("suspended", 1, ())
        assert (await here.runs.resume(run_id, {call.id: approve(arguments={"euros": 7})})).content == "out"
    assert ran == [("pay", 7)]
    assert set(seen) == {"tea"}


async def test_tools_of_a_provider_can_need_approval() -> None:
    from toolbox import ToolProviderRequest

    def provide(request: ToolProviderRequest) -> Any:
        return [refund]

    @register_ai_service(tool_provider=provide)
    class Provided(Protocol):
        async def ask(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with container(asks(REFUND), says("done"), services=(Provided,)) as here:
        waiting = await here.get(Provided).ask("room", "x")
        with pytest.raises(ConversationSuspendedError):
            await here.get(Provided).ask("room", "y")
        result = await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert result.content == "done"
    assert ran == [7]
