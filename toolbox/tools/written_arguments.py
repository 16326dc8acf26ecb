"""Reads arguments of a call that were written as JSON before: by a person who approves it, or in the record of a run.

A validator may change a value each time it sees it: it makes cents of euros, and then cents of cents. So what is
written as before keeps its value and is not validated again, and everything else must be written as before afterwards.
Not here: the arguments that a model writes (`codec`), writing those of a call (`tool_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, Optional

from ..chat import ToolExecutionRequest
from ..errors import ToolArgumentsError
from ..introspection import unwrapped
from .codec import ArgumentDecoder, mentions
from .specification import ToolParameter, adapter_of
from .tool_calls import Tool, ToolCall, json_of

_OTHER_VALUE = "the tool would get another value than the one that was sent"
_UNREADABLE = "the recorded value cannot be read back"
_MISSING = object()
_PLAIN = frozenset(
    {
        *("bool", "date", "datetime", "decimal", "enum", "float", "int", "literal", "none", "str", "time", "timedelta"),
        *("uuid", "dict", "frozenset", "list", "nullable", "set", "tuple", "union"),
    }
)
"""The kinds of schemas in which pydantic only converts values."""
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def change_arguments(
    tool: Tool,
    request: ToolExecutionRequest,
    arguments: Mapping[str, Any],
    shown: Mapping[str, Any],
    sent: Mapping[str, Any],
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the arguments of a call with what a person has changed, and the names of the changed parameters.

    `shown` are the arguments as JSON, `sent` those that the person sent. An argument that is sent as it was shown keeps
    its value, and one that is left out gets its default. Raises `ToolArgumentsError` for unknown names, for invalid
    values, and for values that the tool would not get as they were sent.
    """
    kept = {name for name, value in sent.items() if name in shown and _is_written_alike(shown[name], value)}
    if tool.decode is None:  # an executor written by hand: only it knows which values are valid
        changed = {name: shown[name] if name in kept else value for name, value in sent.items()}
        return changed, frozenset({*shown, *sent} - kept)
    parameters = {each.shown_name: each for each in tool.visible}
    faults = [(name, "unknown argument") for name in sent if name not in parameters]
    others = [each for name, each in parameters.items() if name not in kept]
    found = dict(arguments)
    for each in others:
        found.pop(each.name, None)
        try:
            found |= _read(request, each, sent)
        except ToolArgumentsError as error:
            faults += error.problems
        else:
            faults += _find_other_values(request, each, sent, found)
    if faults:
        raise ToolArgumentsError(request, faults)
    return found, frozenset(each.name for each in others)


def with_recorded_arguments(call: ToolCall, recorded: Mapping[str, Any], *known: ToolCall) -> ToolCall:
    """Return the call with the arguments that its tool ran with, from a record.

    An argument that is recorded as the call, or a `known` one, has it keeps that value; one without a record stays as
    it is. Raises `ToolArgumentsError` if this program cannot read a value as it is recorded.
    """
    if call.tool.decode is None:
        return call.with_arguments(dict(recorded)) if recorded else call
    arguments = dict(call.arguments or {})
    sources = [(each.arguments or {}, each.written_arguments()) for each in (call, *known)]
    for each in call.tool.visible:
        name = each.shown_name
        if name not in recorded:
            continue
        arguments.pop(each.name, None)
        source = next(
            (values for values, written in sources if name in written and written[name] == recorded[name]), None
        )
        if source is None:
            arguments |= _read_recorded(call.request, each, recorded)
        elif each.name in source:
            arguments[each.name] = source[each.name]
    return call.with_arguments(arguments)


