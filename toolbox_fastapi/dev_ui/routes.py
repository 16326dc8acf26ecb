"""The HTTP routes of the dev UI: the page and its files, the program as JSON, tool and method calls, the live log.

The program are services with their methods, tools and beans: names and types, no values. Each method has a form: a JSON
schema of its parameters, and the conversion of JSON input into arguments. Not here: access control (`access`), the page
itself (`page/`), the arguments of tools, which the tool's codec reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import Depends, FastAPI
from fastapi.sse import ServerSentEvent
from pydantic import (
    BaseModel,
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from toolbox.chat import PartialReasoning, PartialResponse, PendingCall, RunSuspended, ToolExecutionRequest, UserMessage
from toolbox.container import Container, internals_of
from toolbox.contents import (
    CONTENT_TYPES,
    PDF,
    AudioContent,
    Content,
    ImageContent,
    Media,
    PdfContent,
    TextContent,
    media_in,
)
from toolbox.context import WhileCallerWaits
from toolbox.errors import FrameworkError, RunSuspendedError, ToolAbort
from toolbox.execution.markers import Execution
from toolbox.introspection import EMPTY, Unresolved, read_signature, type_name, unwrapped
from toolbox.json_text import parse_json
from toolbox.overview import Node, nodes_of
from toolbox.runs.store import Answer, Run
from toolbox.security import Reach
from toolbox.services.declaration import local_names_of
from toolbox.services.hosting import ContainerHost
from toolbox.services.memory import MessageWindow, TokenWindow, Window, estimate_tokens
from toolbox.services.outputs import Output, Result, Shape
from toolbox.services.plans import MethodPlan, Provider
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

KEPT = "private, max-age=31536000, immutable"  # for files whose address has the version of their content
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@dataclass(frozen=True)
class PageFiles:
    """The page's files by name, each with its media type; `version` changes with their content."""

    files: Mapping[str, tuple[bytes, str]]
    version: str

    @classmethod
    @cache
    def read(cls) -> PageFiles:
        """Read the files, once. The page's own addresses of the others have the version."""
        paths = sorted(each for each in Path(__file__).with_name("page").iterdir() if each.suffix in KINDS)
        files = {each.name: (each.read_bytes(), KINDS[each.suffix]) for each in paths}
        digest = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        index, kind = files["index.html"]
        files["index.html"] = (index.replace(b'="page/', f'="page/{digest}/'.encode()), kind)
        return cls(files, digest)


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


class TypedAnswerBody(AnswerBody):
    """An answer from the page. `text` is the JSON of the arguments or of the value, as it was typed.

    Numbers in a text keep their digits: a browser rounds integers above 2^53.
    """

    text: str | None = None

    def answer(self) -> Answer:
        """Return the answer. Raises `ValueError` for a text that is not JSON, and like `AnswerBody`."""
        if self.text is None:
            return super().answer()
        name = {"approve": "arguments", "respond": "value"}.get(self.kind)
        if name is None:
            raise ValueError(f"{self.kind} has no text")
        typed = parse_json(self.text)
        if name == "arguments" and not isinstance(typed, dict):
            raise ValueError("the arguments must be a JSON object")
        return AnswerBody.model_validate({"kind": self.kind, name: typed}).answer()


class RunAnswersBody(BaseModel):
    """The body of answers to the pending calls of a run; `cancel` cancels the run instead, with `reason`."""

    model_config = ConfigDict(extra="forbid")
    run_id: str
    answers: dict[str, TypedAnswerBody] = {}
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
                Route("/page/{version}/{name}", self._file),
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
        page = PageFiles.read()
        content, kind = page.files.get(request.path_params.get("name", "index.html"), (None, ""))
        if content is None:
            return _problem(404, "File not found.")
        is_kept = request.path_params.get("version") == page.version
        return Response(content, media_type=kind, headers={"cache-control": KEPT} if is_kept else None)

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
        return Response(as_json([_inbox_view(each) for each in found]), media_type="application/json")

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


def _inbox_view(run: Run[Any]) -> dict[str, Any]:
    """Return a run for the page. The `text` of a pending call is the JSON of its arguments, with all digits."""
    view = run_view(run).model_dump()
    pending = [
        {**each, "text": json.dumps(each["arguments"], indent=2, ensure_ascii=False)} for each in view["pending"]
    ]
    return {**view, "pending": pending}


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


