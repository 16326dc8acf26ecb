"""Tools for tests of programs with AI services: a scripted model, assertions on tool calls, skipped time, store checks.

Not here: pytest's fixtures (`pytest_plugin`), recorded replies of a real model (`recordings`), a model that answers by
rules (`demo`).
"""

from __future__ import annotations

from .call_assertions import (
    CalledTool,
    EventRecord,
    ExpectedCall,
    assert_no_tool_calls,
    assert_tool_calls,
    called_tools,
)
from .pending_answers import Answers, approve_all, assert_pending, resume_until_done
from .scripted_model import ScriptedChatModel, offered_tools, system_text, text_of, tool_call, user_text
from .tested_stores import conversation_store_checks, run_store_checks, skip_time

__all__ = [
    "Answers",
    "CalledTool",
    "EventRecord",
    "ExpectedCall",
    "ScriptedChatModel",
    "approve_all",
    "assert_no_tool_calls",
    "assert_pending",
    "assert_tool_calls",
    "called_tools",
    "conversation_store_checks",
    "offered_tools",
    "resume_until_done",
    "run_store_checks",
    "skip_time",
    "system_text",
    "text_of",
    "tool_call",
    "user_text",
]
