"""`container.injected`: what calls get and how they are checked, with taskiq, Celery and typer as callers."""

import asyncio
import functools
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from toolbox import (
    Container,
    ContainerNotStartedError,
    IllegalConfigurationError,
    Inject,
    ServiceStartedEvent,
    application_scoped,
    observes,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.container import internals_of
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@application_scoped
class Outbox:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.closed: list[str] = []


@request_scoped
class Job:
    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox

    def stop(self) -> None:
        self.outbox.closed.append("job")


class Missing: ...


async def send(to: str, job: Inject[Job], count: int = 1, *, again: Inject[Job]) -> str:
    """Send mails."""
    assert job is again
    job.outbox.sent.append((to, count))
    return f"sent {count} to {to}"


def send_now(to: str, job: Inject[Job], count: int = 1) -> str:
    job.outbox.sent.append((to, count))
    return f"sent {count} to {to}"


def container() -> Container:
    return Container().register(Outbox, Job)


# --- what is returned


async def test_the_returned_function_has_the_signature_that_is_left() -> None:
    made = container().injected(send)

    assert str(inspect.signature(made)) == "(to: str, count: int = 1) -> str"
    assert get_type_hints(made) == {"to": str, "count": int, "return": str}
    assert (made.__name__, made.__module__, made.__doc__) == ("send", __name__, "Send mails.")
    assert not hasattr(made, "__wrapped__")
    assert inspect.iscoroutinefunction(made)
    assert not inspect.iscoroutinefunction(container().injected(send_now))


async def test_each_call_has_a_request_scope_of_its_own() -> None:
    here = container()
    before = here.injected(send)
    async with here:
        after = here.injected(send)
        assert await before("ann", 2) == "sent 2 to ann"
        assert await after(to="bob", count=3) == "sent 3 to bob"
        assert await after("eve") == "sent 1 to eve"
        outbox = here.get(Outbox)

    assert (outbox.sent, outbox.closed) == ([("ann", 2), ("bob", 3), ("eve", 1)], ["job"] * 3)


def test_a_def_is_called_on_the_thread_of_its_caller() -> None:
    def where(job: Inject[Job]) -> tuple[Any, threading.Thread]:
        return job, threading.current_thread()

    with container() as here:
        one, other = here.injected(where)(), here.injected(where)()

    assert one[0] is not other[0]
    assert one[1] is threading.current_thread()


def test_a_def_gets_beans_that_must_be_awaited() -> None:
    closed: list[str] = []

    @produces(scope="request")
    async def session(job: Job) -> AsyncIterator[dict[str, Job]]:
        await asyncio.sleep(0)
        yield {"job": job}
        closed.append("session")

    def work(session: Inject[dict[str, Job]], job: Inject[Job]) -> bool:
        return session["job"] is job

    with container().register(session) as here:
        assert here.injected(work)()

    assert closed == ["session"]


async def test_errors_reach_the_caller_and_the_scope() -> None:
    thrown: list[str] = []

    @produces(scope="request")
    def session() -> Iterator[dict[str, int]]:
        try:
            yield {}
        except ValueError as error:
            thrown.append(str(error))
            raise

    async def failing(session: Inject[dict[str, int]]) -> None:
        raise ValueError("no")

    async with container().register(session) as here:
        with pytest.raises(ValueError, match="no"):
            await here.injected(failing)()

    assert thrown == ["no"]


async def test_wrong_arguments_and_injected_ones_are_type_errors() -> None:
    async with container() as here:
        made = here.injected(send)
        for call in (lambda: made(), lambda: made("a", 1, 2), lambda: made("a", job=None), lambda: made(x=1)):
            with pytest.raises(TypeError):
                await call()
        assert here.get(Outbox).closed == []


async def test_methods_partials_and_callable_objects_are_functions_too() -> None:
    class Clerk:
        def send(self, to: str, job: Inject[Job]) -> str:
            return send_now(to, job)

        async def __call__(self, to: str, job: Inject[Job]) -> str:
            assert len(job.outbox.closed) == len(job.outbox.sent)  # the scope of this call is open
            return send_now(to, job)

    async with container() as here:
        assert here.injected(Clerk().send)("ann") == "sent 1 to ann"
        assert await here.injected(Clerk())("ann") == "sent 1 to ann"
        assert await here.injected(functools.partial(Clerk(), to="ann"))() == "sent 1 to ann"
        made = here.injected(functools.partial(send_now, count=7))
        assert made("ann") == "sent 7 to ann"
        assert made.__name__ == "send_now"


async def test_methods_that_another_decorator_wraps_are_functions_too() -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs)

        return wrapper

    class Clerk:
        @logged
        async def send(self, to: str, job: Inject[Job]) -> str:
            return send_now(to, job)

    @register_ai_service
    class Desk(Protocol):
        async def chat(self, text: str) -> str: ...

    here = Container(models={"default": ScriptedChatModel(["one", "two"])}).register(Job, Outbox, Desk)
    async with here:
        assert await here.injected(Clerk().send)("ann") == "sent 1 to ann"
        async with here.request_scope():
            assert await here.acall(Clerk().send, to="ann") == "sent 1 to ann"
        assert await here.injected(here.get(Desk).chat)("hi") == "one"
        assert await here.acall(here.get(Desk).chat, text="hi") == "two"


