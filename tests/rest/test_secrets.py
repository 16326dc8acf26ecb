"""No error, log line or `repr` shows what was sent as a secret, whatever a server repeats."""

import asyncio
import base64
import html
import json
import logging
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol
from urllib.parse import quote, quote_plus, unquote

import httpx2
import pytest
from pydantic import BaseModel, Secret, SecretBytes, SecretStr, field_serializer

from tests.rest.http_server import Answer, Received
from toolbox import rest
from toolbox.settings import ToolboxSettings

pytestmark = pytest.mark.anyio

KEY = "k3y/of+the=shop&\"more\" 'x'-0123456789abcdef"
HEADER_KEY = 'h3ader/k+y=&"q"-fedcba98765432100'


PATH_SECRET, QUERY_SECRET = SecretStr("p4th-secret-0123456789"), SecretStr("qu3ry-secret-0123456789")
LIST_SECRET, HEADER_SECRET = SecretStr("l1st-secret-0123456789"), SecretStr("h3ader-secret-0123456789")


class Thing(BaseModel):
    name: int


def sign(request: httpx2.Request) -> None:
    request.headers["X-Sig"] = "s1gned-by-the-filter-0123456789"


def computed() -> dict[str, str]:
    return {"X-User": "computed-for-the-user-0123456789"}


@rest.register_rest_client(config_key="shop", headers=computed, request_filters=[sign])
@rest.client_query_param("app", "${SHOP_KEY}")
@rest.client_header_param("X-Shop", "Bearer ${SHOP_HEADER_KEY}")
class Shop(Protocol):
    @rest.post("/x/{code}")
    async def order(
        self,
        body: dict[str, str],
        code: SecretStr = PATH_SECRET,
        query: Annotated[SecretStr, rest.Query("q")] = QUERY_SECRET,
        queries: Annotated[tuple[SecretStr, ...], rest.Query("qs")] = (LIST_SECRET,),
        api_key: Annotated[str, rest.Query("api_key")] = "ap1-key-0123456789-0123456789",
        header: Annotated[SecretStr, rest.Header("X-One")] = HEADER_SECRET,
        cookie: Annotated[str, rest.Cookie("c")] = "cook1e-secret-0123456789",
    ) -> Thing: ...

    @rest.post("/form")
    def sign_in(
        self, user: Annotated[str, rest.Form()], password: Annotated[str, rest.Form()]
    ) -> AsyncIterator[Thing]: ...

    @rest.get("/plain")
    def plain_now(self) -> Thing: ...


SECRETS = [
    KEY,
    HEADER_KEY,
    "s1gned-by-the-filter-0123456789",
    "computed-for-the-user-0123456789",
    "p4th-secret-0123456789",
    "qu3ry-secret-0123456789",
    "l1st-secret-0123456789",
    "ap1-key-0123456789-0123456789",
    "h3ader-secret-0123456789",
    "cook1e-secret-0123456789",
    "b0dy-secret-0123456789",
    "s3ttings-header-0123456789",
    "pa55word-of/the+user",
]


@pytest.fixture
def shop(server, monkeypatch) -> Shop:
    monkeypatch.setenv("SHOP_KEY", KEY)
    monkeypatch.setenv("SHOP_HEADER_KEY", HEADER_KEY)
    return rest.create_rest_client(
        Shop, url=server.url, username="ann", password=SECRETS[-1], headers={"X-Tenant": "s3ttings-header-0123456789"}
    )


def everything_of(error: BaseException) -> str:
    """The texts of an error and its causes; not the lines of source that a traceback shows, which are the test's."""
    shown = f"{vars(error)}\n{error.args}\n{pickle.dumps(error)!r}"
    cause: BaseException | None = error
    while cause is not None:
        shown += f"\n{cause}\n{cause!r}"
        cause = cause.__cause__ or cause.__context__
    return shown


async def shown_after(shop: Shop, server: Any, answer: Answer) -> str:
    server.answer(answer)
    with pytest.raises(rest.RestClientError) as caught:
        await shop.order({"client_secret": "b0dy-secret-0123456789"})
    assert len(caught.value.body) <= 501
    return everything_of(caught.value)


def parts(secret: str) -> list[str]:
    """All substrings of eight characters."""
    return [secret[at : at + 8] for at in range(len(secret) - 7)]


SPELLINGS = [
    str,
    lambda text: quote(text, safe=""),
    quote_plus,
    lambda text: json.dumps(text)[1:-1],
    html.escape,
    lambda text: json.dumps(quote(text)).replace("/", "\\/"),
    lambda text: base64.b64encode(f"ann:{text}".encode()).decode(),
]


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize("status", [200, 403])
async def test_a_secret_that_the_server_repeats_is_hidden(server, shop, spelled, status) -> None:
    for secret in SECRETS:
        shown = await shown_after(shop, server, Answer(f'{{"name": "you sent <{spelled(secret)}>"}}', status))

        assert not [part for part in parts(spelled(secret)) if part in shown]


