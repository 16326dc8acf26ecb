"""Threads of a container: a bounded pool, new threads, executors, and an event loop for programs without one.

All of them are daemon threads, so a tool that never returns does not keep the process alive.
Not here: the choice for each call (`runners`).
"""

from __future__ import annotations

from .event_loops import LoopThread, await_on, call_on, on_event_loop, refuse_idle, refuse_on_event_loop, running_loop
from .forks import FORKED, Forkable, keep_inherited, register_for_fork
from .thread_names import has_own_name, run_labelled, thread_watcher
from .thread_pools import settle
from .workers import Finish, Workers, finished

__all__ = [
    "FORKED",
    "Finish",
    "Forkable",
    "LoopThread",
    "Workers",
    "await_on",
    "call_on",
    "finished",
    "has_own_name",
    "keep_inherited",
    "on_event_loop",
    "refuse_idle",
    "refuse_on_event_loop",
    "register_for_fork",
    "run_labelled",
    "running_loop",
    "settle",
    "thread_watcher",
]
