"""Services without a container: `create_ai_service`.

Not here: the implementation of their methods (`services.methods`), services of a container (`hosting`).
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import TypeForm

from ..bean_references import BeanReference, global_priority
from ..capabilities import Capabilities, Late, load, named_problems
from ..chat import ChatModel
from ..context import ActiveScope, InvocationContext
from ..di.beans import read_class
from ..di.injection_points import MISSING
from ..errors import IllegalConfigurationError, Problem
from ..execution.threads import LoopThread, Workers, keep_inherited, register_for_fork
from ..introspection import takes, type_name
from ..limits import CostEstimator, UsageLimits, host_started, no_estimator
from ..models.fallbacks import CoolingModels
from ..models.routing import router_in
from ..models.selection import key_function_of, no_model
from ..security import SecurityIdentity, identity_from, identity_in
from ..service_names import stored_names
from ..services.call_messages import FunctionMessage
from ..services.declaration import ServiceOptions, method_names, names_around, options_for
from ..services.declared_sources import (
    as_sources,
    providers_of,
    retrievers_in,
    service_cycles,
    services_offered_by,
)
from ..services.inner_plans import services_below, settled
from ..services.method_marks import NamedAt, named_at_method, named_at_tool
from ..services.methods import implementation_of
from ..services.planning import plan_service
from ..services.plans import MethodPlan
from ..services.teams import with_handovers, with_teams
from ..tools.failures import ToolErrors
from ..tools.tool_calls import InjectedParameter, Tool, read_injected
from .ineffective_marks import class_problems
from .named_instances import NamedInstances
from .service_hosting import ServiceHosting

if TYPE_CHECKING:
    from ..runs.store import RunStore

T = TypeVar("T")

logger = logging.getLogger("toolbox.services")


class _Process:
    """The event-loop thread and the thread pool of all services without a container; created on first use."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: LoopThread | None = None
        self.workers = Workers()
        register_for_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the loop thread in a forked process, because it runs in the parent."""
        keep_inherited(self._thread)
        self._lock, self._thread = Lock(), None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop for synchronous methods, and start it if necessary."""
        with self._lock:
            if self._thread is None:
                thread = LoopThread()
                thread.start()
                self._thread = thread
            return self._thread.loop

    def end(self) -> None:
        """End the running calls at exit. Tools on threads, which cannot be stopped, get `stop_timeout` seconds."""
        thread, self._thread = self._thread, None
        if thread is None and not self.workers.abandoned:
            return
        end_by = monotonic() + (timeout := _stop_timeout())
        if thread is not None:
            thread.stop(timeout)
        if stuck := self.workers.wait_for_abandoned(max(end_by - monotonic(), 0)):
            logger.warning("the program is exiting, but these tools still run: %s", ", ".join(stuck))


def _stop_timeout() -> float:
    """Return the timeout for the exit of the process in seconds: `TOOLBOX_STOP_TIMEOUT`, or 10."""
    if not any(name.upper() == "TOOLBOX_STOP_TIMEOUT" for name in os.environ):
        return 10.0  # avoids importing the settings library at exit
    from ..settings import ToolboxSettings

    try:
        return ToolboxSettings().stop_timeout
    except ValueError:  # another setting is invalid, which does not matter at exit
        return 10.0


_process = _Process()
atexit.register(lambda: _process.end())


class _OnlyModel:
    """The model of a service, which has all names."""

    def __init__(self, model: ChatModel) -> None:
        self._model, self.cooling = model, CoolingModels()

    async def find(self, name: str | None, context: InvocationContext | None = None) -> ChatModel:
        return self._model

    async def choose(self, name: str, where: str, context: InvocationContext) -> ChatModel:
        if name == "default":
            return self._model
        fact = f"the call chose the model {name!r}, but a service without a container has only one model"
        raise IllegalConfigurationError([Problem(where, fact, "register the service with a Container(models={…})")])


