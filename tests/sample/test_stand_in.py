"""The stand-in says what Open-Meteo says: its parameters, its replies, its refusals."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from sample_app.stand_in import StandIn
from sample_app.stand_in.cities import all_cities


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server


def asked(stand_in: StandIn, path: str, **parameters: object) -> tuple[int, Any]:
    query = urllib.parse.urlencode(parameters, doseq=True)
    try:
        with urllib.request.urlopen(f"{stand_in.url}{path}?{query}") as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_offline_weather_service_has_more_than_a_hundred_cities_on_every_continent() -> None:
    cities = all_cities()

    assert len(cities) >= 100
    assert len({city.country for city in cities}) >= 80
    assert {city.timezone.partition("/")[0] for city in cities} >= {
        "Africa", "America", "Asia", "Atlantic", "Australia", "Europe", "Pacific",
    }  # fmt: skip


def test_every_city_is_found_by_each_of_its_names(stand_in: StandIn) -> None:
    lost = []
    for city in all_cities():
        for name in (city.name, *city.also):
            _, reply = asked(stand_in, "/v1/search", name=name, count=10, language="en", format="json")
            if city.id not in [place["id"] for place in reply.get("results", ())]:
                lost.append((city.name, name))

    assert lost == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("reykjavik", "Reykjavík"),
        ("SAO PAULO", "São Paulo"),
        ("köln", "Cologne"),
        ("tromso", "Tromsø"),
        ("Krakow", "Kraków"),
        ("münchen", "Munich"),
        ("東京", "Tokyo"),
        ("Valen", "Valencia"),
        ("Paris", "Paris"),
    ],
)
def test_accents_case_and_other_names_do_not_matter(stand_in: StandIn, name: str, found: str) -> None:
    _, reply = asked(stand_in, "/v1/search", name=name, count=1)

    [place] = reply["results"]
    assert place["name"] == found


def test_a_place_has_the_fields_of_the_real_service(stand_in: StandIn) -> None:
    _, reply = asked(stand_in, "/v1/search", name="Valence", count=1, language="en", format="json")

    [place] = reply["results"]
    assert place["country"] == "France"
    assert place["country_code"] == "FR"
    assert place["timezone"] == "Europe/Paris"
    assert (round(place["latitude"], 2), round(place["longitude"], 2)) == (44.93, 4.9)
    assert reply["generationtime_ms"] >= 0


@pytest.mark.parametrize("name", ["Nowhereville", "unknown_city", "", "x"])
def test_without_a_match_the_reply_has_no_results(stand_in: StandIn, name: str) -> None:
    status, reply = asked(stand_in, "/v1/search", name=name)

    assert status == 200
    assert list(reply) == ["generationtime_ms"]


def test_a_forecast_has_a_column_for_each_quantity(stand_in: StandIn) -> None:
    daily = ["weather_code", "temperature_2m_max", "temperature_2m_min"]

    status, reply = asked(
        stand_in, "/v1/forecast", latitude=64.13548, longitude=-21.89541, daily=daily, forecast_days=3, timezone="auto"
    )

    assert status == 200
    assert reply["timezone"] == "Atlantic/Reykjavik"
    assert list(reply["daily"]) == ["time", *daily]
    assert all(len(column) == 3 for column in reply["daily"].values())
    assert reply["daily_units"]["temperature_2m_max"] == "°C"
    assert all(
        low < high
        for low, high in zip(reply["daily"]["temperature_2m_min"], reply["daily"]["temperature_2m_max"], strict=True)
    )


def test_quantities_can_be_in_one_parameter_or_in_several(stand_in: StandIn) -> None:
    place = {"latitude": 44.9, "longitude": 4.9}

    together = asked(stand_in, "/v1/forecast", **place, daily="precipitation_sum,wind_speed_10m_max")
    apart = asked(stand_in, "/v1/forecast", **place, daily=["precipitation_sum", "wind_speed_10m_max"])

    assert together[1]["daily"] == apart[1]["daily"]


def test_a_forecast_without_quantities_has_no_columns(stand_in: StandIn) -> None:
    _, reply = asked(stand_in, "/v1/forecast", latitude=1, longitude=1)

    assert "daily" not in reply
    assert reply["timezone"] == "GMT"


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/v1/search", {}),
        ("/v1/search", {"name": "Paris", "count": 0}),
        ("/v1/search", {"name": "Paris", "count": "many"}),
        ("/v1/search", {"name": "Paris", "format": "protobuf"}),
        ("/v1/forecast", {"longitude": 1}),
        ("/v1/forecast", {"latitude": 91, "longitude": 1}),
        ("/v1/forecast", {"latitude": "nan", "longitude": 1}),
        ("/v1/forecast", {"latitude": 1, "longitude": -181}),
        ("/v1/forecast", {"latitude": 1, "longitude": 1, "forecast_days": 17}),
        ("/v1/forecast", {"latitude": 1, "longitude": 1, "daily": "happiness"}),
        ("/v1/forecast", {"latitude": 1, "longitude": 1, "timezone": "../etc/passwd"}),
    ],
)
def test_an_invalid_query_is_rejected_with_a_reason(
    stand_in: StandIn, path: str, parameters: dict[str, object]
) -> None:
    status, reply = asked(stand_in, path, **parameters)

    assert status == 400
    assert reply["error"] is True
    assert reply["reason"]


def test_unknown_paths_get_404(stand_in: StandIn) -> None:
    assert asked(stand_in, "/v1/archive")[0] == 404
