"""`@observes`: who receives which events, in which scope, in what order, and what keeps a container from starting."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from toolbox import (
    Container,
    EventListener,
    Inject,
    InvocationContext,
    InvocationEvent,
    ModelResponseEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ToolboxSettings,
    ToolExecutedEvent,
    application_scoped,
    call_scoped,
    decorates,
    invocation_attributes,
    observes,
    only_if,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.container import internals_of
from toolbox.runs import InMemoryRunStore, RunId, Runs, RunStore
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio


class Log:
    """What observers saw; `wait_for` waits until it has a number of entries."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.changed = asyncio.Event()

    def add(self, entry: Any) -> None:
        self.entries.append(entry)
        self.changed.set()

    async def wait_for(self, count: int) -> list[Any]:
        async with asyncio.timeout(10):
            while len(self.entries) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.entries


@tool
async def add(a: int, b: int) -> int:
    return a + b


@register_ai_service(tools=add)
class Desk(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(tools=add)
class Other(Protocol):
    async def ask(self, text: str) -> str: ...


def program(*registered: Any, replies: Iterable[Any] = ("hello",) * 50, **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(list(replies))}, **options)
    return made.register(Desk, *registered).register_instance(Log())


async def test_a_function_receives_the_events_of_its_type_with_injected_beans() -> None:
    @observes
    async def audit(event: ToolExecutedEvent, log: Inject[Log]) -> None:
        log.add((event.execution.request.name, event.execution.result))

    async with program(audit, replies=[tool_call("add", {"a": 1, "b": 2}), "3"]) as container:
        assert await container.get(Desk).ask("x") == "3"
        assert await container.get(Log).wait_for(1) == [("add", "3")]


async def test_a_method_of_a_bean_receives_unions_and_base_classes_in_order() -> None:
    @application_scoped
    class Journal:
        def __init__(self, log: Log) -> None:
            self.log = log

        @observes
        def both(self, event: ServiceStartedEvent | ServiceCompletedEvent) -> None:
            self.log.add(("both", type(event).__name__))

    @observes
    async def everything(event: InvocationEvent, log: Inject[Log]) -> None:
        log.add(("all", type(event).__name__))

    async with program(Journal, everything) as container:
        await container.get(Desk).ask("x")
        seen = await container.get(Log).wait_for(6)

    names = ["ServiceStartedEvent", "ModelRequestEvent", "ModelResponseEvent", "ServiceCompletedEvent"]
    assert [name for who, name in seen if who == "all"] == names
    assert [name for who, name in seen if who == "both"] == [names[0], names[3]]


async def test_methods_receive_events_on_their_own_bean_after_a_model_class() -> None:
    @application_scoped
    class Model(ScriptedChatModel):
        def __init__(self) -> None:
            super().__init__(["hello"])

    class Journal:
        def __init__(self, log: Log) -> None:
            self.log = log

        @observes
        def note(self, event: ServiceCompletedEvent) -> None:
            self.log.add(type(self).__name__)

    class Diary(Journal): ...

    async with Container().register(Model, Journal, Diary, Desk).register_instance(Log()) as container:
        await container.get(Desk).ask("x")
        assert sorted(await container.get(Log).wait_for(2)) == ["Diary", "Journal"]


async def test_events_of_other_services_are_filtered() -> None:
    @observes(service=Desk)
    async def of_desk(event: ServiceCompletedEvent, log: Inject[Log]) -> None:
        log.add(("desk", event.context.service))

    @observes(service=(Desk, Other))
    async def of_both(event: ServiceCompletedEvent, log: Inject[Log]) -> None:
        log.add(("both", event.context.service))

    async with program(Other, of_desk, of_both) as container:
        await container.get(Other).ask("x")
        await container.get(Desk).ask("x")
        seen = await container.get(Log).wait_for(3)

    assert sorted(seen, key=str) == [("both", Desk), ("both", Other), ("desk", Desk)]


