"""Calls cancelled at each of their await points leave nothing open and store all messages or none."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import Any, Protocol

import pytest

from tests.conversations.made_logs import check_pairs
from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    MemoryId,
    Message,
    Result,
    TokenStream,
    UserMessage,
    produces,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("only_new_garbage")]


class Opened:
    """Counts the open sessions."""

    def __init__(self) -> None:
        self.opened = self.closed = 0


class Session:
    def __init__(self, opened: Opened) -> None:
        self.opened = opened


@produces(scope="call")
async def session(opened: Opened) -> AsyncIterator[Session]:
    await asyncio.sleep(0)
    opened.opened += 1
    try:
        yield Session(opened)
    finally:
        await asyncio.sleep(0)
        opened.closed += 1


class Tools:
    """Tools of a dependent bean that uses a call-scoped session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @tool
    async def look(self, number: int) -> int:
        await asyncio.sleep(0)
        return number

    @tool
    def block(self, number: int) -> int:
        return number


@register_ai_service(tools=Tools)
class Service(Protocol):
    def stream(self, session: MemoryId[str], question: str) -> AsyncIterator[str]: ...
    def events(self, session: MemoryId[str], question: str) -> TokenStream: ...
    async def chat(self, session: MemoryId[str], question: str) -> Result[str]: ...


@register_ai_service(tools=Tools, concurrent_tools=True)
class Together(Protocol):
    def stream(self, session: MemoryId[str], question: str) -> AsyncIterator[str]: ...
    def events(self, session: MemoryId[str], question: str) -> TokenStream: ...
    async def chat(self, session: MemoryId[str], question: str) -> Result[str]: ...


class Interrupted(Awaitable[Any]):
    """Awaits a coroutine and cancels it at its `at`-th suspension; `reached` is True if it got that far."""

    def __init__(self, coroutine: Any, at: int) -> None:
        self.coroutine, self.at, self.reached = coroutine, at, False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.coroutine.__await__()
        send, value = steps.send, None
        suspended = 0
        while True:
            try:
                asked = send(value)
            except StopIteration as stop:
                return stop.value
            suspended += 1
            if suspended == self.at:
                self.reached = True
                # A task that is cancelled between two steps cancels the future it waits for as well.
                getattr(asked, "cancel", lambda: None)()
                send, value = steps.throw, asyncio.CancelledError()
                continue
            try:
                send, value = steps.send, (yield asked)
            except BaseException as error:
                send, value = steps.throw, error


def reply(request: ChatRequest) -> AiMessage:
    """Return two rounds of tool calls and then an answer."""
    since = [type(each) for each in reversed(request.messages)].index(UserMessage)
    if since == 0:
        both = [tool_call("look", {"number": 1}, id="1"), tool_call("block", {"number": 2}, id="2")]
        return AiMessage("hm. ", both)
    if since == 3:
        return AiMessage("so. ", [tool_call("look", {"number": 3}, id="3")])
    return AiMessage("done")


async def consume(service: Any, way: str) -> None:
    if way == "chat":
        await service.chat("s", "question")
        return
    async for _ in getattr(service, way)("s", "question"):
        pass


@pytest.mark.parametrize("way", ["chat", "stream", "events"])
@pytest.mark.parametrize("cls", [Service, Together])
async def test_calls_cancelled_at_any_await_leave_nothing_open(cls: Any, way: str) -> None:
    at, reached = 0, True
    while reached:
        at += 1
        opened = Opened()
        model = ScriptedChatModel([reply] * 6)
        container = Container(models={"default": model})
        container.register(session, cls).register_instance(opened)
        async with container:
            service = container.get(cls)
            tasks = asyncio.all_tasks()
            call = Interrupted(consume(service, way), at)
            outcome = await asyncio.gather(asyncio.ensure_future(_awaited(call)), return_exceptions=True)
            reached = call.reached
            gc.collect()
            await asyncio.gather(*(asyncio.all_tasks() - tasks))
            remembered: list[Message] = await container.chat_memory(cls, "s").messages()

            assert opened.opened == opened.closed
            if outcome == [None]:
                assert len(remembered) == 7
                assert type(remembered[0]) is UserMessage
            else:
                assert isinstance(outcome[0], asyncio.CancelledError)
                check_pairs(remembered)  # what the tools did is kept, and a call that has no result gets one
                assert len(remembered) <= 7
            again = await service.chat("s", "and now?")
            assert again.content == "done"
            assert len(await container.chat_memory(cls, "s").messages()) == len(remembered) + 7
        assert opened.opened == opened.closed
    assert at > 4
    assert [each for each in threading.enumerate() if each.name in ("look", "block")] == []


async def _awaited(call: Interrupted) -> None:
    await call
