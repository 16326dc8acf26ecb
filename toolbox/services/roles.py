"""Tells by its annotation which part a parameter of a service method may play.

Not here: which part each one plays in its method (`planning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from ..chat import Content, Message, UserMessage
from ..context import MemoryId, MemoryIdMark
from ..signatures import Parameter, Unresolved
from ..type_keys import unwrapped


def is_unreadable(parameter: Parameter) -> bool:
    """Whether it cannot be told what part this parameter plays."""
    return parameter.is_variadic or isinstance(parameter.annotation, Unresolved)


def is_memory_id(parameter: Parameter) -> bool:
    """Whether it names the conversation."""
    return parameter.annotation is MemoryId or any(isinstance(mark, MemoryIdMark) for mark in parameter.metadata)


def _members(annotation: Any) -> set[Any]:
    """The types of a union, or the one type."""
    return set(get_args(annotation)) if get_origin(annotation) is not None else {annotation}


def is_history(parameter: Parameter) -> bool:
    """Whether it is messages, to be put before what the user says."""
    annotation = unwrapped(parameter.annotation).type
    origin = get_origin(annotation)
    if not (isinstance(origin, type) and issubclass(origin, Sequence)):
        return False
    return _members(get_args(annotation)[0]) <= set(get_args(Message))


def is_content(parameter: Parameter) -> bool:
    """Whether it is contents, to be put after what the user says."""
    annotation = unwrapped(parameter.annotation).type
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        annotation = get_args(annotation)[0]
    return _members(annotation) <= set(get_args(Content))


def may_speak(parameter: Parameter) -> bool:
    """Whether it may be what the user says."""
    annotation = unwrapped(parameter.annotation).type
    if isinstance(annotation, type) and issubclass(annotation, (str, UserMessage)):
        return True
    members = _members(annotation)
    return annotation is Any or members <= {str, UserMessage, *get_args(Content)} or str in members
