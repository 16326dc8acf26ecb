"""What is wrong with the beans of a container as services and tools meet them.

Not here: one service's declaration (`planning`), its options (`options`), beans as such (`di.checks`).
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
    """What is wrong with the tools of the registered classes, whoever may offer them."""
    classes = dict.fromkeys(each.provides for each in graph.definitions)
    for cls in bean_types(classes):
        yield from read_tools([cls], cls.__name__)[1]
    for cls in classes:
        if not isinstance(cls, type) or service_options_of(cls) is not None:
            continue
        for name, member in vars(cls).items():
            if toolbox_of(member) is not None:
                what = "@toolbox means nothing on a method of a class that is no AI service"
                yield Problem(f"{cls.__name__}.{name}", what, "put it on the service's method, or on the endpoint")


def listener_problems(graph: BeanGraph) -> Iterator[Problem]:
    """What is wrong with the beans that are told of events."""
    point = point_of(list[EventListener], "the listeners of events")
    yield from graph.problems_of(point)
    for key in beans_in(graph.value_of(point)):
        definition = graph.definitions[key]
        if definition.scope in (Scope.REQUEST, Scope.CALL):
            fact = f"{definition.label} is {definition.scope.value}-scoped, and is told of all that its container does"
            yield Problem(point.where, fact, "mark it @application_scoped")
        if inspect.iscoroutinefunction(getattr(class_of(definition.provides), "on_event", None)):
            fact = f"{definition.label}.on_event is async def, and nothing awaits it"
            yield Problem(point.where, fact, "make it a def that is quick, and give slow work to a task or a queue")


def store_problems(graph: BeanGraph) -> Iterator[Problem]:
    """What is wrong with the bean that keeps the conversations; the same for all services."""
    point = point_of(ChatMemoryStore | None, "the store of the conversations")
    yield from graph.problems_of(point)
    value = graph.value_of(point)
    if not isinstance(value, SingleBean) and (near := look_alikes(ChatMemoryStore, graph.definitions)):
        fix = f"bind(ChatMemoryStore, {near[0]}) if it is meant"
        yield Problem(point.where, f"{near[0]} has its methods, and is none", fix)
    if isinstance(value, SingleBean) and (definition := graph.definitions[value.bean]).scope in (
        Scope.REQUEST,
        Scope.CALL,
    ):
        yield Problem(
            point.where,
            f"{definition.label} is {definition.scope.value}-scoped, and conversations outlive that",
            "mark it @application_scoped",
        )


def tool_bean_problems(where: str, tool: Tool, graph: BeanGraph) -> Iterator[Problem]:
    """What is wrong with the beans that a tool offered at `where` needs."""
    if tool.bean is not None:
        yield from graph.problems_of(point_of(tool.bean, where))
    yield from injection_problems(where, tool.injected, graph)


def injection_problems(where: str, injected: Iterable[InjectedParameter], graph: BeanGraph) -> Iterator[Problem]:
    """What is wrong with the beans that parameters of a function at `where` are."""
    for each in injected:
        default = None if each.optional else MISSING
        yield from graph.problems_of(point_of(each.wanted, f"{where}, parameter {each.name}", default=default))
