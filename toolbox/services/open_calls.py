"""Tracks the calls of a host that are under way, and the streams that wait for their readers, until it stops.

Not here: running a call (`driver`), reading a stream (`streams`).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Protocol

logger = logging.getLogger("toolbox.services")


class Closable(Protocol):
    """A stream that can be closed."""

    async def aclose(self) -> None:
        """Cancel the stream."""
        ...


class Running:
    """Tracks the tasks of invocations, and the streams that wait for their readers.

    `stop_timeout` are the seconds that a call waits for its compensations after it was cancelled.
    """

    def __init__(self) -> None:
        self.stop_timeout = 10.0
        self._tasks: dict[int, tuple[str, asyncio.Task[object] | None]] = {}
        self._undoing: set[asyncio.Task[object] | None] = set()
        self._streams: dict[int, tuple[str, weakref.ref[Closable], asyncio.Task[None]]] = {}
        self._numbers = count()
        self._ended = asyncio.Event()

    @contextmanager
    def task(self, label: str) -> Iterator[None]:
        """Track the current task as the task of an invocation inside the block."""
        number = next(self._numbers)
        self._tasks[number] = (label, asyncio.current_task())
        try:
            yield
        finally:
            del self._tasks[number]
            self._ended.set()

    @contextmanager
    def undoing(self, label: str) -> Iterator[None]:
        """Track the current task, which undoes tools inside the block: `stop` waits for it, and does not cancel it."""
        task = asyncio.current_task()
        self._undoing.add(task)
        try:
            with self.task(label):
                yield
        finally:
            self._undoing.discard(task)

    def open_stream(self, label: str, stream: Closable, task: asyncio.Task[None]) -> None:
        """Track an open stream until its task ends, with a weak reference: a stream that is dropped ends its task."""
        number = next(self._numbers)
        self._streams[number] = (label, weakref.ref(stream), task)
        task.add_done_callback(lambda _: self._streams.pop(number, None))

    async def wait_for_end(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until no invocation is under way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._under_way():
                    self._ended.clear()
                    await self._ended.wait()

    async def stop(self, timeout: float) -> list[str]:
        """Cancel the invocations, and close the open streams for up to `timeout` seconds, at least one.

        Compensations are not cancelled. Returns the labels of the cancelled invocations, and of the compensations that
        have not ended.
        """
        under_way = self._under_way()
        late = [each for each in under_way if each[1] not in self._undoing]
        for each in {task for _, task in late if task is not None}:  # one task may run a call inside a block
            each.cancel()
        if under_way:
            await self.wait_for_end(1.0)  # cancelled calls end at once, unless they undo their tools
            if self._undoing:
                # That takes as long as calls of tools do, and nobody else does it later: it gets the same time again.
                await self.wait_for_end(timeout - 1.0)
            late += [each for each in self._under_way() if each not in late]
        closing = [asyncio.create_task(_close(*each)) for each in list(self._streams.values())]
        if closing:
            _, late_to_close = await asyncio.wait(closing, timeout=max(timeout, 1.0))
            for each in late_to_close:
                each.cancel()
        return sorted(label for label, _ in late)

    def _under_way(self) -> list[tuple[str, asyncio.Task[object] | None]]:
        current = asyncio.current_task()
        return [(label, task) for label, task in self._tasks.values() if task is not current]


async def _close(label: str, stream: weakref.ref[Closable], task: asyncio.Task[None]) -> None:
    """Close a stream, or wait for the end of one that was dropped a moment ago. Log its failure."""
    if (open_stream := stream()) is not None:
        try:
            await open_stream.aclose()
        except Exception as error:  # the other streams, and the beans, must be closed as well
            logger.error("%s failed while the container closed its stream: %s", label, error, exc_info=error)
    elif task.get_loop() is asyncio.get_running_loop():
        await asyncio.wait([task])
