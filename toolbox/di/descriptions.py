"""Describes a graph as data, for `toolbox graph`: the names of the providers, and all beans with their dependencies.

Not here: which bean an injection point gets (`graph`), the providers themselves (`providers`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_origin

from ..introspection import class_of, type_name
from .beans import BeanDefinition, FactoryKind
from .decorating import decorates_mark_of
from .decorators import Scope
from .graph import Bean, BeanGraph
from .injection_points import InjectionPoint
from .values import LazyBean, beans_in

# --- names of providers


def provider_names(graph: BeanGraph, beans: Sequence[Bean], taken: Iterable[str] = ()) -> list[str]:
    """Return the names of the providers of these beans of a graph; `taken` are those of other ones.

    A bean's own name, else its type's in snake_case. Where the types of several beans give the same name, all of them
    get the parts of their module in front, the smallest number of parts that makes them unique, then a number. A name
    that was given never changes, nor does that of an implicit bean or a template, which may have none.
    """
    short_names = graph.short_names
    definitions, names = [each.definition for each in beans], [short_names[each.key] for each in beans]
    alike: dict[str, list[int]] = {}
    for place, (name, bean) in enumerate(zip(names, beans, strict=True)):
        if bean.definition.name is None and not bean.definition.implicit and bean.key not in graph.templates:
            alike.setdefault(name, []).append(place)
    for name, places in alike.items():
        if len(places) > 1 or name in taken:
            others = {*taken, *(each for place, each in enumerate(names) if place not in places)}
            moved = _unique_names(name, [definitions[place] for place in places], others)
            for place, each in zip(places, moved, strict=True):
                names[place] = each
    return names


def _unique_names(name: str, definitions: Sequence[BeanDefinition], others: set[str]) -> list[str]:
    """Return unique names, none of them in `others`, for beans that would all be called `name`."""
    choices = [[name] * len(definitions)]
    # The modules of the types first; those of producers tell apart several beans of one type.
    for modules in (
        [_module_of(class_of(each.provides)) for each in definitions],
        [_module_of(each.source) for each in definitions],
    ):
        for count in range(1, max(map(len, modules)) + 1):
            choices.append(["_".join([*module[-count:], name]) for module in modules])
    for choice in choices[1:]:
        if len(set(choice)) == len(choice) and not others & set(choice):
            return choice
    # No choice is unique: use the best one, and number the duplicates.
    best = max(choices, key=lambda choice: len({*choice} - others))
    numbered: dict[str, None] = {}
    for each in best:
        free, number = each, 1
        while free in numbered or free in others:
            number += 1
            free = f"{each}_{number}"
        numbered[free] = None
    return list(numbered)


def _module_of(source: object) -> list[str]:
    module = getattr(source, "__module__", None) or ""
    parts = [re.sub(r"\W+", "_", part).strip("_").lower() for part in str(module).split(".")]
    return [part for part in parts if part]


@dataclass(frozen=True, slots=True)
class BeanDescription:
    """A bean as `toolbox graph` prints it; `dependencies` maps parameters to the names of the beans they get."""

    name: str
    type: str
    scope: Scope
    made_by: str
    source: object
    dependencies: Mapping[str, tuple[str, ...]]
    lazy: Mapping[str, tuple[str, ...]]


def describe(graph: BeanGraph) -> tuple[BeanDescription, ...]:
    """Return all beans of a graph in registration order; `lazy` has the beans behind an `Instance`."""
    beans = graph.beans
    names = provider_names(graph, beans)

    def named(keys: Iterable[int]) -> tuple[str, ...]:
        return tuple(names[key] for key in keys)

    return tuple(
        BeanDescription(
            name=names[bean.key],
            type=type_name(bean.definition.provides),
            scope=bean.definition.scope,
            made_by=_made_by(bean.definition),
            source=bean.definition.source,
            dependencies={
                point.parameter: named(beans_in(value)) for point, value in bean.needs + bean.behind if beans_in(value)
            },
            lazy={point.parameter: named(value.found) for point, value in bean.needs if isinstance(value, LazyBean)},
        )
        for bean in beans
    )


def describe_function(
    graph: BeanGraph,
    where: str,
    made_by: str,
    source: object,
    points: Iterable[InjectionPoint],
    bean: int | None = None,
) -> BeanDescription:
    """Return a function that gets beans in a request scope, as `describe` returns beans; `bean` has the method."""
    values = {point.parameter: graph.resolve(point) for point in points}
    names = provider_names(graph, graph.beans)  # after the values, which may add beans
    holds: dict[str, tuple[str, ...]] = {} if bean is None else {"self": (names[bean],)}
    lazy: dict[str, tuple[str, ...]] = {}
    for parameter, value in values.items():
        if isinstance(value, LazyBean):
            lazy[parameter] = tuple(names[key] for key in value.found)
        elif keys := beans_in(value):
            holds[parameter] = tuple(names[key] for key in keys)
    return BeanDescription(f"{where}()", where, Scope.REQUEST, made_by, source, holds, lazy)


def _made_by(definition: BeanDefinition) -> str:
    if (mark := decorates_mark_of(definition.source)) is not None:
        return f"decorator of {type_name(mark.wanted)}"
    if definition.factory_kind is FactoryKind.SEED:
        return "seed"
    source = definition.source
    if isinstance(source, type) or get_origin(source) is not None:
        return "class"
    return f"{definition.factory_kind} {type_name(source)}" if inspect.isroutine(source) else "instance"
