"""Decodes the JSON arguments of a tool call, and encodes a tool's return value for the model.

All preparation is done when a tool is described; a call costs one validation. Not here: repairing broken JSON
(`toolbox.json_text`), filling hidden parameters (`function_calls`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, assert_never, get_args, get_origin

from pydantic_core import to_json, to_jsonable_python

from ..chat import ToolExecutionRequest, ToolExecutionResult
from ..contents import CONTENT_TYPES, AudioContent, Content, ImageContent, PdfContent, TextContent, joined_text
from ..errors import EndsInvocation, ToolArgumentsError, ToolResultError, ToolRetry
from ..execution.markers import returns_awaitable
from ..introspection import EMPTY, Unresolved, is_plain_data, unwrapped
from ..json_text import arguments_text, as_wanted, doubled_name, value_text
from ..safe_text import COUNTED, faults_of
from ..schemas import schema_of
from .specification import ToolParameter, is_field

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

# Exceptions of user code that are not converted into argument or result errors.
_PASSED_ON = (EndsInvocation, ToolRetry)

SUCCESS = "Success"
# The most frequent types of results without a special encoding.
_PLAIN = frozenset({dict, int, float, bool})


# --- arguments


class ArgumentDecoder:
    """Decodes the arguments of one tool into a dictionary with the names of the function's parameters."""

    __slots__ = ("_adapter", "_decimals", "_defaults", "_schema", "_shown", "_validator", "_validators", "_visible")

    def __init__(
        self,
        adapter: TypeAdapter[dict[str, Any]] | None,
        visible: Sequence[ToolParameter],
    ) -> None:
        """Prepare decoding."""
        self._adapter = adapter
        self._schema: Mapping[str, Any] | None = None  # made for the first call that needs a repair
        self._validator = None if adapter is None else adapter.validator
        self._decimals = adapter is not None and _mentions(adapter.core_schema, "decimal")
        self._defaults = tuple((each.name, _fresh(each)) for each in visible if each.has_default)
        self._shown = {each.name: each.default for each in visible}
        self._visible = {each.name: each for each in visible}
        self._validators: dict[str, Any] = {}

    def decode(self, request: ToolExecutionRequest) -> dict[str, Any]:
        """Return the arguments of `request`, without those that keep the function's own default.

        Raises `ToolArgumentsError` if they are invalid and cannot be repaired.
        """
        refuse_doubled_names(request)
        text = request.arguments
        try:
            if self._validator is None:
                if text != "{}":
                    arguments_text(text or "")
                return {}
            if "NaN" in text or "Infinity" in text or (self._decimals and _has_inexact(text)):
                values = self._carefully(text)
            else:
                values = self._validator.validate_json(text)
        except _PASSED_ON:
            raise
        except Exception:  # broken JSON, invalid values, and any exception of a type's own validators
            try:
                values = self._carefully(text or "")
            except _PASSED_ON:
                raise
            except Exception as error:  # as above
                raise ToolArgumentsError(request, _faults(error)) from error
        for name, fresh in self._defaults:
            if values.get(name) is None:
                _set_default(values, name, fresh)
        return values

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return decoded arguments together with the function's own defaults, in the order of the parameters."""
        return {**self._shown, **arguments}

    def validate(
        self, request: ToolExecutionRequest, values: Mapping[str, Any], kept: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Validate Python values, by the names of the parameters. Return all arguments as `decode` does.

        `kept` are decoded arguments that are used for other parameters, without validation. Without them, the other
        parameters get their defaults. Raises `ToolArgumentsError` for `request`.
        """
        decoded = dict(kept or {})
        faults: list[tuple[str, str]] = []
        for name, value in values.items():
            if (parameter := self._visible.get(name)) is None:
                faults.append((str(name), "unknown argument"))
                continue
            try:
                decoded |= self._validator_of(parameter).validate_python({parameter.shown_name: value})
            except _PASSED_ON:
                raise
            except Exception as error:  # invalid values, and any exception of a type's own validators
                faults += _faults(error)
        for name, parameter in self._visible.items():
            if name not in decoded and name not in values and not parameter.has_default:
                if parameter.admits_none:
                    decoded[name] = None
                else:
                    faults.append((name, "missing argument"))
        if faults:
            raise ToolArgumentsError(request, faults)
        for name, fresh in self._defaults:
            if decoded.get(name) is None:
                _set_default(decoded, name, fresh)
        return decoded

    def _validator_of(self, parameter: ToolParameter) -> Any:
        validator = self._validators.get(parameter.name)
        if validator is None:
            from .specification import adapter_of

            validator = self._validators[parameter.name] = adapter_of([parameter]).validator
        return validator

    def _carefully(self, text: str) -> dict[str, Any]:
        """Repair the JSON text and validate it; if it is still invalid, repair its values and validate again."""
        from pydantic import ValidationError

        text = arguments_text(text)
        failure: ValidationError | None = None
        for repaired in (self._strings_as_wanted, _numbers_as_text):
            if failure is None:
                try:
                    return self._validate_text(text)
                except ValidationError as error:
                    failure = error
            if failure.error_count() > COUNTED:
                break
            if (other := repaired(text, failure)) is not None:
                text, failure = other, None
        if failure is not None:
            raise failure
        return self._validate_text(text)

    def _strings_as_wanted(self, text: str, error: ValidationError) -> str | None:
        """Convert the strings that `error` reports to what the parameters expect; return None if nothing changes."""
        return with_strings_as_wanted(text, error, self._schema_with_names, _parsed_leniently)

    def _schema_with_names(self) -> Mapping[str, Any]:
        if self._schema is None:
            assert self._adapter is not None
            self._schema = schema_of(self._adapter, with_names=True)
        return self._schema

    def _validate_text(self, text: str) -> dict[str, Any]:
        """Validate a JSON object. Decimals get numbers exactly as written, also those that a float would round."""
        from pydantic import ValidationError

        validator: Any = self._validator
        if validator is None:
            return {}
        values: dict[str, Any]
        if self._decimals and _has_inexact(text):
            try:
                values = validator.validate_python(json.loads(text, parse_float=_exact))
                return values
            except ValidationError:
                pass
            try:  # strict models accept dates and similar types only from JSON, where decimals may be strings
                values = validator.validate_json(_STRING_OR_NUMBER.sub(_quoted_if_inexact, text))
                return values
            except ValidationError:
                pass
        try:
            values = validator.validate_json(text)
        except ValidationError as error:
            if error.error_count() > 1 or error.errors(include_url=False)[0]["type"] != "json_invalid":
                raise
            # The text is valid JSON, but pydantic's parser is stricter about depth and lone surrogates.
            values = validator.validate_python(json.loads(text))
        return values


def with_strings_as_wanted(
    text: str,
    error: ValidationError,
    schema: Callable[[], Mapping[str, Any]],
    parse: Callable[[str], Any] | None = None,
) -> str | None:
    """Return a JSON text with the strings that `error` reports converted to what the schema expects.

    `schema` returns a schema with the names of enums. See `as_wanted` for the repairs, and for `parse`. Returns None if
    nothing changes.
    """
    wrong = set[str]()
    for fault in error.errors(include_url=False):
        # pydantic reports an invalid tag at the object that contains it.
        for value in (fault["input"], fault.get("ctx", {}).get("tag")):
            if type(value) is str:
                wrong.add(value)
    if not wrong:
        return None
    try:
        written = parsed_exactly(text)
        wanted = as_wanted(written, schema(), wrong, parse)
        return None if wanted == written else written_exactly(wanted)
    except (RecursionError, ValueError):
        return None


def refuse_doubled_names(request: ToolExecutionRequest) -> None:
    """Raise `ToolArgumentsError` if an object in the arguments has two values of one name: checks could see another
    value than the tool.
    """
    if (name := doubled_name(request.arguments or "")) is not None:
        what = "this name occurs twice in one JSON object; pass it once"
        raise ToolArgumentsError(request, [(printable(name[:100]), what)])


def read_arguments(request: ToolExecutionRequest) -> dict[str, Any]:
    """Return the JSON arguments of a request, without validating them. Raises `ToolArgumentsError`."""
    try:
        arguments: dict[str, Any] = json.loads(arguments_text(request.arguments or ""))
    except (ValueError, RecursionError) as error:
        raise ToolArgumentsError(request, _faults(error)) from error
    return arguments


def with_written_arguments(request: ToolExecutionRequest, arguments: Mapping[str, Any]) -> ToolExecutionRequest:
    """Return the request with these arguments as JSON. Raises `ToolArgumentsError` if JSON cannot represent them."""
    try:
        return replace(request, arguments=to_json(dict(arguments)).decode())
    except Exception as error:  # errors of pydantic and of the values' own serializers
        raise ToolArgumentsError(request, _faults(error)) from error


def _set_default(values: dict[str, Any], name: str, fresh: Callable[[], Any] | None) -> None:
    """Set a new default, or leave the argument out, so that the function's own default applies."""
    if fresh is not None:
        values[name] = fresh()
    elif name in values:
        del values[name]


def _fresh(parameter: ToolParameter) -> Callable[[], Any] | None:
    """Return a function that copies a mutable default for each call; None if the default can be shared."""
    default = parameter.default
    if is_field(default):
        return lambda: copy.deepcopy(default.get_default(call_default_factory=True))
    try:
        if copy.deepcopy(default) is default:
            return None
    except Exception:  # a lock, a client: objects that cannot be copied are shared
        return None
    return lambda: copy.deepcopy(default)


def _mentions(schema: Any, kind: str) -> bool:
    """Return True if a core schema contains a schema of this type."""
    if isinstance(schema, dict):
        return schema.get("type") == kind or any(_mentions(each, kind) for each in schema.values())
    return isinstance(schema, (list, tuple)) and any(_mentions(each, kind) for each in schema)


# --- numbers

_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]++|\\.)*+"?|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?', re.DOTALL)


