"""The layers of a run: around model requests and tool calls, what is recorded and what a person approves.

`capabilities` puts them into the order of all layers. Not here: what they do (`run_invocations`, `tool_records`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, cast

from ...context import complete_context
from ...execution.markers import marked_execution
from ...safe_text import printable
from ...services.invocation import Invocation, Perform
from ...services.loop import CallModel, ModelReplied, RunTool
from ...tools.results import Encoded, EncodedInFull
from ...tools.specification import given_or_default
from ...tools.tool_calls import Tool, ToolCall, ToolLayer, ToolStep
from ..persons import read_person
from .run_invocations import RunPlace
from .tool_records import EditedCall

logger = logging.getLogger("toolbox.runs")

NOT_APPROVABLE = "This tool needs the approval of a person, which is not available here."


# --- around effects


def in_run(perform: Perform) -> Perform:
    """Return the layer of effects: model requests are recorded, tool calls get their places."""

    def performing(effect: CallModel | RunTool, invocation: Invocation) -> Awaitable[Any]:
        body = cast("RunPlace", invocation.place).body  # nothing else gives places
        body.check_fits(invocation)
        if isinstance(effect, RunTool):
            return body.run_call(effect, invocation, perform)
        return body.ask_or_replay(effect, invocation, perform)

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
    return cast("RunPlace | None", call.context.place)


def answered(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the outermost layer of a tool: it answers rejected calls, and gives recorded results.

    A result that output guardrails have judged is given as it was recorded, whatever the layers inside return.
    """

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        if place is None:
            return await step(call)
        tools = place.body.tools
        if (rejection := tools.find_rejection(place.call)) is not None:
            return EncodedInFull(printable(rejection.reason or ""), is_error=True)
        if place.is_recorded:
            return await tools.replay(step, call)
        tools.note_decoded(call)
        return await step(call)

    return run


def unless_run(checked: ToolStep, step: ToolStep) -> ToolStep:
    """Return a step that takes the checks before a tool only if the tool will run: a recorded call has passed them."""

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        has_run = place is not None and place.body.tools.next_record(place.call) is not None
        return await (step if has_run else checked)(call)

    return run


def without_approval(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the layer of calls without a run, which nobody can approve: it refuses those that need it."""
    if not tool.requires_approval:
        return step

    async def run(call: ToolCall) -> Encoded:
        refused = await _ask_rule(tool, call) is not None
        return EncodedInFull(NOT_APPROVABLE, is_error=True) if refused else await step(call)

    return run


def approval(step: ToolStep, tool: Tool, guardrails: ToolLayer) -> ToolStep:
    """Return the layer of tool input guardrails and, after them, of approval: it suspends calls that need one.

    A call needs none if the conversation remembers an approval of its tool.
    A tool that needs no approval has it too: it may have needed one when a person changed its arguments.
    """
    # What a person has changed is applied to exactly the arguments that the person saw. They are those of the model;
    # or guardrails have made them, or an interceptor, whose arguments come here again. So what the person left alone
    # keeps its value. The guardrails judge the changed call, and may only rewrite what the person changed.

    async def run_edited(edited: EditedCall) -> Encoded:
        async def run_approved(call: ToolCall) -> Encoded:
            complete_context(call.context, approved_by=read_person(edited.given.by))
            return await step(edited.keep_unchanged(call))

        return await guardrails(run_approved, tool)(edited.call)

    async def run_if_approved(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        assert place is not None
        tools = place.body.tools
        given = tools.find_approval(call)
        if given is not None and given.answer.arguments is not None:
            return await run_edited(tools.edit(call, given))
        if given is not None and (seen := tools.as_seen(call, given)) is not None:
            tools.note_used(call, given)
            complete_context(call.context, approved_by=read_person(given.by))
            return await step(seen)
        if (asked := await _ask_rule(tool, call)) is not None:
            if (remembered := await tools.find_remembered(call)) is None:
                raise tools.suspend(call, place.call, "approval", asked.reason)
            tools.note_remembered(call, remembered)
            complete_context(call.context, approved_by=read_person(remembered.person))
        return await step(call)

    guarded = guardrails(run_if_approved, tool)

    async def run(call: ToolCall) -> Encoded:
        place = run_place_of(call)
        assert place is not None
        if place.body.tools.at(place.call).edits:
            given = place.body.tools.find_approval(call)
            if given is not None and given.answer.arguments is not None:
                return await run_edited(place.body.tools.edit(call, given))
        return await guarded(call)

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
        tools = place.body.tools
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
        return await place.body.tools.run_once(step, call)

    return run
