"""`OpenAiChatModel`: any server that speaks the OpenAI API, or says so.

Joins the parts: a wire encodes and reads, a transport sends and receives. Not here: either of them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from pydantic_core import from_json

from ..chat import ChatRequest, ChatResponse, StreamEvent
from ..errors import (
    IllegalConfigurationError,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
)
from ..json_text import compact_json
from .accumulator import ReplyAccumulator
from .chat_wire import ChatWire
from .openai_settings import OpenAiSettings, problems_of
from .server_errors import secrets_in
from .sse import EventReader, excerpt
from .transport import Stream, Transport
from .wire_encoding import Fields, joined, json_bytes


class Interpreter(Protocol):
    """Knows what the objects of one wire mean, and tells the accumulator.

    `kind`: what a reply is called. `answered`: some of a reply has come. `ended`: it has said that it is complete.
    `final`: nothing that follows counts.
    """

    kind: str
    reply: ReplyAccumulator
    answered: bool

    @property
    def ended(self) -> bool: ...
    @property
    def final(self) -> bool: ...

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Reads one object. Raises `ModelHttpError` when it is an error."""
        ...

    def close(self) -> None:
        """Called before the reply is put together."""
        ...


class Wire(Protocol):
    """One of the two APIs; see `ChatWire`."""

    path: str

    def fields(self, request: ChatRequest) -> Fields: ...
    def stream_fields(self, usage: bool) -> Fields: ...
    def parameter(self, name: str, value: Any) -> tuple[str, Any]: ...
    def interpreter(self, reply: ReplyAccumulator) -> Interpreter: ...


P = ParamSpec("P")
S = TypeVar("S")
M = TypeVar("M")


def _taking(settings: Callable[P, S]) -> Callable[[Callable[[M, S], None]], Callable[Concatenate[M, P], None]]:
    """Make a constructor take what the constructor of its settings takes, so that they are listed in one place."""

    def decorate(init: Callable[[M, S], None]) -> Callable[Concatenate[M, P], None]:
        def construct(self: M, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, settings(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = inspect.signature(settings)
        construct.__signature__ = taken.replace(  # type: ignore[attr-defined]  # read by inspect
            parameters=[own, *taken.parameters.values()]
        )
        return construct

    return decorate


class OpenAiChatModel:
    """A model behind the OpenAI API: OpenAI's own, Azure's, or of any server that is called compatible.

    It takes the settings of `OpenAiSettings`, which describes each of them.
    """

    @_taking(OpenAiSettings)
    def __init__(self, given: OpenAiSettings) -> None:
        settings = given.with_environment()
        if problems := list(problems_of(settings)):
            raise IllegalConfigurationError(problems)
        self.model = settings.model
        self.fallback = _names(settings.fallback)
        self.supports_response_format = settings.supports_response_format
        self._parameters = settings.body_parameters()
        self._settings = settings
        self._wire: Wire = _wire(settings.wire, _names(settings.send_tool_metadata), settings.strict_tools)
        self._stream_usage = settings.stream_usage
        self._transport = Transport(settings)

    def __repr__(self) -> str:
        address = self._settings.address.partition("?")[0]  # behind it may be a key
        return f"OpenAiChatModel({self.model!r}, base_url={address!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} holds connections and a key; make it anew where it is needed")

    @property
    def base_url(self) -> str:
        """The address of the server's API."""
        return self._settings.address

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


def _names(given: Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


# --- reading a reply


class ReplyReader:
    """Reads one reply: the blocks of a stream with `feed`, then `finish`; or a whole body with `read`.

    Each takes what came in place of the other, a document for a stream or a stream for a document. `begun`: an event
    has come. `is_ended`: the reply has said that it is complete; a connection that breaks after that has lost nothing.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self.begun = False
        self._latest: list[dict[str, Any]] = []
        self._interpreter = interpreter
        self._events = EventReader()

    @property
    def is_done(self) -> bool:
        """Whether nothing that follows counts."""
        return self._events.done or self._interpreter.final

    @property
    def is_ended(self) -> bool:
        """Whether the reply is complete, though more may follow."""
        return self._events.done or self._interpreter.ended

    def feed(self, block: bytes) -> list[StreamEvent]:
        """The events of this block. Raises `ModelHttpError` and `ModelProtocolError`."""
        self._take(self._events.feed(block))
        return self._interpreter.reply.take_events()

    def finish(self) -> list[StreamEvent]:
        """The last events, a `CompleteResponse` in the end; nothing more will come. Raises any `ModelError`."""
        self._take(self._events.finish())
        self._end()
        return self._interpreter.reply.take_events()

    def read(self, body: bytes) -> ChatResponse:
        """The reply that a body is. Raises any `ModelError`."""
        try:
            value = from_json(body)
        except ValueError:
            value = None
        if type(value) is dict:
            self._latest = [value]
            self._interpreter.take(value, True)
        else:
            self._take(self._events.feed(body))
            self._take(self._events.finish())
        return self._end()

    def _take(self, values: list[dict[str, Any]]) -> None:
        if values:
            self._latest = values
        for value in values:
            self.begun = True
            self._interpreter.take(value, self._events.is_document)
        if self._events.broken is not None and not self.is_ended:
            raise ModelProtocolError("an event of the model's stream is not JSON", self._events.broken)

    def _end(self) -> ChatResponse:
        interpreter = self._interpreter
        if not interpreter.answered:
            raise ModelProtocolError(f"what came is no {interpreter.kind}", self._excerpt())
        if not self.is_ended:
            raise ModelProtocolError("the stream stopped before the reply ended", self._excerpt())
        try:
            interpreter.close()
            return interpreter.reply.finish()
        except ModelProtocolError as error:
            raise ModelProtocolError(error.message, self._excerpt()) from error.__cause__

    def _excerpt(self) -> str:
        """What meant nothing, else what came last."""
        strange = self._events.excerpt()
        return strange or (excerpt(compact_json(self._latest[-1]).encode()) if self._latest else "")
