"""Nothing that comes in as an argument can leave the configured base URL, add a header or show a secret."""

from typing import Annotated, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from tests.rest.http_server import Answer
from toolbox import rest
from toolbox.errors import IllegalConfigurationError, RestClientError
from toolbox.rest.client_plans import RequestPlan
from toolbox.rest.clients import standalone_exchange
from toolbox.rest.exchange import call_async
from toolbox.rest.replies import ReplyPlan, ReplyShape

pytestmark = pytest.mark.anyio

HOSTILE = [
    "a/...b/c",
    "a/.b/c..",
    "..%2f..%2fadmin",
    "%2e%2e",
    "%2e%2e%2fadmin",
    "//evil.example/x",
    "http://evil.example/",
    "@evil.example",
    "user:password@evil.example",
    "{name}",
    "{}",
    "a?b=c",
    "a#b",
    "a;b",
    "a\\b",
    "a\r\nX-Injected: 1",
    "\x00",
    "\t",
    "%",
    "%zz",
    "%0d%0a",
    " ",
    "/",
    "...",
    ":80",
    "ü/€",
    "\u202e",
    "\uff0e\uff0e",
]


@rest.register_rest_client(config_key="safe", path="/base")
class Api(Protocol):
    @rest.get("/items/{name}/end")
    @rest.client_query_param("fixed", "1")
    async def item(self, name: Annotated[str, rest.Path(allow_slash=True)], q: str | None = None) -> None: ...

    @rest.get("/{name}")
    async def top(self, name: str) -> None: ...

    @rest.get("/headers")
    async def headers(self, tenant: Annotated[str, rest.Header("X-Tenant")]) -> None: ...

    @rest.get("/cookies")
    async def cookies(self, session: Annotated[str, rest.Cookie()]) -> None: ...

    @rest.get("/map")
    @rest.client_query_param("key", "k")
    async def map(self, more: Annotated[dict[str, str], rest.Query()]) -> None: ...

    @rest.get("/bot{token}/send")
    async def send(self, token: SecretStr) -> None: ...


@pytest.mark.parametrize("value", HOSTILE)
async def test_a_hostile_value_stays_one_segment_and_one_parameter(server, value) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    await api.item(value, q=value)

    target = server.last.target
    path, _, query = target.partition("?")
    assert path.split("/")[:3] == ["", "base", "items"]
    assert len(path.split("/")) == 5
    assert path.endswith("/end")
    assert not set(path.split("/")) & {".", "..", ""} - {""}
    assert query.startswith("fixed=1&q=")
    assert query.count("&") == 1
    assert server.last.query == [("fixed", "1"), ("q", value)]
    assert server.last.header("X-Injected") is None
    assert server.last.header("Host") == server.url.removeprefix("http://")


def test_path_values_arrive_unchanged_in_one_segment(server) -> None:
    from urllib.parse import unquote

    @rest.register_rest_client(config_key="safe")
    class Sync(Protocol):
        @rest.get("/items/{name}/end")
        def item(self, name: Annotated[str, rest.Path(allow_slash=True)], q: str) -> None: ...

    api = rest.create_rest_client(Sync, url=server.url)

    @given(value=st.text(min_size=1))
    @settings(max_examples=60, deadline=None)
    def arrives(value: str) -> None:
        try:
            api.item(value, value)
        except RestClientError:
            assert set(value.replace("\\", "/").split("/")) & {".", ".."}
        else:
            segments = server.last.path.split("/")
            assert len(segments) == 4
            assert unquote(segments[2]) == value
            assert server.last.query == [("q", value)]

    arrives()


@pytest.mark.parametrize("value", ["", ".", "..", "\ud800"])
async def test_invalid_path_segments_are_rejected(server, value) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError) as caught:
        await api.top(value)

    assert caught.value.url == f"{server.url}/base/{{name}}"
    assert server.received == []


@pytest.mark.parametrize("value", ["8/payment-details", "/", "a\\b", "../../admin"])
async def test_a_slash_in_a_path_parameter_is_refused_before_anything_is_sent(server, value) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError, match="allow_slash"):
        await api.top(value)

    assert server.received == []


@pytest.mark.parametrize("value", ["../../admin", "a/../b", "a\\..\\b", "./a", "a/.", "..\\a"])
async def test_dot_segments_are_refused_where_slashes_are_allowed(server, value) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError, match="would change the path"):
        await api.item(value)

    assert server.received == []