def _has_inexact(text: str) -> bool:
    return any(not each.startswith('"') and _is_inexact(each) for each in _STRING_OR_NUMBER.findall(text))


def _is_inexact(number: str) -> bool:
    """Return True if converting a number to a float changes its value or its text."""
    if number.lstrip("-").isdecimal():
        return False
    return number.endswith(".0") or repr(float(number)) != number  # 1.0 comes back as 1


def _exact(number: str) -> float | Decimal:
    return Decimal(number) if _is_inexact(number) else float(number)


def _quoted_if_inexact(found: re.Match[str]) -> str:
    piece = found.group()
    return f'"{piece}"' if not piece.startswith('"') and _is_inexact(piece) else piece


class _Number(str):
    """A number exactly as written in a JSON text."""


def parsed_exactly(text: str) -> Any:
    """Parse JSON; numbers become strings of a subclass, exactly as written. Raises `ValueError`."""
    return json.loads(text, parse_int=_Number, parse_float=_Number)


def _parsed_leniently(text: str) -> Any:
    return parsed_exactly(value_text(text))


def _numbers_as_text(text: str, error: ValidationError) -> str | None:
    """Convert numbers to strings where `error` expects a string; return None if it expects none."""
    wanted = [
        fault["loc"]
        for fault in error.errors(include_url=False, include_context=False)
        if fault["type"] == "string_type" and type(fault["input"]) in (int, float)
    ]
    if not wanted:
        return None
    arguments = parsed_exactly(text)
    for path in wanted:
        _quote(arguments, path)
    return written_exactly(arguments)


