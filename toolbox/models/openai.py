"""`OpenAiChatModel`, for any server with an OpenAI-compatible API, and the reader of its replies.

A wire encodes requests and interprets replies, a transport sends and receives. Not here: the wires (`chat_wire`,
`responses_wire`), the transport (`transport`), the settings (`openai_settings`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from pydantic_core import from_json

from ..chat import ChatRequest, ChatResponse, StreamEvent
from ..errors import (
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
)
from ..json_text import compact_json
from .accumulator import ReplyAccumulator
from .chat_wire import ChatWire
from .openai_settings import (
    OUTPUT_LIMITS,
    OpenAiSettings,
    ServerSettings,
    environment_headers,
    is_openai_address,
    key_provider,
    problems_of,
)
from .server_model import ServerChatModel, names_of
from .sse import EventReader, excerpt
from .wire_encoding import Fields, SendReasoning, joined, json_bytes

if TYPE_CHECKING:
    from .transport import Stream


class Interpreter(Protocol):
    """Interprets the JSON objects of one wire and passes the parts to the accumulator.

    A `CompleteToolCall` is more than a display: a service starts the tool at once, before the reply is complete. So
    finish a call only when the server has said that it is complete, or when the next part cannot belong to it.

    `kind`: the name of a reply, for errors. `answered`: a part of a reply has arrived. `ended`: the server has said
    that the reply is complete. `final`: everything that follows is ignored.
    """

    kind: str
    reply: ReplyAccumulator
    answered: bool

    @property
    def ended(self) -> bool: ...
    @property
    def final(self) -> bool: ...

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Read one object. Raises `ModelHttpError` if it is an error."""
        ...

    def close(self) -> None:
        """Finish reading; called before the reply is assembled."""
        ...


class Wire(Protocol):
    """Encodes requests for one of the two APIs and creates interpreters of replies; see `ChatWire`."""

    path: str
    recorded_fields: frozenset[str]

    def fields(self, request: ChatRequest) -> Fields: ...
    def stream_fields(self, usage: bool) -> Fields: ...
    def parameter(self, name: str, value: Any) -> tuple[str, Any]: ...
    def interpreter(self, reply: ReplyAccumulator) -> Interpreter: ...


P = ParamSpec("P")
S = TypeVar("S")
M = TypeVar("M")


def taking(settings: Callable[P, S]) -> Callable[[Callable[[M, S], None]], Callable[Concatenate[M, P], None]]:
    """Give a constructor the parameters of a settings class, so that they are declared once."""

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