class StandaloneHost(ServiceHosting[_OnlyModel]):
    """Hosts one service: provides its model, its memory and the process's threads."""

    max_concurrent_tools = 16
    is_container = False

    def __init__(self, model: ChatModel) -> None:
        super().__init__()
        self.models = _OnlyModel(model)
        self.workers = _process.workers
        self.own_plans: Mapping[type[Any], Mapping[str, MethodPlan]] = {}
        self.is_persistent = False
        """True if there is a store that keeps runs longer than the process."""
        self._instances = NamedInstances()
        self.scope: ActiveScope = self._instances
        self.failures = ToolErrors()

    @property
    def loop(self) -> None:
        """None: calls run on the loops of their callers."""
        return None

    async def caller(self) -> SecurityIdentity | None:
        """Return the identity of `identity=`, or that of a run; None without one."""
        return await identity_in(self.scope) if self._instances.provides(SecurityIdentity) else None

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        return _process.loop()

    def add(self, reference: BeanReference, where: str) -> Iterator[Problem]:
        """Create the instance of a named class. Yield a problem if its constructor needs arguments."""
        return self._instances.add(reference, where)

    @property
    def plans(self) -> Mapping[type[Any], Mapping[str, MethodPlan]]:
        return self.own_plans

    def plans_of(self, service: str) -> Mapping[str, MethodPlan]:
        """Return the plans of the service, or of one that it has as a tool, with this stored name."""
        own = [plan for methods in self.plans.values() for plan in methods.values()]
        plans = [*own, *(inner for plan in own for inner in services_below(plan))]
        found = (each for each in plans if service in stored_names(each.service))
        return {each.name: each for each in found}

    @asynccontextmanager
    async def open_request(self, seeds: Mapping[Any, Any]) -> AsyncIterator[None]:
        """Use the seeds in place of the instances of their types, such as that of `identity=`, inside the block."""
        with self._instances.seeded(seeds):
            yield

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await work()

    def _instance(self, given: object, where: str, problems: list[Problem]) -> object:
        """Return the instance that was given, or an instance of the class, or None after a problem with the class."""
        if not isinstance(given, type):
            return given
        reference = BeanReference.to(given)
        found = list(self._instances.add(reference, where))
        problems += found
        return None if found else self._instances.get(reference.bean)

    def use_run_store(self, given: object) -> Iterator[Problem]:
        """Keep runs in this instance, or in an instance of this class. Yield problems with it."""
        where, problems = "create_ai_service, run_store=", list[Problem]()
        store: Any = self._instance(given, where, problems)
        yield from problems
        if store is None:
            return
        if not all(hasattr(store, each) for each in ("persistent", "load", "append", "acquire")):
            yield Problem(where, f"{given!r} is not a RunStore", "pass an InMemoryRunStore or a SqlRunStore")
        else:
            self._instances.provide(load(Late.RUN_STORE), lambda: store)
            self.is_persistent = store.persistent

    def use_estimator(self, given: object) -> Iterator[Problem]:
        """Estimate costs with this instance or class. Yield problems with it."""
        where, problems = "create_ai_service, cost_estimator=", list[Problem]()
        given = self._instance(given, where, problems)
        yield from problems
        if problems:
            return
        estimate = getattr(given, "estimate", None)
        if not takes(estimate, 2) or inspect.iscoroutinefunction(estimate):
            fix = "pass an object with a method `def estimate(self, model, usage)`"
            yield Problem(where, f"{given!r} is not a CostEstimator", fix)
            return
        estimator = cast("CostEstimator", given)
        self._instances.provide(CostEstimator, lambda: estimator)
        self.has_cost_estimator = True
        host_started(self)

    def use_identity(self, given: object) -> Iterator[Problem]:
        """Use this identity, or the result of this function, as the caller. Yield problems with it."""
        where = "create_ai_service, identity="
        if isinstance(given, SecurityIdentity):
            self._instances.provide(SecurityIdentity, lambda: given)
        elif (
            not callable(given) or isinstance(given, type) or inspect.iscoroutinefunction(given) or not takes(given, 0)
        ):
            fix = "pass a SecurityIdentity, or a `def` function without parameters that returns one or None"
            yield Problem(where, f"{given!r} is not an identity", fix)
        else:
            self._instances.provide(SecurityIdentity, lambda: identity_from(given(), where))

    def problems_of(self, named: Iterable[NamedAt]) -> Iterator[Problem]:
        """Create the instances of classes that decorators name. Yield problems with them."""
        for each in named:
            problems = list(named_problems(each))
            yield from problems or self._instances.add(each.reference, each.where)

    def tool_problems(self, where: str, tool: Tool) -> Iterator[Problem]:
        """Yield problems with a tool: those of every host, and what needs a container."""
        yield from super().tool_problems(where, tool)
        if tool.approval_expires is not None:
            fact = "approval_expires= needs a container, which looks for expired calls"
            yield Problem(f"{where}, tool {tool.specification.name}", fact, "register the service with a Container")

    def unknown_beans(self, where: str, tool: Tool) -> Iterator[Problem]:
        """Yield a problem for each bean that the tool needs; only its interceptors need no container."""
        if tool.bean is not None and self._instances.find_now(tool.bean) is None:  # a retriever may have one
            yield Problem(where, "is a method of a class, which needs a container", "pass an instance of the class")
        yield from self.problems_of(named_at_tool(tool))
        yield from self.not_injected(where, tool.injected)

    def not_injected(self, where: str, injected: Iterable[InjectedParameter]) -> Iterator[Problem]:
        """Yield a problem for each parameter whose bean needs a container."""
        for each in injected:
            if not each.optional and not self._instances.provides(each.wanted):
                fact = f"the injected parameter {each.name} needs a container"
                yield Problem(where, fact, "register the service with a Container")

    def provides(self, wanted: type[Any]) -> bool:
        """Return True if a bean of this type was given."""
        return self._instances.provides(wanted)


