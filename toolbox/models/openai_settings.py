"""The settings of `OpenAiChatModel` in one frozen class, their defaults from the environment, and their checks.

Not here: connecting to the server (`transport`), the library's own settings (`settings`). Parameters are checked by the
server.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from ..chat import REASONING, Reasoning
from ..context import current_bean_caller
from ..errors import Problem

PUBLIC_URL = "https://api.openai.com/v1"
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The names of the limit of a reply's tokens in the OpenAI APIs."""

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
    def body_parameters(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """The settings of a model behind the OpenAI API. `OpenAiChatModel` takes the same arguments.

    Server:

    - `base_url`, `api_key`: default to `OPENAI_BASE_URL` and `OPENAI_API_KEY`. Your own server may need no key. The key
      may be a function that returns the current key, with `Inject[…]` parameters.
    - `wire`: `"chat"` (chat completions) or `"responses"`.
    - `transport`: `"aiohttp"` (the default if it is installed), `"httpx2"`, or an object that sends requests, such as
      an httpx2 transport or a `toolbox.recordings.Recording`. A model has one client per event loop.

    Limits:

    - `timeout`: seconds for a whole call, including retries and streaming; None for no limit.
    - `read_timeout`: seconds for each wait for data from the server.
    - `max_retries`: retries after the first try, for failed connections and the statuses 408, 409, 429 and 5xx. The
      server's `retry-after` is respected.
    - `max_concurrent_requests`: a limit per event loop; further calls wait.
    - `max_reply_bytes`: the largest decoded reply; None for no limit.

    Parameters of every request:

    - `reasoning`: `"none"`, `"minimal"`, `"low"`, `"medium"` or `"high"`; None leaves it to the server.
    - `temperature`, `max_tokens`, `max_completion_tokens`, `seed`, `parallel_tool_calls`, and `parameters` for all
      others, by the server's names (`top_p`, `stop`, `reasoning_effort`, …). Parameters of a request win; None removes
      one.
    - `extra_body`, `extra_headers`, `extra_query`: further fields, headers and query parameters.

    Behaviour:

    - `fallback`: the names of other models of the container, which are called in order if this one does not answer.
    - `supports_response_format=False`: the server does not support JSON schemas for replies. The schema is added to the
      prompt instead.
    - `send_tool_metadata`: the keys of tool metadata that are sent to the server.
    - `send_reasoning`: send a reply's reasoning back `"always"`, `"with_calls"` (only with tool calls) or `"never"`.
      None means always for the Responses API, Z.ai and Ollama, otherwise with calls.
    - `strict_tools`: require arguments that match the schema, for tools whose schema allows it.
    - `stream_usage=False`: do not request token counts in streams. After a server has rejected the option, it is
      not sent again.
    """

    model: str
    base_url: str | None = field(default=None, repr=False)  # may contain a key, like the other fields with repr=False
    api_key: ApiKey | None = field(default=None, repr=False)
    _: KW_ONLY
    wire: Literal["chat", "responses"] = "chat"
    timeout: float | None = 600.0
    read_timeout: float | None = None
    max_retries: int = 2
    max_concurrent_requests: int | None = None
    fallback: Sequence[str] = ()
    reasoning: Reasoning | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    parallel_tool_calls: bool | None = None
    parameters: Mapping[str, Any] | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] | None = field(default=None, repr=False)
    extra_headers: Mapping[str, str] | None = field(default=None, repr=False)
    extra_query: Mapping[str, object] | None = field(default=None, repr=False)
    supports_response_format: bool = True
    send_tool_metadata: Sequence[str] = ()
    strict_tools: bool = False
    send_reasoning: Literal["always", "with_calls", "never"] | None = None
    stream_usage: bool = True
    transport: TransportChoice = None
    max_reply_bytes: int | None = LARGEST_REPLY

    def with_environment(self) -> OpenAiSettings:
        """Return the settings with missing values of address and key from the environment."""
        url = self.base_url or os.environ.get("OPENAI_BASE_URL")
        # The key in the environment belongs to the environment's server. It must not be sent to another one.
        key = self.api_key or (os.environ.get("OPENAI_API_KEY") if is_from_environment(url or PUBLIC_URL) else None)
        return replace(self, base_url=url, api_key=key)

    @property
    def address(self) -> str:
        """The base URL of the server's API."""
        return self.base_url or PUBLIC_URL

    @property
    def sent_reasoning(self) -> Literal["always", "with_calls", "never"]:
        """Return which replies are sent back with their reasoning: by default what the server's own clients send."""
        if self.send_reasoning is not None:
            return self.send_reasoning
        return "always" if self.wire == "responses" or _keeps_reasoning(self.address) else "with_calls"

    @property
    def key(self) -> ApiKey:
        """The key to send. Your own server may need none, but the `openai` package requires one."""
        return self.api_key or "none"

    def body_parameters(self) -> dict[str, Any]:
        """Return the parameters in the body of every request, by the names of the chat completions API."""
        names = ("temperature", "max_tokens", "max_completion_tokens", "seed", "parallel_tool_calls")
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.reasoning is not None:
            named["reasoning_effort"] = self.reasoning
        return {**named, **(self.parameters or {}), **(self.extra_body or {})}


