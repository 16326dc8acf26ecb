"""Creates beans: with generated functions, step by step, or with providers of `dependency_injector`.

One function is generated for each requested bean: nested constructor calls for dependent beans, one lookup in the
scope's store for the others. Long chains and async dependent beans are made step by step; a step is a generator, so
that Python's stack does not limit the length of a chain. The providers are the definition layer, overriding, and the
slow path over the graph: each bean is a Factory whose arguments are the providers of its dependencies. Our scopes store
the instances. Not here: providers of other containers as beans (`foreign`).
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from dependency_injector import containers, providers

from .beans import MISSING, BeanDefinition, FactoryKind, Stop
from .decorators import Scope
from .graph import (
    DEFAULT,
    Bean,
    BeanDict,
    BeanGraph,
    BeanList,
    Constant,
    LazyBean,
    NotFound,
    SingleBean,
    Value,
    beans_in,
    provider_names,
)
from .scopes import Home, MustAwait, OpenScope

Resolver: TypeAlias = Callable[[OpenScope], Any]

INLINED = 2000
"""Maximum length in characters of a constructor call that is inlined into the call of its holder."""


class Resolvers:
    """The functions of one started container, each generated at first use."""

    def __init__(self, graph: BeanGraph, home: Home, later: Callable[[LazyBean], Any]) -> None:
        self._graph, self._home, self._later = graph, home, later
        self._lock = threading.RLock()
        self._written: dict[int, Resolver] = {}
        self._begun: dict[int, Resolver] = {}
        self._constants = 0
        self.too_long: set[int] = set()
        application = home.application
        self._names: dict[str, Any] = {
            "MISSING": MISSING,
            "A": application,
            "a_get": application.store.get,
            "must_await": _must_await,
            "without_none": without_none,
        }

    def resolver(self, value: Value) -> Resolver:
        """Return a function that returns the value for the active scope; it can raise `MustAwait`."""
        with self._lock:
            writing = _Writing(self, None)
            return self._compile("get", writing, writing.value(value))

    def builder(self, key: int) -> Resolver:
        """Return a function that creates a new instance of the bean for a scope."""
        with self._lock:
            known = self._written.get(key)
            if known is None:
                bean = self._graph[key]
                writing = _Writing(self, bean.definition.scope)
                known = self._written[key] = self._compile(f"make_{key}", writing, writing.call(bean, key))
            return known

    def beginner(self, key: int) -> Resolver:
        """Return a function that calls the bean's factory for a scope; the result is not entered yet."""
        with self._lock:
            known = self._begun.get(key)
            if known is None:
                bean = self._graph[key]
                writing = _Writing(self, bean.definition.scope)
                known = self._begun[key] = self._compile(f"begin_{key}", writing, writing.construct(bean))
            return known

    def _compile(self, name: str, writing: _Writing, expression: str) -> Resolver:
        lines = [f"def {name}(s):"]
        if writing.wants_scope:
            lines.append(f"    if s is A: s.home.refuse({writing.wants_scope[0]}, s)")
        if writing.wants_request or writing.may_use_request:
            lines.append("    r = s.request")
        if writing.wants_request:
            lines.append(f"    if r is None: s.home.refuse({writing.wants_request[0]}, s)")
            lines.append("    r_get = r.store.get")
        if writing.wants_scope:
            lines.append("    s_get = s.store.get")
        lines.append(f"    return {expression}")
        namespace: dict[str, Any] = {}
        exec(compile("\n".join(lines), f"<toolbox resolver {name}>", "exec"), self._names, namespace)
        function: Resolver = namespace[name]
        return function

    def constant(self, value: Any) -> str:
        """Return a name for an object in the generated code."""
        self._constants += 1
        name = f"k{self._constants}"
        self._names[name] = value
        return name

    def making(self, key: int) -> str:
        """Return the name of the function that creates a bean; it is generated at its first call."""
        name = f"make_{key}"
        if name not in self._names and key in self._home.deep:
            self._names[name] = partial(self._home.make_deep, key)
        elif name not in self._names:

            def first(scope: OpenScope) -> Any:
                self._names[name] = made = self.builder(key)
                return made(scope)

            self._names[name] = first
        return name


