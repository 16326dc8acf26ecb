"""Sends encoded requests with the `openai` client and receives replies: one client per event loop, retries, timeouts.

Only this module uses the `openai` package, and only that package retries. Not here: the contents of requests and
replies (`chat_wire`, `responses_wire`), turning failures into errors (`server_errors`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

from ..errors import ModelError, ModelProtocolError, ModelTimeoutError
from ..execution.threads import keep_inherited, renewed_after_fork
from ..logs import hide_queries
from ..validation_text import hide_secrets
from .openai_settings import OpenAiSettings, environment_headers, is_from_environment
from .permission import model_requests
from .server_errors import http_error, redirect_error, request_id_in, shorten, transport_error

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECT_TIMEOUT = 10.0
AFTER_END = 5.0
"""Seconds to wait for more data or the end of a stream whose reply is complete."""
AFTER_DONE = 0.1
"""The same after `[DONE]`, only to be able to use the connection again."""

SHORTEST_SECRET = 8
"""Shorter headers and keys are not hidden in errors: `none` and `true` may be part of any text."""
_HARMLESS_HEADERS = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "http-referer", "openai-beta", "referer"}
    | {"user-agent", "x-title"}
)


@dataclass(slots=True)
class _Connection:
    """The client and the limit of one event loop. Closing `keeper` closes the client."""

    client: AsyncOpenAI
    limit: asyncio.Semaphore | contextlib.AbstractAsyncContextManager[None]
    keeper: AsyncGenerator[None, None]


@dataclass(frozen=True, slots=True)
class Received:
    """A whole reply: status, body and headers."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def request_id(self) -> str | None:
        """The server's id of this request."""
        return request_id_in(self.headers)


