"""Reads and checks everything that is registered with a container.

Beans, AI services, REST clients and functions that the container calls itself each have a reader. Not here: how a class
becomes a bean (`di`), what is checked about services, tools and models (`hosts`), the start (`container`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, get_origin

from .bean_references import GLOBAL_INTERCEPTOR_MARK, is_rest_client
from .chat import ChatModel
from .context import ActiveScope
from .di.beans import BeanDefinition
from .di.conditions import conditions_of
from .di.decorating import decorates_mark_of
from .di.decorators import Scope, producer_mark_of, scope_mark_of
from .di.graph import BeanGraph, Registration
from .di.graph_checks import find_problems
from .di.injection_points import name_problem
from .di.registry import (
    Reader,
    Registered,
    Registry,
    bean_reader,
    decorator_reader,
    producer_problems,
    read_included,
    read_instance,
    settings_in,
)
from .di.settings_beans import settings_problem
from .errors import IllegalConfigurationError, Problem
from .security import SecurityIdentity

if TYPE_CHECKING:
    from .called_functions import CallDecorator, CalledFunction
    from .di.overriding import Override
    from .hosts.hosting import ContainerHost
    from .injected_functions import InjectedFunction
    from .settings import ToolboxSettings
    from .tools.failures import ToolErrors
    from .tools.tool_calls import Tool


class HasModels(Protocol):
    """The container, which is a bean, and whose models tests can replace."""

    models: dict[str, ChatModel]


class RegisteredProgram:
    """What is registered with one container: it is read and checked again for each start.

    `checks`, `tool_finders` and `injected` come from code that uses the container. `overrides` are the active ones.
    """

    def __init__(
        self,
        container: HasModels,
        scope: ActiveScope,
        *,
        executors: Mapping[str, Executor],
        tool_errors: ToolErrors | None,
        settings: ToolboxSettings | None,
        seeds: Iterable[Any],
        run_seeds: Iterable[Any],
        run_identity: Iterable[str],
    ) -> None:
        self._container, self._scope = container, scope
        self._executors, self._tool_errors, self._settings = dict(executors), tool_errors, settings
        self._run_seeds, declared = tuple(run_seeds), list(_types("seeds", seeds))
        self._run_identity = _names("run_identity", run_identity)
        self.registry = Registry([each for each in declared if each is not SecurityIdentity], self._run_seeds)
        if SecurityIdentity in declared:
            # A request scope without an identity belongs to an anonymous caller.
            self.registry.declare_seed(SecurityIdentity, SecurityIdentity.anonymous)
        self.checks: list[Callable[[BeanGraph], Iterable[Problem]]] = []
        self.tool_finders: list[Callable[[BeanGraph], Mapping[str, Sequence[Tool]]]] = []
        self.overrides: list[Override] = []
        self.injected: list[InjectedFunction] = []
        self._read_before: _ReadBefore | None = None

    # --- reading

    def read(self) -> tuple[ContainerHost, Registered, list[Problem]]:
        """Read everything registered; also return problems of the library's own settings.

        Reuse the last result if nothing has changed, so that `check()` and the start after it read once.
        """
        host, problems = self._new_host()
        contents, before = self.registry.contents(), self._read_before
        models = dict(self._container.models), tuple(host.models.sources.names()), self._overridden_models()
        given = (contents, models, host.settings)
        if before is not None and contents is not None and before.given == given:
            return before.host, before.registered, problems
        names = self.registry.names()

        def own_on_request(wanted: object) -> BeanDefinition | None:
            # Most programs use neither of these, and do not import them.
            if (runs := loaded("runs.runs_bean")) is not None and wanted is runs.Runs:
                return _own_bean(host.runs)
            conversations = loaded("conversations.conversations_bean")
            if conversations is not None and wanted is conversations.Conversations:
                return _own_bean(host.conversations)
            return None

        own = [_own_bean(each) for each in (self._container, host.settings)]
        registered = self.registry.read(
            self._readers(names, host), names, own, own_on_request, host.models, host.settings.profiles
        )
        self._read_before = _ReadBefore(given, host, registered)
        return host, registered, problems

    def forget_reading(self) -> None:
        """Read everything again next time: a start needs a new graph and host."""
        self._read_before = None

    def _new_host(self) -> tuple[ContainerHost, list[Problem]]:
        """Return the host of the services, and problems of the library's own settings."""
        from .hosts.hosting import ContainerHost
        from .settings import ToolboxSettings

        problems: list[Problem] = []
        try:
            settings = self._settings or ToolboxSettings()
        except ValueError as error:
            problems.append(settings_problem(ToolboxSettings, error))
            # With the demo, so that the missing model is not a second problem.
            settings = ToolboxSettings.model_construct(demo=True)
        host = ContainerHost(
            self._scope,
            models=self._container.models,
            overridden=self._overridden_models(),
            executors=self._executors,
            tool_errors=self._tool_errors,
            settings=settings,
            run_seeds=self._run_seeds,
            run_identity=self._run_identity,
        )
        return host, problems

    def _overridden_models(self) -> tuple[str, ...]:
        """Return the names of the models that overrides replace: they need not be configured."""
        return tuple(name for each in self.overrides if (name := each.name_of(ChatModel, "default")) is not None)

    def _readers(self, names: Mapping[str, Any], host: ContainerHost) -> tuple[Reader, ...]:
        """Return the readers of registered objects, in the order to try them."""
        from .services.implied_beans import named_beans

        def read_client(registered: object) -> Registration | None:
            if "toolbox.rest" not in sys.modules:
                return None  # nothing can be a REST client, or settings of one
            from .rest.clients import read_rest_client

            return with_named(read_rest_client(registered, self._scope, lambda: host.settings))

        def read_service(registered: object) -> Registration | None:
            return host.registered.read(registered, names)

        def read_bean(registered: object) -> Registration | None:
            return with_named(read(registered))

        def read_given(registered: object) -> Registration | None:
            return with_named(read_instance(registered))

        def with_named(registration: Registration | None) -> Registration | None:
            """Add the classes that decorators name at the provided classes, so that they need no registration."""
            if registration is None:
                return None
            decorator = registration.decorator
            described = registration.definitions if decorator is None else (decorator.definition,)
            if not (implied := tuple(named_beans(each.provides for each in described))):
                return registration
            return replace(registration, implies=(*registration.implies, *implied))

        def read_decorating(registered: object) -> Registration | None:
            return with_named(read_decorator(registered))

        def read_called(registered: object) -> Registration | None:
            called = tuple(found for each in decorators if (found := each.read_function(registered)) is not None)
            return Registration((), called=called) if called else None

        read, read_decorator, decorators = bean_reader(names), decorator_reader(names), call_decorators()
        others = read_given, read_included, read_decorating, read_service, read_client, read_bean
        return (read_called, *others) if decorators else others

    # --- checking

    def check(self, *, models: bool = True) -> CheckedProgram:
        """Read everything registered, and check it. `models=False` does not check the models."""
        from .hosts.bean_checks import (
            access_problems,
            estimator_problems,
            find_store_without_logs,
            global_interceptor_problems,
            hook_problems,
            identity_problems,
            key_function_problems,
            listener_problems,
            restricted_in,
            tool_problems,
            tools_of_beans,
        )
        from .hosts.ineffective_marks import Use, mark_problems
        from .services.option_checks import handler_problems

        host, registered, problems = self.read()
        graph = registered.graph
        host.use_graph(graph)
        host.models.are_checked, settings_are_read = models, not problems
        problems += registered.unreadable
        read = len(problems)
        if self._tool_errors is not None:
            problems += handler_problems("Container(tool_errors=…)", self._tool_errors)
        problems += registered.problems()  # plans the services
        problems += host.registered.settle()
        tools = tools_of_beans(graph)
        problems += tool_problems(graph, tools)
        problems += host.models.problems(problems)
        problems += key_function_problems(host.models, graph)
        problems += host.registered.name_problems()
        problems += host.registered.run_problems(graph, self._added_tools(graph))
        problems += host.registered.bean_problems(graph, find_store_without_logs(graph))
        problems += listener_problems(graph)
        problems += global_interceptor_problems(graph)
        problems += hook_problems(graph)
        problems += estimator_problems(graph)
        problems += access_problems(graph)
        plans = [plan for service in host.plans.values() for plan in service.values()]
        problems += identity_problems(graph, restricted_in(graph, plans, tools))
        named = (name_problem(each, "Container(executors=…)") for each in self._executors)
        problems += (each for each in named if each is not None)
        for check in self.checks:
            problems += check(graph)
        start: tuple[CalledFunction, ...] = ()
        observers: tuple[CalledFunction, ...] = ()
        if (startup := loaded("startup")) is not None:
            start = startup.start_functions(registered.readings, graph)
            problems += startup.start_problems(start, graph, host.workers)
        if (observing := loaded("observers")) is not None:
            observers = observing.observing_functions(registered.readings, graph)
            problems += observing.observer_problems(observers, graph, host.workers)
        for each in self.injected:
            problems += each.problems(graph)
        functions = [(each.where, each.function, Use.CALLED) for each in (*start, *observers)]
        functions += [(*each, Use.CALLED) for each in host.models.key_functions()]
        functions += [(each.where, each.function, Use.NONE) for each in self.injected]
        problems += mark_problems(graph, plans, functions, [each.attribute for each in call_decorators()])
        for override in self.overrides:
            problems += override.problems(graph)
        overridden = [key for each in self.overrides if (key := each.key_in(graph)) is not None]
        problems[read:read] = find_problems(graph)  # last, because all other checks may add beans
        settings, failed = settings_in(graph, overridden)
        if settings_are_read:
            failed += producer_problems(graph, host.settings, overridden)
        return CheckedProgram(host, graph, settings, start, observers, list(dict.fromkeys(problems + failed)))

    def _added_tools(self, graph: BeanGraph) -> Iterator[Sequence[Tool]]:
        """Yield the tools that each endpoint adds to calls. Invalid ones are reported with their endpoint."""
        for find in self.tool_finders:
            with suppress(IllegalConfigurationError):
                yield from find(graph).values()


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """The result of a check: the host of the services, the graph, the settings beans, marked functions, problems."""

    host: ContainerHost
    graph: BeanGraph
    settings: dict[int, Any]
    start: Sequence[CalledFunction]
    observers: Sequence[CalledFunction]
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class _ReadBefore:
    """The result of reading `given`: everything registered, the models and the settings."""

    given: tuple[object, ...]
    host: ContainerHost
    registered: Registered


