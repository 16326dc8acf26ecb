"""The weather agent over HTTP and on the terminal, on its embedded default."""

import json
import re
import socket
import subprocess
from typing import Any

import pytest

from tests import programs

from .conftest import DEV_UI_TOKEN


def names(answer: Any) -> list[str]:
    return [each["name"] for each in answer["tool_executions"]]


@pytest.mark.parametrize(
    ("question", "city", "country"),
    [
        ("What is the weather tomorrow in Valence?", "Valence", "France"),
        ("What is the weather in Reykjavík?", "Reykjavík", "Iceland"),
        ("Will it rain in São Paulo this week?", "São Paulo", "Brazil"),
        ("How warm is it in New York today?", "New York", "United States"),
    ],
)
def test_the_agent_answers_with_a_forecast_and_three_tool_calls(
    weather_agent: Any, question: str, city: str, country: str
) -> None:
    answer = weather_agent.ask(question)

    assert names(answer) == ["extract_city", "find_city", "forecast"]
    extract, find, forecast = answer["tool_executions"]
    assert extract["arguments"] == {"question": question}
    assert extract["result"] == city
    assert find["arguments"] == {"name": city}
    [place] = json.loads(find["result"])["results"]
    assert (place["name"], place["country"]) == (city, country)
    assert forecast["arguments"] == {"latitude": place["latitude"], "longitude": place["longitude"]}
    days = json.loads(forecast["result"])["days"]
    assert [day["day"] for day in days[:2]] == ["today", "tomorrow"]
    assert len(days) == 7
    assert city in answer["answer"]
    assert any(day["weather"] in answer["answer"] for day in days)
    assert not any(each["is_error"] for each in answer["tool_executions"])
    assert all(each["duration"] > 0 and each["started_at"] for each in answer["tool_executions"])


@pytest.mark.parametrize("question", ["What is the weather in Nowhereville?", "What is the meaning of life?"])
def test_an_unknown_city_gets_a_polite_answer(weather_agent: Any, question: str) -> None:
    answer = weather_agent.ask(question)

    assert names(answer) == ["extract_city", "find_city"]
    assert "sorry" in answer["answer"].lower()
    assert not any(each["is_error"] for each in answer["tool_executions"])


def test_a_question_about_one_day_gets_that_day(weather_agent: Any) -> None:
    answer = weather_agent.ask("What is the weather tomorrow in Valence?")

    days = json.loads(answer["tool_executions"][2]["result"])["days"]
    assert [day["date"] for day in days if day["date"] in answer["answer"]] == [days[1]["date"]]


def test_a_question_without_a_day_gets_today_and_tomorrow(weather_agent: Any) -> None:
    answer = weather_agent.ask("What is the weather in Oslo?")

    assert [line.partition(" (")[0] for line in answer["answer"].splitlines()] == [
        "Oslo, Norway, today",
        "Oslo, Norway, tomorrow",
    ]


def test_the_same_question_has_the_same_answer(weather_agent: Any) -> None:
    first, second = (weather_agent.ask("What is the weather in Oslo?") for _ in range(2))

    assert first["answer"] == second["answer"]


@pytest.mark.parametrize("body", [{}, {"question": ""}, {"question": 7}, {"question": "x" * 2001}])
def test_invalid_questions_are_rejected(weather_agent: Any, body: object) -> None:
    assert weather_agent.post("/weather", body).status == 422


def test_the_openapi_document_shows_the_question_and_no_injected_parameters(weather_agent: Any) -> None:
    operation = weather_agent.get("/openapi.json").json["paths"]["/weather"]["post"]

    assert "parameters" not in operation
    assert "agent" not in json.dumps(operation)


def test_the_page_loads_nothing_from_other_servers(weather_agent: Any) -> None:
    page = weather_agent.get("/")

    assert page.status == 200
    assert "{{" not in page.text
    assert "embedded demo model" in page.text
    assert 'src="http' not in page.text
    assert "url(http" not in page.text


def test_the_sample_can_be_inspected_with_the_command_line(weather_agent: Any) -> None:
    assert "/dev-ui" in weather_agent.get("/").text
    assert weather_agent.get("/dev-ui").status == 403
    assert weather_agent.get(f"/dev-ui/api/program?token={DEV_UI_TOKEN}").status == 200


def test_a_port_in_use_prints_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        done = run("--port", str(port))

    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert str(port) in line
    assert f"PORT={port + 1}" in line


def test_ask_answers_on_the_terminal() -> None:
    done = run("ask", "What is the weather tomorrow in Valence?")

    assert done.returncode == 0, done.stderr
    forecast = r"[a-z ]+, -?[\d.]+ to -?[\d.]+ °C, .+, wind up to [\d.]+ km/h\."
    assert re.fullmatch(rf"Valence, France, tomorrow \(\d{{4}}-\d\d-\d\d\): {forecast}\n", done.stdout)
    assert "{" not in done.stderr
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["extract_city", "find_city", "forecast"]


def test_a_misspelt_setting_is_reported_without_a_traceback() -> None:
    done = run("ask", "What is the weather in Oslo?", TOOLBOX_REST__OPENMETEO__TIMEOUT="soon")

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "openmeteo" in done.stderr.lower()


def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    from .conftest import ROOT, environment

    return subprocess.run(
        programs.command("-m", "sample_app", *arguments),
        cwd=ROOT,
        env=environment(**more),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
        check=False,
    )
