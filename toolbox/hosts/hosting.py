"""Services as beans of a container: registering them, checking them, and hosting their calls.

Not here: the container itself (`container`), running a call (`driver`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from ..bean_references import BeanReference, global_priority
from ..chat import ChatModel, ToolExecutionRequest, ToolProgress
from ..context import ActiveScope, InvocationContext, current_attributes, current_invocation
from ..di.beans import MISSING, Names, Stop, point_of, read_class
from ..di.decorators import Named, Scope
from ..di.graph import BeanGraph, NotFound, Registration, SingleBean, beans_in, look_alikes
from ..di.scopes import outside_scopes
from ..errors import (
    ContainerNotStartedError,
    IllegalConfigurationError,
    Problem,
)
from ..events import EventListener, Listeners
from ..execution.markers import ExecutionModel, unknown_executor
from ..execution.runners import LoopRunner
from ..execution.threads import FORKED, Workers, keep_inherited, renewed_after_fork
from ..introspection import class_of, may_be_marked_in, method_takes, type_name
from ..limits import CostEstimator, UsageLimits, host_started, host_stopped, no_estimator
from ..security import OF_KNOWN, SecurityIdentity, access_to_member, class_access, identity_in, marked_access
from ..services.declaration import CallLimits, ServiceOptions, is_interface, method_names, service_options_of
from ..services.invocation import Running, abandon_runs
from ..services.layering import GUARDRAILS, HostLayers, NamedAt, named_at_method, named_at_tool, tool_layers
from ..services.memory import ChatMemories, ChatMemory, ChatMemoryKey, ChatMemoryStore, InMemoryChatMemoryStore
from ..services.methods import bound_arguments, implementation_of
from ..services.planning import (
    named_beans,
    plan_service,
    providers_of,
    service_cycles,
    services_offered_by,
    sources_of,
    strategies,
)
from ..services.plans import FunctionMessage, MethodPlan, call_may_suspend, may_suspend, settle
from ..tools.failures import ToolErrors
from ..tools.marks import mcp_marked, toolbox_of
from ..tools.pipeline import InjectedParameter, Tool, ToolEnvironment, ToolOutcome, execute_tool, read_injected
from ..tools.sources import bean_types, members_of, read_tools

logger = logging.getLogger("toolbox.services")

T = TypeVar("T")

if TYPE_CHECKING:
    from ..models.selection import NamedModels
    from ..runs.run_engines import RunEngine
    from ..runs.runs_bean import Runs
    from ..runs.store import RunStore
    from ..settings import ToolboxSettings


class ContainerHost:
    """Hosts the services of one container: provides threads, models and conversations while it is started."""

    workers: Workers
    listeners: Listeners | None = None
    layers = HostLayers()
    is_container = True
    has_cost_estimator = False

    def __init__(
        self,
        scope: ActiveScope,
        *,
        models: Mapping[str, ChatModel] | None,
        executors: Mapping[str, Executor] | None,
        tool_errors: ToolErrors | None,
        settings: ToolboxSettings,
        run_seeds: tuple[Any, ...] = (),
        run_identity: tuple[str, ...] = (),
    ) -> None:
        from ..models.selection import NamedModels

        self.scope, self.settings = scope, settings
        self.failures = tool_errors or ToolErrors()
        self.limits = CallLimits(
            max_tool_rounds=settings.max_tool_rounds,
            max_tool_calls_per_response=settings.max_tool_calls_per_response,
            max_result_chars=settings.max_result_chars,
            timeout=settings.timeout,
        )
        self.max_concurrent_tools = settings.max_concurrent_tools
        self.models: NamedModels = NamedModels(models, settings)
        self.model: Callable[[str | None], ChatModel] = self.models.find  # see `ServiceHost.model`
        self._executors = dict(executors or {})
        self.running_loop: asyncio.AbstractEventLoop | None = None
        self._forked = ""
        self._memories: ChatMemories | None = None
        self._services: dict[type[Any], _Service] = {}
        self._graph: BeanGraph | None = None
        self.running = Running()
        self.offered_by: Callable[..., Iterable[type[Any]]] = services_offered_by  # each check remembers its results
        self.run_seeds, self.run_identity = run_seeds, run_identity
        self._runs: Runs | None = None
        self._run_store: RunStore | None = None
        self._find_added: Sequence[Callable[[], Mapping[str, Sequence[Tool]]]] = ()
        self.added_may_suspend = False
        self._renew_workers()

    def _renew_workers(self) -> None:
        self.workers = Workers(
            pool_size=self.settings.pool_size,
            thread_limit=self.settings.thread_limit,
            executors=self._executors,
            slow_call_warning=self.settings.slow_call_warning,
        )

    # --- starting and stopping

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run invocations on `loop` from now on."""
        self.running_loop = loop
        renewed_after_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the loop in a forked process, because it runs in the parent."""
        keep_inherited(self.running_loop, self._memories, self.running, self.models)
        if self.running_loop is not None:
            self.running_loop, self._forked = None, FORKED

    def read_added_tools(self, find_added: Sequence[Callable[[], Mapping[str, Sequence[Tool]]]]) -> None:
        """Read the tools that endpoints add, by the names of their functions, and note if they may suspend a call."""
        self._find_added = find_added
        added = [tool for find in find_added for tools in find().values() for tool in tools]
        self.added_may_suspend = any(self.tool_may_suspend(tool) for tool in added)

    def tools_added_by(self, place: str) -> Sequence[Tool] | None:
        """Return the tools that an endpoint adds, by the name of its function; None for an unknown endpoint."""
        for find in self._find_added:
            if (tools := find().get(place)) is not None:
                return tools
        return None

    async def find_listeners(self) -> None:
        """Find the `EventListener` beans and send them events from now on."""
        # Listeners outlive requests; the container may be started inside the request of another container.
        with outside_scopes():
            found = await self.scope.aget(list[EventListener])
        self.listeners = Listeners(found) if found else None
        host_started(self)

    def add_listener(self, listener: EventListener) -> None:
        """Send events to a listener that is not a bean, too."""
        self.listeners = (self.listeners or Listeners(())).with_listener(listener)

    def remove_listener(self, listener: EventListener) -> None:
        """Send no more events to a listener that was added."""
        self.listeners = self.listeners.without(listener) if self.listeners is not None else None

    async def stop(self) -> list[str]:
        """Wait for running calls up to the settings' `stop_timeout`, then cancel them, and log a warning.

        Returns the labels of the cancelled invocations, and of the tools whose threads still run.
        """
        timeout = self.settings.stop_timeout
        host_stopped(self)
        if self._runs is not None:
            await self._runs.stop_taking_over()
        late = await self.running.stop(timeout)
        stuck = await self.workers.stop(timeout if not late else 0.1)
        if self._runs is not None:
            await self._runs.close()
        if late:
            logger.warning("cancelled because the container is stopping (waited %g s): %s", timeout, ", ".join(late))
        if stuck:
            logger.warning("the container is stopping, but these tools still run on a thread: %s", ", ".join(stuck))
        self._renew_workers()
        self._memories = self._run_store = None
        self.listeners = None
        self.running_loop = None
        return late + stuck

    async def close_models(self) -> None:
        """Close the models that were created from settings."""
        await self.models.aclose()

    # --- for services

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """See `ServiceHost.loop`."""
        if self.running_loop is None:
            raise ContainerNotStartedError("a call of a service", self._forked)
        return self.running_loop

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """See `ServiceHost.sync_loop`."""
        return self.loop

    def chosen_model(self, name: str, where: str) -> ChatModel:
        """See `ServiceHost.chosen_model`."""
        if (problem := self.models.problem(name, where)) is not None:
            raise IllegalConfigurationError([problem])
        return self.models.find(name)

    async def memories(self) -> ChatMemories:
        """See `ServiceHost.memories`. Uses the `ChatMemoryStore` bean, or the memory of this process without one."""
        if self._memories is None:
            # Conversations outlive requests.
            with outside_scopes():
                store = await self.scope.find(ChatMemoryStore)
            if self._memories is None:
                self._memories = ChatMemories(InMemoryChatMemoryStore() if store is None else store)
        return self._memories

    async def cost_estimator(self) -> CostEstimator | None:
        """See `ServiceHost.cost_estimator`."""
        return await self.scope.aget(CostEstimator) if self.has_cost_estimator else None

    async def identity(self) -> SecurityIdentity:
        """Return the identity of the current scope."""
        return await identity_in(self.scope)

    async def execute(
        self,
        tools: Mapping[str, Tool],
        request: ToolExecutionRequest,
        caller: type[Any],
        failures: ToolErrors,
        memory_id: object = None,
        on_progress: Callable[[ToolProgress], object] | None = None,
    ) -> ToolOutcome:
        """Run one of `tools` without a service, for example for MCP, in the current scope.

        The tool sees `caller` as `InvocationContext.service`. The container's error handlers complete `failures`.
        `on_progress` receives the tool's progress, on the event loop. Tools that the current identity may not
        call are unknown.
        Raises the same errors as `execute_tool`.
        """
        outer = current_invocation.get()
        if any(each.access is not None for each in tools.values()):
            identity = await self.identity()
            tools = {name: each for name, each in tools.items() if each.access is None or each.access.allows(identity)}
        if (tool := tools.get(request.name)) is not None:
            tools = {**tools, request.name: tool.with_layers(tool_layers(self.layers.interceptors))}
        environment = ToolEnvironment(
            tools=tools,
            context=InvocationContext(
                caller,
                request.name,
                memory_id,
                attributes=current_attributes.get(),
                outer_invocation_id=outer.invocation_id if outer is not None else None,
            ),
            scope=self.scope,
            runner=LoopRunner(self.workers),
            failures=failures.over(self.failures),
            max_result_chars=self.limits.max_result_chars,
            listeners=self.listeners,
            on_progress=on_progress,
            model=self.model,
        )
        return await execute_tool(request, environment)

    def chat_memory(self, service: type[Any], memory_id: object) -> ChatMemory:
        """Return the access to one conversation of a service."""
        return ChatMemory(self, ChatMemoryKey.of(service, memory_id))

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """See `MemoryHost.on_own_loop`. The container waits for this work when it stops."""

        async def counted() -> T:
            with self.running.task("a use of a conversation"):
                return await work()

        home = self.running_loop
        if home is None or home is asyncio.get_running_loop():  # None while beans are being stopped
            return await counted()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(counted(), home))

    # --- runs

    @property
    def runs(self) -> Runs:
        """The runs of this container."""
        if self._runs is None:
            from ..runs.runs_bean import Runs

            self._runs = Runs(self)
        return self._runs

    async def open_runs(self, *, take_over: bool) -> None:
        """Open the `RunStore` and `RunEngine` beans, if there are any, and take over lapsed runs from now on."""
        graph = self._graph
        if graph is None or not _runs_are_imported():
            return
        from ..runs.run_engines import RunEngine
        from ..runs.store import RunStore

        if any(isinstance(graph.choose(each, None), SingleBean) for each in (RunStore, RunEngine)):
            await self.runs.open(take_over=take_over)  # without these beans, the first run opens them

    async def run_engine(self) -> RunEngine:
        """Return the `RunEngine` bean, or an engine that executes runs in this process."""
        from ..runs.run_engines import LocalRunEngine, RunEngine

        engine: RunEngine | None = await self.application_bean(RunEngine)
        return LocalRunEngine() if engine is None else engine

    async def run_store(self) -> RunStore:
        """Return the `RunStore` bean, or the store in memory without one; opened."""
        if self._run_store is None:
            from ..runs.store import InMemoryRunStore, RunStore

            found: RunStore | None = await self.application_bean(RunStore)
            store = InMemoryRunStore() if found is None else found
            durable = [plan.where for methods in self.plans.values() for plan in methods.values() if plan.durable]
            if durable and not store.persistent:
                from ..runs.start_checks import not_persistent

                raise IllegalConfigurationError([not_persistent(durable[0])])
            await store.open()
            if self._run_store is None:
                self._run_store = store
        return self._run_store

    async def application_bean(self, wanted: Any) -> Any:
        """Return a bean from outside of all requests, or None."""
        with outside_scopes():
            return await self.scope.find(wanted)

    async def suspended_run(self, key: ChatMemoryKey) -> str | None:
        """See `ServiceHost.suspended_run`."""
        return await self.runs.suspended_in(key)

    async def cancel_run(self, run_id: str, reason: str) -> str:
        """See `ServiceHost.cancel_run`."""
        return str((await self.runs.cancel(run_id, reason)).service)

    async def abandon_runs(self, error: BaseException) -> list[str]:
        """See `ServiceHost.abandon_runs`."""
        return await abandon_runs(error, self)

    def tool_may_suspend(self, tool: Tool) -> bool:
        """See `ServiceHost.tool_may_suspend`."""
        return call_may_suspend(tool, self.plans)

    def plans_of(self, service: str) -> Mapping[str, MethodPlan]:
        """Return the plans of the service with this qualified name, `module.Class`; empty for an unknown one."""
        for cls, methods in self.plans.items():
            if f"{cls.__module__}.{cls.__qualname__}" == service:
                return methods
        return {}

    def bound_call(
        self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[MethodPlan, Mapping[str, Any]]:
        """Return the plan and the arguments of a call. Raises `TypeError` for anything but an async service method."""
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if owner is not None:
            found = [cls for cls in type(owner).__mro__ if name in self.plans.get(cls, {})][:1]
        else:
            found = [
                cls
                for cls, methods in self.plans.items()
                if name in methods and inspect.getattr_static(cls, name, None) is method
            ]
        if len(found) != 1:
            several = ", ".join(sorted(cls.__name__ for cls in found))
            fact = f"several services have it ({several}); pass the method of one" if found else "expected a method"
            raise TypeError(f"runs.start: {method!r}: {fact} of a registered AI service")
        plan = self.plans[found[0]][name]
        if not plan.is_coroutine:
            raise TypeError(f"runs.start: {plan.where} is not `async def`; only async methods can be started")
        return plan, bound_arguments(plan, args, kwargs)

    def open_request(self, seeds: Mapping[Any, Any]) -> Any:
        """Return a new request scope with these seeds."""
        scope: Any = self.scope
        return scope.request_scope(seeds)

    # --- reading and checking

    @property
    def plans(self) -> dict[type[Any], Mapping[str, MethodPlan]]:
        """The method plans of all services, by class; available after the check."""
        return {cls: service.plans for cls, service in self._services.items()}

    def run_problems(self, graph: BeanGraph, added: Iterable[Sequence[Tool]] = ()) -> Iterator[Problem]:
        """Decide which calls may be suspended. Yield problems with runs: of seeds, stores and durable methods.

        `added` are the tools that each endpoint adds to the services that it calls.
        """
        settle(self.plans)
        plans = [plan for methods in self.plans.values() for plan in methods.values()]
        added = [tools for tools in added if any(may_suspend(each, self.plans) for each in tools)]
        suspends = added or any(each.durable or each.may_suspend for each in plans)
        if not (self.run_seeds or suspends or _runs_are_imported()):
            return
        from ..runs.start_checks import run_problems

        yield from run_problems(self.plans, graph, self.run_seeds, self.layers.interceptors, added)

    def checked(self, graph: BeanGraph) -> None:
        """Use this graph for the plans of services, and to check the beans of tools."""
        self._graph = graph
        self.has_cost_estimator = isinstance(graph.value_of(_ESTIMATOR), SingleBean)
        self.layers = HostLayers(interceptors=global_interceptors(graph))
        self.offered_by = functools.cache(services_offered_by)

    def tool_problems(self, where: str, tool: Tool) -> Iterator[Problem]:
        """See `ServiceHost.tool_problems`."""
        where = f"{where}, tool {tool.specification.name}"
        if tool.requires_approval is not False:
            from ..runs.start_checks import hidden_argument_problems

            yield from hidden_argument_problems(where, tool)
        if tool.execution.model is ExecutionModel.EXECUTOR and self.workers.executor(tool.execution) is None:
            yield unknown_executor(where, tool.execution)
        if self._graph is not None:
            yield from tool_bean_problems(where, tool, self._graph)

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
        listed = *bean_types(sources), *(each.bean for each in providers_of(registered, options))
        named = (*strategies(options), *named_beans([registered, *sources]))
        implied = (*registrable(listed), *named)
        return Registration((definition,), implied, service.check)


def _runs_are_imported() -> bool:
    """Return True if the program has imported stores or engines of runs, so that a bean can be one."""
    return "toolbox.runs.store" in sys.modules or "toolbox.runs.run_engines" in sys.modules


def registrable(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """Yield the listed classes to register as beans: all except interfaces, which are bound to a bean."""
    for cls in listed:
        if not isinstance(cls, type):
            continue
        if not is_interface(cls) or any(name.startswith("__toolbox_") for name in vars(cls)):
            yield cls


class _Service:
    """One registered service. It is planned at the check, and created at the first request for it."""

    def __init__(self, cls: type[Any], options: ServiceOptions, host: ContainerHost) -> None:
        self._cls, self._options, self._host = cls, options, host
        self._plans: dict[str, MethodPlan] | None = None
        self._problems: list[Problem] = []
        self._planned_in: BeanGraph | None = None

    @property
    def plans(self) -> dict[str, MethodPlan]:
        """The plans of its methods, by name; available after the check."""
        assert self._plans is not None
        return self._plans

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """Create the service. The arguments are those of the class's constructor."""
        return implementation_of(self._cls, self.plans, self._host)(*args, **kwargs)

    def check(self, graph: BeanGraph) -> Iterator[Problem]:
        """Yield the service's problems in this graph of beans."""
        if self._planned_in is not graph:
            limits, layers = self._host.limits, self._host.layers
            planned = plan_service(self._cls, self._options, graph.names, limits=limits, host=layers)
            self._plans, self._problems = planned
            self._planned_in = graph
        plans = self.plans
        yield from self._problems
        yield from service_cycles(self._cls, self._host.offered_by)
        if (problem := self._host.models.problem(self._options.model, self._cls.__name__)) is not None:
            yield problem
        for provider in providers_of(self._cls, self._options):
            if provider.bean is not None:
                yield from graph.problems_of(point_of(provider.bean, f"{self._cls.__name__}, tool provider"))
        if (bean := BeanReference.to(self._options.tool_search).bean) is not None:
            yield from graph.problems_of(point_of(bean, f"{self._cls.__name__}, tool_search"))
        bounds = self._options.limits
        if isinstance(bounds, UsageLimits) and bounds.cost is not None and not self._host.has_cost_estimator:
            yield no_estimator(
                f"{self._cls.__name__}, limits=", next(iter(look_alikes(CostEstimator, graph.definitions)), "")
            )
        if any(plan.memory_parameter and plan.window for plan in plans.values()):
            yield from store_problems(graph)
        seen: set[object] = set()
        yield from guardrail_cycles(self._cls, plans, graph)
        for plan in plans.values():
            yield from reference_problems(named_at_method(self._cls, plan.name), graph)
            if isinstance(plan.system, FunctionMessage):
                yield from injection_problems(f"{plan.where}, system message", plan.system.injected, graph)
            for tool in (*plan.toolset.tools, *plan.compensations.values()):
                if (tool.where, tool.specification.name, tool.bean) not in seen:
                    seen.add((tool.where, tool.specification.name, tool.bean))
                    yield from self._host.tool_problems(plan.where, tool)


