"""Replies of scripted models, tools that wait for a person, and the list in which tools note what they did."""

from decimal import Decimal
from typing import Any

from toolbox import AiMessage, ChatResponse, FinishReason, InvocationContext, TokenUsage, tool
from toolbox.security import SecurityIdentity
from toolbox.testing import tool_call

ran: list[Any] = []
"""Effects of the tools in this test."""


def asks(*calls: Any) -> ChatResponse:
    """Return a reply that calls tools."""
    return ChatResponse(AiMessage(None, calls), TokenUsage(10, 1), FinishReason.TOOL_EXECUTION)


def says(text: str) -> ChatResponse:
    """Return a reply with a text."""
    return ChatResponse(AiMessage(text), TokenUsage(10, 5), FinishReason.STOP)


class Refunds:
    @tool(requires_approval=True)
    def refund(self, order: int, euros: Decimal) -> str:
        ran.append(("refund", order, euros))
        return f"refunded {order}"

    @tool
    def look(self, order: int) -> str:
        ran.append(("look", order))
        return f"order {order} is paid"


class WriteOffs:
    @tool(requires_approval=True, approvers=("manager",), not_self=True)
    def write_off(self, order: int, context: InvocationContext) -> str:
        ran.append(("write_off", order, context.approved_by))
        current = InvocationContext.current()
        assert current is not None
        assert current.approved_by == context.approved_by
        return "written off"


REFUND = tool_call("refund", {"order": 7, "euros": "12.50"}, id="same")
LOOK = tool_call("look", {"order": 7}, id="same")
WRITE_OFF = tool_call("write_off", {"order": 7})
ANN = SecurityIdentity("ann", {"support"})
BOB = SecurityIdentity("bob", {"manager"})
