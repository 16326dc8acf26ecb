"""The router and its experts: AI services as tools, as the LangChain4j documentation has them."""

from typing import Any

import pytest

from sample_app.experts import LegalExpert, MedicalExpert, RouterAgent, TechnicalExpert
from toolbox import AiMessage, Container, ToolExecutionResultMessage, UserMessage
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

QUESTION = "I broke my leg, what should I do?"


async def asked(*replies: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    container = Container(models={"default": model})
    container.register(RouterAgent, MedicalExpert, LegalExpert, TechnicalExpert)
    async with container:
        return await container.get(RouterAgent).ask_expert(QUESTION), model


async def test_the_router_calls_only_the_expert_it_chooses() -> None:
    result, model = await asked(tool_call("medical_request", {"request": QUESTION}), "See a doctor.", "See a doctor.")

    assert result.content == "See a doctor."
    assert [each.request.name for each in result.tool_executions] == ["medical_request"]
    assert [type(each) for each in result.messages] == [UserMessage, AiMessage, ToolExecutionResultMessage, AiMessage]
    router, expert, router_again = model.requests
    assert [each.name for each in router.tool_specifications] == [
        "medical_request",
        "legal_request",
        "technical_request",
    ]
    assert [each.description for each in router.tool_specifications] == [
        "A medical expert",
        "A legal expert",
        "A technical expert",
    ]
    [prompt] = expert.messages
    assert isinstance(prompt, UserMessage)
    assert prompt.text.strip().startswith("You are a medical expert.")
    assert prompt.text.strip().endswith(QUESTION)
    assert expert.tool_specifications == ()
    assert len(router_again.messages) == 3


async def test_a_failing_expert_is_a_failed_tool_call_of_the_router() -> None:
    result, _ = await asked(
        tool_call("legal_request", {"request": QUESTION}), LookupError("no lawyer is in"), "No lawyer is in."
    )

    assert result.content == "No lawyer is in."
    assert result.tool_executions[0].is_error
    assert result.tool_executions[0].result == "no lawyer is in"
