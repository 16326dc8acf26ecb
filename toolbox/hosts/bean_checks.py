"""Checks at start: the beans that services, tools and the container itself use, and the roles.

Not here: checks of declarations (`services.planning`), of runs (`runs.service_calls.call_checks`), of beans in general
(`di.graph_checks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from typing_extensions import is_protocol

from ..bean_references import BeanReference, global_priority
from ..capabilities import named_problems
from ..conversations.stores import ChatMemoryStore, is_log_store
from ..di.decorators import Named, Scope
from ..di.graph import BeanGraph
from ..di.injection_points import MISSING, point_of
from ..di.problem_texts import find_look_alikes, identity_fix
from ..di.values import NotFound, SingleBean, beans_in
from ..errors import Problem
from ..events import EventListener
from ..introspection import class_of, may_be_marked_in, method_takes, type_name
from ..limits import CostEstimator
from ..request_hooks import BEFORE_MODEL_REQUEST, ON_SUCCESS, Hook, hooks_of
from ..security import SecurityIdentity, access_to_member, class_access, marked_access
from ..services.call_messages import FunctionMessage
from ..services.declaration import ServiceOptions, method_names, service_options_of
from ..services.inner_plans import inner_plan
from ..services.method_marks import GUARDRAILS, NamedAt, named_at_method, named_at_tool
from ..services.option_checks import log_problem, options_with_logs
from ..services.plans import MethodPlan
from ..tools.marks import mcp_marked
from ..tools.retrievers import is_retriever
from ..tools.sources import bean_types, members_of, read_tools
from ..tools.tool_calls import InjectedParameter, Tool, read_injected

if TYPE_CHECKING:
    from .model_beans import ModelBeans

ReadTools: TypeAlias = tuple[tuple[Tool, ...], tuple[Problem, ...]]


def tools_of_beans(graph: BeanGraph) -> tuple[ReadTools, ...]:
    """Return the tools of each registered class, whether or not a service offers them, and the problems with them."""
    classes = bean_types(dict.fromkeys(each.provides for each in graph.definitions))
    return tuple(read_tools([cls], cls.__name__) for cls in classes)


def tool_problems(graph: BeanGraph, read: Iterable[ReadTools]) -> Iterator[Problem]:
    """Yield problems with the tools that `tools_of_beans` has read."""
    for tools, problems in read:
        yield from problems
        for tool in tools:
            yield from reference_problems(named_at_tool(tool), graph)


def listener_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the event listeners."""
    point = point_of(list[EventListener], "the listeners of events")
    yield from graph.problems_of(point)
    for key in beans_in(graph.resolve(point)):
        definition = graph.definitions[key]
        if definition.scope.is_temporary:
            fact = f"{definition.label} is {definition.scope.value}-scoped, but listeners live as long as the container"
            yield Problem(point.where, fact, "mark it @application_scoped")
        if inspect.iscoroutinefunction(getattr(class_of(definition.provides), "on_event", None)):
            fact = f"{definition.label}.on_event is async def, which is not supported"
            yield Problem(point.where, fact, "declare it `def`, and hand slow work to a task or a queue")


ESTIMATOR = point_of(CostEstimator | None, "the estimator of costs")


