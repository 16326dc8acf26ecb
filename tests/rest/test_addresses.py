"""A parameter that is the whole address of a request: it cannot leave the client's own service."""

from typing import Annotated, Any, Protocol

import httpx2
import pytest
from pydantic import AnyUrl, SecretStr

from tests.rest.http_server import Answer
from toolbox import Container, Result, register_ai_service, rest, tool
from toolbox.errors import IllegalConfigurationError, RestArgumentError, RestClientError
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@rest.register_rest_client(config_key="pages", path="/v1")
class Pages(Protocol):
    @rest.get()
    @rest.client_query_param("days", 7)
    async def page(self, address: Annotated[str | AnyUrl | None, rest.Url()], size: int | None = None) -> Any: ...

    @rest.post()
    def secret(self, address: Annotated[SecretStr, rest.Url], body: Annotated[str, rest.Body()]) -> None: ...

    @rest.get("/items/{name}")
    async def item(self, name: str) -> Any: ...


def pages(server: Any, **settings: Any) -> Pages:
    return rest.create_rest_client(Pages, url=f"{server.url}/api", bearer_token="t0ken", **settings)


async def test_the_request_goes_to_the_address_with_the_fixed_query(server) -> None:
    client = pages(server)

    await client.page(f"{server.url}/api/v1/items?cursor=a%2Fb&q=%C3%A9#top")
    assert server.last.target == "/api/v1/items?cursor=a%2Fb&q=%C3%A9&days=7"
    assert server.last.header("Authorization") == "Bearer t0ken"

    await client.page(AnyUrl(f"{server.url}/api/v1"), size=5)
    assert server.last.target == "/api/v1?days=7&size=5"


async def test_a_parameter_that_the_address_has_is_not_added_again(server) -> None:
    await pages(server, api_key="k", api_key_query="key").page(f"{server.url}/api/v1/items?days=7&key=k&x=1")

    assert server.last.target == "/api/v1/items?days=7&key=k&x=1"


async def test_an_address_cannot_replace_a_fixed_value_or_a_key(server) -> None:
    client = pages(server, api_key="k", api_key_query="key")

    for query in ("days=8", "key=mine"):
        with pytest.raises(RestArgumentError, match="its query has another value of"):
            await client.page(f"{server.url}/api/v1/items?{query}")

    assert server.received == []


@pytest.mark.parametrize(
    "target",
    [
        "items?days=7&days=8",
        "items?days=8&days=7",
        "items?days=7&days=",
        "items?days",
        "items?%64ays=8",
        "items?%2564ays=8",
        "items?days=7&%64ays=8",
        "items?Days=8",
        "items?days=7&DAYS=8",
        "items?days[]=8",
        "items?days=7&days%5B0%5D=8",
        "items?+days=8",
        "items?x=1;days=8",
        "items?days=7&x=1;days=8",
        "items?x=1&amp;days=8",
        "items;days=8",
        "items;x=1;Days=8/more",
        "items?key=k&key=mine",
        "items?Key=mine",
    ],
)
async def test_an_address_cannot_name_a_fixed_parameter_again(server, target) -> None:
    client = pages(server, api_key="k", api_key_query="key")

    with pytest.raises(RestArgumentError, match=r"its query has another value of '(days|key)'"):
        await client.page(f"{server.url}/api/v1/{target}")

    assert server.received == []


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("items?days=7&days=7", "items?days=7&days=7"),
        ("items?%64ays=7", "items?%64ays=7"),
        ("items?daysleft=8&mydays=8&x=days", "items?daysleft=8&mydays=8&x=days&days=7"),
        ("items?back=/a/b?days", "items?back=/a/b?days&days=7"),
        ("days=8/items", "days=8/items?days=7"),
        ("items?x=1;days=7", "items?x=1;days=7&days=7"),
    ],
)
async def test_an_address_with_the_fixed_value_or_other_names_is_accepted(server, target, sent) -> None:
    await pages(server).page(f"{server.url}/api/v1/{target}")

    assert server.last.target == f"/api/v1/{sent}"


async def test_the_pages_of_a_service_with_brackets_in_its_names_can_be_followed(server) -> None:
    @rest.register_rest_client(config_key="pages")
    class Items(Protocol):
        @rest.get()
        @rest.client_query_param("page[size]", 10)
        @rest.client_query_param("tag", ["a", "b"])
        async def page(self, address: Annotated[str, rest.Url()]) -> Any: ...

    client = rest.create_rest_client(Items, url=server.url)
    for query in ("page[size]=10&page[number]=2&tag=a&tag=b", "tag=b&tag=a&page%5Bsize%5D=10"):
        await client.page(f"{server.url}/items?{query}")
        assert server.last.target == f"/items?{query}"

    for query in ("tag=a", "tag=a&tag=b&tag=c", "page[size]=1000", "page[size][]=1000"):
        with pytest.raises(RestArgumentError, match="its query has another value of"):
            await client.page(f"{server.url}/items?{query}")


def test_the_error_of_a_refused_address_does_not_show_secrets_of_the_base(server) -> None:
    @rest.register_rest_client(config_key="pages", path="/{token}")
    class Own(Protocol):
        @rest.get()
        def page(self, address: Annotated[str, rest.Url()], token: Annotated[SecretStr, rest.Path()]) -> Any: ...

    with pytest.raises(RestArgumentError, match=r"must be below http://127.0.0.1:\d+/\*\*\*, without") as raised:
        rest.create_rest_client(Own, url=server.url).page("https://evil.example/", SecretStr("s3cret"))

    assert "s3cret" not in str(raised.value)


