"""One call of a REST client, from its values to its reply: headers, filters, redirects, retries, failures.

A generator without I/O yields `Effect`s and receives their results. Two drivers perform them: with `await` for
asynchronous methods, on the calling thread for others. The steps of a call, in this order:

1. `_prepare_request` computes the fixed values and headers. `outgoing` builds the request from them, once for all
   attempts, and refuses values that cannot be sent.
2. `_attempt_repeatedly` makes one or more attempts; only idempotent requests are repeated.
3. `_attempt_once` makes the `httpx2.Request`. `connections.request_for` checks as the last guard that it goes below the
   base URL. Then authentication is looked up, and for each request of a chain of redirects: request filters, sending,
   response filters. `origins` decides if a redirect is followed, and what another origin gets: no filters, credentials
   or personal headers.
4. `_raise_for_reply` asks the exception mappers about a failure, and raises.
5. `hide` removes what was sent as a secret from errors, also from those of decoding and streaming.
6. `call`, `stream` and their `_async` twins decode a success with `replies`.

Of a URL there are two texts: the one that is sent, and the one that logs and errors show (`UrlText`, `MaskedUrl`).
Not here: building a request (`outgoing`), decoding a successful reply (`replies`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import httpx2
import stamina
from pydantic_core import from_json

from ..context import InvocationContext
from ..di.injection_points import InjectionPoint
from ..environment_variables import expand_variables
from ..errors import RestClientError, RestDecodeError, RestTimeoutError, ScopeNotActiveError
from ..http_replies import BoundedBody, RefusedBody, read_retry_after
from ..oauth.token_sources import (
    FOR_THE_PROGRAM,
    MAX_REPLY_BYTES,
    AccessToken,
    SubjectTokens,
    TokenAuth,
    TokenRequest,
    WaitForToken,
    read_subject,
    token_of_identity,
)
from ..safe_text import brief, hide_secrets, without_secrets
from ..security import SecurityIdentity, UnauthenticatedError
from .annotations import FixedValue
from .authorization import refuse_other_authorization
from .client_plans import ClientPlan, CollaboratorPlan, RequestPlan, default_of, is_context, is_required
from .connections import RestConnection
from .deadlines import BodyUntil, deadline_for_network
from .encoding import is_secret_name, secrets_in_header, shown_header
from .endpoint import propagated_headers
from .origins import is_same_origin, redirected_request, shown_url_of
from .outgoing import Outgoing, build_outgoing
from .replies import PieceDecoder, Response, beginning, decode, excerpt

logger = logging.getLogger("toolbox.rest")

T = TypeVar("T")

RETRIED = frozenset({502, 503, 504})
_NO_AUTH = httpx2.Auth()
_SEARCHED_BODY = 100_000
"""Size in bytes up to which the JSON body of a failed request is searched for secrets."""


@dataclass(frozen=True, slots=True)
class FindBean:
    """Look up the bean of an injection point in the current scope."""

    point: InjectionPoint


@dataclass(frozen=True, slots=True)
class AwaitValue:
    """Return the value; await it first if it is awaitable."""

    value: Any


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request; the reply must arrive within `limit` seconds. With `unread`, its body is not read.

    `max_bytes` is the limit of the body; None for that of the endpoint.
    """

    request: httpx2.Request
    auth: httpx2.Auth
    limit: float
    unread: bool
    where: str
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReadBody:
    """Read the body of a response that was left unread, within `limit` seconds."""

    response: httpx2.Response
    limit: float
    where: str


@dataclass(frozen=True, slots=True)
class CloseResponse:
    """Close a response that is not needed any more."""

    response: httpx2.Response


@dataclass(frozen=True, slots=True)
class StartRetries:
    """Start a series of attempts; the result is an iterator."""

    attempts: Any


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Wait for the next attempt of the series and return it."""

    attempts: Any


Effect: TypeAlias = (
    FindBean | AwaitValue | SendRequest | ReadBody | CloseResponse | StartRetries | NextAttempt | WaitForToken
)
Steps: TypeAlias = Generator[Effect, Any, Any]


class UnsuccessfulReply(Exception):  # noqa: N818 - never leaves an exchange
    """A reply with a failure status, passed through the retries as an exception."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


