"""Routes that are added after the start, or hidden behind ASGI wrappers: their roles are checked, or they never run."""

import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response, WebSocket
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.routing import BaseRoute, Host, Match, Mount, Route, Router
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from toolbox import Container, IllegalConfigurationError, Inject
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox_fastapi import InjectRoute, install

ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


def current_user(user: Annotated[str | None, Header()] = None) -> SecurityIdentity | None:
    return None if user is None else SecurityIdentity(user, {"admin"} if user == "boss" else {"support"})


def installed() -> FastAPI:
    app = FastAPI()
    install(app, Container(), identity=current_user)
    return app


@roles_allowed("admin")
async def secret(who: Inject[SecurityIdentity]) -> str:
    ran.append(str(who))
    return "secret"


@roles_allowed("admin")
async def talk(websocket: WebSocket) -> None:
    ran.append("talk")
    await websocket.accept()
    await websocket.close()


@roles_allowed("admin")
async def view(request: Request) -> Response:
    ran.append("view")
    return Response("secret")


class Views(HTTPEndpoint):
    @roles_allowed("admin")
    async def get(self, request: Request) -> Response:
        ran.append("view")
        return Response("secret")


class ViewObject:
    """A view of Starlette that is an ASGI application."""

    @roles_allowed("admin")
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        ran.append("view")
        await Response("secret")(scope, receive, send)


def assert_closed(client: TestClient, path: str = "/late") -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"user": "ann"}).status_code == 403
    assert ran == []
    assert client.get(path, headers={"user": "boss"}).status_code == 200
    assert ran == ["boss"]


# --- added after the start


