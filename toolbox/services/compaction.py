"""Makes what a call sends shorter: with a summary before its first request, and when the model's context is full.

What is left out of a request stays in the log. Not here: what a view leaves out (`conversations.views`), recognizing
that a server refuses a request because it is too long (`models.length_refusals`).
"""

from __future__ import annotations

import hashlib
import logging
from itertools import count
from typing import Any

from ..chat import ChatModel, ChatRequest, ChatResponse, FinishReason, TokenUsage
from ..conversations.log import NO_USAGE, Turn
from ..conversations.memories import ChatMemories
from ..conversations.views import Excerpt, FullHistory, OwnView, Summary, View, as_view
from ..errors import ContextLengthError, EndsInvocation
from ..models.selection import DEFAULT_NAME
from ..transcripts import messages_to_json
from .interruptions import ModelCall
from .invocation import Invocation
from .loop import CallModel, ModelReplied, request_of, without_results
from .model_calls import ask_model
from .plans import PerformEffect
from .recording_needs import SUMMARY, SummaryReply
from .streamed_call import StreamedCall
from .usage_layers import counted, limited

logger = logging.getLogger("toolbox.services")

MOST_TIMES = 2
"""How often a call may leave something out because the model's context is full."""


# --- before the first request


async def summarize_first(invocation: Invocation) -> None:
    """Summarize what the window of a `Summary` would leave out. Without a summary, the window leaves it out."""
    excerpt, view = invocation.excerpt, invocation.plan.window
    assert excerpt is not None
    assert isinstance(view, Summary)
    if (summarized := await _summarized(view, excerpt, invocation)) is not None:
        invocation.excerpt, invocation.history = summarized, summarized.messages


# --- a full context


async def shorten(
    invocation: Invocation, refused: ContextLengthError, streamed: StreamedCall | None = None
) -> CallModel:
    """Leave something out of a request that was too long, and return the request to send in its place.

    First earlier turns of the conversation, then the results of tools of this call. Raises `refused` if neither is
    left, the third time, and if the reader of a stream has a part of the reply.
    """
    if streamed is not None and streamed.has_sent_pieces:
        raise refused
    # The state has what was left out, so that a run that continues leaves it out too. A run that continues before the
    # reply to the shorter request was recorded sends the longer one again, and comes here again.
    times = invocation.state.compactions
    if times == MOST_TIMES:
        raise refused
    if not await _leave_out_turns(invocation):
        shorter = without_results(invocation.state)
        if shorter is None:
            raise refused
        invocation.state = shorter
    invocation.state = invocation.state.changed(compactions=times + 1)
    return CallModel(request_of(invocation.rules, invocation.state))


async def _leave_out_turns(invocation: Invocation) -> bool:
    """Leave out earlier turns of the conversation, by a summary of them or without. Returns False if there are none."""
    state, excerpt = invocation.state, invocation.excerpt
    recalled = state.history[: state.recalled]
    if not recalled:
        return False
    shorter: Excerpt | None
    if excerpt is not None and excerpt.messages == recalled:
        shorter = await _stored_shorter(as_view(invocation.plan.window), excerpt, invocation)
    elif excerpt is not None and len(excerpt.messages) < len(recalled):
        shorter = excerpt  # of a run that continues: another process had stored this before it crashed
    else:
        # A run continues with what it had, or the store could not keep the last cut: this call alone leaves it out.
        shorter = FullHistory().halved(Excerpt(recalled, turns=(Turn(messages=recalled, number=1),)))
    if shorter is None:
        return False
    history = (*shorter.messages, *state.history[state.recalled :])
    invocation.state = invocation.state.changed(history=history, recalled=len(shorter.messages))
    return True


async def _stored_shorter(view: View | OwnView, excerpt: Excerpt, invocation: Invocation) -> Excerpt | None:
    """Return what is sent with a new summary, or without the older half of the turns; None if there are none.

    Either is stored at once: the next call would find the context full again.
    """
    key = invocation.memory_key
    assert key is not None
    summarized = None
    if isinstance(view, Summary) and (due := view.shortened(excerpt)) is not None:
        summarized = await _summarized(view, due, invocation)
    if summarized is not None:
        invocation.excerpt = summarized
        return summarized
    shorter = view.halved(excerpt)
    memories: ChatMemories = await invocation.host.memories()
    if shorter is not None and memories.keeps_logs:
        await memories.note(key, shorter)
        invocation.excerpt = shorter
    return shorter