async def test_optional_parameters_and_defaults_are_kept() -> None:
    def work(one: Inject[Missing] | None, other: Inject[Missing] = None) -> Any:  # type: ignore[assignment]
        return one, other

    here = container()
    made = here.injected(work)
    assert here.check() == []
    async with here:
        assert made() == (None, None)


async def test_it_is_anonymous_and_calls_of_services_work() -> None:
    @tool
    async def who(identity: Inject[SecurityIdentity]) -> str:
        return str(identity.is_anonymous)

    @register_ai_service(tools=who)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    async def work(text: str, desk: Inject[Desk], identity: Inject[SecurityIdentity]) -> tuple[str, bool]:
        return await desk.ask(text), identity.is_anonymous

    model = ScriptedChatModel([tool_call("who"), lambda request: request.messages[-1].text])
    async with Container(models={"default": model}, seeds=[SecurityIdentity]).register(Desk) as here:
        assert await here.injected(work)("x") == ("True", True)


# --- checks


async def test_before_the_start_calls_say_so() -> None:
    with pytest.raises(ContainerNotStartedError):
        await container().injected(send)("ann")


async def test_missing_beans_and_seeds_are_problems_at_start_and_later_errors() -> None:
    class User: ...

    @request_scoped
    class Basket:
        def __init__(self, user: User) -> None: ...

    def work(missing: Inject[Missing], basket: Inject[Basket]) -> None: ...

    def optional(user: Inject[User] | None) -> bool:
        return user is None

    here = Container(seeds=[User]).register(Basket)
    here.injected(work)
    assert [each.where for each in here.check()] == ["work.missing", "work.basket -> Basket -> User"]

    other = Container(seeds=[User]).register(Basket)
    made = other.injected(optional)
    async with other:
        assert made()
        with pytest.raises(IllegalConfigurationError, match="no bean provides Missing"):
            other.injected(work)


def generator(job: Inject[Job]) -> Iterator[int]:
    yield 1


async def async_generator(job: Inject[Job]) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator, Job, functools.partial(generator)])
async def test_generators_and_classes_are_rejected(function: Any) -> None:
    with pytest.raises(IllegalConfigurationError):
        container().injected(function)


async def test_what_cannot_be_called_or_read_is_rejected() -> None:
    def unreadable(job: "Inject[Nowhere]") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError):
        container().injected(3)  # type: ignore[arg-type]
    with pytest.raises(IllegalConfigurationError) as raised:
        container().injected(unreadable)
    [problem] = raised.value.problems
    assert (problem.where, "Nowhere" in problem.what) == ("unreadable.job", True)


# --- real callers


async def test_taskiq_runs_jobs_with_its_own_dependencies_beside_ours() -> None:
    pytest.importorskip("taskiq")
    from taskiq import Context, InMemoryBroker, TaskiqDepends, TaskiqState

    broker, here = InMemoryBroker(await_inplace=True), container()

    async def job(to: str, job: Inject[Job], context: Annotated[Context, TaskiqDepends()], count: int = 1) -> str:
        return f"{context.message.task_name.rpartition(':')[2]}: {await send(to, job, count, again=job)}"

    task = broker.task(here.injected(job))
    plain = broker.task(task_name="plain")(here.injected(send_now))

    @broker.on_event("startup")  # type: ignore[arg-type]
    async def start(state: TaskiqState) -> None: ...

    await broker.startup()
    async with here:
        results = [await (await task.kiq("ann", count=2)).wait_result() for _ in range(2)]
        results.append(await (await plain.kiq(to="bob")).wait_result())
        outbox = here.get(Outbox)
    await broker.shutdown()

    assert [each.return_value for each in results] == ["job: sent 2 to ann"] * 2 + ["sent 1 to bob"]
    assert [each.is_err for each in results] == [False] * 3
    assert outbox.closed == ["job"] * 3


