"""A task group, timeout or `gather` that fails in the program's own code is no cancellation of the call."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import pytest

from toolbox import (
    ChatRequest,
    ChatResponse,
    InvocationContext,
    TokenStream,
    ToolExecutionResult,
    create_ai_service,
    register_ai_service,
    time_limit,
    tool,
)
from toolbox.errors import InvocationTimeoutError, ToolTimeoutError
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.interceptors import (
    ModelInterceptor,
    ModelInvocation,
    ModelProceed,
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    interceptors,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


async def fail_soon() -> None:
    await asyncio.sleep(0)
    raise ValueError("failed")


async def in_task_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail_soon())


async def in_nested_task_groups() -> None:
    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
        inner.create_task(fail_soon())
        outer.create_task(fail_soon())


async def in_timeout() -> None:
    async with asyncio.timeout(0.001):
        await asyncio.Event().wait()


async def in_gather() -> None:
    await asyncio.gather(fail_soon(), fail_soon())


async def in_cancelled_gather() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.gather(task)


FAILING = [in_task_group, in_nested_task_groups, in_timeout, in_gather, in_cancelled_gather]


async def handled(failing: Callable[[], Awaitable[None]]) -> None:
    with suppress(Exception, asyncio.CancelledError):
        await failing()


def service(place: str, failing: Callable[[], Awaitable[None]]) -> Any:
    """Return a service with one place where something fails and is handled."""

    @tool
    async def look() -> str:
        if place == "tool":
            await handled(failing)
        if place == "handler":
            raise KeyError("x")
        return "looked"

    class Checking(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            if place == "guardrail":
                await handled(failing)
            return self.success()

    class Around(ToolInterceptor, ModelInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            if place == "tool interceptor":
                await handled(failing)
            return await proceed(call)

        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
            if place == "model interceptor":
                await handled(failing)
            return await proceed(call)

    async def on_error(error: Exception, context: InvocationContext) -> str:
        await handled(failing)
        return "failed"

    class Model(ScriptedChatModel):
        async def chat(self, request: ChatRequest) -> ChatResponse:
            if place == "model":
                await handled(failing)
            return await super().chat(request)

    @register_ai_service(tools=look, on_tool_execution_error=on_error)
    @input_guardrails(Checking)
    @interceptors(Around)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...
        def events(self, text: str) -> TokenStream: ...

    return create_ai_service(Desk, chat_model=Model([tool_call("look"), "done"]))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("place", ["tool", "handler", "guardrail", "tool interceptor", "model interceptor", "model"])
async def test_a_handled_failure_in_the_programs_code_is_no_cancellation(
    place: str, failing: Callable[[], Awaitable[None]], streamed: bool
) -> None:
    task = asyncio.current_task()
    assert task is not None
    desk = service(place, failing)
    if streamed:
        assert [event async for event in desk.events("x")][-1].response.ai_message.text == "done"
    else:
        assert await desk.ask("x") == "done"
    assert task.cancelling() == 0


@pytest.mark.parametrize("failing", FAILING)
async def test_a_failure_that_a_tool_does_not_handle_is_the_failure_of_the_tool(
    failing: Callable[[], Awaitable[None]],
) -> None:
    failures: list[Exception] = []

    @tool
    async def look() -> str:
        await failing()
        return "looked"

    def on_error(error: Exception, context: InvocationContext) -> str:
        failures.append(error)
        return "failed"

    @register_ai_service(tools=look, on_tool_execution_error=on_error)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    desk = create_ai_service(Desk, chat_model=ScriptedChatModel([tool_call("look"), "done"]))
    assert await desk.ask("x") == "done"
    assert len(failures) == 1


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_cancellation_from_outside_ends_the_call_even_if_the_tool_catches_it(swallows: bool) -> None:
    waiting = asyncio.Event()

    @tool
    async def look() -> str:
        await handled(in_task_group)
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not swallows:
                raise
        return "looked"

    @register_ai_service(tools=look)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    desk = create_ai_service(Desk, chat_model=ScriptedChatModel([tool_call("look"), "done"]))
    task = asyncio.create_task(desk.ask("x"))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_time_limits_work_after_a_handled_failure() -> None:
    @tool(timeout=0.01)
    async def look() -> str:
        await handled(in_task_group)
        await asyncio.Event().wait()
        return "looked"

    def on_error(error: Exception, context: InvocationContext) -> str:
        assert isinstance(error, ToolTimeoutError)
        return "late"

    @tool
    async def wait() -> str:
        await handled(in_task_group)
        await asyncio.Event().wait()
        return "waited"

    @register_ai_service(tools=[look, wait], on_tool_execution_error=on_error)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    desk = create_ai_service(Desk, chat_model=ScriptedChatModel([tool_call("look"), tool_call("wait")]))
    with pytest.raises(InvocationTimeoutError), time_limit(0.2):
        await desk.ask("x")


async def test_a_tool_goes_on_in_the_order_in_which_it_began_to_wait() -> None:
    gate, waits = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    @tool
    async def wait() -> str:
        waits.set()
        await gate.wait()
        order.append("tool")
        return "done"

    class Assistant(Protocol):
        async def chat(self, question: str) -> str: ...

    async def wait_too() -> None:
        await waits.wait()
        await gate.wait()
        order.append("other")

    model = ScriptedChatModel([tool_call("wait"), "hello"])
    assistant = create_ai_service(Assistant, chat_model=model, tools=[wait])
    call, other = asyncio.create_task(assistant.chat("hello")), asyncio.create_task(wait_too())
    await waits.wait()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(call, other)

    assert order == ["tool", "other"]
