"""Roles on endpoints: who is refused, before what, and where a mark has no effect."""

import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Protocol

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header, HTTPException, Response, WebSocket
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Route
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from toolbox import Container, produces, register_ai_service, request_scoped, tool
from toolbox.security import SecurityIdentity, authenticated, permit_all, roles_allowed
from toolbox_fastapi import Inject, InjectRoute, install

log: list[Any] = []
USERS = {"ann": {"support"}, "boss": {"support", "admin"}}


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()


class Question(BaseModel):
    text: str


def current_user(user: Annotated[str | None, Header()] = None) -> SecurityIdentity | None:
    log.append(f"identity of {user}")
    return None if user is None else SecurityIdentity(user, USERS.get(user, ()))


def installed(identity: Any = current_user, *registered: Any) -> FastAPI:
    app = FastAPI()
    install(app, Container().register(*registered), identity=identity)
    return app


def as_user(name: str | None) -> dict[str, str]:
    return {} if name is None else {"user": name}


# --- who is refused, and where

STATUSES = [("boss", 200), ("ann", 403), (None, 401)]


def direct() -> FastAPI:
    app = installed()

    @app.post("/ask/{number}")
    @roles_allowed("admin")
    async def ask(number: int, question: Question, who: Inject[SecurityIdentity]) -> str:
        return f"{who} asks {question.text}"

    return app


def router_with(route_class: Any = None) -> APIRouter:
    router = APIRouter(route_class=route_class) if route_class else APIRouter()

    @router.post("/{number}")
    @roles_allowed("admin")
    async def ask(number: int, question: Question, who: Inject[SecurityIdentity]) -> str:
        return f"{who} asks {question.text}"

    return router


def included() -> FastAPI:
    app = installed()
    app.include_router(router_with(), prefix="/ask")
    return app


def nested() -> FastAPI:
    app, outer = installed(), APIRouter(prefix="/ask")
    outer.include_router(router_with(InjectRoute))
    app.include_router(outer)
    app.openapi()  # FastAPI has read the routes before the start
    return app


def mounted() -> FastAPI:
    app, inner = installed(), FastAPI()
    inner.include_router(router_with())
    app.mount("/ask", inner)
    return app


def behind_middleware() -> FastAPI:
    app, inner = installed(), FastAPI()
    inner.include_router(router_with())
    app.mount("/ask", GZipMiddleware(CORSMiddleware(inner)))
    return app


def behind_a_host() -> FastAPI:
    app, inner = installed(), FastAPI()
    inner.include_router(router_with(), prefix="/ask")
    app.router.routes.append(Host("testserver", app=inner))
    return app


@pytest.mark.parametrize(("user", "status"), STATUSES, ids=str)
@pytest.mark.parametrize("application", [direct, included, nested, mounted, behind_middleware, behind_a_host])
def test_callers_without_the_role_are_refused(
    application: Callable[[], FastAPI], user: str | None, status: int
) -> None:
    app = application()
    for _ in range(2):  # also after another start
        log.clear()
        with TestClient(app) as client:
            reply = client.post("/ask/7", json={"text": "why"}, headers=as_user(user))

        assert reply.status_code == status
        assert log == [f"identity of {user}"]
        if status == 200:
            assert reply.json() == "boss asks why"
        else:
            assert reply.headers["content-type"] == "application/problem+json"
            assert "admin" not in reply.text


@pytest.mark.parametrize(("user", "status"), [("boss", 200), ("ann", 200), (None, 401)], ids=str)
def test_authenticated_refuses_anonymous_callers(user: str | None, status: int) -> None:
    app = installed()

    @app.get("/")
    @authenticated
    def me(who: Annotated[SecurityIdentity, Depends(current_user)]) -> str:
        return who.name

    with TestClient(app) as client:
        reply = client.get("/", headers=as_user(user))

    assert reply.status_code == status
    assert log == [f"identity of {user}"]
    assert reply.headers.get("www-authenticate") == (None if status == 200 else "Bearer")


def test_permit_all_says_that_an_endpoint_is_open() -> None:
    app = installed()

    @app.get("/")
    @permit_all
    async def hours() -> str:
        return "9 to 5"

    with TestClient(app) as client:
        assert client.get("/").json() == "9 to 5"


def test_the_mark_may_be_above_the_route_decorator() -> None:
    app = installed()

    @authenticated
    @app.get("/")
    async def me(who: Inject[SecurityIdentity]) -> str:
        return who.name

    with TestClient(app) as client:
        assert client.get("/").status_code == 401
        assert client.get("/", headers=as_user("ann")).json() == "ann"


