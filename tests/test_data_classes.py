"""Public data classes and errors: frozen, comparable, copyable, picklable."""

import copy
import pickle
import weakref
from dataclasses import FrozenInstanceError, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from toolbox import (
    AiMessage,
    AiServiceTool,
    BeforeToolExecution,
    ChatMemoryKey,
    ChatRequest,
    ChatRequestParameters,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    ImageContent,
    IntermediateResponse,
    InvocationContext,
    MessageWindow,
    Named,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    Problem,
    ResponseFormat,
    Result,
    ReturnBehavior,
    SystemMessage,
    TextContent,
    TokenUsage,
    TokenWindow,
    ToolAbort,
    ToolErrors,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProviderRequest,
    ToolProviderResult,
    ToolRetry,
    ToolSpecification,
    UserMessage,
    return_to_model,
)
from toolbox.context import in_tool

NOW = datetime(2026, 1, 2, tzinfo=UTC)
REQUEST = ToolExecutionRequest("1", "add", "{}", {"k": 1})
EXECUTION = ToolExecution(REQUEST, "3", 3, False, NOW, 0.5, {"a": 1})
RESPONSE = ChatResponse(AiMessage("hi"), TokenUsage(1, 2), FinishReason.STOP, "id", "gpt")


def executor(request: ToolExecutionRequest, memory_id: Any) -> str:
    return "done"


