"""Fast creation of frozen, slotted data classes, for those that every tool call creates.

A frozen data class sets each attribute with `object.__setattr__`. The functions here set them on a draft instead, whose
class has the same slots and ordinary assignment, and change its class at the end. Not here: the data classes (`chat`,
`context`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")

AS_TUPLE: Mapping[str, Any] = {"as_tuple": True}
"""Metadata of a field: `with_fast_init` converts its value into a tuple."""


def with_fast_init(cls: type[T]) -> type[T]:
    """Replace the `__init__` of a frozen, slotted data class with a faster one.

    It takes the same arguments and a third of the time. Use it above `@dataclass(frozen=True, slots=True)`. Fields with
    the metadata `AS_TUPLE` become tuples.
    """
    parameters, values = ["self"], {}
    names: dict[str, Any] = {"MISSING": MISSING, "cls": cls, "draft": _draft_of(cls), "to_class": _CLASS.__set__}
    for each in fields(cls):  # type: ignore[arg-type]  # `cls` is a data class
        name = each.name
        names[f"set_{name}"] = cls.__dict__[name].__set__
        if each.default_factory is not MISSING:
            names[f"make_{name}"] = each.default_factory
            parameters.append(f"{name}=MISSING")
            values[name] = f"make_{name}() if {name} is MISSING else {name}"
        else:
            names[f"default_{name}"] = each.default
            parameters.append(name if each.default is MISSING else f"{name}=default_{name}")
            values[name] = name
            if each.metadata.get("as_tuple"):
                values[name] = f"{name} if isinstance({name}, tuple) else tuple({name})"
    # Changing the class twice costs as much as setting two slots, and subclasses have no draft.
    lines = [f"set_{name}(self, {value})" for name, value in values.items()]
    if len(values) > 3:
        assignments = [f"self.{name} = {value}" for name, value in values.items()]
        drafting = [*_changing("to_class(self, draft)"), *assignments, *_changing("self.__class__ = cls")]
        lines = ["if self.__class__ is cls:", *_indented(drafting), "else:", *_indented(lines)]
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    made = _function(f"def __init__({', '.join(parameters)}):", lines, names)
    made.__qualname__, made.__doc__ = f"{cls.__qualname__}.__init__", cls.__init__.__doc__
    made.__annotations__ = dict(cls.__init__.__annotations__)
    setattr(cls, "__init__", made)  # noqa: B010 - the annotations of `__init__` are kept
    return cls


def copier(cls: type[T], *changed: str) -> Callable[..., T]:
    """Return a function `copy(instance, *values)` for a frozen, slotted data class.

    It copies the instance, with new values for the fields `changed`. It does not call `__post_init__`.
    """
    kept = [each.name for each in fields(cls) if each.name not in changed]  # type: ignore[arg-type]  # a data class
    values = {**{name: f"instance.{name}" for name in kept}, **{name: name for name in changed}}
    return _drafting(cls, f"def copy(instance, {', '.join(changed)}):", values)


def creator(cls: type[T], *given: str) -> Callable[..., T]:
    """Return a function `create(*values)` for a frozen, slotted data class.

    It takes the values of the fields `given`, and the others get their defaults. It takes half the time of calling the
    class, and does not call `__post_init__`.
    """
    values, names = {name: name for name in given}, {}
    for each in fields(cls):  # type: ignore[arg-type]  # as above
        if each.name not in given:
            has_factory = each.default_factory is not MISSING
            names[f"default_{each.name}"] = each.default_factory if has_factory else each.default
            values[each.name] = f"default_{each.name}{'()' if has_factory else ''}"
    return _drafting(cls, f"def create({', '.join(given)}):", values, **names)


def _drafting(cls: type[T], head: str, values: Mapping[str, str], **names: Any) -> Callable[..., T]:
    """Return a function that creates an instance with these values of its fields."""
    names |= {"cls": cls, "draft": _draft_of(cls)}
    lines = ["made = draft()", *(f"made.{name} = {value}" for name, value in values.items())]
    made: Callable[..., T] = _function(head, [*lines, *_changing("made.__class__ = cls"), "return made"], names)
    return made


_CLASS: Any = object.__dict__["__class__"]


def _draft_of(cls: type[Any]) -> type[Any]:
    """Return a class with the same slots whose attributes can be set."""
    members = {"__slots__": cls.__dict__["__slots__"], "__setattr__": object.__setattr__}
    return type(f"{cls.__name__}Draft", cls.__bases__, members)


def _changing(line: str) -> list[str]:
    """Return the lines that change the class of an object with this line.

    Python compares the slots of both classes. If too many calls are nested for that, it says that they differ.
    """
    failed = "raise RecursionError('maximum recursion depth exceeded') from None"
    return ["try:", *_indented([line]), "except TypeError:", *_indented([failed])]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _function(head: str, lines: list[str], names: dict[str, Any]) -> Any:
    exec("\n".join([head, *_indented(lines)]), names)
    return names[head.removeprefix("def ").partition("(")[0]]
