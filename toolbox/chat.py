"""What is said between a program, a model and its tools: messages, specifications, requests, replies, stream events.

Plain frozen data and the `ChatModel` Protocol. Not here: talking to a model (`models`), what to say (`services`),
running a tool (`tools`), reading and writing these as JSON (`transcripts`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, assert_never, get_args

from .fast_dataclass import with_fast_init

K = TypeVar("K")


class Encodable:
    """Keeps, beside a value, the forms an adapter has encoded it into, so that a value is encoded once per adapter."""

    __slots__ = ("_encoded",)
    _encoded: dict[object, bytes]

    def encoded_by(self, encode: Callable[[K], bytes], value: K) -> bytes:
        """`encode(value)`, kept under `encode`, which must be the same object in every call to be found again."""
        try:
            forms = self._encoded
        except AttributeError:
            forms = {}
            object.__setattr__(self, "_encoded", forms)
        form = forms.get(encode)
        if form is None:
            form = forms[encode] = encode(value)
        return form

    @staticmethod
    def all_encoded_by(encode: Callable[[Any], bytes], values: Sequence[Encodable]) -> list[bytes]:
        """`encoded_by` for each of many values; quick when all but the last few have been encoded before."""
        for value in reversed(values):
            if encode in getattr(value, "_encoded", ()):
                break
            value.encoded_by(encode, value)
        try:
            return [value._encoded[encode] for value in values]
        except (AttributeError, KeyError):
            return [value.encoded_by(encode, value) for value in values]


def _to_tuple(owner: object, name: str, values: Iterable[object]) -> None:
    if not isinstance(values, tuple):
        object.__setattr__(owner, name, tuple(values))


# --- contents


@dataclass(frozen=True, slots=True)
class TextContent:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImageContent:
    """An image, by address or by value.

    `url`: an http(s) or data address. `data`: the bytes, or their base64 text. One of the two is needed (`ValueError`).
    `mime_type`, such as `image/png`, is guessed from the bytes when it is not given. `detail` is how closely the model
    looks, in the server's words: `low`, `high`, `auto`.
    """

    url: str | None = None
    data: bytes | str | None = None
    mime_type: str | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.data is None):
            raise ValueError("an ImageContent takes either url= or data=")


Content: TypeAlias = TextContent | ImageContent
"""A part of a message. Code that handles contents matches every kind and ends with `assert_never`, so that a type
checker finds all of it when a kind is added."""

CONTENT_TYPES: tuple[type[Any], ...] = get_args(Content)


def joined_text(contents: Iterable[Content]) -> str:
    """Return the texts of `contents`, a line each."""
    texts: list[str] = []
    for each in contents:
        match each:
            case TextContent(text):
                texts.append(text)
            case ImageContent():
                pass
            case _:
                assert_never(each)
    return "\n".join(texts)


def _checked(contents: Iterable[Any]) -> tuple[Content, ...]:
    parts = tuple(contents)
    for each in parts:
        if not isinstance(each, CONTENT_TYPES):
            expected = " or ".join(kind.__name__ for kind in CONTENT_TYPES)
            raise TypeError(f"unknown message content {type(each).__name__}; expected {expected}")
    return parts


# --- tools


def no_parameters() -> dict[str, Any]:
    """The schema of a tool that takes nothing."""
    return {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSpecification(Encodable):
    """A tool as the model sees it: name, description and the JSON schema of its arguments.

    `metadata` is for the program: it is never sent to a model unless an adapter is told to.
    """

    name: str
    description: str | None = field(default=None, hash=False)
    parameters: Mapping[str, Any] = field(default_factory=no_parameters, hash=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ToolExecutionRequest:
    """One call of a tool, as the model asked for it; `arguments` is the JSON text, unchecked."""

    id: str
    name: str
    arguments: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)


@with_fast_init
@dataclass(frozen=True, slots=True)
class ToolExecutionResult:
    """What a tool may return to say more than its value: the text for the model, the value, whether it is an error."""

    text: str
    result_object: object = field(default=None, hash=False)
    is_error: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    contents: Sequence[Content] = ()

    def __post_init__(self) -> None:
        if self.contents or type(self.contents) is not tuple:
            object.__setattr__(self, "contents", _checked(self.contents))


@with_fast_init
@dataclass(frozen=True, slots=True)
class ToolExecution:
    """A tool call that ended: the request, the text sent to the model, the value, when it ran and for how long.

    `result_object` is the tool's own value, None when it failed; `started_at` is an aware datetime; `duration` is in
    seconds.
    """

    request: ToolExecutionRequest
    result: str
    result_object: object = field(hash=False)
    is_error: bool
    started_at: datetime
    duration: float
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)


ToolExecutor: TypeAlias = Callable[[ToolExecutionRequest, Any], "object | Awaitable[object]"]
"""Runs one call: takes the request and the memory id (or None), returns the value, or an awaitable of it."""


# --- messages


@dataclass(frozen=True, slots=True)
class SystemMessage(Encodable):
    """Instructions for the model.

    `role="developer"` is the newer name of the role, which some servers distinguish. `name` is the author's.
    `attributes` may hold `cache_control` for servers that cache the beginning of a conversation on request.
    """

    text: str
    role: Literal["system", "developer"] = "system"
    name: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.role not in ("system", "developer"):
            raise ValueError(f"unknown role {self.role!r} of a SystemMessage; expected 'system' or 'developer'")


@dataclass(frozen=True, slots=True)
class UserMessage(Encodable):
    """What the user says: text and images. A `str` is one `TextContent`, also inside a list.

    `name` tells apart the people of one conversation. `attributes` may hold `cache_control`. Raises `TypeError` for a
    part that is not a `Content`; so do the results of tools.
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
        given: Any = contents
        parts = (given,) if isinstance(given, (str, *CONTENT_TYPES)) else tuple(given)
        parts = tuple(TextContent(each) if isinstance(each, str) else each for each in parts)
        object.__setattr__(self, "contents", _checked(parts))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "attributes", attributes if attributes is not None else {})

    @property
    def text(self) -> str:
        """The texts, a line each."""
        return joined_text(self.contents)