# --- the program as the page shows it


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool with its id on the page and the methods that offer it."""

    id: str
    tool: Tool
    offered_by: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Method:
    """A service method and its form."""

    plan: MethodPlan
    form: MethodForm


class ProgramView:
    """The services, tools and beans of a started container, and its reach; read once."""

    def __init__(
        self, container: Container, endpoint_tools: Iterable[tuple[str, Tool]] = (), reach: Iterable[Reach] = ()
    ) -> None:
        self.reach = tuple(reach)
        self.host = internals_of(container).host
        self.nodes = [
            each
            for each in nodes_of(internals_of(container).describe(), container)
            if each.type != DevUiListener.__name__
        ]
        self.methods = {
            plan.where: Method(plan, form_of(plan)) for plans in self.host.plans.values() for plan in plans.values()
        }
        self.tools: dict[str, ListedTool] = {}
        self._by_place: dict[tuple[Any, ...], ListedTool] = {}
        for where, method in self.methods.items():
            for tool in method.plan.toolset.tools:
                self._list(tool).offered_by.append(where)
        for where, tool in endpoint_tools:
            self._list(tool).offered_by.append(where)
        for tool in read_tools(internals_of(container).tool_beans(), "the dev UI")[0]:
            self._list(tool)

    def _list(self, tool: Tool) -> ListedTool:
        name = tool.specification.name
        # A class and its only bean are the same tool; functions and instances are compared by identity.
        place = (name, tool.where, repr(tool.bean), id(tool.function) if tool.bean is None else None)
        if (listed := self._by_place.get(place)) is None:
            number = sum(each.tool.specification.name == name for each in self.tools.values())
            id_ = name if not number else f"{name}~{number + 1}"
            listed = self._by_place[place] = self.tools[id_] = ListedTool(id_, tool)
        return listed

    def method(self, where: str) -> Method:
        """Return a method by its id. Raises `BadInputError` for an unknown one."""
        if where not in self.methods:
            raise BadInputError(f"unknown service method {where!r}")
        return self.methods[where]

    def tool(self, id_: str) -> Tool:
        """Return a tool by its id. Raises `BadInputError` for an unknown one."""
        if id_ not in self.tools:
            raise BadInputError(f"unknown tool {id_!r}")
        return self.tools[id_].tool

    def as_json(self, title: str) -> dict[str, Any]:
        """Return the JSON data for the page."""
        by_service: dict[type[Any], list[MethodPlan]] = {}
        for method in self.methods.values():
            by_service.setdefault(method.plan.service, []).append(method.plan)
        return {
            "title": title,
            "services": [self._service(cls, plans) for cls, plans in by_service.items()],
            "tools": [_tool_as_json(each) for each in self.tools.values()],
            "beans": [_bean_as_json(each) for each in self.nodes],
            "reach": [each.as_json() for each in self.reach],
        }

    def _service(self, cls: type[Any], plans: Iterable[MethodPlan]) -> dict[str, Any]:
        plans = list(plans)
        return {
            "name": cls.__name__,
            "module": cls.__module__,
            "doc": _first_paragraph(cls.__doc__),
            "model": _model_of(self.host, plans[0].options.model),
            "methods": [self._method(plan) for plan in plans],
        }

    def _method(self, plan: MethodPlan) -> dict[str, Any]:
        form = self.methods[plan.where].form
        return {
            "id": plan.where,
            "name": plan.name,
            "doc": _first_paragraph(getattr(plan.service, plan.name).__doc__),
            "returns": _returns(plan.output),
            "streams": plan.output.is_stream,
            "memory": _memory(plan.window) if plan.memory_parameter is not None else None,
            "memory_parameter": plan.memory_parameter,
            "user_parameter": plan.user_parameter,
            "schema": form.schema,
            "tools": [each.id for each in self.tools.values() if plan.where in each.offered_by],
            "providers": [_provider_name(each) for each in plan.providers],
        }


def _tool_as_json(listed: ListedTool) -> dict[str, Any]:
    tool, specification = listed.tool, listed.tool.specification
    shown = [specification.name, specification.description, specification.parameters]
    return {
        "id": listed.id,
        "name": specification.name,
        "description": specification.description,
        "schema": specification.parameters,
        "where": tool.where,
        "runs": _place(tool.execution),
        "returns_immediately": str(tool.return_behavior) == "immediate",
        "timeout": tool.timeout,
        "wants_memory_id": bool(tool.memory_id_names),
        "needs_memory_id": tool.needs_memory_id,
        "offered_by": listed.offered_by,
        "tokens": estimate_tokens(UserMessage(as_json(shown))),
    }


def _bean_as_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "type": node.type,
        "scope": node.scope,
        "made_by": node.made_by,
        "tools": node.tools,
        "links": [{"to": bean, "manner": manner} for bean, manner in node.links],
    }


def _place(execution: Execution) -> str:
    """Describe where a tool runs."""
    if execution.is_coroutine:
        return "the event loop"
    if isinstance(execution.executor, str):
        return f"the executor {execution.executor!r}"
    words: Mapping[str, str] = {
        "blocking": "a worker thread",
        "non_blocking": "the event loop",
        "thread": "a new thread",
        "executor": "its own executor",
    }
    return words[str(execution.model)]


def _memory(window: Window | None) -> str | None:
    match window:
        case None:
            return None
        case MessageWindow(max_messages=count):
            return f"the last {count} messages"
        case TokenWindow(max_tokens=count):
            return f"the last messages with {count} tokens"
        case _:
            return type(window).__name__


def _model_of(host: ContainerHost, name: str | None) -> str:
    """Return the model's name and class; not its address, which may contain a secret."""
    try:
        model = host.model(name)
    except Exception as error:  # a program whose services are all replaced by fakes needs no model
        return f"none ({type(error).__name__})"
    kind, known_as = type(model).__name__, getattr(model, "model", None)
    shown = f"{kind}, {known_as}" if isinstance(known_as, str) else kind
    return shown if name is None else f"{name!r}: {shown}"


