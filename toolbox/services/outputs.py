"""Return types of service methods: the JSON schema for the model, and parsing the reply into the declared type.

Includes `Result` and `TokenStream`. No I/O. Not here: asking again after an invalid reply (`loop`), other streams
(`streams`).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from json import JSONDecoder
from types import GenericAlias, NoneType
from typing import Any, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from typing_extensions import is_typeddict

from ..chat import (
    AiMessage,
    FinishReason,
    Message,
    PendingCall,
    ResponseFormat,
    TokenUsage,
    ToolExecution,
    ToolExecutionResult,
    ToolSpecification,
)
from ..contents import CONTENT_TYPES
from ..errors import OutputParsingError, Path, RunSuspendedError
from ..introspection import EMPTY, is_number, is_union, unwrapped
from ..json_text import arguments_text, value_text
from ..passages import Passage
from ..safe_text import faults_of
from ..schemas import schema_of, strict_form
from ..service_events import ServiceEvent
from ..tools.codec import parsed_leniently
from .answers import AnswerType, UnsupportedOutput

T = TypeVar("T")

OutputMode: TypeAlias = Literal["schema", "tool", "prompt"]
"""How a structured reply is requested: as a response format, as a tool to call, or in words."""


@dataclass(frozen=True, slots=True)
class Compensation:
    """A tool call that was undone, because another tool of its round failed.

    `arguments` are those that the tool ran with, as JSON values by the model's names. `error` is type and text of the
    error of the method that should have undone it; None if it succeeded.
    """

    tool_name: str
    arguments: Mapping[str, Any] = field(hash=False)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The value of a service method with details of the call: declare `-> Result[str]`.

        result = await assistant.answer("How many seats?")
        print(result.content, result.token_usage)

    - `content`: the value; None after an immediate return.
    - `tool_executions`: the tool calls, with results and durations.
    - `token_usage`: the sum over all model calls; None if no reply contained a usage.
    - `finish_reason`: why the model stopped.
    - `messages`: the messages of this call, from the user message to the answer.
    - `pending`: the tool calls that wait for an answer, if the call was suspended; then `content` is None, and `run_id`
      names the run.
    - `compensations`: the tool calls that were undone, in this order.
    - `response_id`: the id that the model server gave the last reply; None if it gave none.
    - `sources`: the passages that retrievers found; the answer names the first as `[1]`. Stored ones have no text.
    - `stopped_by`: the name of the limit at which the model was asked for its answer, such as `"max_tool_rounds"`, with
      `on_limit="answer"`; else None.
    - `answered_by`: the method that has answered, such as `"Billing.chat"`: after a hand-over not the one that was
      called. None in results of earlier releases.
    """

    content: T = field(hash=False)
    tool_executions: Sequence[ToolExecution] = ()
    token_usage: TokenUsage | None = None
    finish_reason: FinishReason | None = None
    messages: Sequence[Message] = field(default=(), repr=False)
    pending: Sequence[PendingCall] = ()
    run_id: str | None = None
    compensations: Sequence[Compensation] = ()
    response_id: str | None = None
    sources: Sequence[Passage] = ()
    stopped_by: str | None = None
    answered_by: str | None = None

    def __post_init__(self) -> None:
        for name in ("tool_executions", "messages", "pending", "compensations", "sources"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __tool_value__(self) -> object:
        """Return the value for the model, if a tool returns a `Result`. Raises `RunSuspendedError` without a value."""
        if self.pending and self.run_id is not None:
            raise RunSuspendedError(self.run_id, self.pending)
        return self.content


class TokenStream(AsyncIterator[ServiceEvent]):
    """The events of one call as they happen: declare `-> TokenStream`.

        async for event in assistant.stream("Hello"):
            if isinstance(event, PartialResponse): print(event.text, end="")

    The last event is a `CompleteResponse`. Errors are raised during the iteration. The call starts with the first step.
    `aclose()`, or leaving `async with`, cancels the call.
    """

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel the call: close the model's stream, cancel the tools, store nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# --- the kinds of return


class Kind(StrEnum):
    """The ways to convert a reply."""

    TEXT = "text"
    NOTHING = "nothing"
    MESSAGE = "message"
    STRUCTURED = "structured"


class Shape(StrEnum):
    """The form in which the caller gets the value."""

    VALUE = "value"
    RESULT = "result"
    TEXT_STREAM = "text stream"
    ITEM_STREAM = "item stream"
    EVENT_STREAM = "event stream"


@dataclass(frozen=True)
class Output:
    """A parsed return annotation: its shape, and the type inside."""

    shape: Shape
    kind: Kind
    type: Any
    synchronous: bool = False  # for a stream: True for a plain iterator

    @property
    def is_stream(self) -> bool:
        """True for a stream."""
        return self.shape not in (Shape.VALUE, Shape.RESULT)

    @property
    def wants_immediate_value(self) -> bool:
        """True if the value of an immediate tool must have the method's return type to end the call."""
        return self.shape is Shape.VALUE and self.kind is not Kind.NOTHING

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """The validator of the type."""
        return _text_adapter() if self.type is str else TypeAdapter(self.type)

    @cached_property
    def structure(self) -> Structure | None:
        """The structure of a structured reply; None for other kinds."""
        return Structure.of(self.type, self.shape is Shape.ITEM_STREAM) if self.kind is Kind.STRUCTURED else None


@cache
def _text_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(str)


def read_output(annotation: object) -> Output:
    """Parse a resolved return annotation. Raises `TypeError` for an unsupported one."""
    if (content := _content_in(annotation)) is not None:
        name = content.__name__
        raise UnsupportedOutput(
            f"models answer with text, so it would invent the {name}", f"write a tool that returns it, `-> {name}`"
        )
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is TokenStream:
        raise UnsupportedOutput("TokenStream has no parameter", "write `-> TokenStream`, or AsyncIterator[…] for items")
    if annotation is TokenStream:
        return Output(Shape.EVENT_STREAM, Kind.TEXT, str)
    if not arguments and (bare := origin or annotation) in (AsyncGenerator, AsyncIterable, AsyncIterator, Iterator):
        raise TypeError(f"the type of the items is missing, as in {getattr(bare, '__name__', bare)}[str]")
    if isinstance(origin, type) and issubclass(origin, (AsyncIterable, Iterator)):
        if arguments[0] is str:
            return Output(Shape.TEXT_STREAM, Kind.TEXT, str, synchronous=issubclass(origin, Iterator))
        if issubclass(origin, Iterator):
            raise TypeError(f"a synchronous stream must be an Iterator[str], got {annotation}")
        if arguments[0] == ServiceEvent:
            return Output(Shape.EVENT_STREAM, Kind.TEXT, str)
        return Output(Shape.ITEM_STREAM, Kind.STRUCTURED, arguments[0])
    if annotation is Result:
        return Output(Shape.RESULT, Kind.TEXT, str)
    if origin is Result:
        return Output(Shape.RESULT, _kind_of(arguments[0]), arguments[0])
    return Output(Shape.VALUE, _kind_of(annotation), annotation)


def _content_in(annotation: Any) -> type[Any] | None:
    """Return the class of a message's content in a return type, also in unions, lists and streams, or None."""
    form = unwrapped(annotation).type
    if any(form is each for each in CONTENT_TYPES):
        return cast("type[Any]", form)
    if get_origin(form) is Literal:
        return None
    return next((found for each in get_args(form) if (found := _content_in(each)) is not None), None)


def _kind_of(annotation: object) -> Kind:
    if annotation is str:
        return Kind.TEXT
    if annotation in (None, NoneType):
        return Kind.NOTHING
    if annotation is AiMessage:
        return Kind.MESSAGE
    return Kind.STRUCTURED


# --- values of immediate tools


def can_be(declared: Any, wanted: Any) -> bool:
    """Return False if the annotations show that no value of the type `declared` is a value of `wanted`.

    Unannotated functions, type variables and similar forms may return anything. Conversions do not count, except that
    an `int` is a `float`.
    """
    here, there = [*_alternatives(declared)], [*_alternatives(wanted)]
    return any(_is_related(a, b) for a in here for b in there)


def always_can_be(declared: Any, wanted: Any) -> bool:
    """Return False if a value of the type `declared` may be no value of `wanted`, such as the None of `str | None`."""
    there = [*_alternatives(wanted)]
    return all(any(_is_related(each, b) for b in there) for each in _alternatives(declared))


_ANYTHING = (Any, EMPTY, ToolExecutionResult)


def _alternatives(annotation: Any) -> Iterator[type[Any]]:
    """Yield the classes that a value of a type may have; `object` if they are not known."""
    bare = unwrapped(annotation)
    if bare.optional or bare.type is None:
        yield NoneType
    origin = get_origin(bare.type) or bare.type
    if is_union(bare.type):
        for member in get_args(bare.type):
            yield from _alternatives(member)
    elif origin is Result:
        yield from _alternatives(get_args(bare.type)[0] if get_args(bare.type) else str)
    elif origin is Literal:
        yield from {type(each) for each in get_args(bare.type)}
    elif is_typeddict(origin):
        yield dict
    elif bare.type is not None:
        yield origin if isinstance(origin, type) and origin not in _ANYTHING else object


def _is_related(declared: type[Any], wanted: type[Any]) -> bool:
    if object in (declared, wanted) or (declared, wanted) == (int, float):
        return True
    if bool in (declared, wanted):  # in strict mode, a bool is not an int
        return declared is wanted
    try:
        if issubclass(wanted, BaseModel) and issubclass(declared, Mapping):  # pydantic validates its values
            return True
        return issubclass(declared, wanted) or issubclass(wanted, declared)
    except TypeError:  # a Protocol with attributes
        return True


# --- structured replies

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL)
_CUT_OFF = "the answer was cut off"
# The beginning of a JSON object or list, but not of other braces or brackets in prose.
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_VALUE_BEGINS = re.compile(
    rf"\{{(?=\s*+(?:\}}|{_STRING}\s*+:))|\[(?=\s*+(?:[\[{{\]\d-]|{_STRING}\s*+[,\]]|true|false|null))", re.DOTALL
)
_LOOKS_LIKE_JSON = re.compile(r"```|[\[{]\s*[\"{\[\d-]|\[\s*\Z|\{\s*\Z")
_BULLET = re.compile(r"(?:[-*•–]|\d{1,4}[.)])\s+")
_SCALARS = {"string", "integer", "number", "boolean", "null"}


