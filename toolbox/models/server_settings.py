"""The settings that the models of all providers share: their types, and checks at start.

Not here: the settings classes of the providers (`openai_settings`, `anthropic`), connecting to a server (`transport`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ..chat import REASONING
from ..context import current_bean_caller
from ..errors import Problem
from .fallbacks import cooldown_problem

ApiKey: TypeAlias = "str | Callable[..., str] | Callable[..., Awaitable[str]]"
"""A key, or a function that returns it; `def` or `async def`, with `Inject[…]` parameters."""
LARGEST_REPLY = 64 * 2**20
"""The default of `max_reply_bytes`."""


class HttpTransport(Protocol):
    """Sends the requests of a client: an httpx2 `AsyncBaseTransport` or an object with the same methods."""

    async def handle_async_request(self, request: Any) -> Any:
        """Return the reply to a request."""
        ...

    async def aclose(self) -> None:
        """Release connections; called when the client is closed."""
        ...


TransportChoice: TypeAlias = Literal["aiohttp", "httpx2"] | HttpTransport | None


class ServerSettings(Protocol):
    """The settings that every model with a server has; `OpenAiSettings` documents them."""

    @property
    def address(self) -> str: ...
    @property
    def key(self) -> ApiKey: ...
    @property
    def model(self) -> str: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def read_timeout(self) -> float | None: ...
    @property
    def max_retries(self) -> int: ...
    @property
    def max_concurrent_requests(self) -> int | None: ...
    @property
    def extra_headers(self) -> Mapping[str, str] | None: ...
    @property
    def extra_query(self) -> Mapping[str, object] | None: ...
    @property
    def transport(self) -> TransportChoice: ...
    @property
    def max_reply_bytes(self) -> int | None: ...
    @property
    def fallback(self) -> Sequence[str]: ...
    @property
    def cooldown(self) -> float: ...
    def body_parameters(self) -> dict[str, Any]: ...


P = ParamSpec("P")
S = TypeVar("S")
M = TypeVar("M")


def taking(settings: Callable[P, S]) -> Callable[[Callable[[M, S], None]], Callable[Concatenate[M, P], None]]:
    """Give a constructor the parameters of a settings class, so that they are declared once."""

    def decorate(init: Callable[[M, S], None]) -> Callable[Concatenate[M, P], None]:
        def construct(self: M, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, settings(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = inspect.signature(settings)
        construct.__signature__ = taken.replace(  # type: ignore[attr-defined]  # read by inspect
            parameters=[own, *taken.parameters.values()]
        )
        return construct

    return decorate


# --- addresses and keys


def is_address(url: str) -> bool:
    """Return True if the URL begins with http:// or https://. Without it, the host would be read as a scheme."""
    return url.lower().startswith(("http://", "https://"))


def is_same_address(url: str, other: str | None) -> bool:
    """Return True if two base URLs are of the same API."""
    return bool(other) and _normalize_address(url) == _normalize_address(other or "")


def _normalize_address(url: str) -> tuple[str, str | None, int | None, str]:
    try:
        parts = urlsplit(url.strip())
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return ("", None, None, url)
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def key_provider(function: Callable[..., str | Awaitable[str]], model: str) -> Callable[[], Awaitable[str]]:
    """Return a coroutine function that calls the function of a key, with its beans from the scope of the call."""

    async def provide_key() -> str:
        call = current_bean_caller.get()
        key: Any
        if call is not None:
            key = await call(function, key_place(model))
        else:
            key = function()
            key = await key if inspect.isawaitable(key) else key
        if not isinstance(key, str):
            raise TypeError(f"{key_place(model)} returned {type(key).__name__}, not str")
        return key

    return provide_key


def key_place(model: str) -> str:
    """Return the place of a key's function, for errors."""
    return f"the api_key function of model {model!r}"


# --- problems


def reasoning_problems(level: object, where: str) -> Iterator[Problem]:
    """Yield a problem if `reasoning=` of a model is unknown."""
    if level not in (None, *REASONING):
        yield Problem(where, f"unknown reasoning {level!r}", f"use one of: {', '.join(REASONING)}")


def has_own_transport(settings: ServerSettings) -> bool:
    """Return True if requests go to an object of the program instead of a server."""
    return settings.transport is not None and not isinstance(settings.transport, str)


def server_problems(
    settings: ServerSettings, model: object, where: str, example: str, variable: str
) -> Iterator[Problem]:
    """Yield the problems that the settings of all providers can have.

    `example` says how to set the address; `variable` is the environment variable of the key.
    """
    if not isinstance(model, str) or not model.strip():
        yield Problem(where, "missing model name", "pass the server's name of the model")
    yield from _problems_of_address(settings.address, where, example)
    yield from _problems_of_limits(settings, where)
    if isinstance(settings.key, str):
        if not settings.key.isascii() or not settings.key.isprintable() or " " in settings.key:
            what = "invalid API key: it contains a space, a line break or another character that headers do not allow"
            yield Problem(where, what, f"set api_key= or {variable} to the key only")
    elif not callable(settings.key):
        what = f"invalid API key of type {type(settings.key).__name__}"
        yield Problem(where, what, "pass a str, or a function that returns one")
    for name, value in (settings.extra_headers or {}).items():
        if not isinstance(value, str) or not value.isprintable() or not f"{name}".isascii() or not name.isprintable():
            yield Problem(where, f"invalid name or value of the header {name!r}", "use one line of printable text")
    if isinstance(settings.transport, str) and settings.transport not in ("aiohttp", "httpx2"):
        yield Problem(where, f"unknown transport {settings.transport!r}", "use one of: aiohttp, httpx2")


def _problems_of_address(address: str, where: str, example: str) -> Iterator[Problem]:
    if not is_address(address):
        yield Problem(where, "invalid base URL: it must begin with http:// or https://", example)
        return
    try:
        parts = urlsplit(address)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable or not address.isprintable() or " " in address:
        yield Problem(where, "invalid base URL: the host or port cannot be read", example)
    elif "@" in parts.netloc:
        fix = "pass api_key=, or extra_headers={'authorization': …}"
        yield Problem(where, "the base URL contains a user name or password, which would be logged", fix)
    elif parts.query or parts.fragment:
        fix = "pass the query parameters as extra_query={…}"
        yield Problem(where, "the base URL contains a query or fragment, and API paths cannot be added after it", fix)


def _problems_of_limits(settings: ServerSettings, where: str) -> Iterator[Problem]:
    for name, value in (("timeout", settings.timeout), ("read_timeout", settings.read_timeout)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            yield Problem(where, f"invalid {name}={value!r}", "use seconds above 0, or None for no limit")
    if (problem := cooldown_problem(settings.cooldown, where)) is not None:
        yield problem
    limits = (
        ("max_retries", settings.max_retries, 0),
        ("max_concurrent_requests", settings.max_concurrent_requests, 1),
        ("max_reply_bytes", settings.max_reply_bytes, 1),
    )
    for name, count, least in limits:
        if name != "max_retries" and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            yield Problem(where, f"invalid {name}={count!r}", f"use an integer of at least {least}")
