"""Data exchanged with models and tools: messages, tool specifications, requests, replies, stream events; `ChatModel`.

Not here: calling a model server (`models`), building requests (`services`), running tools (`tools`), messages as JSON
(`transcripts`), the parts of a message (`contents`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, get_args

from .contents import CONTENT_TYPES as CONTENT_TYPES
from .contents import AudioContent as AudioContent
from .contents import Content as Content
from .contents import ImageContent as ImageContent
from .contents import PdfContent as PdfContent
from .contents import TextContent as TextContent
from .contents import joined_text as joined_text
from .introspection import is_count, is_number
from .passages import Passage

K = TypeVar("K")


class Encodable:
    """Caches the encoded forms of a value, so that each adapter encodes it once."""

    __slots__ = ("_encoded",)
    _encoded: dict[object, bytes]

    def encoded_by(self, encode: Callable[[K], bytes], value: K) -> bytes:
        """Return `encode(value)`, cached by `encode`.

        It must be the same object in every call, and outlive single models: a value that is kept, such as a tool, keeps
        each encoder and whatever the encoder refers to.
        """
        try:
            forms = self._encoded
        except AttributeError:
            forms = {}
            object.__setattr__(self, "_encoded", forms)
        form = forms.get(encode)
        if form is None:
            form = forms[encode] = encode(value)
        return form


# --- contents


def _check_contents(contents: Iterable[Any]) -> tuple[Content, ...]:
    if not isinstance(contents, Iterable):
        raise _make_content_error(contents)
    parts = tuple(contents)
    for each in parts:
        if not isinstance(each, CONTENT_TYPES):
            raise _make_content_error(each)
    return parts


def _make_content_error(given: object) -> TypeError:
    expected = " or ".join(kind.__name__ for kind in CONTENT_TYPES)
    return TypeError(f"unknown message content {type(given).__name__}; expected {expected}")


# --- tools


def no_parameters() -> dict[str, Any]:
    """Return the schema of a tool without parameters."""
    return {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSpecification(Encodable):
    """A tool as the model sees it: name, description and the JSON schema of its arguments.

    `metadata` is for your program. It is sent to the model server only if you configure it (`send_tool_metadata=`).
    `strict` says if arguments must match the schema, for servers that can enforce it; None leaves it to the model.
    """

    name: str
    description: str | None = field(default=None, hash=False)
    parameters: Mapping[str, Any] = field(default_factory=no_parameters, hash=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolExecutionRequest:
    """A tool call that the model requests. `arguments` is the JSON text as the model wrote it, not validated."""

    id: str
    name: str
    arguments: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ToolExecutionResult:
    """A return value of tools with more details than a plain value.

    `text` is sent to the model, with the images, documents and audio in `contents`. `result_object` is the value for
    your program. `is_error` marks a failure. `attributes` are kept with the result message.
    """

    text: str
    result_object: object = field(default=None, hash=False)
    is_error: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    contents: Sequence[Content] = ()

    def __post_init__(self) -> None:
        if self.contents or type(self.contents) is not tuple:
            object.__setattr__(self, "contents", _check_contents(self.contents))


def _refuse_change(self: object, *args: object, **kwargs: object) -> Any:
    raise TypeError("this dictionary is read-only; change a copy: dict(…)")


class ReadOnlyDict(dict[str, Any]):
    """A dictionary whose methods do not change it. It is copied, pickled and written as JSON like every dictionary."""

    __slots__ = ()
    _refuse: ClassVar[Any] = _refuse_change
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


@dataclass(frozen=True, slots=True)
class ToolExecution:
    """A finished tool call.

    `result` is the text sent to the model. `result_object` is the value that the tool returned, or None if it failed.
    `started_at` has a time zone. `duration` is in seconds. `arguments` are those that the tool ran with, after
    interceptors, guardrails and an approval: a read-only mapping of JSON values, by the model's names, with defaults.
    It is empty if the tool did not run. `request` is what the model sent.
    """

    request: ToolExecutionRequest
    result: str
    result_object: object = field(hash=False)
    is_error: bool
    started_at: datetime
    duration: float
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", ReadOnlyDict(self.arguments))


ToolExecutor: TypeAlias = Callable[[ToolExecutionRequest, Any], "object | Awaitable[object]"]
"""A function that runs one call: it takes the request and the memory id (or None), and returns or awaits the value."""


# --- messages


@dataclass(frozen=True, slots=True)
class SystemMessage(Encodable):
    """Instructions for the model.

    `role="developer"` is the newer name of this role, which some servers require. `name` is the name of the author. Set
    `cache_control` in `attributes` for servers that cache the beginning of a conversation on request.
    """

    text: str
    role: Literal["system", "developer"] = "system"
    name: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.role not in ("system", "developer"):
            raise ValueError(f"unknown role {self.role!r} of a SystemMessage; use one of: system, developer")


@dataclass(frozen=True, slots=True)
class UserMessage(Encodable):
    """A message of the user: text, images, PDF documents, audio. A `str` becomes a `TextContent`, also inside a list.

        UserMessage(["What is in this picture?", ImageContent(url)])

    `name` identifies the author in conversations with several people. `attributes` may contain `cache_control`. Raises
    `TypeError` for a part that is not a `Content`.
    """

    contents: Sequence[Content]
    name: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        contents: str | Content | Iterable[Content | str],
        name: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        parts: Any
        if isinstance(contents, str):
            parts = (TextContent(contents),)
        elif isinstance(contents, CONTENT_TYPES):
            parts = (contents,)
        else:
            given: Any = contents
            if isinstance(given, Iterable):
                given = (TextContent(each) if isinstance(each, str) else each for each in given)
            parts = _check_contents(given)
        object.__setattr__(self, "contents", parts)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "attributes", attributes if attributes is not None else {})

    def __post_init__(self) -> None:
        # For pydantic, which sets the fields of a message that it reads without calling `__init__`.
        object.__setattr__(self, "contents", _check_contents(self.contents))

    @property
    def text(self) -> str:
        """Return the texts, joined by line breaks."""
        contents = self.contents
        if len(contents) == 1 and type(contents[0]) is TextContent:  # most messages
            return contents[0].text
        return joined_text(contents)


@dataclass(frozen=True, slots=True)
class AiMessage(Encodable):
    """A model's reply: text, tool calls, or both. `reasoning` is the model's reasoning, if the server sends it.

    `attributes` of a reply contain fields of the server without an attribute here (annotations, …). In a request,
    `prefix` (or `partial`) asks the model to continue this text, and `cache_control` marks it for caching. `name` is
    the name of the author.
    """

    text: str | None = None
    tool_execution_requests: Sequence[ToolExecutionRequest] = ()
    reasoning: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_execution_requests", tuple(self.tool_execution_requests))

    @property
    def has_tool_execution_requests(self) -> bool:
        """Return True if the reply contains tool calls."""
        return bool(self.tool_execution_requests)


@dataclass(frozen=True, slots=True)
class ToolExecutionResultMessage(Encodable):
    """The result of one tool call, for the model. `id` and `tool_name` are those of the request."""

    id: str
    tool_name: str
    text: str
    is_error: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    contents: Sequence[Content] = ()

    def __post_init__(self) -> None:
        if self.contents or type(self.contents) is not tuple:
            object.__setattr__(self, "contents", _check_contents(self.contents))

    @classmethod
    def of(cls, request: ToolExecutionRequest, text: str) -> ToolExecutionResultMessage:
        """Return the result message with `text` for `request`."""
        return cls(request.id, request.name, text)


Message: TypeAlias = SystemMessage | UserMessage | AiMessage | ToolExecutionResultMessage
"""One message of a conversation."""


def check_messages(given: object, where: str) -> None:
    """Raise `TypeError` for anything but a list of messages, such as the dictionaries that a client sends."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{where}: expected a list of messages, got {type(given).__name__}")
    for each in given:
        if not isinstance(each, Message):
            fix = "messages_from_json(…) of toolbox.transcripts reads stored ones"
            raise TypeError(f"{where}: expected messages such as UserMessage(…), got {type(each).__name__}; {fix}")


