"""Mistakes in the declaration of tokens are problems at start."""

from typing import Annotated, Any, Protocol

import pytest
from pydantic import SecretStr

from toolbox import Container, IllegalConfigurationError, rest
from toolbox.mcp import McpServers, mcp_server
from toolbox.oauth import ClientCredentials, TokenExchange
from toolbox.openapi import tools_from_openapi
from toolbox.settings import McpSettings, OAuthSettings, RestSettings, ToolboxSettings

URL = "https://login.example/token"


def grant(**changes: Any) -> ClientCredentials:
    return ClientCredentials(**{"token_url": URL, "client_id": "desk", "client_secret": "hunter22", **changes})


class Orders(Protocol):
    @rest.get("/orders")
    async def list(self) -> dict[str, Any]: ...


def problems_of(own: object, /, cls: type = Orders, settings: ToolboxSettings | None = None, **given: Any) -> list[str]:
    client = type("Orders", (cls, Protocol), {})
    rest.register_rest_client(config_key="orders", auth=own, base_url="https://orders.example")(client)
    container = Container(settings=settings).register(client, rest.rest_settings("orders", **given))
    return [str(each) for each in container.check()]


WRONG = [
    ({"token_url": "http://login.example/token"}, "not encrypted"),
    ({"token_url": "http://127.evil.example/token"}, "not encrypted"),
    ({"token_url": "http://localhost.example/token"}, "not encrypted"),
    ({"token_url": "ftp://login.example/token"}, "invalid token URL"),
    ({"token_url": "login.example"}, "invalid token URL"),
    ({"token_url": "https://ann:hunter2@login.example/token"}, "invalid token URL"),
    ({"token_url": "https://login.example/token#here"}, "invalid token URL"),
    ({"token_url": "https://login.example/to ken"}, "invalid token URL"),
    ({"token_url": "https://login.example:99999/token"}, "invalid token URL"),
    ({"token_url": ""}, "invalid token URL"),
    ({"client_id": ""}, "missing client id"),
    ({"client_secret": ""}, "the client secret is empty"),
    ({"client_secret": SecretStr("")}, "the client secret is empty"),
    ({"client_secret": 5}, "invalid client secret"),
    ({"client_secret": "a\ud800b"}, "lone surrogate"),
    ({"client_secret": "${TOOLBOX_TESTS_NO_SECRET}"}, "TOOLBOX_TESTS_NO_SECRET is not set"),
    ({"client_auth": "header"}, "invalid client_auth"),
    ({"scope": ["read"]}, "invalid scope"),
    ({"audience": 5}, "invalid audience"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_wrong_grant_is_one_problem(changes: dict[str, Any], text: str) -> None:
    [problem] = problems_of(grant(**changes))

    assert text in problem
    assert "hunter2" not in problem

    client = type("Orders", (Orders, Protocol), {})
    with pytest.raises(IllegalConfigurationError, match=text):
        rest.create_rest_client(client, url="https://orders.example", auth=grant(**changes))
    document = {"openapi": "3.1.0", "info": {"title": "t", "version": "1"}, "paths": {}}
    with pytest.raises(IllegalConfigurationError, match=text):
        tools_from_openapi(document, base_url="https://orders.example", auth=grant(**changes))
    container = Container().register(McpServers)
    container.register_instance(mcp_server("crm", url="https://crm.example", auth=grant(**changes)), name="crm")
    [problem] = container.check()
    assert text in problem.what


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "127.3.2.1:1", "[::1]:8080"])
def test_loopback_addresses_need_no_encryption(host: str) -> None:
    assert problems_of(grant(token_url=f"http://{host}/token")) == []


def test_one_grant_of_several_clients_is_one_problem() -> None:
    class Invoices(Protocol):
        @rest.get("/invoices")
        async def list(self) -> dict[str, Any]: ...

    wrong = grant(client_secret="${TOOLBOX_TESTS_NO_SECRET}")
    for cls in (client := type("Orders", (Orders, Protocol), {}), Invoices):
        rest.register_rest_client(base_url="https://orders.example", auth=wrong)(cls)

    assert len(Container().register(client, Invoices).check()) == 1


def test_a_variable_that_is_set_later_is_no_problem_any_more(monkeypatch) -> None:
    client = type("Orders", (Orders, Protocol), {})
    auth = grant(client_secret="${TOOLBOX_TESTS_SECRET}")
    rest.register_rest_client(base_url="https://orders.example", auth=auth)(client)
    container = Container().register(client)

    assert len(container.check()) == 1
    monkeypatch.setenv("TOOLBOX_TESTS_SECRET", "hunter22")
    assert container.check() == []


def test_a_secret_that_only_contains_a_variable_is_taken_as_it_is() -> None:
    assert problems_of(grant(client_secret="a${TOOLBOX_TESTS_NO_SECRET}")) == []


@pytest.mark.parametrize(
    "given",
    [
        {"bearer_token": "t"},
        {"username": "ann", "password": "p"},
        {"headers": {"authorization": "Basic x"}},
        {"api_key": "k", "api_key_header": "Authorization"},
        {"propagate_headers": ("traceparent", "Authorization")},
        {"url": "https://ann:pa55@orders.example"},
    ],
)
def test_another_setting_of_authorization_is_a_problem(given: dict[str, Any]) -> None:
    [problem] = problems_of(grant(), **given)

    assert "auth= sets it" in problem
    assert "pa55" not in problem


