"""`is_store_table`: tells the tables of the stores from those of the program, for tools that compare a database.

Not here: creating and migrating the tables (`migrations`).
"""

from __future__ import annotations

import functools

from .conversation_tables import ConversationTables
from .migrations import VERSIONS, tables_in_use
from .run_tables import RunTables


def is_store_table(name: str | None) -> bool:
    """Return True for the name of a table that a store of this module creates and migrates, such as `toolbox_runs`.

    For the `include_object` of Alembic, which otherwise proposes to drop these tables:

        def include_object(item, name, kind, reflected, compared):
            return not (kind == "table" and sql.is_store_table(name))

    Tables with names of your own (`table=`) count as soon as this process has created their store.
    """
    return name in _tables_by_default() or name in tables_in_use


@functools.cache
def _tables_by_default() -> frozenset[str]:
    runs, conversations = RunTables("toolbox_runs").schema().tables, ConversationTables("toolbox_conversations").tables
    return frozenset(each.name for each in (*runs, *conversations, VERSIONS))
