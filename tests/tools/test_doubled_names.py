"""A name that occurs twice in a JSON object of arguments: every reader of the text must see the same value."""

import json
from typing import Annotated, Any, Protocol

import pytest
from pydantic import BaseModel, Field

from toolbox import (
    Result,
    ToolArgumentsError,
    ToolExecutionRequest,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    create_ai_service,
    return_to_model,
    tool,
)
from toolbox.hosts.executors import tool_executor_from
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

DOUBLED = [
    '{"path": "/tmp", "path": "/"}',
    '{"path": "/", "path": "/"}',
    '{"p\\u0061th": "/tmp", "path": "/"}',
    '{"path": "/tmp", "options": {"deep": [1, {"force": false, "force": true}]}}',
    '{"path": "/tmp", "path": "/",}',
    '{"path": "/tmp\n", "path": "/"}',
    '{} {"path": "/tmp", "path": "/"}',
    '{"path": "/"}{"path": "/tmp", "path": "/"}',
    '{"path": "/tmp", "path": "/"}{"path": "/"}',
    json.dumps('{"path": "/tmp", "path": "/"}'),
    '{"path" : "/tmp",\n"path"\t: "/"}',
    '{"path": "/tmp", "unknown": 1, "unknown": 2}',
]
SINGLE = [
    '{"path": "/tmp"}',
    '{"path": "/tmp"}{"path": "/tmp"}',
    '{"path": "/tmp", "options": {"path": "/"}}',
    '{"path": "/tmp", "options": [{"path": 1}, {"path": 2}]}',
    '{"path": "/tmp", "text": "{\\"path\\": 1, \\"path\\": 2}"}',
    '{"path": "/tmp", "PATH": "/"}',
]


class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


def delete(path: str, options: Any = None, text: str = "") -> str:
    return path.strip()


def now() -> str:
    return "12:00"


@pytest.mark.parametrize("arguments", DOUBLED)
async def test_a_function_is_not_called(arguments: str) -> None:
    with pytest.raises(ToolArgumentsError, match="occurs twice in one JSON object"):
        tool_executor_from(delete)(ToolExecutionRequest("1", "delete", arguments), None)


@pytest.mark.parametrize("arguments", DOUBLED)
async def test_an_executor_written_by_hand_is_not_called(arguments: str) -> None:
    seen: list[str] = []

    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        seen.append(request.arguments)
        return "deleted"

    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult({ToolSpecification("delete"): execute})

    model = ScriptedChatModel([tool_call("delete", arguments), "Sorry."])
    service = create_ai_service(
        Assistant, chat_model=model, tool_provider=provide, on_tool_arguments_error=return_to_model
    )
    [execution] = (await service.ask("Delete it.")).tool_executions

    assert execution.is_error
    assert "occurs twice" in execution.result
    assert seen == []


@pytest.mark.parametrize("arguments", SINGLE)
async def test_the_same_name_in_other_objects_or_texts_is_accepted(arguments: str) -> None:
    assert tool_executor_from(delete)(ToolExecutionRequest("1", "delete", arguments), None).text == "/tmp"


async def test_a_tool_without_parameters_is_not_called() -> None:
    with pytest.raises(ToolArgumentsError):
        tool_executor_from(now)(ToolExecutionRequest("1", "now", '{"a": 1, "a": 2}'), None)


class Options(BaseModel):
    force: Annotated[bool, Field(description="Delete without asking")] = False


async def test_an_object_written_as_a_text_counts_too() -> None:
    def remove(path: str, options: Options) -> str:
        return path

    arguments = {"path": "/", "options": '{"force": false, "force": true}'}

    with pytest.raises(ToolArgumentsError):
        tool_executor_from(remove)(ToolExecutionRequest("1", "remove", json.dumps(arguments)), None)


async def test_the_model_reads_which_name_occurs_twice() -> None:
    class Disk:
        @tool
        def delete(self, path: str) -> str:
            """Delete a folder."""
            return path

    model = ScriptedChatModel([tool_call("delete", '{"path": "/tmp", "path": "/"}'), "Sorry."])
    service = create_ai_service(Assistant, chat_model=model, tools=[Disk()], on_tool_arguments_error=return_to_model)
    [execution] = (await service.ask("Delete it.")).tool_executions

    assert execution.is_error
    assert "path: this name occurs twice in one JSON object; pass it once" in execution.result


@pytest.mark.parametrize("text", ['"' + '\\"' * 200_000, '{"a":' * 100_000, '{"a": "' + "\\n" * 200_000, "{" * 200_000])
async def test_long_invalid_arguments_are_refused(text: str) -> None:
    with pytest.raises(ToolArgumentsError):
        tool_executor_from(delete)(ToolExecutionRequest("1", "delete", text), None)
