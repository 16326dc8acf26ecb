"""What every host of services does alike: conversations, runs, and the beans that services ask for.

A container has its own loop, its scopes and many services (`hosting`); a service without a container runs on its
caller's loop and needs nothing started (`standalone`). Everything that does not depend on that is here, once.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..capabilities import Late, load
from ..context import ActiveScope, InvocationContext, complete_context
from ..conversations.keys import ChatMemoryKey, Owner
from ..conversations.memories import ChatMemories
from ..conversations.stores import ChatMemoryStore, InMemoryChatMemoryStore
from ..conversations.views import ChosenView, FullHistory
from ..di.scopes import active, outside_scopes
from ..di.stored_beans import StoredBeans
from ..errors import IllegalConfigurationError, Problem
from ..events import Listeners
from ..execution.markers import ExecutionModel, unknown_executor
from ..execution.threads import Workers
from ..introspection import type_name
from ..limits import CostEstimator
from ..models.pools import ConnectionPools
from ..security import SecurityIdentity, identity_in
from ..service_names import stored_names
from ..services.abandoned_runs import abandon_runs
from ..services.host_needs import HostModels
from ..services.inner_plans import call_may_suspend
from ..services.open_calls import Running
from ..services.plans import MethodPlan
from ..services.recording_needs import PlaceInRun
from ..tools.failures import ToolErrors
from ..tools.tool_calls import Tool

if TYPE_CHECKING:
    from ..conversations.conversations_bean import Conversations
    from ..runs.run_answers import Run
    from ..runs.run_engines import RunEngine
    from ..runs.runs_bean import Runs
    from ..runs.store import RunStore


T = TypeVar("T")
Models = TypeVar("Models", bound=HostModels)


class ServiceHosting(ABC, Generic[Models]):
    """The common part of a `ServiceHost`. `scope` has the beans."""

    scope: ActiveScope
    workers: Workers
    failures: ToolErrors
    max_concurrent_tools: int
    models: Models
    listeners: Listeners | None = None
    has_cost_estimator = False
    has_identity_bean = True
    notes_callers = True
    added_may_suspend = False
    takes_over_runs = False
    pools: ConnectionPools | None = None

    def __init__(self, run_seeds: tuple[Any, ...] = (), run_identity: tuple[str, ...] = ()) -> None:
        self.running = Running()
        self.run_seeds, self.run_identity = run_seeds, run_identity
        self._memories: ChatMemories | None = None
        self._runs: Runs | None = None
        self._run_store: RunStore | None = None

    @property
    @abstractmethod
    def plans(self) -> Mapping[type[Any], Mapping[str, MethodPlan]]:
        """The method plans of all services, by class."""

    @property
    @abstractmethod
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of invocations; None for the caller's loop."""

    @abstractmethod
    def sync_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for synchronous methods."""

    @abstractmethod
    def unknown_beans(self, where: str, tool: Tool) -> Iterator[Problem]:
        """Yield problems with the beans that a tool needs."""

    def class_behind(self, cls: type[Any]) -> type[Any]:
        """Return `cls`: a service that is used without a container has no beans that provide it."""
        return cls

    async def application_bean(self, wanted: Any) -> Any:
        """Return a bean from outside of all requests, or None."""
        with outside_scopes():
            return await self.scope.find(wanted)

    async def cost_estimator(self) -> CostEstimator | None:
        """Return the bean that estimates costs, if there is one."""
        return await self.scope.aget(CostEstimator) if self.has_cost_estimator else None

    async def note_caller(self, context: InvocationContext) -> None:
        """Note the name of the caller in a context, for logs and traces."""
        # Without a bean, the caller can only be a seed of a scope.
        if self.notes_callers and (self.has_identity_bean or active.get() is not None):
            try:
                identity = await identity_in(self.scope)
            except Exception:  # reported where the identity is needed, if it is
                return
            complete_context(context, user=identity.name or None)

    @abstractmethod
    async def caller(self) -> SecurityIdentity | None:
        """Return the identity that acts, which may be anonymous; None for the program itself."""

    async def memories(self) -> ChatMemories:
        """Return the conversations: in the `ChatMemoryStore` bean, or in the memory of this process without one."""
        if self._memories is None:
            # Conversations outlive requests.
            store: ChatMemoryStore | None = await self.application_bean(ChatMemoryStore)
            if self._memories is None:
                self._memories = ChatMemories(InMemoryChatMemoryStore() if store is None else store)
        return self._memories

    async def stop_conversation(self, key: ChatMemoryKey, by: str | SecurityIdentity | None = None) -> bool:
        """End the call or the run that is at work in a conversation, in any process, or the run that waits in it.

        Takes no lock, and returns when its turn is stored; in code of the call itself, at once. Returns False if
        nothing is under way, also for an unknown conversation. Await it on the host's loop.
        """
        memories, name = await self.memories(), by.name if isinstance(by, SecurityIdentity) else by
        if key in memories.entered_here():
            return await memories.stop(key, name)
        return bool(await self.runs.stop_in(key, by, lambda: memories.stop(key, name)))

    @abstractmethod
    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the host's loop, as work that its stop waits for."""

    @property
    def conversations(self) -> Conversations:
        """The conversations of all services, for programs."""
        from ..conversations.conversations_bean import Conversations

        return Conversations(self)

    def view_of(self, service: str) -> ChosenView | None:
        """Return what `chat_memory=` of a service says; everything for one that this program does not have."""
        plan = next(iter(self.plans_of(service).values()), None)
        return FullHistory() if plan is None else plan.window

    def shares_conversations(self, service: str) -> bool:
        """Return True for a service with `shared_conversations=True`."""
        plan = next(iter(self.plans_of(service).values()), None)
        return plan is not None and plan.options.shared_conversations

    @abstractmethod
    def plans_of(self, service: str) -> Mapping[str, MethodPlan]:
        """Return the plans of the service with this stored name, also a former one; empty for an unknown one."""

    def find_class(self, service: str) -> type[Any] | None:
        """Return the class of the service with this stored name, also a former one; None for an unknown one."""
        return next((plan.service for plan in self.plans_of(service).values()), None)

    def names_of(self, service: str | type[Any]) -> tuple[str, ...]:
        """Return all stored names of a service, the present one first; `service` is its class or one of its names.

        The name of a service that this program does not have is the only one.
        """
        if isinstance(service, type):
            return stored_names(service)
        cls = self.find_class(service)
        return (service,) if cls is None else stored_names(cls)

    def label_of(self, service: str) -> str:
        """Return the name of the class of a service with this stored name, for error texts."""
        cls = self.find_class(service)
        return service.rpartition(".")[2] if cls is None else cls.__name__

    def find_charge(self, service: str, method: Any) -> str | None:
        """Return the name of a method that can be in charge of conversations of a service; None for all others."""
        function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
        for entry in self.plans_of(service).values():
            for plan in (entry, *entry.team.values()) if entry.team else ():
                if inspect.getattr_static(plan.service, plan.name, None) is function:
                    return plan.where
        return None

    def open_conversation(self, key: ChatMemoryKey, beans: StoredBeans) -> AbstractAsyncContextManager[object]:
        """Return a new scope for the beans of a conversation, which only the programs of containers have."""
        scope: Any = self.scope
        opened: AbstractAsyncContextManager[object] = scope.open_conversation(key, beans)
        return opened

    def tool_may_suspend(self, tool: Tool) -> bool:
        """Return True if a call of this tool may be suspended, also inside of a service that it calls."""
        return call_may_suspend(tool, self.plans)

    def tool_problems(self, where: str, tool: Tool) -> Iterator[Problem]:
        """Yield problems with a tool: its approval, an unknown executor, and beans that it cannot get."""
        where = f"{where}, tool {tool.specification.name}"
        if tool.requires_approval is not False:
            yield from load(Late.CHECKS_OF_APPROVED_ARGUMENTS)(where, tool)
        if tool.execution.model is ExecutionModel.EXECUTOR and self.workers.executor(tool.execution) is None:
            yield unknown_executor(where, tool.execution)
        yield from self.unknown_beans(where, tool)

    def retriever_problems(self, plan: MethodPlan) -> Iterator[Problem]:
        """Yield problems with the method's retrievers: an unknown executor, and beans that they cannot get."""
        for each in plan.retrievers:
            where, execution = f"{plan.where}, retriever {type_name(each.tool.owner)}", each.tool.execution
            if execution.model is ExecutionModel.EXECUTOR and self.workers.executor(execution) is None:
                yield unknown_executor(where, execution)
            yield from self.unknown_beans(where, each.tool)

    def fallback_problems(self, plan: MethodPlan) -> Iterator[Problem]:
        """Yield a problem if the method's `@fallback` needs an unknown executor."""
        if (answer := plan.fallback) is None or answer.execution.model is not ExecutionModel.EXECUTOR:
            return
        if self.workers.executor(answer.execution) is None:
            yield unknown_executor(answer.where, answer.execution)

    # --- runs

    @property
    def runs(self) -> Runs:
        """The runs of these services."""
        if self._runs is None:
            made: Runs = load(Late.RUNS)(self)
            self._runs = made
        return self._runs

    def new_run(self, run_id: str | None) -> PlaceInRun:
        """Return the place of the outermost invocation of a new run; without an id, it gets one."""
        place: PlaceInRun = load(Late.A_NEW_RUN)(run_id)
        return place

    def plan_of(self, method: Any) -> MethodPlan:
        """Return the plan of an async service method. Raises `TypeError` for anything else."""
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
        return plan

    def tools_added_by(self, place: str) -> Sequence[Tool] | None:
        """Return the tools that an endpoint adds to its calls; None: only containers know endpoints."""
        return None

    async def run_engine(self) -> RunEngine:
        """Return the `RunEngine` bean, or an engine that executes runs in this process."""
        engine: RunEngine | None = await self.application_bean(load(Late.RUN_ENGINE))
        local: Callable[[], RunEngine] = load(Late.RUN_ENGINE_OF_THIS_PROCESS)
        return local() if engine is None else engine

    async def run_store(self) -> RunStore:
        """Return the `RunStore` bean, or the store in memory without one; opened."""
        if self._run_store is None:
            found: RunStore | None = await self.application_bean(load(Late.RUN_STORE))
            in_memory: Callable[[], RunStore] = load(Late.RUN_STORE_IN_MEMORY)
            store = in_memory() if found is None else found
            durable = [plan.where for methods in self.plans.values() for plan in methods.values() if plan.durable]
            if durable and not store.persistent:
                raise IllegalConfigurationError([load(Late.CHECK_OF_PERSISTENCE)(durable[0])])
            await store.open()
            if self._run_store is None:
                self._run_store = store
        return self._run_store

    async def suspended_run(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        return await self.runs.suspended_in(key)

    async def run_of(self, key: ChatMemoryKey) -> Run[Any] | None:
        """Return the newest run of a conversation that has not ended, or None."""
        return await self.runs.run_of(key.service, key.memory_id)

    async def cancel_waiting(self, key: ChatMemoryKey, reason: str) -> None:
        """Cancel the runs of a conversation that wait."""
        await self.runs.cancel_waiting(key.service, key.memory_id, reason)

    async def forget_runs(
        self, *, owner: Owner | None = None, service: str | None = None, memory_id: str | None = None
    ) -> int:
        """Delete ended runs: those of a conversation, or those that an owner has started outside of conversations."""
        return await self.runs.forget_runs(owner=owner, service=service, memory_id=memory_id)

    async def cancel_run(self, run_id: str, reason: str) -> str:
        """Cancel a suspended run. Return the name of the class of its service."""
        return self.label_of((await self.runs.cancel(run_id, reason)).service)

    async def abandon_runs(self, error: BaseException) -> list[str]:
        """Cancel the runs of a `RunSuspendedError` that left a tool. Return the names of their services."""
        return await abandon_runs(error, self.cancel_run)
