"""`open_session`: sessions that give their connection back while a model works. `keep_transaction`: not now.

Before a model request, a session that has only read commits, and its connection goes to the pool. It is never rolled
back, because that would expire the objects that it has loaded. A session with something to lose keeps its transaction.
Not here: what a commit may lose (`transaction_notes`), sessions as beans (`sessions`), calling the sessions
(`services.model_calls`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, PoolProxiedConnection, event, inspect
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.util import await_only

from ..context import ActiveScope, current_invocation
from ..di.scopes import innermost_scope
from ..errors import OpenTransactionError
from ..execution.threads import running_loop
from ..request_hooks import before_model_request, holds_database, releases_connection
from ..settings import ToolboxSettings, WhileAModelWorks
from .engines import is_for_writing, shares_connections
from .transaction_notes import COMMIT, Loss, TransactionNotes
from .transactions import is_begun_by_program, transactional_function_of

logger = logging.getLogger("toolbox.sql")

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_keeps: ContextVar[bool] = ContextVar("toolbox.keep_transaction", default=False)

_MOST_WARNINGS = 1000  # of one container
_warned: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
"""The warnings that were logged, by container."""


@contextmanager
def keep_transaction() -> Iterator[None]:
    """Keep the transactions of all sessions, with their connections, while models work in calls made in the block.

    with sql.keep_transaction():
        answer = await desk.chat(question)
    """
    token = _keeps.set(True)
    try:
        yield
    finally:
        _keeps.reset(token)


@overload
def open_session(engine: AsyncEngine) -> AsyncSession: ...


@overload
def open_session(engine: Engine) -> Session: ...


def open_session(engine: AsyncEngine | Engine) -> AsyncSession | Session:
    """Return a session for a producer, to be used in `async with`; for an `Engine` a `Session`, for `with`.

        @produces(scope="request")
        async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
            async with sql.open_session(engine) as session:
                yield session

    Before each model request it gives its connection back, as the sessions of this module do: if it has only read, it
    is committed. Loaded objects stay loaded (`expire_on_commit=False`).
    """
    if isinstance(engine, AsyncEngine):
        return ReleasingAsyncSession(engine)
    return ReleasingSession(engine, expire_on_commit=False)


# --- the lock


class _ThreadRelease:
    """A release on a thread. Its thread may use the session; other threads wait for its end."""

    def __init__(self) -> None:
        self._thread, self._ended = threading.get_ident(), threading.Event()

    @property
    def is_mine(self) -> bool:
        return threading.get_ident() == self._thread

    def wait(self) -> None:
        self._ended.wait()

    def end(self) -> None:
        self._ended.set()


class _TaskRelease:
    """A release in its own task. Other tasks wait for its end."""

    task: asyncio.Task[Any] | None = None

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    @property
    def is_mine(self) -> bool:
        return asyncio.current_task() is self.task

    def wait(self) -> None:
        """Wait inside of a statement, in the greenlet in which SQLAlchemy runs it."""
        await_only(self._ended.wait())

    async def ended(self) -> None:
        await self._ended.wait()

    def end(self) -> None:
        self._ended.set()


def _waiting(method: F) -> F:
    """Let code that uses a session wait while the session gives its connection back, and note that it is used."""

    @functools.wraps(method)
    def waits(self: ReleasingSession, *args: Any, **kwargs: Any) -> Any:
        self.begin_use()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.end_use()

    return waits  # type: ignore[return-value]  # it has the same parameters and result


# --- sessions


class ReleasingSession(Session):
    """A `Session` that gives its connection back before a model request, if it has only read.

    All statements pass through one of these methods: loads of objects and attributes are `execute`.
    """

    flush = _waiting(Session.flush)
    begin_nested = _waiting(Session.begin_nested)
    commit = _waiting(Session.commit)
    rollback = _waiting(Session.rollback)
    prepare = _waiting(Session.prepare)
    close = _waiting(Session.close)
    reset = _waiting(Session.reset)
    invalidate = _waiting(Session.invalidate)
    bulk_save_objects = _waiting(Session.bulk_save_objects)
    bulk_insert_mappings = _waiting(Session.bulk_insert_mappings)
    bulk_update_mappings = _waiting(Session.bulk_update_mappings)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes = TransactionNotes()
        self.has_lent_connection = False
        """True if the program has the connection itself, and may use it later."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop on which the connection works; None on threads."""
        self.ongoing: _ThreadRelease | _TaskRelease | None = None
        self._beans = innermost_scope()
        self._uses, self._lock = 0, threading.Lock()

    @_waiting
    def begin(self, nested: bool = False) -> SessionTransaction:
        if nested and not self.in_transaction():
            super().connection()  # otherwise the transaction around the savepoint would count as the program's own
        return super().begin(nested)

    @_waiting
    def execute(self, *args: Any, **options: Any) -> Any:
        result = super().execute(*args, **options)
        self._note_result(result if isinstance(result, CursorResult) else getattr(result, "raw", None))
        return result

    @_waiting
    def scalar(self, *args: Any, **options: Any) -> Any:
        return super().scalar(*args, **options)

    def scalars(self, *args: Any, **options: Any) -> Any:
        return self.execute(*args, **options).scalars()

    @_waiting
    def connection(self, *args: Any, **options: Any) -> Connection:
        connection = super().connection(*args, **options)
        self.has_lent_connection = True
        return connection

    @before_model_request
    @releases_connection
    def release_connection(self) -> bool:
        """Commit if the session has only read. Returns True if a connection was given back.

        Raises `OpenTransactionError` if there are changes and the setting is `raise`.
        """
        if not self.may_be_asked():
            return False
        if not self.claim(_ThreadRelease()):
            return False
        try:
            return self.has_only_read() and self.give_back()
        finally:
            self.end_release()

    @holds_database
    def find_held(self) -> tuple[Engine, str] | None:
        """Return the engine to which the open transaction has written, and what; None if it has only read."""
        if not self.in_transaction():
            return None
        if any(is_for_writing(each) for each in self.notes.connections):
            held: str | None = f"@transactional {transactional_function_of(self)}"
        else:
            losses = (each.what for each in self.notes.find_losses())
            held = next((each for each in losses if each.startswith(("INSERT", "UPDATE", "DELETE"))), None)
        return None if held is None else (self.get_bind().engine, held)

    # --- who uses the session

    def begin_use(self) -> None:
        """Note that a statement or another method begins. Waits for the end of a release."""
        while True:
            with self._lock:
                ongoing = self.ongoing
                if ongoing is None or ongoing.is_mine:
                    self._uses += 1
                    return
            ongoing.wait()

    def end_use(self) -> None:
        """Note the end of what `begin_use` began."""
        with self._lock:
            self._uses -= 1

    def claim(self, release: _ThreadRelease | _TaskRelease) -> bool:
        """Begin a release. Returns False while the session is used, and while a stream of rows is not read to its end.

        Statements that begin from now on wait for `end_release`.
        """
        with self._lock:
            if self._uses or self.ongoing is not None or self.notes.has_unread_rows:
                return False
            self.ongoing = release
            return True

    def end_release(self) -> None:
        """Let the waiting statements begin."""
        release, self.ongoing = self.ongoing, None
        if release is not None:
            release.end()

    def _note_result(self, result: CursorResult[Any] | None) -> None:
        """Note a result that reads its rows from the connection when it is asked for them."""
        if result is None:
            return
        dialect, options = result.dialect, result.context.execution_options
        if options.get("stream_results") or (dialect.name == "sqlite" and not dialect.is_async):
            self.notes.add_rows(result)

    # --- deciding

    def may_be_asked(self) -> bool:
        """Return True if there is a transaction that the program does not want to keep."""
        return self.in_transaction() and not _keeps.get() and self._setting != "keep"

    @property
    def _container(self) -> ActiveScope:
        """The container that created the session; for a session from elsewhere, such as a seed, the current one."""
        container = self._beans or innermost_scope()
        assert container is not None, "sessions are asked in the scopes of a container"
        return container

    @property
    def _setting(self) -> WhileAModelWorks:
        return self._container.get(ToolboxSettings).sql.while_a_model_works

    def has_only_read(self, *, is_lent: bool = False) -> bool:
        """Return True if a commit loses nothing, and gives a connection back, but for a snapshot (see `give_back`).

        Otherwise warns, once per place, or raises `OpenTransactionError`. `is_lent`: the program has the connection.
        """
        function = transactional_function_of(self)
        if function is not None:
            loss = Loss(f"@transactional {function} has begun it", "call the model outside of this function")
            self._report([loss], function)
            return False
        if losses := list(self._find_losses(is_lent)):
            self._report(losses)
            return False
        # Sessions that share a connection share their transaction: a commit would commit the changes of others.
        return not shares_connections(self.get_bind().engine)

    def _find_losses(self, is_lent: bool) -> Iterator[Loss]:
        if not self.is_active:
            yield Loss("a statement has failed", "roll back before the call")
            return
        if is_begun_by_program(self) or self.notes.has_savepoint:
            yield Loss("the program began the transaction, or a savepoint, itself", f"{COMMIT}, where its block ends")
        dirty = (each for each in self.dirty if self.is_modified(each) or self._listens_to_flush_of(each))
        for what, objects in (("new", self.new), ("changed", dirty), ("deleted", self.deleted)):
            yield from dict.fromkeys(Loss(f"{what} objects of {_table_of(each)}") for each in objects)
        if is_lent or self.has_lent_connection:
            yield Loss("the program uses session.connection()")
        if listened := sorted(self._listened_events()):
            yield Loss(f"the program listens to {', '.join(listened)}")
        yield from self.notes.find_losses()

    def _listened_events(self) -> set[str]:
        """Return the events of a commit for which the program has listeners."""
        listeners = {
            "before_commit": [*self.dispatch.before_commit],
            "after_commit": [*self.dispatch.after_commit],
            "after_transaction_end": [each for each in self.dispatch.after_transaction_end if each is not _note_end],
            "commit": [each for connection in self.notes.connections for each in connection.dispatch.commit],
        }
        return {name for name, found in listeners.items() if found}

    def _listens_to_flush_of(self, instance: object) -> bool:
        """Return True if a listener gets an object whose values are the same as before, and may change it."""
        return bool(self.dispatch.before_flush or inspect(instance).mapper.dispatch.before_update)

    def _report(self, losses: list[Loss], place: str | None = None) -> None:
        """Warn once per place, or raise `OpenTransactionError`."""
        invocation = current_invocation.get()
        where = "a model" if invocation is None else f"{invocation.service.__name__}.{invocation.method}"
        what = ", ".join(each.what for each in losses)
        fixes = dict.fromkeys(each.fix for each in losses)
        if any(each.startswith(COMMIT) for each in fixes if each != COMMIT):
            fixes.pop(COMMIT, None)  # another one says more
        error = OpenTransactionError(where, what, "; ".join(fixes))
        if self._setting == "raise":
            raise error
        warned, place = _warned.setdefault(self._container, set()), place or f"{where}: {what}"
        if place not in warned and len(warned) < _MOST_WARNINGS:
            warned.add(place)
            logger.warning("%s", error)

    # --- giving the connection back

    def give_back(self) -> bool:
        """Commit, unless the transaction reads a snapshot, which is reported as `has_only_read` does.

        If that fails, discard the connection; loaded objects stay as they are.
        """
        connections = list(self.notes.connections)
        try:
            snapshots = self.notes.find_snapshots()
            if not snapshots:
                super().commit()
        except Exception as error:  # the model request goes on, and so does the program, with a new connection
            logger.warning("cannot give a connection back before a model request, it is discarded: %s", error)
            self._discard(connections)
        else:
            if snapshots:
                self._report(snapshots)
                return False
        return bool(connections)

    def _discard(self, connections: list[Connection]) -> None:
        values = [(each, dict(inspect(each).dict), inspect(each).unmodified) for each in self.identity_map.values()]
        for connection in connections:
            if not connection.closed:
                connection.invalidate()
        super().rollback()
        for instance, loaded, unmodified in values:  # a rollback expires all objects
            for name, value in loaded.items():
                if name in unmodified:
                    set_committed_value(instance, name, value)
                elif not name.startswith("_sa_"):
                    setattr(instance, name, value)


