"""`AnthropicChatModel`, its settings, and the loop that continues paused replies.

Not here: the wire (`anthropic_wire`), the transport (`transport`).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from ..chat import AiMessage, ChatRequest, ChatResponse, Reasoning, StreamEvent, SystemMessage
from ..errors import IllegalConfigurationError, ModelError, ModelProtocolError, Problem
from ..json_text import compact_json
from .accumulator import ReplyAccumulator
from .anthropic_wire import CONTAINER, AnthropicInterpreter, AnthropicWire, closed_schema, tool_choice
from .fallbacks import DEFAULT_COOLDOWN
from .reply_reader import ReplyReader, receive_block
from .server_errors import too_large, with_request
from .server_model import ServerChatModel, added_tools, names_of
from .server_settings import (
    LARGEST_REPLY,
    ApiKey,
    ServerSettings,
    TransportChoice,
    has_own_transport,
    is_same_address,
    key_provider,
    reasoning_problems,
    server_problems,
    taking,
)
from .wire_encoding import Fields, join_fields, json_bytes

_logger = logging.getLogger("toolbox.models")

PUBLIC_URL = "https://api.anthropic.com"
MOST_CONTINUATIONS = 10
"""Requests after the first one that continue a reply which the server paused."""


@dataclass(frozen=True, slots=True)
class AnthropicSettings:
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

    model: str
    api_key: ApiKey | None = field(default=None, repr=False)
    base_url: str | None = field(default=None, repr=False)  # may contain a key, like the other fields with repr=False
    max_tokens: int = 4096
    cache: bool | Literal["5m", "1h"] = True
    _: KW_ONLY
    reasoning: Reasoning | None = None
    temperature: float | None = None
    parallel_tool_calls: bool | None = None
    timeout: float | None = 600.0
    read_timeout: float | None = None
    max_retries: int = 2
    max_concurrent_requests: int | None = None
    fallback: Sequence[str] = ()
    parameters: Mapping[str, Any] | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] | None = field(default=None, repr=False)
    extra_headers: Mapping[str, str] | None = field(default=None, repr=False)
    extra_query: Mapping[str, object] | None = field(default=None, repr=False)
    supports_response_format: bool | None = None
    send_tool_metadata: Sequence[str] = ()
    strict_tools: bool = False
    transport: TransportChoice = None
    max_reply_bytes: int | None = LARGEST_REPLY
    cooldown: float = DEFAULT_COOLDOWN

    def with_environment(self) -> AnthropicSettings:
        """Return the settings with missing values of address and key from the environment."""
        url = self.base_url or os.environ.get("ANTHROPIC_BASE_URL")
        # The key in the environment belongs to the environment's server. It must not be sent to another one.
        own = is_from_environment(url or PUBLIC_URL)
        key = os.environ.get("ANTHROPIC_API_KEY") or os.environ.get("ANTHROPIC_AUTH_TOKEN") if own else None
        return replace(self, base_url=url, api_key=self.api_key or key)

    @property
    def address(self) -> str:
        """The address of the server."""
        return self.base_url or PUBLIC_URL

    @property
    def key(self) -> ApiKey:
        """The key to send. Your own server may need none, but the `anthropic` package requires one."""
        return self.api_key or "none"

    def body_parameters(self) -> dict[str, Any]:
        """Return the parameters in the body of every request."""
        named = {"temperature": self.temperature, "parallel_tool_calls": self.parallel_tool_calls}
        given = {name: value for name, value in named.items() if value is not None}
        return {"max_tokens": self.max_tokens, **given, **(self.parameters or {}), **(self.extra_body or {})}


def is_from_environment(address: str) -> bool:
    """Return True if `ANTHROPIC_API_KEY` and similar variables may be sent to this address.

    They belong to the address in `ANTHROPIC_BASE_URL` and to Anthropic's public address.
    """
    return is_same_address(address, os.environ.get("ANTHROPIC_BASE_URL")) or is_public(address)


def is_public(address: str) -> bool:
    """Return True for Anthropic's public address."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return parts.scheme.lower() == "https" and parts.hostname == "api.anthropic.com"