class _Writing:
    """Generates one function: its expressions, and the scopes that they need from their argument `s`.

    `owner` is the scope of the bean whose dependent beans are made; None when `s` is whatever scope is active.
    """

    def __init__(self, resolvers: Resolvers, owner: Scope | None) -> None:
        self._resolvers = resolvers
        self._graph = resolvers._graph
        self._owner = owner
        self.wants_request: list[int] = []
        self.wants_scope: list[int] = []
        self.may_use_request = False

    def value(self, value: Value) -> str:
        """Return an expression for the value of an injection point."""
        match value:
            case SingleBean(key, absent):
                made = self.bean(key, absent)
                if not self._graph.definitions[key].optional or absent is None:
                    return made
                return f"s.home.required({key}, {made}, {self._resolvers.constant(absent)})"
            case BeanList(keys, as_tuple):
                made = self._present("[" + ", ".join(self.bean(key) for key in keys) + "]", keys)
                return f"tuple({made})" if as_tuple else made
            case BeanDict(named):
                made = "{" + ", ".join(f"{name!r}: {self.bean(key)}" for name, key in named) + "}"
                return self._present(made, beans_in(value))
            case Constant(fixed):
                return self._resolvers.constant(fixed)
            case LazyBean():
                return self._resolvers.constant(self._resolvers._later(value))
            case NotFound():
                raise AssertionError("a graph with a missing bean is refused before")

    def _present(self, made: str, keys: tuple[int, ...]) -> str:
        may_hold_none = any(self._graph.definitions[key].optional for key in keys)
        return f"without_none({made})" if may_hold_none else made

    def bean(self, key: int, absent: Any = MISSING) -> str:
        """Return an expression that finds a bean in its scope, or creates it."""
        bean = self._graph[key]
        definition = bean.definition
        if (nobody := self._graph.outside(key)) is not MISSING:
            return self._caller(bean, nobody)
        if definition.factory_kind is FactoryKind.SEED:
            return self._seed(key, absent)
        if not definition.caches or definition.scope is Scope.DEPENDENT:
            return self._dependent(bean)
        if definition.scope is Scope.APPLICATION:
            place, get = "A", "a_get"
        elif definition.scope is Scope.REQUEST:
            place, get = "r", "r_get"
            self.wants_request.append(key)
        else:
            place, get = "s", "s_get"
            self.wants_scope.append(key)
        if key in self._resolvers._home.awaited:
            made = f"must_await({key})"
        else:
            made = f"{place}.create({key}, {self._resolvers.making(key)})"
        return f"(v if (v := {get}({key}, MISSING)) is not MISSING else {made})"

    def _caller(self, bean: Bean, nobody: Any) -> str:
        """Return an expression for the identity of the request, or for `nobody` outside of request scopes."""
        key, definition = bean.key, bean.definition
        self.may_use_request = True
        if definition.factory_kind is FactoryKind.SEED:
            made = f"s.home.no_seed({key})"
        elif key in self._resolvers._home.awaited:
            made = f"must_await({key})"
        elif definition.is_stored and definition.scope is Scope.REQUEST:
            made = f"r.create({key}, {self._resolvers.making(key)})"
        else:
            made = f"{self._resolvers.making(key)}(s)"
        if definition.scope is Scope.REQUEST and definition.caches:
            made = f"v if (v := r.store.get({key}, MISSING)) is not MISSING else {made}"
        return f"({self._resolvers.constant(nobody)} if r is None else {made})"

    def _seed(self, key: int, absent: Any) -> str:
        if absent is not MISSING:
            self.may_use_request = True
            default = self._resolvers.constant(absent)
            found = f"v if (v := r.store.get({key}, MISSING)) is not MISSING else s.home.no_seed({key}, {default})"
            return f"({default} if r is None else {found})"
        self.wants_request.append(key)
        return f"(v if (v := r_get({key}, MISSING)) is not MISSING else s.home.no_seed({key}))"

    def _dependent(self, bean: Bean) -> str:
        if bean.key in self._resolvers._home.awaited and not bean.definition.is_shared:
            return f"must_await({bean.key})"
        if bean.key not in self._resolvers.too_long and bean.key not in self._resolvers._home.deep:
            before = len(self.wants_request), len(self.wants_scope)
            inlined = self.call(bean, None)
            if len(inlined) <= INLINED:
                return inlined
            self._resolvers.too_long.add(bean.key)
            del self.wants_request[before[0] :], self.wants_scope[before[1] :]
        return f"{self._resolvers.making(bean.key)}(s)"

    def call(self, bean: Bean, key: int | None) -> str:
        """Return an expression that creates a bean and registers how to close it."""
        definition = bean.definition
        call = self.construct(bean)
        kept = key if definition.caches and definition.scope is not Scope.DEPENDENT else None
        if definition.factory_kind is FactoryKind.GENERATOR:
            return f"s.enter({call}, {kept})"
        if definition.stop is Stop.SYNC:
            return f"s.keep_stopping({call}, {kept})"
        if definition.stop is Stop.ASYNC:
            return f"s.keep_stopping_async({call}, {kept})"
        return call

    def construct(self, bean: Bean) -> str:
        """Return an expression that calls a bean's factory."""
        return f"{self._resolvers.constant(bean.definition.factory)}({self._arguments(bean)})"

    def _arguments(self, bean: Bean) -> str:
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


