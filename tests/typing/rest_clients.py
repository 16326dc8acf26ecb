"""The types of REST clients that users rely on; checked, never run."""

from collections.abc import AsyncIterator
from typing import Annotated, Protocol, assert_type

from toolbox import Container, rest, tool


@rest.register_rest_client(config_key="weather", path="/v1")
@rest.client_header_param("X-Version", "1")
class Weather(Protocol):
    @rest.get("/forecast")
    @rest.client_query_param("days", 7)
    @tool("Forecasts")
    async def forecast(self, latitude: float, tenant: Annotated[str | None, rest.Header("X-Tenant")] = None) -> int: ...

    @rest.post("/raw", idempotent=True)
    def raw(self, body: Annotated[bytes, rest.Body()]) -> rest.Response[list[str]]: ...

    @rest.post("/reports")
    async def report(
        self, town: Annotated[str, rest.BodyField()], note: Annotated[str | None, rest.BodyField("remark")] = None
    ) -> int: ...

    @rest.get()
    async def page(self, address: Annotated[str, rest.Url()]) -> list[str]: ...

    @rest.get("/lines")
    def lines(self) -> AsyncIterator[str]: ...


@rest.register_rest_client
class Bare(Protocol):
    @rest.get()
    def find(self) -> str: ...


async def methods_keep_their_types(container: Container) -> None:
    weather = container.get(Weather)
    assert_type(weather, Weather)
    assert_type(await weather.forecast(1.0), int)
    assert_type(await weather.report("Rome", note="x"), int)
    assert_type(await weather.page("http://127.0.0.1/v1/pages/2"), list[str])
    assert_type(weather.raw(b""), rest.Response[list[str]])
    assert_type(weather.raw(b"").body, list[str])
    async for line in weather.lines():
        assert_type(line, str)


def an_argument_that_cannot_be_sent_is_a_value_error(error: rest.RestArgumentError) -> None:
    errors: list[ValueError] = [error]
    failures: list[rest.RestClientError] = [error]
    assert_type(len(errors) + len(failures), int)


def a_client_without_a_container_is_of_its_class() -> None:
    assert_type(rest.create_rest_client(Bare, url="http://127.0.0.1:1"), Bare)
    assert_type(rest.create_rest_client(Bare).find(), str)
    Container().register(Weather, Bare, rest.rest_settings("weather", url="http://127.0.0.1:1", retries=2))
