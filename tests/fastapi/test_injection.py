"""`Inject[T]` wherever FastAPI calls something, without a trace in OpenAPI; missing beans are seen at start."""

import importlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import fastapi
import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from pydantic import BaseModel
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute

from toolbox import (
    Container,
    IllegalConfigurationError,
    Instance,
    Named,
    application_scoped,
    produces,
    register_ai_service,
    request_scoped,
)
from toolbox.security import SecurityIdentity, authenticated
from toolbox_fastapi import Inject, InjectRoute, install

pytestmark = pytest.mark.anyio


class Greeter(Protocol):
    def greet(self, name: str) -> str: ...


@application_scoped
class English:
    def greet(self, name: str) -> str:
        return f"Hello {name}"


@request_scoped
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


@produces(scope="application", name="motto")
def motto() -> str:
    return "onwards"


class Missing: ...


def container() -> Container:
    return Container().register(English, Counter, motto).bind(Greeter, English)


def application() -> FastAPI:
    app = FastAPI()
    install(app, container())
    return app


class Ask(BaseModel):
    name: str


def declare(routes: Any) -> None:
    """The same endpoints on whatever takes routes."""

    def counted(counter: Inject[Counter]) -> int:
        return counter.next()

    async def twice(once: Annotated[int, Depends(counted)], counter: Inject[Counter]) -> int:
        return once + counter.next()

    @routes.post("/async/{times}")
    async def asynchronous(ask: Ask, times: int, greeter: Inject[Greeter], loud: bool = False) -> str:
        """Greets."""
        return " ".join([greeter.greet(ask.name)] * times) + ("!" if loud else "")

    @routes.post("/sync/{times}")
    def synchronous(greeter: Inject[Greeter], ask: Ask, times: int, loud: bool = False) -> str:
        return " ".join([greeter.greet(ask.name)] * times) + ("!" if loud else "")

    @routes.get("/depending")
    async def depending(number: Annotated[int, Depends(twice)], counter: Inject[Counter]) -> list[int]:
        return [number, counter.next()]

    @routes.get("/forms")
    async def forms(
        named: Inject[Annotated[str, Named("motto")]],
        optional: Inject[Missing | None],
        every: Inject[list[English]],
        instance: Inject[Instance[Counter]],
    ) -> list[Any]:
        return [named, optional, len(every), instance.get().next()]

    @routes.get("/generator")
    async def generator(greeter: Inject[Greeter]) -> AsyncIterator[str]:
        yield greeter.greet("you")


async def ask_all(client: Any, prefix: str = "") -> None:
    body = {"name": "you"}
    assert (await client.post(f"{prefix}/async/2?loud=true", json=body)).json() == "Hello you Hello you!"
    assert (await client.post(f"{prefix}/sync/1", json=body)).json() == "Hello you"
    assert (await client.get(f"{prefix}/depending")).json() == [3, 3]
    assert (await client.get(f"{prefix}/forms")).json() == ["onwards", None, 1, 1]
    assert (await client.get(f"{prefix}/generator")).text.strip() == '"Hello you"'


async def test_an_applications_own_routes_are_injected(running) -> None:
    app = application()
    declare(app)

    async with running(app) as client:
        await ask_all(client)


@pytest.mark.parametrize("router", [APIRouter, lambda: APIRouter(route_class=InjectRoute)], ids=["plain", "ours"])
async def test_routers_are_injected_also_when_included_early(running, router: Any) -> None:
    app, early, inner, outer, late = application(), router(), router(), router(), router()
    app.include_router(early, prefix="/early")
    declare(early)
    declare(inner)
    outer.include_router(inner, prefix="/inner")
    app.include_router(outer, prefix="/outer")
    declare(late)

    async with running(app) as client:
        app.include_router(late, prefix="/late")
        await ask_all(client, "/early")
        await ask_all(client, "/outer/inner")
        await ask_all(client, "/late")


async def test_routes_made_before_install_are_injected(running) -> None:
    app = FastAPI()
    declare(app)
    install(app, container())

    async with running(app) as client:
        await ask_all(client)


async def test_mounted_applications_are_injected(running) -> None:
    app, mounted = application(), FastAPI()
    declare(mounted)
    app.mount("/mounted", mounted)

    async with running(app) as client:
        await ask_all(client, "/mounted")
        late = FastAPI()
        declare(late)
        app.mount("/late", late)
        await ask_all(client, "/late")


