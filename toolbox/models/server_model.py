"""What the models of all providers share: settings, connections, the requests of one reply, and errors without secrets.

A provider adds a settings class, a wire, and how a request is encoded. Not here: the transport (`transport`), reading
replies (`reply_reader`), the providers (`openai`, `anthropic`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from ..chat import ChatModel, ChatRequest, ChatResponse, StreamEvent
from ..errors import IllegalConfigurationError, ModelError
from .accumulator import ReplyAccumulator
from .reply_reader import Interpreter, ReplyReader, receive_block
from .server_errors import MOST_CONTINUATIONS, paused_error, secrets_in, too_large, with_request
from .server_settings import ServerSettings
from .wire_encoding import ToolNames

if TYPE_CHECKING:
    from .transport import ClientPackage


class Wire(Protocol):
    """One API of model servers: what its requests and replies look like.

    - `path` is added to the base URL.
    - `recorded_fields` are the top-level fields of a request that a recording writes with their values. A recording
      hides the values of all others, because some gateways take keys there: list each field that the wire sends.
    - `stream_type` is the media type of its streams: `sse.EVENT_STREAM` or `sse.JSON_LINES`. Streams are read and
      recorded by it.
    """

    path: str
    recorded_fields: frozenset[str]
    stream_type: str

    def interpreter(self, reply: ReplyAccumulator) -> Interpreter:
        """Return an interpreter for one reply."""
        ...


def names_of(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a setting, which may be a single one."""
    return (given,) if isinstance(given, str) else tuple(given)


def _add_tools(model: Mapping[str, Any], request: Mapping[str, Any]) -> list[Any] | None:
    """Return the server-side tools of a model and of a request. None in the request removes the model's."""
    given = {**request, **(request.get("extra_body") or {})}
    if "tools" in given and given["tools"] is None:
        return None
    both = [*(model.get("tools") or ()), *(given.get("tools") or ())]
    return both or None


W = TypeVar("W", bound=Wire)


@dataclass(slots=True)
class _Reply:
    """One reply while it is received: in one part, or in several if the server pauses it."""

    interpreter: Interpreter
    size: int = 0


