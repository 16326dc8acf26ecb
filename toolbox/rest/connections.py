"""The requests of REST clients: built from a plan, the values of a call and an endpoint, and sent by an HTTP client.

Each config key has one client per event loop and one for threads. For each text that is sent, building also makes the
text that logs and errors may show. The home of httpx2 with `exchange`; loaded when the first REST client is created.
Not here: computing values, redirects and retries (`exchange`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urljoin

import httpx2
from pydantic_core import PydanticSerializationError, from_json, to_json

from ..errors import ContainerNotStartedError, RestArgumentError
from ..execution.threads import keep_inherited, renewed_after_fork
from ..http_replies import BoundedBody
from ..safe_text import HIDDEN, brief
from ..tls import tls_context
from .annotations import Body, File, FixedValue, Path, Place, Upload
from .client_plans import ParameterPlan, RequestPlan
from .encoding import (
    PROTECTED_HEADERS,
    EncodingError,
    cookie_value,
    fields_of,
    has_dot_segment,
    header_value,
    is_dot_segment,
    is_header_name,
    is_secret,
    is_secret_name,
    literal_path,
    percent,
    revealed,
    segment,
    shown_url,
    text_of,
    texts_of,
    variables_of,
)
from .endpoint import RestEndpoint
from .replies import EXCERPT

T = TypeVar("T")

_NO_ADDRESS = re.compile(r"[\x00-\x20\x7f\\]")
_MASKS = (b"*", b'""')  # what pydantic writes for a secret, and for an empty one


@dataclass(slots=True)
class Outgoing:
    """A request that is ready to be sent, once or more often.

    `secrets` are values that errors must not show. `open_headers` are the lower-case names of headers that may be
    shown. `sent` lists the HTTP requests made from it, including redirected ones.
    """

    verb: str
    url: str
    shown_url: str
    headers: dict[str, tuple[str, bytes]]
    content: bytes | None = None
    fields: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[str, Upload]] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list, repr=False)
    open_headers: set[str] = field(default_factory=set)
    sent: list[httpx2.Request] = field(default_factory=list, repr=False)


def build(
    plan: RequestPlan,
    values: Mapping[str, Any],
    fixed: list[tuple[FixedValue, object]],
    headers: Mapping[str, object],
    endpoint: RestEndpoint,
) -> Outgoing:
    """Return the request of a call. `fixed` has the current fixed values, `headers` the computed headers.

    Raises `RestArgumentError` for a value that cannot be sent in its place; nothing has been sent then.
    """
    building = _Building(plan, endpoint)
    building.accept(plan.reply.accept)
    building.headers_of(dict(endpoint.headers))
    for each, value in fixed:
        building.fixed(each, value)
    building.headers_of(headers)
    for parameter in plan.parameters:
        building.parameter(parameter, values[parameter.name])
    return building.finish()


class _Building:
    """Collects the parts of one request."""

    def __init__(self, plan: RequestPlan, endpoint: RestEndpoint) -> None:
        self._plan, self._endpoint = plan, endpoint
        self._segments: dict[str, tuple[str, str]] = {}
        self._query: list[tuple[str, str]] = []
        self._shown_query: list[tuple[str, str]] = []
        self._cookies: dict[str, str] = {}
        self._headers: dict[str, tuple[str, bytes]] = {}
        self._fields: list[tuple[str, str]] = []
        self._files: list[tuple[str, Upload]] = []
        self._content: bytes | None = None
        self._body_fields: dict[str, bytes] = {}
        self._address: str | None = None
        self._address_is_hidden = False
        self._fixed_names: set[str] = set()
        self._secrets: list[str] = []
        self._open_headers: set[str] = set()

    def accept(self, media_types: str) -> None:
        self._put(Place.HEADER, "Accept", media_types, False)

    def headers_of(self, headers: Mapping[str, object]) -> None:
        """Add headers of the settings or computed headers. None is omitted."""
        for name, value in headers.items():
            self._putting(name, functools.partial(self._put, Place.HEADER, name, value, True))

    def fixed(self, fixed: FixedValue, value: object) -> None:
        variables = [os.environ.get(name, default) or "" for name, default in variables_of(fixed.value)]
        self._secrets += variables
        hidden = is_secret(value) or bool(variables)
        self._fixed_names.add(fixed.name)
        self._putting(fixed.name, lambda: self._put(fixed.place, fixed.name, value, hidden))

    def parameter(self, parameter: ParameterPlan, value: Any) -> None:
        def put() -> None:
            if parameter.place is Place.BODY:
                self._body(parameter, value)
            elif parameter.place is Place.BODY_FIELD:
                self._body_field(parameter, value)
            elif parameter.place is Place.FILE:
                self._file(parameter, value)
            elif parameter.spread:
                self._spread(parameter, value)
            else:
                allow_slash = isinstance(parameter.mark, Path) and parameter.mark.allow_slash
                self._put(parameter.place, parameter.wire_name, value, is_secret(value), allow_slash)

        self._putting(parameter.name, put)

    def _putting(self, name: str, put: Callable[[], T]) -> T:
        try:
            return put()
        except (EncodingError, UnicodeEncodeError) as error:
            where = f"{self._endpoint.url}{self._plan.template}"
            raise RestArgumentError(f"{self._plan.where}: {name} cannot be sent: {error}", where) from error

    def _put(self, place: Place, name: str, value: object, hidden: bool, allow_slash: bool = False) -> None:
        if is_secret(value):
            self._secrets += texts_of(value)
        match place:
            case Place.PATH:
                encoded = segment(value, allow_slash)
                self._segments[name] = encoded, HIDDEN if hidden else encoded
            case Place.QUERY:
                for text in texts_of(value):
                    self._one_query(name, text, hidden)
            case Place.FORM:
                for text in texts_of(value):
                    self._one_field(name, text)
            case Place.HEADER:
                if value is not None:
                    self._header(name, ", ".join(texts_of(value)), hidden)
            case Place.COOKIE:
                if value is not None:
                    self._cookies[name] = cookie_value(text_of(value))
                    self._secrets.append(self._cookies[name])
            case Place.URL:
                if value is None:
                    raise EncodingError("it is None; the address is required")
                self._address, self._address_is_hidden = text_of(value), hidden
            case Place.FILE | Place.BODY | Place.BODY_FIELD:
                raise AssertionError("files and bodies cannot be fixed values")

    def _one_query(self, name: str, text: str, hidden: bool) -> None:
        encoded = percent(text)
        self._query.append((percent(name), encoded))
        if is_secret_name(name):
            hidden = True
            self._secrets.append(text)
        self._shown_query.append((percent(name), HIDDEN if hidden else encoded))

    def _one_field(self, name: str, text: str) -> None:
        if is_secret_name(name):
            self._secrets.append(text)
        self._fields.append((name, text))

    def _header(self, name: str, text: str, hidden: bool) -> None:
        if not is_header_name(name) or name.lower() in PROTECTED_HEADERS:
            raise EncodingError("a header of this name cannot be set")
        self._headers[name.lower()] = name, header_value(text)
        if hidden or is_secret_name(name):
            self._open_headers.discard(name.lower())
        else:
            self._open_headers.add(name.lower())

    def _spread(self, parameter: ParameterPlan, value: Any) -> None:
        for name, text, is_hidden in fields_of(value) if value is not None else ():
            if is_hidden:
                self._secrets.append(text)
            if parameter.place is Place.FORM:
                self._one_field(name, text)
            elif name in self._fixed_names:
                raise EncodingError(f"its field {name!r} would replace a fixed value")
            else:
                self._one_query(name, text, is_hidden)

    def _body(self, parameter: ParameterPlan, value: Any) -> None:
        if value is None:
            return
        given = parameter.mark.media_type if isinstance(parameter.mark, Body) else None
        if isinstance(value, (bytes, bytearray)):
            self._content, media_type = bytes(value), "application/octet-stream"
        elif isinstance(value, str) and parameter.mark is not None:
            self._content, media_type = value.encode(), "text/plain; charset=utf-8"
        else:
            self._content, media_type = _json(parameter, value, self._secrets), "application/json"
        self._headers.setdefault("content-type", ("Content-Type", header_value(given or media_type)))

    def _body_field(self, parameter: ParameterPlan, value: Any) -> None:
        if value is not None or not parameter.omits_none:
            self._body_fields[parameter.wire_name] = _json(parameter, value, self._secrets)

    def _file(self, parameter: ParameterPlan, value: Any) -> None:
        if value is None:
            return
        mark = parameter.mark if isinstance(parameter.mark, File) else File()
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(item, Upload):
                if not isinstance(item, (bytes, bytearray, str)):
                    raise EncodingError(f"a {type(item).__name__} is not a file; use bytes, str or rest.Upload")
                content = item.encode() if isinstance(item, str) else bytes(item)
                default = "text/plain; charset=utf-8" if isinstance(item, str) else "application/octet-stream"
                item = Upload(content, mark.filename or parameter.wire_name, mark.media_type or default)
            header_value(item.media_type)  # it is sent as a header of the part
            self._files.append((parameter.wire_name, item))

    def _addressed(self, base: str, address: str) -> tuple[str, str]:
        """Return the address that an argument holds, with the query of the request, and the form to show of it.

        Raises `RestArgumentError` unless it is below `base`: a server's reply, a user or a model may have chosen it.
        """
        name = next(each.name for each in self._plan.parameters if each.place is Place.URL)
        return self._putting(name, lambda: self._below(base, address))

    def _below(self, base: str, address: str) -> tuple[str, str]:
        if _NO_ADDRESS.search(address):
            raise EncodingError("it contains white space, a backslash or a control character")
        try:
            scheme, colon, rest = address.partition(":")
            url = httpx2.URL(f"{scheme.lower()}{colon}{rest}")  # it knows default ports of lower-case schemes only
            query = parse_qsl(url.query.decode("ascii"), keep_blank_values=True)
        except (httpx2.InvalidURL, ValueError) as error:
            raise EncodingError("it is not a valid URL") from error
        if has_dot_segment(address.partition("?")[0]) or not is_below(url, httpx2.URL(base)):
            raise EncodingError(f"it must be below {base}, without user info")
        self._secrets += [text for each, text in query if is_secret_name(each)]
        added: list[tuple[str, str]] = []
        shown: list[tuple[str, str]] = []
        for pair, shown_pair in zip(self._query, self._shown_query, strict=True):
            known = [text for each, text in query if each == unquote(pair[0])]
            if not known:
                added.append(pair)
                shown.append(shown_pair)
            elif unquote(pair[1]) not in known:
                raise EncodingError(f"its query has another value of {unquote(pair[0])!r}")
        path = f"{url.scheme}://{url.netloc.decode('ascii')}{url.raw_path.decode('ascii')}"
        shown_path = f"{base}/{HIDDEN}" if self._address_is_hidden else shown_url(path)
        return _with_query(path, added), _with_query(shown_path, shown)

    def finish(self) -> Outgoing:
        path, shown_path = "", ""
        for at, part in enumerate(self._plan.path):
            encoded, shown = self._segments[part] if at % 2 else (literal_path(part),) * 2
            path, shown_path = path + encoded, shown_path + shown
        for name, value in self._endpoint.query:
            self._one_query(name, value, True)
        own = {name: value for name, value in self._endpoint.credentials if name.lower() not in self._headers}
        self.headers_of(own)
        if self._cookies:
            self._header("Cookie", "; ".join(f"{name}={value}" for name, value in self._cookies.items()), True)
        if self._fields and not self._files:
            pairs = (f"{percent(name)}={percent(text)}" for name, text in self._fields)
            self._content, self._fields = "&".join(pairs).encode(), []
            self._headers.setdefault("content-type", ("Content-Type", b"application/x-www-form-urlencoded"))
        if any(each.place is Place.BODY_FIELD for each in self._plan.parameters):
            fields = (to_json(name) + b":" + value for name, value in self._body_fields.items())
            self._content = b"{" + b",".join(fields) + b"}"
            self._headers.setdefault("content-type", ("Content-Type", b"application/json"))
        url, shown = self._endpoint.url + path, self._endpoint.url + shown_path
        if self._address is None:
            url, shown = _with_query(url, self._query), _with_query(shown, self._shown_query)
        else:
            url, shown = self._addressed(url, self._address)
        return Outgoing(
            self._plan.verb,
            url,
            shown,
            self._headers,
            self._content,
            self._fields,
            self._files,
            self._secrets,
            self._open_headers | {"content-type"},
        )


def _with_query(url: str, pairs: list[tuple[str, str]]) -> str:
    query = "&".join(f"{name}={value}" for name, value in pairs)
    return f"{url}{'&' if '?' in url else '?'}{query}" if pairs else url


def _json(parameter: ParameterPlan, value: Any, secrets: list[str]) -> bytes:
    """Return a body as JSON with the real values of its secrets, which are added to `secrets`."""
    assert parameter.adapter is not None
    try:
        written = parameter.adapter.dump_json(value, by_alias=True, warnings="error")
        if not any(mask in written for mask in _MASKS):
            return written
        original = parameter.adapter.dump_python(value, by_alias=True, warnings="error")
        found: list[str] = []
        whole = revealed(from_json(written), original, found)
        secrets += found
        return to_json(whole) if found else written
    except PydanticSerializationError as error:
        reason = str(error).partition("\n")[0]
        raise EncodingError(f"a {type(value).__name__} does not match the declared type ({reason})") from error


# --- the HTTP clients

# Headers that a redirect may send to another origin: none of them identifies the caller.
_IMPERSONAL = frozenset({"accept", "accept-encoding", "accept-language", "user-agent", "host"})
_CLOSE_LIMIT = 5.0
_WRITTEN_AT_ONCE = 64 * 1024  # bytes; between two parts of a body, the deadline is checked
# One generator per client keeps it open. They are held here because garbage collection of a client together with its
# sockets would finalize the sockets first, with a ResourceWarning.
_open: dict[httpx2.AsyncClient, AsyncGenerator[None]] = {}
_closing: set[asyncio.Task[None]] = set()


class ShownUrl(httpx2.URL):
    """A URL whose text hides its secrets, because httpx2 and other libraries log URLs."""

    shown = ""

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"URL({self.shown!r})"

    def join(self, url: httpx2.URL | str) -> httpx2.URL:
        """Resolve `url` against the real URL, not against its text."""
        return httpx2.URL(self).join(url)


_network_deadline: ContextVar[float | None] = ContextVar("toolbox.rest.network_deadline", default=None)


@contextlib.contextmanager
def deadline_for_network(deadline: float, request: httpx2.Request | None = None) -> Iterator[None]:
    """End all synchronous network work inside at `deadline`, a moment of `time.monotonic()`.

    Raises `httpx2.TimeoutException`. httpx2's own time-outs are for each read and write, so a server that sends one
    byte at a time, or one interim reply after the other, would never exceed them.
    """
    if request is not None:
        request.extensions["trace"] = functools.partial(_limit_network_stream, request.extensions.get("trace"))
    token = _network_deadline.set(deadline)
    try:
        yield
    finally:
        _network_deadline.reset(token)


def _limit_network_stream(other_trace: Callable[[str, Any], Any] | None, event: str, info: dict[str, Any]) -> None:
    """Replace the class of each network stream that is opened: a trace function of the HTTP library."""
    if other_trace is not None:
        other_trace(event, info)
    if event.endswith(".started") and "timeout" in info:  # connecting, which may begin after a wait for the pool
        info["timeout"] = _remaining(info["timeout"], httpx2.ConnectTimeout)
    stream = info.get("return_value")
    if event.endswith(".complete") and hasattr(stream, "start_tls"):
        kind: Any = type(stream)
        stream.__class__ = _limited_class(kind)


@functools.cache
def _limited_class(kind: Hashable) -> type[Any]:
    """Return a class of network streams whose reads and writes end at the deadline."""

    class LimitedStream(kind):  # type: ignore[misc,valid-type]  # the class of a stream that the HTTP library opened
        def read(self, max_bytes: int, timeout: float | None = None) -> Any:
            return super().read(max_bytes, _remaining(timeout, httpx2.ReadTimeout))

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            view = memoryview(buffer)
            for start in range(0, len(view), _WRITTEN_AT_ONCE):
                part = view[start : start + _WRITTEN_AT_ONCE]
                super().write(part, _remaining(timeout, httpx2.WriteTimeout))

    return LimitedStream


def _remaining(timeout: float | None, error: type[httpx2.TimeoutException]) -> float | None:
    """Return the seconds that the next step may take. Raises `error` when no time is left."""
    deadline = _network_deadline.get()
    if deadline is None:
        return timeout
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise error("the time for the whole request is used up")
    return remaining if timeout is None else min(timeout, remaining)


class RestConnection:
    """Holds the HTTP clients of one config key. Each is created on first use and closed with its loop at the latest."""

    def __init__(self, endpoint: RestEndpoint) -> None:
        self.endpoint = endpoint
        self._base = httpx2.URL(endpoint.url)
        self._lock = threading.Lock()
        self._sync: httpx2.Client | None = None
        self._async: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False
        renewed_after_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the clients: two processes that share a socket would read each other's replies."""
        keep_inherited(self._sync, self._async)
        self._lock, self._sync, self._async = threading.Lock(), None, {}

    def sync_client(self) -> httpx2.Client:
        """Return the client that all threads share. Raises `ContainerNotStartedError` after `aclose`."""
        self._refuse_closed()
        with self._lock:
            if self._sync is None:
                self._sync = httpx2.Client(**self._options(), event_hooks={"response": [self._limit]})
                weakref.finalize(self, self._sync.close)
            return self._sync

    async def async_client(self) -> httpx2.AsyncClient:
        """Return the client of the running loop. Raises `ContainerNotStartedError` after the connection is closed."""
        self._refuse_closed()
        loop = asyncio.get_running_loop()
        client = self._async.get(loop)
        if client is None:
            client = httpx2.AsyncClient(**self._options(), event_hooks={"response": [self._limit_async]})
            with self._lock:
                for other in [other for other in self._async if other.is_closed()]:
                    del self._async[other]
                self._async[loop] = client
            keeper = _open[client] = _keep_open(client)
            weakref.finalize(self, _close_soon, client, loop)
            # After its first step the loop knows the generator, and closes it when the loop ends.
            await anext(keeper)
        return client

    async def aclose(self) -> None:
        """Close all clients, also those of other running loops."""
        self._is_closed = True
        with self._lock:
            clients, self._async = self._async, {}
            shared, self._sync = self._sync, None
        if shared is not None:
            shared.close()
        for loop, client in clients.items():
            if loop is asyncio.get_running_loop():
                await _close(client)
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(_close(client), loop)
                await asyncio.wait([asyncio.wrap_future(closing)], timeout=_CLOSE_LIMIT)

    def _limit(self, response: httpx2.Response) -> None:
        response.stream = BoundedBody(response, self.endpoint.settings.max_reply_bytes)

    async def _limit_async(self, response: httpx2.Response) -> None:
        self._limit(response)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ContainerNotStartedError(f"the REST client of {self.endpoint.key!r}")

    def _options(self) -> dict[str, Any]:
        settings = self.endpoint.settings
        if self._tls is None:
            self._tls = tls_context(settings.verify, settings.client_certificate, settings.trust_environment)
        return {
            "verify": self._tls,
            "transport": self.endpoint.transport,
            "proxy": settings.proxy.get_secret_value() if settings.proxy else None,
            "trust_env": settings.trust_environment,
            # Cookies of one caller must not be sent with requests of another.
            "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            "limits": httpx2.Limits(
                max_connections=settings.max_connections,
                max_keepalive_connections=settings.max_keepalive_connections,
            ),
        }

    def request(self, outgoing: Outgoing, timeout: float, where: str) -> httpx2.Request:
        """Return the request for httpx2.

        Raises `RestArgumentError` for a URL that is too long or not below the base URL of the endpoint.
        """
        shown = brief(outgoing.shown_url, EXCERPT)
        try:
            request = self._request(outgoing, timeout)
        except httpx2.InvalidURL as error:
            raise RestArgumentError(f"{where}: invalid URL: {error}", shown) from error
        if not is_below(request.url, self._base):  # credentials are sent nowhere else, whatever the arguments were
            fact = f"the request is not sent: its URL is not below {self.endpoint.url}"
            raise RestArgumentError(f"{where}: {fact}", shown)
        outgoing.sent.append(request)
        return request

    def _request(self, outgoing: Outgoing, timeout: float) -> httpx2.Request:
        connect = min(timeout, self.endpoint.settings.connect_timeout)
        request = httpx2.Request(
            outgoing.verb,
            outgoing.url,
            headers=[(name.encode(), value) for name, value in outgoing.headers.values()],
            content=outgoing.content,
            data=_grouped(outgoing.fields) if outgoing.files else None,
            files=[(name, (each.filename, each.content, each.media_type)) for name, each in outgoing.files] or None,
            extensions={"timeout": httpx2.Timeout(timeout, connect=connect).as_dict()},
        )
        if "user-agent" not in request.headers:
            request.headers["User-Agent"] = "toolbox-di"
        if "accept-encoding" not in request.headers:
            request.headers["Accept-Encoding"] = "identity"
        _set_shown_url(request, outgoing.shown_url)
        return request