@dataclass(frozen=True, slots=True)
class Plan:
    """Beans to create with await, in order (`awaited`), before a value can be created without; `others` follow.

    `goal` is the bean whose instance in its scope is the value, if it is one: once that exists, nothing is to be done.
    `is_direct`: the value itself needs no await after that. `is_plain`: no part of the value ever needs await.
    """

    goal: int | None
    awaited: tuple[int, ...]
    others: frozenset[int]
    is_direct: bool
    is_plain: bool


class Planner:
    """The plans of a graph without the `overridden` beans.

    `awaited` are the beans that async code creates, `stepwise` those that hold an async dependent bean.
    """

    def __init__(self, graph: BeanGraph, overridden: frozenset[int]) -> None:
        self._graph, self.overridden = graph, overridden
        self._plans: dict[Value, Plan] = {}
        self.awaited = self._find_awaited()
        self.stepwise = frozenset(bean.key for bean in graph.beans if any(map(self.is_made_for_one, bean.held)))

    def _find_awaited(self) -> frozenset[int]:
        """Return the beans with an async factory, and the beans that hold an async dependent bean."""
        definitions = self._graph.definitions
        holders: dict[int, list[int]] = {}
        for bean in self._graph.beans:
            for held in bean.held:
                if not definitions[held].is_shared:
                    holders.setdefault(held, []).append(bean.key)
        found = {bean.key for bean in self._graph.beans if bean.definition.is_awaited} - self.overridden
        todo = list(found)
        while todo:
            more = {*holders.get(todo.pop(), ())} - found - self.overridden
            found |= more
            todo += more
        return frozenset(found)

    def is_made_for_one(self, key: int) -> bool:
        """Return True for async dependent beans."""
        return key in self.awaited and not self._graph.definitions[key].is_shared

    def plan(self, value: Value) -> Plan:
        """Return the plan for a value."""
        try:
            plan = self._plans.get(value)
            if plan is None:
                plan = self._plans[value] = self._new_plan(value, lambda _: False)
        except TypeError:  # a default that cannot be hashed
            return self._new_plan(value, lambda _: False)
        return plan

    def plan_outside(self, value: Value) -> Plan:
        """Return the plan for a value where no request scope is active, without the identity and what it needs."""
        return self._new_plan(value, lambda key: self._graph.outside(key) is not MISSING)

    def plan_in(self, request: OpenScope, value: Value) -> Plan:
        """Return the plan for a value in a request scope with seeds, without the beans that they replace."""
        seeds = request.seeds or {}
        return self._new_plan(value, lambda key: key in request.store or key in seeds)

    def _new_plan(self, value: Value, is_there: Callable[[int], bool]) -> Plan:
        order: dict[int, None] = {}
        seen: set[int] = set()
        # Not by recursion: chains can have any length.
        path: list[tuple[int, Iterator[int]]] = [(-1, iter(beans_in(value)))]
        while path:
            here, held = path[-1]
            key = next(held, None)
            if key is None:
                path.pop()
                if here >= 0 and self._graph.definitions[here].is_shared:
                    order[here] = None
            elif key not in seen and key not in self.overridden and not is_there(key):
                seen.add(key)
                path.append((key, iter(self._graph[key].held)))
        awaited = tuple(key for key in order if key in self.awaited)
        bean = value.bean if isinstance(value, SingleBean) else -1
        return Plan(
            bean if bean in order and self._graph.definitions[bean].is_stored else None,
            awaited,
            frozenset(order).difference(awaited),
            is_direct=not any(self.is_made_for_one(key) for key in beans_in(value)),
            is_plain=self.awaited.isdisjoint(seen),
        )

    def path(self, value: Value, goal: int) -> list[int]:
        """Return the shortest path from a value to an async bean, and on to the async producer."""
        path = self._shortest(value, goal)
        definitions = self._graph.definitions
        while not definitions[path[-1]].is_awaited:  # it is async because of a dependent bean that it holds
            path.append(next(key for key in self._graph[path[-1]].held if self.is_made_for_one(key)))
        return path

    def _shortest(self, value: Value, goal: int) -> list[int]:
        before: dict[int, int | None] = dict.fromkeys(beans_in(value))
        queue = deque(before)
        while queue and goal not in before:
            here = queue.popleft()
            for key in self._graph[here].held:
                if key not in before:
                    before[key] = here
                    queue.append(key)
        path: list[int] = []
        step: int | None = goal
        while step is not None:
            path.append(step)
            step = before.get(step)
        return path[::-1]


