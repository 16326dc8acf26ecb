"""Beans as `dependency_injector` providers, and providers of other containers of that library as beans.

Ours are the definition layer, overriding, and the slow path over the graph: each bean is a Factory whose arguments are
the providers of its dependencies, and our scopes store the instances. The others keep control of the lifetime of their
instances and are called each time, so their overrides apply; what they leave undefined becomes a bean of ours.
Not here: the fast path (`resolvers`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeGuard, cast

from dependency_injector import containers, providers, resources

from ..errors import AsyncBeanError, Problem
from ..introspection import plain, read_signature, type_name
from .beans import MISSING, BeanDefinition, FactoryKind, InjectionPoint, Stop, point_of, yielded
from .decorators import Scope
from .graph import (
    DEFAULT,
    BeanDict,
    BeanGraph,
    BeanList,
    Constant,
    LazyBean,
    NotFound,
    Registration,
    SingleBean,
    Value,
    provider_names,
)
from .scopes import MustAwait, OpenScope


class Started(Protocol):
    """The started container that the providers belong to."""

    @property
    def awaited(self) -> frozenset[int]:
        """Return the beans that async code creates."""
        ...

    @property
    def deep(self) -> frozenset[int]:
        """Return the beans at the end of a long chain."""
        ...

    def make_deep(self, key: int, scope: OpenScope) -> Any:
        """Create a bean at the end of a long chain for `scope`, without await."""
        ...

    def place_of(self, key: int, owner: OpenScope) -> OpenScope:
        """Return the scope that stores a bean requested inside `owner`. Raises `ScopeNotActiveError`."""
        ...

    def get_from_provider_call(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the bean, or an awaitable of it, to code that calls its provider."""
        ...

    def no_seed(self, key: int, absent: Any = MISSING) -> Any:
        """Return the replacement for a seed that the request scope does not have. Raises `MissingBeanError`."""
        ...

    def outside(self, key: int) -> Any:
        """Return the value of a bean outside of request scopes, or `MISSING`."""
        ...

    def overriding_changed(self, key: int, began: bool) -> None:
        """Handle the start or end of an override of the provider."""
        ...


class _CurrentOwner(threading.local):
    owner: OpenScope | None = None


_current = _CurrentOwner()


@contextmanager
def owned_by(scope: OpenScope) -> Iterator[None]:
    """Set the scope for which providers on this thread create beans; it closes dependent beans."""
    outer, _current.owner = _current.owner, scope
    try:
        yield
    finally:
        _current.owner = outer


