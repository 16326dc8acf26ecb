"""Reads a function's signature with its annotations resolved, each one alone: a bad one does not hide the others.

Not here: what a parameter means (`di.beans`, `tools.specification`, `services.planning`).
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin

EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Unresolved:
    """An annotation that names something that cannot be found."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its annotation resolved (else `EMPTY` or `Unresolved`), its default or `EMPTY`."""

    name: str
    annotation: Any
    default: Any
    kind: Any

    @property
    def is_variadic(self) -> bool:
        """Whether it is `*args` or `**kwargs`."""
        return self.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @property
    def metadata(self) -> tuple[object, ...]:
        """What stands beside the type in `Annotated`, also through `| None`."""
        return metadata_of(self.annotation)


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters in order, and its return annotation: resolved, `EMPTY` or `Unresolved`."""

    parameters: tuple[Parameter, ...]
    returns: Any


def read_signature(function: Callable[..., Any], known: Mapping[str, Any] | None = None) -> Signature:
    """The signature of `function`; `known` are names to look up besides those of its module (classes of a function).

    A method's first parameter is among the parameters when `function` is not bound.
    """
    plain = inspect.unwrap(function)
    signature = inspect.signature(plain)
    where = getattr(plain, "__func__", plain)
    names = getattr(where, "__globals__", None) or vars(sys.modules.get(where.__module__, typing))
    parameters = tuple(
        Parameter(each.name, resolve(each.annotation, names, known), each.default, each.kind)
        for each in signature.parameters.values()
    )
    return Signature(parameters, resolve(signature.return_annotation, names, known))


def resolve(annotation: Any, names: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> Any:
    """The annotation as an object, whatever in it was written as text; `Unresolved` where a name is missing."""
    if annotation is EMPTY or isinstance(annotation, type):
        return annotation
    holder = SimpleNamespace(__annotations__={"it": annotation})
    local = {name: value for name, value in (known or {}).items() if name not in names}
    try:
        return typing.get_type_hints(holder, dict(names), local, include_extras=True)["it"]
    except Exception as error:  # evaluating a user's text may raise anything
        text = annotation if isinstance(annotation, str) else repr(annotation)
        return Unresolved(text, str(error) or type(error).__name__)


def without_none(annotation: Any) -> Any:
    """`T` of `T | None`; any other annotation as it is."""
    arguments = get_args(annotation)
    if type(None) in arguments and get_origin(annotation) is not Annotated:
        rest = [each for each in arguments if each is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def metadata_of(annotation: Any) -> tuple[object, ...]:
    """What stands beside the type in `Annotated`, also through `| None`."""
    if get_origin(annotation) is Annotated:
        outer = tuple(annotation.__metadata__)
        return outer + metadata_of(annotation.__origin__)
    inner = without_none(annotation)
    return metadata_of(inner) if inner is not annotation else ()
