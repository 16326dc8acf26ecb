"""Generic types as beans: each list of arguments is a bean of its own."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Generic, List, NewType, Protocol, TypeVar  # noqa: UP035

import pytest

from tests.di.payments import Order, User
from toolbox import (
    AmbiguousBeanError,
    ChatModel,
    Container,
    IllegalConfigurationError,
    Inject,
    Instance,
    MissingBeanError,
    Named,
    application_scoped,
    decorates,
    dependent,
    on_start,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.container import internals_of
from toolbox.di import providers
from toolbox.di.awaited import Planner
from toolbox.di.beans import read_class
from toolbox.di.graph import BeanGraph
from toolbox.introspection import type_name
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


T = TypeVar("T")

K = TypeVar("K")


class Repository(Generic[T]):
    pass


class UserRepository(Repository[User]):
    pass


class OrderRepository(Repository[Order]):
    pass


@dependent
class Uses(Generic[T]):
    def __init__(self, repository: Repository[T]) -> None:
        self.repository = repository


async def test_generic_types_with_different_arguments_are_different_beans() -> None:
    class Service:
        def __init__(self, users: Repository[User], orders: Repository[Order], every: list[Repository[User]]) -> None:
            self.users, self.orders, self.every = users, orders, every

    async with Container().register(UserRepository, OrderRepository, Service) as c:
        service = c.get(Service)
        assert isinstance(service.users, UserRepository)
        assert isinstance(service.orders, OrderRepository)
        assert [type(each) for each in service.every] == [UserRepository]
        assert [type(each) for each in c.get(list[Repository])] == [UserRepository, OrderRepository]  # type: ignore[type-arg]  # the raw class
        with pytest.raises(AmbiguousBeanError):
            c.get(Repository)
        with pytest.raises(MissingBeanError):
            c.get(Repository[int])


async def test_producers_of_generic_types() -> None:
    @produces(scope="application")
    def users() -> Repository[User]:
        return Repository()

    @produces(scope="application")
    def orders() -> Repository[Order]:
        return Repository()

    @produces(scope="application")
    def prices() -> dict[str, int]:
        return {"a": 1}

    @produces(scope="application")
    def words() -> list[str]:
        return ["a", "b"]

    @produces(scope="application")
    def double() -> Callable[[int], int]:
        return lambda value: value * 2

    async with Container().register(users, orders, prices, words, double) as c:
        assert c.get(Repository[User]) is not c.get(Repository[Order])
        assert c.get(dict[str, int]) == {"a": 1}
        assert c.get(list[str]) == ["a", "b"]
        assert c.get(List[str]) == ["a", "b"]  # noqa: UP006
        assert c.get(Callable[[int], int])(4) == 8


@application_scoped
class Cache(Generic[K, T]):
    def __init__(self, key: Repository[K]) -> None:
        self.key = key


async def test_a_generic_class_is_a_bean_for_each_of_its_arguments() -> None:
    class Service:
        def __init__(self, users: Uses[User], cache: Cache[User, int]) -> None:
            self.users, self.cache = users, cache

    async with Container().register(Uses, UserRepository, OrderRepository, Cache, Service) as c:
        assert isinstance(c.get(Service).users.repository, UserRepository)
        assert c.get(Service).cache is c.get(Cache[User, int])
        assert c.get(Cache[User, int]) is not c.get(Cache[Order, int])
        assert isinstance(c.get(Uses[Order]).repository, OrderRepository)


async def test_a_generic_class_can_be_registered_with_arguments() -> None:
    async with Container().register(Uses[User], Uses[Order], UserRepository, OrderRepository) as c:
        assert isinstance(c.get(Uses[User]).repository, UserRepository)
        assert isinstance(c.get(Uses[Order]).repository, OrderRepository)
        assert len(c.get(list[Uses])) == 2  # type: ignore[type-arg]  # the raw class


async def test_type_arguments_reach_inherited_constructors() -> None:
    class OfOrders(Uses[Order]):
        pass

    async with Container().register(OfOrders, UserRepository, OrderRepository) as c:
        assert isinstance(c.get(OfOrders).repository, OrderRepository)
        assert isinstance(c.get(Uses[Order]), OfOrders)


async def test_generic_protocols_are_bean_types() -> None:
    class Store(Protocol[T]):
        def load(self) -> T: ...

    class UserStore(Store[User]):
        def load(self) -> User:
            return User()

    class OrderStore(Store[Order]):
        def load(self) -> Order:
            return Order()

    async with Container().register(UserStore, OrderStore) as c:
        assert isinstance(c.get(Store[Order]), OrderStore)


UserId = NewType("UserId", int)


async def test_new_types_are_separate_bean_types() -> None:
    @produces()
    def user_id() -> UserId:
        return UserId(3)

    async with Container().register(user_id) as c:
        assert c.get(UserId) == 3
        with pytest.raises(MissingBeanError):
            c.get(int)


# --- added while the container runs


class Connection: ...


@produces(scope="dependent")
async def connection() -> Connection:
    return Connection()


@dependent
class Table(Generic[T]):
    def __init__(self, connection: Connection) -> None:
        self.connection = connection


@pytest.mark.parametrize(
    "method", [lambda graph: graph.resolve_type(Uses[int], None), lambda graph: graph.find(Uses[int])]
)
def test_a_graph_has_all_beans_of_its_definitions_after_each_lookup(method: Callable[[BeanGraph], object]) -> None:
    graph = BeanGraph([read_class(Uses), read_class(Repository)])

    assert method(graph)

    assert [each.definition for each in graph.beans] == graph.definitions
    assert [type_name(each.provides) for each in graph.definitions[2:]] == ["Uses[int]", "Repository[int]"]


def test_a_seed_can_be_given_while_another_thread_looks_up_a_new_bean(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = Uses[int](Repository())
    names_of = providers.provider_names

    def name_after_a_seed_was_given(*args: Any) -> list[str]:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(container.request_scope, {Uses[int]: seed}).result()
        return names_of(*args)

    with Container().register(Uses, Repository) as container:
        monkeypatch.setattr(providers, "provider_names", name_after_a_seed_was_given)

        assert isinstance(container.get(Uses[str]), Uses)
        with container.request_scope({Uses[int]: seed}):
            assert container.get(Uses[int]) is seed
        assert container.get(Uses[int]) is not seed
        assert {"uses_str", "uses_int", "repository_int"} <= container.providers.providers.keys()


async def test_a_new_bean_can_be_looked_up_again_after_its_first_lookup_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> list[str]:
        monkeypatch.undo()
        raise RecursionError

    async with Container().register(Table, connection) as container:
        monkeypatch.setattr(providers, "provider_names", fail)
        with pytest.raises(RecursionError):
            await container.aget(Table[int])

        assert isinstance((await container.aget(Table[int])).connection, Connection)
        assert "table_int" in container.providers.providers


async def test_an_override_ends_while_another_thread_looks_up_a_new_bean(monkeypatch: pytest.MonkeyPatch) -> None:
    find_awaited = Planner._find_awaited

    async with Container().register(Uses, Repository, UserRepository) as container:
        override = container.override(UserRepository, UserRepository())
        fake = override.__enter__()
        ending = threading.Thread(target=override.__exit__, args=(None, None, None))

        def end_meanwhile(planner: Planner) -> frozenset[int]:
            monkeypatch.undo()
            ending.start()
            ending.join(0.5)  # it waits until the beans are planned; otherwise it would end now
            return find_awaited(planner)

        monkeypatch.setattr(Planner, "_find_awaited", end_meanwhile)
        container.get(Uses[str])
        await asyncio.to_thread(ending.join)

        assert container.get(UserRepository) is not fake


# --- that cannot be created


class Driver(Protocol[T]):
    def load(self) -> T: ...


@application_scoped
class Unmet(Generic[T]):
    def __init__(self, driver: Driver[T]) -> None: ...

    async def ready(self) -> bool:
        return True


@request_scoped
class Basket(Generic[T]): ...


@application_scoped
class Captive(Generic[T]):
    def __init__(self, basket: Basket[T]) -> None: ...


@dependent
class Left(Generic[T]):
    def __init__(self, right: "Right[T]") -> None: ...


@dependent
class Right(Generic[T]):
    def __init__(self, left: Left[T]) -> None: ...


@dependent
class Endless(Generic[T]):
    def __init__(self, larger: "Endless[list[T]]") -> None: ...


@dependent
class Undeclared(Generic[T]):
    def __init__(self, model: Annotated[ChatModel, Named("unknown")], repository: Repository[T]) -> None: ...


@dependent
class Decorated(Generic[T]):
    def __init__(self, repository: Repository[T]) -> None: ...


@decorates(Decorated)
@request_scoped
class Around(Decorated[T]):
    def __init__(self, inner: Decorated[T]) -> None: ...


@dependent
class Above(Generic[T]):
    def __init__(self, broken: Unmet[T]) -> None: ...


@dependent
class Later(Generic[T]):
    def __init__(self, broken: Instance[Unmet[T]]) -> None:
        self.broken = broken


BROKEN = (Unmet, Captive, Left, Endless, Undeclared, Decorated, Above)
GENERIC = (*BROKEN, Right, Basket, Around, Later, Uses, Repository)


def new_container(*others: object) -> Container:
    return Container(models={"default": ScriptedChatModel()}).register(*GENERIC, UserRepository, *others)


def wants_a_good_one(uses: Uses[bytes]) -> str:
    return type(uses.repository).__name__


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_generic_bean_that_cannot_be_created_fails_its_own_lookups_only(broken: Any) -> None:
    def wants_a_broken_one(bean: broken[float]) -> None: ...

    async with new_container() as container:
        lookups: list[Callable[[], Any]] = [
            lambda: container.get(broken[int]),
            lambda: container.get(broken[int]),
            lambda: container.call(wants_a_broken_one),
            lambda: container.get(Instance[broken[str]]).get(),
            lambda: container.override(broken[bytes], object()).__enter__(),
            lambda: container.injected(wants_injected(broken[int])),
            lambda: container.providers.providers[f"{broken.__name__.lower()}_int"](),
            lambda: container.providers.providers[f"{broken.__name__.lower()}_int"](1),
        ]
        for number, look_up in enumerate(lookups):
            with pytest.raises(IllegalConfigurationError) as caught:
                look_up()
            assert len(caught.value.problems) == 1
            new: Any = tuple[(int,) * (number + 1)]  # type: ignore[misc]  # another one each time

            assert isinstance(container.get(Repository[new]), Repository)
            assert await container.acall(wants_a_good_one) == "Repository"
            assert isinstance(container.get(UserRepository), UserRepository)
        with pytest.raises(IllegalConfigurationError):
            await container.aget(broken[int])
        with container.request_scope({broken[dict]: object()}), container.override(UserRepository, UserRepository()):
            assert isinstance(container.get(Uses[dict]), Uses)
        assert internals_of(container).application_beans_with("ready") == {}


def wants_injected(wanted: Any) -> Callable[..., None]:
    def function(bean: Inject[wanted]) -> None: ...

    return function


async def test_a_bean_that_can_look_up_a_broken_one_later_is_created() -> None:
    async with new_container() as container:
        later = container.get(Later[int])

        with pytest.raises(IllegalConfigurationError, match="no bean provides Driver"):
            later.broken.get()
        assert isinstance(container.get(Later[int]), Later)


def list_a_tool(wanted: Any) -> object:
    class Tools:
        @tool
        def load(self, bean: Inject[wanted]) -> str:
            """Load something."""
            return ""

    @register_ai_service(tools=Tools)
    class Assistant(Protocol):
        def chat(self, question: str) -> str: ...

    return Assistant


def run_at_start(wanted: Any) -> object:
    @on_start
    def prepare(bean: Inject[wanted]) -> None: ...

    return prepare


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("using", [list_a_tool, run_at_start])
def test_the_start_checks_beans_that_only_its_other_checks_request(using: Callable[[Any], object], broken: Any) -> None:
    [problem] = new_container(using(broken[int])).check()

    assert problem.where.startswith((broken.__name__, "Unmet", "Around"))


def test_the_start_checks_the_beans_of_injected_functions_and_overrides() -> None:
    injecting, overriding = new_container(), new_container()
    injecting.injected(wants_injected(Captive[int]))

    with overriding.override(Unmet[int], object()):
        assert [each.where for each in injecting.check() + overriding.check()] == [
            "Captive[int].basket",
            "Unmet[int].driver",
        ]
