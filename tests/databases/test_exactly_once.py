"""Tools that would lose their exactly-once in durable runs are problems at start; `reach` names the real ones."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Protocol

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from toolbox import (
    Container,
    IllegalConfigurationError,
    Inject,
    Named,
    ToolboxSettings,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.runs import RunStore
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call


def logged(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


@tool
@sql.transactional
async def debit(session: Inject[AsyncSession]) -> str:
    return "done"


@tool
@sql.transactional
def credit(session: Inject[Session]) -> str:
    return "done"


@tool
@logged
@sql.transactional
async def hidden(session: Inject[AsyncSession]) -> str:
    return "done"


@tool(on_unknown_outcome="tell")
@logged
@sql.transactional
async def excused(session: Inject[AsyncSession]) -> str:
    return "done"


@produces(scope="application", name="reports_engine")
async def other_engine() -> AsyncIterator[AsyncEngine]:
    async with sql.open_engine("sqlite://") as made:
        yield made


@produces(scope="call", name="reports")
async def other_session(engine: Annotated[AsyncEngine, Named("reports_engine")]) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as made:
        yield made


def container(tmp_path: Any, *tools: Any, more: tuple[Any, ...] = (), **options: Any) -> Container:
    options = {"durable": True, **options}

    @register_ai_service(tools=tools, **options)
    class Bank(Protocol):
        async def ask(self, text: str) -> str: ...

    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{tmp_path / 'bank.db'}"))
    made = Container(settings=settings, models={"default": ScriptedChatModel([])}, take_over_runs=False)
    return made.register(Bank, sql.engine, sql.SqlRunStore, sql.session, sql.sync_engine, sql.sync_session, *more)


def effects(made: Container) -> dict[str, tuple[str, ...]]:
    return {each.tool: each.effects for each in made.reach()}


def test_a_transaction_that_a_decorator_hides_is_a_problem(tmp_path: Any) -> None:
    [problem] = container(tmp_path, debit, hidden).check()

    assert problem.where == "hidden"
    assert "hides @sql.transactional" in problem.what
    assert "on_unknown_outcome" in problem.fix


def test_only_the_tools_own_option_excuses_it(tmp_path: Any) -> None:
    assert container(tmp_path, excused).check() == []
    assert len(container(tmp_path, hidden, on_unknown_outcome="ask").check()) == 1


def test_methods_that_are_not_durable_have_no_problem(tmp_path: Any) -> None:
    assert container(tmp_path, hidden, durable=False).check() == []


@tool
@sql.transactional(name="reports")
async def report() -> str:
    return "done"


class Ledger:
    def __init__(self, session: Annotated[AsyncSession, Named("reports")]) -> None:
        self.session = session

    @tool
    @sql.transactional
    async def write(self) -> str:
        return "done"


def test_another_engine_than_that_of_the_store_is_a_problem(tmp_path: Any) -> None:
    more = (other_engine, other_session, Ledger)
    problems = container(tmp_path, debit, report, Ledger, more=more).check()

    assert [each.where for each in problems] == ["report", "Ledger.write"]
    assert all("another engine than the RunStore" in each.what for each in problems)
    found = effects(container(tmp_path, debit, report, Ledger, more=more))
    assert (found["report"], found["write"]) == (("transactional",), ("transactional",))


# --- engines that are only known at start


def with_store(store: sql.SqlRunStore | None, *more: Any, tools: Any = debit, url: str = "sqlite://") -> Container:
    """Return a durable program: the store is this instance, or a bean that uses the engine of the settings."""

    @register_ai_service(tools=tools, durable=True)
    class Bank(Protocol):
        async def ask(self, text: str) -> str: ...

    models = {"default": ScriptedChatModel([])}
    made = Container(settings=ToolboxSettings(sql=SqlSettings(url=url)), models=models).register(Bank, *more)
    return made.register(sql.SqlRunStore) if store is None else made.register_instance(store, RunStore)


@produces(scope="application")
def engine_of_settings(settings: ToolboxSettings) -> Iterator[Engine]:
    assert settings.sql.url is not None
    with sql.open_sync_engine(settings.sql.url.get_secret_value()) as made:
        yield made


async def refused(made: Container, *places: str) -> None:
    with pytest.raises(IllegalConfigurationError) as raised:
        async with made:
            pass
    assert [each.where for each in raised.value.problems] == [*places]
    assert all("another engine than the RunStore" in each.what for each in raised.value.problems)
    assert all("on_unknown_outcome" in each.fix for each in raised.value.problems)


@pytest.mark.anyio
async def test_a_store_that_is_an_instance_has_another_engine_than_the_settings(tmp_path: Any) -> None:
    async with sql.open_engine(f"sqlite:///{tmp_path / 'runs.db'}") as engine:
        made = with_store(sql.SqlRunStore(engine), sql.engine, sql.session)
        assert made.check() == []

        await refused(made, "debit")


@pytest.mark.anyio
async def test_an_engine_that_is_an_instance_is_not_that_of_the_settings(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    with sql.open_sync_engine(f"sqlite:///{tmp_path / 'bank.db'}") as engine:
        more = sql.engine, sql.sync_session
        made = with_store(None, *more, tools=credit, url=url).register_instance(engine, Engine)

        await refused(made, "credit")


@pytest.mark.anyio
async def test_a_synchronous_engine_of_the_stores_database_keeps_exactly_once(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'bank.db'}"
    more = sql.engine, sql.sync_session, engine_of_settings
    async with with_store(None, *more, tools=credit, url=url) as here:
        assert here.is_started

    async with sql.open_engine(f"sqlite:///{tmp_path / 'runs.db'}") as engine:
        more = sql.sync_session, engine_of_settings
        await refused(with_store(sql.SqlRunStore(engine), *more, tools=credit, url=url), "credit")


@pytest.mark.anyio
async def test_one_engine_for_all_is_no_problem_also_if_it_is_an_instance(tmp_path: Any) -> None:
    async with sql.open_engine(f"sqlite:///{tmp_path / 'bank.db'}") as engine:
        store = sql.SqlRunStore(engine)

        @produces(scope="application")
        def same() -> AsyncEngine:
            return engine

        for made in (
            with_store(store, sql.session).register_instance(engine, AsyncEngine),
            with_store(store, sql.session, same),
        ):
            async with made as here:
                assert here.is_started


@pytest.mark.anyio
async def test_an_engine_that_replaces_another_one_counts(tmp_path: Any) -> None:
    async with (
        sql.open_engine(f"sqlite:///{tmp_path / 'runs.db'}") as other,
        sql.open_engine(f"sqlite:///{tmp_path / 'bank.db'}") as engine,
    ):
        made = with_store(sql.SqlRunStore(engine), sql.session).register_instance(engine, AsyncEngine)
        with made.override(AsyncEngine, other):
            await refused(made, "debit")


@pytest.mark.anyio
async def test_a_tool_of_an_inner_service_is_found_and_its_own_option_excuses_it(tmp_path: Any) -> None:
    @register_ai_service(tools=debit)
    class Inner(Protocol):
        @tool(name="debit")
        async def ask(self, text: str) -> str: ...

    @tool(on_unknown_outcome="ask")
    @sql.transactional
    async def asks(session: Inject[AsyncSession]) -> str:
        return "done"

    async with sql.open_engine(f"sqlite:///{tmp_path / 'runs.db'}") as engine:
        store = sql.SqlRunStore(engine)
        await refused(with_store(store, Inner, sql.engine, sql.session, tools=Inner), "debit")
        async with with_store(store, sql.engine, sql.session, tools=asks) as here:
            assert here.is_started


@pytest.mark.anyio
@pytest.mark.parametrize("excused", [False, True])
async def test_an_engine_that_only_a_session_knows_is_reported_when_the_tool_runs(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, excused: bool
) -> None:
    @produces(scope="call")
    def own_session() -> AsyncSession:
        return AsyncSession(other)

    @sql.transactional
    async def own(session: Inject[AsyncSession]) -> str:
        return "done"

    of_tool: dict[str, Any] = {"on_unknown_outcome": "tell"} if excused else {}

    @register_ai_service(tools=tool(name="debit", **of_tool)(own), durable=True)
    class Bank(Protocol):
        async def ask(self, text: str) -> str: ...

    async with (
        sql.open_engine(f"sqlite:///{tmp_path / 'runs.db'}") as engine,
        sql.open_engine(f"sqlite:///{tmp_path / 'bank.db'}") as other,
    ):
        made = Container(models={"default": ScriptedChatModel([tool_call("debit"), "done"])})
        made.register(Bank, own_session).register_instance(sql.SqlRunStore(engine), RunStore)
        async with made as here:
            assert await here.get(Bank).ask("debit") == "done"

    warnings = [each.getMessage() for each in caplog.records if "exactly once" in each.getMessage()]
    assert len(warnings) == (0 if excused else 1)
    assert all("another engine than the RunStore" in each and "on_unknown_outcome" in each for each in warnings)


def test_an_engine_that_is_not_known_is_no_problem(tmp_path: Any) -> None:
    @produces(scope="call", name="reports")
    def own_session() -> AsyncSession:
        return AsyncSession()

    made = container(tmp_path, report, more=(own_session,))
    assert made.check() == []
    assert effects(made)["report"] == ("transactional",)


def test_reach_names_the_tools_that_take_effect_exactly_once(tmp_path: Any) -> None:
    found = effects(container(tmp_path, debit, credit, excused))

    assert found["debit"] == found["credit"] == ("transactional", "exactly once")
    assert found["excused"] == ("transactional",)
    assert effects(container(tmp_path, debit, durable=False))["debit"] == ("transactional",)


def test_the_default_of_a_service_is_checked(tmp_path: Any) -> None:
    with (
        pytest.raises(IllegalConfigurationError, match="invalid on_unknown_outcome='never'"),
        container(tmp_path, debit, on_unknown_outcome="never"),
    ):
        pass