def estimator_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the bean that estimates costs."""
    yield from graph.problems_of(ESTIMATOR)
    value = graph.resolve(ESTIMATOR)
    if not isinstance(value, SingleBean):
        return
    definition = graph.definitions[value.bean]
    estimator = class_of(definition.provides)
    if inspect.iscoroutinefunction(getattr(estimator, "estimate", None)):
        fact = f"{definition.label}.estimate is async def, which is not supported"
        yield Problem(ESTIMATOR.where, fact, "declare it `def`, and keep the prices in memory")
    elif not method_takes(estimator, "estimate", 2):
        fact = f"{definition.label}.estimate does not take two arguments, the model's name and the usage"
        yield Problem(ESTIMATOR.where, fact, "declare it `def estimate(self, model, usage)`")


_IDENTITY = point_of(SecurityIdentity | None, "the identity of the caller")


def identity_problems(graph: BeanGraph, restricted: Iterable[str]) -> Iterator[Problem]:
    """Yield problems with the identity, if one of these places needs it."""
    places = list(dict.fromkeys(restricted))
    if not places:
        return
    yield from graph.problems_of(_IDENTITY)
    if not isinstance(graph.resolve(_IDENTITY), SingleBean):
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        fact = f"{', '.join(places[:3])}{more}: roles are used, but no bean provides a SecurityIdentity"
        yield Problem(_IDENTITY.where, fact, identity_fix(SecurityIdentity))


def restricted_in(graph: BeanGraph, plans: Iterable[MethodPlan], read: Iterable[ReadTools]) -> Iterator[str]:
    """Yield the places of all tools and methods that are not for everyone; `read` is what `tools_of_beans` returned."""
    for tools, _ in read:
        yield from (tool.where for tool in tools if is_restricted(tool))
    for cls in dict.fromkeys(class_of(each.provides) for each in graph.definitions):
        for name in mcp_marked(cls) if isinstance(cls, type) else ():
            if access_to_member(cls, name) is not None:
                yield f"{cls.__name__}.{name}"
    for plan in plans:
        if plan.access is not None:
            yield plan.where
        yield from (tool.where for tool in plan.toolset.tools if is_restricted(tool))


def is_restricted(tool: Tool) -> bool:
    """Return True for a tool with a mark of roles. With `not_self`, a program may have no identity."""
    return tool.access is not None and tool.access.is_declared


def access_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield a problem for each mark of roles that has no effect."""
    for cls in dict.fromkeys(class_of(each.provides) for each in graph.definitions):
        if not isinstance(cls, type):
            continue
        marked = [  # without `object`, and without properties, whose marks never have an effect (`ineffective_marks`)
            (base, name)
            for base in cls.__mro__[:-1]
            for name, member in may_be_marked_in(base)
            if not isinstance(member, (type, cached_property)) and marked_access(member) is not None
        ]
        if not marked and class_access(cls) is None:
            continue
        effective = {each.attribute for each in members_of(cls)} | set(mcp_marked(cls))
        if is_retriever(cls):
            effective.add("retrieve")
        if service_options_of(cls) is not None:
            effective |= set(method_names(cls))
        fix = "put it on a tool, on a class with tools, or on a method of an AI service that has no body"
        if not effective and class_access(cls) is not None:
            yield Problem(
                cls.__name__, "the roles have no effect: the class has no tools and is not an AI service", fix
            )
        for base, name in marked:
            if name not in effective:
                fact = "the roles have no effect: the method is neither a tool nor answered by a model"
                yield Problem(f"{base.__name__}.{name}", fact, fix)


