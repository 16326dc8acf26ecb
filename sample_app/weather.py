"""The weather agent from the Quarkus documentation: the agent, its three tools, and their data.

Not here: the URLs of the weather services, the choice of the model (`application`).
"""

from __future__ import annotations

from datetime import date
from typing import Any, Protocol

from pydantic import BaseModel, model_validator

from toolbox import Result, register_ai_service, rest, return_to_model, system_message, tool, toolbox, user_message


class Place(BaseModel):
    """The location of a city."""

    name: str
    country: str | None = None
    admin1: str | None = None
    latitude: float
    longitude: float


class Places(BaseModel):
    """The places with a name; empty if the service does not know the name."""

    results: list[Place] = []


class Day(BaseModel):
    """The weather of one day: temperatures in °C, precipitation in mm, wind speed in km/h."""

    day: str
    date: date
    weather: str
    max_temperature: float | None
    min_temperature: float | None
    precipitation: float | None
    wind_speed: float | None


class WeatherForecast(BaseModel):
    """A forecast by day, starting today; the service itself replies with one list per quantity."""

    timezone: str
    days: list[Day]

    @model_validator(mode="before")
    @classmethod
    def _by_day(cls, reply: Any) -> Any:
        if not isinstance(reply, dict) or "daily" not in reply:
            return reply
        daily = reply["daily"]
        return {
            "timezone": reply["timezone"],
            "days": [
                {
                    "day": _name_of_day(number, date.fromisoformat(day)),
                    "date": day,
                    "weather": WMO_CODES.get(daily["weather_code"][number], "unknown"),
                    "max_temperature": daily["temperature_2m_max"][number],
                    "min_temperature": daily["temperature_2m_min"][number],
                    "precipitation": daily["precipitation_sum"][number],
                    "wind_speed": daily["wind_speed_10m_max"][number],
                }
                for number, day in enumerate(daily["time"])
            ],
        }


def _name_of_day(number: int, day: date) -> str:
    return ("today", "tomorrow")[number] if number < 2 else f"{day:%A}"


WMO_CODES: dict[int, str] = {
    0: "clear sky",
    1: "mainly clear",
    2: "partly cloudy",
    3: "overcast",
    45: "fog",
    48: "depositing rime fog",
    51: "light drizzle",
    53: "moderate drizzle",
    55: "dense drizzle",
    56: "light freezing drizzle",
    57: "dense freezing drizzle",
    61: "slight rain",
    63: "moderate rain",
    65: "heavy rain",
    66: "light freezing rain",
    67: "heavy freezing rain",
    71: "slight snow fall",
    73: "moderate snow fall",
    75: "heavy snow fall",
    77: "snow grains",
    80: "slight rain showers",
    81: "moderate rain showers",
    82: "violent rain showers",
    85: "slight snow showers",
    86: "heavy snow showers",
    95: "thunderstorm",
    96: "thunderstorm with slight hail",
    99: "thunderstorm with heavy hail",
}


@register_ai_service(chat_memory=None)
class CityExtractorAgent(Protocol):
    """Extracts the city from a question."""

    @user_message("""
        You are given one question and you have to extract the city name from it.
        Only reply the city name if it exists, or reply 'unknown_city' if there is no city name in the question.

        Here is the question: {question}
        """)
    @tool("Extracts the city from a question")
    async def extract_city(self, question: str) -> str:
        """Return the name of the city, or `unknown_city`."""
        ...


@rest.register_rest_client(config_key="geocoding", path="/v1")
class GeoCodingService(Protocol):
    """The geocoding service of Open-Meteo."""

    @rest.get("/search")
    @rest.client_query_param("count", 1)
    @rest.client_query_param("language", "en")
    @rest.client_query_param("format", "json")
    @tool("Finds the latitude and longitude of a given city")
    async def find_city(self, name: str) -> Places:
        """Return the best match; `results` is empty if there is none."""
        ...


@rest.register_rest_client(config_key="openmeteo", path="/v1")
class WeatherForecastService(Protocol):
    """The forecast service of Open-Meteo."""

    @rest.get("/forecast")
    @rest.client_query_param("forecast_days", 7)
    @rest.client_query_param("timezone", "auto")
    @rest.client_query_param(
        "daily",
        ["weather_code", "temperature_2m_max", "temperature_2m_min", "precipitation_sum", "wind_speed_10m_max"],
    )
    @tool("Forecasts the weather for the given latitude and longitude")
    async def forecast(self, latitude: float, longitude: float) -> WeatherForecast:
        """Return a forecast for seven days, starting with today at this place."""
        ...


@register_ai_service(on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model)
class WeatherForecastAgent(Protocol):
    """Answers questions about the weather."""

    @system_message("""
        You are a meteorologist, and you answer questions about the weather in at most 3 lines.
        Extract the city from the question, find its latitude and longitude, then ask for its forecast.
        The forecast is a JSON object with an entry for each of 7 days, the first of them today:
        max_temperature and min_temperature are in degrees Celsius,
        precipitation is the amount of water in mm,
        wind_speed is the highest speed of the wind in kilometres per hour,
        weather is the overall weather.
        When the city is not known, or there is none in the question, say so politely and ask for another.
        """)
    @toolbox(CityExtractorAgent, GeoCodingService, WeatherForecastService)
    async def chat(self, question: str) -> Result[str]:
        """Return the answer with the tool calls behind it."""
        ...
