"""Stores in tests: their clocks, and checks of stores that a program brings.

Not here: the checks (`store_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from .. import store_clock
from ..errors import ContainerNotStartedError, IllegalConfigurationError, Problem

if TYPE_CHECKING:
    from ..container import Container
    from ..store_checks.conversation_stores import ConversationStoreCheck
    from ..store_checks.run_stores import RunStoreCheck


async def skip_time(container: Container, duration: timedelta) -> None:
    """Move the clocks of a container's stores forward, for tests of leases and expiries that wait for nothing.

        await skip_time(container, timedelta(hours=1))

    The `RunStore` and the `ChatMemoryStore` must be in memory or on SQLite. When it returns, the container has renewed
    the leases that it holds, and has looked for runs to take over. Stores of other containers in this process move
    too if they have the same SQLite file; those of other processes, and stores that are made later, do not. Raises
    `IllegalConfigurationError` for stores on servers, `TypeError` or `ValueError` for an invalid duration, and
    `ContainerNotStartedError`.
    """
    from ..container import internals_of  # late: most tests do not skip time

    if not isinstance(duration, timedelta):
        raise TypeError(f"skip_time: expected a datetime.timedelta, got {type(duration).__name__}")
    if duration < timedelta():
        raise ValueError(f"skip_time: invalid duration {duration}; clocks move forward only")
    if not container.is_started:
        raise ContainerNotStartedError("skip_time")
    host = internals_of(container).host

    async def skip() -> None:
        runs, conversations = await host.run_store(), (await host.memories()).store
        store_clock.skip([clock for each in (runs, conversations) for clock in _find_clocks(each)], duration)
        if (renew_leases := getattr(conversations, "renew_leases", None)) is not None:
            await renew_leases()
        await host.runs.follow_clock()

    await host.on_own_loop(skip)


def _find_clocks(store: object) -> Iterator[store_clock.StoreClock]:
    """Yield the clock of a store. A store of conversations without `lock` needs none: it has no leases."""
    clock = store_clock.own_clock_of(store)
    if clock is not None:
        yield clock
    elif hasattr(store, "lease") or hasattr(store, "lock"):
        fact = f"the clock of {type(store).__name__} cannot be moved: it does not measure time in this process"
        raise IllegalConfigurationError([Problem("skip_time", fact, "test with a store in memory or on SQLite")])


# --- stores of your own


def run_store_checks() -> tuple[RunStoreCheck, ...]:
    """Return a check for each promise of `RunStore`. The stores of toolbox pass the same ones.

        @pytest.mark.parametrize("check", run_store_checks())
        async def test_the_store_keeps_its_promises(check: RunStoreCheck, tmp_path: Path) -> None:
            await check(lambda lease: MyRunStore(tmp_path, lease))

    Each check gets a function that returns a store whose leases last that many seconds. It is called twice, as two
    processes would; both stores must have the same runs, and may be one object. The check opens them, and raises
    `AssertionError`. Some let a lease of one second end: they move the store's `clock`, or wait if it has none. Start
    with an empty store: runs are purged.
    """
    from ..store_checks.run_stores import RUN_STORE_CHECKS  # late: most tests need no store

    return RUN_STORE_CHECKS


def conversation_store_checks() -> tuple[ConversationStoreCheck, ...]:
    """Return a check for each promise of `ChatMemoryStore`; those of `lock` check only stores that have it.

        @pytest.mark.parametrize("check", conversation_store_checks())
        async def test_the_store_keeps_its_promises(check: ConversationStoreCheck, tmp_path: Path) -> None:
            await check(lambda: Files(tmp_path))

    Each check gets a function that returns a store. It is called twice, as two processes would; both stores must have
    the same conversations, and may be one object. The check raises `AssertionError`.
    """
    from ..store_checks.conversation_stores import CONVERSATION_STORE_CHECKS  # late: as above

    return CONVERSATION_STORE_CHECKS
