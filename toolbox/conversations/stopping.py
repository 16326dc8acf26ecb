"""Stopping the calls of conversations: those of this process at once, those of other processes by a wish.

Not here: what a call does then (`services`), the order of calls (`queues`, `leases`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakValueDictionary

from ..execution.threads import call_on, register_for_fork
from ..safe_text import describe_store_error
from .keys import ChatMemoryKey
from .stores import ChatMemoryStore, InMemoryChatMemoryStore, LogStore, keeps_logs

logger = logging.getLogger("toolbox.memory")

STOPPED = "its conversation was stopped"
"""The reason in the history of a run that ends because somebody stops its conversation."""

_BETWEEN_LOOKS = 1.0  # seconds between two looks for the wishes of other processes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.25  # seconds between two looks whether another process has ended its call


def _new_end() -> Future[None]:
    end: Future[None] = Future()
    end.set_running_or_notify_cancel()  # one who gives up waiting for it must not cancel it for the others
    return end


@dataclass(slots=True, eq=False)
class _CallAtWork:
    """A call that has a conversation. `end_it` runs on its loop; `ended` is set when its turn is stored."""

    key: ChatMemoryKey
    end_it: Callable[[str | None], None]
    loop: asyncio.AbstractEventLoop
    ended: Future[None] = field(default_factory=_new_end)

    def stop(self, by: str | None) -> None:
        """End the call, from any thread."""
        call_on(self.loop, self.end_it, by)


class _CallsOfStore:
    """The calls at work in one store, of all containers of this process."""

    def __init__(self) -> None:
        self.at_work: dict[ChatMemoryKey, _CallAtWork] = {}


class _StoresAtWork:
    """The calls of each store."""

    def __init__(self) -> None:
        register_for_fork(self)
        self.renew_after_fork()

    def renew_after_fork(self) -> None:
        """Forget all calls: they continue in the parent process only."""
        self._lock = Lock()
        self._of: WeakValueDictionary[int, _CallsOfStore] = WeakValueDictionary()

    def calls_of(self, store: object) -> _CallsOfStore:
        """Return the calls of this store."""
        with self._lock:
            calls = self._of.get(id(store))
            if calls is None:
                calls = self._of[id(store)] = _CallsOfStore()
            return calls


_stores = _StoresAtWork()


class Stopping:
    """Stops the calls of a store. `others` is the store if other processes use its conversations too."""

    def __init__(self, store: ChatMemoryStore) -> None:
        is_shared = keeps_logs(store) and not isinstance(store, InMemoryChatMemoryStore)
        self._others: LogStore | None = store if keeps_logs(store) and is_shared else None
        self._calls = _stores.calls_of(store)
        self._own = 0  # calls of this container, for which it looks
        self._idle = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def at_work(self, key: ChatMemoryKey, end_it: Callable[[str | None], None]) -> AsyncIterator[None]:
        """Let `end_it` be called inside the block by those who stop the conversation, with their name."""
        call = _CallAtWork(key, end_it, asyncio.get_running_loop())
        self._calls.at_work[key] = call
        self._own += 1
        if self._others is not None and self._own == 1:
            # Without the caller's context: it looks for the calls after this one too.
            self._idle = asyncio.Event()
            looking = self._look_for_wishes(self._others, self._idle, self._looking)
            self._looking = asyncio.get_running_loop().create_task(looking, context=Context())
        try:
            yield
        finally:
            self._own -= 1
            del self._calls.at_work[key]
            call.ended.set_result(None)
            if self._looking is not None and self._own == 0:
                self._idle.set()
                await asyncio.wait([self._looking])  # a query under way uses a connection, which is closed next

    async def stop(self, key: ChatMemoryKey, by: str | None, *, waits: bool) -> bool:
        """End the call at work, and wait until it has left the conversation. Returns False if there is none."""
        if (call := self._calls.at_work.get(key)) is not None:
            call.stop(by)
            if waits:
                await asyncio.wrap_future(call.ended)
            return True
        return self._others is not None and await self._stop_elsewhere(self._others, key, by)

    async def _stop_elsewhere(self, store: LogStore, key: ChatMemoryKey, by: str | None) -> bool:
        """Leave a wish for the process that holds the conversation, and wait until it has left it."""
        for place in key.places:  # one of an earlier release knows the former name alone
            if (holder := await store.holder(place)) is not None:
                break
        else:
            return False
        if not await store.ask_to_stop(place, by):
            return False
        pause = _FIRST_PAUSE
        while await store.holder(place) == holder:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return True

    async def _look_for_wishes(self, store: LogStore, idle: asyncio.Event, before: asyncio.Task[None] | None) -> None:
        """Look once a second, with one query for all conversations that are held, until there are no calls."""
        if before is not None:
            await asyncio.wait([before])
        while not idle.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_BETWEEN_LOOKS):
                    await idle.wait()
            if not idle.is_set():
                await self._grant_wishes(store)

    async def _grant_wishes(self, store: LogStore) -> None:
        try:
            wishes = await store.wishes()
        except Exception as error:  # the next look may find them
            logger.warning("cannot look for the wishes to stop conversations: %s", describe_store_error(error))
            return
        for call in [*self._calls.at_work.values()]:
            for place in call.key.places:
                if place in wishes:
                    call.stop(wishes[place])
