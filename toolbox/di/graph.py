"""Finds the bean for each injection point: definitions and bindings become a graph.

Not here: checks of the whole graph (`graph_checks`), fixes for missing beans (`problem_texts`), the graph as data
(`descriptions`), creating beans (`resolvers`, `scopes`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import GenericAlias
from typing import Any, Protocol, get_args, get_origin

from ..errors import AmbiguousBeanError, IllegalConfigurationError, MissingBeanError, Problem
from ..introspection import (
    class_of,
    fitted,
    forms_of,
    is_hashable,
    is_key,
    is_union,
    opened,
    parameters_of,
    plain,
    snake_case,
    type_name,
    unfit,
)
from ..security import SecurityIdentity
from .beans import BeanDefinition, FactoryKind, open_variables, read_class
from .conditions import LeftOut
from .decorating import BeanDecorator, Decorations
from .decorators import Scope
from .injection_points import MISSING, InjectionPoint, Names, PointShape, name_problem, point_of
from .problem_texts import (
    NearMisses,
    find_similar,
    find_wider_producer,
    identity_fix,
    left_out_fix,
    suggest_fix,
    wanted_text,
    web_request_fix,
)
from .settings_beans import is_settings
from .values import DEFAULT, BeanDict, BeanList, Constant, LazyBean, NotFound, SingleBean, Value, beans_in


@dataclass(frozen=True, slots=True)
class Registration:
    """The result of reading a registered object.

    `implies` are further objects to register. `check` yields the problems of the object when all beans are known.
    `called` describes a function that the container calls itself.
    `left_out` says why the object is not registered. `decorator` is a class with `@decorates`.
    """

    definitions: tuple[BeanDefinition, ...]
    implies: tuple[object, ...] = ()
    check: Callable[[BeanGraph], Iterable[Problem]] | None = None
    called: tuple[Any, ...] = ()
    left_out: LeftOut | None = None
    decorator: BeanDecorator | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """Arguments of `bind(interface, implementation, name)`."""

    interface: Any
    implementation: Any
    name: str | None = None


class NamedType(Protocol):
    """The rules of a type whose beans have separate names, such as `ChatModel`."""

    def name_of(self, name: str | None) -> str:
        """Return the name of the bean that a point with this name gets; None stands for no name."""
        ...

    def problem(self, name: str | None, where: str) -> Problem | None:
        """Return the problem of a point that requests the bean with this name, or None."""
        ...

    def missing(self, name: str | None) -> BeanDefinition | None:
        """Return a bean that is added for a name that no bean has, or None."""
        ...


MAX_NESTING = 10
"""How many type arguments can be inside each other in a bean of a generic class: `Box[list[int]]` has two."""

_NOTHING = (NotFound(), BeanList(()), BeanList((), as_tuple=True), BeanDict(()))


@dataclass(frozen=True, slots=True)
class Bean:
    """A definition in its graph: its key, and the values of its injection points.

    `holds` are the beans required to create this bean, with their injection points; `held` are their keys.
    """

    key: int
    definition: BeanDefinition
    needs: tuple[tuple[InjectionPoint, Value], ...]
    behind: tuple[tuple[InjectionPoint, Value], ...] = ()
    holds: tuple[tuple[InjectionPoint, int], ...] = field(init=False, repr=False, compare=False)
    held: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        holds = tuple((point, bean) for point, value in self.needs + self.behind for bean in beans_in(value))
        object.__setattr__(self, "holds", holds)
        object.__setattr__(self, "held", tuple(bean for _, bean in holds))


class BeanGraph:
    """All beans of a container and their dependencies.

    Only settings, generic classes with arguments and what `on_request` returns are added after construction, also by
    lookups of several threads: by `resolve…`, `find…` and `problems_of`. These hold the lock, and complete `beans`
    before they return; methods with an underscore are called with the lock held. `beans` is replaced when it has all
    that its beans hold. Read it once where two loops must see the same beans. It may have beans that cannot be created:
    the start checks all of them, and each lookup those that it has added (`graph_checks`).
    """

    def __init__(
        self,
        definitions: Iterable[BeanDefinition],
        bindings: Iterable[Binding] = (),
        names: Names | None = None,
        on_request: Callable[[Any], BeanDefinition | None] | None = None,
        left_out: Iterable[LeftOut] = (),
        decorators: Iterable[BeanDecorator] = (),
        named_types: Mapping[Any, NamedType] | None = None,
    ) -> None:
        self.names, self._on_request, self._named_types = names or {}, on_request, named_types or {}
        self.left_out = list(left_out)
        self._lock = threading.RLock()
        self.definitions: list[BeanDefinition] = []
        self._short_names: list[str] = []
        self._index: dict[Any, list[tuple[int, str | None]]] = {}
        self._open: list[int] = []
        self._unions: list[int] = []
        self.templates: set[int] = set()
        self._derived: dict[Any, int] = {}
        self._bound: dict[tuple[Any, str | None], int] = {}
        self._bound_open: dict[tuple[Any, str | None], int] = {}
        self._absent_callers: dict[int, bool] = {}
        self.binding_problems: list[Problem] = []
        self.decorations = Decorations(decorators, self.definitions, self._index, self._bound)
        self._keys = {definition.identity: self._add(definition) for definition in definitions}
        self.registered = len(self.definitions)
        assert len(self._keys) == self.registered, "two definitions are copies of one"
        bindings = list(bindings)
        self._bind_all(bindings)
        self._decorate_all(bindings)
        self._beans: tuple[Bean, ...] = ()
        self._complete_beans()

    def _add(self, definition: BeanDefinition, *, derived: bool = False) -> int:
        key = len(self.definitions)
        self.definitions.append(definition)
        if open_variables(definition):
            self._open.append(key)
            if any(parameters_of(point.whole) for point in definition.needs):
                # It can be created only with type arguments.
                self.templates.add(key)
                return key
        if is_union(definition.provides):
            self._unions.append(key)
        # A derived bean is found only by its exact type, and is not added to lists.
        for form in (plain(definition.provides),) if derived else forms_of(definition.provides):
            if is_key(form) and form not in definition.not_as:
                self._index.setdefault(form, []).append((key, definition.name))
        return key

    # --- decorators

    def _decorate_all(self, bindings: Sequence[Binding]) -> None:
        """Put each decorator in the place of the beans of its type."""
        for decorator in self.decorations.usable:
            wanted, name = decorator.mark.wanted, decorator.mark.name
            if not decorator.is_open:
                self._matching(wanted)  # a generic class with these type arguments becomes a bean
            targets = [(plain(each.interface), each.name, plain(each.implementation)) for each in bindings]
            if self.decorations.put_around_all(decorator, targets):
                continue
            if any(map(decorator.matches, [form for key in self._open for form in self._opened_forms(key)])):
                continue  # its beans are added when they are requested
            what = f"no bean provides {wanted_text(replace(point_of(wanted, ''), name=name))}, which it decorates"
            absent = "; ".join(map(str, self.left_out_for(wanted)))
            fix = "register one, or remove the decorator"
            self.decorations.problems.append(Problem(decorator.label, f"{what}: {absent}" if absent else what, fix))

    def _opened_forms(self, key: int) -> tuple[Any, ...]:
        return forms_of(opened(self.definitions[key].provides))

    # --- bindings

    def _bind_all(self, waiting: list[Binding]) -> None:
        """Bind each interface, after those among the implementations."""
        while waiting:
            interfaces = {plain(each.interface) for each in waiting}
            later = [
                each
                for each in waiting
                if is_hashable(form := plain(each.implementation)) and form in interfaces - {plain(each.interface)}
            ]
            is_cycle = len(later) == len(waiting)
            for each in waiting:
                if is_cycle or each not in later:
                    self._bind(each)
            waiting = [] if is_cycle else later

    def _bind(self, binding: Binding) -> None:
        interface = plain(binding.interface)
        where = f"bind({type_name(binding.interface)}, {type_name(binding.implementation)})"
        if (problem := name_problem(binding.name, where)) is not None:
            self.binding_problems.append(problem)
        found = self._implementing(binding)
        if found == NotFound() and (absent := self.left_out_for(binding.implementation)):
            # The binding is left out with its implementation.
            self.left_out += [replace(each, provides=interface) for each in absent]
            return
        if isinstance(found, NotFound):
            self.binding_problems.append(self._unbound(binding, found, where))
            return
        of_function = inspect.isroutine(binding.implementation)
        given = self.definitions[found.bean].provides if of_function else binding.implementation
        if reason := unfit(interface, given):
            fix = (
                f"bind a class that implements it; for a fake, use register_instance(…, as_type={type_name(interface)})"
            )
            self.binding_problems.append(Problem(where, reason, fix))
            return
        key, bound = found.bean, self._bound
        filled = self._filled(key, interface) if key in self._open else None
        if filled is not None:
            key = filled
        elif key in self._open:
            self._bound_open.setdefault((interface, binding.name), key)
            bound = self._bound_open if key in self.templates else bound
        earlier = bound.setdefault((interface, binding.name), key)
        if earlier != key:
            what = f"{type_name(interface)} is already bound to {self.definitions[earlier].label}"
            self.binding_problems.append(Problem(where, what, "remove one of the bindings, or give them names"))
            return
        pairs = self._index.setdefault(interface, [])
        # Lists are in registration order. The implementation can already be listed by its name.
        if key not in self.templates and (binding.name is not None or key not in (each for each, _ in pairs)):
            pairs.append((key, binding.name))
            pairs.sort(key=self.decorations.place_of)

    def _implementing(self, binding: Binding) -> SingleBean | NotFound:
        """Return the bean that provides the implementation of a binding."""
        if inspect.isroutine(binding.implementation):
            return _only(key for key, each in enumerate(self.definitions) if each.source == binding.implementation)
        found = self._choose(binding.implementation, None)
        if isinstance(found, NotFound) and binding.name is not None:
            named = self._choose(binding.implementation, binding.name)
            found = named if isinstance(named, SingleBean) else found
        if found == NotFound():
            found = _only(key for key in self._open if self.definitions[key].provides is binding.implementation)
        return found

    def _unbound(self, binding: Binding, found: NotFound, where: str) -> Problem:
        implementation = type_name(binding.implementation)
        if found.candidates:
            labels = ", ".join(self.definitions[key].label for key in found.candidates)
            return Problem(where, f"multiple beans provide {implementation}: {labels}", "bind one of them")
        return Problem(where, f"no bean provides {implementation}", f"register {implementation}, or bind another class")

    # --- resolving

    @property
    def beans(self) -> tuple[Bean, ...]:
        """Return all beans until now; the index of a bean is its key."""
        return self._beans

    @property
    def short_names(self) -> list[str]:
        """Return the given name of each bean, or the name of its type in snake_case."""
        known = self._short_names
        new = self.definitions[len(known) :]
        self._short_names = [*known, *(each.provider_name or each.name or snake_case(each.provides) for each in new)]
        return self._short_names

    def single(self, key: int) -> SingleBean:
        """Return the value of a bean that may be None."""
        return SingleBean(key, None) if self.definitions[key].optional else SingleBean(key)

    def __getitem__(self, key: int) -> Bean:
        return self._beans[key]

    def key_of(self, definition: BeanDefinition) -> int:
        """Return the key of a definition that was registered. The graph may have a changed copy at another place."""
        return self._keys[definition.identity]

    def _complete_beans(self) -> None:
        """Create the `Bean` of each definition, including definitions derived during this."""
        if len(self._beans) == len(self.definitions):
            return
        beans = list(self._beans)
        while len(beans) < len(self.definitions):
            key = len(beans)
            definition = self.definitions[key]
            needs = self._values_of(() if key in self.templates else definition.needs)
            if (inner := self.decorations.inner_of.get(key)) is not None:
                decorated = self.single(inner)
                needs = tuple((point, decorated if point.parameter == definition.inner else v) for point, v in needs)
            beans.append(Bean(key, definition, needs, self._values_of(definition.behind)))
        self._beans = tuple(beans)

    def _values_of(self, points: Iterable[InjectionPoint]) -> tuple[tuple[InjectionPoint, Value], ...]:
        return tuple((point, self._resolve(point)) for point in points)

    def resolve(self, point: InjectionPoint) -> Value:
        """Return the value of an injection point; add the beans that it needs."""
        with self._lock:
            value = self._resolve(point)
            self._complete_beans()
            return value

    def _resolve(self, point: InjectionPoint) -> Value:
        if point.problem is not None:
            return NotFound() if point.default is MISSING else DEFAULT
        if point.shape is PointShape.INSTANCE:
            inner = point_of(point.wants, point.where)
            name = point.name or inner.name
            value = self._resolve(replace(inner, name=name))
            if not isinstance(value, NotFound):
                return LazyBean(point.wants, name, beans_in(value))
        else:
            value = (
                self._collection(point) if point.shape is not PointShape.ONE else self._choose(point.wants, point.name)
            )
        if isinstance(value, SingleBean) and self.definitions[value.bean].optional:
            return SingleBean(value.bean, None if point.optional else point.default)
        if isinstance(value, SingleBean) and self.is_seed(value.bean):
            return SingleBean(value.bean, None if point.optional and point.default is MISSING else point.default)
        if value in _NOTHING:
            if point.default is not MISSING:
                return DEFAULT
            if point.optional and isinstance(value, NotFound):
                return Constant(None)
        return value

    def _collection(self, point: InjectionPoint) -> Value:
        # A producer of the list itself takes precedence over a list of beans.
        whole = self._choose(point.whole, point.name, derive=False)
        if isinstance(whole, NotFound) and point.shape is not PointShape.TUPLE:
            whole = self._choose(_concrete(point), point.name, derive=False)
        if isinstance(whole, SingleBean) or point.name is not None:
            return whole
        pairs = self._matching(point.wants, derive=False)
        if point.shape is not PointShape.DICT:
            return BeanList(tuple(dict.fromkeys(key for key, _ in pairs)), point.shape is PointShape.TUPLE)
        return BeanDict(tuple({name: (name, key) for key, name in pairs if name is not None}.values()))

    def resolve_type(self, wanted: Any, name: str | None, *, derive: bool = True) -> SingleBean | NotFound:
        """Return the bean for a type and a name, or the candidates if none or several match.

        A bean that nobody has registered is added, unless `derive` is False.
        """
        with self._lock:
            found = self._choose(wanted, name, derive=derive)
            self._complete_beans()
            return found

    def _choose(self, wanted: Any, name: str | None, *, derive: bool = True) -> SingleBean | NotFound:
        wanted = plain(wanted)
        if not is_key(wanted):
            return self._named(name) if name is not None and wanted in (Any, object) else NotFound()
        if (named := self._named_types.get(wanted)) is not None:
            name = named.name_of(name)
        bound = self._bound.get((wanted, name))
        if bound is None and derive and (filled := self._bound_with_arguments(wanted, name)) is not None:
            bound = self.decorations.outermost(filled, wanted)
        if bound is not None:
            return SingleBean(bound)
        pairs = self._matching(wanted, derive)
        if name is not None:
            pairs = [pair for pair in pairs if pair[1] == name]
        else:
            pairs = [pair for pair in pairs if pair[1] is None] or pairs
        keys = tuple(dict.fromkeys(key for key, _ in pairs))
        if len(keys) > 1:
            exact = [key for key in keys if self.definitions[self.decorations.undecorated(key)].provides == wanted]
            keys = tuple(exact) if len(exact) == 1 else keys
        if not keys and named is not None and derive and (added := named.missing(name)) is not None:
            keys = (self._add(added, derived=True),)
        return SingleBean(keys[0]) if len(keys) == 1 else NotFound(keys)

    def class_behind(self, cls: type[Any]) -> type[Any]:
        """Return the class of the bean that provides `cls`: a subclass, or `cls` itself, also without a single bean."""
        value = self.resolve_type(cls, None)
        found = class_of(self.definitions[value.bean].provides) if isinstance(value, SingleBean) else cls
        return found if isinstance(found, type) and cls in found.__mro__ else cls

    def _named(self, name: str) -> SingleBean | NotFound:
        """Return the bean with a name, whatever its type."""
        return _only(key for key, each in enumerate(self.definitions) if each.name == name)

    def _matching(self, wanted: Any, derive: bool = True) -> list[tuple[int, str | None]]:
        """Return the beans of a type with their names, in registration order."""
        if is_union(wanted):
            members = dict.fromkeys(plain(each) for each in get_args(wanted))
            arms = [pair for arm in members for pair in self._matching(arm, derive)]
            for key in self._unions:  # a bean that is of one of these types
                definition = self.definitions[key]
                if all(members.keys() & forms_of(plain(each)) for each in get_args(definition.provides)):
                    arms.append((key, definition.name))
            return sorted(set(arms), key=self.decorations.place_of)
        if not is_key(wanted):
            return []
        found: list[tuple[int, str | None]] = list(self._index.get(wanted, ()))
        if not found and derive:
            derived = self._derive(wanted)
            found = [] if derived is None else [(self.decorations.outermost(derived, wanted), None)]
        return found

    def _derive(self, wanted: Any) -> int | None:
        """Add and return the bean of a type of which the program has registered none; None if there cannot be one."""
        if self._on_request is not None and (own := self._on_request(wanted)) is not None:
            return self._add(own, derived=True)
        if is_settings(wanted):
            return self._add(read_class(wanted, self.names), derived=True)
        for key in self._open:
            filled = self._filled(key, wanted)
            if filled is not None:
                if self.definitions[filled].provides != wanted:
                    self._index.setdefault(wanted, []).append((filled, None))
                return filled
        return None

    def _filled(self, key: int, wanted: Any) -> int | None:
        """Return the bean of a generic class with the type arguments that give the wanted type, if there are any."""
        for form in self._opened_forms(key):
            if arguments := fitted(form, wanted):
                return self._with_arguments(key, arguments)
        return None

    def _with_arguments(self, key: int, arguments: Mapping[Any, Any]) -> int:
        definition = self.definitions[key]
        filled = definition.provides[tuple(arguments.get(each, Any) for each in open_variables(definition))]
        if filled not in self._derived:
            derived = read_class(filled, self.names, definition.scope)
            if _nesting_of(filled) > MAX_NESTING:
                derived = replace(derived, needs=(), problems=(_endless_arguments(derived),))
            self._derived[filled] = self._add(derived, derived=True)
        return self._derived[filled]

    def _bound_with_arguments(self, wanted: Any, name: str | None) -> int | None:
        """Return the bean for a generic interface with arguments that is bound to a generic class without."""
        key = self._bound_open.get((get_origin(wanted), name))
        if key is None or wanted in self._index:
            return None
        filled = self._filled(key, wanted)
        if filled is not None:
            return filled
        variables, given = open_variables(self.definitions[key]), get_args(wanted)
        # A class that does not inherit from its Protocol: its type variables have the same order.
        return (
            self._with_arguments(key, dict(zip(variables, given, strict=True)))
            if len(variables) == len(given)
            else None
        )

    # --- the identity

    def outside(self, key: int) -> Any:
        """Return the value of a bean outside of request scopes: the anonymous identity, otherwise `MISSING`."""
        if self.definitions[key].provides is not SecurityIdentity:
            return MISSING
        known = self._absent_callers.get(key)
        if known is None:
            known = self._absent_callers[key] = self._needs_request(key)
        return SecurityIdentity.anonymous() if known else MISSING

    @cached_property
    def has_callers(self) -> bool:
        """Return True if a bean has a value outside of request scopes."""
        return any(self.outside(key) is not MISSING for key in range(self.registered))

    def _needs_request(self, goal: int) -> bool:
        """Return True if a bean, or one that it holds, belongs to a request."""
        seen, todo = {goal}, [goal]
        while todo:
            bean = self._beans[todo.pop()]
            if bean.definition.scope.rule.is_in_request:
                return True
            more = {*bean.held} - seen
            seen |= more
            todo += more
        return False

    # --- seeds

    def is_seed(self, key: int) -> bool:
        """Return True for a bean whose value comes with the request scope."""
        return self.definitions[key].factory_kind is FactoryKind.SEED

    def seeds_behind(
        self, value: Value, given: Collection[Any] = (), above: tuple[int, ...] = ()
    ) -> Iterator[tuple[int, ...]]:
        """Yield the path of beans to each seed that a value needs in a request scope with the seeds `given` only.

        Seeds that may be absent, and what an `Instance` looks up later, do not count.
        """
        for key in beans_in(value):
            definition = self.definitions[key]
            if key in above or definition.provides in given:
                continue
            path = (*above, key)
            if self.is_seed(key):
                if not isinstance(value, SingleBean) or value.absent is MISSING:
                    yield path
            elif definition.scope is not Scope.APPLICATION:
                for _, inner in (*self[key].needs, *self[key].behind):
                    yield from self.seeds_behind(inner, given, path)

    # --- what can be reached

    def find_reached(self, wanted: Iterable[Any], scope: Scope) -> BeanDefinition | None:
        """Return a bean of this scope that is of one of these types, or that such a bean can get, now or when used.

        Through constructors and `Instance`. What the tools of an AI service reach is not reached by the service: it
        runs its tools itself.
        """
        todo: list[Value] = [self.resolve(point_of(each, type_name(each))) for each in wanted]
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if isinstance(value, LazyBean):
                value = self.resolve(replace(point_of(value.wanted, ""), name=value.name))
            for key in {*beans_in(value)} - seen:
                seen.add(key)
                bean = self[key]
                if bean.definition.scope is scope:
                    return bean.definition
                todo += (inner for _, inner in (*bean.needs, *bean.behind))
                todo += map(self.resolve, bean.definition.later)
        return None

    # --- lookup

    def find(self, wanted: Any, name: str | None = None) -> Value:
        """Return the value for a type and name, `NotFound` if no bean matches. Raises `AmbiguousBeanError`."""
        return self.find_at(_point_of_lookup(wanted, name))

    def find_at(self, point: InjectionPoint) -> Value:
        """Return the value of an injection point outside the graph, as `find` does."""
        value = self.resolve(point)
        if isinstance(value, NotFound) and point.problem is not None:
            raise IllegalConfigurationError([point.problem])
        if isinstance(value, NotFound) and value.candidates:
            raise AmbiguousBeanError(
                _lookup_text(point), tuple(self.definitions[key].label for key in value.candidates)
            )
        return value

    def missing(self, wanted: Any, name: str | None) -> MissingBeanError:
        """Return the error for a lookup without a bean."""
        return self.missing_at(_point_of_lookup(wanted, name))

    def missing_at(self, point: InjectionPoint) -> MissingBeanError:
        """Return the error for an injection point without a bean."""
        if (rules := self._rules_of(point)) is not None:
            of_type, name = rules
            problem = of_type.problem(name, point.where)
            fix = "" if problem is None else problem.fix
            return MissingBeanError(_lookup_text(point), (), point.where if point.parameter else "", fix)
        fix = web_request_fix(point.wants) or identity_fix(point.wants)
        if absent := self.left_out_for(point.wants):
            fix = "; ".join(map(str, absent))
        elif find_wider_producer(point.wants, self.definitions) is not None:
            fix = suggest_fix(point, (), self.definitions)
        near = NearMisses(lambda: self.near_misses(point))
        return MissingBeanError(_lookup_text(point), near, point.where if point.parameter else "", fix)

    # --- problems of one injection point

    def problems_of(self, point: InjectionPoint) -> Iterator[Problem]:
        """Yield the problems of an injection point of a tool or an endpoint; add the beans that it needs."""
        yield from self.problems_with(point, self.resolve(point))

    def problems_with(self, point: InjectionPoint, value: Value) -> Iterator[Problem]:
        """Yield the problems of an injection point with this value."""
        if point.problem is not None:
            yield point.problem
        elif (rules := self._rules_of(point)) is not None:
            of_type, name = rules
            has_default = isinstance(value, Constant)
            if not has_default and (problem := of_type.problem(name, point.where)) is not None:
                reasons = "; ".join(map(str, self.left_out_for(point.wants)))
                yield replace(problem, what=f"{problem.what}: {reasons}") if reasons else problem
        elif isinstance(value, NotFound) and value.candidates:
            candidates = [self.definitions[key] for key in value.candidates]
            names = ", ".join(each.label for each in candidates)
            wanted = wanted_text(point)
            named = next((each.name for each in candidates if each.name), None)
            bound = next((type_name(each.provides) for each in candidates if each.provides is not point.wants), None)
            if named is not None:
                fix = f'use Annotated[{wanted}, Named("{named}")]'
            elif bound is not None:
                fix = "use the class of one of them"
            else:
                fix = f'give them names, such as @produces(name="a"), and use Annotated[{wanted}, Named("a")]'
            fix += "" if bound is None else f", or call bind({wanted}, {bound})"
            yield Problem(point.where, f"multiple beans provide {wanted}: {names}", fix)
        elif isinstance(value, NotFound) and (absent := self.left_out_for(point.wants)):
            what = f"no bean provides {wanted_text(point)}: {'; '.join(map(str, absent))}"
            yield Problem(point.where, what, left_out_fix(point, absent))
        elif isinstance(value, NotFound):
            yield Problem(
                point.where,
                f"no bean provides {wanted_text(point)}",
                suggest_fix(point, self.near_misses(point), self.definitions),
            )

    def left_out_for(self, wanted: Any) -> list[LeftOut]:
        """Return what would provide a type, or is this function, but was left out by its conditions."""
        wanted = plain(wanted)
        return [each for each in self.left_out if wanted in (each.source, *forms_of(each.provides))]

    def _rules_of(self, point: InjectionPoint) -> tuple[NamedType, str | None] | None:
        """Return the rules for the names of the point's type, and the name that it requests; None without rules."""
        if point.shape is PointShape.INSTANCE:
            inner = point_of(point.wants, point.where)
            return self._rules_of(replace(inner, name=point.name or inner.name))
        wanted = plain(point.wants)
        named = self._named_types.get(wanted) if is_key(wanted) and point.shape is PointShape.ONE else None
        return None if named is None else (named, point.name)

    def near_misses(self, point: InjectionPoint) -> tuple[str, ...]:
        """Return similar beans: same type with another name, same members, or a similar name."""
        inner = point_of(point.wants, point.where) if point.shape is PointShape.INSTANCE else point
        otherwise_named = [self.definitions[key].label for key, _ in self._matching(inner.wants, derive=False)]
        return tuple(dict.fromkeys([*otherwise_named, *find_similar(inner.wants, self.definitions)]))


def _nesting_of(form: Any) -> int:
    """Return how many type arguments are inside each other."""
    arguments = get_args(form)
    return 1 + max(map(_nesting_of, arguments)) if arguments else 0


def _endless_arguments(derived: BeanDefinition) -> Problem:
    what = f"more than {MAX_NESTING} type arguments inside each other: the class needs itself with larger ones"
    return Problem(derived.label, what, "request it with arguments that do not grow")


def _point_of_lookup(wanted: Any, name: str | None) -> InjectionPoint:
    point = point_of(wanted, type_name(wanted))
    return point if name is None else replace(point, name=name)


def _lookup_text(point: InjectionPoint) -> str:
    return repr(point.wants) if isinstance(point.wants, str) else wanted_text(point)


def _concrete(point: InjectionPoint) -> Any:
    """Return the `list[T]` or `dict[str, T]` that a `Sequence[T]` or `Mapping[str, T]` can be."""
    return GenericAlias(dict, (str, point.wants)) if point.shape is PointShape.DICT else GenericAlias(list, point.wants)


def _only(keys: Iterable[int]) -> SingleBean | NotFound:
    """Return the only bean of these, or the candidates."""
    found = tuple(keys)
    return SingleBean(found[0]) if len(found) == 1 else NotFound(found)
