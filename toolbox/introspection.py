"""Reads Python objects: types and annotations, keys and names of beans, signatures, local names, empty bodies.

Annotations are unwrapped, and resolved where they are text. Local names of a function are available only while it
runs; `local_names` collects them then. Not here: the meaning of parameters (`di.beans`, `tools.specification`,
`services.parameter_roles`).
"""

from __future__ import annotations

import abc
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from typing_extensions import TypeAliasType as BackportedAlias
from typing_extensions import TypeIs, is_protocol

A = TypeVar("A", bound=Callable[..., Any])

_ALIASES: tuple[Any, ...] = tuple({BackportedAlias, getattr(typing, "TypeAliasType", BackportedAlias)})
_NOT_A_KEY = frozenset({object, abc.ABC, typing.Generic, typing.Protocol})


# --- types and annotations


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """The parts of an annotation.

    `type` is the type itself, `metadata` the metadata of `Annotated`, innermost first. `optional` is True if the type
    was in a union with None.
    """

    type: Any
    metadata: tuple[object, ...]
    optional: bool


def is_class(form: object) -> bool:
    """Return True for a class without type arguments. `isinstance(list[int], type)` is True on Python 3.11."""
    return issubclass(type(form), type)


def unwrapped(annotation: Any) -> Unwrapped:
    """Return the parts of an annotation: unwraps `Annotated`, `| None` and aliases in any order."""
    if is_class(annotation):
        return Unwrapped(annotation, (), False)
    metadata: tuple[object, ...] = ()
    optional = False
    while True:
        if get_origin(annotation) is Annotated:
            metadata = (*annotation.__metadata__, *metadata)
            annotation = annotation.__origin__
        elif (resolved := without_alias(annotation)) is not annotation:
            annotation = resolved
        elif is_union(annotation) and type(None) in get_args(annotation):
            optional = True
            rest = tuple(each for each in get_args(annotation) if each is not type(None))
            annotation = rest[0] if len(rest) == 1 else typing.Union[rest]  # noqa: UP007 - of a tuple made here
        else:
            return Unwrapped(plain(annotation), metadata, optional)


def metadata_of(annotation: Any) -> tuple[object, ...]:
    """Return the metadata of `Annotated`, also inside `| None`."""
    return unwrapped(annotation).metadata


def admits_none(annotation: Any) -> bool:
    """Return True if None is a value of the type: `T | None`, `Any`, `object`, None itself."""
    inner = unwrapped(annotation)
    if inner.optional or inner.type in (Any, object, None, types.NoneType):
        return True
    if isinstance(inner.type, typing.NewType):
        return admits_none(inner.type.__supertype__)
    return is_union(inner.type) and any(admits_none(each) for each in get_args(inner.type))


def plain(annotation: Any) -> Any:
    """Return the type itself: without `Annotated`, with aliases resolved, and `typing.List[T]` as `list[T]`."""
    if is_class(annotation):
        return annotation
    while True:
        if get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        elif (resolved := without_alias(annotation)) is not annotation:
            annotation = resolved
        else:
            break
    origin = get_origin(annotation)
    if isinstance(origin, type) and origin.__module__ == "builtins" and not isinstance(annotation, types.GenericAlias):
        return types.GenericAlias(origin, get_args(annotation))
    return annotation


def without_alias(annotation: Any) -> Any:
    """Return the value of an alias with its type arguments; other annotations unchanged."""
    if isinstance(annotation, _ALIASES):
        return annotation.__value__
    alias = get_origin(annotation)
    if isinstance(alias, _ALIASES):
        return substitute(alias.__value__, dict(zip(alias.__type_params__, get_args(annotation), strict=True)))
    return annotation


def is_hashable(annotation: Any) -> bool:
    """Return True if the annotation can be a key. Metadata of `Annotated` may be unhashable."""
    try:
        hash(annotation)
    except TypeError:
        return False
    return True


def is_key(form: Any) -> bool:
    """Return True if beans can be found by this type. All objects are instances of `object`, and ABCs of `ABC`."""
    return is_hashable(form) and form is not Any and form not in _NOT_A_KEY


def is_union(annotation: Any) -> bool:
    """Return True for `A | B` and `Union[A, B]`."""
    return not is_class(annotation) and get_origin(annotation) in (typing.Union, types.UnionType)