def _returns(output: Output) -> str:
    inner = type_name(output.type)
    match output.shape:
        case Shape.RESULT:
            return f"Result[{inner}]"
        case Shape.EVENT_STREAM:
            return "a stream of events"
        case Shape.TEXT_STREAM:
            return "a stream of text"
        case Shape.ITEM_STREAM:
            return f"a stream of {inner}"
        case Shape.VALUE:
            return inner


def _provider_name(provider: Provider) -> str:
    found = provider.bean or provider.given
    return getattr(found, "__name__", None) or type(found).__name__


def _first_paragraph(text: str | None) -> str | None:
    return inspect.cleandoc(text).partition("\n\n")[0] if text else None


# --- forms of service methods


class BadInputError(Exception):
    """The page sent invalid input; the message says why."""


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter: its JSON schema, the function that converts the input, and whether it is required."""

    schema: dict[str, Any]
    read: Callable[[Any], Any]
    required: bool


@dataclass(frozen=True, slots=True)
class MethodForm:
    """The form of a method; `absent` are the arguments that the form does not ask for."""

    fields: Mapping[str, Field]
    absent: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """Return the fields as one JSON schema."""
        required = [name for name, field in self.fields.items() if field.required]
        properties = {name: field.schema for name, field in self.fields.items()}
        return {"type": "object", "properties": properties, "required": required}

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the method's arguments by name. Raises `BadInputError` with all problems."""
        try:
            typed = parse_json(text)
        except ValueError as error:
            raise BadInputError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(typed, dict):
            raise BadInputError("the arguments must be a JSON object")
        arguments, wrong = dict(self.absent), []
        for name, each in self.fields.items():
            if name in typed:
                try:
                    arguments[name] = each.read(typed[name])
                except ValidationError as error:
                    wrong += [
                        _error_text(name, fault) for fault in error.errors(include_url=False, include_input=False)
                    ]
                except (ValueError, TypeError) as error:
                    wrong.append(f"{name}: {error}")
            elif each.required:
                wrong.append(f"{name}: missing")
        wrong += [f"{name}: unknown parameter" for name in typed if name not in self.fields]
        if wrong:
            raise BadInputError("; ".join(wrong))
        return arguments


