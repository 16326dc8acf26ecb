"""What shapes a request, its reply and its tools is of the method in charge; the call as a whole is of the entry."""

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tests.listening import Events
from toolbox import (
    AiMessage,
    ChatResponse,
    Container,
    HandedOver,
    HandedOverEvent,
    InvocationContext,
    MemoryId,
    ModelHttpError,
    ModelRequestEvent,
    PartialResponse,
    Result,
    TokenStream,
    TokenUsage,
    UsageLimitExceededError,
    UserMessage,
    compensate_for,
    register_ai_service,
    system_message,
    tool,
    toolbox,
    user_message,
)
from toolbox.chat import ToolExecuted
from toolbox.errors import ToolRoundsExceededError
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    input_guardrails,
    output_guardrails,
)
from toolbox.handover import hands_over_to
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed, interceptors
from toolbox.limits import CostEstimator, UsageLimits
from toolbox.models import fallback
from toolbox.retrieval import Passage, Query, Retriever
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.services.outputs import ANSWER_TOOL
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

TO_BILLING, TO_DESK = tool_call("transfer_to_billing", {}), tool_call("transfer_to_desk", {})


def started(model: ScriptedChatModel, *classes: Any) -> Container:
    return Container(models={"default": model}).register(*classes)


async def test_parameters_go_by_kind_or_by_name() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        @system_message("Answer in {language}, {style}.")
        async def chat(self, chat_id: MemoryId[str], question: str, language: str, style: str = "briefly") -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @user_message("{text}")
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str, language: str = "French") -> str: ...

    model = ScriptedChatModel([TO_BILLING, "Voilà"])
    async with started(model, Desk, Billing) as container:
        assert await container.get(Desk).chat("ada", "Why?") == "Voilà"
    assert model.requests[1].messages[0].text == "Answer in French, briefly."


async def test_the_model_its_parameters_and_the_output_mode_are_those_of_the_target() -> None:
    class Answer(BaseModel):
        text: str

    @register_ai_service(model="large", temperature=0.5, output_mode="tool")
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> Answer: ...

    @register_ai_service(temperature=0.1, output_mode="prompt")
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> Answer: ...

    small, large = ScriptedChatModel([TO_BILLING]), ScriptedChatModel([tool_call(ANSWER_TOOL, {"text": "7 euros"})])
    async with Container(models={"default": small, "large": large}).register(Desk, Billing) as container:
        assert await container.get(Desk).chat("How much?") == Answer(text="7 euros")
    asked_first = small.requests[0].messages[-1]
    assert isinstance(asked_first, UserMessage)
    assert len(asked_first.contents) == 2  # the instructions about the answer
    [asked] = large.requests
    assert asked.temperature == 0.5
    assert [each.text for each in asked.messages[:1]] == ["How much?"]
    assert [each.name for each in asked.tool_specifications] == [ANSWER_TOOL]


async def test_a_hand_over_beside_the_answer_tool_is_a_round() -> None:
    class Answer(BaseModel):
        text: str

    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> Answer: ...

    @register_ai_service(output_mode="tool")
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> Answer: ...

    both = AiMessage(tool_execution_requests=[tool_call(ANSWER_TOOL, {"text": "no"}), TO_BILLING])
    model = ScriptedChatModel([both, '{"text": "yes"}'])
    async with started(model, Desk, Billing) as container:
        assert await container.get(Desk).chat("Well?") == Answer(text="yes")
    reply = model.requests[1].messages[-2]
    assert isinstance(reply, AiMessage)
    assert [each.name for each in reply.tool_execution_requests] == ["transfer_to_billing"]


async def test_rounds_are_those_of_the_entry() -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    @register_ai_service(tools=look, max_tool_rounds=10)
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service(max_tool_rounds=2)
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> str: ...

    look_call = tool_call("look", {})
    async with started(ScriptedChatModel([TO_BILLING, look_call, look_call]), Desk, Billing) as container:
        with pytest.raises(ToolRoundsExceededError):
            await container.get(Desk).chat("Hi")


