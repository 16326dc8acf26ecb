"""Starting, stopping and restarting containers; registration, scanning and descriptions."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from toolbox import (
    Container,
    ContainerNotStartedError,
    IllegalConfigurationError,
    Instance,
    application_scoped,
    dependent,
    produces,
    request_scoped,
)
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio


@application_scoped
class Pool:
    pass


@request_scoped
class Basket:
    def __init__(self, pool: Pool, later: Instance[Pool]) -> None: ...


async def test_a_container_can_be_started_again() -> None:
    opened: list[int] = []

    @produces(scope="application")
    async def connection() -> AsyncIterator[float]:
        opened.append(1)
        yield 1.0
        opened.append(-1)

    c = Container().register(Pool, connection)
    async with c:
        first = c.get(Pool)
    c.register(Basket)
    async with c:
        assert c.get(Pool) is not first
    assert opened == [1, -1, 1, -1]

    def synchronously() -> Pool:
        with c:
            return c.get(Pool)

    assert await asyncio.to_thread(synchronously) is not first


async def test_registration_after_start_is_rejected() -> None:
    async with Container().register(Pool) as c:
        for attempt in (
            lambda: c.register(Basket),
            lambda: c.register_instance(1),
            lambda: c.bind(object, Pool),
            lambda: c.scan(__name__),
            lambda: c.include(object()),
        ):
            with pytest.raises(IllegalConfigurationError, match="before the start"):
                attempt()
        with pytest.raises(IllegalConfigurationError, match="started"):
            async with c:
                pass
        assert c.get(Pool) is c.get(Pool)


async def test_registering_twice_has_no_effect() -> None:
    number = 5
    c = Container().register(Pool, Pool).register(Pool).register_instance(number).register_instance(number)
    async with c:
        assert len(c.get(list[Pool])) == 1
        assert c.get(list[int]) == [5]


async def test_registered_instances_are_beans() -> None:
    class Base:
        pass

    class Derived(Base):
        pass

    one, two, three = Derived(), Derived(), Derived()
    c = Container().register_instance(one).register_instance(two, as_type=Base).register_instance(three, name="three")
    async with c:
        assert c.get(Derived) is one
        assert c.get(Base) is two
        assert c.get(Base, "three") is three


async def test_a_failed_start_closes_the_created_beans() -> None:
    log: list[str] = []

    @produces(scope="application")
    async def first() -> AsyncIterator[int]:
        try:
            yield 1
        except OSError:
            log.append("closed")
            raise

    @produces(scope="application")
    async def second(first: int) -> str:
        raise OSError("no server")

    c = Container().register(first, second)
    with pytest.raises(OSError, match="no server"):
        async with c:
            raise AssertionError("it must not start")
    assert log == ["closed"]
    with pytest.raises(ContainerNotStartedError):
        c.get(int)


def test_a_failed_synchronous_start_leaves_no_threads() -> None:
    import threading

    @produces(scope="application")
    async def failing() -> str:
        raise OSError("no server")

    c = Container().register(failing)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no server"), c:
        pass
    assert set(threading.enumerate()) <= before


def test_a_program_without_an_event_loop_can_use_a_container() -> None:
    @produces(scope="application")
    async def connection() -> AsyncIterator[float]:
        await asyncio.sleep(0)
        yield 1.5

    with Container().register(connection, Pool, Basket) as c:
        assert c.get(float) == 1.5
        with c.request_scope():
            assert c.get(Basket) is c.get(Basket)
        assert asyncio.run(c.aget(float)) == 1.5


async def test_beans_can_be_looked_up_while_the_container_stops() -> None:
    seen: list[bool] = []

    @application_scoped
    class Last:
        def __init__(self, container: Container, pool: Pool) -> None:
            self.container, self.pool = container, pool

        def stop(self) -> None:
            seen.append(self.container.get(Pool) is self.pool)

    async with Container().register(Pool, Last) as c:
        c.get(Last)
    assert seen == [True]


async def test_errors_while_stopping_are_raised_as_one_group() -> None:
    @application_scoped
    class Broken:
        def stop(self) -> None:
            raise OSError("one")

    @produces(scope="application")
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("two")

    c = Container().register(Broken, broken)
    with pytest.raises(ExceptionGroup) as raised:
        async with c:
            c.get(Broken)
            c.get(int)
    assert [type(each) for each in raised.value.exceptions] == [KeyError, OSError]
    with pytest.raises(ContainerNotStartedError):
        c.get(Broken)


# --- scanning


def test_scan_registers_the_marked_classes_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "scanned_app"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from toolbox import application_scoped\n")
    (package / "__main__.py").write_text("raise SystemExit('a program')\n")
    (package / "beans.py").write_text(
        "from decimal import Decimal\n"
        "from toolbox import application_scoped, produces\n"
        "@application_scoped\nclass Shop: ...\n"
        "class Plain: ...\n"
        "@produces()\ndef price() -> Decimal: return Decimal(1)\n"
    )
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "more.py").write_text(
        "from scanned_app.beans import Shop\n"
        "from toolbox import request_scoped, tool\n"
        "@request_scoped\nclass Basket:\n    def __init__(self, shop: Shop): ...\n"
        "from abc import ABC, abstractmethod\n"
        "class Tools(ABC):\n    @tool\n    def add(self, a: int) -> int: return a\n"
        "    @abstractmethod\n    def name(self) -> str: ...\n"
        "class Calculator(Tools):\n    def name(self) -> str: return ''\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    container = Container().scan("scanned_app")

    assert container.check() == []
    types = {bean.type for bean in internals_of(container).describe()}
    assert {"Shop", "Decimal", "Basket", "Calculator"} <= types
    assert types.isdisjoint({"Plain", "Tools"})
    module = sys.modules["scanned_app.beans"]
    assert "Decimal" in {bean.type for bean in internals_of(Container().scan(module)).describe()}
    assert "Basket" not in {bean.type for bean in internals_of(Container().scan(module)).describe()}
    for name in [name for name in sys.modules if name.startswith("scanned_app")]:
        del sys.modules[name]


def test_scan_raises_the_error_of_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken_app"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beans.py").write_text("import does_not_exist_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        Container().scan("broken_app")
    del sys.modules["broken_app"]


# --- the graph as data


def test_the_graph_is_available_as_data() -> None:
    @dependent
    class Line:
        def __init__(self, basket: Basket, pools: list[Pool], amount: int = 3) -> None: ...

    @produces(scope="application", name="main")
    async def connection(pool: Pool) -> AsyncIterator[float]:
        yield 1.0

    beans = {
        bean.name: bean
        for bean in internals_of(Container(seeds=(bytes,)).register(Pool, Basket, Line, connection)).describe()
    }

    assert beans["line"].dependencies == {"basket": ("basket",), "pools": ("pool",)}
    assert beans["basket"].lazy == {"later": ("pool",)}
    assert beans["main"].scope == "application"
    assert beans["main"].type == "float"
    assert beans["main"].made_by == "async generator connection"
    assert beans["bytes"].made_by == "seed"
    assert beans["container"].made_by == "instance"


def test_an_invalid_graph_can_be_described() -> None:
    class Broken:
        def __init__(self, missing: bytes, two: Pool) -> None: ...

    beans = {bean.name: bean for bean in internals_of(Container().register(Broken, Pool)).describe()}

    assert beans["broken"].dependencies == {"two": ("pool",)}


def test_invalid_scope_decorators_are_rejected() -> None:
    with pytest.raises(TypeError, match="two scopes"):
        request_scoped(Pool)
    assert application_scoped(Pool) is Pool
    with pytest.raises(TypeError, match="produces"):
        application_scoped(lambda: 1)  # type: ignore[type-var]  # what this is about
    with pytest.raises(ValueError):
        produces(scope="session")  # type: ignore[arg-type]  # what this is about

    class Heir(Pool):
        pass

    [heir] = [bean for bean in internals_of(Container().register(Heir)).describe() if bean.type == "Heir"]
    assert heir.scope == "dependent"
