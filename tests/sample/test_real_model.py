"""The same program with a model server on the wire: which requests leave it, and what comes of a model's mistakes."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sample_app.stand_in import StandIn

from .conftest import WireServer, served

QUESTION = "What is the weather tomorrow in Valence?"
Reply = dict[str, Any]
Start = Callable[[Callable[[Reply], Reply]], WireServer]


@pytest.fixture
def open_meteo() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server


def call(name: str, arguments: object) -> Reply:
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}]}


def results(request: Reply) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


def scripted(*steps: Callable[[list[str]], Reply]) -> Callable[[Reply], Reply]:
    """Without tools, the city; else the step for as many tool results as there are."""

    def reply(request: Reply) -> Reply:
        if not request.get("tools"):
            return {"content": "Valence"}
        found = results(request)
        return steps[len(found)](found)

    return reply


STEPS: tuple[Callable[[list[str]], Reply], ...] = (
    lambda found: call("extract_city", {"question": QUESTION}),
    lambda found: call("find_city", {"name": found[0]}),
    lambda found: call("forecast", {key: json.loads(found[1])["results"][0][key] for key in ("latitude", "longitude")}),
    lambda found: {"content": f"Tomorrow in Valence: {json.loads(found[2])['days'][1]['weather']}."},
)


def environment(wire: WireServer, open_meteo: StandIn) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": wire.url,
        "OPENAI_API_KEY": "test",
        "OPENAI_MODEL": "a-model",
        "TOOLBOX_REST__GEOCODING__URL": open_meteo.url,
        "TOOLBOX_REST__OPENMETEO__URL": open_meteo.url,
    }


def test_a_question_takes_five_model_calls_and_two_calls_of_the_weather_services(
    wire_server: Start, open_meteo: StandIn
) -> None:
    wire = wire_server(scripted(*STEPS))

    with served(**environment(wire, open_meteo)) as agent:
        answer = agent.ask(QUESTION)

    mine = [request for request in wire.requests if request.get("tools")]
    extractors = [request for request in wire.requests if not request.get("tools")]
    assert (len(mine), len(extractors)) == (4, 1)
    assert {request["model"] for request in wire.requests} == {"a-model"}
    assert [tool["function"]["name"] for tool in mine[0]["tools"]] == ["extract_city", "find_city", "forecast"]
    assert [message["role"] for message in mine[0]["messages"]] == ["system", "user"]
    assert [message["role"] for message in mine[3]["messages"]] == ["system", "user", *["assistant", "tool"] * 3]
    assert QUESTION in extractors[0]["messages"][-1]["content"]

    assert [path.partition("?")[0] for path in open_meteo.requests] == ["/v1/search", "/v1/forecast"]
    search, forecast = open_meteo.requests
    assert "name=Valence" in search
    assert "count=1" in search
    assert "latitude=44.92801" in forecast
    assert forecast.count("daily=") == 5
    assert "timezone=auto" in forecast

    assert answer["answer"].startswith("Tomorrow in Valence:")
    assert [each["name"] for each in answer["tool_executions"]] == ["extract_city", "find_city", "forecast"]


def test_unknown_tools_and_invalid_arguments_are_reported_to_the_model(wire_server: Start, open_meteo: StandIn) -> None:
    wire = wire_server(
        scripted(
            lambda found: call("findCity", {"name": "Valence"}),
            lambda found: call("forecast", {"latitude": "north"}),
            lambda found: {"content": f"{found[0]} | {found[1]}"},
        )
    )

    with served(**environment(wire, open_meteo)) as agent:
        answer = agent.ask(QUESTION)

    unknown, invalid = answer["answer"].split(" | ")
    assert all(name in unknown for name in ("extract_city", "find_city", "forecast"))
    assert "latitude" in invalid
    assert "longitude" in invalid
    assert open_meteo.requests == []


def test_a_model_server_that_fails_is_a_bad_gateway_and_not_a_traceback(
    wire_server: Start, open_meteo: StandIn
) -> None:
    wire = wire_server(scripted(*STEPS))
    # The stand-in speaks HTTP, but not this wire: it refuses to be posted to.
    settings = environment(wire, open_meteo) | {"OPENAI_BASE_URL": open_meteo.url}

    with served(**settings) as agent:
        reply = agent.post("/weather", {"question": QUESTION})

    assert reply.status == 502
    assert reply.json["status"] == 502
    assert "Traceback" not in reply.text
