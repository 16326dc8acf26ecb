"""The HTTP routes of the dev UI: the page and its files, the program as JSON, tool and method calls, the live log.

Not here: access control (`access`), the page itself (`page/`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote

from fastapi import Depends, FastAPI
from fastapi.sse import ServerSentEvent
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from toolbox.chat import PartialReasoning, PartialResponse, PendingCall, RunSuspended, ToolExecutionRequest
from toolbox.container import Container, internals_of
from toolbox.contents import media_in
from toolbox.context import WhileCallerWaits
from toolbox.errors import FrameworkError, RunSuspendedError, ToolAbort
from toolbox.services.outputs import Result
from toolbox.settings import ToolboxSettings
from toolbox.tools.failures import ToolErrors, return_to_model
from toolbox.tools.marks import toolbox_of
from toolbox.tools.pipeline import Tool
from toolbox.tools.sources import read_tools

from ..endpoints import IDENTITY_DEPENDENCY, endpoints_of
from ..routers import AnswerBody, answered, pending_view, run_view
from ..streaming import EVENTS, as_json, close_stream, iterate, sse
from .access import TOKEN_KEY, DevUi, Token, guarded_route, print_address, server_address, take_token
from .journal import DevUiListener, Entry, Journal, entry_callback, failure, media_entry, plain
from .program import BadInputError, Method, ProgramView

logger = logging.getLogger("toolbox.fastapi")

B = TypeVar("B", bound=BaseModel)

MAX_RUNS = 200
"""The newest runs that the inbox shows."""

MAX_BODY_BYTES = 24_000_000
"""Room for a document or a recording of 16 MB, in base64."""

SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
LOGIN_POLICY = "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
LOGIN_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Dev UI: token required</title>
</head>
<body>
<h1>Dev UI</h1>
<p>Open the address that the program printed when it started, or enter its token:</p>
<form method="post">
<label>Token <input type="password" name="token" autocomplete="off" required autofocus></label>
<button>Open</button>
</form>
</body>
</html>
"""
RAW_SECURITY = [(name.encode(), value.encode()) for name, value in SECURITY.items()]

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the page's files by name, each with its media type."""
    folder = Path(__file__).with_name("page")
    return {each.name: (each.read_bytes(), KINDS[each.suffix]) for each in folder.iterdir() if each.suffix in KINDS}


def mount_dev_ui(app: FastAPI, container: Container, options: DevUi) -> DevUiApplication:
    """Serve the dev UI of `container` below `options.path`, hidden from the OpenAPI document."""

    async def to_the_page(request: Request) -> Response:
        query = f"?token={quote(token, safe='')}" if (token := request.scope.get(TOKEN_KEY)) else ""
        location = f"{request.url.path.rpartition('/')[2]}/{query}"
        return Response(status_code=307, headers={"location": location, "cache-control": "no-store"})

    journal = Journal()
    # With a name, so that a program that injects its only listener still gets that one.
    container.register_instance(DevUiListener(journal), name="toolbox_dev_ui")
    app.add_route(options.path, to_the_page, include_in_schema=False)
    served = DevUiApplication(app, container, options, journal)
    if (resolve_identity := getattr(app.state, IDENTITY_DEPENDENCY, None)) is not None:
        # Only calls have an identity: a browser cannot send an Authorization header for the page itself.
        calls, dependencies = f"{options.path}/api/{{call}}", [*options.dependencies, Depends(resolve_identity)]
        app.router.routes.append(guarded_route(app, calls, served, dependencies, below=options.path, methods=["POST"]))
    if options.dependencies:
        below = f"{options.path}/{{rest:path}}"
        app.router.routes.append(guarded_route(app, below, served, options.dependencies, below=options.path))
    else:
        app.mount(options.path, served, name="toolbox dev UI")
    return served


class ToolCallBody(BaseModel):
    """The body of a tool call; `arguments` is text, as a model sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    tool: str
    arguments: str
    memory_id: str | None = None


class MethodCallBody(BaseModel):
    """The body of a method call; `arguments` is a JSON object with the parameters, as text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    method: str
    arguments: str


class RunAnswersBody(BaseModel):
    """The body of answers to the pending calls of a run; `cancel` cancels the run instead, with `reason`."""

    model_config = ConfigDict(extra="forbid")
    run_id: str
    answers: dict[str, AnswerBody] = {}
    cancel: bool = False
    reason: str | None = None


