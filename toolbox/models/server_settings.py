"""The settings that the models of all providers share: their fields and defaults, the environment, and checks at start.

Not here: the settings classes of the providers (`openai_settings`, `anthropic_settings`), creating models from the
program's settings (`model_providers`), connecting to a server (`transport`).
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ..chat import REASONING, Reasoning
from ..context import current_bean_caller
from ..errors import Problem
from .fallbacks import DEFAULT_COOLDOWN, cooldown_problem

ApiKey: TypeAlias = "str | Callable[..., str] | Callable[..., Awaitable[str]]"
"""A key, or a function that returns it; `def` or `async def`, with `Inject[…]` parameters."""
Key: TypeAlias = "str | Callable[[], Awaitable[str]]"
"""A key, or a coroutine function that returns the one for the next request."""
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


class AddressAndKey:
    """Fields that each settings class declares itself: they are positional arguments, and each has its own order."""

    __slots__ = ()

    base_url: str | None
    api_key: ApiKey | None


@dataclass(frozen=True, slots=True)
class ServerSettings(AddressAndKey, ABC):
    """The settings that every model with a server has; `OpenAiSettings` documents them.

    The settings class of a provider adds `base_url`, `api_key`, its own fields, and `body_parameters`. It sets:

    - `variables`: how its environment variables begin: `OPENAI` for `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
    - `public_url`: the address of the provider's own server. `example_url`: an address for the texts of problems.
    - `key_variables`: how the variables of the key end; the first that is set counts.
    - `needs_key`: False if the server at `public_url` accepts requests without a key.

    Do not use `super()` without arguments here: a class with slots is created twice, and it would find the first one.
    """

    variables: ClassVar[str]
    public_url: ClassVar[str]
    example_url: ClassVar[str]
    key_variables: ClassVar[tuple[str, ...]] = ("API_KEY",)
    header_variables: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Headers that the provider's package reads from the environment, with the ends of their variables."""
    needs_key: ClassVar[bool] = True

    model: str
    _: KW_ONLY
    timeout: float | None = 600.0
    read_timeout: float | None = None
    max_retries: int = 2
    max_concurrent_requests: int | None = None
    fallback: Sequence[str] = ()
    reasoning: Reasoning | None = None
    temperature: float | None = None
    parameters: Mapping[str, Any] | None = field(default=None, repr=False)  # fields without repr may contain a key
    extra_body: Mapping[str, Any] | None = field(default=None, repr=False)
    extra_headers: Mapping[str, str] | None = field(default=None, repr=False)
    extra_query: Mapping[str, object] | None = field(default=None, repr=False)
    transport: TransportChoice = None
    max_reply_bytes: int | None = LARGEST_REPLY
    cooldown: float = DEFAULT_COOLDOWN

    @abstractmethod
    def body_parameters(self) -> dict[str, Any]:
        """Return the parameters in the body of every request, by the names of the provider's API."""

    def own_problems(self, where: str) -> Iterator[Problem]:
        """Yield the problems of the fields that only this provider has."""
        yield from ()

    @property
    def address(self) -> str:
        """The base URL of the server's API."""
        return self.base_url or self.public_url

    @property
    def key(self) -> ApiKey:
        """The key to send. Your own server may need none, but the packages require one."""
        return self.api_key or "none"

    @property
    def has_own_transport(self) -> bool:
        """True if requests go to an object of the program instead of a server."""
        return self.transport is not None and not isinstance(self.transport, str)

    # --- the environment

    def with_environment(self) -> Self:
        """Return the settings with missing values of address and key from the environment."""
        url = self.base_url or self.in_environment("BASE_URL")
        # The key in the environment belongs to the environment's server. It must not be sent to another one.
        own = self.is_from_environment(url or self.public_url)
        found = [key for name in self.key_variables if own and (key := self.in_environment(name))]
        given: dict[str, Any] = {"base_url": url, "api_key": self.api_key or next(iter(found), None)}
        return replace(self, **given)

    @classmethod
    def in_environment(cls, name: str) -> str | None:
        """Return the value of one of the provider's variables, such as `MODEL`; None if it is unset or empty."""
        return os.environ.get(f"{cls.variables}_{name}") or None

    @classmethod
    def is_from_environment(cls, address: str) -> bool:
        """Return True if the key and the headers in the environment may be sent to this address.

        They belong to the address in the environment, and to the provider's public addresses.
        """
        return is_same_address(address, cls.in_environment("BASE_URL")) or cls.is_public(address)

    @classmethod
    def is_public(cls, address: str) -> bool:
        """Return True for the provider's public addresses: those with the scheme, host and port of `public_url`."""
        return _normalize_address(address)[:3] == _normalize_address(cls.public_url)[:3]

    @classmethod
    def environment_headers(cls, address: str | None) -> dict[str, str]:
        """Return the headers that the package reads from the environment for this address (None: any address)."""
        if address is not None and not cls.is_from_environment(address):
            return {}
        lines = [line.partition(":") for line in (cls.in_environment("CUSTOM_HEADERS") or "").split("\n")]
        headers = {name.strip(): value.strip() for name, colon, value in lines if colon}
        named = {name: cls.in_environment(variable) for name, variable in cls.header_variables.items()}
        return headers | {name: value for name, value in named.items() if value is not None}

    # --- problems, without values that may be secret

    def missing_key(self, where: str) -> Problem | None:
        """Return the problem if neither key nor address is known.

        It is apart from `problems`: a program may set the key after its settings were checked.
        """
        if self.api_key or self.base_url or self.has_own_transport or not self.needs_key:
            return None
        fix = f"pass api_key= or base_url=, or set {self.variables}_API_KEY or {self.variables}_BASE_URL"
        return Problem(where, "missing API key and base URL", fix)

    def problems(self, where: str) -> Iterator[Problem]:
        """Yield all other problems of these settings."""
        model: object = self.model
        if not isinstance(model, str) or not model.strip():
            yield Problem(where, "missing model name", "pass the server's name of the model")
        example = f"set base_url= or {self.variables}_BASE_URL, for example to {self.example_url}"
        yield from _problems_of_address(self.address, where, example)
        yield from limit_problems(
            where,
            timeout=self.timeout,
            read_timeout=self.read_timeout,
            cooldown=self.cooldown,
            max_retries=self.max_retries,
            max_concurrent_requests=self.max_concurrent_requests,
            max_reply_bytes=self.max_reply_bytes,
        )
        if isinstance(self.key, str):
            if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
                what = (
                    "invalid API key: it contains a space, a line break or another character that headers do not allow"
                )
                yield Problem(where, what, f"set api_key= or {self.variables}_API_KEY to the key only")
        elif not callable(self.key):
            what = f"invalid API key of type {type(self.key).__name__}"
            yield Problem(where, what, "pass a str, or a function that returns one")
        for name, value in (self.extra_headers or {}).items():
            is_text = isinstance(value, str) and value.isprintable()
            if not is_text or not f"{name}".isascii() or not name.isprintable():
                yield Problem(where, f"invalid name or value of the header {name!r}", "use one line of printable text")
        if isinstance(self.transport, str) and self.transport not in ("aiohttp", "httpx2"):
            yield Problem(where, f"unknown transport {self.transport!r}", "use one of: aiohttp, httpx2")
        yield from reasoning_problems(self.reasoning, where)
        yield from self.own_problems(where)


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


def missing_package(name: str, where: str) -> Problem:
    """Return the problem if a package is not installed; its extra has the same name."""
    return Problem(where, f"the package {name} is missing", f"install it with: pip install 'toolbox-di[{name}]'")


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


def limit_problems(
    where: str,
    *,
    timeout: object,
    read_timeout: object = None,
    cooldown: object,
    max_retries: object,
    max_concurrent_requests: object = None,
    max_reply_bytes: object,
) -> Iterator[Problem]:
    """Yield the problems of a model's limits."""
    for name, value in (("timeout", timeout), ("read_timeout", read_timeout)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            yield Problem(where, f"invalid {name}={value!r}", "use seconds above 0, or None for no limit")
    if (problem := cooldown_problem(cooldown, where)) is not None:
        yield problem
    limits = (
        ("max_retries", max_retries, 0),
        ("max_concurrent_requests", max_concurrent_requests, 1),
        ("max_reply_bytes", max_reply_bytes, 1),
    )
    for name, count, least in limits:
        if name != "max_retries" and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            yield Problem(where, f"invalid {name}={count!r}", f"use an integer of at least {least}")