@pytest.mark.parametrize("path", ["/a/%2e%2e/b", "/%2E", "/..;x/y", "/a\\..\\b"])
def test_a_dot_segment_in_the_path_of_a_client_is_a_problem_in_every_spelling(path) -> None:
    @rest.register_rest_client(config_key="safe")
    class Climbing(Protocol):
        @rest.get(path)
        async def climb(self) -> None: ...

    with pytest.raises(IllegalConfigurationError, match="has the segment"):
        rest.create_rest_client(Climbing, url="http://127.0.0.1:1")


@pytest.mark.parametrize(
    "path",
    [
        *("@127.0.0.2/x", "/../admin", "/a/../../admin", "x", ":1/x", "/%2e%2e/admin", "/..;x/admin"),
        *("/..%2fadmin", "/%2e%2e%2fadmin", "/a/..%2f..%2fadmin", "/..%5cadmin", "/a\\..\\..\\admin", "/..%3bx/admin"),
    ],
)
async def test_a_request_that_does_not_go_below_the_base_url_is_not_sent(server, path) -> None:
    exchange = standalone_exchange("test", rest.rest_settings("test", url=f"{server.url}/base", bearer_token="t"))
    plan = RequestPlan(where="test", verb="GET", path=(path,), parameters=(), reply=ReplyPlan(ReplyShape.TEXT))

    with pytest.raises(RestClientError, match="is not below"):
        await call_async(exchange, plan, {})

    assert server.received == []


@pytest.mark.parametrize("value", ["a\r\nX-Injected: 1", "a\nb", "a\rb", "a\x00b", "\x7f"])
async def test_a_header_cannot_hold_a_line_end(server, value) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError, match="control character"):
        await api.headers(value)

    assert server.received == []


@pytest.mark.parametrize("value", ["a; admin=1", "a\r\nX: 1", "a,b", 'a"', "a b", "ü"])
async def test_a_cookie_value_cannot_add_another_cookie(server, value) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError):
        await api.cookies(value)

    assert server.received == []


async def test_a_mapping_cannot_replace_a_fixed_parameter(server) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    for name in ("key", "Key", "key[]", " key", "%6bey"):
        with pytest.raises(RestClientError, match="fixed"):
            await api.map({name: "mine"})
    await api.map({"a&b": "c=d"})

    assert server.last.query == [("key", "k"), ("a&b", "c=d")]


async def test_a_url_that_is_too_long_is_reported(server) -> None:
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError, match="too long"):
        await api.top("x" * 100_000)


async def test_a_secret_argument_is_sent_and_never_shown(server) -> None:
    server.answer(Answer("", 500))
    api = rest.create_rest_client(Api, url=server.url)

    with pytest.raises(RestClientError) as caught:
        await api.send(SecretStr("s3cret"))

    assert server.last.path == "/base/bots3cret/send"
    assert caught.value.url == f"{server.url}/base/bot***/send"


async def test_cookies_a_server_sets_do_not_reach_other_callers(server) -> None:
    server.answer(Answer("", 200, {"Set-Cookie": "session=alice; Path=/"}))
    api = rest.create_rest_client(Api, url=server.url)

    await api.top("a")
    await api.top("b")

    assert server.last.header("Cookie") is None


async def test_a_mapping_cannot_replace_a_key_of_the_settings_or_a_fixed_form_field(server) -> None:
    @rest.register_rest_client(config_key="safe")
    class Shop(Protocol):
        @rest.get("/items")
        async def find(self, like: Annotated[dict[str, str], rest.Query()]) -> None: ...

        @rest.post("/log-in")
        @rest.client_form_param("tenant", "acme")
        async def log_in(self, fields: Annotated[dict[str, str], rest.Form()]) -> None: ...

        @rest.get("/named")
        @rest.client_header_param("X-Tenant", "acme")
        async def named(self, fields: Annotated[dict[str, str], rest.Query()]) -> None: ...

    shop = rest.create_rest_client(Shop, url=server.url, api_key="k", api_key_query="key")

    with pytest.raises(RestClientError, match="fixed"):
        await shop.find({"key": "mine"})
    with pytest.raises(RestClientError, match="fixed"):
        await shop.log_in({"Tenant": "evil"})
    assert server.received == []

    await shop.named({"X-Tenant": "a query parameter"})
    assert server.last.query == [("X-Tenant", "a query parameter"), ("key", "k")]
