"""Roles of endpoints that are methods and objects: the nearest mark counts, as for tools."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from toolbox import Container, Inject, register_ai_service, tool
from toolbox.security import SecurityIdentity, authenticated, permit_all, roles_allowed
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import install

ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


def current_user(user: Annotated[str | None, Header()] = None) -> SecurityIdentity | None:
    return None if user is None else SecurityIdentity(user, {"admin"} if user == "boss" else {"support"})


def note() -> str:
    ran.append("ran")
    return "secret"


@roles_allowed("admin")
class Marked:
    async def view(self) -> str:
        return note()

    def on_thread(self) -> str:
        return note()

    async def __call__(self) -> str:
        return note()

    @classmethod
    async def of_class(cls) -> str:
        return note()

    @staticmethod
    async def static() -> str:
        return note()


class Inheriting(Marked):
    async def view(self) -> str:
        return note()


class Base:
    @roles_allowed("admin")
    async def view(self) -> str:
        return note()

    @roles_allowed("admin")
    async def __call__(self) -> str:
        return note()


class Overriding(Base):
    async def view(self) -> str:
        return note()

    async def __call__(self) -> str:
        return note()


class Plain(Base): ...


class Abstract(ABC):
    @abstractmethod
    @roles_allowed("admin")
    async def view(self) -> str: ...


class Concrete(Abstract):
    async def view(self) -> str:
        return note()


class Injected:
    @roles_allowed("admin")
    async def view(self, who: Inject[SecurityIdentity]) -> str:
        return note()


class InjectedOverriding(Injected):
    async def view(self, who: Inject[SecurityIdentity]) -> str:
        return note()


@roles_allowed("admin")
async def function(text: str = "") -> str:
    return note()


def logged(view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(view)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await view(*args, **kwargs)

    return call


class Wrapped(Base):
    @logged
    async def view(self) -> str:
        return note()


@permit_all
class Opened(Marked):
    @authenticated
    async def __call__(self) -> str:
        return note()


class OpenedMethod(Marked):
    @permit_all
    async def view(self) -> str:
        return note()


@roles_allowed("admin")
class Constructed:
    """A class is an endpoint too: FastAPI creates it for each request, and sends its fields."""

    def __init__(self) -> None:
        self.text = note()


CLOSED: dict[str, Callable[[], Any]] = {
    "a method of a class with a mark": lambda: Marked().view,
    "a method on a thread": lambda: Marked().on_thread,
    "an object of a class with a mark": lambda: Marked(),
    "a class method": lambda: Marked.of_class,
    "a static method": lambda: Marked.static,
    "an inherited mark of a class": lambda: Inheriting().view,
    "an inherited call": lambda: Inheriting(),
    "an overridden method": lambda: Overriding().view,
    "an overridden call": lambda: Overriding(),
    "an inherited method": lambda: Plain().view,
    "an inherited marked call": lambda: Plain(),
    "a method of an interface": lambda: Concrete().view,
    "a method with beans": lambda: Injected().view,
    "an overridden method with beans": lambda: InjectedOverriding().view,
    "a partial": lambda: functools.partial(function, text="x"),
    "a partial of a partial": lambda: functools.partial(functools.partial(function), text="x"),
    "a partial of a method": lambda: functools.partial(Overriding().view),
    "a partial of an object": lambda: functools.partial(Overriding()),
    "a wrapped overridden method": lambda: Wrapped().view,
    "a wrapper around a method": lambda: logged(Overriding().view),
    "an object that was marked itself": lambda: roles_allowed("admin")(Opened()),
    "a class": lambda: Constructed,
}


def application(endpoint: Any, how: str) -> FastAPI:
    app = FastAPI()
    install(app, Container(), identity=current_user)
    owner: Any = app if how == "direct" else APIRouter() if how == "included" else FastAPI()
    owner.add_api_route("/", endpoint, response_model=None)
    if how == "included":
        app.include_router(owner, prefix="/at")
    elif how == "mounted":
        app.mount("/at", owner)
    return app


@pytest.mark.parametrize("how", ["direct", "included", "mounted"])
@pytest.mark.parametrize("form", CLOSED)
def test_the_roles_of_a_class_hold_for_its_endpoints(form: str, how: str) -> None:
    app = application(CLOSED[form](), how)

    path = "/" if how == "direct" else "/at/"
    with TestClient(app) as client:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"user": "ann"}).status_code == 403
        assert ran == []
        assert client.get(path, headers={"user": "boss"}).status_code == 200
        assert ran == ["ran"]


@pytest.mark.parametrize(
    ("endpoint", "statuses"),
    [
        (OpenedMethod().view, (200, 200)),  # the mark of the method replaces that of its class
        (Opened().view, (200, 200)),  # a subclass replaces the mark of its base
        (Opened(), (401, 200)),
        (permit_all(functools.partial(function)), (200, 200)),  # a wrapper replaces what it wraps
    ],
    ids=["a method", "a class", "a call", "a partial"],
)
def test_the_nearest_mark_counts(endpoint: Any, statuses: tuple[int, int]) -> None:
    with TestClient(application(endpoint, "direct")) as client:
        replies = client.get("/"), client.get("/", headers={"user": "ann"})

    assert tuple(each.status_code for each in replies) == statuses


class Talking:
    @roles_allowed("admin")
    async def talk(self, websocket: WebSocket) -> None:
        note()
        await websocket.accept()
        await websocket.close()

    @roles_allowed("admin")
    async def __call__(self, websocket: WebSocket) -> None:
        await self.talk(websocket)


class TalkingOverriding(Talking):
    async def talk(self, websocket: WebSocket) -> None:
        await super().talk(websocket)

    async def __call__(self, websocket: WebSocket) -> None:
        await self.talk(websocket)


@pytest.mark.parametrize("endpoint", [TalkingOverriding().talk, TalkingOverriding()], ids=["a method", "a call"])
@pytest.mark.parametrize("how", ["direct", "included"])
def test_they_hold_for_websockets(endpoint: Any, how: str) -> None:
    app = FastAPI()
    install(app, Container(), identity=current_user)
    owner: Any = app if how == "direct" else APIRouter()
    owner.add_api_websocket_route("/", endpoint)
    if how == "included":
        app.include_router(owner)

    with TestClient(app) as client:
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/") as websocket:
            websocket.receive_text()
        assert ran == []
        boss = client.websocket_connect("/", headers={"user": "boss"})
        with pytest.raises(WebSocketDisconnect), boss as websocket:
            websocket.receive_text()
        assert ran == ["ran"]


class Unmarked:
    @staticmethod
    async def view() -> str:
        return note()


@roles_allowed("admin")
class Stricter(Unmarked): ...


def test_a_static_method_of_two_classes_is_a_problem() -> None:
    app, container = FastAPI(), Container()
    install(app, container, identity=current_user)
    app.add_api_route("/", Stricter.view)

    [problem] = container.check()

    assert problem.where == "GET / (view)"
    assert problem.what == "is the same function as Stricter.view, whose class may have other roles"
    assert problem.fix == "define Stricter.view as well, or use a method of an instance"


class Checking:
    @roles_allowed("admin")
    async def __call__(self) -> None: ...

    async def check(self) -> None: ...


@roles_allowed("admin")
class CheckingAll(Checking): ...


@pytest.mark.parametrize(
    "dependency", [Checking(), CheckingAll(), CheckingAll().check], ids=["call", "object", "method"]
)
def test_on_a_dependency_a_mark_is_a_problem_in_every_form(dependency: Any) -> None:
    app, container = FastAPI(), Container()
    install(app, container, identity=current_user)

    @app.get("/", dependencies=[Depends(dependency)])
    async def endpoint() -> None: ...

    [problem] = container.check()

    assert problem.what == "the roles have no effect on a dependency"


def test_the_roles_are_in_the_rows_of_reach() -> None:
    class Tools:
        @tool
        def look(self) -> str:
            return "x"

    @register_ai_service(tools=Tools)
    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    @roles_allowed("admin")
    class Controller:
        async def chat(self, assistant: Inject[Assistant]) -> str:
            return await assistant.chat("?")

    app, container = FastAPI(), Container(models={"default": ScriptedChatModel([])}).register(Assistant)
    install(app, container, identity=current_user)
    app.add_api_route("/chat", Controller().chat)

    rows = {each.entry: each.roles for each in container.reach(app)}

    assert rows["GET /chat"] == {"admin"}
