"""A service with a few tools, and scripted replies that call them, for the tests of the tool loop."""

from typing import Any, Protocol

from toolbox import AiMessage, Result, ReturnBehavior, ToolExecutionResultMessage, create_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


class Tools:
    def __init__(self) -> None:
        self.ran: list[Any] = []

    @tool
    def sync(self, n: int = 0) -> int:
        self.ran.append(("sync", n))
        return n

    @tool
    async def later(self, n: int = 0) -> int:
        self.ran.append(("later", n))
        return n

    @tool
    def fail(self) -> str:
        self.ran.append("fail")
        raise ValueError("broken")

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now(self, n: int = 0) -> int:
        self.ran.append(("now", n))
        return n

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now_fails(self) -> str:
        raise ValueError("broken now")

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now_nothing(self) -> None:
        self.ran.append("now_nothing")


def calls(*names: str) -> AiMessage:
    return AiMessage(
        None, [tool_call(name, {"n": number} if "fail" not in name else {}) for number, name in enumerate(names)]
    )


def assistant(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel, Tools]:
    model, tools = ScriptedChatModel(replies), Tools()
    return create_ai_service(Assistant, chat_model=model, tools=(tools,), **options), model, tools


def results(model: ScriptedChatModel, number: int = -1) -> list[str]:
    return [each.text for each in model.requests[number].messages if isinstance(each, ToolExecutionResultMessage)]