async def test_a_mounted_application_can_have_its_own_container(running) -> None:
    class Own: ...

    app, mounted = application(), FastAPI()
    own = container().register(Own)
    install(mounted, own)
    declare(mounted)
    app.mount("/mounted", mounted)
    declare(app)

    @mounted.get("/own")
    async def endpoint(own: Inject[Own]) -> str:
        return type(own).__name__

    async with mounted.router.lifespan_context(mounted), running(app) as client:
        assert (await client.get("/mounted/own")).json() == "Own"
        await ask_all(client, "/mounted")
        await ask_all(client)


@pytest.mark.parametrize("plain", [True, False], ids=["router", "application"])
async def test_websockets_are_injected(connect, plain: bool) -> None:
    app = application()
    routes: Any = APIRouter() if plain else app

    def counted(counter: Inject[Counter]) -> int:
        return counter.next()

    @routes.websocket("/ws")
    async def conversation(
        websocket: WebSocket, greeter: Inject[Greeter], counter: Inject[Counter], first: int = Depends(counted)
    ) -> None:
        await websocket.accept()
        async for name in websocket.iter_text():
            await websocket.send_text(f"{greeter.greet(name)} {counter.next()}")

    if plain:
        app.include_router(routes)

    async with app.router.lifespan_context(app):
        client = connect(app, "/ws", "websocket")
        task = client.start()
        client.say({"type": "websocket.receive", "text": "you"})
        assert (await client.sent("websocket.send"))["text"] == "Hello you 2"
        client.leave()
        await task


def test_injected_parameters_are_not_in_the_openapi_document() -> None:
    class Anything: ...

    def declare_plainly(routes: Any) -> None:
        async def twice() -> int:
            return 0

        @routes.post("/async/{times}")
        async def asynchronous(ask: Ask, times: int, loud: bool = False) -> str:
            """Greets."""
            return ""

        @routes.post("/sync/{times}")
        def synchronous(ask: Ask, times: int, loud: bool = False) -> str:
            return ""

        @routes.get("/depending")
        async def depending(number: Annotated[int, Depends(twice)]) -> list[int]:
            return []

        @routes.get("/forms")
        async def forms() -> list[Any]:
            return []

        @routes.get("/generator")
        async def generator() -> AsyncIterator[str]:
            yield ""

    ours, plain = application(), FastAPI()
    for app, declares in ((ours, declare), (plain, declare_plainly)):
        router = APIRouter()
        declares(app)
        declares(router)
        app.include_router(router, prefix="/router")

    assert ours.openapi() == plain.openapi()


async def test_a_missing_bean_of_an_endpoint_is_a_problem_at_start() -> None:
    app, mounted, router, ours = application(), FastAPI(), APIRouter(), APIRouter(route_class=InjectRoute)

    def depends(inner: Inject[Missing]) -> None: ...

    @app.get("/own")
    async def own(wanted: Inject[Missing]) -> None: ...

    @router.get("/routed")
    def routed(wanted: Inject[Missing], other: Inject[Counter], _: None = Depends(depends)) -> None: ...

    @ours.get("/ours")
    def ours_too(wanted: Inject[Missing | None], other: Inject[Instance[Missing]]) -> None: ...

    @mounted.websocket("/ws")
    async def conversation(websocket: WebSocket, wanted: Inject[Missing]) -> None: ...

    app.include_router(router, prefix="/in")
    app.include_router(ours)
    app.mount("/mounted", mounted)

    with pytest.raises(IllegalConfigurationError) as caught:
        async with app.router.lifespan_context(app):
            pass

    assert [(each.where, each.what) for each in caught.value.problems] == [
        (where, "no bean provides Missing")
        for where in (
            "GET /own (own), parameter 'wanted'",
            "GET /in/routed (routed), parameter 'wanted'",
            "GET /in/routed (routed), dependency depends, parameter 'inner'",
            "GET /ours (ours_too), parameter 'other'",
            "WebSocket /mounted/ws (conversation), parameter 'wanted'",
        )
    ]


async def test_problems_of_beans_and_endpoints_are_reported_together() -> None:
    class Needy:
        def __init__(self, missing: Missing) -> None: ...

    app = FastAPI()
    install(app, Container().register(Needy))

    @app.get("/own")
    async def own(wanted: Inject[Missing]) -> None: ...

    with pytest.raises(IllegalConfigurationError) as caught:
        async with app.router.lifespan_context(app):
            pass

    assert [each.where for each in caught.value.problems] == ["Needy.missing", "GET /own (own), parameter 'wanted'"]


async def test_a_missing_bean_leaves_the_default_of_the_parameter(running) -> None:
    app = application()

    @app.get("/")
    async def endpoint(missing: Inject[Missing] = "none", greeter: Inject[Greeter] = None) -> str:  # type: ignore[assignment]
        return f"{missing}, {greeter.greet('you')}"

    async with running(app) as client:
        assert (await client.get("/")).json() == "none, Hello you"


