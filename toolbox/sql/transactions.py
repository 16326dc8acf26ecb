"""`@transactional`: commits the database work of a function before it returns, or rolls all of it back.

In a durable run, the result of a tool is recorded in the same transaction. Not here: sessions as beans (`sessions`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, AsyncSessionTransaction
from sqlalchemy.orm import Session, SessionTransaction, SessionTransactionOrigin

from ..context import ActiveScope, current_invocation
from ..di.scopes import innermost_scope
from ..errors import (
    IllegalConfigurationError,
    MissingBeanError,
    Problem,
    ScopeNotActiveError,
    ToolDeferred,
    TransactionRolledBackError,
)
from ..tools.marks import with_effects
from ..transaction_recorder import (
    SESSION_MARK,
    TRANSACTIONAL_MARK,
    SessionNeed,
    TransactionRecorder,
    current_recorder,
)
from .engines import FOR_WRITING, prepare_to_write

logger = logging.getLogger("toolbox.sql")


F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", AsyncSession, Session)

_TRANSACTION = "toolbox.transaction"  # key of the current transaction in `session.info`


class _Transaction:
    """A running `@transactional` call of `function`; `failed` is True after a nested call failed."""

    __slots__ = ("failed", "function")

    def __init__(self, function: str) -> None:
        self.function, self.failed = function, False


_entered: ContextVar[tuple[_Transaction, ...]] = ContextVar("toolbox.transactions", default=())


def transactional_function_of(session: Session) -> str | None:
    """Return the `@transactional` function whose transaction a session is in, or None."""
    transaction: _Transaction | None = session.info.get(_TRANSACTION)
    return None if transaction is None else transaction.function


def is_begun_by_program(session: Session) -> bool:
    """Return True if the program itself began the transaction of a session, or a savepoint in it."""
    transaction = session.get_transaction()
    is_begun = transaction is not None and transaction.origin is SessionTransactionOrigin.BEGIN
    return is_begun or session.in_nested_transaction()


@overload
def transactional(function: F, /) -> F: ...


@overload
def transactional(*, name: str | None = None, isolation: str | None = None) -> Callable[[F], F]: ...


def transactional(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, isolation: str | None = None
) -> Any:
    """Commit when the function returns, roll back when it raises. A nested call joins the outer transaction.

    If the program itself began the session's transaction (`session.begin()`, a savepoint), the call is a savepoint in
    it, and commits nothing.

        @tool
        @sql.transactional
        async def book(self, car: int) -> Booking: ...

    An `async def` uses an `AsyncSession`, a `def` a `Session`: the one among its arguments, otherwise the one in an
    attribute of `self`, otherwise the one of the current scope. `name` selects a named session. If a nested call fails,
    the outer transaction is rolled back too; it raises `TransactionRolledBackError` if the outer function
    suppressed the failure. `isolation` is the isolation level of a new transaction, such as `"SERIALIZABLE"`.

    A call raises `MissingBeanError` or `ScopeNotActiveError` if there is no session, and `IllegalConfigurationError` if
    there are several, or if another task uses the session. The decorator raises `TypeError` for generators, and above
    `@staticmethod` or `@classmethod`.
    """
    if function is None:
        return lambda marked: _wrap_function(marked, name, isolation)
    return _wrap_function(function, name, isolation)


def _wrap_function(function: Callable[..., Any], name: str | None, isolation: str | None) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"write @transactional below @{type(function).__name__}, directly on the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator; @transactional supports only functions that return")
    label = function.__qualname__

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            session = _find_session_argument(AsyncSession, label, args, kwargs) if name is None else None
            if session is None:
                session = await _find_async_session(label, name)
            with _join_or_begin(session, label) as transaction:
                if transaction is None:
                    return await function(*args, **kwargs)
                joins = is_begun_by_program(session.sync_session)
                recorder = _recorder_of(run_coroutine)
                if recorder is not None and (joins or not recorder.writes_to(_bind_of(session.sync_session))):
                    await recorder.outside()
                    recorder = None
                deferred: ToolDeferred | None = None
                ending: AsyncSession | AsyncSessionTransaction = session
                try:
                    if joins:
                        ending = await session.begin_nested()
                    elif options := _choose_begin_options(session.sync_session, isolation):
                        await session.connection(execution_options=options)
                    with _note_commits(session.sync_session, recorder):
                        try:
                            value = await function(*args, **kwargs)
                        except ToolDeferred as error:  # the call ends normally, and its result comes later
                            value = deferred = error
                    _check_commit_allowed(transaction, label)
                    if recorder is not None:
                        await session.flush()  # the record comes last
                        await (await session.connection()).run_sync(recorder.record_in, value)
                    await ending.commit()
                except BaseException:
                    await _rollback_async(ending)
                    raise
                if deferred is not None:
                    raise deferred
                return value

        return _mark_function(run_coroutine, AsyncSession, name)

    @functools.wraps(function)
    def run_function(*args: Any, **kwargs: Any) -> Any:
        session = _find_session_argument(Session, label, args, kwargs) if name is None else None
        if session is None:
            session = _find_session(label, name)
        with _join_or_begin(session, label) as transaction:
            if transaction is None:
                return function(*args, **kwargs)
            joins = is_begun_by_program(session)
            recorder = _recorder_of(run_function)
            if recorder is not None and (joins or not recorder.writes_to(_bind_of(session))):
                recorder.outside_waiting()
                recorder = None
            deferred: ToolDeferred | None = None
            ending: Session | SessionTransaction = session
            try:
                if joins:
                    ending = session.begin_nested()
                elif options := _choose_begin_options(session, isolation):
                    session.connection(execution_options=options)
                with _note_commits(session, recorder):
                    try:
                        value = function(*args, **kwargs)
                    except ToolDeferred as error:  # as above
                        value = deferred = error
                _check_commit_allowed(transaction, label)
                if recorder is not None:
                    session.flush()  # the record comes last
                    recorder.record_in(session.connection(), value)
                ending.commit()
            except BaseException:
                _rollback(ending)
                raise
            if deferred is not None:
                raise deferred
            return value

    return _mark_function(run_function, Session, name)


def _mark_function(function: F, session: type[Any], name: str | None) -> F:
    """Mark a transactional function, for the durable runs of which it is a tool, and for reports."""
    setattr(function, SESSION_MARK, SessionNeed(session, (AsyncEngine, Engine), name))
    setattr(function, TRANSACTIONAL_MARK, function)  # itself: outer decorators copy its attributes
    return with_effects(function, "transactional")


# --- recording the result of a tool in a durable run


def _recorder_of(function: object) -> TransactionRecorder | None:
    """Return the recorder of the current tool call, if this function is the tool."""
    recorder = current_recorder.get()
    return recorder if recorder is not None and recorder.belongs_to(function) else None


def _bind_of(session: Session) -> Any:
    try:
        return session.get_bind()
    except InvalidRequestError:  # it has several engines
        return None


@contextmanager
def _note_commits(session: Session, recorder: TransactionRecorder | None) -> Iterator[None]:
    """Note the commits of the function itself, which do not contain the record of its result."""
    if recorder is None:
        yield
        return

    def note_commit(committed: Session) -> None:
        if committed.get_nested_transaction() is None:
            recorder.outside_in(committed.connection())

    event.listen(session, "before_commit", note_commit)
    try:
        yield
    finally:
        event.remove(session, "before_commit", note_commit)


# --- finding the session


def _find_session_argument(kind: type[S], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
    """Return the session among the arguments, or in an attribute of `self`. Raises for more than one."""
    for candidates in ((*args, *kwargs.values()), tuple(getattr(args[0], "__dict__", {}).values()) if args else ()):
        found = {id(each): each for each in candidates if isinstance(each, kind)}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            fix = "name each session and choose one with @transactional(name=…)"
            raise IllegalConfigurationError([Problem(label, f"found {len(found)} sessions, expected one", fix)])
    return None


async def _find_async_session(label: str, name: str | None) -> AsyncSession:
    try:
        return await _find_scope(label).aget(AsyncSession, name)
    except MissingBeanError as error:
        raise MissingBeanError(
            f"{error.wanted} for {label}, which is `async def`", _missing_session_hints(error, "session")
        ) from None


def _find_session(label: str, name: str | None) -> Session:
    try:
        return _find_scope(label).get(Session, name)
    except MissingBeanError as error:
        raise MissingBeanError(
            f"{error.wanted} for {label}, which is `def`", _missing_session_hints(error, "sync_session")
        ) from None


def _missing_session_hints(error: MissingBeanError, producer: str) -> tuple[str, ...]:
    return (*error.near, f"toolbox.sql.{producer}")


def _find_scope(label: str) -> ActiveScope:
    """Return the innermost scope. Raises `ScopeNotActiveError`."""
    scope = innermost_scope()
    if scope is None:
        raise ScopeNotActiveError(f"the session of {label}", "no scope is active")
    return scope


# --- the transaction


@contextmanager
def _join_or_begin(session: AsyncSession | Session, label: str) -> Iterator[_Transaction | None]:
    """Begin a transaction; yield None if the session is already in a transaction of this call."""
    around = session.info.get(_TRANSACTION)
    if around is not None:
        if around not in _entered.get():
            what = "its session is already in a transaction of another task or thread"
            fix = "use one session per task: call it as a tool, or in a separate request scope"
            raise IllegalConfigurationError([Problem(label, what, fix)])
        try:
            yield None
        except BaseException:
            around.failed = True
            raise
        return
    transaction = session.info[_TRANSACTION] = _Transaction(label)
    token = _entered.set((*_entered.get(), transaction))
    try:
        yield transaction
    finally:
        _entered.reset(token)
        del session.info[_TRANSACTION]


def _choose_begin_options(session: Session, isolation: str | None) -> dict[str, Any]:
    """Return execution options for the connection of a new transaction; none if it has already begun."""
    if session.in_transaction():
        return {}
    writing: dict[str, Any] = {}
    if session.bind is not None and session.bind.dialect.name == "sqlite":
        prepare_to_write(session.bind.engine)
        writing = FOR_WRITING
    return {**writing, **({"isolation_level": isolation} if isolation is not None else {})}


def _check_commit_allowed(transaction: _Transaction, label: str) -> None:
    """Raise `TransactionRolledBackError` if a function that returned must not be committed."""
    if transaction.failed:
        reason = "a nested @transactional call failed; let its error through, or run the nested work in a savepoint"
        raise TransactionRolledBackError(label, f"{reason} (`session.begin_nested()`)")
    invocation = current_invocation.get()
    if invocation is not None and invocation.cancelled:  # a thread runs on after its call was cancelled
        reason = "its call timed out or was cancelled before it finished; give the tool a longer timeout="
        raise TransactionRolledBackError(label, reason)


async def _rollback_async(ending: AsyncSession | AsyncSessionTransaction) -> None:
    try:
        await ending.rollback()
    except Exception as error:  # the caller gets the original error
        logger.warning("cannot roll back a transaction, its connection is discarded: %s", error)


def _rollback(ending: Session | SessionTransaction) -> None:
    try:
        ending.rollback()
    except Exception as error:  # the caller gets the original error
        logger.warning("cannot roll back a transaction, its connection is discarded: %s", error)
