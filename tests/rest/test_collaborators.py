"""What takes part in a call: computed values, filters, credentials, trace headers, logging."""

import asyncio
import logging
from typing import Annotated, ClassVar, Protocol

import httpx2
import pytest

from tests.rest.http_server import Answer
from toolbox import rest
from toolbox.errors import IllegalConfigurationError, RestClientError

pytestmark = pytest.mark.anyio


async def tenant() -> str:
    return "acme"


def nothing() -> None:
    return None


class Headers:
    def __call__(self) -> dict[str, str]:
        return {"X-Made": "by a bean", "X-Tenant": "factory"}


def sign(request: httpx2.Request) -> None:
    request.headers["X-Signature"] = str(len(request.url.path))


class Seen:
    statuses: ClassVar[list[int]] = []

    async def __call__(self, response: httpx2.Response) -> None:
        self.statuses.append(response.status_code)


@rest.register_rest_client(config_key="c", headers=Headers, request_filters=[sign], response_filters=[Seen])
@rest.client_header_param("X-All", ["a", "b"])
class Api(Protocol):
    @rest.get("/x")
    @rest.client_header_param("X-Tenant", tenant)
    @rest.client_header_param("X-Nothing", nothing, required=False)
    @rest.client_query_param("key", "${TEST_REST_KEY}")
    @rest.client_query_param("region", "${TEST_REST_REGION:eu}-1")
    @rest.client_query_param("absent", "${TEST_REST_ABSENT}", required=False)
    @rest.client_cookie_param("theme", "dark")
    async def find(self, trace: Annotated[str | None, rest.Header("X-Made")] = None) -> str: ...

    @rest.get("/y")
    @rest.client_header_param("X-Nothing", nothing)
    async def broken(self) -> str: ...


@pytest.fixture
def api(server, monkeypatch):
    monkeypatch.setenv("TEST_REST_KEY", "from the environment")
    server.answer("ok")
    Seen.statuses.clear()
    return rest.create_rest_client(Api, url=server.url)


async def test_values_are_computed_for_each_request(server, api) -> None:
    await api.find()

    assert server.last.header("X-All") == "a, b"
    assert server.last.header("X-Made") == "by a bean"
    assert server.last.header("X-Nothing") is None
    assert server.last.header("Cookie") == "theme=dark"
    assert server.last.query == [("key", "from the environment"), ("region", "eu-1")]


async def test_arguments_override_computed_values(server, api) -> None:
    await api.find(trace="mine")

    assert server.last.header("X-Made") == "mine"
    assert server.last.header("X-Tenant") == "factory"


async def test_a_required_value_that_cannot_be_computed_is_an_error_before_anything_is_sent(server, api) -> None:
    with pytest.raises(RestClientError, match="X-Nothing"):
        await api.broken()

    assert server.received == []


async def test_without_a_container_an_optional_bean_is_missing(server) -> None:
    class Tenant:
        name = "acme"

    def headers(tenant: Tenant | None = None) -> dict[str, str]:
        return {"X-Tenant": tenant.name if tenant is not None else "none"}

    @rest.register_rest_client(headers=headers)
    class Optional(Protocol):
        @rest.get("/x")
        async def find(self) -> str: ...

        @rest.get("/x")
        def find_now(self) -> str: ...

    server.answer("ok")
    client = rest.create_rest_client(Optional, url=server.url)

    assert await client.find() == "ok"
    assert await asyncio.to_thread(client.find_now) == "ok"
    assert [each.header("X-Tenant") for each in server.received] == ["none", "none"]


async def test_filters_see_the_request_and_the_response(server, api) -> None:
    await api.find()

    assert server.last.header("X-Signature") == "2"
    assert Seen.statuses == [200]


def test_a_variable_the_environment_lacks_is_a_problem(monkeypatch) -> None:
    monkeypatch.delenv("TEST_REST_KEY", raising=False)

    with pytest.raises(IllegalConfigurationError, match="TEST_REST_KEY"):
        rest.create_rest_client(Api, url="http://127.0.0.1:1")


def test_async_collaborators_of_def_methods_are_problems() -> None:
    @rest.register_rest_client
    class Sync(Protocol):
        @rest.get("/x")
        @rest.client_header_param("X-Tenant", tenant)
        def find(self) -> str: ...

    with pytest.raises(IllegalConfigurationError, match="tenant must be awaited"):
        rest.create_rest_client(Sync, url="http://127.0.0.1:1")


@rest.register_rest_client(config_key="auth")
class Plain(Protocol):
    @rest.get("/x")
    async def find(self, mine: Annotated[str | None, rest.Header("Authorization")] = None) -> str: ...

    @rest.get("/x")
    def find_now(self) -> str: ...