async def test_it_never_delays_the_call_and_runs_one_event_after_another() -> None:
    release = asyncio.Event()
    running: list[int] = []

    @observes
    async def slow(event: ServiceCompletedEvent, log: Inject[Log]) -> None:
        running.append(1)
        assert len(running) == 1
        await release.wait()
        running.pop()
        log.add(event.value)

    async with program(slow, replies=[str(each) for each in range(5)]) as container:
        for number in range(5):
            assert await container.get(Desk).ask("x") == str(number)
        release.set()
        assert await container.get(Log).wait_for(5) == ["0", "1", "2", "3", "4"]


async def test_a_def_runs_on_a_thread_without_blocking_the_loop() -> None:
    release = threading.Event()

    @observes
    def slow(event: ServiceCompletedEvent) -> None:
        assert release.wait(10)
        threads.append(threading.current_thread())

    threads: list[Any] = []
    async with program(slow) as container:
        await container.get(Desk).ask("x")
        release.set()

    assert threads[0] is not threading.current_thread()


async def test_it_has_a_request_scope_with_the_seeds_and_identity_of_the_event_and_a_call_scope() -> None:
    class User:
        def __init__(self, name: str) -> None:
            self.name = name

    @request_scoped
    class Basket: ...

    @call_scoped
    class Attempt: ...

    closed: list[str] = []

    @produces(scope="call")
    async def session() -> AsyncIterator[dict[str, int]]:
        yield {}
        closed.append("session")

    baskets: list[Any] = []

    @observes
    async def audit(
        event: ServiceCompletedEvent,
        log: Inject[Log],
        user: Inject[User],
        identity: Inject[SecurityIdentity],
        basket: Inject[Basket],
        attempt: Inject[Attempt],
        session: Inject[dict[str, int]],
    ) -> None:
        baskets.append((basket, attempt))
        log.add((user.name, identity.name))

    container = program(audit, Basket, Attempt, session, seeds=[User, SecurityIdentity])
    async with container:
        for name in ("ann", "bob"):
            async with container.request_scope({User: User(name), SecurityIdentity: SecurityIdentity(name)}):
                baskets.append((container.get(Basket), container.get(Attempt)))
                await container.get(Desk).ask("x")
        assert await container.get(Log).wait_for(2) == [("ann", "ann"), ("bob", "bob")]

    assert len({id(each) for pair in baskets for each in pair}) == 8
    assert closed == ["session"] * 2


async def test_outside_of_requests_the_identity_is_anonymous() -> None:
    @observes
    async def audit(event: ServiceCompletedEvent, log: Inject[Log], who: Inject[SecurityIdentity]) -> None:
        log.add(who.is_anonymous)

    async with program(audit, seeds=[SecurityIdentity]) as container:
        await container.get(Desk).ask("x")
        assert await container.get(Log).wait_for(1) == [True]


def test_in_fastapi_it_has_the_request_and_its_identity() -> None:
    seen: list[Any] = []

    @observes
    async def audit(event: ServiceCompletedEvent, request: Inject[Request], who: Inject[SecurityIdentity]) -> None:
        seen.append((request.url.path, who.name))

    def identify(request: Request) -> SecurityIdentity:
        return SecurityIdentity(request.headers["x-user"])

    app = FastAPI()
    install(app, program(audit), identity=identify)

    @app.get("/ask")
    async def ask(desk: Inject[Desk]) -> str:
        return await desk.ask("x")

    with TestClient(app) as client:
        for name in ("ann", "bob"):
            client.get("/ask", headers={"x-user": name})

    assert seen == [("/ask", "ann"), ("/ask", "bob")]


async def test_it_runs_in_an_empty_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    @observes
    async def audit(event: ServiceCompletedEvent, log: Inject[Log]) -> None:
        log.add((variable.get(), InvocationContext.current(), event.context.attributes["tenant"]))

    async with program(audit) as container:
        variable.set("set")
        with invocation_attributes(tenant="a"):
            await container.get(Desk).ask("x")
        assert await container.get(Log).wait_for(1) == [("unset", None, "a")]


