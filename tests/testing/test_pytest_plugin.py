"""The pytest plugin in projects of users: each test writes a project and runs pytest on it in a new process."""

import http.server
import importlib.util
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.timeout(400)  # starts processes

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import asyncio
from typing import Protocol
from toolbox import Container, Result, produces, register_ai_service, request_scoped, tool

class Prices:
    def of(self, dish: str) -> float:
        return 12.0

class Menu:
    def __init__(self, prices: Prices) -> None:
        self.prices = prices

    @tool
    def price(self, dish: str) -> float:
        return self.prices.of(dish)

class Stopped:
    times = 0
    def __init__(self) -> None:
        self.loop = None
    def stop(self) -> None:
        Stopped.times += 1

class User(str): ...

@request_scoped
class Basket:
    def __init__(self, user: User) -> None:
        self.user = user

@produces(scope="application")
async def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()

@register_ai_service(tools=Menu)
class Waiter(Protocol):
    async def ask(self, question: str) -> Result[str]: ...

@register_ai_service(tools=Menu, model="thrifty")
class Blocking(Protocol):
    def ask(self, question: str) -> Result[str]: ...

container = Container(seeds=(User,)).register(Prices, Menu, Waiter, Blocking, Basket, loop)
"""
LOOPS = "asyncio_default_fixture_loop_scope = function"
SETTINGS = """
[pytest]
toolbox_container = program:container
pythonpath = .
filterwarnings = error
addopts = -p no:cacheprovider -p no:asyncio
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(program=PROGRAM)
    pytester.makeini(SETTINGS)
    return pytester