MADE: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (Problem, ("here", "this", "that"), {"where": "here", "what": "this", "fix": "that"}),
    (
        ToolSpecification,
        ("n", "d", {"type": "object", "properties": {}}, {"m": 1}),
        {"name": "n", "description": "d", "parameters": {"type": "object", "properties": {}}, "metadata": {"m": 1}},
    ),
    (
        ToolExecutionRequest,
        ("1", "n", "{}", {"k": 1}),
        {"id": "1", "name": "n", "arguments": "{}", "attributes": {"k": 1}},
    ),
    (
        ToolExecutionResult,
        ("t", {"o": 1}, True, {"a": 1}, [TextContent("t")]),
        {
            "text": "t",
            "result_object": {"o": 1},
            "is_error": True,
            "attributes": {"a": 1},
            "contents": (TextContent("t"),),
        },
    ),
    (
        ToolExecutionResultMessage,
        ("1", "n", "t", True, {"a": 1}, [TextContent("t")]),
        {
            "id": "1",
            "tool_name": "n",
            "text": "t",
            "is_error": True,
            "attributes": {"a": 1},
            "contents": (TextContent("t"),),
        },
    ),
    (
        ToolExecution,
        (REQUEST, "3", [3], False, NOW, 0.5, {"a": 1}, {"n": 3}),
        {
            "request": REQUEST,
            "result": "3",
            "result_object": [3],
            "is_error": False,
            "started_at": NOW,
            "duration": 0.5,
            "attributes": {"a": 1},
            "arguments": {"n": 3},
        },
    ),
    (
        AiServiceTool,
        (ToolSpecification("n"), executor, ReturnBehavior.IMMEDIATE, 5.0),
        {
            "specification": ToolSpecification("n"),
            "executor": executor,
            "return_behavior": ReturnBehavior.IMMEDIATE,
            "timeout": 5.0,
        },
    ),
    (
        ToolProviderResult,
        ([executor],),
        {"tools": (executor,)},
    ),
    (
        ToolProviderResult,
        ({ToolSpecification("n"): executor},),
        {"tools": {ToolSpecification("n"): executor}},
    ),
    (
        ToolProviderRequest,
        (UserMessage("hi"), "id", InvocationContext(str, "chat")),
        {"user_message": UserMessage("hi"), "memory_id": "id", "context": InvocationContext(str, "chat")},
    ),
    (
        Result,
        (["x"], [EXECUTION], TokenUsage(1, 2), FinishReason.STOP, [UserMessage("hi")]),
        {
            "content": ["x"],
            "tool_executions": (EXECUTION,),
            "token_usage": TokenUsage(1, 2),
            "finish_reason": FinishReason.STOP,
            "messages": (UserMessage("hi"),),
        },
    ),
    (
        TokenUsage,
        (1, 2, 3, 4),
        {"input_tokens": 1, "output_tokens": 2, "cached_input_tokens": 3, "reasoning_tokens": 4},
    ),
    (
        ToolErrors,
        (return_to_model, return_to_model, return_to_model),
        {
            "on_unknown_tool": return_to_model,
            "on_tool_arguments_error": return_to_model,
            "on_tool_execution_error": return_to_model,
        },
    ),
    (MessageWindow, (5,), {"max_messages": 5}),
    (TokenWindow, (5, len), {"max_tokens": 5, "count": len}),
    (ChatMemoryKey, ("s", "m"), {"service": "s", "memory_id": "m"}),
    (
        InvocationContext,
        (str, "chat", "id", UserMessage("hi"), {"a": 1}, 5.0),
        {
            "service": str,
            "method": "chat",
            "memory_id": "id",
            "user_message": UserMessage("hi"),
            "attributes": {"a": 1},
            "deadline": 5.0,
        },
    ),
    (SystemMessage, ("t",), {"text": "t"}),
    (
        UserMessage,
        ([TextContent("a"), ImageContent("https://u")],),
        {"contents": [TextContent("a"), ImageContent("https://u")]},
    ),
    (
        AiMessage,
        ("t", [REQUEST], "thought", {"a": 1}),
        {"text": "t", "tool_execution_requests": (REQUEST,), "reasoning": "thought", "attributes": {"a": 1}},
    ),
    (TextContent, ("t",), {"text": "t"}),
    (ImageContent, ("http://x/y.png", None, "image/png"), {"url": "http://x/y.png", "mime_type": "image/png"}),
    (
        ChatRequest,
        ([UserMessage("hi")], [ToolSpecification("n")], ResponseFormat("f", {}), "auto", {"seed": 1}, 0.5, "low", 9),
        {
            "messages": (UserMessage("hi"),),
            "tool_specifications": (ToolSpecification("n"),),
            "response_format": ResponseFormat("f", {}),
            "tool_choice": "auto",
            "parameters": {"seed": 1},
            "temperature": 0.5,
            "reasoning": "low",
            "max_output_tokens": 9,
        },
    ),
    (
        ChatRequestParameters,
        ("m", 0.5, "auto", "low", 9, {"seed": 1}),
        {
            "model": "m",
            "temperature": 0.5,
            "tool_choice": "auto",
            "reasoning": "low",
            "max_output_tokens": 9,
            "parameters": {"seed": 1},
        },
    ),
    (
        ChatResponse,
        (AiMessage("hi"), TokenUsage(1, 2), FinishReason.STOP, "id", "gpt"),
        {
            "ai_message": AiMessage("hi"),
            "token_usage": TokenUsage(1, 2),
            "finish_reason": FinishReason.STOP,
            "id": "id",
            "model": "gpt",
        },
    ),
    (ResponseFormat, ("n", {"type": "object"}), {"name": "n", "schema": {"type": "object"}}),
    (PartialResponse, ("t",), {"text": "t"}),
    (PartialReasoning, ("t",), {"text": "t"}),
    (PartialToolCall, (0, "1", "n", "{"), {"index": 0, "id": "1", "name": "n", "partial_arguments": "{"}),
    (CompleteToolCall, (0, REQUEST), {"index": 0, "request": REQUEST}),
    (CompleteResponse, (RESPONSE,), {"response": RESPONSE}),
    (IntermediateResponse, (RESPONSE,), {"response": RESPONSE}),
    (BeforeToolExecution, (REQUEST,), {"request": REQUEST}),
    (ToolExecuted, (EXECUTION,), {"execution": EXECUTION}),
    (Named, ("x",), {"name": "x"}),
]
NAMES = [f"{made[0].__name__}{number}" for number, made in enumerate(MADE)]


