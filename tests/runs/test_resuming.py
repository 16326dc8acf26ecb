"""A resumed run belongs to the container: not to the request, the person or the task that resumed it."""

import asyncio
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    Container,
    Inject,
    InvocationContext,
    Result,
    ToolProviderResult,
    create_ai_service,
    produces,
    register_ai_service,
    time_limit,
    tool,
)
from toolbox.errors import InvocationTimeoutError
from toolbox.limits import current_usage, usage_limits
from toolbox.runs import InMemoryRunStore, RunCancelledError, RunStore, StoredRun, approve, runs_of
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import ANN, BOB, asks, ran, says

pytestmark = pytest.mark.anyio

caller: ContextVar[str] = ContextVar("caller", default="nobody")


@tool(requires_approval=True)
async def sign(by: Inject[SecurityIdentity]) -> str:
    ran.append((by.name, caller.get()))
    return "signed"


@register_ai_service(tools=sign)
class Notary(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


SIGN = asks(tool_call("sign", {}))


def container(*replies: Any, services: Any = (Notary,), store: RunStore | None = None, **options: Any) -> Container:
    options = {"seeds": (SecurityIdentity,), **options}
    made = Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)
    return made if store is None else made.register_instance(store, RunStore)


# --- whose identity, context, time and usage


@pytest.mark.parametrize("starter", [SecurityIdentity.anonymous(), ANN], ids=str)
async def test_a_resumed_run_acts_as_its_starter_also_if_a_producer_knows_only_the_person_who_answers(
    starter: SecurityIdentity,
) -> None:
    here = SecurityIdentity.anonymous()

    @produces(scope="request")
    def user() -> SecurityIdentity:
        return here

    async with container(SIGN, says("done"), services=(Notary, user), seeds=()) as made:
        here = starter
        async with made.request_scope():
            run_id = (await made.get(Notary).ask("x")).run_id or ""
        here = BOB
        async with made.request_scope():
            token = caller.set("bob")
            await made.runs.resume(run_id, {"0": approve()}, by=BOB)
            caller.reset(token)
    assert ran == [(starter.name, "nobody")]


@pytest.mark.parametrize("starter", [None, ANN], ids=str)
async def test_a_resumed_run_of_a_service_without_a_container_acts_as_its_starter(
    starter: SecurityIdentity | None,
) -> None:
    here = starter
    made = create_ai_service(
        Notary, chat_model=ScriptedChatModel([SIGN, says("done")]), tools=sign, identity=lambda: here
    )
    run_id = (await made.ask("x")).run_id or ""
    here = BOB
    await runs_of(made).resume(run_id, {"0": approve()}, by=BOB)
    assert ran == [("" if starter is None else starter.name, "nobody")]


