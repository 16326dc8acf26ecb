"""Keeps what invocations did for the program to look at, failed ones too: `invocation_record`.

Not here: events as they happen (`TokenStream`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..chat import Message, TokenUsage, ToolExecution
from .loop import State


@dataclass(slots=True)
class InvocationRecord:
    """What the invocations of a block did, those of services called as tools among them, in the order they ended.

    `token_usage` is summed, None when no reply had one.
    """

    messages: list[Message] = field(default_factory=list)
    tool_executions: list[ToolExecution] = field(default_factory=list)
    token_usage: TokenUsage | None = None

    def add(self, state: State) -> None:
        """Keeps what an invocation that has ended, well or not, has come to."""
        self.messages += state.messages
        self.tool_executions += state.executions
        if state.token_usage is not None:
            usage = self.token_usage
            self.token_usage = state.token_usage if usage is None else usage + state.token_usage


_records: ContextVar[tuple[InvocationRecord, ...]] = ContextVar("toolbox.records", default=())


@contextmanager
def invocation_record() -> Iterator[InvocationRecord]:
    """Records the invocations begun inside."""
    record = InvocationRecord()
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)


def note(state: State) -> None:
    """Adds an invocation that has ended to the records around it."""
    for record in _records.get():
        record.add(state)
