"""Runs: service calls that wait for a person or for a result, and calls that survive the process.

The names are loaded on first use, so that services can use the parts of this package without loading all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from ..chat import PendingCall, RunSuspended
    from ..errors import (
        AnswerForbiddenError,
        ConversationSuspendedError,
        LeaseLostError,
        RunAnswerError,
        RunBusyError,
        RunCancelledError,
        RunConflictError,
        RunFailedError,
        RunIncompatibleError,
        RunNotFoundError,
        RunStateError,
        RunStoreError,
        RunSuspendedError,
        ToolDeferred,
    )
    from ..parameters import IdempotencyKey, RunId
    from ..services.declaration import durable
    from .prepared_runs import IdentityLoader
    from .resuming import ResumedEvents
    from .run_answers import Answer, HistoryEntry, Run, approve, fail, reject, respond, retry
    from .run_engines import LocalRunEngine, RunEngine
    from .run_events import RunEnded, RunEvent, RunEvents
    from .runs_bean import Runs, runs_of
    from .store import (
        KEEP,
        InMemoryRunStore,
        Ownership,
        RunChanges,
        RunLook,
        RunStatus,
        RunStore,
        StoredEvent,
        StoredRecord,
        StoredRun,
        ownership_after,
    )

_HOMES = {
    "..chat": ("PendingCall", "RunSuspended"),
    "..parameters": ("IdempotencyKey", "RunId"),
    "..errors": (
        "AnswerForbiddenError",
        "ConversationSuspendedError",
        "LeaseLostError",
        "RunAnswerError",
        "RunBusyError",
        "RunCancelledError",
        "RunConflictError",
        "RunFailedError",
        "RunIncompatibleError",
        "RunNotFoundError",
        "RunStateError",
        "RunStoreError",
        "RunSuspendedError",
        "ToolDeferred",
    ),
    "..services.declaration": ("durable",),
    ".run_engines": ("LocalRunEngine", "RunEngine"),
    ".run_events": ("RunEnded", "RunEvent", "RunEvents"),
    ".prepared_runs": ("IdentityLoader",),
    ".resuming": ("ResumedEvents",),
    ".runs_bean": ("Runs", "runs_of"),
    ".run_answers": ("Answer", "HistoryEntry", "Run", "approve", "fail", "reject", "respond", "retry"),
    ".store": (
        "KEEP",
        "InMemoryRunStore",
        "Ownership",
        "RunChanges",
        "RunLook",
        "RunStatus",
        "RunStore",
        "StoredEvent",
        "StoredRecord",
        "StoredRun",
        "ownership_after",
    ),
}

__getattr__, __dir__ = names_on_first_use(__name__, _HOMES)

__all__ = [
    "KEEP",
    "Answer",
    "AnswerForbiddenError",
    "ConversationSuspendedError",
    "HistoryEntry",
    "IdentityLoader",
    "IdempotencyKey",
    "InMemoryRunStore",
    "LeaseLostError",
    "LocalRunEngine",
    "Ownership",
    "PendingCall",
    "ResumedEvents",
    "Run",
    "RunAnswerError",
    "RunBusyError",
    "RunCancelledError",
    "RunChanges",
    "RunConflictError",
    "RunEnded",
    "RunEngine",
    "RunEvent",
    "RunEvents",
    "RunFailedError",
    "RunId",
    "RunIncompatibleError",
    "RunLook",
    "RunNotFoundError",
    "RunStateError",
    "RunStatus",
    "RunStore",
    "RunStoreError",
    "RunSuspended",
    "RunSuspendedError",
    "Runs",
    "StoredEvent",
    "StoredRecord",
    "StoredRun",
    "ToolDeferred",
    "approve",
    "durable",
    "fail",
    "ownership_after",
    "reject",
    "respond",
    "retry",
    "runs_of",
]
