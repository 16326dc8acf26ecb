"""Services, tools and scripted replies of the tests of limits."""

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, Protocol

from toolbox import (
    AiMessage,
    ChatResponse,
    Result,
    TokenStream,
    TokenUsage,
    create_ai_service,
    register_ai_service,
    tool,
    user_message,
)
from toolbox.limits import (
    CostEstimator,
    UsageLimits,
)
from toolbox.testing import ScriptedChatModel, tool_call

ASKED, SAID = TokenUsage(10, 1), TokenUsage(10, 5)


def asks(*calls: Any, usage: TokenUsage | None = ASKED) -> ChatResponse:
    return ChatResponse(AiMessage(None, calls), usage)


def says(text: str, usage: TokenUsage | None = SAID, model: str | None = None) -> ChatResponse:
    return ChatResponse(AiMessage(text), usage, model=model)


ran: list[str] = []


@tool
async def note(text: str) -> str:
    ran.append(text)
    return text


class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...
    async def result(self, question: str) -> Result[str]: ...
    async def number(self, question: str) -> int: ...
    def events(self, question: str) -> TokenStream: ...
    def texts(self, question: str) -> AsyncIterator[str]: ...


class Sync(Protocol):
    def ask(self, question: str) -> str: ...


def assistant(*replies: Any, of: Any = Assistant, **options: Any) -> Any:
    return create_ai_service(of, chat_model=ScriptedChatModel(replies), **{"tools": [note], **options})


def limits(**given: Any) -> dict[str, Any]:
    return {"limits": UsageLimits(**given)}


NOTE = tool_call("note", {"text": "a"})


class Prices(CostEstimator):
    def __init__(self, price: Any = Decimal("0.10")) -> None:
        self.price, self.models = price, list[str]()

    def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
        self.models.append(model)
        if isinstance(self.price, Exception):
            raise self.price
        return self.price  # type: ignore[no-any-return]  # wrong values as well


@register_ai_service(tools=note)
class Inner(Protocol):
    @tool
    @user_message("{topic}")
    async def inner(self, topic: str) -> str: ...


INNER = tool_call("inner", {"topic": "t"})


def tree(
    outer_limits: UsageLimits | None, inner_limits: UsageLimits | None, outer: Any, inner: Any, **options: Any
) -> Any:
    """Return a service with another service as its tool; each has its own model."""
    made: Any = create_ai_service(Inner, chat_model=ScriptedChatModel(inner), limits=inner_limits)
    return create_ai_service(
        Assistant, chat_model=ScriptedChatModel(outer), tools=[made], limits=outer_limits, **options
    )
