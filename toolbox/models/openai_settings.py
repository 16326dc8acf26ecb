"""The settings of `OpenAiChatModel`, in one frozen class, with what the environment adds and what is wrong with them.

Not here: reaching the server (`transport`); the settings of the environment (`settings`); parameters, which the server
judges.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from ..errors import Problem

PUBLIC_URL = "https://api.openai.com/v1"

ApiKey: TypeAlias = "str | Callable[[], Awaitable[str]]"
LARGEST_REPLY = 64 * 2**20
"""The default of `max_reply_bytes`."""


class HttpTransport(Protocol):
    """What sends a client's requests: an httpx2 `AsyncBaseTransport`, or what has its methods, as a `Recording` has."""

    async def handle_async_request(self, request: Any) -> Any:
        """The reply to a request."""
        ...

    async def aclose(self) -> None:
        """The client is closed."""
        ...


TransportChoice: TypeAlias = Literal["aiohttp", "httpx2"] | HttpTransport | None


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """How to reach a model behind the OpenAI API, and what to send with every request.

    `base_url` and `api_key` default to `OPENAI_BASE_URL` and `OPENAI_API_KEY`; a server of your own may need no key. A
    key may be a coroutine function that returns a fresh one. `wire` is `"chat"` (chat completions) or `"responses"`.

    `timeout` is for a whole call, retries and streaming included, `read_timeout` for each wait for the server; seconds.
    `max_retries` counts those after the first try: of connections that fail and of the statuses 408, 409, 429 and 5xx,
    waiting as long as the server says. `max_concurrent_requests` is a limit per event loop; more calls wait.

    `parameters` are sent with every request, by the wire's names (`top_p`, `stop`, `reasoning_effort` …); those of a
    request win, and None removes one. The named ones here are short for the same. `extra_body`, `extra_headers`,
    `extra_query` go with every request.

    `fallback` names other models of the container, asked in order when this one does not answer.
    `supports_response_format=False`: the server knows no JSON schema for replies; it is put into the prompt instead.
    `send_tool_metadata`: the keys of a tool's metadata that are sent with it. `strict_tools`: asks for arguments that
    follow the schema, of tools whose schema allows it. `max_reply_bytes` limits a reply, decoded; None: no limit.
    `stream_usage=False`: never asks a stream for its token counts; a server that refuses the question is not asked
    twice. `transport` is `"aiohttp"` (where it is installed), `"httpx2"` or an object that sends: an httpx2 transport,
    a `toolbox.recordings.Recording`. Used on several event loops, a model has a client on each.
    """

    model: str
    base_url: str | None = field(default=None, repr=False)  # may hold a key, as those below that are not shown
    api_key: ApiKey | None = field(default=None, repr=False)
    _: KW_ONLY
    wire: Literal["chat", "responses"] = "chat"
    timeout: float | None = 600.0
    read_timeout: float | None = None
    max_retries: int = 2
    max_concurrent_requests: int | None = None
    fallback: Sequence[str] = ()
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
    stream_usage: bool = True
    transport: TransportChoice = None
    max_reply_bytes: int | None = LARGEST_REPLY

    def with_environment(self) -> OpenAiSettings:
        """Return these settings with the address and the key of the environment, where none are given."""
        url = self.base_url or os.environ.get("OPENAI_BASE_URL")
        # The key of the environment belongs to the environment's server: another one must not see it.
        key = self.api_key or (os.environ.get("OPENAI_API_KEY") if is_from_environment(url or PUBLIC_URL) else None)
        return replace(self, base_url=url, api_key=key)

    @property
    def address(self) -> str:
        """The address of the server's API."""
        return self.base_url or PUBLIC_URL

    @property
    def key(self) -> ApiKey:
        """The key to send; servers of your own want none, but the `openai` package does."""
        return self.api_key or "none"

    def body_parameters(self) -> dict[str, Any]:
        """Return what is sent in the body of every request, by the names of the chat wire."""
        names = ("temperature", "max_tokens", "max_completion_tokens", "seed", "parallel_tool_calls")
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**named, **(self.parameters or {}), **(self.extra_body or {})}


# --- the environment


def is_address(url: str) -> bool:
    """Return True for the address of a server: without http:// a host would be read as a scheme."""
    return url.lower().startswith(("http://", "https://"))


