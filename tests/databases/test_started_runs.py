"""Runs that are started, followed, waited for, executed by hand and taken over; in memory and in databases."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Protocol

import pytest
from sqlalchemy import text

from tests.runs.replies import asks, says
from toolbox import (
    BeforeToolExecution,
    CompleteResponse,
    Container,
    ContainerNotStartedError,
    IntermediateResponse,
    InvocationContext,
    PartialResponse,
    Result,
    ToolExecuted,
    application_scoped,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.errors import (
    IllegalConfigurationError,
    RunBusyError,
    RunCancelledError,
    RunConflictError,
    RunFailedError,
    RunNotFoundError,
)
from toolbox.limits import usage_limits
from toolbox.runs import InMemoryRunStore, RunId, RunStore, RunSuspended, approve
from toolbox.runs.run_engines import RunEngine
from toolbox.runs.run_events import RunEnded
from toolbox.security import SecurityIdentity
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

pytestmark = pytest.mark.anyio


@application_scoped
class Desk:
    """Tools whose progress the tests control."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.go_on = asyncio.Event()
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    @tool
    async def look(self, what: str) -> str:
        self.ran.append(what)
        return f"saw {what}"

    @tool
    async def wait(self) -> str:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "waited"

    @tool(requires_approval=True)
    async def cancel_order(self, order: int) -> str:
        self.ran.append(f"cancelled {order}")
        return "cancelled"


@register_ai_service(tools=Desk)
class Agent(Protocol):
    @user_message("{text}")
    async def ask(self, text: str) -> str: ...

    async def count(self, text: str) -> int: ...

    async def full(self, text: str) -> Result[str]: ...

    def blocking(self, text: str) -> str: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...


LOOK = tool_call("look", {"what": "a"})

MakeContainer = Callable[..., Awaitable[Container]]


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[MakeContainer]:
    """Starts containers of one database, each like another process."""
    url = (
        None
        if request.param == "memory"
        else request.getfixturevalue("sqlite_runs_url" if request.param == "sqlite" else "postgres_runs_url")
    )
    memory = InMemoryRunStore(lease=60)
    async with AsyncExitStack() as stack:

        async def make(*replies: Any, services: Any = (Agent,), engine: Any = None, **options: Any) -> Container:
            store: Any = memory
            if url is not None:
                store = SqlRunStore(await stack.enter_async_context(sql.open_engine(url)), lease=60)
            container = Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)
            container.register_instance(store, RunStore)
            if engine is not None:
                container.register_instance(engine, RunEngine)
            return await stack.enter_async_context(container)

        yield make


async def let_leases_end(*containers: Container) -> None:
    """Let the containers live for longer than a lease. The clock of a server stays, so the leases there move back."""
    for each in containers:
        try:
            await skip_time(each, timedelta(minutes=2))
        except IllegalConfigurationError:
            store: Any = await each.runs.store()
            async with store._engine.begin() as connection:
                await connection.execute(text("UPDATE toolbox_runs_leases SET until = until - 120000"))
            await each.runs.follow_clock()


async def events_of(container: Container, run_id: str, after: Any = None) -> list[Any]:
    return [each.event async for each in container.runs.events(run_id, after=after)]


async def test_a_started_run_continues_without_its_caller(start: MakeContainer) -> None:
    here = await start(asks(LOOK), says("done"))

    run = await here.runs.start(here.get(Agent).ask, "hello")

    assert run.status == "running"
    assert run.service.endswith(".Agent")
    assert await here.runs.result(run) == "done"
    assert here.get(Desk).ran == ["a"]
    assert (await here.runs.get(run.id)).status == "completed"


async def test_numbers_that_no_database_has_are_no_errors(start: MakeContainer) -> None:
    here = await start(says("done"))
    run = await here.runs.start(Agent.ask, "hello")
    await here.runs.result(run)

    for after in (10**15, "9" * 18):  # `Last-Event-ID` comes from outside
        assert await events_of(here, run.id, after) == []
    assert [each.id for each in await here.runs.list(limit=10**30)] == [run.id]
    assert await here.runs.list(waiting_longer_than=timedelta.max) == []
    assert await here.runs.purge(timedelta.max) == 0


async def test_the_method_of_a_service_class_is_started(start: MakeContainer) -> None:
    here = await start(says("42"))

    run = await here.runs.start(Agent.count, "how many?")

    assert await here.runs.result(run.id) == 42


