"""Running calls when their container stops or their caller is cancelled."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    ContainerNotStartedError,
    InvocationContext,
    PartialResponse,
    Result,
    StreamEvent,
    ToolboxSettings,
    application_scoped,
    create_ai_service,
    produces,
    register_ai_service,
    time_limit,
    tool,
)
from toolbox.errors import InvocationTimeoutError
from toolbox.runs import RunEngine
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Gate:
    """Signals that a tool has started, and lets it end."""

    def __init__(self) -> None:
        self.inside = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.release = threading.Event()
        self.log: list[str] = []

    def enter(self) -> None:
        self.loop.call_soon_threadsafe(self.inside.set)


class Session:
    """A call-scoped bean."""


@produces(scope="call")
async def open_session(gate: Gate) -> AsyncIterator[Session]:
    gate.log.append("opened")
    try:
        yield Session()
    finally:
        gate.log.append("closed")


class Tools:
    def __init__(self, gate: Gate, session: Session) -> None:
        self.gate = gate

    @tool
    async def wait(self) -> str:
        self.gate.enter()
        try:
            await asyncio.Event().wait()
        finally:
            self.gate.log.append("cancelled")
        return ""

    @tool
    def block(self, context: InvocationContext) -> str:
        self.gate.enter()
        self.gate.release.wait()
        self.gate.log.append(f"cancelled is {context.cancelled}")
        return "done"


@register_ai_service(tools=Tools)
class Service(Protocol):
    async def chat(self, name: str) -> str: ...
    def stream(self, name: str) -> AsyncIterator[str]: ...


def container(gate: Gate, stop_timeout: float = 60, name: str = "wait") -> Container:
    model = ScriptedChatModel([AiMessage("hm ", [tool_call(name)]), "ended"] * 2)
    made = Container(models={"default": model}, settings=ToolboxSettings(stop_timeout=stop_timeout))
    return made.register(Service, open_session).register_instance(gate)


async def test_stop_waits_for_running_calls() -> None:
    gate = Gate()
    async with container(gate, name="block") as running:
        call = asyncio.create_task(running.get(Service).chat("q"))
        await gate.inside.wait()
        asyncio.get_running_loop().call_soon(gate.release.set)

    assert await call == "ended"
    assert gate.log == ["opened", "cancelled is False", "closed"]


async def test_stop_cancels_late_calls_and_logs_them(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with caplog.at_level(logging.WARNING, "toolbox"):
        async with container(gate, stop_timeout=0.02) as running:
            call = asyncio.create_task(running.get(Service).chat("q"))
            await gate.inside.wait()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert gate.log == ["opened", "cancelled", "closed"]
    assert "Service.chat" in caplog.text


async def test_stop_logs_the_tools_whose_threads_still_run(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with caplog.at_level(logging.WARNING, "toolbox"):
        async with container(gate, stop_timeout=0.02, name="block") as running:
            call = asyncio.create_task(running.get(Service).chat("q"))
            await gate.inside.wait()
    gate.release.set()
    await asyncio.gather(call, return_exceptions=True)

    assert "still run on a thread" in caplog.text
    assert "block" in caplog.text


async def test_stop_closes_open_streams() -> None:
    gate = Gate()
    async with container(gate) as running:
        stream = running.get(Service).stream("q")
        assert await anext(stream) == "hm "

    assert [piece async for piece in stream] == []


class FailsToClose:
    """A model whose stream raises an error when it is closed."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        raise AssertionError("not called")

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        try:
            yield PartialResponse("hm ")
            await asyncio.Event().wait()
        finally:
            raise OSError("cannot close")


