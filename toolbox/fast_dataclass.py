"""A fast `__init__` for frozen, slotted data classes that are created for every tool call.

Not here: the data classes (`chat`, `context`).
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def with_fast_init(cls: type[T]) -> type[T]:
    """Replace the `__init__` of a frozen, slotted data class with one that sets the slots directly.

    It takes the same arguments and half the time. Use it above `@dataclass(frozen=True, slots=True)`.
    """
    names: dict[str, Any] = {"MISSING": MISSING}
    parameters, lines = ["self"], []
    for each in fields(cls):  # type: ignore[arg-type]  # `cls` is a data class
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
    setattr(cls, "__init__", made)  # noqa: B010 - the annotations of `__init__` are kept
    return cls
