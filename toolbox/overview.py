"""A program for display: its beans with their tools and dependencies, and `Container.reach`, all ways to its tools.

The ways go from the entries of a program through services as tools and hand-overs. Nothing is run: the plans of the
services and the marks of the tools say everything. Not here: the bean graph (`di`), the rows of the second report
(`security`), the entries of a web application (`toolbox_fastapi`), the output (`cli`, `toolbox_fastapi.dev_ui`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from .bean_references import BeanReference, is_rest_client
from .di.decorators import Scope
from .di.descriptions import BeanDescription
from .di.graph import BeanGraph
from .di.injection_points import InjectionPoint
from .di.values import LazyBean, beans_in
from .errors import IllegalConfigurationError
from .introspection import class_of
from .runs.exactly_once import ExactlyOnce, exactly_once_of
from .security import Access, Reach
from .services.declaration import service_options_of
from .services.declared_sources import retrievers_in, sources_of
from .services.inner_plans import inner_plan
from .services.method_marks import MethodMarks
from .services.plans import MethodPlan
from .tools.retrievers import is_retriever
from .tools.sources import bean_types, classes_of_methods
from .tools.tool_calls import Tool


@dataclass(frozen=True, slots=True)
class Node:
    """A bean for display; `dependencies`, `lazy`, `toolbox` and `searched` name other beans, `tools` are its own."""

    name: str
    type: str
    scope: str
    made_by: str
    dependencies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lazy: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    toolbox: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()

    @property
    def links(self) -> Iterator[tuple[str, str]]:
        """Yield the names of linked beans with the kind of link: holds, looks up, calls or searches."""
        yield from ((bean, "holds") for beans in self.dependencies.values() for bean in beans)
        yield from ((bean, "looks up") for beans in self.lazy.values() for bean in beans)
        yield from ((bean, "calls") for bean in self.toolbox)
        yield from ((bean, "searches") for bean in self.searched)


def nodes_of(beans: Sequence[BeanDescription], container: object) -> list[Node]:
    """Return the beans of a container for display, those with the longest lifetime first."""
    names = {bean.source: bean.name for bean in beans if isinstance(bean.source, type)}

    def node(bean: BeanDescription) -> Node:
        source = bean.source
        options = service_options_of(source) if isinstance(source, type) else None
        sources: tuple[Any, ...] = ()
        searched: tuple[Any, ...] = ()
        if isinstance(source, type) and options is not None:
            sources, searched = sources_of(source, options), retrievers_in(source, options)
        used = (*bean_types(sources), *classes_of_methods(sources), *_types_of(filter(is_retriever, sources)))
        return Node(
            name=bean.name,
            type=bean.type,
            scope=str(bean.scope),
            made_by="AI service" if options is not None else "REST client" if is_rest_client(source) else bean.made_by,
            dependencies=dict(bean.dependencies),
            lazy=dict(bean.lazy),
            tools=tool_names(source),
            toolbox=tuple(names[each] for each in used if each in names),
            searched=tuple(dict.fromkeys(names[each] for each in _types_of(searched) if each in names)),
        )

    nodes = sorted(map(node, beans), key=lambda each: -Scope(each.scope).span)
    linked = {name for each in nodes for name, _ in each.links}
    # The container itself is a bean as well; it is only shown if another bean uses it.
    itself = {bean.name for bean in beans if bean.source is container}
    return [each for each in nodes if each.name not in itself - linked]


def _types_of(listed: Iterable[object]) -> Iterator[Any]:
    return (BeanReference.to(each).type for each in listed)


def tool_names(source: object) -> tuple[str, ...]:
    """Return the names of a class's tools; empty if they are invalid, which `check` reports."""
    from .hosts.executors import tool_specifications_from

    try:
        return tuple(each.name for each in tool_specifications_from(source)) if isinstance(source, type) else ()
    except IllegalConfigurationError:
        return ()


# --- all ways to its tools


