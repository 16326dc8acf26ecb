"""What a test of a program with AI services needs: a model that follows a script, and assertions on what was called.

Not here: pytest's fixtures (`pytest_plugin`), a real model's replies played back (`recordings`).
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
