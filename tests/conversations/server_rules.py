"""The rules by which model servers accept a conversation, checked on what each wire and the bridge send."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart

from toolbox import ChatRequest
from toolbox.models.anthropic_wire import AnthropicWire
from toolbox.models.chat_wire import ChatWire
from toolbox.models.pydantic_ai import messages_of
from toolbox.models.responses_wire import ResponsesWire

CHAT, RESPONSES, ANTHROPIC = ChatWire(), ResponsesWire(), AnthropicWire()


def check_request(request: ChatRequest) -> None:
    """Check what is sent of a request that ends with a message of the user, or with results."""
    _check_chat(json.loads(CHAT.fields(request)["messages"]))
    _check_responses(json.loads(RESPONSES.fields(request)["input"]))
    _check_anthropic(json.loads(ANTHROPIC.fields(request)["messages"]))
    _check_bridge(messages_of(request.messages))


def _check_turns(roles: Sequence[str]) -> None:
    """The user begins and has the last word, and no side speaks twice: results of tools count as the user's."""
    assert roles[0] == "user", roles
    assert roles[-1] != "assistant", roles
    for one, following in pairwise(roles):
        assert (one == "assistant") != (following == "assistant") or one == following == "tool", roles


def _check_calls(waiting: list[str], answered: str) -> None:
    assert answered in waiting, f"a result without its call: {answered}"
    waiting.remove(answered)


def _check_chat(messages: Sequence[dict[str, Any]]) -> None:
    _check_turns([each["role"] for each in messages])
    waiting: list[str] = []
    for each in messages:
        if each["role"] == "tool":
            _check_calls(waiting, each["tool_call_id"])
            continue
        assert not waiting, f"calls without a result: {waiting}"
        assert each.get("content") or each.get("tool_calls"), each
        waiting = [call["id"] for call in each.get("tool_calls", ())]
        assert len(waiting) == len(set(waiting))
    assert not waiting


def _check_responses(items: Sequence[dict[str, Any]]) -> None:
    kinds = {"function_call": "assistant", "function_call_output": "tool"}
    waiting: list[str] = []
    roles: list[str] = []
    for each in items:
        role = kinds.get(each.get("type", "message")) or each["role"]
        if role == "tool":
            _check_calls(waiting, each["call_id"])
        elif each.get("type") == "function_call":
            waiting.append(each["call_id"])
        else:
            assert not waiting, f"calls without a result: {waiting}"
        if not (role == "assistant" and roles[-1:] == ["assistant"]):  # a text and its calls are items of one reply
            roles.append(role)
    assert not waiting
    _check_turns(roles)


def _check_anthropic(messages: Sequence[dict[str, Any]]) -> None:
    _check_turns([each["role"] for each in messages])
    waiting: list[str] = []
    for each in messages:
        blocks = [{"type": "text"}] if isinstance(each["content"], str) else each["content"]
        assert blocks, each
        kinds = [block["type"] for block in blocks]
        assert kinds == sorted(kinds, key=lambda kind: kind != "tool_result"), f"results come first: {kinds}"
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        assert sorted(results) == sorted(waiting), (results, waiting)
        waiting = [block["id"] for block in blocks if block["type"] == "tool_use"]
        assert len(waiting) == len(set(waiting))
    assert not waiting


def _check_bridge(messages: Sequence[Any]) -> None:
    """pydantic-ai has one message for all that is sent between two replies."""
    _check_turns(["assistant" if isinstance(each, ModelResponse) else "user" for each in messages])
    waiting: list[str] = []
    for each in messages:
        assert each.parts, each
        results = [part.tool_call_id for part in each.parts if isinstance(part, ToolReturnPart)]
        assert sorted(results) == sorted(waiting), (results, waiting)
        waiting = [part.tool_call_id for part in each.parts if isinstance(part, ToolCallPart)]
        assert len(waiting) == len(set(waiting))
    assert not waiting
