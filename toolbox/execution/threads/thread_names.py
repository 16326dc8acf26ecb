"""The names of threads: the label of a call while it runs, and the names that nobody chose."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

thread_watcher: ContextVar[Callable[[str, str], None] | None] = ContextVar("toolbox.thread_watcher", default=None)
"""Called on each thread that runs a call, with the label of the call and the usual name of the thread."""


def run_labelled(call: Callable[[], T], label: str, *, rename: bool) -> T:
    """Return `call()`. If `rename` is true, the thread is named `label` during the call."""
    thread = threading.current_thread()
    name = thread.name
    if (watcher := thread_watcher.get()) is not None:
        watcher(label, name)
    if not rename:
        return call()
    thread.name = label
    try:
        return call()
    finally:
        thread.name = name


_UNNAMED = re.compile(r"MainThread|Thread-\d+.*|asyncio_\d+|AnyIO worker thread")
"""The names of threads that Python, asyncio and anyio give."""


def has_own_name(thread: threading.Thread) -> bool:
    """Return True if a thread has a name that somebody chose, such as that of a user's executor."""
    return _UNNAMED.fullmatch(thread.name) is None