def _read(request: ToolExecutionRequest, parameter: ToolParameter, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument as the tool gets it, or its default if it is not written. Raises `ToolArgumentsError`."""
    name = parameter.shown_name
    text = json.dumps({name: written[name]} if name in written else {})
    return ArgumentDecoder(adapter_of([parameter]), [parameter]).decode(replace(request, arguments=text))


def _read_recorded(
    request: ToolExecutionRequest, parameter: ToolParameter, recorded: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the argument that is recorded; without the validators of the parameter, if they would change it again."""
    for each in (parameter, _without_validators(parameter)):
        try:
            read = _read(request, each, recorded)
        except ToolArgumentsError:
            continue
        if not [*_find_other_values(request, parameter, recorded, read)]:
            return read
    raise ToolArgumentsError(request, [(parameter.shown_name, _UNREADABLE)])


def _without_validators(parameter: ToolParameter) -> ToolParameter:
    bare = unwrapped(parameter.annotation)
    return replace(parameter, annotation=Optional[bare.type] if bare.optional else bare.type)  # noqa: UP045 - a value


# --- comparing JSON


def _find_other_values(
    request: ToolExecutionRequest, parameter: ToolParameter, sent: Mapping[str, Any], read: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the places in an argument where the tool would get another value than the one that was sent."""
    name = parameter.shown_name
    if name not in sent or (sent[name] is None and not parameter.admits_none):  # null asks for the default
        return
    schema = adapter_of([parameter]).core_schema
    is_set = mentions(schema, "set") or mentions(schema, "frozenset")  # which JSON has in any order
    try:
        written = json_of(read.get(parameter.name, parameter.default))
        paths = [*_find_differing(sent[name], written, name, is_set)]
    except Exception:  # any exception of the value's own serializers
        paths = [name]
    if paths and not _is_other_spelling(request, parameter, sent, read):
        yield from ((path, _OTHER_VALUE) for path in paths)


def _is_other_spelling(
    request: ToolExecutionRequest, parameter: ToolParameter, sent: Mapping[str, Any], read: Mapping[str, Any]
) -> bool:
    """Return True if the plain type alone reads the same value, as it does of a time that is sent in another zone."""
    from pydantic import TypeAdapter

    bare = _without_validators(parameter)
    try:
        kinds = {*_kinds_in(TypeAdapter(bare.annotation).core_schema)}
        if not _PLAIN.issuperset(kinds) or ("bool" not in kinds and _has_boolean(sent[parameter.shown_name])):
            return False  # pydantic reads true as the number 1, which is another value
        plain = _read(request, bare, sent)
    except Exception:  # pydantic and the types' own hooks raise many kinds of exceptions
        return False
    return bool(plain.get(parameter.name, _MISSING) == read.get(parameter.name, _MISSING))


def _has_boolean(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(_has_boolean, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool)


def _kinds_in(schema: Any) -> Iterator[str]:
    """Yield the kinds of pydantic's schemas inside of one."""
    if isinstance(schema, dict):
        if isinstance(kind := schema.get("type"), str):
            yield kind
        schema = schema.values()
    elif not isinstance(schema, (list, tuple)):
        return
    for each in schema:
        yield from _kinds_in(each)


def _find_differing(sent: Any, written: Any, path: str, in_any_order: bool) -> Iterator[str]:
    """Yield the paths of values that are written in another way than they were sent. Names may be added: defaults."""
    if isinstance(sent, dict) and isinstance(written, dict):
        for name, value in sent.items():
            if name in written:
                yield from _find_differing(value, written[name], f"{path}.{name}", in_any_order)
            else:
                yield f"{path}.{name}"
    elif isinstance(sent, list) and isinstance(written, list) and len(sent) == len(written):
        left = [*written]
        for number, value in enumerate(sent):
            inner = f"{path}.{number}"
            fitting = (each for each in left if not [*_find_differing(value, each, inner, in_any_order)])
            found = next(fitting, left[0]) if in_any_order else left[0]
            left.remove(found)
            yield from _find_differing(value, found, inner, in_any_order)
    elif not _is_same_value(sent, written):
        yield path


def _is_same_value(sent: Any, written: Any) -> bool:
    """Return True for equal values, where a number and its text are equal."""
    numbers = [_number_in(each) for each in (sent, written)]
    if None not in numbers and not (isinstance(sent, str) and isinstance(written, str)):
        return numbers[0] == numbers[1]
    return type(sent) is type(written) and bool(sent == written)


def _number_in(value: Any) -> Decimal | None:
    if type(value) in (int, float):
        return Decimal(str(value))
    return Decimal(value) if isinstance(value, str) and _JSON_NUMBER.fullmatch(value) else None


def _is_written_alike(shown: Any, sent: Any) -> bool:
    """Return True for the same JSON. A number is also the text that it has in JSON."""
    if isinstance(shown, dict) and isinstance(sent, dict):
        return shown.keys() == sent.keys() and all(_is_written_alike(shown[name], sent[name]) for name in shown)
    if isinstance(shown, list) and isinstance(sent, list):
        return len(shown) == len(sent) and all(map(_is_written_alike, shown, sent))
    if type(shown) in (int, float) and type(sent) in (int, float):
        return bool(shown == sent)
    if type(shown) in (int, float) or type(sent) in (int, float):
        return str(shown) == str(sent)
    return type(shown) is type(sent) and bool(shown == sent)
