"""Databases with SQLAlchemy (extra `sql`): engines and sessions as beans, `@transactional`, and stores."""

from __future__ import annotations

try:
    import sqlalchemy as _  # noqa: F401 - checks that it is installed
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "toolbox.sql needs SQLAlchemy; install it with: pip install 'toolbox-di[sql]'", name=_error.name
    ) from None

from ..errors import MemoryLeaseLostError, OpenTransactionError, TransactionRolledBackError
from ..settings import SqlSettings
from .conversation_store import SqlChatMemoryStore
from .engines import open_engine, open_sync_engine
from .open_sessions import keep_transaction, open_session
from .run_store import SqlRunStore
from .sessions import engine, session, sync_engine, sync_session
from .table_names import is_store_table
from .transactions import transactional

stores = (SqlRunStore, SqlChatMemoryStore)
"""All stores in SQL databases: `container.register(sql.engine, *sql.stores)`.

A store of your own that you register as well replaces the one of its kind.
"""

__all__ = [
    "MemoryLeaseLostError",
    "OpenTransactionError",
    "SqlChatMemoryStore",
    "SqlRunStore",
    "SqlSettings",
    "TransactionRolledBackError",
    "engine",
    "is_store_table",
    "keep_transaction",
    "open_engine",
    "open_session",
    "open_sync_engine",
    "session",
    "stores",
    "sync_engine",
    "sync_session",
    "transactional",
]
