"""Cancels suspended runs that nobody will continue, because the error that names them was let through.

Not here: the runs themselves (`toolbox.runs`), suspending a call (`driver`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from ..errors import RunNotFoundError, RunSuspendedError


async def abandon_runs(
    error: BaseException, cancel_run: Callable[[str, str], Awaitable[str]], own: str | None = None
) -> list[str]:
    """Cancel the runs of a `RunSuspendedError`, also those in groups: a tool or guardrail let it through.

    The run with the id `own` is kept. Returns the names of the services of the others.
    """
    services = []
    for each in _suspensions_in(error):
        if each.run_id == own:
            continue
        each.is_abandoned = True
        service = each.pending[0].service if each.pending else "the service"
        with suppress(RunNotFoundError):  # a run of another host
            service = await cancel_run(each.run_id, "the call that needed its result has ended")
        services.append(service.rpartition(".")[2])
    return services


def _suspensions_in(error: BaseException) -> Iterator[RunSuspendedError]:
    """Yield the suspensions in an exception, which may be a group."""
    if isinstance(error, RunSuspendedError):
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _suspensions_in(each)
