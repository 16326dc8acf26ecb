"""Finds the roles of a method's parameters: memory id, call options, history, contents, user message and others.

Annotations decide the role of a parameter, together with the templates that use it. Not here: the rest of a method
(`planning`), making messages of the arguments (`call_messages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from ..chat import ChatRequestParameters, Message, UserMessage
from ..contents import Content
from ..errors import Problem
from ..introspection import EMPTY, Parameter, Unresolved, unwrapped
from ..parameters import MemoryId, MemoryIdMark, RunIdMark
from .call_messages import FunctionMessage
from .templates import Template


@dataclass(frozen=True, slots=True)
class ParameterRoles:
    """Names of parameters, by role. `values` has the parameter of each variable of the templates."""

    user_message: str | None
    values: Mapping[str, str]
    history: tuple[str, ...]
    contents: tuple[str, ...]
    call_options: str | None
    run_id: str | None
    unused: tuple[Parameter, ...] = ()  # in no message, though the method has one


def read_roles(
    where: str,
    parameters: Mapping[str, Parameter],
    system: Template | FunctionMessage | None,
    user: Template | None,
) -> tuple[ParameterRoles, list[Problem]]:
    """Return the roles of a method's parameters, except the memory id, and their problems.

    `system` and `user` are the messages that decorators of the method declare.
    """
    readable = [each for each in parameters.values() if not _is_unreadable(each)]
    call_options = [each.name for each in readable if is_call_options(each)]
    run_ids = [each.name for each in readable if _is_run_id(each)]
    problems = [
        *_problems_of_several(where, "ChatRequestParameters", call_options),
        *_problems_of_several(where, "RunId", run_ids),
    ]
    rest = [each for each in readable if not (_is_memory_id(each) or is_call_options(each) or _is_run_id(each))]
    all_readable = len(readable) == len(parameters)

    variables = {name for each in (system, user) if isinstance(each, Template) for name in each.variables}
    values = {name: name for name in variables if name in parameters}
    if "it" in variables and "it" not in parameters:
        if len(rest) == 1:
            values["it"] = rest[0].name
        elif all_readable:
            fact = "uses {it}, which needs exactly one parameter besides the memory id"
            problems.append(Problem(where, fact, "use the parameter's name"))
    left = [each for each in rest if each.name not in values.values()]
    history = tuple(each.name for each in left if _is_history(each))
    contents = tuple(each.name for each in left if _is_content(each))
    left = [each for each in left if each.name not in history + contents]

    user_message = None
    if user is None:
        speakers = [each.name for each in left if _may_speak(each)]
        if len(speakers) == 1:
            user_message = speakers[0]
            left = [each for each in left if each.name != user_message]
        elif not left and not contents and all_readable:
            problems += _problems_without_user_message(where, history, parameters.values())
    is_misspelled = not variables <= {*parameters, "it"}  # reported once
    if not is_misspelled and user is None and user_message is None:
        problems += unused_problems(where, left, user)
        left = []
    first_options, first_run_id = next(iter(call_options), None), next(iter(run_ids), None)
    unused = () if is_misspelled else tuple(left)
    return ParameterRoles(user_message, values, history, contents, first_options, first_run_id, unused), problems


def find_memory_id(where: str, parameters: Iterable[Parameter]) -> tuple[str | None, list[Problem]]:
    """Return the name of the memory id, and the problems of all memory ids."""
    found = [each for each in parameters if _is_memory_id(each)]
    problems = [
        Problem(where, f"parameter {each.name!r} uses MemoryId without a type", f"write `{each.name}: MemoryId[str]`")
        for each in found
        if each.annotation is MemoryId
    ]
    names = [each.name for each in found]
    problems += _problems_of_several(where, "MemoryId", names)
    return next(iter(names), None), problems


# --- problems


def _problems_of_several(where: str, kind: str, names: Sequence[str]) -> Iterator[Problem]:
    if len(names) > 1:
        yield Problem(where, f"has {len(names)} {kind} parameters: {', '.join(names)}", "keep only one")


def _problems_without_user_message(
    where: str, history: Sequence[str], parameters: Iterable[Parameter]
) -> Iterator[Problem]:
    """Yield the problems of a method that has no user message. It may send a history alone."""
    if not history:
        yield Problem(where, "has no user message", 'add a `str` parameter, or @user_message("…")')
    elif any(_is_memory_id(each) for each in parameters):
        yield Problem(
            where,
            f"{history[-1]!r} is the only message and the method has a memory id: both are the conversation so far",
            "remove the MemoryId parameter, or add a `str` parameter for a new message",
        )


def unused_problems(where: str, unused: Iterable[Parameter], user: Template | None) -> Iterator[Problem]:
    """Yield a problem for each parameter that no message uses."""
    for each in unused:
        if each.annotation is EMPTY and user is None:
            fact, fix = "has no type annotation", f"add one, for example `{each.name}: str`"
        else:
            fact = "is not used in any message"
            fix = f"use {{{each.name}}} in @user_message or @system_message, or remove it"
        yield Problem(where, f"parameter {each.name!r} {fact}", fix)


# --- what annotations say


def _is_unreadable(parameter: Parameter) -> bool:
    """Return True if the parameter's role is unknown, because its annotation cannot be resolved."""
    return parameter.is_variadic or isinstance(parameter.annotation, Unresolved)


def _is_memory_id(parameter: Parameter) -> bool:
    return parameter.annotation is MemoryId or any(isinstance(mark, MemoryIdMark) for mark in parameter.metadata)


def _is_run_id(parameter: Parameter) -> bool:
    return any(isinstance(mark, RunIdMark) for mark in parameter.metadata)


def is_call_options(parameter: Parameter) -> bool:
    """Return True for the options of one call."""
    return unwrapped(parameter.annotation).type is ChatRequestParameters


def _is_history(parameter: Parameter) -> bool:
    """Return True for a sequence of messages, which is sent before the user message."""
    item = _item_type(unwrapped(parameter.annotation).type)
    return item is not None and _members(item) <= set(get_args(Message))


def _is_content(parameter: Parameter) -> bool:
    """Return True for contents, which are appended to the user message."""
    return _members(unwrapped(parameter.annotation).type) <= set(get_args(Content))


def _may_speak(parameter: Parameter) -> bool:
    """Return True if the parameter can be the user message."""
    annotation = unwrapped(parameter.annotation).type
    if isinstance(annotation, type) and issubclass(annotation, (str, UserMessage)):
        return True
    members = _members(annotation)
    return annotation is Any or members <= {str, UserMessage, *get_args(Content)} or str in members


def _members(annotation: Any) -> set[Any]:
    """Return the types of a union or of a sequence's items, or the type itself."""
    item = _item_type(annotation)
    if item is not None:
        annotation = item
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}


def _item_type(annotation: Any) -> Any:
    """Return the type of a sequence's items; None for other types, and for sequences that have none: `typing.List`."""
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return next(iter(get_args(annotation)), None)
    return None
