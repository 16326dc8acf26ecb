"""`OpenAiChatModel`: any server that speaks the OpenAI API, or says so.

Joins the parts: a wire encodes and reads, a transport sends and receives. Not here: either of them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from ..chat import ChatRequest, ChatResponse, StreamEvent
from ..errors import (
    IllegalConfigurationError,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    Problem,
)
from .accumulator import ReplyAccumulator
from .chat_wire import ChatWire
from .encoding import Fields, joined, json_bytes
from .options import problems_of
from .reading import Interpreter, ReplyReader
from .server_errors import secrets_in
from .transport import (
    LARGEST_REPLY,
    PUBLIC_URL,
    ApiKey,
    Stream,
    Transport,
    TransportChoice,
    TransportSettings,
    is_address,
    is_from_environment,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Wire(Protocol):
    """One of the two APIs; see `ChatWire`."""

    path: str

    def fields(self, request: ChatRequest) -> Fields: ...
    def stream_fields(self, usage: bool) -> Fields: ...
    def parameter(self, name: str, value: Any) -> tuple[str, Any]: ...
    def interpreter(self, reply: ReplyAccumulator) -> Interpreter: ...


class OpenAiChatModel:
    """A model behind the OpenAI API: OpenAI's own, Azure's, or of any server that is called compatible.

    `base_url` and `api_key` default to `OPENAI_BASE_URL` and `OPENAI_API_KEY`; a server of one's own may need no key. A
    key may be a coroutine function that gives a fresh one. `wire` is `"chat"` (chat completions) or `"responses"`.

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
    `stream_usage=False`: never asks a stream for its token counts;
    a server that refuses the question is not asked twice. `transport` is `"aiohttp"` (where it is installed),
    `"httpx2"` or an object that sends: an httpx2 transport, a `toolbox.recordings.Recording`. Used on several event
    loops, it has a client on each.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
        *,
        wire: Literal["chat", "responses"] = "chat",
        timeout: float | None = 600.0,
        read_timeout: float | None = None,
        max_retries: int = 2,
        max_concurrent_requests: int | None = None,
        fallback: Sequence[str] = (),
        temperature: float | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        seed: int | None = None,
        parallel_tool_calls: bool | None = None,
        parameters: Mapping[str, Any] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        extra_query: Mapping[str, object] | None = None,
        supports_response_format: bool = True,
        send_tool_metadata: Sequence[str] = (),
        strict_tools: bool = False,
        stream_usage: bool = True,
        transport: TransportChoice = None,
        max_reply_bytes: int | None = LARGEST_REPLY,
    ) -> None:
        self.model = model
        self.fallback = (fallback,) if isinstance(fallback, str) else tuple(fallback)
        self.supports_response_format = supports_response_format
        named = {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "max_completion_tokens": max_completion_tokens,
            "seed": seed,
            "parallel_tool_calls": parallel_tool_calls,
        }
        given = {name: value for name, value in named.items() if value is not None}
        self._parameters: dict[str, Any] = {**given, **(parameters or {}), **(extra_body or {})}
        self._settings = _transport_settings(model, base_url, api_key, transport)(
            timeout=timeout,
            read_timeout=read_timeout,
            max_retries=max_retries,
            max_concurrent_requests=max_concurrent_requests,
            max_reply_bytes=max_reply_bytes,
            headers=dict(extra_headers or {}),
            query=dict(extra_query or {}),
        )
        if problems := list(problems_of(model, self._settings)):
            raise IllegalConfigurationError(problems)
        keys = (send_tool_metadata,) if isinstance(send_tool_metadata, str) else tuple(send_tool_metadata)
        self._wire: Wire = _wire(wire, keys, strict_tools)
        self._stream_usage = stream_usage
        self._transport = Transport(self._settings)

    def __repr__(self) -> str:
        address = self._settings.base_url.partition("?")[0]  # behind it may be a key
        return f"OpenAiChatModel({self.model!r}, base_url={address!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} holds connections and a key; make it anew where it is needed")

    @property
    def base_url(self) -> str:
        """The address of the server's API."""
        return self._settings.base_url

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What is sent with every request."""
        return MappingProxyType(self._parameters)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """The whole reply. Raises `ModelError`."""
        body, headers = self._body(request, {})
        try:
            received = await self._transport.post(self._wire.path, body, headers)
            try:
                return self._reader(request).read(received.body)
            except ModelError as error:
                raise _located(error, received.status, received.request_id) from error.__cause__
        except ModelError as error:
            self._transport.hide_secrets(error, self._secrets_of(request))
            raise

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """The reply in pieces, a `CompleteResponse` last. Raises `ModelError` in the iteration."""
        while True:
            body, headers = self._body(request, self._wire.stream_fields(self._stream_usage))
            try:
                async with self._transport.open(self._wire.path, body, headers) as stream:
                    reader = self._reader(request)
                    events: list[StreamEvent] = []
                    try:
                        while (block := await _next_block(stream, reader, bool(events))) is not None:
                            events = reader.feed(block)
                            for event in events:
                                yield event
                        last = reader.finish()
                    except ModelError as error:
                        raise _located(error, 200, stream.request_id) from error.__cause__
                    await stream.drain()
                    for event in last:
                        yield event
                    return
            except ModelError as error:
                self._transport.hide_secrets(error, self._secrets_of(request))
                if not self._refuses_usage(error):
                    raise
                self._stream_usage = False

    async def aclose(self) -> None:
        """Closes the connections. The model may be used again, on new ones."""
        await self._transport.aclose()

    # --- sending

    def _body(self, request: ChatRequest, more: Fields) -> tuple[bytes, dict[str, str] | None]:
        """A request's bytes and the headers of its own."""
        parameters = self._parameters
        headers: dict[str, str] | None = None
        if request.parameters:
            parameters = {**parameters, **request.parameters}
            headers = parameters.pop("extra_headers", None)
            parameters.update(parameters.pop("extra_body", None) or {})
            parameters["tools"] = added_tools(self._parameters, request.parameters)
        if parameters.get("tools") and not request.parameters.get("tools"):
            request = replace(request, parameters=parameters)  # the model's own tools count for the tool choice too
        fields = {"model": json_bytes(self.model), **self._wire.fields(request), **more}
        for name, value in parameters.items():
            # Servers refuse the question about parallel calls where there are none.
            if value is not None and (name != "parallel_tool_calls" or request.tool_specifications):
                name, value = self._wire.parameter(name, value)
                form = json_bytes(value)
                if name == "tools" and name in fields and form.startswith(b"["):
                    form = b"[%s]" % b",".join(filter(None, (fields[name][1:-1], form[1:-1])))
                fields[name] = form
        return joined(fields), headers

    def _secrets_of(self, request: ChatRequest) -> list[str]:
        """Return what a request's own parameters hold under names of credentials, and its headers."""
        return list(secrets_in([self._parameters, request.parameters]))

    def _reader(self, request: ChatRequest) -> ReplyReader:
        names = {each.name for each in request.tool_specifications}
        reply = ReplyAccumulator(names, wants_json=request.response_format is not None)
        return ReplyReader(self._wire.interpreter(reply))

    def _refuses_usage(self, error: ModelError) -> bool:
        """Whether the server refused a stream because it was asked for its token counts."""
        if not self._stream_usage or not isinstance(error, ModelHttpError):
            return False
        return error.status in (400, 422) and "stream_options" in f"{error.message}{error.body}"


