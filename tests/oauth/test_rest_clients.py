"""Tokens of an OAuth server in the requests of REST clients."""

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any, Protocol

import pytest
from pydantic import SecretStr

from tests.oauth.oauth_server import EXCHANGE, SECRET, Issued, OAuthServer, Resource
from tests.rest.http_server import Answer, Server
from toolbox import Container, IllegalConfigurationError, Named, OAuthError, RestClientError, rest
from toolbox.di.decorators import request_scoped
from toolbox.oauth import ClientCredentials, TokenExchange
from toolbox.security import SecurityIdentity, UnauthenticatedError

pytestmark = pytest.mark.anyio


class Orders(Protocol):
    @rest.get("/orders")
    async def list(self) -> dict[str, Any]: ...

    @rest.get("/orders")
    def list_now(self) -> dict[str, Any]: ...

    @rest.post("/orders")
    async def create(self, order: dict[str, int]) -> dict[str, Any]: ...


def for_the_program(oauth: OAuthServer, **changes: Any) -> ClientCredentials:
    return ClientCredentials(oauth.url, **{"client_id": "desk", "client_secret": SECRET, **changes})


def for_the_user(oauth: OAuthServer, **changes: Any) -> TokenExchange:
    given = {"client_id": "desk", "client_secret": SECRET, "audience": "orders", **changes}
    return TokenExchange(oauth.url, **given)


def registered(orders: Resource, auth: object, **settings: Any) -> Container:
    client = type("Orders", (Orders, Protocol), {})
    rest.register_rest_client(config_key="orders", auth=auth)(client)
    container = Container(seeds=(SecurityIdentity,))
    container.register(client, rest.rest_settings("orders", url=orders.url, **settings))
    container.client = client
    return container


def client_of(container: Container) -> Any:
    return container.get(container.client)


def acting_for(container: Container, name: str, token: object) -> Any:
    identity = SecurityIdentity(name, attributes={} if token is None else {"token": token})
    return container.request_scope({SecurityIdentity: identity})


# --- tokens for the program


@pytest.mark.parametrize("secret", [SECRET, SecretStr(SECRET), "${DESK_SECRET}"], ids=["text", "secret", "variable"])
@pytest.mark.parametrize("client_auth", ["basic", "body"])
async def test_a_client_sends_a_token_for_the_program(oauth, orders, monkeypatch, secret, client_auth) -> None:
    monkeypatch.setenv("DESK_SECRET", SECRET)
    auth = for_the_program(oauth, client_secret=secret, client_auth=client_auth, scope="read write", audience="orders")

    async with registered(orders, auth) as container:
        monkeypatch.delenv("DESK_SECRET")  # it was read at the start
        first, second = await client_of(container).list(), await client_of(container).create({"dish": 1})

    assert first["subject"] == "desk"
    assert second["body"] == '{"dish":1}'
    assert orders.seen == [Issued("desk", "desk", "orders", "read write")] * 2
    [request] = oauth.requests
    assert request["grant_type"] == "client_credentials"
    assert ("client_secret" in request) is (client_auth == "body")


async def test_settings_describe_the_tokens_of_a_client(oauth, orders, monkeypatch) -> None:
    for name, value in {
        "KIND": "client_credentials",
        "TOKEN_URL": oauth.url,
        "CLIENT_ID": "desk",
        "CLIENT_SECRET": SECRET,
        "SCOPE": "read",
        "AUDIENCE": "orders",
        "CLIENT_AUTH": "body",
    }.items():
        monkeypatch.setenv(f"TOOLBOX_REST__ORDERS__AUTH__{name}", value)

    async with registered(orders, None) as container:
        await client_of(container).list()

    assert orders.seen == [Issued("desk", "desk", "orders", "read")]
    assert "client_secret" in oauth.requests[0]


@pytest.mark.parametrize("secret", ["123", "true", '{"a": 1}', "[1]", "null"])
async def test_a_secret_in_a_setting_is_never_read_as_json(oauth, orders, monkeypatch, secret) -> None:
    oauth.clients["desk"].client_secret = secret
    names = {"KIND": "client_credentials", "TOKEN_URL": oauth.url, "CLIENT_ID": "desk", "CLIENT_SECRET": secret}
    for name, value in names.items():
        monkeypatch.setenv(f"TOOLBOX_REST__ORDERS__AUTH__{name}", value)

    async with registered(orders, None) as container:
        await client_of(container).list()

    assert len(orders.seen) == 1


