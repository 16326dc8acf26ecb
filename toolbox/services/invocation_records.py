"""`invocation_record`: records what the invocations in a block say, do and use.

Not here: the state of one invocation (`state`), the events of a host (`toolbox.events`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..chat import Message, TokenUsage, ToolExecution
from .state import State


@dataclass(slots=True)
class InvocationRecord:
    """The messages, tool executions and token usage of all invocations in a block, in the order in which they ended.

    It includes services called as tools, and invocations that failed. `token_usage` is the sum; None if no reply
    contained a usage.
    """

    messages: list[Message] = field(default_factory=list)
    tool_executions: list[ToolExecution] = field(default_factory=list)
    token_usage: TokenUsage | None = None

    def add(self, state: State) -> None:
        """Add the state of an ended invocation."""
        self.messages += state.all_messages
        self.tool_executions += state.all_executions
        if state.token_usage is not None:
            usage = self.token_usage
            self.token_usage = state.token_usage if usage is None else usage + state.token_usage


_records: ContextVar[tuple[InvocationRecord, ...]] = ContextVar("toolbox.records", default=())


@contextmanager
def invocation_record() -> Iterator[InvocationRecord]:
    """Record all invocations that start inside the block, also those that fail.

        with invocation_record() as record:
            assistant.chat("Hello")
        print(record.token_usage, record.tool_executions)

    Yields an `InvocationRecord`, which can also be read after the block.
    """
    record = InvocationRecord()
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)


def note_in_records(state: State) -> None:
    """Add the state of an invocation that has ended, also with an error, to the records of enclosing blocks."""
    for record in _records.get():
        record.add(state)