@pytest.mark.parametrize("included_first", [True, False])
@pytest.mark.parametrize("greeter", [None, English()], ids=["without the bean", "with it"])
async def test_a_missing_bean_leaves_the_default_in_a_fastapi_dependency(
    running, included_first: bool, greeter: English | None
) -> None:
    router = APIRouter()

    def greeting(greeter: Inject[Greeter] = None) -> Greeter | None:  # type: ignore[assignment]
        return greeter

    @router.get("/async")
    async def endpoint(
        of: Annotated[Greeter, Depends(greeting)],
        missing: Inject[Missing] = 1,  # type: ignore[assignment]
        again: Inject[Missing] = 2,  # type: ignore[assignment]
    ) -> Any:
        return [missing, again, of is greeter]

    @router.get("/def")
    def on_thread(missing: Inject[Missing] = 3, greeter: Inject[Greeter] = None) -> Any:  # type: ignore[assignment]
        return [missing, greeter is not None]

    app = FastAPI()
    if included_first:
        app.include_router(router)
    beans = Container()
    if greeter is not None:
        beans.register_instance(greeter, as_type=Greeter)
    install(app, beans)
    if not included_first:
        app.include_router(router, prefix="/v1")

    prefix = "" if included_first else "/v1"
    async with running(app) as client:
        assert (await client.get(f"{prefix}/async")).json() == [1, 2, True]
        assert (await client.get(f"{prefix}/def")).json() == [3, greeter is not None]


async def test_a_missing_bean_leaves_the_default_on_a_websocket(connect) -> None:
    app = application()

    @app.websocket("/")
    async def endpoint(websocket: WebSocket, missing: Inject[Missing] = "none") -> None:  # type: ignore[assignment]
        await websocket.accept()
        await websocket.send_text(missing)

    async with app.router.lifespan_context(app):
        connection = connect(app, "/", kind="websocket")
        await connection.start()
        assert (await connection.sent("websocket.send"))["text"] == "none"


@pytest.mark.parametrize("name", ["toolbox", "toolbox_fastapi"])
@pytest.mark.parametrize("plain", [False, True], ids=["a route of the application", "a plain router"])
async def test_inject_of_either_package_works_in_endpoints(name: str, plain: bool, running) -> None:
    inject = importlib.import_module(name).Inject
    app = application()
    routes: Any = APIRouter() if plain else app

    def double(counter: Any) -> int:
        return counter.next() * 2

    async def endpoint(counter: Any, missing: Any, doubled: Any) -> list[Any]:
        return [type(counter).__name__, missing, doubled]

    double.__annotations__["counter"] = inject[Counter]
    endpoint.__annotations__ |= {
        "counter": inject[Counter],
        "missing": inject[Missing | None],
        "doubled": Annotated[int, Depends(double)],
    }
    routes.get("/either")(endpoint)
    if plain:
        app.include_router(routes)

    async with running(app) as client:
        assert (await client.get("/either")).json() == ["Counter", None, 2]
    assert "parameters" not in app.openapi()["paths"]["/either"]["get"]


def test_inject_works_when_fastapi_is_imported_after_the_annotation_was_evaluated() -> None:
    program = """
import sys
from toolbox import Container, Inject, Named
from typing import Annotated

class Greeter:
    word = "hello"

async def greet(greeter: Inject[Greeter], other: Inject[Annotated[Greeter, Named("other")]]) -> str:
    return greeter.word + other.word

assert "fastapi" not in sys.modules
from fastapi import FastAPI
from fastapi.testclient import TestClient
from toolbox_fastapi import install

other = Greeter()
other.word = " again"
app = FastAPI()
install(app, Container().register(Greeter).register_instance(other, name="other"))
app.get("/")(greet)
with TestClient(app) as client:
    assert client.get("/").json() == "hello again", client.get("/").text
"""
    subprocess.run([sys.executable, "-c", program], check=True)


FASTAPI, OURS, THEIR_INSTALL = (
    "from fastapi import APIRouter, Depends, FastAPI",
    "from toolbox import Container, Inject, application_scoped",
    "from toolbox_fastapi import install",
)
GREETER = "@application_scoped\nclass Greeter:\n    word = 'hello'"
ALIAS = "Wanted = Inject[Greeter]"
ROUTES = """
routes, app = APIRouter(), FastAPI()
@app.get("/")
def greet(greeter: Inject[Greeter]) -> str: return greeter.word
def word_of(greeter: Inject[Greeter]) -> str: return greeter.word
@routes.get("/routed")
def greet_too(greeter: Inject[Greeter], word: str = Depends(word_of)) -> str: return word
app.include_router(routes)
"""
INSTALLED = "install(app, Container().register(Greeter))"
SERVED = """
from fastapi.testclient import TestClient
with TestClient(app) as client:
    print(client.get("/").json(), client.get("/routed").json())
"""