@pytest.mark.parametrize("given", [{"api_key": "k"}, {"api_key": "k", "api_key_query": "key"}, {"headers": {"X": "1"}}])
def test_settings_of_other_headers_are_no_problem(given: dict[str, Any]) -> None:
    assert problems_of(grant(), **given) == []


def test_another_declaration_of_authorization_is_a_problem() -> None:
    class WithParameter(Protocol):
        @rest.get("/orders")
        async def list(self, authorization: Annotated[str, rest.Header]) -> dict[str, Any]: ...

    class WithFixedValue(Protocol):
        @rest.client_header_param("AUTHORIZATION", "Basic x")
        @rest.get("/orders")
        async def list(self) -> dict[str, Any]: ...

    for cls in (WithParameter, WithFixedValue):
        [problem] = problems_of(grant(), cls)
        assert "a header of Orders.list sets Authorization" in problem


AUTH = OAuthSettings(kind="client_credentials", token_url=URL, client_id="desk", client_secret=SecretStr("hunter22"))


def test_the_settings_of_tokens_beside_those_of_the_class_are_a_problem() -> None:
    settings = ToolboxSettings(rest={"orders": RestSettings(auth=AUTH)})

    [problem] = problems_of(grant(), settings=settings)
    assert "the settings AUTH of 'orders'" in problem
    assert problems_of(None, settings=settings) == []
    assert problems_of(None, settings=settings, auth=grant()) == []  # settings in code override the environment


def test_settings_of_tokens_are_checked() -> None:
    wrong = AUTH.model_copy(update={"token_url": "http://login.example/token"})
    settings = ToolboxSettings(rest={"orders": RestSettings(auth=wrong)})

    [problem] = problems_of(None, settings=settings)

    assert "not encrypted" in problem


def test_incomplete_settings_of_tokens_are_a_problem(monkeypatch) -> None:
    monkeypatch.setenv("TOOLBOX_REST__ORDERS__AUTH__KIND", "password")
    monkeypatch.setenv("TOOLBOX_REST__ORDERS__AUTH__CLIENT_SECRET", "hunter22")

    [problem] = problems_of(None)

    assert "rest.orders.auth.token_url" in problem
    assert "hunter22" not in problem


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"headers": {"AUTHORIZATION": SecretStr("Basic x")}}, "auth= sets it"),
        ({"url": "https://ann:pa55@crm.example/mcp"}, "auth= sets it"),
        ({"url": None, "command": "crm"}, "no effect on a process"),
        ({"auth": AUTH.model_copy(update={"token_url": "http://login.example"})}, "not encrypted"),
    ],
)
def test_the_settings_of_an_mcp_server_are_checked(changes: dict[str, Any], text: str) -> None:
    crm = McpSettings(**{"url": "https://crm.example/mcp", "auth": AUTH, **changes})

    problems = Container(settings=ToolboxSettings(mcp={"crm": crm})).register(McpServers).check()

    [problem] = [str(each) for each in problems]
    assert text in problem
    assert "pa55" not in problem


class Session:
    def token(self) -> str:
        return "t"


class AsyncSession:
    async def token(self) -> str:
        return "t"


class Unbuildable:
    def __init__(self, number: Orders) -> None: ...

    def token(self) -> str:
        return "t"


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        ("Session", "expected a class with the method token"),
        (str, "expected a class with the method token"),
        (Unbuildable, "Orders"),
        (Session, None),
        (AsyncSession, None),
    ],
)
def test_the_bean_with_the_token_is_checked(subject: Any, text: str | None) -> None:
    exchange = TokenExchange(URL, "desk", "hunter22", subject=subject)

    class Plain(Protocol):
        @rest.get("/orders")
        async def list(self) -> dict[str, Any]: ...

    rest.register_rest_client(config_key="orders", auth=exchange, base_url="https://orders.example")(Plain)
    of_rest = [str(each) for each in Container().register(Plain).check()]
    container = Container().register(McpServers)
    container.register_instance(mcp_server("crm", url="https://crm.example", auth=exchange), name="crm")
    of_mcp = [str(each) for each in container.check()]

    for problems in (of_rest, of_mcp):
        assert bool(problems) is (text is not None)
        assert text is None or text in problems[0]


def test_a_token_that_must_be_awaited_needs_async_methods() -> None:
    class Waiting(Protocol):
        @rest.get("/orders")
        def list_now(self) -> dict[str, Any]: ...

    [problem] = problems_of(TokenExchange(URL, "desk", "hunter22", subject=AsyncSession), Waiting)

    assert "must be awaited" in problem


def test_a_named_protocol_must_be_provided() -> None:
    class HasToken(Protocol):
        def token(self) -> str: ...

    [problem] = problems_of(TokenExchange(URL, "desk", "hunter22", subject=HasToken))

    assert "no bean provides HasToken" in problem


def test_a_declaration_shows_no_secret() -> None:
    for each in (grant(), TokenExchange(URL, "desk", "hunter22")):
        assert "hunter22" not in f"{each!r} {each}"
    assert "hunter22" not in repr(AUTH)
