"""`@toolbox` on an endpoint adds tools to the services it calls directly, and to nothing else."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from fastapi.responses import StreamingResponse

from toolbox import (
    ChatRequest,
    Container,
    IllegalConfigurationError,
    MemoryId,
    call_scoped,
    register_ai_service,
    request_scoped,
    tool,
    toolbox,
    user_message,
)
from toolbox.runs import InMemoryRunStore, RunAnswerError, RunIncompatibleError, approve
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, InjectRoute, install, send_stream, sse

pytestmark = pytest.mark.anyio


@request_scoped
class User:
    name = "me"


@call_scoped
class RefundTools:
    def __init__(self, user: User) -> None:
        self.user = user

    @tool
    def refund(self, order: int) -> str:
        """Refunds an order."""
        return f"{order} refunded to {self.user.name}"


@tool
def greet() -> str:
    return "Hello"


@register_ai_service
class Helper(Protocol):
    @tool
    async def help(self, question: str) -> str: ...


@register_ai_service(tools=[greet, Helper])
class Assistant(Protocol):
    async def chat(self, text: str) -> str: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...


@register_ai_service
class SyncAssistant(Protocol):
    def chat(self, text: str) -> str: ...


class Refusing(ScriptedChatModel):
    """A model that must not be asked."""

    def __init__(self) -> None:
        super().__init__([])


def offered(request: ChatRequest) -> list[str]:
    return [each.name for each in request.tool_specifications]


def answering(asked: list[list[str]]) -> ScriptedChatModel:
    """Answers `ok`, and keeps what it was offered."""

    def answer(request: ChatRequest) -> str:
        asked.append(offered(request))
        return "ok"

    return ScriptedChatModel([answer] * 10)


def application(model: ScriptedChatModel) -> FastAPI:
    app = FastAPI()
    container = Container(models={"default": model}).register(User, Assistant, SyncAssistant, Helper)
    install(app, container)
    return app


def declare(routes: Any) -> None:
    @routes.get("/awaited")
    @toolbox(RefundTools)
    async def awaited(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("go")

    @routes.get("/threaded")
    @toolbox(RefundTools)
    def threaded(assistant: Inject[SyncAssistant]) -> str:
        return assistant.chat("go")

    @routes.get("/streamed")
    @toolbox(RefundTools)
    async def streamed(assistant: Inject[Assistant]) -> StreamingResponse:
        return StreamingResponse(assistant.stream("go"))

    @routes.get("/events")
    @toolbox(RefundTools)
    async def events(assistant: Inject[Assistant]) -> Any:
        return sse(assistant.stream("go"))

    @routes.get("/generated")
    @toolbox(RefundTools)
    async def generated(assistant: Inject[Assistant]) -> AsyncIterator[str]:
        async for text in assistant.stream("go"):
            yield text

    @routes.get("/without")
    async def without(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("go")


PATHS = ["/awaited", "/threaded", "/streamed", "/events", "/generated"]


@pytest.mark.parametrize("routes", [None, APIRouter, lambda: APIRouter(route_class=InjectRoute)], ids=["app", "r", "o"])
@pytest.mark.parametrize("path", PATHS)
async def test_an_endpoints_tools_are_added_to_the_services_it_calls(running, path: str, routes: Any) -> None:
    asked: list[list[str]] = []
    app = application(answering(asked))
    router = app if routes is None else routes()
    declare(router)
    if routes is not None:
        app.include_router(router)

    async with running(app) as client:
        assert "ok" in (await client.get(path)).text
        assert (await client.get("/without")).json() == "ok"

    own = [] if path == "/threaded" else ["greet", "help"]
    assert asked == [[*own, "refund"], ["greet", "help"]]


@pytest.mark.parametrize("plain", [False, True], ids=["own route", "plain router"])
async def test_tools_of_an_endpoint_without_injected_parameters_are_added(running, plain: bool) -> None:
    asked: list[list[str]] = []
    app = FastAPI()
    container = Container(models={"default": answering(asked)}).register(User, Assistant, SyncAssistant, Helper)
    install(app, container)
    routes: Any = APIRouter() if plain else app

    @routes.get("/awaited")
    @toolbox(RefundTools)
    async def awaited() -> str:
        return await container.get(Assistant).chat("go")

    @routes.get("/threaded")
    @toolbox(RefundTools)
    def threaded() -> str:
        return container.get(SyncAssistant).chat("go")

    @routes.get("/generated")
    @toolbox(RefundTools)
    async def generated() -> AsyncIterator[str]:
        async for text in container.get(Assistant).stream("go"):
            yield text

    if plain:
        app.include_router(routes)

    for _ in range(2):
        async with running(app) as client:
            for path in ("/awaited", "/threaded", "/generated"):
                assert "ok" in (await client.get(path)).text

    assert asked == [["greet", "help", "refund"], ["refund"], ["greet", "help", "refund"]] * 2
    assert all("parameters" not in each["get"] for each in app.openapi()["paths"].values())


async def test_the_tools_are_beans_of_the_request(running) -> None:
    model = ScriptedChatModel([tool_call("refund", {"order": 7}), lambda request: request.messages[-1].text])
    app = application(model)
    declare(app)

    async with running(app) as client:
        assert (await client.get("/awaited")).json() == "7 refunded to me"


async def test_services_that_its_tools_call_do_not_get_them(running) -> None:
    asked: list[list[str]] = []

    def note(reply: Any) -> Any:
        def answer(request: ChatRequest) -> Any:
            asked.append(offered(request))
            return reply

        return answer

    app = application(ScriptedChatModel([note(tool_call("help", {"question": "?"})), note("helped"), note("ok")]))
    declare(app)

    async with running(app) as client:
        assert (await client.get("/awaited")).json() == "ok"

    assert asked == [["greet", "help", "refund"], [], ["greet", "help", "refund"]]


@pytest.mark.parametrize("plain", [True, False], ids=["plain router", "application"])
async def test_a_duplicate_tool_name_raises_before_the_model_is_called(running, plain: bool) -> None:
    model = Refusing()
    app = application(model)
    routes: Any = APIRouter() if plain else app

    @tool(name="greet")
    def other() -> str:
        return ""

    seen: list[Exception] = []

    @routes.get("/")
    @toolbox(other)
    async def endpoint(assistant: Inject[Assistant]) -> None:
        try:
            await assistant.chat("go")
        except IllegalConfigurationError as error:
            seen.append(error)

    if plain:
        app.include_router(routes)

    async with running(app) as client:
        await client.get("/")

    assert "'greet'" in str(seen[0])
    assert model.requests == []


async def test_invalid_tools_are_a_problem_at_start() -> None:
    app = application(Refusing())

    class Nothing: ...

    @app.get("/")
    @toolbox(Nothing)
    async def endpoint(assistant: Inject[Assistant]) -> None: ...

    with pytest.raises(IllegalConfigurationError) as caught:
        async with app.router.lifespan_context(app):
            pass

    [problem] = caught.value.problems
    assert "GET / (endpoint)" in problem.where
    assert "Nothing" in str(problem)


async def test_a_websocket_endpoint_can_have_tools(connect) -> None:
    asked: list[list[str]] = []
    app = application(answering(asked))

    @app.websocket("/")
    @toolbox(RefundTools)
    async def conversation(websocket: WebSocket, assistant: Inject[Assistant]) -> None:
        await websocket.accept()
        await send_stream(websocket, assistant.stream("go"))
        await websocket.close()

    async with app.router.lifespan_context(app):
        await connect(app, "/", "websocket").start()

    assert asked == [["greet", "help", "refund"]]


async def test_tools_of_a_request_do_not_reach_the_next_one(running) -> None:
    asked: list[list[str]] = []
    app = application(answering(asked))
    declare(app)

    async with running(app) as client:
        for path in ("/awaited", "/without", "/events", "/without"):
            await client.get(path)

    assert [("refund" in each) for each in asked] == [True, False, True, False]


async def test_tools_of_an_endpoint_are_not_in_the_openapi_document() -> None:
    app = application(Refusing())
    declare(app)

    assert app.openapi()["paths"]["/awaited"]["get"].get("parameters") is None


async def test_check_knows_the_tool_classes_of_endpoints() -> None:
    app = FastAPI()
    container = Container(models={"default": ScriptedChatModel()}).register(User, Assistant)
    install(app, container)

    @app.post("/staff")
    @toolbox(RefundTools)
    async def staff(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("")

    assert container.check() == []


async def test_a_registered_bean_for_a_tool_class_is_used(running) -> None:
    class Special(User):
        name = "you"

    app = FastAPI()
    model = ScriptedChatModel([tool_call("refund", {"order": 7}), "done"])
    container = Container(models={"default": model}).register(Assistant)
    container.register_instance(RefundTools(Special()))
    install(app, container)

    @app.post("/staff")
    @toolbox(RefundTools)
    async def staff(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("")

    async with running(app) as client:
        await client.post("/staff")

    assert model.requests[1].messages[-1].text == "7 refunded to you"


# --- calls that are suspended


class Payments:
    @tool(requires_approval=True)
    def pay(self, euros: int) -> str:
        return f"{euros} paid"


@register_ai_service
class Cashier(Protocol):
    @user_message("{text}")
    async def chat(self, customer: MemoryId[str], text: str) -> str: ...


def cashier(store: InMemoryRunStore, *replies: Any, has_endpoint: bool = True) -> tuple[FastAPI, Container]:
    """An application whose endpoint adds a tool that needs approval, and one that adds nothing."""
    app = FastAPI()
    container = Container(models={"default": ScriptedChatModel(replies)}).register(Cashier).register_instance(store)
    install(app, container)
    if has_endpoint:

        @app.post("/pay")
        @toolbox(Payments)
        async def pay(service: Inject[Cashier]) -> str:
            return await service.chat("ann", "pay 5")

    @app.post("/ask")
    async def ask(service: Inject[Cashier]) -> str:
        return await service.chat("ann", "hello")

    return app, container


async def test_a_suspended_call_of_an_endpoints_tool_continues_in_another_process(running) -> None:
    store = InMemoryRunStore()
    app, _ = cashier(store, tool_call("pay", {"euros": 5}))
    async with running(app) as client:
        response = await client.post("/pay")
        assert response.status_code == 202
        run_id, [call] = response.json()["run_id"], response.json()["pending"]
        assert call["tool_name"] == "pay"
        assert (await client.post("/ask")).status_code == 409  # its conversation waits, too

    app, container = cashier(store, tool_call("pay", {"euros": 6}), "done")
    async with running(app):
        with pytest.raises(RunAnswerError, match="euros"):
            await container.runs.resume(run_id, {call["id"]: approve(arguments={"euros": "many"})})
        [second] = (await container.runs.resume(run_id, {call["id"]: approve()})).pending
        result = await container.runs.resume(run_id, {second.id: approve()})
        assert [each.result for each in result.tool_executions] == ["5 paid", "6 paid"]
        assert result.content == "done"


async def test_a_program_without_the_endpoint_cannot_continue_its_suspended_call(running) -> None:
    store = InMemoryRunStore()
    app, _ = cashier(store, tool_call("pay", {"euros": 5}))
    async with running(app) as client:
        run_id = (await client.post("/pay")).json()["run_id"]

    app, container = cashier(store, has_endpoint=False)
    async with running(app):
        with pytest.raises(RunIncompatibleError, match=r"no endpoint .*\.pay, which adds tools"):
            await container.runs.resume(run_id, {"0": approve()})
        assert (await container.runs.get(run_id)).status == "suspended"


async def test_a_durable_call_has_the_tools_of_its_endpoint(running) -> None:
    class Kept(InMemoryRunStore):
        persistent = True

    @register_ai_service(durable=True)
    class Durable(Protocol):
        async def chat(self, text: str) -> str: ...

    app = FastAPI()
    model = ScriptedChatModel([tool_call("greet"), "done"])
    container = Container(models={"default": model}).register(Durable).register_instance(Kept())
    install(app, container)

    @app.post("/chat")
    @toolbox(greet)
    async def chat(service: Inject[Durable]) -> str:
        return await service.chat("hello")

    async with running(app) as client:
        assert (await client.post("/chat")).json() == "done"

    assert model.requests[1].messages[-1].text == "Hello"


class Cash:
    """Its subclass is the bean."""

    @tool
    def pay(self) -> str:
        return f"paid at {type(self).__name__}"

    @tool
    def open(self) -> str:
        return "open"


@roles_allowed("clerk")
class NightCash(Cash):
    pass


@pytest.mark.parametrize("roles", [("clerk",), ()])
async def test_one_method_of_a_class_is_added_with_the_rules_of_its_bean(running: Any, roles: tuple[str, ...]) -> None:
    app, model = FastAPI(), ScriptedChatModel([tool_call("pay"), "done"] if roles else ["done"])

    @app.post("/pay")
    @toolbox(Cash.pay)
    async def pay(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("Pay")

    container = Container(models={"default": model}).register(Assistant, NightCash)
    install(app, container, identity=lambda: SecurityIdentity("ann", roles))
    async with running(app) as client:
        assert (await client.post("/pay")).json() == "done"

    assert ("pay" in [each.name for each in model.requests[0].tool_specifications]) is bool(roles)
    assert "open" not in [each.name for each in model.requests[0].tool_specifications]
    if roles:
        assert model.requests[1].messages[-1].text == "paid at NightCash"


async def test_the_class_of_an_added_method_becomes_a_bean(running: Any) -> None:
    app, model = FastAPI(), ScriptedChatModel([tool_call("shout", {"text": "hey"}), "done"])

    class Loud:
        @tool
        def shout(self, text: str) -> str:
            return text.upper()

    @app.post("/shout")
    @toolbox(Loud.shout)
    async def shout(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("Shout")

    install(app, Container(models={"default": model}).register(Assistant))
    async with running(app) as client:
        assert (await client.post("/shout")).json() == "done"

    assert model.requests[1].messages[-1].text == "HEY"


class Till:
    @tool
    def pay(self) -> str:
        """Pays."""
        return "paid"


class DayTill(Till):
    @tool
    def pay(self) -> str:
        """Pays by day."""
        return "paid by day"


async def test_a_check_of_one_application_does_not_change_the_tools_of_another_with_the_same_router(
    running: Any,
) -> None:
    router, model = APIRouter(), ScriptedChatModel(["done"])

    @router.post("/pay")
    @toolbox(Till.pay)
    async def pay(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("Pay")

    app, container = FastAPI(), Container(models={"default": model}).register(Assistant, DayTill)
    install(app, container)
    app.include_router(router)
    other, other_container = FastAPI(), Container(models={"default": model}).register(Assistant, Till)
    install(other, other_container)
    other.include_router(router)

    async with running(app) as client:
        assert other_container.check() == []
        assert (await client.post("/pay")).json() == "done"

    [offer] = [each for each in model.requests[0].tool_specifications if each.name == "pay"]
    assert offer.description == "Pays by day."