async def test_stop_logs_streams_that_fail_while_they_are_closed_and_closes_the_beans(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []

    @application_scoped
    class Pool:
        async def stop(self) -> None:
            log.append("stopped")

    async with Container(models={"default": FailsToClose()}).register(Plain, Pool) as running:
        await running.aget(Pool)
        streams = [running.get(Plain).stream("q"), running.get(Plain).list("q")]
        assert [await anext(each) for each in streams] == ["hm ", "hm "]

    assert log == ["stopped"]
    assert [each.getMessage() for each in caplog.records] == [
        "Plain.stream failed while the container closed its stream: cannot close",
        "Plain.list failed while the container closed its stream: cannot close",
    ]


@register_ai_service
class Plain(Protocol):
    def stream(self, name: str) -> AsyncIterator[str]: ...
    def list(self, name: str) -> AsyncIterator[str]: ...


# --- stops that are cancelled, or fail


@application_scoped
class Pool:
    """An application bean that needs a few steps of the loop to close."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    async def stop(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.gate.log.append("pool stopped")


async def test_a_cancellation_while_stop_waits_for_calls_ends_the_wait_and_closes_everything() -> None:
    gate = Gate()
    calls: list[asyncio.Task[str]] = []
    made = container(gate).register(Pool)
    leaving = asyncio.Event()

    async def serve() -> None:
        async with made:
            await made.aget(Pool)
            calls.append(asyncio.create_task(made.get(Service).chat("q")))
            await gate.inside.wait()
            leaving.set()

    serving = asyncio.create_task(serve())
    await leaving.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving

    assert calls[0].cancelled()
    assert gate.log == ["opened", "cancelled", "closed", "pool stopped"]
    assert not made.is_started


async def test_a_container_in_a_cancelled_anyio_scope_closes_everything() -> None:
    import anyio

    gate = Gate()
    made = container(gate).register(Pool)
    with anyio.CancelScope() as scope:
        async with made:
            await made.aget(Pool)
            call = asyncio.create_task(made.get(Service).chat("q"))
            await gate.inside.wait()
            scope.cancel()

    assert scope.cancelled_caught
    assert call.cancelled()
    assert gate.log == ["opened", "cancelled", "closed", "pool stopped"]
    async with made:  # nothing of the first start is left
        assert await made.aget(Pool) is not None


class FailsToDetach:
    """An engine of runs that fails at the stop."""

    async def submit(self, run_id: str, generation: int) -> None: ...

    async def detach(self) -> None:
        raise OSError("cannot detach")


async def test_beans_are_closed_if_the_engine_of_runs_fails_at_the_stop() -> None:
    gate = Gate()
    made = container(gate).register(Pool).register_instance(FailsToDetach(), RunEngine)
    with pytest.raises(OSError, match="cannot detach"):
        async with made:
            await made.aget(Pool)

    assert gate.log == ["pool stopped"]


def test_beans_of_a_synchronous_container_are_closed_if_the_engine_of_runs_fails_at_the_stop() -> None:
    log: list[str] = []

    @application_scoped
    class Files:
        def stop(self) -> None:
            log.append("stopped")

    made = Container().register(Files).register_instance(FailsToDetach(), RunEngine)
    with pytest.raises(OSError, match="cannot detach"), made:
        made.get(Files)

    assert log == ["stopped"]


async def test_calls_after_stop_are_rejected() -> None:
    gate = Gate()
    async with container(gate) as running:
        service = running.get(Service)
    with pytest.raises(ContainerNotStartedError):
        await service.chat("q")


def test_containers_started_without_an_event_loop_stop_their_own() -> None:
    before = set(threading.enumerate())
    with Container(models={"default": ScriptedChatModel(["hello"])}).register(Waiting) as running:
        assert running.get(Waiting).chat("q") == "hello"
    assert set(threading.enumerate()) <= before  # threads of earlier tests may have ended


@register_ai_service
class Waiting(Protocol):
    def chat(self, question: str) -> str: ...


# --- synchronous services inside of tools


class Inner(Protocol):
    @tool
    def look_up(self, question: str) -> str: ...


class Outer(Protocol):
    async def ask(self, question: str) -> Result[str]: ...
    def ask_and_wait(self, question: str) -> Result[str]: ...


class Expert:
    """A synchronous service with a tool that waits until it is cancelled."""

    def __init__(self, when_it_waits: Callable[[], None] = lambda: None) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self.when_it_waits = when_it_waits
        model = ScriptedChatModel([AiMessage(None, [tool_call("wait")]), "never said"])
        self.service = create_ai_service(Inner, chat_model=model, tools=[self.wait])

    async def wait(self) -> None:
        self.begun.set()
        self.when_it_waits()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @tool
    def by_hand(self, question: str) -> str:
        return self.service.look_up(question)

    @tool(timeout=100)
    def in_time(self, question: str) -> str:
        return self.service.look_up(question)


def outer_of(expert: Expert, name: str) -> Outer:
    replies = [AiMessage(None, [tool_call(name, {"question": "?"})]), "went on"]
    tools = [expert.service] if name == "look_up" else [expert]
    return create_ai_service(Outer, chat_model=ScriptedChatModel(replies), tools=tools)


@pytest.mark.parametrize("name", ["look_up", "by_hand"])
async def test_synchronous_services_that_a_tool_waits_for_are_cancelled_with_the_caller(name: str) -> None:
    expert = Expert()
    call = asyncio.create_task(outer_of(expert, name).ask("q"))
    await asyncio.to_thread(expert.begun.wait, 60)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(expert.cancelled.wait, 60)


async def test_synchronous_services_that_a_late_tool_waits_for_are_cancelled(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    expert = Expert(lambda: clock.advance(101, loop))
    answer = await outer_of(expert, "in_time").ask("q")

    assert answer.content == "went on"
    assert answer.tool_executions[0].is_error
    assert await asyncio.to_thread(expert.cancelled.wait, 60)


@pytest.mark.parametrize("name", ["look_up", "by_hand"])
def test_time_limits_of_synchronous_services_apply_to_inner_services(name: str, clock: Clock) -> None:
    expert = Expert(lambda: clock.advance(101))
    with pytest.raises(InvocationTimeoutError, match="Outer"), time_limit(100):
        outer_of(expert, name).ask_and_wait("q")

    assert expert.cancelled.wait(60)
