"""Checks at start of service methods that can be runs: what they need when a run continues, elsewhere and later.

Not here: checks that concern all runs (`runs.start_checks`), those of services without runs (`hosts.bean_checks`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from ...bean_references import BeanReference
from ...chat import ChatModel
from ...di.decorators import Named
from ...di.graph import BeanGraph
from ...di.injection_points import MISSING, point_of
from ...di.problem_texts import web_request_fix
from ...di.values import LazyBean, SingleBean, Value, beans_in
from ...errors import Problem
from ...introspection import type_name
from ...security import SecurityIdentity
from ...services.call_messages import FunctionMessage
from ...services.declared_sources import model_names_in
from ...services.inner_plans import inner_plan, is_run
from ...services.method_marks import named_at_method, named_at_tool
from ...services.plans import MethodPlan
from ...services.stored_forms import adapter_of
from ...services.teams import targets_of
from ...tools.tool_calls import Tool
from ..exactly_once import ExactlyOnce, exactly_once_at_start, exactly_once_of
from ..start_checks import setting_problems, store_problems
from ..store import RunStore, supports_of, unsupported_problem

Plans: TypeAlias = Mapping[type[Any], Mapping[str, MethodPlan]]


def run_problems(
    plans: Plans,
    graph: BeanGraph,
    run_seeds: Iterable[Any],
    run_identity: Iterable[str] = (),
    interceptors: Sequence[BeanReference] = (),
    added: Iterable[Sequence[Tool]] = (),
) -> Iterator[Problem]:
    """Yield problems of suspendable and durable methods, and of what is kept. `interceptors` are the global ones.

    `added` are the tools of each endpoint with a tool that can be suspended.
    """
    seeds = tuple(run_seeds)
    yield from setting_problems(graph, seeds, run_identity)
    everything = [plan for methods in plans.values() for plan in methods.values()]
    durable = [plan for plan in everything if plan.durable]
    for plan in durable:
        yield from durable_problems(plan)
    if durable:
        yield from store_problems(durable[0].where, graph)
    yield from _lost_transactions(plans, graph)
    yield from _unsupported_options(plans, added, graph)
    kept = {*seeds, SecurityIdentity}
    found: dict[tuple[str, ...], Problem] = {}
    for plan in everything:
        if is_run(plan, graph):
            for path, problem in _Needs(plans, graph, kept, interceptors).of(plan, (plan.where,)):
                found.setdefault(path, problem)
    for tools in added:
        for tool in tools:
            yield from hidden_argument_problems(tool.where, tool)
        for path, problem in _Needs(plans, graph, kept, interceptors).of_tools(tools, ()):
            found.setdefault(path, problem)
    yield from found.values()


# --- durable methods


def durable_problems(plan: MethodPlan) -> Iterator[Problem]:
    """Yield problems of a durable method: streams, and arguments that cannot be stored."""
    if plan.output.is_stream:
        fact = "is durable but returns a stream, which cannot be stored"
        yield Problem(plan.where, fact, "return the value, and follow the run with runs.events(…)")
    for name, annotation in plan.annotations.items():
        if name not in plan.signature.parameters:
            continue
        try:
            adapter_of(annotation).json_schema()
        except Exception as error:  # pydantic raises many kinds of exceptions
            reason = str(error).split("\n", 1)[0].partition(". Set `")[0].rstrip(".")
            fact = f"is durable, but pydantic cannot write the type of parameter {name!r} as JSON ({reason})"
            yield Problem(plan.where, fact, "use a type that pydantic can write and read")


# --- options that need more of the store


def unsupported_options(plans: Plans, added: Iterable[Sequence[Tool]], store: object) -> Iterator[Problem]:
    """Yield a problem for each option that needs what this store, or this class of a store, does not support."""
    supports = supports_of(store)
    everything = [plan for methods in plans.values() for plan in methods.values()]
    if "retries" not in supports:
        for service in {plan.service for plan in everything if plan.options.run_retries is not None}:
            yield unsupported_problem(service.__name__, "run_retries", store)
    if "expiry" not in supports:
        tools = {tool.where: tool for tools in (*added, *(plan.toolset.tools for plan in everything)) for tool in tools}
        for where, tool in tools.items():
            if tool.approval_expires is not None:
                yield unsupported_problem(where, "approval_expires", store)


def _unsupported_options(plans: Plans, added: Iterable[Sequence[Tool]], graph: BeanGraph) -> Iterator[Problem]:
    """Yield the same for the store that the graph has. A producer's store is checked when it is there."""
    value = graph.resolve(point_of(RunStore | None, "the store of the runs"))
    if isinstance(value, SingleBean):
        definition = graph.definitions[value.bean]
        store = definition.source if hasattr(definition.source, "supports") else definition.provides
        if store is not RunStore:
            yield from unsupported_options(plans, added, store)