async def test_the_result_of_a_method_that_returns_a_result_is_one(start: MakeContainer) -> None:
    here = await start(asks(LOOK), says("done"))

    run = await here.runs.start(here.get(Agent).full, "hello")

    await here.runs.result(run)
    other = await start()  # not earlier: on a busy machine it could take over the run, and it has no replies
    for each in (here, other):
        result = await each.runs.result(run)
        assert isinstance(result, Result)
        assert (result.content, result.pending) == ("done", ())


async def test_other_methods_cannot_be_started(start: MakeContainer) -> None:
    here = await start()
    runs, agent = here.runs, here.get(Agent)

    for method in (agent.blocking, Agent.stream, Desk.look, len, "ask"):
        with pytest.raises(TypeError, match=r"runs\.start"):
            await runs.start(method, "hello")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ask"):
        await runs.start(agent.ask)  # type: ignore[call-arg]
    assert await runs.list() == []


async def test_events_have_the_whole_call_and_its_end(start: MakeContainer) -> None:
    here = await start(asks(LOOK), says("done"))
    run = await here.runs.start(Agent.ask, "hello")

    events = await events_of(here, run.id)

    kinds = [type(each) for each in events if not isinstance(each, PartialResponse)]
    assert [each for each in kinds if each in (IntermediateResponse, BeforeToolExecution, ToolExecuted)] == [
        IntermediateResponse,
        BeforeToolExecution,
        ToolExecuted,
    ]
    assert isinstance(events[-2], CompleteResponse)
    assert events[-1] == RunEnded("completed", None)
    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == "done"


async def test_any_process_follows_a_run_while_it_runs(start: MakeContainer) -> None:
    here, other = await start(asks(tool_call("wait")), says("done")), await start(take_over_runs=False)
    run = await here.runs.start(Agent.ask, "hello")
    await here.get(Desk).begun.wait()

    reader = other.runs.events(run)
    while not isinstance((await anext(reader)).event, BeforeToolExecution):
        pass
    here.get(Desk).go_on.set()
    rest = [each.event async for each in reader]

    assert isinstance(rest[0], ToolExecuted)
    assert rest[-1] == RunEnded("completed", None)
    assert await other.runs.result(run.id) == "done"


async def test_the_same_id_gives_the_same_run(start: MakeContainer) -> None:
    # Either of the two executes the run: it has no owner yet when the other one starts it again or looks for such runs.
    asked: list[str] = []

    def reply(request: Any) -> Any:
        asked.append(request.messages[-1].text)
        return says("one")

    here, other = await start(reply, services=(WithId,)), await start(reply, services=(WithId,))

    runs = [await each.runs.start(WithId.ask, "order-7", "hello") for each in (here, other, here)]

    assert {each.id for each in runs} == {"order-7"}
    assert [await each.runs.result("order-7") for each in (here, other)] == ["one", "one"]
    assert asked == ["hello"]


async def test_the_same_id_with_another_call_is_refused(start: MakeContainer) -> None:
    here = await start(says("one"), services=(WithId,), seeds=(SecurityIdentity,))
    await here.runs.start(WithId.ask, "order-7", "hello")

    with pytest.raises(RunConflictError, match="other arguments"):
        await here.runs.start(WithId.ask, "order-7", "good bye")
    with pytest.raises(RunConflictError, match="another method"):
        await here.runs.start(WithId.tell, "order-7", "hello")
    async with here.request_scope({SecurityIdentity: SecurityIdentity("eve")}):
        with pytest.raises(RunConflictError, match="another identity"):
            await here.runs.start(WithId.ask, "order-7", "hello")
    assert await here.runs.result("order-7") == "one"


async def test_a_client_that_leaves_does_not_cancel_its_run(start: MakeContainer) -> None:
    here = await start(asks(tool_call("wait")), says("done"))

    async def client() -> None:
        run = await here.runs.start(Agent.ask, "hello")
        ids.append(run.id)
        await here.runs.result(run)

    ids: list[str] = []
    waiting = asyncio.create_task(client())
    await here.get(Desk).begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    here.get(Desk).go_on.set()

    assert await here.runs.result(ids[0]) == "done"


async def test_a_started_run_does_not_belong_to_the_call_that_started_it(start: MakeContainer) -> None:
    seen: list[Any] = []

    class Look:
        @tool
        def look(self, what: str, context: InvocationContext) -> str:
            seen.append(context)
            return "ok"

    @register_ai_service(tools=Look)
    class Helper(Protocol):
        async def ask(self, text: str) -> str: ...

    here = await start(asks(LOOK), says("done"), services=(Helper,))

    with usage_limits(model_calls=2):  # what is left of it is the run's own limit
        run = await here.runs.start(Helper.ask, "hello")
        assert await here.runs.result(run) == "done"

    assert seen[0].outer_invocation_id is None