@pytest.mark.parametrize("before", [0, 460, 480, 495, 3960, 3990])
async def test_no_part_of_a_key_remains_where_an_excerpt_is_cut(server, shop, before) -> None:
    for status in (200, 500):
        shown = await shown_after(shop, server, Answer("-" * before + KEY + "." * 9000, status))

        assert not [part for part in (KEY[:n] for n in range(4, 20)) if part in shown]


async def test_a_body_of_nothing_but_keys_shows_none(server, shop) -> None:
    for shift in range(8):
        shown = await shown_after(shop, server, Answer("." * shift + KEY * 500, 500))

        assert not [part for part in parts(KEY) if part in shown]


@pytest.mark.parametrize("status", [200, 400])
async def test_a_form_and_a_stream_show_no_secret(server, shop, status) -> None:
    server.answer(Answer('{"name": "pa55word-of-ann is wrong"}', status, {"Content-Type": "application/x-ndjson"}))

    with pytest.raises(rest.RestClientError) as caught:
        await anext(shop.sign_in("ann", "pa55word-of-ann"))

    assert "pa55word" not in everything_of(caught.value)


async def test_a_synchronous_method_shows_no_secret(server, shop) -> None:
    server.handler = lambda received: Answer(f'{{"name": "{received.header("X-Shop")}"}}')

    with pytest.raises(rest.RestDecodeError) as caught:
        await asyncio.to_thread(shop.plain_now)

    assert not [part for part in parts(HEADER_KEY) if part in everything_of(caught.value)]