async def test_limits_of_the_target_count_from_the_hand_over_on() -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    @register_ai_service(tools=look, limits=UsageLimits(model_calls=1))
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> str: ...

    look_call = tool_call("look", {})
    async with started(ScriptedChatModel([TO_BILLING, "One.", TO_BILLING, look_call]), Desk, Billing) as container:
        assert await container.get(Desk).chat("Hi") == "One."
        with pytest.raises(UsageLimitExceededError) as caught:
            await container.get(Desk).chat("Hi")
        # The numbers are those that count: from the hand-over on.
        error = caught.value
        assert (error.limit, error.allowed, error.used, error.usage.model_calls) == ("model_calls", 1, 1, 1)
        assert "model_calls=1: 1 used" in str(error)


LIMITS: list[dict[str, Any]] = [
    {"model_calls": 1},
    {"tool_calls": 1},
    {"total_tokens": 19},
    {"input_tokens": 9},
    {"cost": Decimal("0.019")},
]


@pytest.mark.parametrize("limits", LIMITS, ids=lambda each: next(iter(each)))
async def test_at_a_limit_of_the_target_the_entry_says_what_happens(limits: dict[str, Any]) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    @register_ai_service(tools=look, limits=UsageLimits(**limits), on_limit="raise")
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service(on_limit="answer", limits=UsageLimits(model_calls=9))
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> Result[str]: ...

    class Prices(CostEstimator):
        def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
            return usage.total_tokens * Decimal("0.001")

    looks = AiMessage(tool_execution_requests=[tool_call("look", {}), tool_call("look", {})])
    replies = [AiMessage(tool_execution_requests=[TO_BILLING]), looks, looks, AiMessage("So be it.")]
    if "tool_calls" in limits or "model_calls" in limits:
        del replies[1]
    paid = [ChatResponse(each, TokenUsage(5, 5)) for each in replies]
    async with started(ScriptedChatModel(paid), Desk, Billing, Prices) as container:
        result = await container.get(Desk).chat("Hi")
    assert (result.content, result.stopped_by, result.answered_by) == ("So be it.", *limits, "Billing.chat")


