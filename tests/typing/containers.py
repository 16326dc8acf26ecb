"""What a type checker knows of the container. Checked by mypy and pyright, never run."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Protocol, assert_type

from toolbox import (
    Container,
    Inject,
    Instance,
    Named,
    Problem,
    ToolboxSettings,
    ToolErrors,
    application_scoped,
    call_scoped,
    dependent,
    on_start,
    on_success,
    produces,
    request_scoped,
    return_to_model,
)


class Payments(Protocol):
    def pay(self, amount: int) -> str: ...


class Ledger(ABC):
    @abstractmethod
    def book(self) -> int: ...


@application_scoped
class CardPayments:
    def pay(self, amount: int) -> str:
        return f"paid {amount}"


@request_scoped
class Cart:
    def __init__(self, payments: Payments, ledger: Ledger | None = None) -> None:
        self.payments = payments


@dependent
class Till:
    def __init__(self, carts: Instance[Cart], all_payments: list[Payments], named: dict[str, Payments]) -> None:
        self.carts = carts


@call_scoped
class Session:
    def stop(self) -> None: ...


@produces(scope="application", name="eu")
def region() -> str:
    return "eu"


class Catalogue:
    @on_start
    async def load(self, till: Inject[Till]) -> int:
        return 1

    @on_start(order=2)
    @staticmethod
    def report() -> None: ...


@request_scoped
class UnitOfWork:
    @on_success
    async def commit(self) -> int:
        return 1

    @on_success
    @staticmethod
    def publish() -> None: ...


async def a_method_that_is_called_on_success_keeps_its_type(work: UnitOfWork) -> None:
    assert_type(await work.commit(), int)
    UnitOfWork.publish()


@on_start
def warm_up(till: Inject[Till]) -> str:
    return "warm"


async def what_runs_at_startup_keeps_its_type(catalogue: Catalogue, till: Till) -> None:
    assert_type(await catalogue.load(till), int)
    assert_type(warm_up(till), str)
    Catalogue.report()


@produces(scope="call")
async def session(ledger: Ledger) -> AsyncIterator[Session]:
    yield Session()


@produces(scope="request")
def cart(payments: Payments) -> Iterator[Cart]:
    yield Cart(payments)


def a_scope_decorator_keeps_the_class() -> None:
    assert_type(Cart(CardPayments()), Cart)
    assert_type(CardPayments().pay(1), str)


def a_producer_stays_the_function_it_was(ledger: Ledger) -> None:
    assert_type(region(), str)
    assert_type(session(ledger), AsyncIterator[Session])


async def a_bean_has_the_type_it_was_asked_for(container: Container) -> None:
    assert_type(container.get(Cart), Cart)
    assert_type(container.get(Payments), Payments)
    assert_type(container.get(Ledger), Ledger)
    assert_type(container.get(Payments, name="card"), Payments)
    assert_type(container.get(Payments | None), Payments | None)
    assert_type(container.get(list[Payments]), list[Payments])
    assert_type(container.get(dict[str, Payments]), dict[str, Payments])
    assert_type(await container.aget(Cart), Cart)
    assert_type(await container.aget(Payments), Payments)
    annotated: Payments = container.get(Annotated[Payments, Named("card")])
    annotated.pay(1)


async def an_instance_gives_its_type(carts: Instance[Cart]) -> None:
    assert_type(carts.get(), Cart)
    assert_type(await carts.aget(), Cart)


def total(cart: Inject[Cart], factor: int) -> int:
    return factor


async def total_later(cart: Inject[Cart], factor: int) -> int:
    return factor


async def a_called_function_keeps_its_result(container: Container) -> None:
    assert_type(container.call(total, factor=2), int)
    assert_type(await container.acall(total_later, factor=2), int)


async def a_container_is_started_either_way() -> None:
    container = Container(
        settings=ToolboxSettings(pool_size=4), tool_errors=ToolErrors(on_unknown_tool=return_to_model), seeds=(Cart,)
    )
    assert_type(container.register(CardPayments, Cart, session), Container)
    container.register_instance(CardPayments(), as_type=Payments, name="card")
    container.bind(Payments, CardPayments)
    assert_type(container.check(), list[Problem])
    with container as started:
        assert_type(started, Container)
    async with container as started:
        assert_type(started, Container)
        async with container.request_scope({Cart: Cart(CardPayments())}):
            pass
        with container.request_scope():
            pass
        with container.override(Payments, CardPayments()):
            pass
