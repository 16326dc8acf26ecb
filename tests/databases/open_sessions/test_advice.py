"""The warning about a session that is kept says what to do, which depends on the cause."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tests.databases.open_sessions.desk import Desk, Order, Start, User, change, session_of
from toolbox import OpenTransactionError, sql

pytestmark = pytest.mark.anyio

KEEP = "or keep it on purpose: `with sql.keep_transaction():`"
LATER = "after the call, or for each transaction in the engine's `begin` event"


async def begin(session: AsyncSession) -> Any:
    return await session.begin()


async def begin_savepoint(session: AsyncSession) -> Any:
    return await session.begin_nested()


async def fail(session: AsyncSession) -> None:
    session.add(Order(id=1000, user_id=7))
    with pytest.raises(IntegrityError):
        await session.flush()


@sql.transactional
async def ask_inside(session: AsyncSession, desk: Desk) -> None:
    await session.get_one(User, 7)
    await desk.chat("?")


def executes(statement: Any) -> Callable[[AsyncSession], Awaitable[Any]]:
    return lambda session: session.execute(text(statement) if isinstance(statement, str) else statement)


CAUSES = [
    (change, "commit before the call"),
    (executes(insert(Order).values(user_id=7)), "commit before the call"),
    (executes("UPDATE users SET name = 'Bob'"), "commit before the call"),
    (executes("NOTIFY a"), "commit before the call"),
    (executes(select(func.pg_notify("a", "b"))), "commit before the call"),
    (executes("SELECT abs(-1)"), "commit before the call if that loses nothing"),
    (executes(select(User).with_for_update()), "commit before the call and lock again after it"),
    (executes("SELECT name FROM users FOR SHARE"), "commit before the call and lock again after it"),
    (executes("LOCK TABLE users"), "commit before the call and lock again after it"),
    (executes(select(func.pg_advisory_xact_lock(1))), "commit before the call and lock again after it"),
    (executes(select(func.pg_export_snapshot())), "commit before the call and read again after it"),
    (
        lambda session: session.connection(execution_options={"isolation_level": "SERIALIZABLE"}),
        "commit before the call and read again after it",
    ),
    (executes("SET LOCAL app.tenant = 'a'"), f"run SET {LATER}"),
    (executes("SET app.tenant = 'a'"), f"run SET {LATER}"),
    (executes("RESET app.tenant"), f"run RESET {LATER}"),
    (executes("SELECT set_config('app.tenant', 'a', true)"), f"run set_config {LATER}"),
    (executes(select(func.set_config("app.tenant", "a", True))), f"run set_config {LATER}"),
    (executes("DECLARE c CURSOR FOR SELECT 1"), f"run DECLARE {LATER}"),
    (executes("CREATE TEMPORARY TABLE more (id INT) ON COMMIT DROP"), f"run CREATE TEMPORARY {LATER}"),
    (executes("LISTEN a"), f"run LISTEN {LATER}"),
    (begin, "commit before the call, where its block ends"),
    (begin_savepoint, "commit before the call, where its block ends"),
    (fail, "roll back before the call"),
]


@pytest.fixture
def database_url(postgres_url: str) -> str:
    return postgres_url


@pytest.mark.parametrize(("do", "fix"), CAUSES)
async def test_the_advice_fits_its_cause(
    do: Callable[[AsyncSession], Awaitable[Any]], fix: str, start: Start, warnings: list[str]
) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        kept = await do(session)
        await program.ask()
        await session.rollback()
        del kept
    [warning] = warnings
    assert warning.endswith(f"); {fix}, {KEEP}")


async def test_several_causes_have_several_fixes(start: Start, warnings: list[str]) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        await session.execute(text("SET LOCAL app.tenant = 'a'"))
        await session.execute(select(User).with_for_update())
        await change(session)
        await program.ask()
        await session.rollback()
    [warning] = warnings
    assert warning.endswith(f"); run SET {LATER}; commit before the call and lock again after it, {KEEP}")


async def test_the_advice_for_a_transactional_function_is_to_call_the_model_outside(
    start: Start, warnings: list[str]
) -> None:
    async with start() as program, program.container.request_scope():
        await ask_inside(await session_of(program), program.desk)
    [warning] = warnings
    assert warning.endswith(f"); call the model outside of this function, {KEEP}")


async def test_the_error_has_the_advice_as_a_fact(start: Start) -> None:
    async with start(while_a_model_works="raise") as program, program.container.request_scope():
        session = await session_of(program)
        await session.execute(text("SET LOCAL app.tenant = 'a'"))
        with pytest.raises(OpenTransactionError) as raised:
            await program.ask()
        assert (raised.value.what, raised.value.fix) == ("SET", f"run SET {LATER}")
        await session.rollback()
