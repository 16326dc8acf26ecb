"""What a client is told of an error: RFC 9457 problem details.

Not here: which errors those are (`toolbox.errors`), the failure of a stream that has begun (`streaming`).
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketState

from toolbox.errors import InvalidMemoryIdError, ModelError, ToolboxError

from .exchanges import ApplicationStoppingError, ClientDisconnectedError

logger = logging.getLogger("toolbox.fastapi")

Handler = Callable[[Any, Any], Response | Awaitable[Response | None] | None]

CLIENT_CLOSED_REQUEST = 499
"""nginx's word for it; nobody is there to read it."""


def status_of(error: BaseException) -> int:
    """The HTTP status that tells a client of `error`."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, ClientDisconnectedError):
        return CLIENT_CLOSED_REQUEST
    if isinstance(error, ApplicationStoppingError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, ToolboxError) and isinstance(error, TimeoutError):
        return HTTPStatus.GATEWAY_TIMEOUT
    if isinstance(error, ModelError):
        return HTTPStatus.BAD_GATEWAY
    if isinstance(error, InvalidMemoryIdError):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    return HTTPStatus.INTERNAL_SERVER_ERROR


def problem_details(error: BaseException) -> dict[str, Any]:
    """`type`, `title`, `status`, sometimes `detail`: what the error itself says is not for the client."""
    status = status_of(error)
    if status == CLIENT_CLOSED_REQUEST:
        return {"type": "about:blank", "title": "Client Closed Request", "status": status}
    problem: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": int(status)}
    if isinstance(error, HTTPException):
        problem["detail"] = error.detail
    elif status == HTTPStatus.GATEWAY_TIMEOUT:
        problem["detail"] = "The answer took too long."
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        problem["detail"] = "The server is stopping."
    elif isinstance(error, InvalidMemoryIdError):
        problem["detail"] = "The id of the conversation is invalid."
    elif status == HTTPStatus.BAD_GATEWAY:
        problem["detail"] = "The language model did not give a usable answer."
    return problem


def log(error: BaseException, where: str) -> None:
    """Writes down what the client is not told."""
    if isinstance(error, ClientDisconnectedError):
        logger.debug("%s: %s", where, error)
    elif status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s failed", where, exc_info=error)
    else:
        logger.warning("%s: %s: %s", where, type(error).__name__, error)


async def answer_with_problem(connection: Request | WebSocket, error: Exception) -> Response | None:
    """The exception handler for `ToolboxError`s; one of the application for a wider class (`TimeoutError`) wins."""
    own = _wider_handler(connection, error)
    if own is not None:
        handled = own(connection, error) if is_async_handler(own) else run_in_threadpool(own, connection, error)
        return await handled  # type: ignore[misc,no-any-return]  # starlette's handlers are not typed by their kind
    log(error, f"{connection.scope['type']} {connection.scope['path']}")
    problem = problem_details(error)
    if isinstance(connection, WebSocket):
        ended = WebSocketState.DISCONNECTED in (connection.client_state, connection.application_state)
        if not ended and not isinstance(error, ClientDisconnectedError):
            await connection.close(code=1011, reason=problem["title"])
        return None
    return Response(json.dumps(problem), status_code=problem["status"], media_type="application/problem+json")


def is_async_handler(handler: Handler) -> bool:
    """Whether calling an exception handler makes a coroutine."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - it is looked at, not asked for
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


def _wider_handler(connection: Request | WebSocket, error: Exception) -> Handler | None:
    handlers = connection.scope["app"].exception_handlers
    kinds = type(error).__mro__
    for kind in kinds[kinds.index(ToolboxError) + 1 :]:
        if kind is not Exception and kind in handlers:
            handler: Handler = handlers[kind]
            return handler
    return None
