"""Collects registered objects, scans modules for them, and reads them into the bean graph.

Not here: which bean an injection point gets (`graph`), checks of the whole graph (`graph_checks`).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast, get_origin

from ..errors import IllegalConfigurationError, Problem
from ..introspection import class_of, forms_of, plain, type_name
from .beans import BeanDefinition, collect_local_classes, read_class, read_producer, seed_of
from .conditions import Condition, Conditions, LeftOut, SettingCondition, conditions_of
from .decorating import decorates_mark_of, read_decorator
from .decorators import Scope, producer_mark_of, settings_check_of
from .graph import BeanGraph, Binding, NamedType, Registration
from .injection_points import InjectionPoint, Names
from .settings_beans import is_settings
from .values import NotFound

Reader: TypeAlias = Callable[[object], Registration | None]
"""Reads a registered object; returns None for objects of other kinds."""


class NamedBeans(NamedType, Protocol):
    """The beans of a type that has rules for names, such as `ChatModel`."""

    @property
    def type(self) -> Any:
        """The type."""
        ...

    def arrange(
        self, definitions: Iterable[BeanDefinition], bindings: Iterable[Binding]
    ) -> tuple[list[BeanDefinition], list[Binding]]:
        """Return the definitions with the beans of the type, and the bindings that are left."""
        ...


@dataclass(frozen=True, slots=True)
class RegisteredInstance:
    """An instance registered with `register_instance`."""

    value: Any
    provides: Any
    name: str | None = None


@dataclass(frozen=True, slots=True)
class IncludedContainer:
    """A `dependency_injector` container registered with `include`."""

    container: Any


@dataclass(frozen=True, slots=True)
class Fallback:
    """A class to register unless a bean provides it, for example one of a subclass."""

    cls: type[Any]


class Registry:
    """Objects, bindings and seeds registered with one container."""

    def __init__(self, seeds: Iterable[Any] = (), optional_seeds: Iterable[Any] = ()) -> None:
        """`optional_seeds` are seeds only if nothing else provides their types."""
        self._optional_seeds: dict[Any, Callable[[], Any] | None] = dict.fromkeys(optional_seeds)
        self._entries: dict[object, object] = {}
        self._bindings: dict[Binding, None] = {}
        self._seeds: dict[Any, Callable[[], Any] | None] = dict.fromkeys(seeds)
        self._implied: list[Callable[[], Iterable[object]]] = []
        self._reads_environment = False

    def add(self, entry: object) -> None:
        """Register an object. Repeated registration has no effect."""
        self._entries.setdefault(_identity(entry), entry)

    def declare_seed(self, wanted: Any, find: Callable[[], Any] | None, is_optional: bool = False) -> None:
        """Register the type of a seed; an optional one is a seed only if nothing else provides its type."""
        (self._optional_seeds if is_optional else self._seeds)[wanted] = find

    def add_implied(self, find: Callable[[], Iterable[object]]) -> None:
        """Register the results of `find()` at each `read`."""
        self._implied.append(find)

    def contents(self) -> tuple[object, ...] | None:
        """Return the inputs of `read`, to detect changes; None if they are not all known.

        Included containers and environment variables can change.
        """
        entries = self._entries.values()
        if self._reads_environment or any(isinstance(each, IncludedContainer) for each in entries):
            return None
        implied = (each for find in self._implied for each in find())
        return (*self._entries, *self._bindings, *self._seeds.items(), *self._optional_seeds.items(), *implied)

    def knows(self, entry: object) -> bool:
        """Return True if the object is registered, or if this type has an instance or binding."""
        if _identity(entry) in self._entries or any(each.interface == entry for each in self._bindings):
            return True
        return any(isinstance(each, RegisteredInstance) and each.provides == entry for each in self._entries.values())

    def give(self, value: Any, provides: Any, name: str | None) -> None:
        """Register an instance."""
        self._entries.setdefault((id(value), provides, name), RegisteredInstance(value, provides, name))

    def include(self, container: Any) -> None:
        """Register the providers of a `dependency_injector` container."""
        self._entries.setdefault((IncludedContainer, id(container)), IncludedContainer(container))

    def bind(self, binding: Binding) -> None:
        """Register the implementation of an interface."""
        self._bindings.setdefault(binding)

    def undefined(self) -> dict[Any, InjectionPoint]:
        """Return the undefined dependencies of included containers; beans can fill them."""
        included = [each.container for each in self._entries.values() if isinstance(each, IncludedContainer)]
        if not included:
            return {}
        from .foreign import undefined_dependencies

        return {provider: point for each in included for provider, point in undefined_dependencies(each).items()}

    def names(self) -> dict[str, Any]:
        """Return the registered classes that are local to functions, by name."""
        types: list[Any] = list(self._seeds)
        for each in self._entries.values():
            if isinstance(each, RegisteredInstance):
                types.append(each.provides)
            elif isinstance(each, type) or get_origin(each) is not None:
                types.append(each)
            else:
                mark = producer_mark_of(each)
                types += mark.local_names.values() if mark else ()
                if not isinstance(returned := getattr(each, "__annotations__", {}).get("return", ""), str):
                    types.append(returned)
        for binding in self._bindings:
            types += [binding.interface, binding.implementation]
        return collect_local_classes(types)

    def read(
        self,
        readers: Sequence[Reader],
        names: Names,
        own: Iterable[BeanDefinition],
        on_request: Callable[[Any], BeanDefinition | None],
        named: NamedBeans,
        profiles: Collection[str] = (),
    ) -> Registered:
        """Read each object, and objects that it implies, with the first reader that supports it.

        `own` are beans of the container itself, and `on_request` returns those that few programs use. `named` adds the
        beans of a type that has rules for names. `profiles` are the active ones, for `@only_if`.
        """
        read_once = _reading_once(readers)
        unconditional = cache(lambda: self._unconditional(read_once, names, named))

        def is_provided(wanted: Any) -> bool:  # settings that nobody has registered are not
            return unconditional().resolve_type(wanted, None, derive=not is_settings(wanted)) != NotFound()

        conditions = Conditions(profiles, is_provided)
        readings = list(self._readings(read_once, conditions.reasons_against, names))
        definitions = [definition for reading, _ in readings for definition in reading.definitions]
        definitions += (seed_of(each, find) for each, find in self._seeds.items())
        provided = [each.provides for each in definitions]
        optional = self._optional_seeds.items()
        definitions += (seed_of(each, find) for each, find in optional if each not in provided)
        definitions += own
        left_out = [reading.left_out for reading, _ in readings if reading.left_out is not None]
        decorators = [reading.decorator for reading, _ in readings if reading.decorator is not None]
        definitions, bindings = named.arrange(definitions, self._bindings)
        named_types = {named.type: named}
        graph = BeanGraph(definitions, bindings, names, on_request, left_out, decorators, named_types)
        return Registered(graph, tuple(reading for reading, _ in readings), tuple(p for _, p in readings if p))

    def _unconditional(self, read: Reader, names: Names, named: NamedBeans) -> BeanGraph:
        """Return the beans that are registered without conditions."""
        readings = self._readings(read, lambda conditions: [("", "")] if conditions else [], names)
        definitions = [definition for reading, _ in readings for definition in reading.definitions]
        definitions, bindings = named.arrange([*definitions, *map(seed_of, self._seeds)], self._bindings)
        return BeanGraph(definitions, bindings, names)

    def _readings(
        self,
        read: Reader,
        reasons_against: Callable[[tuple[Condition, ...]], list[tuple[str, str]]],
        names: Names,
    ) -> Iterator[tuple[Registration, Problem | None]]:
        seen = {*self._entries, *self._seeds}
        queue = deque(self._entries.values())
        implied: list[object] = [each for find in self._implied for each in find()]
        bindings, fallbacks = deque(self._bindings), deque[Fallback]()
        provided: set[object] = set(self._seeds)
        while queue or implied or bindings or fallbacks:
            if not queue and not implied:
                # Last, because these are registered only if nothing else provides them.
                if bindings:
                    implied = self._not_provided(bindings.popleft(), provided)
                elif (cls := fallbacks.popleft().cls) not in provided:
                    implied = [cls]
                continue
            if not queue:
                new = {_identity(each): each for each in implied}
                queue.extend(each for identity, each in new.items() if identity not in seen)
                seen.update(new)
                implied = []
                continue
            entry = queue.popleft()
            if isinstance(entry, Fallback):
                fallbacks.append(entry)
                continue
            if conditions := conditions_of(entry):
                self._reads_environment |= any(isinstance(each, SettingCondition) for each in conditions)
                if reasons := reasons_against(conditions):
                    yield Registration((), left_out=_left_out(entry, reasons, names)), None
                    continue
            reading = read(entry)
            if reading is None:
                yield Registration(()), _not_registrable(entry)
                continue
            implied += reading.implies
            provided.update(form for each in reading.definitions for form in forms_of(each.provides))
            # A class that an instance or producer provides is not registered again.
            seen.update(each.provides for each in reading.definitions if isinstance(each.provides, type))
            yield reading, None

    def _not_provided(self, binding: Binding, provided: set[object]) -> list[object]:
        """Return the implementation of a binding, to be registered, unless a bean or another binding provides it."""
        implementation = binding.implementation
        if producer_mark_of(implementation):
            return [implementation]
        if not isinstance(class_of(implementation), type):
            return []
        others = {plain(each.interface) for each in self._bindings} - {plain(binding.interface)}
        is_filled = class_of(implementation) in self._entries  # a generic class, registered without arguments
        return [] if is_filled or plain(implementation) in provided | others else [implementation]


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of reading: the graph, the registrations with their checks, and unreadable objects."""

    graph: BeanGraph
    readings: tuple[Registration, ...]
    unreadable: tuple[Problem, ...]

    def problems(self) -> Iterator[Problem]:
        """Yield what the registered objects themselves check. Not here: `unreadable`, and the problems of beans."""
        for reading in self.readings:
            if reading.check is not None:
                yield from reading.check(self.graph)


