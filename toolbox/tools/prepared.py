"""A tool as it is offered: everything about its calls that can be decided before one is made.

Not here: deciding it (`members`, `sources`), making a call (`calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..chat import ToolExecutionRequest, ToolSpecification
from ..execution import Execution
from ..signatures import EMPTY
from .codec import Encoded
from .marks import ReturnBehavior


@dataclass(frozen=True, slots=True)
class InjectedParameter:
    """A tool's parameter that is a bean: `wanted` is as annotated; `optional` ones keep their default without one."""

    name: str
    wanted: Any
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool as a call offers it, everything decided beforehand.

    `bean` is looked up for each call in the scope that is active then, and asked for `member`; without one, `function`
    is called as it is. `decode` is None for an executor made by hand, which is given the request itself. `positional`
    has the names and defaults of the parameters that cannot be given by name. `is_simple`: a coroutine function that
    takes what the model fills in, and its time; there is nothing to look up and no other place to go to. `returns` is
    the resolved return annotation, `EMPTY` without one.
    """

    specification: ToolSpecification
    execution: Execution
    where: str
    function: Callable[..., Any] | None
    encode: Callable[[Any], Encoded]
    decode: Callable[[ToolExecutionRequest], dict[str, Any]] | None = None
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM
    timeout: float | None = None
    max_result_chars: int | None = None
    bean: Any = None
    member: str = ""
    positional: tuple[tuple[str, Any], ...] = ()
    memory_id_names: tuple[str, ...] = ()
    context_names: tuple[str, ...] = ()
    needs_memory_id: bool = False
    injected: tuple[InjectedParameter, ...] = ()
    returns: Any = EMPTY
    is_simple: bool = field(init=False)

    def __post_init__(self) -> None:
        filled_in = self.memory_id_names or self.context_names or self.injected or self.positional
        simple = self.execution.is_coroutine and self.function is not None and self.decode is not None
        object.__setattr__(self, "is_simple", simple and not filled_in and self.timeout is None)
