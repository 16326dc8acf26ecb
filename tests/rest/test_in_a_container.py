"""A REST client as a bean: settings, collaborators, connections that end with the container."""

import asyncio
import threading
from typing import Protocol

import pytest

from toolbox import rest
from toolbox.container import Container
from toolbox.context import InvocationContext
from toolbox.di.decorators import application_scoped, produces, request_scoped
from toolbox.errors import ContainerNotStartedError, IllegalConfigurationError
from toolbox.settings import RestSettings, ToolboxSettings

pytestmark = pytest.mark.anyio


@rest.register_rest_client(config_key="open-meteo", path="/v1")
class Weather(Protocol):
    @rest.get("/forecast")
    async def forecast(self, latitude: float) -> dict[str, float]: ...

    @rest.get("/forecast")
    def forecast_now(self, latitude: float) -> dict[str, float]: ...


@pytest.mark.parametrize("before", [True, False])
async def test_settings_may_be_registered_before_or_after_the_client(server, before) -> None:
    settings = rest.rest_settings("open-meteo", url=server.url)
    objects = (settings, Weather) if before else (Weather, settings)

    async with Container().register(*objects) as container:
        assert await container.get(Weather).forecast(1.0) == {}

    assert server.last.target == "/v1/forecast?latitude=1.0"


async def test_settings_of_the_environment_are_found_by_key(server, monkeypatch) -> None:
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__URL", server.url)
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__HEADERS", '{"X-Own": "1"}')
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__TIMEOUT", "2.5")
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__RETRIES", "1")
    from tests.rest.http_server import Answer

    server.answer(Answer("", 503), {})
    async with Container().register(Weather) as container:
        await container.get(Weather).forecast(1.0)

    assert server.last.header("X-Own") == "1"
    assert len(server.received) == 2


async def test_settings_of_the_container_are_found_by_key(server) -> None:
    settings = ToolboxSettings(rest={"open-meteo": RestSettings(url=server.url)})

    async with Container(settings=settings).register(Weather) as container:
        await container.get(Weather).forecast(1.0)

    assert len(server.received) == 1


async def test_settings_in_code_override_the_environment_and_later_ones_earlier_ones(server, monkeypatch) -> None:
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__URL", "http://127.0.0.1:1")
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__HEADERS", '{"X-Own": "environment"}')
    container = Container().register(
        rest.rest_settings("open-meteo", url="http://127.0.0.1:2"),
        Weather,
        rest.rest_settings("open-meteo", url=server.url),
        rest.rest_settings("another", url="http://127.0.0.1:3"),
    )

    async with container:
        await container.get(Weather).forecast(1.0)

    assert server.last.header("X-Own") == "environment"


async def test_settings_may_be_made_by_a_producer(server) -> None:
    @produces(scope="application")
    def settings() -> rest.KeySettings:
        return rest.rest_settings("open-meteo", url=server.url)

    async with Container().register(Weather, settings) as container:
        await container.get(Weather).forecast(1.0)

    assert len(server.received) == 1


def test_every_setting_can_be_set_in_the_environment(monkeypatch) -> None:
    for name, value in {
        "URL": "http://127.0.0.1:1",
        "VERIFY": "false",
        "PROPAGATE_HEADERS": "traceparent, X-Request-Id",
        "FOLLOW_REDIRECTS": "true",
        "API_KEY": "k",
        "MAX_CONNECTIONS": "5",
    }.items():
        monkeypatch.setenv(f"TOOLBOX_REST__MY_KEY__{name}", value)

    settings = ToolboxSettings().rest["my_key"]

    monkeypatch.setenv("TOOLBOX_REST__MY_KEY__PROPAGATE_HEADERS", '["a"]')
    assert ToolboxSettings().rest["my_key"].propagate_headers == ("a",)
    assert settings.verify is False
    assert settings.propagate_headers == ("traceparent", "X-Request-Id")
    assert settings.follow_redirects
    assert "k" not in repr(settings.api_key)
    assert settings.max_connections == 5


def test_start_without_a_url_fails_and_lists_the_ways_to_set_one() -> None:
    [problem] = Container(settings=ToolboxSettings(rest={})).register(Weather).check()

    assert problem.where == "Weather"
    assert "TOOLBOX_REST__OPEN_METEO__URL" in problem.fix


def test_a_setting_that_cannot_be_read_is_the_one_problem(monkeypatch) -> None:
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__URL", "http://127.0.0.1:1")
    monkeypatch.setenv("TOOLBOX_REST__OPEN_METEO__TIMEOUT", "soon")

    [problem] = Container().register(Weather).check()

    assert "TOOLBOX_REST__OPEN_METEO__TIMEOUT" in problem.fix


def test_a_client_works_from_synchronous_code(server) -> None:
    with Container().register(Weather, rest.rest_settings("open-meteo", url=server.url)) as container:
        assert container.get(Weather).forecast_now(1.0) == {}
        assert container.get(Weather) is container.get(Weather)


