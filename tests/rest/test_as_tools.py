"""A client's methods as tools."""

import asyncio
import json
from typing import Annotated, Protocol

import pytest
from pydantic import BaseModel

from tests.rest.http_server import Answer
from toolbox import (
    AiMessage,
    Container,
    Result,
    ToolboxSettings,
    ToolExecutionRequest,
    ToolExecutionResult,
    produces,
    register_ai_service,
    rest,
    tool,
    tools_from,
    user_message,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Forecast(BaseModel):
    high: float


@rest.register_rest_client(config_key="weather")
class Weather(Protocol):
    @tool
    @rest.get("/forecast")
    @rest.client_query_param("days", 7)
    async def forecast(self, latitude: Annotated[float, "degrees north"], days: int | None = None) -> Forecast:
        """Forecasts the weather."""
        ...

    @rest.get("/whole")
    @tool("The whole reply")
    def whole(self, place: Annotated[str, rest.Header("X-Place")]) -> rest.Response[list[Forecast]]: ...


async def test_a_method_is_a_tool_like_any_other(server) -> None:
    server.answer({"high": 21.5})
    weather = rest.create_rest_client(Weather, url=server.url)
    tools = {spec.name: (spec, executor) for spec, executor in tools_from(weather).items()}

    spec, executor = tools["forecast"]
    assert spec.description == "Forecasts the weather."
    assert spec.parameters["properties"]["latitude"] == {"type": "number", "description": "degrees north"}
    assert spec.parameters["required"] == ["latitude"]
    result = await executor(ToolExecutionRequest("1", "forecast", '{"latitude": "49.5"}'), None)
    assert json.loads(result.text) == {"high": 21.5}
    assert result.result_object == Forecast(high=21.5)
    assert server.last.query == [("days", "7"), ("latitude", "49.5")]


async def test_the_model_reads_the_body_of_a_response(server) -> None:
    server.answer([{"high": 1.0}])
    weather = rest.create_rest_client(Weather, url=server.url)
    [executor] = [executor for spec, executor in tools_from(weather).items() if spec.name == "whole"]

    request = ToolExecutionRequest("1", "whole", '{"place": "here"}')
    result = await asyncio.to_thread(executor, request, None)

    assert result.text == '[{"high":1.0}]'
    assert server.last.header("X-Place") == "here"


@register_ai_service(tools=(Weather,), model="default")
class Agent(Protocol):
    @user_message("{question}")
    async def ask(self, question: str) -> Result[str]: ...

    @user_message("{question}")
    def ask_now(self, question: str) -> Result[str]: ...


def replies() -> ScriptedChatModel:
    call = tool_call("forecast", {"latitude": 49.5}), tool_call("whole", {"place": "here"})
    return ScriptedChatModel([AiMessage(tool_execution_requests=call), "done"] * 2)


async def test_a_model_calls_both_kinds_of_method(server) -> None:
    def answer(received):
        return Answer([{"high": 2.0}] if received.path == "/whole" else {"high": 1.0})

    server.handler = answer
    container = Container(models={"default": replies()}).register(Agent, rest.rest_settings("weather", url=server.url))

    async with container:
        result = await container.get(Agent).ask("?")
        assert [each.result for each in result.tool_executions] == ['{"high":1.0}', '[{"high":2.0}]']
        result = await asyncio.to_thread(container.get(Agent).ask_now, "?")
        assert [each.result for each in result.tool_executions] == ['{"high":1.0}', '[{"high":2.0}]']


def test_a_program_without_a_loop_uses_a_client_through_a_service(server) -> None:
    server.answer({"high": 1.0}, [{"high": 2.0}])

    with Container(models={"default": replies()}).register(
        Agent, rest.rest_settings("weather", url=server.url)
    ) as container:
        assert container.get(Agent).ask_now("?").content == "done"


async def test_a_refusal_is_the_tools_failure_and_a_missing_url_a_problem_of_the_program(server) -> None:
    server.answer(Answer("no such place", 404))
    model = ScriptedChatModel([AiMessage(tool_execution_requests=(tool_call("forecast", {"latitude": 1}),)), "sorry"])

    async with Container(models={"default": model}).register(
        Agent, rest.rest_settings("weather", url=server.url)
    ) as container:
        result = await container.get(Agent).ask("?")

    assert result.tool_executions[0].is_error
    assert "no such place" in result.tool_executions[0].result
    problems = Container(models={"default": model}, settings=ToolboxSettings(rest={})).register(Agent).check()
    assert [each.where for each in problems] == ["Weather"]


async def test_a_name_from_the_model_stays_in_its_place(server) -> None:
    @rest.register_rest_client(config_key="weather", path="/v1")
    class Places(Protocol):
        @tool("Finds a place")
        @rest.get("/places/{name}")
        async def place(self, name: str) -> str: ...

    @register_ai_service(tools=(Places,))
    class Finder(Protocol):
        async def ask(self, question: str) -> str: ...

    server.answer("found")
    refused = ["../../admin", "//evil.example/x", "8/payment-details", "8\\payment-details", ".."]
    hostile = ["a\r\nX-Injected: 1", "{name}", "user@evil", "%2e%2e%2f", *refused]
    calls = AiMessage(tool_execution_requests=tuple(tool_call("place", {"name": each}) for each in hostile))

    async with Container(models={"default": ScriptedChatModel([calls, "done"])}).register(
        Finder, rest.rest_settings("weather", url=server.url)
    ) as container:
        assert await container.get(Finder).ask("?") == "done"

    assert len(server.received) == len(hostile) - len(refused)
    for received in server.received:
        assert received.path.startswith("/v1/places/")
        assert received.path.count("/") == 3
        assert received.header("X-Injected") is None


class Seen(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        return await proceed(call)


@rest.register_rest_client(config_key="weather")
class Watched(Protocol):
    @tool
    @interceptors(Seen)
    @rest.get("/forecast")
    async def forecast(self, place: str) -> Forecast:
        """Forecasts the weather."""
        ...


class Station:
    @tool
    @interceptors(Seen)
    def read(self) -> str:
        """Read the thermometer."""
        return "21.5"


@produces()
def station() -> Station:
    return Station()


def test_interceptors_that_a_registered_tool_class_names_need_no_registration() -> None:
    settings = ToolboxSettings.model_validate({"rest": {"weather": {"url": "http://127.0.0.1:1"}}})

    assert Container(settings=settings).register(Watched).check() == []
    assert Container().register(station).check() == []
    container = Container()
    container.register_instance(Station())
    assert container.check() == []


async def test_a_method_of_a_rest_client_is_a_tool(server) -> None:
    @rest.register_rest_client(config_key="menu")
    class Menu(Protocol):
        @rest.get("/dishes/{name}")
        @tool
        async def dish(self, name: str) -> dict[str, int]:
            """Find a dish."""
            ...

        @rest.delete("/dishes/{name}")
        @tool
        async def remove(self, name: str) -> None:
            """Remove a dish."""
            ...

    @register_ai_service(tools=Menu.dish)
    class Guest(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    server.answer({"euros": 9})
    models = {"default": ScriptedChatModel([tool_call("dish", {"name": "soup"}), "done"])}
    container = Container(models=models).register(Guest, rest.rest_settings("menu", url=server.url))
    async with container:
        result = await container.get(Guest).chat("soup?")
        [row] = container.reach()

    assert [each.name for each in models["default"].requests[0].tool_specifications] == ["dish"]
    assert [each.result_object for each in result.tool_executions] == [{"euros": 9}]
    assert row.effects == ("GET /dishes/{name}",)