# --- a summary


async def _summarized(view: Summary, excerpt: Excerpt, invocation: Invocation) -> Excerpt | None:
    """Ask for a summary, and store it. Returns what is sent then; None, with a warning, without a summary.

    Raises the errors that end the invocation, such as a limit.
    """
    key, due = invocation.memory_key, excerpt.unsummarized
    assert key is not None
    assert due is not None
    if invocation.place is not None and invocation.place.run.cancels:
        return None  # only what is recorded still happens
    try:
        response = await _ask(ChatRequest(view.request(due)), view.model, invocation)
    except EndsInvocation:
        raise
    except Exception as error:
        _warn(invocation, error)
        return None
    text = _read_summary(response)
    summarized = excerpt if text is None else view.with_summary(excerpt, text)
    memories = await invocation.host.memories()
    await memories.note(key, summarized, response.token_usage or NO_USAGE)
    _count(response.token_usage, invocation)
    if text is None:
        _warn(invocation, "its reply has no text, or was cut off")
        return None
    return summarized


def _warn(invocation: Invocation, failure: object) -> None:
    fact = str(failure) or type(failure).__name__  # a `TimeoutError` has no text
    where = invocation.where
    logger.warning("%s: earlier messages are left out without a summary, because it failed: %s", where, fact)


def _read_summary(response: ChatResponse) -> str | None:
    """Return the text of a summary; None for a reply without a text, and for one that was cut off."""
    is_cut = response.finish_reason in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
    return None if is_cut else (response.ai_message.text or "").strip() or None


def _count(usage: TokenUsage | None, invocation: Invocation) -> None:
    """Count the tokens of a reply in the usage of the invocation."""
    if invocation.has_begun:
        invocation.state = invocation.state.with_summary_usage(usage)
    else:
        invocation.summary_usage = usage


class _SummaryCall(ModelCall):
    """The request for a summary, as a call that asks a model: a part of an invocation, without tools."""

    def __init__(self, invocation: Invocation, name: str, model: ChatModel) -> None:
        self.host, self.context, self.runner = invocation.host, invocation.context, invocation.runner
        self.model_name, self.model, self.where = name, model, invocation.where
        self.plan, self.account = invocation.entry, invocation.account

    def count_tool_calls(self, response: ChatResponse) -> int:
        """Return 0: no tool was offered, so none is called."""
        return 0


async def _ask(request: ChatRequest, model: str | None, invocation: Invocation) -> ChatResponse:
    """Return the reply to a request for a summary, inside of the layers of a model request that do not need tools."""
    plan = invocation.entry
    name = model or plan.model_name or invocation.model_name or DEFAULT_NAME
    call = _SummaryCall(invocation, name, await invocation.host.models.find(name, invocation.context))
    performing: PerformEffect = _ask_now
    if invocation.account is not None:
        performing = counted(performing)
    for layer in reversed(plan.layers.models):
        performing = layer(performing)
    if invocation.place is not None:
        performing = _recorded(performing, invocation)
    if invocation.account is not None:
        performing = limited(performing)
    replied: Any = await performing(CallModel(request), call)
    response: ChatResponse = replied.response
    return response


async def _ask_now(effect: Any, call: ModelCall) -> ModelReplied:
    """Ask the model: the innermost step."""
    return ModelReplied(await ask_model(call, effect.request))


def _recorded(perform: PerformEffect, invocation: Invocation) -> PerformEffect:
    """Return the layer that records the reply in the run, and gives a recorded one."""
    place = invocation.place
    assert place is not None

    async def ask(effect: Any, call: ModelCall) -> ModelReplied:
        # A process that continues the run may need another summary than the first one that is recorded: that one may
        # be stored in the conversation already. So a record counts for exactly the same messages.
        asked = hashlib.sha256(messages_to_json(effect.request.messages).encode()).hexdigest()
        is_new = False

        async def ask_now() -> SummaryReply:
            nonlocal is_new
            is_new = True
            replied: Any = await perform(effect, call)
            return SummaryReply(asked, replied.response)

        for number in count(1):
            reply = await place.effect(SUMMARY, ask_now, number)
            if reply.asked == asked:
                return ModelReplied(reply.response, is_replayed=not is_new)
        raise AssertionError("the last number has no record")

    return ask