class BeanProvider(providers.Factory):  # type: ignore[type-arg]  # generic in its stubs only
    """The provider of one bean. Called from outside, it looks the bean up in the active scope."""

    def __init__(self, provides: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(provides, *args, **kwargs)
        self.disable_async_mode()
        self._key = -1
        self._started: Started | None = None
        self._definition: BeanDefinition | None = None

    def belong_to(self, started: Started, key: int, definition: BeanDefinition) -> BeanProvider:
        """Set the container and bean of this provider, and return it."""
        self._started, self._key, self._definition = started, key, definition
        return self

    def __deepcopy__(self, memo: dict[Any, Any] | None) -> BeanProvider:
        # Copies of a container share the bean.
        return self

    def _provide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, key, started = _current.owner, self._key, self.started
        if owner is None:
            return started.get_from_provider_call(key, args, kwargs)
        seeds = (owner.request or owner).seeds
        if seeds is not None and key in seeds:
            return seeds[key]
        if owner.request is None and (nobody := started.outside(key)) is not MISSING:
            return nobody
        if not self.definition.is_stored:
            if key in started.awaited:
                raise MustAwait(key)
            return self.make(owner, args, kwargs)
        place = started.place_of(key, owner)
        value = place.store.get(key, MISSING)
        if value is not MISSING:
            return value
        if self.definition.factory_kind is FactoryKind.SEED:
            return started.no_seed(key)
        if key in started.awaited:
            raise MustAwait(key)
        return place.create(key, self.make)

    @property
    def started(self) -> Started:
        """Return the started container of this provider."""
        assert self._started is not None
        return self._started

    @property
    def definition(self) -> BeanDefinition:
        """Return the definition of the bean."""
        assert self._definition is not None
        return self._definition

    def begin(self, scope: OpenScope, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Return the factory's result for `scope`: the bean, a generator to enter or an awaitable."""
        with owned_by(scope):
            return super()._provide(args, kwargs or {})  # type: ignore[misc]  # missing in its stubs

    def make(self, scope: OpenScope, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Return a new bean, created without await; `scope` closes it."""
        if self._key in self.started.deep and not args and not kwargs:
            return self.started.make_deep(self._key, scope)
        made = self.begin(scope, args, kwargs)
        definition = self.definition
        key = self._key if definition.is_stored else None
        if definition.factory_kind is FactoryKind.GENERATOR:
            return scope.enter(made, key)
        return kept(made, definition, key, scope)

    # --- overriding

    def override(self, provider: Any) -> Any:
        """Override the bean in the whole container."""
        context: Any = super().override(provider)
        self._notify(True)
        return context

    def reset_last_overriding(self) -> None:
        """End the last override."""
        super().reset_last_overriding()
        self._notify(False)

    def reset_override(self) -> None:
        """End all overrides."""
        count = len(self.overridden)
        super().reset_override()
        for _ in range(count):
            self._notify(False)

    def _notify(self, began: bool) -> None:
        if self._started is not None:
            self._started.overriding_changed(self._key, began)


class SeedOr(providers.Provider):  # type: ignore[type-arg]  # generic in its stubs only
    """Provides a seed, or its replacement if the request scope does not have one."""

    def __init__(self, key: int = -1, absent: Any = None, seed: Any = None) -> None:
        super().__init__()
        self._facts = key, absent, seed

    def __deepcopy__(self, memo: dict[Any, Any] | None) -> SeedOr:
        return self

    @property
    def related(self) -> Iterator[Any]:
        """Yield the provider of the seed."""
        yield self._facts[2]
        yield from super().related

    def _provide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, absent, seed = self._facts
        if seed.last_overriding is not None:
            return seed()
        request = _current.owner.request if _current.owner is not None else None
        if request is None:
            nobody = seed.started.outside(key)
            return absent if nobody is MISSING else nobody
        value = request.store.get(key, MISSING)
        return value if value is not MISSING else seed.started.no_seed(key, absent)


def kept(made: Any, definition: BeanDefinition, key: int | None, scope: OpenScope) -> Any:
    """Return the object; register its `stop()` with the scope."""
    if definition.stop is Stop.SYNC:
        return scope.keep_stopping(made, key)
    if definition.stop is Stop.ASYNC:
        return scope.keep_stopping_async(made, key)
    return made


def end_override(provider: Any, fake: Any) -> None:
    """End an override of a provider, not necessarily its last one."""
    others = list(provider.overridden)
    later: list[Any] = []
    while others and others[-1] is not fake:
        later.append(others.pop())
        provider.reset_last_overriding()
    if others:
        provider.reset_last_overriding()
    for each in reversed(later):
        provider.override(each)


# --- wiring


class Providers:
    """The providers of one started container, by key and by name."""

    def __init__(self, graph: BeanGraph, started: Started, later: Callable[[LazyBean], Any]) -> None:
        self._graph, self._started, self._later = graph, started, later
        self.container = containers.DynamicContainer()
        self._reserved = frozenset(dir(self.container))
        self._of_bean: list[BeanProvider] = []
        self.grow()

    def __getitem__(self, key: int) -> BeanProvider:
        return self._of_bean[key]

    def override(self, key: int, fake: Any) -> Any:
        """Replace a bean by `fake`; return the provider to pass to `take_back`."""
        provider = providers.Object(fake)
        self._of_bean[key].override(provider)
        return provider

    def take_back(self, key: int, fake: Any) -> None:
        """End an override of a bean, not necessarily its last one."""
        end_override(self._of_bean[key], fake)

    def fill(self, undefined: Mapping[Any, InjectionPoint]) -> list[tuple[Any, Any]]:
        """Define undefined `Dependency` providers with our beans; return the pairs to pass to `empty`."""
        filled = []
        for dependency, point in undefined.items():
            provider = self.of_value(self._graph.value_of(point))
            dependency.override(provider)
            filled.append((dependency, provider))
        return filled

    def empty(self, dependency: Any, provider: Any) -> None:
        """Make a `Dependency` undefined again."""
        if dependency.last_overriding is provider:
            dependency.reset_last_overriding()

    @property
    def overridden(self) -> frozenset[int]:
        """Return the overridden beans."""
        return frozenset(key for key, each in enumerate(self._of_bean) if each.last_overriding is not None)

    @property
    def has_all(self) -> bool:
        """Return True if each bean has a provider."""
        return len(self._of_bean) == len(self._graph.beans)

    def grow(self) -> None:
        """Create providers for beans that were added to the graph."""
        first = len(self._of_bean)
        for bean in self._graph.beans[first:]:
            provider = BeanProvider(bean.definition.factory).belong_to(self._started, bean.key, bean.definition)
            self._of_bean.append(provider)
        names = provider_names(self._graph, first, self.container.providers)
        named = zip(names, self._graph.beans[first:], strict=True)
        for name, bean in sorted(named, key=lambda each: each[1].definition.implicit):
            self._put(name, bean.key)
        for bean in self._graph.beans[first:]:
            self._inject(self._of_bean[bean.key], bean.needs)

    def _put(self, name: str, key: int) -> None:
        if key in self._graph.templates or name in self.container.providers:
            return
        if name in self._reserved:  # a bean must not hide a method of the container
            self.container.providers[name] = self._of_bean[key]
        else:
            self.container.set_provider(name, self._of_bean[key])

    def _inject(self, provider: BeanProvider, needs: Any) -> None:
        args, kwargs = [], {}
        for point, value in needs:
            if value == DEFAULT and not point.positional:
                continue
            of_value = self.of_value(Constant(point.default) if value == DEFAULT else value)
            if point.positional:
                args.append(of_value)
            else:
                kwargs[point.parameter] = of_value
        provider.set_args(*args)
        provider.set_kwargs(**kwargs)

    def of_value(self, value: Value) -> Any:
        """Return the provider of a value."""
        match value:
            case SingleBean(key, absent):
                return self._of_bean[key] if absent is MISSING else SeedOr(key, absent, self._of_bean[key])
            case BeanList(()):
                return providers.Factory(list)  # a List of nothing gives a tuple
            case BeanList(keys):
                return providers.List(*(self._of_bean[key] for key in keys))
            case BeanDict(named):
                return providers.Dict({name: self._of_bean[key] for name, key in named})
            case Constant(fixed):
                return providers.Object(fixed)
            case LazyBean():
                return providers.Object(self._later(value))
            case NotFound():
                raise AssertionError("a graph with a missing bean is refused before")


# --- containers of dependency_injector


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
