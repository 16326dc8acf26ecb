"""The response to an error: its HTTP status and RFC 9457 problem details, and its log record.

Not here: the errors (`toolbox.errors`), errors in a stream that has started (`streaming`).
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

from toolbox.errors import (
    ConversationSuspendedError,
    InputGuardrailError,
    InvalidMemoryIdError,
    ModelError,
    OutputGuardrailError,
    RunAnswerError,
    RunBusyError,
    RunConflictError,
    RunIncompatibleError,
    RunNotFoundError,
    RunStateError,
    RunSuspendedError,
    ToolboxError,
)
from toolbox.limits import UsageLimitExceededError
from toolbox.runs.documents import call_to_dict
from toolbox.security import ForbiddenError, UnauthenticatedError

from .exchanges import (
    ANY_CHALLENGE,
    EXCHANGE_KEY,
    ApplicationStoppingError,
    ClientDisconnectedError,
    ClientExchange,
)

logger = logging.getLogger("toolbox.fastapi")

Handler = Callable[[Any, Any], Response | Awaitable[Response | None] | None]

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; the client does not receive it."""


_RUNS: dict[tuple[type[Exception], ...], HTTPStatus] = {
    (RunSuspendedError,): HTTPStatus.ACCEPTED,
    (RunNotFoundError,): HTTPStatus.NOT_FOUND,
    (
        ConversationSuspendedError,
        RunAnswerError,
        RunBusyError,
        RunConflictError,
        RunIncompatibleError,
        RunStateError,
    ): HTTPStatus.CONFLICT,
}
"""The statuses of errors of runs."""


def status_of(error: BaseException) -> int:
    """Return the HTTP status for `error`."""
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
    if isinstance(error, OutputGuardrailError):
        return HTTPStatus.BAD_GATEWAY
    for kinds, status in _RUNS.items():
        if isinstance(error, kinds):
            return status
    if isinstance(error, (InvalidMemoryIdError, InputGuardrailError)):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    if isinstance(error, UnauthenticatedError):
        return HTTPStatus.UNAUTHORIZED
    if isinstance(error, ForbiddenError):
        return HTTPStatus.FORBIDDEN
    if isinstance(error, UsageLimitExceededError):
        return HTTPStatus.TOO_MANY_REQUESTS
    return HTTPStatus.INTERNAL_SERVER_ERROR


def problem_details(error: BaseException) -> dict[str, Any]:
    """Return `type`, `title`, `status` and sometimes `detail`; never the text of a toolbox error."""
    status = status_of(error)
    if status == CLIENT_CLOSED_REQUEST:
        return {"type": "about:blank", "title": "Client Closed Request", "status": status}
    problem: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": int(status)}
    if isinstance(error, HTTPException):
        problem["detail"] = error.detail
    elif status == HTTPStatus.GATEWAY_TIMEOUT:
        problem["detail"] = "The answer took too long."
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        problem["detail"] = "The server is shutting down."
    elif isinstance(error, InputGuardrailError):
        problem["detail"] = "The message was refused."
    elif isinstance(error, InvalidMemoryIdError):
        problem["detail"] = "The conversation id is invalid."
    elif isinstance(error, UnauthenticatedError):
        problem["detail"] = "This needs a known identity."
    elif isinstance(error, ForbiddenError):
        problem["detail"] = "You are not allowed to do this."
    elif isinstance(error, UsageLimitExceededError):
        problem["detail"] = "The usage limit is reached."
    elif status == HTTPStatus.BAD_GATEWAY:
        problem["detail"] = "The language model did not return a usable answer."
    return problem


def log(error: BaseException, where: str) -> None:
    """Log the error, whose text the client does not get."""
    if isinstance(error, (ClientDisconnectedError, RunSuspendedError)):
        logger.debug("%s: %s", where, error)
    elif status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s failed", where, exc_info=error)
    else:
        logger.warning("%s: %s: %s", where, type(error).__name__, error)


async def answer_with_problem(connection: Request | WebSocket, error: Exception) -> Response | None:
    """Answer a `ToolboxError`; the application's handler for a base class, such as `TimeoutError`, takes precedence."""
    own = _wider_handler(connection, error)
    if own is not None:
        handled = own(connection, error) if is_async_handler(own) else run_in_threadpool(own, connection, error)
        return await handled  # type: ignore[misc,no-any-return]  # starlette's handlers are not typed by their kind
    log(error, f"{connection.scope['type']} {connection.scope['path']}")
    problem = problem_details(error)
    if isinstance(connection, WebSocket):
        ended = WebSocketState.DISCONNECTED in (connection.client_state, connection.application_state)
        if not ended and not isinstance(error, ClientDisconnectedError):
            refused = problem["status"] in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            await connection.close(code=1008 if refused else 1011, reason=problem["title"])
        return None
    if isinstance(error, RunSuspendedError):
        return Response(json.dumps(suspension(error)), status_code=problem["status"], media_type="application/json")
    return Response(
        json.dumps(problem),
        status_code=problem["status"],
        headers={"WWW-Authenticate": _challenge(connection)} if isinstance(error, UnauthenticatedError) else None,
        media_type="application/problem+json",
    )


def _challenge(connection: Request) -> str:
    """Return the `WWW-Authenticate` header of a 401: the schemes from which the identity comes."""
    exchange: ClientExchange | None = connection.scope.get(EXCHANGE_KEY)
    find = None if exchange is None else exchange.find_challenge
    return ANY_CHALLENGE if find is None else find()


def suspension(error: RunSuspendedError) -> dict[str, Any]:
    """Return the body of the response for a call that was suspended."""
    return {"run_id": error.run_id, "pending": [call_to_dict(each) for each in error.pending]}


def is_async_handler(handler: Handler) -> bool:
    """Return True if calling the exception handler returns a coroutine."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - the method is inspected
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


def _wider_handler(connection: Request | WebSocket, error: Exception) -> Handler | None:
    handlers = connection.scope["app"].exception_handlers
    kinds = type(error).__mro__
    for kind in kinds[kinds.index(ToolboxError) + 1 :]:
        if kind is not Exception and kind in handlers:
            handler: Handler = handlers[kind]
            return handler
    return None
