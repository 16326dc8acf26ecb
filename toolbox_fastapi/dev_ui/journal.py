"""The live log: what invocations did lately, and whoever follows it.

Not here: where it comes from (`calls`), how it is sent (`routes`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias

from toolbox.chat import ToolExecution, ToolExecutionRequest
from toolbox.context import current_invocation
from toolbox.execution import thread_watcher

Entry: TypeAlias = dict[str, Any]
"""One thing that happened, as the page reads it: `type`, `run` (the invocation's), `at` (milliseconds since 1970)."""

KEPT = 1000
LONGEST_TEXT = 20_000


def shortened(text: str) -> str:
    """A text as it is kept."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"


class Journal:
    """Keeps the last entries and passes new ones on; entries may come from any thread."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._followers: dict[asyncio.Queue[Entry], asyncio.AbstractEventLoop] = {}

    def add(self, entry: Entry) -> None:
        """Keeps an entry and tells the followers."""
        self._entries.append(entry)
        for queue, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(queue.put_nowait, entry)
            except RuntimeError:  # the follower's loop has ended
                self._followers.pop(queue, None)

    def run(
        self, where: str, *, user_message: str | None, memory_id: object, tap: Callable[[Entry], None] | None = None
    ) -> Run:
        """Begins the entries of one invocation of the method or tool `where`; `tap` gets them too."""
        run = Run(self, next(self._numbers), tap)
        said = None if memory_id is None else str(memory_id)
        run.add({"type": "started", "where": where, "user_message": user_message, "memory_id": said})
        return run

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


class Run:
    """The entries of one invocation."""

    def __init__(self, journal: Journal, number: int, tap: Callable[[Entry], None] | None) -> None:
        self._journal, self.number, self._tap = journal, number, tap
        self._told: list[ToolExecution] = []
        self._threads: dict[ToolExecutionRequest, str] = {}

    def add(self, entry: Entry) -> None:
        """Adds an entry of this invocation."""
        entry = {"run": self.number, "at": time.time() * 1000, **entry}
        self._journal.add(entry)
        if self._tap is not None:
            self._tap(entry)

    @contextmanager
    def watching_threads(self) -> Iterator[None]:
        """Notes which threads the tools called inside run on; the others run on the event loop."""

        def note(label: str, thread: str) -> None:
            current = current_invocation.get()
            if current is not None and current.request is not None and current.request.name == label:
                self._threads[current.request] = thread

        token = thread_watcher.set(note)
        try:
            yield
        finally:
            thread_watcher.reset(token)

    def tool_started(self, request: ToolExecutionRequest) -> None:
        """A tool is about to run."""
        self.add({"type": "tool_started", "call": request.id, "name": request.name, "arguments": request.arguments})

    def tool(self, execution: ToolExecution) -> None:
        """A tool has run."""
        self._told.append(execution)
        self.add(
            {
                "type": "tool",
                "call": execution.request.id,
                "name": execution.request.name,
                "arguments": shortened(execution.request.arguments),
                "result": shortened(execution.result),
                "is_error": execution.is_error,
                "at": execution.started_at.timestamp() * 1000,
                "duration": execution.duration,
                "thread": self._threads.get(execution.request, "event loop"),
            }
        )

    def tools(self, executions: Iterable[ToolExecution]) -> None:
        """Tools have run; those that have been told of already are left out."""
        for execution in executions:
            if not any(execution is each for each in self._told):
                self.tool(execution)

    def ended(self, duration: float, answer: Entry | None = None, failed: Entry | None = None) -> None:
        """The invocation has ended, in `duration` seconds, well or not."""
        self.add({"type": "ended", "duration": duration, "answer": answer, "failure": failed})
