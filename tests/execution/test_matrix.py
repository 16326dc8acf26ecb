"""Thread, scope, context and result for every combination of service method, caller and tool."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from fastapi.testclient import TestClient

from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    Instance,
    InvocationContext,
    TokenStream,
    ToolExecuted,
    blocking,
    invocation_attributes,
    non_blocking,
    register_ai_service,
    request_scoped,
    run_on,
    run_on_thread,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

SERVICES = ("chat", "wait", "text", "events")
TOOLS = ("block", "quick", "later", "fresh", "named")


@request_scoped
class Request:
    """A request-scoped bean."""


@dataclass
class Seen:
    """The thread, scope and context that a tool saw."""

    thread: threading.Thread
    name: str
    request: Request
    variable: str
    context: InvocationContext | None


@dataclass
class Log:
    seen: list[Seen] = field(default_factory=list)


class Tools:
    def __init__(self, request: Instance[Request], log: Log) -> None:
        self.request, self.log = request, log

    def note(self) -> str:
        thread = threading.current_thread()
        seen = Seen(thread, thread.name, self.request.get(), variable.get(), InvocationContext.current())
        self.log.seen.append(seen)
        return "noted"

    @tool
    @blocking
    def block(self) -> str:
        return self.note()

    @tool
    @non_blocking
    def quick(self) -> str:
        return self.note()

    @tool
    async def later(self) -> str:
        await asyncio.sleep(0)
        return self.note()

    @tool
    @run_on_thread
    def fresh(self) -> str:
        return self.note()

    @tool
    @run_on("named")
    def named(self) -> str:
        return self.note()


@register_ai_service(tools=Tools)
class Service(Protocol):
    async def chat(self, question: str) -> str: ...
    def wait(self, question: str) -> str: ...
    def text(self, question: str) -> AsyncIterator[str]: ...
    def events(self, question: str) -> TokenStream: ...


def reply(request: ChatRequest) -> AiMessage:
    asked = request.messages[0].text or ""
    return AiMessage("done") if len(request.messages) > 1 else AiMessage(None, [tool_call(asked)])


@dataclass
class Call:
    """The thread, request and answer of a caller."""

    thread: threading.Thread
    request: Request
    answer: str


def call_def(container: Container, way: str, name: str) -> Call:
    """Call a service from synchronous code; asynchronous methods run in their own event loop."""
    variable.set("callers")
    request = container.get(Request)
    with invocation_attributes(tenant="acme"):
        answer = container.get(Service).wait(name) if way == "wait" else asyncio.run(ask(container, way, name))
    return Call(threading.current_thread(), request, answer)


async def call_async(container: Container, way: str, name: str) -> Call:
    variable.set("callers")
    request = container.get(Request)
    with invocation_attributes(tenant="acme"):
        if way == "wait":
            thread: list[threading.Thread] = []

            def wait() -> str:
                thread.append(threading.current_thread())
                return container.get(Service).wait(name)

            answer = await asyncio.to_thread(wait)
            return Call(thread[0], request, answer)
        answer = await ask(container, way, name)
    return Call(threading.current_thread(), request, answer)


async def ask(container: Container, way: str, name: str) -> str:
    service = container.get(Service)
    match way:
        case "chat":
            return await service.chat(name)
        case "text":
            return "".join([piece async for piece in service.text(name)])
        case _:
            events = [event async for event in service.events(name)]
            [executed] = [event for event in events if isinstance(event, ToolExecuted)]
            assert executed.execution.result == "noted"
            return events[-1].response.ai_message.text  # type: ignore[union-attr]  # the last is complete


def application(container: Container, calls: list[Call]) -> FastAPI:
    app, router = FastAPI(), APIRouter()
    install(app, container)

    @app.get("/async/{way}/{name}")
    async def asynchronous(way: str, name: str, request: Inject[Request]) -> str:
        call = await call_async(container, way, name)
        assert call.request is request
        calls.append(call)
        return call.answer

    @router.get("/def/{way}/{name}")
    def synchronous(way: str, name: str, request: Inject[Request]) -> str:
        call = call_def(container, way, name)
        assert call.request is request
        calls.append(call)
        return call.answer

    @app.websocket("/ws/{way}/{name}")
    async def socket(websocket: WebSocket, way: str, name: str, request: Inject[Request]) -> None:
        await websocket.accept()
        call = await call_async(container, way, name)
        assert call.request is request
        calls.append(call)
        await websocket.send_text(call.answer)
        await websocket.close()

    app.include_router(router)
    return app


@dataclass
class Program:
    """A started program, the thread of its event loop, and the ways to call it."""

    log: Log
    executor: ThreadPoolExecutor
    loop: threading.Thread
    calls: dict[str, Callable[[str, str], Call]]


@contextmanager
def new_program() -> Iterator[tuple[Container, Log, ThreadPoolExecutor]]:
    log = Log()
    model = ScriptedChatModel([reply] * 2 * len(SERVICES) * len(CALLERS) * len(TOOLS))
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as mine:
        container = Container(models={"default": model}, executors={"named": mine})
        yield container.register(Service, Request).register_instance(log), log, mine


@pytest.fixture(scope="module")
def on_a_loop() -> Iterator[Program]:
    with new_program() as (container, log, mine), asyncio.Runner() as runner:

        def from_loop(way: str, name: str) -> Call:
            async def main() -> Call:
                async with container.request_scope():
                    return await call_async(container, way, name)

            return runner.run(main())

        def from_worker(way: str, name: str) -> Call:
            async def main() -> Call:
                async with container.request_scope():
                    return await asyncio.to_thread(call_def, container, way, name)

            return runner.run(main())

        runner.run(container.__aenter__())
        yield Program(log, mine, threading.current_thread(), {"loop": from_loop, "worker thread": from_worker})
        runner.run(container.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def in_an_application() -> Iterator[Program]:
    calls: list[Call] = []
    loop: list[threading.Thread] = []
    with new_program() as (container, log, mine):
        app = application(container, calls)

        @app.get("/thread")
        async def thread() -> None:
            loop.append(threading.current_thread())

        with TestClient(app) as client:

            def from_endpoint(path: str, way: str, name: str) -> Call:
                response = client.get(f"/{path}/{way}/{name}")
                assert (response.status_code, response.json()) == (200, "done")
                return calls.pop()

            def from_websocket(way: str, name: str) -> Call:
                with client.websocket_connect(f"/ws/{way}/{name}") as socket:
                    assert socket.receive_text() == "done"
                return calls.pop()

            client.get("/thread")
            yield Program(
                log,
                mine,
                loop[0],
                {
                    "async endpoint": partial(from_endpoint, "async"),
                    "def endpoint": partial(from_endpoint, "def"),
                    "websocket": from_websocket,
                },
            )


CALLERS = {
    "loop": "on_a_loop",
    "worker thread": "on_a_loop",
    "async endpoint": "in_an_application",
    "def endpoint": "in_an_application",
    "websocket": "in_an_application",
}
"""The callers, and the fixture with the program of each."""


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("way", SERVICES)
def test_tools_run_in_the_right_place_with_the_context_of_their_caller(
    way: str, caller: str, name: str, request: pytest.FixtureRequest
) -> None:
    program: Program = request.getfixturevalue(CALLERS[caller])
    program.log.seen.clear()
    call = program.calls[caller](way, name)
    log, loop_thread = program.log, program.loop
    mine_thread = next(iter(program.executor._threads), None)

    assert call.answer == "done"
    [seen] = log.seen
    assert seen.request is call.request
    assert seen.variable == "callers"
    assert seen.context is not None
    assert (seen.context.method, dict(seen.context.attributes)) == (way, {"tenant": "acme"})
    assert seen.context.request is not None
    assert seen.context.request.name == name
    match way, name:
        case "wait", ("block" | "quick"):
            assert seen.thread is call.thread
        case _, ("later" | "quick"):
            assert seen.thread is loop_thread
        case _, "named":
            assert seen.thread is mine_thread
        case _:
            assert seen.thread not in (loop_thread, call.thread)
    if name in ("block", "fresh"):
        assert seen.name == name
    if name == "named":
        assert seen.name.startswith("mine"), "threads of a user's executor keep their names"
