"""`OpenAiChatModel`, for any server with an OpenAI-compatible API.

A wire encodes requests and interprets replies, a transport sends and receives. Not here: the wires (`chat_wire`,
`responses_wire`), the transport (`transport`), the settings (`openai_settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from pydantic_core import from_json

from ..chat import ChatRequest
from ..errors import (
    ModelError,
    ModelHttpError,
    ModelProtocolError,
)
from .chat_wire import ChatWire
from .openai_settings import OUTPUT_LIMITS, OpenAiSettings
from .server_model import ServerChatModel, Wire, names_of
from .server_settings import Key, ServerSettings, taking
from .sse import excerpt
from .wire_encoding import Fields, join_fields, json_bytes


class OpenAiWire(Wire, Protocol):
    """What the wires of the two APIs have in common; see `ChatWire`."""

    def fields(self, request: ChatRequest) -> Fields: ...
    def stream_fields(self, usage: bool) -> Fields: ...
    def parameter(self, name: str, value: Any) -> tuple[str, Any]: ...


class OpenAiChatModel(ServerChatModel[OpenAiWire]):
    """A model behind an OpenAI-compatible API: OpenAI, Azure, vLLM, Ollama, llama.cpp and many others.

        model = OpenAiChatModel("gpt-5", timeout=60)  # key: OPENAI_API_KEY
        local = OpenAiChatModel("qwen3", "http://localhost:11434/v1")

    It takes the arguments of `OpenAiSettings`, which documents each of them. Raises `IllegalConfigurationError` for
    invalid arguments.
    """

    @taking(OpenAiSettings)
    def __init__(self, given: OpenAiSettings) -> None:
        settings = given.with_environment()
        super().__init__(settings, OpenAiPackage, lambda: _make_wire(settings))
        self.supports_response_format = settings.supports_response_format
        self._stream_usage = settings.stream_usage

    async def call_endpoint(self, path: str, fields: Mapping[str, Any]) -> Any:
        """Send `fields` as JSON to another endpoint of the server, and return the JSON of the reply.

        `path` follows the server's base URL, such as `/moderations`. Raises `ModelError`.
        """
        with self._hide_secrets():
            received = await self._transport.post(path, json_bytes(fields))
            try:
                return from_json(received.body)
            except ValueError as error:
                what = f"the reply of {path} is not JSON"
                raise ModelProtocolError(what, excerpt(received.body), received.status, received.request_id) from error

    # --- sending

    def _encode_body(
        self, request: ChatRequest, interpreter: object, *, streams: bool
    ) -> tuple[bytes, dict[str, str] | None]:
        """Return the bytes of a request, and its additional headers."""
        parameters, headers = self._read_parameters(request)
        if request.reasoning is not None:
            parameters["reasoning_effort"] = request.reasoning
        if request.max_output_tokens is not None:
            limits = {name: value for name, value in parameters.items() if name not in OUTPUT_LIMITS}
            parameters = {**limits, self._choose_output_limit(parameters): request.max_output_tokens}
        if parameters.get("tools") and not request.parameters.get("tools"):
            request = replace(request, parameters=parameters)  # the model's tools count for the tool choice too
        fields = {"model": json_bytes(self.model), **self._wire.fields(request)}
        if streams:
            fields |= self._wire.stream_fields(self._stream_usage)
        for name, value in parameters.items():
            # Servers reject parallel_tool_calls without tools.
            if value is not None and (name != "parallel_tool_calls" or request.tool_specifications):
                is_effort = name == "reasoning_effort"
                name, value = self._wire.parameter(name, value)
                if name == "reasoning" and name in fields:  # the effort, and other settings of reasoning
                    both = (from_json(fields[name]), value)
                    value = both[0] | both[1] if is_effort else both[1] | both[0]
                form = json_bytes(value)
                if name == "tools" and name in fields and form.startswith(b"["):
                    form = b"[%s]" % b",".join(filter(None, (fields[name][1:-1], form[1:-1])))
                fields[name] = form
        return join_fields(fields), headers

    def _choose_output_limit(self, parameters: Mapping[str, Any]) -> str:
        """Return the server's name of the token limit: the name in use, else OpenAI's, which few others accept."""
        used = [name for name in OUTPUT_LIMITS if parameters.get(name) is not None]
        newest = "max_completion_tokens" if OpenAiSettings.is_public(self._server.address) else "max_tokens"
        return used[0] if used else newest

    def _adapt_to(self, error: ModelError) -> bool:
        """Request streams without token counts, if the server refused the option for them."""
        if not self._stream_usage or not isinstance(error, ModelHttpError):
            return False
        if error.status not in (400, 422) or "stream_options" not in f"{error.message}{error.body}":
            return False
        self._stream_usage = False
        return True


class OpenAiPackage:
    """Makes the clients of the `openai` package."""

    options: Mapping[str, Any] = MappingProxyType({"security": {"bearer_auth": True}})
    reads: type[ServerSettings] = OpenAiSettings

    def __init__(self) -> None:
        # The import takes half a second. It belongs in the start of the program, not in the first call.
        import openai

        self.module: Any = openai

    def client(self, settings: ServerSettings, key: Key, **others: Any) -> Any:
        return self.module.AsyncOpenAI(api_key=key, base_url=settings.address, **others)

    async def key_headers(self, client: Any, key: Key) -> Mapping[str, str]:
        return {}  # the package calls a function itself, again for each retry


def _make_wire(settings: OpenAiSettings) -> OpenAiWire:
    options = names_of(settings.send_tool_metadata), settings.strict_tools, settings.sent_reasoning
    if settings.wire == "chat":
        return ChatWire(*options)
    if settings.wire == "responses":
        from .responses_wire import ResponsesWire

        return ResponsesWire(*options)
    raise ValueError(f"invalid wire={settings.wire!r}; use 'chat' or 'responses'")
