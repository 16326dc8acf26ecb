"""Providers of other `dependency_injector` containers as beans of ours, and our beans for what those leave undefined.

These providers keep control of the lifetime of their instances and are called each time, so their overrides apply.
Not here: our own providers (`creation`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeGuard, cast

from dependency_injector import providers, resources

from ..errors import AsyncBeanError, Problem
from ..introspection import plain, read_signature, type_name
from .beans import BeanDefinition, FactoryKind, InjectionPoint, point_of, yielded
from .creation import BeanProvider, end_override
from .decorators import Scope
from .graph import BeanGraph, Registration

_UNSAFE: dict[type[Any], str] = {
    providers.ThreadLocalSingleton: "creates one instance per thread, but a request moves between threads",
    providers.ContextLocalSingleton: "shares an instance with later tasks, but not between the tasks of a request",
    providers.ContextLocalResource: "opens once per context, but does not close the instances of child tasks",
}
_LASTING: tuple[type[Any], ...] = (
    providers.BaseSingleton,
    providers.Resource,
    providers.Object,
    providers.Configuration,
)
_CALLING: tuple[type[Any], ...] = (
    providers.Factory,
    providers.BaseSingleton,
    providers.Callable,
    providers.BaseResource,
)
_LEFT_OUT: tuple[type[Any], ...] = (providers.Self, providers.DependenciesContainer, BeanProvider)


def read_container(container: Any) -> Registration:
    """Read the providers of a container (class or instance) as beans."""
    where = _name_of(container)
    found = list(_named_providers(container, ""))
    unsafe = list(_unsafe(found, where))

    def check(_: BeanGraph) -> Iterator[Problem]:
        yield from unsafe

    definitions = tuple(
        _definition(name, provider, where)
        for name, provider in found
        if not isinstance(provider, tuple(_UNSAFE)) and not _is_undefined(provider)
    )
    return Registration(definitions, check=check)


def _name_of(container: Any) -> str:
    """Return the class name of a declarative container, also for its instances."""
    cls = container if isinstance(container, type) else getattr(container, "declarative_parent", None)
    return str(getattr(cls, "__name__", type(container).__name__))


def _named_providers(container: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, provider in container.providers.items():
        if isinstance(provider, providers.Container):
            yield from _named_providers(provider.container, f"{prefix}{name}.")
        elif not isinstance(provider, _LEFT_OUT):
            yield f"{prefix}{name}", provider


def _unsafe(found: list[tuple[str, Any]], where: str) -> Iterator[Problem]:
    names = {id(provider): name for name, provider in found}
    order = list(names)
    everything = list(providers.traverse(*(provider for _, provider in found)))
    everything.sort(key=lambda each: order.index(id(each)) if id(each) in names else len(order))
    for provider in everything:
        for kind, reason in _UNSAFE.items():
            if isinstance(provider, kind):
                name = names.get(id(provider))
                place = f"{where}.{name}" if name else f"{where}, {type_name(_type_of(provider))}"
                what = f"a {type(provider).__name__} {reason}"
                yield Problem(place, what, "use a Singleton or a Factory, or register its class as @request_scoped")


def _definition(name: str, provider: Any, where: str) -> BeanDefinition:
    scope = Scope.APPLICATION if _lasts(provider) else Scope.DEPENDENT
    needs = tuple(
        point_of(dependency.instance_of, f"{where}.{name}", parameter=type_name(dependency.instance_of))
        for dependency in undefined_in(provider)
    )
    is_awaited = _is_async(provider)
    resource = _Resource(provider) if isinstance(provider, providers.Resource) else None
    factory: Callable[[], Any] = (
        _awaiting(provider, resource) if is_awaited else _ProviderCall(provider, f"{where}.{name}", scope, resource)
    )
    return BeanDefinition(
        provides=_type_of(provider),
        factory=factory,
        scope=scope,
        name=name,
        behind=needs,
        factory_kind=FactoryKind.COROUTINE if is_awaited else FactoryKind.CALL,
        # Async results are stored, because `get` could not await them again.
        caches=is_awaited,
        shutdown=resource.shutdown if resource is not None else None,
        source=provider,
    )


class _ProviderCall:
    """Calls a provider; a lock protects providers that keep their instance."""

    def __init__(self, provider: Any, where: str, scope: Scope, resource: _Resource | None) -> None:
        self._provider, self._where, self._resource = provider, where, resource
        # Without the lock, Singleton and Resource create one instance per concurrent thread.
        self._lock = threading.RLock() if scope is Scope.APPLICATION else None

    def __call__(self) -> Any:
        if self._lock is None:
            made = self._provider()
        else:
            with self._lock:
                made = self._resource.open() if self._resource is not None else self._provider()
        if inspect.isawaitable(made):
            if inspect.iscoroutine(made):
                made.close()
            raise AsyncBeanError(self._where, "overridden by an async provider")
        return made


def _awaiting(provider: Any, resource: _Resource | None) -> Callable[[], Awaitable[Any]]:
    async def call() -> Any:
        made = resource.open() if resource is not None else provider()
        return await made if inspect.isawaitable(made) else made

    return call


class _Resource:
    """A resource that our container shuts down if it opened it."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._opened = False

    def open(self) -> Any:
        """Return the value of the resource, or an awaitable of it."""
        if self._provider.last_overriding is None and not self._provider.initialized:
            self._opened = True
        return self._provider()

    def shutdown(self) -> Any:
        """Shut the resource down; the result can be an awaitable."""
        if not self._opened:
            return None
        self._opened = False
        return self._provider.shutdown()