@pytest.mark.parametrize(
    "order",
    [
        (FASTAPI, OURS, GREETER, "", THEIR_INSTALL),
        (OURS, FASTAPI, GREETER, "", THEIR_INSTALL),
        (OURS, GREETER, FASTAPI, "", THEIR_INSTALL),
        (THEIR_INSTALL, OURS, GREETER, FASTAPI, ""),
        (OURS, GREETER, THEIR_INSTALL, FASTAPI, ""),
        ("from __future__ import annotations", FASTAPI, OURS, GREETER, "", THEIR_INSTALL),
    ],
)
def test_inject_works_in_each_order_of_imports(order: tuple[str, ...]) -> None:
    *before, own, after = order
    program = "\n".join((*before, own, ROUTES, after, INSTALLED, SERVED))

    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)

    assert done.stdout == "hello hello\n", done.stderr


def test_an_annotation_from_before_fastapi_leads_to_toolbox_fastapi() -> None:
    routes = ROUTES.replace("Inject[Greeter]", "Wanted")
    program = "\n".join((OURS, GREETER, ALIAS, FASTAPI, routes))

    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)

    assert "Inject[Greeter]: toolbox_fastapi was not loaded before this annotation" in done.stderr
    assert "import toolbox_fastapi above it" in done.stderr


def test_inject_does_not_load_fastapi_nor_the_names_of_installed_packages() -> None:
    loaded = "print({'fastapi', 'importlib.metadata', 'toolbox_fastapi'} & sys.modules.keys())"
    program = "\n".join(("import sys", "from toolbox.parameters import Inject", "Inject[int]", loaded))

    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert done.stdout == "set()\n"


def text(annotation: str) -> Any:
    """An endpoint whose annotation is text, as `from __future__ import annotations` makes it."""

    async def endpoint(wanted: Any) -> str:
        return type(wanted).__name__

    endpoint.__annotations__["wanted"] = annotation
    return endpoint


async def test_annotations_can_be_strings_with_local_names(running) -> None:
    class Local: ...

    class Body(BaseModel):
        number: int

    app = FastAPI()
    install(app, Container().register(Local, Counter))

    async def endpoint(body: Any, local: Any, counter: Any) -> str:
        return f"{type(local).__name__} {body.number} {counter.next()}"

    endpoint.__annotations__ |= {"body": "Body", "local": "Inject[Local]", "counter": "Inject[Counter]"}
    app.post("/")(endpoint)

    router = APIRouter()
    router.get("/plain")(text("Inject[Counter]"))
    app.include_router(router)

    async with running(app) as client:
        assert (await client.post("/", json={"number": 7})).json() == "Local 7 1"
        assert (await client.get("/plain")).json() == "Counter"


async def test_an_unresolved_inject_is_not_read_from_the_request() -> None:
    app, router = application(), APIRouter()

    with pytest.raises(IllegalConfigurationError, match=r"endpoint, parameter 'wanted': .*'Inject\[Nowhere\]'"):
        app.get("/")(text("Inject[Nowhere]"))

    router.get("/plain")(text("Inject[Nowhere]"))
    app.include_router(router)
    with pytest.raises(IllegalConfigurationError, match=r"GET /plain \(endpoint\), parameter 'wanted'"):
        async with app.router.lifespan_context(app):
            pass


@request_scoped
@dataclass
class Cart:
    """A bean that FastAPI could also read from a request."""

    owner: str = "nobody"


@register_ai_service
class Desk(Protocol):
    async def answer(self, question: str) -> str: ...


def test_a_bean_without_inject_is_not_read_from_the_request() -> None:
    app, beans, router = FastAPI(), container(), APIRouter()
    install(app, beans)

    async def read_owner(cart: Cart) -> str:
        return cart.owner

    async def read_inner(owner: Annotated[str, Depends(read_owner)]) -> str:
        return owner

    @router.post("/endpoint")
    async def endpoint(cart: Cart) -> str:
        return cart.owner

    @router.post("/service")
    async def service(desk: Annotated[Desk, Depends(Desk)]) -> None: ...

    @app.post("/dependency")
    async def dependency(owner: Annotated[str, Depends(read_inner)]) -> str:
        return owner

    @app.post("/body")
    async def body(cart: Annotated[Cart, fastapi.Body()]) -> str:
        return cart.owner

    with pytest.raises(IllegalConfigurationError, match="parameter 'cart': Cart is a bean, but FastAPI would read it"):
        app.post("/own")(endpoint)

    app.include_router(router)

    assert [(each.where, each.what) for each in beans.check()] == [
        (where, f"{name} is a bean, but FastAPI would read it from the request")
        for where, name in (
            ("POST /dependency (dependency), dependency read_inner, dependency read_owner, parameter 'cart'", "Cart"),
            ("POST /endpoint (endpoint), parameter 'cart'", "Cart"),
            ("POST /service (service), parameter 'desk'", "Desk"),
        )
    ]