def create_ai_service(
    service: TypeForm[T],
    *,
    chat_model: ChatModel,
    tools: Any = (),
    interceptors: Any = (),
    identity: SecurityIdentity | Callable[[], SecurityIdentity | None] | None = None,
    cost_estimator: CostEstimator | type[CostEstimator] | None = None,
    run_store: RunStore | type[RunStore] | None = None,
    **options: Any,
) -> T:
    """Create an AI service from a Protocol or ABC without a container. The class does not need a decorator.

        assistant = create_ai_service(Assistant, chat_model=OpenAiChatModel("gpt-5-mini"), tools=[Calculator()])
        print(assistant.chat("What is one and two?"))

    - `chat_model`: the model of the service.
    - `tools`: one tool or several: instances, functions, other services, `AiServiceTool`s and mappings
      `{ToolSpecification: ToolExecutor}`. Classes need a container.
    - `interceptors`: one or several interceptors for all tool calls and model requests, classes or instances. Classes
      that decorators name, and these, must have constructors without arguments; otherwise name an instance.
    - `identity`: the caller, a `SecurityIdentity` or a function that returns one or None, called for each check.
    - `cost_estimator`: estimates the cost of replies, for a limit of the cost.
    - `run_store`: the store of suspended calls, by default in memory. `toolbox.runs.runs_of(service)` continues them.
    - `options`: those of `register_ai_service`; they override the options of a decorated class.

    Raises `IllegalConfigurationError` with all problems, and `TypeError` for unknown options.
    """
    cls: Any = service
    given = (tools,) if isinstance(tools, Mapping) else as_sources(tools)
    settings = options_for(cls, {**options, "tools": given} if given else options)
    around = names_around(cls, sys._getframe(1))
    everywhere = _by_priority(as_sources(interceptors))
    plans, problems = plan_service(cls, settings, Capabilities(everywhere), around=around)
    host = StandaloneHost(chat_model)
    if run_store is not None:
        problems += host.use_run_store(run_store)
    if identity is not None:
        problems += host.use_identity(identity)
    if cost_estimator is not None:
        problems += host.use_estimator(cost_estimator)
    limits = settings.limits
    if isinstance(limits, UsageLimits) and limits.cost is not None and not host.has_cost_estimator:
        problems.append(no_estimator(f"{getattr(cls, '__name__', cls)}, limits="))
    problems += _identity_needed(plans.values(), host)
    if isinstance(cls, type):
        problems += host.add(BeanReference.to(settings.tool_search), f"{cls.__name__}, tool_search")
        for named in retrievers_in(cls, settings):
            problems += host.add(BeanReference.to(named), f"{cls.__name__}, retrievers=")
        problems += host.problems_of(NamedAt("interceptors=", "interceptors", each, False) for each in everywhere)
        problems += host.problems_of(each for name in method_names(cls) for each in named_at_method(cls, name))
        problems += service_cycles(cls, services_offered_by)
        problems += _durable_problems(plans.values(), host)
        problems += _container_needed(cls, settings, plans.values(), host)
        problems += class_problems([cls], plans.values())
    if (router := router_in(settings.model)) is not None:
        fact = f"the router {router.__name__} needs a container: a service without one has only one model"
        fix = "register the service with a Container(models={…})"
        problems.append(Problem(getattr(cls, "__name__", repr(cls)), fact, fix))
    if (function := key_function_of(chat_model)) is not None:
        where = f"the api_key function of {chat_model!r}"
        injected, faults = read_injected(function, where)
        problems += [*faults, *host.not_injected(where, injected)]
    if (problem := no_model(chat_model, getattr(cls, "__name__", repr(cls)), "chat_model=")) is not None:
        problems.append(problem)
    handed, faults = with_handovers({cls: plans} if plans else {})
    problems += faults
    if problems:
        raise IllegalConfigurationError(dict.fromkeys(problems))
    host.own_plans = with_teams(settled(handed), Capabilities(everywhere))
    made: T = implementation_of(cls, host.plans[cls], host)()
    return made


