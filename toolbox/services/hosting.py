"""Services as beans of a container: what registering one means, and the container's side of their calls.

Not here: the container itself (`container`), what a call does (`driver`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..chat import ChatModel, ToolExecutionRequest
from ..context import ActiveScope, InvocationContext, current_attributes, current_invocation
from ..di.beans import Stop, read_class
from ..di.graph import BeanGraph, Registration
from ..di.marks import Scope
from ..di.points import Names, point_of
from ..di.scopes import outside_scopes
from ..errors import ContainerNotStartedError, MissingBeanError, Problem
from ..events import EventListener, Listeners
from ..execution import (
    FORKED,
    ExecutionModel,
    LoopRunner,
    Workers,
    keep_inherited,
    renewed_after_fork,
    unknown_executor,
)
from ..tools.failures import ToolErrors
from ..tools.pipeline import Tool, ToolEnvironment, ToolOutcome, execute_tool
from ..tools.sources import bean_types
from .checks import injection_problems, store_problems, tool_bean_problems
from .declaration import CallLimits, ServiceOptions, service_options_of
from .implementation import implementation_of
from .interfaces import is_interface, method_names
from .listing import providers_of, service_cycles, sources_of
from .memory import ChatMemories, ChatMemory, ChatMemoryKey, ChatMemoryStore, InMemoryChatMemoryStore
from .planning import plan_service
from .plans import FunctionMessage, MethodPlan
from .running import Running

logger = logging.getLogger("toolbox.services")

T = TypeVar("T")

if TYPE_CHECKING:
    from ..models.selection import NamedModels
    from ..settings import ToolboxSettings


class ContainerHost:
    """Hosts the services of one container: its threads, models, conversations, while it is started."""

    workers: Workers
    listeners: Listeners | None = None

    def __init__(
        self,
        scope: ActiveScope,
        *,
        models: Mapping[str, ChatModel] | None,
        executors: Mapping[str, Executor] | None,
        tool_errors: ToolErrors | None,
        settings: ToolboxSettings,
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
        self._executors = dict(executors or {})
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forked = ""
        self._memories: ChatMemories | None = None
        self._services: dict[type[Any], _Service] = {}
        self._graph: BeanGraph | None = None
        self.running = Running()
        self._renew_workers()

    def _renew_workers(self) -> None:
        self.workers = Workers(
            pool_size=self.settings.pool_size,
            thread_limit=self.settings.thread_limit,
            executors=self._executors,
            slow_call_warning=self.settings.slow_call_warning,
        )

    # --- its life

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on invocations run on `loop`."""
        self._loop = loop
        renewed_after_fork(self)

    def renew_after_fork(self) -> None:
        """Forget, in a forked process, the loop: it runs in the parent."""
        keep_inherited(self._loop, self._memories, self.running, self.models)
        if self._loop is not None:
            self._loop, self._forked = None, FORKED

    async def find_listeners(self) -> None:
        """From now on the beans that are `EventListener`s are told of what happens."""
        # They outlive requests, as the container does, which may be started inside another's request.
        with outside_scopes():
            found = await self.scope.aget(list[EventListener])
        self.listeners = Listeners(found) if found else None

    async def stop(self) -> list[str]:
        """Waits for what is under way, up to the settings' `stop_timeout`, then ends it; logs what would not end.

        Returns the labels of the invocations that were cancelled and of the tools whose threads go on.
        """
        timeout = self.settings.stop_timeout
        late = await self.running.stop(timeout)
        stuck = await self.workers.stop(timeout if not late else 0.1)
        if late:
            logger.warning("cancelled after %g s, for the container stops: %s", timeout, ", ".join(late))
        if stuck:
            logger.warning("still on a thread although the container stops: tool %s", ", ".join(stuck))
        self._renew_workers()
        self._memories = None
        self.listeners = None
        self._loop = None
        return late + stuck

    async def close_models(self) -> None:
        """Closes the models made from settings."""
        await self.models.aclose()

    # --- what services ask of it

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """See `ServiceHost.loop`."""
        if self._loop is None:
            raise ContainerNotStartedError("a call of a service", self._forked)
        return self._loop

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """See `ServiceHost.sync_loop`."""
        return self.loop

    def model(self, name: str | None) -> ChatModel:
        """See `ServiceHost.model`."""
        return self.models.find(name)

    async def memories(self) -> ChatMemories:
        """See `ServiceHost.memories`: kept in the `ChatMemoryStore` bean, else in process."""
        if self._memories is None:
            # Conversations outlive requests.
            with outside_scopes():
                try:
                    store: ChatMemoryStore = await self.scope.aget(ChatMemoryStore)
                except MissingBeanError:
                    store = InMemoryChatMemoryStore()
            if self._memories is None:
                self._memories = ChatMemories(store)
        return self._memories

    async def execute(
        self,
        tools: Mapping[str, Tool],
        request: ToolExecutionRequest,
        caller: type[Any],
        failures: ToolErrors,
        memory_id: object = None,
    ) -> ToolOutcome:
        """Runs one of `tools`, by name, that somebody outside of any service asks for, in the scope active here.

        `caller` is what the tool sees as `InvocationContext.service`; what `failures` leaves open is as the container
        is set. Raises as `execute_tool` does.
        """
        outer = current_invocation.get()
        environment = ToolEnvironment(
            tools=tools,
            context=InvocationContext(
                caller,
                request.name,
                memory_id,
                attributes=current_attributes(),
                outer_invocation_id=outer.invocation_id if outer is not None else None,
            ),
            scope=self.scope,
            runner=LoopRunner(self.workers),
            failures=failures.over(self.failures),
            max_result_chars=self.limits.max_result_chars,
            listeners=self.listeners,
        )
        return await execute_tool(request, environment)

    def chat_memory(self, service: type[Any], memory_id: object) -> ChatMemory:
        """One conversation of a service."""
        return ChatMemory(self, ChatMemoryKey.of(service, memory_id))

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """See `MemoryHost.on_own_loop`; stopping the container waits for it."""

        async def counted() -> T:
            with self.running.task("a use of a conversation"):
                return await work()

        home = self._loop
        if home is None or home is asyncio.get_running_loop():  # None: beans are being stopped
            return await counted()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(counted(), home))

    # --- reading and checking

    @property
    def plans(self) -> dict[type[Any], Mapping[str, MethodPlan]]:
        """The methods of the services, by class, once they have been checked."""
        return {cls: service.plans for cls, service in self._services.items()}

    def checked(self, graph: BeanGraph) -> None:
        """From now on this is the graph that tools find their beans in."""
        self._graph = graph

    def tool_problems(self, where: str, tool: Tool) -> Iterator[Problem]:
        """See `ServiceHost.tool_problems`."""
        where = f"{where}, tool {tool.specification.name}"
        if tool.execution.model is ExecutionModel.EXECUTOR and self.workers.executor(tool.execution) is None:
            yield unknown_executor(where, tool.execution)
        if self._graph is not None:
            yield from tool_bean_problems(where, tool, self._graph)

    def read(self, registered: object, names: Names | None = None) -> Registration | None:
        """What registering an AI service means; None for anything else. `names`: classes its annotations may mean."""
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
        listed = *bean_types(sources_of(registered)), *(each.bean for each in providers_of(registered, options))
        return Registration((definition,), tuple(registrable(listed)), service.check)