class Transport:
    """Sends requests to one server."""

    def __init__(self, settings: OpenAiSettings) -> None:
        # The import takes half a second. It belongs in the start of the program, not in the first call.
        import openai

        self._openai: Any = openai
        self._headers = {_RAW: "true", _READ_TIMEOUT: openai.Omit()}
        self.settings = settings
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = WeakKeyDictionary()
        renewed_after_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the connections without closing them: they belong to the event loops of the parent process."""
        keep_inherited(dict(self._connections))
        self._connections = WeakKeyDictionary()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Received:
        """Send a request and return the reply. Raises `ModelError`."""
        self._check_permission()
        connection = self._connection()
        try:
            async with asyncio.timeout(self.settings.timeout), connection.limit:
                response = await self.send(connection.client, path, body, headers, self.settings.max_retries, False)
                if (fault := _fault_of(response)) is not None:
                    raise fault
                return Received(response.status_code, response.content, response.headers)
        except TimeoutError as error:
            self.fail(error)

    @contextlib.asynccontextmanager
    async def open(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> AsyncIterator[Stream]:
        """Send a request and yield the reply as a `Stream`, which is closed at the end. Raises `ModelError`."""
        self._check_permission()
        connection = self._connection()
        timeout = self.settings.timeout
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(deadline):
                    await stack.enter_async_context(connection.limit)
            except TimeoutError as error:
                self.fail(error)
            stream = Stream(self, connection.client, path, body, headers, deadline)
            stack.push_async_callback(stream.aclose)
            await stream.begin()
            yield stream

    async def aclose(self) -> None:
        """Close the connections of all running event loops."""
        here = asyncio.get_running_loop()
        connections, self._connections = dict(self._connections), WeakKeyDictionary()
        for loop, connection in connections.items():
            if loop is here:
                await connection.keeper.aclose()
            elif loop.is_running():
                future = asyncio.run_coroutine_threadsafe(_close(connection), loop)
                with contextlib.suppress(Exception):  # the other loop may end and close its connections first
                    await asyncio.wait_for(asyncio.wrap_future(future), 1.0)

    def hide_secrets(self, error: ModelError, sent: Iterable[object] = ()) -> None:
        """Hide secrets in an error, because a server or a transport may repeat them; then shorten the error's texts.

        `sent` are the secrets of this request, besides those of the settings.
        """
        settings = self.settings
        headers = {**environment_headers(settings.address), **(settings.extra_headers or {})}
        found = [settings.key, *map(str, (settings.extra_query or {}).values()), *sent]
        found += [value for name, value in headers.items() if name.lower() not in _HARMLESS_HEADERS]
        found += [each.client.api_key for each in self._connections.values()]  # a key that a function gave
        # A server may repeat a credential without its scheme ("Bearer …").
        words = [word for each in found if isinstance(each, str) for word in (each, *each.split())]
        hide_secrets(error, {each for each in words if len(each) >= SHORTEST_SECRET})
        shorten(error)

    def _check_permission(self) -> None:
        """Call the hook of test runs, which may refuse the request. A transport object is not a server."""
        transport = self.settings.transport
        if model_requests.check is not None and (transport is None or isinstance(transport, str)):
            model_requests.check(self.settings.address.partition("?")[0])

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None:
            limit = self.settings.max_concurrent_requests
            client = self._client()
            keeper = _until_the_loop_ends(client, weakref.ref(self._connections), loop)
            with contextlib.suppress(StopIteration):
                keeper.__anext__().send(None)  # runs up to `yield`, without waiting
            connection = _Connection(
                client, asyncio.Semaphore(limit) if limit is not None else contextlib.nullcontext(), keeper
            )
            self._connections[loop] = connection
        return connection

    def _client(self) -> AsyncOpenAI:
        from .bodies import prepared

        settings, openai = self.settings, self._openai
        read = settings.read_timeout or settings.timeout
        if settings.extra_query:
            hide_queries(settings.address)
        client: AsyncOpenAI = openai.AsyncOpenAI(
            api_key=settings.key,
            base_url=settings.address,
            timeout=openai.Timeout(read, connect=min(CONNECT_TIMEOUT, read or CONNECT_TIMEOUT)),
            max_retries=settings.max_retries,
            default_headers={
                "content-type": "application/json",
                "accept-encoding": "gzip, deflate",
                **dict.fromkeys(_ABOUT_US, openai.Omit()),
                **self._not_from_environment(),
                **(settings.extra_headers or {}),
            },
            default_query=dict(settings.extra_query or {}),
            http_client=prepared(self._http_client(), settings.max_reply_bytes),
        )
        return client

    def _not_from_environment(self) -> dict[str, Any]:
        """Remove headers that the package reads from the environment, if they belong to another server."""
        if is_from_environment(self.settings.address):
            return {}
        return dict.fromkeys(environment_headers(None), self._openai.Omit())

    def _http_client(self) -> Any:
        # A redirect could send the conversation and headers with keys to another server.
        make = functools.partial(self._openai.DefaultAsyncHttpxClient, follow_redirects=False)
        transport = self.settings.transport
        if transport is not None and not isinstance(transport, str):
            return make(transport=transport)
        if transport == "httpx2":
            return make()
        try:
            return self._openai.DefaultAioHttpClient(follow_redirects=False)
        except RuntimeError:  # aiohttp is not installed
            if transport == "aiohttp":
                raise
            return make()

    async def send(
        self,
        client: Any,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        max_retries: int,
        stream: bool,
    ) -> Any:
        """Send a request and return the HTTP response; the body of a stream is unread.

        The package retries. Error statuses raise `ModelHttpError`.
        """
        options: dict[str, Any] = {"security": {"bearer_auth": True}, "max_retries": max_retries}
        options["headers"] = {**self._headers, **headers} if headers else self._headers
        try:
            raw = await client.post(
                _url(client.base_url, path),
                cast_to=object,
                content=body,
                options=options,
                stream=stream,
                stream_cls=self._openai.AsyncStream[object] if stream else None,
            )
        except self._openai.APIStatusError as error:
            response, status = error.response, error.status_code
            if 300 <= status < 400:
                raise redirect_error(status, response.headers, self.settings.address) from error
            raise http_error(status, response.content, request_id_in(response.headers)) from error
        except Exception as error:
            self.fail(error)
        return raw.http_response

    def fail(self, error: Exception, begun: bool = False) -> NoReturn:
        """Raise the `ModelError` for a failure to send or receive. `begun`: a part of the reply had arrived."""
        if isinstance(error, ModelError):
            raise error
        if type(error) is TimeoutError:
            limit = self.settings.timeout or 0
            raise ModelTimeoutError(f"no complete reply within {limit:g} s; raise timeout=") from error
        raise transport_error(error, self.settings.address, begun) or error from error


async def _until_the_loop_ends(
    client: AsyncOpenAI,
    connections: weakref.ref[WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection]],
    loop: asyncio.AbstractEventLoop,
) -> AsyncGenerator[None, None]:
    """Close the client when the event loop ends, because a loop closes its async generators.

    Otherwise aiohttp would warn about each open connection.
    """
    try:
        yield
    finally:
        if (there := connections()) is not None:
            there.pop(loop, None)
        await client.close()


async def _close(connection: _Connection) -> None:
    await connection.keeper.aclose()


@functools.lru_cache(maxsize=64)
def _url(base_url: Any, path: str) -> str:
    """Return the full URL as the package builds it. Passing it saves parsing once per request."""
    return str(base_url.copy_with(raw_path=base_url.raw_path + path.lstrip("/").encode()))


def _fault_of(response: Any) -> ModelProtocolError | None:
    """Return the fault that ended reading the body, if there is one."""
    return getattr(response.stream, "fault", None)


# With this header, the package returns the HTTP response unparsed.
_RAW = "X-Stainless-Raw-Response"
# The package describes the machine in these headers. Other servers do not need them, and each header costs time.
_READ_TIMEOUT = "x-stainless-read-timeout"
_ABOUT_US = tuple(
    f"X-Stainless-{name}" for name in ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async")
)


class Stream:
    """A reply that is being received. `deadline` is a time of the event loop's clock, or None."""

    def __init__(
        self,
        transport: Transport,
        client: AsyncOpenAI,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        deadline: float | None,
    ) -> None:
        self._transport = transport
        self._client = client
        self._request = (path, body, headers)
        self._deadline = deadline
        self._retries = transport.settings.max_retries
        self._response: Any = None
        self._blocks: AsyncIterator[bytes] | None = None
        self._end_by: float | None = None

    @property
    def request_id(self) -> str | None:
        """The server's id of this request."""
        return None if self._response is None else request_id_in(self._response.headers)

    async def begin(self) -> None:
        """Send the request, and return when the server has answered with a successful status."""
        try:
            async with asyncio.timeout_at(self._deadline):
                response = await self._transport.send(self._client, *self._request, self._retries, True)
        except TimeoutError as error:
            self._transport.fail(error)
        self._retries -= int(response.request.headers.get("x-stainless-retry-count") or 0)
        self._response = response
        self._blocks = response.aiter_bytes()

    async def again(self) -> bool:
        """Send the request again after a broken connection. Returns False if no retry is left."""
        if self._retries <= 0:
            return False
        self._retries -= 1
        await self.aclose()
        await asyncio.sleep(random.uniform(0.4, 0.6))  # like the first retry of the package
        await self.begin()
        return True

    async def next_block(self) -> bytes | None:
        """Return the next bytes, or None at the end."""
        assert self._blocks is not None
        try:
            async with asyncio.timeout_at(self._deadline):
                block = await anext(self._blocks, None)
        except Exception as error:
            self._transport.fail(error, begun=True)
        if block is None and (fault := _fault_of(self._response)) is not None:
            raise fault
        return block

    async def more(self, said: bool) -> bytes | None:
        """Return bytes that follow a complete reply, or None at the end, on a timeout or after a failure.

        `said`: the last block contained data, which restarts the timeout. Pings do not.
        """
        assert self._blocks is not None
        if said or self._end_by is None:
            end_by = asyncio.get_running_loop().time() + AFTER_END
            self._end_by = end_by if self._deadline is None else min(end_by, self._deadline)
        with contextlib.suppress(Exception):
            async with asyncio.timeout_at(self._end_by):
                return await anext(self._blocks, None)
        return None

    async def drain(self) -> None:
        """Read the rest if it arrives quickly, so that the connection can be used again."""
        assert self._blocks is not None
        with contextlib.suppress(Exception):
            async with asyncio.timeout(AFTER_DONE):
                while await anext(self._blocks, None) is not None:
                    pass

    async def aclose(self) -> None:
        """Release the connection."""
        response, self._response, self._blocks = self._response, None, None
        if response is not None:
            with contextlib.suppress(Exception):  # a connection that fails to close is unusable anyway
                await response.aclose()