async def test_guardrails_of_both_hold_and_what_one_rewrites_counts() -> None:
    seen: list[tuple[str, str]] = []

    class First(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            seen.append(("First", request.user_message.text))
            return self.success()

    class Masking(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            seen.append(("Masking", request.user_message.text))
            return self.success_with(request.user_message.text.replace("1234", "****"))

    class Polite(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            seen.append(("Polite", request.text))
            return self.success_with(f"{request.text} Please.")

    class Exact(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            seen.append(("Exact", request.text))
            return self.success()

    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        @input_guardrails(Masking, First)
        @output_guardrails(Exact, Polite)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @input_guardrails(First)
        @output_guardrails(Polite)
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel([TO_BILLING, "Done.", "Again."])
    async with started(model, Desk, Billing) as container:
        assert await container.get(Desk).chat("ada", "My card is 1234") == "Done. Please."
        assert seen == [
            ("First", "My card is 1234"),
            ("Masking", "My card is 1234"),
            ("Exact", "Done."),
            ("Polite", "Done."),
        ]
        assert next(each.text for each in model.requests[1].messages if each.text) == "My card is ****"
        log = await container.conversations.of(Desk, "ada").history()
        assert log[0].message.text == "My card is ****"
        seen.clear()
        await container.get(Desk).chat("ada", "1234")
        assert [name for name, _ in seen] == ["First", "Masking", "Exact", "Polite"]
    assert model.requests[2].messages[-1].text == "****"


async def test_a_target_that_the_identity_may_not_call_is_not_offered_and_does_not_answer() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        @roles_allowed("customer")
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service(shared_conversations=True)
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([TO_BILLING, "Billing.", "Desk.", "Billing again."])
    program = Container(models={"default": model}, seeds=[SecurityIdentity]).register(Desk, Billing)
    async with program as container:
        for name, roles, answered_by in (
            ("ann", {"customer"}, "Billing.chat"),
            ("bob", {"guest"}, "Desk.chat"),
            ("ann", {"customer"}, "Billing.chat"),
        ):
            async with container.request_scope({SecurityIdentity: SecurityIdentity(name, roles)}):
                result = await container.get(Desk).chat("room", "Hi")
                assert result.answered_by == answered_by
    assert [len(each.tool_specifications) for each in model.requests] == [1, 0, 0, 0]


async def test_contexts_and_events_name_who_is_in_charge() -> None:
    seen: list[tuple[str, str, str | None]] = []

    @tool
    def look(context: InvocationContext) -> str:
        """Look."""
        seen.append((context.service.__name__, context.method, context.entry))
        return "seen"

    @register_ai_service(tools=look)
    class Billing(Protocol):
        """Invoices."""

        async def ask(self, text: str) -> str: ...

    @register_ai_service(tools=look)
    class Desk(Protocol):
        @hands_over_to(Billing.ask)
        async def chat(self, text: str) -> str: ...

    look_call = tool_call("look", {})
    model = ScriptedChatModel({Desk: [look_call, TO_BILLING], Billing: [look_call, "Done."]})
    async with started(model, Desk, Billing, Events) as container:
        assert await container.get(Desk).chat("Hi") == "Done."
        events = container.get(Events)
        assert seen == [("Desk", "chat", "Desk.chat"), ("Billing", "ask", "Desk.chat")]
        asked = [(each.context.service.__name__, each.context.method) for each in events.of(ModelRequestEvent)]
        assert asked == [("Desk", "chat"), ("Desk", "chat"), ("Billing", "ask"), ("Billing", "ask")]
        [handed] = events.of(HandedOverEvent)
        assert (handed.source, handed.target, handed.context.method) == ("Desk.chat", "Billing.ask", "ask")


async def test_a_stream_has_the_hand_over_between_the_rounds() -> None:
    class Silent(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            return self.success_with("Judged.")

    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        @output_guardrails(Silent)
        def chat(self, room: MemoryId[str], text: str) -> TokenStream: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        def chat(self, room: MemoryId[str], text: str) -> TokenStream: ...

    model = ScriptedChatModel([TO_BILLING, "Secret.", "Secret."])
    async with started(model, Desk, Billing) as container:
        events = [each async for each in container.get(Desk).chat("ada", "Hi")]
        assert [each for each in events if isinstance(each, HandedOver)] == [HandedOver("Desk.chat", "Billing.chat")]
        assert [each.execution.result for each in events if isinstance(each, ToolExecuted)] == [
            "Handed over to Billing.chat."
        ]
        assert [each.text for each in events if isinstance(each, PartialResponse)] == ["Judged."]
        events = [each async for each in container.get(Desk).chat("ada", "Hi")]
        assert [each.text for each in events if isinstance(each, PartialResponse)] == ["Judged."]


async def test_a_stream_has_what_the_target_retrieves_after_the_hand_over() -> None:
    class Prices(Retriever):
        def retrieve(self, query: Query) -> list[Passage]:
            return [Passage("7 euros")]

    @register_ai_service(retrievers=Prices)
    class Billing(Protocol):
        """Invoices."""

        def chat(self, text: str) -> TokenStream: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        def chat(self, text: str) -> TokenStream: ...

    async with started(ScriptedChatModel([TO_BILLING, "7"]), Desk, Billing) as container:
        events = [type(each).__name__ async for each in container.get(Desk).chat("Hi")]
    assert events[-5:] == ["ToolExecuted", "HandedOver", "Retrieved", "PartialResponse", "CompleteResponse"]


async def test_retrievers_of_the_target_are_asked_for_the_same_message() -> None:
    asked: list[str] = []

    class Prices(Retriever):
        def retrieve(self, query: Query) -> list[Passage]:
            asked.append(query.text)
            return [Passage("7 euros", title="Prices")]

    @register_ai_service(retrievers=Prices)
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([TO_BILLING, "7 [1]", "7 [1]"])
    async with started(model, Desk, Billing) as container:
        result = await container.get(Desk).chat("ada", "How much?")
        assert asked == ["How much?"]
        assert [each.title for each in result.sources] == ["Prices"]
        assert "7 euros" in str(model.requests[1].messages)
        assert "7 euros" not in str(model.requests[0].messages)
        await container.get(Desk).chat("ada", "And now?")
        assert asked == ["How much?", "And now?"]


async def test_what_a_replaced_target_returns_is_the_answer() -> None:
    class FakeBilling:
        async def chat(self, chat_id: str, question: str) -> Result[str]:
            return Result(f"fake for {chat_id}: {question}")

    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, chat_id: MemoryId[str], question: str) -> Result[str]: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([TO_BILLING])
    async with started(model, Desk, Billing) as container:
        with container.override(Billing, FakeBilling()):
            first = await container.get(Desk).chat("ada", "Hi")
            assert (first.content, first.answered_by) == ("fake for ada: Hi", "Billing.chat")
            assert (await container.get(Desk).chat("ada", "Ho")).content == "fake for ada: Ho"
        log = await container.conversations.of(Desk, "ada").history()
        assert [each.message.text for each in log if each.message.text][-1] == "fake for ada: Ho"
        assert log[-1].answered_by == "Billing.chat"


async def test_an_answer_without_a_request_has_the_sources_that_were_found_for_it() -> None:
    class Prices(Retriever):
        def retrieve(self, query: Query) -> list[Passage]:
            return [Passage("7 euros", title="Prices")]

    class FakeBilling:
        async def chat(self, chat_id: str, question: str) -> str:
            return "fake"

    @register_ai_service(retrievers=Prices)
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, chat_id: MemoryId[str], question: str) -> Result[str]: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with started(ScriptedChatModel([TO_BILLING, "7 [1]"]), Desk, Billing) as container:
        await container.get(Desk).chat("ada", "Hi")
        with container.override(Billing, FakeBilling()):
            result = await container.get(Desk).chat("ada", "Ho")

    assert result.content == "fake"
    assert [each.title for each in result.sources] == ["Prices"]


async def test_the_entry_says_that_the_tools_of_the_team_are_undone() -> None:
    undone: list[str] = []

    class Invoices:
        @tool
        def refund(self) -> str:
            """Refund."""
            return "refunded"

        @compensate_for("refund")
        def take_back(self) -> None:
            undone.append("refund")

        @tool
        def fail(self) -> str:
            """Fail."""
            raise ValueError("broken")

    @register_ai_service(tools=Invoices)
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service(compensate_on_failure=True)
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([TO_BILLING, tool_call("refund", {}), tool_call("missing", {})])
    async with started(model, Desk, Billing) as container:
        with pytest.raises(Exception, match="missing"):
            await container.get(Desk).chat("Hi")
    assert undone == ["refund"]


def test_a_blocking_service_hands_over() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        def chat(self, room: MemoryId[str], text: str) -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        def chat(self, room: MemoryId[str], text: str) -> str: ...

    with started(ScriptedChatModel([TO_BILLING, "Done.", "Again."]), Desk, Billing) as container:
        assert container.get(Desk).chat("ada", "Hi") == "Done."
        assert container.get(Desk).chat("ada", "Hi") == "Again."


async def test_another_method_of_the_service_answers_itself_and_changes_nothing() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

        @toolbox()
        async def summary(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([TO_BILLING, "Billing.", "Summary.", "Billing."])
    async with started(model, Desk, Billing) as container:
        desk = container.get(Desk)
        await desk.chat("ada", "Hi")
        assert (await desk.summary("ada", "Short")).answered_by == "Desk.summary"
        assert (await desk.chat("ada", "Hi")).answered_by == "Billing.chat"


async def test_without_a_memory_id_the_hand_over_ends_with_the_call() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> Result[str]: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> Result[str]: ...

    async with started(ScriptedChatModel([TO_BILLING, "Billing.", "Desk."]), Desk, Billing) as container:
        assert (await container.get(Desk).chat("Hi")).answered_by == "Billing.chat"
        assert (await container.get(Desk).chat("Hi")).answered_by == "Desk.chat"


async def test_tools_of_the_entry_are_undone_after_a_hand_over_too() -> None:
    undone: list[int] = []

    class Orders:
        @tool
        def book(self, order: int) -> str:
            """Book an order."""
            return "booked"

        @compensate_for("book")
        def cancel(self, order: int) -> None:
            undone.append(order)

    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service(compensate_on_failure=True, tools=Orders)
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("book", {"order": 7}), TO_BILLING, ValueError("broken")])
    async with started(model, Desk, Billing) as container:
        with pytest.raises(ValueError, match="broken"):
            await container.get(Desk).chat("Hi")
    assert undone == [7]


async def test_the_fallback_is_that_of_the_entry() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, question: str) -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> str: ...

        @staticmethod
        @fallback(chat)
        def sorry(text: str) -> str:
            return f"Sorry about {text!r}"

    async with started(ScriptedChatModel([TO_BILLING, ModelHttpError(503, "away")]), Desk, Billing) as container:
        assert await container.get(Desk).chat("Hi") == "Sorry about 'Hi'"


async def test_interceptors_are_those_of_the_target() -> None:
    seen: list[str] = []

    def noting(name: str) -> Any:
        class Noting(ModelInterceptor):
            async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
                seen.append(name)
                return await proceed(call)

        return Noting

    @register_ai_service
    @interceptors(noting("billing"))
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, text: str) -> str: ...

    @register_ai_service
    @interceptors(noting("desk"))
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, text: str) -> str: ...

    async with started(ScriptedChatModel([TO_BILLING, "Done."]), Desk, Billing) as container:
        await container.get(Desk).chat("Hi")
    assert seen == ["desk", "billing"]