def run(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    done = programs.run(["-m", "pytest", "-q", *options], project.path, dict(os.environ))
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


def test_synchronous_tests_get_a_started_container_and_a_scripted_model(project: pytest.Pytester) -> None:
    project.makepyfile("""
        from program import Blocking, container
        from toolbox.testing import assert_tool_calls, offered_tools, tool_call, user_text

        def test_it(toolbox_container, scripted_model):
            scripted_model.will_reply(tool_call("price", {"dish": "curry"}), "It is 12 euros.")
            result = toolbox_container.get(Blocking).ask("How much is the curry?")
            assert result.content == "It is 12 euros."
            assert_tool_calls(result, tool_call("price", {"dish": "curry"}))
            assert offered_tools(scripted_model) == ["price"]
            assert user_text(scripted_model) == "How much is the curry?"
            assert toolbox_container is container

        def test_it_is_stopped_afterwards_and_has_no_models():
            assert not container.is_started
            assert container.models == {}
    """)

    run(project).assert_outcomes(passed=2)


def test_the_scripted_model_takes_scripts_per_service_at_any_time(project: pytest.Pytester) -> None:
    project.makepyfile("""
        from concurrent.futures import ThreadPoolExecutor
        from program import Blocking, Waiter
        from toolbox.testing import tool_call

        def test_it(toolbox_container, scripted_model):
            scripted_model.will_reply("common")
            blocking = toolbox_container.get(Blocking)
            assert blocking.ask("?").content == "common"
            scripted_model.will_reply(tool_call("price", {"dish": "curry"}), "It is 12 euros.", service=Blocking)
            assert blocking.ask("How much?").content == "It is 12 euros."
            scripted_model.will_reply("more", "others", service=Waiter)
            scripted_model.will_reply("and more", service=Blocking)
            with ThreadPoolExecutor(4) as threads:
                assert threads.submit(lambda: blocking.ask("?")).result().content == "and more"
    """)

    run(project).assert_outcomes(passed=1)


def test_models_are_never_called_by_accident(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "m")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    project.makepyfile("""
        import pytest
        from typing import Protocol
        from program import Blocking, container
        from toolbox import register_ai_service
        from toolbox.testing import ScriptedChatModel

        @register_ai_service
        class Free(Protocol):
            def ask(self, question: str) -> str: ...

        container.register(Free)
        given = ScriptedChatModel(["given"])
        container.models["thrifty"] = given

        def test_given_models_are_kept(toolbox_container):
            assert toolbox_container.get(Blocking).ask("?").content == "given"
            with pytest.raises(AssertionError, match="no scripted reply"):
                toolbox_container.get(Free).ask("?")

        def test_given_models_can_be_scripted(toolbox_container, scripted_model):
            scripted_model.will_reply("scripted")
            assert toolbox_container.get(Blocking).ask("?").content == "scripted"

        def test_models_are_restored_afterwards():
            assert container.models == {"thrifty": given}
    """)

    run(project).assert_outcomes(passed=3)


ASYNC_TEST = """
    import asyncio
    import pytest
    from program import Basket, User, Waiter, container
    from toolbox.testing import assert_tool_calls, tool_call

    @pytest.fixture
    def toolbox_seeds():
        return {{User: User("ann")}}

    @pytest.fixture
    def waiter(toolbox_container):
        return toolbox_container.get(Waiter)

    {mark}
    async def test_it_runs_on_the_test_s_loop(toolbox_container, waiter, scripted_model, toolbox_record):
        assert await toolbox_container.aget(asyncio.AbstractEventLoop) is asyncio.get_running_loop()
        scripted_model.will_reply(tool_call("price", {{"dish": "curry"}}), "12.")
        assert (await waiter.ask("?")).content == "12."
        assert_tool_calls(toolbox_record, "price")

    {mark}
    async def test_runs_in_a_request_scope(toolbox_container, toolbox_request_scope, scripted_model):
        assert toolbox_container.get(Basket).user == "ann"
        assert await toolbox_container.aget(Basket) is toolbox_container.get(Basket)

    {mark}
    async def test_each_test_has_a_new_record(toolbox_record, toolbox_container, scripted_model):
        assert toolbox_record.tool_executions == [] == toolbox_record.requests

    def test_synchronous_tests_work_too(toolbox_request_scope, toolbox_container, scripted_model):
        assert toolbox_container.get(Basket).user == "ann"
        assert container.is_started

    def test_the_container_is_stopped_after_the_module():
        assert not container.is_started
"""


def test_async_fixtures_work_with_the_anyio_plugin(project: pytest.Pytester) -> None:
    project.makepyfile(ASYNC_TEST.format(mark="@pytest.mark.anyio"))
    project.makeconftest("""
        import pytest

        @pytest.fixture
        def anyio_backend():
            return "asyncio"
    """)

    run(project).assert_outcomes(passed=5)


@pytest.mark.skipif(importlib.util.find_spec("pytest_asyncio") is None, reason="pytest-asyncio is not here")
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_async_fixtures_work_with_pytest_asyncio(project: pytest.Pytester, mode: str) -> None:
    mark = "@pytest.mark.asyncio" if mode == "strict" else ""
    project.makepyfile(ASYNC_TEST.format(mark=mark))
    project.makeini(SETTINGS.replace("-p no:asyncio", "") + f"asyncio_mode = {mode}\n{LOOPS}\n")

    run(project).assert_outcomes(passed=5)


def test_overrides_are_undone_if_the_test_fails(project: pytest.Pytester) -> None:
    project.makepyfile("""
        from program import Blocking, Menu, Prices, container

        class Free(Prices):
            def of(self, dish):
                return 0.0

        def test_fails(toolbox_override, toolbox_container, scripted_model):
            toolbox_override(Prices, Free())
            assert toolbox_container.get(Menu).price("curry") == 0.0
            assert False, "on purpose"

        def test_passes(toolbox_container, scripted_model, toolbox_override):
            assert toolbox_container.get(Menu).price("curry") == 12.0
            fake = toolbox_override(Prices, Free())
            assert toolbox_container.get(Prices) is fake

        def test_afterwards(toolbox_container, scripted_model):
            assert toolbox_container.get(Menu).price("curry") == 12.0
    """)

    result = run(project)

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines("*on purpose*")


def test_the_container_can_be_a_fixture_of_the_user(project: pytest.Pytester) -> None:
    project.makeini(SETTINGS.replace("toolbox_container = program:container", ""))
    project.makeconftest("""
        import pytest
        from toolbox import Container

        @pytest.fixture
        def toolbox_container_source():
            return Container().register_instance(7)
    """)
    project.makepyfile("""
        def test_it(toolbox_container):
            assert toolbox_container.get(int) == 7
    """)

    run(project).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("", "*no container is configured for the tests*toolbox_container = module:name*"),
        ("nowhere:container", "*cannot find module 'nowhere'*pythonpath*"),
        ("program:contaner", "*has no attribute 'contaner'*"),
        ("program:Menu", "*expected a Container, got type*"),
    ],
)
def test_missing_containers_are_reported(project: pytest.Pytester, target: str, said: str) -> None:
    project.makeini(SETTINGS.replace("program:container", target))
    project.makepyfile("def test_it(toolbox_container): ...")

    result = run(project)

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(said)


