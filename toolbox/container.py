"""The container: what is registered, checked, started, looked up, overridden, stopped.

Joins the rooms; each rule lives in its own. Not here: beans and scopes (`di`), tools (`tools`), services (`services`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_origin, overload

from typing_extensions import TypeForm

from .chat import ChatModel
from .di.beans import MISSING, BeanDefinition, InjectionPoint, Missing, points_of, read_class
from .di.description import BeanDescription, describe
from .di.environment import settings_problem
from .di.graph import DEFAULT, BeanGraph, Binding, Registration, SingleBean, Value, provider_names
from .di.marks import Scope, producer_mark_of, scope_mark_of
from .di.registry import (
    Reader,
    Registered,
    Registry,
    bean_reader,
    marked_in,
    producer_problems,
    read_included,
    read_instance,
    settings_in,
)
from .di.scopes import CallScope, RequestScope
from .errors import ContainerNotStartedError, IllegalConfigurationError, Problem
from .execution import FORKED, LoopThread, keep_inherited, renewed_after_fork
from .type_keys import type_name

if TYPE_CHECKING:
    from dependency_injector.containers import DynamicContainer

    from .di.overriding import Override
    from .di.wiring import Wiring
    from .services.hosting import ContainerHost
    from .services.memory import ChatMemory
    from .settings import ToolboxSettings
    from .tools.failures import ToolErrors

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger("toolbox.container")

APPLICATION_CONTAINER = "toolbox_container"
"""The attribute of an application's `state` by which commands find the container that was installed in it."""