class OpenAiChatModel(ServerChatModel):
    """A model behind an OpenAI-compatible API: OpenAI, Azure, vLLM, Ollama, llama.cpp and many others.

        model = OpenAiChatModel("gpt-5", timeout=60)  # key: OPENAI_API_KEY
        local = OpenAiChatModel("qwen3", "http://localhost:11434/v1")

    It takes the arguments of `OpenAiSettings`, which documents each of them. Raises `IllegalConfigurationError` for
    invalid arguments.
    """

    @taking(OpenAiSettings)
    def __init__(self, given: OpenAiSettings) -> None:
        settings = given.with_environment()
        super().__init__(settings, problems_of(settings), OpenAiPackage)
        self.supports_response_format = settings.supports_response_format
        metadata, thoughts = names_of(settings.send_tool_metadata), settings.sent_reasoning
        self._wire: Wire = _wire(settings.wire, metadata, settings.strict_tools, thoughts)
        self._stream_usage = settings.stream_usage

    async def _send(self, request: ChatRequest) -> ChatResponse:
        body, headers = self._body(request, {})
        received = await self._transport.post(self._wire.path, body, headers)
        try:
            return self._reader(request).read(received.body)
        except ModelError as error:
            raise located(error, received.status, received.request_id) from error.__cause__

    async def _send_stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        said = False
        while True:
            body, headers = self._body(request, self._wire.stream_fields(self._stream_usage))
            try:
                async with self._transport.open(self._wire.path, body, headers) as stream:
                    reader = self._reader(request)
                    events: list[StreamEvent] = []
                    try:
                        while (block := await next_block(stream, reader, bool(events))) is not None:
                            events = reader.feed(block)
                            said = said or bool(events)
                            for event in events:
                                yield event
                        for event in reader.flush():
                            said = True
                            yield event
                        last = reader.finish()
                    except ModelError as error:
                        raise located(error, 200, stream.request_id) from error.__cause__
                    await stream.drain()
                    for event in last:
                        yield event
                    return
            except ModelError as error:
                if said or not self._refuses_usage(error):
                    raise
                self._stream_usage = False

    async def call_endpoint(self, path: str, fields: Mapping[str, Any]) -> Any:
        """Send JSON to another endpoint of the server, such as `/moderations`, and return the JSON of the reply.

        Raises `ModelError`.
        """
        with self._hide_secrets():
            received = await self._transport.post(path, json_bytes(fields))
            try:
                return from_json(received.body)
            except ValueError as error:
                what = f"the reply of {path} is not JSON"
                raise ModelProtocolError(what, excerpt(received.body), received.status, received.request_id) from error

    # --- sending

    def _body(self, request: ChatRequest, more: Fields) -> tuple[bytes, dict[str, str] | None]:
        """Return the bytes of a request, and its additional headers."""
        parameters = self._parameters
        headers: dict[str, str] | None = None
        if request.parameters:
            parameters = {**parameters, **request.parameters}
            headers = parameters.pop("extra_headers", None)
            parameters.update(parameters.pop("extra_body", None) or {})
            parameters["tools"] = added_tools(self._parameters, request.parameters)
        if request.temperature is not None:
            parameters = {**parameters, "temperature": request.temperature}
        if request.reasoning is not None:
            parameters = {**parameters, "reasoning_effort": request.reasoning}
        if request.max_output_tokens is not None:
            limits = {name: value for name, value in parameters.items() if name not in OUTPUT_LIMITS}
            parameters = {**limits, self._output_limit(parameters): request.max_output_tokens}
        if parameters.get("tools") and not request.parameters.get("tools"):
            request = replace(request, parameters=parameters)  # the model's tools count for the tool choice too
        fields = {"model": json_bytes(self.model), **self._wire.fields(request), **more}
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
        return joined(fields), headers

    def _output_limit(self, parameters: Mapping[str, Any]) -> str:
        """Return the server's name of the token limit: the name in use, else OpenAI's, which few others accept."""
        used = [name for name in OUTPUT_LIMITS if parameters.get(name) is not None]
        newest = "max_completion_tokens" if is_openai_address(self._server.address) else "max_tokens"
        return used[0] if used else newest

    def _reader(self, request: ChatRequest) -> ReplyReader:
        names = self._tool_names.of(request.tool_specifications)
        reply = ReplyAccumulator(names, wants_json=request.response_format is not None)
        return ReplyReader(self._wire.interpreter(reply))

    def _refuses_usage(self, error: ModelError) -> bool:
        """Return True if the server rejected a stream because of the option for token counts."""
        if not self._stream_usage or not isinstance(error, ModelHttpError):
            return False
        return error.status in (400, 422) and "stream_options" in f"{error.message}{error.body}"


class OpenAiPackage:
    """Makes the clients of the `openai` package."""

    options: Mapping[str, Any] = MappingProxyType({"security": {"bearer_auth": True}})

    def __init__(self) -> None:
        # The import takes half a second. It belongs in the start of the program, not in the first call.
        import openai

        self.module: Any = openai

    def client(self, settings: ServerSettings, **others: Any) -> Any:
        key = settings.key if isinstance(settings.key, str) else key_provider(settings.key, settings.model)
        return self.module.AsyncOpenAI(api_key=key, base_url=settings.address, **others)

    async def key_headers(self, client: Any, settings: ServerSettings) -> Mapping[str, str]:
        return {}  # the package calls a function itself

    def environment_headers(self, address: str | None) -> dict[str, str]:
        return environment_headers(address)


def added_tools(model: Mapping[str, Any], request: Mapping[str, Any]) -> list[Any] | None:
    """Return the server-side tools of a model and of a request. None in the request removes the model's."""
    given = {**request, **(request.get("extra_body") or {})}
    if "tools" in given and given["tools"] is None:
        return None
    both = [*(model.get("tools") or ()), *(given.get("tools") or ())]
    return both or None


async def next_block(stream: Stream, reader: ReplyReader, said: bool) -> bytes | None:
    """Return the next block, or None. A connection that broke before the first event is retried.

    `said`: the previous block contained a part of the reply. Raises the error in the previous block, if there was one.
    """
    reader.raise_failure()
    if reader.is_done:
        return None
    if reader.is_ended:  # token counts may follow the finish_reason
        return await stream.more(said)
    while True:
        try:
            return await stream.next_block()
        except ModelConnectionError:
            if reader.begun or not await stream.again():
                raise
            reader.restart()


def located(error: ModelError, status: int, request_id: str | None) -> ModelError:
    """Return the error with the request's id and status, if its class has them."""
    if request_id is None and not isinstance(error, ModelProtocolError):
        return error
    if isinstance(error, ModelHttpError) and error.request_id is None:
        return ModelHttpError(error.status, error.message, error.body, request_id)
    if isinstance(error, ModelProtocolError) and error.status is None:
        return ModelProtocolError(error.message, error.body, status, request_id)
    return error


