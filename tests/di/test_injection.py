"""Injection into constructors, producers and functions."""

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, Generic, List, NamedTuple, NewType, Optional, Protocol, TypeVar, Union  # noqa: UP035

import pytest
from pydantic import BaseModel
from pydantic_settings import BaseSettings, SettingsConfigDict

from tests.di.conftest import call_scope
from toolbox import (
    AmbiguousBeanError,
    AsyncBeanError,
    Container,
    ContainerNotStartedError,
    IllegalConfigurationError,
    Inject,
    Instance,
    MissingBeanError,
    Named,
    application_scoped,
    dependent,
    produces,
    request_scoped,
)
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio

T = TypeVar("T")
K = TypeVar("K")


class Payments(Protocol):
    def pay(self, amount: int) -> str: ...


class CardPayments(Payments):
    def pay(self, amount: int) -> str:
        return f"card {amount}"


class InvoicePayments(Payments):
    def pay(self, amount: int) -> str:
        return f"invoice {amount}"


class LookAlike:
    def pay(self, amount: int) -> str:
        return f"look-alike {amount}"


class Shape(ABC):
    @abstractmethod
    def area(self) -> int: ...


class Square(Shape):
    def area(self) -> int:
        return 4


@produces(scope="application", name="card")
def named_card() -> Payments:
    return CardPayments()


@produces(scope="application", name="invoice")
def named_invoice() -> Payments:
    return InvoicePayments()


async def test_a_single_subclass_needs_no_bind() -> None:
    class Checkout:
        def __init__(self, payments: Payments, shape: Shape) -> None:
            self.payments, self.shape = payments, shape

    async with Container().register(CardPayments, Square, Checkout) as c:
        checkout = c.get(Checkout)
        assert isinstance(checkout.payments, CardPayments)
        assert isinstance(checkout.shape, Square)
        assert isinstance(c.get(Payments), CardPayments)


async def test_a_class_with_the_same_methods_can_be_bound() -> None:
    async with Container().register(LookAlike).bind(Payments, LookAlike) as c:
        assert isinstance(c.get(Payments), LookAlike)
        assert [type(each) for each in c.get(list[Payments])] == [LookAlike]


async def test_a_bound_class_need_not_be_registered() -> None:
    async with Container().bind(Payments, LookAlike) as c:
        assert isinstance(c.get(Payments), LookAlike)


async def test_bind_selects_one_of_several_implementations() -> None:
    async with Container().register(CardPayments, InvoicePayments).bind(Payments, InvoicePayments) as c:
        assert isinstance(c.get(Payments), InvoicePayments)
        assert [type(each) for each in c.get(list[Payments])] == [CardPayments, InvoicePayments]


async def test_bind_with_a_name() -> None:
    c = Container().bind(Payments, LookAlike, name="first").bind(Payments, CardPayments, name="second")
    async with c:
        assert isinstance(c.get(Payments, "first"), LookAlike)
        assert isinstance(c.get(Annotated[Payments, Named("second")]), CardPayments)
        assert list(c.get(dict[str, Payments])) == ["first", "second"]
        with pytest.raises(MissingBeanError):
            c.get(Payments, "third")


async def test_bind_to_a_producer() -> None:
    async with Container().register(named_card, named_invoice).bind(Payments, named_invoice) as c:
        assert c.get(Payments).pay(1) == "invoice 1"


async def test_the_class_itself_is_preferred_to_a_subclass() -> None:
    @dependent
    class Base:
        pass

    @dependent
    class Derived(Base):
        pass

    async with Container().register(Derived, Base) as c:
        assert type(c.get(Base)) is Base
        assert type(c.get(Derived)) is Derived
        assert [type(each) for each in c.get(list[Base])] == [Derived, Base]


async def test_named_beans_are_injected_by_name() -> None:
    class Checkout:
        def __init__(
            self,
            card: Annotated[Payments, Named("card")],
            other: Annotated[Payments | None, Named("other")],
            invoice: Annotated[Payments, Named("invoice")] | None,
            by_name: dict[str, Payments],
            all_of_them: list[Payments],
        ) -> None:
            self.card, self.other, self.invoice = card, other, invoice
            self.by_name, self.all = by_name, all_of_them

    async with Container().register(named_card, named_invoice, LookAlike, Checkout) as c:
        checkout = c.get(Checkout)
        assert checkout.card.pay(1) == "card 1"
        assert checkout.other is None
        assert checkout.invoice is not None
        assert checkout.by_name == {"card": c.get(Payments, "card"), "invoice": c.get(Payments, name="invoice")}
        assert checkout.all == [c.get(Payments, "card"), c.get(Payments, "invoice")]