# --- reading providers


def _lasts(provider: Any) -> bool:
    """Return True if the provider always returns the same instance."""
    if isinstance(provider, providers.Dependency):
        behind = provider.last_overriding or provider.default
        return behind is None or _lasts(behind)
    return isinstance(provider, _LASTING)


def _is_async(provider: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Return True if the provider's result must be awaited."""
    if id(provider) in seen or isinstance(provider, (BeanProvider, providers.Delegate)):
        return False
    provides = _provides(provider)
    if (
        inspect.iscoroutinefunction(provides)
        or inspect.isasyncgenfunction(provides)
        or provider.is_async_mode_enabled()
    ):
        return True
    if isinstance(provides, type) and issubclass(provides, resources.AsyncResource):
        return True
    return any(_is_async(each, seen | {id(provider)}) for each in provider.related)


def _provides(provider: Any) -> Any:
    """Return the class or function of a provider; for a context manager, the generator function."""
    provides = provider.provides if isinstance(provider, _CALLING) else None
    return inspect.unwrap(provides) if callable(provides) and not isinstance(provides, type) else provides


def _type_of(provider: Any) -> Any:
    """Return the declared type of the provider's result, or `object`."""
    if isinstance(provider, providers.Configuration):
        return dict[str, Any]
    if isinstance(provider, providers.Object):
        value = provider.provides
        return type[value] if isinstance(value, type) else type(value)
    if isinstance(provider, providers.Dependency):
        return provider.instance_of
    if isinstance(provider, providers.List):
        return list
    if isinstance(provider, providers.Dict):
        return dict
    provides = _provides(provider)
    if isinstance(provides, type):
        is_resource = issubclass(provides, (resources.Resource, resources.AsyncResource))
        return _returned(cast("Any", provides).init) if is_resource else provides
    return _returned(provides) if inspect.isroutine(provides) else object


def _returned(function: Callable[..., Any]) -> Any:
    """Return the annotated type that a function returns or yields, or `object`."""
    with suppress(ValueError, TypeError):  # C code without a signature
        returns = read_signature(function).returns
        if isinstance(returns, type) or getattr(returns, "__origin__", None) is not None:
            form = plain(returns)
            yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
            return yielded(form) if yields else form
    return object


# --- overriding


def holders_in(graph: BeanGraph, key: int, provider: Any) -> frozenset[int]:
    """Return the beans of included containers that depend on a bean, whose provider is `provider`."""
    targets = _targets(graph, key, provider)
    return frozenset(
        each
        for each, definition in enumerate(graph.definitions)
        if each != key and isinstance(definition.source, providers.Provider) and _holds(definition.source, targets)
    )


def override_outside(graph: BeanGraph, key: int, provider: Any, fake: Any) -> Callable[[], None]:
    """Replace a bean in included containers, with new instances of their holders. Return a function that ends it.

    Call this before you override `provider`, our provider of the bean.
    """
    targets = _targets(graph, key, provider)
    sources = [each.source for each in graph.definitions if isinstance(each.source, providers.Provider)]
    stand_ins: list[tuple[Any, Any]] = [
        (each, type(each)(each.provides, *each.args, **each.kwargs).set_attributes(**each.attributes))
        for each in providers.traverse(*sources)
        if isinstance(each, providers.BaseSingleton) and each.last_overriding is None and _holds(each, targets)
    ]
    stand_ins += [(each, providers.Object(fake)) for each in targets if each is not provider]
    for each, other in stand_ins:
        each.override(other)

    def take_back() -> None:
        for each, other in stand_ins:
            end_override(each, other)

    return take_back


def _targets(graph: BeanGraph, key: int, provider: Any) -> tuple[Any, ...]:
    source = graph.definitions[key].source
    return (provider, source) if isinstance(source, providers.Provider) else (provider,)


def _holds(provider: Any, targets: tuple[Any, ...]) -> bool:
    behind = {id(each) for each in providers.traverse(provider)} - {id(provider)}
    return any(id(target) in behind for target in targets)


# --- undefined dependencies


def undefined_in(provider: Any) -> Iterator[Any]:
    """Yield the undefined `Dependency` providers that the provider uses, including itself."""
    for each in providers.traverse(provider):
        if _is_undefined(each) and each.instance_of is not object:
            yield each


def _is_undefined(provider: Any) -> TypeGuard[Any]:
    # Dependencies that our started container fills also count as undefined.
    return isinstance(provider, providers.Dependency) and (
        not provider.is_defined or isinstance(provider.last_overriding, BeanProvider)
    )


def undefined_dependencies(container: Any) -> dict[Any, InjectionPoint]:
    """Return all undefined `Dependency` providers of a container with their injection points."""
    where = _name_of(container)
    return {
        dependency: point_of(dependency.instance_of, f"{where}.{name}")
        for name, provider in _named_providers(container, "")
        for dependency in undefined_in(provider)
    }
