"""Tools that would lose their exactly-once in durable runs are problems at start; `reach` names the real ones."""

import functools
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Protocol

import pytest
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
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel


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
