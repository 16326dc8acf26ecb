"""Gives frozen, slotted data classes a fast `__init__`: for the classes that every tool call makes instances of.

Not here: the data (`chat`, `context`).
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def with_fast_init(cls: type[T]) -> type[T]:
    """Replace the `__init__` of a frozen, slotted data class by one that fills the slots directly, in half the time.

    It takes the same arguments. Use it above `@dataclass(frozen=True, slots=True)`.
    """
    names: dict[str, Any] = {"MISSING": MISSING}
    parameters, lines = ["self"], []
    for each in fields(cls):  # type: ignore[arg-type]  # that it is a data class is what this is for
        name = each.name
        names[f"set_{name}"] = cls.__dict__[name].__set__
        if each.default_factory is not MISSING:
            names[f"make_{name}"] = each.default_factory
            parameters.append(f"{name}=MISSING")
            lines.append(f"set_{name}(self, make_{name}() if {name} is MISSING else {name})")
        else:
            names[f"default_{name}"] = each.default
            parameters.append(name if each.default is MISSING else f"{name}=default_{name}")
            lines.append(f"set_{name}(self, {name})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    source = f"def __init__({', '.join(parameters)}):\n  " + "\n  ".join(lines)
    exec(source, names)
    made = names["__init__"]
    made.__qualname__, made.__doc__ = f"{cls.__qualname__}.__init__", cls.__init__.__doc__
    made.__annotations__ = dict(cls.__init__.__annotations__)
    setattr(cls, "__init__", made)  # noqa: B010 - a type checker is right to forbid it elsewhere
    return cls