def store_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the bean that stores the conversations of all services."""
    point = point_of(ChatMemoryStore | None, "the store of the conversations")
    yield from graph.problems_of(point)
    value = graph.resolve(point)
    if not isinstance(value, SingleBean) and (near := find_look_alikes(ChatMemoryStore, graph.definitions)):
        fix = f"inherit from ChatMemoryStore, or call bind(ChatMemoryStore, {near[0]})"
        yield Problem(point.where, f"{near[0]} has the methods of a ChatMemoryStore but is not used as one", fix)
    if isinstance(value, SingleBean) and (definition := graph.definitions[value.bean]).scope.is_temporary:
        yield Problem(
            point.where,
            f"{definition.label} is {definition.scope.value}-scoped, but a ChatMemoryStore must be application-scoped",
            "mark it @application_scoped",
        )


def find_store_without_logs(graph: BeanGraph) -> type[Any] | None:
    """Return the class of the store of the conversations if that says that it keeps only messages."""
    value = graph.resolve(point_of(ChatMemoryStore | None, "the store of the conversations"))
    if not isinstance(value, SingleBean):
        return None
    source = graph.definitions[value.bean].source
    store = type(source) if hasattr(type(source), "get_messages") else class_of(graph.definitions[value.bean].provides)
    return None if is_protocol(store) or inspect.isabstract(store) or is_log_store(store) else store


def log_problems(where: str, options: ServiceOptions, graph: BeanGraph) -> Iterator[Problem]:
    """Yield a problem for each option that the store of the conversations cannot do, if its class is known."""
    if (store := find_store_without_logs(graph)) is not None:
        yield from (log_problem(where, each, store) for each in options_with_logs(options))


def uses_conversation(tool: Tool, graph: BeanGraph) -> bool:
    """Return True if a tool can reach a conversation-scoped bean. A service that is a tool does not."""
    if tool.is_service:
        return False
    beans = () if tool.bean is None else (tool.bean,)
    wanted = [*beans, *(each.wanted for each in tool.injected)]
    return graph.find_reached(wanted, Scope.CONVERSATION) is not None


def bean_store_problems(
    plans: Mapping[type[Any], Mapping[str, MethodPlan]],
    graph: BeanGraph,
    interceptors: Iterable[BeanReference],
    store: str,
) -> Iterator[Problem]:
    """Yield a problem for each service with a memory id that can use beans which this store does not keep."""

    def reached(plan: MethodPlan) -> Iterator[Any]:
        """Yield what the calls of a method can look up, without what services that are tools can."""
        yield from (each.reference.bean for each in named_at_method(plan.service, plan.name))
        yield from (each.bean for each in plan.providers)
        if isinstance(plan.messages.system, FunctionMessage):
            yield from (each.wanted for each in plan.messages.system.injected)
        for tool in (*plan.toolset.tools, *plan.compensations.values()):
            if not tool.is_service:
                yield from (tool.bean, *(each.wanted for each in tool.injected))
                yield from (each.reference.bean for each in named_at_tool(tool))

    def with_inner(plan: MethodPlan, seen: set[int]) -> Iterator[MethodPlan]:
        if id(plan) not in seen:
            seen.add(id(plan))
            yield plan
            for inner in filter(None, (inner_plan(tool, plans) for tool in plan.toolset.tools)):
                yield from with_inner(inner, seen)

    for service, methods in plans.items():
        seen: set[int] = set()
        used = [each for plan in methods.values() if plan.memory_parameter for each in with_inner(plan, seen)]
        wanted = [*(each.bean for each in interceptors), *(bean for plan in used for bean in reached(plan))]
        found = graph.find_reached([each for each in wanted if each is not None], Scope.CONVERSATION) if used else None
        if found is not None:
            fact = f"it can use the conversation-scoped bean {found.label}, but {store} keeps only messages"
            fix = "use a store of toolbox (in memory, toolbox.sql, toolbox.redis), or beans of another scope"
            yield Problem(service.__name__, fact, fix)


def tool_bean_problems(where: str, tool: Tool, graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the beans that a tool needs."""
    if tool.bean is not None:
        yield from graph.problems_of(point_of(tool.bean, where))
    yield from reference_problems(named_at_tool(tool), graph)
    yield from injection_problems(where, tool.injected, graph)


