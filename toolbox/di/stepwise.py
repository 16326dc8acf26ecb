"""Makes beans step by step, with a stack of their own: chains of any length, and dependent beans that are awaited.

Each step is a generator; two short drivers run them, with and without awaiting. Not here: which beans are awaited
(`plans`), beans that are made by nested calls (`resolvers`, `providers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from .beans import MISSING, Making
from .graph import DEFAULT, BeanGraph, ByName, Every, One, Value
from .plans import Planner
from .providers import Providers, has_place, kept, owned_by
from .scopes import MustAwait, OpenScope


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
                if path and has_place(definitions[here]):
                    place = self._place_of(here, owner)
                    if here not in place.store:
                        place.create(here, partial(self._make, here))
            elif key in self.deep and key not in seen and not self._is_there(key, owner):
                if key in self.planner.awaited:
                    raise MustAwait(key)
                seen.add(key)
                path.append((key, self._held_by(key)))

    def _held_by(self, key: int) -> Iterator[int]:
        return iter([held for _, held in self._graph[key].holds])

    def _is_there(self, key: int, owner: OpenScope) -> bool:
        if key in self.planner.overridden or key in ((owner.request or owner).seeds or ()):
            return True
        return has_place(self._graph.definitions[key]) and key in self._place_of(key, owner).store

    # --- the steps

    def steps_to(self, value: Value, owner: OpenScope) -> Steps:
        """Return a value for `owner`, when the awaited beans with a place are there."""
        match value:
            case Every(keys):
                beans = []
                for key in keys:
                    beans.append((yield self.steps_to(One(key), owner)))
                return beans
            case ByName(named):
                by_name = {}
                for name, key in named:
                    by_name[name] = yield self.steps_to(One(key), owner)
                return by_name
            case One(key) if key not in ((owner.request or owner).seeds or ()):
                if self._providers[key].last_overriding is not None:
                    with owned_by(owner):
                        made = self._providers[key]()
                    return (yield Awaiting(key, made)) if inspect.isawaitable(made) else made
                has_a_place = has_place(self._graph.definitions[key])
                if self.planner.is_made_for_one(key) or (key in self.deep and not has_a_place):
                    return (yield self.steps_to_make(key, owner))
                if key in self.deep:
                    made = self._place_of(key, owner).store.get(key, MISSING)
                    if made is not MISSING:
                        return made
        return self._now(value, owner)

    def steps_to_make(self, key: int, owner: OpenScope) -> Steps:
        """Return a bean made for `owner`, which keeps what closes it."""
        if key in self.planner.awaited:
            yield Awaiting(key)
        bean = self._graph[key]
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
        place = key if has_place(definition) else None
        if definition.made is Making.ASYNC_GENERATOR:
            return (yield Awaiting(key, owner.enter_async(made, place, definition.own_task)))
        if definition.made is Making.GENERATOR:
            return owner.enter(made, place)
        if definition.made is Making.COROUTINE:
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