async def test_clients_with_equal_grants_share_one_token(oauth, orders) -> None:
    class Invoices(Protocol):
        @rest.get("/invoices")
        async def list(self) -> dict[str, Any]: ...

    rest.register_rest_client(config_key="invoices", auth=for_the_program(oauth))(Invoices)
    container = registered(orders, for_the_program(oauth))
    container.register(Invoices, rest.rest_settings("invoices", url=orders.url))

    async with container:
        await client_of(container).list()
        await container.get(Invoices).list()

    assert len(oauth.requests) == 1


async def test_clients_with_different_grants_have_different_tokens(oauth, orders) -> None:
    class Invoices(Protocol):
        @rest.get("/invoices")
        async def list(self) -> dict[str, Any]: ...

    rest.register_rest_client(config_key="invoices", auth=for_the_program(oauth, scope="write"))(Invoices)
    container = registered(orders, for_the_program(oauth, scope="read"))
    container.register(Invoices, rest.rest_settings("invoices", url=orders.url))

    async with container:
        await client_of(container).list()
        await container.get(Invoices).list()

    assert [each.scope for each in orders.seen] == ["read", "write"]


async def test_a_named_bean_may_have_the_token(oauth, orders) -> None:
    token = oauth.log_in("ann")

    class Session:
        def token(self) -> str:
            return token

    auth = for_the_user(oauth, subject=Annotated[Session, Named("mine")])
    container = registered(orders, auth)
    container.register_instance(Session(), name="mine")
    async with container:
        await client_of(container).list()

    assert [each.subject for each in orders.seen] == ["ann"]


async def test_clients_without_a_container_have_tokens_too(oauth, orders) -> None:
    client = rest.create_rest_client(Orders, url=orders.url, auth=for_the_program(oauth))

    await client.list()
    await asyncio.to_thread(client.list_now)

    assert (len(oauth.requests), len(orders.seen)) == (1, 2)


# --- tokens for the user


async def test_the_token_of_each_user_is_exchanged_once(oauth, orders) -> None:
    ann, bob = oauth.log_in("ann"), oauth.log_in("bob")

    async with registered(orders, for_the_user(oauth, scope="read")) as container:
        for name, token in (("ann", ann), ("bob", SecretStr(bob)), ("ann", ann)):
            async with acting_for(container, name, token):
                await client_of(container).list()

    assert [each.subject for each in orders.seen] == ["ann", "bob", "ann"]
    assert {(each.audience, each.scope) for each in orders.seen} == {("orders", "read")}
    assert [each["subject_token"] for each in oauth.requests] == [ann, bob]
    assert {each["grant_type"] for each in oauth.requests} == {EXCHANGE}


async def test_the_token_comes_from_a_bean_that_is_named(oauth, orders) -> None:
    ann = oauth.log_in("ann")

    @request_scoped
    class Session:
        def token(self) -> str:
            return ann

    async with registered(orders, for_the_user(oauth, subject=Session)) as container, container.request_scope():
        await client_of(container).list()
        await asyncio.to_thread(client_of(container).list_now)

    assert [each.subject for each in orders.seen] == ["ann", "ann"]


@pytest.mark.parametrize("token", [None, ""], ids=["none", "empty"])
async def test_without_a_token_of_the_user_nothing_is_sent(oauth, orders, token) -> None:
    async with registered(orders, for_the_user(oauth)) as container:
        with pytest.raises(UnauthenticatedError, match="no token of the user"):
            await client_of(container).list()
        with pytest.raises(UnauthenticatedError):
            await asyncio.to_thread(client_of(container).list_now)
        async with acting_for(container, "ann", token):
            with pytest.raises(UnauthenticatedError, match=r"Orders\.list"):
                await client_of(container).list()

    assert (oauth.http.received, orders.http.received) == ([], [])


async def test_settings_describe_an_exchange(oauth, orders, monkeypatch) -> None:
    names = {"KIND": "token_exchange", "TOKEN_URL": oauth.url, "CLIENT_ID": "desk", "CLIENT_SECRET": SECRET}
    for name, value in names.items():
        monkeypatch.setenv(f"TOOLBOX_REST__ORDERS__AUTH__{name}", value)

    async with registered(orders, None) as container, acting_for(container, "ann", oauth.log_in("ann")):
        await client_of(container).list()

    assert [each.subject for each in orders.seen] == ["ann"]


