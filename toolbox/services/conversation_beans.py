"""The conversation-scoped beans of a call: their scope around it, and tools that use them one after another.

Not here: the beans and what changed of them (`di.stored_beans`), storing that with the turn (`layers`), recording it in
a run (`toolbox.runs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

from ..di.scopes import ConversationScope, conversation_here
from ..di.stored_beans import StoredBeans
from ..tools.results import Encoded
from ..tools.tool_calls import Tool, ToolCall, ToolLayer, ToolStep
from .invocation import Invocation


@asynccontextmanager
async def with_beans(invocation: Invocation, joined: ConversationScope | None) -> AsyncIterator[None]:
    """Let the code of a call use the beans of its conversation inside the block, if the store keeps them.

    `joined` is the scope of a block that holds the conversation, whose beans the call shares.
    """
    key, excerpt = invocation.memory_key, invocation.excerpt
    assert key is not None
    assert excerpt is not None
    if not (await invocation.host.memories()).keeps_logs:
        yield
        return
    if joined is not None:
        joined.join()
        invocation.joined = joined
        invocation.use_beans(joined.beans)
        yield
        return
    place, head = invocation.place, excerpt.head
    beans = StoredBeans({} if head is None else head.beans, None if place is None else place.run.recorded_beans)
    invocation.use_beans(beans)
    async with invocation.host.open_conversation(key, beans):
        yield


# --- one tool after another

_turns: ContextVar[tuple[ConversationScope, asyncio.Lock] | None] = ContextVar("toolbox.bean_turns", default=None)
"""The lock for tools that this code calls, inside of a tool that uses the beans of this conversation."""


def one_after_another(uses_beans: Callable[[Tool], bool]) -> ToolLayer:
    """Return the layer of tools that use conversation-scoped beans: of one conversation, only one runs at a time.

    Also if services that are tools run at the same time, and each has such a tool. What such a tool calls itself does
    not wait for it.
    """

    def add(step: ToolStep, tool: Tool) -> ToolStep:
        if tool.is_service or not uses_beans(tool):
            return step

        async def run(call: ToolCall) -> Encoded:
            if (scope := conversation_here()) is None:
                return await step(call)
            outer = _turns.get()
            async with outer[1] if outer is not None and outer[0] is scope else scope.turns:
                token = _turns.set((scope, asyncio.Lock()))
                try:
                    return await step(call)
                finally:
                    _turns.reset(token)

        return run

    return add