# --- requests and replies

Reasoning: TypeAlias = Literal["none", "minimal", "low", "medium", "high"]
"""Effort of the reasoning before a reply. Not every model supports it."""

REASONING: tuple[str, ...] = get_args(Reasoning)


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Number of tokens.

    `input_tokens` count all input; `cached_input_tokens` (read from a cache) and `cache_write_tokens` (written to it)
    are parts of them. `reasoning_tokens` are part of the output.
    """

    input_tokens: int
    output_tokens: int
    cached_input_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Return the sum of input and output tokens."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_input_tokens + other.cached_input_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


class FinishReason(StrEnum):
    """The reason why a reply ended.

    It is complete (`STOP`), it reached the token limit (`LENGTH`), it calls tools (`TOOL_EXECUTION`), or a filter of
    the server stopped it (`CONTENT_FILTER`). All other reasons are `OTHER`.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_EXECUTION = "tool_execution"
    CONTENT_FILTER = "content_filter"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ResponseFormat(Encodable):
    """The JSON schema that the text of a reply must match, with a name and a description for the model.

    The server enforces the schema if it can; with `strict=False` the model only tries to follow it.
    """

    name: str
    schema: Mapping[str, Any] = field(hash=False)
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to a model.

    `tool_choice`: `"auto"`, `"none"`, `"required"` (some servers call it `"any"`) or the name of a tool. `parameters`:
    further parameters by the server's names, such as `top_p`; `{"tools": […]}` adds server-side tools. `temperature`,
    `reasoning` and `max_output_tokens` have the same names for every server and win over `parameters`.
    """

    messages: Sequence[Message]
    tool_specifications: Sequence[ToolSpecification] = ()
    response_format: ResponseFormat | None = None
    tool_choice: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    temperature: float | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "tool_specifications", tuple(self.tool_specifications))


@dataclass(frozen=True, slots=True)
class ChatRequestParameters:
    """Options of one call: declare a parameter of this type in a method of a service.

        class Assistant(Protocol):
            async def ask(self, question: str, options: ChatRequestParameters | None = None) -> str: ...

        await assistant.ask("Why?", ChatRequestParameters(model="strong", reasoning="high"))

    - `model`: the name of a configured model. `tool_choice`: `"auto"`, `"none"`, `"required"` or the name of a tool.
    - `temperature`, `reasoning`, `max_output_tokens`: sent with each request of the call.
    - `parameters`: further parameters by the server's names; `{"tools": […]}` adds server-side tools.

    A value replaces the service's; None keeps it. Raises `ValueError` for an unknown `reasoning`, and for
    invalid numbers.
    """

    model: str | None = None
    temperature: float | None = None
    tool_choice: str | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.reasoning is not None and self.reasoning not in REASONING:
            raise ValueError(f"unknown reasoning {self.reasoning!r}; use one of: {', '.join(REASONING)}")
        if self.temperature is not None and not is_number(self.temperature):
            raise ValueError(f"invalid temperature={self.temperature!r}; use a number")
        if self.max_output_tokens is not None and not is_count(self.max_output_tokens, 1):
            raise ValueError(f"invalid max_output_tokens={self.max_output_tokens!r}; use 1 or more")


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A model's reply, with token usage, finish reason, id and model as reported by the server.

    `attributes` contain all other fields by the server's names: `service_tier`, `citations`, `logprobs`, further
    `choices`, …
    """

    ai_message: AiMessage
    token_usage: TokenUsage | None = None
    finish_reason: FinishReason | None = None
    id: str | None = None
    model: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)