def _left_out(entry: object, reasons: Sequence[tuple[str, str]], names: Names) -> LeftOut:
    """Describe a registered object whose conditions do not hold."""
    is_producer = producer_mark_of(entry) is not None
    provides = read_producer(cast("Callable[..., Any]", entry), names).provides if is_producer else entry
    whys, fixes = zip(*reasons, strict=True)
    return LeftOut(type_name(entry), provides, " and ".join(whys), " and ".join(dict.fromkeys(fixes)), entry)


def _reading_once(readers: Sequence[Reader]) -> Reader:
    """Return a reader that asks each reader in order, and keeps the result for each object.

    Objects are read again to decide conditions. Readers keep what they read, such as the plans of a service, so the
    second reading must be the first one.
    """
    found: dict[object, Registration | None] = {}

    def read(entry: object) -> Registration | None:
        identity = _identity(entry)
        if identity not in found:
            readings = (each(entry) for each in readers)
            found[identity] = next((reading for reading in readings if reading is not None), None)
        return found[identity]

    return read


def _identity(entry: object) -> object:
    is_stable = isinstance(entry, type) or get_origin(entry) is not None or inspect.ismethod(entry)
    return entry if is_stable else id(entry)


def _not_registrable(entry: object) -> Problem:
    if isinstance(entry, ModuleType):
        fix = f'register its classes, or call scan("{entry.__name__}") to register everything marked in it'
        return Problem(f"register({entry.__name__})", "modules cannot be registered", fix)
    if isinstance(entry, (list, tuple, set, frozenset, dict)):
        where = f"register({type(entry).__name__} of {len(entry)})"
        return Problem(where, "collections cannot be registered", "write register(*beans)")
    where = f"register({entry!r})"
    return Problem(where, "expected a class or a producer", "for an instance, use register_instance(…)")


