"""Locks on conversations that hold across processes: leased, renewed while they are held, given back.

A process that dies keeps nobody out for longer than its lease. Not here: where leases are kept (`toolbox.sql`,
`toolbox.redis`), whose turn it is within this process (`memory`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, Protocol

from .memory import ChatMemoryKey, Turns

logger = logging.getLogger("toolbox.memory")

LEASE = 15.0
"""Seconds for which a lease holds when it is not renewed."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds between two attempts to take a lease that another process holds
_LAST_WORK = 5.0  # seconds that giving back may take when everything ends


class LeaseKeeper(Protocol):
    """Where leases are kept, for all processes. Each of these is one atomic step."""

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Whether nobody has the conversation, so that `token` has it now, for `seconds`."""
        ...

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Whether `token` has it still, and so has it for `seconds` from now."""
        ...

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """If `token` has it, nobody has it any more."""
        ...


class Leases:
    """The leases of one process in one store. Within the process, turns are taken in the order of coming."""

    def __init__(self, keeper: LeaseKeeper, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"lease={seconds}; use a number of seconds above 0")
        self._keeper, self._seconds = keeper, seconds
        self._turns = Turns()
        self._tokens: dict[ChatMemoryKey, str] = {}
        self._work: set[asyncio.Task[None]] = set()

    def token(self, key: ChatMemoryKey) -> str | None:
        """The token under which this process has the conversation, or had it and may have lost it by now."""
        return self._tokens.get(key)

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey) -> AsyncIterator[None]:
        """The conversation, for one caller at a time in all processes."""
        token = secrets.token_hex(16)
        async with self._turns.turn(key):
            try:
                await self._take(key, token)
                self._tokens[key] = token
                given_back = asyncio.Event()
                self._begin(self._keep(key, token, given_back))
                try:
                    yield
                finally:
                    given_back.set()
                    del self._tokens[key]
            finally:
                # Also when taking it was interrupted: it may have succeeded. In a task of its own, since this one may
                # be cancelled; then the lease is given back a moment later.
                await asyncio.shield(self._begin(self._give_back(key, token)))

    async def _take(self, key: ChatMemoryKey, token: str) -> None:
        pause = _FIRST_PAUSE
        while not await self._keeper.take(key, token, self._seconds):
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    async def _keep(self, key: ChatMemoryKey, token: str, given_back: asyncio.Event) -> None:
        """Renews the lease three times in its length, until it is given back or lost."""
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
                logger.warning("the lease on conversation %s could not be renewed, trying again: %s", key, error)
                pause = self._seconds / 10
                continue
            if not renewed:
                if not given_back.is_set():
                    logger.error("the lease on conversation %s is lost: this call can no longer be kept", key)
                return
            pause = self._seconds / 3

    async def _give_back(self, key: ChatMemoryKey, token: str) -> None:
        try:
            await self._keeper.give_back(key, token)
        except Exception as error:
            # What the call has written is written; the lease ends by itself.
            logger.warning("the lease on conversation %s could not be given back: %s", key, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # With no context of the caller's, whose request it may outlive.
        task = asyncio.create_task(work, context=Context())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def stop(self) -> None:
        """Lets what is being given back get there."""
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=_LAST_WORK)
            for task in late:
                task.cancel()