async def test_at_most_a_thousand_users_are_kept(oauth, orders) -> None:
    tokens = [oauth.log_in(f"user-{number}") for number in range(1001)]

    async with registered(orders, for_the_user(oauth)) as container:
        for token in (*tokens, tokens[1000], tokens[1], tokens[0]):
            async with acting_for(container, "ann", token):
                await client_of(container).list()

    assert [each["subject_token"] for each in oauth.requests[1001:]] == [tokens[0]]


# --- keeping and renewing


@pytest.mark.parametrize(("expires_in", "seconds", "requests"), [(3600, 3569, 1), (3600, 3571, 2), (0, 10**9, 1)])
async def test_a_token_is_renewed_half_a_minute_before_it_ends(
    oauth, orders, clock, expires_in, seconds, requests
) -> None:
    oauth.expires_in = expires_in

    async with registered(orders, for_the_program(oauth)) as container:
        await client_of(container).list()
        clock.advance(seconds)
        await client_of(container).list()

    assert len(oauth.requests) == requests


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_refused_token_is_replaced_and_the_request_repeated(oauth, orders, is_async) -> None:
    async with registered(orders, for_the_program(oauth)) as container:
        client = client_of(container)
        await client.list()
        oauth.revoke()
        if is_async:
            answer = await client.create({"dish": 1})
            assert answer["body"] == '{"dish":1}'
        else:
            await asyncio.to_thread(client.list_now)

    assert (len(oauth.requests), len(orders.seen), len(orders.http.received)) == (2, 2, 3)


async def test_a_token_is_replaced_once_for_each_call(oauth, orders) -> None:
    orders.refuse_next = 1000

    async with registered(orders, for_the_program(oauth)) as container:
        with pytest.raises(RestClientError) as raised:
            await client_of(container).list()

    assert raised.value.status == 401
    assert (len(oauth.requests), len(orders.http.received)) == (2, 2)


async def test_a_refused_token_that_another_call_has_replaced_is_not_replaced_again(oauth, orders) -> None:
    async with registered(orders, for_the_program(oauth)) as container:
        client = client_of(container)
        await client.list()
        oauth.revoke()
        await asyncio.gather(*(client.list() for _ in range(20)))

    assert (len(oauth.requests), len(orders.seen)) == (2, 21)


async def test_calls_at_the_same_time_share_one_request_for_a_token(oauth, orders) -> None:
    """Also those of other event loops and of threads."""
    arrived, may_go = threading.Event(), threading.Event()

    def slow(received: Any) -> Answer:
        arrived.set()
        assert may_go.wait(30)
        return oauth.create_token_response(received)

    oauth.http.handler = slow
    async with registered(orders, for_the_program(oauth)) as container:
        client = client_of(container)
        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            first = asyncio.create_task(client.list())
            await asyncio.to_thread(arrived.wait)
            others = [asyncio.create_task(client.list()) for _ in range(10)]
            others += [asyncio.wrap_future(threads.submit(client.list_now)) for _ in range(5)]
            others += [asyncio.wrap_future(threads.submit(asyncio.run, client.list())) for _ in range(5)]
            asyncio.get_running_loop().call_later(0.1, may_go.set)
            await asyncio.gather(first, *others)

    assert (len(oauth.requests), len(orders.seen)) == (1, 21)


async def test_a_cancelled_call_leaves_the_request_to_another_one(oauth, orders) -> None:
    arrived, may_go = threading.Event(), threading.Event()

    def slow(received: Any) -> Answer:
        if not arrived.is_set():
            arrived.set()
            assert may_go.wait(30)
        return oauth.create_token_response(received)

    oauth.http.handler = slow
    async with registered(orders, for_the_program(oauth)) as container:
        client = client_of(container)
        first = asyncio.create_task(client.list())
        await asyncio.to_thread(arrived.wait)
        second = asyncio.create_task(client.list())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)["subject"] == "desk"
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await first

    assert len(orders.seen) == 1


async def test_a_shared_failure_is_a_separate_error_for_each_call(oauth, orders) -> None:
    arrived, may_go = threading.Event(), threading.Event()

    def slow(received: Any) -> Answer:
        arrived.set()
        assert may_go.wait(30)
        return Answer({"error": "unauthorized_client"}, 400)

    oauth.http.handler = slow
    async with registered(orders, for_the_program(oauth)) as container:
        client = client_of(container)
        calls = [asyncio.create_task(client.list())]
        await asyncio.to_thread(arrived.wait)
        calls += [asyncio.create_task(client.list()) for _ in range(5)]
        asyncio.get_running_loop().call_later(0.1, may_go.set)
        errors = await asyncio.gather(*calls, return_exceptions=True)

    assert len(oauth.requests) == 1
    assert {(type(each), each.error) for each in errors} == {(OAuthError, "unauthorized_client")}
    assert len({id(each) for each in errors}) == 6