DEPTH = 32
"""Maximum depth of nested constructor calls, in beans."""


def deep_beans(graph: BeanGraph) -> frozenset[int]:
    """Return the beans at the end of a chain longer than `DEPTH`: they are made step by step, not by nested calls."""
    depth: dict[int, int] = {}
    path: list[tuple[int, Iterator[int]]] = [(-1, iter(range(len(graph.beans))))]
    while path:
        here, held = path[-1]
        key = next(held, None)
        if key is None:
            path.pop()
            if here >= 0:
                depth[here] = 1 + max((depth[each] for each in graph[here].held), default=0)
        elif key not in depth:
            path.append((key, iter(graph[key].held)))
    return frozenset(key for key, count in depth.items() if count > DEPTH)


# --- making beans step by step


class Awaiting(NamedTuple):
    """An effect of a step: await `work`; the bean with this key cannot be made without awaiting."""

    key: int
    work: Awaitable[Any] | None = None


Steps: TypeAlias = Generator[Any, Any, Any]
"""Yields further `Steps`, whose result it is sent, and `Awaiting`; returns the value."""


class Stepwise:
    """Makes the beans of one started container step by step.

    `now` gives a value that needs no long chain, `place_of` the scope that a bean lives in. `planner` and `deep` are
    those of the graph as it is now.
    """

    planner: Planner
    deep: frozenset[int] = frozenset()

    def __init__(
        self,
        graph: BeanGraph,
        providers: Providers,
        now: Callable[[Value, OpenScope], Any],
        place_of: Callable[[int, OpenScope], OpenScope],
    ) -> None:
        self._graph, self._providers = graph, providers
        self._now, self._place_of = now, place_of

    def make(self, key: int, owner: OpenScope) -> Any:
        """Make a bean for `owner`, and before it what it needs that has a place. Raises `MustAwait`."""
        self._make_needed(key, owner)
        return self._make(key, owner)

    def _make(self, key: int, owner: OpenScope) -> Any:
        return run(self.steps_to_make(key, owner))

    def _make_needed(self, goal: int, owner: OpenScope) -> None:
        """Make the beans with a place at the ends of the long chains below `goal`, the innermost first."""
        definitions = self._graph.definitions
        seen: set[int] = set()
        path: list[tuple[int, Iterator[int]]] = [(goal, self._held_by(goal))]
        while path:
            here, held = path[-1]
            key = next(held, None)
            if key is None:
                path.pop()
                if path and definitions[here].is_stored:
                    place = self._place_of(here, owner)
                    if here not in place.store:
                        place.create(here, partial(self._make, here))
            elif key in self.deep and key not in seen and not self._is_there(key, owner):
                if key in self.planner.awaited and definitions[key].make_ready is None:
                    raise MustAwait(key)
                seen.add(key)
                path.append((key, self._held_by(key)))

    def _held_by(self, key: int) -> Iterator[int]:
        return iter(self._graph[key].held)

    def _is_there(self, key: int, owner: OpenScope) -> bool:
        if key in self.planner.overridden or key in ((owner.request or owner).seeds or ()):
            return True
        if owner.request is None and self._graph.outside(key) is not MISSING:
            return True
        return self._graph.definitions[key].is_stored and key in self._place_of(key, owner).store

    # --- the steps

    def steps_to(self, value: Value, owner: OpenScope) -> Steps:
        """Return a value for `owner`, when the awaited beans with a place are there."""
        made = yield self._steps_to(value, owner)
        if isinstance(value, SingleBean) and made is None and self._graph.definitions[value.bean].optional:
            return owner.home.required(value.bean, made, value.absent)
        return made

    def _steps_to(self, value: Value, owner: OpenScope) -> Steps:
        match value:
            case BeanList(keys, as_tuple):
                beans = []
                for key in keys:
                    beans.append((yield self.steps_to(self._graph.single(key), owner)))
                present = without_none(beans)
                return tuple(present) if as_tuple else present
            case BeanDict(named):
                by_name = {}
                for name, key in named:
                    by_name[name] = yield self.steps_to(self._graph.single(key), owner)
                return without_none(by_name)
            case SingleBean(key) if key not in ((owner.request or owner).seeds or ()):
                if self._providers[key].last_overriding is not None:
                    with owned_by(owner):
                        made = self._providers[key]()
                    return (yield Awaiting(key, made)) if inspect.isawaitable(made) else made
                if owner.request is None and (nobody := self._graph.outside(key)) is not MISSING:
                    return nobody
                has_a_place = self._graph.definitions[key].is_stored
                if self.planner.is_made_for_one(key) or (key in self.deep and not has_a_place):
                    return (yield self.steps_to_make(key, owner))
                if key in self.deep:
                    made = self._place_of(key, owner).store.get(key, MISSING)
                    if made is not MISSING:
                        return made
        return self._now(value, owner)

    def steps_to_make(self, key: int, owner: OpenScope) -> Steps:
        """Return a bean made for `owner`, which keeps what closes it."""
        bean = self._graph[key]
        if key in self.planner.awaited and bean.definition.make_ready is None:
            yield Awaiting(key)
        args, kwargs = [], {}
        for point, value in bean.needs:
            if value == DEFAULT:
                if point.positional:
                    args.append(point.default)
            elif point.positional:
                args.append((yield self.steps_to(value, owner)))
            else:
                kwargs[point.parameter] = yield self.steps_to(value, owner)
        return (yield self.steps_to_enter(key, bean.definition.factory(*args, **kwargs), owner))

    def steps_to_enter(self, key: int, made: Any, owner: OpenScope) -> Steps:
        """Return the bean of what its factory has returned: entered or awaited, and kept by `owner`."""
        definition = self._graph.definitions[key]
        place = key if definition.is_stored else None
        if definition.factory_kind is FactoryKind.ASYNC_GENERATOR:
            return (yield Awaiting(key, owner.enter_async(made, place, definition.own_task)))
        if definition.factory_kind is FactoryKind.GENERATOR:
            return owner.enter(made, place)
        if definition.factory_kind is FactoryKind.COROUTINE:
            made = yield Awaiting(key, made)
        return kept(made, definition, place, owner)


