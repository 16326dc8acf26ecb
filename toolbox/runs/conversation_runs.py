"""`ConversationRuns`: the runs of conversations, for those who show, stop, delete or forget a conversation.

Not here: the conversations themselves (`toolbox.conversations`), cancelling one run (`cancelling`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from ..conversations.keys import ChatMemoryKey, Owner
from ..conversations.stopping import STOPPED
from ..conversations.stores import keeps_logs
from ..errors import RunNotFoundError
from .runs_host import RunsHost
from .store import ENDED, Position, RunStatus, StoredRun, position_of, supports_of
from .stored_runs import StoredRuns, document_or_empty, memory_id_of, named_attributes

_PAGE = 100


class ConversationRuns:
    """The runs of the conversations of a host. `cancel` cancels a run and returns when it has ended."""

    def __init__(self, host: RunsHost, runs: StoredRuns, cancel: Callable[[str, str, Any], Awaitable[Any]]) -> None:
        self._host, self._runs, self._cancel = host, runs, cancel

    async def unended(self, service: str | type[Any], memory_id: str) -> list[StoredRun]:
        """Return the runs of a conversation that have not ended, newest first."""
        # Twice "running": a run may go on while the suspended ones are read.
        statuses: tuple[RunStatus, ...] = ("running", "suspended", "running")
        found = {run.id: run for status in statuses async for run in self._find(service, memory_id, status)}
        return sorted(found.values(), key=position_of, reverse=True)

    async def stop(self, key: ChatMemoryKey, by: Any, stop_call: Callable[[], Awaitable[bool]]) -> bool:
        """End the call at work with `stop_call`, or the run; return False if there is neither."""
        before = await self._find_at_work(key)
        was_at_work = await stop_call()
        run = await self._find_at_work(key)
        if run is None:
            return was_at_work
        was_there = before is not None and (before.id, before.status) == (run.id, run.status)
        # Who stops a call does not mean a run that has begun since, or one that waits beside the call.
        if was_at_work and was_there is (run.status == "suspended"):
            return True
        # The run has just left the conversation, and is about to end; or its process is gone.
        await self._cancel(run.id, STOPPED, by)
        return True

    async def _find_at_work(self, key: ChatMemoryKey) -> StoredRun | None:
        """Return the run that has a conversation, or waits for it longest; without one, the newest suspended one."""
        running = [run async for run in self._find(key.service, key.memory_id, "running")]
        if running:
            return min(running, key=position_of)
        return next(iter(await self.unended(key.service, key.memory_id)), None)

    async def cancel_waiting(self, service: str | type[Any], memory_id: str | None, reason: str, by: Any) -> int:
        """Cancel the runs of a conversation that wait for an answer, or for their next try; return their number.

        Without a memory id, those of all conversations of the service. A run that is executed stays.
        """
        waiting = [run async for run in self._find(service, memory_id, "suspended") if _has_memory(run)]
        between_tries = [run async for run in self._find(service, memory_id, "running") if _has_memory(run)]
        waiting += [run for run in between_tries if run.owner is None and run.next_at is not None]
        for run in waiting:
            with suppress(RunNotFoundError):  # deleted in between
                await self._cancel(run.id, reason, by)
        return len(waiting)

    async def forget_ended(self, owner: Owner | None, service: str | type[Any] | None, memory_id: str | None) -> int:
        """Delete ended runs, and return their number.

        With a memory id, those of this conversation; with a service alone, those of all its conversations; with an
        owner, those that this person has started outside of conversations, or in one that does not exist any more.
        """
        store, deleted = await self._runs.open(), 0
        for status in sorted(ENDED):
            async for run in self._find(service, memory_id, status, started_by=None if owner is None else owner.name):
                is_chosen = _has_memory(run) if owner is None else await self._is_left_by(run, owner)
                if is_chosen:
                    await store.delete(run.id)
                    deleted += 1
        return deleted

    async def _find(
        self,
        service: str | type[Any] | None,
        memory_id: str | None,
        status: RunStatus,
        started_by: str | None = None,
    ) -> AsyncIterator[StoredRun]:
        """Yield headers, newest first under each name of the service; they may be deleted in between."""
        store = await self._runs.open()
        names: tuple[str | None, ...] = (None,) if service is None else self._runs.names_of(service)
        room: dict[str, Any] = {}
        if memory_id is not None and "conversations" in supports_of(store):
            room = {"memory_id": memory_id}
        for name in names:
            before: Position | None = None
            while True:
                page = await store.find(
                    status=status, service=name, limit=_PAGE, before=before, started_by=started_by, **room
                )
                for run in page:
                    if memory_id is None or memory_id_of(run) == memory_id:
                        yield run
                if len(page) < _PAGE:
                    break
                before = position_of(page[-1])

    async def _is_left_by(self, run: StoredRun, owner: Owner) -> bool:
        """Return True if a run of this person belongs to no conversation that exists."""
        if dict(named_attributes(document_or_empty(run), self._host.run_identity)) != dict(owner.attributes):
            return False
        if (key := self._runs.conversation_of(run)) is None:
            return True
        store = (await self._host.memories()).store
        return keeps_logs(store) and await store.read_since(key, lambda head: head.next_number) is None


def _has_memory(run: StoredRun) -> bool:
    return memory_id_of(run) is not None