def test_a_stream_and_a_generator_are_refused_before_they_begin() -> None:
    app = installed()

    @app.get("/words")
    @authenticated
    async def words() -> AsyncIterator[str]:
        log.append("begun")
        yield "word"

    with TestClient(app) as client:
        assert client.get("/words").status_code == 401
        assert "begun" not in log
        assert client.get("/words", headers=as_user("ann")).status_code == 200


def test_a_producer_may_provide_the_identity() -> None:
    @produces(scope="request")
    def identity(request: Request) -> SecurityIdentity:
        return SecurityIdentity(request.headers.get("user", "guest"), USERS.get(request.headers.get("user", ""), ()))

    app = installed(None, identity)

    @app.post("/")
    @roles_allowed("admin")
    async def ask(question: Question) -> str:
        return question.text

    with TestClient(app) as client:
        assert client.post("/", content="{").status_code == 403
        assert client.post("/", json={"text": "why"}, headers=as_user("boss")).json() == "why"


def test_a_router_may_be_in_the_applications_of_two_containers() -> None:
    router = router_with()
    apps = [installed(), installed(lambda: SecurityIdentity("root", {"admin"}))]
    for app in apps:
        app.include_router(router, prefix="/ask")

    with TestClient(apps[0]) as first, TestClient(apps[1]) as second:
        assert first.post("/ask/1", json={"text": "x"}).status_code == 401
        assert second.post("/ask/1", json={"text": "x"}).json() == "root asks x"
        assert first.post("/ask/1", json={"text": "x"}, headers=as_user("boss")).json() == "boss asks x"


def test_a_router_of_many_applications_does_not_keep_their_containers() -> None:
    router, containers = router_with(), []
    for _ in range(3):
        app, container = FastAPI(), Container()
        install(app, container, identity=current_user)
        app.include_router(router)
        with TestClient(app) as client:
            assert client.post("/1", json={"text": "?"}, headers=as_user("ann")).status_code == 403
            assert client.post("/1", json={"text": "?"}, headers=as_user("boss")).status_code == 200
        containers.append(weakref.ref(container))
        del app, container, client
    gc.collect()

    assert [each() for each in containers] == [None] * 3


def test_an_application_that_is_mounted_in_two_applications_is_closed_in_both() -> None:
    inner = FastAPI()
    inner.include_router(router_with())
    apps = [installed(), installed()]
    for app in apps:
        app.mount("/ask", inner)

    with TestClient(apps[0]) as first, TestClient(apps[1]) as second:
        for client in (first, second):
            assert client.post("/ask/1", json={"text": "x"}).status_code == 401


# --- before what


@request_scoped
class Basket:
    def __init__(self) -> None:
        log.append("a bean")


def note() -> None:
    log.append("a dependency")


def test_nothing_else_is_read_before() -> None:
    app = installed(current_user, Basket)

    @app.post("/ask/{number}", dependencies=[Depends(note)])
    @authenticated
    async def ask(number: int, size: int, question: Question, basket: Inject[Basket]) -> str:
        return "never"

    with TestClient(app) as client:
        for headers in ({}, {"content-type": "application/json"}):
            assert client.post("/ask/none?size=large", content="{", headers=headers).status_code == 401
        assert client.post("/ask/none?size=large", json={}, headers=as_user("ann")).status_code == 422

    assert log == ["identity of None", "identity of None", "identity of ann", "a dependency"]


@pytest.mark.anyio
async def test_the_body_is_not_read() -> None:
    app, sent = direct(), []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/ask/7",
        "raw_path": b"/ask/7",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"100000000")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)

    assert sent[0]["status"] == 401


def test_another_method_is_still_not_allowed() -> None:
    with TestClient(direct()) as client:
        assert client.get("/ask/7").status_code == 405


# --- the identity


def test_exceptions_of_the_identity_come_first() -> None:
    def stranger() -> None:
        raise HTTPException(418, "who are you?")

    app = installed(stranger)

    @app.post("/")
    @authenticated
    async def ask(question: Question) -> str:
        return "never"

    with TestClient(app) as client:
        reply = client.post("/", content="{")

    assert (reply.status_code, reply.json()) == (418, {"detail": "who are you?"})


def test_invalid_headers_of_the_identity_are_a_422() -> None:
    def by_number(user: Annotated[int, Header()]) -> SecurityIdentity:
        return SecurityIdentity(str(user))

    app = installed(by_number)

    @app.post("/")
    @authenticated
    async def ask(question: Question) -> str:
        return question.text

    with TestClient(app) as client:
        reply = client.post("/", json={"text": "x"}, headers={"user": "ann"})
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"] == ["header", "user"]
        assert client.post("/", json={"text": "x"}, headers={"user": "7"}).json() == "x"


