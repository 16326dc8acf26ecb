"""Checks the beans that services and tools use: tools, listeners, the conversation store, injected parameters.

Not here: the declaration of a service (`planning`), its options (`options`), other checks of beans (`di.checks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from ..di.graph import BeanGraph, SingleBean, beans_in
from ..di.hints import look_alikes
from ..di.marks import Scope
from ..di.points import MISSING, point_of
from ..errors import Problem
from ..events import EventListener
from ..tools.marks import toolbox_of
from ..tools.pipeline import InjectedParameter, Tool
from ..tools.sources import bean_types, read_tools
from ..type_keys import class_of
from .declaration import service_options_of
from .memory import ChatMemoryStore


def tool_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the tools of all registered classes, whether or not a service offers them."""
    classes = dict.fromkeys(each.provides for each in graph.definitions)
    for cls in bean_types(classes):
        yield from read_tools([cls], cls.__name__)[1]
    for cls in classes:
        if not isinstance(cls, type) or service_options_of(cls) is not None:
            continue
        for name, member in vars(cls).items():
            if toolbox_of(member) is not None:
                what = "@toolbox has no effect here: the class is not an AI service"
                yield Problem(
                    f"{cls.__name__}.{name}", what, "put @toolbox on a method of an AI service, or on an endpoint"
                )


def listener_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the event listeners."""
    point = point_of(list[EventListener], "the listeners of events")
    yield from graph.problems_of(point)
    for key in beans_in(graph.value_of(point)):
        definition = graph.definitions[key]
        if definition.scope in (Scope.REQUEST, Scope.CALL):
            fact = f"{definition.label} is {definition.scope.value}-scoped, but listeners live as long as the container"
            yield Problem(point.where, fact, "mark it @application_scoped")
        if inspect.iscoroutinefunction(getattr(class_of(definition.provides), "on_event", None)):
            fact = f"{definition.label}.on_event is async def, which is not supported"
            yield Problem(point.where, fact, "declare it `def`, and hand slow work to a task or a queue")


def store_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the bean that stores the conversations of all services."""
    point = point_of(ChatMemoryStore | None, "the store of the conversations")
    yield from graph.problems_of(point)
    value = graph.value_of(point)
    if not isinstance(value, SingleBean) and (near := look_alikes(ChatMemoryStore, graph.definitions)):
        fix = f"inherit from ChatMemoryStore, or call bind(ChatMemoryStore, {near[0]})"
        yield Problem(point.where, f"{near[0]} has the methods of a ChatMemoryStore but is not used as one", fix)
    if isinstance(value, SingleBean) and (definition := graph.definitions[value.bean]).scope in (
        Scope.REQUEST,
        Scope.CALL,
    ):
        yield Problem(
            point.where,
            f"{definition.label} is {definition.scope.value}-scoped, but conversations live longer than that",
            "mark it @application_scoped",
        )


def tool_bean_problems(where: str, tool: Tool, graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the beans that a tool needs."""
    if tool.bean is not None:
        yield from graph.problems_of(point_of(tool.bean, where))
    yield from injection_problems(where, tool.injected, graph)


def injection_problems(where: str, injected: Iterable[InjectedParameter], graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the injected parameters of a function."""
    for each in injected:
        default = None if each.optional else MISSING
        yield from graph.problems_of(point_of(each.wanted, f"{where}, parameter {each.name}", default=default))