def test_typer_shows_and_passes_the_parameters_that_are_left() -> None:
    here, app = container(), typer.Typer()

    @app.command()
    @here.injected
    def mail(to: str, job: Inject[Job], count: Annotated[int, typer.Option(help="How many")] = 1) -> None:
        """Send mails."""
        typer.echo(send_now(to, job, count))

    with here:
        shown = CliRunner().invoke(app, ["--help"])
        done = CliRunner().invoke(app, ["ann", "--count", "3"])

    assert "job" not in shown.output
    assert "How many" in shown.output
    assert done.output == "sent 3 to ann\n"


CELERY = """
    from celery import Celery
    from celery.signals import worker_process_init, worker_process_shutdown
    from toolbox import Container, Inject, application_scoped, request_scoped

    app = Celery("jobs", broker=BROKER, backend=BACKEND)
    app.conf.broker_transport_options = {"data_folder_in": FOLDER, "data_folder_out": FOLDER}
    app.conf.worker_hijack_root_logger = False

    @application_scoped
    class Outbox:
        count = 0

    @request_scoped
    class Job:
        def __init__(self, outbox: Outbox) -> None:
            self.outbox = outbox

        def stop(self) -> None:
            self.outbox.count += 1

    container = Container().register(Outbox, Job)

    @worker_process_init.connect
    def start(**_):
        container.__enter__()

    @app.task(bind=True)
    @container.injected
    def send(self, to: str, job: Inject[Job], count: int = 1) -> list:
        return [self.name, to, count, job.outbox.count]
"""


@pytest.mark.timeout(120)
def test_celery_runs_jobs_in_forked_processes(tmp_path: Path) -> None:
    pytest.importorskip("celery")
    (tmp_path / "queue").mkdir()
    names = {"BROKER": "filesystem://", "BACKEND": f"file://{tmp_path}", "FOLDER": str(tmp_path / "queue")}
    program = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + textwrap.dedent(CELERY)
    (tmp_path / "jobs.py").write_text(program, encoding="utf-8")
    worker = [sys.executable, "-m", "celery", "-A", "jobs", "worker", "--concurrency=1", "--loglevel=warning"]
    client = "import jobs; print([jobs.send.delay('ann', count=n).get(timeout=60) for n in range(3)])"
    running = subprocess.Popen([*worker, "--without-mingle", "--without-gossip"], cwd=tmp_path)
    try:
        done = subprocess.run([sys.executable, "-c", client], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    finally:
        running.terminate()
        running.wait(30)

    assert done.stdout.strip() == str([["jobs.send", "ann", number, number] for number in range(3)]), done.stderr


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Celery does not configure the logging of this process: a receiver of its signal means that the program does."""
    pytest.importorskip("celery")
    from celery.signals import setup_logging

    def configure(**_: object) -> None: ...

    setup_logging.connect(configure)
    yield
    setup_logging.disconnect(configure)


@pytest.mark.usefixtures("own_logging")
def test_celery_runs_jobs_in_a_thread_of_this_process() -> None:
    from celery import Celery
    from celery.contrib.testing.worker import start_worker

    here = container()
    app = Celery("jobs", broker="memory://", backend="cache+memory://")
    task = app.task(name="send")(here.injected(send_now))

    with here, start_worker(app, perform_ping_check=False, pool="solo"):
        results = [task.delay("ann", count=number).get(timeout=30) for number in range(3)]
        closed = here.get(Outbox).closed

    assert results == [f"sent {number} to ann" for number in range(3)]
    assert len(closed) == 3


async def test_the_graph_shows_functions_that_get_beans() -> None:
    @observes
    async def audit(event: ServiceStartedEvent, outbox: Inject[Outbox]) -> None: ...

    here = container().register(audit)
    here.injected(send)
    nodes = {each.name: each for each in internals_of(here).describe()}

    assert (nodes["audit()"].made_by, nodes["audit()"].dependencies) == ("@observes", {"outbox": ("outbox",)})
    assert (nodes["send()"].made_by, nodes["send()"].dependencies) == (
        "injected function",
        {"job": ("job",), "again": ("job",)},
    )
    async with here:
        assert "send()" in {each.name for each in internals_of(here).describe()}
