"""Headers of a web application's request travel on with the requests that are sent for it, those that settings name."""

from typing import Protocol

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.rest.http_server import Server
from toolbox import Container, register_ai_service, rest, tool
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install


@rest.register_rest_client(config_key="weather")
class Weather(Protocol):
    @rest.get("/now/{city}")
    @tool("Tells the weather")
    def now(self, city: str) -> str: ...


@register_ai_service(tools=Weather)
class Assistant(Protocol):
    async def ask(self, question: str) -> str: ...


def application(server: Server) -> FastAPI:
    app = FastAPI()
    model = ScriptedChatModel([tool_call("now", {"city": "Bern"}), "Sunny."])
    settings = rest.rest_settings("weather", url=server.url, propagate_headers="traceparent,X-Tenant")
    install(app, Container(models={"default": model}).register(Weather, Assistant, settings))

    @app.get("/direct")
    def direct(weather: Inject[Weather]) -> str:
        return weather.now("Rom")

    @app.get("/ask")
    async def ask(assistant: Inject[Assistant]) -> str:
        return await assistant.ask("How is the weather in Bern?")

    return app


def test_an_endpoints_and_an_agents_requests_carry_them(server: Server) -> None:
    server.answer("sunny")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    incoming = {"Traceparent": trace, "x-tenant": "a", "Authorization": "Bearer of-the-user", "Cookie": "session=1"}

    with TestClient(application(server)) as client:
        for path, target in (("/direct", "/now/Rom"), ("/ask", "/now/Bern")):
            assert client.get(path, headers=incoming).status_code == 200
            assert server.last.target == target
            assert (server.last.header("traceparent"), server.last.header("X-Tenant")) == (trace, "a")
            assert (server.last.header("Authorization"), server.last.header("Cookie")) == (None, None)


def test_a_request_without_them_sends_none(server: Server) -> None:
    server.answer("sunny")

    with TestClient(application(server)) as client:
        client.get("/direct")

    assert server.last.header("traceparent") is None


@pytest.mark.parametrize(("names", "sent"), [(None, None), ("baggage", "user=ann")])
def test_baggage_is_sent_only_if_it_is_named(server: Server, names: str | None, sent: str | None) -> None:
    from opentelemetry import baggage, context
    from opentelemetry.sdk.trace import TracerProvider

    settings = {} if names is None else {"propagate_headers": f"traceparent,{names}"}
    server.answer("sunny")
    weather = rest.create_rest_client(Weather, url=server.url, **settings)
    token = context.attach(baggage.set_baggage("user", "ann"))
    try:
        with TracerProvider().get_tracer("test").start_as_current_span("asking"):
            weather.now("Bern")
    finally:
        context.detach(token)

    assert server.last.header("baggage") == sent
    assert server.last.header("traceparent") is not None


def test_span_headers_are_sent_only_if_they_are_named(server: Server) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    server.answer("sunny")
    weather = rest.create_rest_client(Weather, url=server.url, propagate_headers="")
    with TracerProvider().get_tracer("test").start_as_current_span("asking"):
        weather.now("Bern")

    assert (server.last.header("traceparent"), server.last.header("tracestate")) == (None, None)
