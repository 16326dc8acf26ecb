"""Stores a call that was suspended: its header and the states of its invocations.

Not here: the records within a run (`places`), continuing it (`inbox`).
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from ..context import ActiveScope
from ..services.memory import ChatMemoryKey
from .codecs import (
    current_identity,
    output_fingerprint,
    qualified,
    write_arguments,
    write_attributes,
    write_identity,
    write_seeds,
)
from .documents import RunDocument
from .store import RunStore, StoredRun

if TYPE_CHECKING:
    from ..services.plans import MethodPlan
    from .places import RunSession


class StoringHost(Protocol):
    """Hosts services, and provides their store of runs."""

    scope: ActiveScope
    run_seeds: tuple[Any, ...]

    async def run_store(self) -> RunStore:
        """Return the store of the runs."""
        ...


async def suspend(invocation: Any) -> None:
    """Store the run of an invocation that was suspended; an inner invocation waits for the outermost one."""
    session: RunSession = invocation.place.session
    if session.cancels:
        raise session.cancelled()
    session.note_suspended(invocation)
    if invocation.place.path:
        return
    host: StoringHost = invocation.host
    store = await host.run_store()
    stored = None
    if session.document is None:
        plan, context = invocation.plan, invocation.context
        session.document = await describe(plan, host, invocation.arguments, context.attributes, invocation.added_by)
        stored = header(session.id, plan, invocation.memory_key)
        session.store = store
    await session.store_suspension(stored)


def header(run_id: str, plan: MethodPlan, conversation: ChatMemoryKey | None) -> StoredRun:
    """Return the header of a new run, without its document."""
    now = datetime.now(UTC)
    return StoredRun(
        id=run_id,
        service=qualified(plan.service),
        method=plan.name,
        status="running",
        document="",
        created_at=now,
        updated_at=now,
        conversation=None if conversation is None else conversation_key(conversation),
    )


def conversation_key(key: ChatMemoryKey) -> str:
    """Return the key of a conversation for stores of runs, which has 64 characters."""
    return hashlib.sha256(f"{key.service}\0{key.memory_id}".encode()).hexdigest()


async def describe(plan: MethodPlan, host: StoringHost, arguments: Any, attributes: Any, added_by: str) -> RunDocument:
    """Return the document of a new run, from the active scope. `added_by` is the endpoint that adds tools to the call.

    Raises `IllegalConfigurationError` for seeds and attributes that pydantic cannot write.
    """
    written, unwritten = write_arguments(plan, arguments)
    return RunDocument(
        arguments=written,
        unwritten=unwritten,
        output=output_fingerprint(plan),
        seeds=await write_seeds(host.scope, host.run_seeds, plan.where),
        identity=write_identity(await current_identity(host.scope)),
        attributes=write_attributes(attributes, plan.where),
        added_by=added_by,
    )
