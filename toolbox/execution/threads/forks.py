"""What must begin again in a forked process, where the threads of its parent do not exist."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """Holds threads, locks, event loops or connections, which do not work in a forked process."""

    def renew_after_fork(self) -> None:
        """Drop everything that belongs to the parent process. Closes nothing: the parent still uses it."""
        ...


FORKED = (
    "the container was started before this process was forked, and runs in the parent only; start the container in "
    "each process, after the fork (`with container:` works here and creates new beans)"
)
"""Reason why a container of the parent does not count as started in a forked process."""

_forkables: WeakSet[Forkable] = WeakSet()
_inherited: list[object] = []

# A process uses an executor, also if its containers get new `Workers` at each start.
_used_executors: WeakSet[Executor] = WeakSet()
_dead_executors: WeakSet[Executor] = WeakSet()  # used before the fork: their threads exist only in the parent


def register_for_fork(holder: Forkable) -> None:
    """Call `holder.renew_after_fork()` in each process forked from this one, while `holder` is alive."""
    _forkables.add(holder)


def keep_inherited(*things: object) -> None:
    """Keep objects of the parent process alive, so that their finalizers do not close them in this process."""
    _inherited.extend(things)


def use_executor(executor: Executor) -> bool:
    """Return True if an executor works in this process, and False if the parent used it before the fork."""
    try:
        if executor in _dead_executors:
            return False
        _used_executors.add(executor)
    except TypeError:  # an executor of another library without support for weak references
        pass
    return True


def _after_fork_in_child() -> None:
    _dead_executors.update(_used_executors)
    _used_executors.clear()
    for each in list(_forkables):
        each.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