async def test_a_named_bean_is_found_without_its_name_if_it_is_the_only_one() -> None:
    async with Container().register(named_card) as c:
        assert c.get(Payments).pay(1) == "card 1"
    async with Container().register(named_card, InvoicePayments) as c:
        assert c.get(Payments).pay(1) == "invoice 1"
    async with Container().register(named_card, named_invoice) as c:
        with pytest.raises(AmbiguousBeanError, match=r"card.*invoice"):
            c.get(Payments)


async def test_optional_parameters_lists_and_defaults() -> None:
    class Everything:
        def __init__(
            self,
            absent: Payments | None,
            old_absent: Optional[Payments],  # noqa: UP045
            none_of_them: list[Payments],
            no_names: dict[str, Payments],
            present: "Square | None",
            amount: int = 3,
            payments: Payments | None = None,
            some: tuple[str, ...] = ("a",),
            untyped=5,  # type: ignore[no-untyped-def]  # what this is about
            lists: list[Payments] = [],  # noqa: B006
            *args: int,
            only: float = 1.5,
            **kwargs: int,
        ) -> None:
            self.__dict__.update(locals())

    async with Container().register(Everything, Square) as c:
        found = vars(c.get(Everything))
        assert found["absent"] is None
        assert found["old_absent"] is None
        assert found["none_of_them"] == []
        assert found["no_names"] == {}
        assert isinstance(found["present"], Square)
        assert (found["amount"], found["payments"], found["some"], found["only"]) == (3, None, ("a",), 1.5)
        assert found["untyped"] == 5


async def test_a_bean_takes_precedence_over_a_default() -> None:
    class Uses:
        def __init__(self, payments: Payments | None = None, *, shape: Shape = Square()) -> None:  # noqa: B008
            self.payments, self.shape = payments, shape

    async with Container().register(Uses, CardPayments) as c:
        assert isinstance(c.get(Uses).payments, CardPayments)
        assert isinstance(c.get(Uses).shape, Square)


async def test_positional_only_parameters_are_injected() -> None:
    class Uses:
        def __init__(self, shape: Shape, amount: int = 3, payments: Payments | None = None, /) -> None:
            self.found = shape, amount, payments

    async with Container().register(Uses, CardPayments, Square) as c:
        shape, amount, payments = c.get(Uses).found
        assert isinstance(shape, Square)
        assert amount == 3
        assert isinstance(payments, CardPayments)


async def test_instances_look_up_in_the_current_scope() -> None:
    @request_scoped
    class Basket:
        pass

    @application_scoped
    class Shop:
        def __init__(
            self,
            basket: Instance[Basket],
            payments: Instance[list[Payments]],
            card: Instance[Annotated[Payments, Named("card")]],
            named: Annotated[Instance[Payments], Named("card")],
            maybe: Instance[Shape | None],
        ) -> None:
            self.basket, self.payments, self.card, self.named, self.maybe = basket, payments, card, named, maybe

    async with Container().register(Basket, Shop, named_card) as c:
        shop = c.get(Shop)
        async with c.request_scope():
            assert shop.basket.get() is c.get(Basket)
            assert await shop.basket.aget() is c.get(Basket)
            assert shop.payments.get() == [c.get(Payments)]
            assert shop.card.get() is shop.named.get()
            assert shop.maybe.get() is None


async def test_instances_of_named_beans_are_found_by_name() -> None:
    @produces(scope="application", name="invoice")
    def invoice() -> Payments:
        return CardPayments()

    class Shop:
        def __init__(self, card: Annotated[Instance[Payments], Named("card")]) -> None:
            self.card = card

    async with Container().register(named_card, invoice, Shop) as c:
        assert c.get(Shop).card.get() is c.get(Payments, "card")


async def test_optional_instances_of_missing_beans_keep_their_default() -> None:
    no_shape: Any = object()

    class Shop:
        def __init__(self, shape: Instance[Shape] | None, other: Instance[Shape] = no_shape) -> None:
            self.found = shape, other

    async with Container().register(Shop) as c:
        assert c.get(Shop).found == (None, no_shape)


async def test_the_container_is_a_bean() -> None:
    class Uses:
        def __init__(self, container: Container) -> None:
            self.container = container

    c = Container().register(Uses)
    async with c:
        assert c.get(Uses).container is c
        assert c.get(Container) is c


