"""Beans of a started container: lookup by type and name, creation in scopes, seeds, and `container.override(…)`.

Not here: reading registered objects (`registry`), start and stop (`container`), putting a replaced bean into the
providers (`creation`, `foreign`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..context import ActiveScope
from ..errors import (
    AmbiguousBeanError,
    AsyncBeanError,
    FrameworkError,
    IllegalConfigurationError,
    MissingBeanError,
    Problem,
    ScopeNotActiveError,
)
from ..introspection import forms_of, is_hashable, plain, type_name
from .beans import MISSING, InjectionPoint, seed_of
from .creation import Plan, Planner, Providers, Resolver, Resolvers, Stepwise, deep_beans, owned_by, run_awaiting
from .decorators import Instance, Scope
from .foreign import Opened, fill, holders_in, override_outside
from .graph import BeanGraph, BeanList, Constant, LazyBean, SingleBean, Value, chain_text, web_request_fix
from .registry import problems_in
from .scopes import ApplicationScope, CallScope, Home, MustAwait, OpenScope, RequestScope, active

GENERATE = True
"""True: use generated functions where nothing is overridden. False: use only the providers."""


class _Builders(dict[int, Callable[[OpenScope], Awaitable[Any]]]):
    """Maps each bean to the async function that creates it."""

    def __init__(self, build: Callable[[int, OpenScope], Awaitable[Any]]) -> None:
        self._build = build

    def __missing__(self, key: int) -> Callable[[OpenScope], Awaitable[Any]]:
        self[key] = builder = partial(self._build, key)
        return builder


class Wiring(Home):
    """Beans of one container between a start and the next stop."""

    def __init__(self, graph: BeanGraph, lookup: ActiveScope, loop: asyncio.AbstractEventLoop | None) -> None:
        self.graph, self.loop = graph, loop
        self.lookup = lookup
        self.application = ApplicationScope(self)
        self._layers = OverrideLayers(graph, self)
        self.providers = Providers(graph, self, self._instance)
        self._resolvers = Resolvers(graph, self, self._instance)
        self._unnamed: dict[Any, Resolver] = {}
        self._plain: dict[Any, Resolver] = {}
        self._stored: dict[Any, int] = {}
        self._builders = _Builders(self._build)
        self._growing = threading.Lock()
        self._found: dict[tuple[Any, str | None], Value] = {}
        self._by_value: dict[Value, Resolver] = {}
        self._seeding = Seeding(graph)
        self._outside: list[Callable[[], None]] = []
        self._opened = Opened(graph, self)
        self._filled: tuple[Any, ...] = ()
        self._recipes: dict[Any, tuple[Plan, Resolver]] = {}
        self._stepwise = Stepwise(graph, self.providers, self._now, self.place_of)
        self._find_deep()
        self._find_awaited()

    def _instance(self, later: LazyBean) -> Instance[Any]:
        return Instance(self.lookup, later.wanted, later.name)

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        return self.graph.definitions[key].label

    # --- scopes

    def no_seed(self, key: int, absent: Any = MISSING) -> Any:
        """Return the replacement for a seed that the request scope does not have: from its `find()`, else `absent`."""
        value = self.graph.definitions[key].factory()
        if value is not MISSING:
            return value
        if absent is not MISSING:
            return absent
        fix = web_request_fix(self.graph.definitions[key].provides)
        raise MissingBeanError(f"{self.label(key)}: this request scope has no such seed", fix=fix)

    def required(self, key: int, made: Any, absent: Any) -> Any:
        """Return what a producer that can return None has made, else `absent`. Raises `MissingBeanError`."""
        if made is not None or absent is not MISSING:
            return made if made is not None else absent
        fix = f"take `{type_name(self.graph.definitions[key].provides)} | None`"
        raise MissingBeanError(f"{self.label(key)}: its producer returned None", fix=fix)

    def scope(self) -> OpenScope:
        """Return the active scope of this container, or its application scope."""
        scope = active.get()
        while scope is not None and scope.home is not self:
            scope = scope.outer
        return self.application if scope is None else scope

    def open_request(self, seeds: Mapping[Any, Any]) -> RequestScope:
        """Return a new request scope in which `seeds` replace the beans of their types."""
        scope = RequestScope(self)
        if seeds:
            self._seeding.give(scope, seeds)
        return scope

    def open_call_scope(self) -> CallScope:
        """Return a new call scope inside the active scope. It is the active scope until `leave` is called."""
        outer = active.get()
        if outer is None:
            own: OpenScope = self.application
        else:
            own = outer if outer.home is self else self.scope()
        return CallScope(self, outer, own.request, own.direct)

    def place_of(self, key: int, owner: OpenScope) -> OpenScope:
        """Return the scope that stores a bean requested inside `owner`."""
        scope = self.graph.definitions[key].scope
        if scope is Scope.APPLICATION:
            return self._layers.place_of(key) if self._layers else self.application
        if scope is Scope.REQUEST:
            return owner.request if owner.request is not None else self.refuse(key, owner)
        return owner if not isinstance(owner, ApplicationScope) else self.refuse(key, owner)

    # --- looking up

    def value_of(self, wanted: Any, name: str | None) -> Value:
        """Return the graph's value for a lookup. Raises `MissingBeanError` or `AmbiguousBeanError`."""
        if not is_hashable(wanted):
            return self.graph.find(wanted, name)
        value = self._found.get((wanted, name))
        if value is None:
            value = self._found[wanted, name] = self.graph.find(wanted, name)
            self.follow_graph()
        return value

    def follow_graph(self) -> None:
        """Add providers for beans that the graph gained: settings and generic classes that were requested first."""
        if self.providers.has_all:
            return
        with self._growing:
            if self.providers.has_all:
                return
            if problems := list(problems_in(self.graph)):
                raise IllegalConfigurationError(problems)
            self.providers.grow()
            self._find_deep()
            self._find_awaited()

    def get(self, wanted: Any, name: str | None = None) -> Any:
        """Return the bean; create it without await."""
        scope = active.get() or self.application
        if name is None and scope.direct is self:
            try:
                resolver = self._unnamed.get(wanted)
            except TypeError:  # the metadata of an Annotated cannot be hashed
                resolver = None
            if resolver is not None:
                try:
                    return resolver(scope)
                except MustAwait as error:
                    return self._prepared(self.value_of(wanted, None), scope, error)
        scope = self.scope()
        try:
            value = self.value_of(wanted, name)
        except MissingBeanError:
            return seed_without_bean(scope, wanted)
        if name is None and is_hashable(wanted):
            self._remember(wanted, value)
        return self.get_value(value, scope)

    def _remember(self, wanted: Any, value: Value) -> None:
        """Store the function for the next `get`, and for `aget` if it never has to await."""
        resolver = self._resolver(value)
        if self._planner.plan(value).is_plain:
            self._plain[wanted] = resolver
            if isinstance(value, SingleBean) and not self._layers:
                definition = self.graph.definitions[value.bean]
                if definition.scope is Scope.APPLICATION and definition.is_stored:
                    self._stored[wanted] = value.bean
        self._unnamed[wanted] = resolver

    def get_value(self, value: Value, scope: OpenScope) -> Any:
        """Return a value without await; use an object from `prepare` first."""
        try:
            return self._now(value, scope)
        except MustAwait as error:
            return self._prepared(value, scope, error)

    def _prepared(self, value: Value, scope: OpenScope, error: MustAwait) -> Any:
        """Return the object that `prepare` created for a value. Raises `AsyncBeanError` if there is none."""
        prepared = scope.prepared.get(error.key) if scope.prepared is not None else None
        if prepared and isinstance(value, SingleBean) and value.bean == error.key:
            made = prepared.pop()
            return self.required(error.key, made, value.absent) if self.graph.definitions[error.key].optional else made
        raise self._must_await(value, error) from None

    def _must_await(self, value: Value, error: MustAwait) -> AsyncBeanError:
        """Return the error for a lookup without await, with the path to the async producer."""
        path = [self.label(key) for key in self._planner.path(value, error.key)]
        return AsyncBeanError(path[0], chain_text(path))

    def _now(self, value: Value, owner: OpenScope) -> Any:
        """Return a value for `owner` without await. Raises `MustAwait`."""
        if isinstance(value, Constant):
            return value.value
        if owner.direct is self:
            return self._resolver(value)(owner)
        return self._by_providers(value, owner)

    def _resolver(self, value: Value) -> Resolver:
        """Return a function that returns this value for a scope."""
        try:
            resolver = self._by_value.get(value)
            if resolver is None:
                resolver = self._by_value[value] = self._new_resolver(value)
        except TypeError:  # a default that cannot be hashed
            return self._new_resolver(value)
        return resolver

    def _new_resolver(self, value: Value) -> Resolver:
        if GENERATE and not self._layers:
            return self._resolvers.resolver(value)
        return partial(self._by_providers, value)

    def _by_providers(self, value: Value, owner: OpenScope) -> Any:
        with owned_by(owner):
            made = self.providers.of_value(value)()
        if (
            isinstance(value, SingleBean)
            and self.providers[value.bean].last_overriding is not None
            and inspect.isawaitable(made)
        ):
            raise MustAwait(value.bean)
        return made

    def existing(self, wanted: Any) -> Any:
        """See `ActiveScope.existing`."""
        scope = active.get()
        if scope is not None and scope.direct is not self:
            return None
        try:
            key = self._stored.get(wanted)
        except TypeError:  # as in `get`
            return None
        return None if key is None else self.application.store.get(key)

    # --- looking up, with awaiting

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        """Return the bean; await async producers."""
        scope = active.get() or self.application
        # Await beans that other threads are creating instead of blocking the loop.
        is_busy = scope.making or (scope.request or scope).making or self.application.making
        if name is None and scope.direct is self and not is_busy:
            try:
                resolver = self._plain.get(wanted)
            except TypeError:  # as in `get`
                resolver = None
            if resolver is not None:
                return resolver(scope)
        scope = self.scope()
        recipe = self._recipes.get(wanted) if name is None and scope.direct is self and is_hashable(wanted) else None
        if recipe is not None and not (scope.request or scope).is_seeded and not self._is_without_caller(scope):
            plan, resolver = recipe
            await self._follow(plan, scope)
            try:
                return resolver(scope)
            except MustAwait as error:
                raise self._gone(error) from None
        try:
            value = self.value_of(wanted, name)
        except MissingBeanError:
            return seed_without_bean(scope, wanted)
        if name is None and is_hashable(wanted):
            self._remember_awaiting(wanted, value)
        return await self.aget_value(value, scope)

    def _remember_awaiting(self, wanted: Any, value: Value) -> None:
        plan = self._planner.plan(value)
        if plan.is_plain:
            self._remember(wanted, value)
        elif plan.is_direct and not self._layers:
            self._recipes[wanted] = plan, self._resolver(value)

    async def aget_value(self, value: Value, scope: OpenScope) -> Any:
        """Return a value; await async producers."""
        plan = await self._ready(value, scope)
        try:
            if plan.is_direct and not self._layers:
                return self._now(value, scope)
            return await run_awaiting(self._stepwise.steps_to(value, scope))
        except MustAwait as error:
            raise self._gone(error) from None

    def _gone(self, error: MustAwait) -> ScopeNotActiveError:
        """Return the error for a scope that ended during an async lookup."""
        return ScopeNotActiveError(self.label(error.key), "its scope ended during the lookup")

    async def prepare(self, wanted: Any, name: str | None = None) -> None:
        """Create the async parts of a bean, so that `get` can create the rest on any thread."""
        try:
            if name is None and wanted in self._plain:
                return
        except TypeError:  # as in `get`
            pass
        scope = self.scope()
        try:
            value = self.value_of(wanted, name)
        except MissingBeanError:
            return
        await self._ready(value, scope)
        if (
            isinstance(value, SingleBean)
            and self._planner.is_made_for_one(value.bean)
            and value.bean not in (scope.seeds or ())
        ):
            # A new instance per lookup: store it for the next `get`.
            made = await self._build(value.bean, scope)
            if scope.prepared is None:
                scope.prepared = {}
            scope.prepared.setdefault(value.bean, []).append(made)

    async def _ready(self, value: Value, scope: OpenScope) -> Plan:
        """Create the stored beans of a value that async code must create."""
        # Do not create beans that a seed replaces, nor beans that only those need.
        request = scope.request
        if request is not None and request.is_seeded:
            plan = self._planner.plan_in(request, value)
        elif self._is_without_caller(scope):
            plan = self._planner.plan_outside(value)
        else:
            plan = self._planner.plan(value)
        await self._follow(plan, scope)
        return plan

    def _is_without_caller(self, scope: OpenScope) -> bool:
        """Return True if no request scope is active, so that the identity is the anonymous one."""
        return scope.request is None and self.graph.has_callers

    def outside(self, key: int) -> Any:
        """Return the value of a bean outside of request scopes, or `MISSING`."""
        return self.graph.outside(key)

    async def _follow(self, plan: Plan, scope: OpenScope) -> None:
        if plan.goal is not None and plan.goal in self.place_of(plan.goal, scope).store:
            return
        for key in plan.awaited:
            if (make_ready := self.graph.definitions[key].make_ready) is not None:
                await make_ready()
                continue
            place = self.place_of(key, scope)
            if key not in place.store:
                await place.create_awaiting(key, self._builders[key])
        # Await beans that a thread is creating, so that the loop is not blocked.
        request = scope.request or scope
        if scope.making or request.making or self.application.making:
            for place in {self.application, scope, request}:
                for key in plan.others.intersection(place.making):
                    await place.settled(key)

    async def _build(self, key: int, owner: OpenScope) -> Any:
        """Return a new bean created with await; `owner` closes it."""
        is_nested = not self._layers and key not in self._planner.stepwise and key not in self.deep
        if is_nested and GENERATE and owner.direct is self:
            made = self._resolvers.beginner(key)(owner)
            return await run_awaiting(self._stepwise.steps_to_enter(key, made, owner))
        return await run_awaiting(self._stepwise.steps_to_make(key, owner))

    def make_deep(self, key: int, scope: OpenScope) -> Any:
        """Create a bean at the end of a long chain for `scope`, without await."""
        return self._stepwise.make(key, scope)

    def _find_deep(self) -> None:
        self.deep = self._stepwise.deep = deep_beans(self.graph)

    def _find_awaited(self) -> None:
        self._planner = self._stepwise.planner = Planner(self.graph, self.providers.overridden)
        self.awaited = self._planner.awaited

    # --- calls of providers by other code

    def get_from_provider_call(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the bean, or an awaitable of it, to code that calls its provider."""
        if self.application.closed:
            # The provider also works after the container was started again.
            definition = self.graph.definitions[key]
            return self.lookup.get(definition.provides, definition.name)
        scope = self.scope()
        if (args or kwargs) and not self.graph.definitions[key].is_stored and key not in self.awaited:
            return self.providers[key].make(scope, args, kwargs)
        try:
            return self._now(self.graph.single(key), scope)
        except MustAwait:
            return self.aget_value(self.graph.single(key), scope)

    # --- start and stop

    async def start(self, undefined: Mapping[Any, InjectionPoint]) -> None:
        """Create the async application beans; the others are created at first use.

        `undefined` maps undefined `Dependency` providers of included containers to their injection points.
        """
        for dependency, point in undefined.items():
            self._outside.append(fill(dependency, self.providers.of_value(self.graph.value_of(point))))
        self._filled = tuple(undefined)
        places = ((key, self.graph.definitions[key]) for key in sorted(self.awaited))
        awaited = [key for key, each in places if each.scope is Scope.APPLICATION]
        # In one plan: separate plans would contain the beans of a long chain many times.
        await self._ready(BeanList(tuple(awaited)), self.application)

    async def stop(self, error: BaseException | None) -> None:
        """Close the application beans."""
        self._prepare_stop()
        try:
            await self.application.aclose(error)
        finally:
            self._restore_included()

    def stop_waiting(self, error: BaseException | None, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Close the application beans from a thread without a loop; `run` runs coroutines on the container's loop."""
        self._prepare_stop()
        try:
            self.application.close_waiting(error)
        finally:
            run(self.stop(error))

    def _prepare_stop(self) -> None:
        self._layers.merge()
        self._opened.adopt_all()

    def _restore_included(self) -> None:
        """Leave the providers of included containers as they were before the start."""
        while self._outside:
            self._outside.pop()()
        if self._filled:
            self._opened.reset_holders(self._filled)

    # --- overriding

    def override(self, key: int, fake: Any) -> Callable[[], None]:
        """Replace a bean by `fake`, in included containers too. Return a function that ends the override."""
        end_outside = override_outside(self.graph, key, self.providers[key], fake)
        self._outside.append(end_outside)
        provider = self.providers.override(key, fake)

        def end() -> None:
            self.providers.take_back(key, provider)
            if end_outside in self._outside:
                self._outside.remove(end_outside)
                end_outside()

        return end

    def overriding_changed(self, key: int, began: bool) -> None:
        """Use separate instances of application beans that hold an overridden bean, until the override ends."""
        if began:
            self._layers.begin(key, holders_in(self.graph, key, self.providers[key]))
            self._forget()
        else:
            left = self._layers.end(key)
            self._forget()
            self._layers.close(left)

    def _forget(self) -> None:
        self._unnamed.clear()
        self._plain.clear()
        self._stored.clear()
        self._recipes.clear()
        self._by_value.clear()
        self._find_awaited()


# --- seeds


class Seeding:
    """Stores seeds where lookups find them."""

    def __init__(self, graph: BeanGraph) -> None:
        self._graph = graph
        self._keys: dict[Any, int | None] = {}

    def give(self, scope: RequestScope, seeds: Mapping[Any, Any]) -> None:
        """Add seeds, by type, to a scope that is not entered yet."""
        for form, value in seeds.items():
            if form not in self._keys:
                wanted = seed_of(form)
                found = self._graph.choose(wanted.provides, wanted.name)
                self._keys[form] = found.bean if isinstance(found, SingleBean) else None
            self._put(scope, form, self._keys[form], value)

    def _put(self, scope: RequestScope, form: Any, key: int | None, value: Any) -> None:
        if key is None:
            scope.extras = {**(scope.extras or {}), plain(form): value}
            scope.direct = None
        elif self._graph.definitions[key].is_stored and self._graph.definitions[key].scope is Scope.REQUEST:
            scope.store[key] = value
            scope.is_seeded = True
        else:
            # Generated functions do not see this seed, because they do not look in the request's store.
            scope.seeds = {**(scope.seeds or {}), key: value}
            scope.is_seeded = True
            scope.direct = None


def seed_without_bean(scope: OpenScope, wanted: Any) -> Any:
    """Return the seed for a type that no bean provides; else raise the current error again."""
    request = scope.request
    form = plain(wanted)
    for given, value in (request.extras or {}).items() if request is not None else ():
        if form == given or form in forms_of(given):
            if request is not None and request.closing:
                raise ScopeNotActiveError(str(form), "its request scope has ended")
            return value
    raise


# --- overriding


class Override:
    """A replacement of the bean of a type and name."""

    def __init__(self, wanted: Any, fake: Any, name: str | None) -> None:
        self._wanted, self._fake, self._name = wanted, fake, name
        self._applied: tuple[Wiring, Callable[[], None]] | None = None

    def key_in(self, graph: BeanGraph) -> int | None:
        """Return the key of the overridden bean; None if no single bean matches."""
        try:
            return self._key_in(graph)
        except FrameworkError:
            return None

    def _key_in(self, graph: BeanGraph) -> int:
        value = graph.find(self._wanted, self._name)
        if isinstance(value, SingleBean):
            return value.bean
        what = "the type is not a single bean"
        raise IllegalConfigurationError([Problem(self._where, what, "override its beans one by one")])

    @property
    def _where(self) -> str:
        return f"override({type_name(self._wanted)}, …)"

    def problems(self, graph: BeanGraph) -> Iterator[Problem]:
        """Yield the problems of the override before start."""
        try:
            self._key_in(graph)
        except AmbiguousBeanError as error:
            yield Problem(
                self._where, f"multiple beans provide it: {', '.join(error.candidates)}", "override one of them"
            )
        except IllegalConfigurationError as error:
            yield from error.problems
        except FrameworkError:
            yield Problem(self._where, "no bean provides it", "register the bean that the fake replaces")

    def apply(self, wiring: Wiring) -> None:
        """Replace the bean by the fake. Raises if no bean, or more than one, matches."""
        key = self._key_in(wiring.graph)
        wiring.follow_graph()
        self._applied = wiring, wiring.override(key, self._fake)

    def take_back(self, wiring: Wiring) -> None:
        """End the override."""
        if self._applied is not None and self._applied[0] is wiring:
            _, end = self._applied
            self._applied = None
            end()


# --- scopes of beans during an override


@dataclass(frozen=True, slots=True)
class _Layer:
    """An active override: `scope` stores the application beans (`holders`) that hold the overridden bean."""

    key: int
    holders: frozenset[int]
    scope: ApplicationScope


class OverrideLayers:
    """The active overrides of a started container, newest last. False if there is none."""

    def __init__(self, graph: BeanGraph, home: Home) -> None:
        self._graph, self._home = graph, home
        self._layers: list[_Layer] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def place_of(self, key: int) -> ApplicationScope:
        """Return the scope that currently stores an application bean."""
        for layer in reversed(self._layers):
            if key in layer.holders:
                return layer.scope
        return self._home.application

    def begin(self, key: int, outside: Iterable[int]) -> None:
        """Start an override; `outside` are the beans of included containers that hold the bean."""
        self._layers.append(_Layer(key, self._application_holders(key, outside), ApplicationScope(self._home)))

    def end(self, key: int) -> ApplicationScope:
        """End the last override of a bean; return its scope, which the caller must close."""
        layer = next(layer for layer in reversed(self._layers) if layer.key == key)
        self._layers.remove(layer)
        return layer.scope

    def close(self, scope: ApplicationScope) -> None:
        """Close the beans of an ended override; on an event loop, async closers wait until the stop."""
        scope.close_here(None)
        if not scope.closers:
            return
        if asyncio._get_running_loop() is None:
            scope.close_waiting(None)
        else:
            self._home.application.closers.extend(scope.closers)

    def merge(self) -> None:
        """Move the closers of active overrides to the application scope."""
        for layer in self._layers:
            layer.scope.closing = True
            self._home.application.closers.extend(layer.scope.closers)
            layer.scope.closers.clear()

    def _application_holders(self, key: int, outside: Iterable[int]) -> frozenset[int]:
        """Return the application beans that hold a bean, directly or indirectly."""
        holders: dict[int, list[int]] = {}
        for bean in self._graph.beans:
            for held in bean.held:
                holders.setdefault(held, []).append(bean.key)
        found = set(outside)
        todo = [key, *found]
        while todo:
            for holder in holders.get(todo.pop(), ()):
                if holder not in found:
                    found.add(holder)
                    todo.append(holder)
        return frozenset(each for each in found if self._graph.definitions[each].scope is Scope.APPLICATION)