async def _keep_open(client: httpx2.AsyncClient) -> AsyncGenerator[None]:
    """Keep a client open while its loop runs: a loop closes its asynchronous generators when it ends."""
    try:
        yield
    finally:
        _open.pop(client, None)
        await client.aclose()


async def _close(client: httpx2.AsyncClient) -> None:
    keeper = _open.get(client)
    if keeper is not None:
        await keeper.aclose()


def _close_soon(client: httpx2.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    """Close the client of a garbage-collected connection on its loop."""

    def begin() -> None:
        task = loop.create_task(_close(client))
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    if client in _open:
        with suppress(RuntimeError):  # the loop is closed already, and the client with it
            loop.call_soon_threadsafe(begin)


def _grouped(fields: list[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, text in fields:
        grouped.setdefault(name, []).append(text)
    return grouped


def _set_shown_url(request: httpx2.Request, shown: str) -> None:
    url = ShownUrl(request.url)
    url.shown = shown
    request.url = url


def is_below(url: httpx2.URL, base: httpx2.URL) -> bool:
    """Return True if the URL has the origin of `base`, a path below that of `base`, and no user info."""
    if (url.raw_scheme, url.raw_host, url.port, url.userinfo) != (base.raw_scheme, base.raw_host, base.port, b""):
        return False
    start, path = base.raw_path.rstrip(b"/"), url.raw_path.partition(b"?")[0]
    if path != start and not path.startswith(start + b"/"):
        return False
    return not any(map(is_dot_segment, path[len(start) :].decode("ascii").split("/")))


def is_same_origin(url: httpx2.URL, other: httpx2.URL) -> bool:
    """Return True if credentials for `url` may be sent to `other`: same origin, or http upgraded to https."""
    if (url.scheme, url.host, url.port) == (other.scheme, other.host, other.port):
        return True
    upgraded = url.scheme == "http" and other.scheme == "https" and url.port is None and other.port is None
    return upgraded and url.host == other.host


def redirected(request: httpx2.Request, response: httpx2.Response, hide: Callable[[str], str]) -> httpx2.Request | None:
    """Return the request that a redirect asks for, None when it must not be followed.

    Another origin gets no personal headers and no body. `hide` removes secrets from the text of the new URL.
    """
    following = response.next_request
    try:
        shown = shown_url(urljoin(str(request.url), response.headers["location"]))
    except ValueError:  # an invalid URL is not followed
        return None
    if following is None or following.url.scheme not in ("http", "https") or not following.url.host:
        return None
    if not is_same_origin(request.url, following.url):
        if following.method not in ("GET", "HEAD"):
            return None
        for name in [name for name in following.headers if name.lower() not in _IMPERSONAL]:
            del following.headers[name]
    elif "cookie" in request.headers:
        following.headers["Cookie"] = request.headers["Cookie"]
    _set_shown_url(following, hide(shown))
    return following
