"""A client's methods as tools."""

import asyncio
import json
from typing import Annotated, Protocol

import pytest
from pydantic import BaseModel

from toolbox import rest
from toolbox.chat import ToolExecutionRequest
from toolbox.tools.marks import tool
from toolbox.tools.standalone import tools_from

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


async def test_of_a_whole_response_the_model_reads_the_body(server) -> None:
    server.answer([{"high": 1.0}])
    weather = rest.create_rest_client(Weather, url=server.url)
    [executor] = [executor for spec, executor in tools_from(weather).items() if spec.name == "whole"]

    request = ToolExecutionRequest("1", "whole", '{"place": "here"}')
    result = await asyncio.to_thread(executor, request, None)

    assert result.text == '[{"high":1.0}]'
    assert server.last.header("X-Place") == "here"
