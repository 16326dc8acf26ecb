"""Providers of other `dependency_injector` containers as beans of ours, and our beans for what those leave undefined.

These providers keep control of the lifetime of their instances and are called each time, so their overrides and resets
apply. Our container opens each of them once, and closes the resources.
Not here: our own providers (`providers`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NewType, TypeGuard, cast, get_origin

from dependency_injector import providers, resources

from ..errors import Problem
from ..execution.threads import running_loop
from ..introspection import class_of, is_class, parameters_of, plain, read_signature, type_name, unwrapped, with_self
from .beans import BeanDefinition, FactoryKind, yielded
from .closing import Closer
from .decorators import Scope
from .graph import BeanGraph, Registration
from .injection_points import MISSING, InjectionPoint, point_of
from .providers import BeanProvider, ValueProvider, end_override
from .scopes import Home, MustAwait

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
_KEEPING: tuple[type[Any], ...] = (providers.BaseSingleton, providers.Resource)
_LEFT_OUT: tuple[type[Any], ...] = (providers.Self, providers.DependenciesContainer, BeanProvider)
_CALLING_NOTHING: tuple[type[Any], ...] = (
    *(BeanProvider, ValueProvider, providers.Delegate, providers.Aggregate, providers.Container, providers.Self),
    *(providers.Configuration, providers.ConfigurationOption, providers.Object),
)


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
    needs = tuple(
        point_of(dependency.instance_of, f"{where}.{name}", parameter=type_name(dependency.instance_of))
        for dependency in undefined_in(provider)
    )
    is_awaited, lasts = _is_async(provider), _lasts(provider)
    call = ProviderCall(provider)
    produced = unwrapped(_type_of(provider))
    return BeanDefinition(
        provides=produced.type,
        optional=produced.optional,
        factory=call if not is_awaited else call.present if lasts else call.new,
        make_ready=call.make_ready if is_awaited and lasts else None,
        scope=Scope.APPLICATION if lasts else Scope.DEPENDENT,
        name=name,
        behind=needs,
        factory_kind=FactoryKind.COROUTINE if is_awaited and not lasts else FactoryKind.CALL,
        caches=False,
        source=provider,
        included=call,
    )


# --- calling providers


class ProviderCall:
    """Gets the bean of one provider, each time from the provider, so that its overrides and resets apply."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._opened: Opened | None = None
        self._key = -1

    def belong_to(self, opened: Opened, key: int) -> None:
        """Set what the started container has opened, and the key of the bean."""
        self._opened, self._key = opened, key

    def _of_container(self) -> Opened:
        assert self._opened is not None
        return self._opened

    def __call__(self) -> Any:
        """Return the bean of a provider that needs no await. Raises `MustAwait` if an override needs it."""
        behind = self.behind
        if self.turned_async:
            kept = self._of_container().present(behind) if _lasts(self._provider) else MISSING
            if kept is MISSING:
                raise MustAwait(self._key, behind)
            return kept
        made = self._of_container().call(self._provider)
        if inspect.isawaitable(made):
            if inspect.iscoroutine(made):
                made.close()
            raise MustAwait(self._key, behind)
        return made

    @property
    def behind(self) -> Any:
        """Return the provider that answers now: an overriding one, or this one."""
        return _effective(self._provider)

    @property
    def turned_async(self) -> bool:
        """Return True if an async provider overrides it."""
        behind = self.behind
        return behind is not self._provider and _is_async(behind)

    async def new(self) -> Any:
        """Return the bean of an async provider."""
        return await self._of_container().call_awaiting(self.behind)

    async def make_ready(self) -> None:
        """Open an async provider that keeps its instance; `present` returns it."""
        behind = self.behind
        if behind is self._provider or _is_async(behind):
            await self._of_container().call_awaiting(behind)

    def present(self) -> Any:
        """Return the instance of an async provider that is open. Raises `MustAwait`."""
        behind = self.behind
        if behind is not self._provider and not _is_async(behind):
            return self._of_container().call(behind)
        value = self._of_container().present(behind)
        if value is MISSING:
            raise MustAwait(self._key)
        return value