class Session:
    def __init__(self) -> None:
        log.append("session")


def session() -> Iterator[Session]:
    try:
        yield Session()
    except BaseException as error:
        log.append(f"rolled back: {type(error).__name__}")
        raise
    log.append("committed")


def user_of_session(
    session: Annotated[Session, Depends(session)], user: Annotated[str | None, Header()] = None
) -> SecurityIdentity | None:
    log.append("identity")
    return None if user is None else SecurityIdentity(user)


class Service:
    def __init__(
        self,
        session: Annotated[Session, Depends(session)],
        who: Annotated[SecurityIdentity | None, Depends(user_of_session)],
    ) -> None:
        self.session, self.who = session, who


def application_with_a_session() -> FastAPI:
    app = installed(user_of_session)

    @app.post("/{number}")
    @authenticated
    async def book(
        number: int,
        question: Question,
        session: Annotated[Session, Depends(session)],
        service: Annotated[Service, Depends()],
    ) -> bool:
        if number == 13:
            raise HTTPException(404, "no such number")
        if number == 14:
            raise ValueError("a bug")
        assert service.who is not None
        return session is service.session

    return app


def test_dependencies_that_the_identity_and_the_endpoint_share_run_once() -> None:
    with TestClient(application_with_a_session()) as client:
        assert client.post("/7", json={"text": "x"}, headers=as_user("ann")).json() is True

    assert log == ["session", "identity", "committed"]


@pytest.mark.parametrize(
    ("number", "user", "status", "error"),
    [(13, "ann", 404, "HTTPException"), (14, "ann", 500, "ValueError"), (7, None, 401, "UnauthenticatedError")],
)
def test_shared_generators_see_the_error(number: int, user: str | None, status: int, error: str) -> None:
    with TestClient(application_with_a_session(), raise_server_exceptions=False) as client:
        reply = client.post(f"/{number}", json={"text": "x"}, headers=as_user(user))

    assert reply.status_code == status
    assert log == ["session", "identity", f"rolled back: {error}"]


def test_tests_can_override_the_identity_and_its_dependencies() -> None:
    app = application_with_a_session()
    app.dependency_overrides[user_of_session] = lambda: SecurityIdentity("test")
    with TestClient(app) as client:
        assert client.post("/7", json={"text": "x"}).json() is True
    assert log.count("session") == log.count("committed")

    app.dependency_overrides = {session: Session}
    with TestClient(app) as client:
        assert client.post("/7", json={"text": "x"}, headers=as_user("ann")).json() is True


def test_headers_and_background_tasks_of_the_identity_are_kept() -> None:
    def renewed(response: Response, tasks: BackgroundTasks) -> SecurityIdentity:
        response.set_cookie("session", "renewed")
        tasks.add_task(log.append, "in the background")
        return SecurityIdentity("ann")

    app = installed(renewed)

    @app.post("/")
    @authenticated
    async def ask(question: Question) -> str:
        return question.text

    with TestClient(app) as client:
        reply = client.post("/", json={"text": "x"})

    assert reply.json() == "x"
    assert [each.split("=")[0] for each in reply.headers.get_list("set-cookie")] == ["session"]
    assert log == ["in the background"]


def test_the_identity_may_read_the_body_itself() -> None:
    async def by_signature(request: Request) -> SecurityIdentity | None:
        return SecurityIdentity("signer") if b"signed" in await request.body() else None

    app = installed(by_signature)

    @app.post("/")
    @authenticated
    async def ask(question: Question) -> str:
        return question.text

    with TestClient(app) as client:
        assert client.post("/", json={"text": "signed"}).json() == "signed"
        assert client.post("/", json={"text": "other"}).status_code == 401


def test_the_document_still_has_the_schemes_and_headers_of_the_identity() -> None:
    def by_token(
        token: Annotated[Any, Depends(HTTPBearer(auto_error=False))], tenant: Annotated[str, Header()] = ""
    ) -> SecurityIdentity | None:
        return None

    documents = []
    for mark in (authenticated, permit_all):
        app = installed(by_token)

        @app.post("/")
        @mark
        async def ask(question: Question) -> str:
            return "never"

        with TestClient(app) as client:
            documents.append(client.get("/openapi.json").json())
            assert client.post("/").status_code in (401, 422)

    assert documents[0] == documents[1]
    assert documents[0]["paths"]["/"]["post"]["security"] == [{"HTTPBearer": []}]


# --- WebSockets


