"""Lookups of beans: from functions, by annotated types, of seeds, and of beans that may be missing."""

import asyncio
import pickle
from typing import Annotated, Any

import pytest

from tests.di.conftest import call_scope
from tests.di.payments import CardPayments, Heir, LookAlike, Order, Payments, Shape, Square, User, named_card
from toolbox import (
    Container,
    ContainerNotStartedError,
    IllegalConfigurationError,
    Inject,
    Instance,
    MissingBeanError,
    application_scoped,
    dependent,
    produces,
    request_scoped,
)
from toolbox.container import internals_of
from toolbox.di import resolvers

pytestmark = pytest.mark.anyio


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


class Preferences(dict[str, str]):
    """A seed that cannot be hashed."""


def test_code_for_a_default_that_cannot_be_hashed_is_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = Preferences(language="de"), Preferences(language="de")
    generated: list[object] = []

    def note_and_compile(source: Any, *rest: Any) -> Any:
        generated.append(source)
        return compile(source, *rest)

    def show(preferences: Preferences = own) -> Preferences:
        return preferences

    def show_other(preferences: Preferences = other) -> Preferences:
        return preferences

    monkeypatch.setattr(resolvers, "compile", note_and_compile, raising=False)
    with Container(seeds=[Preferences]) as container:
        assert container.call(show) is own
        assert container.call(show_other) is other
        count = len(generated)
        assert count > 0

        assert container.call(show) is own
        assert container.call(show_other) is other
        with container.request_scope({Preferences: Preferences(language="en")}):
            assert container.call(show) == {"language": "en"}
        assert len(generated) == count


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


@pytest.mark.parametrize("seeds", [{}, {User: User()}])
async def test_a_tool_gets_its_own_async_bean_where_its_request_has_one_too(seeds: dict[type, Any]) -> None:
    @produces(scope="call")
    async def session(user: User | None) -> bytearray:
        return bytearray(b"of a user" if user is not None else b"")

    class Uses:
        def __init__(self, session: bytearray) -> None:
            self.session = session

    async with Container(seeds=[User]).register(session, Uses) as c, c.request_scope(seeds):
        of_request = (await c.aget(Uses)).session
        with call_scope(c):
            await internals_of(c).prepare(Uses)
            of_call = c.get(Uses).session
            assert of_call is c.get(bytearray) is not of_request
        assert c.get(bytearray) is of_request
        assert of_request == of_call == (b"of a user" if seeds else b"")


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
