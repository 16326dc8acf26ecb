"""`@decorates`: classes that take the place of other beans and get them in their constructor.

Not here: in which place of the graph they are put (`graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from typing_extensions import TypeForm

from ..errors import Problem
from ..introspection import class_of, fitted, forms_of, is_key, opened, parameters_of, plain, type_name, unfit
from .beans import BeanDefinition, FactoryKind, read_class
from .decorators import scope_mark_of
from .injection_points import InjectionPoint, Names, PointShape

C = TypeVar("C", bound=type[Any])

DECORATES_MARK = "__toolbox_decorates__"


@dataclass(frozen=True, slots=True)
class DecoratesMark:
    """The arguments of `@decorates`."""

    wanted: Any
    name: str | None = None
    order: int = 0


def decorates(wanted: TypeForm[Any], *, name: str | None = None, order: int = 0) -> Callable[[C], C]:
    """Put the class around every bean of a type: it takes their place, and gets the bean in its constructor.

        @decorates(Mailer)
        class CountingMailer(Mailer):
            def __init__(self, inner: Mailer, counter: Counter) -> None: ...

    Exactly one parameter has the decorated type; the others are injected. Lookups of the type, and of its base classes,
    give the decorator; a lookup of the concrete class gives the bean itself. `name` restricts it to beans with this
    name. A smaller `order` is further outside, and equal ones are in the order of their registration. Its scope is that
    of the bean. An override of the type replaces the whole chain.

    Raises `TypeError` for anything but a class, and for arguments of wrong types.
    """
    if not is_key(plain(wanted)) or isinstance(wanted, str):
        raise TypeError(f"@decorates needs the type of a bean: @decorates(Mailer), got {wanted!r}")
    if not isinstance(order, int) or isinstance(order, bool):
        raise TypeError(f"@decorates: order must be an integer, got {order!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"@decorates: invalid name={name!r}; use a string")

    def apply(cls: C) -> C:
        if not isinstance(cls, type):
            raise TypeError(f"@decorates: expected a class, got {cls!r}")
        if DECORATES_MARK in vars(cls):
            raise TypeError(f"{cls.__qualname__} has @decorates twice; write one class for each type")
        setattr(cls, DECORATES_MARK, DecoratesMark(plain(wanted), name, order))
        return cls

    return apply


def decorates_mark_of(cls: object) -> DecoratesMark | None:
    """Return the mark of the class itself, or None. Subclasses do not inherit it."""
    return vars(cls).get(DECORATES_MARK) if isinstance(cls, type) else None


@dataclass(frozen=True, slots=True)
class BeanDecorator:
    """A class with `@decorates`: `definition` is the class as a bean, `inner` the parameter for the decorated bean."""

    mark: DecoratesMark
    definition: BeanDefinition
    inner: InjectionPoint | None
    names: Names
    problems: tuple[Problem, ...]

    @property
    def label(self) -> str:
        """Return the name of the class, for messages."""
        return self.definition.label

    @property
    def is_open(self) -> bool:
        """Return True if it decorates a generic class, or Protocol, with all type arguments."""
        return isinstance(self.mark.wanted, type) and bool(parameters_of(self.mark.wanted))

    def matches(self, form: Any) -> bool:
        """Return True if a bean is decorated that is looked up by this type."""
        return form == self.mark.wanted or (self.is_open and class_of(form) is self.mark.wanted)

    def takes(self, name: str | None) -> bool:
        """Return True if beans with this name are decorated."""
        return self.mark.name in (None, name)

    def around(self, inner: BeanDefinition, form: Any) -> BeanDefinition:
        """Return the definition of the decorator of a bean. `form` is the decorated type, with the bean's arguments."""
        assert self.inner is not None
        definition = self.definition
        if form != self.mark.wanted and parameters_of(cls := definition.provides):
            arguments = fitted(opened(self.inner.wants), form) or {}
            definition = read_class(cls[tuple(arguments.get(each, Any) for each in parameters_of(cls))], self.names)
        return replace(
            definition,
            scope=inner.scope,
            source=self.definition.source,
            inner=self.inner.parameter,
            problems=(),
            adapt=inner.adapt,
        )

    def problems_around(self, inner: BeanDefinition) -> Iterator[Problem]:
        """Yield the reasons why a bean cannot be decorated."""
        scope = scope_mark_of(class_of(self.definition.provides))
        if inner.factory_kind is FactoryKind.SEED:
            fix = "wrap the object before you pass it to request_scope(…)"
            yield Problem(self.label, f"{inner.label} is a seed, which cannot be decorated", fix)
        if inner.optional and self.inner is not None and not self.inner.optional:
            what, name = f"the producer of {inner.label} may return None", type_name(self.inner.wants)
            yield Problem(self.inner.where, what, f"take `{name} | None`")
        if scope not in (None, inner.scope):
            what = f"it is {scope}_scoped, but decorates {inner.label}, which is {inner.scope}"
            fix = f"remove @{scope}_scoped: a decorator has the scope of its bean"
            yield Problem(self.label, what, fix)


def read_decorator(cls: type[Any], mark: DecoratesMark, names: Names | None = None) -> BeanDecorator:
    """Read a class with `@decorates`."""
    definition = read_class(cls, names)
    wanted = mark.wanted
    candidates = [each for each in definition.needs if _is_inner(each, wanted)]
    inner = candidates[0] if len(candidates) == 1 else None
    return BeanDecorator(mark, definition, inner, names or {}, tuple(_problems(definition, wanted, candidates)))


def _is_inner(point: InjectionPoint, wanted: Any) -> bool:
    if point.shape is not PointShape.ONE or point.name is not None:
        return False
    is_open = isinstance(wanted, type) and parameters_of(wanted)
    return bool(point.wants == wanted or (is_open and class_of(point.wants) is wanted))


