"""Generates the functions that create beans, each when it is first needed.

A lookup calls a generated function with the active scope. For a request-scoped `Orders(store: Store, clock: Clock)`
with an application-scoped `Store` (key 3) and a dependent `Clock` (key 4), `get(Orders)` calls `get` and `make_5`:

    def get(scope):
        request = scope.request
        if request is None: scope.home.refuse(5, scope)
        return (found if (found := request.store.get(5, MISSING)) is not MISSING else request.create(5, make_5))

    def make_5(scope):
        return factory_5(
            store=(found if (found := application.store.get(3, MISSING)) is not MISSING
                   else application.create(3, make_3)),
            clock=factory_4())

`create` calls its function once for all threads. `scope` is the active scope in `get`, and in `make_5` the scope of the
new bean. Functions of beans that hold async dependent beans are `async def`. An overridden bean comes from its
provider (`home.get_overridden`). Not here: providers (`providers`), what async code must create before (`awaited`).
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .awaited import Plan, Planner
from .beans import BeanDefinition, FactoryKind, Stop
from .decorators import ITSELF, Scope
from .graph import Bean, BeanGraph
from .injection_points import MISSING
from .scopes import ApplicationScope, Home, MustAwait, OpenScope
from .values import DEFAULT, BeanDict, BeanList, Constant, LazyBean, NotFound, SingleBean, Value, as_key

Resolver: TypeAlias = Callable[[OpenScope], Any]
"""Returns a value for a scope; it can raise `MustAwait`. An async one returns an awaitable of the value."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """How to get a value: async code creates the beans of `plan`, then a function returns the value for a scope.

    This is `aget` for a value that needs `await` itself, and `get` for all others. `get` can raise `MustAwait`.
    """

    value: Value
    plan: Plan
    get: Resolver
    aget: Callable[[OpenScope], Awaitable[Any]] | None


class Resolvers:
    """The functions of one started container, until a bean is overridden or an override ends.

    `store_of` returns the scope that stores an application bean; `check` raises if a value cannot be created. `seeded`
    are beans that request scopes have in their `seeds`; a container has one set of functions for each such combination,
    and `plain` is the set without seeds. `lookups` has what was looked up before, by type, name, and whether it may be
    missing; None for what is.
    """

    def __init__(
        self,
        graph: BeanGraph,
        home: Home,
        planner: Planner,
        store_of: Callable[[int], ApplicationScope],
        later: Callable[[LazyBean], Any],
        check: Callable[[Value], None],
        seeded: frozenset[int] = frozenset(),
        plain: Resolvers | None = None,
    ) -> None:
        self.graph, self.planner, self.store_of, self.later, self._check = graph, planner, store_of, later, check
        self.seeded, self._plain = seeded, plain or self
        self._lock = threading.RLock()
        self.lookups: dict[tuple[Any, str | None, bool], Lookup | None] = {}
        self._of_value: dict[Value, Lookup] = {}
        self._names: dict[str, Any] = {
            "MISSING": MISSING,
            "application": home.application,
            "must_await": _must_await,
            "without_none": without_none,
        }

    def find_lookup(self, value: Value) -> Lookup:
        """Return how to get a value."""
        key = as_key(value)
        if (known := self._of_value.get(key)) is not None:
            return known
        return self._of_value.setdefault(key, self._new_lookup(value))

    def _new_lookup(self, value: Value) -> Lookup:
        self._check(value)
        plan = self.planner.plan(value)
        aget = None if plan.is_direct else self._new_resolver(value, awaiting=True)
        return Lookup(value, plan, self._new_resolver(value), aget)

    def _new_resolver(self, value: Value, awaiting: bool = False) -> Resolver:
        """Return a function that returns the value for the active scope."""
        with self._lock:
            writing = _Writing(self, None, awaiting)
            return self._compile("get", writing, writing.value(value))

    def maker(self, key: int, awaiting: bool = False) -> Resolver:
        """Return a function that creates a new instance of the bean for a scope, which closes it."""
        maker: Resolver = self._names[self.name_maker(key, awaiting)]
        return maker

    def name_maker(self, key: int, awaiting: bool) -> str:
        """Return the name of the function that creates a bean; its first call generates it."""
        name = f"make_awaiting_{key}" if awaiting else f"make_{key}"
        owner = self.graph.definitions[key].scope
        if name not in self._names and owner is Scope.APPLICATION and self is not self._plain:
            self._names[name] = self._plain.maker(key, awaiting)  # a request's seeds do not outlive it
        elif name not in self._names:

            def generate(scope: OpenScope) -> Any:
                with self._lock:
                    writing = _Writing(self, owner, awaiting)
                    made = self._compile(name, writing, writing.create(self.graph[key]))
                    self._names[name] = made
                return made(scope)

            self._names[name] = generate
        return name

    def _compile(self, name: str, writing: _Writing, expression: str) -> Resolver:
        lines = [f"async def {name}(scope):" if writing.awaits else f"def {name}(scope):"]
        for scope, key in writing.stores.items():
            holder, is_owner = scope.rule.holder, scope is writing.owner
            if holder != ITSELF:
                lines.append(f"    {holder} = scope" if is_owner else f"    {holder} = scope.{holder}")
            if key is not None and not is_owner:
                absent = "scope is application" if holder == ITSELF else f"{holder} is None"
                lines.append(f"    if {absent}: scope.home.refuse({key}, scope)")
        lines.append(f"    return {expression}")
        namespace: dict[str, Any] = {}
        exec(compile("\n".join(lines), f"<toolbox resolver {name}>", "exec"), self._names, namespace)
        function: Resolver = namespace[name]
        return function

    def name_object(self, kind: str, value: Any) -> str:
        """Return a name for an object in the generated code, such as `constant_12`."""
        name = f"{kind}_{len(self._names)}"
        self._names[name] = value
        return name

    def name_factory(self, key: int, factory: Callable[..., Any]) -> str:
        """Return the name of a bean's factory in the generated code."""
        self._names[f"factory_{key}"] = factory
        return f"factory_{key}"