def test_applications_that_start_the_container_get_it_unstarted(project: pytest.Pytester) -> None:
    pytest.importorskip("fastapi")
    project.makepyfile(
        web="""
        from fastapi import FastAPI
        from program import Waiter, container
        from toolbox_fastapi import Inject, install

        app = FastAPI()
        install(app, container)

        @app.get("/ask")
        async def ask(question: str, waiter: Inject[Waiter]) -> str:
            return (await waiter.ask(question)).content
        """,
        test_web="""
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fastapi.testclient import TestClient
        from web import app
        from toolbox.testing import assert_tool_calls, tool_call
        from program import Prices

        class Free(Prices):
            def of(self, dish):
                return 0.0

        def test_it(toolbox_unstarted_container, toolbox_override, toolbox_record, scripted_model):
            toolbox_override(Prices, Free())
            scripted_model.will_reply(tool_call("price", {"dish": "pie"}), lambda r: r.messages[-1].text)
            with TestClient(app) as client:
                assert client.get("/ask", params={"question": "?"}).json() == "0.0"
            assert_tool_calls(toolbox_record, tool_call("price", {"dish": "pie"}))
        """,
    )

    run(project).assert_outcomes(passed=1)


RECORDED = """
    import asyncio, json, os
    import pytest
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread
    from toolbox import ChatRequest, OpenAiChatModel, UserMessage

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            text = json.dumps({"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        def log_message(self, *_): ...

    @pytest.fixture
    def address():
        if not os.environ.get("SERVED"):
            yield None
            return
        server = HTTPServer(("127.0.0.1", 0), Server)
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        server.server_close()
        thread.join()

    async def ask(recording, address, text):
        model = OpenAiChatModel("m", address, "sk-secret-12345", transport=recording)
        try:
            return (await model.chat(ChatRequest([UserMessage(text)]))).ai_message.text
        finally:
            await model.aclose()

    class TestHello:
        @pytest.mark.parametrize("text", ["Hi", "a/ü"])
        def test_hello(self, toolbox_recording, address, text):
            assert asyncio.run(ask(toolbox_recording, address, os.environ.get("TEXT", text))) == "Hello"

    def test_swallowed(toolbox_recording, address):
        try:
            asyncio.run(ask(toolbox_recording, address, os.environ.get("TEXT", "?")))
        except Exception:
            pass
"""


