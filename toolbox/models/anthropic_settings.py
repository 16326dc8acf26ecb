"""The settings of `AnthropicChatModel` in one frozen class.

Not here: the settings and checks that all providers share (`server_settings`), what the models accept (`anthropic`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from ..errors import Problem
from .server_settings import ApiKey, ServerSettings


@dataclass(frozen=True, slots=True)
class AnthropicSettings(ServerSettings):
    """The settings of a model behind Anthropic's Messages API. `AnthropicChatModel` takes the same arguments.

    Server:

    - `api_key`: defaults to `ANTHROPIC_API_KEY`, then `ANTHROPIC_AUTH_TOKEN`. Your own server may need no key. The key
      may be a function that returns the current key, with `Inject[…]` parameters.
    - `base_url`: the address without `/v1`; defaults to `ANTHROPIC_BASE_URL`, then Anthropic.
    - `transport`, `timeout`, `read_timeout`, `max_retries`, `max_concurrent_requests`, `max_reply_bytes`: see
      `OpenAiSettings`.

    Every request:

    - `max_tokens`: the largest number of tokens in a reply, thoughts included.
    - `cache`: set cache marks on the system message, the tools and the last user turn; `"1h"` for a cache that lasts an
      hour. A mark of your own is `attributes={"cache_control": …}` of a message. A request has at most 4.
    - `reasoning`: `"none"`, `"minimal"`, `"low"`, `"medium"` or `"high"`; None leaves it to the server.
    - `temperature`, `parallel_tool_calls`, and `parameters` for all others, by the server's names (`top_k`,
      `stop_sequences`, …). Parameters of a request win; None removes one.
    - `extra_body`, `extra_headers`, `extra_query`: further fields, headers (`anthropic-beta`) and query parameters.

    Behaviour:

    - `fallback`: the names of other models of the container, which are called in order if this one does not answer.
    - `cooldown`: seconds for which a chain of fallbacks skips this model after its server failed; 0 for never.
    - `supports_response_format=False`: the model does not support JSON schemas for replies. The schema is added to the
      prompt instead. By default, it depends on the model.
    - `send_tool_metadata`: the keys of tool metadata that are sent to the server.
    - `strict_tools`: require arguments that match the schema, for tools whose schema allows it.
    """

    variables = "ANTHROPIC"
    public_url = "https://api.anthropic.com"
    example_url = "http://localhost:8080"
    key_variables = ("API_KEY", "AUTH_TOKEN")

    api_key: ApiKey | None = field(default=None, repr=False)
    base_url: str | None = field(default=None, repr=False)  # may contain a key, like the other fields with repr=False
    max_tokens: int = 4096
    cache: bool | Literal["5m", "1h"] = True
    _: KW_ONLY
    parallel_tool_calls: bool | None = None
    supports_response_format: bool | None = None
    send_tool_metadata: Sequence[str] = ()
    strict_tools: bool = False

    def body_parameters(self) -> dict[str, Any]:
        """Return the parameters in the body of every request."""
        named = {"temperature": self.temperature, "parallel_tool_calls": self.parallel_tool_calls}
        given = {name: value for name, value in named.items() if value is not None}
        return {"max_tokens": self.max_tokens, **given, **(self.parameters or {}), **(self.extra_body or {})}

    def own_problems(self, where: str) -> Iterator[Problem]:
        """Yield the problems of `max_tokens` and `cache`."""
        count: object = self.max_tokens
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            yield Problem(where, f"invalid max_tokens={count!r}", "use an integer of at least 1")
        if self.cache not in (True, False, "5m", "1h"):
            yield Problem(where, f"invalid cache={self.cache!r}", "use True, False, '5m' or '1h'")