async def test_a_bean_can_be_injected_by_a_union() -> None:
    class Uses:
        def __init__(self, payments: CardPayments | Square, old: Union[int, str] = 3) -> None:  # noqa: UP007
            self.payments, self.old = payments, old

    async with Container().register(Uses, Square) as c:
        assert isinstance(c.get(Uses).payments, Square)
        assert c.get(Uses).old == 3


# --- settings


class DbSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TEST_DB_")
    url: str
    size: int = 3


async def test_settings_need_no_registration_and_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_URL", "sqlite://")

    @request_scoped
    class Uses:
        def __init__(self, settings: DbSettings, later: Instance[DbSettings]) -> None:
            self.settings, self.later = settings, later

    async with Container().register(Uses) as c:
        async with c.request_scope():
            first = c.get(Uses).settings
            assert first.url == "sqlite://"
            assert c.get(Uses).later.get() is first
        async with c.request_scope():
            assert c.get(Uses).settings is first
            assert c.get(DbSettings) is first


async def test_settings_that_are_not_injected_anywhere_can_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_URL", "sqlite://")
    async with Container() as c:
        assert c.get(DbSettings) is c.get(DbSettings)
        assert (await c.aget(DbSettings)).url == "sqlite://"
        assert c.call(lambda settings: settings, settings=1) == 1


async def test_problems_of_settings_contain_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_SIZE", "secret-value")

    class Uses:
        def __init__(self, settings: DbSettings) -> None: ...

    c = Container().register(Uses)
    [problem] = c.check()
    assert problem.where == "DbSettings"
    assert "url" in problem.what
    assert "size" in problem.what
    assert "TEST_DB_URL" in problem.fix
    assert "secret-value" not in str(problem)
    with pytest.raises(IllegalConfigurationError) as raised:
        async with c:
            pass
    assert "secret-value" not in str(raised.value)


async def test_errors_of_settings_after_start_contain_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_SIZE", "secret-value")
    async with Container() as c:
        with pytest.raises(IllegalConfigurationError) as raised:
            c.get(DbSettings)
        assert "secret-value" not in str(raised.value)
        assert raised.value.__cause__ is None


async def test_registered_settings_are_not_built_again() -> None:
    async with Container().register_instance(DbSettings(url="given")) as c:
        assert c.get(DbSettings).url == "given"


# --- generics


class User:
    pass


class Order:
    pass


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


# --- kinds of classes


@dataclass
class Base:
    shape: Shape


@dataclass
class Data(Base):
    payments: Payments
    label: str = "x"
    init: InitVar[Square | None] = None
    made: list[int] = field(default_factory=list)


class Tuple(NamedTuple):
    shape: Shape
    count: int = 2