@pytest.mark.parametrize(("cls", "args", "kwargs"), MADE, ids=NAMES)
def test_data_classes_accept_positions_and_keywords_and_compare_by_value(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert cls(*args) == cls(**kwargs)
    assert hash(cls(*args)) == hash(cls(**kwargs))


@pytest.mark.parametrize(("cls", "args", "kwargs"), MADE, ids=NAMES)
def test_data_classes_are_frozen(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    made = cls(*args)
    assert is_dataclass(made)

    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(made)[0].name, None)


@pytest.mark.parametrize(("cls", "args", "kwargs"), MADE, ids=NAMES)
def test_sequences_become_tuples(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    made = cls(*args)

    for each in fields(made):
        if each.name not in ("content", "result_object"):  # whatever a tool or a model returned, as it is
            assert not isinstance(getattr(made, each.name), list)


@pytest.mark.parametrize(("cls", "args", "kwargs"), MADE, ids=NAMES)
def test_data_classes_can_be_copied_and_pickled(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert copy.deepcopy(cls(*args)) == cls(*args)


def test_dictionaries_are_compared_but_not_hashed() -> None:
    one, other = ToolExecutionRequest("1", "n", "{}", {"a": 1}), ToolExecutionRequest("1", "n", "{}", {"a": 2})

    assert one != other
    assert hash(one) == hash(other)


def test_specifications_are_hashed_by_name() -> None:
    one, other = ToolSpecification("n", "d", {"type": "object", "properties": {"a": {}}}), ToolSpecification("n")

    assert hash(one) == hash(other)
    assert one != other
    assert {one: 1}[ToolSpecification("n", "d", {"type": "object", "properties": {"a": {}}})] == 1


def test_omitted_fields_have_their_default() -> None:
    assert ToolSpecification("n") == ToolSpecification("n", None, {"type": "object", "properties": {}}, {})
    assert AiMessage() == AiMessage(None, (), None, {})
    assert ToolExecutionResult("t") == ToolExecutionResult("t", None, False, {}, ())
    assert ToolExecutionResultMessage("1", "n", "t") == ToolExecutionResultMessage("1", "n", "t", False, {}, ())
    assert AiServiceTool(ToolSpecification("n"), executor).return_behavior is ReturnBehavior.TO_LLM
    assert AiServiceTool(ToolSpecification("n"), executor).timeout is None
    assert TokenUsage(3, 4) == TokenUsage(3, 4, 0, 0)
    assert TokenUsage(3, 4).total_tokens == 7
    assert MessageWindow() == MessageWindow(20)
    assert ChatRequest(()) == ChatRequest((), (), None, None, {})
    assert ChatResponse(AiMessage("x")) == ChatResponse(AiMessage("x"), None, None, None, None)


def test_messages_have_a_text() -> None:
    message = UserMessage([TextContent("a"), ImageContent(url="http://x"), TextContent("b")])

    assert "a" in message.text
    assert "b" in message.text
    assert UserMessage("hi").contents == (TextContent("hi"),)
    assert UserMessage("hi").text == "hi"
    assert AiMessage(None, [REQUEST]).has_tool_execution_requests
    assert not AiMessage("x").has_tool_execution_requests
    assert ToolExecutionResultMessage.of(REQUEST, "3") == ToolExecutionResultMessage("1", "add", "3")


def test_retry_and_abort_survive_pickling() -> None:
    retry = pickle.loads(pickle.dumps(ToolRetry("again")))
    abort = pickle.loads(pickle.dumps(ToolAbort("enough", 3)))

    assert str(retry) == "again"
    assert abort.args == ("enough", 3)


def test_the_toolbox_decorator_is_not_the_package() -> None:
    from toolbox import rest, toolbox

    assert callable(toolbox)
    assert rest.get is not None


class Sound:
    """Not a message content, although it has the fields of an image."""

    url, data, mime_type = "https://example.com/a.wav", None, "audio/wav"


@pytest.mark.parametrize("contents", [[Sound()], [TextContent("a"), Sound()], [None], [b"bytes"], [{"type": "text"}]])
def test_contents_of_unknown_classes_are_rejected(contents: Any) -> None:
    rejects(contents, type(contents[-1]))


@pytest.mark.parametrize("contents", [Sound(), 3, None])
def test_contents_that_are_not_a_sequence_are_rejected(contents: Any) -> None:
    rejects(contents, type(contents))


def rejects(contents: Any, unknown: type) -> None:
    text = f"unknown message content {unknown.__name__}; expected TextContent or ImageContent"
    with pytest.raises(TypeError, match=text):
        UserMessage(contents)
    with pytest.raises(TypeError, match=text):
        ToolExecutionResult("text", contents=contents)
    with pytest.raises(TypeError, match=text):
        ToolExecutionResultMessage("1", "tool", "text", contents=contents)


def test_contents_of_subclasses_are_accepted() -> None:
    class Caption(TextContent):
        pass

    caption = Caption("a")

    assert UserMessage([caption]).contents == (caption,)
    assert UserMessage(caption).text == "a"
    assert ToolExecutionResult("a", contents=[caption]).contents == (caption,)


def test_the_context_inside_a_tool_is_a_frozen_copy() -> None:
    outside = InvocationContext(str, "chat", memory_id="m", notes={"a": 1})
    request = ToolExecutionRequest("1", "add", "{}")
    inside = in_tool(outside, request, outside.cancellation)

    assert inside.request is request
    assert {each.name for each in fields(inside) if getattr(inside, each.name) is not getattr(outside, each.name)} == {
        "request"
    }
    assert type(inside) is InvocationContext
    assert weakref.ref(inside)() is inside
    with pytest.raises(FrozenInstanceError):
        inside.method = "other"  # type: ignore[misc]  # that is the test
