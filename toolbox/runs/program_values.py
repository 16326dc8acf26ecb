"""The values of a program that a run keeps as JSON: by their types; its seeds and attributes.

Nothing is pickled. A value that no longer fits its type raises `RunIncompatibleError`. Not here: which values a body
has (`service_calls`), messages (`transcripts`), who asked and who answers (`persons`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from typing import Annotated, Any, get_args

from pydantic import PlainSerializer, PlainValidator, Secret, SecretBytes, SecretStr, ValidationError
from pydantic_core import to_jsonable_python

from ..chat import Message
from ..contents import CONTENT_TYPES
from ..context import ActiveScope
from ..errors import IllegalConfigurationError, Problem, RunIncompatibleError, ScopeNotActiveError
from ..introspection import type_name, with_types
from ..json_text import whole_json, written_by
from ..safe_text import faults_of, faults_text
from ..services.stored_forms import adapter_of
from ..tools.results import json_values
from ..transcripts import content_from_dict, content_to_dict, message_from_dict, message_to_dict
from .documents import RunDocument


def qualified(cls: type[Any]) -> str:
    """Return the qualified name of a class: `module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _stored_as(kind: type[Any], write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Any:
    """Return the annotation of a class that these functions write and read."""

    def read_kind(written: Any) -> Any:
        value = read(written)
        if not isinstance(value, kind):
            raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return Annotated[kind, PlainValidator(read_kind), PlainSerializer(write)]


# As in conversations: pydantic would write bytes as text, and read base64 text as bytes.
_FORMS: Mapping[Any, Any] = {
    **{each: _stored_as(each, message_to_dict, message_from_dict) for each in get_args(Message)},
    **{each: _stored_as(each, content_to_dict, content_from_dict) for each in CONTENT_TYPES},
}


def write_and_read(annotation: Any, value: Any) -> tuple[Any, Any]:
    """Return the JSON form of a value, and the value that is read from it."""
    adapter = adapter_of(with_types(annotation, _FORMS))
    text = written_by(adapter.serializer, value, by_alias=True, warnings="error")
    again = adapter.validate_json(text)
    _refuse_secret(value, text)
    return json.loads(text), again


def _refuse_secret(value: Any, text: bytes) -> None:
    """Raise `ValueError` for a `SecretStr` and the like in a value: pydantic writes stars, and the value is lost."""
    if b"*" * 10 not in text:
        return
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        here = todo.pop()
        if isinstance(here, (SecretStr, SecretBytes, Secret)):
            raise ValueError(f"it contains a {type(here).__name__}, which pydantic writes without its value")
        if id(here) in seen or isinstance(here, (str, bytes, int, float)):
            continue
        seen.add(id(here))
        if isinstance(here, Mapping):
            todo += [*here, *here.values()]
        elif isinstance(here, Iterable) and isinstance(here, Sized):
            todo += here
        names = (*getattr(here, "__dict__", ()), *getattr(type(here), "__slots__", ()))
        todo += [getattr(here, name, None) for name in names]


def read_as(annotation: Any, written: Any) -> Any:
    """Return the value that `write_and_read` wrote. Raises `ValidationError`, and what the type's validators raise."""
    text = whole_json(written)
    try:
        return adapter_of(with_types(annotation, _FORMS)).validate_json(text)
    except ValidationError as error:
        with suppress(ValidationError):  # an earlier version has written a message or a part of one
            return adapter_of(annotation).validate_json(text)
        raise error


def json_value(value: Any) -> Any:
    """Return a value as JSON values. Raises whatever the value's serializers raise."""
    return json.loads(json.dumps(json_values(value)))


def writable_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that have a JSON form, and leave out the others."""
    written = {}
    for name, value in dict(values).items():
        with suppress(Exception):  # any exception of the value's own serializers
            written[str(name)] = json_value(value)
    return written


def reason_of(error: Exception) -> str:
    """Return pydantic's faults in one line."""
    if isinstance(error, ValidationError):
        return faults_text(faults_of(error))
    return str(error).split("\n", 1)[0]


# --- seeds and attributes


async def write_seeds(scope: ActiveScope, types: Iterable[Any], where: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return the kept seeds of the active request scope as JSON by name, and by type as they are read again.

    Raises `IllegalConfigurationError` for a seed that cannot be written.
    """
    written, seeds = {}, {}
    for each in types:
        try:
            value = await scope.find(each)
        except ScopeNotActiveError:
            continue
        if value is None:
            continue
        try:
            written[qualified(each)], seeds[each] = write_and_read(each, value)
        except Exception as error:  # pydantic and serializers raise many kinds of exceptions
            fact = f"the seed {type_name(each)} cannot be stored with the run: {reason_of(error)}"
            fix = "let the seed contain only values that pydantic can write and read"
            raise IllegalConfigurationError([Problem(where, fact, fix)]) from error
    return written, seeds


def read_seeds(run_id: str, types: Iterable[Any], document: RunDocument) -> dict[Any, Any]:
    """Return the seeds of a run. Raises `RunIncompatibleError`."""
    by_name = {qualified(each): each for each in types}
    seeds: dict[Any, Any] = {}
    for name, written in document.seeds.items():
        if name not in by_name:
            raise RunIncompatibleError(run_id, f"it has the seed {name}, which is not in run_seeds= any more")
        try:
            seeds[by_name[name]] = read_as(by_name[name], written)
        except Exception as error:  # as above
            raise RunIncompatibleError(run_id, f"the seed {name} is no longer valid: {reason_of(error)}") from error
    return seeds


def write_attributes(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the attributes of an invocation as JSON values. Raises `IllegalConfigurationError`, naming the key."""
    written = {}
    for name, value in attributes.items():
        try:
            text = json.dumps(to_jsonable_python(value))
            _refuse_secret(value, text.encode())
            written[name] = json.loads(text)
        except Exception as error:  # any exception of the value's own serializers
            fact = f"the attribute {name!r} is a {type(value).__name__}, which cannot be stored with the run"
            fix = "use a value that pydantic can write as JSON in invocation_attributes(…)"
            raise IllegalConfigurationError([Problem(where, fact, fix)]) from error
    return written
