"""The response to an error: its HTTP status and RFC 9457 problem details, and its log record.

Not here: the errors (`toolbox.errors`), errors in a stream that has started (`streaming`).
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketState

from toolbox.chat import PendingCall
from toolbox.errors import (
    AnswerForbiddenError,
    ConversationBusyError,
    ConversationNotFoundError,
    ConversationStoppedError,
    ConversationSuspendedError,
    InputGuardrailError,
    InvalidMemoryIdError,
    McpConnectionError,
    ModelError,
    OAuthError,
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
from toolbox.security import ForbiddenError, UnauthenticatedError
from toolbox.services.stored_forms import fields_to_dict

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

_TITLES = {**{each.value: each.phrase for each in HTTPStatus}, CLIENT_CLOSED_REQUEST: "Client Closed Request"}

_KNOWN: tuple[tuple[type[Exception], HTTPStatus, str], ...] = (
    (TimeoutError, HTTPStatus.GATEWAY_TIMEOUT, "The answer took too long."),
    (ModelError, HTTPStatus.BAD_GATEWAY, "The language model did not return a usable answer."),
    (McpConnectionError, HTTPStatus.BAD_GATEWAY, "A server that this needs cannot be reached."),
    (OAuthError, HTTPStatus.BAD_GATEWAY, "A server that this needs cannot be reached."),
    (OutputGuardrailError, HTTPStatus.BAD_GATEWAY, "The language model did not return a usable answer."),
    (InputGuardrailError, HTTPStatus.UNPROCESSABLE_ENTITY, "The message was refused."),
    (InvalidMemoryIdError, HTTPStatus.UNPROCESSABLE_ENTITY, "The conversation id is invalid."),
    (UnauthenticatedError, HTTPStatus.UNAUTHORIZED, "This needs a known identity."),
    (ForbiddenError, HTTPStatus.FORBIDDEN, "You are not allowed to do this."),
    (UsageLimitExceededError, HTTPStatus.TOO_MANY_REQUESTS, "The usage limit is reached."),
    (RunSuspendedError, HTTPStatus.ACCEPTED, "The call waits for answers to its pending calls."),
    (RunNotFoundError, HTTPStatus.NOT_FOUND, "There is no such run."),
    (ConversationNotFoundError, HTTPStatus.NOT_FOUND, "There is no such conversation."),
    (ConversationBusyError, HTTPStatus.CONFLICT, "The conversation is in use by another call."),
    (ConversationStoppedError, HTTPStatus.CONFLICT, "The conversation was stopped."),
    (ConversationSuspendedError, HTTPStatus.CONFLICT, "The conversation waits for answers to pending calls."),
    (RunAnswerError, HTTPStatus.CONFLICT, "The answer does not fit the pending calls of the run."),
    (RunBusyError, HTTPStatus.CONFLICT, "The run is executed elsewhere; try again later."),
    (RunConflictError, HTTPStatus.CONFLICT, "There is another run with this id."),
    (RunIncompatibleError, HTTPStatus.CONFLICT, "The program has changed since the run began."),
    (RunStateError, HTTPStatus.CONFLICT, "The status of the run does not allow this."),
)
"""The status of each kind of `ToolboxError`, and the text for the client."""


_UNKNOWN: tuple[int, str] = (HTTPStatus.INTERNAL_SERVER_ERROR, "")


def status_of(error: BaseException) -> int:
    """Return the HTTP status for `error`, which may be a group."""
    error = _find_first(error)
    if isinstance(error, HTTPException):
        return error.status_code
    return _choose_answer(error)[0]


def problem_details(error: BaseException) -> dict[str, Any]:
    """Return `type`, `title`, `status` and sometimes `detail`; never the text of a toolbox error.

    Only a person who may not answer a pending call reads why.
    """
    error = _find_first(error)
    status, detail = _choose_answer(error)
    if isinstance(error, HTTPException):
        status, detail = error.status_code, error.detail
    return describe_problem(status, detail)


def describe_problem(status: int, detail: str | None) -> dict[str, Any]:
    """Return problem details with this status and detail."""
    problem: dict[str, Any] = {"type": "about:blank", "title": _TITLES.get(status, "Error"), "status": int(status)}
    return {**problem, "detail": detail} if detail else problem


def problem_text(problem: Mapping[str, Any]) -> str:
    """Return the words of problem details, for a person."""
    return str(problem.get("detail") or problem["title"])


def problem_of_type(name: str) -> dict[str, Any]:
    """Return the problem details for an error of which only the name of its type is known, such as that of a run."""
    kinds: list[type[Any]] = [ToolboxError, TimeoutError]
    for each in kinds:
        kinds += [kind for kind in each.__subclasses__() if kind not in kinds]
    kind = next((each for each in kinds if each.__name__ == name), Exception)
    status, detail = _choose_answer_for(kind) if issubclass(kind, ToolboxError) else _UNKNOWN
    return describe_problem(status, detail)


def _find_first(error: BaseException) -> BaseException:
    """Return the first error of a group if each has an answer here; every other error as it is."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    errors = list(errors_in(error))
    return errors[0] if all(isinstance(each, (HTTPException, ToolboxError)) for each in errors) else error