# --- readers


def read_instance(entry: object) -> Registration | None:
    """Read an instance registered with `register_instance`."""
    if not isinstance(entry, RegisteredInstance):
        return None
    value = entry.value
    later = getattr(value, LATER, ()) if hasattr(type(value), LATER) else ()
    definition = BeanDefinition(
        provides=entry.provides,
        factory=lambda: value,
        scope=Scope.APPLICATION,
        name=entry.name,
        source=value,
        later=later,
    )
    implies, check = (getattr(value, each, None) if hasattr(type(value), each) else None for each in (IMPLIES, CHECK))
    return Registration((definition,), implies or (), check)


def read_included(entry: object) -> Registration | None:
    """Read a container registered with `include`."""
    if not isinstance(entry, IncludedContainer):
        return None
    from .foreign import read_container

    return read_container(entry.container)


IMPLIES = "__toolbox_implies__"
"""Attribute of a class or an instance: further classes to register with it."""
CHECK = "__toolbox_check__"
"""Attribute of a class or an instance: a function that takes the `BeanGraph` and yields `Problem`s."""
LATER = "__toolbox_later__"
"""Attribute of an instance: the injection points of what it looks up when it is used."""


def bean_reader(names: Names) -> Reader:
    """Return the reader of classes and producers; their annotations can use `names`."""

    def read(entry: object) -> Registration | None:
        if isinstance(entry, type) or isinstance(get_origin(entry), type):
            return Registration((read_class(entry, names),), getattr(entry, IMPLIES, ()), getattr(entry, CHECK, None))
        return Registration((read_producer(entry, names),)) if callable(entry) and hasattr(entry, "__code__") else None

    return read


