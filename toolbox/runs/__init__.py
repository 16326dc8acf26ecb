"""Runs: service calls that wait for a person or for a result, and calls that survive the process.

The names are loaded on first use, so that services can use the parts of this package without loading all of it. Type
checkers and editors read `__init__.pyi`, which `make stubs` writes from the table below.
"""

from __future__ import annotations

from ..first_use import names_on_first_use

_LISTED = {
    "..chat": "PendingCall RunSuspended",
    "..errors": """
        AnswerForbiddenError ConversationSuspendedError LeaseLostError RunAnswerError RunBusyError RunCancelledError
        RunConflictError RunFailedError RunIncompatibleError RunNotFoundError RunStateError RunStoreError
        RunSuspendedError ToolDeferred
    """,
    "..parameters": "IdempotencyKey RunId",
    "..services.declaration": "Retries durable",
    ".prepared_runs": "IdentityLoader",
    ".resuming": "ResumedEvents",
    ".run_answers": "Answer HistoryEntry Run approve fail reject respond retry",
    ".run_engines": "LocalRunEngine RunEngine",
    ".run_events": "RunEnded RunEvent RunEvents",
    ".runs_bean": "Runs runs_of",
    ".store": """
        InMemoryRunStore KEEP Ownership RunChanges RunLook RunStatus RunStore StoredEvent StoredRecord StoredRun
        next_at_after ownership_after
    """,
}

__getattr__, __dir__ = names_on_first_use(__name__, _LISTED)
__all__ = sorted(" ".join(_LISTED.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the .pyi