# --- checks of the beans that services and tools use


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
    for cls in dict.fromkeys(each.provides for each in graph.definitions):
        if not isinstance(cls, type) or service_options_of(cls) is not None:
            continue
        for name, member in may_be_marked_in(cls):
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


_ESTIMATOR = point_of(CostEstimator | None, "the estimator of costs")


def estimator_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the bean that estimates costs."""
    yield from graph.problems_of(_ESTIMATOR)
    value = graph.value_of(_ESTIMATOR)
    if not isinstance(value, SingleBean):
        return
    definition = graph.definitions[value.bean]
    estimator = class_of(definition.provides)
    if inspect.iscoroutinefunction(getattr(estimator, "estimate", None)):
        fact = f"{definition.label}.estimate is async def, which is not supported"
        yield Problem(_ESTIMATOR.where, fact, "declare it `def`, and keep the prices in memory")
    elif not method_takes(estimator, "estimate", 2):
        fact = f"{definition.label}.estimate does not take two arguments, the model's name and the usage"
        yield Problem(_ESTIMATOR.where, fact, "declare it `def estimate(self, model, usage)`")


_IDENTITY = point_of(SecurityIdentity | None, "the identity of the caller")


def identity_problems(graph: BeanGraph, restricted: Iterable[str]) -> Iterator[Problem]:
    """Yield problems with the identity, if one of these places needs it."""
    places = list(dict.fromkeys(restricted))
    if not places:
        return
    yield from graph.problems_of(_IDENTITY)
    if not isinstance(graph.value_of(_IDENTITY), SingleBean):
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        fact = f"{', '.join(places[:3])}{more}: roles are used, but no bean provides a SecurityIdentity"
        fix = (
            "pass identity= to install(…), register a producer, or declare a seed: Container(seeds=[SecurityIdentity])"
        )
        yield Problem(_IDENTITY.where, fact, fix)


def restricted_in(graph: BeanGraph, plans: Iterable[MethodPlan], read: Iterable[ReadTools]) -> Iterator[str]:
    """Yield the places of all tools and methods that are not for everyone; `read` is what `tools_of_beans` returned."""
    for tools, _ in read:
        yield from (tool.where for tool in tools if _is_restricted(tool))
    for cls in dict.fromkeys(class_of(each.provides) for each in graph.definitions):
        for name in mcp_marked(cls) if isinstance(cls, type) else ():
            if access_to_member(cls, name) is not None:
                yield f"{cls.__name__}.{name}"
    for plan in plans:
        if plan.access is not None:
            yield plan.where
        yield from (tool.where for tool in plan.toolset.tools if _is_restricted(tool))


def _is_restricted(tool: Tool) -> bool:
    """Return True for a tool with a mark of roles. With `not_self`, a program may have no identity."""
    return tool.access is not None and tool.access is not OF_KNOWN


def access_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield a problem for each mark of roles that has no effect."""
    for cls in dict.fromkeys(class_of(each.provides) for each in graph.definitions):
        if not isinstance(cls, type):
            continue
        marked = [  # without `object`
            (base, name)
            for base in cls.__mro__[:-1]
            for name, member in may_be_marked_in(base)
            if not isinstance(member, type) and marked_access(member) is not None
        ]
        if not marked and class_access(cls) is None:
            continue
        effective = {each.attribute for each in members_of(cls)} | set(mcp_marked(cls))
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
    yield from reference_problems(named_at_tool(tool), graph)
    yield from injection_problems(where, tool.injected, graph)


def reference_problems(named: Iterable[NamedAt], graph: BeanGraph) -> Iterator[Problem]:
    """Yield problems with the classes that decorators name, and with their beans."""
    for each in named:
        problems = list(each.problems())
        yield from problems
        if problems or each.reference.bean is None:
            continue
        point = point_of(each.reference.bean, each.where)
        value = graph.value_of(point)
        name = type_name(each.reference.type)
        is_missing = isinstance(value, NotFound) and not value.candidates
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
        first = beans_in(graph.value_of(point_of(named.reference.bean, named.where)))
        pending, seen = list(first), set(first)
        while pending:
            bean = graph.beans[pending.pop()]
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
        yield from NamedAt(type_name(each.type), "global_interceptor", each, is_at_tool=False).problems()


def key_function_problems(models: NamedModels, graph: BeanGraph) -> Iterator[Problem]:
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
