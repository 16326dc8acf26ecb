"""Metrics of calls, requests and tools."""

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.otel.telemetry import Assistant, Telemetry, container_with
from toolbox import AiMessage, ChatResponse, FinishReason, TokenUsage
from toolbox.testing import tool_call

pytestmark = pytest.mark.anyio


async def test_calls_requests_and_tools_have_metrics(telemetry: Telemetry) -> None:
    reply = ChatResponse(AiMessage("done"), TokenUsage(300, 20), FinishReason.STOP, model="m-2026")
    async with container_with(telemetry, tool_call("look"), tool_call("fail"), reply) as container:
        await container.get(Assistant).ask("Go")

    tokens = {each.attributes["gen_ai.token.type"]: each for each in telemetry.points("gen_ai.client.token.usage")}
    assert {kind: each.sum for kind, each in tokens.items()} == {"input": 300, "output": 20}
    assert dict(tokens["input"].attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ScriptedChatModel",
        "gen_ai.response.model": "m-2026",
        "gen_ai.token.type": "input",
    }
    assert tokens["input"].explicit_bounds[:5] == (1, 4, 16, 64, 256)
    assert sum(each.count for each in telemetry.points("gen_ai.client.operation.duration")) == 3
    looked, failed = telemetry.points("gen_ai.execute_tool.duration")
    shared = {"gen_ai.tool.type": "function", "gen_ai.agent.name": "Assistant"}
    assert dict(looked.attributes) == {"gen_ai.tool.name": "look", **shared}
    assert dict(failed.attributes) == {"gen_ai.tool.name": "fail", "error.type": "ValueError", **shared}
    assert looked.explicit_bounds[:3] == (0.01, 0.02, 0.04)
    [called] = telemetry.points("gen_ai.invoke_agent.duration")
    assert dict(called.attributes) == {"gen_ai.agent.name": "Assistant"}
    assert called.explicit_bounds[-1] == 409.6
    assert called.sum > 0
    assert telemetry.points("gen_ai.client.operation.time_to_first_chunk") == []


async def test_unsampled_traces_are_measured_but_not_recorded() -> None:
    telemetry = Telemetry(sampler=ALWAYS_OFF)
    async with container_with(telemetry, tool_call("look"), "done", content=True) as container:
        await container.get(Assistant).ask("Go")

    assert telemetry.spans == []
    assert len(telemetry.points("gen_ai.invoke_agent.duration")) == 1