def with_lists(annotation: Any) -> Any:
    """Return the annotation with `list[T]` for `collections.abc.Collection[T]`, which pydantic does not support."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Collection or origin is Collection:
        return types.GenericAlias(list, (with_lists(arguments[0]) if arguments else Any,))
    if origin is Annotated:
        return Annotated[(with_lists(arguments[0]), *annotation.__metadata__)]
    if is_union(annotation) and any(with_lists(each) is not each for each in arguments):
        return typing.Union[tuple(with_lists(each) for each in arguments)]  # noqa: UP007 - of a tuple made here
    return annotation


_PLAIN_DATA = (str, int, bool, float, types.NoneType, bytes, dict, list)
_PLAIN_COLLECTIONS = (dict, list, set, frozenset)


def is_plain_data(annotation: Any) -> bool:
    """Return True for `str`, `int` and the like, and for collections and unions of them.

    Texts that show these types are equal only if the types are.
    """
    if is_class(annotation):
        return any(annotation is each for each in _PLAIN_DATA)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or not arguments:
        return annotation is None
    if origin is Literal:
        return all(type(each) in (bool, int, str) for each in arguments)
    return (origin in _PLAIN_COLLECTIONS or is_union(annotation)) and all(map(is_plain_data, arguments))


def class_of(form: Any) -> Any:
    """Return the class of a type: `Repository` for `Repository[User]`."""
    return form if is_class(form) else get_origin(form) or form


def parameters_of(form: Any) -> tuple[Any, ...]:
    """Return the free type variables of a type."""
    return tuple(getattr(form, "__parameters__", ())) if not isinstance(form, TypeVar) else (form,)


def substitute(annotation: Any, arguments: Mapping[Any, Any]) -> Any:
    """Return the annotation with type variables replaced; variables without an argument are kept."""
    if isinstance(annotation, TypeVar):
        return arguments.get(annotation, annotation)
    open_ones = parameters_of(annotation)
    if not arguments or not open_ones or isinstance(annotation, type):
        return annotation
    return annotation[tuple(arguments.get(each, each) for each in open_ones)]


def with_self(annotation: Any, cls: type[Any]) -> Any:
    """Return the annotation with `cls` for `Self`."""
    return with_types(annotation, {typing.Self: cls})


def with_types(annotation: Any, types: Mapping[Any, Any]) -> Any:
    """Return the annotation with other types at the places of these, also inside of others."""
    if is_hashable(annotation) and annotation in types:
        return types[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    filled = tuple(with_types(each, types) for each in arguments)
    if all(new is old for new, old in zip(filled, arguments, strict=True)):
        return annotation
    if origin is Annotated:
        return Annotated[(filled[0], *annotation.__metadata__)]
    generic: Any = typing.Union if is_union(annotation) else origin
    return generic[filled]


def opened(cls: Any) -> Any:
    """Return a generic class with its type variables, `Repository[T]` for `Repository`; others unchanged."""
    own = parameters_of(cls) if isinstance(cls, type) else ()
    generic: Any = cls
    return generic[own] if own else cls


def forms_of(form: Any) -> tuple[Any, ...]:
    """Return the type and its supertypes, the type first: base classes, and generic bases with arguments."""
    if is_class(form):
        bases = form.__mro__
        for base in bases:
            if "__orig_bases__" in base.__dict__:
                break
        else:
            return tuple([base for base in bases if base not in _NOT_A_KEY])
    if is_union(form):  # a value of a union has the types that all members have
        first, *others = (forms_of(each) for each in get_args(form))
        return (form, *(each for each in first if all(each in other for other in others)))
    found: dict[Any, None] = {}
    for each in _walk_form(plain(form)):
        if each not in _NOT_A_KEY:
            found.setdefault(each)
    return tuple(found)


def _walk_form(form: Any) -> Iterator[Any]:
    yield form
    cls = class_of(form)
    if not isinstance(cls, type) or is_union(form):
        return
    # In MRO order, so that closer types come first; each class is followed by its generic bases.
    arguments = {cls: dict(zip(parameters_of(cls), get_args(form), strict=False))}
    for base in cls.__mro__:
        yield base
        known = arguments.get(base, {})
        for generic in vars(base).get("__orig_bases__", ()):
            origin = get_origin(generic)
            if not isinstance(origin, type) or origin in _NOT_A_KEY:
                continue
            filled = substitute(generic, known)
            arguments.setdefault(origin, dict(zip(parameters_of(origin), get_args(filled), strict=False)))
            yield filled


def arguments_for(form: Any, base: type[Any]) -> dict[Any, Any]:
    """Return the type arguments of `base` in its subclass `form`."""
    for each in _walk_form(plain(form)):
        if get_origin(each) is base:
            return dict(zip(parameters_of(base), get_args(each), strict=False))
    return {}


def fitted(opened_form: Any, wanted: Any) -> dict[Any, Any] | None:
    """Return type arguments that turn the generic type into the wanted type, or None if there are none."""
    if get_origin(opened_form) is not get_origin(wanted) or get_origin(wanted) is None:
        return None
    found: dict[Any, Any] = {}
    for here, there in zip(get_args(opened_form), get_args(wanted), strict=False):
        if isinstance(here, TypeVar):
            if found.setdefault(here, there) != there or not _allows(here, there):
                return None
        elif here != there:
            return None
    return found


def _allows(variable: TypeVar, argument: Any) -> bool:
    bound, cls = variable.__bound__, class_of(argument)
    if isinstance(bound, type) and isinstance(cls, type):
        return bound in cls.__mro__
    return not variable.__constraints__ or argument in variable.__constraints__


def unfit(interface: Any, implementation: Any) -> str:
    """Return the reason why a type does not implement an interface, or ""."""
    wanted, given = class_of(interface), class_of(implementation)
    if not (isinstance(wanted, type) and isinstance(given, type)) or wanted in given.__mro__:
        return ""
    if not is_protocol(wanted):
        return "" if issubclass(given, wanted) else f"{type_name(given)} is not a subclass of {type_name(wanted)}"
    if hasattr(given, "__getattr__"):
        return ""
    # Instances may have the attributes that a Protocol annotates; its methods are those of the class.
    bases = [base for base in wanted.__mro__ if is_protocol(base)]
    methods = dict.fromkeys(name for base in bases for name, each in vars(base).items() if inspect.isfunction(each))
    # Not with `hasattr`, which also finds the methods of the metaclass, such as `__call__`.
    known = {name for base in given.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    missing = [name for name in methods if name not in _OF_ALL_PROTOCOLS | known]
    return f"{type_name(given)} has no {', '.join(missing)}, which {type_name(wanted)} requires" if missing else ""


_OF_ALL_PROTOCOLS = frozenset({"__init__", "__new__", "__subclasshook__", "__class_getitem__", "__init_subclass__"})


# --- names


def type_name(form: Any) -> str:
    """Return the readable name of a type: `Payments`, `Repository[User]`, `str | None`."""
    if form is type(None) or form is None:
        return "None"
    if is_union(form):
        return " | ".join(type_name(each) for each in get_args(form))
    origin = None if is_class(form) else get_origin(form)
    if origin is Annotated:
        return type_name(form.__origin__)
    arguments = get_args(form) if origin is not None else ()
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None and arguments:
        inner = ", ".join(type_name(each) if each is not Ellipsis else "..." for each in arguments)
        return f"{type_name(origin)}[{inner}]"
    name = getattr(form, "__qualname__", None) or getattr(form, "__name__", None)
    # The text before `<locals>.` is the function in which the class was defined.
    return str(name).rpartition("<locals>.")[2] if name else str(form).removeprefix("typing.")


def snake_case(form: Any) -> str:
    """Return the provider name of a type: `http_client` for `HTTPClient`, `repository_user` for `Repository[User]`."""
    text = type_name(form) if not is_class(form) and get_origin(form) else type_name(form).rpartition(".")[2]
    text = _NEXT_WORD.sub("_", text)
    return (text if text.isidentifier() else re.sub(r"\W+", "_", text)).strip("_").lower() or "bean"


_NEXT_WORD = re.compile(r"(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z\d])(?=[A-Z])")


# --- functions


EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Unresolved:
    """An annotation with a name that cannot be resolved."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: its annotation (resolved, `EMPTY` or `Unresolved`) and its default (or `EMPTY`)."""

    name: str
    annotation: Any
    default: Any
    kind: Any

    @property
    def is_variadic(self) -> bool:
        """Return True for `*args` and `**kwargs`."""
        return self.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @property
    def metadata(self) -> tuple[object, ...]:
        """Return the metadata of `Annotated`, also inside `| None`."""
        return metadata_of(self.annotation)


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function in order, and its return annotation (resolved, `EMPTY` or `Unresolved`)."""

    parameters: tuple[Parameter, ...]
    returns: Any


def read_signature(
    function: Callable[..., Any], known: Mapping[str, Any] | None = None, nearer: Mapping[str, Any] | None = None
) -> Signature:
    """Return the signature of `function`.

    `known` are additional names for annotations. `nearer` are names that take precedence over those of the module,
    for example local names of the enclosing function. For an unbound method, the parameters include `self`.
    """
    plain = inspect.unwrap(function)
    declared, returns = declared_signature(plain)
    if inspect.ismethod(function) and not inspect.ismethod(plain):  # the function that its wrapper calls is not bound
        declared = declared[1:]
    where = getattr(plain, "__func__", plain)
    names = getattr(where, "__globals__", None) or vars(sys.modules.get(where.__module__, typing))
    if nearer:
        names = {**names, **nearer}
    parameters = tuple(
        Parameter(each.name, resolve(each.annotation, names, known), each.default, each.kind) for each in declared
    )
    return Signature(parameters, resolve(returns, names, known))


def declared_signature(function: Callable[..., Any]) -> tuple[list[Parameter], Any]:
    """Return the parameters and the return annotation of `function`, as declared. Raises as `inspect.signature`."""
    signature = inspect.signature(function)
    found = [Parameter(each.name, each.annotation, each.default, each.kind) for each in signature.parameters.values()]
    return found, signature.return_annotation


def resolve(annotation: Any, names: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> Any:
    """Return the annotation with all text in it evaluated, or `Unresolved` if a name is missing."""
    if annotation is EMPTY or isinstance(annotation, type):
        return annotation
    if isinstance(annotation, str) and isinstance(named := names.get(annotation), type):
        return named
    holder = SimpleNamespace(__annotations__={"it": annotation})
    local = {name: value for name, value in (known or {}).items() if name not in names}
    # Evaluation adds `__builtins__` to the names. Names of a module already have it and need no copy.
    namespace = names if isinstance(names, dict) and "__builtins__" in names else dict(names)
    try:
        return typing.get_type_hints(holder, namespace, local, include_extras=True)["it"]
    except Exception as error:  # user annotations may raise any error
        text = annotation if isinstance(annotation, str) else repr(annotation)
        return Unresolved(text, str(error) or type(error).__name__)


def is_number(value: object) -> TypeIs[int | float]:
    """Return True for a finite or infinite number; not for True and False, which are integers in Python."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def is_count(value: object, least: int = 0) -> TypeIs[int]:
    """Return True for an integer that is at least `least`; not for True and False."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def checked_limit(limit: object) -> int:
    """Return how many items a list may have, at most what each database can count. Raises `ValueError` for others."""
    if not is_count(limit):
        raise ValueError(f"invalid limit={limit!r}; use 0 or more")
    return min(limit, 10**9)


def takes(function: object, count: int) -> bool:
    """Return True if `function` accepts `count` positional arguments, or if its signature is unknown."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def method_takes(cls: type[Any], name: str, count: int) -> bool:
    """Return True if a method accepts `count` positional arguments besides `self`, or if its signature is unknown."""
    member = inspect.getattr_static(cls, name, None)
    if member is None:  # an attribute that the class creates on demand
        return True
    bound = 0 if isinstance(member, staticmethod) or not hasattr(member, "__get__") else 1
    return takes(getattr(member, "__func__", member), count + bound)