async def test_a_failed_run_tells_type_and_text(start: MakeContainer) -> None:
    here = await start(RuntimeError("no more"))
    run = await here.runs.start(Agent.ask, "hello")

    with pytest.raises(RunFailedError) as caught:
        await here.runs.result(run)

    assert (caught.value.run_id, caught.value.error_type, caught.value.text) == (run.id, "RuntimeError", "no more")
    assert (await events_of(here, run.id))[-1] == RunEnded("failed", "RuntimeError: no more")


async def test_waiting_can_time_out(start: MakeContainer) -> None:
    here = await start(asks(tool_call("wait")), says("done"))
    run = await here.runs.start(Agent.ask, "hello")

    with pytest.raises(TimeoutError):
        await here.runs.result(run, timeout=0.05)
    here.get(Desk).go_on.set()

    assert await here.runs.result(run, timeout=60) == "done"


async def test_a_cancelled_run_stops(start: MakeContainer) -> None:
    here, other = await start(asks(tool_call("wait")), says("done")), await start(take_over_runs=False)
    run = await here.runs.start(Agent.ask, "hello")
    await here.get(Desk).begun.wait()

    await other.runs.cancel(run.id, "changed my mind")

    with pytest.raises(RunCancelledError, match="changed my mind"):
        await here.runs.result(run)
    assert (await events_of(other, run.id))[-1] == RunEnded("cancelled", "changed my mind")
    assert here.get(Desk).cancelled.is_set()
    assert (await other.runs.get(run.id)).status == "cancelled"


async def test_waiting_and_following_continue_over_a_suspension(start: MakeContainer) -> None:
    here, other = (
        await start(asks(tool_call("cancel_order", {"order": 7}))),
        await start(says("done"), take_over_runs=False),
    )
    run = await here.runs.start(Agent.ask, "hello")
    waiting = asyncio.create_task(other.runs.result(run))
    following = asyncio.create_task(events_of(other, run.id))
    reader = here.runs.events(run.id)
    while not isinstance((event := (await anext(reader)).event), RunSuspended):
        pass
    assert not waiting.done()

    [call] = event.pending
    await other.runs.resume(run.id, {call.id: approve()})

    assert await waiting == "done"
    events = await following
    assert [type(each) for each in events].count(RunSuspended) == 1
    assert events[-1] == RunEnded("completed", None)


async def test_an_unknown_run_is_not_found(start: MakeContainer) -> None:
    here = await start()

    for waiting in (here.runs.result("unknown"), here.runs.execute("unknown"), events_of(here, "unknown")):
        with pytest.raises(RunNotFoundError):
            await waiting


# --- executing and taking over