def is_from_environment(base_url: str) -> bool:
    """Return True if `OPENAI_API_KEY` and its like may be sent there.

    They belong to the address of `OPENAI_BASE_URL`, and to OpenAI's public ones.
    """
    own = os.environ.get("OPENAI_BASE_URL")
    if own and _normalized(base_url) == _normalized(own):
        return True
    try:
        parts = urlsplit(base_url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return parts.scheme.lower() == "https" and (host == "api.openai.com" or host.endswith(".api.openai.com"))


def _normalized(url: str) -> tuple[str, str | None, int | None, str]:
    try:
        parts = urlsplit(url.strip())
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return ("", None, None, url)
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def environment_headers(base_url: str | None) -> dict[str, str]:
    """Return the headers that the package reads from the environment, for this address (None: for any)."""
    if base_url is not None and not is_from_environment(base_url):
        return {}
    lines = [line.partition(":") for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")]
    headers = {name.strip(): value.strip() for name, colon, value in lines if colon}
    named = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
    return headers | {name: value for name, variable in named.items() if (value := os.environ.get(variable))}


# --- problems


def problems_of(settings: OpenAiSettings) -> Iterator[Problem]:
    """Yield the problems of these settings. No value that may be a secret is shown."""
    model: object = settings.model
    where = f"OpenAiChatModel({model!r})"
    if (
        not settings.api_key
        and not settings.base_url
        and (settings.transport is None or isinstance(settings.transport, str))
    ):
        fix = "give api_key= or base_url=, or set OPENAI_API_KEY or OPENAI_BASE_URL"
        yield Problem(where, "there is neither an API key nor an address", fix)
    if not isinstance(model, str) or not model.strip():
        yield Problem(where, "it does not say which model", "give the name that the server has for it")
    yield from _of_address(settings.address, where)
    yield from _of_limits(settings, where)
    if isinstance(settings.key, str):
        if not settings.key.isascii() or not settings.key.isprintable() or " " in settings.key:
            what = "its API key holds a blank, a line end or another character that no header can carry"
            yield Problem(where, what, "give api_key= or OPENAI_API_KEY the key alone")
    elif not callable(settings.key):
        what = f"its API key is of type {type(settings.key).__name__}"
        yield Problem(where, what, "give a str, or a coroutine function that gives one")
    for name, value in (settings.extra_headers or {}).items():
        if not isinstance(value, str) or not value.isprintable() or not f"{name}".isascii() or not name.isprintable():
            yield Problem(where, f"the header {name!r} has no value that can be sent", "give one line of text")
    if isinstance(settings.transport, str) and settings.transport not in ("aiohttp", "httpx2"):
        yield Problem(where, f"there is no transport {settings.transport!r}", "use 'aiohttp' or 'httpx2'")


def _of_address(address: str, where: str) -> Iterator[Problem]:
    if not is_address(address):
        what = "its address does not begin with http:// or https://"
        yield Problem(where, what, "set base_url= or OPENAI_BASE_URL: http://localhost:11434/v1, for example")
        return
    try:
        parts = urlsplit(address)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable or not address.isprintable() or " " in address:
        fix = "mend base_url= or OPENAI_BASE_URL: http://localhost:11434/v1, for example"
        yield Problem(where, "its address is none: the host or the port cannot be read", fix)
    elif "@" in parts.netloc:
        fix = "give api_key=, or extra_headers={'authorization': …}"
        yield Problem(where, "its address holds a name or password, which would go into logs", fix)
    elif parts.query or parts.fragment:
        fix = "give extra_query={…} what stands behind the question mark"
        yield Problem(where, "its address holds a query, and the paths of the API would be put behind it", fix)


def _of_limits(settings: OpenAiSettings, where: str) -> Iterator[Problem]:
    for name, value in (("timeout", settings.timeout), ("read_timeout", settings.read_timeout)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            yield Problem(where, f"{name} is {value!r}", "give seconds above 0, or None for no limit")
    limits = (
        ("max_retries", settings.max_retries, 0),
        ("max_concurrent_requests", settings.max_concurrent_requests, 1),
        ("max_reply_bytes", settings.max_reply_bytes, 1),
    )
    for name, count, least in limits:
        if name != "max_retries" and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            yield Problem(where, f"{name} is {count!r}", f"give a whole number from {least}")