async def test_tool_providers_that_are_asked_about_replaced_arguments_do_not_see_the_person_who_answers() -> None:
    seen = []

    @tool(requires_approval=True)
    def pay(euros: int) -> str:
        return "paid"

    def provide(request: Any) -> ToolProviderResult:
        seen.append(caller.get())
        return ToolProviderResult(tools=(pay,))

    @register_ai_service(tool_provider=provide)
    class Provided(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay", {"euros": 1})), says("done"), services=(Provided,)) as here:
        run_id = (await here.get(Provided).ask("x")).run_id or ""
        seen.clear()
        caller.set("bob")
        await here.runs.resume(run_id, {"0": approve(arguments={"euros": 2})})
    assert seen
    assert set(seen) == {"nobody"}


async def test_a_resumed_run_neither_counts_in_the_block_around_resume_nor_ends_at_its_limit() -> None:
    async with container(SIGN, says("done")) as here:
        run_id = (await here.get(Notary).ask("x")).run_id or ""
        with usage_limits(model_calls=0):
            assert (await here.runs.resume(run_id, {"0": approve()})).content == "done"
            assert current_usage().model_calls == 0


# --- waiting for it


class Slow:
    """A tool that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.started, self.goes_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cancelled, self.cleans_up = asyncio.Event(), asyncio.Event()
        self.cleans_up.set()

    @tool(requires_approval=True)
    async def work(self) -> str:
        self.started.set()
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            await self.cleans_up.wait()
            self.ended.set()
        return "worked"


def working(slow: Slow, store: RunStore | None = None) -> tuple[Container, type[Any]]:
    @register_ai_service(tools=slow)
    class Worker(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    return container(asks(tool_call("work", {})), says("done"), services=(Worker,), store=store), Worker


@pytest.mark.parametrize("is_stream", [False, True], ids=["resume", "resume_stream"])
async def test_a_run_goes_on_if_the_caller_of_resume_is_cancelled(is_stream: bool) -> None:
    slow = Slow()
    made, service = working(slow)
    async with made as here:
        run_id = (await here.get(service).ask("x")).run_id or ""
        waiting = asyncio.create_task(_resumed(here, run_id, is_stream))
        await slow.started.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        slow.goes_on.set()
        assert (await here.runs.result(run_id, timeout=60)).content == "done"


async def test_a_time_limit_around_resume_ends_the_waiting_and_not_the_run() -> None:
    slow = Slow()
    made, service = working(slow)
    async with made as here:
        run_id = (await here.get(service).ask("x")).run_id or ""
        with time_limit(0.01), pytest.raises(InvocationTimeoutError, match=r"Worker\.ask"):
            await here.runs.resume(run_id, {"0": approve()})
        slow.goes_on.set()
        assert (await here.runs.result(run_id, timeout=60)).content == "done"


async def _resumed(here: Container, run_id: str, is_stream: bool) -> Any:
    if is_stream:
        return [each async for each in here.runs.resume_stream(run_id, {"0": approve()})]
    return await here.runs.resume(run_id, {"0": approve()})


class Renewing(InMemoryRunStore):
    """Counts the renewals that came too late."""

    refused = 0

    async def renew(self, run_id: str, generation: int) -> bool:
        is_ours = await super().renew(run_id, generation)
        self.refused += not is_ours
        return is_ours


@pytest.mark.parametrize("is_stream", [False, True], ids=["resume", "resume_stream"])
async def test_who_waits_for_a_run_that_is_cancelled_elsewhere_gets_its_cancellation_also_if_a_tool_ends_late(
    is_stream: bool, clock: Clock
) -> None:
    slow, store = Slow(), Renewing()
    slow.cleans_up.clear()
    made, service = working(slow, store)
    other, _ = working(Slow(), store)
    async with made as here, other as elsewhere:
        run_id = (await here.get(service).ask("x")).run_id or ""
        waiting = asyncio.create_task(_resumed(here, run_id, is_stream))
        await slow.started.wait()
        cancelling = asyncio.create_task(elsewhere.runs.cancel(run_id, "changed our minds"))
        await slow.cancelled.wait()
        clock.advance(store.lease)  # so long `cancel` waits for the owner
        await cancelling
        for _ in range(3):  # a second cancellation of the task would reach the caller
            await skip_time(here, timedelta(seconds=1))
        assert store.refused >= 3
        slow.cleans_up.set()
        with pytest.raises(RunCancelledError, match="changed our minds"):
            await waiting


class Stolen(InMemoryRunStore):
    """Gives a run to another process while it is written for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.thief: Container | None = None
        self.finished: Any = None
        self.is_taken = asyncio.Event()

    async def acquire(self, run_id: str, owner: str) -> StoredRun | None:
        taken = await super().acquire(run_id, owner)
        if taken is not None:
            self.is_taken.set()
        return taken

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        if (thief := self.thief) is not None:
            self.thief = None
            await self.release(run_id, generation)
            self.finished = asyncio.create_task(thief.runs.resume(run_id, {}))
            await self.is_taken.wait()
        await super().append(run_id, generation, records, *args)


async def test_who_waits_for_a_run_that_another_process_has_taken_over_gets_its_result() -> None:
    stolen = Stolen()
    async with container(SIGN, says("here"), store=stolen) as here, container(says("there"), store=stolen) as there:
        run_id = (await here.get(Notary).ask("x")).run_id or ""
        stolen.thief = there
        result = await here.runs.resume(run_id, {"0": approve()})
        assert result.content == (await stolen.finished).content == "there"


async def test_an_approved_tool_has_no_outer_invocation() -> None:
    """A service's tool that resumes a run does not make that run a part of its own call."""
    outer: list[str | None] = []

    @tool(requires_approval=True)
    def note(context: InvocationContext) -> str:
        outer.append(context.outer_invocation_id)
        return "noted"

    @register_ai_service(tools=note)
    class Inner(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("note", {})), says("done"), services=(Inner,)) as here:
        run_id = (await here.get(Inner).ask("x")).run_id or ""

        @tool
        async def answer() -> str:
            return str((await here.runs.resume(run_id, {"0": approve()})).content)

        desk: Any = create_ai_service(
            Notary, chat_model=ScriptedChatModel([asks(tool_call("answer", {})), says("ok")]), tools=answer
        )
        assert (await desk.ask("x")).content == "ok"
    assert outer == [None]
