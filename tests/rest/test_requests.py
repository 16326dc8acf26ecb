"""Arguments are sent in the declared places, over real HTTP."""

import datetime as dt
import enum
from decimal import Decimal
from typing import Annotated, Protocol
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from toolbox import rest
from toolbox.errors import RestClientError

pytestmark = pytest.mark.anyio


class Forecast(BaseModel):
    latitude: float
    daily: list[str] = []


class Colour(enum.Enum):
    RED = "red"


@rest.register_rest_client(config_key="openmeteo", path="/v1")
class Weather(Protocol):
    @rest.get("/forecast")
    @rest.client_query_param("forecast_days", 7)
    @rest.client_query_param("daily", ["temperature_2m_max", "weather_code"])
    async def forecast(self, latitude: float, longitude: float) -> Forecast: ...

    @rest.get("/stations/{station_id}/days/{day}")
    async def station(self, station_id: str, day: dt.date, tags: list[str] | None = None) -> None: ...

    @rest.get("/anything")
    async def anything(
        self,
        flag: bool,
        colours: list[Colour],
        when: dt.datetime,
        amount: Decimal,
        key: UUID,
        absent: str | None = None,
        renamed: Annotated[int, rest.Query("page[number]")] = 1,
        tenant: Annotated[str | None, rest.Header("X-Tenant")] = None,
        accept_language: Annotated[str | None, rest.Header()] = None,
        session: Annotated[str | None, rest.Cookie("sid")] = None,
    ) -> dict[str, int]: ...


async def test_parameters_and_fixed_values_make_the_query(server) -> None:
    server.answer({"latitude": 49.5, "daily": ["a"]})
    weather = rest.create_rest_client(Weather, url=server.url)

    forecast = await weather.forecast(49.5, longitude=11.0)

    assert forecast == Forecast(latitude=49.5, daily=["a"])
    assert server.last.verb == "GET"
    assert server.last.path == "/v1/forecast"
    assert server.last.query == [
        ("forecast_days", "7"),
        ("daily", "temperature_2m_max"),
        ("daily", "weather_code"),
        ("latitude", "49.5"),
        ("longitude", "11.0"),
    ]


async def test_a_name_in_the_path_is_one_encoded_segment(server) -> None:
    weather = rest.create_rest_client(Weather, url=f"{server.url}/api/")

    await weather.station("a b c?d#e%2F;ü@\r\n", dt.date(2026, 1, 2), ["x", "y"])

    assert server.last.path == "/api/v1/stations/a%20b%20c%3Fd%23e%252F%3B%C3%BC%40%0D%0A/days/2026-01-02"
    assert server.last.query == [("tags", "x"), ("tags", "y")]


@pytest.mark.parametrize("value", ["", ".", ".."])
async def test_a_segment_that_would_change_the_path_is_refused_before_anything_is_sent(server, value) -> None:
    weather = rest.create_rest_client(Weather, url=server.url)

    with pytest.raises(RestClientError, match="station_id cannot be sent") as caught:
        await weather.station(value, dt.date(2026, 1, 2))

    assert caught.value.status is None
    assert server.received == []


async def test_values_are_written_as_json_would_have_them(server) -> None:
    weather = rest.create_rest_client(Weather, url=server.url)
    key = UUID(int=7)

    await weather.anything(
        True, [Colour.RED, Colour.RED], dt.datetime(2026, 1, 2, tzinfo=dt.UTC), Decimal("1.50"), key, tenant="a"
    )

    assert server.last.query == [
        ("flag", "true"),
        ("colours", "red"),
        ("colours", "red"),
        ("when", "2026-01-02T00:00:00Z"),
        ("amount", "1.50"),
        ("key", str(key)),
        ("page[number]", "1"),
    ]
    assert server.last.header("X-Tenant") == "a"
    assert server.last.header("Cookie") is None


async def test_headers_and_cookies_are_sent_under_their_names(server) -> None:
    weather = rest.create_rest_client(Weather, url=server.url)

    await weather.anything(
        False, [], dt.datetime(2026, 1, 2), Decimal(1), UUID(int=1), tenant="Müller", accept_language="de", session="q"
    )

    assert server.last.header("accept-language") == "de"
    assert server.last.header("Cookie") == "sid=q"
    assert server.last.header("X-Tenant").encode("latin-1").decode() == "Müller"


class Order(BaseModel):
    item: str = Field(alias="itemName")
    count: int = 1


class Filter(BaseModel):
    status: list[str] = []
    limit: int | None = None


