"""The end of an application: its open streams are told in time, and its open requests are waited for.

uvicorn waits for open responses, without limit, before it lets the lifespan end; a stream that nobody tells would hold
up the process. So the signal is noticed here as well. Not here: what a stream does then (`streaming`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeAlias

from .exchanges import ApplicationStoppingError, Exchange

logger = logging.getLogger("toolbox.fastapi")

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """From the lifespan's start to its end: whether the application is stopping, and which exchanges are still open.

    What is open should end by itself. `timeout` seconds after the signal, the invocations under way are ended; as long
    after the end of the lifespan has begun, all requests are.
    """

    def __init__(self, timeout: float) -> None:
        self.begun = asyncio.Event()
        self._timeout = timeout
        self.open: set[Exchange] = set()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def closed(self, exchange: Exchange) -> None:
        """An exchange has ended, its scope too."""
        self.open.discard(exchange)
        if self.begun.is_set():
            self._closed.set()

    # --- the signal

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notices the signals that end the process, before whoever handles them (uvicorn) does."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        chained = [each for each in map(self._chain, SIGNALS) if each is not None]
        try:
            yield
        finally:
            for number, former, ours in chained:
                if signal.getsignal(number) is ours:
                    signal.signal(number, former)
            if self._timer is not None:
                self._timer.cancel()

    def _chain(self, number: signal.Signals) -> tuple[signal.Signals, Handler, Handler] | None:
        former = signal.getsignal(number)
        if not callable(former) or former is signal.default_int_handler:
            return None

        def notice(caught: int, frame: FrameType | None) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._begin)
            former(caught, frame)

        signal.signal(number, notice)
        return number, former, notice

    def _begin(self) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self._timer = self._loop.call_later(self._timeout, self._end_invocations)

    def _end_invocations(self) -> None:
        for exchange in list(self.open):
            exchange.end_invocations(ApplicationStoppingError())

    # --- the end

    async def wait(self) -> None:
        """Waits for the open exchanges, then cancels those that are late."""
        self.begun.set()
        await self._wait_for_the_open(self._timeout)
        late = list(self.open)
        for exchange in late:
            if exchange.task is not None:
                exchange.task.cancel()
        if late:
            await self._wait_for_the_open(1.0)
        for exchange in late:
            outcome = "would not end" if exchange in self.open else "was cancelled"
            logger.warning("%s %s at stop: %s", exchange.scope["type"], exchange.scope["path"], outcome)

    async def _wait_for_the_open(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.open:
                    self._closed.clear()
                    await self._closed.wait()
