"""Engines and sessions as beans, which use the database in `TOOLBOX_SQL__URL`.

Not here: opening engines (`engines`), committing (`transactions`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from ..di.decorators import checks_settings, produces
from ..errors import IllegalConfigurationError, Problem
from ..settings import SqlSettings, ToolboxSettings
from ..transaction_recorder import DATABASE_MARK
from .engines import address_problems, open_engine, open_sync_engine
from .open_sessions import open_session

P = TypeVar("P")


def _engine_problems(settings: ToolboxSettings) -> Iterator[Problem]:
    yield from _url_problems(settings.sql, asynchronous=True)


def _sync_engine_problems(settings: ToolboxSettings) -> Iterator[Problem]:
    yield from _url_problems(settings.sql, asynchronous=False)


def _url_problems(settings: SqlSettings, *, asynchronous: bool) -> Iterator[Problem]:
    try:
        address = _read_url(settings)
    except IllegalConfigurationError as error:
        yield from error.problems
    else:
        yield from address_problems(address, asynchronous=asynchronous)


def _produce_from_settings(producer: P) -> P:
    """Mark a producer of an engine for the database of the settings."""
    setattr(producer, DATABASE_MARK, "TOOLBOX_SQL__URL")
    return producer


@_produce_from_settings
@checks_settings(_engine_problems)
@produces(scope="application")
async def engine(settings: ToolboxSettings) -> AsyncIterator[AsyncEngine]:
    """Provide the engine of the database in `TOOLBOX_SQL__URL`; it is disposed when the container stops.

    A missing or invalid URL and a missing driver are problems at start.
    """
    async with open_engine(_read_url(settings.sql), **_read_options(settings.sql)) as made:
        yield made


@produces(scope="call")
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """Provide a session for each tool call, or for the request outside of tool calls.

    Uncommitted changes are rolled back when the session ends. Before a model request, it gives its connection back.
    """
    made = open_session(engine)
    try:
        yield made
    finally:
        await made.close()


@_produce_from_settings
@checks_settings(_sync_engine_problems)
@produces(scope="application")
def sync_engine(settings: ToolboxSettings) -> Iterator[Engine]:
    """Provide the synchronous engine of the database in `TOOLBOX_SQL__URL`, for `def` tools, which run on threads.

    A missing or invalid URL and a missing driver are problems at start.
    """
    with open_sync_engine(_read_url(settings.sql), **_read_options(settings.sql)) as made:
        yield made


@produces(scope="call")
def sync_session(engine: Engine) -> Iterator[Session]:
    """Provide a session for each call of a `def` tool, or for the request outside of tool calls.

    It is created, used and closed on the tool's thread. Uncommitted changes are rolled back when the session ends.
    Before a model request, it gives its connection back.
    """
    with open_session(engine) as made:
        yield made


def _read_url(settings: SqlSettings) -> str:
    if settings.url is None:
        fix = "set TOOLBOX_SQL__URL, such as sqlite:///shop.db or postgresql://user:password@host/shop"
        raise IllegalConfigurationError([Problem("toolbox.sql", "missing database URL", fix)])
    return settings.url.get_secret_value()


def _read_options(settings: SqlSettings) -> dict[str, Any]:
    recycle = -1 if settings.pool_recycle is None else settings.pool_recycle
    by_database = {"pool_pre_ping"} - settings.model_fields_set
    of_others = {"migrate", "records_of_ended_runs", "while_a_model_works"}
    return {**settings.model_dump(exclude={"url", "pool_recycle"} | of_others | by_database), "pool_recycle": recycle}