ENTRIES: Final = "toolbox_entries"
"""Name of the attribute of an application's `state` with functions that yield its entries for a graph of beans."""

Plans: TypeAlias = Mapping[type[Any], Mapping[str, MethodPlan]]

ANY_TOOL: Final = "?"
"""The name of the tools of a provider, which are known only at run time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A place where calls come in: the services that it can call, and the tools that it offers.

    With services, the tools are added to the calls of their methods, as `@toolbox` of an endpoint does. `access` are
    the roles of the entry itself. With `starts_runs` it can start the async methods of all services as runs.
    """

    name: str
    services: tuple[type[Any], ...] = ()
    tools: tuple[Tool, ...] = ()
    calls_services: bool = True
    access: Access | None = None
    starts_runs: bool = False


def reach_of(plans: Plans, entries: Iterable[Entry], graph: BeanGraph) -> list[Reach]:
    """Return all ways: those from `entries`, then those from each method of a service."""
    found: list[Reach] = []
    for entry in entries:
        start = _Way(entry.name, (), graph).check_roles(entry.access)
        if not entry.calls_services:
            found += _follow_tools(start, entry.tools, plans, ())
            continue
        for plan in _find_called(entry, plans):
            found += _follow_method(start.through(plan), plan, plans, (), entry.tools)
    for methods in plans.values():
        for plan in methods.values():
            found += _follow_method(
                _Way(plan.where, (), graph).check_roles(plan.access).guarded_by(plan), plan, plans, ()
            )
    return found