# --- transactions that cannot have the record of their tool


def _lost_transactions(plans: Plans, graph: BeanGraph) -> Iterator[Problem]:
    """Yield a problem for each transactional tool that would not take effect exactly once in a durable run."""
    for where, tool in _recorded_tools(plans).items():
        yield from _lost_transaction(where, exactly_once_of(tool, graph))


async def problems_with_opened_store(
    plans: Plans, graph: BeanGraph, store: RunStore, find_bean: Callable[[int], Awaitable[Any]]
) -> list[Problem]:
    """Return the problems that depend on the opened store. `find_bean` returns the bean of a key of the graph.

    Engines and stores that are instances or produced, or whose database is in the settings, are only known now.
    """
    found = [*unsupported_options(plans, (), store)]
    for where, tool in _recorded_tools(plans).items():
        found += _lost_transaction(where, await exactly_once_at_start(tool, graph, store, find_bean))
    return found


def _recorded_tools(plans: Plans) -> dict[str, Tool]:
    """Return the tools of durable methods, and those of services that are their tools, by their places.

    Without those that say `on_unknown_outcome=` themselves.
    """
    todo, seen = [plan for methods in plans.values() for plan in methods.values() if plan.durable], set[int]()
    found: dict[str, Tool] = {}
    while todo:
        plan = todo.pop()
        if id(plan) in seen:
            continue
        seen.add(id(plan))
        todo += targets_of(plan, plans)
        for tool in plan.toolset.tools:
            if (inner := inner_plan(tool, plans)) is not None:
                todo.append(inner)
            elif tool.on_unknown_outcome is None:
                found.setdefault(tool.where, tool)
    return found


def _lost_transaction(where: str, found: ExactlyOnce) -> Iterator[Problem]:
    match found:
        case ExactlyOnce.HIDDEN:
            fact = "a decorator hides @sql.transactional, so a durable run cannot take its effect exactly once"
            fix = "write @sql.transactional above the other decorator"
        case ExactlyOnce.ELSEWHERE:
            fact = "its transaction uses another engine than the RunStore, so its effect is not taken exactly once"
            fix = "use the engine of the store"
        case _:
            return
    yield Problem(where, fact, f'{fix}, or say @tool(on_unknown_outcome="tell"), "ask" or "retry"')


# --- arguments that a person would approve without seeing them


def hidden_argument_problems(where: str, tool: Tool) -> Iterator[Problem]:
    """Yield a problem for each argument that a person would not see as it is before approving a call of the tool."""
    if tool.requires_approval is False:
        return
    for parameter in tool.visible:
        try:
            schema = adapter_of(parameter.annotation).core_schema
        except Exception:  # pydantic raises many kinds of exceptions; the tool has a problem without this check
            continue
        for path, reason in dict.fromkeys(_hidden_in(schema, parameter.name)):
            fact = f"needs approval, but the person who approves does not see the argument {path!r} as it is: {reason}"
            yield Problem(where, fact, "use a type whose JSON has all values as they are, and can be read again")