# --- marks of decorators

_WITHOUT_MARKS = frozenset(
    {
        *(bool, bytes, dict, float, frozenset, int, list, property, set, str, tuple, types.NoneType),
        *(types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType),
        *(types.MethodDescriptorType, types.WrapperDescriptorType),
    }
)


def may_be_marked(member: object) -> bool:
    """Return False for members of classes that have no mark, such as texts: most members, and quick to see."""
    kind = type(member)
    return bool(member.__dict__) if kind is FunctionType else kind not in _WITHOUT_MARKS


def may_be_marked_in(cls: type[Any]) -> list[tuple[str, Any]]:
    """Return the members of a class for which `may_be_marked` is true, with their names; not those of its bases."""
    if cls is typing.Protocol or cls is typing.Generic:
        return []
    return [(name, member) for name, member in vars(cls).items() if may_be_marked(member)]


_DECORATOR = "__toolbox_decorator__"


@dataclass(frozen=True, slots=True)
class BareDecorator:
    """A decorator that was used without its parentheses: its argument is the function below it."""

    name: str
    function: object


def name_decorator(name: str, apply: A, argument: object) -> A:
    """Return `apply`, which a decorator returns for its first argument, so that `bare_decorator` recognizes it."""
    setattr(apply, _DECORATOR, BareDecorator(name, argument))
    return apply


