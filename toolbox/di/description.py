"""The graph of beans as data, for tools that show it.

Not here: the graph (`graph`), printing it (the command line).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_origin

from ..type_keys import type_name
from .beans import BeanDefinition, FactoryKind
from .decorators import Scope
from .graph import BeanGraph, LazyBean, beans_in, provider_names


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
    names = provider_names(graph)

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
        for bean in graph.beans
    )


def _made_by(definition: BeanDefinition) -> str:
    if definition.factory_kind is FactoryKind.SEED:
        return "seed"
    source = definition.source
    if isinstance(source, type) or get_origin(source) is not None:
        return "class"
    return f"{definition.factory_kind} {type_name(source)}" if inspect.isroutine(source) else "instance"