def form_of(plan: MethodPlan) -> MethodForm:
    """Create the form of a service method."""
    function = inspect.getattr_static(plan.service, plan.name)
    read = read_signature(function, nearer=local_names_of(plan.service))
    annotations = {each.name: each.annotation for each in read.parameters}
    fields: dict[str, Field] = {}
    absent: dict[str, Any] = {}
    for parameter in plan.signature.parameters.values():
        name, required = parameter.name, parameter.default is EMPTY
        annotation = annotations[name]
        if name in plan.history:
            if required:
                absent[name] = []
        elif name in plan.contents:
            fields[name] = _contents_field(annotation, required)
        elif name == plan.user_parameter and _is_message(annotation):
            fields[name] = Field({"type": "string"}, _message_reader(annotation), required)
        else:
            fields[name] = _field(annotation, required)
    return MethodForm(fields, absent)


def _field(annotation: Any, required: bool) -> Field:
    if annotation is EMPTY or isinstance(annotation, Unresolved):
        return Field({}, lambda value: value, required)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        schema = adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        return Field({}, lambda value: value, required)
    return Field(schema, adapter.validate_python, required)


def _error_text(name: str, error: Any) -> str:
    place = ".".join(map(str, (name, *error["loc"])))
    return f"{place}: {error['msg']}"


# --- messages and their contents


def _kinds(annotation: Any) -> set[Any]:
    """Return the types in an annotation, at any depth."""
    inner = {kind for each in get_args(annotation) for kind in _kinds(each)}
    return inner or {annotation}


def _is_message(annotation: Any) -> bool:
    return bool(_kinds(annotation) & {UserMessage, *CONTENT_TYPES})


def _message_reader(annotation: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError("must be a text")
        kinds = _kinds(annotation)
        if str in kinds:
            return value
        return UserMessage(value) if UserMessage in kinds else [TextContent(value)]

    return read


_KINDS: tuple[tuple[type[Any], str, str], ...] = (
    (ImageContent, "image/", "an image"),
    (PdfContent, PDF, "a PDF document"),
    (AudioContent, "audio/", "a recording"),
)


def _contents_field(annotation: Any, required: bool) -> Field:
    """Return a field that takes texts as they are, and images, documents and recordings as URLs or files."""
    kinds = _kinds(annotation)
    media = [each for each in _KINDS if each[0] in kinds]
    has_text = TextContent in kinds

    def content(value: Any) -> Content:
        if isinstance(value, str):
            if value.startswith("data:") or (not has_text and value.startswith(("https://", "http://"))):
                return _media(value, media)
            if has_text:
                return TextContent(value)
        raise ValueError(f"must be a file, or the URL of {_either(each[2] for each in media)}: https://… or data:…")

    def contents(value: Any) -> list[Content]:
        if not isinstance(value, list):
            raise TypeError("must be a list of URLs")
        return [content(each) for each in value]

    entry: dict[str, Any] = {"type": "string"}
    if not has_text:
        accepted = ",".join(start if start == PDF else f"{start}*" for _, start, _ in media)
        about = f"{_either(each[2] for each in media)}: a file or its URL"
        entry |= {"format": "uri", "contentMediaType": accepted, "description": about}
    origin = get_origin(unwrapped(annotation).type)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return Field({"type": "array", "items": entry}, contents, required)
    return Field(entry, content, required)


def _media(url: str, kinds: Sequence[tuple[type[Any], str, str]]) -> Media:
    """Return the content at a URL. Raises `ValueError` if the parameter does not take it."""
    if url.startswith("data:"):
        found = next((kind for kind, start, _ in kinds if url[5:].lower().startswith(start)), None)
    else:
        by_url = [kind for kind, _, _ in kinds if kind is not AudioContent]
        is_pdf = urlsplit(url).path.lower().endswith(".pdf")
        found = PdfContent if is_pdf and PdfContent in by_url else next(iter(by_url), None)
    if found is ImageContent:
        return ImageContent(url=url)
    if found is PdfContent:
        return PdfContent(url=url)
    if found is AudioContent:
        return AudioContent(url, url[5:].partition(",")[0].partition(";")[0])
    raise ValueError(f"must be {_either(each[2] for each in kinds)}")


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