def bare_decorator(member: object) -> BareDecorator | None:
    """Return the decorator if `member` is not a function, but the result of a decorator without its parentheses.

    `@toolbox` above a function calls `toolbox(function)`, whose result still waits for a function.
    """
    found = getattr(member, _DECORATOR, None)
    return found if isinstance(found, BareDecorator) else None


# --- bodies

# Python does not say whether a function is only declared, and its source is not always there. But a function without a
# body has the instructions that this version of Python compiles one of these to.
_EMPTY_BODIES = (
    *("...", "pass", "return", "return None", "return ..."),
    *("raise NotImplementedError", "raise NotImplementedError()", "raise NotImplementedError('')"),
)


@functools.cache
def _compile_empty_bodies() -> frozenset[bytes]:
    """Return the instructions of functions without a body."""
    found = set()
    for kind in ("def", "async def"):
        for text in (*_EMPTY_BODIES, "'doc'", *(f"'doc'; {each}" for each in _EMPTY_BODIES)):
            names: dict[str, Any] = {}
            exec(f"{kind} function(): {text}", names)
            found.add(names["function"].__code__.co_code)
    return frozenset(found)


def has_body(function: Any) -> bool:
    """Return False for a function that consists of `...`, `pass`, a docstring or `raise NotImplementedError`."""
    code = function.__code__
    if code.co_code not in _compile_empty_bodies() or code.co_names not in ((), ("NotImplementedError",)):
        return True
    # Instructions name constants by their numbers: `return 5` and `return None` have the same ones.
    of_empty_bodies = {repr(None), repr(...), repr(function.__doc__)}
    raises = bool(code.co_names)  # with any text
    return any(repr(each) not in of_empty_bodies and not (raises and isinstance(each, str)) for each in code.co_consts)


