"""The HTTP routes of the dev UI: the page and its files, the program as JSON, calls, runs, conversations, the live log.

Not here: access control (`access`), the program (`program`), its calls (`page_calls`), what the page shows of
conversations (`page_conversations`), the page itself (`page/`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote

from fastapi import Depends, FastAPI
from fastapi.sse import ServerSentEvent
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from toolbox.callers import WhileCallerWaits
from toolbox.container import Container, internals_of
from toolbox.errors import ToolboxError
from toolbox.json_text import parse_json
from toolbox.runs.run_answers import Answer, Run
from toolbox.settings import ToolboxSettings
from toolbox.tools.marks import toolbox_of
from toolbox.tools.tool_calls import Tool

from ..application_routes import endpoints_of
from ..endpoints import read_endpoint_tools
from ..identities import IDENTITY_DEPENDENCY
from ..passed_on_routes import PassedOnRoute
from ..problems import status_of
from ..run_endpoints import AnswerBody, answer_pending, caller_of, run_view
from ..streaming import as_json, sse
from .access import TOKEN_KEY, DevUi, Token, print_address, server_address, take_token
from .forms import BadInputError
from .journal import DevUiListener, Entry, Journal, failure_line, make_failure_entry
from .page_calls import ask, call_tool
from .page_conversations import (
    ConversationBody,
    change_conversation,
    conversation_in,
    list_conversations,
    show_conversation,
    show_history,
)
from .program import ProgramView

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
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@dataclass(frozen=True)
class PageFiles:
    """The page's files by name, each with its media type; `version` changes with their content."""

    files: Mapping[str, tuple[bytes, str]]
    version: str

    @classmethod
    @cache
    def read_files(cls) -> PageFiles:
        """Read the files, once. The page's own addresses of the others have the version."""
        paths = sorted(each for each in Path(__file__).with_name("page").iterdir() if each.suffix in KINDS)
        files = {each.name: (each.read_bytes(), KINDS[each.suffix]) for each in paths}
        digest = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        index, kind = files["index.html"]
        files["index.html"] = (index.replace(b'="page/', f'="page/{digest}/'.encode()), kind)
        return cls(files, digest)


