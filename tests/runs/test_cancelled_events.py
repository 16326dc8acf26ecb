"""What readers and logs see of a run that is cancelled while its model is answering."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import (
    ChatRequest,
    ChatResponse,
    Container,
    PartialResponse,
    compensate_for,
    register_ai_service,
    tool,
)
from toolbox.runs import InMemoryRunStore, RunEnded, RunStore

pytestmark = pytest.mark.anyio


class Talking:
    """Says something, and then nothing more; or goes on talking until it is cancelled."""

    def __init__(self, *, for_ever: bool = False) -> None:
        self.for_ever, self.has_said = for_ever, asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        raise AssertionError

    async def stream(self, request: ChatRequest) -> AsyncIterator[PartialResponse]:
        for each in ("Hello, ", "I am ", "a model."):
            yield PartialResponse(each)
        self.has_said.set()
        while self.for_ever:
            yield PartialResponse(".")
            await asyncio.sleep(0)
        await asyncio.Event().wait()


class Counters:
    @tool
    def count(self) -> str:
        return "1"

    @compensate_for(count)
    def uncount(self) -> None: ...


@register_ai_service
class Speaker(Protocol):
    async def speak(self, text: str) -> str: ...


@register_ai_service(tools=Counters, compensate_on_failure=True)
class Careful(Protocol):
    async def speak(self, text: str) -> str: ...


def program(service: Any, model: Talking, store: RunStore) -> Container:
    made = Container(models={"default": model}).register(service)
    return made.register_instance(store, as_type=RunStore)


async def said_in(container: Container, run_id: str) -> tuple[str, Any]:
    """Return the text that a reader gets of a run, and its end."""
    events = [each.event async for each in container.runs.events(run_id)]
    return "".join(each.text for each in events if isinstance(each, PartialResponse)), events[-1]


@pytest.mark.parametrize("service", [Speaker, Careful])
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_readers_get_what_the_model_said_before_the_run_was_cancelled(
    service: Any, for_ever: bool, is_elsewhere: bool
) -> None:
    store, model = InMemoryRunStore(), Talking(for_ever=for_ever)
    async with program(service, model, store) as here, program(service, Talking(), store) as there:
        run = await here.runs.start(service.speak, "Speak!")
        await asyncio.wait_for(model.has_said.wait(), 60)
        cancelling = (there if is_elsewhere else here).runs
        await asyncio.wait_for(cancelling.cancel(run.id, "enough"), 60)
        said, end = await said_in(there, run.id)

    assert said.rstrip(".") == "Hello, I am a model"
    assert end == RunEnded("cancelled", "enough")


async def test_a_database_keeps_what_the_model_said_before_the_run_was_cancelled(tmp_path: Path) -> None:
    from toolbox.sql import SqlRunStore, open_engine

    url, model = f"sqlite+aiosqlite:///{tmp_path / 'runs.db'}", Talking()
    async with open_engine(url) as engine, program(Speaker, model, SqlRunStore(engine)) as here:
        run = await here.runs.start(Speaker.speak, "Speak!")
        await asyncio.wait_for(model.has_said.wait(), 60)
        await here.runs.cancel(run.id)
        assert (await said_in(here, run.id))[0] == "Hello, I am a model."


class KnowsNoWishes(InMemoryRunStore):
    """As a store of a program's own, from before wishes."""

    supports = frozenset()


@pytest.mark.parametrize("service", [Speaker, Careful])
@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("kind", [InMemoryRunStore, KnowsNoWishes])
async def test_only_a_run_that_is_taken_from_its_process_is_logged_as_taken_over(
    kind: type[InMemoryRunStore], service: Any, is_elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store, model = kind(lease=6), Talking(for_ever=True)
    async with program(service, model, store) as here, program(service, Talking(), store) as there:
        run = await here.runs.start(service.speak, "Speak!")
        await asyncio.wait_for(model.has_said.wait(), 60)
        await (there if is_elsewhere else here).runs.cancel(run.id)
        await here.runs.follow_clock()

    is_taken = is_elsewhere and kind is KnowsNoWishes
    assert warnings_in(caplog) == ([f"another process has taken over run {run.id}"] if is_taken else [])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
