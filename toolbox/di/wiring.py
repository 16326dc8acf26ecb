"""A started container's beans: found by type and name, made in their scopes, overridden.

Joins the graph with the two ways of going over it. Not here: reading what was registered, start and stop (`container`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

from ..context import ActiveScope
from ..errors import AsyncBeanError, IllegalConfigurationError, MissingBeanError, ScopeNotActiveError
from ..type_keys import forms_of, is_hashable, plain
from .beans import MISSING, InjectionPoint, seed_of
from .checks import problems_in
from .foreign import holders_in, override_outside
from .graph import BeanGraph, BeanList, Constant, LazyBean, SingleBean, Value
from .hints import chain_text, web_request_fix
from .marks import Instance, Scope
from .overriding import OverrideLayers
from .providers import Providers, owned_by
from .resolvers import Resolver, Resolvers
from .scopes import ApplicationScope, CallScope, Home, MustAwait, OpenScope, RequestScope, active
from .stepwise import Plan, Planner, Stepwise, deep_beans, run_awaiting

GENERATE = True
"""Whether beans are looked up by generated functions where nothing is overridden; False: by the providers alone."""


class _Builders(dict[int, Callable[[OpenScope], Awaitable[Any]]]):
    """For each bean, the function that makes it by awaiting."""

    def __init__(self, build: Callable[[int, OpenScope], Awaitable[Any]]) -> None:
        self._build = build

    def __missing__(self, key: int) -> Callable[[OpenScope], Awaitable[Any]]:
        self[key] = builder = partial(self._build, key)
        return builder


class Wiring(Home):
    """The beans of one container between a start and the next stop."""

    def __init__(self, graph: BeanGraph, lookup: ActiveScope, loop: asyncio.AbstractEventLoop | None) -> None:
        self.graph, self.loop = graph, loop
        self._lookup = lookup
        self.application = ApplicationScope(self)
        self._layers = OverrideLayers(graph, self)
        self.providers = Providers(graph, self, self._instance)
        self._resolvers = Resolvers(graph, self, self._instance)
        self._unnamed: dict[Any, Resolver] = {}
        self._plain: dict[Any, Resolver] = {}
        self._builders = _Builders(self._build)
        self._growing = threading.Lock()
        self._found: dict[tuple[Any, str | None], Value] = {}
        self._by_value: dict[Value, Resolver] = {}
        self._seeding = Seeding(graph)
        self._filled: list[tuple[Any, Any]] = []
        self._outside: list[Callable[[], None]] = []
        self._recipes: dict[Any, tuple[Plan, Resolver]] = {}
        self._stepwise = Stepwise(graph, self.providers, self._now, self.place_of)
        self._find_deep()
        self._find_awaited()

    def _instance(self, later: LazyBean) -> Instance[Any]:
        return Instance(self._lookup, later.wanted, later.name)

    def label(self, key: int) -> str:
        """The bean with this key, as a reader knows it."""
        return self.graph.definitions[key].label

    # --- scopes

    def no_seed(self, key: int, absent: Any = MISSING) -> Any:
        """What stands for a seed that the request scope was not given: what finds it now, else `absent`."""
        value = self.graph.definitions[key].factory()
        if value is not MISSING:
            return value
        if absent is not MISSING:
            return absent
        fix = web_request_fix(self.graph.definitions[key].provides)
        raise MissingBeanError(f"{self.label(key)}: this request scope has no such seed", fix=fix)

    def scope(self) -> OpenScope:
        """The active scope of this container; its application scope outside of others."""
        scope = active.get()
        while scope is not None and scope.home is not self:
            scope = scope.outer
        return self.application if scope is None else scope

    def open_request(self, seeds: Mapping[Any, Any]) -> RequestScope:
        """A new request scope in which `seeds` stand for beans of their types."""
        scope = RequestScope(self)
        if seeds:
            self._seeding.give(scope, seeds)
        return scope

    def open_call_scope(self) -> CallScope:
        """A new call scope below the active scope."""
        outer = active.get()
        if outer is None or outer.home is not self:
            outer = self.scope()
        return CallScope(self, outer.request, outer.direct)

    def place_of(self, key: int, owner: OpenScope) -> OpenScope:
        """The scope that a bean needed inside `owner` lives in."""
        scope = self.graph.definitions[key].scope
        if scope is Scope.APPLICATION:
            return self._layers.place_of(key) if self._layers else self.application
        if scope is Scope.REQUEST:
            return owner.request if owner.request is not None else self.refuse(key, owner)
        return owner if not isinstance(owner, ApplicationScope) else self.refuse(key, owner)

    # --- looking up

    def value_of(self, wanted: Any, name: str | None) -> Value:
        """What `get` is asked for; raises `MissingBeanError` or `AmbiguousBeanError`."""
        if not is_hashable(wanted):
            return self.graph.find(wanted, name)
        value = self._found.get((wanted, name))
        if value is None:
            value = self._found[wanted, name] = self.graph.find(wanted, name)
            self.follow_graph()
        return value

    def follow_graph(self) -> None:
        """Follows the graph, which gains a bean when settings or a generic class are first asked for."""
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
        """The bean, made without awaiting."""
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
        """Lets `get` use the function at once from now on, and `aget` too if it never has to await."""
        resolver = self._resolver(value)
        if self._planner.plan(value).is_plain:
            self._plain[wanted] = resolver
        self._unnamed[wanted] = resolver

    def get_value(self, value: Value, scope: OpenScope) -> Any:
        """A value made without awaiting; what `prepare` made for it is taken first."""
        try:
            return self._now(value, scope)
        except MustAwait as error:
            return self._prepared(value, scope, error)

    def _prepared(self, value: Value, scope: OpenScope, error: MustAwait) -> Any:
        """What `prepare` made for a value that cannot be made without awaiting; raises when there is nothing."""
        prepared = scope.prepared.get(error.key) if scope.prepared is not None else None
        if prepared and value == SingleBean(error.key):
            return prepared.pop()
        raise self._must_await(value, error) from None

    def _must_await(self, value: Value, error: MustAwait) -> AsyncBeanError:
        """The error of who asks without awaiting, with the way from what was asked for to what has to be awaited."""
        path = [self.label(key) for key in self._planner.path(value, error.key)]
        return AsyncBeanError(path[0], chain_text(path))

    def _now(self, value: Value, owner: OpenScope) -> Any:
        """A value for `owner`, without awaiting; raises `MustAwait`."""
        if isinstance(value, Constant):
            return value.value
        if owner.direct is self:
            return self._resolver(value)(owner)
        return self._by_providers(value, owner)

    def _resolver(self, value: Value) -> Resolver:
        """A function from a scope to this value."""
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

    # --- looking up, with awaiting

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        """The bean, awaiting what has to be."""
        scope = active.get() or self.application
        # What another thread is making is awaited, not waited for.
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
        if recipe is not None and not (scope.request or scope).is_seeded:
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
        """A value, awaiting what has to be."""
        plan = await self._ready(value, scope)
        try:
            if plan.is_direct and not self._layers:
                return self._now(value, scope)
            return await run_awaiting(self._stepwise.steps_to(value, scope))
        except MustAwait as error:
            raise self._gone(error) from None

    def _gone(self, error: MustAwait) -> ScopeNotActiveError:
        """The error of who awaited what a scope holds while that scope ended."""
        return ScopeNotActiveError(self.label(error.key), "its scope ended during the lookup")

    async def prepare(self, wanted: Any, name: str | None = None) -> None:
        """Makes what has to be awaited for a bean; `get` then makes the rest, on any thread."""
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
            # Of the kind of which there is a new one each time: it waits here for the `get` that follows.
            made = await self._build(value.bean, scope)
            if scope.prepared is None:
                scope.prepared = {}
            scope.prepared.setdefault(value.bean, []).append(made)

    async def _ready(self, value: Value, scope: OpenScope) -> Plan:
        """Makes the beans with a place of their own that have to be awaited."""
        # What a seed stands for is not made, nor what only that would have needed.
        request = scope.request
        if request is not None and request.is_seeded:
            plan = self._planner.plan_in(request, value)
        else:
            plan = self._planner.plan(value)
        await self._follow(plan, scope)
        return plan

    async def _follow(self, plan: Plan, scope: OpenScope) -> None:
        for key in plan.awaited:
            place = self.place_of(key, scope)
            if key not in place.store:
                await place.create_awaiting(key, self._builders[key])
        # What a thread is making is awaited, so that the loop does not stand still meanwhile.
        request = scope.request or scope
        if scope.making or request.making or self.application.making:
            for place in {self.application, scope, request}:
                for key in plan.others.intersection(place.making):
                    await place.settled(key)

    async def _build(self, key: int, owner: OpenScope) -> Any:
        """A bean made anew by awaiting, kept by `owner`."""
        is_nested = not self._layers and key not in self._planner.stepwise and key not in self.deep
        if is_nested and GENERATE and owner.direct is self:
            made = self._resolvers.beginner(key)(owner)
            return await run_awaiting(self._stepwise.steps_to_enter(key, made, owner))
        return await run_awaiting(self._stepwise.steps_to_make(key, owner))

    def make_deep(self, key: int, scope: OpenScope) -> Any:
        """Make a bean at the end of a long chain for `scope`, without awaiting."""
        return self._stepwise.make(key, scope)

    def _find_deep(self) -> None:
        self.deep = self._stepwise.deep = deep_beans(self.graph)

    def _find_awaited(self) -> None:
        self._planner = self._stepwise.planner = Planner(self.graph, self.providers.overridden)
        self.awaited = self._planner.awaited

    # --- from outside, through a provider

    def get_from_provider_call(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The bean for code that calls its provider: itself, or an awaitable of it."""
        if self.application.closed:
            # The container may have been started again, and those who call this provider need not know.
            definition = self.graph.definitions[key]
            return self._lookup.get(definition.provides, definition.name)
        scope = self.scope()
        if (args or kwargs) and not self.graph.definitions[key].is_stored and key not in self.awaited:
            return self.providers[key].make(scope, args, kwargs)
        try:
            return self._now(SingleBean(key), scope)
        except MustAwait:
            return self.aget_value(SingleBean(key), scope)

    # --- start and stop

    async def start(self, undefined: Mapping[Any, InjectionPoint]) -> None:
        """Makes the application beans that have to be awaited; the others are made when they are first used.

        `undefined` are providers of `dependency_injector` containers that wait for our beans.
        """
        self._filled = self.providers.fill(undefined)
        places = ((key, self.graph.definitions[key]) for key in sorted(self.awaited))
        awaited = [key for key, each in places if each.scope is Scope.APPLICATION and each.is_stored]
        # Together: the plans of many beans, each for itself, would hold the beans of a long chain many times.
        await self._ready(BeanList(tuple(awaited)), self.application)

    async def stop(self, error: BaseException | None) -> None:
        """Closes the application beans."""
        self._layers.merge()
        try:
            await self.application.aclose(error)
        finally:
            for shut_down in self._shutdowns():
                made = shut_down()
                if inspect.isawaitable(made):
                    await made

    def stop_waiting(self, error: BaseException | None, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Closes the application beans, from a thread that runs no loop; `run` runs coroutines on the container's."""
        self._layers.merge()
        try:
            self.application.close_waiting(error)
        finally:
            run(self.stop(error))

    def _shutdowns(self) -> Iterator[Callable[[], Any]]:
        for definition in reversed(self.graph.definitions):
            if definition.shutdown is not None:
                yield definition.shutdown
        while self._outside:
            yield self._outside.pop()
        for dependency, provider in self._filled:
            self.providers.empty(dependency, provider)
        self._filled = []

    # --- overriding

    def override(self, key: int, fake: Any) -> Callable[[], None]:
        """Makes `fake` stand for a bean, in other containers that were included too; returns the way back."""
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
        """Gives application beans that hold an overridden bean another place, for as long as it is overridden."""
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
        self._recipes.clear()
        self._by_value.clear()
        self._find_awaited()


# --- seeds


class Seeding:
    """Puts seeds where the beans of their types are looked for."""

    def __init__(self, graph: BeanGraph) -> None:
        self._graph = graph
        self._keys: dict[Any, int | None] = {}

    def give(self, scope: RequestScope, seeds: Mapping[Any, Any]) -> None:
        """Gives a scope that is not entered yet its seeds, by type."""
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
            # A bean that is not looked up in a request's store: the generated functions would not see the seed.
            scope.seeds = {**(scope.seeds or {}), key: value}
            scope.is_seeded = True
            scope.direct = None


def seed_without_bean(scope: OpenScope, wanted: Any) -> Any:
    """What the request scope was given for a type that no bean has; else raises the error under way."""
    request = scope.request
    form = plain(wanted)
    for given, value in (request.extras or {}).items() if request is not None else ():
        if form == given or form in forms_of(given):
            if request is not None and request.closing:
                raise ScopeNotActiveError(str(form), "its request scope has ended")
            return value
    raise
