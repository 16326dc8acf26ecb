"""Encoding that all wires share: JSON bytes, names, tools, places of contents.

Not here: the format of messages (`chat_wire`, `responses_wire`, `anthropic_wire`).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from pydantic_core import PydanticSerializationError, to_json

from ..chat import ChatRequest, Message, ResponseFormat, ToolSpecification
from ..contents import Content, reason_against
from ..errors import UnsupportedContentError
from ..json_text import as_json_value, whole_characters, whole_json
from ..schemas import NotStrict, strict_form, strict_output, strict_parameters, with_properties

SendReasoning: TypeAlias = Literal["always", "with_calls", "never"]
"""Which replies are sent back with their reasoning: all, those with tool calls, or none."""

T = TypeVar("T")

Fields: TypeAlias = dict[str, bytes]
"""The top-level fields of a request, each value as JSON."""

SHARED_FIELDS = frozenset(
    {"model", "service_tier", "stream", "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"}
)
"""The fields of all wires that a recording writes with their values; see `recorded_fields` of a wire."""

OTHER_NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
"""Names of parameters in the OpenAI APIs that have another name in the API of Anthropic and in pydantic-ai."""

_ILLEGAL = re.compile(r"[^a-zA-Z0-9_-]")
_KEPT_TOOL_SETS = 64


def json_bytes(value: object) -> bytes:
    """Return compact JSON; lone surrogates become U+FFFD.

    Raises `ValueError` or `TypeError` for values that JSON does not support.
    """
    try:
        return to_json(value, fallback=as_json_value)
    except PydanticSerializationError:
        return whole_json(value).encode()


def join_fields(fields: Fields) -> bytes:
    """Return the body of a request."""
    named = [b'"%s":%s' % (whole_characters(name).encode(), value) for name, value in fields.items()]
    return b"{" + b",".join(named) + b"}"


def offers_tools(request: ChatRequest) -> bool:
    """Return True if the request has tools: the program's, or server-side tools in `parameters`."""
    return bool(request.tool_specifications or request.parameters.get("tools"))


def is_any(request: ChatRequest) -> bool:
    """Return True if the tool choice is `any` (Mistral's word for `required`) and not the name of a tool."""
    return request.tool_choice == "any" and all(each.name != "any" for each in request.tool_specifications)


def function_name(name: str) -> str:
    """Return a name that servers accept in a history. A name invented by a model may contain any characters."""
    return _ILLEGAL.sub("_", name.strip())[:64] or "unknown"


def strict_tool(tool: ToolSpecification, by_default: bool) -> tuple[dict[str, Any], bool]:
    """Return a tool's parameters in their strict form and True, or unchanged and False.

    They are unchanged if they have no strict form, or if the tool (or else `by_default`) does not want it.
    """
    wanted = by_default if tool.strict is None else tool.strict
    form = strict_parameters(tool.parameters, "required" if tool.strict else "refused") if wanted else None
    return (with_properties(tool.parameters), False) if form is None else (form, True)


def strict_answer(wanted: ResponseFormat) -> tuple[dict[str, Any], bool]:
    """Return the schema of a reply in its strict form and True, or unchanged and False if it has none.

    If the request wants it in any case, optional properties are required. Else they are a reason against it.
    """
    form = None
    with suppress(NotStrict):
        if wanted.strict is not False:
            form = strict_form(wanted.schema) if wanted.strict else strict_output(wanted.schema)
    return (dict(wanted.schema), False) if form is None else (form, True)


@cache
def shared_encoder(encode: Callable[..., bytes], **settings: Any) -> Callable[[Any], bytes]:
    """Return `encode` with these settings: one object for all models, because encoded forms are cached by it.

    A bound method would keep its model as long as the tools and messages live.
    """
    return partial(encode, **settings)


class PerTools(Generic[T]):
    """Caches a value by the identity of a tuple of tools, which a service reuses for every call."""

    def __init__(self, make: Callable[[Sequence[ToolSpecification]], T]) -> None:
        self._make = make
        self._kept: OrderedDict[int, tuple[Sequence[ToolSpecification], T]] = OrderedDict()

    def of(self, tools: Sequence[ToolSpecification]) -> T:
        """Return the value for these tools."""
        kept = self._kept.get(id(tools))
        if kept is not None and kept[0] is tools:
            return kept[1]
        value = self._make(tools)
        self._kept[id(tools)] = (tools, value)
        if len(self._kept) > _KEPT_TOOL_SETS:
            self._kept.popitem(last=False)
        return value


class ToolBytes(PerTools[bytes]):
    """Caches the JSON list of tools."""

    def __init__(self, encode: Callable[[ToolSpecification], bytes]) -> None:
        super().__init__(lambda tools: b"[%s]" % b",".join([each.encoded_by(encode, each) for each in tools]))


class ToolNames(PerTools[frozenset[str]]):
    """Caches the names of tools."""

    def __init__(self) -> None:
        super().__init__(lambda tools: frozenset([each.name for each in tools]))


# --- contents


def encode_messages(encode: Callable[[Message], bytes], messages: Sequence[Message]) -> list[bytes]:
    """Return the encoded messages. Raises `UnsupportedContentError` with the place of the part."""
    try:
        return [each.encoded_by(encode, each) for each in messages]
    except UnsupportedContentError as error:
        place = f"messages.{_find_unsupported(encode, messages)}.{error.place}"
        raise UnsupportedContentError(error.content, error.reason, place) from None


def _find_unsupported(encode: Callable[[Message], bytes], messages: Sequence[Message]) -> int:
    for number, message in enumerate(messages):
        try:
            encode(message)
        except UnsupportedContentError:
            return number
    return 0


def encode_parts(encode: Callable[[Content], dict[str, Any]], contents: Iterable[Content]) -> list[dict[str, Any]]:
    """Return the encoded parts of a message. Raises `UnsupportedContentError` with the part's place in the message."""
    parts: list[dict[str, Any]] = []
    for number, content in enumerate(contents):
        refuse_unsendable(content, f"contents.{number}")
        try:
            parts.append(encode(content))
        except UnsupportedContentError as error:
            raise UnsupportedContentError(error.content, error.reason, f"contents.{number}") from None
    return parts


def refuse_unsendable(content: Content, place: str = "") -> None:
    """Raise `UnsupportedContentError` for a stored part that no server may get, such as a `file:` address."""
    if (reason := reason_against(content)) is not None:
        raise UnsupportedContentError(type(content).__name__, reason, place)


DOCUMENT = "document.pdf"
"""The name of a PDF document without a name, which servers require."""
