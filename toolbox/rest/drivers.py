"""Performs the effects of an exchange: with `await` for asynchronous methods, on the calling thread for others.

Not here: the order of the effects (`exchange`).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from ..errors import RestClientError, RestDecodeError, RestTimeoutError
from .building import Outgoing
from .client_plans import RequestPlan, default_of, missing_bean_allowed
from .connections import BoundedResponse, RefusedBody, deadline_for_network
from .exchange import (
    AwaitValue,
    CloseResponse,
    Effect,
    FindBean,
    NextAttempt,
    ReadBody,
    RestExchange,
    SendRequest,
    StartRetries,
    Steps,
)
from .replies import PieceDecoder, decode


async def call_async(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Any:
    """Send the request of an `async def` method and return its value."""
    response, outgoing = await _drive_async(exchange, exchange.steps(plan, values))
    with _hiding_secrets(exchange, outgoing):
        return decode(plan.reply, response, outgoing.shown_url, plan.where)


def call(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Any:
    """Send the request of a `def` method on this thread and return its value."""
    response, outgoing = _drive(exchange, exchange.steps(plan, values))
    with _hiding_secrets(exchange, outgoing):
        return decode(plan.reply, response, outgoing.shown_url, plan.where)


async def stream_async(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> AsyncGenerator[Any]:
    """Yield the items of a streamed reply; the request is sent with the first step."""
    response, outgoing = await _drive_async(exchange, exchange.steps(plan, values, unread=True))
    decoder = _decoder(exchange, plan, response, outgoing.shown_url)
    try:
        with _hiding_secrets(exchange, outgoing):
            with translated_errors(plan.where, outgoing.shown_url):
                async for chunk in response.aiter_bytes():
                    for piece in decoder.feed(chunk):
                        yield piece
            for piece in decoder.end():
                yield piece
    finally:
        await response.aclose()


def stream(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Generator[Any]:
    """Yield the items of a streamed reply on this thread; the request is sent with the first step."""
    response, outgoing = _drive(exchange, exchange.steps(plan, values, unread=True))
    decoder = _decoder(exchange, plan, response, outgoing.shown_url)
    try:
        with _hiding_secrets(exchange, outgoing):
            with translated_errors(plan.where, outgoing.shown_url):
                for chunk in response.iter_bytes():
                    yield from decoder.feed(chunk)
            yield from decoder.end()
    finally:
        response.close()


class _hiding_secrets:  # noqa: N801 - used as a function, and cheaper than a generator
    """Hides sent secrets in errors about the body of a reply, because the server may repeat them."""

    def __init__(self, exchange: RestExchange, outgoing: Outgoing) -> None:
        self._exchange, self._outgoing = exchange, outgoing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RestClientError):
            self._exchange.hide(error, self._outgoing)


def _decoder(exchange: RestExchange, plan: RequestPlan, response: httpx2.Response, url: str) -> PieceDecoder:
    limit = exchange.connection.endpoint.settings.max_reply_bytes
    if isinstance(response, BoundedResponse):
        response.max_bytes = None  # a stream may be endless: the limit applies to the part that is kept in memory
    media_type = response.headers.get("content-type", "")
    return PieceDecoder(plan.reply, media_type, url, response.status_code, plan.where, limit)


async def _drive_async(exchange: RestExchange, steps: Steps) -> Any:
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            effect = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        try:
            answer, error = await _perform_async(exchange, effect), None
        except BaseException as raised:  # the exchange handles it
            error = raised


def _drive(exchange: RestExchange, steps: Steps) -> Any:
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            effect = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        try:
            answer, error = _perform(exchange, effect), None
        except BaseException as raised:  # the exchange handles it
            error = raised


async def _perform_async(exchange: RestExchange, effect: Effect) -> Any:
    match effect:
        case FindBean(point):
            with missing_bean_allowed(point):
                return await exchange.scope.aget(point.whole, point.name)
            return default_of(point)
        case AwaitValue(value):
            return await value if inspect.isawaitable(value) else value
        case SendRequest(request, auth, limit, unread, where):
            client = await exchange.connection.async_client()
            with translated_errors(where, str(request.url)):
                async with asyncio.timeout(limit):
                    response = await client.send(request, auth=auth, stream=True, follow_redirects=False)
                    return response if unread else await _aread(response)
        case ReadBody(response, where):
            with translated_errors(where, str(response.request.url)):
                async with asyncio.timeout(exchange.connection.endpoint.settings.timeout):
                    return await _aread(response)
        case CloseResponse(response):
            return await response.aclose()
        case StartRetries(attempts):
            return aiter(attempts)
        case NextAttempt(attempts):
            return await anext(attempts)


def _perform(exchange: RestExchange, effect: Effect) -> Any:
    match effect:
        case FindBean(point):
            with missing_bean_allowed(point):
                return exchange.scope.get(point.whole, point.name)
            return default_of(point)
        case AwaitValue(value):
            return value
        case SendRequest(request, auth, limit, unread, where):
            client = exchange.connection.sync_client()
            with translated_errors(where, str(request.url)):
                deadline = time.monotonic() + limit
                with deadline_for_network(deadline, request):
                    response = client.send(request, auth=auth, stream=True, follow_redirects=False)
                    return response if unread else _read_until(response, deadline)
        case ReadBody(response, where):
            with translated_errors(where, str(response.request.url)):
                deadline = time.monotonic() + exchange.connection.endpoint.settings.timeout
                with deadline_for_network(deadline):
                    return _read_until(response, deadline)
        case CloseResponse(response):
            return response.close()
        case StartRetries(attempts):
            return iter(attempts)
        case NextAttempt(attempts):
            return next(attempts)


class _Until(httpx2.SyncByteStream):
    """A body that must be complete at a moment of `time.monotonic()`, also if it does not come from a network."""

    def __init__(self, stream: httpx2.SyncByteStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            if time.monotonic() > self._deadline:
                raise httpx2.ReadTimeout("the body took too long")
            yield chunk

    def close(self) -> None:
        self._stream.close()


async def _aread(response: httpx2.Response) -> httpx2.Response:
    try:
        await response.aread()
    finally:
        await response.aclose()
    return response


def _read_until(response: httpx2.Response, deadline: float) -> httpx2.Response:
    assert isinstance(response.stream, httpx2.SyncByteStream)
    response.stream = _Until(response.stream, deadline)
    try:
        response.read()
    finally:
        response.close()
    return response


@contextmanager
def translated_errors(where: str, url: str) -> Iterator[None]:
    """Replace errors of httpx2 with `RestClientError`, `RestTimeoutError` or `RestDecodeError`."""
    try:
        yield
    except RefusedBody as refused:
        kind = RestClientError if refused.is_too_long else RestDecodeError
        raise kind(f"{where}: {refused.reason}", url, refused.status) from None
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise RestTimeoutError(f"{where}: no reply in time", url) from error
    except httpx2.DecodingError as error:
        raise RestDecodeError(f"{where}: invalid encoding of the reply ({error})", url) from error
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RestClientError(f"{where}: the request failed ({reason})", url) from error
