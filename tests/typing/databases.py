"""Types of transactional functions and of sessions: type checkers see the same types as without the mark."""

from typing import assert_type

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from toolbox import sql, tool
from toolbox.interceptors import before_model_request


class Notes:
    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    @tool
    @sql.transactional
    async def count(self, kind: str = "all") -> int:
        return len(kind)

    @sql.transactional(isolation="SERIALIZABLE")
    def written(self, note: str) -> str:
        return note


async def a_transactional_function_keeps_its_type(notes: Notes) -> None:
    assert_type(await notes.count("new"), int)
    assert_type(notes.written("a"), str)


async def sessions_are_those_of_their_engine(engine: AsyncEngine, sync_engine: Engine) -> None:
    async with sql.open_session(engine) as session:
        assert_type(session, AsyncSession)
    with sql.open_session(sync_engine) as sync_session:
        assert_type(sync_session, Session)
    with sql.keep_transaction() as kept:
        assert_type(kept, None)


class Basket:
    @before_model_request
    async def unlock(self) -> int:
        return 1


async def a_marked_method_keeps_its_type(basket: Basket) -> None:
    assert_type(await basket.unlock(), int)
