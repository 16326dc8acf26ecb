"""What annotations say of a value's shape.

Not here: resolving them (`signatures`), what they mean for a request (`plans`) or a reply (`replies`).
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import TypeAliasType


def bare(annotation: Any) -> Any:
    """The type itself, without what `Annotated` and `type X = …` put around it."""
    while True:
        if isinstance(annotation, TypeAliasType):
            annotation = annotation.__value__
        elif get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        else:
            return annotation


def is_structured(annotation: Any) -> bool:
    """Whether values of the type have fields, or are bytes, or hold such values: what a URL cannot say in one word."""
    annotation = bare(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return any(is_structured(each) for each in get_args(annotation))
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return False
    if issubclass(kind, (BaseModel, Mapping, bytes, bytearray)) or is_dataclass(kind):
        return True
    return issubclass(kind, Collection) and any(is_structured(each) for each in get_args(annotation))


def is_many(annotation: Any) -> bool:
    """Whether values of the type are collections, also `| None`."""
    annotation = bare(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return any(is_many(each) for each in get_args(annotation))
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, (str, bytes))
