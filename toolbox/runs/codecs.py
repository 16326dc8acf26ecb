"""The values of a program in a stored run: arguments, seeds, the identity, attributes and results, as JSON values.

A value that no longer fits raises `RunIncompatibleError`. Not here: the documents that contain them (`documents`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sized
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from ..chat import AiMessage
from ..context import ActiveScope
from ..errors import (
    IllegalConfigurationError,
    MissingBeanError,
    Problem,
    RunAnswerError,
    RunIncompatibleError,
    ScopeNotActiveError,
)
from ..services.outputs import Kind, Shape
from ..transcripts import message_from_dict, message_to_dict
from ..type_keys import type_name
from .documents import RunDocument

if TYPE_CHECKING:
    from ..services.plans import MethodPlan


def qualified(cls: type[Any]) -> str:
    """Return the qualified name of a class: `module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def adapter_of(annotation: Any) -> Any:
    """Return pydantic's adapter for a type. Raises whatever pydantic raises for types that it does not know."""
    try:
        return _adapter(annotation)
    except TypeError:  # an annotation that cannot be hashed
        return _adapter.__wrapped__(annotation)


def _written(annotation: Any, value: Any) -> Any:
    """Return the JSON form of a value, after checking that it can be read again."""
    adapter = adapter_of(annotation)
    text = adapter.dump_json(value, by_alias=True, warnings="error")
    adapter.validate_json(text)
    _refuse_secret(value, text)
    return json.loads(text)


def _refuse_secret(value: Any, text: bytes) -> None:
    """Raise `ValueError` for a `SecretStr` and the like in a value: pydantic writes stars, and the value is lost."""
    from pydantic import Secret, SecretBytes, SecretStr

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


def _read(annotation: Any, written: Any) -> Any:
    return adapter_of(annotation).validate_json(json.dumps(written))


def json_value(value: Any) -> Any:
    """Return a value as JSON values. Raises whatever the value's serializers raise."""
    from pydantic_core import to_jsonable_python

    return json.loads(json.dumps(to_jsonable_python(value, by_alias=True)))


def reason_of(error: Exception) -> str:
    """Return pydantic's faults in one line."""
    from pydantic import ValidationError

    from ..validation_text import faults_of

    if isinstance(error, ValidationError):
        return "; ".join(f"{path}: {message}" if path else message for path, message in faults_of(error))
    return str(error).split("\n", 1)[0]


# --- arguments of the method


def write_arguments(plan: MethodPlan, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments as JSON values, and the names of those that pydantic cannot write."""
    written: dict[str, Any] = {}
    unwritten: list[str] = []
    for name, value in arguments.items():
        try:
            written[name] = _written(plan.annotations.get(name, Any), value)
        except Exception:  # pydantic and serializers raise many kinds of exceptions
            unwritten.append(name)
    return written, tuple(unwritten)


def read_arguments(run_id: str, plan: MethodPlan, document: RunDocument) -> dict[str, Any]:
    """Return the arguments of the method; None for those that were not written. Raises `RunIncompatibleError`."""
    arguments: dict[str, Any] = {}
    stored = {*document.arguments, *document.unwritten}
    parameters = plan.signature.parameters
    if gone := sorted(stored - {*parameters}):
        raise RunIncompatibleError(run_id, f"{plan.where} has no parameter {gone[0]!r} any more")
    for name, parameter in parameters.items():
        if name in document.unwritten:
            arguments[name] = None
        elif name in document.arguments:
            try:
                arguments[name] = _read(plan.annotations.get(name, Any), document.arguments[name])
            except Exception as error:  # as above
                reason = f"the argument {name!r} of {plan.where} is no longer valid: {reason_of(error)}"
                raise RunIncompatibleError(run_id, reason) from error
        elif parameter.default is parameter.empty:
            raise RunIncompatibleError(run_id, f"{plan.where} has the new parameter {name!r}")
        else:
            arguments[name] = parameter.default
    return arguments


def output_fingerprint(plan: MethodPlan) -> str:
    """Return a text that changes with the method's return type."""
    output = plan.output
    text: str = output.kind.value
    if output.kind is Kind.STRUCTURED:
        text += json.dumps(adapter_of(output.type).json_schema(), sort_keys=True)
    is_list = output.shape is Shape.ITEM_STREAM
    return hashlib.sha256(f"{text}{is_list}".encode()).hexdigest()[:16]


# --- results


def write_value(plan: MethodPlan, value: Any) -> Any:
    """Return the JSON form of the method's value: a list with it, or an empty one for None."""
    if value is None:
        return []
    if isinstance(value, AiMessage):
        return [message_to_dict(value)]
    return [json.loads(adapter_of(_value_type(plan)).dump_json(value, by_alias=True))]


def read_value(plan: MethodPlan, written: Any) -> Any:
    """Return the value that `write_value` wrote."""
    if not written:
        return None
    if plan.output.kind is Kind.MESSAGE:
        return message_from_dict(written[0])
    return _read(_value_type(plan), written[0])


def _value_type(plan: MethodPlan) -> Any:
    output = plan.output
    if output.kind is not Kind.STRUCTURED:
        return str
    return list[output.type] if output.shape is Shape.ITEM_STREAM else output.type  # type: ignore[name-defined]  # a type at run time


# --- seeds and attributes


async def write_seeds(scope: ActiveScope, types: Iterable[Any], where: str) -> dict[str, Any]:
    """Return the kept seeds of the active request scope. Raises `IllegalConfigurationError` for an unwritable one."""
    seeds = {}
    for each in types:
        try:
            value = await scope.aget(each)
        except (MissingBeanError, ScopeNotActiveError):
            continue
        if value is None:
            continue
        try:
            seeds[qualified(each)] = _written(each, value)
        except Exception as error:  # pydantic and serializers raise many kinds of exceptions
            fact = f"the seed {type_name(each)} cannot be stored with the run: {reason_of(error)}"
            fix = "let the seed contain only values that pydantic can write and read"
            raise IllegalConfigurationError([Problem(where, fact, fix)]) from error
    return seeds


def read_seeds(run_id: str, types: Iterable[Any], document: RunDocument) -> dict[Any, Any]:
    """Return the seeds of a run. Raises `RunIncompatibleError`."""
    by_name = {qualified(each): each for each in types}
    seeds: dict[Any, Any] = {}
    for name, written in document.seeds.items():
        if name not in by_name:
            raise RunIncompatibleError(run_id, f"it has the seed {name}, which is not in run_seeds= any more")
        try:
            seeds[by_name[name]] = _read(by_name[name], written)
        except Exception as error:  # as above
            raise RunIncompatibleError(run_id, f"the seed {name} is no longer valid: {reason_of(error)}") from error
    return seeds


def write_attributes(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the attributes of an invocation as JSON values. Raises `IllegalConfigurationError`, naming the key."""
    from pydantic_core import to_jsonable_python

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


# --- identities


async def current_identity(scope: ActiveScope) -> Any:
    """Return the identity of the active scope; the anonymous one without any."""
    from ..security import identity_in

    return await identity_in(scope)


def write_identity(identity: Any) -> dict[str, Any] | None:
    """Return an identity as JSON values; None for an anonymous one."""
    if identity is None or identity.is_anonymous:
        return None
    return {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "attributes": write_attributes(identity.attributes, "SecurityIdentity.attributes"),
    }


def read_identity(written: Mapping[str, Any] | None) -> Any:
    """Return the identity that `write_identity` wrote."""
    from ..security import SecurityIdentity

    if written is None:
        return SecurityIdentity.anonymous()
    return SecurityIdentity(written["name"], frozenset(written["roles"]), written["attributes"])


def write_person(run_id: str, by: Any) -> Any:
    """Return the JSON form of the person who answers: a name, an identity, or None. Raises `RunAnswerError`."""
    if by is None or isinstance(by, str):
        return by
    if not hasattr(by, "is_anonymous"):
        raise RunAnswerError(run_id, f"by= must be a str or a SecurityIdentity, got {type(by).__name__}")
    if by.is_anonymous:
        return None
    return {"name": by.name, "roles": sorted(by.roles), "attributes": writable(by.attributes)}


def writable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that have a JSON form, and leave out the others."""
    written = {}
    for name, value in dict(values).items():
        with suppress(Exception):  # any exception of the value's own serializers
            written[str(name)] = json_value(value)
    return written


def read_person(written: Any) -> Any:
    """Return the person that `write_person` wrote."""
    return read_identity(written) if isinstance(written, dict) else written


def person_name(by: Any) -> str | None:
    """Return the name of a person for the history."""
    if by is None or isinstance(by, str):
        return by
    return str(by.name) or None
