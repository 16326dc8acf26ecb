"""The worker: continues runs until a signal ends it, and shows a line for each run.

Not here: the command (`commands`), taking over runs (`toolbox.runs`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from ..container import Container, internals_of

if TYPE_CHECKING:
    from ..runs.store import StoredRun

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def work(container: Container, show: Callable[[str], None]) -> None:
    """Continue runs until SIGTERM or SIGINT; `show` gets one line for each start and end of a run.

    At a signal, running tools get the container's `stop_timeout` to finish; then the leases are released. Raises
    `LookupError` if the container has no persistent `RunStore`.
    """
    report = WorkerReport(show)
    internals_of(container).take_over_runs(True)
    async with container:
        runs = container.runs
        store = await runs.store()
        if not store.persistent:
            raise LookupError("its runs are in memory, so a worker finds none; register sql.engine and sql.SqlRunStore")
        runs.report_to(report.tell)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            with suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt
                loop.add_signal_handler(number, stopped.set)
        ready = f"worker {runs.owner} is ready; it looks for runs with expired leases every {store.lease:g} s"
        show(f"{time_of_day()} {ready}")
        try:
            await stopped.wait()
        finally:
            for number in STOP_SIGNALS:
                with suppress(NotImplementedError):
                    loop.remove_signal_handler(number)
            count = report.running
            show(
                f"{time_of_day()} stopping" + (f"; {count} running {'run' if count == 1 else 'runs'}" if count else "")
            )
    show(f"{time_of_day()} stopped; {report.ended} ended here")


class WorkerReport:
    """Counts the runs that this worker executes, and shows a line for each start and end."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._began: dict[str, float] = {}
        self.ended = 0

    @property
    def running(self) -> int:
        """The number of runs that are executed now."""
        return len(self._began)

    def tell(self, what: str, run: StoredRun) -> None:
        """Show that a run was taken (`executes`), or the status with which its execution here has ended."""
        where = f"{time_of_day()} run {run.id} ({run.service}.{run.method})"
        if what == "executes":
            self._began[run.id] = time.monotonic()
            self._show(f"{where}: continues here")
            return
        seconds = time.monotonic() - self._began.pop(run.id, time.monotonic())
        self.ended += what in ("completed", "failed", "cancelled")
        self._show(f"{where}: {what} after {seconds:.1f} s")


def time_of_day() -> str:
    """Return the local time, hours to seconds."""
    return datetime.now().astimezone().strftime("%H:%M:%S")