def _own_bean(value: object) -> BeanDefinition:
    """Return the definition of an object of the container itself."""
    return BeanDefinition(
        provides=type(value), factory=lambda: value, scope=Scope.APPLICATION, implicit=True, source=value
    )


def _types(argument: str, given: Iterable[Any]) -> Iterator[Any]:
    """Yield the given types. Raises `TypeError` for a single type, and for instances in place of types."""
    if isinstance(given, (type, str)) or not isinstance(given, Iterable):
        name = given.__name__ if isinstance(given, type) else "User"
        raise TypeError(f"{argument}= must be a collection of types: {argument}=({name},)")
    for each in given:
        if not (isinstance(each, type) or get_origin(each) or callable(each) or hasattr(each, "__value__")):
            kind = type(each).__name__
            raise TypeError(
                f"{argument}= must be types, got an instance of {kind}; pass instances to request_scope({{{kind}: …}})"
            )
        yield each


def _names(argument: str, given: Iterable[Any]) -> tuple[str, ...]:
    """Return the given names. Raises `TypeError` for a single name, and for anything but names."""
    names = () if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not all(isinstance(each, str) for each in names):
        raise TypeError(f'invalid {argument}={given!r}; use a tuple of names: {argument}=("tenant",)')
    return names


# --- what a program marks


