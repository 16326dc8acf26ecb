"""Common mistakes of new users are reported with place, fact and fix.

Not here: each rule with all its cases (the folders of the rooms).
"""

import asyncio
import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from pydantic_settings import BaseSettings
from sqlalchemy.ext.asyncio import AsyncSession

from tests import programs
from toolbox import (
    AsyncBeanError,
    ChatRequest,
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    MissingBeanError,
    ModelConnectionError,
    OpenAiChatModel,
    ToolArgumentsError,
    UserMessage,
    application_scoped,
    produces,
    register_ai_service,
    sql,
    tool,
    toolbox,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install, sse


@application_scoped
class Catalogue:
    @tool
    def find_books(self, words: str) -> str:
        """Finds books."""
        return words


class Statistics:
    @tool
    def list_searches(self) -> str:
        """Lists searches."""
        return "none"


@register_ai_service(tools=Catalogue)
class Librarian(Protocol):
    async def answer(self, question: str) -> str: ...


class Loans:
    def __init__(self, session: AsyncSession) -> None: ...

    @tool
    @sql.transactional
    def lend(self, number: int) -> str:
        """Lends a book."""
        return "lent"


def application(*beans: object) -> FastAPI:
    app = FastAPI()
    install(app, Container(models={"default": DemoChatModel()}).register(Librarian, *beans))
    return app


def started(*beans: object) -> None:
    with Container().register(*beans):
        pass


# --- mistakes


def a_service_without_its_mark() -> None:
    class Helper(Protocol):
        def answer(self, question: str) -> str: ...

    started(Helper)


def a_module_for_a_class() -> None:
    started(asyncio)


def a_module_of_tools() -> None:
    @register_ai_service(tools=asyncio)
    class Helper(Protocol):
        def answer(self, question: str) -> str: ...

    started(Helper)


def a_name_for_a_class() -> None:
    with Container().register(Catalogue) as container:
        container.get("Catalogue")  # type: ignore[arg-type]  # the mistake


def no_session() -> None:
    started(Loans)


def no_database() -> None:
    started(Loans, sql.engine, sql.session)


def an_address_that_is_none() -> None:
    async def open_it() -> None:
        async with sql.open_engine("secret library.db"):
            pass

    asyncio.run(open_it())


def a_producer_without_parentheses() -> None:
    produces(application)  # type: ignore[arg-type]  # the mistake


def a_producer_with_a_decorator_as_its_scope() -> None:
    produces(scope=application_scoped)  # type: ignore[arg-type]  # the mistake


def a_scope_that_there_is_not() -> None:
    produces(scope="singleton")  # type: ignore[arg-type]  # the mistake


def an_async_bean_in_sync_code() -> None:
    class Connection: ...

    @produces(scope="dependent")
    async def connection() -> AsyncIterator[Connection]:
        yield Connection()

    async def ask() -> None:
        async with Container().register(connection) as container:
            container.get(Connection)

    asyncio.run(ask())


def a_forgotten_inject() -> None:
    app = application()

    @app.get("/ask")
    async def ask(librarian: Librarian) -> str:
        return await librarian.answer("?")


def a_toolbox_without_parentheses() -> None:
    app = application()

    @app.get("/ask")  # type: ignore[arg-type]  # what comes of the mistake below
    @toolbox
    async def ask(librarian: Inject[Librarian]) -> str:
        return await librarian.answer("?")


def a_toolbox_above_the_route() -> None:
    app = application()

    @toolbox(Statistics)
    @app.get("/ask")
    async def ask(librarian: Inject[Librarian]) -> str:
        return await librarian.answer("?")

    with TestClient(app):
        pass


def a_forgotten_await() -> None:
    app = application()

    @app.get("/ask")
    async def ask(librarian: Inject[Librarian]) -> Any:
        return librarian.answer("?")

    # As FastAPI raises it where the application has no handler for it.
    app.exception_handlers[IllegalConfigurationError] = raise_it
    with TestClient(app) as client:
        client.get("/ask")


async def raise_it(request: object, error: Exception) -> Any:
    raise error


def install_the_wrong_way_round() -> None:
    install(Container(), FastAPI())  # type: ignore[arg-type]  # the mistake


def a_server_that_does_not_run() -> None:
    async def ask() -> None:
        # Port 9 is "discard", where nothing listens.
        url = "http://127.0.0.1:9/v1"
        model = OpenAiChatModel("m", base_url=url, api_key="secret", max_retries=0)
        try:
            await model.chat(ChatRequest([UserMessage("?")]))
        finally:
            await model.aclose()

    asyncio.run(ask())


def a_session_of_the_other_kind() -> None:
    @register_ai_service(tools=Loans)
    class Desk(Protocol):
        async def answer(self, question: str) -> str: ...

    @produces(scope="call")
    async def session() -> AsyncSession:
        return AsyncSession()

    async def ask() -> None:
        model = ScriptedChatModel([tool_call("lend", {"number": 1})])
        async with Container(models={"default": model}).register(session, Desk) as container:
            await container.get(Desk).answer("?")

    asyncio.run(ask())


def asked(app: FastAPI) -> None:
    """Return the logged traceback of an endpoint."""
    app.exception_handlers[IllegalConfigurationError] = raise_it
    with TestClient(app) as client:
        client.get("/ask")


@register_ai_service(tools=Catalogue)
class Teller(Protocol):
    def tell(self, question: str) -> AsyncIterator[str]: ...


def a_stream_without_sse() -> None:
    app = application(Teller)

    @app.get("/ask")
    async def ask(teller: Inject[Teller]) -> Any:
        return teller.tell("?")

    asked(app)


def an_answer_in_sse() -> None:
    app = application()

    @app.get("/ask")
    async def ask(librarian: Inject[Librarian]) -> Any:
        return sse(await librarian.answer("?"))

    asked(app)


def a_coroutine_in_sse() -> None:
    app = application()

    @app.get("/ask")
    async def ask(librarian: Inject[Librarian]) -> Any:
        return sse(librarian.answer("?"))  # type: ignore[arg-type]  # the mistake

    asked(app)


def a_stream_in_a_plain_for() -> None:
    async def ask() -> None:
        async with Container(models={"default": DemoChatModel()}).register(Teller) as container:
            for _ in container.get(Teller).tell("?"):  # type: ignore[attr-defined]  # the mistake
                pass

    asyncio.run(ask())


def depends_for_inject() -> None:
    app = application()

    @app.get("/ask")
    async def ask(librarian: Librarian = Depends()) -> str:  # noqa: B008 - as FastAPI's documents write it
        return await librarian.answer("?")


def an_inject_of_nothing() -> None:
    app = application()

    @app.get("/ask")
    async def ask(librarian: Inject) -> str:  # type: ignore[type-arg]  # the mistake
        return str(librarian)


def a_second_install() -> None:
    install(application(), Container())


def a_service_that_is_not_registered() -> None:
    app = FastAPI()
    install(app, Container())

    @app.get("/ask")
    async def ask(librarian: Inject[Librarian]) -> str:
        return await librarian.answer("?")

    asked(app)


def a_list_of_beans() -> None:
    started([Catalogue, Librarian])


def a_value_for_a_bean() -> None:
    class Shelf:
        def __init__(self, width: int) -> None: ...

    started(Shelf)


def a_class_that_is_not_registered() -> None:
    class Shelf:
        def __init__(self, statistics: Statistics) -> None: ...

    started(Shelf)


def a_value_that_nobody_gives() -> None:
    def count(shelf: int) -> int:
        return shelf

    with Container() as container:
        container.call(count)


def a_seed_without_its_type() -> None:
    with Container() as container:
        container.request_scope(Catalogue())  # type: ignore[arg-type]  # the mistake


def a_toolbox_on_a_class() -> None:
    @register_ai_service
    @toolbox(Catalogue)
    class Helper(Protocol):
        def answer(self, question: str) -> str: ...


def a_toolbox_on_any_method() -> None:
    class Shelf:
        @toolbox(Catalogue)
        def look(self) -> str:
            return ""

    started(Shelf)


def a_tool_listed_twice() -> None:
    @register_ai_service(tools=[Catalogue, Catalogue])
    class Helper(Protocol):
        def answer(self, question: str) -> str: ...

    started(Helper)


def a_method_without_self() -> None:
    @register_ai_service
    class Helper(Protocol):
        def answer(question: str) -> str: ...  # type: ignore[misc]  # the mistake

    started(Helper)


def a_question_without_a_type() -> None:
    @register_ai_service
    class Helper(Protocol):
        def answer(self, question) -> str: ...  # type: ignore[no-untyped-def]  # the mistake

    started(Helper)


def an_address_without_http() -> None:
    OpenAiChatModel("m", base_url="localhost:11434/v1")


MISTAKES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (
        a_service_without_its_mark,
        IllegalConfigurationError,
        (
            "Helper: a Protocol cannot be instantiated; register a class that implements it and call bind(Helper, …); "
            "if it declares a service or a client, add @register_ai_service or @register_rest_client"
        ),
    ),
    (
        a_module_for_a_class,
        IllegalConfigurationError,
        'register(asyncio): modules cannot be registered; register its classes, or call scan("asyncio") to register',
    ),
    (
        a_module_of_tools,
        IllegalConfigurationError,
        "Helper: the module asyncio is not a tool; list its classes and functions",
    ),
    (a_name_for_a_class, MissingBeanError, "no bean provides 'Catalogue'; did you mean Catalogue?"),
    (
        no_session,
        IllegalConfigurationError,
        "Loans.session: no bean provides AsyncSession; register toolbox.sql.session,",
    ),
    (no_database, IllegalConfigurationError, "missing database URL; set TOOLBOX_SQL__URL"),
    (
        an_address_that_is_none,
        IllegalConfigurationError,
        "the database URL: invalid URL; use a URL such as sqlite:///shop.db",
    ),
    (a_producer_with_a_decorator_as_its_scope, TypeError, 'scope must be a string; write scope="application"'),
    (a_producer_without_parentheses, TypeError, "write @produces() or @produces(scope=…) above application"),
    (
        a_scope_that_there_is_not,
        ValueError,
        "@produces: unknown scope 'singleton'; use one of: application, request, call, dependent",
    ),
    (an_async_bean_in_sync_code, AsyncBeanError, "Connection is created by async code; use `await aget(…)`"),
    (
        a_forgotten_inject,
        IllegalConfigurationError,
        (
            "endpoint ask, parameter 'librarian': Librarian is a bean, but FastAPI would read it from the request; "
            "write `librarian: Inject[Librarian]`, with `from toolbox import Inject`"
        ),
    ),
    (
        a_toolbox_without_parentheses,
        IllegalConfigurationError,
        "endpoint ask: @toolbox has no parentheses; write @toolbox(…)",
    ),
    (
        a_toolbox_above_the_route,
        IllegalConfigurationError,
        (
            "GET /ask (ask): @toolbox is above the route decorator and has no effect; "
            "put @toolbox below the route decorator, next to the function"
        ),
    ),
    (
        a_forgotten_await,
        IllegalConfigurationError,
        (
            "endpoint ask: it returns the coroutine of Librarian.answer, which is not awaited; "
            "declare it `async def` and write `return await …`"
        ),
    ),
    (
        install_the_wrong_way_round,
        TypeError,
        "install(app, container): app must be a FastAPI application, got Container",
    ),
    (
        a_server_that_does_not_run,
        ModelConnectionError,
        "cannot connect to the model server http://127.0.0.1:9/v1: ",
    ),
    (
        a_stream_without_sse,
        IllegalConfigurationError,
        (
            "endpoint ask: it returns a service's stream, but FastAPI cannot send it; "
            "write `return sse(…)`, with `from toolbox_fastapi import sse`"
        ),
    ),
    (an_answer_in_sse, TypeError, "sse(…) expects a stream, got a str; call a method declared"),
    (a_coroutine_in_sse, TypeError, "sse(…) expects a stream, got the coroutine of Librarian.answer;"),
    (
        a_stream_in_a_plain_for,
        TypeError,
        "iterate a service's stream with `async for`, or return it from an endpoint with",
    ),
    (
        depends_for_inject,
        IllegalConfigurationError,
        "endpoint ask, parameter 'librarian': Librarian is a bean, but FastAPI would read it from the request; write",
    ),
    (
        an_inject_of_nothing,
        IllegalConfigurationError,
        "endpoint ask, parameter 'librarian': Inject has no class; write `librarian: Inject[…]`",
    ),
    (
        a_second_install,
        IllegalConfigurationError,
        "install(app, container): the application already has a container; call install once,",
    ),
    (
        a_service_that_is_not_registered,
        IllegalConfigurationError,
        "GET /ask (ask), parameter 'librarian': no bean provides Librarian; register Librarian,",
    ),
    (
        a_list_of_beans,
        IllegalConfigurationError,
        "register(list of 2): collections cannot be registered; write",
    ),
    (a_value_for_a_bean, IllegalConfigurationError, "Shelf.width: no bean provides int; add a default value, inject a"),
    (
        a_class_that_is_not_registered,
        IllegalConfigurationError,
        "Shelf.statistics: no bean provides Statistics; register Statistics,",
    ),
    (a_value_that_nobody_gives, MissingBeanError, "count.shelf: no bean provides int; register one,"),
    (
        a_seed_without_its_type,
        TypeError,
        "request_scope expects a mapping from types to instances, such as {Catalogue: …}",
    ),
    (
        a_toolbox_on_a_class,
        TypeError,
        "@toolbox: Helper is a class; put @toolbox on a method or an endpoint, or list the tools of a class in ",
    ),
    (
        a_toolbox_on_any_method,
        IllegalConfigurationError,
        "Shelf.look: @toolbox has no effect here: the class is not an AI service",
    ),
    (
        a_tool_listed_twice,
        IllegalConfigurationError,
        (
            "Helper: 2 tools have the same name 'find_books': Catalogue.find_books, Catalogue.find_books; "
            "list Catalogue.find_books only once"
        ),
    ),
    (
        a_method_without_self,
        IllegalConfigurationError,
        "Helper.answer: the first parameter is not `self`; declare it `def answer(self, question: …)`",
    ),
    (
        a_question_without_a_type,
        IllegalConfigurationError,
        "Helper.answer: parameter 'question' has no type annotation; add one, for example `question: str`",
    ),
    (
        an_address_without_http,
        IllegalConfigurationError,
        "OpenAiChatModel('m'): invalid base URL: it must begin with http:// or https://; set base_url=",
    ),
    (
        a_session_of_the_other_kind,
        MissingBeanError,
        "no bean provides Session for Loans.lend, which is `def`; did you mean AsyncSession or ",
    ),
]


@pytest.mark.parametrize(("mistake", "kind", "said"), MISTAKES, ids=lambda each: getattr(each, "__name__", ""))
def test_mistakes_are_reported_with_place_fact_and_fix(
    mistake: Callable[[], None], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLBOX_DEMO", "1")

    with pytest.raises(kind) as caught:
        mistake()

    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TOOLBOX_POOL_SIZE", "many", "correct TOOLBOX_POOL_SIZE"),
        ("TOOLBOX_MODELS__DEFAULT__KEY", "secret", "correct TOOLBOX_MODELS__DEFAULT__KEY"),
    ],
)
def test_invalid_settings_are_problems_that_name_the_variable(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLBOX_DEMO", "1")
    monkeypatch.setenv(variable, value)

    [problem] = Container().register(Librarian).check()

    assert (problem.where, problem.fix) == ("ToolboxSettings", said)
    assert value not in str(problem)


def test_missing_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class LibrarySettings(BaseSettings):
        library_database: str

    class Desk:
        def __init__(self, settings: LibrarySettings) -> None: ...

    monkeypatch.delenv("LIBRARY_DATABASE", raising=False)

    [problem] = Container().register(Desk).check()

    assert problem.fix == "set LIBRARY_DATABASE"


@pytest.mark.parametrize(
    ("module", "library", "extra"), [("toolbox_fastapi", "fastapi", "fastapi"), ("toolbox.sql", "sqlalchemy", "sql")]
)
def test_missing_extras_are_named(module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each == module or each.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)

    assert str(caught.value).endswith(f"install it with: pip install 'toolbox-di[{extra}]'")


def test_very_long_tool_results_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    def read_all() -> str:
        """Reads everything."""
        return "x" * 200_000

    @register_ai_service(tools=read_all)
    class Reader(Protocol):
        def read(self, question: str) -> str: ...

    model = ScriptedChatModel([tool_call("read_all"), "Done."])
    with Container(models={"default": model}).register(Reader) as container:
        container.get(Reader).read("?")

    assert "the result of tool 'read_all' has 200000 characters and is sent to the model without a limit" in caplog.text


def test_errors_of_the_model_suggest_return_to_model() -> None:
    model = ScriptedChatModel([tool_call("find_books", {"word": "knots"})])

    async def ask() -> None:
        async with Container(models={"default": model}).register(Librarian) as container:
            await container.get(Librarian).answer("?")

    with pytest.raises(ToolArgumentsError) as caught:
        asyncio.run(ask())

    assert "invalid arguments for tool 'find_books': words: Field required" in str(caught.value)
    assert caught.value.__notes__[0].startswith("set on_tool_arguments_error=return_to_model")


def test_unclosed_models_cause_no_warnings(tmp_path: Path) -> None:
    """A script ends without closing its model, which the container does not own."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import asyncio, http.server, threading
from toolbox import ChatRequest, OpenAiChatModel, UserMessage

CHOICE = '{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"hi"}}'
REPLY = f'{{"id":"r","object":"chat.completion","model":"m","choices":[{CHOICE}]}}'.encode()

class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = OpenAiChatModel("m", base_url=f"http://127.0.0.1:{server.server_port}/v1")
for _ in range(2):
    print(asyncio.run(model.chat(ChatRequest([UserMessage("?")]))).ai_message.text)
""",
        encoding="utf-8",
    )

    arguments = ["-W", "always::ResourceWarning", str(program)]
    done = programs.run(arguments, tmp_path, dict(os.environ))

    assert done.stdout.split() == ["hi", "hi"]
    assert "Unclosed" not in done.stderr
