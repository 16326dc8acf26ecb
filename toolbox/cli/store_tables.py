"""Migrates the tables of a container's stores in SQL databases, or writes the statements, as lines for the terminal.

Not here: the command (`commands`), migrating itself (`toolbox.sql`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..container import Container, internals_of
from ..runs.store import RunStore
from ..services.memory import ChatMemoryStore


async def migrations_of(container: Container) -> Sequence[str]:
    """Migrate the tables of all SQL stores, and return what was done. Raises `IllegalConfigurationError`."""
    async with _find_tables(container) as tables:
        if not tables:
            return ["There are no stores in SQL databases."]
        from ..sql.migrations import migrate_stores

        lines = []
        for database, done in await migrate_stores(tables):
            lines += [
                f"{database}: {each.name} {'created' if each.before is None else f'migrated from {each.before}'}"
                f", version {each.after}"
                for each in done
            ] or [f"{database}: nothing to do"]
        return lines


async def statements_of(container: Container) -> Sequence[str]:
    """Return the statements of the migrations, with comments. Raises `IllegalConfigurationError`."""
    async with _find_tables(container) as tables:
        if not tables:
            return ["-- There are no stores in SQL databases."]
        from ..sql.migrations import migration_script

        lines = []
        for database, statements in await migration_script(tables):
            lines += [f"-- {database}{'' if statements else ': nothing to do'}", *(f"{each};" for each in statements)]
        return lines


@asynccontextmanager
async def _find_tables(container: Container) -> AsyncIterator[list[Any]]:
    """Provide the tables of all SQL stores of a container, which is not started."""
    async with internals_of(container).beans_of(RunStore, ChatMemoryStore) as stores:
        if "toolbox.sql" not in sys.modules:  # then no bean can be such a store, and it may not be installed
            yield []
            return
        from ..sql.migrations import StoreTables

        tables = (getattr(each, "store_tables", None) for each in stores)
        yield [each for each in tables if isinstance(each, StoreTables)]
