"""The container: registers, starts, looks up, overrides and stops beans.

Not here: reading and checking what is registered (`registered_program`), beans and scopes (`di`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, get_origin, overload

from typing_extensions import TypeForm

from .chat import ChatModel, ToolSpecification
from .di.beans import read_class
from .di.conditions import LeftOut
from .di.decorators import Scope
from .di.descriptions import BeanDescription, describe, describe_function, provider_names
from .di.graph import BeanGraph, Binding
from .di.injection_points import MISSING, InjectionPoint, Missing, point_of, points_of
from .di.registry import marked_in
from .di.scopes import CallScope, ConversationScope, RequestScope
from .di.stored_beans import StoredBeans
from .di.values import DEFAULT, Value
from .errors import ContainerNotStartedError, IllegalConfigurationError, Problem
from .execution.markers import is_executor
from .execution.runners import LoopRunner
from .execution.threads import FORKED, LoopThread, keep_inherited, register_for_fork
from .introspection import type_name
from .registered_program import CheckedProgram, RegisteredProgram, call_decorators, is_marked, loaded
from .security import Reach

if TYPE_CHECKING:
    from dependency_injector.containers import DynamicContainer

    from .conversations.conversation_blocks import ConversationBlock
    from .conversations.conversations_bean import Conversations
    from .conversations.memories import ChatMemory
    from .di.wiring import Wiring
    from .events import EventListener
    from .hosts.hosting import ContainerHost
    from .runs.runs_bean import Runs
    from .settings import ToolboxSettings
    from .tools.failures import ToolErrors
    from .tools.tool_calls import Tool

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger("toolbox.container")

APPLICATION_CONTAINER = "toolbox_container"
"""Name of the attribute of an application's `state` that has the installed container; commands use it."""


