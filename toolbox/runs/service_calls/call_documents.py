"""What the document of a run has of a service call: its arguments, the endpoint that adds tools, and the user message.

Not here: what is the same for every run (`new_documents`), the JSON of the values (`method_values`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...chat import UserMessage
from ...errors import RunIncompatibleError, TranscriptError
from ...limits import UsageLimits
from ...services.plans import MethodPlan
from ...services.templates import Template
from ...transcripts import message_from_dict, message_to_dict
from ..documents import RunDocument
from ..new_documents import DescribedRun, describe_run
from ..program_values import write_and_read
from ..runs_host import RunsHost
from .method_values import output_fingerprint, write_arguments


async def describe_call(
    plan: MethodPlan,
    host: RunsHost,
    arguments: Mapping[str, Any],
    attributes: Mapping[str, Any],
    added_by: str,
    limits: UsageLimits | None,
) -> tuple[DescribedRun, Mapping[str, Any]]:
    """Describe a new run of a service method, from the active scope. Returns the arguments as they are read again, too.

    `added_by` is the endpoint that adds tools to the call. `limits` are what is left for the run. Raises
    `IllegalConfigurationError` for seeds and attributes that pydantic cannot write.
    """
    written, read_again = write_arguments(plan, arguments)
    memory_id = plan.find_memory_id(arguments)
    begun = RunDocument(
        arguments=written,
        unwritten=tuple(name for name in arguments if name not in read_again),
        output=output_fingerprint(plan),
        added_by=added_by,
        memory_id=None if memory_id is None else str(memory_id),
    )
    return await describe_run(host, plan.where, begun, attributes, limits), read_again


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
