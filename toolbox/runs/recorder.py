"""Records the result of one tool call in the database transaction of the tool.

Not here: when the transaction ends (`toolbox.sql.transactions`), the statements (`toolbox.sql.run_store`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from ..errors import ToolDeferred, TransactionRolledBackError
from ..tools.results import Encoded
from ..tools.tool_calls import ToolCall
from ..transaction_recorder import TransactionRecorder, current_recorder
from .exactly_once import transactional_function
from .places import RecordKey
from .run_session import RunSession
from .store import StoredRecord

logger = logging.getLogger("toolbox.runs")

ResultEncoding: TypeAlias = Callable[[Encoded | ToolDeferred, ToolCall, bool], tuple[str, str]]
"""Returns the kind and the data of the record of a call's result; the flag tells if the tool ran without an error."""

_OUTSIDE = '{"version":1}'


class RecorderInTransaction(TransactionRecorder):
    """Records the result of one tool call in the tool's own transaction.

    A call can end before its transaction: by its time limit while its thread goes on, by its cancellation, or with its
    connection. Then `close` is called, and `read_back` tells what happened:

    - A transaction that has recorded before `close` may be committed. `read_back` waits until it has ended.
    - One that records later finds that the recorder is closed, and is rolled back.

    Therefore `record_in` looks after its statement, and `close` comes before reading.
    """

    def __init__(
        self, session: RunSession, call: ToolCall, place: str, function: Any, encode_result: ResultEncoding
    ) -> None:
        assert session.generation is not None
        self._session, self._call, self._place, self._function = session, call, place, function
        self._encode_result = encode_result
        self._owner = session.id, session.generation
        with session.using_store() as store:
            # Errors of the database inside of the tool's transaction are errors of the tool.
            self._store: Any = store
        self._loop = asyncio.get_running_loop()
        self.has_begun = self.is_written = self._is_closed = False

    @property
    def tool_name(self) -> str:
        """The name of the tool."""
        return self._call.tool.name

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the transaction of the tool find this recorder inside the block."""
        token = current_recorder.set(self)
        try:
            yield
        finally:
            current_recorder.reset(token)

    def belongs_to(self, function: object) -> bool:
        """Return True for the function of the tool: only its own transaction has the record."""
        return function is self._function

    def writes_to(self, bind: Any) -> bool:
        """Return True if the store of the run is in this database."""
        return bool(self._store.uses(bind))

    async def outside(self) -> None:
        """Record that the tool uses a transaction which cannot contain its result."""
        warn_of_lost_record(self._call, "its session has another engine than the RunStore, or the program began it")
        await self._session.write_record(RecordKey(self._place, "outside"), "outside", _OUTSIDE)

    def outside_waiting(self) -> None:
        """Do the same on a thread without an event loop."""
        asyncio.run_coroutine_threadsafe(self.outside(), self._loop).result()

    def outside_in(self, connection: Any) -> None:
        """Record the same in a transaction that is about to be committed."""
        record = StoredRecord(str(RecordKey(self._place, "outside")), "outside", _OUTSIDE)
        self._store.note_in(connection, *self._owner, record)
        self._raise_if_closed()
        self._session.add_record(record)

    def record_in(self, connection: Any, value: Any) -> None:
        """Record what the tool returned, or its `ToolDeferred`, as the last statement before the commit."""
        result = value if isinstance(value, ToolDeferred) else self._call.tool.encode(value)
        # The tool has returned, but its call has not: nobody has noted yet that it ran.
        has_run = isinstance(result, Encoded) and not result.is_error
        kind, data = self._encode_result(result, self._call, has_run)
        self.has_begun = True
        self._store.record_in(connection, *self._owner, StoredRecord(self._place, kind, data))
        self._raise_if_closed()
        self.is_written = True

    def close(self) -> None:
        """Let every transaction of the call fail that has not recorded its result yet."""
        self._is_closed = True

    async def read_back(self) -> StoredRecord | None:
        """Return the result that was committed, or None, after a commit that is under way has ended.

        Raises `LeaseLostError` and `RunStoreError`.
        """
        with self._session.using_store():
            found: StoredRecord | None = await self._store.committed(*self._owner, self._place)
            return found

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise TransactionRolledBackError(self._call.tool.where, "its call ended before its transaction")


def warn_of_lost_record(call: ToolCall, reason: str) -> None:
    """Log that a transactional tool does not take effect exactly once, unless it says what happens after a crash."""
    if call.tool.on_unknown_outcome is None:
        logger.warning(
            "%s does not take effect exactly once, because its transaction cannot have the record of its result: %s; "
            'if that is meant, say @tool(on_unknown_outcome="tell")',
            call.tool.where,
            reason,
        )


def recorder_of(
    session: RunSession, call: ToolCall, place: str, encode_result: ResultEncoding
) -> RecorderInTransaction | None:
    """Return the recorder of a tool whose transaction can contain the record of its result; None for others."""
    function = transactional_function(call.tool)
    if function is None:
        return None
    with session.using_store() as store:
        if not hasattr(store, "record_in"):
            if store.persistent:
                warn_of_lost_record(call, f"{type(store).__name__} cannot record in transactions")
            return None
    if call.tool.execution.is_non_blocking and call.environment.runner.is_for_loop:
        warn_of_lost_record(call, "it blocks the event loop, on which the store writes")
        return None
    return RecorderInTransaction(session, call, place, function, encode_result)