# --- the environment


def is_address(url: str) -> bool:
    """Return True if the URL begins with http:// or https://. Without it, the host would be read as a scheme."""
    return url.lower().startswith(("http://", "https://"))


def is_from_environment(base_url: str) -> bool:
    """Return True if `OPENAI_API_KEY` and similar variables may be sent to this address.

    They belong to the address in `OPENAI_BASE_URL` and to OpenAI's public addresses.
    """
    if is_same_address(base_url, os.environ.get("OPENAI_BASE_URL")):
        return True
    return is_openai_address(base_url)


_KEEPING = ("z.ai", "bigmodel.cn", "ollama.com")
_OLLAMA_PORT = 11434


def _keeps_reasoning(url: str) -> bool:
    """Return True for servers whose models are trained to read the reasoning of all earlier replies."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    return port == _OLLAMA_PORT or any(host == each or host.endswith(f".{each}") for each in _KEEPING)


def is_openai_address(url: str) -> bool:
    """Return True for OpenAI's public addresses."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return parts.scheme.lower() == "https" and (host == "api.openai.com" or host.endswith(".api.openai.com"))


def is_same_address(url: str, other: str | None) -> bool:
    """Return True if two base URLs are of the same API."""
    return bool(other) and _normalized(url) == _normalized(other or "")


def _normalized(url: str) -> tuple[str, str | None, int | None, str]:
    try:
        parts = urlsplit(url.strip())
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return ("", None, None, url)
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def environment_headers(base_url: str | None) -> dict[str, str]:
    """Return the headers that the package reads from the environment for this address (None: any address)."""
    if base_url is not None and not is_from_environment(base_url):
        return {}
    lines = [line.partition(":") for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")]
    headers = {name.strip(): value.strip() for name, colon, value in lines if colon}
    named = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
    return headers | {name: value for name, variable in named.items() if (value := os.environ.get(variable))}


# --- problems


def problems_of(settings: OpenAiSettings) -> Iterator[Problem]:
    """Yield the problems of these settings, without values that may be secret."""
    model: object = settings.model
    where = f"OpenAiChatModel({model!r})"
    if not settings.api_key and not settings.base_url and not has_own_transport(settings):
        fix = "pass api_key= or base_url=, or set OPENAI_API_KEY or OPENAI_BASE_URL"
        yield Problem(where, "missing API key and base URL", fix)
    example = "set base_url= or OPENAI_BASE_URL, for example to http://localhost:11434/v1"
    yield from server_problems(settings, model, where, example, "OPENAI_API_KEY")
    yield from reasoning_problems(settings.reasoning, where)
    if settings.send_reasoning not in (None, "always", "with_calls", "never"):
        what = f"invalid send_reasoning {settings.send_reasoning!r}"
        yield Problem(where, what, "use 'always', 'with_calls', 'never' or None")


def key_provider(function: Callable[..., str | Awaitable[str]], model: str) -> Callable[[], Awaitable[str]]:
    """Return a coroutine function that calls the function of a key, with its beans from the scope of the call."""

    async def provide() -> str:
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

    return provide


def key_place(model: str) -> str:
    """Return the place of a key's function, for errors."""
    return f"the api_key function of model {model!r}"


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
    yield from _of_address(settings.address, where, example)
    yield from _of_limits(settings, where)
    if isinstance(settings.key, str):
        if not settings.key.isascii() or not settings.key.isprintable() or " " in settings.key:
            what = "invalid API key: it contains a space, a line break or another character that headers do not allow"
            yield Problem(where, what, f"set api_key= or {variable} to the key only")
    elif not callable(settings.key):
        what = f"invalid API key of type {type(settings.key).__name__}"
        yield Problem(where, what, "pass a str, or a function that returns one")
    for name, value in (settings.extra_headers or {}).items():
        if not isinstance(value, str) or not value.isprintable() or not f"{name}".isascii() or not name.isprintable():
            yield Problem(where, f"invalid name or value of the header {name!r}", "pass one line of printable text")
    if isinstance(settings.transport, str) and settings.transport not in ("aiohttp", "httpx2"):
        yield Problem(where, f"unknown transport {settings.transport!r}", "use 'aiohttp' or 'httpx2'")


def _of_address(address: str, where: str, example: str) -> Iterator[Problem]:
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


def _of_limits(settings: ServerSettings, where: str) -> Iterator[Problem]:
    for name, value in (("timeout", settings.timeout), ("read_timeout", settings.read_timeout)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            yield Problem(where, f"invalid {name} {value!r}", "pass seconds above 0, or None for no limit")
    limits = (
        ("max_retries", settings.max_retries, 0),
        ("max_concurrent_requests", settings.max_concurrent_requests, 1),
        ("max_reply_bytes", settings.max_reply_bytes, 1),
    )
    for name, count, least in limits:
        if name != "max_retries" and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            yield Problem(where, f"invalid {name} {count!r}", f"pass an integer of at least {least}")
