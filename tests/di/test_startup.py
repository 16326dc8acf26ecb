"""`@on_start`: when marked functions and methods run, what they get, and what keeps a container from starting."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient
from typer.testing import CliRunner

from toolbox import (
    ChatModel,
    Container,
    IllegalConfigurationError,
    Inject,
    application_scoped,
    on_start,
    produces,
    register_ai_service,
    request_scoped,
    run_on,
)
from toolbox.cli import app as command_line
from toolbox.container import internals_of
from toolbox.runs import InMemoryRunStore, Runs, RunStore
from toolbox.security import SecurityIdentity, authenticated
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio

ANN = SecurityIdentity("ann")
log: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()


@application_scoped
class Prices:
    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    @on_start
    async def load(self) -> None:
        self.known["soup"] = 7.5
        log.append("prices")


@on_start(order=1)
def print_menu(prices: Inject[Prices]) -> None:
    log.append(sorted(prices.known))


async def test_a_method_of_a_bean_and_a_registered_function_run_once_per_start() -> None:
    container = Container().register(print_menu, Prices)

    for _ in range(2):
        async with container:
            assert (await container.aget(Prices)).known == {"soup": 7.5}
            assert log == ["prices", ["soup"]]
        log.clear()


def test_they_run_when_a_synchronous_program_starts_too() -> None:
    with Container().register(print_menu, Prices):
        assert log == ["prices", ["soup"]]


def marked(name: str, order: int) -> Any:
    @on_start(order=order)
    def note() -> None:
        log.append(name)

    return note


async def test_smaller_orders_run_first_then_the_order_of_registration() -> None:
    class Pair:
        @on_start
        def second(self) -> None:
            log.append("Pair.second")

        @on_start(-1)
        async def first(self) -> None:
            log.append("Pair.first")

    async with Container().register(marked("last", 7), marked("early", 0), Pair, marked("late", 0)):
        pass

    assert log == ["Pair.first", "early", "Pair.second", "late", "last"]


async def test_a_def_runs_on_a_thread_and_an_async_def_on_the_loop() -> None:
    @on_start
    def blocking() -> None:
        log.append(threading.current_thread())

    @on_start
    async def on_loop() -> None:
        log.append(asyncio.current_task())

    async with Container().register(blocking, on_loop):
        pass

    assert log[0] is not threading.current_thread()
    assert log[1] is asyncio.current_task()


async def test_each_runs_in_its_own_request_scope_as_the_anonymous_identity() -> None:
    @request_scoped
    class Session:
        def stop(self) -> None:
            log.append("closed")

    @on_start
    async def one(session: Inject[Session], who: Inject[SecurityIdentity]) -> None:
        log.append((session, str(who)))

    @on_start
    def two(session: Inject[Session]) -> None:
        log.append((session, ""))

    @produces(scope="request")
    def caller() -> SecurityIdentity:
        raise AssertionError("nobody asks")

    async with Container().register(Session, one, two, caller):
        pass

    first, closed, second, _ = log
    assert first[1] == "anonymous"
    assert closed == "closed"
    assert first[0] is not second[0]


async def test_a_start_inside_a_request_of_another_container_is_anonymous() -> None:
    @on_start
    async def ask(who: Inject[SecurityIdentity]) -> None:
        log.append(str(who))

    inner = Container(seeds=[SecurityIdentity]).register(ask)
    async with Container(seeds=[SecurityIdentity]) as outer, outer.request_scope({SecurityIdentity: ANN}), inner:
        pass

    assert log == ["anonymous"]


async def test_methods_of_bases_instances_producers_and_named_beans_run() -> None:
    class Base:
        def __init__(self, name: str = "class") -> None:
            self.name = name

        @on_start
        def warm(self) -> None:
            log.append(self.name)

    class Derived(Base):
        def warm(self) -> None:
            log.append(f"derived {self.name}")

    class Warm(Protocol):
        @on_start
        async def warm(self) -> None: ...

    class Other:
        async def warm(self) -> None:
            log.append("protocol")

    @produces(scope="application", name="a")
    def a() -> Base:
        return Base("a")

    @produces(scope="application", name="b")
    async def b() -> Base:
        return Base("b")

    @produces(scope="application")
    def other() -> Warm:
        return Other()

    @produces(scope="application", name="none")
    def none() -> Base | None:
        return None

    container = Container().register(Derived, a, b, other, none)
    shared = Base("instance")
    container.register_instance(shared, name="c").register_instance(shared, as_type=object)

    async with container:
        pass

    assert log == ["derived class", "a", "b", "protocol", "instance"]


@application_scoped
class OwnModel(ScriptedChatModel):
    @on_start
    def connect(self) -> None:
        log.append("OwnModel")


@produces(scope="application")
def produced_model() -> ScriptedChatModel:
    return ScriptedChatModel()


@produces(scope="application", name="any")
def any_model() -> ChatModel:
    return ScriptedChatModel()


def register_model(container: Container, first: object) -> Container:
    return container.register_instance(first) if isinstance(first, ScriptedChatModel) else container.register(first)


after_a_model = pytest.mark.parametrize(
    "first",
    [OwnModel, produced_model, any_model, OwnModel(), ScriptedChatModel()],
    ids=["class", "producer", "producer of ChatModel", "instance", "instance without methods"],
)


@after_a_model
async def test_methods_run_on_their_own_beans_after_a_model(first: object) -> None:
    class Soups:
        @on_start
        def read(self) -> None:
            log.append(type(self).__name__)

    class Salads:
        @on_start
        def read(self) -> None:
            log.append(type(self).__name__)

    async with register_model(Container(), first).register(Soups, Salads):
        pass

    of_model = ["OwnModel"] if first is OwnModel or isinstance(first, OwnModel) else []
    assert log == [*of_model, "Soups", "Salads"]


@after_a_model
def test_problems_of_seeds_name_the_right_bean_after_a_model(first: object) -> None:
    class User: ...

    @request_scoped
    class Cart:
        def __init__(self, user: User) -> None: ...

        @on_start
        def fill(self) -> None: ...

    container = Container(seeds=[User])
    [problem] = register_model(container, first).register(Cart, Prices).check()

    assert problem.where.endswith("Cart.fill -> Cart -> User")


def test_models_are_in_lists_and_descriptions_in_the_order_of_registration() -> None:
    class Models:
        def __init__(self, models: list[ChatModel]) -> None:
            self.models = models

        @on_start
        def note(self) -> None: ...

    container = Container().register(any_model, OwnModel, Models)
    container.register_instance(ScriptedChatModel(), name="last")

    described = {each.name: each for each in internals_of(container).describe()}

    assert described["models"].dependencies["models"] == ("any_chat_model", "chat_model", "last_chat_model")
    [method] = [each for name, each in described.items() if name.endswith("Models.note()")]
    assert method.dependencies == {"self": ("models",)}


async def test_class_and_static_methods_run() -> None:
    class Tables:
        @classmethod
        @on_start
        def create(cls) -> None:
            log.append(cls.__name__)

        @on_start
        @staticmethod
        async def fill(prices: Inject[Prices]) -> None:
            log.append(len(prices.known))

    async with Container().register(Prices, Tables):
        pass

    assert log == ["prices", "Tables", 1]


async def test_an_overridden_bean_runs_in_place_of_the_bean() -> None:
    class Fake(Prices):
        @on_start
        async def load(self) -> None:
            log.append("fake")

    container = Container().register(Prices)
    with container.override(Prices, Fake()):
        async with container:
            pass

    assert log == ["fake"]


async def test_parameters_without_a_bean_keep_their_default() -> None:
    @on_start
    async def ask(
        prices: Inject[Prices] | None = None, size: int = 3, who: Inject[SecurityIdentity | None] = None
    ) -> None:
        log.append((prices, size, who))

    async with Container().register(ask):
        pass

    assert log == [(None, 3, None)]


async def test_an_error_ends_the_start_stops_what_was_started_and_is_raised_as_it_is() -> None:
    failure = OSError("no prices today")

    @produces(scope="application")
    async def pool() -> AsyncIterator[list[int]]:
        try:
            yield [1]
        finally:
            log.append("pool closed")

    @on_start
    def fail(pool: Inject[list[int]]) -> None:
        raise failure

    container = Container().register(pool, fail, marked("later", 1))
    with pytest.raises(OSError, match="no prices") as raised:
        await container.__aenter__()

    assert raised.value is failure
    assert log == ["pool closed"]
    assert not container.is_started


async def test_a_cancelled_start_stops_what_was_started() -> None:
    begun = asyncio.Event()

    @on_start
    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    container = Container().register(wait)
    start = asyncio.create_task(container.__aenter__())
    await begun.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start

    assert not container.is_started


async def test_scanned_modules_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warm_shop.py").write_text(
        "from toolbox import on_start\n"
        "seen = []\n"
        "@on_start\n"
        "def warm_up():\n    seen.append('function')\n"
        "class Shelf:\n"
        "    @on_start\n"
        "    def fill(self):\n        seen.append('method')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import warm_shop  # type: ignore[import-not-found]  # written above

    async with Container().scan(warm_shop):
        pass

    assert warm_shop.seen == ["function", "method"]


async def test_services_work_while_they_run() -> None:
    @register_ai_service
    class Waiter(Protocol):
        async def answer(self, text: str) -> str: ...

        @authenticated
        async def secret(self, text: str) -> str: ...

    @on_start
    async def warm_up(waiter: Inject[Waiter]) -> None:
        log.append(await waiter.answer("hello"))

    model = ScriptedChatModel(["Good day."])
    async with Container(models={"default": model}, seeds=[SecurityIdentity]).register(Waiter, warm_up):
        pass

    assert log == ["Good day."]


# --- runs


async def test_they_run_before_runs_are_taken_over_and_may_start_runs() -> None:
    class Store(InMemoryRunStore):
        async def lapsed(self, limit: int) -> list[str]:
            log.append("looked for lapsed runs")
            looked.set()
            return await super().lapsed(limit)

    looked = asyncio.Event()

    @produces(scope="application")
    def store() -> RunStore:
        return Store()

    @register_ai_service
    class Clerk(Protocol):
        async def report(self, text: str) -> str: ...

    @on_start
    async def begin(runs: Inject[Runs]) -> None:
        log.append(await runs.result(await runs.start(Clerk.report, "today")))

    model = ScriptedChatModel(["Nothing new."])
    async with Container(models={"default": model}).register(store, Clerk, begin) as container:
        await asyncio.wait_for(looked.wait(), 10)
        [run] = await container.runs.list()
        assert run.status == "completed"

    assert log[:2] == ["Nothing new.", "looked for lapsed runs"]


# --- FastAPI and commands


def test_they_run_before_the_first_request_and_before_the_lifespan_of_the_application() -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.append("lifespan")
        yield

    app = FastAPI(lifespan=lifespan)
    install(app, Container().register(Prices))

    @app.get("/price")
    async def price(prices: Inject[Prices]) -> float:
        return prices.known["soup"]

    with TestClient(app) as client:
        assert log == ["prices", "lifespan"]
        assert client.get("/price").json() == 7.5

    assert log == ["prices", "lifespan"]


def test_the_command_check_does_not_run_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_shop.py").write_text(
        "from toolbox import Container, on_start\n"
        "@on_start\n"
        "def warm_up():\n    raise AssertionError('it runs')\n"
        "container = Container().register(warm_up)\n"
    )
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(command_line, ["check", "checked_shop:container", "--no-models"])

    assert (result.exit_code, result.output) == (0, "No problems.\n")


# --- problems


class User: ...


@request_scoped
class Basket:
    def __init__(self, user: User) -> None: ...


T = TypeVar("T")


def problems_of(*registered: Any, **options: Any) -> list[tuple[str, str]]:
    return [(each.where, each.what) for each in Container(**options).register(*registered).check(models=False)]


@on_start
async def for_a_user(user: Inject[User]) -> None: ...


@on_start
async def for_a_basket(basket: Inject[Basket]) -> None: ...


@on_start
async def perhaps_for_a_user(user: Inject[User | None]) -> None: ...


def test_what_needs_a_seed_is_a_problem() -> None:
    found = problems_of(for_a_user, for_a_basket, perhaps_for_a_user, Basket, seeds=[User])

    fact = "it needs the request seed User, which does not exist at startup"
    assert found == [("for_a_user -> User", fact), ("for_a_basket -> Basket -> User", fact)]


def test_a_method_of_a_bean_that_needs_a_seed_is_a_problem() -> None:
    class Cart:
        def __init__(self, basket: Basket) -> None: ...

        @on_start
        def fill(self) -> None: ...

    [(where, _)] = problems_of(Basket, Cart, seeds=[User])

    assert where == "Cart.fill -> Cart -> Basket -> User"


def test_what_needs_the_web_request_is_a_problem() -> None:
    @on_start
    async def read(request: Inject[Request], who: Inject[SecurityIdentity]) -> None: ...

    container = Container().register(read)
    install(FastAPI(), container, identity=lambda: None)

    [problem] = container.check()

    assert problem.what == "it needs the request seed Request, which does not exist at startup"
    assert problem.fix == "take `Request | None`, or remove the dependency"


def test_wrong_declarations_are_problems() -> None:
    class Unregistered: ...

    class Missing:
        @on_start
        def find(self, what: Inject[Unregistered], where: str) -> None: ...

    class Box(Generic[T]):
        def __init__(self, content: T) -> None: ...

        @on_start
        def open(self) -> None: ...

    @on_start
    @produces()
    def clock() -> int:
        return 1

    @on_start
    def values() -> Iterator[int]:
        yield 1

    @on_start
    @run_on("reports")
    def report() -> None: ...

    assert problems_of(Missing, Box, clock, values, report) == [
        ("Missing.find", "the parameter 'where' has no value"),
        ("Missing.find, parameter what", "no bean provides Unregistered"),
        ("Box.open", "a generic class has no bean at startup, because its type arguments are unknown"),
        ("clock", "a producer cannot have @on_start: it creates a bean when the bean is needed"),
        ("values", "@on_start does not support generators and streams"),
        ("report", "unknown executor 'reports'"),
    ]


async def test_no_function_runs_if_there_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError):
        await Container(seeds=[User]).register(Prices, for_a_user).__aenter__()

    assert log == []


@pytest.mark.parametrize("target", [Prices, 1.5, "first", True, None], ids=str)
def test_only_functions_methods_and_integers_are_accepted(target: Any) -> None:
    with pytest.raises(TypeError, match="@on_start: "):
        on_start(target)


def test_the_decorator_returns_the_same_function() -> None:
    def warm_up() -> None: ...

    assert on_start(warm_up) is warm_up
    assert on_start(order=2)(warm_up) is warm_up
