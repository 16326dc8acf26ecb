"""Reads the parameters of functions and classes into injection points: each requests a bean.

An injection point has the type, the name and the default of its parameter, and whether it takes one bean or several.
Not here: which bean it gets (`graph`), other facts about classes and producers (`beans`).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Final, get_args, get_origin

from ..errors import Problem
from ..introspection import (
    EMPTY,
    Parameter,
    Unresolved,
    metadata_of,
    plain,
    read_signature,
    type_name,
    unwrapped,
)
from .decorators import Instance, Named

Names = Mapping[str, Any]
"""Registered classes that are local to functions, by name: annotations can use them."""


class Missing(Enum):
    """Type of `MISSING`, the marker for no value."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


class PointShape(StrEnum):
    """Kind of an injection point: one bean, a list, a tuple, a dict or an `Instance`."""

    ONE = "one"
    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    INSTANCE = "instance"


@dataclass(frozen=True, slots=True)
class InjectionPoint:
    """A parameter that requests a bean: its place, its type and its default.

    `wants` is the type without `Annotated`, `None` and shape: `Payments` of `list[Payments] | None`; `whole` keeps the
    shape. `default` is `MISSING` where the parameter has none. `problem` is set where the annotation cannot be read.
    """

    where: str
    wants: Any
    whole: Any = None
    name: str | None = None
    shape: PointShape = PointShape.ONE
    optional: bool = False
    parameter: str = ""
    default: Any = MISSING
    positional: bool = False
    keyword: bool = False
    problem: Problem | None = None


_LISTS = (list, Sequence, Collection, Iterable)


def point_of(
    annotation: Any,
    where: str,
    *,
    parameter: str = "",
    default: Any = MISSING,
    positional: bool = False,
    keyword: bool = False,
) -> InjectionPoint:
    """Return the injection point of a parameter with this annotation."""
    if isinstance(annotation, Unresolved):
        problem: Problem | None = unresolved_problem(annotation, where)
        annotation = Any
    elif annotation is EMPTY and default is MISSING:
        problem = Problem(
            where, "the parameter has no annotation", f"annotate {parameter or 'it'} with the type to inject"
        )
        annotation = Any
    else:
        problem = None
        annotation = Any if annotation is EMPTY else annotation
    taken = unwrapped(annotation)
    inner = taken.type
    shape, wants, whole = PointShape.ONE, inner, inner
    origin, arguments = get_origin(inner), get_args(inner)
    if origin in _LISTS and len(arguments) == 1:
        shape, wants = PointShape.LIST, plain(arguments[0])
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        shape, wants = PointShape.TUPLE, plain(arguments[0])
    elif origin in (dict, Mapping) and len(arguments) == 2 and arguments[0] is str:
        shape, wants = PointShape.DICT, plain(arguments[1])
    elif origin is Instance:
        shape, wants = PointShape.INSTANCE, arguments[0]
    elif inner is Instance and problem is None:
        problem = Problem(where, "Instance needs a type argument", "write Instance[T]")
    if shape not in (PointShape.ONE, PointShape.INSTANCE) and get_origin(wants) is Instance and problem is None:
        generic: Any = origin
        of = type_name(generic[tuple(get_args(each)[0] if each is wants else each for each in arguments)])
        problem = Problem(where, f"{type_name(inner)} is not supported", f"write Instance[{of}]")
    name = name_in(taken.metadata)
    within = None if shape is PointShape.ONE else name_in(metadata_of(wants))
    return InjectionPoint(
        where=where,
        wants=wants,
        whole=whole,
        name=name,
        shape=shape,
        optional=taken.optional,
        parameter=parameter,
        default=default,
        positional=positional,
        keyword=keyword,
        problem=problem or name_problem(name, where) or name_problem(within, where),
    )


def name_problem(name: object, where: str) -> Problem | None:
    """Return the problem of an invalid name of a bean; None for a valid name, and without a name."""
    if name is None or (isinstance(name, str) and name.strip()):
        return None
    return Problem(where, f"invalid name={name!r}", "use a string that is not empty, or leave the name out")


def name_in(metadata: Iterable[object]) -> str | None:
    """Return the name that `Named` gives in an annotation's metadata."""
    return next((each.name for each in metadata if isinstance(each, Named)), None)


def points_of(function: Callable[..., Any], where: str, names: Names | None = None) -> tuple[InjectionPoint, ...]:
    """Return the injection points of a function: its parameters except `*args` and `**kwargs`."""
    return tuple(
        point_of_parameter(each, where) for each in read_signature(function, names).parameters if not each.is_variadic
    )


def point_of_parameter(parameter: Parameter, where: str) -> InjectionPoint:
    """Return the injection point of a parameter of a function or class named `where`."""
    return point_of(
        parameter.annotation,
        f"{where}.{parameter.name}",
        parameter=parameter.name,
        default=MISSING if parameter.default is EMPTY else parameter.default,
        positional=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
        keyword=parameter.kind is inspect.Parameter.KEYWORD_ONLY,
    )


def unresolved_problem(annotation: Unresolved, where: str) -> Problem:
    """Return the problem of an annotation whose names are unknown."""
    what = f"the annotation {annotation.text!r} cannot be resolved ({annotation.reason})"
    return Problem(where, what, "import the type at run time, or correct the annotation")


def add_type_checking_hint(point: InjectionPoint, annotation: Any, module: str) -> InjectionPoint:
    """Return the point; explain in its problem if the type is imported only under TYPE_CHECKING."""
    if point.problem is None or not isinstance(annotation, Unresolved):
        return point
    for name in _names_for_checkers(module):
        if f"'{name}'" in annotation.reason:
            problem = Problem(
                point.where,
                f"the annotation {annotation.text!r} cannot be resolved: "
                f"{module} imports {name} only under TYPE_CHECKING",
                f"import {name} outside of `if TYPE_CHECKING:`",
            )
            return dataclasses.replace(point, problem=problem)
    return point


def _names_for_checkers(module: str) -> Iterator[str]:
    """Yield the names that a module imports under `if TYPE_CHECKING:`."""
    with suppress(OSError, TypeError, SyntaxError):
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
            if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
                for each in ast.walk(node):
                    if isinstance(each, (ast.Import, ast.ImportFrom)):
                        yield from (alias.asname or alias.name for alias in each.names)
