"""Time limits release the caller immediately; the timeout of a tool starts when the tool starts."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    Container,
    EventListener,
    InvocationEvent,
    InvocationTimeoutError,
    Result,
    TokenStream,
    ToolExecutedEvent,
    create_ai_service,
    register_ai_service,
    run_on,
    run_on_thread,
    time_limit,
    tool,
)
from toolbox.settings import ToolboxSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Waiting(Protocol):
    def ask(self, question: str) -> Result[str]: ...


class Streaming(Protocol):
    def ask(self, question: str) -> Iterator[str]: ...


class Awaited(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


class Slow:
    """Tools: one blocks until the test releases it, one returns immediately."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun = threading.Event()
        self.left = threading.Event()
        self.when_it_blocks: Callable[[], None] = lambda: None

    @tool(timeout=0.2)
    def stuck(self) -> str:
        self.begun.set()
        self.release.wait()
        self.left.set()
        return "late"

    @tool
    def unlimited(self) -> str:
        self.begun.set()
        self.when_it_blocks()
        self.release.wait()
        self.left.set()
        return "late"

    @tool(timeout=60)
    def quick(self) -> str:
        return "done"


class Events(Protocol):
    async def ask(self, question: str) -> str: ...
    def events(self, question: str) -> TokenStream: ...


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.release.set()


def until_it_blocks(slow: Slow, clock: Clock, answer: AiMessage) -> Callable[[object], AiMessage]:
    """Return a reply; when the tool of `slow` blocks, the limits of the service's event loop end."""

    def reply(request: object) -> AiMessage:
        loop = asyncio.get_running_loop()
        slow.when_it_blocks = lambda: clock.advance(101, loop)
        return answer

    return reply


def calls(*names: str) -> AiMessage:
    return AiMessage(None, [tool_call(name) for name in names])


def outcomes(result: Result[str]) -> list[tuple[str, bool]]:
    return [(each.result, each.is_error) for each in result.tool_executions]


@pytest.mark.parametrize("together", [False, True])
def test_late_def_tools_release_the_caller_of_a_synchronous_method(slow: Slow, together: bool) -> None:
    model = ScriptedChatModel([calls("stuck", "quick"), "went on"])
    service = create_ai_service(Waiting, chat_model=model, tools=slow, concurrent_tools=together)

    result = service.ask("q")

    assert result.content == "went on"
    assert not slow.left.is_set()
    [(text, is_error), second] = outcomes(result)
    assert is_error
    assert "0.2 s" in text
    assert second == ("done", False), "the next tool runs, and is not called late"


@pytest.mark.parametrize("how", ["time_limit", "timeout="])
def test_time_limit_releases_the_caller_of_a_synchronous_method(slow: Slow, how: str, clock: Clock) -> None:
    model = ScriptedChatModel([until_it_blocks(slow, clock, calls("unlimited")), "never said"])
    service = create_ai_service(Waiting, chat_model=model, tools=slow, timeout=100 if how == "timeout=" else None)

    with pytest.raises(InvocationTimeoutError), time_limit(100 if how == "time_limit" else 6000):
        service.ask("q")

    assert slow.begun.is_set()
    assert not slow.left.is_set()


def test_time_limit_releases_the_reader_of_a_synchronous_stream(slow: Slow, clock: Clock) -> None:
    model = ScriptedChatModel([until_it_blocks(slow, clock, calls("unlimited")), "never said"])
    service = create_ai_service(Streaming, chat_model=model, tools=slow, timeout=100)

    with pytest.raises(InvocationTimeoutError):
        list(service.ask("q"))

    assert slow.begun.is_set()
    assert not slow.left.is_set()


def test_def_tools_stay_on_the_callers_thread_without_a_limit() -> None:
    def where() -> int:
        return threading.get_ident()

    service = create_ai_service(Waiting, chat_model=ScriptedChatModel([calls("where"), "there"]), tools=where)

    assert service.ask("q").tool_executions[0].result_object == threading.get_ident()


def queued(clock: Clock, mark: Callable[[Any], Any], **settings: Any) -> tuple[list[str], Result[str]]:
    """Run two tools of 60 s with a timeout of 100 s where only one can run at a time."""
    order: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []
    has_ended = threading.Event()

    class Ends(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, ToolExecutedEvent):
                has_ended.set()

    async def go_round() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @mark
    @tool(timeout=100)
    def work(number: int) -> str:
        order.append(f"begun {number}")
        if len(order) == 2:
            assert has_ended.wait(60)  # its thread is free a little earlier
        clock.advance(60)
        asyncio.run_coroutine_threadsafe(go_round(), *loops).result()  # the loop has read the clock
        return "done"

    @register_ai_service(tools=work, concurrent_tools=True)
    class Many(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    async def ask() -> Result[str]:
        loops.append(asyncio.get_running_loop())
        model = ScriptedChatModel([AiMessage(None, [tool_call("work", {"number": n}) for n in (1, 2)]), "both"])
        container = Container(models={"default": model}, settings=ToolboxSettings(**settings))
        async with container.register(Many).register_instance(Ends()) as running:
            return await running.get(Many).ask("q")

    return order, asyncio.run(ask())


def test_tool_timeouts_do_not_include_waiting_for_the_pool(clock: Clock) -> None:
    order, result = queued(clock, lambda each: each, pool_size=1)

    assert order == ["begun 1", "begun 2"]
    assert outcomes(result) == [("done", False)] * 2


def test_tool_timeouts_do_not_include_waiting_for_a_new_thread(clock: Clock) -> None:
    order, result = queued(clock, run_on_thread, thread_limit=1)

    assert order == ["begun 1", "begun 2"]
    assert outcomes(result) == [("done", False)] * 2


def test_tool_timeouts_do_not_include_waiting_for_an_executor(clock: Clock) -> None:
    with ThreadPoolExecutor(1) as executor:
        order, result = queued(clock, run_on(executor))

    assert order == ["begun 1", "begun 2"]
    assert outcomes(result) == [("done", False)] * 2


async def test_tools_that_waited_still_time_out(slow: Slow) -> None:
    service = create_ai_service(Awaited, chat_model=ScriptedChatModel([calls("stuck"), "went on"]), tools=slow)
    began = time.monotonic()

    result = await service.ask("q")

    assert result.content == "went on"
    assert result.tool_executions[0].is_error
    assert 0.2 <= time.monotonic() - began < 10


# --- tools that catch the cancellation


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("limit", ["time limit", "cancelled"])
async def test_a_tool_that_catches_the_cancellation_does_not_keep_its_invocation_alive(
    limit: str, streamed: bool, clock: Clock
) -> None:
    begun, ran = asyncio.Event(), []

    @tool
    async def stubborn() -> str:
        begun.set()
        if limit == "time limit":
            clock.advance(101)
        try:
            await asyncio.Event().wait()
        except BaseException:
            ran.append("stubborn")
        return "done"

    @tool
    def other() -> str:
        ran.append("other")
        return "done"

    model = ScriptedChatModel([calls("stubborn", "other"), "never"])
    service = create_ai_service(Events, chat_model=model, tools=[stubborn, other])

    async def use() -> None:
        if streamed:
            _ = [event async for event in service.events("x")]
        else:
            await service.ask("x")

    if limit == "time limit":
        with pytest.raises(InvocationTimeoutError), time_limit(100):
            await use()
    else:
        using = asyncio.create_task(use())
        await begun.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
    assert ran == ["stubborn"]
    assert len(model.requests) == 1
