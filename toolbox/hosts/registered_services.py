"""Services as beans of a container: registering them, planning their methods, and checking them.

Not here: hosting their calls (`hosting`), the checks of single beans (`bean_checks`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..bean_references import BeanReference
from ..capabilities import Capabilities, Late, load
from ..chat import ChatModel
from ..conversations.views import Summary
from ..di.beans import Stop, read_class
from ..di.decorators import Scope
from ..di.graph import BeanGraph, Registration
from ..di.injection_points import Names, point_of
from ..di.problem_texts import find_look_alikes
from ..di.registry import Fallback
from ..di.values import SingleBean
from ..errors import Problem
from ..introspection import method_takes
from ..limits import CostEstimator, UsageLimits, no_estimator
from ..models.routing import names_of_router, router_in
from ..service_names import same_name_problems
from ..services.call_messages import FunctionMessage
from ..services.conversation_beans import one_after_another
from ..services.declaration import CallLimits, ServiceOptions, method_names, service_options_of
from ..services.declared_sources import (
    model_names_in,
    providers_of,
    retrievers_in,
    service_cycles,
    services_offered_by,
    services_taking_over,
    sources_of,
)
from ..services.implied_beans import named_beans, registrable, strategies
from ..services.inner_plans import is_run, may_suspend, settled
from ..services.method_marks import named_at_method
from ..services.methods import implementation_of
from ..services.planning import plan_service
from ..services.plans import MethodPlan
from ..services.teams import with_handovers, with_teams
from ..tools.sources import bean_types, classes_of_methods
from ..tools.tool_calls import Tool
from .bean_checks import (
    bean_store_problems,
    global_interceptors,
    guardrail_cycles,
    injection_problems,
    log_problems,
    reference_problems,
    store_problems,
    uses_conversation,
)
from .model_beans import ModelBeans
from .service_hosting import ServiceHosting


class RegisteredServices:
    """The services of one container, and the graph of beans in which they are checked."""

    layering = Capabilities()

    def __init__(self, host: ServiceHosting[ModelBeans], limits: CallLimits) -> None:
        self.host, self.limits = host, limits
        self._services: dict[type[Any], _Service] = {}
        self.graph: BeanGraph | None = None
        self.keeps_beans = False
        self.offered_by: Callable[..., Iterable[type[Any]]] = services_offered_by  # each check remembers its results

    def use_graph(self, graph: BeanGraph) -> None:
        """Check services and tools in this graph."""
        self.graph = graph
        self.keeps_beans = any(each.scope is Scope.CONVERSATION for each in graph.definitions)
        around = (one_after_another(partial(uses_conversation, graph=graph)),) if self.keeps_beans else ()
        self.layering = Capabilities(interceptors=global_interceptors(graph), around_tools=around)
        self.offered_by = functools.cache(services_offered_by)

    def read(self, registered: object, names: Names | None = None) -> Registration | None:
        """Read an AI service at registration; None for other objects. `names` are classes for its annotations."""
        if not isinstance(registered, type) or (options := service_options_of(registered)) is None:
            return None
        service = self._services[registered] = _Service(registered, options, self)
        declared = read_class(registered, names)
        definition = replace(
            declared,
            factory=service.make,
            scope=Scope.APPLICATION,
            stop=declared.stop if "stop" not in method_names(registered) else Stop.NONE,
            problems=(),
        )
        sources = sources_of(registered)
        listed = (
            *bean_types(sources),
            *(each.bean for each in providers_of(registered, options)),
            *retrievers_in(registered, options, sources),
        )
        named = (*strategies(options), *named_beans([registered, *sources]))
        of_methods = map(Fallback, registrable((*classes_of_methods(sources), *services_taking_over(registered))))
        implied = (*registrable(listed), *named, *of_methods)
        return Registration((definition,), implied, service.check)

    @property
    def plans(self) -> dict[type[Any], Mapping[str, MethodPlan]]:
        """The method plans of all services, by class; available after the check."""
        return {cls: service.plans for cls, service in self._services.items()}

    def settle(self) -> list[Problem]:
        """Use plans with what depends on other services, when all services have theirs. Return problems with teams."""
        planned = {cls: service.planned for cls, service in self._services.items()}
        handed, problems = with_handovers(planned)
        for cls, plans in with_teams(settled(handed), self.layering).items():
            self._services[cls].plans = plans
        return problems

    def model_names(self, graph: BeanGraph) -> set[str]:
        """Return the names of the models that settings have, or that services and beans use; not those of producers."""
        services = {each for service in self._services.values() for each in service.model_names}
        points = {point.name for bean in graph.beans for point, _ in bean.needs if point.wants is ChatModel}
        return self.host.models.not_registered({*services, *points})

    def name_problems(self) -> Iterator[Problem]:
        """Yield problems with stored names that several services have."""
        yield from same_name_problems(self._services)

    def bean_problems(self, graph: BeanGraph, store: type[object] | None) -> Iterator[Problem]:
        """Yield problems with conversation-scoped beans. `store` is the class of one that keeps none, or None."""
        if self.keeps_beans and store is not None:
            yield from bean_store_problems(self.plans, graph, self.layering.interceptors, store.__name__)

    def run_problems(self, graph: BeanGraph, added: Iterable[Sequence[Tool]] = ()) -> Iterator[Problem]:
        """Yield problems with runs: of seeds, stores and durable methods.

        `added` are the tools that each endpoint adds to the services that it calls.
        """
        plans = [plan for methods in self.plans.values() for plan in methods.values()]
        added = [tools for tools in added if any(may_suspend(each, self.plans) for each in tools)]
        suspends = added or any(is_run(each, graph) for each in plans)
        host = self.host
        if not (host.run_seeds or host.run_identity or suspends or runs_are_imported()):
            return
        interceptors = self.layering.interceptors
        yield from load(Late.CHECKS_OF_RUNS)(self.plans, graph, host.run_seeds, host.run_identity, interceptors, added)


def runs_are_imported() -> bool:
    """Return True if the program has imported stores or engines of runs, so that a bean can be one."""
    return "toolbox.runs.store" in sys.modules or "toolbox.runs.run_engines" in sys.modules


class _Service:
    """One registered service. It is planned at the check, and created at the first request for it."""

    plans: Mapping[str, MethodPlan]
    """The plans of its methods, by name; available after the check."""
    planned: Mapping[str, MethodPlan]
    """The same without what depends on other services."""

    def __init__(self, cls: type[Any], options: ServiceOptions, services: RegisteredServices) -> None:
        self._cls, self._options, self._services, self._host = cls, options, services, services.host
        self._problems: list[Problem] = []
        self._planned_in: BeanGraph | None = None

    @property
    def model_names(self) -> tuple[str | None, ...]:
        """The names of the models that the service may use; None is the default model."""
        return model_names_in(self._options)

    def _model_problems(self, graph: BeanGraph) -> Iterator[Problem]:
        """Yield the problems of the service's models, and of the bean that chooses among them."""
        where, router = self._cls.__name__, router_in(self._options.model)
        if router is not None:
            where = f"{where}, model={router.__name__}"
            if not names_of_router(router):
                fix = 'set the class attribute `names`, such as `names = ("small", "large")`'
                yield Problem(where, "the router has no names of models", fix)
            if not method_takes(router, "choose", 2):
                yield Problem(
                    where, "choose does not take two arguments", "declare it `choose(self, request, context)`"
                )
            if (bean := BeanReference.to(self._options.model).bean) is not None:
                point = point_of(bean, where)
                yield from graph.problems_of(point)
                found = graph.resolve(point)
                if isinstance(found, SingleBean) and graph.definitions[found.bean].scope.is_temporary:
                    fact = f"the router is {graph.definitions[found.bean].scope}-scoped"
                    yield Problem(where, fact, "mark it @application_scoped")
            view = self._options.chat_memory
            if isinstance(view, Summary) and view.model is None:
                fact = "Summary has no model, and the router chooses the model of each call only later"
                yield Problem(f"{self._cls.__name__}, chat_memory", fact, 'name one: Summary(…, model="small")')
        for name in self.model_names:
            if (problem := self._host.models.problem(name, where)) is not None:
                yield problem

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """Create the service. The arguments are those of the class's constructor."""
        return implementation_of(self._cls, self.plans, self._host)(*args, **kwargs)

    def check(self, graph: BeanGraph) -> Iterator[Problem]:
        """Yield the service's problems in this graph of beans."""
        if self._planned_in is not graph:
            limits, layering = self._services.limits, self._services.layering
            home = graph.class_behind
            planned = plan_service(self._cls, self._options, layering, graph.names, limits=limits, home=home)
            self.planned, self._problems = planned
            if self._services.keeps_beans:
                self.planned = {name: replace(plan, keeps_beans=True) for name, plan in self.planned.items()}
            self.plans = self.planned
            self._planned_in = graph
        plans = self.planned
        yield from self._problems
        yield from service_cycles(self._cls, self._services.offered_by)
        yield from self._model_problems(graph)
        for provider in providers_of(self._cls, self._options):
            if provider.bean is not None:
                yield from graph.problems_of(point_of(provider.bean, f"{self._cls.__name__}, tool provider"))
        if (bean := BeanReference.to(self._options.tool_search).bean) is not None:
            yield from graph.problems_of(point_of(bean, f"{self._cls.__name__}, tool_search"))
        bounds = self._options.limits
        if isinstance(bounds, UsageLimits) and bounds.cost is not None and not self._host.has_cost_estimator:
            yield no_estimator(
                f"{self._cls.__name__}, limits=", next(iter(find_look_alikes(CostEstimator, graph.definitions)), "")
            )
        if any(plan.memory_parameter and plan.window for plan in plans.values()):
            yield from store_problems(graph)
            yield from log_problems(self._cls.__name__, self._options, graph)
        seen: set[object] = set()
        yield from guardrail_cycles(self._cls, plans, graph)
        for plan in plans.values():
            yield from reference_problems(named_at_method(self._cls, plan.name), graph)
            yield from self._host.fallback_problems(plan)
            yield from self._host.retriever_problems(plan)
            if isinstance(plan.messages.system, FunctionMessage):
                yield from injection_problems(f"{plan.where}, system message", plan.messages.system.injected, graph)
            for tool in (*plan.toolset.tools, *plan.compensations.values()):
                if (tool.where, tool.specification.name, tool.bean) not in seen:
                    seen.add((tool.where, tool.specification.name, tool.bean))
                    yield from self._host.tool_problems(plan.where, tool)