def registrable(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """The classes that become beans by being listed: all but interfaces, which are bound to a bean."""
    for cls in listed:
        if not isinstance(cls, type):
            continue
        if not is_interface(cls) or any(name.startswith("__toolbox_") for name in vars(cls)):
            yield cls


class _Service:
    """One registered service: planned when it is checked, made when it is first asked for."""

    def __init__(self, cls: type[Any], options: ServiceOptions, host: ContainerHost) -> None:
        self._cls, self._options, self._host = cls, options, host
        self._plans: dict[str, MethodPlan] | None = None
        self._problems: list[Problem] = []
        self._planned_in: BeanGraph | None = None

    @property
    def plans(self) -> dict[str, MethodPlan]:
        """Its methods, by name."""
        if self._plans is None:
            self._plans, _ = plan_service(self._cls, self._options, limits=self._host.limits)
        return self._plans

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """The service; what it is given is what its own constructor wants."""
        return implementation_of(self._cls, self.plans, self._host)(*args, **kwargs)

    def check(self, graph: BeanGraph) -> Iterator[Problem]:
        """What is wrong with it, among these beans."""
        self._host.checked(graph)
        if self._planned_in is not graph:
            planned = plan_service(self._cls, self._options, graph.names, limits=self._host.limits)
            self._plans, self._problems = planned
            self._planned_in = graph
        plans = self.plans
        yield from self._problems
        yield from service_cycles(self._cls)
        if (problem := self._host.models.problem(self._options.model, self._cls.__name__)) is not None:
            yield problem
        for provider in providers_of(self._cls, self._options):
            if provider.bean is not None:
                yield from graph.problems_of(point_of(provider.bean, f"{self._cls.__name__}, tool provider"))
        if any(plan.memory_parameter and plan.window for plan in plans.values()):
            yield from store_problems(graph)
        seen: set[object] = set()
        for plan in plans.values():
            if isinstance(plan.system, FunctionMessage):
                yield from injection_problems(f"{plan.where}, system message", plan.system.injected, graph)
            for tool in plan.toolset.tools:
                if (tool.where, tool.specification.name, tool.bean) not in seen:
                    seen.add((tool.where, tool.specification.name, tool.bean))
                    yield from self._host.tool_problems(plan.where, tool)