async def test_a_stream_of_items_has_all_items_whoever_is_judged() -> None:
    judged: list[str] = []

    class Judge(OutputGuardrail):
        def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
            judged.append(request.text)
            return self.success()

    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        @output_guardrails(Judge)
        def chat(self, text: str) -> AsyncIterator[int]: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        def chat(self, text: str) -> AsyncIterator[int]: ...

    model = ScriptedChatModel(["[1, 2]", TO_BILLING, "[3, 4]"])
    async with started(model, Desk, Billing) as container:
        assert [each async for each in container.get(Desk).chat("Hi")] == [1, 2]
        assert [each async for each in container.get(Desk).chat("Hi")] == [3, 4]
    assert len(judged) == 1


async def test_what_a_replaced_target_streams_is_the_answer() -> None:
    @register_ai_service
    class Billing(Protocol):
        """Invoices."""

        def texts(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...
        def items(self, room: MemoryId[str], text: str) -> AsyncIterator[int]: ...

    class Fake:
        async def texts(self, room: str, text: str) -> AsyncIterator[str]:
            for each in ("fake ", text):
                yield each

        async def items(self, room: str, text: str) -> AsyncIterator[int]:
            for each in (1, 2):
                yield each

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.texts)
        def texts(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...

        @hands_over_to(Billing.items)
        def items(self, room: MemoryId[str], text: str) -> AsyncIterator[int]: ...

    async with started(ScriptedChatModel([TO_BILLING, TO_BILLING]), Desk, Billing) as container:
        desk = container.get(Desk)
        with container.override(Billing, Fake()):
            for _ in range(2):  # the second time it is in charge from the beginning
                assert "".join([each async for each in desk.texts("ada", "Hi")]) == "fake Hi"
            for _ in range(2):
                assert [each async for each in desk.items("bob", "Hi")] == [1, 2]
