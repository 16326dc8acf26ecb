"""Decodes the JSON arguments of a tool call.

All preparation is done when a tool is described; a call costs one validation. Not here: repairing broken JSON
(`toolbox.json_text`), filling hidden parameters (`function_calls`), the results of tools (`results`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from ..chat import ToolExecutionRequest
from ..errors import ToolArgumentsError
from ..json_text import (
    ExactNumber,
    arguments_text,
    as_wanted,
    doubled_name,
    parsed_exactly,
    read_arguments,
    value_text,
    written_exactly,
)
from ..safe_text import COUNTED, faults_of, printable
from ..schemas import schema_of
from .failures import PASSED_ON
from .specification import ToolParameter, is_field

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError


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
        self._decimals = adapter is not None and mentions(adapter.core_schema, "decimal")
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
        except PASSED_ON:
            raise
        except Exception:  # broken JSON, invalid values, and any exception of a type's own validators
            try:
                values = self._carefully(text or "")
            except PASSED_ON:
                raise
            except Exception as error:  # as above
                raise ToolArgumentsError(request, _faults(error)) from error
        for name, fresh in self._defaults:
            if values.get(name) is None:
                _set_default(values, name, fresh)
        return values

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return decoded arguments together with the function's own defaults, in the order of the parameters."""
        return {name: arguments.get(name, default) for name, default in self._shown.items()}

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
            except PASSED_ON:
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
        return with_strings_as_wanted(text, error, self._schema_with_names, parsed_leniently)

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


def decode_request(request: ToolExecutionRequest, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON arguments of a request, without validating them. Raises `ToolArgumentsError`.

    With a `schema`, strings that it does not allow are repaired as described in `as_wanted`.
    """
    try:
        return read_arguments(request.arguments or "", schema)
    except ValueError as error:
        raise ToolArgumentsError(request, _faults(error)) from error


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


def mentions(schema: Any, kind: str) -> bool:
    """Return True if a core schema contains a schema of this type."""
    if isinstance(schema, dict):
        return schema.get("type") == kind or any(mentions(each, kind) for each in schema.values())
    return isinstance(schema, (list, tuple)) and any(mentions(each, kind) for each in schema)


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


def parsed_leniently(text: str) -> Any:
    """Parse JSON text inside of a string, with the repairs of arguments. Raises `ValueError`."""
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
        if isinstance(inner, ExactNumber):
            place[step] = str(inner)
            return
        place = inner


def _faults(error: Exception) -> list[tuple[str, str]]:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return [(path, printable(message)) for path, message in faults_of(error)]
    if type(error) in (ValueError, TypeError):
        return [("", printable(str(error)))]
    return [("", printable(f"{type(error).__name__}: {error}"))]