@dataclass(frozen=True, slots=True)
class AiMessage(Encodable):
    """A model's reply: text, tool calls, or both. `reasoning` is the model's reasoning, if the server sends it.

    `attributes` of a reply hold what the server sent with the message and no field holds (annotations, …). In a
    request, `prefix` (or `partial`) asks the model to continue this text, and `cache_control` marks it. `name` is the
    author's.
    """

    text: str | None = None
    tool_execution_requests: Sequence[ToolExecutionRequest] = ()
    reasoning: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    name: str | None = None

    def __post_init__(self) -> None:
        _to_tuple(self, "tool_execution_requests", self.tool_execution_requests)

    @property
    def has_tool_execution_requests(self) -> bool:
        """Whether the model asks for tools."""
        return bool(self.tool_execution_requests)


@with_fast_init
@dataclass(frozen=True, slots=True)
class ToolExecutionResultMessage(Encodable):
    """The answer to one tool call; `id` and `tool_name` are those of its request."""

    id: str
    tool_name: str
    text: str
    is_error: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    contents: Sequence[Content] = ()

    def __post_init__(self) -> None:
        if self.contents or type(self.contents) is not tuple:
            object.__setattr__(self, "contents", _checked(self.contents))

    @classmethod
    def of(cls, request: ToolExecutionRequest, text: str) -> ToolExecutionResultMessage:
        """The answer `text` to `request`."""
        return cls(request.id, request.name, text)


Message: TypeAlias = SystemMessage | UserMessage | AiMessage | ToolExecutionResultMessage


# --- requests and replies


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens used; `cached_input_tokens` and `reasoning_tokens` are parts of the input's and the output's number."""

    input_tokens: int
    output_tokens: int
    cached_input_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_input_tokens + other.cached_input_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_EXECUTION = "tool_execution"
    CONTENT_FILTER = "content_filter"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ResponseFormat(Encodable):
    """The JSON schema a reply's text must follow, its name, and a description for the model."""

    name: str
    schema: Mapping[str, Any] = field(hash=False)
    description: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One question to a model.

    `tool_choice`: `"auto"`, `"none"`, `"required"` (`"any"` for servers that call it so) or a tool's name.
    `parameters`: further ones, by the wire's names; `{"tools": […]}` adds the server's own tools.
    """

    messages: Sequence[Message]
    tool_specifications: Sequence[ToolSpecification] = ()
    response_format: ResponseFormat | None = None
    tool_choice: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _to_tuple(self, "messages", self.messages)
        _to_tuple(self, "tool_specifications", self.tool_specifications)


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A model's reply and what the server said about it.

    `attributes` hold what no field holds, under the server's names: `service_tier`, `citations`, `logprobs`, further
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
    """A piece of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class PartialReasoning:
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class PartialToolCall:
    """A piece of a tool call's arguments; `index` counts the calls of the reply, id and name as far as known."""

    index: int
    id: str | None
    name: str | None
    partial_arguments: str


@dataclass(frozen=True, slots=True)
class CompleteToolCall:
    """A tool call whose arguments are complete; it may start."""

    index: int
    request: ToolExecutionRequest


@dataclass(frozen=True, slots=True)
class CompleteResponse:
    """The whole reply; always the last event of a stream."""

    response: ChatResponse


@dataclass(frozen=True, slots=True)
class IntermediateResponse:
    """The whole reply of a round that is not the last."""

    response: ChatResponse


@dataclass(frozen=True, slots=True)
class BeforeToolExecution:
    """A tool is about to run."""

    request: ToolExecutionRequest


@dataclass(frozen=True, slots=True)
class ToolExecuted:
    """A tool has run."""

    execution: ToolExecution


StreamEvent: TypeAlias = PartialResponse | PartialReasoning | PartialToolCall | CompleteToolCall | CompleteResponse
"""What a model's stream yields."""

ServiceEvent: TypeAlias = StreamEvent | IntermediateResponse | BeforeToolExecution | ToolExecuted
"""What a service's `TokenStream` yields."""


class ChatModel(Protocol):
    """A language model. `stream` may be absent: then the whole reply is streamed at once.

    Optional attribute `supports_response_format: bool`: whether `ChatRequest.response_format` is honoured.
    """

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """The whole reply. Raises `ModelError`."""
        ...


class StreamingChatModel(ChatModel, Protocol):
    """A model that streams."""

    def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """The reply in pieces, a `CompleteResponse` last. Raises `ModelError` in the iteration."""
        ...
