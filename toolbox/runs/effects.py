"""`effect`: what a run does, once for all processes that execute it, where that is possible.

Replies of models, results of tools, a router's choice, failures and compensations are effects. Not here: what each of
them records (`service_calls`), the transaction of a tool (`recorder`), the store (`run_session`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import LeaseLostError
from ..safe_text import describe_store_error
from .places import RecordKey
from .recorder import RecorderInTransaction
from .run_session import Recorded, RunSession

logger = logging.getLogger("toolbox.runs")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Generic[T]):
    """What is recorded before an effect that must not happen twice, and the rule for one whose outcome is unknown.

    `arguments` are JSON values. `when_unknown` gets the records of all its starts. It returns the value that counts, or
    None to run the effect again; it may raise to ask a person. `transaction` opens the recorder of the effect's own
    database transaction, which can have the record of its value: then no outcome is unknown.
    """

    arguments: Mapping[str, Any]
    when_unknown: Callable[[Sequence[Recorded]], T | None]
    transaction: Callable[[], RecorderInTransaction | None] = lambda: None


async def effect(
    session: RunSession,
    key: RecordKey,
    run: Callable[[], Awaitable[T]],
    *,
    write: Callable[[T], tuple[str, str] | None],
    read: Callable[[Recorded], T],
    write_error: Callable[[Exception], tuple[str, str] | None] = lambda _: None,
    start: Start[T] | None = None,
) -> T:
    """Return the recorded value of an effect; else run it, and record its value before anyone gets it.

    `write` returns the kind and the data of the record; None if something else records the value. `write_error` does
    the same for an error that counts as the outcome of the effect, and that `read` raises again. After any other error
    the effect runs again in the next process that executes the run, as one without a `start` does after a crash. Raises
    `LeaseLostError` and `RunStoreError`.
    """
    # A process that continues a run comes here again with each effect since the last state. A recorded value counts:
    # nothing is asked, checked or run for it. A recorded start without a value means that the effect may have happened,
    # and nobody knows; `when_unknown` decides. Only an effect without both has certainly not happened. So the start is
    # written before it begins, and the value before the next effect can depend on it.
    if (recorded := session.recorded(key)) is not None:
        return read(recorded)
    transaction, has_start = None, False
    if start is not None and session.is_stored:
        starts = _open_starts(session, key.place)
        if starts and not _is_certain(session, key.place, starts[-1]):
            known = start.when_unknown(starts)
            if known is not None:
                await _record(session, key, write(known))
                return known
        transaction = start.transaction()
        has_start = True
        await _write_start(session, key.place, {"atomic": transaction is not None, "arguments": start.arguments})
    try:
        with nullcontext() if transaction is None else transaction.current():
            value = await run()
    except (Exception, asyncio.CancelledError) as error:
        if transaction is not None and (committed := await _read_back(session, key, transaction, error)) is not None:
            logger.warning(
                "tool %r of run %s has committed its result, so its error is dropped: %s",
                transaction.tool_name,
                session.id,
                describe_store_error(error),
            )
            return read(committed)
        if isinstance(error, Exception):
            written = write_error(error)
            if written is None and has_start and (end := session.end_without_result(error)) is not None:
                # Else the next owner could not know that the effect has ended, and would not run it again.
                await _write_start(session, key.place, {"atomic": True, "ended": True, **end})
            await _record(session, key, written)
        raise
    if session.keeps(key) and (transaction is None or not transaction.is_written):
        await _record(session, key, write(value))
    elif transaction is not None:
        session.forget_messages()
    return value


async def _record(session: RunSession, key: RecordKey, written: tuple[str, str] | None) -> None:
    if written is not None:
        await session.write_record(key, *written)


async def _write_start(session: RunSession, place: str, facts: Mapping[str, Any]) -> None:
    """Record that an effect starts, or with `ended` that its last start has ended with an error, and no value."""
    key = RecordKey(place, "start", len(session.numbered(place, "start")) + 1)
    await session.write_record(key, "start", json.dumps({"version": 1, **facts}))


def _open_starts(session: RunSession, place: str) -> list[Recorded]:
    """Return the starts of an effect of which nobody knows how they ended."""
    starts: list[Recorded] = []
    for each in session.numbered(place, "start").values():
        facts = session.facts_of(each)
        if facts.get("ended", False):
            if facts.get("failures", -1) < session.failures:
                del starts[-1:]
        else:
            starts.append(each)
    return starts


def _is_certain(session: RunSession, place: str, start: Recorded) -> bool:
    """Return True if an effect that was started has not happened: its transaction would contain its record."""
    return session.facts_of(start)["atomic"] and session.recorded(RecordKey(place, "outside")) is None


async def _read_back(
    session: RunSession, key: RecordKey, transaction: RecorderInTransaction, error: BaseException
) -> Recorded | None:
    """Return what a transaction has recorded although its effect raised an error; None if it has not.

    Raises `LeaseLostError`, and `RunStoreError` if the store does not answer until the lease has ended: the run then
    stays as it is.
    """
    # A commit can be under way while its call ends: the connection breaks after the COMMIT was sent, or the call is
    # cancelled while its thread commits. An error then says nothing about what happened. If the tool was undone or
    # called again on the strength of it, its effect would be there twice, or a record without its effect. So nobody
    # gets a result before the store has said which of the two it was, and a cancellation waits for it too.
    transaction.close()
    if not transaction.has_begun:
        return None
    cancelled = error if isinstance(error, asyncio.CancelledError) else None
    reading = asyncio.ensure_future(transaction.read_back())
    while not reading.done():
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError as again:
            cancelled = again
    try:
        record = reading.result()
    except LeaseLostError:
        if cancelled is not None:  # for example because the lease was lost
            raise cancelled from None
        raise
    if record is not None:
        session.add_record(record)
    elif cancelled is not None:
        raise cancelled
    return session.recorded(key)