def _problems(definition: BeanDefinition, wanted: Any, candidates: list[InjectionPoint]) -> Iterator[Problem]:
    name = type_name(wanted)
    yield from definition.problems
    if len(candidates) != 1:
        what = f"it needs exactly one parameter of type {name}, which gets the decorated bean; found {len(candidates)}"
        yield Problem(
            definition.label,
            what,
            f"add `inner: {name}` to the constructor"
            if not candidates
            else f"give the others names: Annotated[{name}, Named(…)]",
        )
    if reason := unfit(wanted, definition.provides):
        yield Problem(definition.label, reason, f"inherit from {name}, or implement all of its methods")


class Decorations:
    """Puts decorators in the places of beans in a graph, whose definitions and indexes it changes.

    `index` has the beans of a type with their names, `bound` the bean of each binding.
    """

    def __init__(
        self,
        decorators: Iterable[BeanDecorator],
        definitions: list[BeanDefinition],
        index: dict[Any, list[tuple[int, str | None]]],
        bound: dict[tuple[Any, str | None], int],
    ) -> None:
        decorators = list(decorators)
        self.problems = [problem for each in decorators for problem in each.problems]
        ordered = sorted(decorators, key=lambda each: each.mark.order)
        self.usable = [each for each in reversed(ordered) if not each.problems]
        """The decorators in the order in which they are put around beans: the outermost is last."""
        self.inner_of: dict[int, int] = {}
        """The decorated bean of each decorator's bean."""
        self.problems_of: dict[int, dict[Problem, None]] = {}
        """The reasons why decorators cannot be put around a bean, by its key."""
        self._definitions, self._index, self._bound = definitions, index, bound
        self._outer: dict[tuple[int, int, Any], int] = {}

    def undecorated(self, key: int) -> int:
        """Return the innermost bean of a chain of decorators; a bean without decorators is returned as it is."""
        while key in self.inner_of:
            key = self.inner_of[key]
        return key

    def place_of(self, pair: tuple[int, str | None]) -> int:
        """Return the place of a bean in lists: that of the bean that it decorates."""
        return self.undecorated(pair[0])

    def put_around_all(self, decorator: BeanDecorator, bindings: Iterable[tuple[Any, str | None, Any]]) -> bool:
        """Put a decorator in the place of all beans of its type. Return False if there are none.

        `bindings` are interface, name and implementation.
        """
        found: dict[tuple[int, Any], None] = {}
        for form in [each for each in self._index if decorator.matches(each)]:
            for key, name in self._index[form]:
                if decorator.takes(name):
                    found.setdefault((key, self._with_arguments(decorator, key, form)))
        for key, form in found:
            if not self._is_around(decorator, key):
                self._replace(key, form, decorator, bindings)
        return bool(found)

    def _is_around(self, decorator: BeanDecorator, key: int) -> bool:
        """Return True if a bean is this decorator, or a chain that contains it: a derived bean has them all."""
        while key in self.inner_of:
            if self._definitions[key].source is decorator.definition.source:
                return True
            key = self.inner_of[key]
        return False

    def _with_arguments(self, decorator: BeanDecorator, key: int, form: Any) -> Any:
        """Return the decorated type of a bean, with its type arguments where the decorator takes all of them."""
        if form != decorator.mark.wanted or not decorator.is_open:
            return form
        forms = forms_of(self._definitions[self.undecorated(key)].provides)
        return next((each for each in forms if each != form and decorator.matches(each)), form)

    def _replace(
        self, key: int, form: Any, decorator: BeanDecorator, bindings: Iterable[tuple[Any, str | None, Any]]
    ) -> None:
        """Put a decorator in the place of a bean, for lookups of this type and of its base classes."""
        if (outer := self._around(decorator, key, form)) is None:
            return
        inner = self._definitions[key]
        wanted, own, forms = set(forms_of(form)), forms_of(self._definitions[outer].provides), forms_of(inner.provides)
        # Also types that both have, but not the concrete class: a lookup of that gives the bean itself.
        replaced = wanted | (set(own) & set(forms) - {plain(inner.provides)})

        def put(each: Any) -> None:
            pairs = self._index[each]
            self._index[each] = [(outer if one == key and decorator.takes(name) else one, name) for one, name in pairs]

        for each in replaced & self._index.keys():
            put(each)
        for each in own:
            if each not in replaced and each not in forms and is_key(each):
                self._index.setdefault(each, []).append((outer, inner.name))
        for interface, name, implementation in bindings:
            is_meant = interface in replaced or implementation in wanted
            if is_meant and self._bound.get((interface, name)) == key and decorator.takes(name):
                self._bound[interface, name] = outer
                put(interface)

    def outermost(self, key: int, wanted: Any) -> int:
        """Return the outermost decorator of a bean that was derived for this type, or the bean itself."""
        found = key
        for decorator in self.usable:
            if decorator.matches(wanted) and decorator.takes(None):
                around = self._around(decorator, found, wanted)
                found = found if around is None else around
        if found != key and wanted in self._index:
            self._index[wanted] = [(found if one == key else one, name) for one, name in self._index[wanted]]
        return found

    def _around(self, decorator: BeanDecorator, key: int, form: Any) -> int | None:
        """Return the decorator of a bean, and add it to the graph; None if the bean cannot be decorated."""
        inner = self._definitions[key]
        if problems := dict.fromkeys(decorator.problems_around(inner)):
            self.problems_of.setdefault(key, {}).update(problems)
            return None
        place = id(decorator), key, form
        if place not in self._outer:
            self._outer[place] = outer = len(self._definitions)
            self._definitions.append(decorator.around(inner, form))
            self.inner_of[outer] = key
        return self._outer[place]
