"""A server on a free local port with the two Open-Meteo endpoints, `/v1/search` and `/v1/forecast`.

Not here: the cities (`cities`), the weather (`forecasts`).
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from .cities import City, find_cities, nearest_city
from .forecasts import UNITS, weather_on

Query = Mapping[str, Sequence[str]]


class BadQuery(Exception):  # noqa: N818 - a response, not a failure of the server
    """A query that the real services answer with status 400 and this reason."""


def search(query: Query) -> dict[str, Any]:
    """Answer `/v1/search`: the places with a name. If there are none, the reply has no `results`."""
    if "name" not in query:
        raise BadQuery("Parameter name required")
    count = _number(query, "count", 10)
    if not 1 <= count <= 100:
        raise BadQuery("Parameter count must be between 1 and 100.")
    if _text(query, "format", "json") != "json":
        raise BadQuery("This stand-in answers format=json only.")
    found = find_cities(_text(query, "name", ""))[: int(count)]
    return {"results": [_place(city) for city in found]} if found else {}


def forecast(query: Query) -> dict[str, Any]:
    """Answer `/v1/forecast`: the daily weather at a point, starting today in its time zone."""
    latitude, longitude = _number(query, "latitude"), _number(query, "longitude")
    if not -90 <= latitude <= 90:
        raise BadQuery(f"Latitude must be in range of -90 to 90°. Given: {latitude}.")
    if not -180 <= longitude <= 180:
        raise BadQuery(f"Longitude must be in range of -180 to 180°. Given: {longitude}.")
    days = _number(query, "forecast_days", 7)
    if not 0 <= days <= 16:
        raise BadQuery(f"Forecast days is invalid. Allowed range 0 to 16. Given {days:g}.")
    wanted = [name for given in query.get("daily", ()) for name in given.split(",") if name]
    for name in wanted:
        if name not in UNITS:
            raise BadQuery(f"Cannot initialize ForecastVariableDaily from invalid String value {name} for key daily")

    near = nearest_city(latitude, longitude)
    zone_name = _text(query, "timezone", "GMT")
    zone_name = near.timezone if zone_name == "auto" else zone_name
    now = datetime.now(_zone(zone_name, longitude))
    reply = {
        "latitude": latitude,
        "longitude": longitude,
        "utc_offset_seconds": int((now.utcoffset() or timedelta()).total_seconds()),
        "timezone": zone_name,
        "timezone_abbreviation": now.tzname(),
        "elevation": near.elevation,
    }
    if wanted:
        reply["daily_units"] = {"time": "iso8601", **{name: UNITS[name] for name in wanted}}
        reply["daily"] = _daily(now.date(), int(days), wanted, latitude, longitude, near.elevation)
    return reply


def _daily(
    first: date, count: int, wanted: Sequence[str], latitude: float, longitude: float, elevation: float
) -> dict[str, list[Any]]:
    days = [first + timedelta(days=number) for number in range(count)]
    weather = [weather_on(day, latitude, longitude, elevation) for day in days]
    return {
        "time": [day.isoformat() for day in days],
        **{name: [getattr(each, name) for each in weather] for name in wanted},
    }


def _place(city: City) -> dict[str, Any]:
    return {
        "id": city.id,
        "name": city.name,
        "latitude": city.latitude,
        "longitude": city.longitude,
        "elevation": city.elevation,
        "feature_code": "PPL",
        "country_code": city.country_code,
        "timezone": city.timezone,
        "population": city.population,
        "country": city.country,
        "admin1": city.admin1,
    }


def _zone(name: str, longitude: float) -> tzinfo:
    if name in ("GMT", "UTC"):
        return UTC
    try:
        return ZoneInfo(name)
    except ZoneInfoNotFoundError:
        # A machine without time zone data: solar time is close enough for a stand-in.
        return timezone(timedelta(hours=round(longitude / 15)))
    except ValueError:
        raise BadQuery("Invalid timezone") from None


def _text(query: Query, name: str, default: str) -> str:
    return query[name][-1] if name in query else default


def _number(query: Query, name: str, default: float | None = None) -> float:
    if name not in query and default is not None:
        return default
    try:
        return float(query[name][-1])
    except (KeyError, ValueError):
        raise BadQuery(f"Value of type 'Float' required for key '{name}'.") from None


ENDPOINTS: dict[str, Callable[[Query], dict[str, Any]]] = {"/v1/search": search, "/v1/forecast": forecast}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, requests: list[str], *connection: Any) -> None:
        self._requests = requests
        super().__init__(*connection)

    def do_GET(self) -> None:
        self._requests.append(self.path)
        address = urlsplit(self.path)
        started = time.perf_counter()
        if (endpoint := ENDPOINTS.get(address.path)) is None:
            self._reply(404, {"error": True, "reason": "Not Found"})
            return
        try:
            reply = endpoint(parse_qs(address.query, keep_blank_values=True))
        except BadQuery as error:
            self._reply(400, {"error": True, "reason": str(error)})
        else:
            self._reply(200, {**reply, "generationtime_ms": round((time.perf_counter() - started) * 1000, 4)})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the overridden name
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


class StandIn:
    """The server: its port is known from the start, and it answers inside `with`. `requests` lists the paths."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self.requests))
        self._thread = threading.Thread(target=self._server.serve_forever, name="open-meteo stand-in", daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "StandIn":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
