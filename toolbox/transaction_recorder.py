"""The protocol with which a transaction records the result of its tool call, as its last statement.

Not here: the transactions (`sql`), the records (`runs`).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

TRANSACTIONAL_MARK = "__toolbox_transactional__"
"""At functions made by `@transactional`: the function itself."""

SESSION_MARK = "__toolbox_session__"
"""At the same functions: a `SessionNeed`."""

DATABASE_MARK = "__toolbox_database__"
"""At producers of engines: a name of their database, which others of the same database share."""


@dataclass(frozen=True, slots=True)
class SessionNeed:
    """The session of a transaction: its type, the types of engines that it and a store of runs can have, its name."""

    session: type[Any]
    engines: tuple[type[Any], ...]
    name: str | None


class TransactionRecorder(Protocol):
    """Records the result of a tool call in the database transaction of the tool."""

    def belongs_to(self, function: object) -> bool:
        """Return True if this function, made by `@transactional`, is the tool of the call."""
        ...

    def writes_to(self, bind: Any) -> bool:
        """Return True if the records are in this database."""
        ...

    async def outside(self) -> None:
        """Note that the transaction cannot contain the record. Raises if that cannot be written."""
        ...

    def outside_waiting(self) -> None:
        """Do the same as `outside`, on a thread without an event loop."""
        ...

    def outside_in(self, connection: Any) -> None:
        """Note the same in a transaction that is about to be committed."""
        ...

    def record_in(self, connection: Any, value: Any) -> None:
        """Record the value that the tool returned, or its `ToolDeferred`, with a synchronous connection."""
        ...


current_recorder: ContextVar[TransactionRecorder | None] = ContextVar("toolbox.recorder", default=None)
