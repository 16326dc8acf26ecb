"""The contents of records as versioned JSON: states, replies of models, results of tools.

Not here: which record is written when (`run_invocations`, `tool_records`), the fields of a state (`services.state`),
what services declare themselves (`services.recording_needs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...chat import ToolExecutionResultMessage
from ...errors import ToolRetry
from ...services.loop import ModelReplied
from ...services.recording_needs import RecordedToolError, type_name_of
from ...services.state import State
from ...tools.failures import message_of
from ...tools.results import Encoded, EncodedInFull, json_values
from ...transcripts import message_from_dict, message_to_dict
from ..documents import VERSION

# --- states and replies

_WHOLE = ("system", "history", "prompted", "response")
"""Fields of a state that are large and rarely change: a record leaves them out if they are the same as before."""
_GROWING = ("messages", "executions")
"""Fields of a state that grow: a record contains only the new part."""


def state_to_json(state: State, before: State | None) -> str:
    """Write a state as JSON text, without what it shares with `before`."""
    if before is None:
        return f'{{"kept":[],"shared":{{}},"state":{state.to_json()}}}'
    empty: dict[str, Any] = {"history": (), "system": None, "prompted": None, "response": None}
    kept = [name for name in _WHOLE if getattr(state, name) is getattr(before, name)]
    changes: dict[str, Any] = {name: empty[name] for name in kept}
    shared: dict[str, int] = {}
    for name in _GROWING:
        now, earlier = getattr(state, name), getattr(before, name)
        count = len(earlier)
        if len(now) >= count and all(new is old for new, old in zip(now, earlier, strict=False)):
            shared[name], changes[name] = count, now[count:]
    trimmed = state.changed(**changes).to_json()
    return f'{{"kept":{json.dumps(kept)},"shared":{json.dumps(shared)},"state":{trimmed}}}'


def state_from_dict(written: Mapping[str, Any], before: State | None) -> State:
    """Read a state written by `state_to_json`."""
    state = State.from_dict(written["state"])
    if before is None:
        return state
    changes: dict[str, Any] = {name: getattr(before, name) for name in written["kept"]}
    for name, count in written["shared"].items():
        changes[name] = (*getattr(before, name)[:count], *getattr(state, name))
    return state.changed(**changes)


def reply_to_json(
    state: State,
    before: State | None,
    replied: ModelReplied,
    usage: Mapping[str, Any] | None = None,
    unfit: Sequence[int] = (),
    failures: int = 0,
) -> str:
    """Write the state before a model's reply, the usage counted before it, and the reply.

    `unfit` are the positions of its calls that the program refused when the reply came; `failures` is how often the run
    had failed before.
    """
    reply = State(None, (), tuple(replied.aside), response=replied.response, sent=replied.sent).to_json()
    counted = json.dumps(usage)
    about = f'"version":{VERSION},"usage":{counted},"unfit":{json.dumps([*unfit])}'
    if failures:
        about = f'{about},"failures":{failures}'
    return f'{{{about},"before":{state_to_json(state, before)},"reply":{reply}}}'


def reply_from_dict(written: Mapping[str, Any]) -> ModelReplied:
    """Read the reply in a record written by `reply_to_json`."""
    reply = State.from_dict(written["reply"])
    assert reply.response is not None
    return ModelReplied(reply.response, reply.messages, sent=reply.sent)


def snapshot_to_json(
    state: State,
    replies: int,
    remaining: float | None,
    notes: Mapping[str, Any],
    usage: Mapping[str, Any] | None = None,
    beans: Mapping[str, Any] | None = None,
) -> str:
    """Write an invocation that is suspended.

    `replies` counts the replies of the model so far; `remaining` are the seconds until its deadline. `beans` are those
    of its conversation that changed and are not stored; None if it has none.
    """
    facts = {"replies": replies, "remaining": remaining, "notes": dict(notes), "usage": usage}
    about = json.dumps(facts if beans is None else {**facts, "beans": dict(beans)})
    return f'{{"version":{VERSION},"about":{about},"state":{state_to_json(state, None)}}}'


# --- results of tools


def result_to_json(
    result: Encoded | Exception,
    arguments: Mapping[str, Any] | None = None,
    *,
    has_run: bool,
    is_judged: bool = False,
    beans: Mapping[str, Any] | None = None,
) -> str:
    """Write the result of a tool call, or its exception.

    `arguments` are those that the tool had, if they are not the model's. `has_run`: the tool ran without an error,
    whatever the result is. `is_judged`: output guardrails have accepted or written the result, so it is what the model
    reads. `beans` are those of the conversation that have changed before it.
    """
    about: dict[str, Any] = {"version": VERSION, "arguments": arguments, "ran": has_run, "judged": is_judged}
    if beans:
        about["beans"] = dict(beans)
    if isinstance(result, Exception):
        kind = "ToolRetry" if isinstance(result, ToolRetry) else type_name_of(result)
        return json.dumps({**about, "error": kind, "text": message_of(result)})
    message = ToolExecutionResultMessage(
        "", "", result.text, result.is_error, dict(result.attributes or {}), tuple(result.contents)
    )
    value = _json_or_none(result.value)
    return json.dumps({**about, "message": message_to_dict(message), "value": value, "failed": result.failed})


def result_from_dict(written: Mapping[str, Any]) -> Encoded | Exception:
    """Return the result in a record written by `result_to_json`, or the exception that was recorded."""
    if "error" in written:
        if written["error"] == "ToolRetry":
            return ToolRetry(written["text"])
        return RecordedToolError(written["error"], written["text"])
    message = message_from_dict(written["message"])
    assert isinstance(message, ToolExecutionResultMessage)
    return EncodedInFull(
        message.text,
        written["value"],
        is_error=message.is_error,
        contents=message.contents,
        attributes=message.attributes,
        failed=written.get("failed", False),
    )


def has_run_in(written: Mapping[str, Any]) -> bool:
    """Return True if the tool of a record written by `result_to_json` ran without an error."""
    if "ran" in written:
        return bool(written["ran"])
    return "message" in written and not written["message"].get("is_error", False)  # written by an earlier release


def _json_or_none(value: object) -> Any:
    """Return the JSON form of a value; None if it has none."""
    try:
        return json_values(value)
    except Exception:  # any exception of the value's own serializers
        return None
