"""A store that fails from one write on, as a process that is killed does. Its data survive."""

from collections.abc import Awaitable, Callable
from copy import deepcopy
from typing import Any

from toolbox.runs import InMemoryRunStore


class CrashedError(Exception):
    pass


class Kept(InMemoryRunStore):
    """The data that survive."""

    persistent = True

    def copied(self) -> "Kept":
        copied = Kept(self.lease)
        copied._runs = deepcopy(self._runs)
        return copied


class Crashing:
    """Passes everything on, until the write with the number `at`; from then on nothing works."""

    persistent = True
    supports = InMemoryRunStore.supports

    def __init__(self, kept: Kept, at: int, after: bool) -> None:
        self.kept, self.at, self.after, self.writes, self.crashed = kept, at, after, 0, False
        self.lease = kept.lease

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        work = getattr(self.kept, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.crashed:
                raise CrashedError
            if name not in ("create", "append", "change", "acquire", "add_events", "add_message", "close_messages"):
                return await work(*args, **kwargs)
            self.writes += 1
            self.crashed = self.writes == self.at
            if self.crashed and not self.after:
                raise CrashedError
            result = await work(*args, **kwargs)
            if self.crashed:
                raise CrashedError
            return result

        return call


async def writes_of(kept: Kept, work: Callable[[Any], Awaitable[None]]) -> int:
    counting = Crashing(kept, 0, False)
    await work(counting)
    return counting.writes
