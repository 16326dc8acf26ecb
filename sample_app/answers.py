"""The HTTP response of an agent: the answer and the tool calls behind it.

Not here: the agents (`weather`, `bookings`, `experts`), the endpoints (`application`, `support`).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from toolbox import Result, ToolExecution


class ToolCall(BaseModel):
    """A tool call: its arguments, the text of its result, its start time, and its duration in seconds."""

    name: str
    arguments: Any
    result: str
    is_error: bool
    started_at: datetime
    duration: float

    @classmethod
    def of(cls, execution: ToolExecution) -> ToolCall:
        """Convert a tool execution; its arguments become JSON values if they are valid JSON."""
        try:
            arguments = json.loads(execution.request.arguments or "{}")
        except ValueError:
            arguments = execution.request.arguments
        return cls(
            name=execution.request.name,
            arguments=arguments,
            result=execution.result,
            is_error=execution.is_error,
            started_at=execution.started_at,
            duration=execution.duration,
        )


class Confirmation(BaseModel):
    """A tool call that waits for a person: its id in the run, the tool and its arguments."""

    id: str
    name: str
    arguments: dict[str, Any]


class Answer(BaseModel):
    """The agent's answer and the tool calls behind it, in order.

    With calls in `pending`, there is no answer yet: the run `run_id` waits for a person.
    """

    answer: str
    tool_executions: list[ToolCall]
    run_id: str | None = None
    pending: list[Confirmation] = []

    @classmethod
    def of(cls, result: Result[str]) -> Answer:
        """Convert the result of an agent."""
        return cls(
            answer=result.content or "",
            tool_executions=[ToolCall.of(each) for each in result.tool_executions],
            run_id=result.run_id if result.pending else None,
            pending=[
                Confirmation(id=each.id, name=each.tool_name, arguments=dict(each.arguments)) for each in result.pending
            ],
        )