def _wire(name: str, send_tool_metadata: tuple[str, ...], strict_tools: bool, send_reasoning: SendReasoning) -> Wire:
    if name == "chat":
        return ChatWire(send_tool_metadata, strict_tools, send_reasoning)
    if name == "responses":
        from .responses_wire import ResponsesWire

        return ResponsesWire(send_tool_metadata, strict_tools, send_reasoning)
    raise ValueError(f"wire={name!r}; use 'chat' or 'responses'")


# --- reading a reply


class ReplyReader:
    """Reads one reply: a stream with `feed` and `finish`, or a whole body with `read`.

    Both accept a stream as well as a document, because some servers send the other one. `begun`: an event has arrived.

    The pieces of a reply that arrived before an error belong to the caller, even if one network block brought both.
    Whether a failed request is repeated, or another model is asked, depends on them too. `feed` and `flush` therefore
    keep an error that follows pieces, and the next call raises it.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self.begun = False
        self._failure: ModelError | None = None
        self._is_flushed = False
        self._latest: dict[str, Any] | str | None = None
        self._interpreter = interpreter
        self._events = EventReader()

    @property
    def is_done(self) -> bool:
        """True if everything that follows is ignored."""
        return self._events.done or self._interpreter.final

    @property
    def is_ended(self) -> bool:
        """True if the server has said that the reply is complete. Token counts may still follow."""
        return self._events.done or self._interpreter.ended

    def feed(self, block: bytes) -> list[StreamEvent]:
        """Return the events of this block. Raises `ModelHttpError` and `ModelProtocolError`."""
        self.raise_failure()
        values = self._events.feed(block)
        if not values:  # no line ended in this block
            return []
        try:
            self._take(values)
        except ModelError as error:
            self._failure = error
        return self._pending_events()

    def flush(self) -> list[StreamEvent]:
        """Read the rest of a stream, and return its events. Raises any `ModelError`."""
        self.raise_failure()
        if self._is_flushed:
            return []
        self._is_flushed = True
        try:
            self._take(self._events.finish())
            self._check_end()
        except ModelError as error:
            self._failure = error
        return self._pending_events()

    def finish(self) -> list[StreamEvent]:
        """Return the last events; the very last is `CompleteResponse`. Raises any `ModelError`."""
        events = self.flush()
        self.end()
        return [*events, *self._interpreter.reply.take_events()]

    def raise_failure(self) -> None:
        """Raise the error that followed the last events."""
        if self._failure is not None:
            raise self._failure

    def restart(self) -> None:
        """Forget the bytes of a connection that broke before the first event: the request was sent again."""
        self._events = EventReader()

    def read(self, body: bytes) -> ChatResponse:
        """Return the reply in a whole body. Raises any `ModelError`."""
        self.load(body)
        return self.end()

    def _pending_events(self) -> list[StreamEvent]:
        events = self._interpreter.reply.take_events()
        if not events:
            self.raise_failure()
        return events

    def load(self, body: bytes) -> None:
        """Read a whole body."""
        try:
            value = from_json(body)
        except ValueError:
            value = None
        if type(value) is dict:
            self._latest = value
            self._interpreter.take(value, True)
        else:
            self._take(self._events.feed(body))
            self._take(self._events.finish())
        self._check_end()

    def _take(self, values: Iterable[dict[str, Any]]) -> None:
        events, interpreter = self._events, self._interpreter
        for value in values:
            self._latest = value
            self.begun = True
            interpreter.take(value, events.is_document)
        if self._events.broken is not None and not self.is_ended:
            raise ModelProtocolError("an event of the model's stream is not valid JSON", self._events.broken)

    def _check_end(self) -> None:
        if not self._interpreter.answered:
            raise ModelProtocolError(f"the reply is not a {self._interpreter.kind}", self._excerpt())
        if not self.is_ended:
            raise ModelProtocolError("the stream ended before the reply was complete", self._excerpt())

    def end(self) -> ChatResponse:
        """Return the reply, when all of it has been read. Raises any `ModelError`."""
        self.raise_failure()
        interpreter = self._interpreter
        try:
            interpreter.close()
            return interpreter.reply.finish()
        except ModelProtocolError as error:
            raise ModelProtocolError(error.message, self._excerpt()) from error.__cause__

    def _excerpt(self) -> str:
        """Return the unknown lines, else the last object."""
        strange, latest = self._events.excerpt(), self._latest
        return strange or (excerpt(compact_json(latest).encode()) if latest is not None else "")
