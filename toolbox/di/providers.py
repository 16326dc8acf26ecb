"""Shows the beans of a started container as providers of `dependency_injector`: by name, to call and to override.

Each bean has one provider, whose arguments are the providers of its dependencies. A call looks the bean up in the
active scope. While a provider is overridden, the generated functions ask it for the bean. Not here: how a bean is
created (`resolvers`), providers of other containers as beans (`foreign`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dependency_injector import providers

from .descriptions import provider_names
from .graph import Bean, BeanGraph
from .scopes import OpenScope
from .values import DEFAULT, Constant, SingleBean, Value, beans_in

if TYPE_CHECKING:
    from dependency_injector.containers import DynamicContainer


class Started(Protocol):
    """The `Wiring` that the providers belong to. A Protocol, because the wiring imports this module."""

    def provide(
        self, value: Value, owner: OpenScope | None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return a value, or an awaitable of it, to code that calls its provider, for `owner` or the active scope."""
        ...

    def overriding_changed(self, key: int, began: bool) -> None:
        """Handle the start or end of an override of the provider."""
        ...


class _CurrentOwner(threading.local):
    owner: OpenScope | None = None


_current = _CurrentOwner()


@contextmanager
def owned_by(scope: OpenScope) -> Iterator[None]:
    """Set the scope for which providers on this thread create beans; it closes dependent beans.

    An overriding provider can have providers of beans as arguments. They belong to the holder of what it returns.
    """
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
        self._started: Started | None = None
        self._value = SingleBean(-1)

    def belong_to(self, started: Started, value: SingleBean) -> BeanProvider:
        """Set the container and bean of this provider, and return it."""
        self._started, self._value = started, value
        return self

    def __deepcopy__(self, memo: dict[Any, Any] | None) -> BeanProvider:
        # Copies of a container share the bean.
        return self

    def _provide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._started is not None
        return self._started.provide(self._value, _current.owner, args, kwargs)

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
            self._started.overriding_changed(self._value.bean, began)


class ValueProvider(providers.Provider):  # type: ignore[type-arg]  # generic in its stubs only
    """Provides the value of an injection point that is not simply a bean, such as a list of beans."""

    def __init__(self, started: Started | None = None, value: Value = DEFAULT, beans: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.disable_async_mode()
        self._started, self._value, self._beans = started, value, beans

    def __deepcopy__(self, memo: dict[Any, Any] | None) -> ValueProvider:
        return self

    @property
    def related(self) -> Iterator[Any]:
        """Yield the providers of the beans in the value."""
        yield from self._beans
        yield from super().related

    def _provide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._started is not None
        return self._started.provide(self._value, _current.owner)


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


def _show(container: DynamicContainer, name: str, provider: BeanProvider) -> None:
    """Add a provider to a container. A bean must not hide a member of the container."""
    if hasattr(container, name):
        container.providers[name] = provider
    else:
        container.set_provider(name, provider)


class Providers:
    """The providers of one started container, by key and by name."""

    def __init__(self, graph: BeanGraph, started: Started) -> None:
        self._graph, self._started = graph, started
        self._of_bean: list[BeanProvider] = []
        self._named: dict[str, BeanProvider] = {}
        self._container: DynamicContainer | None = None
        self._lock = threading.Lock()  # several threads may ask for the container while beans are added

    def __getitem__(self, key: int) -> BeanProvider:
        return self._of_bean[key]

    @property
    def container(self) -> DynamicContainer:
        """Return the container of the named providers, which is created on first use."""
        with self._lock:
            if self._container is None:
                # Imported late: it imports the web frameworks that are installed.
                from dependency_injector.containers import DynamicContainer

                self._container = DynamicContainer()
                for name, provider in self._named.items():
                    _show(self._container, name, provider)
            return self._container

    def override(self, key: int, fake: Any) -> Any:
        """Replace a bean by `fake`; return the provider to pass to `take_back`."""
        provider = providers.Object(fake)
        self._of_bean[key].override(provider)
        return provider

    def take_back(self, key: int, fake: Any) -> None:
        """End an override of a bean, not necessarily its last one."""
        end_override(self._of_bean[key], fake)

    @property
    def overridden(self) -> frozenset[int]:
        """Return the overridden beans."""
        return frozenset(key for key, each in enumerate(self._of_bean) if each.last_overriding is not None)

    def grow(self, beans: Sequence[Bean]) -> None:
        """Create providers for those of the beans that have none. `beans` are all beans of the graph at one time."""
        new = beans[len(self._of_bean) :]
        with self._lock:
            # Names that a program has put into the container count too.
            taken = {*self._named, *(() if self._container is None else self._container.providers)}
            names = provider_names(self._graph, new, taken)
            self._of_bean += [
                BeanProvider(each.definition.factory).belong_to(self._started, self._graph.single(each.key))
                for each in new
            ]
            for name, bean in sorted(zip(names, new, strict=True), key=lambda each: each[1].definition.implicit):
                if name not in taken and bean.key not in self._graph.templates:
                    taken.add(name)
                    self._put(name, self._of_bean[bean.key])
        for bean in new:
            self._inject(self._of_bean[bean.key], bean.needs)

    def _put(self, name: str, provider: BeanProvider) -> None:
        self._named[name] = provider
        if self._container is not None:
            _show(self._container, name, provider)

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
        if args:
            provider.set_args(*args)
        if kwargs:
            provider.set_kwargs(**kwargs)

    def of_value(self, value: Value) -> Any:
        """Return the provider of a value."""
        if isinstance(value, Constant):
            return providers.Object(value.value)
        if isinstance(value, SingleBean) and value == self._graph.single(value.bean):
            return self._of_bean[value.bean]
        return ValueProvider(self._started, value, tuple(self._of_bean[key] for key in beans_in(value)))