class CollaboratorScope(Protocol):
    """The methods of `ActiveScope` that find collaborators. A client without a container has its own."""

    def get(self, wanted: Any, name: str | None = None) -> Any: ...
    async def aget(self, wanted: Any, name: str | None = None) -> Any: ...
    async def find(self, wanted: Any, name: str | None = None) -> Any: ...
    def find_now(self, wanted: Any, name: str | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class RestExchange:
    """Makes the calls of one REST client: its connection, its plan, and the scope of its collaborators."""

    connection: RestConnection
    client: ClientPlan
    scope: CollaboratorScope
    auth: Any = None

    def steps(self, plan: RequestPlan, values: Mapping[str, Any], unread: bool = False) -> Steps:
        """Return a successful `httpx2.Response` and its `Outgoing`. Raises `RestClientError` or a mapper's error."""
        outgoing = yield from self._prepare_request(plan, values)
        try:
            try:
                response = yield from self._attempt_repeatedly(plan, outgoing, unread)
            except UnsuccessfulReply as refusal:
                response = refusal.response
            if not response.is_success:
                yield ReadBody(response, self._limit_of(plan), plan.where)
                yield from self._raise_for_reply(plan, outgoing, response)
        except RestClientError as error:
            self.hide(error, outgoing)
            raise
        return response, outgoing

    def _prepare_request(self, plan: RequestPlan, values: Mapping[str, Any]) -> Generator[Effect, Any, Outgoing]:
        endpoint = self.connection.endpoint
        fixed: list[tuple[FixedValue, object]] = []
        for each in plan.fixed:
            if isinstance(each.value, CollaboratorPlan):
                value = yield from self._call_collaborator(each.value)
            else:
                value = expand_variables(each.value)
            if value is None and each.required:
                where = f"{endpoint.url}{plan.template}"
                raise RestClientError(f"{plan.where}: missing value for {each.place} {each.name}", where)
            fixed.append((each, value))
        headers = propagated_headers(endpoint.settings.propagate_headers)
        if self.client.headers is not None:
            headers |= yield from self._call_collaborator(self.client.headers)
        return build_outgoing(plan, values, fixed, headers, endpoint)

    def _call_collaborator(self, collaborator: CollaboratorPlan, *given: object) -> Steps:
        """Call a collaborator with `given` and its injected parameters; return its result."""
        target = collaborator.target if collaborator.point is None else (yield FindBean(collaborator.point))
        injected: dict[str, object] = {}
        for point in collaborator.points:
            injected[point.parameter] = InvocationContext.current() if is_context(point) else (yield FindBean(point))
        return (yield AwaitValue(target(*given, **injected)))

    def _attempt_repeatedly(
        self, plan: RequestPlan, outgoing: Outgoing, unread: bool
    ) -> Generator[Effect, Any, httpx2.Response]:
        settings = self.connection.endpoint.settings
        if not (settings.retries and plan.idempotent):
            return (yield from self._attempt_once(plan, outgoing, unread))
        attempts = yield StartRetries(
            stamina.retry_context(
                lambda error: _wait_before_retry(error, settings.retry_max_wait),
                attempts=settings.retries + 1,
                timeout=None,
                wait_jitter=0.1,
                wait_max=settings.retry_max_wait,
            )
        )
        while True:
            attempt = yield NextAttempt(attempts)
            with attempt:
                response = yield from self._attempt_once(plan, outgoing, unread)
                if not response.is_success:
                    yield ReadBody(response, self._limit_of(plan), plan.where)
                    raise UnsuccessfulReply(response)
                return response

    def _attempt_once(
        self, plan: RequestPlan, outgoing: Outgoing, unread: bool
    ) -> Generator[Effect, Any, httpx2.Response]:
        settings = self.connection.endpoint.settings
        limit = self._limit_of(plan)
        first = request = self.connection.request_for(outgoing, limit, plan.where)
        auth = yield from self._find_auth(plan.where)
        for _ in range(settings.max_redirects + 1):
            # A filter may sign a request, so it does not get requests to other origins.
            own = is_same_origin(first.url, request.url)
            for each in self.client.request_filters if own else ():
                yield from self._call_collaborator(each, request)
            if own and isinstance(auth, SubjectTokens):
                if request is first:
                    refuse_other_authorization(request.headers, plan.where)
                send = SendRequest(request, _NO_AUTH, limit, unread, plan.where)
                response = yield from self._send_with_token(send, auth, outgoing)
            else:
                given = auth if own and isinstance(auth, httpx2.Auth) else _NO_AUTH
                response = yield from self._send_request(SendRequest(request, given, limit, unread, plan.where))
            if not (response.has_redirect_location and settings.follow_redirects):
                return response
            yield ReadBody(response, limit, plan.where)
            following = redirected_request(
                request, response, lambda text: without_secrets(text, list(self._secrets_of(outgoing)))
            )
            if following is None:
                return response
            request = following
            outgoing.sent.append(request)
        raise RestClientError(f"{plan.where}: more than {settings.max_redirects} redirects", shown_url_of(request))

    def _limit_of(self, plan: RequestPlan) -> float:
        """Return the seconds of a method for a reply, and for the body of a failure or a redirect."""
        return plan.timeout or self.connection.endpoint.settings.timeout

    def _find_auth(self, where: str) -> Generator[Effect, Any, httpx2.Auth | SubjectTokens]:
        given = self.auth or self.client.auth
        if isinstance(given, TokenAuth):
            return (yield from self.find_tokens(given, where))
        if not isinstance(given, CollaboratorPlan):
            return given or _NO_AUTH
        if given.point is not None:
            bean = yield FindBean(given.point)
            return bean if isinstance(bean, httpx2.Auth) else (yield AwaitValue(bean()))
        answer: httpx2.Auth = yield from self._call_collaborator(given)
        return answer

    def find_tokens(self, auth: TokenAuth, where: str) -> Generator[Effect, Any, SubjectTokens]:
        """Return the tokens of the current caller. Raises `UnauthenticatedError` if its own token is missing."""
        point = auth.subject
        if point is None:
            return SubjectTokens(auth.source, FOR_THE_PROGRAM)
        if point.wants is SecurityIdentity:
            try:
                given = token_of_identity((yield FindBean(point)))
            except ScopeNotActiveError:  # nobody is there
                given = None
        else:
            bean = yield FindBean(point)
            given = yield AwaitValue(bean.token())
        subject = read_subject(given)
        if subject is None:
            raise UnauthenticatedError(where, lacks_token=True)
        return SubjectTokens(auth.source, subject)

    def obtain_token(
        self, tokens: SubjectTokens, limit: float, where: str, refused: AccessToken | None = None
    ) -> Generator[Effect, Any, AccessToken]:
        """Return a token, within `limit` seconds; see `TokenSource.obtain`."""

        def send(wanted: TokenRequest, limit: float) -> Generator[Effect, Any, tuple[int, bytes]]:
            request = self.connection.token_request(wanted.url, wanted.headers, wanted.content, limit)
            response = yield SendRequest(request, _NO_AUTH, limit, False, where, MAX_REPLY_BYTES)
            return response.status_code, response.content

        return (yield from tokens.source.obtain(tokens.subject, send, limit, where, refused))

    def _send_with_token(
        self, send: SendRequest, tokens: SubjectTokens, outgoing: Outgoing
    ) -> Generator[Effect, Any, httpx2.Response]:
        """Send a request with a token; once more with a new one if the server does not accept it."""
        token = None
        while True:
            refused, token = token, (yield from self.obtain_token(tokens, send.limit, send.where, token))
            outgoing.secrets.append(token.value)
            send.request.headers["Authorization"] = f"Bearer {token.value}"
            response = yield from self._send_request(send)
            if response.status_code != 401 or refused is not None:
                return response
            yield CloseResponse(response)

    def _send_request(self, send: SendRequest) -> Generator[Effect, Any, httpx2.Response]:
        started = time.perf_counter()
        response: httpx2.Response = yield send
        self._log_reply(send.request, response, time.perf_counter() - started)
        try:
            for each in self.client.response_filters:
                yield from self._call_collaborator(each, response)
        except (Exception, asyncio.CancelledError):  # a cancelled call must release its connection too
            yield CloseResponse(response)
            raise
        return response

    def _log_reply(self, request: httpx2.Request, response: httpx2.Response, seconds: float) -> None:
        level = logging.INFO if self.connection.endpoint.settings.log else logging.DEBUG
        if logger.isEnabledFor(level):
            headers = "; ".join(shown_header(name, value) for name, value in request.headers.items())
            facts = request.method, shown_url_of(request), response.status_code, seconds * 1000, headers
            logger.log(level, "%s %s: %s in %.0f ms (%s)", *facts)

    def _raise_for_reply(self, plan: RequestPlan, outgoing: Outgoing, response: httpx2.Response) -> Steps:
        status, shown = response.status_code, outgoing.url.shown
        if status >= 400:
            whole = Response(status, response.headers, response.content, shown)
            for wanted, mapper in plan.mappers:
                error = (yield from self._call_collaborator(mapper, whole)) if wanted in (None, status) else None
                if error is not None:
                    raise error
        what = (
            "the server sent a redirect, which is not followed:"
            if response.has_redirect_location
            else "the server answered"
        )
        raise RestClientError(f"{plan.where}: {what}", shown, status, beginning(response.content))

    def hide(self, error: RestClientError, outgoing: Outgoing) -> None:
        """Remove from an error what was sent as a secret: a server may repeat it. Then cut the body to an excerpt."""
        hide_secrets(error, list(self._secrets_of(outgoing)))
        if type(error) in (RestClientError, RestDecodeError, RestTimeoutError):  # not an error of a mapper
            error.body = excerpt(error.body)
            error.args = (error.message, error.url, error.status, error.body)

    def _secrets_of(self, outgoing: Outgoing) -> Iterator[str]:
        yield from self.connection.endpoint.secrets
        yield from outgoing.secrets
        yield from _secrets_in_json(outgoing.content)
        for request in outgoing.sent:  # including headers that filters and authentication added
            for name, value in request.headers.multi_items():
                if name.lower() not in outgoing.open_headers:
                    yield from secrets_in_header(name, value)


def _secrets_in_json(content: bytes | None) -> Iterator[str]:
    """Yield the texts in a JSON body whose names say that they are secret."""
    if not content or content[:1] not in b"{[" or len(content) > _SEARCHED_BODY:
        return
    try:
        waiting = [from_json(content)]
    except ValueError:
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from (each for name, each in value.items() if isinstance(each, str) and is_secret_name(name))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _wait_before_retry(error: Exception, longest: float) -> bool | float:
    """Return True or the seconds to wait if the request should be sent again, otherwise False."""
    if not isinstance(error, UnsuccessfulReply):
        # Only failures before a reply arrived. Repeating a request to a slow server would make it slower.
        broken = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)
        return isinstance(error, RestClientError) and isinstance(error.__cause__, broken)
    status, after = error.response.status_code, read_retry_after(error.response.headers.get("retry-after", ""))
    if status in RETRIED:
        return after <= longest and after if after is not None else True
    return status == 429 and after is not None and after <= longest and after


