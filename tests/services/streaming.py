"""A service with every kind of stream, and its tools, for the tests of streams.

Not here: the scripted model (`toolbox.testing`).
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from pydantic import BaseModel

from toolbox import TokenStream, create_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call


class City(BaseModel):
    name: str


class Streaming(Protocol):
    def text(self, text: str) -> AsyncIterator[str]: ...

    def events(self, text: str) -> TokenStream: ...

    def items(self, text: str) -> AsyncIterator[City]: ...

    def numbers(self, text: str) -> AsyncIterator[int]: ...


@tool
async def add(a: int, b: int) -> int:
    return a + b


@tool
def block(text: str = "") -> str:
    return text


@tool
def fail() -> str:
    raise ValueError("broken")


def streaming(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    return create_ai_service(Streaming, chat_model=model, tools=(add, block, fail), **options), model


ADD = tool_call("add", {"a": 1, "b": 2})


async def names(stream: AsyncIterator[Any]) -> list[str]:
    return [type(each).__name__ async for each in stream]
