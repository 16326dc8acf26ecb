"""Errors before, around and after the method of a run: it stays for another try, stays suspended, or has failed."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, field_serializer

from toolbox import Container, application_scoped, produces, register_ai_service, tool
from toolbox.errors import RunIncompatibleError, RunStoreError
from toolbox.runs import IdentityLoader, InMemoryRunStore, RunEngine, RunId, RunStore, durable
from toolbox.security import ForbiddenError, SecurityIdentity
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import asks, says

pytestmark = pytest.mark.anyio


class Counting(InMemoryRunStore):
    """Counts how often a run was taken."""

    persistent = True
    taken = 0

    async def acquire(self, run_id: str, owner: str) -> Any:
        if (found := await super().acquire(run_id, owner)) is not None:
            self.taken += 1
        return found


class Nowhere(RunEngine):
    """Executes nothing."""

    async def submit(self, run_id: str, generation: int) -> None:
        pass


@register_ai_service
class Desk(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


def container(store: Any, *replies: Any, services: Any = (Desk,), **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, seeds=(SecurityIdentity,), **options)
    return made.register(*services).register_instance(store, RunStore)


async def started(store: Any) -> None:
    """Start the run `r` of ann, which nobody executes."""
    made = container(store, take_over_runs=False).register_instance(Nowhere(), RunEngine)
    async with made as here, here.request_scope({SecurityIdentity: SecurityIdentity("ann")}):
        await here.runs.start(Desk.ask, "r", "hi")


# --- before the method


@pytest.mark.parametrize("error", [ConnectionError("the directory is away"), None])
async def test_a_run_whose_identity_cannot_be_loaded_is_released_and_its_caller_gets_the_error(error: Any) -> None:
    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            if error is not None:
                raise error

    store = Counting()
    await started(store)
    async with container(store, services=(Desk, Directory), take_over_runs=False) as here:
        with pytest.raises(ForbiddenError if error is None else ConnectionError):
            await here.runs.execute("r")
    stored = await store.load("r")
    assert stored is not None
    assert (stored.status, stored.owner, store.taken) == ("running", None, 1)
    async with container(store, says("done"), take_over_runs=False) as here:
        assert (await here.runs.execute("r")).status == "completed"


async def test_a_run_that_cannot_begin_here_is_tried_again_by_a_later_look_for_lapsed_runs() -> None:
    seen: list[str] = []
    twice = asyncio.Event()

    @application_scoped
    class Directory(IdentityLoader):
        async def load(self, identity: Any) -> Any:
            if seen.count("tried") == 1:
                twice.set()
            seen.append("tried")
            raise ConnectionError("the directory is away")

    class Watched(Counting):
        async def lapsed(self, limit: int = 100) -> list[str]:
            seen.append("looked")
            return await super().lapsed(limit)

    store = Watched()
    await started(store)
    async with container(store, services=(Desk, Directory)) as here:
        while not twice.is_set():
            await skip_time(here, timedelta(minutes=1))
    first = seen.index("tried")
    assert "looked" in seen[first : seen.index("tried", first + 1)]


async def test_a_run_whose_records_cannot_be_read_is_released_and_its_caller_gets_the_error() -> None:
    class Away(Counting):
        async def records(self, run_id: str) -> Any:
            raise ConnectionError("the database is away")

    store = Away()
    await started(store)
    async with container(store, take_over_runs=False) as here:
        with pytest.raises(RunStoreError, match="the database is away"):
            await here.runs.execute("r")
    stored = await store.load("r")
    assert stored is not None
    assert (stored.status, stored.owner, store.taken) == ("running", None, 1)


async def test_events_of_a_newer_release_stay_for_newer_workers() -> None:
    store = Counting()
    await started(store)
    await store.acquire("r", "newer")
    await store.add_events("r", 1, ['{"version": 99, "type": "Thought"}'])
    await store.release("r", 1)
    async with container(store, take_over_runs=False) as here:
        with pytest.raises(RunIncompatibleError, match="99"):
            await here.runs.execute("r")
    stored = await store.load("r")
    assert stored is not None
    assert (stored.status, stored.owner) == ("running", None)


# --- around the method


class Connection:
    """A bean of the request that a tool uses."""


@produces(scope="request")
async def connection() -> AsyncIterator[Connection]:
    yield Connection()
    raise ConnectionError("already closed")


class Till:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @tool
    async def look(self) -> str:
        """Look."""
        return "seen"

    @tool(requires_approval=True)
    async def pay(self) -> str:
        """Pay."""
        return "paid"


@register_ai_service(tools=Till)
class Cashier(Protocol):
    @durable
    async def ask(self, run: RunId, text: str) -> str: ...


TILL = (Cashier, Till, connection)


async def test_a_run_stays_suspended_if_a_bean_of_its_request_fails_to_close() -> None:
    store = Counting()
    replies = asks(tool_call("look")), asks(tool_call("pay"))
    async with container(store, *replies, services=TILL, take_over_runs=False) as here:
        with pytest.raises(ExceptionGroup, match="closing request scope failed"):
            await here.get(Cashier).ask("r", "hi")
        run = await here.runs.get("r")
        assert (run.status, [each.tool_name for each in run.pending], run.error) == ("suspended", ["pay"], None)
        assert (await here.runs.execute("r")).status == "suspended"


async def test_executing_a_run_whose_request_fails_to_close_returns_the_suspended_run() -> None:
    store = Counting()
    made = container(store, services=TILL, take_over_runs=False).register_instance(Nowhere(), RunEngine)
    async with made as here:
        await here.runs.start(Cashier.ask, "r", "hi")
    replies = asks(tool_call("look")), asks(tool_call("pay"))
    async with container(store, *replies, services=TILL, take_over_runs=False) as here:
        assert (await here.runs.execute("r")).status == "suspended"
    assert store.taken == 1


# --- after the method


async def test_a_durable_run_whose_answer_cannot_be_stored_has_failed() -> None:
    class Secretive(BaseModel):
        word: str

        @field_serializer("word")
        def write(self, word: str) -> str:
            raise ValueError(f"never written: {word}")

    @register_ai_service(durable=True, output_mode="prompt")
    class Writer(Protocol):
        async def ask(self, run: RunId, text: str) -> Secretive: ...

    store = Counting()
    async with container(store, says('{"word": "x"}'), services=(Writer,), take_over_runs=False) as here:
        with pytest.raises(ValueError, match="never written"):
            await here.get(Writer).ask("r", "hi")
        run = await here.runs.get("r")
        assert run.status == "failed"
        assert "never written" in (run.error or "")
