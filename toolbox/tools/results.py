"""The results of tools: encodes a tool's return value for the model, and cuts long results.

All preparation is done when a tool is described. Not here: the arguments of a call (`codec`), the result of a failed
call (`pipeline`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any, assert_never, get_args, get_origin

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from ..chat import ToolExecutionResult
from ..contents import CONTENT_TYPES, AudioContent, Content, ImageContent, PdfContent, TextContent, joined_text
from ..errors import ToolResultError
from ..execution.markers import returns_awaitable
from ..introspection import EMPTY, Unresolved, is_plain_data, unwrapped
from ..json_text import is_half_a_character, whole_characters, whole_json, written_by
from ..safe_text import printable
from .failures import PASSED_ON

SUCCESS = "Success"
# The most frequent types of results without a special encoding.
_PLAIN = frozenset({dict, int, float, bool})


class Encoded:
    """A tool's result as text for the model, before it is cut, and the value."""

    __slots__ = ("text", "value")
    is_error = False
    failed = False  # True if the tool failed, for compensation
    contents: Sequence[Content] = ()
    attributes: Mapping[str, Any] | None = None

    def __init__(self, text: str, value: object = None) -> None:
        self.text, self.value = text, value

    def as_result(self) -> ToolExecutionResult:
        """Return it as a public `ToolExecutionResult`."""
        return ToolExecutionResult(self.text, self.value)


class EncodedInFull(Encoded):
    """A result with more than text and value: an error flag, contents, attributes."""

    __slots__ = ("attributes", "contents", "failed", "is_error")

    def __init__(
        self,
        text: str,
        value: object = None,
        *,
        is_error: bool = False,
        contents: Sequence[Content] = (),
        attributes: Mapping[str, Any] | None = None,
        failed: bool = False,
    ) -> None:
        super().__init__(text, value)
        self.is_error, self.contents, self.attributes, self.failed = is_error, contents, attributes, failed

    def as_result(self) -> ToolExecutionResult:
        return ToolExecutionResult(self.text, self.value, self.is_error, self.attributes or {}, self.contents)

    @classmethod
    def of(cls, result: ToolExecutionResult) -> Encoded:
        """Convert a `ToolExecutionResult` that a tool, an executor or a handler returned."""
        return cls(
            result.text,
            None if result.is_error else result.result_object,
            is_error=result.is_error,
            contents=result.contents,
            attributes=result.attributes,
        )


class ResultEncoder:
    """Encodes the return values of one tool."""

    __slots__ = ("_none", "_serializer", "_tool")

    def __init__(self, tool: str, returns: Any = EMPTY) -> None:
        """Prepare encoding. `returns` is the resolved annotation, `EMPTY` or `Unresolved`."""
        self._tool = tool
        bare = unwrapped(awaited(returns)).type
        self._none = SUCCESS if bare in (None, type(None), EMPTY) else "null"
        self._serializer = _serializer_for(awaited(returns))

    def encode(self, value: Any) -> Encoded:
        """Encode a value for the model. A `ToolExecutionResult` is kept as it is. Raises `ToolResultError`."""
        kind = type(value)
        if kind is str:
            return Encoded(whole_characters(value), value)
        if value is None:
            return Encoded(self._none)
        if kind not in _PLAIN:
            if isinstance(value, ToolExecutionResult):
                return EncodedInFull.of(value)
            if hasattr(kind, "__tool_value__"):  # the result of a service provides its own value
                return self.encode(value.__tool_value__())
            if isinstance(value, str):
                return Encoded(whole_characters(str.__str__(value)), value)
            if contents := _contents_of(value):
                return EncodedInFull(joined_text(contents), value, contents=contents)
        return Encoded(self._json(value), value)

    def _json(self, value: Any) -> str:
        options: Any = {"warnings": False, "by_alias": True, "polymorphic_serialization": True}
        serializer = self._serializer
        if serializer is not None:
            try:
                encoded = written_by(serializer, value, **options)
                if _MAY_BE_NO_NUMBER.search(encoded):
                    return whole_json(_with_named_numbers(serializer.to_python(value, mode="json", **options)))
                return encoded.decode()
            except PASSED_ON:
                raise
            except Exception:
                pass
        try:
            return _write_json(value)
        except PASSED_ON:
            raise
        except Exception as error:  # errors of pydantic and of the value's own serializers
            _raise_passed_on(value)
            reason = str(error).split("\n", 1)[0]
            raise ToolResultError(self._tool, type(value).__name__, printable(reason)) from error


