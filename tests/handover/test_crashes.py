"""A process that is killed in the middle of a hand-over: the next one comes to the same answer."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from tests.runs.crashing import Crashing, Kept, writes_of
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    Result,
    TokenUsage,
    UsageLimitExceededError,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.errors import RunFailedError
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.handover import hands_over_to
from toolbox.limits import UsageLimits
from toolbox.runs import RunId, RunStore, approve
from toolbox.store_clock import skip
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ran: list[str] = []


@tool
async def note(text: str) -> str:
    ran.append(text)
    return "noted"


class Masking(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.success_with(f"{request.user_message.text}*")


@register_ai_service(tools=note, model="second", limits=UsageLimits(model_calls=2))
class Second(Protocol):
    """The second."""

    @input_guardrails(Masking)
    @hands_over_to("First.chat")
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(tools=note, durable=True, name="first")
class First(Protocol):
    """The first."""

    @hands_over_to(Second.chat)
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


class Scripted:
    """Replies by the number of the results that it reads, so that a request that comes again gets the same reply."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.requests = replies, list[ChatRequest]()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.requests.append(request)
        done = sum(isinstance(each, AiMessage) for each in request.messages)
        reply = self.replies[done]
        message = AiMessage(reply) if isinstance(reply, str) else AiMessage(None, tuple(reply))
        return ChatResponse(message, TokenUsage(5, 5))


def note_of(text: str) -> Any:
    return tool_call("note", {"text": text})


ROUNDS = (
    [note_of("a"), tool_call("transfer_to_second", {})],
    [note_of("b")],
    [tool_call("transfer_to_first", {})],
    "Done.",
)


async def call(store: Any) -> Any:
    model = Scripted(*ROUNDS)
    container = Container(models={"default": model, "second": model}).register(First, Second)
    async with container.register_instance(store, RunStore):
        result = await container.get(First).chat("r", "room", "Hi")
        assert all("Hi*" in str(each.messages) for each in model.requests[1:] if len(each.messages) > 2)
        return result


@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_at_any_write_leads_to_the_same_answer(after: bool) -> None:
    count = await writes_of(Kept(), call)

    for at in range(1, count + 1):
        kept, place = Kept(), f"write {at}"
        ran.clear()
        with pytest.raises(Exception):  # noqa: B017 - each layer wraps the crash differently
            await call(Crashing(kept, at, after))
        skip([kept.clock], timedelta(seconds=kept.lease))
        result = await call(kept)

        assert (result.content, result.answered_by) == ("Done.", "First.chat"), place
        assert [each.request.name for each in result.tool_executions] == [
            "note",
            "transfer_to_second",
            "note",
            "transfer_to_first",
        ], place
        assert len(ran) == len(set(ran)), place
        asked = result.messages[0]
        assert isinstance(asked, UserMessage)
        assert asked.text == "Hi*", place


@tool(requires_approval=True)
async def pay() -> str:
    return "paid"


@register_ai_service(tools=pay, limits=UsageLimits(model_calls=2))
class Cashier(Protocol):
    """Pays."""

    async def chat(self, text: str) -> Result[str]: ...


@register_ai_service(tools=note)
class Shop(Protocol):
    @hands_over_to(Cashier.chat)
    async def chat(self, text: str) -> Result[str]: ...


async def test_limits_of_the_target_count_on_after_a_suspension() -> None:
    kept, model = (
        Kept(),
        Scripted([tool_call("transfer_to_cashier", {})], [tool_call("pay", {})], [tool_call("pay", {})]),
    )
    async with (
        Container(models={"default": model}).register(Shop, Cashier).register_instance(kept, RunStore) as container
    ):
        waiting = await container.get(Shop).chat("Pay")
        again = await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
        with pytest.raises((UsageLimitExceededError, RunFailedError), match="model_calls=2: 2 used"):
            await container.runs.resume(waiting.run_id or "", {again.pending[0].id: approve()})


async def test_limits_of_the_one_in_charge_count_on_after_a_suspension() -> None:
    @register_ai_service(tools=pay, limits=UsageLimits(model_calls=2))
    class Till(Protocol):
        """Pays."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Market(Protocol):
        @hands_over_to(Till.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("pay", {}), tool_call("pay", {}), "Third."])
    async with Container(models={"default": model}).register(Market, Till) as container:
        await (await container.conversations.create(Market, "ada")).put_in_charge(Till.chat)
        waiting = await container.get(Market).chat("ada", "Pay")
        again = await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
        with pytest.raises((UsageLimitExceededError, RunFailedError), match="model_calls=2: 2 used"):
            await container.runs.resume(waiting.run_id or "", {again.pending[0].id: approve()})
