"""Types of transactional functions: type checkers see the same types as without the mark."""

from typing import assert_type

from sqlalchemy.ext.asyncio import AsyncSession

from toolbox import sql, tool


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