class Opened:
    """The included providers that are open while our container runs, and what closes the resources among them.

    Providers that keep their instance are opened one by one, in order of need, each under a lock: by themselves,
    `Singleton` and `Resource` create one instance per concurrent thread. Our application scope closes the resources,
    newest first, so each one ends after everything that needs it. This includes our beans.
    """

    def __init__(self, graph: BeanGraph, home: Home) -> None:
        self._home = home
        self._locks: dict[Any, threading.RLock] = {}
        self._made: set[Any] = set()
        self._awaited: dict[Any, Any] = {}
        self._adopted: set[Any] = set()
        self._sources: list[Any] = []
        for key, definition in enumerate(graph.definitions):
            if definition.included is not None:
                definition.included.belong_to(self, key)
                self._sources.append(definition.source)
        # The program that opened these closes them.
        self._earlier = {each for each in self._resources() if each.initialized}

    # --- opening

    def call(self, provider: Any) -> Any:
        """Return what the provider returns; first open what it needs."""
        made = None
        for each in self._to_open(provider):
            made = self._open(each)
            if each is provider:
                return made
        return provider()

    async def call_awaiting(self, provider: Any) -> Any:
        """Do the same as `call` for an async provider; await its result."""
        for each in self._to_open(provider):
            made = self._open(each)
            if inspect.isawaitable(made):
                made = self._awaited[each] = await _result_of(made)
                self._adopt(each)
            if each is provider:
                return made
        made = provider()
        made = self._awaited[provider] = await _result_of(made) if inspect.isawaitable(made) else made
        return made

    def present(self, provider: Any) -> Any:
        """Return the instance of an open async provider, or `MISSING`."""
        if provider not in self._awaited or (isinstance(provider, providers.Resource) and not provider.initialized):
            return MISSING
        if isinstance(provider, _KEEPING) and running_loop() is not None:
            # Only an answer of the provider itself shows that it was reset; it needs an event loop to give one.
            made = self._open(provider)
            if not inspect.isawaitable(made):
                self._awaited[provider] = made
            elif isinstance(made, asyncio.Future) and made.done():
                self._awaited[provider] = made.result()
            else:
                return MISSING
        return self._awaited[provider]

    def _to_open(self, provider: Any) -> Iterator[Any]:
        """Yield the providers that a call of `provider` opens or asks, each after those that it needs."""

        def needed(each: Any) -> Iterator[Any]:
            is_open = each.initialized if isinstance(each, providers.Resource) else each in self._made
            return iter(()) if is_open and each.last_overriding is None else _called_by(each)

        for each in _in_order_of_need((provider,), needed):
            if isinstance(each, _KEEPING) and each.last_overriding is None:
                yield each

    def _open(self, provider: Any) -> Any:
        lock = self._locks.get(provider) or self._locks.setdefault(provider, threading.RLock())
        with lock:
            if isinstance(provider, providers.Resource) and not provider.initialized:
                self._earlier.discard(provider)
            made = provider()
            self._made.add(provider)
            if not inspect.isawaitable(made):
                self._adopt(provider)
        return made

    # --- closing

    def _adopt(self, provider: Any) -> None:
        """Shut a resource down when our container stops, unless the program opened it before the start."""
        if not isinstance(provider, providers.Resource) or provider in self._adopted or provider in self._earlier:
            return
        self._adopted.add(provider)
        home = self._home
        store = home.application.store
        if provider.is_async_mode_enabled():
            loop = running_loop() or home.loop
            home.application.keep(None, Closer(_shut_down_awaiting, provider, store, loop=loop))
        else:
            home.application.keep(None, Closer(_shut_down, provider, store))

    def adopt_all(self) -> None:
        """Adopt the resources that other code has opened since the start, for example the program's own wiring."""
        for each in self._resources():
            if each.initialized:
                self._adopt(each)

    def reset_holders(self, dependencies: tuple[Any, ...]) -> None:
        """Reset the singletons that hold our beans, which are closed now, through these `Dependency` providers."""
        for each in _in_order_of_need(self._sources, lambda each: iter(each.related)):
            if isinstance(each, providers.BaseSingleton) and _holds(each, dependencies):
                each.reset()

    def _resources(self) -> Iterator[Any]:
        for each in _in_order_of_need(self._sources, lambda each: iter(each.related)):
            if isinstance(each, providers.Resource):
                yield each