# --- what the token server answers


@pytest.mark.parametrize(
    ("answer", "error", "status"),
    [
        (Answer({"error": "invalid_client", "error_description": "hunter2"}, 401), "invalid_client", 401),
        (Answer({"error": "invalid_scope"}, 200), "invalid_scope", 200),
        (Answer({"error": 'bad "quote"'}, 400), None, 400),
        (Answer({"error": {"code": 1}}, 400), None, 400),
        (Answer({"error": "x" * 101}, 400), None, 400),
        (Answer({}, 200), None, 200),
        (Answer({"access_token": "t", "token_type": "mac"}, 200), None, 200),
        (Answer({"access_token": "t", "token_type": "N_A"}, 200), None, 200),
        (Answer({"access_token": "t"}, 200), None, 200),
        (Answer({"access_token": "", "token_type": "Bearer"}, 200), None, 200),
        (Answer({"access_token": 5, "token_type": "Bearer"}, 200), None, 200),
        (Answer({"access_token": "a\r\nX-Evil: 1", "token_type": "Bearer"}, 200), None, 200),
        (Answer({"access_token": "t", "token_type": "Bearer"}, 500), None, 500),
        (Answer([1], 200), None, 200),
        (Answer("<html>hunter2</html>", 502), None, 502),
        (Answer(b"\xff", 200), None, 200),
        (Answer(None, 302, {"Location": "/elsewhere"}), None, 302),
        (Answer(json.dumps({"access_token": "t" * 2**20, "token_type": "Bearer"}), 200), None, 200),
        (Answer(b"x", 200, {"Content-Encoding": "gzip"}), None, 200),
        (Answer(hang_up=True), None, None),
    ],
)
async def test_everything_but_a_bearer_token_is_an_error(oauth, orders, answer, error, status) -> None:
    oauth.reply = answer

    async with registered(orders, for_the_program(oauth), retries=3) as container:
        with pytest.raises(OAuthError) as raised:
            await client_of(container).list()
        with pytest.raises(OAuthError) as raised_now:
            await asyncio.to_thread(client_of(container).list_now)

    for each in (raised.value, raised_now.value):
        assert (each.error, each.status, each.url, each.body) == (error, status, oauth.url, "")
        assert each.__cause__ is each.__context__ is None  # they would have the request with the secret
        assert "hunter2" not in str(each)
    assert orders.http.received == []
    assert len(oauth.http.received) == 2


