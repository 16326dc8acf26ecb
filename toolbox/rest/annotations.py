"""What annotations say of a value's shape.

Not here: resolving them (`signatures`), taking them apart (`type_keys`), what they mean for a request (`plans`) or a
reply (`replies`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any, get_args

from pydantic import BaseModel

from ..type_keys import class_of, is_union, plain


def is_structured(annotation: Any) -> bool:
    """Whether values of the type have fields, or are bytes, or hold such values: what a URL cannot say in one word."""
    annotation = plain(annotation)
    if is_union(annotation):
        return any(is_structured(each) for each in get_args(annotation))
    kind = class_of(annotation)
    if not isinstance(kind, type):
        return False
    if issubclass(kind, (BaseModel, Mapping, bytes, bytearray)) or is_dataclass(kind):
        return True
    return issubclass(kind, Collection) and any(is_structured(each) for each in get_args(annotation))


def is_list(annotation: Any) -> bool:
    """Whether values of the type are collections of one value after another, also `| None`."""
    annotation = plain(annotation)
    if is_union(annotation):
        return any(is_list(each) for each in get_args(annotation))
    kind = class_of(annotation)
    return isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, (str, bytes, Mapping))


def has_fields(annotation: Any) -> bool:
    """Whether values of the type are models, dataclasses or mappings, also `| None`."""
    annotation = plain(annotation)
    if is_union(annotation):
        return all(each is type(None) or has_fields(each) for each in get_args(annotation))
    kind = class_of(annotation)
    return isinstance(kind, type) and (issubclass(kind, (BaseModel, Mapping)) or is_dataclass(kind))