def echo() -> FastAPI:
    app, router, inner = installed(), APIRouter(), FastAPI()

    async def talk(websocket: WebSocket, size: int, who: Inject[SecurityIdentity]) -> None:
        await websocket.accept()
        await websocket.send_text(f"{who} {size}")
        await websocket.close()

    app.add_api_websocket_route("/direct", roles_allowed("admin")(talk))
    router.add_api_websocket_route("/talk", talk)
    app.include_router(router, prefix="/included")
    inner.include_router(router)
    app.mount("/mounted", inner)
    return app


@pytest.mark.parametrize("path", ["/direct", "/included/talk", "/mounted/talk"])
def test_websockets_are_refused_before_they_are_accepted(path: str) -> None:
    with TestClient(echo()) as client:
        for user, status in (("ann", 403), (None, 401)):
            with pytest.raises(WebSocketDenialResponse) as refused:
                client.websocket_connect(f"{path}?size=large", headers=as_user(user)).__enter__()
            assert refused.value.status_code == status
        with client.websocket_connect(f"{path}?size=7", headers=as_user("boss")) as websocket:
            assert websocket.receive_text() == "boss 7"
        with pytest.raises(WebSocketDisconnect):
            client.websocket_connect(f"{path}?size=large", headers=as_user("boss")).__enter__()

    assert log == [f"identity of {user}" for user in ("ann", None, "boss", "boss")]


# --- problems


def facts_of(app: FastAPI) -> list[tuple[str, str]]:
    container: Container = app.state.toolbox_container
    return [(each.where, each.what) for each in container.check(models=False)]


def test_on_routes_of_starlette_a_mark_is_a_problem() -> None:
    @roles_allowed("admin")
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("open")

    @authenticated
    async def socket(websocket: WebSocket) -> None: ...

    class View(HTTPEndpoint):
        @authenticated
        async def get(self, request: Request) -> PlainTextResponse:
            return PlainTextResponse("open")

    app = installed()
    app.add_route("/view", view)
    app.router.add_websocket_route("/socket", socket)
    app.add_route("/class", View)
    app.mount("/other", Starlette(routes=[Route("/view", view)]))

    fact = "the roles have no effect here: only routes of FastAPI check them"
    places = [
        "GET/HEAD /view (view)",
        "WebSocket /socket (socket)",
        "HTTP /class (View)",
        "GET/HEAD /other/view (view)",
    ]
    assert facts_of(app) == [(place, fact) for place in places]


def test_on_a_dependency_a_mark_is_a_problem() -> None:
    @roles_allowed("admin")
    def current_admin() -> None: ...

    app = installed()

    @app.get("/", dependencies=[Depends(current_admin)])
    async def ask() -> None: ...

    assert facts_of(app) == [("GET / (ask), dependency current_admin", "the roles have no effect on a dependency")]


def test_roles_without_an_identity_are_a_problem() -> None:
    app = installed(None)

    @app.get("/")
    @authenticated
    async def ask() -> None: ...

    [(_, fact)] = facts_of(app)
    assert fact == "GET / (ask): roles are used, but no bean provides a SecurityIdentity"


def test_an_identity_from_the_declared_body_is_a_problem() -> None:
    def by_body(question: Question) -> SecurityIdentity:
        return SecurityIdentity(question.text)

    app = installed(by_body)

    @app.post("/")
    @authenticated
    async def ask() -> None: ...

    fact = "identity= reads the request's body, but endpoints with roles check the caller before it is read"
    assert facts_of(app) == [("install(app, container)", fact)]


# --- reach


class Orders:
    @tool
    @roles_allowed("support", "admin")
    def refund(self, order: int) -> str:
        return "refunded"

    @tool
    def hours(self) -> str:
        return "9 to 5"


@register_ai_service(tools=Orders)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...

    async def stream(self, text: str) -> str: ...


def test_the_roles_of_an_endpoint_are_in_its_rows_of_reach() -> None:
    app = installed(current_user, Desk)

    @app.post("/admin")
    @roles_allowed("admin")
    async def for_admins(desk: Inject[Desk]) -> str:
        return await desk.chat("x")

    @app.post("/open")
    @permit_all
    async def for_all(desk: Inject[Desk]) -> str:
        return await desk.chat("x")

    @app.post("/closed")
    @roles_allowed()
    async def for_nobody(desk: Inject[Desk]) -> str:
        return await desk.chat("x")

    rows = {
        (each.entry, each.tool): (sorted(each.roles), each.needs_identity)
        for each in app.state.toolbox_container.reach(app)
        if each.entry.startswith("POST")
    }

    assert rows == {
        ("POST /admin", "refund"): (["admin"], True),
        ("POST /admin", "hours"): (["admin"], True),
        ("POST /open", "refund"): (["admin", "support"], True),
        ("POST /open", "hours"): ([], False),
    }
