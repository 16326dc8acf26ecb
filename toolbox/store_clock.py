"""`StoreClock`: the clock of one store, which tests can move.

Not here: what follows it (`testing.skip_time`), the clocks of databases (`sql.dialects`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable
from datetime import UTC, datetime, timedelta
from weakref import WeakSet


class StoreClock:
    """The time of this process, and what tests have skipped of it. Leases, expiries and stored times follow it.

    A store that measures time in this process has one as its attribute `clock`. A store on a server has None: its
    clock is that of the server. `database` is equal for stores of the same data; None for one that has its own.
    """

    def __init__(self, database: Hashable = None) -> None:
        self.database = database
        self.skipped = timedelta()
        _clocks.add(self)

    def now(self) -> datetime:
        """Return the time of day, in UTC."""
        return datetime.now(UTC) + self.skipped

    def monotonic(self) -> float:
        """Return seconds that never go back, as `time.monotonic` does."""
        return time.monotonic() + self.skipped.total_seconds()


_clocks: WeakSet[StoreClock] = WeakSet()
_REAL = StoreClock()


def clock_of(store: object) -> StoreClock:
    """Return the clock of a store; for one that has none in this process, a clock that nobody moves."""
    return own_clock_of(store) or _REAL


def own_clock_of(store: object) -> StoreClock | None:
    """Return the clock of a store; None for one that has none in this process."""
    clock = getattr(store, "clock", None)
    return clock if isinstance(clock, StoreClock) else None


def skip(clocks: Collection[StoreClock], duration: timedelta) -> None:
    """Move clocks forward, and those of all other stores in this process that have the same data.

    Otherwise one store would take the leases of another for those of a process whose clock is wrong.
    """
    databases = {each.database for each in clocks if each.database is not None}
    for each in [*_clocks]:
        if each in clocks or each.database in databases:
            each.skipped += duration
