"""The live log: what invocations did lately, and whoever follows it.

Not here: where it comes from (`listener`), how it is sent (`routes`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar

from .entries import Entry

KEPT = 1000

tap: ContextVar[Callable[[Entry], None] | None] = ContextVar("toolbox.dev_ui.tap", default=None)
"""Gets, besides the journal, the entries of all that is called in a context."""


class Journal:
    """Keeps the last entries and passes new ones on; entries may come from any thread."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._followers: dict[asyncio.Queue[Entry], asyncio.AbstractEventLoop] = {}

    def add(self, entry: Entry) -> None:
        """Keeps an entry and tells the followers, and the tap of this context."""
        self._entries.append(entry)
        for queue, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(queue.put_nowait, entry)
            except RuntimeError:  # the follower's loop has ended
                self._followers.pop(queue, None)
        if (told := tap.get()) is not None:
            told(entry)

    async def follow(self) -> AsyncGenerator[Entry, None]:
        """What is kept, then what comes; without end."""
        queue: asyncio.Queue[Entry] = asyncio.Queue()
        self._followers[queue] = asyncio.get_running_loop()
        try:
            for entry in list(self._entries):
                yield entry
            while True:
                yield await queue.get()
        finally:
            self._followers.pop(queue, None)
