"""Containers on an event loop that does not run while they are used, as between fixtures and tests of some plugins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import pytest

from toolbox import (
    AiMessage,
    Container,
    ContainerNotStartedError,
    Inject,
    MemoryId,
    Result,
    produces,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call


class Session: ...


@produces(scope="request")
async def session() -> AsyncIterator[Session]:
    yield Session()


class Tools:
    @tool
    def read(self, session: Inject[Session]) -> str:
        return "read"


@register_ai_service(tools=Tools)
class Desk(Protocol):
    async def chat(self, memory: MemoryId[str], text: str) -> Result[str]: ...

    def words(self, text: str) -> AsyncIterator[str]: ...

    def wait(self, text: str) -> str: ...

    def texts(self, text: str) -> Iterator[str]: ...


@pytest.fixture(params=["paused", "closed"])
def container(request: pytest.FixtureRequest) -> Iterator[Container]:
    """Return a container whose loop does not run: it is `paused` until the end of the test, or `closed` for ever."""
    model = ScriptedChatModel([AiMessage(None, [tool_call("read")]), *["said"] * 3])
    container = Container(models={"default": model}).register(Desk, session)
    with asyncio.Runner() as first:
        first.run(container.__aenter__())
        if request.param == "paused":
            yield container
            first.run(container.__aexit__(None, None, None))
    if request.param == "closed":
        yield container
        asyncio.run(container.__aexit__(None, None, None))


def test_services_run_on_the_loop_of_their_caller(container: Container) -> None:
    async def use() -> None:
        desk = container.get(Desk)
        async with container.request_scope():
            result = await desk.chat("1", "Hi")
        assert (result.content, result.tool_executions[0].result) == ("said", "read")
        assert [word async for word in desk.words("Hi")] == ["said"]
        run = await container.runs.start(desk.chat, "2", "Hi")
        assert (await container.runs.result(run)).content == "said"
        assert len(await container.conversations.of(Desk, "2").history()) == 2

    asyncio.run(asyncio.wait_for(use(), 30))


def test_code_without_a_loop_gets_an_error_instead_of_waiting_forever(container: Container) -> None:
    def injected(session: Inject[Session]) -> None: ...

    for use in (
        lambda: container.get(Desk).wait("Hi"),
        lambda: next(container.get(Desk).texts("Hi")),
        container.conversation_scope(Desk, "1").__enter__,
        container.injected(injected),
    ):
        with pytest.raises(ContainerNotStartedError, match=r"does not run.*start the container with `with container:`"):
            use()
