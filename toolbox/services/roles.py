"""Classifies the parameters of service methods by annotation: memory id, history, contents, user message.

Not here: assigning the roles in a method (`planning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from ..chat import ChatRequestParameters, Content, Message, UserMessage
from ..context import MemoryId, MemoryIdMark
from ..signatures import Parameter, Unresolved
from ..type_keys import unwrapped


def is_unreadable(parameter: Parameter) -> bool:
    """Return True if the parameter's role is unknown, because its annotation cannot be resolved."""
    return parameter.is_variadic or isinstance(parameter.annotation, Unresolved)


def is_memory_id(parameter: Parameter) -> bool:
    """Return True for the memory id."""
    return parameter.annotation is MemoryId or any(isinstance(mark, MemoryIdMark) for mark in parameter.metadata)


def _members(annotation: Any) -> set[Any]:
    """Return the types of a union, or the type itself."""
    return set(get_args(annotation)) if get_origin(annotation) is not None else {annotation}


def is_call_options(parameter: Parameter) -> bool:
    """Return True for the options of one call."""
    return unwrapped(parameter.annotation).type is ChatRequestParameters


def is_history(parameter: Parameter) -> bool:
    """Return True for a sequence of messages, which is sent before the user message."""
    annotation = unwrapped(parameter.annotation).type
    origin = get_origin(annotation)
    if not (isinstance(origin, type) and issubclass(origin, Sequence)):
        return False
    return _members(get_args(annotation)[0]) <= set(get_args(Message))


def is_content(parameter: Parameter) -> bool:
    """Return True for contents, which are appended to the user message."""
    annotation = unwrapped(parameter.annotation).type
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        annotation = get_args(annotation)[0]
    return _members(annotation) <= set(get_args(Content))


def may_speak(parameter: Parameter) -> bool:
    """Return True if the parameter can be the user message."""
    annotation = unwrapped(parameter.annotation).type
    if isinstance(annotation, type) and issubclass(annotation, (str, UserMessage)):
        return True
    members = _members(annotation)
    return annotation is Any or members <= {str, UserMessage, *get_args(Content)} or str in members
