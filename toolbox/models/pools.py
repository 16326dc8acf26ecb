"""Connections to model servers: one pool per event loop, which the models of one address share inside a container.

A request-scoped model would otherwise open its own connections in each request. Not here: what is sent over them
(`transport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

from ..execution.threads import keep_inherited, register_for_fork

MOST_ADDRESSES = 100
"""So many pools are kept open for models to come. Pools that models use are kept in any case."""


K = TypeVar("K")
V = TypeVar("V")


class ConnectionPool:
    """The connections of an HTTP transport on one event loop.

    They are closed by `aclose`, when the loop ends, and when nothing holds the pool any more.
    """

    def __init__(self, connections: Any) -> None:
        self.connections, self.is_closed = connections, False
        self._keeper = _until_the_loop_ends(connections, weakref.ref(self))
        with contextlib.suppress(StopIteration):
            self._keeper.__anext__().send(None)  # runs up to `yield`, without waiting

    async def aclose(self) -> None:
        """Close the connections."""
        await self._keeper.aclose()

    async def close_from(self, here: asyncio.AbstractEventLoop, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections, which belong to `loop`, from the loop `here`."""
        if loop is here:
            await self.aclose()
        elif loop.is_running():
            future = asyncio.run_coroutine_threadsafe(self.aclose(), loop)
            with contextlib.suppress(Exception):  # the other loop may end and close its connections first
                await asyncio.wait_for(asyncio.wrap_future(future), 1.0)


async def _until_the_loop_ends(connections: Any, pool: weakref.ref[ConnectionPool]) -> AsyncGenerator[None, None]:
    """Close the connections when the event loop ends, because a loop closes its async generators.

    Otherwise aiohttp would warn about each open connection.
    """
    try:
        yield
    finally:
        if (there := pool()) is not None:
            there.is_closed = True
        await connections.aclose()


def entry_of_loop(by_loop: dict[asyncio.AbstractEventLoop, dict[K, V]]) -> dict[K, V]:
    """Return what is kept for the running loop; for a new loop, forget those that are closed.

    Weak keys would forget no loop, because connections refer to theirs.
    """
    loop = asyncio.get_running_loop()
    if loop not in by_loop:
        for other in [other for other in by_loop.copy() if other.is_closed()]:
            by_loop.pop(other, None)  # a thread with another loop may do the same
        by_loop[loop] = {}
    return by_loop[loop]


class ConnectionPools:
    """The pools of one container, by event loop and by what must be equal to share one, such as the address."""

    def __init__(self) -> None:
        self._pools: dict[asyncio.AbstractEventLoop, dict[Hashable, ConnectionPool]] = {}
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the pools without closing them: they belong to the event loops of the parent process."""
        keep_inherited(self._pools)
        self._pools = {}

    def pool(self, key: Hashable, open_connections: Callable[[], Any]) -> ConnectionPool:
        """Return the pool of the running loop with this key; open it if necessary."""
        pools = entry_of_loop(self._pools)
        found = pools.pop(key, None)
        if found is None or found.is_closed:
            found = ConnectionPool(open_connections())
        pools[key] = found  # the latest is last
        if len(pools) > MOST_ADDRESSES:
            del pools[next(iter(pools))]
        return found

    async def aclose(self) -> None:
        """Close the pools of all running event loops."""
        here = asyncio.get_running_loop()
        pools, self._pools = dict(self._pools), {}
        for loop, of_loop in pools.items():
            for each in of_loop.values():
                await each.close_from(here, loop)


current_pools: ContextVar[ConnectionPools | None] = ContextVar("toolbox.model_pools", default=None)
"""The pools of the container whose request runs; None outside of containers. Only the code of models sees it."""