def added_tools(model: Mapping[str, Any], request: Mapping[str, Any]) -> list[Any] | None:
    """Return the server's own tools of a model and of a request; None in the request removes the model's."""
    given = {**request, **(request.get("extra_body") or {})}
    if "tools" in given and given["tools"] is None:
        return None
    both = [*(model.get("tools") or ()), *(given.get("tools") or ())]
    return both or None


async def _next_block(stream: Stream, reader: ReplyReader, said: bool) -> bytes | None:
    """The next block that may count; a connection that broke before the first event is tried again.

    `said`: the last one held something of the reply.
    """
    if reader.is_done:
        return None
    if reader.is_ended:  # what counts may still follow a finish_reason
        return await stream.more(said)
    while True:
        try:
            return await stream.next_block()
        except ModelConnectionError:
            if reader.begun or not await stream.again():
                raise


def _located(error: ModelError, status: int, request_id: str | None) -> ModelError:
    """The same error with the request's id and status, where it can hold them."""
    if request_id is None and not isinstance(error, ModelProtocolError):
        return error
    if isinstance(error, ModelHttpError) and error.request_id is None:
        return ModelHttpError(error.status, error.message, error.body, request_id)
    if isinstance(error, ModelProtocolError) and error.status is None:
        return ModelProtocolError(error.message, error.body, status, request_id)
    return error


def _wire(name: str, send_tool_metadata: tuple[str, ...], strict_tools: bool) -> Wire:
    if name == "chat":
        return ChatWire(send_tool_metadata, strict_tools)
    if name == "responses":
        from .responses_wire import ResponsesWire

        return ResponsesWire(send_tool_metadata, strict_tools)
    raise ValueError(f"wire={name!r}; use 'chat' or 'responses'")


def _transport_settings(
    model: str, base_url: str | None, api_key: ApiKey | None, transport: TransportChoice
) -> Callable[..., TransportSettings]:
    """Settings with the address and key that are meant."""
    url = base_url or os.environ.get("OPENAI_BASE_URL")
    # The key of the environment belongs to the environment's server: another one must not see it.
    key = api_key or (os.environ.get("OPENAI_API_KEY") if is_from_environment(url or PUBLIC_URL) else None)
    if not key and not url and (transport is None or isinstance(transport, str)):
        raise IllegalConfigurationError(
            [
                Problem(
                    f"OpenAiChatModel({model!r})",
                    "there is neither an API key nor an address",
                    "give api_key= or base_url=, or set OPENAI_API_KEY or OPENAI_BASE_URL",
                )
            ]
        )

    if url and not is_address(url):
        what = "its address does not begin with http:// or https://"
        fix = "mend base_url= or OPENAI_BASE_URL: http://localhost:11434/v1, for example"
        raise IllegalConfigurationError([Problem(f"OpenAiChatModel({model!r})", what, fix)])

    def settings(**others: Any) -> TransportSettings:
        # Servers of one's own want no key; the package wants one all the same.
        return TransportSettings(base_url=url or PUBLIC_URL, api_key=key or "none", transport=transport, **others)

    return settings