class _Writing:
    """Generates one function: its expressions, and the scopes that they need from their argument `scope`.

    `owner` is the scope of the bean whose dependent beans are made; None when `scope` is whatever scope is active.
    `awaits`: the function is an `async def`. `stores` are the scopes whose stores the expressions use, each by the name
    of its holder, with a bean that cannot do without it.
    """

    def __init__(self, resolvers: Resolvers, owner: Scope | None, awaits: bool) -> None:
        self._resolvers, self._graph, self._planner = resolvers, resolvers.graph, resolvers.planner
        self.owner, self.awaits = owner, awaits
        self.stores: dict[Scope, int | None] = {}
        self._nested = 0

    def value(self, value: Value) -> str:
        """Return an expression for the value of an injection point."""
        match value:
            case SingleBean(key, absent):
                made = self._find(key, absent)
                if not self._graph.definitions[key].optional or absent is None:
                    return made
                return f"(found if (found := {made}) is not None else {self._absent(key, absent)})"
            case BeanList(keys, as_tuple):
                made = self._leave_none_out("[" + ", ".join(map(self._find, keys)) + "]", keys)
                return f"tuple({made})" if as_tuple else made
            case BeanDict(named):
                made = "{" + ", ".join(f"{name!r}: {self._find(key)}" for name, key in named) + "}"
                return self._leave_none_out(made, tuple(key for _, key in named))
            case Constant(fixed):
                return self._resolvers.name_object("constant", fixed)
            case LazyBean():
                return self._resolvers.name_object("instance", self._resolvers.later(value))
            case NotFound():
                raise AssertionError("a graph with a missing bean is refused before")

    def _leave_none_out(self, made: str, keys: tuple[int, ...]) -> str:
        may_hold_none = any(self._graph.definitions[key].optional for key in keys)
        return f"without_none({made})" if may_hold_none else made

    def _absent(self, key: int, instead: Any) -> str:
        """Return an expression for a bean without a value."""
        return f"scope.home.replace_absent({key}, {self._resolvers.name_object('instead', instead)})"

    def _find(self, key: int, instead: Any = MISSING) -> str:
        """Return an expression that finds a bean in its scope, or creates it; `instead` replaces a missing seed."""
        definition = self._graph.definitions[key]
        if key in self._planner.overridden:
            if key not in self._planner.asked:
                return f"scope.home.get_overridden({key}, scope)"
            return f"(await scope.home.aget_overridden({key}, scope))" if self.awaits else f"must_await({key})"
        if key in self._resolvers.seeded and self.owner is not Scope.APPLICATION:
            return f"scope.seeds[{key}]"
        if (nobody := self._graph.outside(key)) is not MISSING:
            return self._find_in_request(key, nobody, instead)
        if definition.factory_kind is FactoryKind.SEED and instead is not MISSING:
            return self._find_in_request(key, instead, instead)
        if not definition.is_stored:
            return self._make_for_holder(self._graph[key])
        if (holder := definition.scope.rule.holder) is not None:
            if self.stores.get(definition.scope) is None:
                self.stores[definition.scope] = key
            return self._find_stored(key, holder, MISSING)
        stored_in = "application"
        if (place := self._resolvers.store_of(key)) is not place.home.application:
            stored_in = self._resolvers.name_object("application", place)
        return self._find_stored(key, stored_in, MISSING)

    def _find_stored(self, key: int, place: str, instead: Any) -> str:
        """Return an expression that finds or creates a bean in the store of a scope."""
        definition = self._graph.definitions[key]
        if definition.factory_kind is FactoryKind.SEED:
            factory = self._resolvers.name_factory(key, definition.factory)
            made = f"found if (found := {factory}()) is not MISSING else {self._absent(key, instead)}"
        elif key in self._planner.awaited:
            made = f"must_await({key})"
        else:
            made = f"{place}.create({key}, {self._resolvers.name_maker(key, False)})"
        return f"(found if (found := {place}.store.get({key}, MISSING)) is not MISSING else {made})"

    def _find_in_request(self, key: int, outside: Any, instead: Any = MISSING) -> str:
        """Return an expression for a bean that is `outside` where no request scope is active."""
        self.stores.setdefault(Scope.REQUEST, None)
        definition = self._graph.definitions[key]
        if definition.is_stored and definition.scope is Scope.REQUEST:
            made = self._find_stored(key, "request", instead)
        else:
            made = self._make_for_holder(self._graph[key], apart=True)  # it needs a request, this function does not
        return f"({self._resolvers.name_object('outside', outside)} if request is None else {made})"

    def _make_for_holder(self, bean: Bean, apart: bool = False) -> str:
        """Return an expression that creates a bean that is not stored; with `apart`, in another function."""
        if self._planner.is_made_for_one(bean.key):
            if self.awaits:
                return f"(await {self._resolvers.name_maker(bean.key, True)}(scope))"
            if bean.key not in self._planner.asked:
                return f"must_await({bean.key})"
        # Written into the call of its holder, but not more than three in each other, so that no function gets long.
        if not apart and self._nested < 3:
            self._nested += 1
            made = self.create(bean)
            self._nested -= 1
            return made
        return f"{self._resolvers.name_maker(bean.key, False)}(scope)"

    def create(self, bean: Bean) -> str:
        """Return an expression that creates a bean, adapts it, and registers how to close it."""
        made, adapt = self._make(bean), bean.definition.adapt
        return made if adapt is None else f"{self._resolvers.name_object('adapted', bean.definition.adapted)}({made})"

    def _make(self, bean: Bean) -> str:
        definition = bean.definition
        if self.awaits and bean.key in self._planner.asked and definition.included is not None:
            return f"await {self._resolvers.name_object('included', definition.included.new)}()"
        factory = self._resolvers.name_factory(bean.key, definition.factory)
        if definition.factory_kind is FactoryKind.STORED:
            return f"scope.beans.make({factory})"
        call = f"{factory}({self._write_arguments(bean)})"
        return self._keep(call, definition, bean.key if definition.is_stored else None)

    def _keep(self, call: str, definition: BeanDefinition, key: int | None) -> str:
        """Return an expression that enters or awaits what a factory returns, and registers how to close it."""
        match definition.factory_kind:
            case FactoryKind.GENERATOR:
                return f"scope.enter({call}, {key})"
            case FactoryKind.ASYNC_GENERATOR:
                return f"await scope.enter_async({call}, {key}, {definition.own_task})"
            case FactoryKind.COROUTINE:
                call = f"await {call}"
        match definition.stop:
            case Stop.SYNC:
                return f"scope.keep_stopping({call}, {key})"
            case Stop.ASYNC:
                return f"scope.keep_stopping_async({call}, {key})"
        return call

    def _write_arguments(self, bean: Bean) -> str:
        """Return the arguments of a bean's factory."""
        written: list[str] = []
        by_position = True
        for point, value in bean.needs:
            if value == DEFAULT and not point.positional:
                by_position = False  # omitted: pass the following arguments by name
                continue
            expression = self.value(Constant(point.default) if value == DEFAULT else value)
            if point.positional or (by_position and not point.keyword):
                written.append(expression)
            else:
                by_position = False
                written.append(f"{point.parameter}={expression}")
        return ", ".join(written)


def without_none(beans: Any) -> Any:
    """Return a list or dict of beans without those whose producer returned None."""
    if isinstance(beans, dict):
        return {name: bean for name, bean in beans.items() if bean is not None}
    return [bean for bean in beans if bean is not None]


def _must_await(key: int) -> Any:
    raise MustAwait(key)
