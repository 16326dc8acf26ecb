"""The order of calls in one process: one caller at a time in each conversation.

Not here: the order of calls of several processes (`leases`), calls that would wait for themselves (`memories`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from threading import Lock
from weakref import WeakValueDictionary

from ..errors import ConversationBusyError
from ..execution.threads import register_for_fork
from .keys import ChatMemoryKey


class CallQueues:
    """Lets one caller at a time into each conversation, in order of arrival; works across event loops."""

    def __init__(self) -> None:
        self.renew_after_fork()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget all queues: the calls continue in the parent process only."""
        self._lock = Lock()
        self._waiting: dict[ChatMemoryKey, deque[Future[None]]] = {}

    @asynccontextmanager
    async def enter(self, key: ChatMemoryKey, *, wait: bool = True) -> AsyncIterator[None]:
        """Enter a conversation when all callers before have left it.

        With `wait=False`, raises `ConversationBusyError` if somebody is inside.
        """
        ahead: Future[None] | None = None
        with self._lock:
            if (queue := self._waiting.get(key)) is None:
                self._waiting[key] = deque()
            elif not wait:
                raise ConversationBusyError(key.service, key.memory_id)
            else:
                ahead = Future()
                queue.append(ahead)
        if ahead is not None:
            await self._wait(key, ahead)
        try:
            yield
        finally:
            self._pass_on(key)

    async def _wait(self, key: ChatMemoryKey, ahead: Future[None]) -> None:
        try:
            await asyncio.wrap_future(ahead)
        except BaseException:
            with self._lock:
                if ahead in (queue := self._waiting.get(key, deque())):
                    queue.remove(ahead)
                    raise
            self._pass_on(key)  # the turn arrived at the moment of the cancellation
            raise

    def _pass_on(self, key: ChatMemoryKey) -> None:
        with self._lock:
            queue = self._waiting.get(key)
            if queue is None:  # this process was forked during the turn
                return
            if queue:
                following = queue.popleft()
            else:
                del self._waiting[key]
                return
        # A caller that is cancelled at this moment passes its turn on itself (`_wait`).
        if following.set_running_or_notify_cancel():
            following.set_result(None)


class _QueuesOfStores:
    """The queues of each store. Containers that share a store share its queues."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._queues: WeakValueDictionary[int, CallQueues] = WeakValueDictionary()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        self._lock = Lock()

    def of(self, store: object) -> CallQueues:
        """Return the queues of this store."""
        with self._lock:
            queues = self._queues.get(id(store))
            if queues is None:
                queues = self._queues[id(store)] = CallQueues()
            return queues


_queues = _QueuesOfStores()


def queues_of(store: object) -> CallQueues:
    """Return the queues of calls in a store."""
    return _queues.of(store)
