"""Beans of a started container: lookups by type and name, what providers answer, start, stop and overrides.

A lookup takes the active scope, finds how to get the bean (a `Lookup`, kept until an override begins or ends), and
calls its function. Not here: reading registered objects (`registry`), these functions (`resolvers`), which beans are
created with await (`awaited`), the instances of beans during an override (`overriding`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from ..errors import AsyncBeanError, IllegalConfigurationError, MissingBeanError, Problem, ScopeNotActiveError
from ..execution.runners import Runner
from ..execution.threads import running_loop
from ..introspection import type_name
from .awaited import Planner
from .beans import FactoryKind, Stop
from .decorators import ITSELF, Instance, LendingScope, Scope
from .foreign import Opened, fill, holders_in, override_outside
from .graph import Bean, BeanGraph
from .graph_checks import find_bean_problems
from .injection_points import MISSING, InjectionPoint
from .override_layers import OverrideLayers
from .problem_texts import chain_text, web_request_fix
from .providers import Providers, owned_by
from .resolvers import Lookup, Resolvers
from .scopes import (
    ApplicationScope,
    CallScope,
    ConversationScope,
    Home,
    Loan,
    MustAwait,
    OpenScope,
    RequestScope,
    active,
)
from .seeds import Seeding, find_extra, find_given
from .stored_beans import StoredBeans
from .values import DEFAULT, BeanList, LazyBean, NotFound, SingleBean, Value, beans_in


class Wiring(Home):
    """Beans of one container between a start and the next stop."""

    lookup: LendingScope

    def __init__(
        self, graph: BeanGraph, lookup: LendingScope, loop: asyncio.AbstractEventLoop | None, runner: Runner
    ) -> None:
        self.graph, self.loop = graph, loop
        self.lookup, self.runner = lookup, runner
        self.decorated = graph.decorations.inner_of
        self.application = ApplicationScope(self)
        self._layers = OverrideLayers(graph, self)
        # Held while functions and plans are replaced, by lookups of new beans, overrides and seeds of several threads.
        self._planning = threading.RLock()
        self._loans: dict[int, list[Loan]] = {}
        self._seeding = Seeding(graph)
        self._outside: list[Callable[[], None]] = []
        self._opened = Opened(graph, self)
        self._filled: tuple[Any, ...] = ()
        self._awaitable: dict[int, Any] = {}
        self._included = [(key, each.included) for key, each in enumerate(graph.definitions) if each.included]
        self.providers = Providers(graph, self)
        self._followed = 0
        self.follow_graph()
        self._checked = set(range(self._followed))

    def _plan_again(self) -> None:
        """Forget the generated functions and plans: beans were added, or an override began or ended."""
        with self._planning:
            self._planner = Planner(self.graph, self.providers.overridden, self._find_asked())
            self._resolvers = self._resolvers_with(frozenset())
            self._seeded_resolvers: dict[frozenset[int], Resolvers] = {}

    def _resolvers_with(self, seeded: frozenset[int], plain: Resolvers | None = None) -> Resolvers:
        place_of, new_instance = self._layers.place_of, self._new_instance
        return Resolvers(self.graph, self, self._planner, place_of, new_instance, self._refuse_broken, seeded, plain)

    def _resolvers_of(self, scope: OpenScope) -> Resolvers:
        """Return the generated functions for a scope: other ones where seeds replace beans of other scopes."""
        if not scope.seeds:
            return self._resolvers
        seeded = frozenset(scope.seeds)
        if (known := self._seeded_resolvers.get(seeded)) is None:
            with self._planning:
                known = self._resolvers_with(seeded, self._resolvers)
                known = self._seeded_resolvers.setdefault(seeded, known)
        return known

    def _new_instance(self, later: LazyBean) -> Instance[Any]:
        return Instance(self.lookup, later.wanted, later.name)

    def follow_graph(self) -> None:
        """Add providers for beans that the graph gained: settings and generic classes that were requested first."""
        if self._followed == len(self.graph.beans):
            return
        with self._planning:
            beans = self.graph.beans  # other threads may add more during this
            if self._followed < len(beans):
                self.providers.grow(beans)
                self._plan_again()
                self._followed = len(beans)  # last, so that no thread uses the old plan for a new bean

    def find_value(self, point: InjectionPoint) -> Value:
        """Return the value of a parameter of a called function. Raises the errors of a lookup."""
        value = self.graph.find_at(point)
        if isinstance(value, NotFound):
            raise self.graph.missing_at(point)
        self.follow_graph()
        return value

    def problems_behind(self, keys: Iterable[int]) -> list[Problem]:
        """Return why beans, or those that they hold, cannot be created. The start has checked all until then.

        Lookups add further beans: settings, and generic classes with other arguments. Those are checked here, once.
        """
        new: dict[int, None] = {}
        todo = list(keys)
        while todo:
            key = todo.pop()
            if key not in self._checked and key not in new:
                new[key] = None
                todo += self.graph[key].held
        problems = list(find_bean_problems(self.graph, [self.graph[key] for key in new]))
        if not problems:
            self._checked.update(new)
        return problems

    def can_create(self, key: int) -> bool:
        """Return False for a generic class without its arguments, and for a bean with problems."""
        return key not in self.graph.templates and not self.problems_behind([key])

    def _refuse_broken(self, value: Value) -> None:
        """Raise `IllegalConfigurationError` if a bean of the value cannot be created."""
        if problems := self.problems_behind(beans_in(value)):
            raise IllegalConfigurationError(problems)

    def label(self, key: int) -> str:
        """Return the name of a bean for messages."""
        return self.graph.definitions[key].label

    # --- scopes

    def replace_absent(self, key: int, instead: Any) -> Any:
        """Return `instead` for a bean without a value: a seed that was not given, or a producer's None."""
        if instead is not MISSING:
            return instead
        definition = self.graph.definitions[key]
        if definition.factory_kind is FactoryKind.SEED:
            what, fix = "this request scope has no such seed", web_request_fix(definition.provides)
        else:
            what, fix = "its producer returned None", f"take `{type_name(definition.provides)} | None`"
        raise MissingBeanError(f"{definition.label}: {what}", fix=fix)

    def active_scope(self) -> OpenScope:
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

    def given_seeds(self) -> dict[Any, Any]:
        """Return the seeds and the identity of the active request scope; outside, the anonymous identity."""
        return find_given(self.graph, self.active_scope().request)

    def open_call_scope(self) -> CallScope:
        """Return a new call scope inside the active scope. It is the active scope until `leave` is called."""
        return CallScope(self, active.get(), self.active_scope())

    def open_conversation(self, key: Hashable, beans: StoredBeans) -> ConversationScope:
        """Return a new scope for a conversation inside the active scope, to enter with `async with` or `with`."""
        return ConversationScope(self, self.active_scope(), key, beans)

    def find_place(self, key: int, owner: OpenScope) -> OpenScope:
        """Return the scope that stores a bean requested inside `owner`."""
        holder = self.graph.definitions[key].scope.rule.holder
        if holder is None:
            return self._layers.place_of(key)
        place: OpenScope | None = owner if holder == ITSELF else getattr(owner, holder)
        return self.refuse(key, owner) if place is None or isinstance(place, ApplicationScope) else place

    def refuse(self, key: int, scope: OpenScope) -> NoReturn:
        """Raise `ScopeNotActiveError`: the bean is of a scope that is not active."""
        rule = self.graph.definitions[key].scope.rule
        raise ScopeNotActiveError(self.label(key), rule.inactive, rule.opened_by)

    # --- looking up

    def get(self, wanted: Any, name: str | None = None) -> Any:
        """Return the bean; create it without await."""
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name)
        return self._find_extra(scope, wanted, name) if lookup is None else self._get(lookup, scope)

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        """Return the bean; await async producers."""
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name)
        return self._find_extra(scope, wanted, name) if lookup is None else await self._aget(lookup, scope)

    def find_now(self, wanted: Any, name: str | None = None) -> Any:
        """Return the bean, or None if there is none; create it without await."""
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name, may_be_missing=True)
        return find_extra(scope, wanted, None) if lookup is None else self._get(lookup, scope)

    async def find(self, wanted: Any, name: str | None = None) -> Any:
        """Return the bean, or None if there is none; await async producers."""
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name, may_be_missing=True)
        return find_extra(scope, wanted, None) if lookup is None else await self._aget(lookup, scope)

    async def find_bean(self, key: int) -> Any:
        """Return the bean with this key, or None if its producer returns None; await async producers."""
        return await self.aget_value(SingleBean(key, absent=None), self.active_scope())

    def get_value(self, value: Value, scope: OpenScope) -> Any:
        """Return a value; create it without await."""
        return self._get(self._resolvers_of(scope).find_lookup(value), scope)

    async def aget_value(self, value: Value, scope: OpenScope) -> Any:
        """Return a value; await async producers."""
        return await self._aget(self._resolvers_of(scope).find_lookup(value), scope)

    def _find_lookup(
        self, scope: OpenScope, wanted: Any, name: str | None, may_be_missing: bool = False
    ) -> Lookup | None:
        """Return how to get the bean, None if no bean matches. Raises `AmbiguousBeanError`.

        `may_be_missing`: a seed that is absent and a producer's None give None.
        """
        key = wanted, name, may_be_missing
        try:
            return self._resolvers_of(scope).lookups[key]
        except (KeyError, TypeError):  # new, or an Annotated whose metadata cannot be hashed
            value = self.graph.find(wanted, name)
        if isinstance(value, NotFound):
            if may_be_missing:  # each call of a service looks for an identity, for example
                with suppress(TypeError):
                    self._resolvers_of(scope).lookups[key] = None
            return None
        if may_be_missing and isinstance(value, SingleBean) and value.absent is MISSING:
            value = replace(value, absent=None)
        self.follow_graph()
        resolvers = self._resolvers_of(scope)
        lookup = resolvers.find_lookup(value)
        with suppress(TypeError):
            resolvers.lookups[key] = lookup
        return lookup

    def _find_extra(self, scope: OpenScope, wanted: Any, name: str | None) -> Any:
        """Return the seed for a type that no bean provides. Raises `MissingBeanError`."""
        found = find_extra(scope, wanted, MISSING)
        if found is MISSING:
            raise self.graph.missing(wanted, name)
        return found

    def _get(self, lookup: Lookup, scope: OpenScope) -> Any:
        """Return a value without await; use an object from `prepare` first."""
        try:
            return lookup.get(scope)
        except MustAwait as error:
            reason = error
        value = lookup.value
        if self._follow_providers(reason):
            return self.get_value(value, scope)
        prepared = scope.prepared.get(reason.key)
        if prepared and isinstance(value, SingleBean) and value.bean == reason.key:
            made = prepared.pop()
            return made if made is not None else self.replace_absent(reason.key, value.absent)
        path = [self.label(key) for key in self._planner.path(value, reason.key)]
        raise AsyncBeanError(path[0], chain_text(path))

    # --- looking up, with awaiting

    async def _aget(self, lookup: Lookup, scope: OpenScope) -> Any:
        """Return a value; await async producers."""
        try:
            if lookup.plan.awaited or self._is_creating(scope):
                await self._make_ready(lookup.value, scope)
                lookup = self._resolvers_of(scope).find_lookup(lookup.value)  # an override may have begun
            return lookup.get(scope) if lookup.aget is None else await lookup.aget(scope)
        except MustAwait as error:
            reason = error
        if self._follow_providers(reason):
            return await self.aget_value(lookup.value, scope)
        raise ScopeNotActiveError(self.label(reason.key), "its scope ended during the lookup")

    async def prepare(self, wanted: Any, name: str | None = None) -> None:
        """Create the async parts of a bean, so that `get` can create the rest on any thread."""
        if self._awaitable or self._included:  # else no override can have made a provider async unseen
            self._follow_providers()
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name)
        if lookup is None:
            return
        value = lookup.value
        if lookup.plan.awaited or self._is_creating(scope):
            await self._make_ready(value, scope)
        if isinstance(value, SingleBean) and lookup.aget is not None and value.bean not in scope.seeds:
            # A new instance per lookup: store it for the next `get`.
            made = await self.aget_value(self.graph.single(value.bean), scope)
            scope.prepared.setdefault(value.bean, []).append(made)

    def _is_creating(self, scope: OpenScope) -> bool:
        """Return True if a thread or task creates a bean in a scope that a lookup in `scope` can use."""
        # The scopes of `stores_around`, written out: each lookup with await asks. Without the conversation, whose beans
        # are read from JSON: nothing is awaited for them.
        return bool(scope.making or self.application.making or (scope.request or scope).making)

    async def _make_ready(self, value: Value, scope: OpenScope) -> None:
        """Create the stored beans of a value that async code must create."""
        # Do not create beans that a seed replaces, nor beans that only those need.
        request = scope.request
        if request is not None and request.is_seeded:
            seeds = request.seeds

            def is_there(key: int) -> bool:  # not in the scope of a call, if only the request around it has the bean
                return key in seeds or key in self.find_place(key, scope).store

            plan = self._planner.plan_without(is_there, value)
        elif request is None and self.graph.has_callers:  # the identity is the anonymous one
            plan = self._planner.plan_outside(value)
        else:
            plan = self._planner.plan(value)
        if plan.goal is not None and plan.goal in self.find_place(plan.goal, scope).store:
            return
        for key in plan.awaited:
            if (make_ready := self.graph.definitions[key].make_ready) is not None:
                await make_ready()
                continue
            place = self.find_place(key, scope)
            if key not in place.store:
                await place.create_awaiting(key, self._resolvers_of(place).maker(key, awaiting=True))
        # Await beans that a thread is creating, so that the loop is not blocked.
        if self._is_creating(scope):
            for around in scope.stores_around():
                for key in plan.others.intersection(around.making):
                    await around.wait_until_settled(key)

    # --- dependent beans that can be given back

    def lend(self, wanted: Any, name: str | None) -> Any:
        """Return the bean as `get` does. What is created for it alone can be given back."""
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name)
        if lookup is None:
            return self._find_extra(scope, wanted, name)
        if self._is_stored(lookup.value):
            return self._get(lookup, scope)
        loan = Loan(scope, self._loans)
        return loan.hand_out(self._get(lookup, loan))

    async def lend_awaiting(self, wanted: Any, name: str | None) -> Any:
        """Return the bean as `aget` does. What is created for it alone can be given back."""
        scope = self.active_scope()
        lookup = self._find_lookup(scope, wanted, name)
        if lookup is None:
            return self._find_extra(scope, wanted, name)
        if self._is_stored(lookup.value):
            return await self._aget(lookup, scope)
        loan = Loan(scope, self._loans)
        return loan.hand_out(await self._aget(lookup, loan))

    def _is_stored(self, value: Value) -> bool:
        return isinstance(value, SingleBean) and self.graph.definitions[value.bean].is_stored

    def give_back(self, bean: object) -> None:
        """Close what was created for a lent bean alone. Raises `IllegalConfigurationError` if that must be awaited."""
        if (loan := self._newest_loan(bean)) is None:
            return
        if loan.needs_await and running_loop() is not None:
            what, fix = "async code closes this bean", "use `await instance.aclose(bean)`"
            raise IllegalConfigurationError([Problem(f"Instance[{type_name(type(bean))}].close(…)", what, fix)])
        loan.claim().close_waiting(None)

    async def give_back_awaiting(self, bean: object) -> None:
        """Close what was created for a lent bean alone."""
        if (loan := self._newest_loan(bean)) is not None:
            await loan.claim().aclose(None)

    def _newest_loan(self, bean: object) -> Loan | None:
        loans = [*self._loans.get(id(bean), ())]  # other threads may end some of them
        return loans[-1] if loans else None

    # --- providers that answer for beans

    def get_overridden(self, key: int, scope: OpenScope) -> Any:
        """Return what replaces an overridden bean in `scope`. Raises `MustAwait` if that must be awaited."""
        made = self._ask_overriding(key, scope)
        if inspect.isawaitable(made):
            if inspect.iscoroutine(made):
                made.close()
            raise MustAwait(key, self.providers[key].last_overriding)
        return self.graph.definitions[key].adapted(made)

    async def aget_overridden(self, key: int, scope: OpenScope) -> Any:
        """Return what replaces an overridden bean in `scope`; await it if necessary."""
        made = self._ask_overriding(key, scope)
        return self.graph.definitions[key].adapted(await made if inspect.isawaitable(made) else made)

    def _ask_overriding(self, key: int, scope: OpenScope) -> Any:
        with owned_by(scope):
            return self.providers[key]()

    def _follow_providers(self, reason: MustAwait | None = None) -> bool:
        """Plan again if an override has made a provider async, or no longer does. Return True if so.

        Providers of included containers are overridden without notice. So this is found out when a lookup meets an
        awaitable, or a bean that needed `await` before.
        """
        if reason is not None and reason.behind is not None:
            self._awaitable[reason.key] = reason.behind
        if self._find_asked() == self._planner.asked:
            return False
        self._plan_again()
        return True

    def _find_asked(self) -> frozenset[int]:
        """Return the beans whose provider returns awaitables now because it is overridden."""
        asked = {key for key, behind in self._awaitable.items() if self._provider_behind(key) is behind}
        for key, included in self._included:
            if included.turned_async and not self.graph.definitions[key].is_awaited:
                asked.add(key)
        return frozenset(asked)

    def _provider_behind(self, key: int) -> Any:
        """Return the provider that answers for a bean now."""
        overriding = self.providers[key].last_overriding
        included = self.graph.definitions[key].included
        return overriding if overriding is not None or included is None else included.behind

    def provide(
        self, value: Value, owner: OpenScope | None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return a value, or an awaitable of it, to code that calls its provider."""
        if self.application.closed and isinstance(value, SingleBean):
            # The provider also works after the container was started again.
            definition = self.graph.definitions[value.bean]
            return self.lookup.get(definition.provides, definition.name)
        scope = owner or self.active_scope()
        if (args or kwargs) and isinstance(value, SingleBean) and self._takes_arguments(value.bean):
            return self._create_with(self.graph[value.bean], scope, args, kwargs or {})
        try:
            return self._create(value, scope)
        except MustAwait as error:
            self._follow_providers(error)
            return self.aget_value(value, scope)

    def _create(self, value: Value, scope: OpenScope) -> Any:
        """Return a value without await. Raises `MustAwait`."""
        return self._resolvers_of(scope).find_lookup(value).get(scope)

    def _takes_arguments(self, key: int) -> bool:
        return not self.graph.definitions[key].is_stored and key not in self._planner.awaited

    def _create_with(self, bean: Bean, scope: OpenScope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a new dependent bean; the arguments of the provider's call replace those that would be injected."""
        self._refuse_broken(SingleBean(bean.key))
        given: list[Any] = []
        named = dict(kwargs)
        for point, value in bean.needs:
            if point.positional:
                given.append(point.default if value == DEFAULT else self._create(value, scope))
            elif point.parameter not in kwargs and value != DEFAULT:
                named[point.parameter] = self._create(value, scope)
        definition = bean.definition
        made = definition.factory(*given, *args, **named)
        if definition.factory_kind is FactoryKind.GENERATOR:
            made = scope.enter(made, None)
        elif definition.stop is not Stop.NONE:
            keep = scope.keep_stopping if definition.stop is Stop.SYNC else scope.keep_stopping_async
            made = keep(made, None)
        return definition.adapted(made)

    # --- start and stop

    async def start(self, undefined: Mapping[Any, InjectionPoint]) -> None:
        """Create the async application beans; the others are created at first use.

        `undefined` maps undefined `Dependency` providers of included containers to their injection points.
        """
        for dependency, point in undefined.items():
            value = self.graph.resolve(point)
            self.follow_graph()
            self._outside.append(fill(dependency, self.providers.of_value(value)))
        self._filled = tuple(undefined)
        places = ((key, self.graph.definitions[key]) for key in sorted(self._planner.awaited))
        awaited = [key for key, each in places if each.scope is Scope.APPLICATION]
        # In one plan: separate plans would contain the beans of a long chain many times.
        await self._make_ready(BeanList(tuple(awaited)), self.application)

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

    def abandon(self, error: BaseException | None) -> None:
        """Close the application beans that need no event loop, and log the others: the container's loop is blocked."""
        self._prepare_stop()
        try:
            self.application.abandon(error)
        finally:
            self._restore_included()

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
        self._refuse_broken(SingleBean(key))
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
            self._plan_again()
        else:
            left = self._layers.end(key)
            self._plan_again()
            self._layers.close(left)