def errors_in(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, in their order."""
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from errors_in(each)
        else:
            yield each


def _choose_answer(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the detail for `error`; the detail of an unknown error is empty."""
    if isinstance(error, ClientDisconnectedError):
        return CLIENT_CLOSED_REQUEST, ""
    if isinstance(error, ApplicationStoppingError):
        return HTTPStatus.SERVICE_UNAVAILABLE, "The server is shutting down."
    if isinstance(error, RunSuspendedError) and error.is_abandoned:
        return HTTPStatus.INTERNAL_SERVER_ERROR, ""  # the run is cancelled: there is nothing to answer
    if isinstance(error, AnswerForbiddenError):
        return error.status, error.reason
    return _choose_answer_for(type(error)) if isinstance(error, ToolboxError) else _UNKNOWN


def _choose_answer_for(kind: type[Any]) -> tuple[int, str]:
    """Return the same for a kind of `ToolboxError`."""
    return next(((status, detail) for known, status, detail in _KNOWN if issubclass(kind, known)), _UNKNOWN)


def log(error: BaseException, where: str) -> None:
    """Log the error, whose text the client does not get."""
    status = status_of(error)
    if status in (CLIENT_CLOSED_REQUEST, HTTPStatus.ACCEPTED):
        logger.debug("%s: %s", where, error)
    elif status == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s failed", where, exc_info=error)
    else:
        logger.warning("%s: %s: %s", where, type(error).__name__, error)


async def answer_with_problem(connection: Request | WebSocket, error: Exception) -> Response | None:
    """Answer a `ToolboxError`; the application's handler for a base class, such as `TimeoutError`, takes precedence."""
    own = _find_wider_handler(connection, error)
    if own is not None:
        return await _call_handler(own, connection, error)
    log(error, f"{connection.scope['type']} {connection.scope['path']}")
    problem = problem_details(error)
    if isinstance(connection, WebSocket):
        refused = problem["status"] in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        if not (refused and _can_be_denied(connection)):
            ended = WebSocketState.DISCONNECTED in (connection.client_state, connection.application_state)
            if not ended and not isinstance(error, ClientDisconnectedError):
                await connection.close(code=1008 if refused else 1011, reason=problem["title"])
            return None
    if isinstance(error, RunSuspendedError) and not error.is_abandoned:
        content = suspension(error.run_id, error.pending)
        return Response(json.dumps(content), status_code=problem["status"], media_type="application/json")
    return Response(
        json.dumps(problem),
        status_code=problem["status"],
        headers=challenge(problem["status"], connection.scope.get(EXCHANGE_KEY)),
        media_type="application/problem+json",
    )


def _can_be_denied(websocket: WebSocket) -> bool:
    """Return True if the handshake is not answered yet, so that the client can get an HTTP response instead."""
    exchange: ClientExchange | None = websocket.scope.get(EXCHANGE_KEY)
    is_open = exchange is not None and not (exchange.accepted or exchange.left)
    return is_open and "websocket.http.response" in (websocket.scope.get("extensions") or ())


async def answer_group(connection: Request | WebSocket, group: ExceptionGroup[Exception]) -> Response | None:
    """Answer a group as the first of its errors, if each of them has an answer. Raises the group if not.

    The answers are those of the application's handlers, such as the one for `HTTPException`.
    """
    where = f"{connection.scope['type']} {connection.scope['path']}"
    by_kind, by_status = connection.scope["starlette.exception_handlers"]
    errors = list(errors_in(group))
    handlers = [_find_handler(each, by_kind, by_status) for each in errors]
    if None in handlers:
        logger.error("%s failed", where, exc_info=group)
        raise group
    if len(errors) > 1:
        others = "; ".join(f"{type(each).__name__}: {each}" for each in errors[1:])
        logger.warning("%s: %d errors, answered as the first; the others: %s", where, len(errors), others)
    return await _call_handler(cast("Handler", handlers[0]), connection, errors[0])


def _find_handler(
    error: BaseException, by_kind: Mapping[Any, Handler], by_status: Mapping[int, Handler]
) -> Handler | None:
    """Return the handler that would get this error if it came alone."""
    if isinstance(error, HTTPException) and error.status_code in by_status:
        return by_status[error.status_code]
    return next((by_kind[kind] for kind in type(error).__mro__ if kind in by_kind), None)


async def _call_handler(handler: Handler, connection: Request | WebSocket, error: BaseException) -> Response | None:
    handled = handler(connection, error) if is_async_handler(handler) else run_in_threadpool(handler, connection, error)
    return await handled  # type: ignore[misc,no-any-return]  # starlette's handlers are not typed by their kind


def challenge(status: int, exchange: ClientExchange | None) -> dict[str, str]:
    """Return the `WWW-Authenticate` header of a 401: the schemes from which the identity comes. Empty for others."""
    if status != HTTPStatus.UNAUTHORIZED:
        return {}
    find = None if exchange is None else exchange.find_challenge
    return {"WWW-Authenticate": ANY_CHALLENGE if find is None else find()}


def suspension(run_id: str | None, pending: Sequence[PendingCall]) -> dict[str, Any]:
    """Return what a client gets for a call that was suspended."""
    return {"run_id": run_id, "pending": [pending_view(each) for each in pending]}


def pending_view(call: PendingCall) -> dict[str, Any]:
    """Return the fields of a pending call as JSON values."""
    expires_at = None if call.expires_at is None else call.expires_at.isoformat()
    return {**fields_to_dict(call), "expires_at": expires_at}


def is_async_handler(handler: Handler) -> bool:
    """Return True if calling the exception handler returns a coroutine."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - the method is inspected
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


def _find_wider_handler(connection: Request | WebSocket, error: Exception) -> Handler | None:
    handlers = connection.scope["app"].exception_handlers
    kinds = type(error).__mro__
    for kind in kinds[kinds.index(ToolboxError) + 1 :]:
        if kind is not Exception and kind in handlers:
            handler: Handler = handlers[kind]
            return handler
    return None