def _durable_problems(plans: Iterable[MethodPlan], host: StandaloneHost) -> Iterator[Problem]:
    """Yield problems of durable methods."""
    for plan in plans:
        if plan.durable:
            yield from load(Late.CHECKS_OF_DURABLE_METHODS)(plan)
            if not host.is_persistent:
                yield load(Late.CHECK_OF_PERSISTENCE)(plan.where)


def _by_priority(interceptors: Iterable[object]) -> tuple[BeanReference, ...]:
    """Return the global interceptors of a service, outermost first."""
    references = [BeanReference.to(each) for each in interceptors]
    return tuple(sorted(references, key=lambda each: global_priority(each.type) or 0))


def _container_needed(
    cls: type[Any], options: ServiceOptions, plans: Iterable[MethodPlan], host: StandaloneHost
) -> Iterator[Problem]:
    """Yield a problem for everything that needs a container."""
    for point in read_class(cls).needs:
        if point.default is MISSING:
            fact = f"the constructor parameter {point.parameter} needs a container"
            yield Problem(point.where, fact, "register the service with a Container, or give the parameter a default")
    if options.run_retries is not None:
        fact = "run_retries= needs a container, which looks for runs to try again"
        yield Problem(cls.__name__, fact, "register the service with a Container")
    for provider in providers_of(cls, options):
        if provider.bean is not None:
            fact = f"the tool provider {type_name(provider.bean)} is a class, which needs a container"
            yield Problem(cls.__name__, fact, "pass an instance of it")
    for plan in plans:
        yield from host.fallback_problems(plan)
        yield from host.retriever_problems(plan)
        for tool in (*plan.toolset.tools, *plan.compensations.values()):
            # Report a class only once, not for each method and tool.
            if tool.bean is not None:
                fact = f"the tool {type_name(tool.bean)} is a class, which needs a container"
                yield Problem(cls.__name__, fact, "pass an instance of it in tools=")
            else:
                yield from host.tool_problems(plan.where, tool)
        if isinstance(plan.messages.system, FunctionMessage):
            yield from host.not_injected(f"{plan.where}, system message", plan.messages.system.injected)


def _identity_needed(plans: Iterable[MethodPlan], host: StandaloneHost) -> Iterator[Problem]:
    """Yield a problem for each place where roles are used, if there is no identity."""
    for plan in () if host.provides(SecurityIdentity) else plans:
        places = [plan.where] if plan.access is not None else []
        for where in (*places, *(tool.where for tool in plan.toolset.tools if tool.access is not None)):
            fix = "pass identity=SecurityIdentity(…) or a function that returns one"
            yield Problem(where, "roles are used, but there is no identity", fix)