class ParsedAnswer(NamedTuple):
    """An answer in a reply: its value, and its text; for a structured answer its JSON, without anything around it."""

    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Structure:
    """A type that a model's reply is validated against.

    `schema` is the JSON schema for the model: that of the type if it is an object, otherwise wrapped as `{"value": …}`.
    """

    name: str
    schema: Mapping[str, Any]
    type: AnswerType
    wrapped: bool
    scalar: bool
    item_type: AnswerType | None = None
    item_beginnings: str = ""
    strict: bool | None = None

    @classmethod
    def of(cls, type_: Any, streamed: bool) -> Structure:
        """Return the structure of `type_`, or of a list of it if `streamed`.

        Raises pydantic's error for an unsupported type, or `UnsupportedOutput`.
        """
        # Items of a stream are read while they arrive, so its list has no repairs that need the whole text.
        answer = AnswerType(GenericAlias(list, (type_,))) if streamed else AnswerType(type_, parsed_leniently)
        schema = schema_of(answer.adapter)
        root = schema
        while "$ref" in root:
            root = schema["$defs"][root["$ref"].rpartition("/")[2]]
        wrapped = root.get("type") != "object"
        if wrapped:
            definitions = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
            if definitions:
                schema["$defs"] = definitions
        kinds = root.get("type"), *(each.get("type") for each in root.get("anyOf", ()))
        scalar = "enum" in root or "const" in root or any(kind in _SCALARS for kind in kinds)
        name = _schema_name(type_)
        if not streamed:
            return cls(name, schema, answer, wrapped, scalar)
        return cls(name, schema, answer, wrapped, scalar, AnswerType(type_), _beginnings(root.get("items", {})))

    def enforced(self, strict: bool) -> Structure:
        """Return the structure whose schema the server enforces, or not. Raises `NotStrict` if it cannot be."""
        return replace(self, strict=strict, schema=strict_form(self.schema) if strict else self.schema)

    @property
    def response_format(self) -> ResponseFormat:
        """The request for models that support response formats."""
        return ResponseFormat(self.name, self.schema, strict=self.strict)

    @property
    def instructions(self) -> str:
        """The request in words, for other models."""
        return (
            "Answer with JSON only, without any other text, that follows this JSON schema:\n"
            f"{to_json(self.schema).decode()}"
        )

    @property
    def tool(self) -> ToolSpecification:
        """The request as a tool, for output mode `tool`."""
        text = "Gives the final answer. Call it once, when you know it."
        return ToolSpecification(ANSWER_TOOL, text, self.schema, strict=self.strict)

    def read(self, text: str, *, complete: bool = True) -> ParsedAnswer:
        """Return the answer in `text`, which may contain other text too. Raises `OutputParsingError`.

        `complete` is False if the text was cut off; what could go on, such as a number, is not read then.
        """
        try:
            answer = self._validate_answer(text.strip())
        except ValueError as error:
            faults = _faults_in(error)
        else:
            if not complete and self._may_go_on(text.strip()):
                raise OutputParsingError(text, [("", _CUT_OFF)])
            return answer
        blocks = list(_FENCE.finditer(text))
        if not complete and any(_is_open(each) and self._may_go_on(each[1].strip()) for each in blocks):
            raise OutputParsingError(text, [("", _CUT_OFF)])
        in_blocks = [answer for block in blocks for answer in self._readable(block[1])]
        if len(in_blocks) == 1:
            return in_blocks[0]
        embedded = self._find_embedded(text)
        if (count := max(len(in_blocks), len(embedded))) > 1:
            raise OutputParsingError(text, [("", f"expected one JSON value, got {count}")])
        for value in embedded:
            try:
                return self._validate_answer(value)
            except ValueError as error:
                faults = _faults_in(error)
        if complete and not _LOOKS_LIKE_JSON.search(text):
            for answer in self._read_list(text):
                return answer
        raise OutputParsingError(text, faults)

    def accept(self, value: Any) -> ParsedAnswer:
        """Return an answer of the program: a value, a dict to validate, or a text. Raises `OutputParsingError`."""
        if isinstance(value, str):
            return self.read(value)
        try:
            return self._answer(self.type.adapter.validate_python(value))
        except ValidationError as error:
            raise OutputParsingError(str(value), _faults_in(error)) from None

    def _answer(self, value: Any, written: str | None = None) -> ParsedAnswer:
        """Return a value with its JSON; `written` is the JSON that it was read from."""
        return ParsedAnswer(value, self.type.write(value, written))

    def _read_list(self, text: str) -> Iterator[ParsedAnswer]:
        """Yield the list in a text with one item per line, with or without bullets or numbers, if it is valid."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines or not self._wants_list or not self._has_scalar_items:
            return
        bullets = [index for index, line in enumerate(lines) if _BULLET.match(line)]
        if bullets:  # text before and after the list is ignored
            lines = lines[bullets[0] : bullets[-1] + 1]
            if len(lines) != len(bullets):
                return
        elif "string" in self._item_kinds and len(lines) < 2:
            return  # one line may be a sentence
        with suppress(ValueError):
            yield self._answer(*self.type.read(to_json([_BULLET.sub("", line) for line in lines])))

    def _readable(self, text: str) -> Iterator[ParsedAnswer]:
        """Yield the answer if the text is valid."""
        with suppress(ValueError):
            yield self._validate_answer(text.strip())

    def _find_embedded(self, text: str) -> list[str]:
        """Return the JSON objects inside a text, and the lists if a list is expected, as text.

        Returns an empty list if a value is broken or cut off, because a part of it is not what the model meant. `{}`
        between words is not a member of a union.
        """
        found: list[str] = []
        position = 0
        while (begins := _VALUE_BEGINS.search(text, position)) is not None:
            try:
                value, position = _decoder.raw_decode(text, begins.start())
            except (ValueError, RecursionError):
                return []
            if (begins.group() == "{" or self._wants_list) and (value or not self.type.has_kinds):
                found.append(text[begins.start() : position])
        return found

    def _may_go_on(self, text: str) -> bool:
        """Return True if a text may be the beginning of another answer, as `12` is one of `1234`."""
        if (values := self._fixed_values) is not None:
            begun = text.lstrip("[\"'`").casefold()
            return any(each.startswith(begun) and each != begun for each in values)
        try:
            return is_number(from_json(text, allow_inf_nan=False))
        except ValueError:  # a date, words, or JSON that is not closed
            return True

    @property
    def _fixed_values(self) -> list[str] | None:
        """The values of enums and literals, in small letters; None if other values than these and booleans fit."""
        if not self.wrapped:
            return None
        declared = self.schema["properties"]["value"]
        values: list[str] = []
        for each in (self._resolved(form) for form in declared.get("anyOf", (declared,))):
            if "enum" in each or "const" in each:
                values += (str(value).casefold() for value in each.get("enum", (each.get("const"),)))
            elif each.get("type") not in ("boolean", "null"):
                return None
        return values

    def _resolved(self, form: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema behind a reference, or the schema itself."""
        name = form.get("$ref", "").rpartition("/")[2]
        found: Mapping[str, Any] = self.schema.get("$defs", {}).get(name, {}) if name else form
        return found

    @property
    def _wants_list(self) -> bool:
        return self.wrapped and "array" in _kinds_of(self.schema["properties"]["value"])

    def _validate_answer(self, text: str) -> ParsedAnswer:
        try:
            data = from_json(text, allow_inf_nan=False)
        except ValueError:
            # In a union of object types, a JSON object with a mistake is never read as a text.
            if not self.scalar or (self.type.has_kinds and _VALUE_BEGINS.search(text)):
                raise
            return self._scalar(text)
        if self.wrapped and isinstance(data, dict) and data.keys() == {"value"}:
            return self._answer(*self.type.read(_inner_value(text, data)))
        try:
            return self._answer(*self.type.read(text))
        except ValidationError:
            if self.wrapped and not self.scalar and isinstance(data, str) and self.type.parse is not None:
                with suppress(ValueError):
                    return self._validate_answer(value_text(data))  # the whole answer is JSON text
            is_object = isinstance(data, (dict, list))
            if not (self.wrapped and self.scalar) or isinstance(data, str) or (self.type.has_kinds and is_object):
                raise
            return self._scalar(text)

    def _scalar(self, text: str) -> ParsedAnswer:
        """Validate a scalar without JSON quotes. Enums and literals may be in brackets."""
        try:
            return self._answer(self.type.adapter.validate_python(text))
        except ValidationError:
            bare = text.strip().strip("[]\"'`").strip()
            with suppress(ValueError):
                return self._answer(*self.type.read(to_json(bare)))
            raise

    @property
    def _item_kinds(self) -> set[str]:
        """The JSON types of the items of a list."""
        items = self._resolved(self.schema["properties"]["value"].get("items", {}))
        return {"enum"} if "enum" in items or "const" in items else _kinds_of(items)

    @property
    def _has_scalar_items(self) -> bool:
        return bool(self._item_kinds) and self._item_kinds <= {*_SCALARS, "enum"}


