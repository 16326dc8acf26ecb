"""`@transactional`: a method's database work is committed before it returns, or none of it is kept.

Not here: which sessions there are (`engines`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from ..context import current_invocation
from ..di.scopes import active
from ..errors import (
    IllegalConfigurationError,
    MissingBeanError,
    Problem,
    ScopeNotActiveError,
    TransactionRolledBackError,
)
from .engines import FOR_WRITING

logger = logging.getLogger("toolbox.sql")

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", AsyncSession, Session)

_TRANSACTION = "toolbox.transaction"  # under this, a session's `info` has the one it is in


class _Transaction:
    """A `@transactional` call that is under way; `failed` when one that joined it has failed."""

    __slots__ = ("failed",)

    def __init__(self) -> None:
        self.failed = False


_entered: ContextVar[tuple[_Transaction, ...]] = ContextVar("toolbox.transactions", default=())


@overload
def transactional(function: F, /) -> F: ...


@overload
def transactional(*, name: str | None = None, isolation: str | None = None) -> Callable[[F], F]: ...


def transactional(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, isolation: str | None = None
) -> Any:
    """Commits when the function returns, rolls back when it raises; inside of another one it is part of that.

    An `async def` works on an `AsyncSession`, a `def` on a `Session`: one among its arguments, else one that `self`
    has, else that of the current scope (of this `name`). If a call that is part of another fails, the other is
    rolled back too, with `TransactionRolledBackError` if it let nothing be seen of it. `isolation` is the level of a
    transaction that begins here, such as `"SERIALIZABLE"`.
    """
    if function is None:
        return lambda marked: _transactional(marked, name, isolation)
    return _transactional(function, name, isolation)


def _transactional(function: Callable[..., Any], name: str | None, isolation: str | None) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"write @transactional below @{type(function).__name__}, next to the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator, which ends when its reader likes: no transaction")
    label = function.__qualname__

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            session = _given(AsyncSession, label, args, kwargs) if name is None else None
            if session is None:
                session = await _awaited_session(label, name)
            with _part_of(session, label) as transaction:
                if transaction is None:
                    return await function(*args, **kwargs)
                try:
                    if options := _options(session.sync_session, isolation):
                        await session.connection(execution_options=options)
                    value = await function(*args, **kwargs)
                    _refuse(transaction, label)
                    await session.commit()
                except BaseException:
                    await _undo_awaiting(session)
                    raise
                return value

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        session = _given(Session, label, args, kwargs) if name is None else None
        if session is None:
            session = _session(label, name)
        with _part_of(session, label) as transaction:
            if transaction is None:
                return function(*args, **kwargs)
            try:
                if options := _options(session, isolation):
                    session.connection(execution_options=options)
                value = function(*args, **kwargs)
                _refuse(transaction, label)
                session.commit()
            except BaseException:
                _undo(session)
                raise
            return value

    return called


# --- which session


def _given(kind: type[S], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
    """The session among the arguments, or the one that `self` has."""
    for candidates in ((*args, *kwargs.values()), tuple(getattr(args[0], "__dict__", {}).values()) if args else ()):
        found = {id(each): each for each in candidates if isinstance(each, kind)}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            fix = "give each session a name, and say which one is meant: @transactional(name=…)"
            raise IllegalConfigurationError([Problem(label, f"it has {len(found)} sessions to choose from", fix)])
    return None


async def _awaited_session(label: str, name: str | None) -> AsyncSession:
    try:
        return await _scope(label).aget(AsyncSession, name)  # type: ignore[no-any-return]  # of the type asked for
    except MissingBeanError as error:
        raise MissingBeanError(
            f"{error.wanted} for {label}, which is `async def`", _ready_made(error, "session")
        ) from None


def _session(label: str, name: str | None) -> Session:
    try:
        return _scope(label).get(Session, name)  # type: ignore[no-any-return]  # likewise
    except MissingBeanError as error:
        raise MissingBeanError(
            f"{error.wanted} for {label}, which is `def`", _ready_made(error, "sync_session")
        ) from None


def _ready_made(error: MissingBeanError, producer: str) -> tuple[str, ...]:
    return (*error.near, f"toolbox.sql.{producer}")


def _scope(label: str) -> Any:
    """Where to look a session up: the innermost scope's container."""
    scope = active.get()
    if scope is None:
        raise ScopeNotActiveError(f"the session of {label}", "no scope is active here")
    return scope.home


# --- its transaction


@contextmanager
def _part_of(session: AsyncSession | Session, label: str) -> Iterator[_Transaction | None]:
    """A new transaction; None when the session is in one that this code is part of."""
    around = session.info.get(_TRANSACTION)
    if around is not None:
        if around not in _entered.get():
            what = "its session is in a transaction of another task or thread"
            fix = "give each its own: call it as a tool, or in a request scope of its own"
            raise IllegalConfigurationError([Problem(label, what, fix)])
        try:
            yield None
        except BaseException:
            around.failed = True
            raise
        return
    transaction = session.info[_TRANSACTION] = _Transaction()
    token = _entered.set((*_entered.get(), transaction))
    try:
        yield transaction
    finally:
        _entered.reset(token)
        del session.info[_TRANSACTION]


def _options(session: Session, isolation: str | None) -> dict[str, Any]:
    """Of the connection that the transaction begins on; nothing when there is nothing to say, or it has begun."""
    if session.in_transaction():
        return {}
    writing = FOR_WRITING if session.bind is not None and session.bind.dialect.name == "sqlite" else {}
    return {**writing, **({"isolation_level": isolation} if isolation is not None else {})}


def _refuse(transaction: _Transaction, label: str) -> None:
    """Raises when what has ended well must not be kept all the same."""
    if transaction.failed:
        reason = "a @transactional call inside of it failed; let that error through, or do what may fail in a savepoint"
        raise TransactionRolledBackError(label, f"{reason} (`session.begin_nested()`)")
    invocation = current_invocation.get()
    if invocation is not None and invocation.cancelled:  # of a thread, which goes on although nobody waits for it
        reason = "its call was given up meanwhile, and has failed for everybody else; give the tool a longer timeout="
        raise TransactionRolledBackError(label, reason)


async def _undo_awaiting(session: AsyncSession) -> None:
    try:
        await session.rollback()
    except Exception as error:  # what went wrong before is what the caller should hear of
        logger.warning("a transaction could not be rolled back, its connection is given up: %s", error)


def _undo(session: Session) -> None:
    try:
        session.rollback()
    except Exception as error:  # as above
        logger.warning("a transaction could not be rolled back, its connection is given up: %s", error)
