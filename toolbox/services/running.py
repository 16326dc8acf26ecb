"""Tracks the running invocations and open streams of a container, which waits for them when it stops.

Not here: threads of tools that still run (`execution`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Protocol


class Closable(Protocol):
    """A stream that can be closed."""

    async def aclose(self) -> None:
        """Cancel the stream."""
        ...


class Running:
    """Tracks the tasks of invocations, and the streams that wait for their readers."""

    def __init__(self) -> None:
        self._tasks: dict[int, tuple[str, asyncio.Task[object] | None]] = {}
        self._streams: dict[int, weakref.ref[Closable]] = {}
        self._numbers = count()
        self._ended = asyncio.Event()

    @contextmanager
    def task(self, label: str) -> Iterator[None]:
        """Track the current task as the task of an invocation inside the block."""
        number = self.begin(label)
        try:
            yield
        finally:
            self.end(number)

    def begin(self, label: str) -> int:
        """Track the current task until `end` is called with the returned number. Cheaper than `task`."""
        number = next(self._numbers)
        self._tasks[number] = (label, asyncio.current_task())
        return number

    def end(self, number: int) -> None:
        """Stop tracking a task."""
        del self._tasks[number]
        self._ended.set()

    def open_stream(self, stream: Closable) -> Callable[[], None]:
        """Track an open stream, with a weak reference. Returns a function to call when it has ended."""
        number = next(self._numbers)
        self._streams[number] = weakref.ref(stream)

        def ended() -> None:
            self._streams.pop(number, None)

        return ended

    async def stop(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds for the invocations, then cancel them; close the open streams.

        Returns the labels of the cancelled invocations.
        """
        await self._wait_for_the_end(timeout)
        late = self._under_way()
        for _, task in late:
            if task is not None:
                task.cancel()
        if late:
            await self._wait_for_the_end(1.0)
        streams = [stream for reference in list(self._streams.values()) if (stream := reference()) is not None]
        if streams:
            closing = [asyncio.ensure_future(stream.aclose()) for stream in streams]
            _, late_to_close = await asyncio.wait(closing, timeout=max(timeout, 1.0))
            for each in late_to_close:
                each.cancel()
            for each in set(closing) - late_to_close:
                each.result()
        return sorted(label for label, _ in late)

    def _under_way(self) -> list[tuple[str, asyncio.Task[object] | None]]:
        current = asyncio.current_task()
        return [(label, task) for label, task in self._tasks.values() if task is not current]

    async def _wait_for_the_end(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._under_way():
                    self._ended.clear()
                    await self._ended.wait()