def problems_of(settings: AnthropicSettings) -> Iterator[Problem]:
    """Yield the problems of these settings, without values that may be secret."""
    model: object = settings.model
    where = f"AnthropicChatModel({model!r})"
    if not settings.api_key and not settings.base_url and not has_own_transport(settings):
        yield Problem(where, "missing API key", "pass api_key= or base_url=, or set ANTHROPIC_API_KEY")
    example = "set base_url= or ANTHROPIC_BASE_URL, for example to http://localhost:8080"
    yield from server_problems(settings, model, where, example, "ANTHROPIC_API_KEY")
    count: object = settings.max_tokens
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        yield Problem(where, f"invalid max_tokens={count!r}", "use an integer of at least 1")
    if settings.cache not in (True, False, "5m", "1h"):
        yield Problem(where, f"invalid cache={settings.cache!r}", "use True, False, '5m' or '1h'")
    yield from reasoning_problems(settings.reasoning, where)


class AnthropicPackage:
    """Makes the clients of the `anthropic` package."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        try:
            import anthropic
        except ImportError as error:
            raise IllegalConfigurationError([missing_package("AnthropicChatModel")]) from error
        self.module: Any = anthropic

    def client(self, settings: ServerSettings, **others: Any) -> Any:
        key = settings.key if isinstance(settings.key, str) else "none"
        return self.module.AsyncAnthropic(api_key=key, base_url=settings.address, open_telemetry=False, **others)

    async def key_headers(self, client: Any, settings: ServerSettings) -> Mapping[str, str]:
        if isinstance(settings.key, str):
            return {}
        key = await key_provider(settings.key, settings.model)()
        headers: Mapping[str, str] = client.with_options(api_key=key).auth_headers
        return headers

    def environment_headers(self, address: str | None) -> dict[str, str]:
        if address is not None and not is_from_environment(address):
            return {}
        lines = [line.partition(":") for line in os.environ.get("ANTHROPIC_CUSTOM_HEADERS", "").split("\n")]
        return {name.strip(): value.strip() for name, colon, value in lines if colon}


def missing_package(where: str) -> Problem:
    """Return the problem if the extra `anthropic` is not installed."""
    return Problem(where, "the package anthropic is missing", "install it with: pip install 'toolbox-di[anthropic]'")


class AnthropicChatModel(ServerChatModel):
    """A Claude model, or another model behind Anthropic's Messages API.

        model = AnthropicChatModel("claude-sonnet-4-6", max_tokens=16_000, reasoning="medium")  # key: ANTHROPIC_API_KEY

    It takes the arguments of `AnthropicSettings`, which documents each of them. It needs the extra `anthropic`. Raises
    `IllegalConfigurationError` for invalid arguments.
    """

    provider_name = "anthropic"

    @taking(AnthropicSettings)
    def __init__(self, given: AnthropicSettings) -> None:
        settings = given.with_environment()
        super().__init__(settings, problems_of(settings), AnthropicPackage)
        self._abilities = abilities = Abilities.of(settings.model)
        supported = settings.supports_response_format
        self.supports_response_format = abilities.formats if supported is None else supported
        self._settings = settings
        mark = {"type": "ephemeral"} | ({"ttl": "1h"} if settings.cache == "1h" else {})
        self._wire = AnthropicWire(
            mark if settings.cache else None,
            names_of(settings.send_tool_metadata),
            settings.strict_tools,
            keeps_unsigned=not is_public(settings.address),
        )
        self._path = self._wire.path if settings.address.rstrip("/").endswith("/v1") else f"/v1{self._wire.path}"
        self._warned: set[str] = set()

    async def _send(self, request: ChatRequest) -> ChatResponse:
        interpreter = self._make_interpreter(request)
        size = 0
        for _ in range(1 + MOST_CONTINUATIONS):
            body, headers = self._encode_body(request, interpreter)
            received = await self._transport.post(self._path, body, headers)
            reader = ReplyReader(interpreter)
            size += len(received.body)
            try:
                self._check_size(size)
                reader.load(received.body)
                if not interpreter.is_paused:
                    return reader.end()
            except ModelError as error:
                raise with_request(error, received.status, received.request_id) from error.__cause__
        raise _make_paused_error()

    async def _send_stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        interpreter = self._make_interpreter(request)
        size = 0
        for _ in range(1 + MOST_CONTINUATIONS):
            body, headers = self._encode_body(request, interpreter, {"stream": b"true"})
            async with self._transport.open(self._path, body, headers) as stream:
                reader = ReplyReader(interpreter)
                events: list[StreamEvent] = []
                try:
                    while (block := await receive_block(stream, reader, bool(events))) is not None:
                        events = reader.feed(block)
                        for event in events:
                            yield event
                        size += len(block)
                        self._check_size(size)
                    for event in reader.flush():
                        yield event
                    reader.raise_failure()
                    if not interpreter.is_paused:
                        reader.end()
                    last = interpreter.reply.take_events()
                except ModelError as error:
                    raise with_request(error, 200, stream.request_id) from error.__cause__
                await stream.drain()
                for event in last:
                    yield event
                if not interpreter.is_paused:
                    return
        raise _make_paused_error()

    def _check_size(self, size: int) -> None:
        """Raise an error if the parts of a continued reply are too large together."""
        limit = self._settings.max_reply_bytes
        if limit is not None and size > limit:
            raise too_large(limit)

    # --- sending

    def _make_interpreter(self, request: ChatRequest) -> AnthropicInterpreter:
        names = self._tool_names.of(request.tool_specifications)
        return self._wire.interpreter(ReplyAccumulator(names, wants_json=request.response_format is not None))

    def _encode_body(
        self, request: ChatRequest, interpreter: AnthropicInterpreter, more: Fields | None = None
    ) -> tuple[bytes, dict[str, str] | None]:
        """Return the bytes of a request, and its additional headers."""
        said = b""
        if interpreter.is_paused:
            said = interpreter.encode_paused_reply()
            interpreter.go_on()
        parameters = self._parameters
        headers: dict[str, str] | None = None
        if request.parameters:
            parameters = {**parameters, **request.parameters}
            headers = parameters.pop("extra_headers", None)
            parameters.update(parameters.pop("extra_body", None) or {})
            parameters["tools"] = added_tools(self._parameters, request.parameters)
        values = {_RENAMED.get(name, name): value for name, value in parameters.items() if value is not None}
        own_tools = values.pop("tools", None) or ()
        if request.max_output_tokens is not None:
            values["max_tokens"] = request.max_output_tokens
        if request.temperature is not None:
            values["temperature"] = request.temperature
        parallel = values.pop("parallel_tool_calls", True) is not False
        if (container := interpreter.container or _container_of(request)) is not None:
            values.setdefault("container", container)
        self._set_reasoning(request, values)
        request = self._set_format(request, values)
        fields: Fields = {"model": json_bytes(self.model)}
        fields |= self._wire.fields(request, said, b",".join(map(json_bytes, own_tools)))
        if "tools" in fields and (choice := tool_choice(request, parallel)) is not None:
            fields["tool_choice"] = json_bytes(choice)
        for name, value in values.items():
            fields[name] = json_bytes(value)
        return join_fields({**fields, **(more or {})}), headers

    def _set_reasoning(self, request: ChatRequest, values: dict[str, Any]) -> None:
        """Set how much the model thinks, and remove the temperature if the model does not accept it then."""
        level = request.reasoning or values.pop("reasoning_effort", None) or self._settings.reasoning
        is_forced = request.tool_choice not in (None, "auto", "none")
        if level is not None and "thinking" not in values and not is_forced:
            config = self._abilities.thinking(level, values["max_tokens"])
            if config is None and level != "none":
                self._warn(f"max_tokens={values['max_tokens']} leaves no room for reasoning={level!r}; it is left out")
            elif level == "none" and self._abilities.always_thinks:
                self._warn("this model cannot reply without reasoning; it uses the least effort instead")
            if config is not None:
                values["thinking"] = config
            if (effort := self._abilities.effort(level)) is not None:
                values["output_config"] = {"effort": effort} | (values.get("output_config") or {})
        thinks = isinstance(given := values.get("thinking"), Mapping) and given.get("type") in ("enabled", "adaptive")
        if values.get("temperature") is not None and (thinks or not self._abilities.samples):
            del values["temperature"]
            self._warn("temperature is left out, because the model does not accept it" + " with reasoning" * thinks)

    def _set_format(self, request: ChatRequest, values: dict[str, Any]) -> ChatRequest:
        """Set the schema of the reply; one that the server cannot enforce becomes a part of the system message."""
        if request.response_format is None:
            return request
        wanted_strict = request.response_format.strict is not False
        schema = closed_schema(request.response_format.schema) if wanted_strict else None
        if schema is not None:
            format_ = {"type": "json_schema", "schema": schema}
            values["output_config"] = {"format": format_} | (values.get("output_config") or {})
            return request
        wanted = compact_json(dict(request.response_format.schema))
        text = f"Reply only with JSON that matches this JSON schema, without any other text:\n{wanted}"
        return replace(request, messages=(*request.messages, SystemMessage(text)))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _logger.warning("model %s: %s", self.model, text)


# Names of the OpenAI APIs that have another name here.
_RENAMED = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}


def _container_of(request: ChatRequest) -> str | None:
    """Return the container in which the server ran code for the last reply."""
    last = next((each for each in reversed(request.messages) if isinstance(each, AiMessage)), None)
    found = last.attributes.get(CONTAINER) if last is not None else None
    return found if isinstance(found, str) else None


def _make_paused_error() -> ModelProtocolError:
    return ModelProtocolError(
        f"the server paused the reply again after {MOST_CONTINUATIONS} continuations; ask for less in one reply"
    )


# --- what the models can do

_OLD = (
    *("claude-2", "claude-3", "claude-instant", "claude-4-", "claude-opus-4-0", "claude-opus-4-1", "claude-opus-4-2"),
    *("claude-opus-4-5", "claude-opus-4@", "claude-sonnet-4-0", "claude-sonnet-4-2", "claude-sonnet-4-5"),
    *("claude-sonnet-4@", "claude-haiku-4"),
)
"""Models that think with a budget. All later ones decide themselves how much they think (adaptive thinking)."""
_WITHOUT_FORMATS = (
    *("claude-2", "claude-3", "claude-instant", "claude-4-", "claude-opus-4-0", "claude-opus-4-2", "claude-opus-4@"),
    *("claude-sonnet-4-0", "claude-sonnet-4-2", "claude-sonnet-4@"),
)
_SAMPLING = ("claude-opus-4-6", "claude-sonnet-4-6", "claude-mythos-preview")
"""Models with adaptive thinking that still accept a temperature."""
_ALWAYS_THINKING = ("claude-fable-5", "claude-mythos-5", "claude-mythos-preview", "claude-opus-5-5")
_LEAST_BUDGET = 1024
_BUDGETS = {"minimal": (1024, 0.25), "low": (2048, 0.25), "medium": (8192, 0.5), "high": (24576, 0.75)}
"""The largest budget of each level in tokens, and its largest part of `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a model accepts: adaptive thinking, temperatures, JSON schemas; and how its thinking is turned off."""

    adaptive: bool
    samples: bool
    formats: bool
    always_thinks: bool
    off: str | None

    @classmethod
    def of(cls, model: str) -> Abilities:
        """Return what the model with this name accepts. Unknown names of Claude are those of later models."""
        found = re.search(r"claude-.*", model.lower())
        if found is None:
            return cls(adaptive=False, samples=True, formats=True, always_thinks=False, off=None)
        name = found[0]
        old = name.startswith(_OLD) or name in ("claude-opus-4", "claude-sonnet-4")
        return cls(
            adaptive=not old,
            samples=old or name.startswith(_SAMPLING),
            formats=not (name.startswith(_WITHOUT_FORMATS) or name in ("claude-opus-4", "claude-sonnet-4")),
            always_thinks=name.startswith(_ALWAYS_THINKING),
            off=None if old else "between_tools" if name.startswith("claude-sonnet-5-5") else "disabled",
        )

    def thinking(self, level: str, max_tokens: int) -> dict[str, Any] | None:
        """Return the configuration of a level, or None for the model without it."""
        if level == "none":
            return None if self.off is None or self.always_thinks else {"type": self.off}
        if self.adaptive:
            return {"type": "adaptive"}
        most, part = _BUDGETS[level]
        budget = max(_LEAST_BUDGET, min(most, int(max_tokens * part)))
        return {"type": "enabled", "budget_tokens": budget} if budget < max_tokens else None

    def effort(self, level: str) -> str | None:
        """Return the effort of a level, if the model has efforts."""
        if not self.adaptive or (level == "none" and not self.always_thinks):
            return None
        return level if level in ("low", "medium", "high") else "low"