def test_a_link_in_a_reply_is_resolved_against_the_real_address_in_a_filter(server) -> None:
    links: list[str] = []

    def follow(response: httpx2.Response) -> None:
        links.append(response.request.url.join("?page=2").raw_path.decode())
        assert "s3cret" not in str(response.request.url)

    @rest.register_rest_client(config_key="pages", response_filters=[follow])
    class Own(Protocol):
        @rest.get("/{token}/items")
        def items(self, token: SecretStr) -> Any: ...

    rest.create_rest_client(Own, url=server.url).items(SecretStr("s3cret"))

    assert links == ["/s3cret/items?page=2"]


@pytest.mark.parametrize(
    "address",
    [
        "https://{host}/api/v1/items",
        "http://127.0.0.2:{port}/api/v1/items",
        "http://127.0.0.1:1/api/v1/items",
        "http://{host}/api/v2/items",
        "http://{host}/api/v10",
        "http://{host}/",
        "http://{host}",
        "http://user:password@{host}/api/v1/items",
        "http://user@{host}/api/v1/items",
        "http://{host}@127.0.0.2/api/v1",
        "http://{host}/api/v1/../v2",
        "http://{host}/api/v1/%2e%2e/v2",
        "http://{host}/api/v1/..%2fv2",
        "http://{host}/api/v1/%252e%252e/v2",
        "http://{host}/api/v1/..\\v2",
        "http://{host}/api/v1/a b",
        "http://{host}/api/v1/a\r\nX: 1",
        "/api/v1/items",
        "//{host}/api/v1/items",
        "items",
        "",
        "http://[::1/api/v1",
        "file:///etc/passwd",
    ],
)
async def test_other_addresses_are_refused_before_anything_is_sent(server, address) -> None:
    host = server.url.removeprefix("http://")

    with pytest.raises(RestArgumentError) as raised:
        await pages(server).page(address.format(host=host, port=host.partition(":")[2]))

    assert isinstance(raised.value, (RestClientError, ValueError))
    assert raised.value.status is None
    assert "password" not in str(raised.value)
    assert server.received == []


async def test_none_is_not_an_address(server) -> None:
    with pytest.raises(RestArgumentError, match="the address is required"):
        await pages(server).page(None)


async def test_scheme_host_and_default_port_may_be_written_in_other_ways() -> None:
    seen: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.url.raw_path.decode())
        return httpx2.Response(200, json=1)

    client = rest.create_rest_client(Pages, url="https://api.example/base", transport=httpx2.MockTransport(answer))
    await client.page("HTTPS://API.example:443/base/v1/items")

    assert seen == ["/base/v1/items?days=7"]


def test_secret_addresses_and_keys_in_them_are_not_shown(server) -> None:
    server.answer(Answer("", 500))
    client = pages(server)

    with pytest.raises(RestClientError) as raised:
        client.secret(SecretStr(f"{server.url}/api/v1/hidden"), "x")

    assert server.last.path == "/api/v1/hidden"
    assert "hidden" not in str(raised.value)


async def test_a_secret_in_the_query_of_an_address_is_not_shown(server) -> None:
    server.answer(Answer("", 500))

    with pytest.raises(RestClientError) as raised:
        await pages(server).page(f"{server.url}/api/v1/items?api_key=s3cret&x=1")

    assert "s3cret" not in str(raised.value)
    assert "x=1" in str(raised.value)


async def test_path_arguments_that_are_refused_are_value_errors_too(server) -> None:
    for value in ("", ".", "..", "a/b", "a\\b", "x" * 100_000):
        with pytest.raises(RestArgumentError):
            await pages(server).item(value)

    assert server.received == []


async def test_a_model_cannot_choose_another_server(server) -> None:
    @rest.register_rest_client(config_key="tools")
    class Web(Protocol):
        @rest.get()
        @tool
        async def open(self, address: Annotated[str, rest.Url()]) -> Any:
            """Open a page of the shop."""
            ...

    @register_ai_service(tools=Web)
    class Reader(Protocol):
        async def read(self, text: str) -> Result[str]: ...

    server.answer({"page": 1})
    calls = [tool_call("open", {"address": each}) for each in (f"{server.url}/a", "http://127.0.0.2/")]
    container = Container(models={"default": ScriptedChatModel([*calls, "done"])})
    async with container.register(Reader, rest.rest_settings("tools", url=server.url)):
        result = await container.get(Reader).read("?")

    assert [each.is_error for each in result.tool_executions] == [False, True]
    assert "address cannot be sent" in result.tool_executions[1].result
    assert [each.path for each in server.received] == ["/a"]


def test_what_cannot_be_a_whole_address_is_a_problem() -> None:
    class Wrong(Protocol):
        @rest.get("/items")
        def with_path(self, address: Annotated[str, rest.Url()]) -> None: ...

        @rest.get()
        def two(self, one: Annotated[str, rest.Url()], other: Annotated[str, rest.Url()]) -> None: ...

        @rest.get()
        def several(self, addresses: Annotated[list[str], rest.Url()]) -> None: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        rest.create_rest_client(Wrong, url="http://127.0.0.1:1")

    assert [each.what for each in raised.value.problems] == [
        "address is the whole address, but the verb has the path '/items'",
        "one, other are all whole addresses, but a request has one",
        "the parameter addresses holds more than one value, but a whole address holds one",
    ]
    assert raised.value.problems[0].fix == "write @rest.get() without a path"
