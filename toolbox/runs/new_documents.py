"""Describes a new run: its document, from the call and the active scope, and its header.

Not here: creating the run once (`new_runs`), the form of a document (`documents`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..chat import UserMessage
from ..context import headers_of_current_span
from ..conversations.keys import ChatMemoryKey
from ..errors import RunIncompatibleError, TranscriptError
from ..limits import UsageLimits
from ..safe_text import is_text
from ..service_names import stored_name
from ..services.plans import MethodPlan
from ..services.templates import Template
from ..transcripts import message_from_dict, message_to_dict
from .documents import RunDocument, digest_of
from .persons import current_identity, read_identity, with_token_of, write_identity
from .program_values import (
    output_fingerprint,
    write_and_read,
    write_arguments,
    write_attributes,
    write_seeds,
)
from .runs_host import RunsHost
from .store import StoredRun


@dataclass(frozen=True, slots=True)
class DescribedRun:
    """The document of a new run, with all arguments. `arguments` and `seeds` are what is read from it.

    `identity` is read from it too, but has the token of the caller.
    """

    document: RunDocument
    arguments: Mapping[str, Any]
    seeds: Mapping[Any, Any]
    identity: Any


async def describe_run(
    plan: MethodPlan,
    host: RunsHost,
    arguments: Any,
    attributes: Any,
    added_by: str,
    limits: UsageLimits | None,
) -> DescribedRun:
    """Describe a new run, from the active scope. `added_by` is the endpoint that adds tools to the call.

    `limits` are what is left for the run.

    Raises `IllegalConfigurationError` for seeds and attributes that pydantic cannot write.
    """
    written, read_again = write_arguments(plan, arguments)
    memory_id = plan.find_memory_id(arguments)
    written_seeds, seeds = await write_seeds(host.scope, host.run_seeds, plan.where)
    caller = await current_identity(host.scope)
    identity = write_identity(caller)
    named = {} if identity is None else identity["attributes"]
    document = RunDocument(
        arguments=written,
        unwritten=tuple(name for name in arguments if name not in read_again),
        output=output_fingerprint(plan),
        seeds=written_seeds,
        identity=identity,
        attributes=write_attributes(attributes, plan.where),
        added_by=added_by,
        limits=limits,
        memory_id=None if memory_id is None else str(memory_id),
        trace=current_trace(),
        digest=digest_of(written),
        identity_attributes={name: named[name] for name in host.run_identity if name in named},
    )
    return DescribedRun(document, read_again, seeds, with_token_of(caller, read_identity(identity)))


_TRACE_HEADERS = ("traceparent", "tracestate")


def current_trace() -> dict[str, str]:
    """Return the headers of the current span that identify it, without baggage, which may be about persons."""
    return {name: value for name, value in headers_of_current_span().items() if name in _TRACE_HEADERS}


# --- the message of the user


def with_message(
    document: RunDocument, plan: MethodPlan, arguments: Mapping[str, Any], message: UserMessage
) -> RunDocument:
    """Return a document with the message that input guardrails have written in place of the user's.

    What the user has said is not stored then: of the arguments, the document keeps those that are used elsewhere.
    """
    messages = plan.messages
    system = messages.system.variables if isinstance(messages.system, Template) else frozenset()
    needed = {plan.memory_parameter, plan.run_id_parameter, plan.call_options, *messages.history, *messages.contents}
    needed |= {messages.values[each] for each in system}
    kept = {name: value for name, value in document.arguments.items() if name in needed}
    if messages.continues_history:
        name = next(each for each in reversed(messages.history) if arguments[each])
        kept[name], _ = write_and_read(plan.annotations[name], [*arguments[name][:-1], message])
    dropped = tuple(name for name in document.arguments if name not in kept)
    return document.changed(arguments=kept, dropped=dropped, message=message_to_dict(message))


def read_user_message(run_id: str, document: RunDocument) -> UserMessage | None:
    """Return the message of `with_message`; None if the arguments have it. Raises `RunIncompatibleError`."""
    if document.message is None:
        return None
    try:
        message = message_from_dict(document.message)
    except TranscriptError as error:
        raise RunIncompatibleError(run_id, f"its user message cannot be read: {error}") from error
    assert isinstance(message, UserMessage)
    return message


# --- the header


def new_header(
    run_id: str, plan: MethodPlan, conversation: ChatMemoryKey | None, document: RunDocument, now: datetime
) -> StoredRun:
    """Return the header of a new run. `now` is the time of its store."""
    return StoredRun(
        id=run_id,
        service=stored_name(plan.service),
        method=plan.name,
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