class Model(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    shape: Shape
    count: int = 2


class OnlyNew:
    shape: Shape

    def __new__(cls, shape: Shape) -> "OnlyNew":
        made = super().__new__(cls)
        made.shape = shape
        return made


class FromProtocol(Payments):
    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def pay(self, amount: int) -> str:
        return ""


class Heir(FromProtocol):
    pass


@pytest.mark.parametrize("cls", [Data, Tuple, Model, OnlyNew, Heir])
async def test_all_kinds_of_classes_can_be_beans(cls: Any) -> None:
    payments = [CardPayments] if cls is Data else []
    async with Container().register(cls, Square, *payments) as c:
        assert isinstance(c.get(cls).shape, Square)


async def test_a_class_without_a_signature_is_created_without_arguments() -> None:
    class Numbers(dict[str, int]):
        pass

    async with Container().register(Numbers) as c:
        assert c.get(Numbers) == {}


# --- producers


async def test_all_kinds_of_producers_are_supported() -> None:
    @produces(scope="request")
    def plain() -> int:
        return 1

    @produces(scope="request")
    async def coroutine(plain: int) -> str:
        return str(plain)

    @produces(scope="request")
    def generator(coroutine: str) -> Iterator[float]:
        yield float(coroutine)

    @produces(scope="request")
    async def async_generator(generator: float) -> AsyncIterator[bytes]:
        yield str(generator).encode()

    async with Container().register(plain, coroutine, generator, async_generator) as c, c.request_scope():
        assert await c.aget(bytes) == b"1.0"
        assert c.get(bytes) is await c.aget(bytes)
        assert c.get(float) == 1.0


def make_nothing_in_an_older_spelling(calls: list[int]) -> Any:
    @produces(scope="application")
    def nothing() -> Optional[Square]:  # noqa: UP045
        calls.append(1)
        return None

    return nothing


def make_nothing(calls: list[int]) -> Any:
    @produces(scope="application")
    def nothing() -> Square | None:
        calls.append(1)
        return None

    return nothing


@pytest.mark.parametrize("making", [make_nothing, make_nothing_in_an_older_spelling])
async def test_a_producer_that_returns_none_is_called_once(making: Any) -> None:
    calls: list[int] = []
    nothing = making(calls)

    class Uses:
        def __init__(self, square: Square | None) -> None:
            self.square = square

    async with Container().register(nothing, Uses) as c:
        assert c.get(Uses).square is None
        assert c.get(Uses).square is None
        assert calls == [1]


async def test_dependent_beans_can_be_async() -> None:
    made: list[int] = []

    @produces()
    async def number() -> int:
        await asyncio.sleep(0)
        made.append(1)
        return len(made)

    @dependent
    class Part:
        def __init__(self, number: int) -> None:
            self.number = number

    @application_scoped
    class Long:
        def __init__(self, one: Part, two: Part, every: list[Part], named: dict[str, Part]) -> None:
            self.numbers = [one.number, two.number, *(each.number for each in every)]

    @request_scoped
    class Short:
        def __init__(self, long: Long, number: int) -> None:
            self.long, self.number = long, number

    async with Container().register(number, Part, Long, Short) as c:
        assert c.get(Long).numbers == [1, 2, 3]
        with pytest.raises(AsyncBeanError, match="Part -> int"):
            c.get(Part)
        async with c.request_scope():
            with pytest.raises(AsyncBeanError, match="Short -> int"):
                c.get(Short)
            short = await c.aget(Short)
            assert short.number == 4
            assert c.get(Short) is short
        assert (await c.aget(Part)).number == 5
        assert [each.number for each in await c.aget(list[Part])] == [6]


async def test_async_application_beans_are_created_at_start_and_others_at_first_use() -> None:
    made: list[str] = []

    @produces(scope="application")
    async def first() -> int:
        made.append("awaited")
        return 1

    @application_scoped
    class Second:
        def __init__(self, first: int) -> None:
            made.append("lazy")

    async with Container().register(Second, first) as c:
        assert made == ["awaited"]
        c.get(Second)
        assert made == ["awaited", "lazy"]


async def test_get_of_an_async_bean_reports_the_path_to_the_async_producer() -> None:
    @produces(scope="request")
    async def session() -> int:
        return 1

    @request_scoped
    class Repo:
        def __init__(self, session: int) -> None: ...

    @request_scoped
    class Service:
        def __init__(self, repo: Repo) -> None: ...

    async with Container().register(session, Repo, Service) as c, c.request_scope():
        with pytest.raises(AsyncBeanError) as raised:
            c.get(Service)
        assert (raised.value.wanted, raised.value.path) == ("Service", "Service -> Repo -> int")
        await c.aget(int)
        assert c.get(Service) is await c.aget(Service)


# --- functions


async def test_call_injects_the_missing_arguments() -> None:
    @produces(scope="request")
    async def session() -> float:
        return 1.5

    def plain(a: int, payments: Payments, /, shape: Inject[Shape], *rest: int, b: int = 2, **more: int) -> Any:
        return a, payments, shape, b, more

    async def coroutine(session: float, payments: list[Payments], b: str | None) -> Any:
        return session, payments, b

    async with Container().register(CardPayments, Square, session) as c, c.request_scope():
        a, payments, shape, b, more = c.call(plain, a=1, x=5)
        assert (a, b, more) == (1, 2, {"x": 5})
        assert isinstance(payments, CardPayments)
        assert isinstance(shape, Square)
        session_, all_payments, none = await c.acall(coroutine)
        assert session_ == 1.5
        assert len(all_payments) == 1
        assert none is None
        assert c.call(Heir).shape is not None
        with pytest.raises(MissingBeanError, match="bytes"):
            c.call(_wants_bytes)
        with pytest.raises(IllegalConfigurationError, match="no annotation"):
            c.call(_untyped)
        assert c.call(_untyped, value=4) == 4


def _wants_bytes(value: bytes) -> None: ...


def _untyped(value):  # type: ignore[no-untyped-def]  # what this is about
    return value


async def test_call_accepts_bound_methods() -> None:
    class Service:
        def run(self, shape: Shape) -> Shape:
            return shape

    async with Container().register(Square) as c:
        assert isinstance(c.call(Service().run), Square)


# --- looking up


async def test_annotated_types_are_looked_up_by_the_annotated_type() -> None:
    async with Container().register(Square) as c:
        assert isinstance(c.get(Annotated[Shape, "something", ["unhashable"]]), Square)
        assert isinstance(await c.aget(Annotated[Shape, "something", ["unhashable"]]), Square)
        assert c.get(Payments | None) is None
        assert isinstance(c.get(Shape | None), Square)
        assert isinstance(c.get(Instance[Shape]).get(), Square)


async def test_the_error_of_a_missing_bean_suggests_similar_beans() -> None:
    async with Container().register(LookAlike, named_card) as c:
        with pytest.raises(MissingBeanError) as raised:
            c.get(Payments, "crad")
        assert "Payments 'card'" in raised.value.near
        assert "LookAlike" in raised.value.near

        class LookAlikes:
            pass

        with pytest.raises(MissingBeanError, match="LookAlike"):
            await c.aget(LookAlikes)


async def test_lookups_before_start_and_after_stop_raise_an_error() -> None:
    c = Container().register(Square)
    for use in (c.get, internals_of(c).open_call_scope, c.request_scope):
        with pytest.raises(ContainerNotStartedError):
            use(Square) if use == c.get else use()  # type: ignore[operator, call-arg]  # three signatures
    with pytest.raises(ContainerNotStartedError):
        c.call(_untyped)
    with pytest.raises(ContainerNotStartedError):
        _ = c.providers
    async with c:
        c.get(Square)
    with pytest.raises(ContainerNotStartedError, match="Square"):
        await c.aget(Square)


# --- seeds


async def test_seeds_are_beans_of_their_request_scope() -> None:
    class Uses:
        def __init__(self, user: User, maybe: Order | None) -> None:
            self.user, self.maybe = user, maybe

    user = User()
    async with Container(seeds=(User, Order)).register(Uses) as c:
        async with c.request_scope({User: user}):
            assert c.get(Uses).user is user
            assert c.get(User) is user
            assert c.get(Uses).maybe is None
            with pytest.raises(MissingBeanError, match="Order"):
                c.get(Order)
        async with c.request_scope():
            with pytest.raises(MissingBeanError, match="User"):
                c.get(Uses)


async def test_undeclared_types_can_be_seeded_and_looked_up() -> None:
    class Admin(User):
        pass

    admin = Admin()
    async with Container() as c:
        async with c.request_scope({Admin: admin}):
            assert c.get(Admin) is admin
            assert await c.aget(User) is admin
            with pytest.raises(MissingBeanError):
                c.get(Order)
        with pytest.raises(MissingBeanError):
            c.get(Admin)


@pytest.mark.parametrize("scope", [application_scoped, request_scoped, dependent])
async def test_a_seed_replaces_a_bean_for_one_task(scope: Any) -> None:
    @scope
    class Real:
        def __init__(self) -> None:
            self.kind = "real"

    class Fake(Real):
        def __init__(self) -> None:
            self.kind = "fake"

    class Holder:
        def __init__(self, real: Real, every: list[Real]) -> None:
            self.kinds = [real.kind, *(each.kind for each in every)]

    async with Container().register(Real, Holder) as c:

        async def kinds(seeds: dict[type, Real]) -> list[str]:
            async with c.request_scope(seeds):
                await asyncio.sleep(0)
                found = c.get(Holder).kinds
                await asyncio.sleep(0)
                with call_scope(c):
                    assert (await c.aget(Holder)).kinds == found
                return found

        fake, real = await asyncio.gather(kinds({Real: Fake()}), kinds({}))
        assert fake == ["fake", "fake"]
        assert real == ["real", "real"]


# --- lookups of what may be missing


async def test_find_returns_none_for_a_bean_that_nobody_provides() -> None:
    class Shelf:
        pass

    class User:
        pass

    class Guest:
        pass

    @produces(scope="dependent")
    def nothing() -> Shelf | None:
        return None

    async with Container(seeds=[User]).register(nothing) as c:
        find = internals_of(c).find
        assert await find(bytes) is await find(bytes, "named") is await find(User) is await find(Shelf) is None
        async with c.request_scope():
            assert await find(User) is None
        user, guest = User(), Guest()
        async with c.request_scope({User: user, Guest: guest}):
            assert await find(User) is user
            assert await find(Guest) is guest
        assert await find(Container) is c


async def test_similar_beans_are_searched_for_when_somebody_reads_the_error() -> None:
    class Invoice:
        pass

    class Invoices:
        pass

    async with Container().register(Invoice) as c:
        with pytest.raises(MissingBeanError) as raised:
            await c.aget(Invoices)
        assert raised.value.near == ("Invoice",)
        copied = pickle.loads(pickle.dumps(raised.value))
        assert copied.near == ("Invoice",)
        assert str(copied) == str(raised.value)
