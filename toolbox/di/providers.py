"""Beans as `dependency_injector` providers: the definition layer, overriding, and the slow path over the graph.

Each bean is a Factory whose arguments are the providers of its dependencies. Our scopes store the instances.
Not here: providers of other containers as beans (`foreign`), the fast path (`resolvers`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from dependency_injector import containers, providers

from .beans import MISSING, BeanDefinition, FactoryKind, InjectionPoint, Stop
from .graph import (
    DEFAULT,
    BeanDict,
    BeanGraph,
    BeanList,
    Constant,
    LazyBean,
    NotFound,
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
