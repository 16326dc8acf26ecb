"""Public data classes and errors: frozen, comparable, copyable, picklable."""

import copy
import pickle
import weakref
from dataclasses import FrozenInstanceError, fields
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


# Sequences are given as lists.
EXAMPLES = [
    Problem("here", "this", "that"),
    ToolSpecification("n", "d", {"type": "object", "properties": {}}, {"m": 1}),
    REQUEST,
    ToolExecutionResult("t", {"o": 1}, True, {"a": 1}, [TextContent("t")]),
    ToolExecutionResultMessage("1", "n", "t", True, {"a": 1}, [TextContent("t")]),
    ToolExecution(REQUEST, "3", [3], False, NOW, 0.5, {"a": 1}, {"n": 3}),
    AiServiceTool(ToolSpecification("n"), executor, ReturnBehavior.IMMEDIATE, 5.0),
    ToolProviderResult([executor]),
    ToolProviderResult({ToolSpecification("n"): executor}),
    ToolProviderRequest(UserMessage("hi"), "id", InvocationContext(str, "chat")),
    Result(["x"], [EXECUTION], TokenUsage(1, 2), FinishReason.STOP, [UserMessage("hi")]),
    TokenUsage(1, 2, 3, 4),
    ToolErrors(return_to_model, return_to_model, return_to_model),
    MessageWindow(5),
    TokenWindow(5, len),
    ChatMemoryKey("s", "m"),
    InvocationContext(str, "chat", "id", UserMessage("hi"), {"a": 1}, 5.0),
    SystemMessage("t"),
    UserMessage([TextContent("a"), ImageContent("https://u")]),
    AiMessage("t", [REQUEST], "thought", {"a": 1}),
    TextContent("t"),
    ImageContent("http://x/y.png", None, "image/png"),
    ChatRequest([UserMessage("hi")], [ToolSpecification("n")], ResponseFormat("f", {}), "auto", {"seed": 1}, 0.5),
    ChatRequestParameters("m", 0.5, "auto", "low", 9, {"seed": 1}),
    RESPONSE,
    ResponseFormat("n", {"type": "object"}),
    PartialResponse("t"),
    PartialReasoning("t"),
    PartialToolCall(0, "1", "n", "{"),
    CompleteToolCall(0, REQUEST),
    CompleteResponse(RESPONSE),
    IntermediateResponse(RESPONSE),
    BeforeToolExecution(REQUEST),
    ToolExecuted(EXECUTION),
    Named("x"),
]


@pytest.mark.parametrize("made", EXAMPLES, ids=lambda made: type(made).__name__)
def test_data_classes_are_values(made: Any) -> None:
    """Shared between threads: frozen, without lists, comparable, hashable, and equal to their copies."""
    again = copy.deepcopy(made)

    assert again == made
    assert hash(again) == hash(made)
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(made)[0].name, None)
    for each in fields(made):
        if each.name not in ("content", "result_object"):  # whatever a tool or a model returned, as it is
            assert not isinstance(getattr(made, each.name), list)


def test_dictionaries_are_compared_but_not_hashed() -> None:
    one, other = ToolExecutionRequest("1", "n", "{}", {"a": 1}), ToolExecutionRequest("1", "n", "{}", {"a": 2})

    assert one != other
    assert hash(one) == hash(other)


def test_specifications_are_hashed_by_name() -> None:
    one, other = ToolSpecification("n", "d", {"type": "object", "properties": {"a": {}}}), ToolSpecification("n")

    assert hash(one) == hash(other)
    assert one != other
    assert {one: 1}[ToolSpecification("n", "d", {"type": "object", "properties": {"a": {}}})] == 1


def test_token_usage_has_a_total() -> None:
    assert TokenUsage(3, 4).total_tokens == 7


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