class Container:
    """Beans, tools and services of one program.

    Started by `async with` or `with`; then beans are looked up with `get` and `aget`. It is a bean itself. `models` are
    those given, by name: a test may put others in their place before the start.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, ChatModel] | None = None,
        executors: Mapping[str, Executor] | None = None,
        tool_errors: ToolErrors | None = None,
        settings: ToolboxSettings | None = None,
        seeds: Iterable[TypeForm[Any]] = (),
    ) -> None:
        if models is not None and not isinstance(models, Mapping):
            raise TypeError(f'models= must map names to models: {{"default": {type(models).__name__}(…)}}')
        self.models: dict[str, ChatModel] = dict(models or {})
        self._executors = dict(executors or {})
        self._tool_errors, self._settings = tool_errors, settings
        self._host: ContainerHost | None = None
        self._registry = Registry(seeds)
        self._checks: list[Callable[[BeanGraph], Iterable[Problem]]] = []
        self._overrides: list[Override] = []
        self._wiring: Wiring | None = None  # set only by `_connect` and `_disconnect`
        self._thread: LoopThread | None = None
        self._forked = ""  # why it is not started in this process, if it was when this process was forked
        self._read_before: _ReadBefore | None = None
        self._internals = ContainerInternals(self)

    # --- registering

    def register(self, *objects: object) -> Self:
        """Registers classes, producers, services, REST clients."""
        self._refuse_started("register")
        for each in objects:
            self._registry.add(each)
        return self

    def register_instance(self, instance: T, as_type: TypeForm[T] | None = None, name: str | None = None) -> Self:
        """Registers an object as a bean of its class, or of `as_type`. It is never closed here."""
        self._refuse_started("register_instance")
        self._registry.give(instance, type(instance) if as_type is None else as_type, name)
        return self

    def bind(self, interface: TypeForm[T], implementation: type[T] | Callable[..., T], name: str | None = None) -> Self:
        """Makes `interface` (under `name`) mean the bean of this class or producer."""
        self._refuse_started("bind")
        self._registry.bind(Binding(interface, implementation, name))
        return self

    def scan(self, module: ModuleType | str) -> Self:
        """Registers everything marked in a module and in all below it."""
        return self.register(*marked_in(module, self._is_marked))

    def include(self, container: Any) -> Self:
        """Makes each provider of a `dependency_injector` container, class or instance, a bean."""
        self._refuse_started("include")
        if isinstance(container, Container) or not hasattr(container, "providers"):
            raise TypeError(f"include(…) expects a dependency_injector container, got {type(container).__name__}")
        self._registry.include(container)
        return self

    def _refuse_started(self, what: str, fix: str = "call it before the start") -> None:
        if self._wiring is not None:
            problem = Problem(f"Container.{what}", "the container is already started", fix)
            raise IllegalConfigurationError([problem])

    # --- reading and checking

    @staticmethod
    def _is_marked(member: object) -> bool:
        """Whether `scan` registers it."""
        from .rest.marks import client_mark_of
        from .services.declaration import service_options_of
        from .tools.sources import bean_types

        if isinstance(member, type):
            marks = (scope_mark_of(member), service_options_of(member), client_mark_of(member))
            is_marked = any(mark is not None for mark in marks)
            # An abstract class with tools offers them through its subclasses.
            return is_marked or (bool(bean_types([member])) and not inspect.isabstract(member))
        return producer_mark_of(member) is not None

    def _readers(self, names: Mapping[str, Any], host: ContainerHost) -> tuple[Reader, ...]:
        """What registered objects may be, in this order."""
        from .rest.implementation import read_rest_client

        def read_client(registered: object) -> Registration | None:
            return read_rest_client(registered, self._internals, lambda: host.settings)

        def read_service(registered: object) -> Registration | None:
            return host.read(registered, names)

        return read_instance, read_included, read_service, read_client, bean_reader(names)

    def _read(self) -> tuple[ContainerHost, Registered, list[Problem]]:
        """Read everything registered; also what is wrong with the library's own settings.

        What was read before is used again if nothing has changed: `check()` and the start after it read once.
        """
        host, problems = self._new_host()
        contents, before = self._registry.contents(), self._read_before
        given = (contents, dict(self.models), host.settings)
        if before is not None and contents is not None and before.given == given:
            return before.host, before.registered, problems
        names = self._registry.names()
        own = [
            BeanDefinition(
                provides=type(value),
                factory=lambda value=value: value,
                scope=Scope.APPLICATION,
                implicit=True,
                source=value,
            )
            for value in (self, host.settings)
        ]
        registered = self._registry.read(self._readers(names, host), names, own)
        self._read_before = _ReadBefore(given, host, registered)
        return host, registered, problems

    def _new_host(self) -> tuple[ContainerHost, list[Problem]]:
        """What services will find around their calls, and what is wrong with the library's own settings."""
        from .services.hosting import ContainerHost
        from .settings import ToolboxSettings

        problems: list[Problem] = []
        try:
            settings = self._settings or ToolboxSettings()
        except ValueError as error:
            problems.append(settings_problem(ToolboxSettings, error))
            # With the demo, so that what could not be read is not told once more, as a model that is missing.
            settings = ToolboxSettings.model_construct(demo=True)
        host = ContainerHost(
            self._internals,
            models=self.models,
            executors=self._executors,
            tool_errors=self._tool_errors,
            settings=settings,
        )
        return host, problems

    def check(self, *, models: bool = True) -> list[Problem]:
        """Return what start would refuse, without starting.

        `models=False` leaves out which models there are, for a machine that has none, such as one that builds.
        """
        _, _, _, problems = self._checked(models=models)
        if problems:  # the program may correct what was read, and not only what is registered
            self._read_before = None
        return problems

    def _checked(self, *, models: bool = True) -> tuple[ContainerHost, BeanGraph, dict[int, Any], list[Problem]]:
        """Return what services run with, the graph, the settings beans, and everything that is wrong."""
        from .services.checks import listener_problems, tool_problems

        host, registered, problems = self._read()
        host.models.are_checked, settings_are_read = models, not problems
        problems = [*problems, *registered.problems(), *tool_problems(registered.graph)]
        problems += listener_problems(registered.graph)
        for check in self._checks:
            problems += check(registered.graph)
        for override in self._overrides:
            problems += override.problems(registered.graph)
        overridden = [key for each in self._overrides if (key := each.key_in(registered.graph)) is not None]
        settings, failed = settings_in(registered.graph, overridden)
        if settings_are_read:
            failed += producer_problems(registered.graph, host.settings, overridden)
        return host, registered.graph, settings, list(dict.fromkeys(problems + failed))

    # --- start and stop

    @property
    def is_started(self) -> bool:
        """Whether it has been started and not stopped since."""
        return self._wiring is not None

    async def __aenter__(self) -> Self:
        self._refuse_started("start", "stop it first, or create another container")
        await self._start(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop(error)

    def __enter__(self) -> Self:
        self._refuse_started("start", "stop it first, or create another container")
        thread = LoopThread()
        thread.start()
        self._thread = thread
        try:
            thread.run(self._start(thread.loop))
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, wiring = self._thread, self._wiring
        if self._forked:
            return  # the parent stops it
        if thread is None or wiring is None:
            raise ContainerNotStartedError("stop")
        if not thread.answers(self._internals.host.settings.stop_timeout):
            logger.error("a tool or a bean blocks the container's event loop; the container stops anyway")
            self._leave_behind(wiring, error)
            return
        try:
            thread.run(self._before_beans_stop())
            # Beans made by synchronous code are closed on the thread that made most of them.
            wiring.stop_waiting(error, thread.run)
        finally:
            self._disconnect()
            try:
                thread.run(self._after_beans_stop())
            finally:
                self._end_thread()

    def _leave_behind(self, wiring: Wiring, error: BaseException | None) -> None:
        """Stop without the loop: what has to be awaited is not closed."""
        self._disconnect()
        self._host = self._thread = None
        wiring.stop_waiting(error, lambda work: work.close())

    def renew_after_fork(self) -> None:
        """Forget, in a forked process, what runs in the parent: this container is not started here."""
        if self._wiring is not None:
            keep_inherited(self._wiring, self._host, self._thread)
            self._disconnect()
            self._host = self._thread = None
            self._forked = FORKED

    def _connect(self, wiring: Wiring) -> None:
        """Make lookups reach the beans of this start."""
        self._wiring = wiring
        # Calls of these members go directly to the wiring while the container is started: each tool call uses them.
        vars(self._internals).update(
            get=wiring.get, aget=wiring.aget, prepare=wiring.prepare, open_call_scope=wiring.open_call_scope
        )

    def _disconnect(self) -> None:
        """Make lookups raise `ContainerNotStartedError`."""
        self._wiring = None
        for name in ("get", "aget", "prepare", "open_call_scope"):
            vars(self._internals).pop(name, None)

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        host, graph, settings, problems = self._checked()
        self._read_before = None  # each start has a graph and a host for itself
        if problems:
            raise IllegalConfigurationError(problems)
        # Not before it is needed: dependency_injector takes long to load.
        from .di.wiring import Wiring

        wiring = Wiring(graph, self._internals, loop)
        wiring.application.store.update(settings)
        self._connect(wiring)
        self._forked = ""
        renewed_after_fork(self)
        host.start(loop)
        self._host = host
        try:
            for override in self._overrides:
                override.apply(wiring)
            await wiring.start(self._registry.undefined())
            await host.find_listeners()
        except BaseException as error:
            await self._stop(error)
            raise

    async def _stop(self, error: BaseException | None) -> None:
        wiring = self._wiring
        if self._forked:
            return  # the parent stops it
        if wiring is None:
            raise ContainerNotStartedError("stop")
        try:
            await self._before_beans_stop()
            await wiring.stop(error)
        finally:
            self._disconnect()
            await self._after_beans_stop()

    async def _before_beans_stop(self) -> None:
        """Ends the invocations that are under way, before the first bean is closed."""
        if self._host is not None:
            await self._host.stop()

    async def _after_beans_stop(self) -> None:
        """Closes the models that settings made, when all beans are closed."""
        host, self._host = self._host, None
        if host is not None:
            await host.close_models()

    # --- looking up

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """The bean, made now if need be.

        Raises `MissingBeanError`, `AmbiguousBeanError`, `AsyncBeanError` when a part of it has to be awaited, and
        `ScopeNotActiveError` outside its scope.
        """
        # Not by `_started`: each endpoint and tool comes here.
        wiring = self._wiring if self._wiring is not None else self._started(wanted)
        return wiring.get(wanted, name)  # type: ignore[no-any-return]  # the wiring returns the requested type

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """The bean, awaiting what has to be. Raises as `get` does."""
        wiring = self._wiring if self._wiring is not None else self._started(wanted)
        return await wiring.aget(wanted, name)  # type: ignore[no-any-return]  # as in `get`

    def _started(self, what: Any) -> Wiring:
        if self._wiring is None:
            raise ContainerNotStartedError(what if isinstance(what, str) else type_name(what), self._forked)
        return self._wiring

    def call(self, function: Callable[..., R], /, **values: Any) -> R:
        """Calls `function` with `values`; its other parameters are injected."""
        wiring = self._started(type_name(function))
        points = self._points(function, wiring.graph)
        for point, value in _unfilled(points, values, wiring):
            values[point.parameter] = wiring.get_value(value, wiring.scope())
        return function(*_positional(points, values), **values)

    @overload
    async def acall(self, function: Callable[..., Coroutine[Any, Any, R]], /, **values: Any) -> R: ...

    @overload
    async def acall(self, function: Callable[..., R], /, **values: Any) -> R: ...

    async def acall(self, function: Callable[..., Any], /, **values: Any) -> Any:
        """The same, awaiting what has to be, also what `function` returns."""
        wiring = self._started(type_name(function))
        points = self._points(function, wiring.graph)
        for point, value in _unfilled(points, values, wiring):
            values[point.parameter] = await wiring.aget_value(value, wiring.scope())
        result = function(*_positional(points, values), **values)
        return await result if inspect.isawaitable(result) else result

    @staticmethod
    def _points(function: Callable[..., Any], graph: BeanGraph) -> tuple[InjectionPoint, ...]:
        if isinstance(function, type):
            return read_class(function, graph.names).needs
        return points_of(function, type_name(function), graph.names)

    @property
    def providers(self) -> DynamicContainer:
        """The beans as a `dependency_injector` container, after start: a provider each, under its name."""
        return self._started("providers").providers.container

    # --- scopes

    def request_scope(self, seeds: Mapping[Any, Any] | None = None) -> RequestScope:
        """A new request scope, to be entered with `async with` or `with`; `seeds` are instances by type."""
        if seeds is not None and not isinstance(seeds, Mapping):
            kind = type(seeds).__name__
            raise TypeError(
                f"request_scope expects a mapping from types to instances, such as {{{kind}: …}}; got {kind}"
            )
        wiring = self._wiring if self._wiring is not None else self._started("request_scope")
        return wiring.open_request(seeds or {})

    # --- services

    def chat_memory(self, service: type[Any], memory_id: object) -> ChatMemory:
        """A conversation of a service: `await .messages()`, `.add(*messages)`, `.clear()`."""
        return self._internals.host.chat_memory(service, memory_id)

    # --- overriding

    @contextmanager
    def override(self, wanted: TypeForm[T], fake: T, name: str | None = None) -> Iterator[T]:
        """Makes `fake` stand for a bean in the whole container; application beans that hold it are made anew inside.

        For a fake that only one task sees, seed a request scope.
        """
        from .di.overriding import Override

        override = Override(wanted, fake, name)
        if self._wiring is not None:
            override.apply(self._wiring)
        self._overrides.append(override)
        try:
            yield fake
        finally:
            self._overrides.remove(override)
            if self._wiring is not None:
                override.take_back(self._wiring)


@dataclass(frozen=True, slots=True)
class _ReadBefore:
    """What was read of `given`: all that is registered, the models and the settings."""

    given: tuple[object, ...]
    host: ContainerHost
    registered: Registered


def internals_of(container: Container) -> ContainerInternals:
    """Return the members of a container that are for the framework itself: web, command line, MCP, tests."""
    return container._internals


class ContainerInternals:
    """What the framework needs of a container beyond what its users do; programs have no need of it.

    It is the `ActiveScope` in which tools and services find their beans.
    """

    def __init__(self, container: Container) -> None:
        self._container = container

    # --- before start

    def declare_seed(self, wanted: TypeForm[T], find: Callable[[], T | Missing] | None = None) -> None:
        """Tells the check of a further type that request scopes will be given.

        In a scope that was not, `find()` is asked each time, and answers `MISSING` when it does not know either.
        """
        self._container._refuse_started("declare_seed")
        self._container._registry.declare_seed(wanted, find)

    def add_check(self, check: Callable[[BeanGraph], Iterable[Problem]]) -> None:
        """Lets `check()` and start ask for further problems, of what uses the container from outside."""
        self._container._checks.append(check)

    def add_implied(self, find: Callable[[], Iterable[object]]) -> None:
        """Lets `check()` and start ask what else counts as registered, unless something provides it already."""
        self._container._refuse_started("add_implied")
        self._container._registry.add_implied(find)

    def knows(self, registered: object) -> bool:
        """Whether an object has been registered, or is an instance or binding of this type."""
        return self._container._registry.knows(registered)

    def tool_beans(self) -> tuple[type[Any], ...]:
        """The classes among the beans that have tools, in registration order."""
        from .tools.sources import bean_types

        graph = self._container._read()[1].graph
        return bean_types(dict.fromkeys(each.provides for each in graph.definitions))

    def describe(self) -> tuple[BeanDescription, ...]:
        """All beans, in registration order: for tools that show the graph."""
        return describe(self._container._read()[1].graph)

    # --- while it is started

    def application_beans_with(self, method: str) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return the application-scoped beans whose class has this method: by name, a function that gets the bean.

        Raises `ContainerNotStartedError`.
        """
        wiring = self._container._started(method)
        names = provider_names(wiring.graph)
        found: dict[str, Callable[[], Awaitable[Any]]] = {}
        for bean in wiring.graph.beans:
            definition = bean.definition
            cls = get_origin(definition.provides) or definition.provides
            if definition.scope is Scope.APPLICATION and callable(getattr(cls, method, None)):
                found[names[bean.key]] = partial(wiring.aget_value, SingleBean(bean.key), wiring.application)
        return found

    # `Container._connect` replaces the next four by the members of the wiring.

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """See `Container.get`."""
        return self._container._started(wanted).get(wanted, name)  # type: ignore[no-any-return]  # as there

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """See `Container.aget`."""
        return await self._container._started(wanted).aget(wanted, name)  # type: ignore[no-any-return]  # as there

    async def prepare(self, wanted: TypeForm[Any], name: str | None = None) -> None:
        """See `ActiveScope.prepare`."""
        await self._container._started(wanted).prepare(wanted, name)

    def open_call_scope(self) -> CallScope:
        """See `ActiveScope.open_call_scope`."""
        return self._container._started("open_call_scope").open_call_scope()

    @property
    def host(self) -> ContainerHost:
        """What runs the services of a started container: for what calls its tools from outside."""
        if self._container._host is None:
            raise ContainerNotStartedError("a call of a tool", self._container._forked)
        return self._container._host


def _unfilled(
    points: Sequence[InjectionPoint], given: Mapping[str, Any], wiring: Wiring
) -> Iterator[tuple[InjectionPoint, Value]]:
    """The parameters of a called function that the container fills, and what each gets."""
    for point in points:
        if point.parameter not in given and (value := wiring.graph.found(point)) != DEFAULT:
            wiring.follow_graph()
            yield point, value


def _positional(points: Sequence[InjectionPoint], values: dict[str, Any]) -> list[Any]:
    """Taken out of `values`: those of positional-only parameters."""
    taken = [values.pop(each.parameter, each.default) for each in points if each.positional]
    return [value for value in taken if value is not MISSING]