# --- local names


def local_names(functions: Iterable[Any], frame: FrameType | None) -> dict[str, Any]:
    """Return the local names that the annotations of `functions` use, with their values.

    Text annotations cannot be resolved after the enclosing function returned. The names are looked up in `frame` and
    in the calling frames of the same module.
    """
    local = [each for each in functions if "<locals>" in getattr(each, "__qualname__", "")]
    annotations = [note for each in local for note in getattr(each, "__annotations__", {}).values()]
    wanted = {name for note in annotations for text in _texts_in(note) for name in _names_in(text)}
    modules = [getattr(each, "__globals__", None) for each in local]
    found: dict[str, Any] = {}
    while wanted and frame is not None:
        if any(frame.f_globals is each for each in modules):  # skip frames of other modules
            if frame.f_code.co_name == "<module>":
                break
            here = wanted.intersection(frame.f_locals)  # since 3.13 its keys() are a list
            found |= {name: frame.f_locals[name] for name in here}
            wanted -= here
        frame = frame.f_back
    return found


def names_around(function: Any) -> dict[str, Any]:
    """Return the `local_names` of `function` if its enclosing function still runs on this thread."""
    around = getattr(function, "__qualname__", "").rpartition(".<locals>.")[0]
    frame = sys._getframe(1) if around else None
    while frame is not None and (frame.f_code.co_qualname != around or frame.f_globals is not function.__globals__):
        frame = frame.f_back
    return local_names([function], frame)


def _texts_in(annotation: object) -> Iterator[str]:
    if isinstance(annotation, str):
        yield annotation
    elif isinstance(annotation, typing.ForwardRef):
        yield annotation.__forward_arg__
    elif get_origin(annotation) is not typing.Literal:
        for each in get_args(annotation):
            yield from _texts_in(each)


def _names_in(text: str) -> Iterator[str]:
    try:
        code: CodeType = compile(text, "<annotation>", "eval")
    except SyntaxError:
        return
    yield from code.co_names
    for constant in code.co_consts:  # a nested quoted name
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