def _quote(place: Any, path: tuple[int | str, ...]) -> None:
    """Replace the number at `path` inside `place` with a string."""
    for step in path:
        try:
            inner = place[step]
        except (LookupError, TypeError):  # this step names the branch of a union
            continue
        if isinstance(inner, _Number):
            place[step] = str(inner)
            return
        place = inner


def written_exactly(value: Any) -> str:
    """Return a value of `parsed_exactly` as JSON."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written_exactly(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written_exactly, value)) + "]"
    return str(value) if isinstance(value, _Number) else json.dumps(value)


def _faults(error: Exception) -> list[tuple[str, str]]:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return [(path, printable(message)) for path, message in faults_of(error)]
    if type(error) in (ValueError, TypeError):
        return [("", printable(str(error)))]
    return [("", printable(f"{type(error).__name__}: {error}"))]


def printable(text: str) -> str:
    """Return `text` with lone surrogates escaped, because UTF-8 cannot encode them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# --- results


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
            return Encoded(value if value.isascii() else self._sendable(value, value), value)
        if value is None:
            return Encoded(self._none)
        if kind not in _PLAIN:
            if isinstance(value, ToolExecutionResult):
                return EncodedInFull.of(value)
            if hasattr(kind, "__tool_value__"):  # the result of a service provides its own value
                return self.encode(value.__tool_value__())
            if isinstance(value, str):
                return Encoded(self._sendable(str.__str__(value), value), value)
            if contents := _contents_of(value):
                return EncodedInFull(joined_text(contents), value, contents=contents)
        return Encoded(self._json(value), value)

    def _sendable(self, text: str, value: Any) -> str:
        """Return the text. Raises `ToolResultError` if UTF-8 cannot encode it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ToolResultError(self._tool, type(value).__name__, str(error)) from error
        return text

    def _json(self, value: Any) -> str:
        if self._serializer is not None:
            try:
                encoded: bytes = self._serializer.to_json(
                    value, warnings=False, by_alias=True, polymorphic_serialization=True
                )
                return encoded.decode()
            except _PASSED_ON:
                raise
            except Exception:
                pass
        try:
            return to_json(value, inf_nan_mode="null").decode()
        except _PASSED_ON:
            raise
        except Exception as error:  # errors of pydantic and of the value's own serializers
            _raise_passed_on(value)
            reason = str(error).split("\n", 1)[0]
            raise ToolResultError(self._tool, type(value).__name__, printable(reason)) from error


def _raise_passed_on(value: Any) -> None:
    """Raise the `ToolAbort` or `ToolRetry` of a value's serializer: the JSON error contains only its text."""
    try:
        to_jsonable_python(value)
    except Exception as error:
        below: BaseException | None = error
        while below is not None:
            if isinstance(below, _PASSED_ON):
                raise below from None
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
