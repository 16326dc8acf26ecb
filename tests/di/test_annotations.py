"""Annotations as text, with names of a module, a function or another module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar

import pytest

from toolbox import Container, Instance, Named, application_scoped, produces

pytestmark = pytest.mark.anyio

T = TypeVar("T")


class Payments(Protocol):
    def pay(self) -> str: ...


class Checkout:
    def __init__(self, payments: Payments, named: Annotated[Later | None, Named("x")], all: list[Later]) -> None:  # noqa: A002
        self.payments, self.named, self.all = payments, named, all


class Later:
    pass


class CardPayments(Payments):
    def pay(self) -> str:
        return "card"


async def test_annotations_can_name_classes_that_are_defined_later() -> None:
    async with Container().register(Checkout, CardPayments, Later) as c:
        assert isinstance(c.get(Checkout).payments, CardPayments)
        assert c.get(Checkout).named is None
        assert len(c.get(Checkout).all) == 1


async def test_annotations_can_name_classes_inside_a_function() -> None:
    class Local:
        pass

    class Port(Protocol):
        def open(self) -> None: ...

    class Adapter(Port):
        def open(self) -> None: ...

    @dataclass
    class Uses:
        local: Local
        port: Port
        lazy: Instance[Local]
        maybe: Local | None = None

    @produces(scope="application")
    def made(local: Local) -> Made:
        return Made(local)

    class Made:
        def __init__(self, local: Local) -> None:
            self.local = local

    @produces(scope="application", name="second")
    def second(made: Made) -> Made:
        return made

    async with Container().register(Local, Adapter, Uses).bind(Made, Made) as c:
        uses = c.get(Uses)
        assert isinstance(uses.local, Local)
        assert isinstance(uses.port, Adapter)
        assert isinstance(uses.lazy.get(), Local)
        assert isinstance(uses.maybe, Local)
        assert c.call(_takes_local, local=1) == 1
        assert isinstance(c.get(Made).local, Local)


def _takes_local(local: Local) -> object:  # type: ignore[name-defined]  # noqa: F821 - local to another function
    return local


async def test_a_local_class_takes_precedence_over_a_module_class() -> None:
    class Later:
        pass

    class Uses:
        def __init__(self, later: Later) -> None:
            self.later = later

    async with Container().register(Later, Uses) as c:
        assert type(c.get(Uses).later) is Later


async def test_annotations_can_name_nested_classes() -> None:
    class Outer:
        class Inner:
            pass

        def __init__(self, inner: Inner) -> None:
            self.inner = inner

    async with Container().register(Outer, Outer.Inner) as c:
        assert isinstance(c.get(Outer).inner, Outer.Inner)


class Repository(Generic[T]):
    pass


class User:
    pass


class UserRepository(Repository[User]):
    pass


class Service(Generic[T]):
    def __init__(self, repository: Repository[T], instance: Instance[Repository[T]]) -> None:
        self.repository, self.instance = repository, instance


class UserService(Service[User]):
    pass


async def test_annotations_can_name_generic_types() -> None:
    async with Container().register(UserRepository, UserService) as c:
        assert isinstance(c.get(UserService).repository, UserRepository)
        assert isinstance(c.get(UserService).instance.get(), UserRepository)
    async with Container().register(UserRepository, Service) as c:
        assert isinstance(c.get(Service[User]).instance.get(), UserRepository)


async def test_inherited_fields_are_resolved_in_the_module_of_their_class(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import sys

    (tmp_path / "inherited_fields.py").write_text(  # type: ignore[operator]  # a Path
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "class Hidden: ...\n"
        "@dataclass\n"
        "class Base:\n"
        "    hidden: Hidden\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("inherited_fields")

    @dataclass
    class Derived(module.Base):  # type: ignore[name-defined, misc]  # written above
        later: Later

    async with Container().register(Derived, Later, module.Hidden) as c:
        assert isinstance(c.get(Derived).hidden, module.Hidden)
    sys.modules.pop("inherited_fields")


async def test_an_invalid_annotation_does_not_hide_other_problems() -> None:
    @application_scoped
    class Uses:
        def __init__(self, bad: Nowhere, worse: list[1 / 0], missing: Later) -> None: ...  # type: ignore  # noqa: F821

    problems = Container().register(Uses).check()

    assert [problem.where for problem in problems] == ["Uses.bad", "Uses.worse", "Uses.missing"]
