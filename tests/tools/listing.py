"""Tools and helpers for tests of what a service offers: which tools a request names, and which results it contains."""

from toolbox import ToolExecutionRequest, ToolExecutionResultMessage, tool
from toolbox.testing import ScriptedChatModel


def offered(model: ScriptedChatModel, number: int = 0) -> list[str]:
    return [each.name for each in model.requests[number].tool_specifications]


def results(model: ScriptedChatModel) -> list[str]:
    return [each.text for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage)]


class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        return a + b


@tool
def weather(city: str) -> str:
    return f"sun in {city}"


def by_hand(request: ToolExecutionRequest, memory_id: object) -> str:
    return f"{request.name} {request.arguments} {memory_id}"
