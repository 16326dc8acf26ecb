"""`StoredRuns`: loads runs from the store of a container, waits for them, and reads what callers see of them.

Not here: continuing a run (`prepared_runs`, `run_execution`), the JSON of its header (`documents`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar
from uuid import uuid4

from pydantic_core import to_json

from ..chat import PendingCall
from ..conversations.keys import ChatMemoryKey
from ..errors import RunIncompatibleError, RunNotFoundError
from ..execution.threads import await_on
from ..safe_text import is_text, printable
from ..store_clock import clock_of
from .documents import RunDocument, UnreadableDocumentError
from .new_documents import conversation_key
from .run_answers import Run
from .run_looks import RunLooks
from .run_session import RunSession, store_errors_of
from .runs_host import RunsHost
from .store import ENDED, KEEP, Keep, RunChanges, RunLook, RunStore, StoredRecord, StoredRun, supports_of

T = TypeVar("T")


class StoredRuns:
    """The stored runs of a host. `owner` names this process in their leases; `looks` are for those who wait for one."""

    def __init__(self, host: RunsHost) -> None:
        self._host = host
        self.looks = RunLooks(self.look)
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"  # of this start of the container

    def find_service(self, name: str) -> type[Any] | None:
        """Return the class of the service with this stored name, if this program has it."""
        return self._host.find_class(name)

    # --- loading

    async def open(self) -> RunStore:
        """Return the opened store."""
        return await self._host.run_store()

    @asynccontextmanager
    async def using(self, run_id: str) -> AsyncIterator[RunStore]:
        """Use the opened store for a run inside the block. Raises `RunStoreError` for errors of the store."""
        store = await self.open()
        with store_errors_of(run_id):
            yield store

    async def now(self) -> datetime:
        """Return the time by the clock of the store, or of this process if the store's is on a server."""
        return clock_of(await self.open()).now()

    async def store_time(self) -> datetime:
        """Return the time by the clock of the store, also of one on a server, for what is due at a time."""
        store = await self.open()
        return await store.now() if supports_of(store) else await self.now()

    async def load(self, run_id: str) -> StoredRun:
        """Return a run. Raises `RunNotFoundError` and `RunStoreError`."""
        # No run has another id, and databases refuse some of them with other errors.
        if (stored := await self.find(run_id)) is None:
            raise RunNotFoundError(run_id if is_storable(run_id) else shortened(run_id))
        return stored

    async def find(self, run_id: str) -> StoredRun | None:
        """Return a run, or None for an unknown one. Raises `RunStoreError`."""
        if not is_storable(run_id):
            return None
        async with self.using(run_id) as store:
            return await store.load(run_id)

    async def acquire(self, run_id: str) -> StoredRun | None:
        """Take a run, and return it with a new generation; None if it is unknown, or not runnable."""
        if not is_storable(run_id):
            return None
        async with self.using(run_id) as store:
            return await store.acquire(run_id, self.owner)

    async def records(self, run_id: str) -> list[StoredRecord]:
        """Return all records of a run."""
        async with self.using(run_id) as store:
            return await store.records(run_id)

    async def change(self, stored: StoredRun, document: RunDocument, changes: RunChanges) -> StoredRun | None:
        """Change a run that has not changed since it was read, and let it lie under the present name of its service.

        `document` is the new one. Returns the new header; None if the run has changed.
        """
        async with self.using(stored.id) as store:
            return await store.change(stored.id, stored.version, self.moved(stored, document, changes))

    async def look(self, run_id: str) -> RunLook:
        """Return what changes of a run. Raises `RunNotFoundError`."""
        if not is_storable(run_id):
            raise RunNotFoundError(shortened(run_id))
        async with self.using(run_id) as store:
            found = await store.look(run_id)
        if found is None:
            raise RunNotFoundError(run_id)
        return found

    async def wait_for_end(self, run_id: str) -> StoredRun:
        """Wait until a run has ended, also over suspensions. Raises `RunNotFoundError`."""
        seen: RunLook | None = None
        while seen is None or seen.status not in ENDED:
            seen = await self.looks.after(run_id, seen)
        return await self.load(run_id)

    # --- where to wait

    async def on_home(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the container's loop. The container does not wait for it when it stops."""
        home = self._host.loop
        if home is None or home is asyncio.get_running_loop():
            return await work()
        return await await_on(home, work)

    # --- reading what is stored

    def show(self, stored: StoredRun) -> Run[Any]:
        """Return a run as callers see it, also one that this program cannot read."""
        try:
            document = _read_document(stored)
            _refuse_unshowable(stored, document)
        except UnreadableDocumentError as error:
            document = RunDocument(error_type="RunIncompatibleError", error_text=str(error))
        return Run(
            id=stored.id,
            service=self.present_name(stored.service),
            method=stored.method,
            status=stored.status,
            pending=self._pending_of(stored, document),
            created_at=stored.created_at,
            updated_at=stored.updated_at,
            history=document.history,
            error=error_text_of(document),
            started_by=stored.started_by or document.started_by,
            memory_id=stored.memory_id or document.memory_id,
            attempts=document.attempts,
            identity_attributes=named_attributes(document, self._host.run_identity),
        )

    def _pending_of(self, stored: StoredRun, document: RunDocument) -> tuple[PendingCall, ...]:
        """Return the calls that wait for an answer, with the present names of their services."""
        if stored.status != "suspended":
            return ()
        return tuple(replace(each, service=self.present_name(each.service)) for each in document.pending)

    def names_of(self, service: str | type[Any]) -> tuple[str, ...]:
        """Return all stored names of a service, the present one first; `service` is its class or one of its names."""
        return self._host.names_of(service)

    def present_name(self, service: str) -> str:
        """Return the present stored name of a service with this name, also a former one; an unknown one stays."""
        return self.names_of(service)[0]

    def conversation_of(self, stored: StoredRun) -> ChatMemoryKey | None:
        """Return the conversation of a run, also of one that this program cannot read; None without one."""
        memory_id = memory_id_of(stored)
        if stored.conversation is None or memory_id is None:
            return None
        name, *former = self.names_of(stored.service)
        return ChatMemoryKey(name, memory_id, tuple(former))

    async def suspended_in(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation, also under a former name of its service, or None."""
        store = await self.open()
        for name in self.names_of(key.service):
            if (found := await store.suspended_in(conversation_key(ChatMemoryKey(name, key.memory_id)))) is not None:
                return found
        return None

    def label_of(self, service: str) -> str:
        """Return the name of the class of a service with this stored name, for error texts."""
        return self._host.label_of(service)

    def moved(self, stored: StoredRun, document: RunDocument, changes: RunChanges) -> RunChanges:
        """Return changes of a run that also move it to the present name of its service, if it lies under another."""
        name = self.present_name(stored.service)
        if name == stored.service:
            return changes
        conversation: str | Keep | None = KEEP
        if stored.conversation is not None and document.memory_id is not None:
            conversation = conversation_key(ChatMemoryKey(name, document.memory_id))
        return replace(changes, service=name, conversation=conversation)

    async def session_of(self, stored: StoredRun, document: RunDocument) -> RunSession:
        """Return a run with its records, to read what it has done: it is not executed."""
        return RunSession.of(stored, document, await self.records(stored.id), await self.open())


def read_document(stored: StoredRun) -> RunDocument:
    """Return the header of a run. Raises `RunIncompatibleError`."""
    try:
        return _read_document(stored)
    except UnreadableDocumentError as error:
        raise RunIncompatibleError(stored.id, str(error)) from error


def _read_document(stored: StoredRun) -> RunDocument:
    """Return the document of a run, with the memory id also if release 0.1 has stored it among the arguments alone."""
    document = RunDocument.from_json(stored.document)
    if document.memory_id is None and stored.conversation is not None:
        for value in map(str, document.arguments.values()):
            if is_text(value) and conversation_key(ChatMemoryKey(stored.service, value)) == stored.conversation:
                return document.changed(memory_id=value)
    return document


def memory_id_of(stored: StoredRun) -> str | None:
    """Return the memory id of a run; runs of earlier releases, and stores of programs, have it in the document only."""
    return stored.memory_id if stored.memory_id is not None else document_or_empty(stored).memory_id


def document_or_empty(stored: StoredRun) -> RunDocument:
    """Return the document of a run; an empty one for a run of another version of the program."""
    try:
        return _read_document(stored)
    except UnreadableDocumentError:
        return RunDocument()


def named_attributes(document: RunDocument, run_identity: Iterable[str]) -> Mapping[str, Any]:
    """Return the attributes of the identity that `run_identity=` names; for runs of earlier releases, names now."""
    if document.identity_attributes is not None:
        return document.identity_attributes
    written = {} if document.identity is None or document.is_reduced else document.identity["attributes"]
    return {name: written[name] for name in run_identity if name in written}


def error_text_of(document: RunDocument) -> str | None:
    """Return the error of a failed run, or the reason of a cancelled one."""
    if document.error_type is not None:
        return printable(f"{document.error_type}: {document.error_text}")
    return None if document.reason is None else printable(document.reason)


_ROOM = 10
"""The levels of JSON that a client may put around a run: pydantic writes 255 levels."""


def _refuse_unshowable(stored: StoredRun, document: RunDocument) -> None:
    """Raise `UnreadableDocumentError` if a client cannot get the pending calls and the history as JSON.

    A model can write half a surrogate, or nest its arguments too deeply: one such run must not break all lists.
    """
    shown: Any = (document.pending if stored.status == "suspended" else (), document.history)
    for _ in range(_ROOM):
        shown = [shown]
    try:
        to_json(shown)
    except (ValueError, RecursionError):
        reason = "its pending calls or its history have half a surrogate or are nested too deeply"
        raise UnreadableDocumentError(reason) from None


def is_storable(run_id: object) -> bool:
    """Return True for a text that can be the id of a run: 1 to 200 characters that a database can store."""
    return isinstance(run_id, str) and 0 < len(run_id) <= 200 and is_text(run_id)


def shortened(given: object) -> str:
    """Return what a client sent, for an error text."""
    text = repr(given)
    return text if len(text) <= 100 else f"{text[:99]}…"
