"""Reads what a program registers (a marked or plain class, a producer, a seed) into `BeanDefinition`s.

`inspect` and `typing` end here. Not here: the injection points of parameters (`injection_points`), which bean an
injection point gets (`graph`), making one (`resolvers`).
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar, get_args, get_origin

from typing_extensions import is_protocol

from ..bean_references import DEFAULT_SCOPE_MARK, MODEL_MARKS
from ..errors import Problem
from ..introspection import (
    EMPTY,
    Parameter,
    Unresolved,
    arguments_for,
    class_of,
    declared_signature,
    forms_of,
    is_class,
    may_be_marked_in,
    metadata_of,
    names_around,
    parameters_of,
    plain,
    read_signature,
    resolve,
    substitute,
    type_name,
    unwrapped,
    with_self,
)
from .conditions import conditions_of
from .decorators import Scope, producer_mark_of, scope_mark_of
from .injection_points import (
    MISSING,
    InjectionPoint,
    Names,
    add_type_checking_hint,
    name_in,
    point_of_parameter,
    unresolved_problem,
)
from .settings_beans import build_settings, is_settings
from .stored_beans import BeanForm


class FactoryKind(StrEnum):
    """The kinds of factories."""

    CALL = "call"
    COROUTINE = "coroutine"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"
    SEED = "seed"
    STORED = "stored"


class Stop(StrEnum):
    """Kind of the `stop` method of a class; it is called when the scope ends."""

    NONE = "none"
    SYNC = "def stop"
    ASYNC = "async def stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeanDefinition:
    """A declared bean: its type, factory and scope.

    `caches=False`: the factory itself keeps its instances for as long as `scope` says, and is asked each time.
    `make_ready` is then awaited before `factory` is called, if that returns an instance that async code must create.
    `behind` are beans it needs and gets in another way; `later` are those that it looks up when it is used, in the
    scope of its caller. `included` calls the provider of an included container.
    `inner` is the parameter of a decorator that gets the decorated bean. `optional`: the factory may return None. An
    `implicit` bean gives way where its provider's name is taken. `source` is what was registered; `problems` is what is
    wrong with the declaration by itself. `adapt` converts all instances: those of the factory, of seeds and of
    overrides. `not_as` are base types that another bean provides in its place. `provider_name` is the name of its
    provider, if that is neither `name` nor the name of its type. `is_read_at_start`: the check creates the bean, from
    the environment alone, and reports the problems that its factory raises. `identity` is shared with changed copies:
    by it the graph finds the bean of a definition that was read.
    """

    provides: Any
    factory: Callable[..., Any]
    scope: Scope = Scope.DEPENDENT
    name: str | None = None
    needs: tuple[InjectionPoint, ...] = ()
    factory_kind: FactoryKind = FactoryKind.CALL
    stop: Stop = Stop.NONE
    own_task: bool = False
    caches: bool = True
    behind: tuple[InjectionPoint, ...] = ()
    later: tuple[InjectionPoint, ...] = ()
    make_ready: Callable[[], Awaitable[None]] | None = None
    included: Any = None
    inner: str = ""
    implicit: bool = False
    optional: bool = False
    source: object = None
    problems: tuple[Problem, ...] = ()
    adapt: Callable[[Any], Any] | None = None
    not_as: tuple[Any, ...] = ()
    provider_name: str | None = None
    is_read_at_start: bool = False
    identity: object = field(default_factory=object, repr=False, compare=False)

    @property
    def label(self) -> str:
        """Return the name for messages: `Payments`, or `Payments 'card'`."""
        text = type_name(self.provides)
        return f"{text} {self.name!r}" if self.name is not None else text

    def adapted(self, instance: Any) -> Any:
        """Return what holders of the bean get for an instance of the factory, a seed or an override."""
        return instance if self.adapt is None or instance is None else self.adapt(instance)

    @property
    def is_stored(self) -> bool:
        """Return True if scopes store the instances. Dependent instances belong to the object that holds them."""
        return self.caches and self.scope is not Scope.DEPENDENT

    @property
    def is_created_in_scope(self) -> bool:
        """Return True if a scope creates and stores the instances; a seed is only stored."""
        return self.is_stored and self.factory_kind is not FactoryKind.SEED

    @property
    def is_shared(self) -> bool:
        """Return True if all who request the bean in its scope get the same instance, stored or kept by the factory."""
        return self.scope is not Scope.DEPENDENT

    @property
    def is_awaited(self) -> bool:
        """Return True if async code must create the bean."""
        awaited = (FactoryKind.COROUTINE, FactoryKind.ASYNC_GENERATOR)
        return self.factory_kind in awaited or self.make_ready is not None


# --- classes


def read_class(form: Any, names: Names | None = None, scope: Scope | None = None) -> BeanDefinition:
    """Read a class, or a generic class with arguments. Without a scope decorator, the bean is dependent."""
    cls = class_of(form)
    where = type_name(form)
    scope = scope or scope_mark_of(cls) or _default_scope(cls)
    if scope is Scope.CONVERSATION:
        stored = BeanForm(form)
        problems = (*_class_problems(cls, where), *stored.problems())
        return BeanDefinition(
            provides=form,
            factory=stored,
            scope=scope,
            factory_kind=FactoryKind.STORED,
            source=form,
            problems=problems,
        )
    needs: tuple[InjectionPoint, ...] = () if is_settings(cls) else tuple(_constructor_points(form, cls, where, names))
    return BeanDefinition(
        provides=form,
        factory=partial(build_settings, cls) if is_settings(cls) else cls,
        scope=scope,
        needs=needs,
        stop=_stop_of(cls),
        source=form,
        is_read_at_start=is_settings(cls),
        problems=tuple(_class_problems(cls, where)),
    )


def _default_scope(cls: type[Any]) -> Scope:
    """Return the scope of a class without a scope decorator."""
    if (default := getattr(cls, DEFAULT_SCOPE_MARK, None)) is not None:
        return Scope(default)
    return Scope.APPLICATION if is_settings(cls) else Scope.DEPENDENT


def _class_problems(cls: type[Any], where: str) -> Iterator[Problem]:
    if is_protocol(cls):
        implement = f"register a class that implements it and call bind({where}, …)"
        fix = f"{implement}; if it declares a service or a client, add @register_ai_service or @register_rest_client"
        yield Problem(where, "a Protocol cannot be instantiated", fix)
    elif inspect.isabstract(cls):
        abstract = ", ".join(sorted(cls.__abstractmethods__))
        yield Problem(
            where, f"the class is abstract (missing: {abstract})", "register a subclass that implements these members"
        )
    for name, member in may_be_marked_in(cls):
        if inspect.isfunction(member) and producer_mark_of(member) is not None:
            fix = "move it to a module-level function with the required beans as parameters, and register that"
            yield Problem(f"{where}.{name}", "@produces does not support methods", fix)
        if conditions_of(member):
            yield Problem(f"{where}.{name}", "@only_if does not support methods", f"put it on {where}")


def _stop_of(cls: type[Any]) -> Stop:
    definitions = [vars(base)["stop"] for base in cls.__mro__ if "stop" in vars(base)]
    declared = definitions[0] if definitions else None
    if not inspect.isfunction(declared):
        return Stop.NONE
    if any(mark in getattr(each, "__dict__", ()) for each in definitions for mark in MODEL_MARKS):
        return Stop.NONE  # a tool named `stop` runs only if a model calls it
    first, *others = inspect.signature(declared).parameters.values()
    if first.kind is inspect.Parameter.KEYWORD_ONLY or any(
        each.default is EMPTY and each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for each in others
    ):
        return Stop.NONE
    return Stop.ASYNC if inspect.iscoroutinefunction(declared) else Stop.SYNC


def _constructor_points(form: Any, cls: type[Any], where: str, names: Names | None) -> Iterator[InjectionPoint]:
    base, constructor = _constructor(cls)
    if constructor is None:
        return
    if any("__signature__" in vars(each) for each in cls.__mro__):
        constructor = cls  # as in pydantic's models: the class declares its signature
    arguments = arguments_for(form, base) if base is not cls or get_origin(form) is not None else {}
    with suppress(ValueError, TypeError):  # C code without a signature: call it without arguments
        parameters, _ = declared_signature(constructor)
        for each in parameters if constructor is cls else parameters[1:]:
            if each.is_variadic:
                continue
            owner = _declaring_class(base, constructor, each.name)
            annotation = _resolved(each.annotation, owner, names)
            if isinstance(annotation, Unresolved) and inspect.isfunction(constructor):
                annotation = _resolved(each.annotation, owner, {**(names or {}), **names_around(constructor)})
            if not isinstance(annotation, Unresolved):
                annotation = substitute(annotation, arguments)
            parameter = Parameter(each.name, annotation, each.default, each.kind)
            yield add_type_checking_hint(point_of_parameter(parameter, where), annotation, owner.__module__)


def _constructor(cls: type[Any]) -> tuple[type[Any], Callable[..., Any] | None]:
    """Return the class that defines the constructor, and the constructor function."""
    for name in ("__init__", "__new__"):
        for base in cls.__mro__:
            found = vars(base).get(name)
            # Protocol adds an `__init__` to its classes that have none.
            if found is None or getattr(found, "__module__", "") in ("typing", "typing_extensions"):
                continue
            if base not in (object, typing.Generic) and base.__module__ != "typing":
                return base, getattr(found, "__func__", found)
            break
    return cls, None


def _declaring_class(base: type[Any], constructor: Callable[..., Any], parameter: str) -> type[Any]:
    """Return the class that declares the annotation; a generated `__init__` has annotations of several classes."""
    if getattr(getattr(constructor, "__code__", None), "co_filename", "<").startswith("<"):
        for each in base.__mro__:
            if parameter in vars(each).get("__annotations__", {}):
                return each
    return base


def _resolved(annotation: Any, owner: type[Any], names: Names | None) -> Any:
    if isinstance(annotation, type):
        return annotation
    module = vars(sys.modules.get(owner.__module__, typing))
    # Names of the class or function hide names of the module.
    nearer = {name: value for name, value in vars(owner).items() if isinstance(value, type)}
    here, inside, _ = owner.__qualname__.rpartition("<locals>.")
    if inside:
        known = (names or {}).items()
        nearer |= {n: v for n, v in known if getattr(v, "__qualname__", "").rpartition("<locals>.")[0] == here}
    found = resolve(annotation, {**module, **nearer} if nearer else module, names)
    return found.type if isinstance(found, dataclasses.InitVar) else found


# --- producers

_YIELDING = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)


def yielded(form: Any) -> Any:
    """Return the type that a generator with this return annotation yields, or the annotation itself."""
    return get_args(form)[0] if get_origin(form) in _YIELDING and get_args(form) else form


def read_producer(function: Callable[..., Any], names: Names | None = None) -> BeanDefinition:
    """Read a function marked with `@produces`; an unmarked function gets a problem."""
    mark = producer_mark_of(function)
    where = type_name(function)
    made = _making_of(function)
    signature = read_signature(function, names, mark.local_names if mark else None)
    owner = getattr(function, "__self__", None)
    returns = with_self(signature.returns, owner) if isinstance(owner, type) else signature.returns
    provides, optional, problem = _produced(returns, made, where)
    problems = [problem] if problem else []
    if mark is None:
        problems = [Problem(where, "the function is not marked as a producer", "add @produces(scope=…)")]
    elif getattr(function, "__globals__", {}).get("__name__") == "contextlib":
        what = "@produces does not support context managers"
        problems = [Problem(where, what, "remove the decorator: @produces takes the generator function itself")]
    elif mark.own_task and made is not FactoryKind.ASYNC_GENERATOR:
        problems.append(Problem(where, "own_task= works only with async generators", "remove own_task="))
    named = name_in(metadata_of(returns))
    module = getattr(function, "__module__", "")
    return BeanDefinition(
        provides=provides,
        factory=function,
        scope=mark.scope if mark else Scope.DEPENDENT,
        name=named if mark is None or mark.name is None else mark.name,
        needs=tuple(
            add_type_checking_hint(point_of_parameter(each, where), each.annotation, module)
            for each in signature.parameters
            if not each.is_variadic
        ),
        factory_kind=made,
        optional=optional,
        own_task=bool(mark and mark.own_task),
        source=function,
        problems=tuple(problems),
    )


def _making_of(function: Callable[..., Any]) -> FactoryKind:
    if inspect.isasyncgenfunction(function):
        return FactoryKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return FactoryKind.GENERATOR
    return FactoryKind.COROUTINE if inspect.iscoroutinefunction(function) else FactoryKind.CALL


def _produced(returns: Any, made: FactoryKind, where: str) -> tuple[Any, bool, Problem | None]:
    """Return the type that a producer creates, if it may return None, and the problem of its return annotation."""
    if isinstance(returns, Unresolved):
        return Any, False, unresolved_problem(returns, f"{where}.return")
    if returns is EMPTY or returns is None or returns is type(None):
        problem = Problem(where, "missing return annotation", "annotate the type that the producer returns or yields")
        return Any, False, problem
    form = returns
    if made in (FactoryKind.GENERATOR, FactoryKind.ASYNC_GENERATOR):
        form = yielded(plain(returns))
        if form is plain(returns):
            kind = "Iterator" if made is FactoryKind.GENERATOR else "AsyncIterator"
            name = type_name(returns)
            what = f"the producer yields, but its return annotation is {name}"
            return form, False, Problem(where, what, f"annotate it `-> {kind}[{name}]`")
    produced = unwrapped(form)
    return produced.type, produced.optional, _unfindable(produced.type, where)


def _unfindable(form: Any, where: str) -> Problem | None:
    """Return the problem of a produced type that no injection point can request."""
    name = type_name(form)
    if form is typing.Self:
        return Problem(where, "Self needs a class method", "name the class, or register the class method")
    if isinstance(form, TypeVar) or (not is_class(form) and parameters_of(form)):
        fix = "name the type arguments; for all of them, register the generic class itself"
        return Problem(where, f"the producer returns {name}, which has free type variables", fix)
    return None


# --- names local to functions


def collect_local_classes(objects: Iterable[object]) -> dict[str, Any]:
    """Return the classes, and their bases, that were defined in functions, by name: annotations can use them."""
    found: dict[str, Any] = {}
    for each in objects:
        for form in forms_of(each):
            if isinstance(form, type) and "<locals>" in form.__qualname__:
                found.setdefault(form.__name__, form)
    return found


def seed_of(form: Any, find: Callable[[], Any] | None = None) -> BeanDefinition:
    """Return the definition of a seed; without a seed, `find()` returns the value or `MISSING`."""
    annotation = form
    name = name_in(metadata_of(annotation))
    # Implicit: a user's bean can have the same name as a seed, such as `request`.
    return BeanDefinition(
        provides=plain(form),
        factory=find or _not_given,
        scope=Scope.REQUEST,
        name=name,
        factory_kind=FactoryKind.SEED,
        implicit=True,
        source=form,
    )


def _not_given() -> Any:
    return MISSING


def open_variables(definition: BeanDefinition) -> tuple[TypeVar, ...]:
    """Return the type variables of a registered generic class without arguments."""
    form = definition.provides
    return tuple(getattr(form, "__parameters__", ())) if isinstance(form, type) and definition.source is form else ()
