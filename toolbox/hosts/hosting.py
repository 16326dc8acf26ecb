"""Hosts the calls of a container's services: provides threads, models, conversations and runs while it is started.

Not here: the container itself (`container`), reading and checking services (`registered_services`), running a call
(`driver`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..capabilities import Late, load, tool_layers
from ..chat import ChatModel, ToolExecutionRequest, ToolProgress
from ..context import ActiveScope, InvocationContext, current_attributes, current_invocation
from ..conversations.conversation_blocks import HeldConversation
from ..conversations.keys import ChatMemoryKey, Owner, refuse_other
from ..conversations.memories import ChatMemory
from ..conversations.stores import ChatMemoryStore
from ..di.graph import BeanGraph
from ..di.scopes import RequestScope, outside_scopes
from ..di.values import SingleBean
from ..errors import ContainerNotStartedError, ConversationSuspendedError, IllegalConfigurationError, Problem
from ..events import EventListener, Listeners
from ..execution.cancellation import finish_before_cancellation
from ..execution.runners import LoopRunner
from ..execution.threads import (
    FORKED,
    Workers,
    await_on,
    keep_inherited,
    refuse_idle,
    register_for_fork,
    running_loop,
)
from ..limits import host_started, host_stopped
from ..models.pools import ConnectionPools
from ..models.selection import NamedModels
from ..security import SecurityIdentity, identity_in
from ..service_names import check_service, stored_names
from ..services.declaration import CallLimits
from ..services.option_checks import log_problem, options_with_logs
from ..services.plans import MethodPlan
from ..tools.failures import ToolErrors
from ..tools.function_calls import with_layers
from ..tools.pipeline import execute_tool
from ..tools.results import Encoded
from ..tools.tool_calls import Tool, ToolCall, ToolEnvironment, ToolLayer, ToolOutcome, ToolStep
from .bean_checks import ESTIMATOR, tool_bean_problems
from .model_beans import ModelBeans
from .registered_services import RegisteredServices, runs_are_imported
from .service_hosting import ServiceHosting

logger = logging.getLogger("toolbox.services")

T = TypeVar("T")

if TYPE_CHECKING:
    from ..runs.run_answers import Run
    from ..settings import ToolboxSettings


class EventObservers(EventListener, Protocol):
    """Receives events and delivers them later. A Protocol, because `toolbox.observers` uses the hosts."""

    async def stop(self, timeout: float) -> None:
        """Deliver what waits for up to `timeout` seconds."""
        ...


class ContainerHost(ServiceHosting[ModelBeans]):
    """Hosts the services of one container: provides threads, models and conversations while it is started."""

    is_container = True

    def __init__(
        self,
        scope: ActiveScope,
        *,
        models: Mapping[str, ChatModel] | None,
        overridden: Collection[str] = (),
        executors: Mapping[str, Executor] | None,
        tool_errors: ToolErrors | None,
        settings: ToolboxSettings,
        run_seeds: tuple[Any, ...] = (),
        run_identity: tuple[str, ...] = (),
    ) -> None:
        super().__init__(run_seeds, run_identity)
        self.scope, self.settings = scope, settings
        self.failures = tool_errors or ToolErrors()
        self.limits = CallLimits(
            max_tool_rounds=settings.max_tool_rounds,
            max_tool_calls_per_response=settings.max_tool_calls_per_response,
            max_result_chars=settings.max_result_chars,
            timeout=settings.timeout,
        )
        self.max_concurrent_tools = settings.max_concurrent_tools
        self.models = ModelBeans(NamedModels(models, settings), self, overridden)
        self.pools = ConnectionPools()
        self._executors = dict(executors or {})
        self.running.stop_timeout = settings.stop_timeout
        self.running_loop: asyncio.AbstractEventLoop | None = None
        self._forked = ""
        self._observers: EventObservers | None = None
        self.registered = RegisteredServices(self, self.limits)
        self._find_added: Sequence[Callable[[BeanGraph], Mapping[str, Sequence[Tool]]]] = ()
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
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the loop in a forked process, because it runs in the parent."""
        keep_inherited(self.running_loop, self._memories, self.running, self.models.sources)
        if self.running_loop is not None:
            self.running_loop, self._forked = None, FORKED

    def read_added_tools(self, find_added: Sequence[Callable[[BeanGraph], Mapping[str, Sequence[Tool]]]]) -> None:
        """Read the tools that endpoints add, by the names of their functions, and note if they may suspend a call."""
        self._find_added = find_added
        added = [tool for by_place in self._added_tools() for tools in by_place.values() for tool in tools]
        self.added_may_suspend = any(self.tool_may_suspend(tool) for tool in added)

    def tools_added_by(self, place: str) -> Sequence[Tool] | None:
        """Return the tools that an endpoint adds, by the name of its function; None for an unknown endpoint."""
        return next((by_place[place] for by_place in self._added_tools() if place in by_place), None)

    def _added_tools(self) -> Iterator[Mapping[str, Sequence[Tool]]]:
        graph = self.registered.graph
        return (find(graph) for find in self._find_added if graph is not None)

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

    def observe(self, observers: EventObservers) -> None:
        """Send events to observers, which have the rest of the grace period for them when the container stops."""
        self._observers = observers
        self.add_listener(observers)

    async def stop(self) -> None:
        """Wait for running calls up to the settings' `stop_timeout`, then end all that runs; log what did not end.

        A cancellation ends this wait. It is raised after the rest.
        """
        timeout, now = self.settings.stop_timeout, asyncio.get_running_loop().time
        began = now()
        host_stopped(self)
        try:
            if self._runs is not None:
                await self._runs.stop_taking_over()
            await self.running.wait_for_end(timeout)
        finally:
            waited = min(now() - began, timeout)
            await finish_before_cancellation(self._end_all(timeout, waited), self, timeout)

    async def _end_all(self, timeout: float, waited: float) -> None:
        """End the calls and the observers, then the threads and the runs, also if a step before them fails."""
        late: list[str] = []
        now = asyncio.get_running_loop().time
        end_by = now() + timeout - waited

        async def stop_workers() -> None:
            if stuck := await self.workers.stop(timeout if not late else 0.1):
                text = "the container is stopping, but these tools still run on a thread: %s"
                logger.warning(text, ", ".join(stuck))

        async with AsyncExitStack() as steps:  # calls the last one first
            steps.callback(self._forget_start)
            if self._runs is not None:
                steps.push_async_callback(self._runs.close)
            steps.push_async_callback(stop_workers)
            if late := await self.running.stop(timeout):
                text = "cancelled because the container is stopping (waited %g s): %s"
                logger.warning(text, round(waited, 2), ", ".join(late))
            if self._observers is not None:
                await self._observers.stop(max(end_by - now(), 0.1))

    def abandon(self) -> None:
        """Refuse calls from now on, without a wait for those that run: the event loop is blocked."""
        host_stopped(self)
        self.running_loop = None

    def _forget_start(self) -> None:
        self._renew_workers()
        self._memories = self._run_store = None
        self.listeners = self._observers = None
        self.running_loop = None

    async def close_models(self) -> None:
        """Close the models that were created from settings, and the connections of all models."""
        await finish_before_cancellation(self._close_models(), self, self.settings.stop_timeout)

    async def _close_models(self) -> None:
        try:
            await self.models.sources.aclose()
        finally:
            if self.pools is not None:
                await self.pools.aclose()

    # --- for services

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of calls: that on which the container was started; the caller's while that does not run.

        A plugin for tests may start a container on the loop of a fixture, which does not run during a test on another
        one. Raises `ContainerNotStartedError`, also without any loop that runs.
        """
        if (home := self.running_loop) is None:
            raise ContainerNotStartedError("a call of a service", self._forked)
        if not home.is_running():
            if (here := running_loop()) is not None:
                return here
            refuse_idle(home, "a call of a service")
        return home

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for synchronous methods: that of the container."""
        return self.loop

    async def caller(self) -> SecurityIdentity | None:
        """Return the identity of the active request; None outside of requests, where the program itself acts."""
        scope: Any = self.scope
        return None if scope.is_used_by_program else await identity_in(self.scope)

    async def execute(
        self,
        scope: RequestScope,
        tools: Mapping[str, Tool],
        request: ToolExecutionRequest,
        caller: type[Any],
        failures: ToolErrors,
        memory_id: object = None,
        on_progress: Callable[[ToolProgress], object] | None = None,
    ) -> ToolOutcome:
        """Run one of `tools` without a service, for example for MCP, in the current `scope`, whose only work it is.

        The tool sees `caller` as `InvocationContext.service`. The container's error handlers complete `failures`.
        `on_progress` receives the tool's progress, on the event loop. Tools that the current identity may not
        call are unknown.
        Raises the same errors as `execute_tool`.
        """
        outer = current_invocation.get()
        if any(each.access is not None for each in tools.values()):
            identity = await identity_in(self.scope)
            tools = {name: each for name, each in tools.items() if each.access is None or each.access.allows(identity)}
        if (tool := tools.get(request.name)) is not None:
            layers = (_settling(scope), *tool_layers(self.registered.layering.interceptors))
            tools = {**tools, request.name: with_layers(tool, layers)}
        context = InvocationContext(
            caller,
            request.name,
            memory_id,
            attributes=current_attributes.get(),
            outer_invocation_id=outer.invocation_id if outer is not None else None,
        )
        await self.note_caller(context)
        environment = ToolEnvironment(
            tools=tools,
            context=context,
            scope=self.scope,
            runner=LoopRunner(self.workers),
            failures=failures.over(self.failures),
            max_result_chars=self.limits.max_result_chars,
            listeners=self.listeners,
            on_progress=on_progress,
            model=self.models.find,
        )
        outcome = await execute_tool(request, environment)
        scope.has_failed = scope.has_failed or outcome.execution.is_error
        return outcome

    def chat_memory(self, service: type[Any] | str, memory_id: object) -> ChatMemory:
        """Return the access to one conversation of a service, its class or stored name."""
        check_service(service)
        name, *former = self.names_of(service)
        return ChatMemory(self, ChatMemoryKey(name, str(memory_id), tuple(former)))

    @asynccontextmanager
    async def hold_conversation(self, service: type[Any] | str, memory_id: object) -> AsyncIterator[HeldConversation]:
        """Hold one conversation of a service, its class or stored name, with its beans, for a block.

        Raises `InvalidMemoryIdError`, `MemoryInUseError` inside of a call or a block of it, `AccessDeniedError` if it
        belongs to another identity, `ConversationSuspendedError` while a run of it is suspended, and
        `IllegalConfigurationError` if the store keeps no beans.
        """
        room, (name, *former) = self.conversations.of(service, memory_id), self.names_of(service)
        key = ChatMemoryKey(name, room.memory_id, tuple(former))
        memories, identity = await self.memories(), await self.caller()
        if not memories.keeps_logs:
            fact = "the store of the conversations does not keep beans"
            fix = "use a store of toolbox: in memory, toolbox.sql or toolbox.redis"
            raise IllegalConfigurationError([Problem(f"{self.label_of(name)}, conversation_scope", fact, fix)])
        async with memories.hold(key) as block:
            head = await memories.head(key)
            if head is not None and not self.shares_conversations(key.service):
                refuse_other(head.owner, key, identity, self.run_identity)
            await self._refuse_suspended(key)
            owner = None if identity is None else Owner.of(identity, self.run_identity)
            store = partial(memories.store_beans, key, owner=owner)
            loaded = {} if head is None else head.beans
            yield HeldConversation(block, loaded, room, store)

    async def _refuse_suspended(self, key: ChatMemoryKey) -> None:
        """Raise `ConversationSuspendedError` if a run of the conversation waits, unless the conversation goes on."""
        plans = self.plans_of(key.service).values()
        may_wait = self.added_may_suspend or any(each.checks_suspended or each.providers for each in plans)
        if not may_wait or any(each.options.on_suspended == "continue" for each in plans):
            return
        if (run_id := await self.suspended_run(key)) is not None:
            raise ConversationSuspendedError(self.label_of(key.service), run_id)

    async def on_own_loop(
        self, work: Callable[[], Coroutine[Any, Any, T]], label: str = "a use of a conversation"
    ) -> T:
        """Await `work()` on the loop of the container, which waits for it when it stops."""

        async def counted() -> T:
            with self.running.task(label):
                return await work()

        # There is none while beans are being stopped.
        home = None if self.running_loop is None else self.loop
        if home is None or home is asyncio.get_running_loop():
            return await counted()
        return await await_on(home, counted)

    def class_behind(self, cls: type[Any]) -> type[Any]:
        """Return the class of the bean that provides `cls`: a subclass, or `cls` itself."""
        graph = self.registered.graph
        return cls if graph is None else graph.class_behind(cls)

    async def open_stores(self, find_bean: Callable[[int], Awaitable[Any]]) -> None:
        """Open the `RunStore` bean, if there is one, and let the `ChatMemoryStore` bean check its tables, if it can.

        `find_bean` returns the bean of a key of the graph. Raises one `IllegalConfigurationError` with the problems of
        both stores.
        """
        problems: list[Problem] = []
        for opening in (self._open_conversations, partial(self._open_run_store, find_bean)):
            try:
                await opening()
            except IllegalConfigurationError as error:
                problems += error.problems
        if problems:
            raise IllegalConfigurationError(problems)

    async def _open_conversations(self) -> None:
        if self._has_bean(ChatMemoryStore):
            memories = await self.memories()  # the calls use the same ones
            if not memories.keeps_logs and (problems := [*self._log_problems(type(memories.store))]):
                raise IllegalConfigurationError(problems)
            if (open_at_start := getattr(memories.store, "open_at_start", None)) is not None:
                await open_at_start()

    def _log_problems(self, store: type[object]) -> Iterator[Problem]:
        """Yield a problem for each option that needs logs, for a store whose class the graph did not know."""
        for cls, plans in self.plans.items():
            plan = next((each for each in plans.values() if each.memory_parameter and each.window), None)
            for option in () if plan is None else options_with_logs(plan.options):
                yield log_problem(cls.__name__, option, store)
        if self.registered.graph is not None:
            yield from self.registered.bean_problems(self.registered.graph, store)

    async def _open_run_store(self, find_bean: Callable[[int], Awaitable[Any]]) -> None:
        if runs_are_imported() and self._has_bean(load(Late.RUN_STORE)):
            store = await self.run_store()
            with outside_scopes():
                problems = await load(Late.CHECKS_WITH_THE_OPENED_RUN_STORE)(
                    self.plans, self.registered.graph, store, find_bean
                )
            if problems:
                raise IllegalConfigurationError(problems)

    def _has_bean(self, wanted: Any) -> bool:
        graph = self.registered.graph
        return graph is not None and isinstance(graph.resolve_type(wanted, None), SingleBean)

    # --- runs

    async def suspended_run(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        return await super().suspended_run(key) if runs_are_imported() else None

    async def run_of(self, key: ChatMemoryKey) -> Run[Any] | None:
        """Return the newest run of a conversation that has not ended, or None."""
        return await super().run_of(key) if runs_are_imported() else None

    async def cancel_waiting(self, key: ChatMemoryKey, reason: str) -> None:
        """Cancel the runs of a conversation that wait."""
        if runs_are_imported():
            await super().cancel_waiting(key, reason)

    async def forget_runs(
        self, *, owner: Owner | None = None, service: str | None = None, memory_id: str | None = None
    ) -> int:
        """Delete ended runs: those of a conversation, or those that an owner has started outside of conversations."""
        if not runs_are_imported():
            return 0
        return await super().forget_runs(owner=owner, service=service, memory_id=memory_id)

    async def open_runs(self, *, take_over: bool) -> None:
        """Open the `RunStore` and `RunEngine` beans, if there are any, and take over lapsed runs from now on."""
        self.takes_over_runs = take_over
        if runs_are_imported() and any(map(self._has_bean, (load(Late.RUN_STORE), load(Late.RUN_ENGINE)))):
            await self.runs.open(take_over=take_over)  # without these beans, the first run opens them

    def plans_of(self, service: str) -> Mapping[str, MethodPlan]:
        """Return the plans of the service with this stored name, also a former one; empty for an unknown one."""
        return next((methods for cls, methods in self.plans.items() if service in stored_names(cls)), {})

    def open_request(self, seeds: Mapping[Any, Any]) -> Any:
        """Return a new request scope with these seeds."""
        scope: Any = self.scope
        return scope.request_scope(seeds)

    # --- the services and their beans

    @property
    def plans(self) -> dict[type[Any], Mapping[str, MethodPlan]]:
        """The method plans of all services, by class; available after the check."""
        return self.registered.plans

    def use_graph(self, graph: BeanGraph) -> None:
        """Use this graph for the plans of services, and to check the beans of tools."""
        self.registered.use_graph(graph)
        self.has_cost_estimator = isinstance(graph.resolve(ESTIMATOR), SingleBean)
        identity = graph.resolve_type(SecurityIdentity, None)
        self.has_identity_bean = isinstance(identity, SingleBean)
        # A dependent one would be produced again, only for its name.
        self.notes_callers = not isinstance(identity, SingleBean) or graph.definitions[identity.bean].is_shared

    def unknown_beans(self, where: str, tool: Tool) -> Iterator[Problem]:
        """Yield problems with the beans that a tool needs. Without a graph, there is nothing to check yet."""
        if self.registered.graph is not None:
            yield from tool_bean_problems(where, tool, self.registered.graph)


def _settling(scope: RequestScope) -> ToolLayer:
    """Return the layer of a call that is all the work of its scope: what `@on_success` raises is the tool's error."""

    def add(step: ToolStep, tool: Tool) -> ToolStep:
        async def run_and_settle(call: ToolCall) -> Encoded:
            encoded = await step(call)
            if not encoded.is_error:
                await scope.settle()
            return encoded

        return run_and_settle

    return add