def test_recordings_are_stored_next_to_the_test_and_played_in_ci(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOOLBOX_RECORDING", "CI"):
        monkeypatch.delenv(name, raising=False)
    project.makepyfile(test_talk=RECORDED)

    monkeypatch.setenv("CI", "true")
    missing = run(project)
    missing.assert_outcomes(errors=3)
    missing.stdout.fnmatch_lines("*recordings/test_talk.TestHello.test_hello-Hi.json: the recording does not exist*")

    monkeypatch.delenv("CI")
    monkeypatch.setenv("SERVED", "1")
    run(project).assert_outcomes(passed=3)
    files = sorted(each.name for each in (project.path / "recordings").iterdir())
    assert len(files) == 3
    assert "test_talk.TestHello.test_hello-Hi.json" in files
    assert "test_talk.test_swallowed.json" in files
    assert not any("sk-secret" in each.read_text() for each in (project.path / "recordings").iterdir())

    monkeypatch.delenv("SERVED")
    monkeypatch.setenv("CI", "true")
    run(project, "-n", "2").assert_outcomes(passed=3)

    monkeypatch.setenv("TEXT", "something else")
    changed = run(project)
    changed.assert_outcomes(
        passed=1, failed=2, errors=1
    )  # errors that the program swallowed are reported after the test
    changed.stdout.fnmatch_lines('*messages?0?.content: recorded "Hi", now "something else"*')


def test_recordings_can_be_replaced_with_an_option(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOOLBOX_RECORDING", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SERVED", "1")
    project.makepyfile(test_talk=RECORDED)
    run(project, "-k", "swallowed").assert_outcomes(passed=1)
    file = project.path / "recordings" / "test_talk.test_swallowed.json"

    monkeypatch.setenv("TEXT", "new")
    run(project, "-k", "swallowed", "--toolbox-recording", "record").assert_outcomes(passed=1)

    assert json.loads(file.read_text())["exchanges"][0]["request"]["body"]["messages"][0]["content"] == "new"


def test_the_plugin_can_be_disabled_and_works_with_xdist(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider\n")
    project.makepyfile("def test_it(): ...")

    run(project, "-p", "no:toolbox").assert_outcomes(passed=1)
    run(project, "-n", "2").assert_outcomes(passed=1)


def test_unused_plugins_import_nothing_heavy(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import sys

        def test_it():
            heavy = ("dependency_injector", "openai", "httpx2", "fastapi", "pydantic", "toolbox.testing")
            assert [name for name in heavy if name in sys.modules] == []
            assert "toolbox.pytest_plugin" in sys.modules
    """)

    project.runpytest_subprocess("-q", "-p", "no:anyio").assert_outcomes(passed=1)


def test_fixtures_have_descriptions() -> None:
    done = subprocess.run(
        programs.command("-m", "pytest", "--fixtures", "-q", "-p", "no:cacheprovider"),
        cwd=Path(__file__).parent,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )

    for name in (
        "toolbox_container",
        "scripted_model",
        "toolbox_recording",
        "toolbox_request_scope",
        "toolbox_override",
    ):
        assert name in done.stdout


# --- model servers

SERVED = """
from typing import Protocol
from fastapi import FastAPI
from toolbox import Container, OpenAiChatModel, register_ai_service
from toolbox_fastapi import Inject, install

@register_ai_service
class Desk(Protocol):
    async def ask(self, question: str) -> str: ...

@register_ai_service(model="by_hand")
class Other(Protocol):
    async def ask(self, question: str) -> str: ...

app = FastAPI()
container = Container(models={"by_hand": OpenAiChatModel("gpt", "https://models.example.com/v1", "key")})
install(app, container.register(Desk, Other))

@app.get("/ask")
async def ask(desk: Inject[Desk]) -> str:
    return await desk.ask("Hello")

@app.get("/other")
async def other(other: Inject[Other]) -> str:
    return await other.ask("Hello")
"""
CLIENT = """
import warnings
import pytest
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient
from served import app

@pytest.fixture
def client():
    with TestClient(app) as client:
        yield client
"""


@pytest.fixture
def served(project: pytest.Pytester) -> pytest.Pytester:
    """A project with an application that uses the configured model and another that creates its model."""
    project.makepyfile(served=SERVED, conftest=CLIENT)
    return project


class ModelServer:
    """A local chat-completions server that counts its requests."""

    def __init__(self) -> None:
        self.asked = 0
        counting = self
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "real"}, "finish_reason": "stop"}]})

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                counting.asked += 1
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *rest: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def model_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """The server that the environment names at the start of the run."""
    made = ModelServer()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    monkeypatch.setenv("OPENAI_MODEL", "gpt")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setenv("OPENAI_BASE_URL", made.url)
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_scripted_models_work_with_any_order_of_fixtures(served: pytest.Pytester, model_server: ModelServer) -> None:
    served.makepyfile("""
        def test_the_application_starts_first(client, scripted_model):
            scripted_model.will_reply("one", "two")
            assert client.get("/ask").json() == "one"
            assert client.get("/other").json() == "two"

        def test_the_model_is_created_first(scripted_model, client):
            scripted_model.will_reply("one")
            assert client.get("/ask").json() == "one"
    """)
    run(served).assert_outcomes(passed=2)
    assert model_server.asked == 0


@pytest.mark.parametrize("fixtures", ["client, toolbox_record", "toolbox_record, client"])
def test_a_record_works_before_and_after_the_fixture_that_starts_the_application(
    served: pytest.Pytester, fixtures: str
) -> None:
    served.makepyfile(f"""
        def test_it_records({fixtures}, scripted_model):
            scripted_model.will_reply("one")
            assert client.get("/ask").json() == "one"
            assert len(toolbox_record.requests) == 1

        def test_each_test_has_its_own(toolbox_container, scripted_model, toolbox_record):
            assert toolbox_record.events == []

        def test_a_used_record_is_not_told_again({fixtures}, scripted_model):
            scripted_model.will_reply("two")
            assert client.get("/ask").json() == "two"
            assert len(toolbox_record.requests) == 1
    """)
    run(served, "-o", "toolbox_container=served:container").assert_outcomes(passed=3)


@pytest.mark.parametrize("fixtures", ["client, toolbox_container", "client, toolbox_request_scope, toolbox_container"])
def test_the_container_of_an_application_that_runs_is_used_as_it_is(served: pytest.Pytester, fixtures: str) -> None:
    served.makepyfile(f"""
        import pytest
        from served import container

        def test_it_is_the_one_of_the_application({fixtures}, scripted_model):
            scripted_model.will_reply("one", "two")
            assert toolbox_container is container
            assert client.get("/ask").json() == "one"

        @pytest.mark.anyio
        async def test_asynchronous_tests_too({fixtures}, scripted_model):
            assert toolbox_container is container
            assert container.is_started

        def test_the_application_has_stopped_it():
            assert not container.is_started
    """)
    run(served, "-o", "toolbox_container=served:container").assert_outcomes(passed=3)


def test_a_fixture_that_fails_leaves_no_scripted_model_in_the_container(served: pytest.Pytester) -> None:
    served.makepyfile("""
        import pytest
        from served import container

        before = dict(container.models)

        @pytest.fixture
        def failing(toolbox_unstarted_container):
            raise RuntimeError("the fixture fails")

        def test_it_fails(failing, toolbox_record):
            ...

        def test_it_fails_after_the_start(client, scripted_model, failing):
            ...

        def test_the_models_are_as_before():
            assert container.models == before
    """)
    run(served, "-o", "toolbox_container=served:container").assert_outcomes(passed=1, errors=2)


def test_applications_without_a_configured_model_start_with_a_scripted_one(served: pytest.Pytester) -> None:
    served.makepyfile("""
        def test_it_answers(client, scripted_model):
            scripted_model.will_reply("one")
            assert client.get("/ask").json() == "one"
    """)
    run(served).assert_outcomes(passed=1)


def test_requests_to_model_servers_are_refused_unless_allowed(
    served: pytest.Pytester, model_server: ModelServer
) -> None:
    served.makepyfile("""
        import pytest
        from toolbox import ChatRequest, OpenAiChatModel, UserMessage

        @pytest.mark.parametrize("path", ["/ask", "/other"])
        def test_unscripted_model(client, path):
            with pytest.raises(AssertionError, match="scripted_model.*allow_model_requests"):
                client.get(path)

        def test_by_hand():
            import asyncio
            model = OpenAiChatModel("gpt")
            request = ChatRequest([UserMessage("Hello")])
            with pytest.raises(AssertionError, match="scripted_model.*allow_model_requests"):
                asyncio.run(model.chat(request))

            async def stream():
                async for _ in model.stream(request): ...

            with pytest.raises(AssertionError, match="scripted_model.*allow_model_requests"):
                asyncio.run(stream())
    """)
    run(served).assert_outcomes(passed=3)
    assert model_server.asked == 0


def test_tests_can_allow_requests_to_model_servers(served: pytest.Pytester, model_server: ModelServer) -> None:
    served.makepyfile("""
        import pytest

        @pytest.mark.allow_model_requests
        def test_by_marker(client):
            assert client.get("/ask").json() == "real"

        def test_by_fixture(client, allow_model_requests):
            assert client.get("/ask").json() == "real"

        def test_the_next_one_is_refused_again(client):
            with pytest.raises(AssertionError, match="scripted_model"):
                client.get("/ask")

        @pytest.mark.allow_model_requests
        def test_a_container_for_the_test_keeps_its_models(toolbox_container):
            import asyncio
            from served import Desk
            assert asyncio.run(toolbox_container.get(Desk).ask("Hello")) == "real"
    """)
    run(served, "-o", "toolbox_container=served:container").assert_outcomes(passed=4)
    assert model_server.asked == 3


def test_servers_started_by_the_test_are_not_refused(
    served: pytest.Pytester, model_server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL")
    served.makepyfile(f"""
        import asyncio
        from toolbox import ChatRequest, OpenAiChatModel, UserMessage

        def test_a_local_wire():
            model = OpenAiChatModel("gpt", {model_server.url!r})
            reply = asyncio.run(model.chat(ChatRequest([UserMessage("Hello")])))
            assert reply.ai_message.text == "real"
    """)
    run(served).assert_outcomes(passed=1)
    assert model_server.asked == 1


def test_containers_keep_their_own_scripted_models(served: pytest.Pytester) -> None:
    served.makepyfile("""
        import asyncio
        from served import Desk
        from toolbox import Container
        from toolbox.testing import ScriptedChatModel

        def test_two_scripts(scripted_model):
            async def ask():
                models = {"default": ScriptedChatModel(["its own"])}
                async with Container(models=models).register(Desk) as container:
                    return await container.get(Desk).ask("Hello")

            assert asyncio.run(ask()) == "its own"
    """)
    run(served).assert_outcomes(passed=1)


def test_an_overridden_scripted_model_works_in_all_tests_of_its_scope(served: pytest.Pytester) -> None:
    served.makepyfile("""
        import pytest
        from toolbox.testing import ScriptedChatModel

        @pytest.fixture(scope="module")
        def scripted_model():
            return ScriptedChatModel(["one", "two", "three"])

        def test_first(client, scripted_model):
            assert client.get("/ask").json() == "one"

        def test_second(client, scripted_model):
            assert client.get("/ask").json() == "two"

        class TestOwn:
            @pytest.fixture
            def scripted_model(self):
                return ScriptedChatModel(["its own"])

            def test_own(self, client, scripted_model):
                assert client.get("/ask").json() == "its own"

        def test_third(client, scripted_model):
            assert client.get("/ask").json() == "three"
    """)
    run(served).assert_outcomes(passed=4)