@pytest.mark.parametrize("kind", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("lifetime", ["3600", 3600.5, None, "soon", True, [1]])
async def test_lenient_spellings_of_a_bearer_token_are_accepted(oauth, orders, kind, lifetime) -> None:
    token = oauth.log_in("ann")
    oauth.reply = Answer({"access_token": token, "token_type": kind, "expires_in": lifetime})

    async with registered(orders, for_the_program(oauth)) as container:
        await client_of(container).list()
        await client_of(container).list()

    assert len(oauth.http.received) == 1


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_token_server_that_does_not_answer_is_an_error_within_the_time_limit(oauth, orders, is_async) -> None:
    may_go = threading.Event()
    oauth.http.handler = lambda received: Answer(may_go.wait(60))

    async with registered(orders, for_the_program(oauth), timeout=0.3) as container:
        client = client_of(container)
        for calls in (1, 3):
            pending = [client.list() if is_async else asyncio.to_thread(client.list_now) for _ in range(calls)]
            for error in await asyncio.gather(*pending, return_exceptions=True):
                assert isinstance(error, OAuthError)
                assert "did not answer in time" in str(error)
        may_go.set()


async def test_a_call_with_more_time_does_not_fail_with_one_that_had_less(oauth, orders) -> None:
    arrived, may_go = threading.Event(), threading.Event()

    class Impatient(Orders, Protocol):
        @rest.get("/orders", timeout=0.2)
        async def hurry(self) -> dict[str, Any]: ...

    def slow(received: Any) -> Answer:
        arrived.set()
        assert may_go.wait(60)
        return oauth.create_token_response(received)

    oauth.http.handler = slow
    rest.register_rest_client(config_key="orders", auth=for_the_program(oauth))(Impatient)
    async with Container().register(Impatient, rest.rest_settings("orders", url=orders.url)) as container:
        client = container.get(Impatient)
        hurried = asyncio.create_task(client.hurry())
        await asyncio.to_thread(arrived.wait)
        patient = asyncio.create_task(client.list())
        with pytest.raises(OAuthError, match="in time"):
            await hurried
        may_go.set()
        assert (await patient)["subject"] == "desk"


# --- where tokens go


async def test_a_token_is_not_sent_to_another_origin(oauth, orders) -> None:
    other = Server()
    try:
        orders.http.handler = lambda received: (
            Answer(None, 307, {"Location": f"{other.url}/stolen"})
            if oauth.bearer(received.header("Authorization"))
            else Answer(None, 401)
        )
        async with registered(orders, for_the_program(oauth), follow_redirects=True) as container:
            await client_of(container).list()
        assert other.last.header("Authorization") is None
    finally:
        other.stop()


async def test_a_token_is_sent_again_within_the_origin(oauth, orders) -> None:
    answer = orders.http.handler
    assert answer is not None

    def redirect(received: Any) -> Answer:
        return Answer(None, 307, {"Location": "/moved"}) if received.path == "/orders" else answer(received)

    orders.http.handler = redirect
    async with registered(orders, for_the_program(oauth), follow_redirects=True) as container:
        await client_of(container).list()

    assert len(orders.seen) == 1


async def test_filters_and_headers_of_the_client_do_not_reach_the_token_server(oauth, orders) -> None:
    seen: list[str] = []

    class Filtered(Protocol):
        @rest.get("/orders")
        async def list(self) -> dict[str, Any]: ...

    rest.register_rest_client(
        config_key="orders",
        auth=for_the_program(oauth),
        headers=lambda: {"X-Tenant": "acme"},
        request_filters=[lambda request: seen.append(str(request.url))],
    )(Filtered)
    settings = rest.rest_settings("orders", url=orders.url, headers={"X-Own": "1"})
    async with Container().register(Filtered, settings) as container:
        await container.get(Filtered).list()

    assert seen == [f"{orders.url}/orders"]
    [request] = oauth.http.received
    assert (request.header("X-Tenant"), request.header("X-Own"), request.header("Cookie")) == (None, None, None)


@pytest.mark.parametrize("place", ["headers", "filter"])
async def test_a_computed_authorization_is_refused(oauth, orders, place) -> None:
    class Both(Protocol):
        @rest.get("/orders")
        async def list(self) -> dict[str, Any]: ...

    def authorize(request: Any) -> None:
        request.headers["Authorization"] = "Basic abc"

    own: Any = {"headers": lambda: {"authorization": "Basic abc"}} if place == "headers" else {}
    own |= {"request_filters": [authorize]} if place == "filter" else {}
    rest.register_rest_client(config_key="orders", auth=for_the_program(oauth), **own)(Both)
    async with Container().register(Both, rest.rest_settings("orders", url=orders.url)) as container:
        with pytest.raises(IllegalConfigurationError, match="auth= sets it"):
            await container.get(Both).list()

    assert orders.http.received == []


async def test_streams_are_authorized_too(oauth, orders) -> None:
    class Streaming(Protocol):
        @rest.get("/lines")
        def follow(self) -> AsyncIterator[str]: ...

    rest.register_rest_client(config_key="orders", auth=for_the_program(oauth))(Streaming)
    orders.refuse_next = 1
    async with Container().register(Streaming, rest.rest_settings("orders", url=orders.url)) as container:
        assert [each async for each in container.get(Streaming).follow()]

    assert len(oauth.requests) == 2


async def test_files_are_sent_again_after_a_401(oauth, orders) -> None:
    class Uploads(Protocol):
        @rest.post("/files")
        async def send(self, content: Annotated[bytes, rest.File()]) -> dict[str, Any]: ...

    rest.register_rest_client(config_key="orders", auth=for_the_program(oauth))(Uploads)
    orders.refuse_next = 1
    async with Container().register(Uploads, rest.rest_settings("orders", url=orders.url)) as container:
        answer = await container.get(Uploads).send(b"the content")

    assert "the content" in answer["body"]


async def test_containers_have_separate_tokens(oauth, orders) -> None:
    auth = for_the_program(oauth)

    async with AsyncExitStack() as stack:
        for _ in range(2):
            container = await stack.enter_async_context(registered(orders, auth))
            await client_of(container).list()

    assert len(oauth.requests) == 2
