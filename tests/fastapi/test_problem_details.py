"""`ToolboxError`s become problem details that tell nothing of the inside; the application's own handlers win."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from starlette.testclient import TestClient, WebSocketDenialResponse

from toolbox import (
    Container,
    InvalidMemoryIdError,
    InvocationTimeoutError,
    MissingBeanError,
    ModelHttpError,
    ModelTimeoutError,
    RestClientError,
    RestTimeoutError,
    ToolboxError,
)
from toolbox.limits import Usage, UsageLimitExceededError
from toolbox.runs import RunSuspendedError
from toolbox.security import ForbiddenError, UnauthenticatedError
from toolbox_fastapi import install, sse

pytestmark = pytest.mark.anyio


def application(error: Exception, **options: Any) -> FastAPI:
    app = FastAPI(**options)
    install(app, Container())

    @app.get("/")
    async def endpoint() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "status", "title"),
    [
        (InvocationTimeoutError("Secret", "chat", 5), 504, "Gateway Timeout"),
        (ModelTimeoutError("secret"), 504, "Gateway Timeout"),
        (RestTimeoutError("secret", "http://secret"), 504, "Gateway Timeout"),
        (ModelHttpError(401, "secret key"), 502, "Bad Gateway"),
        (InvalidMemoryIdError("Secret", "secret", "secret"), 422, "Unprocessable Entity"),
        (RestClientError("secret", "http://secret"), 500, "Internal Server Error"),
        (MissingBeanError("Secret"), 500, "Internal Server Error"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_errors_become_problem_details(running, error: Exception, status: int, title: str) -> None:
    async with running(application(error)) as client:
        reply = await client.get("/")

    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/problem+json"
    assert {"type": "about:blank", "title": title, "status": status}.items() <= reply.json().items()
    assert "secret" not in reply.text.lower()


async def test_details_that_the_client_does_not_get_are_logged(running, caplog: pytest.LogCaptureFixture) -> None:
    async with running(application(MissingBeanError("Secret"))) as client:
        await client.get("/")

    assert "no bean provides Secret" in caplog.text


@pytest.mark.parametrize("kind", [ModelHttpError, ToolboxError, TimeoutError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async def", "def"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
async def test_the_applications_exception_handler_takes_precedence(
    running, kind: Any, asynchronous: bool, before: bool
) -> None:
    def handle(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"own": type(error).__name__}, 418)

    async def handle_on_loop(request: Request, error: Exception) -> JSONResponse:
        return handle(request, error)

    error = ModelTimeoutError("late") if kind is TimeoutError else ModelHttpError(500, "broken")
    own = handle_on_loop if asynchronous else handle
    app = application(error, exception_handlers={kind: own} if before else {})
    if not before:
        app.add_exception_handler(kind, own)

    async with running(app) as client:
        reply = await client.get("/")

    assert (reply.status_code, reply.json()) == (418, {"own": type(error).__name__})


async def test_other_errors_are_handled_by_the_application(running) -> None:
    async with running(application(HTTPException(404, "gone"))) as client:
        reply = await client.get("/")
        assert (reply.status_code, reply.json()) == (404, {"detail": "gone"})

    async with running(application(KeyError("x"))) as client:
        reply = await client.get("/")
        assert (reply.status_code, reply.text) == (500, "Internal Server Error")


async def test_errors_in_a_mounted_application_become_problem_details(running) -> None:
    app, mounted = application(KeyError()), FastAPI()
    app.mount("/mounted", mounted)

    @mounted.get("/")
    async def endpoint() -> None:
        raise ModelHttpError(500, "broken")

    async with running(app) as client:
        reply = await client.get("/mounted/")

    assert (reply.status_code, reply.headers["content-type"]) == (502, "application/problem+json")


@pytest.mark.parametrize("accepted", [True, False])
async def test_an_error_closes_a_websocket(connect, accepted: bool) -> None:
    app = FastAPI()
    install(app, Container())

    @app.websocket("/")
    async def conversation(websocket: WebSocket) -> None:
        if accepted:
            await websocket.accept()
        raise ModelHttpError(500, "secret")

    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        await client.start()

    assert client.response[-1] == {"type": "websocket.close", "code": 1011, "reason": "Bad Gateway"}


async def test_a_stream_that_fails_with_an_unusual_status_sends_it(running) -> None:
    app = FastAPI()
    install(app, Container())

    async def texts() -> AsyncIterator[str]:
        yield "a"
        raise HTTPException(420, "Enhance your calm.")

    @app.get("/")
    async def stream() -> Response:
        return sse(texts())

    async with running(app) as client:
        reply = await client.get("/")

    last = reply.text.strip().split("\n")[-1].removeprefix("data: ")
    assert json.loads(last) == {
        "type": "about:blank",
        "title": "Error",
        "status": 420,
        "detail": "Enhance your calm.",
    }


# --- groups of errors


class Teapot(Exception):
    pass


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([ModelHttpError(500, "secret")], 502),
        ([HTTPException(409, "taken"), ModelHttpError(500, "secret")], 409),
        ([ExceptionGroup("inner", [UsageLimitExceededError("requests", 1, 1, Usage())]), HTTPException(409)], 429),
        ([Teapot(), ModelHttpError(500, "secret")], 418),
        ([ModelHttpError(500, "secret"), KeyError("secret")], 500),
        ([RunSuspendedError("r1")], 202),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_group_is_answered_as_its_first_error_if_each_has_an_answer(
    running, errors: list[Exception], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = application(ExceptionGroup("several", errors))

    @app.exception_handler(Teapot)
    async def brew(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({}, 418)

    async with running(app) as client:
        reply = await client.get("/")

    assert reply.status_code == status
    assert "secret" not in reply.text
    if status == 500:
        assert any(each.exc_info and isinstance(each.exc_info[1], ExceptionGroup) for each in caplog.records)


async def test_a_handler_for_groups_takes_precedence(running) -> None:
    app = application(ExceptionGroup("several", [ModelHttpError(500, "secret")]))

    @app.exception_handler(ExceptionGroup)
    def own(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"own": len(error.exceptions)}, 418)  # type: ignore[attr-defined]

    async with running(app) as client:
        reply = await client.get("/")

    assert (reply.status_code, reply.json()) == (418, {"own": 1})


async def test_a_group_in_a_stream_is_its_first_error(running) -> None:
    app = FastAPI()
    install(app, Container())

    async def texts() -> AsyncIterator[str]:
        yield "a"
        raise ExceptionGroup("several", [ModelHttpError(500, "secret")])

    @app.get("/")
    async def endpoint() -> Response:
        return sse(texts())

    async with running(app) as client:
        reply = await client.get("/")

    assert '"status": 502' in reply.text


# --- WebSockets before `accept()`


def refused(error: Exception) -> tuple[int, Any, dict[str, str]]:
    """Return the status, body and headers with which the handshake of a WebSocket is refused."""
    app = FastAPI()
    install(app, Container())

    @app.websocket("/")
    async def conversation(websocket: WebSocket) -> None:
        raise error

    with (
        TestClient(app) as client,
        pytest.raises(WebSocketDenialResponse) as denied,
        client.websocket_connect("/"),
    ):
        pass
    response = denied.value
    return response.status_code, response.json(), dict(response.headers)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(UnauthenticatedError("x"), 401), (ForbiddenError("x", "ann", ["boss"]), 403)]
)
def test_a_refusal_before_accept_has_its_http_status(error: Exception, status: int, grouped: bool) -> None:
    found, body, headers = refused(ExceptionGroup("several", [error]) if grouped else error)

    assert (found, body["status"]) == (status, status)
    assert ("www-authenticate" in headers) == (status == 401)


def test_a_group_before_accept_is_answered_as_its_first_error() -> None:
    status, body, _ = refused(ExceptionGroup("several", [HTTPException(409, "taken"), ModelHttpError(500, "x")]))

    assert (status, body) == (409, {"detail": "taken"})