def reference_problems(named: Iterable[NamedAt], graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the classes that decorators name, and with their beans."""
    for each in named:
        problems = list(named_problems(each))
        yield from problems
        if problems or each.reference.bean is None:
            continue
        point = point_of(each.reference.bean, each.where)
        value = graph.resolve(point)
        name = type_name(each.reference.type)
        is_missing = isinstance(value, NotFound) and not value.candidates and not graph.left_out_for(point.wants)
        if is_missing and inspect.isabstract(each.reference.type):
            fact = f"no bean provides {name}, which is abstract"
            missing = ", ".join(sorted(each.reference.type.__abstractmethods__))
            yield Problem(each.where, fact, f"name a class that implements {missing}")
        elif is_missing and isinstance(each.reference.bean, type):  # at start, named classes are registered
            fix = f"register {name}; classes that the tools of a provider name are not registered implicitly"
            yield Problem(each.where, f"no bean provides {name}", fix)
        else:
            yield from graph.problems_with(point, value)


def guardrail_cycles(cls: type[Any], methods: Iterable[str], graph: BeanGraph) -> Iterator[Problem]:
    """Yield a problem for each guardrail of a service that depends on it, and so would call itself without end."""
    for named in dict.fromkeys(each for method in methods for each in named_at_method(cls, method)):
        if named.decorator not in GUARDRAILS or named.reference.bean is None:
            continue
        first = beans_in(graph.resolve(point_of(named.reference.bean, named.where)))
        pending, seen = list(first), set(first)
        while pending:
            bean = graph[pending.pop()]
            if bean.definition.source is cls or bean.definition.provides is cls:
                fact = (
                    f"{type_name(named.reference.type)} depends on {cls.__name__}, so it would call itself without end"
                )
                yield Problem(named.where, fact, "ask another service in the guardrail")
                break
            new = {*bean.held} - seen
            seen |= new
            pending += new


def global_interceptors(graph: BeanGraph) -> tuple[BeanReference, ...]:
    """Return the global interceptors among the beans, outermost first."""
    found: list[tuple[float, BeanReference]] = []
    for each in graph.definitions[: graph.registered]:
        cls = class_of(each.provides)
        for marked in (cls, type(each.source)):
            if (priority := global_priority(marked)) is not None:
                wanted = each.provides if each.name is None else Annotated[each.provides, Named(each.name)]
                found.append((priority, BeanReference(bean=wanted)))
                break
    return tuple(reference for _, reference in sorted(found, key=lambda pair: pair[0]))


def global_interceptor_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the global interceptors."""
    for each in global_interceptors(graph):
        yield from named_problems(NamedAt(type_name(each.type), "global_interceptor", each, is_at_tool=False))


def hook_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with `@before_model_request` and `@on_success` methods.

    They take no arguments. The bean of the first is request- or call-scoped, that of the second request-scoped.
    """
    for hook, scopes in ((BEFORE_MODEL_REQUEST, (Scope.REQUEST, Scope.CALL)), (ON_SUCCESS, (Scope.REQUEST,))):
        found: dict[tuple[type[Any], str, Scope], None] = {}
        for each in graph.definitions[: graph.registered]:
            # An instance may be registered as one of its base types.
            for cls in {class_of(each.provides), type(each.source)}:
                if isinstance(cls, type):
                    found.update(dict.fromkeys((cls, name, each.scope) for name in hooks_of(cls, hook)))
        for cls, name, scope in found:
            yield from _problems_of_hook(hook, cls, name, scope, scopes)


def _problems_of_hook(
    hook: Hook, cls: type[Any], name: str, scope: Scope, scopes: Sequence[Scope]
) -> Iterator[Problem]:
    where = f"{cls.__name__}.{name}"
    if scope not in scopes:
        fact = f"{hook.decorator} has no effect: the bean is {scope.value}-scoped"
        yield Problem(where, fact, f"mark the class {' or '.join(each.rule.decorator for each in scopes)}")
    function = inspect.unwrap(getattr(cls, name))
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        yield Problem(where, f"{hook.decorator} does not support generators", "use a method that returns")
    elif not method_takes(cls, name, 0):
        fact = f"a {hook.decorator} method is called without arguments"
        yield Problem(where, fact, f"declare it `def {name}(self)`, and take beans in the constructor")


def key_function_problems(models: ModelBeans, graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the parameters of functions that return the keys of models."""
    for where, function in models.key_functions():
        injected, problems = read_injected(function, where)
        yield from problems
        yield from injection_problems(where, injected, graph)


def injection_problems(where: str, injected: Iterable[InjectedParameter], graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the injected parameters of a function."""
    for each in injected:
        default = None if each.optional else MISSING
        yield from graph.problems_of(point_of(each.wanted, f"{where}, parameter {each.name}", default=default))