# --- performing the effects


async def call_async(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Any:
    """Send the request of an `async def` method and return its value."""
    response, outgoing = await perform_async(exchange, exchange.steps(plan, values))
    with hide_sent(exchange, outgoing):
        return decode(plan.reply, response, outgoing.url.shown, plan.where)


def call(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Any:
    """Send the request of a `def` method on this thread and return its value."""
    response, outgoing = _drive(exchange, exchange.steps(plan, values))
    with hide_sent(exchange, outgoing):
        return decode(plan.reply, response, outgoing.url.shown, plan.where)


async def stream_async(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> AsyncGenerator[Any]:
    """Yield the items of a streamed reply; the request is sent with the first step."""
    response, outgoing = await perform_async(exchange, exchange.steps(plan, values, unread=True))
    decoder = _make_decoder(exchange, plan, response, outgoing.url.shown)
    try:
        with hide_sent(exchange, outgoing):
            with translated_errors(plan.where, outgoing.url.shown):
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
    decoder = _make_decoder(exchange, plan, response, outgoing.url.shown)
    try:
        with hide_sent(exchange, outgoing):
            with translated_errors(plan.where, outgoing.url.shown):
                for chunk in response.iter_bytes():
                    yield from decoder.feed(chunk)
            yield from decoder.end()
    finally:
        response.close()


@contextmanager
def hide_sent(exchange: RestExchange, outgoing: Outgoing) -> Iterator[None]:
    """Hide sent secrets in errors about the body of a reply, because the server may repeat them."""
    try:
        yield
    except RestClientError as error:
        exchange.hide(error, outgoing)
        raise


def _make_decoder(exchange: RestExchange, plan: RequestPlan, response: httpx2.Response, url: str) -> PieceDecoder:
    limit = exchange.connection.endpoint.settings.max_reply_bytes
    if isinstance(response.stream, BoundedBody):
        response.stream.max_bytes = (
            None  # a stream may be endless: the limit applies to the part that is kept in memory
        )
    media_type = response.headers.get("content-type", "")
    return PieceDecoder(plan.reply, media_type, url, response.status_code, plan.where, limit)


async def perform_async(exchange: RestExchange, steps: Generator[Effect, Any, T]) -> T:
    """Perform the steps of an exchange, and return their result."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            effect = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            answer, error = await _perform_effect_async(exchange, effect), None
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


async def _perform_effect_async(exchange: RestExchange, effect: Effect) -> Any:
    match effect:
        case FindBean(point):
            if is_required(point):
                return await exchange.scope.aget(point.whole, point.name)
            found = await exchange.scope.find(point.whole, point.name)
            return default_of(point) if found is None else found
        case AwaitValue(value):
            return await value if inspect.isawaitable(value) else value
        case SendRequest(request, auth, limit, unread, where, max_bytes):
            client = await exchange.connection.async_client()
            with translated_errors(where, shown_url_of(request)):
                async with asyncio.timeout(limit):
                    response = await client.send(request, auth=auth, stream=True, follow_redirects=False)
                    _limit_body(response, max_bytes)
                    return response if unread else await _aread(response)
        case ReadBody(response, limit, where):
            with translated_errors(where, shown_url_of(response.request)):
                async with asyncio.timeout(limit):
                    return await _aread(response)
        case CloseResponse(response):
            return await response.aclose()
        case StartRetries(attempts):
            return aiter(attempts)
        case NextAttempt(attempts):
            return await anext(attempts)
        case WaitForToken(outcome, limit):
            # Not `wait_for`: cancelling this call must not cancel the request of the other one.
            await asyncio.wait([asyncio.wrap_future(outcome)], timeout=limit)
            return None


def _perform(exchange: RestExchange, effect: Effect) -> Any:
    match effect:
        case FindBean(point):
            if is_required(point):
                return exchange.scope.get(point.whole, point.name)
            found = exchange.scope.find_now(point.whole, point.name)
            return default_of(point) if found is None else found
        case AwaitValue(value):
            return value
        case SendRequest(request, auth, limit, unread, where, max_bytes):
            client = exchange.connection.sync_client()
            with translated_errors(where, shown_url_of(request)):
                deadline = time.monotonic() + limit
                with deadline_for_network(deadline, request):
                    response = client.send(request, auth=auth, stream=True, follow_redirects=False)
                    _limit_body(response, max_bytes)
                    return response if unread else _read_until(response, deadline)
        case ReadBody(response, limit, where):
            with translated_errors(where, shown_url_of(response.request)):
                deadline = time.monotonic() + limit
                with deadline_for_network(deadline):
                    return _read_until(response, deadline)
        case CloseResponse(response):
            return response.close()
        case StartRetries(attempts):
            return iter(attempts)
        case NextAttempt(attempts):
            return next(attempts)
        case WaitForToken(outcome, limit):
            concurrent.futures.wait([outcome], timeout=limit)
            return None


def _limit_body(response: httpx2.Response, max_bytes: int | None) -> None:
    if max_bytes is not None and isinstance(response.stream, BoundedBody):
        response.stream.max_bytes = max_bytes


def _check_read(response: httpx2.Response) -> None:
    if isinstance(response.stream, BoundedBody):
        response.stream.check_read(response)


async def _aread(response: httpx2.Response) -> httpx2.Response:
    try:
        _check_read(response)
        await response.aread()
    finally:
        await response.aclose()
    return response


def _read_until(response: httpx2.Response, deadline: float) -> httpx2.Response:
    assert isinstance(response.stream, httpx2.SyncByteStream)
    try:
        _check_read(response)
        response.stream = BodyUntil(response.stream, deadline)
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
        kind = RestClientError if refused.refusal == "too long" else RestDecodeError
        raise kind(f"{where}: {_explain(refused)}", url, refused.status) from None
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise RestTimeoutError(f"{where}: no reply in time", url) from error
    except httpx2.DecodingError as error:
        raise RestDecodeError(f"{where}: invalid encoding of the reply ({error})", url) from error
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RestClientError(f"{where}: the request failed ({reason})", url) from error


def _explain(refused: RefusedBody) -> str:
    detail = brief(refused.detail, 50)
    match refused.refusal:
        case "too long":
            return f"the reply is longer than max_reply_bytes ({detail} bytes)"
        case "broken":
            return f"invalid encoding of the reply ({detail})"
        case "unsupported":
            return f"unsupported compression of the reply ({detail}); accept only gzip and deflate"
        case _:
            what = f"the reply is compressed ({detail}), which was not requested"
            return f"{what}; to accept it, send the header Accept-Encoding"
