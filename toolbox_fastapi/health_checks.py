"""`health_router`: endpoints for the liveness and the readiness of an application.

Not here: the checks themselves, which are the `ready()` methods of beans.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from toolbox.container import Container, internals_of
from toolbox.errors import ContainerNotStartedError

from .exchanges import current_exchange

logger = logging.getLogger("toolbox.fastapi")


def health_router(
    container: Container, *, prefix: str = "/health", timeout: float = 5.0, tags: Sequence[str] = ("health",)
) -> APIRouter:
    """Return a router with `GET {prefix}/live` and `GET {prefix}/ready`.

        app.include_router(health_router(container))

    `/live` answers 200 while the event loop runs. It checks nothing else, so a slow database does not cause a restart.
    `/ready` answers 200 if the container is started, the application is not shutting down, and all checks pass;
    otherwise 503. The response names the checks and says which ones passed. Errors are logged by `toolbox.fastapi` and
    never sent to the client.

    A check is the method `ready()`, `def` or `async def`, without parameters, of an application-scoped bean, such
    as the stores for SQL and Redis, and the MCP client. A bean that was not created yet is checked if its declared
    class has the method. A check fails if it returns False, raises an exception, or takes longer than `timeout`
    seconds. Checks run together; a `def` check runs on its own thread. A check that is still running is not started
    again, however often clients ask.

    Raises `ValueError` if `timeout` is not a positive number.
    """
    if not 0 < timeout < float("inf"):
        raise ValueError(f"invalid timeout={timeout!r}; use a number of seconds above 0")
    router = APIRouter(prefix=prefix, tags=list(tags))
    checks = _Checks(container, timeout)

    @router.get("/live", summary="Liveness")
    async def live() -> JSONResponse:
        """Answer 200 while the process serves requests."""
        return _make_response(200, {"status": "live"})

    @router.get("/ready", summary="Readiness", responses={503: {"description": "Not ready"}})
    async def ready() -> JSONResponse:
        """Answer 200 if all checks pass, else 503."""
        exchange = current_exchange()
        begun = exchange.shutdown_begun if exchange is not None else None
        if not container.is_started or (begun is not None and begun.is_set()):
            return _make_response(503, {"status": "not ready", "checks": {}})
        results = await checks.results()
        passed = results is not None and all(results.values())
        shown = {name: "passed" if each else "failed" for name, each in (results or {}).items()}
        return _make_response(200 if passed else 503, {"status": "ready" if passed else "not ready", "checks": shown})

    return router


def _make_response(status: int, content: dict[str, Any]) -> JSONResponse:
    return JSONResponse(content, status, headers={"Cache-Control": "no-store"})


class _Checks:
    """Runs the checks of a container; requests that arrive during a round share its results."""

    def __init__(self, container: Container, timeout: float) -> None:
        self._container, self._timeout = container, timeout
        self._round: asyncio.Task[dict[str, bool] | None] | None = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._on_threads: set[str] = set()

    async def results(self) -> dict[str, bool] | None:
        """Return which checks passed, by the name of the bean; None if the container is not started."""
        loop = asyncio.get_running_loop()
        if self._round is None or self._round.done() or self._round.get_loop() is not loop:
            # In an empty context: a round belongs to no request, and can outlive the one that started it.
            self._round = loop.create_task(self._run_all(), context=Context())
        return await asyncio.shield(self._round)

    async def _run_all(self) -> dict[str, bool] | None:
        try:
            beans = internals_of(self._container).application_beans_with("ready")
        except ContainerNotStartedError:
            return None
        results = await asyncio.gather(*(self._passes(name, get) for name, get in beans.items()))
        return dict(zip(beans, results, strict=True))

    async def _passes(self, name: str, get: Callable[[], Awaitable[Any]]) -> bool:
        loop = asyncio.get_running_loop()
        earlier = self._running.get(name)
        if earlier is not None and not earlier.done() and earlier.get_loop() is loop:
            logger.warning("readiness check %s failed: an earlier call still runs", name)
            return False
        check = self._running[name] = loop.create_task(self._run_check(name, get))
        check.add_done_callback(_retrieve_error)
        # Not asyncio.timeout: it would wait for a check that ignores its cancellation.
        await asyncio.wait({check}, timeout=self._timeout)
        if not check.done():
            logger.warning("readiness check %s failed: no answer within %g s", name, self._timeout)
            if name not in self._on_threads:  # nothing can stop a thread
                check.cancel()
            return False
        if check.cancelled():
            logger.warning("readiness check %s failed: it was cancelled", name)
            return False
        error = check.exception()
        if error is not None:
            logger.warning("readiness check %s failed: %s", name, type(error).__name__, exc_info=error)
            return False
        if check.result() is False:
            logger.warning("readiness check %s failed: it returned False", name)
        return check.result() is not False

    async def _run_check(self, name: str, get: Callable[[], Awaitable[Any]]) -> Any:
        """Call `ready()` of a bean; a bean that cannot be created fails its check."""
        ready = getattr(await get(), "ready", None)
        if ready is None:  # a fake without this method
            return True
        if inspect.iscoroutinefunction(ready):
            return await ready()
        self._on_threads.add(name)
        try:
            value = await _call_on_thread(ready)
        finally:
            self._on_threads.discard(name)
        return await value if inspect.isawaitable(value) else value


def _retrieve_error(check: asyncio.Task[Any]) -> None:
    """Mark the error of a check as handled, also of one that ends after its timeout."""
    if not check.cancelled():
        check.exception()


async def _call_on_thread(function: Callable[[], Any]) -> Any:
    """Call `function` on a new thread: a check that hangs must not occupy a thread of a pool."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle_future(value: Any, error: BaseException | None) -> None:
        if outcome.done():  # cancelled with the loop
            return
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)

    def run_function() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is already closed
            loop.call_soon_threadsafe(settle_future, value, error)

    threading.Thread(target=run_function, name="toolbox-readiness", daemon=True).start()
    return await outcome