async def test_an_error_of_the_network_shows_no_secret(monkeypatch) -> None:
    def fail(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError(
            f"cannot connect to {httpx2.URL(request.url).raw_path!r} with {dict(request.headers)}"
        )

    monkeypatch.setenv("SHOP_KEY", KEY)
    monkeypatch.setenv("SHOP_HEADER_KEY", HEADER_KEY)
    shop = rest.create_rest_client(Shop, url="http://x.example", transport=httpx2.MockTransport(fail))

    with pytest.raises(rest.RestClientError) as caught:
        await shop.order({})

    shown = everything_of(caught.value)
    assert not [secret for secret in SECRETS[:10] if any(part in shown for part in parts(secret))]


async def test_headers_added_by_authentication_are_hidden(server) -> None:
    @rest.register_rest_client(config_key="shop")
    class Basic(Protocol):
        @rest.get("/x")
        async def find(self) -> Thing: ...

    server.handler = lambda received: Answer(f"no user {base64.b64decode(received.header('Authorization')[6:])!r}", 401)
    client = rest.create_rest_client(Basic, url=server.url, auth=httpx2.BasicAuth("ann", "pa55word-0123456789"))

    with pytest.raises(rest.RestClientError) as caught:
        await client.find()

    assert "pa55word" not in everything_of(caught.value)
    assert "no user" in caught.value.body


async def test_a_redirect_that_repeats_a_key_shows_it_in_no_error_or_log(server, shop, caplog, monkeypatch) -> None:
    def echo(received: Received) -> Answer:
        return Answer("", 307, {"Location": f"/again?you={quote(KEY)}&also={HEADER_KEY}"})

    caplog.set_level(logging.DEBUG)
    server.handler = echo
    client = rest.create_rest_client(Shop, url=server.url, follow_redirects=True, max_redirects=2)

    with pytest.raises(rest.RestClientError, match="more than 2 redirects") as caught:
        await client.order({})

    shown = everything_of(caught.value) + "".join(
        each.getMessage() for each in caplog.records if "toolbox" in each.name
    )
    shown += "".join(each.getMessage() for each in caplog.records if each.name == "httpx2")
    for key in (KEY, HEADER_KEY):
        assert not [part for part in (*parts(key), *parts(quote(key))) if part in shown]


async def test_harmless_values_stay_in_errors(server) -> None:
    @rest.register_rest_client(config_key="shop")
    class Open(Protocol):
        @rest.get("/x/{name}")
        async def find(self, name: str, tenant: Annotated[str, rest.Header("X-Tenant")], q: str) -> Thing: ...

    server.answer(Answer("no acme-industries, green-tea or application/json", 404))
    client = rest.create_rest_client(Open, url=server.url, headers={"Accept": "application/json"}, bearer_token="t0ken")

    with pytest.raises(rest.RestClientError) as caught:
        await client.find("green-tea", "acme-industries", "q-value")

    assert caught.value.body == "no acme-industries, green-tea or application/json"
    assert caught.value.url == f"{server.url}/x/green-tea?q=q-value"


def test_the_text_of_settings_shows_no_secret() -> None:
    settings = ToolboxSettings(
        models={
            "m": {
                "base_url": "https://ann:SECRET@models.example/v1?key=SECRET",
                "api_key": "SECRET",
                "extra_body": {"token": "SECRET"},
                "parameters": {"tools": [{"authorization": "SECRET"}]},
                "query": {"key": "SECRET"},
            }
        },
        rest={
            "a": {
                "url": "https://ann:SECRET@shop.example/api",
                "proxy": "http://u:SECRET@proxy",
                "headers": {"X": "SECRET"},
            },
            "b": {"url": "https://ann:SEC#SECRET@shop.example/api"},
            "c": {"url": "SECRET@shop.example"},
            "d": {"url": "https://[SECRET"},
        },
        mcp={
            "a": {"url": "https://mcp.example/s/SECRET/mcp", "headers": {"Authorization": "SECRET"}},
            "b": {"command": "npx", "args": ["server", "--token", "SECRET"], "env": {"TOKEN": "SECRET"}},
            "c": {"command": "npx server --token SECRET"},
            "d": {"url": "https://mcp.example/mcp?token=SECRET"},
        },
        sql={"url": "postgresql://ann:SECRET@db/shop"},
        redis={"url": "redis://:SECRET@cache"},
    )  # type: ignore[arg-type]  # as the environment gives them

    for shown in (repr(settings), str(settings), f"{settings.models}{settings.rest}{settings.mcp}"):
        assert "SEC" not in shown.replace("SecretStr", "")
        assert "https://shop.example/api" in shown
        assert "https://mcp.example/" in shown
    assert settings.rest["a"].url == "https://ann:SECRET@shop.example/api"
    assert settings.mcp["b"].args == ("server", "--token", "SECRET")


def test_the_text_of_a_clients_marks_and_settings_shows_no_secret() -> None:
    @rest.register_rest_client(config_key="shop", base_url="https://ann:SECRET@shop.example")
    class Shown(Protocol): ...

    given = rest.rest_settings("shop", url="https://ann:SECRET@shop.example", password="SECRET")

    assert "SECRET" not in f"{given!r} {vars(Shown)!r}"


class SignIn(BaseModel):
    user: str
    password: SecretStr
    pin: Secret[int] = Secret(1234567890)
    keys: list[SecretBytes] = []


@dataclass
class Login:
    user: str
    password: SecretStr


@rest.register_rest_client(config_key="accounts")
class Accounts(Protocol):
    @rest.get("/x")
    async def query(self, login: Annotated[SignIn, rest.Query()]) -> Thing: ...

    @rest.get("/x")
    async def query_of_dataclass(self, login: Annotated[Login, rest.Query()]) -> Thing: ...

    @rest.get("/x")
    async def query_of_mapping(self, login: Annotated[dict[str, SecretStr], rest.Query()]) -> Thing: ...

    @rest.post("/x")
    async def form(self, login: Annotated[SignIn, rest.Form()]) -> Thing: ...

    @rest.post("/x")
    async def body(self, login: SignIn) -> Thing: ...

    @rest.post("/x")
    async def bodies(self, logins: dict[str, list[Login]]) -> Thing: ...


MODEL_PASSWORD = SecretStr("m0del-passphrase/&=0123456789")
SIGN_IN = SignIn(user="ann*", password=MODEL_PASSWORD, keys=[SecretBytes(b"k3y-in-a-list-0123456789")])
LOGIN = Login("ann*", MODEL_PASSWORD)


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("query", SIGN_IN),
        ("query_of_dataclass", LOGIN),
        ("query_of_mapping", {"phrase": MODEL_PASSWORD}),
        ("form", SIGN_IN),
        ("body", SIGN_IN),
        ("bodies", {"all": [LOGIN]}),
    ],
)
async def test_secret_fields_of_models_are_sent_with_their_values_and_hidden_in_errors(
    server, method, argument
) -> None:
    def repeat(received: Received) -> Answer:
        return Answer(f"you sent {unquote(received.target)} {unquote(received.body.decode())}", 400)

    server.handler = repeat
    accounts = rest.create_rest_client(Accounts, url=server.url)

    with pytest.raises(rest.RestClientError) as caught:
        await getattr(accounts, method)(argument)

    sent = unquote(server.last.target) + unquote(server.last.body.decode())
    assert MODEL_PASSWORD.get_secret_value() in sent
    assert "**" not in sent
    if argument is SIGN_IN:
        assert "k3y-in-a-list-0123456789" in sent
        assert "1234567890" in sent
        assert "ann*" in sent
    shown = everything_of(caught.value)
    for secret in (MODEL_PASSWORD.get_secret_value(), "k3y-in-a-list-0123456789", "1234567890"):
        assert not [part for part in parts(secret) if part in shown]


async def test_a_serializer_of_the_program_decides_how_its_secret_is_sent(server) -> None:
    class Signed(BaseModel):
        key: SecretStr

        @field_serializer("key", when_used="json")
        def sign(self, key: SecretStr) -> str:
            return f"signed with {len(key.get_secret_value())} characters*"

    class Signing(Protocol):
        @rest.get("/x")
        async def query(self, signed: Annotated[Signed, rest.Query()]) -> None: ...

        @rest.post("/x")
        async def body(self, signed: Signed) -> None: ...

    signing = rest.create_rest_client(Signing, url=server.url)
    await signing.query(Signed(key=SecretStr("abc")))
    assert server.last.query == [("key", "signed with 3 characters*")]
    await signing.body(Signed(key=SecretStr("abc")))
    assert server.last.json == {"key": "signed with 3 characters*"}
