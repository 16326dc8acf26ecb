"""The settings of `OpenAiChatModel` in one frozen class.

Not here: the settings and checks that all providers share (`server_settings`), the library's own settings
(`settings`). Parameters are checked by the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from ..errors import Problem
from .server_settings import ApiKey, ServerSettings

OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The names of the limit of a reply's tokens in the OpenAI APIs."""


@dataclass(frozen=True, slots=True)
class OpenAiSettings(ServerSettings):
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
    - `max_concurrent_requests`: a limit per event loop, server, model and key, also if each request has its own model;
      further calls wait.
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

    variables = "OPENAI"
    public_url = "https://api.openai.com/v1"
    example_url = "http://localhost:11434/v1"
    header_variables = MappingProxyType({"OpenAI-Organization": "ORG_ID", "OpenAI-Project": "PROJECT_ID"})

    base_url: str | None = field(default=None, repr=False)  # may contain a key, like the other fields with repr=False
    api_key: ApiKey | None = field(default=None, repr=False)
    _: KW_ONLY
    wire: Literal["chat", "responses"] = "chat"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    parallel_tool_calls: bool | None = None
    supports_response_format: bool = True
    send_tool_metadata: Sequence[str] = ()
    strict_tools: bool = False
    send_reasoning: Literal["always", "with_calls", "never"] | None = None
    stream_usage: bool = True

    @property
    def sent_reasoning(self) -> Literal["always", "with_calls", "never"]:
        """Return which replies are sent back with their reasoning: by default what the server's own clients send."""
        if self.send_reasoning is not None:
            return self.send_reasoning
        return "always" if self.wire == "responses" or _keeps_reasoning(self.address) else "with_calls"

    def body_parameters(self) -> dict[str, Any]:
        """Return the parameters in the body of every request, by the names of the chat completions API."""
        names = ("temperature", "max_tokens", "max_completion_tokens", "seed", "parallel_tool_calls")
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.reasoning is not None:
            named["reasoning_effort"] = self.reasoning
        return {**named, **(self.parameters or {}), **(self.extra_body or {})}

    @classmethod
    def is_public(cls, address: str) -> bool:
        """Return True for OpenAI's public addresses, those of its regions included."""
        try:
            parts = urlsplit(address)
            host = parts.hostname or ""
        except ValueError:
            return False
        return parts.scheme.lower() == "https" and (host == "api.openai.com" or host.endswith(".api.openai.com"))

    def own_problems(self, where: str) -> Iterator[Problem]:
        """Yield the problem of an invalid `send_reasoning`."""
        if self.send_reasoning not in (None, "always", "with_calls", "never"):
            what = f"invalid send_reasoning={self.send_reasoning!r}"
            yield Problem(where, what, "use 'always', 'with_calls', 'never' or None")


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
