"""The settings of `OpenAiChatModel` in one frozen class, their defaults from the environment, and their checks.

Not here: the settings and checks that all providers share (`server_settings`), the library's own settings
(`settings`). Parameters are checked by the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from ..chat import Reasoning
from ..errors import Problem
from .fallbacks import DEFAULT_COOLDOWN
from .server_settings import (
    LARGEST_REPLY,
    ApiKey,
    TransportChoice,
    has_own_transport,
    is_same_address,
    reasoning_problems,
    server_problems,
)

PUBLIC_URL = "https://api.openai.com/v1"
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The names of the limit of a reply's tokens in the OpenAI APIs."""


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
    - `cooldown`: seconds for which a chain of fallbacks skips this model after its server failed; 0 for never.
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
    cooldown: float = DEFAULT_COOLDOWN

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
        what = f"invalid send_reasoning={settings.send_reasoning!r}"
        yield Problem(where, what, "use 'always', 'with_calls', 'never' or None")
