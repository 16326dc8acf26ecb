"""What an application can add to its routes: `health_router`, `runs_router` and `mount_mcp`.

The first has liveness and readiness checks. The second lists, shows, follows, answers and cancels runs, for an
application's own front end. The third serves a container's tools to MCP clients at a path, over streamable HTTP.
Not here: the checks themselves, which are the `ready()` methods of beans; who may use the runs, which is the
application's decision; the MCP server itself (`toolbox.mcp`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, cast

from fastapi import APIRouter, FastAPI, Header, HTTPException, Path, Query, Request, Response
from fastapi.params import Depends
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from toolbox.container import Container, internals_of
from toolbox.errors import ContainerNotStartedError, RunAnswerError, RunNotFoundError, RunSuspendedError
from toolbox.execution.markers import BLOCKING, is_async
from toolbox.execution.runners import LoopRunner
from toolbox.introspection import takes
from toolbox.overview import ENTRIES, Entry
from toolbox.runs.run_answers import Answer, Run, approve, fail, reject, respond, retry
from toolbox.runs.run_events import number_after
from toolbox.runs.store import RunStatus
from toolbox.security import SecurityIdentity, caller_of_request, identity_from, identity_in

from .endpoints import IDENTITY_DEPENDENCY, exchange_of
from .exchanges import current_exchange, current_identity
from .passed_on_routes import PassedOnRoute
from .problems import challenge, pending_view, problem_details, suspension
from .streaming import as_json, sse

logger = logging.getLogger("toolbox.fastapi")

# --- health checks


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


# --- runs, for a front end


_MAX_ANSWERS = 1000  # in one request
_MAX_TEXT = 10_000  # characters of a reason
_PAGE = 100  # runs that are read at once while `may_see` chooses
_MAX_LOOKED_AT = 10_000  # runs for which `may_see` is called for one list


class PendingCallView(BaseModel):
    """A call that waits for an answer. `call_id` is the model's own id of the call, which a model may repeat."""

    model_config = ConfigDict(extra="forbid")  # a new field of `PendingCall` must not be left out here

    id: str
    tool_name: str
    arguments: dict[str, Any]
    service: str
    kind: Literal["approval", "deferred", "unknown_outcome"]
    reason: str | None
    attributes: dict[str, Any]
    started_by: str | None
    call_id: str


class HistoryEntryView(BaseModel):
    """One answer that a run received, or its cancellation."""

    at: datetime
    by: str | None
    call_id: str | None
    tool_name: str | None
    answer: str
    reason: str | None


class RunView(BaseModel):
    """A run. `error` is only the type of the error."""

    id: str
    service: str
    method: str
    status: RunStatus
    pending: list[PendingCallView]
    created_at: datetime
    updated_at: datetime
    history: list[HistoryEntryView]
    error: str | None
    started_by: str | None
    memory_id: str | None