class Container:
    """Beans, tools and services of one program.

        container = Container(models={"default": model}).register(Assistant, Orders)
        async with container:
            assistant = await container.aget(Assistant)

    Start it with `async with` or `with`, then look up beans with `get` and `aget`. The container itself is a bean. The
    start raises `IllegalConfigurationError` with all problems of the program.

    - `models`: models by their names; tests can replace them before the start.
    - `executors`: executors by their names, for `@run_on("name")`.
    - `tool_errors`: the error handlers of services without their own.
    - `settings`: the settings, by default read from the environment.
    - `seeds`: types whose instances each request scope gets from its caller: `request_scope({User: user})`.
    - `run_seeds`: types of seeds that are stored with a run, so that it continues with them.
    - `run_identity`: names of attributes of the `SecurityIdentity` that, with its name, decide whose run an id is:
      `run_identity=("tenant",)`.
    - `take_over_runs`: with False the container does not continue runs whose process is gone, and a `RunEngine` only
      submits.

    Raises `TypeError` for arguments of another type.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, ChatModel] | None = None,
        executors: Mapping[str, Executor] | None = None,
        tool_errors: ToolErrors | None = None,
        settings: ToolboxSettings | None = None,
        seeds: Iterable[TypeForm[Any]] = (),
        run_seeds: Iterable[TypeForm[Any]] = (),
        run_identity: Iterable[str] = (),
        take_over_runs: bool = True,
    ) -> None:
        _refuse_invalid(models, executors, tool_errors, settings)
        self.models: dict[str, ChatModel] = dict(models or {})
        self._internals = ContainerInternals(take_over_runs)
        self._internals.program = RegisteredProgram(
            self,
            self._internals,
            executors=executors or {},
            tool_errors=tool_errors,
            settings=settings,
            seeds=seeds,
            run_seeds=run_seeds,
            run_identity=run_identity,
        )

    # --- registering

    def register(self, *objects: object) -> Self:
        """Register classes, producers, services and REST clients. Returns the container.

        Wrong registrations are problems at start. Raises `IllegalConfigurationError` after the start.
        """
        self._internals.refuse_started("register")
        for each in objects:
            self._internals.program.registry.add(each)
        return self

    def register_instance(self, instance: T, as_type: TypeForm[T] | None = None, name: str | None = None) -> Self:
        """Register an object as a bean of its class, or of `as_type`, under `name`. The container never closes it.

        Returns the container. Raises `IllegalConfigurationError` after the start.
        """
        self._internals.refuse_started("register_instance")
        self._internals.program.registry.give(instance, type(instance) if as_type is None else as_type, name)
        return self

    def bind(self, interface: TypeForm[T], implementation: type[T] | Callable[..., T], name: str | None = None) -> Self:
        """Use the bean of this class or producer for `interface` (under `name`). Returns the container.

        Raises `IllegalConfigurationError` after the start.
        """
        self._internals.refuse_started("bind")
        self._internals.program.registry.bind(Binding(interface, implementation, name))
        return self

    def scan(self, module: ModuleType | str) -> Self:
        """Register everything marked in a module, given itself or by name, and its submodules. Returns the container.

        Imports the submodules, and raises their errors. Raises `IllegalConfigurationError` after the start.
        """
        return self.register(*marked_in(module, is_marked))

    def include(self, container: Any) -> Self:
        """Register each provider of a `dependency_injector` container (class or instance) as a bean.

        Returns this container. Raises `TypeError` for other objects, and `IllegalConfigurationError` after the start.
        """
        self._internals.refuse_started("include")
        if isinstance(container, Container) or not hasattr(container, "providers"):
            raise TypeError(f"include(…) expects a dependency_injector container, got {type(container).__name__}")
        self._internals.program.registry.include(container)
        return self

    # --- checking

    def check(self, *, models: bool = True) -> list[Problem]:
        """Return all configuration problems without starting the container; an empty list if there are none.

        `models=False` does not check the models, for machines without keys, such as build servers.
        """
        problems = self._internals.program.check(models=models).problems
        if problems:  # the program may correct registered objects, not only register more
            self._internals.program.forget_reading()
        return problems

    # --- start and stop

    @property
    def is_started(self) -> bool:
        """Return True between start and stop."""
        return self._internals.wiring is not None

    async def __aenter__(self) -> Self:
        await self._internals.start(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._internals.stop(error)

    def __enter__(self) -> Self:
        self._internals.start_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._internals.stop_thread(error)

    # --- looking up

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """Return the bean; create it if necessary.

        Raises `MissingBeanError`, `AmbiguousBeanError`, `AsyncBeanError` if async code must create a part of it, and
        `ScopeNotActiveError` outside its scope. Raises `ContainerNotStartedError` before the start and after the stop.
        """
        return self._internals.started(wanted).get(wanted, name)  # type: ignore[no-any-return]  # the wiring returns the requested type

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """Return the bean; await async producers. Raises the same errors as `get`, except `AsyncBeanError`.

        On another event loop than that of the container, the bean is created on that of the container.
        """
        return await self._internals.at_home(lambda: self._internals.aget(wanted, name), wanted)

    def call(self, function: Callable[..., R], /, **values: Any) -> R:
        """Call `function` with `values`, inject its other parameters, and return its value.

        Raises the errors of `get`, and those of the function.
        """
        wiring = self._internals.started(type_name(function))
        points = self._points(function, wiring.graph)
        for point, value in _unfilled(points, values, wiring):
            values[point.parameter] = wiring.get_value(value, wiring.active_scope())
        return function(*_positional(points, values), **values)

    @overload
    async def acall(self, function: Callable[..., Coroutine[Any, Any, R]], /, **values: Any) -> R: ...

    @overload
    async def acall(self, function: Callable[..., R], /, **values: Any) -> R: ...

    async def acall(self, function: Callable[..., Any], /, **values: Any) -> Any:
        """Call `function` as `call` does; await async beans, and the result if it is awaitable.

        On another event loop than that of the container, all of this runs on that of the container. Raises the errors
        of `aget`, and those of the function.
        """
        return await self._internals.at_home(lambda: self._call_awaiting(function, values), function)

    async def _call_awaiting(self, function: Callable[..., Any], values: dict[str, Any]) -> Any:
        wiring = self._internals.started(type_name(function))
        points = self._points(function, wiring.graph)
        for point, value in _unfilled(points, values, wiring):
            values[point.parameter] = await wiring.aget_value(value, wiring.active_scope())
        result = function(*_positional(points, values), **values)
        return await result if inspect.isawaitable(result) else result

    def injected(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function whose `Inject[…]` parameters are filled in a new request scope for each call.

            send = broker.task(container.injected(send_mails))

        For libraries that call functions themselves, such as taskiq, Celery, typer and APScheduler. The returned
        function has the parameters that are left, and is `async def` if `function` is. It can be made before or after
        the start; its calls need a started container. A bean that it cannot get is a problem at start; after the start,
        it raises `IllegalConfigurationError` here. So do generators and classes.
        """
        from .injected_functions import read_function, with_injection

        read = read_function(function)
        if self._internals.wiring is None:
            self._internals.program.injected.append(read)
        else:
            wiring = self._internals.wiring
            if problems := [*read.problems(wiring.graph), *wiring.problems_behind(read.keys_in(wiring.graph))]:
                raise IllegalConfigurationError(problems)
        return with_injection(read, self._internals)

    @staticmethod
    def _points(function: Callable[..., Any], graph: BeanGraph) -> tuple[InjectionPoint, ...]:
        if isinstance(function, type):
            return read_class(function, graph.names).needs
        return points_of(function, type_name(function), graph.names)

    @property
    def providers(self) -> DynamicContainer:
        """Return the beans of the started container as a `dependency_injector` container of named providers.

        Raises `ContainerNotStartedError`.
        """
        return self._internals.started("providers").providers.container

    # --- scopes

    def request_scope(self, seeds: Mapping[Any, Any] | None = None) -> RequestScope:
        """Return a new request scope to enter with `async with` or `with`.

        `seeds` maps types to instances, which replace the beans of these types in the scope. Raises `TypeError` if it
        is not a mapping, and `ContainerNotStartedError`.
        """
        if seeds is not None and not isinstance(seeds, Mapping):
            kind = type(seeds).__name__
            raise TypeError(
                f"request_scope expects a mapping from types to instances, such as {{{kind}: …}}; got {kind}"
            )
        return self._internals.started("request_scope").open_request(seeds or {})

    def conversation_scope(self, service: type[Any] | str, memory_id: object) -> ConversationBlock:
        """Return a block in which nobody else uses a conversation, to enter with `async with` or `with`.

            async with container.conversation_scope(Assistant, "room 7") as room:
                (await container.aget(Reservation)).departure = None

        Its `@conversation_scoped` beans are stored at the end if they changed, unless the block raises. A request scope
        is opened if none is active. `service` is the class of the service or its stored name, `memory_id` the id as in
        calls. Raises `InvalidMemoryIdError`, and `ContainerNotStartedError`.
        """
        from .conversations.conversation_blocks import ConversationBlock

        wiring, host = self._internals.started("conversation_scope"), self._internals.host
        at_home = partial(self._internals.at_home, what="conversation_scope")
        track = partial(host.running.task, "a block of a conversation")
        return ConversationBlock(wiring, partial(host.hold_conversation, service, memory_id), at_home, track)

    # --- services

    @property
    def runs(self) -> Runs:
        """Return the runs of the started container: answer suspended calls, continue and cancel runs. Also a bean.

        Raises `ContainerNotStartedError`.
        """
        return self._internals.host.runs

    def reach(self, app: Any = None) -> list[Reach]:
        """Return all ways to tools: from which entry, through which services, with which roles, and to which effects.

        Nothing is run; the container may be started or not. `app` is the application of `install(app, container)`: its
        endpoints and MCP servers are entries too. Without it, the entries are the methods of the AI services. Raises
        `IllegalConfigurationError` if `app` does not belong to this container.
        """
        from .overview import ENTRIES, reach_of

        if app is not None and getattr(getattr(app, "state", None), APPLICATION_CONTAINER, None) is not self:
            fact = f"{app!r} is not an application of this container"
            raise IllegalConfigurationError(
                [Problem("Container.reach(app)", fact, "call install(app, container) first")]
            )
        if self._internals.running_host is None or self._internals.wiring is None:
            checked = self._internals.program.check(models=False)
            host, graph = checked.host, checked.graph
        else:
            host, graph = self._internals.running_host, self._internals.wiring.graph
        finders = [] if app is None else getattr(app.state, ENTRIES, [])
        return reach_of(host.plans, [entry for find in finders for entry in find(graph)], graph)

    @property
    def conversations(self) -> Conversations:
        """Return the conversations of the started container: list, read, change and delete them. Also a bean.

        Raises `ContainerNotStartedError`.
        """
        return self._internals.host.conversations

    def chat_memory(self, service: type[Any] | str, memory_id: object) -> ChatMemory:
        """Return a conversation of a service: `await .messages()`, `.add(*messages)`, `.clear()`.

        `service` is the class or the stored name, `memory_id` the id as in calls. Raises `InvalidMemoryIdError`,
        `ContainerNotStartedError`, and `TypeError` for another `service`.
        """
        return self._internals.host.chat_memory(service, memory_id)

    # --- overriding

    @contextmanager
    def override(self, wanted: TypeForm[T], fake: T, name: str | None = None) -> Iterator[T]:
        """Replace a bean by `fake` in the whole container, inside the `with` block.

        Application beans that hold the replaced bean are created again inside the block. To replace a bean for one task
        only, seed a request scope. Before the start, a type that is not a single bean is a problem at start; after it,
        raises `MissingBeanError`, `AmbiguousBeanError` or `IllegalConfigurationError`.
        """
        from .di.overriding import Override

        override = Override(wanted, fake, name)
        if self._internals.wiring is not None:
            override.apply(self._internals.wiring)
        self._internals.program.overrides.append(override)
        try:
            yield fake
        finally:
            self._internals.program.overrides.remove(override)
            if self._internals.wiring is not None:
                override.take_back(self._internals.wiring)


