"""What the document of a run has of a service call, as JSON: its arguments, the message of its user, and its value.

Not here: what is the same for every run (`new_documents`), how a value of a type is written (`program_values`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ...chat import AiMessage, FinishReason, UserMessage
from ...errors import RunIncompatibleError, TranscriptError
from ...introspection import type_name
from ...json_text import whole_json
from ...limits import UsageLimits
from ...services.answers import restored_result
from ...services.outputs import Kind, Result, Shape
from ...services.plans import MethodPlan
from ...services.state import State
from ...services.stored_forms import adapter_of
from ...services.templates import Template
from ...tools.results import json_values
from ...transcripts import message_from_dict, message_to_dict
from ..documents import RunDocument
from ..new_documents import DescribedRun, describe_run
from ..program_values import read_as, reason_of, write_and_read
from ..runs_host import RunsHost


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


# --- arguments of the method


def write_arguments(plan: MethodPlan, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments as JSON values, and as they are read again; without those that pydantic cannot write."""
    written, read_again = {}, {}
    for name, value in arguments.items():
        with suppress(Exception):  # pydantic and serializers raise many kinds of exceptions
            written[name], read_again[name] = write_and_read(plan.annotations.get(name, Any), value)
    return written, read_again


def refuse_other_type(plan: MethodPlan, name: str, value: Any) -> None:
    """Raise `TypeError` if an argument is not of the type that the method declares."""
    annotation = plan.annotations.get(name, Any)
    try:
        is_of_type = type(adapter_of(annotation).validate_python(value, strict=True)) is type(value)
    except ValidationError:
        is_of_type = False
    except Exception:  # a type that pydantic does not know, or a validator that fails
        return
    if not is_of_type:
        raise TypeError(f"{plan.where}(): {name} must be {type_name(annotation)}, got {type(value).__name__}")


def read_arguments(run_id: str, plan: MethodPlan, document: RunDocument) -> dict[str, Any]:
    """Return the arguments of the method; None for those that were not stored. Raises `RunIncompatibleError`."""
    arguments: dict[str, Any] = {}
    stored = {*document.arguments, *document.unwritten, *document.dropped}
    parameters = plan.signature.parameters
    if gone := sorted(stored - {*parameters}):
        raise RunIncompatibleError(run_id, f"{plan.where} has no parameter {gone[0]!r} any more")
    for name, parameter in parameters.items():
        if name in document.unwritten or name in document.dropped:
            arguments[name] = None
        elif name in document.arguments:
            try:
                arguments[name] = read_as(plan.annotations.get(name, Any), document.arguments[name])
            except Exception as error:  # pydantic and serializers raise many kinds of exceptions
                reason = f"the argument {name!r} of {plan.where} is no longer valid: {reason_of(error)}"
                raise RunIncompatibleError(run_id, reason) from error
        elif parameter.default is parameter.empty:
            raise RunIncompatibleError(run_id, f"{plan.where} has the new parameter {name!r}")
        else:
            arguments[name] = parameter.default
    return arguments


# --- results of the method


def output_fingerprint(plan: MethodPlan) -> str:
    """Return a text that changes with the method's return type."""
    output = plan.output
    text: str = output.kind.value
    if output.kind is Kind.STRUCTURED:
        text += json.dumps(adapter_of(output.type).json_schema(), sort_keys=True)
    is_list = output.shape is Shape.ITEM_STREAM
    return hashlib.sha256(f"{text}{is_list}".encode()).hexdigest()[:16]


def write_value(plan: MethodPlan, value: Any) -> Any:
    """Return the JSON form of the method's value: a list with it, or an empty one for None."""
    if value is None:
        return []
    if isinstance(value, AiMessage):
        return [message_to_dict(value)]
    written = _value_adapter(plan).dump_python(value, mode="json", by_alias=True)
    return [json.loads(whole_json(json_values(written)))]


def read_value(plan: MethodPlan, written: Any) -> Any:
    """Return the value that `write_value` wrote."""
    if not written:
        return None
    if plan.output.kind is Kind.MESSAGE:
        return message_from_dict(written[0])
    return _value_adapter(plan).validate_json(whole_json(written[0]))


def _value_adapter(plan: MethodPlan) -> Any:
    """Return the adapter of the method's value, which writes and reads the kinds of unions."""
    structure = plan.output.structure
    return adapter_of(str) if structure is None else structure.type.adapter


def write_details(result: Result[Any]) -> dict[str, Any]:
    """Return what a `Result` has besides its content, as JSON values."""
    state = State(
        None,
        (),
        tuple(result.messages),
        executions=tuple(result.tool_executions),
        token_usage=result.token_usage,
        compensations=tuple(result.compensations),
        passages=tuple(result.sources),
    )
    facts = {
        "finish_reason": result.finish_reason,
        "response_id": result.response_id,
        "stopped_by": result.stopped_by,
        "answered_by": result.answered_by,
    }
    return {"state": state.to_dict(), **facts}


def read_details(plan: MethodPlan, content: Any, written: Mapping[str, Any] | None) -> Result[Any]:
    """Return the `Result` with this content and the details that `write_details` wrote."""
    if written is None:
        return Result(content)
    reason = written["finish_reason"]
    state = with_restored_results(plan, State.from_dict(written["state"]))
    result = state.result(content, None if reason is None else FinishReason(reason), written.get("answered_by"))
    return replace(result, response_id=written.get("response_id"), stopped_by=written.get("stopped_by"))


def with_restored_results(plan: MethodPlan, state: State) -> State:
    """Return a state that was stored, with the results of tools in their types."""

    def read_result(name: str, value: Any) -> Any:
        found = (each.toolset.stored(name) for each in (plan, *plan.team.values()))
        tool = next((each for each in found if each is not None), None)
        return value if tool is None else restored_result(tool.returns, value)

    return state.with_results(read_result)