def _shut_down(resource: Any, error: BaseException | None) -> None:
    resource.shutdown()


async def _shut_down_awaiting(resource: Any, error: BaseException | None) -> None:
    made = resource.shutdown()
    if inspect.isawaitable(made):
        await made


async def _result_of(made: Awaitable[Any]) -> Any:
    """Return the result of an awaitable; the end of this task does not cancel a future, which others may await."""
    if not isinstance(made, asyncio.Future):
        return await made
    if not made.done():
        if (loop := made.get_loop()) is not asyncio.get_running_loop():
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_result_of(made), loop))
        await asyncio.wait((made,))
    return made.result()


def _in_order_of_need(roots: Iterable[Any], needed: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yield providers, each after those that `needed` gives for it, and once."""
    seen: set[Any] = set()
    for root in roots:
        path: list[tuple[Any, Iterator[Any]]] = []
        following = root
        while following is not None or path:
            if following is not None and following not in seen:
                seen.add(following)
                path.append((following, needed(following)))
            following = next(path[-1][1], None) if path else None
            if following is None and path:
                yield path.pop()[0]


def _called_by(provider: Any) -> Iterator[Any]:
    """Yield the providers that a call of the provider calls."""
    if provider.last_overriding is not None:
        yield provider.last_overriding
    elif isinstance(provider, providers.Selector):
        # It calls one of its providers only.
        chosen = provider.providers.get(provider.selector()) if provider.selector is not None else None
        if chosen is not None:
            yield chosen
    elif not isinstance(provider, _CALLING_NOTHING):
        yield from (each for each in provider.related if not providers.is_delegated(each))


def _effective(provider: Any) -> Any:
    """Return the provider that answers for an overridden one, or for a `Dependency`."""
    while True:
        behind = provider.last_overriding
        if behind is None and isinstance(provider, providers.Dependency):
            behind = provider.default
        if behind is None:
            return provider
        provider = behind


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
    if isinstance(provider, providers.Resource) and _is_entered_awaiting(provides):
        return True
    return any(_is_async(each, seen | {id(provider)}) for each in provider.related)


def _is_entered_awaiting(provides: Any) -> bool:
    """Return True if a resource of this class or function is an async context manager, which is entered."""
    if inspect.isgeneratorfunction(provides) or (
        isinstance(provides, type) and issubclass(provides, resources.Resource)
    ):
        return False
    made = class_of(provides if isinstance(provides, type) else _returned(provides) if callable(provides) else None)
    return hasattr(made, "__aenter__") and not hasattr(made, "__enter__")


def _provides(provider: Any) -> Any:
    """Return the class or function of a provider; for a context manager, the generator function."""
    provides = provider.provides if isinstance(provider, _CALLING) else None
    return inspect.unwrap(provides) if callable(provides) and not isinstance(provides, type) else provides


def _type_of(provider: Any) -> Any:
    """Return the declared type of the provider's result, which can be a union with None, or `Any`."""
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
    return _returned(provides) if inspect.isroutine(provides) else Any


def _returned(function: Callable[..., Any]) -> Any:
    """Return the annotated type that a function returns or yields, or `Any`."""
    with suppress(ValueError, TypeError):  # C code without a signature
        returns = read_signature(function).returns
        owner = getattr(function, "__self__", None)
        returns = with_self(returns, owner) if isinstance(owner, type) else returns
        yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        form = yielded(plain(returns)) if yields else returns
        inner = unwrapped(form).type
        if is_class(inner) or isinstance(inner, NewType) or (get_origin(inner) and not parameters_of(inner)):
            return form
    return Any


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


def fill(dependency: Any, provider: Any) -> Callable[[], None]:
    """Define an undefined `Dependency` with our provider. Return a function that makes it undefined again."""
    had_no_mode = dependency.is_async_mode_undefined()
    dependency.override(provider)

    def empty() -> None:
        end_override(dependency, provider)
        if had_no_mode:  # its first call has set it, and it depends on our bean
            dependency.reset_async_mode()

    return empty


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