async def test_credentials_of_the_settings_are_sent(server) -> None:
    server.answer("ok")

    await rest.create_rest_client(Plain, url=server.url, bearer_token="t").find()
    assert server.last.header("Authorization") == "Bearer t"
    await rest.create_rest_client(Plain, url=server.url, username="Aladdin", password="open sesame").find()
    assert server.last.header("Authorization") == "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="
    await rest.create_rest_client(Plain, url=server.url, api_key="k", api_key_header="X-Key").find()
    assert server.last.header("X-Key") == "k"
    await rest.create_rest_client(Plain, url=server.url, headers={"X-Own": "1"}).find()
    assert server.last.header("X-Own") == "1"


async def test_an_argument_comes_before_the_credentials_of_the_settings(server) -> None:
    server.answer("ok")

    await rest.create_rest_client(Plain, url=server.url, bearer_token="t").find(mine="Own x")

    assert server.last.header("Authorization") == "Own x"


class Refreshing(httpx2.Auth):
    """Asks for a new token when the old one is refused."""

    def __init__(self) -> None:
        self.token = "old"

    def auth_flow(self, request):
        request.headers["Authorization"] = self.token
        response = yield request
        if response.status_code == 401:
            self.token = "new"
            request.headers["Authorization"] = self.token
            yield request


async def test_an_auth_flow_may_answer_a_401(server) -> None:
    server.answer(Answer("", 401), "ok", "ok", Answer("", 401), "ok")

    assert await rest.create_rest_client(Plain, url=server.url, auth=Refreshing()).find() == "ok"
    assert [each.header("Authorization") for each in server.received] == ["old", "new"]
    assert await rest.create_rest_client(Plain, url=server.url, auth=lambda: Refreshing()).find() == "ok"
    plain = rest.create_rest_client(Plain, url=server.url, auth=Refreshing)
    assert await asyncio.to_thread(plain.find_now) == "ok"
    assert server.last.header("Authorization") == "new"


async def test_trace_headers_of_the_incoming_request_travel_on(server) -> None:
    server.answer("ok")
    incoming = {"Traceparent": "00-1-2-01", "authorization": "secret", "X-Request-Id": "r1"}

    with rest.propagate_headers(incoming):
        await rest.create_rest_client(Plain, url=server.url).find()
        assert server.last.header("traceparent") == "00-1-2-01"
        assert server.last.header("authorization") is None
        assert server.last.header("x-request-id") is None
        named = rest.create_rest_client(Plain, url=server.url, propagate_headers="X-Request-Id")
        await named.find()
        assert server.last.header("x-request-id") == "r1"
        assert server.last.header("traceparent") is None
    await named.find()
    assert server.last.header("x-request-id") is None


async def test_logs_hold_no_secret(server, caplog) -> None:
    @rest.register_rest_client(config_key="auth")
    class Keyed(Protocol):
        @rest.get("/x")
        @rest.client_query_param("api_key", "s3cret-1")
        async def find(self, tenant: Annotated[str, rest.Header("X-Tenant")]) -> str: ...

    server.answer("ok")
    with caplog.at_level(logging.DEBUG):
        await rest.create_rest_client(
            Keyed, url=server.url, bearer_token="s3cret-2", log=True, headers={"X-Own": "s3cret-3"}
        ).find("s3cret-4")

    assert server.last.query == [("api_key", "s3cret-1")]
    assert "s3cret" not in caplog.text
    ours = [each for each in caplog.records if each.name == "toolbox.rest"]
    assert len(ours) == 1
    assert ours[0].levelno == logging.INFO
    assert "GET" in ours[0].getMessage()
    assert "x-tenant: ***" in ours[0].getMessage()
    assert "200" in ours[0].getMessage()


async def test_the_span_of_a_traced_program_is_the_parent(server) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    server.answer("ok")
    context = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    plain = rest.create_rest_client(Plain, url=server.url)

    with trace.use_span(trace.NonRecordingSpan(context)), rest.propagate_headers({"traceparent": "of the caller"}):
        await plain.find()

    assert server.last.header("traceparent") == f"00-{0xABC:032x}-{0xDEF:016x}-01"
    await rest.create_rest_client(Plain, url=server.url, propagate_headers=()).find()
    assert server.last.header("traceparent") is None


async def test_an_incoming_header_cannot_say_where_the_request_goes(server) -> None:
    with pytest.raises(IllegalConfigurationError, match="Host"):
        rest.create_rest_client(Plain, url=server.url, propagate_headers="Host")
    plain = rest.create_rest_client(Plain, url=server.url, propagate_headers="X-Id")

    with rest.propagate_headers({"X-Id": "a\r\nX: 1"}), pytest.raises(RestClientError, match="control character"):
        await plain.find()

    assert server.received == []