def _hidden_in(schema: Any, path: str, config: Mapping[str, Any] = MappingProxyType({})) -> Iterator[tuple[str, str]]:
    """Yield the paths in pydantic's schema of a type whose values JSON leaves out or changes, with the reason.

    Serializers of pydantic's own types, such as dates and addresses, write the value; those of programs may write
    anything. `config` is that of the class around the schema.
    """
    if isinstance(schema, (list, tuple)):
        for each in schema:
            yield from _hidden_in(each, path, config)
    if not isinstance(schema, Mapping):
        return
    config = schema.get("config", config)
    if schema.get("serialization_exclude") is True or callable(schema.get("serialization_exclude_if")):
        yield path, "exclude= leaves it out"
    if schema.get("init_only") is True:
        yield path, "an InitVar is not a field"
    if isinstance(written := schema.get("serialization"), Mapping) and (reason := _reason_of(written)) is not None:
        yield path, reason
    for key, inner in schema.items():
        if key == "fields":
            for name, field in _fields_in(inner):
                if name and (split := _find_split_alias(name, field, config)) is not None:
                    yield f"{path}.{name}", split
                yield from _hidden_in(field, f"{path}.{name}" if name else path, config)
        elif key not in ("serialization", "computed_fields", "metadata", "default"):
            yield from _hidden_in(inner, path, config)


