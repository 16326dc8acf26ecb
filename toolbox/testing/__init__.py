"""Tools for tests of programs with AI services: a scripted model, and assertions on tool calls.

Not here: pytest's fixtures (`pytest_plugin`), recorded replies of a real model (`recordings`).
"""

from .assertions import (
    CalledTool,
    EventRecord,
    ExpectedCall,
    assert_no_tool_calls,
    assert_tool_calls,
    called_tools,
    offered_tools,
    system_text,
    user_text,
)
from .scripted import ScriptedChatModel, tool_call

__all__ = [
    "CalledTool",
    "EventRecord",
    "ExpectedCall",
    "ScriptedChatModel",
    "assert_no_tool_calls",
    "assert_tool_calls",
    "called_tools",
    "offered_tools",
    "system_text",
    "tool_call",
    "user_text",
]