async def test_a_bean_without_inject_in_the_identity_of_guarded_endpoints_is_a_problem_at_start() -> None:
    async def read_cart(cart: Cart) -> str:
        return cart.owner

    async def find_caller(owner: Annotated[str, Depends(read_cart)]) -> SecurityIdentity:
        return SecurityIdentity(owner)

    app = FastAPI()
    install(app, Container(), identity=find_caller)

    @app.get("/")
    @authenticated
    async def endpoint() -> None: ...

    with pytest.raises(IllegalConfigurationError, match=r"dependency .*parameter 'cart': Cart is a bean, but FastAPI"):
        async with app.router.lifespan_context(app):
            pass


async def test_an_application_without_a_container_raises_a_clear_error(running) -> None:
    app = FastAPI()

    @app.get("/")
    async def endpoint(greeter: Inject[Greeter]) -> None: ...

    seen: list[Exception] = []

    @app.exception_handler(IllegalConfigurationError)
    async def see(request: Any, error: IllegalConfigurationError) -> Any:
        seen.append(error)
        raise error

    async with running(app) as client:
        await client.get("/")

    assert "toolbox_fastapi.install(app, container)" in str(seen[0])


async def test_decorated_endpoints_are_unchanged_functions() -> None:
    app = application()

    @app.get("/")
    async def endpoint(greeter: Inject[Greeter]) -> str:
        return greeter.greet("you")

    assert await endpoint(English()) == "Hello you"


async def test_fakes_of_the_container_reach_endpoints(running) -> None:
    class French:
        def greet(self, name: str) -> str:
            return f"Bonjour {name}"

    app = FastAPI()
    beans = container()
    install(app, beans)
    router = APIRouter()
    declare(router)
    declare(app)
    app.include_router(router, prefix="/router")

    async with running(app) as client:
        with beans.override(Greeter, French()):
            assert (await client.post("/async/1", json={"name": "you"})).json() == "Bonjour you"
            assert (await client.post("/router/sync/1", json={"name": "you"})).json() == "Bonjour you"
        await ask_all(client)


async def test_the_applications_lifespan_runs_inside_the_containers() -> None:
    beans = container()
    happened: list[str] = []

    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        happened.append((await beans.aget(Greeter)).greet("start"))
        yield {"state": "kept"}
        happened.append((await beans.aget(Greeter)).greet("end"))

    from contextlib import asynccontextmanager

    app = FastAPI(lifespan=asynccontextmanager(lifespan))
    install(app, beans)

    async with app.router.lifespan_context(app) as state:
        assert state == {"state": "kept"}

    assert happened == ["Hello start", "Hello end"]


async def test_an_application_can_be_started_again(running) -> None:
    app = application()
    declare(app)

    for _ in range(2):
        async with running(app) as client:
            await ask_all(client)


async def test_inject_in_a_view_of_starlette_is_a_problem_at_start() -> None:
    app = application()

    async def view(request: Request, counter: Inject[Counter]) -> JSONResponse:
        return JSONResponse(counter.next())

    async def socket(websocket: WebSocket, counter: "Inject[Counter]") -> None: ...

    class Views(HTTPEndpoint):
        async def get(self, request: Request, motto: Annotated[Inject[str], "kept"]) -> JSONResponse:
            return JSONResponse(motto)

    def plain(request: Request) -> JSONResponse:
        return JSONResponse("plain")

    app.add_route("/view", view)
    app.router.routes.append(WebSocketRoute("/socket", socket))
    app.add_route("/views", Views)
    app.add_route("/plain", plain)

    with pytest.raises(IllegalConfigurationError) as caught:
        async with app.router.lifespan_context(app):
            pass

    assert [each.where for each in caught.value.problems] == [
        "GET/HEAD /view (view), parameter 'counter'",
        "WebSocket /socket (socket), parameter 'counter'",
        "HTTP /views (Views), parameter 'motto'",
    ]
    assert all("add_api_route" in each.fix for each in caught.value.problems)
