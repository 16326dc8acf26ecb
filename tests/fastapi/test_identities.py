"""The identity of a request: a FastAPI dependency, resolved once, for endpoints, WebSockets, MCP and the dev UI."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Security, WebSocket
from fastapi.security import APIKeyHeader, HTTPBasic, HTTPBearer, OAuth2PasswordBearer, SecurityScopes
from starlette.requests import HTTPConnection, Request
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from toolbox import (
    Container,
    EventListener,
    IllegalConfigurationError,
    TokenStream,
    produces,
    register_ai_service,
    request_scoped,
    tool,
    toolbox,
)
from toolbox.events import InvocationEvent
from toolbox.limits import UsageLimits
from toolbox.security import SecurityIdentity, authenticated, roles_allowed
from toolbox.testing import ScriptedChatModel, offered_tools, tool_call
from toolbox_fastapi import DevUi, Inject, install, mount_mcp, sse

USERS = {"ann": {"support"}, "boss": {"support", "admin"}, "bob": set[str]()}
asked: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    asked.clear()


async def current_user(connection: HTTPConnection, user: Annotated[str | None, Header()] = None) -> Any:
    asked.append(user or "")
    if user is None:
        return None
    if user not in USERS:
        raise HTTPException(418, "who are you?")
    return SecurityIdentity(user, frozenset(USERS[user]))


class Orders:
    @tool
    @roles_allowed("support")
    def refund(self, order: int) -> str:
        return f"refunded {order}"

    @tool
    @authenticated
    def who_am_i(self, who: Inject[SecurityIdentity]) -> str:
        return who.name


@register_ai_service(tools=Orders)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...

    @roles_allowed("admin")
    async def audit(self, text: str) -> str: ...

    @authenticated
    def events(self, text: str) -> TokenStream: ...


@request_scoped
class Caller:
    def __init__(self, identity: SecurityIdentity) -> None:
        self.name = str(identity)


def application(
    model: Any = None, identity: Any = current_user, beans: tuple[Any, ...] = (), **options: Any
) -> tuple[FastAPI, ScriptedChatModel]:
    model = model or ScriptedChatModel(["hello"] * 9)
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Desk, Caller, *beans), identity=identity, **options)

    @app.post("/chat")
    async def chat(desk: Inject[Desk]) -> str:
        return await desk.chat("q")

    @app.post("/audit")
    async def audit(desk: Inject[Desk]) -> str:
        return await desk.audit("q")

    @app.post("/events")
    async def events(desk: Inject[Desk]) -> Any:
        return sse(desk.events("q"))

    @app.get("/me")
    async def me(who: Inject[SecurityIdentity], caller: Inject[Caller]) -> list[str]:
        return [str(who), caller.name]

    return app, model


def as_user(name: str | None) -> dict[str, str]:
    return {} if name is None else {"user": name}


@pytest.mark.parametrize("path", ["/chat", "/events"])
@pytest.mark.parametrize("user", ["bob", None])
def test_events_of_the_request_have_the_name_of_the_caller(user: str | None, path: str) -> None:
    seen: set[str | None] = set()

    class Listening(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            seen.add(event.context.user)

    app, _ = application(ScriptedChatModel(["hello"]), beans=(Listening,))
    with TestClient(app, raise_server_exceptions=False) as client:
        client.post(path, headers=as_user(user))

    assert seen == {user}
    assert asked == [user or ""]


@pytest.mark.parametrize(
    ("user", "names"), [("ann", ["refund", "who_am_i"]), ("bob", ["who_am_i"]), (None, [])], ids=str
)
def test_a_model_is_offered_the_tools_of_the_caller(user: str | None, names: list[str]) -> None:
    app, model = application()
    with TestClient(app) as client:
        assert client.post("/chat", headers=as_user(user)).json() == "hello"
        assert client.get("/me", headers=as_user(user)).json() == [user or "anonymous"] * 2

    assert offered_tools(model.requests[0]) == names
    assert asked == [user or ""] * 2  # once per request


@pytest.mark.parametrize(("user", "status"), [("boss", 200), ("ann", 403), (None, 401)], ids=str)
def test_methods_that_the_caller_may_not_call_answer_401_or_403(user: str | None, status: int) -> None:
    app, model = application()
    with TestClient(app) as client:
        reply = client.post("/audit", headers=as_user(user))

    assert reply.status_code == status
    assert len(model.requests) == (1 if status == 200 else 0)
    if status != 200:
        assert reply.headers["content-type"] == "application/problem+json"
        assert "Desk" not in reply.text
        assert "admin" not in reply.text
    assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def by_bearer(token: Annotated[Any, Depends(HTTPBearer(auto_error=False))]) -> SecurityIdentity | None:
    return None


def by_key_or_login(
    key: Annotated[str | None, Security(APIKeyHeader(name="X-Key", auto_error=False))],
    login: Annotated[Any, Depends(HTTPBasic(realm="shop", auto_error=False))],
    token: Annotated[Any, Depends(by_bearer)],
    again: Annotated[Any, Depends(HTTPBearer(auto_error=False))],
) -> SecurityIdentity | None:
    return None


class Tokens(OAuth2PasswordBearer):
    def __init__(self) -> None:
        super().__init__("token", auto_error=False)


def by_oauth(token: Annotated[str | None, Depends(Tokens())]) -> SecurityIdentity | None:
    return None


@pytest.mark.parametrize(
    ("identity", "challenge"),
    [(by_bearer, "Bearer"), (by_key_or_login, 'APIKey, Basic realm="shop", Bearer'), (by_oauth, "Bearer")],
    ids=["bearer", "several", "oauth"],
)
def test_a_401_names_the_schemes_of_the_identity(identity: Any, challenge: str) -> None:
    app, _ = application(identity=identity)
    with TestClient(app) as client:
        assert client.post("/audit").headers["www-authenticate"] == challenge
        assert client.post("/events").headers["www-authenticate"] == challenge
        assert "www-authenticate" not in client.get("/me").headers


def test_a_401_of_a_mounted_application_names_the_schemes_too() -> None:
    app, _ = application(identity=by_key_or_login)
    inner = FastAPI()

    @inner.post("/audit")
    async def audit(desk: Inject[Desk]) -> str:
        return await desk.audit("q")

    app.mount("/inner", inner)
    with TestClient(app) as client:
        reply = client.post("/inner/audit")
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, 'APIKey, Basic realm="shop", Bearer')


def test_a_stream_is_refused_before_it_begins() -> None:
    app, model = application()
    with TestClient(app) as client:
        assert client.post("/events").status_code == 401
        assert client.post("/events", headers=as_user("bob")).status_code == 200
    assert len(model.requests) == 1


def test_exceptions_of_the_dependency_are_those_of_the_application() -> None:
    app, model = application()
    with TestClient(app) as client:
        reply = client.post("/chat", headers=as_user("eve"))

    assert (reply.status_code, reply.json()) == (418, {"detail": "who are you?"})
    assert model.requests == []


def test_a_limit_answers_429_without_inner_text() -> None:
    @register_ai_service(limits=UsageLimits(model_calls=0))
    class Limited(Protocol):
        async def chat(self, text: str) -> str: ...

    app = FastAPI()
    install(app, Container(models={"default": ScriptedChatModel(["never"])}).register(Limited))

    @app.get("/")
    async def chat(service: Inject[Limited]) -> str:
        return await service.chat("q")

    with TestClient(app) as client:
        reply = client.get("/")
    assert (reply.status_code, "model_calls" in reply.text) == (429, False)


def test_the_dependency_may_use_security_schemes_and_other_dependencies() -> None:
    bearer = HTTPBearer(auto_error=False)

    def database() -> dict[str, str]:
        return {"secret": "ann"}

    def user(
        scopes: SecurityScopes,
        token: Annotated[Any, Depends(bearer)],
        users: Annotated[dict[str, str], Depends(database)],
    ) -> SecurityIdentity | None:
        assert scopes.scopes == ["read"]
        return SecurityIdentity(users[token.credentials]) if token is not None else None

    app, _ = application(identity=Security(user, scopes=["read"]))
    with TestClient(app) as client:
        assert client.get("/me", headers={"authorization": "Bearer secret"}).json() == ["ann", "ann"]
        assert client.get("/me").json() == ["anonymous", "anonymous"]
        schemes = client.get("/openapi.json").json()["components"]["securitySchemes"]
    assert list(schemes) == ["HTTPBearer"]


def test_a_scheme_that_refuses_unknown_callers_does_so() -> None:
    def user(key: Annotated[str, Depends(APIKeyHeader(name="key"))]) -> SecurityIdentity:
        return SecurityIdentity(key)

    app, _ = application(identity=user)
    with TestClient(app) as client:
        assert client.get("/me").status_code in (401, 403)
        assert client.get("/me", headers={"key": "ann"}).json() == ["ann", "ann"]


def test_tests_can_override_the_dependency() -> None:
    app, _ = application()
    app.dependency_overrides[current_user] = lambda: SecurityIdentity("test")
    with TestClient(app) as client:
        assert client.get("/me").json() == ["test", "test"]


def test_an_endpoint_that_uses_the_dependency_too_does_not_ask_twice() -> None:
    app, _ = application()

    @app.get("/both")
    async def both(user: Annotated[Any, Depends(current_user)], who: Inject[SecurityIdentity]) -> bool:
        return user is who

    with TestClient(app) as client:
        assert client.get("/both", headers=as_user("ann")).json() is True
    assert asked == ["ann"]


@pytest.mark.parametrize("where", ["included", "nested", "before", "mounted", "plain def"])
def test_all_routes_have_the_identity(where: str) -> None:
    model = ScriptedChatModel([])
    app = FastAPI()
    router = APIRouter()

    @router.get("/who")
    def who(identity: Inject[SecurityIdentity]) -> str:
        return str(identity)

    if where == "before":
        app.include_router(router)
    install(app, Container(models={"default": model}), identity=current_user)
    path = "/who"
    if where == "included":
        app.include_router(router)
    elif where == "nested":
        outer = APIRouter(prefix="/outer")
        outer.include_router(router, prefix="/inner")
        app.include_router(outer)
        path = "/outer/inner/who"
    elif where == "mounted":
        inner = FastAPI()
        inner.include_router(router)
        app.mount("/inner", inner)
        path = "/inner/who"
    elif where == "plain def":
        app.get("/who")(who)
    with TestClient(app) as client:
        assert client.get(path, headers=as_user("ann")).json() == "ann"
        assert client.get(path).json() == "anonymous"
    assert asked == ["ann", ""]


def test_websockets_have_the_identity() -> None:
    app, _ = application()

    @app.websocket("/ws")
    async def talk(socket: WebSocket, desk: Inject[Desk], who: Inject[SecurityIdentity]) -> None:
        await socket.accept()
        await socket.send_text(str(who))
        await desk.audit("q")
        await socket.send_text("allowed")

    with TestClient(app) as client:
        with client.websocket_connect("/ws", headers=as_user("boss")) as socket:
            assert [socket.receive_text(), socket.receive_text()] == ["boss", "allowed"]
        with client.websocket_connect("/ws", headers=as_user("ann")) as socket:
            assert socket.receive_text() == "ann"
            with pytest.raises(WebSocketDisconnect) as caught:
                socket.receive_text()
    assert caught.value.code == 1008
    assert asked == ["boss", "ann"]


def test_what_is_not_a_dependency_is_refused() -> None:
    for wrong in (SecurityIdentity("ann"), 3):
        with pytest.raises(IllegalConfigurationError, match="is not a FastAPI dependency"):
            install(FastAPI(), Container(), identity=wrong)  # type: ignore[arg-type]  # the mistake under test


def test_a_dependency_that_returns_something_else_is_an_error_and_not_anonymous() -> None:
    app, _ = application(identity=lambda: "ann")
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/me").status_code == 500


def test_a_producer_can_provide_the_identity_from_the_request() -> None:
    @produces(scope="request")
    def identity(request: Request) -> SecurityIdentity:
        return SecurityIdentity(request.headers.get("user", "guest"))

    app = FastAPI()
    install(app, Container(models={"default": ScriptedChatModel([])}).register(identity))

    @app.get("/me")
    async def me(who: Inject[SecurityIdentity]) -> str:
        return str(who)

    with TestClient(app) as client:
        assert client.get("/me", headers=as_user("ann")).json() == "ann"


def test_tools_of_endpoints_need_an_identity_and_are_filtered() -> None:
    @register_ai_service
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

    for identity in (None, current_user):
        model = ScriptedChatModel(["hello"] * 2)
        app, container = FastAPI(), Container(models={"default": model}).register(Plain)
        install(app, container, identity=identity)

        @app.get("/")
        @toolbox(Orders)
        async def chat(service: Inject[Plain]) -> str:
            return await service.chat("q")

        if identity is None:
            assert any("SecurityIdentity" in each.what for each in container.check())
            continue
        with TestClient(app) as client:
            client.get("/", headers=as_user("ann"))
            client.get("/")
        assert [offered_tools(each) for each in model.requests] == [["refund", "who_am_i"], []]


def test_a_request_scope_outside_of_requests_is_anonymous_and_can_be_seeded() -> None:
    container = Container(models={"default": ScriptedChatModel([])})
    install(FastAPI(), container, identity=current_user)
    with container:
        with container.request_scope():
            assert container.get(SecurityIdentity).is_anonymous
        with container.request_scope({SecurityIdentity: SecurityIdentity("job")}):
            assert container.get(SecurityIdentity).name == "job"


# --- MCP


def mcp(client: TestClient, method: str, params: Any = None, **headers: str) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, **({} if params is None else {"params": params})}
    accept = {"accept": "application/json, text/event-stream", "host": "localhost"}
    return client.post("/mcp", json=body, headers={**accept, **headers})


def names_of(reply: Any) -> list[str]:
    return [each["name"] for each in reply.json()["result"]["tools"]]


def text_of(reply: Any) -> str:
    text: str = reply.json()["result"]["content"][0]["text"]
    return text


def user_of_request(request: Request) -> SecurityIdentity | None:
    name = request.headers.get("mcp-user")
    return None if name is None else SecurityIdentity(name, frozenset(USERS.get(name, ())))


async def user_of_request_async(request: Request) -> SecurityIdentity | None:
    return user_of_request(request)


class UserOfRequest:
    async def __call__(self, request: Request) -> SecurityIdentity | None:
        return user_of_request(request)


IDENTITIES: dict[str, Callable[..., Any]] = {
    "def": user_of_request,
    "async def": user_of_request_async,
    "lambda": lambda request: user_of_request_async(request),
    "object": UserOfRequest(),
}


@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES)
@pytest.mark.parametrize("source", ["alone", "with install", "with a producer"])
def test_mcp_clients_see_and_call_the_tools_of_their_identity(identity: Callable[..., Any], source: str) -> None:
    @produces(scope="request")
    def other() -> SecurityIdentity:
        return SecurityIdentity("other", frozenset({"support"}))

    container = Container().register(*([other] if source == "with a producer" else []))
    app = FastAPI()
    install(app, container, identity=current_user if source == "with install" else None)
    mount_mcp(app, container, [Orders], identity=identity)
    with TestClient(app) as client:
        assert names_of(mcp(client, "tools/list", **{"mcp-user": "ann"})) == ["refund", "who_am_i"]
        assert names_of(mcp(client, "tools/list", **{"mcp-user": "bob"})) == ["who_am_i"]
        assert names_of(mcp(client, "tools/list")) == []
        call = {"name": "refund", "arguments": {"order": 7}}
        assert text_of(mcp(client, "tools/call", call, **{"mcp-user": "ann"})) == "refunded 7"
        refused = text_of(mcp(client, "tools/call", call, **{"mcp-user": "bob"}))
        assert refused == "There is no tool named 'refund'. The tools are: who_am_i."
        unknown = text_of(mcp(client, "tools/call", {"name": "x", "arguments": {}}, **{"mcp-user": "bob"}))
        assert "refund" not in unknown
        who = {"name": "who_am_i", "arguments": {}}
        assert text_of(mcp(client, "tools/call", who, **{"mcp-user": "bob"})) == "bob"
    assert asked == []


def test_mcp_uses_the_identity_of_the_application_by_default() -> None:
    container = Container()
    app = FastAPI()
    install(app, container, identity=current_user)
    mount_mcp(app, container, [Orders])
    with TestClient(app) as client:
        assert names_of(mcp(client, "tools/list", user="ann")) == ["refund", "who_am_i"]
        assert names_of(mcp(client, "tools/list")) == []
        assert mcp(client, "tools/list", user="eve").status_code == 418


def test_functions_with_roles_served_by_mcp_need_an_identity() -> None:
    @tool
    @roles_allowed("admin")
    def secret() -> str: ...

    container = Container()
    app = FastAPI()
    install(app, container)
    mount_mcp(app, container, [secret])
    [problem] = container.check(models=False)
    assert "secret" in problem.what
    assert "SecurityIdentity" in problem.what


# --- the dev UI


def test_calls_of_the_dev_ui_have_the_identity_of_the_application() -> None:
    model = ScriptedChatModel([tool_call("who_am_i", {}), "done"])
    app, _ = application(model, dev_ui=DevUi(token=False))
    here = {"host": "localhost"}
    with TestClient(app, client=("127.0.0.1", 50000)) as client:
        assert client.get("/dev-ui/", headers=here).status_code == 200
        assert asked == []
        program = client.get("/dev-ui/api/program", headers=here).json()
        key = next(each["id"] for each in program["tools"] if each["name"] == "who_am_i")
        body = {"tool": key, "arguments": "{}"}
        assert client.post("/dev-ui/api/tool", json=body, headers={**here, "user": "ann"}).json()["text"] == "ann"
        assert client.post("/dev-ui/api/tool", json=body, headers=here).json()["is_error"] is True
        method = next(each["id"] for each in program["services"][0]["methods"] if each["name"] == "chat")
        ask = {"method": method, "arguments": json.dumps({"text": "q"})}
        assert client.post("/dev-ui/api/ask", json=ask, headers={**here, "user": "ann"}).status_code == 200
    assert offered_tools(model.requests[0]) == ["refund", "who_am_i"]
