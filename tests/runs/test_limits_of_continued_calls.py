"""Limits and deadlines of calls that wait and continue, and of those that are started or continued as a stream."""

import asyncio
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    ChatRequest,
    ChatResponse,
    Container,
    EventListener,
    InvocationContext,
    InvocationEvent,
    InvocationTimeoutError,
    MemoryId,
    Result,
    register_ai_service,
    tool,
)
from toolbox.events import ServiceStartedEvent
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.limits import UsageLimitExceededError, UsageLimits
from toolbox.runs import RunFailedError, approve
from toolbox.testing import ScriptedChatModel, tool_call

from .approved_refunds import REFUND, container, refund
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


async def test_usage_rounds_and_limits_carry_over() -> None:
    @register_ai_service(tools=refund, limits=UsageLimits(model_calls=2))
    class Limited(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    @register_ai_service(tools=refund, max_tool_rounds=1)
    class Short(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(REFUND), asks(REFUND), says("never"), services=(Limited,)) as here:
        run_id = (await here.get(Limited).ask("x")).run_id or ""
        await here.runs.resume(run_id, {"0": approve()})
        with pytest.raises(UsageLimitExceededError):
            await here.runs.resume(run_id, {"1": approve()})
        assert (await here.runs.get(run_id)).status == "failed"
    async with container(asks(REFUND), asks(REFUND), services=(Short,)) as here:
        run_id = (await here.get(Short).ask("x")).run_id or ""
        with pytest.raises(Exception, match="1 round"):
            await here.runs.resume(run_id, {"0": approve()})


async def test_waiting_does_not_count_for_the_deadline_of_a_suspended_run(clock: Clock) -> None:
    @tool
    async def wait() -> str:
        clock.advance(101)
        await asyncio.Event().wait()
        return "x"

    @register_ai_service(tools=[refund, wait], timeout=100)
    class Timed(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(REFUND), asks(tool_call("wait")), services=(Timed,)) as here:
        waiting = await here.get(Timed).ask("x")
        clock.advance(1000)
        with pytest.raises(InvocationTimeoutError):
            await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert ran == [7]


class Waiting(ScriptedChatModel):
    """Never answers the second request: the time limit ends instead."""

    def __init__(self, clock: Clock, *replies: Any) -> None:
        super().__init__(replies)
        self._clock = clock

    async def chat(self, request: Any) -> ChatResponse:
        if len(self.requests) == 1:
            self._clock.advance(101)
            await asyncio.Event().wait()
        return await super().chat(request)

    stream: Any = None


@register_ai_service(tools=refund, timeout=100)
class Hurried(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


async def test_a_time_limit_ends_a_call_that_continues_as_a_stream(clock: Clock) -> None:
    async with Container(models={"default": Waiting(clock, asks(REFUND))}).register(Hurried) as here:
        run_id = (await here.get(Hurried).ask("x")).run_id or ""
        with pytest.raises(InvocationTimeoutError):
            _ = [each async for each in here.runs.resume_stream(run_id, {"0": approve()})]
        assert (await here.runs.get(run_id)).status == "failed"


async def test_a_time_limit_ends_a_started_call(clock: Clock) -> None:
    model = Waiting(clock, "never", "never")
    model.requests.append(ChatRequest([]))
    async with Container(models={"default": model}).register(Hurried) as here:
        run = await here.runs.start(here.get(Hurried).ask, "x")
        with pytest.raises(RunFailedError, match="longer than its limit"):
            await here.runs.result(run)


@register_ai_service(timeout=100)
class Rooms(Protocol):
    async def ask(self, room: MemoryId[str], text: str) -> str: ...


async def test_waiting_for_the_conversation_does_not_count_for_the_timeout_of_a_run(clock: Clock) -> None:
    async def answer_after_a_minute(request: ChatRequest) -> str:
        await both_have_begun.wait()
        clock.advance(60)
        return "done"

    class Begun(EventListener):
        def __init__(self) -> None:
            self.count = 0

        def on_event(self, event: InvocationEvent) -> None:
            self.count += isinstance(event, ServiceStartedEvent)
            if self.count == 2:  # the other one waits as soon as it is its turn on the loop
                asyncio.get_running_loop().call_later(0.05, both_have_begun.set)

    both_have_begun = asyncio.Event()
    model = ScriptedChatModel([answer_after_a_minute, answer_after_a_minute])
    made = Container(models={"default": model}).register(Rooms).register_instance(Begun(), EventListener)
    async with made as here:
        first = await here.runs.start(here.get(Rooms).ask, "7", "first")
        second = await here.runs.start(here.get(Rooms).ask, "7", "second")

        assert await here.runs.result(first) == "done"
        assert await here.runs.result(second) == "done"  # 60 seconds of waiting and 60 of work


@register_ai_service
class Inside(Protocol):
    @tool
    async def inside(self, text: str) -> str: ...


@register_ai_service(tools=Inside, limits=UsageLimits(model_calls=1))
class Thrifty(Protocol):
    async def ask(self, text: str) -> str: ...


async def test_a_limit_that_an_inner_service_reaches_ends_a_started_call() -> None:
    async with container(asks(tool_call("inside", {"text": "x"})), says("never"), services=(Thrifty,)) as here:
        run = await here.runs.start(here.get(Thrifty).ask, "x")
        with pytest.raises(RunFailedError, match="model_calls=1"):
            await here.runs.result(run, timeout=60)


async def test_code_of_a_started_call_sees_its_context() -> None:
    seen: list[str] = []

    class Noting(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            current = InvocationContext.current()
            assert current is not None
            seen.append(current.method)
            return self.success()

    @register_ai_service
    @input_guardrails(Noting)
    class Noted(Protocol):
        async def ask(self, text: str) -> str: ...

    async with container(says("done"), services=(Noted,)) as here:
        run = await here.runs.start(here.get(Noted).ask, "x")
        assert await here.runs.result(run, timeout=60) == "done"
    assert seen == ["ask"]
