"""Runs: service calls that wait for a person or for a result, and calls that survive the process.

The names are loaded on first use, so that services can use the parts of this package without loading all of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chat import PendingCall, RunSuspended
    from ..context import IdempotencyKey, RunId
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
    from ..services.declaration import durable
    from .event_log import RunEnded, RunEvent, RunEvents
    from .inbox import IdentityLoader, ResumedEvents, Runs, runs_of
    from .starting import LocalRunEngine, RunEngine
    from .store import (
        Answer,
        HistoryEntry,
        InMemoryRunStore,
        Run,
        RunChanges,
        RunStatus,
        RunStore,
        StoredEvent,
        StoredRecord,
        StoredRun,
        approve,
        fail,
        reject,
        respond,
        retry,
    )

_HOMES = {
    "..chat": ("PendingCall", "RunSuspended"),
    "..context": ("IdempotencyKey", "RunId"),
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
    ".inbox": ("IdentityLoader", "ResumedEvents", "Runs", "runs_of"),
    ".event_log": ("RunEnded", "RunEvent", "RunEvents"),
    ".starting": ("LocalRunEngine", "RunEngine"),
    ".store": (
        "Answer",
        "HistoryEntry",
        "InMemoryRunStore",
        "Run",
        "RunChanges",
        "RunStatus",
        "RunStore",
        "StoredEvent",
        "StoredRecord",
        "StoredRun",
        "approve",
        "fail",
        "reject",
        "respond",
        "retry",
    ),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module 'toolbox.runs' has no attribute {name!r}")
    value: object = getattr(import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


__all__ = [
    "Answer",
    "AnswerForbiddenError",
    "ConversationSuspendedError",
    "HistoryEntry",
    "IdentityLoader",
    "IdempotencyKey",
    "InMemoryRunStore",
    "LeaseLostError",
    "LocalRunEngine",
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
    "reject",
    "respond",
    "retry",
    "runs_of",
]
