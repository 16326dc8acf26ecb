"""A started program with a database, and the warnings of `toolbox.sql`."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.databases.open_sessions.desk import Base, Desk, Order, Program, Start, StreamingDesk, User, Watching
from toolbox import Container, ToolboxSettings, sql
from toolbox.settings import SqlSettings


@pytest.fixture
def start(database_url: str) -> Start:
    @contextlib.asynccontextmanager
    async def starting(*registered: Any, replies: Any = (), **options: Any) -> AsyncIterator[Program]:
        model = Watching(*replies)
        settings = ToolboxSettings(sql=SqlSettings(url=database_url, **options))
        container = Container(models={"default": model}, settings=settings)
        container.register(sql.engine, sql.session, sql.sync_engine, sql.sync_session, Desk, StreamingDesk)
        async with container.register(*registered):
            engine, sync_engine = await container.aget(AsyncEngine), await asyncio.to_thread(container.get, Engine)
            model.engines += [engine, sync_engine]
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
                await connection.execute(insert(User).values(id=7, name="Ada"))
                await connection.execute(insert(Order).values(id=1000, user_id=7))
            yield Program(container, model)
            assert engine.pool.checkedout() == sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    return starting


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings that were logged, in order."""
    found: list[str] = []

    class Found(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Found(logging.WARNING), logging.getLogger("toolbox.sql")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