def mount_dev_ui(app: FastAPI, container: Container, options: DevUi) -> DevUiApplication:
    """Serve the dev UI of `container` below `options.path`, hidden from the OpenAPI document."""

    async def redirect_to_page(request: Request) -> Response:
        query = f"?token={quote(token, safe='')}" if (token := request.scope.get(TOKEN_KEY)) else ""
        location = f"{request.url.path.rpartition('/')[2]}/{query}"
        return Response(status_code=307, headers={"location": location, "cache-control": "no-store"})

    journal = Journal()
    # With a name, so that a program that injects its only listener still gets that one.
    container.register_instance(DevUiListener(journal), name="toolbox_dev_ui")
    app.add_route(options.path, redirect_to_page, include_in_schema=False)
    served = DevUiApplication(app, container, options, journal)
    guard = partial(PassedOnRoute, app, inner=served, below=options.path, has_own_identity=True)
    if (resolve_identity := getattr(app.state, IDENTITY_DEPENDENCY, None)) is not None:
        # Only calls have an identity: a browser cannot send an Authorization header for the page itself.
        calls, dependencies = f"{options.path}/api/{{call}}", [*options.dependencies, Depends(resolve_identity)]
        app.router.routes.append(guard(calls, dependencies=dependencies, methods=["POST"]))
    if options.dependencies:
        below = f"{options.path}/{{rest:path}}"
        app.router.routes.append(guard(below, dependencies=options.dependencies, methods=METHODS))
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
        given = self.model_dump(exclude={"text"}, exclude_unset=True)
        return AnswerBody.model_validate({**given, name: typed}).answer()


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
                Route("/", self._send_page),
                Route("/", self._log_in, methods=["POST"]),
                Route("/page/{name}", self._send_file),
                Route("/page/{version}/{name}", self._send_file),
                Route("/api/program", self._show_program),
                Route("/api/tool", self._handle_tool_call, methods=["POST"]),
                Route("/api/ask", self._handle_question, methods=["POST"]),
                Route("/api/runs", self._list_runs),
                Route("/api/runs", self._answer_run, methods=["POST"]),
                Route("/api/conversations", self._list_conversations),
                Route("/api/conversations", self._change_conversation, methods=["POST"]),
                Route("/api/conversation", self._show_conversation),
                Route("/api/history", self._show_history),
                Route("/api/export", self._export_conversation),
                Route("/api/log", self._stream_log),
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
            await _problem_response(403, reason)(scope, receive, send_securely)
            return
        if not scope["path"].startswith(scope.get("root_path", "")):  # a proxy has removed the root path
            scope = {**scope, "root_path": self._options.path}
        if not self.token.opens(scope) and (scope["method"], _read_path(scope)) != ("POST", "/"):
            await self._ask_for_token(scope)(scope, receive, send_securely)
            return
        try:
            await self._router(scope, receive, send_securely)
        except BadInputError as error:
            await _problem_response(422, str(error))(scope, receive, send_securely)

    # --- the token

    def start(self, settings: ToolboxSettings, mounted_at: str) -> None:
        """Use the token of the settings unless the program sets one, and print the address.

        `mounted_at` is the path of the application; empty if it is not mounted.
        """
        if not self.token.is_chosen and settings.dev_ui_token is not None:
            self.token = Token(settings.dev_ui_token.get_secret_value())
        print_address(f"{mounted_at}{self._options.path}", self.token.value, server_address())

    def hide_token(self, scope: Scope) -> None:
        """Remove the token from the URL of a request."""
        take_token(scope, self._options.path)

    def _ask_for_token(self, scope: Scope) -> Response:
        reason = "Missing or invalid token: open the dev UI with the address that the program printed at startup."
        logger.warning("%s", reason)
        if scope["method"] in ("GET", "HEAD") and _read_path(scope) in ("", "/"):
            # With "no-referrer" a browser sends the form without its origin.
            headers = {"content-security-policy": LOGIN_POLICY, "referrer-policy": "same-origin"}
            return HTMLResponse(LOGIN_PAGE, 403, headers)
        return _problem_response(403, reason)

    async def _send_page(self, request: Request) -> Response:
        if TOKEN_KEY in request.scope and self.token.value is not None:
            return self._remember_token(request)
        return await self._send_file(request)

    async def _log_in(self, request: Request) -> Response:
        body = (await _read_body(request)).decode("utf-8", "replace")
        if not self.token.matches(parse_qs(body).get("token", [""])[0].strip()):
            return self._ask_for_token({**request.scope, "method": "GET"})
        return self._remember_token(request)

    def _remember_token(self, request: Request) -> Response:
        """Set the cookie and redirect to the page, so that the URL does not contain the token."""
        response = Response(status_code=303, headers={"location": "./"})
        self.token.remember(response, request.scope)
        return response

    # --- the page

    async def _send_file(self, request: Request) -> Response:
        page = PageFiles.read_files()
        content, kind = page.files.get(request.path_params.get("name", "index.html"), (None, ""))
        if content is None:
            return _problem_response(404, "File not found.")
        is_kept = request.path_params.get("version") == page.version
        return Response(content, media_type=kind, headers={"cache-control": KEPT} if is_kept else None)

    async def _show_program(self, request: Request) -> Response:
        return Response(as_json(self.program.as_json(self._app.title)), media_type="application/json")

    @property
    def program(self) -> ProgramView:
        """Return the program; read again after the container was restarted."""
        if self._program is None or self._program.host is not internals_of(self._container).host:
            self._program = ProgramView(self._container, self._find_endpoint_tools(), self._container.reach(self._app))
        return self._program

    def _find_endpoint_tools(self) -> Iterator[tuple[str, Tool]]:
        graph = internals_of(self._container).graph
        for where, context in endpoints_of(self._app):
            if callable(context.endpoint) and toolbox_of(context.endpoint) is not None:
                for tool in read_endpoint_tools(context.endpoint, graph):
                    yield where, tool

    # --- calls

    async def _handle_tool_call(self, request: Request) -> Response:
        body = await _parse_body(ToolCallBody, request)
        tool = self.program.tool(body.tool)
        if tool.needs_memory_id and body.memory_id is None:
            raise BadInputError("this tool needs a memory id")
        result = await call_tool(self._container, tool, body.arguments, body.memory_id)
        return Response(as_json(result), media_type="application/json")

    async def _handle_question(self, request: Request) -> Response:
        body = await _parse_body(MethodCallBody, request)
        method = self.program.method(body.method)
        arguments = method.form.arguments(body.arguments)
        return sse(_make_events(ask(self._container, method, arguments)))

    async def _list_runs(self, request: Request) -> Response:
        runs = self._container.runs
        # Those that wait for a person are listed however many runs are newer.
        found = [*await runs.list("suspended", limit=MAX_RUNS), *await runs.list(limit=MAX_RUNS)]
        shown = {each.id: each for each in found}
        return Response(as_json([_describe_run(each) for each in shown.values()]), media_type="application/json")

    async def _answer_run(self, request: Request) -> Response:
        body = await _parse_body(RunAnswersBody, request)
        try:
            answers = {call_id: each.answer() for call_id, each in body.answers.items()}
            with WhileCallerWaits():
                async with self._container.request_scope():
                    if not body.cancel:
                        return await answer_pending(self._container, body.run_id, answers)
                    by = await caller_of(self._container)
                    await self._container.runs.cancel(body.run_id, reason=body.reason, by=by)
                    return Response(as_json({"status": "cancelled"}), media_type="application/json")
        except ValueError as error:
            raise BadInputError(str(error)) from None
        except Exception as error:
            logger.debug("run %s, answered in the dev UI, failed", body.run_id, exc_info=error)
            return Response(as_json(make_failure_entry(error)), media_type="application/json")

    # --- conversations

    async def _list_conversations(self, request: Request) -> Response:
        return await _answer(list_conversations(self._container, self.program, request.query_params))

    async def _show_conversation(self, request: Request) -> Response:
        return await _answer(show_conversation(self._container, self.program, request.query_params))

    async def _show_history(self, request: Request) -> Response:
        return await _answer(show_history(self._container, request.query_params))

    async def _export_conversation(self, request: Request) -> Response:
        async def export() -> object:
            return await conversation_in(self._container, request.query_params).export()

        response = await _answer(export())
        if response.status_code == 200:
            response.headers["content-disposition"] = 'attachment; filename="conversation.json"'
        return response

    async def _change_conversation(self, request: Request) -> Response:
        body = await _parse_body(ConversationBody, request)
        with WhileCallerWaits():
            async with self._container.request_scope():
                by = await caller_of(self._container)
                return await _answer(change_conversation(self._container, body, by))

    async def _stream_log(self, request: Request) -> Response:
        return sse(_make_events(self._journal.follow()))