@rest.register_rest_client(config_key="orders")
class Orders(Protocol):
    @rest.post("/orders")
    def create(self, order: Order, notify: bool = False) -> Order: ...

    @rest.put("/orders/{number}")
    def replace(self, number: int, order: Order | None) -> None: ...

    @rest.patch("/orders")
    def many(self, orders: list[Order]) -> str: ...

    @rest.delete("/orders/{number}")
    def delete(self, number: int) -> bytes: ...

    @rest.get("/orders")
    def search(self, where: Annotated[Filter, rest.Query()]) -> list[Order]: ...

    @rest.post("/notes")
    def note(self, text: Annotated[str, rest.Body()]) -> None: ...

    @rest.post("/raw")
    def raw(self, data: Annotated[bytes, rest.Body("image/png")]) -> None: ...

    @rest.post("/login")
    @rest.client_form_param("grant_type", "password")
    def login(self, user: Annotated[str, rest.Form()], scopes: Annotated[list[str], rest.Form("scope")]) -> None: ...

    @rest.post("/upload")
    def upload(
        self,
        title: Annotated[str, rest.Form()],
        photo: Annotated[bytes, rest.File("photo", "a.png", "image/png")],
        more: Annotated[list[rest.Upload], rest.File("more")],
    ) -> None: ...


def test_a_model_is_the_body(server) -> None:
    server.answer({"itemName": "tea", "count": 2})
    orders = rest.create_rest_client(Orders, url=server.url)

    assert orders.create(Order(itemName="tea", count=2)) == Order(itemName="tea", count=2)

    assert server.last.verb == "POST"
    assert server.last.json == {"itemName": "tea", "count": 2}
    assert server.last.header("content-type") == "application/json"
    assert server.last.query == [("notify", "false")]


def test_a_body_of_none_is_omitted(server) -> None:
    orders = rest.create_rest_client(Orders, url=server.url)

    orders.replace(5, None)

    assert server.last.body == b""
    assert server.last.header("content-type") is None


def test_a_list_of_models_is_the_body(server) -> None:
    server.answer("done")
    orders = rest.create_rest_client(Orders, url=server.url)

    assert orders.many([Order(itemName="a"), Order(itemName="b")]) == "done"
    assert [each["itemName"] for each in server.last.json] == ["a", "b"]


def test_bytes_are_returned_unchanged(server) -> None:
    server.answer(b"\x00\xff")
    orders = rest.create_rest_client(Orders, url=server.url)

    assert orders.delete(7) == b"\x00\xff"
    assert (server.last.verb, server.last.path) == ("DELETE", "/orders/7")


def test_a_model_in_the_query_gives_its_fields(server) -> None:
    server.answer([])
    orders = rest.create_rest_client(Orders, url=server.url)

    assert orders.search(Filter(status=["open", "late"])) == []
    assert server.last.query == [("status", "open"), ("status", "late")]


def test_text_and_bytes_are_sent_unchanged(server) -> None:
    orders = rest.create_rest_client(Orders, url=server.url)

    orders.note("grüße")
    assert server.last.body.decode() == "grüße"
    assert server.last.header("content-type") == "text/plain; charset=utf-8"
    orders.raw(b"\x89PNG")
    assert server.last.body == b"\x89PNG"
    assert server.last.header("content-type") == "image/png"


def test_form_fields_are_encoded_as_a_form(server) -> None:
    orders = rest.create_rest_client(Orders, url=server.url)

    orders.login("a&b=c", ["x", "y"])

    assert server.last.header("content-type") == "application/x-www-form-urlencoded"
    assert server.last.body == b"grant_type=password&user=a%26b%3Dc&scope=x&scope=y"


def test_files_make_a_multipart_form(server) -> None:
    orders = rest.create_rest_client(Orders, url=server.url)

    orders.upload("holiday", b"\x89PNG", [rest.Upload(b"1", 'n"1\r\n.txt', "text/plain"), rest.Upload(b"2")])

    body = server.last.body
    assert server.last.header("content-type").startswith("multipart/form-data; boundary=")
    assert b'name="title"\r\n\r\nholiday' in body
    assert b'name="photo"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n\x89PNG' in body
    assert b'name="more"; filename="n%221%0D%0A.txt"' in body
    assert b'filename="file"' in body


def test_media_types_of_files_cannot_add_headers(server) -> None:
    orders = rest.create_rest_client(Orders, url=server.url)

    with pytest.raises(RestClientError, match="control character"):
        orders.upload("x", b"1", [rest.Upload(b"1", "a", "text/plain\r\nX-Injected: 1")])

    assert server.received == []
