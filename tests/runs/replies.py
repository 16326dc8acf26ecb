"""Replies of scripted models, and the list in which tools of tests note what they did."""

from typing import Any

from toolbox import AiMessage, ChatResponse, FinishReason, TokenUsage

ran: list[Any] = []
"""Effects of the tools in this test."""


def asks(*calls: Any) -> ChatResponse:
    """Return a reply that calls tools."""
    return ChatResponse(AiMessage(None, calls), TokenUsage(10, 1), FinishReason.TOOL_EXECUTION)


def says(text: str) -> ChatResponse:
    """Return a reply with a text."""
    return ChatResponse(AiMessage(text), TokenUsage(10, 5), FinishReason.STOP)
