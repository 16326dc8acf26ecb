"""Validates the arguments of a call by the schema in the OpenAPI document, and writes them as the operation expects.

The home of jsonschema, which is loaded with the first tool. Not here: which arguments a tool has (`operation_tools`),
their schemas (`document_schemas`), encoding the request (`rest`).
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from ..chat import ToolExecutionRequest, ToolSpecification
from ..errors import IllegalConfigurationError, Problem, ToolArgumentsError
from ..json_text import compact_json
from ..rest import Body
from ..rest.annotations import Place
from ..rest.client_plans import ParameterPlan
from ..rest.encoding import DelimitedText
from ..safe_text import SHOWN, brief
from ..tools.codec import decode_request
from .document_reading import DocumentBody, DocumentParameter

_SEPARATORS = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}
"""Delimiters between the words of a list or object that is not exploded; by default a comma."""
_DELIMITERS = {"label": (".", "."), "matrix": (";", ";")}
"""The delimiters before the first and before each further part of a value."""
STYLES = {
    "path": ("simple", "label", "matrix"),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
"""The styles of the parameters in each place."""
_PLACES = {"path": Place.PATH, "query": Place.QUERY, "header": Place.HEADER, "cookie": Place.COOKIE}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of the tool: its name for the model, and how its value is sent."""

    name: str
    required: bool
    put: Callable[[Any], Any]
    parameter: ParameterPlan


def decode_arguments(
    arguments: tuple[Argument, ...], request: ToolExecutionRequest, validator: ArgumentsValidator
) -> Iterator[tuple[str, Any]]:
    """Yield the values of the request's parameters. Raises `ToolArgumentsError`."""
    given = decode_request(request, validator.specification.parameters)
    missing = [each.name for each in arguments if each.required and each.name not in given]
    if missing:
        raise ToolArgumentsError(request, [(name, "this argument is required") for name in missing])
    # Null omits an optional argument, also if its schema admits null: only inside of a body, null can be sent.
    values = {
        each.name: given[each.name]
        for each in arguments
        if each.name in given and (each.required or given[each.name] is not None)
    }
    if faults := validator.validate(values):
        raise ToolArgumentsError(request, faults)
    for each in arguments:
        try:
            yield each.name, each.put(values[each.name]) if each.name in values else None
        except ValueError as error:
            raise ToolArgumentsError(request, [(each.name, str(error))]) from error


# --- writing


def make_argument(visible: str, parameter: DocumentParameter, declared: set[str]) -> Argument:
    """Return the argument for a parameter. `declared` are the properties that an object may send in the query."""
    place = _PLACES[parameter.place]
    plan = ParameterPlan(name=visible, place=place, wire_name=parameter.name, spread=_is_spread(parameter))
    return Argument(visible, parameter.required, lambda value: _write_in_style(parameter, value, declared), plan)


def make_body_argument(visible: str, body: DocumentBody, media_type: str, declared: set[str]) -> Argument:
    """Return the argument for the body, sent as `media_type`. `declared` are the fields of a form; empty: any."""
    if media_type.startswith("application/x-www-form-urlencoded"):
        plan = ParameterPlan(name=visible, place=Place.FORM, wire_name=visible, spread=True)
        # A form without declared fields accepts any.
        return Argument(visible, body.required, lambda value: _require_declared(value, declared or set(value)), plan)
    sent_as = "application/json" if media_type == "*/*" else media_type
    plan = ParameterPlan(name=visible, place=Place.BODY, wire_name=visible, mark=Body(sent_as))
    if media_type.startswith("text/"):
        return Argument(visible, body.required, _write_word, plan)
    return Argument(visible, body.required, lambda value: compact_json(value).encode(), plan)


def choose_media_type(body: DocumentBody) -> str | None:
    """Return the media type to send: JSON is preferred to a form, and a form to text."""
    wanted = (r"application/json\b.*", r".*\+json\b.*", r"application/x-www-form-urlencoded\b.*", r"text/.*", r"\*/\*")
    for pattern in wanted:
        for media_type in body.schemas:
            if re.fullmatch(pattern, media_type):
                return media_type
    return None


def _write_in_style(parameter: DocumentParameter, value: Any, declared: set[str]) -> Any:
    """Return the value in the style of the parameter; for a parameter that `_is_spread`, the fields to send."""
    if parameter.media_type is not None:
        return compact_json(value)
    if not _is_spread(parameter):
        return _expand(parameter, value)
    if not isinstance(value, Mapping):
        return {parameter.name: value if parameter.explode else _expand(parameter, value)}
    fields = _require_declared(value, declared)
    if parameter.style == "deepObject":
        return {f"{parameter.name}[{key}]": each for key, each in fields.items()}
    return fields


def _is_spread(parameter: DocumentParameter) -> bool:
    """Return True if a value may be sent as several query parameters, or under other names."""
    spread = parameter.explode or parameter.style == "deepObject"
    return parameter.place == "query" and parameter.media_type is None and spread


def _require_declared(value: Mapping[str, Any], declared: set[str]) -> Mapping[str, Any]:
    """Return a value whose properties become parameters. Raises `ValueError` for a property of another name."""
    if unknown := [name for name in value if name not in declared]:
        raise ValueError(
            f"unknown property {brief(unknown[0], 50)!r}; expected: {', '.join(sorted(declared)) or 'none'}"
        )
    return value


