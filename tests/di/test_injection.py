"""Injection into constructors: interfaces, names, optional parameters, lists, defaults and instances.

Not here: settings (`test_settings_beans`), generic types (`test_generic_beans`), classes and producers
(`test_kinds_of_beans`), functions and lookups (`test_lookups`).
"""

from typing import Annotated, Any, Optional, Union

import pytest

from tests.di.payments import CardPayments, LookAlike, Payments, Shape, Square, named_card
from toolbox import (
    AmbiguousBeanError,
    Container,
    Instance,
    MissingBeanError,
    Named,
    application_scoped,
    dependent,
    produces,
    request_scoped,
)

pytestmark = pytest.mark.anyio


class InvoicePayments(Payments):
    def pay(self, amount: int) -> str:
        return f"invoice {amount}"


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
