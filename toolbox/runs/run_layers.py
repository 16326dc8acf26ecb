"""The layers of a run: around model requests and tool calls, what is recorded and what a person approves.

`capabilities` puts them into the order of all layers. Not here: what they do (`run_session`, `tool_records`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, cast

from ..context import complete_context
from ..execution.markers import marked_execution
from ..safe_text import printable
from ..services.invocation import Invocation, Perform
from ..services.loop import CallModel, ModelReplied, RunTool
from ..tools.results import Encoded, EncodedInFull
from ..tools.specification import given_or_default
from ..tools.tool_calls import Tool, ToolCall, ToolStep
from .persons import read_person
from .run_session import RunPlace, RunSession
from .stored_calls import decode_arguments

logger = logging.getLogger("toolbox.runs")

NOT_APPROVABLE = "This tool needs the approval of a person, which is not available here."


# --- around effects


def in_run(perform: Perform) -> Perform:
    """Return the layer of effects: model requests are recorded, tool calls get their places."""

    def performing(effect: CallModel | RunTool, invocation: Invocation) -> Awaitable[Any]:
        assert invocation.place is not None
        session = cast("RunSession", invocation.place.session)
        session.check_fits(invocation)
        if isinstance(effect, RunTool):
            return session.run_call(effect, invocation, perform)
        return session.ask_or_replay(effect, invocation, perform)

    return performing


def replaying(perform: Perform) -> Perform:
    """Return the layer inside of interceptors that answers a model request with its recorded reply."""

    def performing(effect: CallModel | RunTool, invocation: Invocation) -> Awaitable[Any]:
        if isinstance(effect, CallModel) and effect.recorded is not None:
            return _give(effect.recorded)
        return perform(effect, invocation)

    return performing


async def _give(reply: ModelReplied) -> ModelReplied:
    return reply


# --- around tools, the outermost first


def run_place_of(call: ToolCall) -> RunPlace | None:
    """Return the place of a call in its run, or None outside of runs."""
    return cast("RunPlace | None", call.context.place)  # nothing else gives places


def answered(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the outermost layer of a tool: it answers rejected calls, and replaces arguments that a person changed.

    A result that output guardrails have judged is given as it was recorded, whatever the layers inside return.
    """

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        if place is None:
            return await step(call)
        tools = place.session.tools
        answer = tools.take_answer(place.call)
        if answer is not None and answer.kind == "reject":
            return EncodedInFull(printable(answer.reason or ""), is_error=True)
        if place.is_recorded:
            return await tools.replay(step, call)
        tools.note_decoded(call)
        if answer is None:
            return await step(call)
        return await step(call.with_arguments(decode_arguments(call, answer.arguments or {})))

    return run


def unless_run(checked: ToolStep, step: ToolStep) -> ToolStep:
    """Return a step that takes the checks before a tool only if the tool will run: a recorded call has passed them."""

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        has_run = place is not None and place.session.next_record(place.call) is not None
        return await (step if has_run else checked)(call)

    return run


def approval(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the layer that suspends calls that need approval; tools that never do keep their step."""
    if not tool.requires_approval:
        return step

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        if place is None:  # nobody can approve a call without a run
            refused = await _ask_rule(tool, call) is not None
            return EncodedInFull(NOT_APPROVABLE, is_error=True) if refused else await step(call)
        tools, arguments = place.session.tools, call.json_arguments()
        given = tools.take_edited_approval(call) or tools.find_approval(call, arguments)
        if given is not None:
            complete_context(call.context, approved_by=read_person(given.by))
            if given.answer.arguments is None and given.asked != arguments:  # it runs with what the person saw
                call = call.with_arguments(decode_arguments(call, given.asked))
        elif (asked := await _ask_rule(tool, call)) is not None:
            raise tools.suspend(call, place.call, "approval", asked.reason)
        return await step(call)

    return run


@dataclass(frozen=True, slots=True)
class _ApprovalNeeded:
    """A call needs an approval; the tool's rule may give the reason."""

    reason: str | None = None


async def _ask_rule(tool: Tool, call: ToolCall) -> _ApprovalNeeded | None:
    """Return that the call needs an approval, or None. A rule that returns a text asks for one, also an empty text."""
    needed: Any = tool.requires_approval
    if isinstance(needed, bool):
        return _ApprovalNeeded() if needed else None
    execution = marked_execution(needed)
    try:
        visible = {name: given_or_default(value) for name, value in call.visible_arguments().items()}
        ask = functools.partial(needed, visible, call.context)
        said = await call.environment.runner.run(execution, ask, f"{tool.name} (requires_approval)")
        if isinstance(said, str):
            return _ApprovalNeeded(said or None)
        return _ApprovalNeeded() if said else None
    except asyncio.CancelledError:
        raise
    except Exception as error:
        logger.warning("requires_approval of tool %r failed, so the call needs approval: %s", tool.name, error)
        return _ApprovalNeeded()


def judging(guarded: ToolStep, step: ToolStep) -> ToolStep:
    """Return the layer around output guardrails: what they let the model read is recorded, and not judged again."""

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        if place is None:
            return await guarded(call)
        tools = place.session.tools
        if place.is_recorded and tools.is_judged(place.call):
            return await step(call)
        return await tools.judge(guarded, call)

    return run


def recording(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the layer that records the results of a tool; not what layers inside of it do, such as `RetryOnError`."""

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        if place is None:
            return await step(call)
        return await place.session.tools.run_once(step, call)

    return run
