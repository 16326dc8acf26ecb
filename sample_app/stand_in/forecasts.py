"""Weather computed from place and date: the same question has the same answer on every machine.

It depends on latitude, season, elevation and a random number seeded by place and date. Not here: HTTP (`server`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from random import Random


@dataclass(frozen=True, slots=True)
class DayWeather:
    """One day: a WMO weather code, degrees Celsius, millimetres, percent, kilometres per hour, compass degrees."""

    weather_code: int
    temperature_2m_max: float
    temperature_2m_min: float
    apparent_temperature_max: float
    apparent_temperature_min: float
    precipitation_sum: float
    precipitation_probability_max: int
    wind_speed_10m_max: float
    wind_gusts_10m_max: float
    wind_direction_10m_dominant: int


UNITS: dict[str, str] = {
    "weather_code": "wmo code",
    "temperature_2m_max": "°C",
    "temperature_2m_min": "°C",
    "apparent_temperature_max": "°C",
    "apparent_temperature_min": "°C",
    "precipitation_sum": "mm",
    "precipitation_probability_max": "%",
    "wind_speed_10m_max": "km/h",
    "wind_gusts_10m_max": "km/h",
    "wind_direction_10m_dominant": "°",
}
"""The daily quantities and their units."""


def weather_on(day: date, latitude: float, longitude: float, elevation: float) -> DayWeather:
    """Return the weather of one day at one place."""
    dice = Random(f"{latitude:.2f} {longitude:.2f} {day.isoformat()}")
    mean = _mean_temperature(day, latitude, elevation) + dice.gauss(0, 2.5)
    swing = dice.uniform(2.5, 6.5)
    wind = dice.uniform(4, 22) + 14 * dice.random() ** 3 + abs(latitude) / 8
    wet = dice.random() < 0.38
    rain = round(0.3 + dice.expovariate(1 / 5), 1) if wet else 0.0
    high, low = round(mean + swing, 1), round(mean - swing, 1)
    chill = wind / 12 if mean < 12 else -1.0
    return DayWeather(
        weather_code=_weather_code(rain, high, low, dice),
        temperature_2m_max=high,
        temperature_2m_min=low,
        apparent_temperature_max=round(high - chill, 1),
        apparent_temperature_min=round(low - chill, 1),
        precipitation_sum=rain,
        precipitation_probability_max=min(100, round(45 + rain * 6)) if wet else round(dice.uniform(0, 25)),
        wind_speed_10m_max=round(wind, 1),
        wind_gusts_10m_max=round(wind * dice.uniform(1.5, 2.1), 1),
        wind_direction_10m_dominant=dice.randrange(360),
    )


def _mean_temperature(day: date, latitude: float, elevation: float) -> float:
    """Return the mean temperature by latitude, season and elevation (6.5 degrees less per kilometre)."""
    distance = abs(latitude)
    yearly = 27.5 - 0.0056 * distance**2
    warmest = 200 if latitude >= 0 else 17
    season = math.cos(2 * math.pi * (day.timetuple().tm_yday - warmest) / 365.25)
    return yearly + season * min(11.0, distance * 0.2) - elevation * 0.0065


def _weather_code(rain: float, high: float, low: float, dice: Random) -> int:
    """Return the WMO code for an amount of rain or snow."""
    if not rain:
        return dice.choice((0, 0, 1, 2, 2, 3, 3, 45))
    steps: tuple[Callable[[float], bool], ...] = (lambda mm: mm < 2.5, lambda mm: mm < 8, lambda mm: True)
    strength = next(number for number, fits in enumerate(steps) if fits(rain))
    if high < 1.5:
        return (71, 73, 75)[strength]
    if strength == 2 and low > 15 and dice.random() < 0.4:
        return 95
    return dice.choice(((51, 61, 80), (53, 63, 81), (65, 65, 82))[strength])