def _refuse_invalid(models: object, executors: object, tool_errors: object, settings: object) -> None:
    """Raise `TypeError` for an argument of another type."""
    if models is not None and not isinstance(models, Mapping):
        raise TypeError(f'models= must map names to models: {{"default": {type(models).__name__}(…)}}')
    if executors is not None and not isinstance(executors, Mapping):
        raise TypeError(f'executors= must map names to executors: {{"reports": {type(executors).__name__}(…)}}')
    for name, executor in (executors or {}).items():
        if not is_executor(executor):
            raise TypeError(f"executors= must map names to executors, but {name!r} is {executor!r}")
    if tool_errors is not None:
        from .tools.failures import ToolErrors

        if not isinstance(tool_errors, ToolErrors):
            raise TypeError(f"tool_errors= must be ToolErrors(…), got {tool_errors!r}")
    if settings is not None:
        from .settings import ToolboxSettings

        if not isinstance(settings, ToolboxSettings):
            raise TypeError(f"settings= must be ToolboxSettings(…), got an instance of {type(settings).__name__}")


def internals_of(container: Container) -> ContainerInternals:
    """Return the members of a container that are for the framework itself: web, command line, MCP, tests."""
    return container._internals


Offered: TypeAlias = tuple[str, tuple[ToolSpecification, ...]]
"""Tools that models can see, with their place, such as the name of an endpoint."""