class DevUiApplication:
    """The ASGI application below the path of the dev UI."""

    def __init__(self, app: FastAPI, container: Container, options: DevUi, journal: Journal) -> None:
        self._app, self._container, self._options, self._journal = app, container, options, journal
        self._program: ProgramView | None = None
        self.token = Token(options.token)
        self._router = Router(
            [
                Route("/", self._page),
                Route("/", self._log_in, methods=["POST"]),
                Route("/page/{name}", self._file),
                Route("/api/program", self._show_program),
                Route("/api/tool", self._call_tool, methods=["POST"]),
                Route("/api/ask", self._ask, methods=["POST"]),
                Route("/api/runs", self._list_runs),
                Route("/api/runs", self._answer_run, methods=["POST"]),
                Route("/api/log", self._log),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_securely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [*message.get("headers", ())]
                names = {name for name, _ in own}
                message["headers"] = [*own, *(each for each in RAW_SECURITY if each[0] not in names)]
            await send(message)

        if (reason := self._options.refusal(scope)) is not None:
            logger.warning("%s", reason)
            await _problem(403, reason)(scope, receive, send_securely)
            return
        if not scope["path"].startswith(scope.get("root_path", "")):  # a proxy has removed the root path
            scope = {**scope, "root_path": self._options.path}
        if not self.token.opens(scope) and (scope["method"], _path_in(scope)) != ("POST", "/"):
            await self._ask_for_token(scope)(scope, receive, send_securely)
            return
        try:
            await self._router(scope, receive, send_securely)
        except BadInputError as error:
            await _problem(422, str(error))(scope, receive, send_securely)

    # --- the token

    def start(self, settings: ToolboxSettings) -> None:
        """Use the token of the settings unless the program sets one, and print the address."""
        if not self.token.is_chosen and settings.dev_ui_token is not None:
            self.token = Token(settings.dev_ui_token.get_secret_value())
        print_address(self._options.path, self.token.value, server_address())

    def hide_token(self, scope: Scope) -> None:
        """Remove the token from the URL of a request."""
        take_token(scope, self._options.path)

    def _ask_for_token(self, scope: Scope) -> Response:
        reason = "Missing or invalid token: open the dev UI with the address that the program printed at startup."
        logger.warning("%s", reason)
        if scope["method"] in ("GET", "HEAD") and _path_in(scope) in ("", "/"):
            # With "no-referrer" a browser sends the form without its origin.
            headers = {"content-security-policy": LOGIN_POLICY, "referrer-policy": "same-origin"}
            return HTMLResponse(LOGIN_PAGE, 403, headers)
        return _problem(403, reason)

    async def _page(self, request: Request) -> Response:
        if TOKEN_KEY in request.scope and self.token.value is not None:
            return self._logged_in(request)
        return await self._file(request)

    async def _log_in(self, request: Request) -> Response:
        body = (await _body_of(request)).decode("utf-8", "replace")
        if not self.token.matches(parse_qs(body).get("token", [""])[0].strip()):
            return self._ask_for_token({**request.scope, "method": "GET"})
        return self._logged_in(request)

    def _logged_in(self, request: Request) -> Response:
        """Set the cookie and redirect to the page, so that the URL does not contain the token."""
        response = Response(status_code=303, headers={"location": "./"})
        self.token.remember(response, request.scope)
        return response

    # --- the page

    async def _file(self, request: Request) -> Response:
        content, kind = page_files().get(request.path_params.get("name", "index.html"), (None, ""))
        if content is None:
            return _problem(404, "File not found.")
        return Response(content, media_type=kind)

    async def _show_program(self, request: Request) -> Response:
        return Response(as_json(self.program.as_json(self._app.title)), media_type="application/json")

    @property
    def program(self) -> ProgramView:
        """Return the program; read again after the container was restarted."""
        if self._program is None or self._program.host is not internals_of(self._container).host:
            self._program = ProgramView(self._container, self._endpoint_tools(), self._container.reach(self._app))
        return self._program

    def _endpoint_tools(self) -> Iterator[tuple[str, Tool]]:
        for where, context in endpoints_of(self._app.routes):
            tools, _ = read_tools(toolbox_of(context.endpoint) or (), where)
            for tool in tools:
                yield where, tool

    # --- calls

    async def _call_tool(self, request: Request) -> Response:
        body = await _read(ToolCallBody, request)
        tool = self.program.tool(body.tool)
        if tool.needs_memory_id and body.memory_id is None:
            raise BadInputError("this tool needs a memory id")
        result = await call_tool(self._container, tool, body.arguments, body.memory_id)
        return Response(as_json(result), media_type="application/json")

    async def _ask(self, request: Request) -> Response:
        body = await _read(MethodCallBody, request)
        method = self.program.method(body.method)
        arguments = method.form.arguments(body.arguments)
        return sse(_events(ask(self._container, method, arguments)))

    async def _list_runs(self, request: Request) -> Response:
        found = await self._container.runs.list(limit=MAX_RUNS)
        return Response(as_json([run_view(each).model_dump() for each in found]), media_type="application/json")

    async def _answer_run(self, request: Request) -> Response:
        body = await _read(RunAnswersBody, request)
        try:
            if body.cancel:
                await self._container.runs.cancel(body.run_id, reason=body.reason)
                return Response(as_json({"status": "cancelled"}), media_type="application/json")
            answers = {call_id: each.answer() for call_id, each in body.answers.items()}
            with WhileCallerWaits():
                async with self._container.request_scope():
                    return await answered(self._container, body.run_id, answers)
        except ValueError as error:
            raise BadInputError(str(error)) from None
        except Exception as error:
            logger.debug("run %s, answered in the dev UI, failed", body.run_id, exc_info=error)
            return Response(as_json(failure(error)), media_type="application/json")

    async def _log(self, request: Request) -> Response:
        return sse(_events(self._journal.follow()))


async def _events(entries: AsyncGenerator[Entry, None]) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(entries):
        async for entry in entries:
            yield ServerSentEvent(raw_data=as_json(entry))


async def _body_of(request: Request) -> bytes:
    """Return the request body. Raises `BadInputError` if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadInputError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _read(kind: type[B], request: Request) -> B:
    """Return the body as a `kind`. Raises `BadInputError` if it is invalid.

    The content type must be JSON: pages of other sites cannot send it without permission.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadInputError("the content type must be application/json")
    body = await _body_of(request)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        texts = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise BadInputError("; ".join(texts)) from None


def _path_in(scope: Scope) -> str:
    """Return the path relative to the path of the dev UI."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _problem(status: int, detail: str) -> Response:
    problem: dict[str, Any] = {"type": "about:blank", "status": status, "detail": detail}
    return Response(as_json(problem), status, media_type="application/problem+json")


ERRORS_TO_MODEL = ToolErrors(on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model)


class DevUiPage:
    """The `InvocationContext.service` of a tool that is called from the page."""


_numbers = count(1)


# --- a call of one tool


async def call_tool(container: Container, tool: Tool, arguments: str, memory_id: str | None) -> Entry:
    """Call a tool with the arguments as text, like a model does; return the result as a model would read it."""
    request = ToolExecutionRequest(f"dev-ui-{next(_numbers)}", tool.specification.name, arguments)
    try:
        with WhileCallerWaits():
            async with container.request_scope():
                outcome = await internals_of(container).host.execute(
                    {request.name: tool}, request, DevUiPage, ERRORS_TO_MODEL, memory_id
                )
    except (FrameworkError, ToolAbort) as error:  # a model never sees these, the developer does
        return failure(error)
    execution = outcome.execution
    return {
        "type": "result",
        "text": execution.result,
        "is_error": execution.is_error,
        "duration": execution.duration,
        "contents": [media_entry(each) for each in media_in(outcome.message.contents)],
    }


# --- a service's method


def _suspended(run_id: str | None, pending: Sequence[PendingCall]) -> Entry:
    return {"type": "suspended", "run_id": run_id, "pending": [pending_view(each) for each in pending]}


async def ask(container: Container, method: Method, arguments: Mapping[str, Any]) -> AsyncGenerator[Entry, None]:
    """Call a method; yield texts, items and tool calls as they happen, then an answer or a failure."""
    call = _MethodCall(container, method, arguments)
    task = asyncio.create_task(call.run())
    try:
        while (entry := await call.entries.get()) is not None:
            yield entry
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _MethodCall:
    """One call of a service method, which puts its entries into a queue."""

    def __init__(self, container: Container, method: Method, arguments: Mapping[str, Any]) -> None:
        self._container, self._plan, self._arguments = container, method.plan, arguments
        self.entries: asyncio.Queue[Entry | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._text: list[str] = []

    def _emit(self, entry: Entry | None) -> None:
        # Entries can come from other threads and loops: the container may run on another loop than the application.
        self._loop.call_soon_threadsafe(self.entries.put_nowait, entry)

    async def run(self) -> None:
        """Call the method and emit its entries; the last one is None."""
        began = time.perf_counter()
        entry_callback.set(self._emit)  # in this task and the calls it makes
        self._emit({"type": "asked", "at": time.time() * 1000})
        try:
            outcome = await self._call()
        except RunSuspendedError as error:
            outcome = _suspended(error.run_id, error.pending)
        except Exception as error:
            logger.debug("%s, called from the dev UI, failed", self._plan.where, exc_info=error)
            outcome = failure(error)
        self._emit({**outcome, "at": time.time() * 1000, "duration": time.perf_counter() - began})
        self._emit(None)

    async def _call(self) -> Entry:
        async with self._container.request_scope():
            service = await self._container.aget(self._plan.service)
            function = getattr(service, self._plan.name)
            if self._plan.is_async:
                value = function(**self._arguments)
            else:
                value = await run_in_threadpool(function, **self._arguments)
            if inspect.isawaitable(value):
                value = await value
            if self._plan.output.is_stream:
                return await self._emit_stream(value)
        if isinstance(value, Result) and value.pending:
            return _suspended(value.run_id, value.pending)
        return {"type": "answer", "value": plain(value.content if isinstance(value, Result) else value)}

    async def _emit_stream(self, stream: Any) -> Entry:
        has_items = False
        try:
            async for each in iterate(stream):
                match each:
                    case str() | PartialResponse():
                        text = each if isinstance(each, str) else each.text
                        self._text.append(text)
                        self._emit({"type": "text", "text": text})
                    case PartialReasoning(text):
                        self._emit({"type": "reasoning", "text": text})
                    case RunSuspended(run_id, pending):
                        return _suspended(run_id, pending)
                    case _ if not isinstance(each, EVENTS):
                        has_items = True
                        self._emit({"type": "item", "value": plain(each)})
        finally:
            await close_stream(stream)
        return {"type": "answer", "value": None if has_items else "".join(self._text)}