def _expand(parameter: DocumentParameter, value: Any) -> DelimitedText | None:
    """Return a value as one text, expanded as RFC 6570 describes; None for an empty list or object.

    Null is omitted in lists and objects.
    """
    is_matrix, has_keys = parameter.style == "matrix", isinstance(value, Mapping)
    if has_keys and parameter.place == "cookie":
        raise ValueError("an object cannot be sent in a cookie")
    if has_keys:
        pairs = [(str(key), _write_word(each)) for key, each in value.items() if each is not None]
    else:
        listed = value if isinstance(value, list) else [value]
        pairs = [(parameter.name, _write_word(each)) for each in listed if each is not None]
    items = [(key, [word]) for key, word in pairs]
    if not parameter.explode and items:
        items = [(parameter.name, [each for pair in pairs for each in (pair if has_keys else pair[1:])])]
    first, between = _DELIMITERS.get(parameter.style, ("", ","))
    parts: list[str] = []
    for at, (key, words) in enumerate(items):
        delimiter = between if at else first
        if is_matrix or (has_keys and parameter.explode):
            parts += [delimiter, key]
            delimiter = "="
        if not (is_matrix and words == [""]):
            for word in words:
                parts += [delimiter, word]
                delimiter = _SEPARATORS.get(parameter.style, ",")
    return DelimitedText(parts) if parts else None


def _write_word(value: Any) -> str:
    return value if isinstance(value, str) else compact_json(value)


# --- validation


class ArgumentsValidator:
    """Validates the arguments of calls of one tool."""

    def __init__(self, specification: ToolSpecification) -> None:
        self.specification = specification
        self._library = _load_schema_library()
        self._validator: Any = None

    def validate(self, arguments: dict[str, Any]) -> list[tuple[str, str]]:
        """Return the faults of the arguments, as (path, message); at most `SHOWN`.

        First removes each null that the schema does not admit, at any depth: models write it for what they leave out.
        Raises `IllegalConfigurationError` if the schema is invalid.
        """
        if self._validator is None:
            self._validator = self._compile_validator()
        try:
            while True:
                found = list(itertools.islice(self._validator.iter_errors(arguments), SHOWN))
                if not (nulls := [path for each in found for path in _find_null_properties(each)]):
                    return [(brief(".".join(map(str, each.absolute_path))), brief(each.message)) for each in found]
                for *outer, name in nulls:
                    functools.reduce(operator.getitem, outer, arguments).pop(name, None)
        except RecursionError:
            return [("", "nested too deeply")]

    def _compile_validator(self) -> Any:
        import referencing

        jsonschema, schema = self._library, self.specification.parameters
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            what = f"invalid schema of the arguments: {brief(getattr(error, 'message', 'nested too deeply'))}"
            problem = Problem(f"tool {self.specification.name}", what, "correct the OpenAPI document")
            raise IllegalConfigurationError([problem]) from None
        # With an empty registry, the validator does not fetch references.
        return _make_validator_class()(schema, registry=referencing.Registry())


def _find_null_properties(error: Any) -> Iterator[list[Any]]:
    """Yield the paths of the properties that are null against their schema, also in alternatives such as `anyOf`."""
    path = list(error.absolute_path)
    if error.instance is None and path and isinstance(path[-1], str):
        yield path
    for each in error.context or ():
        yield from _find_null_properties(each)


def _load_schema_library() -> Any:
    try:
        import jsonschema  # type: ignore[import-untyped]  # it comes without type hints
    except ModuleNotFoundError as error:
        text = "tools_from_openapi needs the library jsonschema; install it: pip install 'toolbox-di[openapi]'"
        raise ModuleNotFoundError(text, name="jsonschema") from error
    return jsonschema


@functools.cache
def _make_validator_class() -> Callable[..., Any]:
    """Return a validator whose patterns are matched in linear time; jsonschema matches them with Python's engine."""
    jsonschema = _load_schema_library()
    check_without_patterns = jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"]

    def check_pattern(validator: Any, pattern: str, value: object, schema: Any) -> Iterator[Any]:
        check = _compile_pattern(pattern)
        if isinstance(value, str) and check is not None and not check(value):
            yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")

    def check_by_name(validator: Any, by_pattern: Mapping[str, Any], value: object, schema: Any) -> Iterator[Any]:
        for pattern, wanted in by_pattern.items():
            check = _compile_pattern(pattern)
            if isinstance(value, Mapping) and check is not None:
                for name in filter(check, value):
                    yield from validator.descend(value[name], wanted, path=name, schema_path=pattern)

    def check_others(validator: Any, allowed: Any, value: object, schema: Mapping[str, Any]) -> Iterator[Any]:
        if isinstance(value, Mapping):
            checks = [_compile_pattern(pattern) for pattern in schema.get("patternProperties", ())]
            named = {name for name in value if any(check is None or check(name) for check in checks)}
            others = {name: each for name, each in value.items() if name not in named}
            declared = {"properties": schema.get("properties", {})}
            yield from check_without_patterns(validator, allowed, others, declared)

    checks = {"pattern": check_pattern, "patternProperties": check_by_name, "additionalProperties": check_others}
    made: Callable[..., Any] = jsonschema.validators.extend(jsonschema.Draft202012Validator, checks)
    return made


@functools.lru_cache(maxsize=256)
def _compile_pattern(pattern: str) -> Callable[[str], bool] | None:
    """Return a check with a linear-time engine: a document's pattern could block Python's engine forever.

    Returns None for a pattern that this engine does not support: what depends on it is left to the server.
    """
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return None

    def check_text(value: str) -> bool:
        try:
            validator.validate_python(value)
        except ValidationError:
            return False
        return True

    return check_text
