"""Describes a new run: what its document has whatever its body is, from the active scope, and its header.

Not here: what a body writes into the document (`service_calls`), creating the run once (`new_runs`), the form of a
document (`documents`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..context import headers_of_current_span
from ..conversations.keys import ChatMemoryKey
from ..limits import UsageLimits
from ..safe_text import is_text
from ..service_names import stored_name
from .documents import RunDocument, digest_of
from .persons import current_identity, read_identity, with_token_of, write_identity
from .program_values import write_attributes, write_seeds
from .runs_host import RunsHost
from .store import StoredRun


@dataclass(frozen=True, slots=True)
class DescribedRun:
    """The document of a new run, with all arguments. `seeds` are what is read from it.

    `identity` is read from it too, but has the token of the caller.
    """

    document: RunDocument
    seeds: Mapping[Any, Any]
    identity: Any


async def describe_run(
    host: RunsHost, where: str, begun: RunDocument, attributes: Mapping[str, Any], limits: UsageLimits | None
) -> DescribedRun:
    """Describe a new run, from the active scope: `begun` is its document with what its body has written.

    `limits` are what is left for the run. `where` names its method in errors: raises `IllegalConfigurationError` for
    seeds and attributes that pydantic cannot write.
    """
    written_seeds, seeds = await write_seeds(host.scope, host.run_seeds, where)
    caller = await current_identity(host.scope)
    identity = write_identity(caller)
    named = {} if identity is None else identity["attributes"]
    document = begun.changed(
        seeds=written_seeds,
        identity=identity,
        attributes=write_attributes(attributes, where),
        limits=limits,
        trace=current_trace(),
        digest=digest_of(begun.arguments),
        identity_attributes={name: named[name] for name in host.run_identity if name in named},
    )
    return DescribedRun(document, seeds, with_token_of(caller, read_identity(identity)))


_TRACE_HEADERS = ("traceparent", "tracestate")


def current_trace() -> dict[str, str]:
    """Return the headers of the current span that identify it, without baggage, which may be about persons."""
    return {name: value for name, value in headers_of_current_span().items() if name in _TRACE_HEADERS}


# --- the header


def new_header(
    run_id: str,
    service: type[Any],
    method: str,
    conversation: ChatMemoryKey | None,
    document: RunDocument,
    now: datetime,
) -> StoredRun:
    """Return the header of a new run. `now` is the time of its store."""
    return StoredRun(
        id=run_id,
        service=stored_name(service),
        method=method,
        status="running",
        document=document.to_json(),
        created_at=now,
        updated_at=now,
        conversation=None if conversation is None else conversation_key(conversation),
        started_by=_text_or_none(document.started_by),
        memory_id=_text_or_none(document.memory_id),
    )


def _text_or_none(given: str | None) -> str | None:
    return given if given is not None and is_text(given) else None


def conversation_key(key: ChatMemoryKey) -> str:
    """Return the key of a conversation for stores of runs, which has 64 characters."""
    return hashlib.sha256(f"{key.service}\0{key.memory_id}".encode()).hexdigest()