class ContainerInternals:
    """The state of a container, and its members for the framework itself; programs do not need it.

    It is the `LendingScope` from which tools and services get their beans. `wiring` and `running_host` are the beans
    and the services between a start and the next stop.
    """

    program: RegisteredProgram
    """What is registered."""

    def __init__(self, take_over_runs: bool) -> None:
        self.wiring: Wiring | None = None
        self.running_host: ContainerHost | None = None
        self._takes_over_runs = take_over_runs
        self._thread: LoopThread | None = None
        self._forked = ""  # reason why it is not started in a forked process
        self._offers: list[Callable[[], Iterable[Offered]]] = []
        self._listening: list[EventListener] = []

    # --- start and stop

    def start_thread(self) -> None:
        """Start the container on the event loop of a new thread."""
        self.refuse_started("start", "stop it first, or create another container")
        thread = LoopThread()
        thread.start()
        self._thread = thread
        try:
            # On the caller's thread: there, annotations find the local names of the functions that are running.
            checked, wiring = self._wire(thread.loop)
            thread.run(self._open(checked, wiring))
        except BaseException:
            self._end_thread()
            raise

    def stop_thread(self, error: BaseException | None) -> None:
        """Stop the container and its thread; the beans get `error`."""
        thread, wiring = self._thread, self.wiring
        if self._forked:
            return  # the parent process stops it
        if thread is None or wiring is None:
            raise ContainerNotStartedError("stop")
        if not thread.answers(self.host.settings.stop_timeout):
            logger.error("a tool or a bean blocks the container's event loop; the container stops anyway")
            self._leave_behind(wiring, error)
            return
        try:
            try:
                thread.run(self._before_beans_stop())
            finally:
                # Beans made by synchronous code are closed on the thread that made most of them.
                wiring.stop_waiting(error, thread.run)
        finally:
            self.wiring = None
            try:
                thread.run(self._after_beans_stop())
            finally:
                self._end_thread()

    def _leave_behind(self, wiring: Wiring, error: BaseException | None) -> None:
        """Stop without the event loop: beans that need `await` to close are not closed, and models are not either."""
        self.host.abandon()
        self.wiring = None
        self.running_host = self._thread = None
        wiring.abandon(error)

    def renew_after_fork(self) -> None:
        """Mark the container as not started in a forked process: its beans and loop belong to the parent process."""
        if self.wiring is not None:
            keep_inherited(self.wiring, self.running_host, self._thread)
            self.wiring = None
            self.running_host = self._thread = None
            self._forked = FORKED

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the program and start it on this loop. Raises `IllegalConfigurationError`."""
        self.refuse_started("start", "stop it first, or create another container")
        await self._open(*self._wire(loop))

    async def _open(self, checked: CheckedProgram, wiring: Wiring) -> None:
        """Create the beans that the start creates, open the stores, and run the start functions."""
        host = checked.host
        try:
            for override in self.program.overrides:
                override.apply(wiring)
            await wiring.start(self.program.registry.undefined())
            await host.find_listeners()
            for listener in self._listening:
                host.add_listener(listener)
            host.read_added_tools(self.program.tool_finders)
            await host.open_stores(wiring.find_bean)
            if checked.observers and (observing := loaded("observers")) is not None:
                host.observe(observing.Observers(checked.observers, wiring, host.workers))
            if checked.start and (startup := loaded("startup")) is not None:
                await startup.run_start_functions(checked.start, wiring, host.workers)
            await host.open_runs(take_over=self._takes_over_runs)
        except BaseException as error:
            await self.stop(error)
            raise

    def _wire(self, loop: asyncio.AbstractEventLoop, *, models: bool = True) -> tuple[CheckedProgram, Wiring]:
        """Check everything, and make beans available; none is created yet. Raises `IllegalConfigurationError`."""
        checked = self.program.check(models=models)
        self.program.forget_reading()
        if checked.problems:
            raise IllegalConfigurationError(checked.problems)
        # Imported late: dependency_injector takes long to load.
        from .di.wiring import Wiring

        wiring = Wiring(checked.graph, self, loop, LoopRunner(checked.host.workers))
        wiring.stop_timeout = checked.host.settings.stop_timeout
        wiring.application.store.update(checked.settings)
        self.wiring = wiring
        self._forked = ""
        register_for_fork(self)
        checked.host.start(loop)
        self.running_host = checked.host
        return checked, wiring

    async def stop(self, error: BaseException | None) -> None:
        """Stop the container; the beans get `error`."""
        wiring = self.wiring
        if self._forked:
            return  # the parent process stops it
        if wiring is None:
            raise ContainerNotStartedError("stop")
        try:
            try:
                await self._before_beans_stop()
            finally:
                await wiring.stop(error)
        finally:
            self.wiring = None
            await self._after_beans_stop()

    async def _before_beans_stop(self) -> None:
        """End running invocations before the first bean is closed."""
        if self.running_host is not None:
            await self.running_host.stop()

    async def _after_beans_stop(self) -> None:
        """Close the models that settings created, after all beans are closed."""
        host, self.running_host = self.running_host, None
        if host is not None:
            await host.close_models()

    def refuse_started(self, what: str, fix: str = "call it before the start") -> None:
        """Raise `IllegalConfigurationError` if the container is started."""
        if self.wiring is not None:
            problem = Problem(f"Container.{what}", "the container is already started", fix)
            raise IllegalConfigurationError([problem])

    def started(self, what: Any) -> Wiring:
        """Return the beans of the started container, for `what` it is asked. Raises `ContainerNotStartedError`."""
        if self.wiring is None:
            raise ContainerNotStartedError(what if isinstance(what, str) else type_name(what), self._forked)
        return self.wiring

    # --- before start

    def take_over_runs(self, wanted: bool) -> None:
        """Decide whether the container continues runs of other processes, for commands."""
        self.refuse_started("take_over_runs")
        self._takes_over_runs = wanted

    def declare_seed(
        self, wanted: TypeForm[T], find: Callable[[], T | Missing] | None = None, is_optional: bool = False
    ) -> None:
        """Declare another type that request scopes receive as a seed.

        In a scope without this seed, `find()` is called each time; it returns `MISSING` if it has no value. An optional
        one is a seed only if nothing else provides its type.
        """
        self.refuse_started("declare_seed")
        self.program.registry.declare_seed(wanted, find, is_optional)

    def add_check(self, check: Callable[[BeanGraph], Iterable[Problem]]) -> None:
        """Add a check of code that uses the container, for `check()` and start."""
        self.program.checks.append(check)

    def add_implied(self, find: Callable[[], Iterable[object]]) -> None:
        """Register the results of `find()` at each check and start, unless other beans already provide them."""
        self.refuse_started("add_implied")
        self.program.registry.add_implied(find)

    def add_offers(self, find: Callable[[], Iterable[Offered]]) -> None:
        """Add tools that code outside of services offers to models, for tools that list them: by place."""
        self._offers.append(find)

    def add_tool_finder(self, find: Callable[[BeanGraph], Mapping[str, Sequence[Tool]]]) -> None:
        """Add the tools that code outside of services adds to calls, by the place that adds them, for stored runs."""
        self.program.tool_finders.append(find)

    def offers(self) -> Iterator[Offered]:
        """Yield the added offers: where they are, and their tools."""
        for find in self._offers:
            yield from find()

    @contextmanager
    def listening(self, listener: EventListener) -> Iterator[None]:
        """Send the container's events to a listener inside the block; the container may be started or not."""
        self._listening.append(listener)
        if self.running_host is not None:
            self.running_host.add_listener(listener)
        try:
            yield
        finally:
            self._listening.remove(listener)
            if self.running_host is not None:
                self.running_host.remove_listener(listener)

    def knows(self, registered: object) -> bool:
        """Return True if the object is registered, or if this type has an instance or binding."""
        return self.program.registry.knows(registered)

    def tool_beans(self) -> tuple[type[Any], ...]:
        """Return the bean classes that have tools, in registration order."""
        from .tools.sources import bean_types

        return bean_types(self._bean_classes())

    def mcp_beans(self) -> tuple[type[Any], ...]:
        """Return the bean classes that have tools, resources or prompts for MCP clients, in registration order."""
        from .tools.marks import mcp_marked
        from .tools.sources import bean_types

        classes = self._bean_classes()
        with_tools = set(bean_types(classes))
        return tuple(each for each in classes if each in with_tools or (isinstance(each, type) and mcp_marked(each)))

    def _bean_classes(self) -> dict[Any, None]:
        """Return the types of all beans, without decorators: lookups of the decorated types find those."""
        graph = self.graph
        decorators = graph.decorations.inner_of
        return dict.fromkeys(each.provides for key, each in enumerate(graph.definitions) if key not in decorators)

    def describe(self) -> tuple[BeanDescription, ...]:
        """Return all beans in registration order, then the functions that get beans, for tools that show the graph."""
        return (*describe(self.graph), *self._described_functions())

    def _described_functions(self) -> Iterator[BeanDescription]:
        """Yield the functions that the container calls or injects."""
        decorators, injected = call_decorators(), self.program.injected
        if not (decorators or injected):
            return
        registered = self.program.read()[1]
        graph = registered.graph
        for decorator in decorators:
            for each in decorator.functions_in(registered.readings, graph):
                points = [
                    point_of(parameter.wanted, each.where, parameter=parameter.name) for parameter in each.injected
                ]
                yield describe_function(graph, each.where, each.decorator, each.function, points, each.bean)
        for read in injected:
            yield describe_function(graph, read.where, "injected function", read.function, read.points)

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return what `@only_if` left out, for tools that show the graph."""
        return tuple(self.graph.left_out)

    @property
    def graph(self) -> BeanGraph:
        """The beans of the started container; before the start, those that it would have."""
        return self.program.read()[1].graph if self.wiring is None else self.wiring.graph

    # --- instead of a start

    @asynccontextmanager
    async def beans_of(self, *kinds: type[Any]) -> AsyncIterator[list[Any]]:
        """Create the application-scoped beans of these types, and what they need, without starting the container.

        For commands: nothing else is created or started, no run is taken over, and models are not checked. The beans
        are closed at the end of the block. Raises `IllegalConfigurationError`.
        """
        self.refuse_started("beans_of")
        _, wiring = self._wire(asyncio.get_running_loop(), models=False)
        try:
            found = []
            for bean in wiring.graph.beans:
                cls = get_origin(bean.definition.provides) or bean.definition.provides
                is_one = isinstance(cls, type) and any(kind in cls.__mro__ for kind in kinds)
                if is_one and bean.definition.scope is Scope.APPLICATION and wiring.can_create(bean.key):
                    found.append(await wiring.aget_value(wiring.graph.single(bean.key), wiring.application))
            yield found
        except BaseException as error:
            await self.stop(error)
            raise
        await self.stop(None)

    def model_names(self) -> set[str]:
        """Return the names of the models that settings have, or that services and beans use; not those of producers."""
        host, registered, _ = self.program.read()
        return host.registered.model_names(registered.graph)

    # --- while it is started

    def application_beans_with(self, method: str) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return the application-scoped beans that have this method: by name, a function that gets the bean.

        Beans that were not created yet count if their declared class has the method. Raises `ContainerNotStartedError`.
        """
        wiring = self.started(method)
        beans = wiring.graph.beans
        names = provider_names(wiring.graph, beans)
        found: dict[str, Callable[[], Awaitable[Any]]] = {}
        for bean in beans:
            definition = bean.definition
            cls = get_origin(definition.provides) or definition.provides
            created = wiring.application.store.get(bean.key)  # a producer may declare an interface without the method
            has_method = any(callable(getattr(each, method, None)) for each in (cls, created))
            if definition.scope is Scope.APPLICATION and has_method and wiring.can_create(bean.key):
                found[names[bean.key]] = partial(wiring.aget_value, wiring.graph.single(bean.key), wiring.application)
        return found

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the started container, or None."""
        return None if self.wiring is None else self.wiring.loop

    async def at_home(self, work: Callable[[], Coroutine[Any, Any, T]], what: Any) -> T:
        """Await `work()` on the event loop of the container, which waits for work from another loop when it stops.

        `what` is the type or function, for messages. If the container's loop does not run, as between the tests of some
        plugins, the work runs here. Raises `ContainerNotStartedError`.
        """
        home = self.started(what).loop
        if home is None or home is asyncio.get_running_loop() or not home.is_running():
            return await work()
        return await self.host.on_own_loop(work, type_name(what))

    @property
    def is_used_by_program(self) -> bool:
        """True outside of requests, where the program itself acts, and no identity counts."""
        request = None if self.wiring is None else self.wiring.active_scope().request
        return request is None or request.is_of_program

    def open_scope(self) -> RequestScope:
        """Return a new request scope without seeds."""
        return self.request_scope({})

    def request_scope(self, seeds: Mapping[Any, Any]) -> RequestScope:
        """Return a new request scope with these seeds."""
        return self.started("request_scope").open_request(seeds)

    def open_conversation(self, key: Hashable, beans: StoredBeans) -> ConversationScope:
        """Return a new scope for the beans of a conversation."""
        return self.started("a conversation").open_conversation(key, beans)

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """Return the bean from the active scope; create it without await."""
        return self.started(wanted).get(wanted, name)  # type: ignore[no-any-return]  # the wiring returns the requested type

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """Return the bean from the active scope; await async producers."""
        return await self.started(wanted).aget(wanted, name)  # type: ignore[no-any-return]  # the wiring returns the requested type

    async def find(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        """Return the bean as `aget` does, or None if nothing provides it."""
        return await self.started(wanted).find(wanted, name)  # type: ignore[no-any-return]  # the wiring returns the requested type

    def find_now(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        """Return the bean as `get` does, or None if nothing provides it."""
        return self.started(wanted).find_now(wanted, name)  # type: ignore[no-any-return]  # the wiring returns the requested type

    def lend(self, wanted: TypeForm[T], name: str | None) -> T:
        """Return the bean as `get` does. What is created for it alone can be given back."""
        return self.started(wanted).lend(wanted, name)  # type: ignore[no-any-return]  # as there

    async def lend_awaiting(self, wanted: TypeForm[T], name: str | None) -> T:
        """Return the bean as `aget` does. What is created for it alone can be given back."""
        return await self.started(wanted).lend_awaiting(wanted, name)  # type: ignore[no-any-return]  # as there

    def give_back(self, bean: object) -> None:
        """Close what was created for a lent bean alone; nothing after the stop, which has closed it."""
        if (wiring := self.wiring) is not None:
            wiring.give_back(bean)

    async def give_back_awaiting(self, bean: object) -> None:
        """Close what was created for a lent bean alone; nothing after the stop, which has closed it."""
        if (wiring := self.wiring) is not None:
            await wiring.give_back_awaiting(bean)

    async def prepare(self, wanted: TypeForm[Any], name: str | None = None) -> None:
        """Create the async parts of a bean, so that `get` can create the rest on any thread."""
        await self.started(wanted).prepare(wanted, name)

    def open_call_scope(self) -> CallScope:
        """Return a new scope for one tool call, inside the active scope; it is active until `leave` is called."""
        return self.started("open_call_scope").open_call_scope()

    @property
    def host(self) -> ContainerHost:
        """Return the host that runs the services of the started container."""
        if self.running_host is None:
            raise ContainerNotStartedError("a call of a tool", self._forked)
        return self.running_host


def _unfilled(
    points: Sequence[InjectionPoint], given: Mapping[str, Any], wiring: Wiring
) -> Iterator[tuple[InjectionPoint, Value]]:
    """Yield the parameters of a called function that the container fills, with their values."""
    for point in points:
        if point.parameter not in given and (value := wiring.find_value(point)) != DEFAULT:
            yield point, value


def _positional(points: Sequence[InjectionPoint], values: dict[str, Any]) -> list[Any]:
    """Remove the values of positional-only parameters from `values` and return them."""
    taken = [values.pop(each.parameter, each.default) for each in points if each.positional]
    return [value for value in taken if value is not MISSING]
