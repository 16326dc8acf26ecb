"""The bundled table of cities, with search by name and by location.

Not here: the reply of the geocoding service (`server`).
"""

import csv
import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Letters that do not decompose into a letter and an accent.
_PLAIN_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ı": "i", "þ": "th", "æ": "ae", "œ": "oe"})


@dataclass(frozen=True, slots=True)
class City:
    """A city: degrees north and east, metres above sea level, population; `also` has other names."""

    id: int
    name: str
    also: tuple[str, ...]
    admin1: str
    country: str
    country_code: str
    latitude: float
    longitude: float
    elevation: float
    timezone: str
    population: int


@cache
def all_cities() -> tuple[City, ...]:
    """The table, in the order of the file."""
    text = Path(__file__).with_name("cities.csv").read_text(encoding="utf-8")
    return tuple(
        City(
            id=number,
            name=row["name"],
            also=tuple(name for name in row["also"].split(",") if name),
            admin1=row["admin1"],
            country=row["country"],
            country_code=row["country_code"],
            latitude=float(row["latitude"]),
            longitude=float(row["longitude"]),
            elevation=float(row["elevation"]),
            timezone=row["timezone"],
            population=int(row["population"]),
        )
        for number, row in enumerate(csv.DictReader(text.splitlines(), delimiter=";"), start=1)
    )


def plain(name: str) -> str:
    """A name without accents, case and punctuation: what two spellings of it have in common."""
    letters = unicodedata.normalize("NFKD", name.casefold()).translate(_PLAIN_LETTERS)
    kept = (letter if letter.isalnum() else " " for letter in letters if not unicodedata.combining(letter))
    return " ".join("".join(kept).split())


@cache
def _index() -> tuple[tuple[str, City], ...]:
    return tuple((plain(name), city) for city in all_cities() for name in (city.name, *city.also))


def find_cities(name: str) -> list[City]:
    """Return the cities with this name, then those whose name starts with it (3 or more letters), largest first."""
    wanted = plain(name)

    def matches() -> Iterator[tuple[bool, int, City]]:
        for known, city in _index():
            if known == wanted or (len(wanted) >= 3 and known.startswith(wanted)):
                yield known != wanted, -city.population, city

    found = sorted(matches(), key=lambda match: match[:2]) if len(wanted) >= 2 else []
    return list(dict.fromkeys(city for *_, city in found))


def nearest_city(latitude: float, longitude: float) -> City:
    """Return the city closest to a point."""

    def distance(city: City) -> float:
        north, south = math.radians(latitude), math.radians(city.latitude)
        east = math.radians(city.longitude - longitude)
        return -(math.sin(north) * math.sin(south) + math.cos(north) * math.cos(south) * math.cos(east))

    return min(all_cities(), key=distance)