ANSWER_TOOL = "final_answer"


_decoder = JSONDecoder()


# pydantic names the function that reads a union as a step of the path.
_NO_STEP = re.compile(r"function-wrap\[[^\]]*\]\.?")


def _faults_in(error: ValueError) -> list[tuple[Path, str]]:
    if not isinstance(error, ValidationError):
        return [("", str(error))]
    return [(_NO_STEP.sub("", path).rstrip("."), message) for path, message in faults_of(error)]


def _kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows at the top level."""
    kind = schema.get("type", ())
    kinds = {kind} if isinstance(kind, str) else set(kind)
    return kinds.union(*(_kinds_of(each) for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))))


_BEGINNINGS = {
    "object": "{",
    "array": "[",
    "string": '"',
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tf",
    "null": "n",
}


def _beginnings(schema: Mapping[str, Any]) -> str:
    """Return the characters that may follow the `[` of a list with items of this schema."""
    kinds = _kinds_of(schema) or _BEGINNINGS.keys()
    return "".join(_BEGINNINGS.get(kind, "") for kind in sorted(kinds)) + "]"


def _inner_value(text: str, data: dict[str, Any]) -> str:
    """Return the JSON text of an object's only member unchanged, so that no number is rounded."""
    inner = text[text.index(":", text.index('"value"')) + 1 :].strip()
    return inner[:-1].strip() if inner.endswith("}") else inner


