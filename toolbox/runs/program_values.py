"""The values of a program that a run keeps as JSON: arguments and results of its method, seeds, attributes.

Nothing is pickled. A value that no longer fits its type raises `RunIncompatibleError`. Not here: messages
(`transcripts`), who asked and who answers (`persons`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, get_args

from pydantic import PlainSerializer, PlainValidator, Secret, SecretBytes, SecretStr, ValidationError
from pydantic_core import to_jsonable_python

from ..chat import AiMessage, FinishReason, Message
from ..contents import CONTENT_TYPES
from ..context import ActiveScope
from ..errors import IllegalConfigurationError, Problem, RunIncompatibleError, ScopeNotActiveError
from ..introspection import type_name, with_types
from ..json_text import whole_json, written_by
from ..safe_text import faults_of, faults_text
from ..services.answers import restored_result
from ..services.outputs import Kind, Result, Shape
from ..services.plans import MethodPlan
from ..services.state import State
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


def _read_as(annotation: Any, written: Any) -> Any:
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


# --- arguments of the method


def write_arguments(plan: MethodPlan, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments as JSON values, and as they are read again; without those that pydantic cannot write."""
    written, read_again = {}, {}
    for name, value in arguments.items():
        with suppress(Exception):  # pydantic and serializers raise many kinds of exceptions
            written[name], read_again[name] = write_and_read(plan.annotations.get(name, Any), value)
    return written, read_again


def refuse_other_type(plan: MethodPlan, name: str, value: Any) -> None:
    """Raise `TypeError` if an argument is not of the type that the method declares."""
    annotation = plan.annotations.get(name, Any)
    try:
        is_of_type = type(adapter_of(annotation).validate_python(value, strict=True)) is type(value)
    except ValidationError:
        is_of_type = False
    except Exception:  # a type that pydantic does not know, or a validator that fails
        return
    if not is_of_type:
        raise TypeError(f"{plan.where}(): {name} must be {type_name(annotation)}, got {type(value).__name__}")


def read_arguments(run_id: str, plan: MethodPlan, document: RunDocument) -> dict[str, Any]:
    """Return the arguments of the method; None for those that were not stored. Raises `RunIncompatibleError`."""
    arguments: dict[str, Any] = {}
    stored = {*document.arguments, *document.unwritten, *document.dropped}
    parameters = plan.signature.parameters
    if gone := sorted(stored - {*parameters}):
        raise RunIncompatibleError(run_id, f"{plan.where} has no parameter {gone[0]!r} any more")
    for name, parameter in parameters.items():
        if name in document.unwritten or name in document.dropped:
            arguments[name] = None
        elif name in document.arguments:
            try:
                arguments[name] = _read_as(plan.annotations.get(name, Any), document.arguments[name])
            except Exception as error:  # as above
                reason = f"the argument {name!r} of {plan.where} is no longer valid: {reason_of(error)}"
                raise RunIncompatibleError(run_id, reason) from error
        elif parameter.default is parameter.empty:
            raise RunIncompatibleError(run_id, f"{plan.where} has the new parameter {name!r}")
        else:
            arguments[name] = parameter.default
    return arguments


# --- results of the method


def output_fingerprint(plan: MethodPlan) -> str:
    """Return a text that changes with the method's return type."""
    output = plan.output
    text: str = output.kind.value
    if output.kind is Kind.STRUCTURED:
        text += json.dumps(adapter_of(output.type).json_schema(), sort_keys=True)
    is_list = output.shape is Shape.ITEM_STREAM
    return hashlib.sha256(f"{text}{is_list}".encode()).hexdigest()[:16]


def write_value(plan: MethodPlan, value: Any) -> Any:
    """Return the JSON form of the method's value: a list with it, or an empty one for None."""
    if value is None:
        return []
    if isinstance(value, AiMessage):
        return [message_to_dict(value)]
    written = _value_adapter(plan).dump_python(value, mode="json", by_alias=True)
    return [json.loads(whole_json(json_values(written)))]


def read_value(plan: MethodPlan, written: Any) -> Any:
    """Return the value that `write_value` wrote."""
    if not written:
        return None
    if plan.output.kind is Kind.MESSAGE:
        return message_from_dict(written[0])
    return _value_adapter(plan).validate_json(whole_json(written[0]))


def _value_adapter(plan: MethodPlan) -> Any:
    """Return the adapter of the method's value, which writes and reads the kinds of unions."""
    structure = plan.output.structure
    return adapter_of(str) if structure is None else structure.type.adapter


def write_details(result: Result[Any]) -> dict[str, Any]:
    """Return what a `Result` has besides its content, as JSON values."""
    state = State(
        None,
        (),
        tuple(result.messages),
        executions=tuple(result.tool_executions),
        token_usage=result.token_usage,
        compensations=tuple(result.compensations),
        passages=tuple(result.sources),
    )
    facts = {
        "finish_reason": result.finish_reason,
        "response_id": result.response_id,
        "stopped_by": result.stopped_by,
        "answered_by": result.answered_by,
    }
    return {"state": state.to_dict(), **facts}


def read_details(plan: MethodPlan, content: Any, written: Mapping[str, Any] | None) -> Result[Any]:
    """Return the `Result` with this content and the details that `write_details` wrote."""
    if written is None:
        return Result(content)
    reason = written["finish_reason"]
    state = with_restored_results(plan, State.from_dict(written["state"]))
    result = state.result(content, None if reason is None else FinishReason(reason), written.get("answered_by"))
    return replace(result, response_id=written.get("response_id"), stopped_by=written.get("stopped_by"))


def with_restored_results(plan: MethodPlan, state: State) -> State:
    """Return a state that was stored, with the results of tools in their types."""

    def read_result(name: str, value: Any) -> Any:
        found = (each.toolset.stored(name) for each in (plan, *plan.team.values()))
        tool = next((each for each in found if each is not None), None)
        return value if tool is None else restored_result(tool.returns, value)

    return state.with_results(read_result)


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
            seeds[by_name[name]] = _read_as(by_name[name], written)
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