async def _answer(work: Awaitable[object]) -> Response:
    """Return the result as JSON, or the problem. Raises `BadInputError` for a value that the page must not send."""
    try:
        return Response(as_json(await work), media_type="application/json")
    except ValueError as error:
        raise BadInputError(str(error)) from None
    except ToolboxError as error:
        logger.debug("a request of the dev UI failed", exc_info=error)
        return _problem_response(status_of(error), failure_line(error))


async def _make_events(entries: AsyncGenerator[Entry, None]) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(entries):
        async for entry in entries:
            yield ServerSentEvent(raw_data=as_json(entry))


async def _read_body(request: Request) -> bytes:
    """Return the request body. Raises `BadInputError` if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadInputError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _parse_body(kind: type[B], request: Request) -> B:
    """Return the body as a `kind`. Raises `BadInputError` if it is invalid.

    The content type must be JSON: pages of other sites cannot send it without permission.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadInputError("the content type must be application/json")
    body = await _read_body(request)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        texts = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise BadInputError("; ".join(texts)) from None


def _read_path(scope: Scope) -> str:
    """Return the path relative to the path of the dev UI."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _problem_response(status: int, detail: str) -> Response:
    problem: dict[str, Any] = {"type": "about:blank", "status": status, "detail": detail}
    return Response(as_json(problem), status, media_type="application/problem+json")


def _describe_run(run: Run[Any]) -> dict[str, Any]:
    """Return a run for the page. The `text` of a pending call is the JSON of its arguments, with all digits."""
    view = run_view(run).model_dump()
    pending = [
        {**each, "text": json.dumps(each["arguments"], indent=2, ensure_ascii=False)} for each in view["pending"]
    ]
    return {**view, "pending": pending}
