"""What others learn of guardrails: an event of each run, and the failure of a service that is a tool."""

import asyncio
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from tests.services.guarded import Events, NoDigits, Shop, guarded, started
from toolbox import InvocationTimeoutError, register_ai_service, time_limit, tool
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailError,
    InputGuardrailRequest,
    OutputGuardrailError,
    input_guardrails,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG

pytestmark = pytest.mark.anyio


# --- services as tools


async def test_a_refusal_of_a_service_that_is_a_tool_is_a_failure_without_details() -> None:
    @register_ai_service
    class Inner(Protocol):
        @tool
        @input_guardrails(NoDigits)
        async def inner(self, text: str) -> str:
            """Answer."""
            ...

    @register_ai_service(tools=[Inner])
    class Outer(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("inner", {"text": "secret 7"}), "I cannot"])
    async with started(model, Inner, Outer) as container:
        assert await container.get(Outer).ask("go") == "I cannot"

    result: Any = model.requests[-1].messages[-1]
    assert result.is_error
    assert result.text == "the input was refused by a guardrail"
    assert LOG == [("NoDigits", "secret 7")]


# --- events


async def test_each_run_of_a_guardrail_is_one_event() -> None:
    async with started(ScriptedChatModel(["retry", "reprompt", "failure"]), Shop, Events) as container:
        with pytest.raises(OutputGuardrailError):
            await container.get(Shop).result("x")
        events = container.get(Events)

    assert events.guardrails == [("Polite", "retry"), ("Polite", "reprompt"), ("Polite", "failure")]
    assert all(each.duration > 0 and each.context.method == "result" for each in events.all)
    assert {each.invocation_id for each in events.all} == {events.all[0].context.invocation_id}


async def test_a_guardrail_that_raises_or_is_cancelled_has_a_fatal_event(clock: Clock) -> None:
    class Hanging(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            if request.user_message.text == "raise":
                raise ValueError
            clock.advance(101)
            await asyncio.Event().wait()
            return self.success()

    service = guarded(Hanging)
    async with started(ScriptedChatModel([]), service, Events) as container:
        with pytest.raises(InputGuardrailError):
            await container.get(service).ask("raise")
        with pytest.raises(InvocationTimeoutError), time_limit(100):
            await container.get(service).ask("hang")
        assert container.get(Events).guardrails == [("Hanging", "fatal")] * 2