def _is_open(block: re.Match[str]) -> bool:
    """Return True for a fenced block without its end."""
    return block.end() == block.end(1)


def _schema_name(type_: Any) -> str:
    name = getattr(type_, "__name__", None) or str(type_)
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:64] or "answer"


def answer_text(arguments: str) -> str:
    """Return the arguments of the answer tool as the reply, repaired like those of any tool."""
    try:
        return arguments_text(arguments)
    except ValueError:
        return arguments


def correction(error: OutputParsingError) -> str:
    """Return the message for the model after an invalid reply."""
    faults = "\n".join(f"- {path}: {message}" if path else f"- {message}" for path, message in error.problems)
    return f"Your answer is not valid:\n{faults}\nAnswer again, with corrected JSON only."


# --- a list, item by item

_WRAPPER = re.compile(r'\{\s*"value"\s*:\Z')
_NEXT = re.compile(r"\s*+(\S?)")
_LOOKED_BACK = 200
"""The number of characters before a bracket that decide whether a list begins there."""
_IN_STRING, _BETWEEN = re.compile(r'["\\]'), re.compile(r'["\[\]{},]')


class ItemReader:
    """Parses a JSON list piece by piece, and yields each item as soon as it is complete."""

    def __init__(self, item_type: AnswerType, beginnings: str = '{["-0123456789]') -> None:
        """Prepare parsing. `beginnings` are the characters that may follow the `[` of a list after other text."""
        self._type, self._beginnings = item_type, beginnings
        self._all: list[str] = []
        self._open: list[str] = []  # incomplete text: the text before the list, later an item
        self._position = 0  # in the text before the list: everything before was searched
        self._at_start = True  # no text was dropped so far
        self._waits = False  # waits for the character after a bracket
        self._depth = 0
        self._in_string = self._escaped = False
        self.began = self.ended = False

    def feed(self, text: str) -> Iterable[Any]:
        """Yield the items that `text` completes. Raises `OutputParsingError` for an invalid item."""
        self._all.append(text)
        if not self.ended and (self.began or (text := self._begun(text))):
            return self._items(text)
        return ()

    def _begun(self, text: str) -> str:
        """Return the text after the beginning of the list, or "" if the list has not begun.

        A list begins at the start of the text or of a fenced block; otherwise at a bracket before an item or the end of
        the list, unless it is inside another value.
        """
        self._open.append(text)
        if "[" not in text and (not self._waits or text.isspace()):
            return ""
        text = "".join(self._open)
        self._open.clear()
        self._waits = False
        position = self._position
        while (bracket := text.find("[", position)) >= 0:
            first, inside = self._before(text, bracket)
            following = _NEXT.match(text, bracket + 1)
            if first or (following and following[1] and following[1] in self._beginnings and not inside):
                self.began = True
                return text[bracket + 1 :]
            position = bracket + 1
            if not inside and following and not following[1]:
                self._waits = True
                position = bracket
                break
        dropped = max(0, position - _LOOKED_BACK)
        self._at_start = self._at_start and dropped == 0
        self._open.append(text[dropped:])
        self._position = position - dropped
        return ""

    def _before(self, text: str, bracket: int) -> tuple[bool, bool]:
        """Return whether this bracket is the first character of the text or block, and whether it is inside a value."""
        if text.startswith("[", bracket - 1) and bracket:
            return False, True
        start = max(0, bracket - _LOOKED_BACK)
        before = text[start:bracket].rstrip()
        if before.endswith(":") and (wrapper := _WRAPPER.search(before)) is not None:
            before = before[: wrapper.start()].rstrip()
        if before[-7:].lower().endswith(("```", "```json")) or (not before and start == 0 and self._at_start):
            return True, False
        match before[-1:]:
            case ":":
                return False, before[:-1].rstrip().endswith('"')
            case ",":
                return False, before[:-1].rstrip().endswith(("}", "]"))
            case last:
                return False, last == "["

    def _items(self, text: str) -> Iterator[Any]:
        start = position = 0
        if self._escaped and text:
            position, self._escaped = 1, False
        while (found := (_IN_STRING if self._in_string else _BETWEEN).search(text, position)) is not None:
            position, character = found.end(), found.group()
            if character == "\\":
                position += 1  # skip the escaped character
                self._escaped = position > len(text)
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "[{":
                self._depth += 1
            elif self._depth == 0 and character in ",]":
                item = "".join((*self._open, text[start : position - 1])).strip()
                self._open.clear()
                start = position
                self.ended = character == "]"
                if item or not self.ended:
                    yield self._read(item)
                if self.ended:
                    return
            elif character in "]}":
                self._depth -= 1
        self._open.append(text[start:])

    def _read(self, item: str) -> Any:
        try:
            return self._type.read(item)[0]
        except ValidationError as error:
            raise OutputParsingError(item, _faults_in(error)) from None

    def finish(self) -> None:
        """Raise `OutputParsingError` if the text ended without a complete list."""
        if not self.ended:
            text = "".join(self._all)
            raise OutputParsingError(
                text, [("", "the JSON list is incomplete" if self.began else "expected a JSON list")]
            )
