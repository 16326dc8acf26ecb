"""Validates a tool call's arguments against the schema in an OpenAPI document.

The home of jsonschema, loaded when the first tool of a document is made. Not here: the arguments of Python functions,
which pydantic validates (`tools.codec`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from ..chat import ToolSpecification
from ..errors import IllegalConfigurationError, Problem
from ..validation_text import SHOWN, brief


class ArgumentsValidator:
    """Validates the arguments of calls of one tool."""

    def __init__(self, specification: ToolSpecification) -> None:
        self._specification = specification
        self._library = _library()
        self._validator: Any = None

    def faults(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the faults of these arguments, as (path, message); at most `SHOWN`.

        Raises `IllegalConfigurationError` if the schema is invalid.
        """
        if self._validator is None:
            self._validator = self._compiled()
        try:
            found = list(itertools.islice(self._validator.iter_errors(dict(arguments)), SHOWN))
        except RecursionError:
            return [("", "nested too deeply")]
        return [(brief(".".join(map(str, each.absolute_path))), brief(each.message)) for each in found]

    def _compiled(self) -> Any:
        import referencing

        jsonschema, schema = self._library, self._specification.parameters
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            what = f"invalid schema of the arguments: {brief(getattr(error, 'message', 'nested too deeply'))}"
            problem = Problem(f"tool {self._specification.name}", what, "correct the OpenAPI document")
            raise IllegalConfigurationError([problem]) from None
        # With an empty registry, the validator does not fetch references.
        return _validator_class()(schema, registry=referencing.Registry())


def _library() -> Any:
    try:
        import jsonschema  # type: ignore[import-untyped]  # it comes without type hints
    except ModuleNotFoundError as error:
        text = "tools_from_openapi needs the library jsonschema; install it: pip install 'toolbox-di[openapi]'"
        raise ModuleNotFoundError(text, name="jsonschema") from error
    return jsonschema


@functools.cache
def _validator_class() -> Callable[..., Any]:
    jsonschema = _library()

    def check_pattern(validator: Any, pattern: str, value: object, schema: Any) -> Iterator[Any]:
        if isinstance(value, str) and not _matches(pattern)(value):
            yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")

    made: Callable[..., Any] = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": check_pattern})
    return made


@functools.lru_cache(maxsize=256)
def _matches(pattern: str) -> Callable[[str], bool]:
    """Return a check with a linear-time engine: a document's pattern could block Python's engine for ever.

    Patterns that this engine does not support are left to the server.
    """
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return lambda value: True

    def check(value: str) -> bool:
        try:
            validator.validate_python(value)
        except ValidationError:
            return False
        return True

    return check