async def test_errors_are_logged_and_thrown_into_the_scope(caplog: pytest.LogCaptureFixture) -> None:
    thrown: list[str] = []

    @produces(scope="request")
    async def session() -> AsyncIterator[dict[str, int]]:
        try:
            yield {}
        except ValueError as error:
            thrown.append(str(error))
            raise

    @observes
    async def audit(event: ServiceCompletedEvent, log: Inject[Log], session: Inject[dict[str, int]]) -> None:
        log.add(event.value)
        if event.value == "first":
            raise ValueError("no")

    async with program(audit, session, replies=["first", "second"]) as container:
        for _ in range(2):
            await container.get(Desk).ask("x")
        assert await container.get(Log).wait_for(2) == ["first", "second"]

    assert "failed on ServiceCompletedEvent" in caplog.text
    assert thrown == ["no"]


async def test_events_that_an_observer_causes_do_not_reach_it_also_through_others() -> None:
    @observes
    async def first(event: ServiceCompletedEvent, log: Inject[Log], desk: Inject[Desk]) -> None:
        log.add("first")
        await desk.ask("again")

    @observes
    async def second(event: ServiceCompletedEvent, log: Inject[Log], desk: Inject[Desk]) -> None:
        log.add("second")
        await desk.ask("again")

    async with program(first, second) as container:
        await container.get(Desk).ask("x")
        await container.get(Log).wait_for(4)
    # Each sees the event, and the one that the other caused: no event goes back to an observer that led to it.
    assert sorted(container_log(container)) == ["first", "first", "second", "second"]


def container_log(container: Container) -> list[Any]:
    return next(each.source for each in internals_of(container).describe() if isinstance(each.source, Log)).entries


async def test_waiting_events_are_delivered_when_the_container_stops() -> None:
    seen: list[Any] = []

    @observes
    async def audit(event: ServiceCompletedEvent) -> None:
        await asyncio.sleep(0)
        seen.append(event.value)

    async with program(audit, replies=["1", "2", "3"]) as container:
        for _ in range(3):
            await container.get(Desk).ask("x")

    assert seen == ["1", "2", "3"]


async def test_events_that_are_late_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    @observes
    async def stuck(event: ServiceCompletedEvent) -> None:
        await asyncio.Event().wait()

    async with program(stuck, settings=ToolboxSettings(stop_timeout=0.1)) as container:
        for _ in range(3):
            await container.get(Desk).ask("x")

    assert "3 events were not delivered to the observer" in caplog.text


async def test_at_most_10000_events_wait_then_the_oldest_are_dropped_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()
    seen: list[int] = []

    @observes
    async def slow(event: ServiceFailedEvent) -> None:
        await release.wait()
        seen.append(int(event.duration))

    async with program(slow) as container:
        host = internals_of(container).host
        context = InvocationContext(Desk, "ask")
        assert host.listeners is not None
        for number in range(10_006):
            host.listeners.tell(ServiceFailedEvent(context, ValueError(), float(number)))
            if number == 0:
                await asyncio.sleep(0)
        release.set()

    assert seen == [0, *range(6, 10_006)]
    assert caplog.text.count("more than 10000 events wait") == 1


def test_containers_without_an_event_loop_have_observers_too() -> None:
    seen: list[str] = []

    @register_ai_service
    class Plain(Protocol):
        def ask(self, text: str) -> str: ...

    @observes
    def audit(event: ModelResponseEvent) -> None:
        seen.append(event.response.ai_message.text or "")

    with program(Plain, audit) as container:
        container.get(Plain).ask("x")

    assert seen == ["hello"]