# --- the drivers


class _Stack:
    """Steps under way, the innermost last: sends each the result of the one that it waits for."""

    def __init__(self, first: Steps) -> None:
        self._steps = [first]
        self.result: Any = None

    def until_awaiting(self, error: BaseException | None = None) -> Awaiting | None:
        """Go on until something has to be awaited; None when `result` is the result of all. Raises what steps raise."""
        steps = self._steps
        while steps:
            try:
                step = steps[-1].send(self.result) if error is None else steps[-1].throw(error)
            except StopIteration as end:
                steps.pop()
                self.result, error = end.value, None
                continue
            except BaseException as raised:
                steps.pop()
                error = raised
                continue
            self.result, error = None, None
            if isinstance(step, Awaiting):
                return step
            steps.append(step)
        if error is not None:
            raise error
        return None


def run(steps: Steps) -> Any:
    """Return the result of steps that await nothing. Raises `MustAwait` when one has to."""
    stack = _Stack(steps)
    if (awaiting := stack.until_awaiting()) is not None:
        raise MustAwait(awaiting.key)
    return stack.result


async def run_awaiting(steps: Steps) -> Any:
    """Return the result of steps, awaiting what has to be."""
    stack = _Stack(steps)
    awaiting = stack.until_awaiting()
    while awaiting is not None:
        try:
            stack.result = await awaiting.work if awaiting.work is not None else None
        except BaseException as error:
            awaiting = stack.until_awaiting(error)
        else:
            awaiting = stack.until_awaiting()
    return stack.result


