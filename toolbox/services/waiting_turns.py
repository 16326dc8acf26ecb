"""The turn of a call that waits for an answer: what a conversation that goes on shows of it.

It has the message of the user, and a note of what waits. When the run of the call ends, its turn replaces this one.
Not here: storing it (`layers`), what becomes of it when a run ends without a turn (`runs.waiting_entries`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..chat import PendingCall, UserMessage
from ..conversations.keys import ChatMemoryKey
from ..conversations.log import Turn
from ..conversations.memories import ChatMemories
from ..conversations.views import Excerpt
from .invocation import Invocation


def waiting_turn_of(invocation: Invocation) -> Turn | None:
    """Return the turn of an invocation that is being suspended; None without a message of the user."""
    place, asked = invocation.place, invocation.state.remembered[:1]
    if place is None or not asked or not isinstance(asked[0], UserMessage):
        return None
    return make_waiting_turn(place.run_id, place.suspensions, asked[0], place.pending)


def make_waiting_turn(run_id: str, suspensions: int, asked: UserMessage, pending: Sequence[PendingCall]) -> Turn:
    """Return the turn of a run that waits for these calls. Its id is the same when this suspension happens again."""
    turn_id = f"{run_id}:waiting:{suspensions}"
    return Turn(id=turn_id, run_id=run_id, state="waiting", messages=(asked,), note=_describe(pending))


def _describe(pending: Sequence[PendingCall]) -> str:
    """Return what a model reads at the end of the turn."""
    approvals = dict.fromkeys(each.tool_name for each in pending if each.kind == "approval")
    results = dict.fromkeys(each.tool_name for each in pending if each.kind != "approval")
    waits = [f"the approval of a person for {', '.join(approvals)}"] if approvals else []
    waits += [f"the result of {', '.join(results)}"] if results else []
    return f"[This turn waits for {' and '.join(waits)}. It has no answer yet.]"


async def load_conversation(invocation: Invocation, key: ChatMemoryKey, memories: ChatMemories) -> Excerpt:
    """Return what the view of an invocation sends of its conversation, but for what its own run has stored there.

    A turn whose run has ended does not wait any more: its process was killed before it could write that.
    """
    place, view = invocation.place, invocation.plan.window
    own = place.run_id if place is not None and invocation.is_recorded else None
    excerpt = await memories.load(key, view, without_run=own)
    has_changed = False
    for each in excerpt.turns:
        if each.state == "waiting" and each.run_id is not None:
            state = await invocation.host.runs.turn_state_after(each.run_id)
            if state is not None:
                has_changed |= await memories.end_waiting(key, each.run_id, state)
    return await memories.load(key, view, without_run=own) if has_changed else excerpt