def is_marked(member: object) -> bool:
    """Return True if `scan` registers this object."""
    from .services.declaration import service_options_of
    from .tools.marks import mcp_marked
    from .tools.sources import bean_types

    if conditions_of(member) or decorates_mark_of(member):
        return True
    if isinstance(member, type):
        marks = (scope_mark_of(member), service_options_of(member))
        has_mark = any(mark is not None for mark in marks) or GLOBAL_INTERCEPTOR_MARK in vars(member)
        has_mark = has_mark or is_rest_client(member)
        # Subclasses offer the tools of an abstract class.
        offers = bool(bean_types([member])) or bool(mcp_marked(member))
        offers = offers or any(each.has_methods(member) for each in call_decorators())
        return has_mark or (offers and not inspect.isabstract(member))
    is_called = any(each.mark_of(member) is not None for each in call_decorators())
    return is_called or producer_mark_of(member) is not None


def loaded(module: str) -> Any:
    """Return a module of the library, or None if the program has not imported it, so that it has no marks of it."""
    return sys.modules.get(f"toolbox.{module}")


def call_decorators() -> tuple[CallDecorator, ...]:
    """Return the decorators of functions that the container calls, of those that the program has imported."""
    decorators = (("startup", "ON_START"), ("observers", "OBSERVES"))
    return tuple(getattr(found, name) for module, name in decorators if (found := loaded(module)) is not None)