class ServerChatModel(ChatModel, ABC, Generic[W]):
    """A model behind a server. A provider implements `_encode_body`, and may adapt to a refusal with `_adapt_to`.

    Secrets are hidden in all errors here, so that no provider can forget it.
    """

    supports_response_format = True

    def __init__(
        self, settings: ServerSettings, package: Callable[[], ClientPackage], make_wire: Callable[[], W]
    ) -> None:
        from .transport import Transport  # loads the HTTP library, like the package

        where = f"{type(self).__name__}({settings.model!r})"
        missing = settings.missing_key(where)
        if problems := [*([missing] if missing is not None else []), *settings.problems(where)]:
            raise IllegalConfigurationError(problems)
        self.model = settings.model
        self.fallback, self.cooldown = names_of(settings.fallback), settings.cooldown
        self._parameters = settings.body_parameters()
        self._server: ServerSettings = settings  # its text shows no key; the key alone would be in vars()
        self._tool_names = ToolNames()
        self._wire = make_wire()
        self._transport = Transport(settings, package())

    def __repr__(self) -> str:
        address = self._server.address.partition("?")[0]  # the query may contain a key
        return f"{type(self).__name__}({self.model!r}, base_url={address!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {self!r}, which holds connections and a key; create a new model instead"
        )

    @property
    def key_function(self) -> Callable[..., Any] | None:
        """The function that returns the key, or None."""
        key = self._server.key
        return None if isinstance(key, str) else key

    @property
    def base_url(self) -> str:
        """The base URL of the server's API."""
        return self._server.address

    @property
    def server_identity(self) -> tuple[str, str]:
        """The server's address, and the name of the model there."""
        return self._server.address, self.model

    @property
    def patience(self) -> float:
        """The seconds that this model waits for a reply, at most."""
        return min(self._server.timeout or inf, self._server.read_timeout or inf)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters that are sent with every request."""
        return MappingProxyType(self._parameters)

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Send a request and return the whole reply. Raises `ModelError`."""
        with self._hide_secrets(request):
            reply = self._start_reply(request)
            for _ in range(1 + MOST_CONTINUATIONS):
                body, headers = self._encode_body(request, reply.interpreter, streams=False)
                received = await self._transport.post(self._choose_path(streams=False), body, headers)
                reader = ReplyReader(reply.interpreter, self._wire.stream_type)
                try:
                    self._count(reply, received.body)
                    reader.load(received.body)
                    if not reply.interpreter.is_paused:
                        return reader.end()
                except ModelError as error:
                    raise with_request(error, received.status, received.request_id) from error.__cause__
            raise paused_error()

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Send a request and yield the reply as events; the last is `CompleteResponse`. Raises `ModelError`."""
        with self._hide_secrets(request):
            reply, said = self._start_reply(request), False
            for _ in range(1 + MOST_CONTINUATIONS):
                try:
                    async with aclosing(self._stream_part(request, reply)) as events:
                        async for event in events:
                            said = True
                            yield event
                    if not reply.interpreter.is_paused:
                        return
                except ModelError as error:
                    # A caller that has got a part of the reply would get it twice.
                    if said or not self._adapt_to(error):
                        raise
                    reply = self._start_reply(request)
            raise paused_error()

    async def _stream_part(self, request: ChatRequest, reply: _Reply) -> AsyncGenerator[StreamEvent, None]:
        """Send one request and yield its events; the last is `CompleteResponse` unless the reply is paused."""
        body, headers = self._encode_body(request, reply.interpreter, streams=True)
        async with self._transport.open(self._choose_path(streams=True), body, headers) as stream:
            reader = ReplyReader(reply.interpreter, self._wire.stream_type)
            events: list[StreamEvent] = []
            try:
                while (block := await receive_block(stream, reader, bool(events))) is not None:
                    events = reader.feed(block)
                    for event in events:
                        yield event
                    self._count(reply, block)
                for event in reader.flush():
                    yield event
                reader.raise_failure()
                last = [] if reply.interpreter.is_paused else reader.finish()
            except ModelError as error:
                raise with_request(error, 200, stream.request_id) from error.__cause__
            await stream.drain()
            for event in last:
                yield event

    async def aclose(self) -> None:
        """Close the connections. The model can be used again with new connections."""
        await self._transport.aclose()

    @abstractmethod
    def _encode_body(
        self, request: ChatRequest, interpreter: Any, *, streams: bool
    ) -> tuple[bytes, dict[str, str] | None]:
        """Return the body of a request, and its additional headers. It continues a reply that is paused.

        `interpreter` is one of this model's wire. It has read the earlier parts of the reply. The body has what the
        request says, by the names of the server: messages, tools, `tool_choice`, `response_format` (if
        `supports_response_format` is not False), `max_output_tokens`, `reasoning`; and `_read_parameters`, without
        those that are None.
        """

    def _choose_path(self, *, streams: bool) -> str:
        """Return the path of a request below the base URL. Recordings know it by its end, the path of the wire."""
        return self._wire.path

    def _read_parameters(self, request: ChatRequest) -> tuple[dict[str, Any], dict[str, str] | None]:
        """Return the parameters of the model and of a request, which wins, and the additional headers of the request.

        A parameter that is None is not sent. `tools` are those that run on the server.
        """
        parameters = dict(self._parameters)
        headers: dict[str, str] | None = None
        if request.parameters:
            parameters |= request.parameters
            headers = parameters.pop("extra_headers", None)
            parameters |= parameters.pop("extra_body", None) or {}
            parameters["tools"] = _add_tools(self._parameters, request.parameters)
        if request.temperature is not None:
            parameters["temperature"] = request.temperature
        return parameters, headers

    def _adapt_to(self, error: ModelError) -> bool:
        """Change how streams are requested after the server refused one. Returns True to send the request again."""
        return False

    def _start_reply(self, request: ChatRequest) -> _Reply:
        names = self._tool_names.of(request.tool_specifications)
        accumulator = ReplyAccumulator(names, wants_json=request.response_format is not None)
        return _Reply(self._wire.interpreter(accumulator))

    def _count(self, reply: _Reply, received: bytes) -> None:
        """Raise an error if the parts of a paused reply are too large together; the transport limits each."""
        reply.size += len(received)
        limit = self._server.max_reply_bytes
        if limit is not None and reply.size > limit:
            raise too_large(limit)

    @contextmanager
    def _hide_secrets(self, request: ChatRequest | None = None) -> Iterator[None]:
        """Hide secrets in errors: those of the settings, and credentials in the parameters of a request."""
        try:
            yield
        except ModelError as error:
            given = [self._parameters, request.parameters] if request is not None else []
            self._transport.hide_secrets(error, secrets_in(given))
            raise