def add_to_app(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    app.get("/late")(secret)


def append_a_route(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    app.router.routes.append(APIRoute("/late", secret))


def include_a_router(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    router = APIRouter()
    router.get("/late")(secret)
    app.include_router(router)


def add_to_an_included_router(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    known.get("/late")(secret)


def include_in_an_included_router(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    router = APIRouter(route_class=InjectRoute)
    router.get("/late")(secret)
    known.include_router(router)


def mount_an_application(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    inner = FastAPI()
    inner.get("/")(secret)
    app.mount("/late", inner)


def mount_a_router(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    router = APIRouter()
    router.get("/late")(secret)
    app.mount("/", router)


def mount_at_a_host(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    inner = FastAPI()
    inner.get("/late")(secret)
    app.router.routes.insert(0, Host("testserver", inner))


def add_to_a_mounted_application(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    mounted.get("/late")(secret)


def include_in_a_mounted_application(app: FastAPI, known: APIRouter, mounted: FastAPI) -> None:
    router = APIRouter()
    router.get("/late")(secret)
    mounted.include_router(router)


LATER = [
    add_to_app,
    append_a_route,
    include_a_router,
    add_to_an_included_router,
    include_in_an_included_router,
    mount_an_application,
    mount_a_router,
    mount_at_a_host,
    add_to_a_mounted_application,
    include_in_a_mounted_application,
]


def with_a_router_and_a_mounted_application(**options: Any) -> tuple[FastAPI, APIRouter, FastAPI]:
    app, known, mounted = FastAPI(**options), APIRouter(), FastAPI()
    install(app, Container(), identity=current_user)
    known.get("/known")(lambda: "known")
    known.add_api_websocket_route("/talk", talk)
    app.include_router(known)
    app.mount("/at", mounted)
    return app, known, mounted


def path_of(add: Callable[..., None]) -> str:
    return "/at/late" if "a_mounted_application" in add.__name__ else "/late"


@pytest.mark.parametrize("add", LATER)
def test_roles_hold_on_routes_that_are_added_after_the_start(add: Callable[..., None]) -> None:
    app, known, mounted = with_a_router_and_a_mounted_application()

    with TestClient(app) as client:
        assert client.get("/known").json() == "known"
        add(app, known, mounted)
        assert_closed(client, path_of(add))


@pytest.mark.parametrize("add", LATER)
def test_roles_hold_on_routes_that_the_lifespan_adds(add: Callable[..., None]) -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        add(app, known, mounted)
        yield

    app, known, mounted = with_a_router_and_a_mounted_application(lifespan=lifespan)
    with TestClient(app) as client:
        assert_closed(client, path_of(add))


def test_roles_hold_without_a_lifespan() -> None:
    app, container = FastAPI(), Container()
    install(app, container, identity=current_user)
    app.get("/late")(secret)

    with container:
        assert_closed(TestClient(app))


def test_a_route_in_place_of_an_equal_one_is_checked() -> None:
    app = installed()
    app.get("/late")(secret)

    with TestClient(app) as client:
        assert client.get("/late").status_code == 401
        app.router.routes[-1] = APIRoute("/late", secret)
        assert_closed(client)


def test_the_other_routes_of_a_router_stay_closed_when_one_is_added() -> None:
    app, known, _ = with_a_router_and_a_mounted_application()
    known.get("/late")(secret)

    with TestClient(app) as client:
        for _ in range(2):
            assert client.get("/late").status_code == 401
            with pytest.raises(WebSocketDisconnect), client.websocket_connect("/talk") as websocket:
                websocket.receive_text()
            known.get("/more")(lambda: "more")
            assert client.get("/more").json() == "more"
    assert ran == []


def test_roles_hold_on_a_websocket_that_is_added_after_the_start() -> None:
    app = installed()
    with TestClient(app) as client:
        app.add_api_websocket_route("/late", talk)
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/late") as websocket:
            websocket.receive_text()
        assert ran == []


def test_a_route_that_a_middleware_adds_is_checked_in_the_same_request() -> None:
    app = installed()

    @app.middleware("http")
    async def adding(request: Request, call_next: Any) -> Response:
        if not any(getattr(each, "path", None) == "/late" for each in app.routes):
            app.get("/late")(secret)
        response: Response = await call_next(request)
        return response

    with TestClient(app) as client:
        assert_closed(client)


# --- what cannot be checked


def starlette_view(app: FastAPI) -> None:
    app.add_route("/late", view)


def starlette_views(app: FastAPI) -> None:
    app.add_route("/late", Views)  # type: ignore[arg-type]


def starlette_object(app: FastAPI) -> None:
    app.router.routes.append(Route("/late", ViewObject()))


def starlette_partial(app: FastAPI) -> None:
    app.add_route("/late", functools.partial(view))


def starlette_in_a_router(app: FastAPI) -> None:
    router = APIRouter()
    router.add_route("/late", view)
    app.include_router(router)


def starlette_application(app: FastAPI) -> None:
    app.mount("/late", Starlette(routes=[Route("/", view)]))


def starlette_router(app: FastAPI) -> None:
    app.router.routes.append(Mount("/late", Router([Route("/", view)])))


def marked_dependency(app: FastAPI) -> None:
    @roles_allowed("admin")
    async def check() -> None: ...

    @app.get("/late", dependencies=[Depends(check)])
    async def endpoint() -> str:
        ran.append("endpoint")
        return "secret"


UNCHECKED = [
    starlette_view,
    starlette_views,
    starlette_object,
    starlette_partial,
    starlette_in_a_router,
    starlette_application,
    starlette_router,
    marked_dependency,
]


@pytest.mark.parametrize("add", UNCHECKED)
def test_an_added_route_whose_roles_cannot_be_checked_answers_500_and_says_why(
    add: Callable[[FastAPI], None], caplog: pytest.LogCaptureFixture
) -> None:
    app = installed()
    with TestClient(app, raise_server_exceptions=False, headers={"user": "boss"}) as client:
        add(app)
        with caplog.at_level(logging.ERROR, "toolbox.fastapi"):
            replies = [client.get("/late") for _ in range(2)]

    assert [each.status_code for each in replies] == [500, 500]
    assert ran == []
    assert "the roles have no effect" in caplog.text
    assert all("roles" not in each.text for each in replies)


def test_an_added_websocket_of_starlette_with_roles_never_runs(caplog: pytest.LogCaptureFixture) -> None:
    app = installed()
    with TestClient(app) as client:
        app.router.add_websocket_route("/late", talk)
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/late") as websocket:
            websocket.receive_text()

    assert ran == []
    assert "the roles have no effect" in caplog.text


# --- hidden behind ASGI wrappers


class Wrapper:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._inner({**scope}, receive, send)


class Slotted:
    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.target(scope, receive, send)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        await self.target(scope, receive, send)


class Choosing:
    def __init__(self, **choices: Any) -> None:
        self.choices = choices

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.choices["it"](scope, receive, send)


def closure(inner: Any) -> Any:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    return call


def default(inner: Any) -> Any:
    async def call(scope: Any, receive: Any, send: Any, to: Any = inner) -> None:
        await to(scope, receive, send)

    return call


async def pass_on(inner: Any, scope: Any, receive: Any, send: Any) -> None:
    await inner(scope, receive, send)


module_wide = FastAPI()
module_wide.get("/late")(secret)


async def by_its_name(scope: Any, receive: Any, send: Any) -> None:
    await module_wide(scope, receive, send)


class Dispatching(BaseRoute):
    """A route of the program's own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return Match.FULL, {}

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        await self.inner(scope, receive, send)


class Beside:
    """A middleware that passes some requests to another application."""

    def __init__(self, app: Any, other: Any) -> None:
        self.app, self.other = app, other

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        chosen = self.other if scope["type"] == "http" and scope["path"] == "/late" else self.app
        await chosen(scope, receive, send)


def hide_in_middleware(app: FastAPI, inner: Any) -> None:
    app.add_middleware(Beside, other=inner)


def hide_in_a_route(app: FastAPI, inner: Any) -> None:
    app.router.routes.append(Dispatching(inner))


def hide_in_a_view(app: FastAPI, inner: Any) -> None:
    app.router.routes.append(Route("/late", Wrapper(inner)))


def hide_in_two_wrappers(app: FastAPI, inner: Any) -> None:
    app.mount("/", Wrapper(closure(Slotted(inner))))


def mounting(wrap: Callable[[Any], Any]) -> Callable[[FastAPI, Any], None]:
    def hide(app: FastAPI, inner: Any) -> None:
        app.mount("/", wrap(inner))

    return hide


HIDDEN = {
    "an attribute": mounting(Wrapper),
    "a slot": mounting(Slotted),
    "a method": mounting(lambda inner: Slotted(inner).handle),
    "a dictionary": mounting(lambda inner: Choosing(it=inner)),
    "a closure": mounting(closure),
    "a default": mounting(default),
    "a partial": mounting(lambda inner: functools.partial(pass_on, inner)),
    "a name of the module": mounting(lambda inner: by_its_name),
    "middleware": hide_in_middleware,
    "a route": hide_in_a_route,
    "a view": hide_in_a_view,
    "wrappers": hide_in_two_wrappers,
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_roles_hold_behind_asgi_wrappers(hide: Callable[[FastAPI, Any], None]) -> None:
    app, inner = installed(), FastAPI()
    inner.get("/late")(secret)
    hide(app, inner)

    with TestClient(app) as client:
        assert_closed(client)


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_routes_that_are_added_behind_asgi_wrappers_are_checked(hide: Callable[[FastAPI, Any], None]) -> None:
    app, inner = installed(), FastAPI()
    hide(app, inner)

    with TestClient(app, raise_server_exceptions=False) as client:
        client.get("/other")
        inner.get("/late")(secret)
        assert_closed(client)


def test_a_hidden_view_of_starlette_with_roles_is_a_problem() -> None:
    app = installed()
    app.mount("/", Wrapper(Starlette(routes=[Route("/late", view)])))

    with pytest.raises(IllegalConfigurationError, match="the roles have no effect here"), TestClient(app):
        pass


def test_an_application_around_itself_is_read_once() -> None:
    app, inner = installed(), FastAPI()
    inner.get("/late")(secret)
    inner.mount("/again", Wrapper(inner))
    inner.mount("/outside", Wrapper(app))
    app.mount("/", closure(inner))

    with TestClient(app) as client:
        assert_closed(client)
