"""Leases on conversations, with which a store lets one caller of all processes at a time into each conversation.

Not here: the order of calls in one process (`queues`), stores in databases (`sql`, `redis`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, Protocol

from ..errors import ConversationBusyError
from ..execution.cancellation import CancellationsHere
from ..introspection import is_number
from ..safe_text import describe_store_error
from .keys import ChatMemoryKey
from .queues import CallQueues

logger = logging.getLogger("toolbox.memory")

LEASE = 15.0
"""Seconds until a lease expires if it is not renewed."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds between two attempts to take another process's lease
_LAST_WORK = 5.0  # seconds to wait for a release at the end of a call, and for all of them when the store stops


class LeaseKeeper(Protocol):
    """Stores leases for all processes. Each method is atomic."""

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Take the lease for `seconds` if it is free. Returns True if `token` has it now."""
        ...

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Extend the lease to `seconds` from now. Returns False if `token` has lost it."""
        ...

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """Release the lease if `token` has it."""
        ...


class Leases:
    """The leases of one process in one store. Calls in the same process get their turn in order of arrival."""

    def __init__(self, keeper: LeaseKeeper, seconds: float) -> None:
        if not (is_number(seconds) and seconds > 0):
            raise ValueError(f"invalid lease={seconds!r}; use a number of seconds greater than 0")
        self._keeper, self._seconds = keeper, seconds
        self._queues = CallQueues()
        self._tokens: dict[ChatMemoryKey, str] = {}
        self._leaving: set[ChatMemoryKey] = set()
        self._work: set[asyncio.Task[None]] = set()

    def token(self, key: ChatMemoryKey) -> str | None:
        """Return the token of this process's lease, which may have expired, or None without a lease."""
        return self._tokens.get(key)

    @property
    def tokens(self) -> Mapping[ChatMemoryKey, str]:
        """The tokens of the leases that this process has, which may have expired."""
        return dict(self._tokens)

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey, *, wait: bool = True) -> AsyncIterator[None]:
        """Lock the conversation for one caller at a time across all processes.

        With `wait=False`, raises `ConversationBusyError` if another caller has it.
        """
        token = secrets.token_hex(16)
        keeping: asyncio.Task[None] | None = None
        left: str | None = token
        async with self._queues.enter(key, wait=wait):
            try:
                await self._take(key, token, wait=wait)
                self._tokens[key] = token
                given_back = asyncio.Event()
                keeping = self._begin(self._keep(key, token, given_back))
                try:
                    yield
                finally:
                    given_back.set()
                    left = self._tokens.pop(key, None)
                    self._leaving.discard(key)
            finally:
                # Release it even if taking it was interrupted, because it may have succeeded. A separate task does it:
                # this task may be cancelled, or the database may not answer, and then the lease is released later.
                await asyncio.wait([self._begin(self._give_back(key, left, keeping))], timeout=_LAST_WORK)

    def leave(self, key: ChatMemoryKey) -> None:
        """Note that the last write of this process's holder begins. A renewal that waits for it finds no lease."""
        if key in self._tokens:
            self._leaving.add(key)

    def released(self, key: ChatMemoryKey) -> None:
        """Note that this write has released the lease: it need not be given back."""
        self._tokens.pop(key, None)

    async def _take(self, key: ChatMemoryKey, token: str, *, wait: bool) -> None:
        pause, cancellations = _FIRST_PAUSE, CancellationsHere()
        while True:
            taken = await self._keeper.take(key, token, self._seconds)
            # In Python 3.11, `asyncio.wait_for` can lose a cancellation, and redis sends commands with it.
            if cancellations.came:
                raise asyncio.CancelledError
            if taken:
                return
            if not wait:
                raise ConversationBusyError(key.service, key.memory_id)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    async def _keep(self, key: ChatMemoryKey, token: str, given_back: asyncio.Event) -> None:
        """Renew the lease three times per lease duration, until it is released or lost."""
        pause = self._seconds / 3
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await given_back.wait()
            if given_back.is_set():
                return
            try:
                renewed = await self._keeper.renew(key, token, self._seconds)
            except Exception as error:
                what = describe_store_error(error)
                logger.warning("cannot renew the lease on conversation %s, retrying: %s", key, what)
                pause = self._seconds / 10
                continue
            if not renewed:
                if not given_back.is_set() and key not in self._leaving:
                    logger.error("the lease on conversation %s is lost; the current call will not be stored", key)
                return
            pause = self._seconds / 3

    async def renew_all(self) -> None:
        """Renew all leases of this process once, outside of their turn."""
        for key, token in [*self._tokens.items()]:
            await self._keeper.renew(key, token, self._seconds)

    async def _give_back(self, key: ChatMemoryKey, token: str | None, keeping: asyncio.Task[None] | None) -> None:
        if keeping is not None:  # a renewal that has begun uses a connection: nothing may be left of it afterwards
            await asyncio.wait([keeping])
        if token is None:  # the last write has released the lease
            return
        try:
            await self._keeper.give_back(key, token)
        except Exception as error:
            # The call is already stored, and the lease expires by itself.
            what = describe_store_error(error)
            logger.warning("cannot release the lease on conversation %s, it expires by itself: %s", key, what)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # Without the caller's context: the work may outlive the caller's request.
        task = asyncio.create_task(work, context=Context())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def stop(self) -> None:
        """Wait for the pending releases, and cancel those that take too long."""
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=_LAST_WORK)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=_LAST_WORK)  # they return their connections
