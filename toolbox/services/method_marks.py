"""What decorators name at services, at their methods and at tools: guardrails and interceptors.

Not here: the references themselves (`bean_references`), checking the classes and choosing layers (`capabilities`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..bean_references import BeanReference, definitions_of, is_marked, named_at_first, named_in_class
from ..tools.tool_calls import Tool

GUARDRAILS = ("input_guardrails", "output_guardrails", "tool_input_guardrails", "tool_output_guardrails")
"""The decorators that name guardrails."""

DECORATORS = ("interceptors", *GUARDRAILS)
"""The decorators that name beans, at services and their methods, and at tools."""


@dataclass(frozen=True, slots=True)
class MethodMarks:
    """Finds what decorators name at a service class and at one of its methods."""

    cls: type[Any]
    method: str
    is_marked: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look once for any mark: most methods have none."""
        object.__setattr__(self, "is_marked", is_marked(*self.definitions))

    @property
    def definitions(self) -> tuple[Any, ...]:
        """The class and its bases, and the definitions of the method in them."""
        return *self.cls.__mro__, *definitions_of(self.cls, self.method)

    def named_by(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the class and its bases, then at the method."""
        if not self.is_marked:
            return ()
        return (*self.at_class(decorator), *self.at_method(decorator))

    def at_class(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the class and its bases."""
        return named_in_class(self.cls, decorator)

    def at_method(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the method."""
        return named_at_first(definitions_of(self.cls, self.method), decorator) if self.is_marked else ()


@dataclass(frozen=True, slots=True)
class NamedAt:
    """A class or instance that a decorator names; `where` is the place for problems."""

    where: str
    decorator: str
    reference: BeanReference
    is_at_tool: bool


def named_at_method(cls: type[Any], method: str) -> Iterator[NamedAt]:
    """Yield everything that decorators name at a service class and at one of its methods."""
    marks = MethodMarks(cls, method)
    for decorator in DECORATORS if marks.is_marked else ():
        for where, named in ((cls.__name__, marks.at_class), (f"{cls.__name__}.{method}", marks.at_method)):
            yield from (NamedAt(f"{where}, @{decorator}", decorator, each, False) for each in named(decorator))


def named_at_tool(tool: Tool) -> Iterator[NamedAt]:
    """Yield everything that decorators name at a tool and its class."""
    classes = tool.owner.__mro__ if tool.owner is not None else ()
    for decorator in DECORATORS if is_marked(*classes, *tool.definitions) else ():
        for each in tool.named_by(decorator):
            yield NamedAt(f"{tool.where}, @{decorator}", decorator, each, True)