class AnswerBody(BaseModel):
    """The answer to one pending call: `kind` is the name of the function in `toolbox.runs` that creates it."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["approve", "reject", "respond", "fail", "retry"]
    arguments: dict[str, Any] | None = Field(None, description="For approve: replaces all arguments.")
    value: Any = Field(None, description="For respond: the result of the call.")
    reason: str | None = Field(None, max_length=_MAX_TEXT, description="For reject and fail: the model reads it.")

    def answer(self) -> Answer:
        """Return the answer. Raises `ValueError` for a field that its kind does not have."""
        allowed = {"approve": "arguments", "respond": "value", "reject": "reason", "fail": "reason"}.get(self.kind)
        if extra := sorted(self.model_fields_set - {"kind", allowed}):
            raise ValueError(f"{self.kind} has no {extra[0]}")
        match self.kind:
            case "approve":
                return approve(self.arguments) if self.arguments is not None else approve()
            case "reject":
                return reject(self.reason) if self.reason is not None else reject()
            case "respond":
                return respond(self.value)
            case "fail":
                return fail(self.reason) if self.reason is not None else fail()
            case "retry":
                return retry()


class AnswersBody(BaseModel):
    """Answers by the ids of the pending calls. Without answers, a run that was interrupted continues."""

    model_config = ConfigDict(extra="forbid")

    answers: dict[str, AnswerBody] = Field(max_length=_MAX_ANSWERS)


class CancelBody(BaseModel):
    """Why a run is cancelled."""

    model_config = ConfigDict(extra="forbid")

    reason: str | None = Field(None, max_length=_MAX_TEXT)


RunId = Annotated[str, Path(max_length=500)]


MaySee: TypeAlias = Callable[[SecurityIdentity, Run[Any]], bool | Awaitable[bool]]
"""Decides whether a caller may see a run, and so answer and cancel it."""


def runs_router(
    container: Container,
    *,
    prefix: str = "/runs",
    tags: Sequence[str] = ("runs",),
    events: bool = True,
    may_see: MaySee | None = None,
) -> APIRouter:
    """Return a router for the runs of a container. It does not authenticate clients: pass your own dependencies.

        app.include_router(runs_router(container), dependencies=[Depends(current_operator)])

    Without `may_see` everyone who gets in sees all runs. For customers, pass a function, `def` or `async def`, that
    gets the caller's `SecurityIdentity` and the run:

        runs_router(container, may_see=lambda identity, run: run.started_by == identity.name)

    A run for which it returns False is not listed, and is an unknown run for everything else.

    - `GET {prefix}?status=&service=&limit=`: `{"runs": […]}`, newest first, at most 1,000, of the newest 10,000 if
      `may_see` hides some.
    - `GET {prefix}/{id}`: one run.
    - `GET {prefix}/{id}/events`: its events as server-sent events; `Last-Event-ID` continues. Left out with
      `events=False`.
    - `POST {prefix}/{id}/answers` with `{"answers": {"0": {"kind": "approve"}}}`: answers pending calls, and waits
      until the run ends (200, `{"run_id", "status", "content"}`) or is suspended again (202, `{"run_id", "pending"}`).
      `by` is the `SecurityIdentity` of the request.
    - `POST {prefix}/{id}/cancel` with `{"reason": …}`: cancels it, and returns it; an ended run stays as it is.

    An unknown run gets 404. An invalid answer gets 409, or 422 with `problems` for replaced arguments. A person who may
    not answer gets 403, or 401 if anonymous, with the reason. `error` of a failed run is only the name of the
    exception's type. Raises `TypeError` if `may_see` does not take two arguments.
    """
    if may_see is not None and not takes(may_see, 2):
        raise TypeError(f"runs_router: may_see must be a function (identity, run) -> bool, got {may_see!r}")
    router = APIRouter(prefix=prefix, tags=list(tags))
    visible = _VisibleRuns(container, may_see)

    @router.get("", summary="List runs")
    async def list_runs(
        status: RunStatus | None = None,
        service: Annotated[str | None, Query(max_length=500)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, list[RunView]]:
        """List runs, newest first."""
        return {"runs": [run_view(each) for each in await visible.list(status, service, limit)]}

    @router.get("/{run_id}", summary="Show a run")
    async def get_run(run_id: RunId) -> RunView:
        """Show one run."""
        return run_view(await visible.get(run_id))

    if events:

        @router.get("/{run_id}/events", summary="Follow a run", response_model=None)
        async def follow(
            run_id: RunId, last_event_id: Annotated[str | None, Header(max_length=100)] = None
        ) -> EventSourceResponse:
            """Send the events of a run, from the beginning or after `Last-Event-ID`."""
            await visible.get(run_id)
            return sse(container.runs.events(run_id, after=number_after(last_event_id)))

    @router.post("/{run_id}/answers", summary="Answer pending calls", response_model=None)
    async def answer(run_id: RunId, body: AnswersBody) -> Response:
        """Answer pending calls, and wait until the run ends or is suspended again."""
        try:
            answers = {call_id: each.answer() for call_id, each in body.answers.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        await visible.get(run_id)
        return await answer_pending(container, run_id, answers)

    @router.post("/{run_id}/cancel", summary="Cancel a run")
    async def cancel(run_id: RunId, body: CancelBody | None = None) -> RunView:
        """Cancel a run that has not ended."""
        await visible.get(run_id)
        await container.runs.cancel(run_id, reason=body.reason if body is not None else None)
        return run_view(await container.runs.get(run_id))

    return router


class _VisibleRuns:
    """The runs that `may_see` shows to the caller of the current request; all without it."""

    def __init__(self, container: Container, may_see: MaySee | None) -> None:
        self._container, self._may_see = container, may_see

    async def get(self, run_id: str) -> Run[Any]:
        """Return a run. Raises `RunNotFoundError`, also for one that is hidden."""
        run = await self._container.runs.get(run_id)
        if not await self._choose_visible([run]):
            raise RunNotFoundError(run_id)
        return run

    async def list(self, status: RunStatus | None, service: str | None, limit: int) -> list[Run[Any]]:
        """Return the newest runs. Calls `may_see` for no more than `_MAX_LOOKED_AT`."""
        found: list[Run[Any]] = []
        page = limit if self._may_see is None else max(limit, _PAGE)
        last: Run[Any] | None = None
        for _ in range(0, _MAX_LOOKED_AT, page):
            runs = await self._container.runs.list(status=status, service=service, limit=page, before=last)
            found += await self._choose_visible(runs)
            if len(found) >= limit or len(runs) < page:
                break
            last = runs[-1]
        return found[:limit]

    async def _choose_visible(self, runs: Sequence[Run[Any]]) -> Sequence[Run[Any]]:
        may_see, internals = self._may_see, internals_of(self._container)
        if may_see is None:
            return runs
        caller = await identity_in(internals)
        if is_async(may_see) or is_async(getattr(may_see, "__call__", None)):  # noqa: B004 - the method is inspected
            return [run for run in runs if await cast("Awaitable[bool]", may_see(caller, run))]

        def choose_runs() -> Sequence[Run[Any]]:
            return [run for run in runs if may_see(caller, run)]

        return cast(
            "Sequence[Run[Any]]", await LoopRunner(internals.host.workers).run(BLOCKING, choose_runs, "may_see")
        )


async def answer_pending(container: Container, run_id: str, answers: Mapping[str, Answer]) -> Response:
    """Answer pending calls as the identity of the request. Returns the response: 200, 202, 401, 403, 409 or 422."""
    identity = await identity_in(internals_of(container))
    by = None if identity.is_anonymous else identity
    try:
        result = await container.runs.resume(run_id, answers, by=by)
    except RunAnswerError as error:
        return _refusal_response(error)
    except RunSuspendedError as error:
        return _json_response(202, suspension(error.run_id, error.pending))
    if result.pending:
        return _json_response(202, suspension(run_id, result.pending))
    status = (await container.runs.get(run_id)).status
    return _json_response(200, {"run_id": run_id, "status": status, "content": result.content})


def run_view(run: Run[Any]) -> RunView:
    """Return what a client sees of a run. The text of an error can contain anything, and stays here."""
    error = run.error
    if run.status == "failed" and error is not None:
        error = error.partition(":")[0]
    return RunView(
        id=run.id,
        service=run.service,
        method=run.method,
        status=run.status,
        pending=[PendingCallView(**pending_view(each)) for each in run.pending],
        created_at=run.created_at,
        updated_at=run.updated_at,
        history=[
            HistoryEntryView(
                at=each.at,
                by=each.by,
                call_id=each.call_id,
                tool_name=each.tool_name,
                answer=each.answer,
                reason=each.reason,
            )
            for each in run.history
        ],
        error=error,
        started_by=run.started_by,
        memory_id=run.memory_id,
    )


def _refusal_response(error: RunAnswerError) -> Response:
    """Return 422 with the problems of replaced arguments, 401 or 403 for the wrong person, and 409 for the others."""
    problem = {**problem_details(error), "detail": error.reason}
    if error.problems:
        problem |= {"title": "Unprocessable Content", "status": 422}
        problem["problems"] = [{"path": _split_path(path), "message": message} for path, message in error.problems]
    headers = challenge(problem["status"], current_exchange())
    return _json_response(problem["status"], problem, "application/problem+json", headers)


def _split_path(path: object) -> list[str | int]:
    parts = path if isinstance(path, (list, tuple)) else (path,)
    return [each if isinstance(each, int) else str(each) for each in parts]


def _json_response(
    status: int,
    content: Mapping[str, Any],
    kind: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(as_json(dict(content)), status, headers, media_type=kind)


# --- tools for MCP clients


def mount_mcp(
    app: FastAPI,
    container: Container,
    tools: Iterable[Any],
    path: str = "/mcp",
    *,
    name: str = "toolbox",
    allowed_hosts: Sequence[str] = (),
    dependencies: Sequence[Depends] = (),
    identity: Callable[[Request], Any] | None = None,
) -> None:
    """Serve `tools` to MCP clients at `path`. Call it after `install`. Each call of a tool has its own request scope.

        mount_mcp(app, container, [Orders], dependencies=[Depends(authenticate)])

    `tools` are classes, functions, instances, AI services, or single tools of them, such as `Orders.find`. Their
    resources and prompts (`@mcp_resource`, `@mcp_prompt`) are served too. `name` is the server's name in the protocol.

    `dependencies` run before each request, like those of a route, after the identity is known. The dependencies of
    `FastAPI(dependencies=[…])` do not run here. Requests must use a local host name or one of `allowed_hosts`:
    `example.org` or `example.org:*`.
    Only POST is supported: the server has no sessions and sends nothing on its own.

    `identity` is a function of the `Request`, `def` or `async def`, that returns the caller's `SecurityIdentity`, or
    None for an anonymous caller. Without it, the `identity` of `install` applies. A client sees only the tools that its
    identity may call.

    Raises `IllegalConfigurationError` for a source without tools, and `ImportError` if the extra `mcp` is not
    installed.
    """
    from toolbox.mcp import mcp_server_of
    from toolbox.mcp.serving import served_tools

    has_own_identity = identity is not None
    endpoint = _McpApplication(container, tuple(tools), name, tuple(allowed_hosts), has_own_identity)
    mcp_server_of(container, endpoint.tools, name)  # raises for invalid tools
    known = getattr(app.state, IDENTITY_DEPENDENCY, None)
    if identity is not None:
        internals_of(container).declare_seed(SecurityIdentity, current_identity, is_optional=True)
        known = _make_identity_dependency(identity)
    if known is not None:  # first, so that the other dependencies see the caller
        dependencies = [Depends(known), *dependencies]
    bare = path.rstrip("/")
    served = Entry(f"MCP {bare or '/'}", tools=served_tools(container, endpoint.tools), calls_services=False)
    setattr(app.state, ENTRIES, [*getattr(app.state, ENTRIES, ()), lambda graph: [served]])
    # Two routes and no redirect: proxies and clients follow redirects of a POST incorrectly.
    for each in (bare, f"{bare}/") if bare else ("/",):
        route = PassedOnRoute(app, each, endpoint, dependencies, methods=["POST"], has_own_identity=has_own_identity)
        app.router.routes.append(route)
    app.router.lifespan_context = endpoint.wrap_lifespan(app.router.lifespan_context)


def _make_identity_dependency(identity: Callable[[Request], Any]) -> Callable[..., Any]:
    """Return the dependency that lets `identity`, a function of the request, find the caller."""

    async def resolve_identity(request: Request) -> None:
        found = (
            identity(request) if inspect.iscoroutinefunction(identity) else await run_in_threadpool(identity, request)
        )
        caller = identity_from(await found if inspect.isawaitable(found) else found, "identity= of mount_mcp(…)")
        exchange_of(request).identity = caller

    return resolve_identity


class _McpApplication:
    """Passes requests to an MCP server, which is created each time the application starts: it can run only once.

    With its own identity, the calls of a request are those of its caller; else the application knows the caller.
    """

    def __init__(
        self,
        container: Container,
        tools: tuple[Any, ...],
        name: str,
        allowed_hosts: tuple[str, ...],
        has_own_identity: bool,
    ) -> None:
        self._container, self.tools, self._name, self._hosts = container, tools, name, allowed_hosts
        self._has_own_identity = has_own_identity
        self._app: ASGIApp | None = None

    def wrap_lifespan(self, lifespan: Lifespan[Any]) -> Lifespan[Any]:
        """Return a lifespan that runs the MCP server inside the application's `lifespan`."""

        @asynccontextmanager
        async def serving(app: FastAPI) -> AsyncIterator[Any]:
            from mcp.server.transport_security import TransportSecuritySettings

            from toolbox.mcp import mcp_server_of
            from toolbox.mcp.serving import reports_progress

            server = mcp_server_of(self._container, self.tools, self._name)
            # Only a stream of events can carry progress; without it, a plain JSON reply suits every client.
            is_plain = not reports_progress(self.tools, self._container)
            local = ["127.0.0.1", "127.0.0.1:*", "localhost", "localhost:*", "[::1]", "[::1]:*"]
            security = TransportSecuritySettings(
                allowed_hosts=[*local, *self._hosts],
                allowed_origins=[
                    f"{scheme}://{host}" for scheme in ("http", "https") for host in (*local, *self._hosts)
                ],
            )
            asgi = server.streamable_http_app(
                streamable_http_path="/", stateless_http=True, json_response=is_plain, transport_security=security
            )
            async with lifespan(app) as state, server.session_manager.run():
                self._app = asgi
                try:
                    yield state
                finally:
                    self._app = None

        return serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            raise RuntimeError("the MCP server is not started; run the application with its lifespan")
        root = scope["path"].rstrip("/")
        exchange = current_exchange() if self._has_own_identity else None
        token = caller_of_request.set(None if exchange is None else exchange.identity)
        try:
            await self._app({**scope, "root_path": root, "path": f"{root}/"}, receive, send)
        finally:
            caller_of_request.reset(token)
