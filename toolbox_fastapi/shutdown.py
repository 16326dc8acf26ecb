"""Graceful shutdown: ends open streams at the signal, then waits for open requests.

uvicorn waits without a limit for open responses before it ends the lifespan, so an open stream would keep the process
alive. That is why the signal is handled here as well. Not here: how a stream ends (`streaming`).
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

from .exchanges import ApplicationStoppingError, ClientExchange

logger = logging.getLogger("toolbox.fastapi")

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """The open exchanges of an application, and whether it is shutting down (`begun`).

    `timeout` seconds after the signal, running invocations are cancelled. `timeout` seconds after the lifespan starts
    to end, open requests are cancelled.
    """

    def __init__(self, timeout: float) -> None:
        self.begun = asyncio.Event()
        self._timeout = timeout
        self.open: set[ClientExchange] = set()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def closed(self, exchange: ClientExchange) -> None:
        """Remove an exchange whose scope is closed."""
        self.open.discard(exchange)
        if self.begun.is_set():
            self._closed.set()

    # --- the signal

    @contextmanager
    def signals_noticed(self) -> Iterator[None]:
        """Notice the signals that end the process, then call the handler that was installed before (uvicorn's)."""
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
            with suppress(RuntimeError):  # the loop may already be closed
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
        """Wait for the open exchanges; cancel those that are still open after the timeout."""
        self.begun.set()
        await self._wait_for_open(self._timeout)
        late = list(self.open)
        for exchange in late:
            if exchange.task is not None:
                exchange.task.cancel()
        if late:
            await self._wait_for_open(1.0)
        for exchange in late:
            outcome = "still running after it was cancelled" if exchange in self.open else "cancelled"
            logger.warning("%s %s at shutdown: %s", exchange.scope["type"], exchange.scope["path"], outcome)

    async def _wait_for_open(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.open:
                    self._closed.clear()
                    await self._closed.wait()
