"""`AnthropicChatModel`, how its requests are encoded, and what Claude models accept.

Not here: the settings (`anthropic_settings`), the wire (`anthropic_wire`), the transport (`transport`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..chat import AiMessage, ChatRequest, SystemMessage
from ..errors import IllegalConfigurationError
from ..json_text import compact_json
from .anthropic_settings import AnthropicSettings
from .anthropic_wire import CONTAINER, AnthropicInterpreter, AnthropicWire, closed_schema, tool_choice
from .server_model import ServerChatModel, names_of
from .server_settings import Key, ServerSettings, missing_package, taking
from .wire_encoding import OTHER_NAMES, Fields, join_fields, json_bytes

_logger = logging.getLogger("toolbox.models")


class AnthropicPackage:
    """Makes the clients of the `anthropic` package."""

    options: Mapping[str, Any] = MappingProxyType({})
    reads: type[ServerSettings] = AnthropicSettings

    def __init__(self) -> None:
        try:
            import anthropic
        except ImportError as error:
            raise IllegalConfigurationError([missing_package("anthropic", "AnthropicChatModel")]) from error
        self.module: Any = anthropic

    def client(self, settings: ServerSettings, key: Key, **others: Any) -> Any:
        known = key if isinstance(key, str) else "none"
        return self.module.AsyncAnthropic(api_key=known, base_url=settings.address, open_telemetry=False, **others)

    async def key_headers(self, client: Any, key: Key) -> Mapping[str, str]:
        if isinstance(key, str):
            return {}
        headers: Mapping[str, str] = client.with_options(api_key=await key()).auth_headers
        return headers


class AnthropicChatModel(ServerChatModel[AnthropicWire]):
    """A Claude model, or another model behind Anthropic's Messages API.

        model = AnthropicChatModel("claude-sonnet-4-6", max_tokens=16_000, reasoning="medium")  # key: ANTHROPIC_API_KEY

    It takes the arguments of `AnthropicSettings`, which documents each of them. It needs the extra `anthropic`. Raises
    `IllegalConfigurationError` for invalid arguments.
    """

    provider_name = "anthropic"

    @taking(AnthropicSettings)
    def __init__(self, given: AnthropicSettings) -> None:
        settings = given.with_environment()
        super().__init__(settings, AnthropicPackage, lambda: _make_wire(settings))
        self._abilities = abilities = Abilities.of(settings.model)
        supported = settings.supports_response_format
        self.supports_response_format = abilities.formats if supported is None else supported
        self._settings = settings
        self._warned: set[str] = set()

    # --- sending

    def _choose_path(self, *, streams: bool) -> str:
        path = super()._choose_path(streams=streams)
        return path if self._server.address.rstrip("/").endswith("/v1") else f"/v1{path}"

    def _encode_body(
        self, request: ChatRequest, interpreter: AnthropicInterpreter, *, streams: bool
    ) -> tuple[bytes, dict[str, str] | None]:
        """Return the bytes of a request, and its additional headers."""
        said = b""
        if interpreter.is_paused:
            said = interpreter.encode_paused_reply()
            interpreter.go_on()
        parameters, headers = self._read_parameters(request)
        values = {OTHER_NAMES.get(name, name): value for name, value in parameters.items() if value is not None}
        own_tools = values.pop("tools", None) or ()
        if request.max_output_tokens is not None:
            values["max_tokens"] = request.max_output_tokens
        parallel = values.pop("parallel_tool_calls", True) is not False
        if (container := interpreter.container or _container_of(request)) is not None:
            values.setdefault("container", container)
        self._set_reasoning(request, values)
        request = self._set_format(request, values)
        fields: Fields = {"model": json_bytes(self.model)}
        fields |= self._wire.fields(request, said, own_tools)
        if "tools" in fields and (choice := tool_choice(request, parallel)) is not None:
            fields["tool_choice"] = json_bytes(choice)
        for name, value in values.items():
            fields[name] = json_bytes(value)
        if streams:
            fields["stream"] = b"true"
        return join_fields(fields), headers

    def _set_reasoning(self, request: ChatRequest, values: dict[str, Any]) -> None:
        """Set how much the model thinks, and remove the temperature if the model does not accept it then."""
        level = request.reasoning or values.pop("reasoning_effort", None) or self._settings.reasoning
        is_forced = request.tool_choice not in (None, "auto", "none")
        if level is not None and "thinking" not in values and not is_forced:
            limit = values.get("max_tokens") or self._settings.max_tokens
            config = self._abilities.thinking(level, limit)
            if config is None and level != "none":
                self._warn(f"max_tokens={limit} leaves no room for reasoning={level!r}; it is left out")
            elif level == "none" and self._abilities.always_thinks:
                self._warn("this model cannot reply without reasoning; it uses the least effort instead")
            elif not self._abilities.knows(level):
                self._warn(f"this model has no level {level!r} of reasoning; it uses 'high' instead")
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
        if request.response_format.strict:
            self._warn("the server cannot enforce the schema of the reply; it is added to the prompt instead")
        wanted = compact_json(dict(request.response_format.schema))
        text = f"Reply only with JSON that matches this JSON schema, without any other text:\n{wanted}"
        return replace(request, messages=(*request.messages, SystemMessage(text)))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _logger.warning("model %s: %s", self.model, text)


def _make_wire(settings: AnthropicSettings) -> AnthropicWire:
    mark = {"type": "ephemeral"} | ({"ttl": "1h"} if settings.cache == "1h" else {})
    return AnthropicWire(
        mark if settings.cache else None,
        names_of(settings.send_tool_metadata),
        settings.strict_tools,
        keeps_unsigned=not settings.is_public(settings.address),
    )


def _container_of(request: ChatRequest) -> str | None:
    """Return the container in which the server ran code for the last reply."""
    last = next((each for each in reversed(request.messages) if isinstance(each, AiMessage)), None)
    found = last.attributes.get(CONTAINER) if last is not None else None
    return found if isinstance(found, str) else None


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
        most, part = _BUDGETS.get(level, _BUDGETS["high"])
        budget = max(_LEAST_BUDGET, min(most, int(max_tokens * part)))
        return {"type": "enabled", "budget_tokens": budget} if budget < max_tokens else None

    def effort(self, level: str) -> str | None:
        """Return the effort of a level, if the model has efforts."""
        if not self.adaptive or (level == "none" and not self.always_thinks):
            return None
        return "low" if level in ("none", "minimal") else level

    def knows(self, level: str) -> bool:
        """Return False for a level without a budget. The server checks efforts, of which new models have more."""
        return self.adaptive or level == "none" or level in _BUDGETS