def _fields_in(fields: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and the schemas of fields; of a data class an outer schema has the names alone."""
    named = fields.items() if isinstance(fields, Mapping) else ((each, each) for each in fields)
    for name, field in named:
        if isinstance(field, Mapping):
            yield name if isinstance(name, str) else field.get("name", ""), field


def _find_split_alias(name: str, field: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return that a field is not read under the name under which it is written; None if it is."""
    written, given = field.get("serialization_alias", name), field.get("validation_alias")
    read = set[str]()
    if given is not None and config.get("validate_by_alias", True):
        choices = given if isinstance(given, list) and all(isinstance(each, list) for each in given) else [given]
        paths = [[each] if isinstance(each, str) else each for each in choices]
        read |= {path[0] for path in paths if len(path) == 1}
    if given is None or config.get("validate_by_name", config.get("populate_by_name", False)):
        read.add(name)
    if written in read:
        return None
    return f"it is written as {written!r}, which is not a name under which it is read"


def _reason_of(serialization: Mapping[str, Any]) -> str | None:
    """Return why a serializer may hide or change a value; None for one that writes it."""
    kind = serialization.get("type", "")
    if kind == "format" or kind.startswith("include-exclude"):
        return "it has a serializer"
    if not kind.startswith("function-"):
        return None
    function = serialization["function"]
    if function in _secret_serializers():
        return "it is a secret, of which only stars are shown"
    is_pattern = repr(function) == "operator.attrgetter('pattern')"  # of re.Pattern
    is_of_pydantic = (getattr(function, "__module__", None) or "").partition(".")[0] == "pydantic"
    return None if is_pattern or is_of_pydantic else "it has a serializer"


@cache
def _secret_serializers() -> frozenset[Any]:
    """Return the functions with which pydantic writes its secret types."""
    from pydantic import Secret, SecretBytes, SecretStr

    todo: list[Any] = [adapter_of(kind).core_schema for kind in (SecretStr, SecretBytes, Secret[str])]
    found = set()
    while todo:
        here = todo.pop()
        if isinstance(here, Mapping):
            todo += here.values()
            if isinstance(written := here.get("serialization"), Mapping) and "function" in written:
                found.add(written["function"])
    return frozenset(found)


# --- seeds that are not there when a run continues


class _Needs:
    """Finds request seeds that a run needs when it continues, but that are not kept."""

    def __init__(
        self, plans: Plans, graph: BeanGraph, kept: Collection[Any], interceptors: Sequence[BeanReference]
    ) -> None:
        self._plans, self._graph, self._kept, self._interceptors = plans, graph, kept, interceptors
        self._seen: set[object] = set()

    def of(self, plan: MethodPlan, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Problem]]:
        """Yield the path to each missing seed, with its problem, for everything that a method's run may use."""
        if id(plan) in self._seen:
            return
        self._seen.add(id(plan))
        named = [*named_at_method(plan.service, plan.name)]
        for each in (*self._interceptors, *(each.reference for each in named)):
            yield from self._of_bean(each.bean, path)
        for provider in plan.providers:
            yield from self._of_bean(provider.bean, path)
        yield from self._of_bean(BeanReference.to(plan.options.tool_search).bean, path)
        for name in model_names_in(plan.options):
            yield from self._of_bean(ChatModel if name is None else Annotated[ChatModel, Named(name)], path)
        if plan.durable:
            yield from self._of_system_message(plan, path)
        for target in targets_of(plan, self._plans):
            yield from self._of_later_call(target, (*path, target.where))
        yield from self.of_tools((*plan.toolset.tools, *plan.compensations.values()), path)
        yield from self.of_tools((each.tool for each in plan.retrievers), path)

    def _of_later_call(self, plan: MethodPlan, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Problem]]:
        """Yield the same for a method that is called within the run, perhaps after it was continued."""
        yield from self._of_system_message(plan, path)
        yield from self.of(plan, path)

    def _of_system_message(self, plan: MethodPlan, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Problem]]:
        if isinstance(plan.messages.system, FunctionMessage) and id(plan.messages.system) not in self._seen:
            self._seen.add(id(plan.messages.system))
            for parameter in plan.messages.system.injected:
                yield from self._of_point(parameter.wanted, path, parameter.optional)

    def of_tools(self, tools: Iterable[Tool], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Problem]]:
        """Yield the same for these tools."""
        for tool in tools:
            if (inner := inner_plan(tool, self._plans)) is not None:
                yield from self._of_later_call(inner, (*path, inner.where))
                continue
            here = (*path, tool.where)
            yield from self._of_bean(tool.bean, here)
            for parameter in tool.injected:
                yield from self._of_point(parameter.wanted, here, parameter.optional)
            for named_here in named_at_tool(tool):
                yield from self._of_bean(named_here.reference.bean, here)

    def _of_bean(self, bean: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Problem]]:
        if bean is not None:
            yield from self._of_point(bean, path, optional=False)

    def _of_point(
        self, wanted: Any, path: tuple[str, ...], optional: bool
    ) -> Iterator[tuple[tuple[str, ...], Problem]]:
        graph = self._graph
        value = graph.resolve(point_of(wanted, path[-1]))
        if optional and isinstance(value, SingleBean) and graph.is_seed(value.bean):
            return
        for keys in self._seeds_and_services_behind(value):
            here, found = (*path, *(graph.definitions[key].label for key in keys)), graph.definitions[keys[-1]].provides
            if graph.is_seed(keys[-1]):
                yield here, _not_kept(here, found)
            for plan in self._plans.get(found, {}).values():
                yield from self._of_later_call(plan, (*here[:-1], plan.where))

    def _seeds_and_services_behind(self, first: Value) -> Iterator[tuple[int, ...]]:
        """Yield a path of beans to each seed that is not kept, and to each service, that a value needs.

        Needed at once or in a later lookup. A program calls the methods of a service bean in its code.
        """
        # Not `graph.seeds_behind`: what an `Instance` looks up may be asked for while the seeds are there. In a run it
        # is asked for whenever the run gets there, and that can be after an answer.
        graph, seen = self._graph, set[int]()
        todo: list[tuple[tuple[int, ...], Value]] = [((), first)]
        while todo:
            above, value = todo.pop(0)
            if isinstance(value, LazyBean):
                value = graph.resolve(replace(point_of(value.wanted, ""), name=value.name))
            for key in beans_in(value):
                definition, path = graph.definitions[key], (*above, key)
                is_optional = graph.is_seed(key) and isinstance(value, SingleBean) and value.absent is not MISSING
                if key in seen or is_optional or definition.provides in self._kept:
                    continue
                seen.add(key)
                if graph.is_seed(key):
                    yield path
                    continue
                if definition.provides in self._plans:
                    yield path
                inner = [found for _, found in (*graph[key].needs, *graph[key].behind)]
                todo += [(path, each) for each in (*inner, *map(graph.resolve, definition.later))]


def _not_kept(path: tuple[str, ...], seed: Any) -> Problem:
    name = type_name(seed)
    fact = f"a run that continues needs the request seed {name}, which does not exist then"
    fix = f"add {name} to Container(run_seeds=…) if it is a pydantic model or dataclass, or take `{name} | None`"
    if web_request_fix(seed):
        fix = f"take `{name} | None`, or a model with what you need of it that is in Container(run_seeds=…)"
    return Problem(" -> ".join(path), fact, fix)
