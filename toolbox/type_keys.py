"""Types and resolved annotations: unwrapping, keys of beans, supertypes, readable names.

Pure functions. Not here: resolving annotations that are text (`signatures`), beans (`di.beans`).
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from typing_extensions import TypeAliasType as BackportedAlias

_ALIASES: tuple[Any, ...] = tuple({BackportedAlias, getattr(typing, "TypeAliasType", BackportedAlias)})
_NOT_A_KEY = frozenset({object, typing.Generic, typing.Protocol})


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """The parts of an annotation.

    `type` is the type itself, `metadata` the metadata of `Annotated`, innermost first. `optional` is True if the type
    was in a union with None.
    """

    type: Any
    metadata: tuple[object, ...]
    optional: bool


def unwrapped(annotation: Any) -> Unwrapped:
    """Return the parts of an annotation: unwraps `Annotated`, `| None` and aliases in any order."""
    metadata: tuple[object, ...] = ()
    optional = False
    while True:
        if get_origin(annotation) is Annotated:
            metadata = (*annotation.__metadata__, *metadata)
            annotation = annotation.__origin__
        elif (meant := _without_alias(annotation)) is not annotation:
            annotation = meant
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
    while True:
        if get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        elif (meant := _without_alias(annotation)) is not annotation:
            annotation = meant
        else:
            break
    origin = get_origin(annotation)
    if isinstance(origin, type) and origin.__module__ == "builtins" and not isinstance(annotation, types.GenericAlias):
        return types.GenericAlias(origin, get_args(annotation))
    return annotation


def _without_alias(annotation: Any) -> Any:
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


def is_union(annotation: Any) -> bool:
    """Return True for `A | B` and `Union[A, B]`."""
    return get_origin(annotation) in (typing.Union, types.UnionType)


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


def class_of(form: Any) -> Any:
    """Return the class of a type: `Repository` for `Repository[User]`."""
    return get_origin(form) or form


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


def opened(cls: Any) -> Any:
    """Return a generic class with its type variables, `Repository[T]` for `Repository`; others unchanged."""
    own = parameters_of(cls) if isinstance(cls, type) else ()
    generic: Any = cls
    return generic[own] if own else cls


def forms_of(form: Any) -> tuple[Any, ...]:
    """Return the type and its supertypes, the type first: base classes, and generic bases with arguments."""
    found: dict[Any, None] = {}
    for each in _walk(plain(form)):
        if each not in _NOT_A_KEY:
            found.setdefault(each)
    return tuple(found)


def _walk(form: Any) -> Iterator[Any]:
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
    for each in _walk(plain(form)):
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


# --- names


def type_name(form: Any) -> str:
    """Return the readable name of a type: `Payments`, `Repository[User]`, `str | None`."""
    if form is type(None) or form is None:
        return "None"
    if is_union(form):
        return " | ".join(type_name(each) for each in get_args(form))
    origin = get_origin(form)
    if origin is Annotated:
        return type_name(form.__origin__)
    arguments = get_args(form)
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
    text = type_name(form) if get_origin(form) else type_name(form).rpartition(".")[2]
    text = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", text)
    text = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", text)
    return re.sub(r"\W+", "_", text).strip("_").lower() or "bean"