# --- beans as providers of dependency_injector


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

    def required(self, key: int, made: Any, absent: Any) -> Any:
        """Return what a producer that can return None has made, else `absent`. Raises `MissingBeanError`."""
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
            if key in started.awaited and not self.definition.is_shared:
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


def _calling(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the provider of what a function returns for the values of other providers."""
    provider = providers.Callable(function, *arguments)
    provider.disable_async_mode()
    return provider


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
        if args:
            provider.set_args(*args)
        if kwargs:
            provider.set_kwargs(**kwargs)

    def of_value(self, value: Value) -> Any:
        """Return the provider of a value."""
        match value:
            case SingleBean(key, absent) if self._graph.definitions[key].optional:
                found = self._of_bean[key]
                return found if absent is None else _calling(self._started.required, key, found, absent)
            case SingleBean(key, absent):
                return self._of_bean[key] if absent is MISSING else SeedOr(key, absent, self._of_bean[key])
            case BeanList(keys, as_tuple):
                beans = _calling(without_none, providers.List(*(self._of_bean[key] for key in keys)))
                return _calling(tuple, beans) if as_tuple else beans
            case BeanDict(named):
                return _calling(without_none, providers.Dict({name: self._of_bean[key] for name, key in named}))
            case Constant(fixed):
                return providers.Object(fixed)
            case LazyBean():
                return providers.Object(self._later(value))
            case NotFound():
                raise AssertionError("a graph with a missing bean is refused before")