async def test_one_client_serves_all_interfaces_of_a_key_and_ends_with_the_container(server) -> None:
    @rest.register_rest_client(config_key="open-meteo")
    class Other(Protocol):
        @rest.get("/other")
        async def other(self) -> None: ...

    async with Container().register(Weather, Other, rest.rest_settings("open-meteo", url=server.url)) as container:
        weather, other = container.get(Weather), container.get(Other)
        await weather.forecast(1.0)
        await other.other()
        await asyncio.to_thread(weather.forecast_now, 1.0)
        ports = {each.port for each in server.received[:2]}
        assert len(ports) == 1
        assert server.open_connections == 2

    assert await asyncio.to_thread(server.all_closed.wait, 60)


async def test_each_event_loop_has_a_separate_connection(server) -> None:
    async with Container().register(Weather, rest.rest_settings("open-meteo", url=server.url)) as container:
        weather = container.get(Weather)
        await weather.forecast(1.0)
        assert await asyncio.to_thread(lambda: asyncio.run(weather.forecast(2.0))) == {}
        await weather.forecast(3.0)

    assert len({each.port for each in server.received}) == 2


async def test_two_hundred_calls_at_once_share_the_pool(server) -> None:
    settings = rest.rest_settings("open-meteo", url=server.url, max_connections=8)

    async with Container().register(Weather, settings) as container:
        weather = container.get(Weather)
        await asyncio.gather(*(weather.forecast(float(n)) for n in range(200)))

    assert len(server.received) == 200
    assert len({each.port for each in server.received}) <= 8


@request_scoped
class User:
    name = "guest"


@application_scoped
class Tenants:
    def of(self, user: User) -> str:
        return f"tenant of {user.name}"


def tenant(user: User, tenants: Tenants, context: InvocationContext | None, missing: bytes | None) -> str:
    assert context is None
    assert missing is None
    return tenants.of(user)


@request_scoped
class PerRequest:
    def __init__(self, user: User) -> None:
        self.user = user

    def __call__(self) -> dict[str, str]:
        return {"X-User": self.user.name, "X-Thread": threading.current_thread().name}


@rest.register_rest_client(config_key="open-meteo", headers=PerRequest)
class Personal(Protocol):
    @rest.get("/me")
    @rest.client_header_param("X-Tenant", tenant)
    async def me(self) -> None: ...

    @rest.get("/me")
    @rest.client_header_param("X-Tenant", tenant)
    def me_now(self) -> None: ...


async def test_collaborators_are_looked_up_in_the_current_request_scope(server) -> None:
    async with Container().register(
        Personal, User, Tenants, rest.rest_settings("open-meteo", url=server.url)
    ) as container:
        personal = container.get(Personal)
        for name in ("ann", "bob"):
            user = User()
            user.name = name
            async with container.request_scope({User: user}):
                await personal.me()
                assert server.last.header("X-User") == name
                assert server.last.header("X-Tenant") == f"tenant of {name}"
                await asyncio.to_thread(personal.me_now)
                assert server.last.header("X-User") == name


def test_a_bean_that_a_collaborator_lacks_is_a_problem_at_start() -> None:
    container = Container().register(Personal, rest.rest_settings("open-meteo", url="http://127.0.0.1:1"))

    problems = container.check()

    assert {"User", "Tenants"} <= {word for each in problems for word in each.what.split()}
    with pytest.raises(IllegalConfigurationError), container:
        pass


async def test_a_client_can_be_overridden(server) -> None:
    class Fake:
        async def forecast(self, latitude: float) -> dict[str, float]:
            return {"fake": latitude}

    async with Container().register(Weather, rest.rest_settings("open-meteo", url=server.url)) as container:
        with container.override(Weather, Fake()):
            assert await container.get(Weather).forecast(1.0) == {"fake": 1.0}
        assert await container.get(Weather).forecast(1.0) == {}


async def test_clients_raise_after_their_container_has_stopped(server) -> None:
    async with Container().register(Weather, rest.rest_settings("open-meteo", url=server.url)) as container:
        weather = container.get(Weather)

    with pytest.raises(ContainerNotStartedError, match="open_meteo"):
        await weather.forecast(1.0)
    with pytest.raises(ContainerNotStartedError):
        await asyncio.to_thread(weather.forecast_now, 1.0)


async def test_a_collaborator_may_be_an_instance_or_bound_to_another_class(server) -> None:
    class Version:
        def __init__(self, number: str) -> None:
            self.number = number

        def __call__(self) -> dict[str, str]:
            return {"X-Version": self.number}

    @rest.register_rest_client(config_key="open-meteo", headers=Version)
    class Versioned(Protocol):
        @rest.get("/x")
        async def find(self) -> None: ...

    container = Container().register(Versioned, rest.rest_settings("open-meteo", url=server.url))
    async with container.register_instance(Version("7")):
        await container.get(Versioned).find()

    assert server.last.header("X-Version") == "7"


async def test_a_container_can_be_started_again(server) -> None:
    container = Container().register(Weather, rest.rest_settings("open-meteo", url=server.url))

    for _ in range(2):
        async with container:
            assert await container.get(Weather).forecast(1.0) == {}