def _find_called(entry: Entry, plans: Plans) -> Iterator[MethodPlan]:
    """Yield the methods of an entry's services. One that can start runs can start every async method."""
    for service in entry.services:
        yield from plans.get(service, {}).values()
    for service, methods in plans.items() if entry.starts_runs else ():
        if service not in entry.services:
            yield from (plan for plan in methods.values() if plan.is_coroutine)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way so far: what a caller needs for it, and what guards it."""

    entry: str
    path: tuple[str, ...]
    graph: BeanGraph
    is_open: bool = True
    needs_identity: bool = False
    checks: tuple[frozenset[str], ...] = ()
    requires_approval: bool = False
    guardrails: tuple[type, ...] = ()
    approvers: tuple[str, ...] = ()

    def check_roles(self, access: Access | None) -> _Way:
        """Return the way after a check of roles. It is closed if no identity can pass the check."""
        if access is None or access.is_open:
            return self
        if access.roles is None:
            return replace(self, needs_identity=True)
        checks = self.checks if access.roles in self.checks else (*self.checks, access.roles)
        return replace(self, needs_identity=True, checks=checks, is_open=self.is_open and bool(access.roles))

    def guarded_by(self, plan: MethodPlan) -> _Way:
        """Return the way after the guardrails of a method: of its messages, and of all tools that it calls."""
        marks = MethodMarks(plan.service, plan.name)
        decorators = ("input_guardrails", "tool_input_guardrails", "tool_output_guardrails")
        named = [each for decorator in decorators for each in marks.named_by(decorator)]
        return replace(self, guardrails=(*self.guardrails, *(each.type for each in named)))

    def through(self, plan: MethodPlan) -> _Way:
        """Return the way into a method."""
        return replace(self.check_roles(plan.access).guarded_by(plan), path=(*self.path, plan.where))

    def to(self, tool: Tool) -> _Way:
        """Return the way to a tool."""
        named = (*tool.named_by("tool_input_guardrails"), *tool.named_by("tool_output_guardrails"))
        way = self.check_roles(tool.access)
        approval = way.requires_approval or tool.requires_approval is not False
        guardrails = (*way.guardrails, *(each.type for each in named))
        approvers = (*way.approvers, *tool.approvers)
        return replace(way, requires_approval=approval, guardrails=guardrails, approvers=approvers)

    def reach(self, tool: str, effects: tuple[str, ...] = ()) -> Reach:
        """Return the row for a tool at the end of this way."""
        common = frozenset.intersection(*self.checks) if self.checks else frozenset()
        return Reach(
            entry=self.entry,
            path=self.path,
            tool=tool,
            roles=common or frozenset().union(*self.checks),
            requires_approval=self.requires_approval,
            guardrails=tuple(dict.fromkeys(self.guardrails)),
            effects=effects,
            needs_identity=self.needs_identity,
            checks=self.checks,
            approvers=tuple(dict.fromkeys(self.approvers)),
        )


def _follow_method(
    way: _Way, plan: MethodPlan, plans: Plans, outer: tuple[MethodPlan, ...], added: Iterable[Tool] = ()
) -> Iterator[Reach]:
    """Yield the ways from a method that was called: to its tools, those of its providers, those `added`, retrievers."""
    if not way.is_open or any(each is plan for each in outer):
        return
    yield from _follow_tools(way, (*plan.toolset.tools, *added), plans, (*outer, plan))
    yield from (way.reach(ANY_TOOL) for _ in plan.providers)
    yield from (way.reach(each.tool.where) for each in plan.retrievers)


def _follow_tools(way: _Way, tools: Iterable[Tool], plans: Plans, outer: tuple[MethodPlan, ...]) -> Iterator[Reach]:
    for tool in tools:
        here = way.to(tool)
        if not here.is_open:
            continue
        yield here.reach(tool.name, _find_effects(tool, here.graph, in_durable=bool(outer) and outer[0].durable))
        inner = inner_plan(tool, plans) if tool.hands_over_to is None else _find_target(tool, outer[-1], plans)
        if inner is not None:
            yield from _follow_method(here.through(inner), inner, plans, outer)


def _find_target(tool: Tool, plan: MethodPlan, plans: Plans) -> MethodPlan | None:
    """Return the method to which a tool of this method hands over."""
    targets = (plans.get(service, {}).get(name) for service, name in plan.targets)
    return next((each for each in targets if each is not None and each.where == tool.hands_over_to), None)


def _find_effects(tool: Tool, graph: BeanGraph, *, in_durable: bool) -> tuple[str, ...]:
    """Return the known effects of a tool; a transaction that has the record of its run takes effect exactly once."""
    if not in_durable or exactly_once_of(tool, graph) is not ExactlyOnce.YES:
        return tool.effects
    at = tool.effects.index("transactional") + 1
    return (*tool.effects[:at], "exactly once", *tool.effects[at:])


def entry_behind(
    name: str, points: Iterable[InjectionPoint], graph: BeanGraph, tools: tuple[Tool, ...], access: Access | None
) -> Entry | None:
    """Return an entry with the services among the beans of these points; None if it can call none."""
    classes = _find_classes(points, graph)
    services = tuple(each for each in classes if service_options_of(each) is not None)
    runs_bean = sys.modules.get("toolbox.runs.runs_bean")  # not imported: no program part can start a run
    starts_runs = runs_bean is not None and runs_bean.Runs in classes
    return Entry(name, services, tools, access=access, starts_runs=starts_runs) if services or starts_runs else None


def _find_classes(points: Iterable[InjectionPoint], graph: BeanGraph) -> tuple[type[Any], ...]:
    """Return the classes of the beans of these points, and of the beans that these hold."""
    todo = [bean for point in points for bean in _find_beans(point, graph)]
    seen: dict[int, None] = {}
    while todo:
        bean = todo.pop(0)
        if bean not in seen:
            seen[bean] = None
            todo += [each for point, _ in graph[bean].needs + graph[bean].behind for each in _find_beans(point, graph)]
    return tuple(dict.fromkeys(class_of(graph.definitions[bean].provides) for bean in seen))


def _find_beans(point: InjectionPoint, graph: BeanGraph) -> tuple[int, ...]:
    value = graph.resolve(point)
    return value.found if isinstance(value, LazyBean) else beans_in(value)
