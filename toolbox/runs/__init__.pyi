# Written by `make stubs` from the tables of names in the __init__.py beside this file.
from ..chat import (
    PendingCall,
    RunSuspended,
)
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
from ..parameters import (
    IdempotencyKey,
    RunId,
)
from ..services.declaration import (
    Retries,
    durable,
)
from .prepared_runs import (
    IdentityLoader,
)
from .resuming import (
    ResumedEvents,
)
from .run_answers import (
    Answer,
    HistoryEntry,
    Run,
    approve,
    fail,
    reject,
    respond,
    retry,
)
from .run_engines import (
    LocalRunEngine,
    RunEngine,
)
from .run_events import (
    RunEnded,
    RunEvent,
    RunEvents,
)
from .runs_bean import (
    Runs,
    runs_of,
)
from .store import (
    InMemoryRunStore,
    KEEP,
    Ownership,
    RunChanges,
    RunLook,
    RunStatus,
    RunStore,
    StoredEvent,
    StoredRecord,
    StoredRun,
    next_at_after,
    ownership_after,
)

__all__ = [
    "Answer",
    "AnswerForbiddenError",
    "ConversationSuspendedError",
    "HistoryEntry",
    "IdempotencyKey",
    "IdentityLoader",
    "InMemoryRunStore",
    "KEEP",
    "LeaseLostError",
    "LocalRunEngine",
    "Ownership",
    "PendingCall",
    "ResumedEvents",
    "Retries",
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
    "next_at_after",
    "ownership_after",
    "reject",
    "respond",
    "retry",
    "runs_of",
]