class Nowhere(RunEngine):
    """Collects what is submitted."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int]] = []

    async def submit(self, run_id: str, generation: int) -> None:
        self.submitted.append((run_id, generation))


async def test_an_engine_decides_where_a_run_executes(start: MakeContainer) -> None:
    engine = Nowhere()
    here = await start(says("here"), engine=engine, take_over_runs=False)
    other = await start(says("there"), take_over_runs=False)

    run = await here.runs.start(Agent.ask, "hello")
    assert engine.submitted == [(run.id, 0)]
    ended = await other.runs.execute(run.id)

    assert ended.status == "completed"
    assert await here.runs.result(run) == "there"


async def test_an_engine_that_fails_is_asked_again(start: MakeContainer) -> None:
    again = asyncio.Event()

    class Failing(Nowhere):
        async def submit(self, run_id: str, generation: int) -> None:
            await super().submit(run_id, generation)
            if len(self.submitted) == 1:
                raise ConnectionError("the queue is away")
            again.set()

    engine = Failing()
    here = await start(says("done"), engine=engine)
    run = await here.runs.start(Agent.ask, "hello")

    await let_leases_end(here)
    await again.wait()

    assert set(engine.submitted) == {(run.id, 0)}


async def test_executing_an_ended_or_suspended_run_returns_it(start: MakeContainer) -> None:
    here = await start(asks(tool_call("cancel_order", {"order": 7})), says("done"), engine=Nowhere())
    run = await here.runs.start(Agent.ask, "hello")

    suspended = await here.runs.execute(run.id)
    assert suspended.status == "suspended"
    assert (await here.runs.execute(run.id)).status == "suspended"
    await here.runs.resume(run.id, {suspended.pending[0].id: approve()})
    assert (await here.runs.execute(run.id)).status == "completed"
    assert here.get(Desk).ran == ["cancelled 7"]


async def test_a_run_is_executed_once_however_often_it_is_delivered(start: MakeContainer) -> None:
    here, other = (
        await start(asks(LOOK, LOOK), says("done"), engine=Nowhere(), take_over_runs=False),
        await start(asks(LOOK, LOOK), says("done"), engine=Nowhere(), take_over_runs=False),
    )
    run = await here.runs.start(Agent.ask, "hello")

    ended = await asyncio.gather(*(each.runs.execute(run.id) for each in (here, other) * 3))

    assert {each.status for each in ended} == {"completed"}
    assert [*here.get(Desk).ran, *other.get(Desk).ran] == ["a", "a"]


async def test_a_run_that_is_executed_elsewhere_is_busy(start: MakeContainer) -> None:
    here, other = await start(asks(tool_call("wait")), says("done")), await start(take_over_runs=False)
    run = await here.runs.start(Agent.ask, "hello")
    await here.get(Desk).begun.wait()
    with pytest.raises(RunBusyError):
        await other.runs.execute(run.id, timeout=0)
    await let_leases_end(here)
    with pytest.raises(RunBusyError):
        await other.runs.execute(run.id, timeout=0.1)  # its owner renews the lease
    here.get(Desk).go_on.set()

    assert (await other.runs.execute(run.id, timeout=60)).status == "completed"


async def test_a_container_that_stops_hands_its_runs_over(start: MakeContainer, request: pytest.FixtureRequest) -> None:
    from toolbox import ToolboxSettings

    first = await start(asks(tool_call("wait")), settings=ToolboxSettings(stop_timeout=0.1))
    run = await first.runs.start(Agent.ask, "hello")
    await first.get(Desk).begun.wait()

    await first.__aexit__(None, None, None)
    other = await start(asks(LOOK), says("done"))

    assert await other.runs.result(run.id, timeout=60) == "done"
    assert other.get(Desk).ran == ["a"]
    await first.__aenter__()  # the fixture stops it


async def test_a_container_that_does_not_take_over_leaves_runs_alone(start: MakeContainer) -> None:
    here = await start(engine=Nowhere(), take_over_runs=False)
    run = await here.runs.start(Agent.ask, "hello")
    other = await start(says("no"), take_over_runs=False)

    await let_leases_end(here, other)

    assert (await here.runs.get(run.id)).status == "running"


async def test_lapsed_runs_are_taken_over_at_start_and_later(start: MakeContainer) -> None:
    here = await start(engine=Nowhere(), take_over_runs=False)
    early = await here.runs.start(Agent.ask, "early")
    other = await start(says("one"), says("two"))
    assert await other.runs.result(early.id, timeout=60) == "one"

    late = await here.runs.start(Agent.ask, "late")
    await let_leases_end(other)

    assert await here.runs.result(late, timeout=60) == "two"


async def test_waiting_ends_when_the_container_stops(start: MakeContainer) -> None:
    here = await start(engine=Nowhere(), take_over_runs=False)
    run = await here.runs.start(Agent.ask, "hello")
    waiting = [
        asyncio.create_task(here.runs.result(run)),
        asyncio.create_task(events_of(here, run.id)),
    ]
    await asyncio.sleep(0.05)

    await here.__aexit__(None, None, None)

    for each in waiting:
        with pytest.raises(ContainerNotStartedError):
            await asyncio.wait_for(each, 60)
    await here.__aenter__()


def test_runs_are_started_from_synchronous_code_too() -> None:
    model = ScriptedChatModel([says("done")])
    with Container(models={"default": model}).register(Agent) as container:

        async def elsewhere() -> Any:
            run = await container.runs.start(Agent.ask, "hello")
            events = [each async for each in container.runs.events(run)]
            return await container.runs.result(run, timeout=60), events[-1].event

        assert asyncio.run(elsewhere()) == ("done", RunEnded("completed", None))


async def test_request_scoped_stores_and_engines_are_problems_at_start() -> None:
    from toolbox import request_scoped

    @request_scoped
    class Engine(RunEngine):
        async def submit(self, run_id: str, generation: int) -> None: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Agent, Engine).check()

    assert "Engine is request-scoped, but runs live longer" in problem.what


@register_ai_service(tools=Desk)
class WithId(Protocol):
    @user_message("{text}")
    async def ask(self, run: RunId, text: str) -> str: ...

    @user_message("{text}")
    async def tell(self, run: RunId, text: str) -> str: ...
