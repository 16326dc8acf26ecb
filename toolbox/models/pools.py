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
from typing import Any
from weakref import WeakKeyDictionary

from ..execution.threads import keep_inherited, register_for_fork

MOST_ADDRESSES = 100
"""So many pools are kept open for models to come. Pools that models use are kept in any case."""


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


class ConnectionPools:
    """The pools of one container, by event loop and by what must be equal to share one, such as the address."""

    def __init__(self) -> None:
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, ConnectionPool]] = WeakKeyDictionary()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the pools without closing them: they belong to the event loops of the parent process."""
        keep_inherited(dict(self._pools))
        self._pools = WeakKeyDictionary()

    def pool(self, key: Hashable, open_connections: Callable[[], Any]) -> ConnectionPool:
        """Return the pool of the running loop with this key; open it if necessary."""
        pools = self._pools.setdefault(asyncio.get_running_loop(), {})
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
        pools, self._pools = dict(self._pools), WeakKeyDictionary()
        for loop, of_loop in pools.items():
            for each in of_loop.values():
                await each.close_from(here, loop)


current_pools: ContextVar[ConnectionPools | None] = ContextVar("toolbox.model_pools", default=None)
"""The pools of the container whose request runs; None outside of containers. Only the code of models sees it."""
