"""Generates one function per requested bean: the fast path, without provider calls.

The functions do the same as the providers: nested constructor calls for dependent beans, one lookup in the scope's
store for the others. Not here: overridden or seeded beans (`providers`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from .beans import MISSING, FactoryKind, Stop
from .decorators import Scope
from .graph import DEFAULT, Bean, BeanDict, BeanGraph, BeanList, Constant, LazyBean, NotFound, SingleBean, Value
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
                return self.bean(key, absent)
            case BeanList(keys):
                return "[" + ", ".join(self.bean(key) for key in keys) + "]"
            case BeanDict(named):
                return "{" + ", ".join(f"{name!r}: {self.bean(key)}" for name, key in named) + "}"
            case Constant(fixed):
                return self._resolvers.constant(fixed)
            case LazyBean():
                return self._resolvers.constant(self._resolvers._later(value))
            case NotFound():
                raise AssertionError("a graph with a missing bean is refused before")

    def bean(self, key: int, absent: Any = MISSING) -> str:
        """Return an expression that finds a bean in its scope, or creates it."""
        bean = self._graph[key]
        definition = bean.definition
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

    def _seed(self, key: int, absent: Any) -> str:
        if absent is not MISSING:
            self.may_use_request = True
            default = self._resolvers.constant(absent)
            found = f"v if (v := r.store.get({key}, MISSING)) is not MISSING else s.home.no_seed({key}, {default})"
            return f"({default} if r is None else {found})"
        self.wants_request.append(key)
        return f"(v if (v := r_get({key}, MISSING)) is not MISSING else s.home.no_seed({key}))"

    def _dependent(self, bean: Bean) -> str:
        if bean.key in self._resolvers._home.awaited:
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


def _must_await(key: int) -> Any:
    raise MustAwait(key)