# --- stream events


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """A part of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class PartialReasoning:
    """A part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class PartialToolCall:
    """A part of a tool call's arguments.

    `index` is the position of the call in the reply. `id` and `name` are None until the server has sent them.
    """

    index: int
    id: str | None
    name: str | None
    partial_arguments: str


@dataclass(frozen=True, slots=True)
class CompleteToolCall:
    """A tool call whose arguments are complete. The tool may start."""

    index: int
    request: ToolExecutionRequest


@dataclass(frozen=True, slots=True)
class CompleteResponse:
    """The whole reply. Always the last event of a stream."""

    response: ChatResponse


@dataclass(frozen=True, slots=True)
class IntermediateResponse:
    """The whole reply of a round that is followed by another round."""

    response: ChatResponse


@dataclass(frozen=True, slots=True)
class BeforeToolExecution:
    """A tool is about to run."""

    request: ToolExecutionRequest


@dataclass(frozen=True, slots=True)
class ToolExecuted:
    """A tool has run."""

    execution: ToolExecution


@dataclass(frozen=True, slots=True)
class ToolProgress:
    """A running tool reports its progress: `done` of `total` units (None: unknown), and a text for people."""

    request: ToolExecutionRequest
    done: float
    total: float | None = None
    message: str | None = None


StreamEvent: TypeAlias = PartialResponse | PartialReasoning | PartialToolCall | CompleteToolCall | CompleteResponse
"""The events of a model's stream."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A tool call of a suspended run that waits for an answer.

    - `id`: the place of the call in the run, such as `0/1/0`; unique in the run. It is not the model's own id.
    - `arguments`: the validated arguments as JSON values, by the model's names.
    - `service`: the stored name, by default `module.Class`, of the service whose model made the call.
    - `kind`: `"approval"`, `"deferred"` or `"unknown_outcome"`.
    - `reason`: the text of `ToolDeferred`, or of the rule that asks for an approval. `attributes` come from
      `ToolDeferred`.
    - `started_by`: the name of the identity that asked for the run; None for an anonymous one.
    - `call_id`: the model's own id of the call, as in its `ToolExecutionRequest`. A model may repeat it.
    - `expires_at`: the time at which the call is rejected if nobody has answered it; None without `approval_expires`.
    - `may_remember`: the tool says `may_remember=True`, so that `approve(remember="conversation")` is possible for a
      call in a conversation that was started by a known user.
    """

    id: str
    tool_name: str
    arguments: Mapping[str, Any] = field(hash=False)
    service: str
    kind: Literal["approval", "deferred", "unknown_outcome"]
    reason: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    started_by: str | None = None
    call_id: str = ""
    expires_at: datetime | None = None
    may_remember: bool = False


@dataclass(frozen=True, slots=True)
class RunSuspended:
    """The call was suspended: `pending` are the calls that wait for an answer. The last event of the stream."""

    run_id: str
    pending: tuple[PendingCall, ...]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Retrievers have found these passages for the user message: the first has the number 1. The first event, if any.

    Those that a run has stored have no text.
    """

    passages: tuple[Passage, ...]


class ChatModel(Protocol):
    """A language model: any object with `async def chat(request)`.

    It may also have `stream` (see `StreamingChatModel`); without it, a stream contains the whole reply at once. Set the
    attribute `supports_response_format = True` if the model respects `ChatRequest.response_format`.
    """

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the whole reply. Raises `ModelError`."""
        ...


class StreamingChatModel(ChatModel, Protocol):
    """A language model that can stream its reply."""

    def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """Yield the reply as events; the last is `CompleteResponse`. Raises `ModelError` during the iteration."""
        ...