async def test_listeners_still_work_beside_observers() -> None:
    seen: list[str] = []

    @application_scoped
    class Listening(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            seen.append("listener")

    @observes
    async def audit(event: ServiceStartedEvent) -> None:
        seen.append("observer")

    async with program(Listening, audit) as container:
        await container.get(Desk).ask("x")

    assert seen.count("listener") == 4
    assert seen.count("observer") == 1


async def test_scanned_conditional_and_decorated_observers() -> None:
    seen: list[str] = []

    @observes
    @only_if(profile="prod")
    async def left_out(event: ServiceStartedEvent) -> None:
        raise AssertionError

    @application_scoped
    class Journal:
        @observes
        def note(self, event: ServiceStartedEvent) -> None:
            seen.append(type(self).__name__)

    @decorates(Journal)
    class Louder(Journal):
        def __init__(self, inner: Journal) -> None: ...

        @observes
        def shout(self, event: ServiceStartedEvent) -> None:
            seen.append("shout")

    async with program(left_out, Journal, Louder) as container:
        await container.get(Desk).ask("x")

    assert sorted(seen) == ["Journal", "shout"]


# --- problems


class NotAService: ...


def wrong() -> list[tuple[Any, str]]:
    @observes
    async def no_event(log: Inject[Log]) -> None: ...

    @observes
    async def two(one: ServiceStartedEvent, other: ServiceFailedEvent) -> None: ...

    @observes
    async def other(event: ServiceStartedEvent, what: str) -> None: ...

    @observes
    async def missing(event: ServiceStartedEvent, bean: Inject[NotAService]) -> None: ...

    @observes
    async def stream(event: ServiceStartedEvent) -> AsyncIterator[int]:
        yield 1

    @observes(service=NotAService)
    async def unknown(event: ServiceStartedEvent) -> None: ...

    @observes
    async def positional(event: ServiceStartedEvent, /) -> None: ...

    @observes
    async def mixed(event: ServiceStartedEvent | str) -> None: ...

    return [
        (no_event, "exactly one parameter with the type of an event, found none"),
        (two, "exactly one parameter with the type of an event, found one, other"),
        (other, "the parameter 'what' has no value"),
        (missing, "no bean provides NotAService"),
        (stream, "does not support generators"),
        (unknown, "NotAService is not an AI service"),
        (positional, "positional-only parameter 'event'"),
        (mixed, "found none"),
    ]


@pytest.mark.parametrize(("function", "text"), wrong(), ids=lambda value: getattr(value, "__name__", ""))
async def test_what_cannot_observe_is_a_problem_at_start(function: Any, text: str) -> None:
    problems = program(function).check()

    assert any(text in each.what for each in problems), problems


@pytest.mark.parametrize(
    "use",
    [
        lambda: observes(NotAService),  # type: ignore[type-var]
        lambda: observes(service="Desk"),  # type: ignore[arg-type]
        lambda: observes(service=[Desk, 1]),  # type: ignore[list-item]
        lambda: observes(3),  # type: ignore[call-overload]
    ],
)
async def test_invalid_uses_are_type_errors(use: Any) -> None:
    with pytest.raises(TypeError):
        use()


async def test_a_program_without_observers_has_no_listeners(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with program() as container:
        assert internals_of(container).host.listeners is None


async def test_a_run_that_an_observer_starts_does_not_reach_it() -> None:
    class Kept(InMemoryRunStore):
        persistent = True

    @register_ai_service(durable=True)
    class Durable(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    @observes
    async def again(event: ServiceCompletedEvent, runs: Inject[Runs], log: Inject[Log]) -> None:
        log.add(event.value)
        if len(log.entries) < 5:
            run = await runs.start(Durable.ask, f"r{len(log.entries)}", "x")
            log.add(await runs.result(run))

    container = program(Durable, again).register_instance(Kept(), RunStore)
    async with container:
        await container.get(Durable).ask("r", "x")

    assert container_log(container) == ["hello", "hello"]