def decorator_reader(names: Names) -> Reader:
    """Return the reader of classes with `@decorates`; their annotations can use `names`."""

    def read(entry: object) -> Registration | None:
        if not isinstance(entry, type) or (mark := decorates_mark_of(entry)) is None:
            return None
        return Registration((), decorator=read_decorator(entry, mark, names))

    return read


def producer_problems(graph: BeanGraph, settings: Any, overridden: Iterable[int] = ()) -> Iterator[Problem]:
    """Yield invalid settings of producers that check their settings."""
    left_out = set(overridden)
    for bean in graph.beans:
        check = settings_check_of(bean.definition.source)
        if check is not None and bean.key not in left_out:
            yield from check(settings)


def settings_in(graph: BeanGraph, overridden: Iterable[int] = ()) -> tuple[dict[int, Any], list[Problem]]:
    """Create the beans that are read at the start, such as settings; return them and the problems."""
    built: dict[int, Any] = {}
    problems: list[Problem] = []
    left_out = set(overridden)
    for bean in graph.beans:
        if bean.definition.is_read_at_start and bean.key not in left_out:
            try:
                built[bean.key] = bean.definition.factory()
            except IllegalConfigurationError as error:
                problems += error.problems
    return built, problems


# --- scanning


def marked_in(module: ModuleType | str, is_marked: Callable[[object], bool]) -> Iterator[object]:
    """Yield the marked objects of a module and its submodules; import the submodules."""
    for each in modules_of(importlib.import_module(module) if isinstance(module, str) else module):
        for member in list(vars(each).values()):
            # Skip imported objects: they are registered with the module that defines them.
            if getattr(member, "__module__", None) == each.__name__ and is_marked(member):
                yield member


def modules_of(module: ModuleType) -> Iterator[ModuleType]:
    """Yield the module and its submodules, sorted by name, without `__main__` modules."""
    yield module
    for found in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda each: each.name):
        if found.name != "__main__":
            yield from modules_of(importlib.import_module(f"{module.__name__}.{found.name}"))
