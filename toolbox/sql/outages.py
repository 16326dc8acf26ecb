"""Calls the methods of a store again while its database is away.

Not here: what the methods do (`run_store`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from .engines import joined_connection

_PAUSES = 0.05, 1.0  # seconds between two tries: the first, the longest
# SQLSTATEs: connection lost, session ended by the server, server stopping or starting, and conflicts of transactions.
_AWAY = ("08", "57P", "25P03", "40001", "40P01")

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


class OutlivesOutages(Protocol):
    """A store with `retried` methods. `lease` and `_limit` are the seconds for all tries, and for one."""

    lease: float
    _limit: float | None
    _engine: AsyncEngine


def retried(method: F) -> F:
    """Call a method again while the database is away, up to one lease. For methods that can be repeated.

    On PostgreSQL each try has a time limit: without one, a connection whose other end is gone would never end. In a
    transaction of several writes, only the whole transaction is repeated.
    """

    @functools.wraps(method)
    async def repeated(self: OutlivesOutages, *args: Any, **kwargs: Any) -> Any:
        if joined_connection(self._engine) is not None:
            return await method(self, *args, **kwargs)
        until, pause = time.monotonic() + self.lease, _PAUSES[0]
        while True:
            try:
                async with asyncio.timeout(self._limit):
                    return await method(self, *args, **kwargs)
            except Exception as error:
                if time.monotonic() + pause > until or not _is_away(error):
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSES[1])

    return cast("F", repeated)


def _is_away(error: Exception) -> bool:
    """Return True if the connection was lost or refused, so that nothing was written or the write can be repeated."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    # asyncpg raises it on a connection that was lost in the middle of another statement.
    if type(getattr(error, "orig", error)).__name__ == "InternalClientError":
        return True
    state = str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")
    return isinstance(error, OSError) or state.startswith(_AWAY)
