"""Which beans a type finds: bindings, collections, unions, generic types, and producers that return None."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NewType, Optional, Protocol, Self, TypeVar

import pytest
from dependency_injector import containers, providers

from toolbox import (
    Container,
    IllegalConfigurationError,
    Instance,
    MissingBeanError,
    Named,
    application_scoped,
    produces,
)

pytestmark = pytest.mark.anyio

T = TypeVar("T")


class Loose(Protocol):
    def send(self, text: str) -> str: ...


class Base:
    def send(self, text: str) -> str:
        return text


class Sub(Base):
    pass


class Other(Base):
    pass


class Mute:
    pass


class Dials:
    def __init__(self) -> None:
        self.number = 1


class Dialling(Protocol):
    number: int


def texts(container: Container) -> list[str]:
    return [str(each) for each in container.check()]


# --- bind


def test_bind_points_to_a_subclass_that_provides_the_implementation() -> None:
    with Container().register(Sub).bind(Loose, Base) as c:
        assert type(c.get(Loose)) is type(c.get(Base)) is Sub
        assert [type(each) for each in c.get(list[Base])] == [Sub]


def test_bind_points_to_a_producer_of_the_implementation() -> None:
    @produces(scope="application")
    def base() -> Base:
        return Sub()

    with Container().register(base).bind(Loose, Base) as c:
        assert c.get(Loose) is c.get(Base)
        assert len(c.get(list[Base])) == 1


@pytest.mark.parametrize("is_reversed", [False, True])
def test_bind_points_to_another_bind(is_reversed: bool) -> None:
    class Upper(Protocol):
        def send(self, text: str) -> str: ...

    container = Container()
    binds: list[tuple[Any, Any]] = [(Upper, Loose), (Loose, Sub)]
    for interface, implementation in reversed(binds) if is_reversed else binds:
        container.bind(interface, implementation)
    with container as c:
        assert isinstance(c.get(Upper), Sub)
        assert len(c.get(list[Upper])) == 1


def test_bind_to_an_interface_that_has_a_bean() -> None:
    class Sender(ABC):
        @abstractmethod
        def send(self, text: str) -> str: ...

    class Mail(Sender):
        def send(self, text: str) -> str:
            return "mail"

    with Container().register(Mail).bind(Loose, Sender) as c:
        assert c.get(Loose).send("") == "mail"


def test_an_implementation_that_nothing_provides_is_registered() -> None:
    with Container().register(Other).bind(Loose, Sub) as c:
        assert isinstance(c.get(Loose), Sub)
        assert isinstance(c.get(Sub), Sub)


def test_an_ambiguous_implementation_is_reported() -> None:
    [problem] = Container().register(Sub, Other).bind(Loose, Base).check()
    assert problem.where == "bind(Loose, Base)"
    assert "multiple beans provide Base: Sub, Other" in problem.what


def test_bindings_in_a_cycle_are_reported() -> None:
    class Upper(Protocol):
        def send(self, text: str) -> str: ...

    container = Container().bind(Upper, Loose).bind(Loose, Upper)
    assert [each.where for each in container.check()] == ["bind(Upper, Loose)", "bind(Loose, Upper)"]


def test_a_bound_class_that_lacks_methods_is_reported() -> None:
    container = Container().bind(Loose, Mute).bind(Base, Mute)  # type: ignore[arg-type]  # the mistake
    first, second = container.check()
    assert (first.where, first.what) == ("bind(Loose, Mute)", "Mute has no send, which Loose requires")
    assert (second.where, second.what) == ("bind(Base, Mute)", "Mute is not a subclass of Base")
    assert "register_instance(…, as_type=Loose)" in first.fix


def test_a_bound_class_must_be_callable_where_its_protocol_is() -> None:
    class Converts(Protocol):
        def __call__(self, text: str) -> int: ...

    class Length:
        def __call__(self, text: str) -> int:
            return len(text)

    assert Container().bind(Converts, Length).check() == []
    [problem] = Container().bind(Converts, Mute).check()  # type: ignore[arg-type]  # the mistake
    assert problem.what == "Mute has no __call__, which Converts requires"


def test_a_bound_producer_must_return_an_implementation() -> None:
    @produces()
    def mute() -> Mute:
        return Mute()

    [problem] = Container().bind(Loose, mute).check()  # type: ignore[arg-type]  # the mistake
    assert "Mute has no send" in problem.what


def test_attributes_that_only_instances_have_satisfy_a_bound_protocol() -> None:
    with Container().bind(Dialling, Dials) as c:
        assert c.get(Dialling).number == 1


def test_virtual_subclasses_and_fakes_can_be_bound() -> None:
    class Abstract(ABC):  # noqa: B024 - has only virtual subclasses
        pass

    Abstract.register(Mute)
    with Container().bind(Abstract, Mute).register_instance(Mute(), as_type=Loose) as c:  # type: ignore[type-var]
        assert isinstance(c.get(Abstract), Mute)
        assert isinstance(c.get(Loose), Mute)


class Store(Protocol[T]):
    def all(self) -> list[T]: ...


class Memory(Generic[T]):
    def __init__(self, of: type[T] | None = None) -> None:
        self.of = of

    def all(self) -> list[T]:
        return []


@dataclass
class Needs(Generic[T]):
    item: T

    def all(self) -> list[T]:
        return [self.item]


class Repository(Generic[T]):
    pass


class Sql(Repository[T]):
    def __init__(self, item: T) -> None:
        self.item = item


class InMemory(Repository[T]):
    pass


def test_a_generic_implementation_serves_each_parametrization() -> None:
    class Uses:
        def __init__(self, base: Store[Base], mute: Store[Mute]) -> None:
            self.stores = base, mute

    with Container().bind(Store, Memory).register(Uses) as c:
        base, mute = c.get(Uses).stores
        assert isinstance(base, Memory)
        assert isinstance(mute, Memory)
        assert isinstance(c.get(Store[int]), Memory)


@pytest.mark.parametrize("name", [None, "kept"])
def test_a_generic_implementation_gets_the_type_arguments(name: str | None) -> None:
    with Container().register(Base, Mute).bind(Store, Needs, name) as c:
        assert isinstance(c.get(Store[Base], name), Needs)
        assert type(c.get(Store[Base], name).all()[0]) is Base
        assert type(c.get(Store[Mute], name).all()[0]) is Mute


def test_bind_selects_one_of_several_generic_implementations() -> None:
    with Container().register(Base, InMemory).bind(Repository, Sql) as c:
        assert isinstance(c.get(Repository[Base]), Sql)
    with Container().register(Base, InMemory).bind(Repository[Base], Sql) as c:
        assert isinstance(c.get(Repository[Base]), Sql)
        assert isinstance(c.get(Repository[int]), InMemory)


# --- producers of unions, generic types and Self


@produces(scope="application")
def one_of_two() -> Sub | Other:
    return Other()


def test_a_producer_of_a_union_is_found() -> None:
    class Uses:
        def __init__(self, same: Other | Sub, wider: Sub | Other | Mute, base: Base) -> None:
            self.found = same, wider, base

    with Container().register(one_of_two, Uses) as c:
        found = c.get(Sub | Other)
        assert isinstance(found, Other)
        assert c.get(Uses).found == (found, found, found)
        assert c.get(list[Base]) == [found]
        with pytest.raises(MissingBeanError):
            c.get(Other)


def test_a_producer_with_free_type_variables_is_reported() -> None:
    @produces()
    def memory() -> Memory[T]:
        return Memory()

    @produces()
    def anything() -> Iterator[T]:
        yield Memory()  # type: ignore[misc]  # any value

    first, second = Container().register(memory, anything).check()
    assert "memory" in first.where
    assert first.what == "the producer returns Memory[T], which has free type variables"
    assert "the producer returns T" in second.what


def test_a_producer_of_a_generic_class_is_not_replaced_by_the_class() -> None:
    @produces(scope="application")
    def memory() -> Memory:  # type: ignore[type-arg]  # without arguments
        return Memory()

    with Container().register(memory) as c:
        assert c.get(Memory) is c.get(Memory)
        with pytest.raises(MissingBeanError):
            c.get(Memory[int])


class Made:
    @classmethod
    @produces(scope="application")
    def make(cls) -> Self:
        return cls()

    @classmethod
    @produces(scope="application", name="opened")
    def opened(cls) -> Iterator[Self | None]:
        yield cls()

    @produces(scope="application", name="above")
    @classmethod
    def above(cls) -> Self:
        return cls()


class Inherits(Made):
    pass


def test_a_class_method_that_returns_self_is_a_producer() -> None:
    with Container().register(Made.make, Made.make, Inherits.opened, Made.above) as c:
        assert type(c.get(Annotated[Made, Named("above")])) is Made
        assert type(c.get(Annotated[Made, Named("opened")])) is Inherits
        assert type(c.get(Inherits)) is Inherits
        assert type(c.get(Made)) is Made
        assert len(c.get(list[Made])) == 3


def test_self_outside_of_a_class_method_is_reported() -> None:
    class Owner:
        @staticmethod
        @produces()
        def make() -> Self:  # type: ignore[misc]  # the mistake
            raise NotImplementedError

    [problem] = Container().register(Owner.make).check()
    assert problem.what == "Self needs a class method"


def test_a_bound_method_cannot_be_marked_as_a_producer() -> None:
    with pytest.raises(TypeError, match=r"does not support bound methods, got Base\.send"):
        produces()(Base().send)


def test_a_built_in_function_cannot_be_marked_as_a_producer() -> None:
    with pytest.raises(TypeError, match="expected a Python function, got <built-in function len>"):
        produces()(len)


# --- collections


class UsesCollections:
    def __init__(
        self,
        sequence: Sequence[Base],
        collection: Collection[Base],
        iterable: Iterable[Base],
        many: tuple[Base, ...],
        mapping: Mapping[str, Base],
        maybe: Sequence[Base] | None,
        kept: Sequence[int] = (1,),
    ) -> None:
        self.lists = sequence, collection, iterable, many, maybe
        self.mapping, self.kept = mapping, kept


@produces(scope="application", name="second")
def second() -> Other:
    return Other()


async def test_all_collections_of_beans_are_injected() -> None:
    async with Container().register(application_scoped(Sub), second, UsesCollections) as c:
        both = c.get(list[Base])
        uses = c.get(UsesCollections)
        assert uses.lists == (both, both, both, tuple(both), both)
        assert uses.mapping == {"second": both[1]}
        assert uses.kept == (1,)
        assert await c.aget(tuple[Base, ...]) == tuple(both)
        assert c.get(Mapping[str, Base]) == uses.mapping


async def test_a_producer_of_the_collection_takes_precedence() -> None:
    @produces()
    def numbers() -> list[int]:
        return [1, 2]

    @produces()
    def names() -> Sequence[str]:
        return ("a",)

    @produces()
    def pair() -> tuple[float, ...]:
        return (0.5,)

    async with Container().register(numbers, names, pair) as c:
        assert c.get(Sequence[int]) == [1, 2]
        assert c.get(Sequence[str]) == ("a",)
        assert c.get(tuple[float, ...]) == (0.5,)


def test_a_collection_of_lookups_is_reported() -> None:
    class Uses:
        def __init__(self, each: tuple[Instance[Base], ...], by_name: Mapping[str, Instance[Base]]) -> None: ...

    first, second = Container().register(Uses, Base).check()
    assert first.fix == "write Instance[tuple[Base, ...]]"
    assert second.fix == "write Instance[Mapping[str, Base]]"


def test_nothing_provides_abc() -> None:
    class Sender(ABC):  # noqa: B024 - only its base is used
        pass

    class Mail(Sender):
        pass

    with Container().register(Mail) as c:
        assert isinstance(c.get(Sender), Mail)
        assert c.get(list[ABC]) == []
        with pytest.raises(MissingBeanError):
            c.get(ABC)


# --- producers that return None


@produces(scope="application", name="nothing")
def nothing() -> Sub | None:
    return None


@produces(name="none awaited")
async def nothing_awaited() -> Optional[Other]:  # noqa: UP045 - the older spelling
    return None


async def test_collections_leave_out_none() -> None:
    async with Container().register(nothing, nothing_awaited, second) as c:
        assert [type(each) for each in await c.aget(list[Base])] == [Other]
        assert [type(each) for each in await c.aget(tuple[Base, ...])] == [Other]
        assert list(await c.aget(dict[str, Base])) == ["second"]
        assert c.get(list[Sub]) == []


async def test_a_producers_none_is_missing_where_the_type_is_required() -> None:
    class Requires:
        def __init__(self, sub: Sub) -> None: ...

    class Accepts:
        def __init__(self, sub: Sub | None, other: Other | None) -> None:
            self.found = sub, other

    class Defaults:
        def __init__(self, sub: Sub = Sub()) -> None:  # noqa: B008 - compared by identity
            self.sub = sub

    async with Container().register(nothing, nothing_awaited, Requires, Accepts, Defaults) as c:
        assert (await c.aget(Accepts)).found == (None, None)
        assert isinstance(c.get(Defaults).sub, Sub)
        assert c.get(Sub | None) is None
        assert await c.aget(Other | None) is None
        for wanted in (Sub, Requires):
            with pytest.raises(MissingBeanError, match=r"take `Sub \| None`"):
                c.get(wanted)
        with pytest.raises(MissingBeanError, match=r"take `Other \| None`"):
            await c.aget(Other)


UserId = NewType("UserId", int)


def find_sub(there: bool = True) -> Sub | None:
    return Sub() if there else None


def find_other() -> Optional[Other]:  # noqa: UP045 - the older spelling
    return None


def find_user() -> UserId:
    return UserId(7)


async def test_optional_types_and_new_types_of_included_providers() -> None:
    class Legacy(containers.DeclarativeContainer):
        sub = providers.Singleton(find_sub)
        other = providers.Callable(find_other)
        user = providers.Factory(find_user)

    async with Container().include(Legacy()) as c:
        assert isinstance(c.get(Sub), Sub)
        assert c.get(Sub | None) is c.get(Sub)
        assert c.get(Other | None) is None
        with pytest.raises(MissingBeanError):
            c.get(Other)
        assert c.get(UserId) == 7
        assert c.get(list[Base]) == [c.get(Sub)]


# --- texts


def test_a_producer_with_a_wider_annotation_is_named() -> None:
    @produces()
    def mailer() -> Base:
        return Sub()

    class Uses:
        def __init__(self, sub: Sub) -> None: ...

    container = Container().register(mailer, Uses)
    [problem] = container.check()
    assert "mailer returns Sub, annotate it so: it says Base" in problem.fix
    with pytest.raises(IllegalConfigurationError):
        container.__enter__()
    with Container().register(mailer) as c, pytest.raises(MissingBeanError, match="annotate it so"):
        c.get(Sub)


def test_beans_of_the_container_itself_are_not_suggested_for_a_protocol() -> None:
    class Copies(Protocol):
        def model_copy(self) -> object: ...

    class Uses:
        def __init__(self, each: Iterator[Base], copies: Copies) -> None: ...

    for text in texts(Container().register(Uses)):
        assert "ToolboxSettings" not in text
        assert "bind(" not in text
