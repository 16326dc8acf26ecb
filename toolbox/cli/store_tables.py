"""Migrates the data of a container's stores, or writes the SQL statements for it, as lines for the terminal.

Not here: the command (`commands`), migrating itself (`toolbox.sql`, `toolbox.redis`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..container import Container, internals_of
from ..conversations.stores import ChatMemoryStore
from ..runs.store import RunStore


async def migrations_of(container: Container) -> Sequence[str]:
    """Migrate the tables of all SQL stores and the conversations in Redis, and return what was done.

    Raises `IllegalConfigurationError`.
    """
    async with _find_stores(container) as stores:
        lines = []
        for each in stores:
            if (migrate_all := getattr(each, "migrate_all", None)) is not None:
                done = await migrate_all()
                what = f"{done} conversations migrated" if done else "nothing to do"
                lines.append(f"{type(each).__name__}: {what}")
        if not (tables := _find_tables(stores)):
            return lines or ["There are no stores in SQL databases."]
        from ..sql.migrations import migrate_stores

        for database, changes in await migrate_stores(tables):
            lines += [
                f"{database}: {each.name} {'created' if each.before is None else f'migrated from {each.before}'}"
                f", version {each.after}"
                for each in changes
            ] or [f"{database}: nothing to do"]
        return lines


async def statements_of(container: Container) -> Sequence[str]:
    """Return the statements of the migrations, with comments. Raises `IllegalConfigurationError`."""
    async with _find_stores(container) as stores:
        if not (tables := _find_tables(stores)):
            return ["-- There are no stores in SQL databases."]
        from ..sql.migrations import migration_script

        lines = []
        for database, statements in await migration_script(tables):
            lines += [f"-- {database}{'' if statements else ': nothing to do'}", *(f"{each};" for each in statements)]
        return lines


@asynccontextmanager
async def _find_stores(container: Container) -> AsyncIterator[Sequence[Any]]:
    """Provide the stores of a container, which is not started."""
    async with internals_of(container).beans_of(RunStore, ChatMemoryStore) as stores:
        yield stores


def _find_tables(stores: Sequence[Any]) -> list[Any]:
    """Return the tables of the SQL stores."""
    if "toolbox.sql" not in sys.modules:  # then no bean can be such a store, and it may not be installed
        return []
    from ..sql.migrations import StoreTables

    tables = (getattr(each, "store_tables", None) for each in stores)
    return [each for each in tables if isinstance(each, StoreTables)]