def _write_json(value: Any) -> str:
    try:
        encoded = to_json(value, inf_nan_mode="null")
    except PydanticSerializationError as error:
        if not is_half_a_character(error):
            raise
        return whole_json(_with_named_numbers(json.loads(whole_json(value))))
    if not _MAY_BE_NO_NUMBER.search(encoded):
        return encoded.decode()
    written = json_values(value)
    return written if isinstance(value, float) else whole_json(written)


_MAY_BE_NO_NUMBER = re.compile(rb"null|NaN|Infinity")
"""What NaN and infinity can be in the JSON of a value: pydantic's models decide it themselves."""


def json_values(value: Any) -> Any:
    """Return a value as JSON values. NaN and infinity become texts, because JSON has no such numbers.

    Raises whatever the value's serializers raise.
    """
    return _with_named_numbers(to_jsonable_python(value, by_alias=True))


def _with_named_numbers(written: Any) -> Any:
    if isinstance(written, float):
        if isfinite(written):
            return written
        return "NaN" if isnan(written) else "Infinity" if written > 0 else "-Infinity"
    if isinstance(written, dict):
        return {name: _with_named_numbers(each) for name, each in written.items()}
    return [_with_named_numbers(each) for each in written] if isinstance(written, list) else written


def _raise_passed_on(value: Any) -> None:
    """Raise the `ToolAbort` or `ToolRetry` of a value's serializer: the JSON error contains only its text."""
    try:
        to_jsonable_python(value)
    except Exception as error:
        below: BaseException | None = error
        seen = set[int]()  # an error may be its own cause
        while below is not None and id(below) not in seen:
            if isinstance(below, PASSED_ON):
                raise below from None
            seen.add(id(below))
            below = below.__cause__ or below.__context__


def cut(text: str, contents: tuple[Content, ...], limit: int) -> tuple[str, tuple[Content, ...]]:
    """Cut the text, and the texts in `contents`, after `limit` characters, and add a note for the model."""
    if len(text) <= limit:
        return text, contents
    note = f"\n[cut here: {limit} of {len(text)} characters are shown]"
    kept: list[Content] = []
    left = limit
    for each in contents:
        match each:
            case TextContent(part):
                if left > 0:
                    kept.append(TextContent(part[:left]))
                    left -= len(part) + 1
            case ImageContent() | PdfContent() | AudioContent():
                kept.append(each)
            case _:
                assert_never(each)
    if kept:
        kept.append(TextContent(note.strip()))
    return text[:limit] + note, tuple(kept)


def _contents_of(value: Any) -> tuple[Content, ...]:
    if isinstance(value, CONTENT_TYPES):
        return (value,)
    if isinstance(value, (list, tuple)) and any(isinstance(each, CONTENT_TYPES) for each in value):
        parts = tuple(TextContent(each) if isinstance(each, str) else each for each in value)
        if all(isinstance(each, CONTENT_TYPES) for each in parts):
            return parts
    return ()


def awaited(returns: Any) -> Any:
    """Return `T` for `Awaitable[T]`, `Coroutine[…, T]` and similar types; other annotations unchanged."""
    if isinstance(returns, Unresolved) or not returns_awaitable(returns):
        return returns
    arguments = get_args(returns) if get_origin(returns) is not None else ()
    return arguments[-1] if arguments else Any


def _serializer_for(returns: Any) -> Any:
    """Return the serializer of a type that defines its own serialization; None for all other types."""
    if returns in (EMPTY, Any) or isinstance(returns, Unresolved) or is_plain_data(returns):
        return None
    from pydantic import TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(returns)
        return adapter.serializer if _has_serialization(adapter.core_schema) else None
    except Exception:  # pydantic does not support the type, but it may support the values
        return None


def _has_serialization(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "serialization" in schema or any(_has_serialization(each) for each in schema.values())
    return isinstance(schema, (list, tuple)) and any(_has_serialization(each) for each in schema)