@event.listens_for(ReleasingSession, "after_begin")
def _note_begin(session: ReleasingSession, transaction: SessionTransaction, connection: Connection) -> None:
    session.loop = running_loop()
    session.notes.begin(connection)


@event.listens_for(ReleasingSession, "after_transaction_end")
def _note_end(session: ReleasingSession, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.notes.end()
        session.has_lent_connection = False


def _table_of(instance: object) -> str:
    table = inspect(type(instance)).local_table
    return str(getattr(table, "fullname", None) or type(instance).__name__)


class _LentConnection(AsyncConnection):
    """The connection of a session, which notes that the program takes the driver's own connection.

    That one may be used without a trace, so the session keeps it until its transaction ends.
    """

    def __init__(self, connection: AsyncConnection, session: ReleasingSession) -> None:
        super().__init__(connection.engine, connection.sync_connection)
        self._session = session

    async def get_raw_connection(self) -> PoolProxiedConnection:
        connection = await super().get_raw_connection()
        self._session.has_lent_connection = True
        return connection

    async def run_sync(self, fn: Callable[..., T], *arg: Any, **kw: Any) -> T:
        self._session.has_lent_connection = True
        return await super().run_sync(fn, *arg, **kw)


class ReleasingAsyncSession(AsyncSession):
    """An `AsyncSession` that gives its connection back before a model request, if it has only read."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine, sync_session_class=ReleasingSession, expire_on_commit=False)
        assert isinstance(self.sync_session, ReleasingSession)
        self._inner = self.sync_session
        self._lent: WeakSet[AsyncConnection] = WeakSet()

    async def connection(self, *args: Any, **options: Any) -> AsyncConnection:
        was_lent = self._inner.has_lent_connection
        connection = await super().connection(*args, **options)
        self._inner.has_lent_connection = was_lent
        if not isinstance(connection, _LentConnection):
            connection = _LentConnection(connection, self._inner)
        self._lent.add(connection)  # it counts as long as the program has it
        return connection

    async def run_sync(self, fn: Callable[..., T], *arg: Any, **kw: Any) -> T:
        """Call `fn` with the synchronous session. The session is in use until the function returns."""
        return await super().run_sync(_waiting(fn), *arg, **kw)

    @holds_database
    def find_held(self) -> tuple[Engine, str] | None:
        return self._inner.find_held()

    @before_model_request
    @releases_connection
    async def release_connection(self) -> bool:
        session = self._inner
        if not session.may_be_asked() or session.loop not in (None, asyncio.get_running_loop()):
            return False
        if isinstance(session.ongoing, _TaskRelease):  # for another model request
            await session.ongoing.ended()
            return False
        release = _TaskRelease()
        if not session.claim(release):
            return False
        try:
            may_commit = session.has_only_read(is_lent=any(not each.closed for each in self._lent))
        except BaseException:
            session.end_release()
            raise
        if not may_commit:
            session.end_release()
            return False
        # In a task: if the request is cancelled, the session must not stay in the middle of a commit.
        release.task = task = asyncio.create_task(super().run_sync(lambda _: session.give_back()))
        task.add_done_callback(lambda _: session.end_release())
        return await asyncio.shield(task)
