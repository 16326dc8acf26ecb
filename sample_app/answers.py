"""What an agent's answer looks like to those who ask over HTTP: the text, and the tools that were called for it.

Not here: who answers (`weather`, `bookings`, `experts`), at which address (`application`, `support`).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from toolbox import Result, ToolExecution


class ToolCall(BaseModel):
    """A tool the model called: its arguments, the text it gave back, when it began and how many seconds it took."""

    name: str
    arguments: Any
    result: str
    is_error: bool
    started_at: datetime
    duration: float

    @classmethod
    def of(cls, execution: ToolExecution) -> ToolCall:
        """An execution, for a person to read: the arguments as what they are rather than as text."""
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


class Answer(BaseModel):
    """The agent's answer and the tools that were called for it, in order."""

    answer: str
    tool_executions: list[ToolCall]

    @classmethod
    def of(cls, result: Result[str]) -> Answer:
        """What the agent returned."""
        return cls(answer=result.content or "", tool_executions=[ToolCall.of(each) for each in result.tool_executions])
