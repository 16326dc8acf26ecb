"""Parameters that the library fills and models do not see: `Inject`, `MemoryId`, `RunId`, `IdempotencyKey`, `Progress`.

Not here: filling them (`tools`, `services`), and `InvocationContext` (`context`).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from .errors import IllegalConfigurationError, Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemoryIdMark:
    """Marks the parameter with the conversation's id."""


@dataclass(frozen=True, slots=True)
class RunIdMark:
    """Marks the parameter with the id of the run."""


@dataclass(frozen=True, slots=True)
class IdempotencyKeyMark:
    """Marks the parameter with a key that is the same for each execution of the same tool call."""


RunId: TypeAlias = Annotated[str, RunIdMark()]
"""The id of a run, as a parameter of a durable method or of a tool. Models never see it."""


IdempotencyKey: TypeAlias = Annotated[str, IdempotencyKeyMark()]
"""A key that stays the same for the same tool call of a run, over retries and processes. Models never see it."""


@dataclass(frozen=True, slots=True)
class InjectMark:
    """Marks a parameter that receives a bean of the current scope."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> object:
        # Only FastAPI asks for this, on a route whose annotations were evaluated before its support was loaded.
        raise IllegalConfigurationError(
            [
                Problem(
                    where=f"a parameter Inject[{getattr(source, '__name__', source)}]",
                    what="toolbox_fastapi was not loaded before this annotation, so FastAPI does not know Inject",
                    fix="import toolbox_fastapi above it, or write `from toolbox_fastapi import Inject`",
                )
            ]
        )


_endpoint_metadata: Callable[[object], tuple[object, ...]] | None = None


def support_endpoints(metadata: Callable[[object], tuple[object, ...]]) -> None:
    """Set the function that returns what a web framework needs in the metadata of `Inject[T]`, given T."""
    global _endpoint_metadata
    _endpoint_metadata = metadata


@cache
def _load_endpoint_support(framework: str) -> None:
    """Load the packages that support a web framework: they call `support_endpoints`."""
    from importlib.metadata import entry_points  # loads the email package, and few programs need it

    for each in entry_points(group="toolbox.endpoints", name=framework):
        each.load()


MEMORY_ID = MemoryIdMark()


INJECT = InjectMark()


if TYPE_CHECKING:
    MemoryId = Annotated[T, MEMORY_ID]
    Inject = Annotated[T, INJECT]
else:

    class MemoryId:
        """`MemoryId[T]`: the parameter with the conversation's id.

            async def chat(self, room: MemoryId[str], question: str) -> str: ...

        In a tool it receives the id of the calling service's conversation.
        """

        def __class_getitem__(cls, item: object) -> object:
            return Annotated[item, MEMORY_ID]

    class Inject:
        """A parameter that the container fills: `Inject[T]` receives a bean of type T from the current scope.

        Works in tools, in functions that the container calls, and in FastAPI endpoints and dependencies. A model and an
        HTTP client never see the parameter.

            @tool
            def my_orders(self, user: Inject[User]) -> list[Order]: ...
        """

        def __class_getitem__(cls, item: object) -> object:
            if _endpoint_metadata is None and "fastapi" in sys.modules:
                _load_endpoint_support("fastapi")
            return Annotated[item, INJECT, *(_endpoint_metadata(item) if _endpoint_metadata is not None else ())]


class Progress:
    """A hidden tool parameter that reports how far the tool is, to streams, listeners and MCP clients.

        @tool
        async def import_rows(rows: list[Row], progress: Progress) -> str:
            for number, row in enumerate(rows):
                await progress(number, len(rows), "importing")

    `progress(…)` reports at once, on any thread. It returns an awaitable, which you may ignore; awaiting it lets other
    tasks run. After the tool's end it does nothing. In a test, `Progress()` does nothing, and `Progress(report)` calls
    `report(done, total, message)`.
    """

    __slots__ = ("_report",)

    def __init__(self, report: Callable[[float, float | None, str | None], object] | None = None) -> None:
        self._report = report

    def __call__(self, done: float, total: float | None = None, message: str | None = None) -> Awaitable[None]:
        """Report that `done` of `total` units are done.

        Raises `TypeError` unless they are numbers, and `ValueError` for infinite numbers and NaN.
        """
        for number in (done,) if total is None else (done, total):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise TypeError(f"invalid progress={number!r}; use a number")
            if isinstance(number, float) and not isfinite(number):
                raise ValueError(f"invalid progress={number!r}; use a finite number")
        if self._report is not None:
            self._report(done, total, message)
        return _OneTurn()

    def end(self) -> None:
        """Ignore all later calls."""
        self._report = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Progress, ()  # another process cannot report


current_progress: ContextVar[Progress | None] = ContextVar("toolbox.progress", default=None)
"""The `Progress` of the running tool, for executors with the attribute `TAKES_PROGRESS`."""


TAKES_PROGRESS = "__toolbox_takes_progress__"


class _OneTurn(Awaitable[None]):
    """Awaiting it lets the event loop run other tasks once."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield
