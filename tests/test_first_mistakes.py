"""What somebody who follows the tutorial does wrong is told with place, fact and fix.

Not here: each rule with all its cases (the folders of the rooms).
"""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic_settings import BaseSettings
from sqlalchemy.ext.asyncio import AsyncSession

from toolbox import (
    AsyncBeanError,
    ChatRequest,
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    MissingBeanError,
    ModelConnectionError,
    OpenAiChatModel,
    UserMessage,
    application_scoped,
    produces,
    register_ai_service,
    sql,
    tool,
    toolbox,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install


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


MISTAKES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (
        a_service_without_its_mark,
        IllegalConfigurationError,
        (
            "Helper: a Protocol cannot be made; mark it @register_ai_service or @register_rest_client if it is one, "
            "else register a class that implements it, bind(Helper, …)"
        ),
    ),
    (
        a_module_for_a_class,
        IllegalConfigurationError,
        'register(asyncio): it is a module; name its classes, or take all that is marked in it: scan("asyncio")',
    ),
    (
        a_module_of_tools,
        IllegalConfigurationError,
        "Helper: the module asyncio is among its tools; give the classes and functions that it has",
    ),
    (a_name_for_a_class, MissingBeanError, "no bean provides 'Catalogue'; did you mean Catalogue?"),
    (
        no_session,
        IllegalConfigurationError,
        "Loans.session: no bean provides AsyncSession; register toolbox.sql.session,",
    ),
    (no_database, IllegalConfigurationError, "no database is named; set TOOLBOX_SQL__URL"),
    (
        an_address_that_is_none,
        IllegalConfigurationError,
        "the database's address: it is no URL; write one such as sqlite:///shop.db",
    ),
    (a_producer_without_parentheses, TypeError, "write @produces() or @produces(scope=…) above application"),
    (
        a_scope_that_there_is_not,
        ValueError,
        "@produces has no scope 'singleton'; use one of 'application', 'request', 'call', 'dependent'",
    ),
    (an_async_bean_in_sync_code, AsyncBeanError, "Connection is made by awaiting; use `await aget(…)`"),
    (
        a_forgotten_inject,
        IllegalConfigurationError,
        (
            "endpoint ask, parameter 'librarian': Librarian is a bean, and FastAPI would look for it in the request; "
            "write `librarian: Inject[Librarian]`, with `from toolbox_fastapi import Inject`"
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
            "GET /ask (ask): its @toolbox stands above the route's decorator, which did not see it; "
            "put @toolbox below, next to the function"
        ),
    ),
    (
        a_forgotten_await,
        IllegalConfigurationError,
        (
            "endpoint ask: it returns the coroutine of Librarian.answer, which nobody awaits; "
            "declare it `async def` and write `return await …`"
        ),
    ),
    (
        install_the_wrong_way_round,
        TypeError,
        "install(app, container) takes the FastAPI application first, not a Container",
    ),
    (
        a_server_that_does_not_run,
        ModelConnectionError,
        "the connection to the model server http://127.0.0.1:9/v1 failed: ",
    ),
    (
        a_session_of_the_other_kind,
        MissingBeanError,
        "no bean provides Session for Loans.lend, which is `def`; did you mean AsyncSession?",
    ),
]


@pytest.mark.parametrize(("mistake", "kind", "said"), MISTAKES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_mistake_is_told_with_place_fact_and_fix(
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
def test_a_wrong_setting_is_one_problem_that_names_the_variable(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLBOX_DEMO", "1")
    monkeypatch.setenv(variable, value)

    [problem] = Container().register(Librarian).check()

    assert (problem.where, problem.fix) == ("ToolboxSettings", said)
    assert value not in str(problem)


def test_a_setting_that_is_not_there_is_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_extra_that_is_not_installed_is_named(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each == module or each.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)

    assert str(caught.value).endswith(f"install it with: pip install 'toolbox-di[{extra}]'")
