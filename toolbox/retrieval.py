"""Retrieval: what searches your documents for passages before a model is asked, or when the model asks for it.

Not here: reading retrievers (`tools.retrievers`), when they are asked (`services.retrieving`), numbers and texts of
passages (`passages`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from .chat import Message
from .context import InvocationContext
from .introspection import name_decorator
from .passages import Passage

__all__ = ["Passage", "Query", "Retriever", "retrieves"]

F = TypeVar("F", bound=Callable[..., Any])

RETRIEVES_MARK: Final = "__toolbox_retrieves__"


@dataclass(frozen=True, slots=True)
class Query:
    """What a retriever searches for.

    - `text`: the text of the user message, after input guardrails; of a search by the model, its words.
    - `messages`: the conversation before that message, as the model sees it.
    - `context`: the invocation.
    """

    text: str
    messages: tuple[Message, ...]
    context: InvocationContext


class Retriever:
    """Searches documents for passages: `@register_ai_service(retrievers=Handbook)`, or `tools=Handbook`.

        @request_scoped
        class Handbook(Retriever):
            def __init__(self, index: SearchClient, user: SecurityIdentity) -> None:
                self.index, self.user = index, user

            async def retrieve(self, query: Query) -> list[Passage]:
                found = await self.index.search(query.text, groups=self.user.roles, limit=5)
                return [Passage(hit.text, source=hit.url, title=hit.title) for hit in found]

    A subclass is a bean of any scope. Each search has its own call scope, which ends before the model is asked.

    - `optional`: True logs what `retrieve` raises, and the call goes on without its passages. Otherwise it is the error
      of the call.
    - `timeout`: in seconds; then `ToolTimeoutError`. None for no limit.
    """

    optional: bool = False
    timeout: float | None = 5.0

    def retrieve(self, query: Query) -> Iterable[Passage] | Awaitable[Iterable[Passage] | None] | None:
        """Return the passages for a query, best first; None for none. `def` or `async def`.

        A `def` runs where a `def` tool runs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no retrieve(self, query)")


def retrieves(*retrievers: Any) -> Callable[[F], F]:
    """Set the retrievers of one method of an AI service, classes (beans) or instances.

        @retrieves(Handbook)
        async def answer(self, question: str) -> Result[str]: ...

    It replaces the `retrievers=` of the class; `@retrieves()` asks none. Raises `TypeError` for a class below it.
    """

    def apply(target: F) -> F:
        if isinstance(target, type):
            fix = "put @retrieves on a method, or list retrievers of a class in @register_ai_service(retrievers=…)"
            raise TypeError(f"@retrieves: {target.__name__} is a class; {fix}")
        setattr(target, RETRIEVES_MARK, retrievers)
        return target

    return name_decorator("@retrieves", apply, retrievers[0] if retrievers else None)


def retrieves_of(function: object) -> tuple[Any, ...] | None:
    """Return the retrievers of `@retrieves`; None without the decorator."""
    named = getattr(function, RETRIEVES_MARK, None)
    return named if isinstance(named, tuple) else None
