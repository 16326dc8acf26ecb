"""The dev UI over HTTP: who is let in, what is shown, what can be called, and nothing when it is off."""

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from tests import programs
from toolbox import (
    AiMessage,
    AudioContent,
    Container,
    IllegalConfigurationError,
    ImageContent,
    InvocationContext,
    MemoryId,
    Message,
    OpenAiChatModel,
    PdfContent,
    Result,
    TokenStream,
    ToolAbort,
    UserMessage,
    call_scoped,
    only_if,
    produces,
    register_ai_service,
    request_scoped,
    run_on_thread,
    tool,
    toolbox,
    user_message,
)
from toolbox.events import EventListener, InvocationEvent
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, Inject, install
from toolbox_fastapi.dev_ui import routes

pytestmark = pytest.mark.anyio

HERE = {"host": "localhost"}
OPEN = DevUi(token=False)


@request_scoped
class Basket:
    def __init__(self) -> None:
        self.dishes: list[str] = []

    @tool
    def add(self, dish: str, count: int = 1) -> list[str]:
        """Puts a dish into the basket."""
        self.dishes += [dish] * count
        return self.dishes

    @tool
    async def leave(self) -> None:
        raise ToolAbort("the guest has left")

    @tool
    def note(self, text: str, table: MemoryId[str]) -> str:
        return f"{table}: {text}"


@register_ai_service(tools=Basket)
class Waiter(Protocol):
    """Serves guests.

    Friendly.
    """

    async def serve(self, table: MemoryId[str], wish: str) -> Result[str]: ...
    def tell(self, table: MemoryId[str], wish: str) -> TokenStream: ...


@register_ai_service
class Cook(Protocol):
    @user_message("Cook {dish} for {guests}")
    async def cook(self, dish: str, guests: int = 2) -> dict[str, int]: ...
    def recipe(self, dish: str) -> AsyncIterator[str]: ...
    def steps(self, dish: str) -> AsyncIterator[int]: ...
    def taste(self, dish: str) -> str: ...
    def smell(self, dish: str) -> Iterator[str]: ...
    async def look(self, message: UserMessage, photos: list[ImageContent]) -> str: ...


def restaurant(*replies: Any, dev_ui: Any = OPEN, register: tuple[Any, ...] = ()) -> FastAPI:
    app = FastAPI(title="The restaurant")
    container = Container(models={"default": ScriptedChatModel(list(replies))})
    install(app, container.register(Basket, Waiter, Cook, *register), dev_ui=dev_ui)
    return app


def entries_of(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, without its end."""
    events = [dict(line.split(": ", 1) for line in each.splitlines() if ": " in line) for each in text.split("\n\n")]
    return [json.loads(each["data"]) for each in events if "data" in each and "event" not in each]


async def asked(client: Any, method: str, **arguments: Any) -> list[dict[str, Any]]:
    body = {"method": method, "arguments": json.dumps(arguments)}
    reply = await client.post("/dev-ui/api/ask", json=body, headers=HERE)
    assert reply.status_code == 200, reply.text
    return entries_of(reply.text)


async def called(client: Any, name: str, arguments: str, **more: Any) -> Any:
    reply = await client.post("/dev-ui/api/tool", json={"tool": name, "arguments": arguments, **more}, headers=HERE)
    return reply.json()


async def program_of(client: Any) -> Any:
    return (await client.get("/dev-ui/api/program", headers=HERE)).json()


# --- whether it is there


async def test_the_dev_ui_is_off_by_default(running: Any) -> None:
    async with running(restaurant(dev_ui=False)) as client:
        assert (await client.get("/dev-ui/", headers=HERE)).status_code == 404


def test_the_modules_of_the_dev_ui_are_not_loaded_when_it_is_off() -> None:
    program = (
        "import sys; from fastapi import FastAPI; from toolbox import Container; from toolbox_fastapi import install\n"
        "install(FastAPI(), Container())\n"
        "print([name for name in sys.modules if name.startswith('toolbox_fastapi.dev_ui.')])"
    )

    done = programs.run(["-c", program], Path.cwd(), dict(os.environ))

    assert done.stdout.strip() == "['toolbox_fastapi.dev_ui.access']"


async def test_the_page_loads_nothing_from_other_servers(running: Any) -> None:
    async with running(restaurant()) as client:
        page = await client.get("/dev-ui/", headers=HERE)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page.text
        for name in ("style.css", "main.js", "beans.js", "chat.js", "forms.js", "log.js", "timeline.js", "tools.js"):
            file = await client.get(f"/dev-ui/page/{name}", headers=HERE)
            assert file.status_code == 200, name
            assert "https://" not in file.text
        assert (await client.get("/dev-ui/page/..%2Froutes.py", headers=HERE)).status_code == 404


async def test_a_browser_keeps_the_files_of_the_page_until_they_change(running: Any) -> None:
    async with running(restaurant()) as client:
        page = await client.get("/dev-ui/", headers=HERE)
        addresses = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
        assert [each.rpartition("/")[2] for each in addresses] == ["style.css", "main.js"]
        for address in addresses:
            file = await client.get(f"/dev-ui/{address}", headers=HERE)
            assert file.headers["cache-control"] == "private, max-age=31536000, immutable"
            [_, version, name] = address.split("/")
            for other in (f"page/{name}", f"page/{version[::-1]}/{name}"):  # such as of the version before
                reply = await client.get(f"/dev-ui/{other}", headers=HERE)
                assert (reply.content, reply.headers["cache-control"]) == (file.content, "no-store")
            assert (await client.get(f"/dev-ui/page/{version}/none.js", headers=HERE)).status_code == 404
            assert (await client.get(f"/dev-ui/page/{version}/..%2Froutes.py", headers=HERE)).status_code == 404
        for path in ("", "page/index.html", "api/program", "page/none.js"):
            reply = await client.get(f"/dev-ui/{path}", headers=HERE)
            assert reply.headers["cache-control"] == "no-store"


def test_the_version_in_the_addresses_of_the_files_changes_with_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "page"
    shutil.copytree(Path(routes.__file__).with_name("page"), folder)
    monkeypatch.setattr(routes, "__file__", str(tmp_path / "routes.py"))
    read = routes.PageFiles.read.__wrapped__  # type: ignore[attr-defined]  # without the cache
    versions = [read(routes.PageFiles).version]
    assert versions == [read(routes.PageFiles).version]
    for each in ("index.html", "style.css", "dom.js"):
        with (folder / each).open("a") as file:
            file.write("\n")
        versions.append(read(routes.PageFiles).version)

    assert len(set(versions)) == 4


async def test_the_path_without_a_slash_redirects_even_with_a_catch_all_route(running: Any) -> None:
    app = restaurant()

    @app.get("/{path:path}")
    async def everything(path: str) -> str:
        return path

    async with running(app) as client:
        reply = await client.get("/dev-ui", headers=HERE, follow_redirects=True)

    assert reply.url.path == "/dev-ui/"
    assert "<title>Dev UI</title>" in reply.text


async def test_the_path_can_be_chosen_and_is_not_in_the_openapi_document(running: Any) -> None:
    async with running(restaurant(dev_ui=DevUi("/inside/ui/", token=False))) as client:
        assert (await client.get("/inside/ui/", headers=HERE)).status_code == 200
        assert (await client.get("/dev-ui/", headers=HERE)).status_code == 404
        assert (await client.get("/openapi.json")).json()["paths"] == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "dev"},
        {"path": "/"},
        {"path": "/{x}"},
        {"allowed_hosts": ["http://example.org"]},
        {"allowed_hosts": ["*"]},
        {"allowed_clients": ["somewhere"]},
    ],
)
def test_invalid_options_are_reported_together(wrong: Any) -> None:
    with pytest.raises(IllegalConfigurationError, match="DevUi"):
        DevUi(**wrong)


# --- who is let in


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LocalHost", "localhost."]
)
async def test_local_host_names_are_allowed(running: Any, host: str) -> None:
    async with running(restaurant()) as client:
        assert (await client.get("/dev-ui/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "example.org"},
        {"host": "localhost.example.org"},
        {"host": "0.0.0.0:8000"},
        {"host": ""},
        {"host": "localhost", "x-forwarded-for": "203.0.113.9"},
        {"host": "localhost", "x-forwarded-for": "127.0.0.1, 203.0.113.9"},
        {"host": "localhost", "x-real-ip": "203.0.113.9"},
        {"host": "localhost", "forwarded": 'proto=http;for="[2001:db8::1]", for=127.0.0.1'},
        {"host": "localhost", "forwarded": "for=unknown"},
        {"host": "localhost", "forwarded": 'for="203.0.113.9:80"'},
        {"host": "localhost", "forwarded": "for=127.0.0.1;host=example.org"},
        {"host": "localhost", "x-forwarded-host": "example.org"},
        {"host": "localhost", "origin": "https://example.org"},
        {"host": "localhost:8000", "origin": "http://localhost:9000"},
        {"host": "localhost", "origin": "null"},
    ],
)
async def test_other_host_names_are_rejected(running: Any, headers: dict[str, str]) -> None:
    async with running(restaurant()) as client:
        for path in ("/dev-ui/", "/dev-ui/api/program", "/dev-ui/api/log", "/dev-ui/page/main.js"):
            reply = await client.get(path, headers=headers)
            assert reply.status_code == 403
            assert "dev UI" in reply.json()["detail"]


async def test_a_remote_client_is_rejected_with_the_option_that_allows_it(connect: Any, running: Any) -> None:
    for allowed, status in (((), 403), (("203.0.113.0/24",), 200)):
        app = restaurant(dev_ui=DevUi(allowed_clients=allowed, token=False))
        async with running(app):
            client = connect(app, "/dev-ui/")
            client.scope["headers"] = [(b"host", b"localhost")]
            client.scope["client"] = ("203.0.113.9", 5)
            await client.start()
            assert client.status == status
            assert allowed or b"allowed_clients=['203.0.113.9']" in client.body


async def test_an_unknown_client_is_rejected(connect: Any, running: Any) -> None:
    app = restaurant()
    async with running(app):
        client = connect(app, "/dev-ui/")
        client.scope |= {"headers": [(b"host", b"localhost")], "client": None}
        await client.start()
    assert client.status == 403
    assert b"allowed_clients" not in client.body  # which takes addresses only


@pytest.mark.parametrize("path", ["/x/", "/api/v1/x/"])
async def test_the_page_works_below_a_root_path_whether_or_not_a_proxy_removes_it(
    connect: Any, running: Any, path: str
) -> None:
    app = restaurant(dev_ui=DevUi("/x", token=False))
    async with running(app):
        for file in ("", "page/main.js", "api/program"):
            client = connect(app, path + file)
            client.scope |= {"headers": [(b"host", b"localhost")], "root_path": "/api/v1"}
            await client.start()
            assert client.status == 200


@pytest.mark.parametrize("said", ["127.0.0.1", '"127.0.0.1:4711"', '"[::1]"', '"[::1]:4711";host="localhost:80"'])
async def test_a_proxy_can_report_a_local_client(running: Any, said: str) -> None:
    async with running(restaurant()) as client:
        assert (await client.get("/dev-ui/", headers={**HERE, "forwarded": f"for={said}"})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "site", "status"),
    [
        ("http://localhost:9000", "same-origin", 200),
        ("http://evil.example", "same-origin", 403),  # its name leads to the proxy
        ("http://localhost:9000", "same-site", 403),  # another page of this machine
        ("null", "same-origin", 403),
    ],
)
async def test_the_page_works_behind_a_proxy_that_uses_its_own_host_name(
    running: Any, origin: str, site: str, status: int
) -> None:
    shown = {"host": "127.0.0.1:8000", "origin": origin, "sec-fetch-site": site}
    async with running(restaurant()) as client:
        body = {"tool": "add", "arguments": '{"dish": "soup"}'}
        assert (await client.post("/dev-ui/api/tool", json=body, headers=shown)).status_code == status


async def test_other_host_names_can_be_allowed(running: Any) -> None:
    async with running(restaurant(dev_ui=DevUi(allowed_hosts=["dev.example.org"], token=False))) as client:
        assert (await client.get("/dev-ui/", headers={"host": "dev.example.org:8000"})).status_code == 200
        assert (await client.get("/dev-ui/", headers={"host": "example.org"})).status_code == 403


async def test_pages_of_other_sites_cannot_call_anything(running: Any) -> None:
    body = json.dumps({"tool": "add", "arguments": "{}"})
    async with running(restaurant()) as client:
        for headers, status in (
            ({"content-type": "text/plain"}, 422),
            ({}, 422),
            ({"content-type": "application/json", "sec-fetch-site": "cross-site"}, 403),
            ({"content-type": "application/json", "sec-fetch-site": "same-site"}, 403),
            ({"content-type": "application/json", "origin": "http://evil.example"}, 403),
            ({"content-type": "application/json", "origin": "http://localhost", "sec-fetch-site": "same-origin"}, 200),
        ):
            reply = await client.post("/dev-ui/api/tool", content=body, headers={**HERE, **headers})
            assert reply.status_code == status, headers
        assert (await client.get("/dev-ui/api/tool", headers=HERE)).status_code == 405


async def test_websockets_are_rejected(connect: Any, running: Any) -> None:
    app = restaurant()
    async with running(app):
        client = connect(app, "/dev-ui/api/log", "websocket")
        await client.start()
    assert client.response == [{"type": "websocket.close", "code": 1008}]


# --- what is shown


async def test_services_are_shown_with_their_parameters_and_tools(running: Any) -> None:
    async with running(restaurant()) as client:
        shown = await program_of(client)

    assert shown["title"] == "The restaurant"
    waiter, cook = shown["services"]
    assert (waiter["name"], waiter["doc"], waiter["model"]) == ("Waiter", "Serves guests.", "ScriptedChatModel")
    serve, tell = waiter["methods"]
    assert serve["tools"] == ["add", "leave", "note"]
    assert (serve["memory"], serve["memory_parameter"], serve["user_parameter"]) == (
        "the last 20 messages",
        "table",
        "wish",
    )
    assert (serve["streams"], tell["streams"]) == (False, True)
    assert serve["returns"] == "Result[str]"
    methods = {each["name"]: each for each in cook["methods"]}
    assert methods["cook"]["schema"]["required"] == ["dish"]
    assert methods["cook"]["returns"] == "dict[str, int]"
    assert methods["look"]["schema"]["properties"]["photos"]["type"] == "array"


async def test_tools_are_shown_as_models_see_them(running: Any) -> None:
    async with running(restaurant()) as client:
        tools = {each["id"]: each for each in (await program_of(client))["tools"]}

    assert tools["add"]["description"] == "Puts a dish into the basket."
    assert tools["add"]["schema"]["properties"]["count"] == {"type": "integer"}
    assert tools["add"]["offered_by"] == ["Waiter.serve", "Waiter.tell"]
    assert (tools["add"]["runs"], tools["leave"]["runs"]) == ("a worker thread", "the event loop")
    assert tools["note"]["needs_memory_id"]
    assert "table" not in tools["note"]["schema"]["properties"]


async def test_tools_of_endpoints_and_unused_tools_are_shown(running: Any) -> None:
    class Clock:
        @tool
        def now(self) -> str:
            return "noon"

    class Refunds:
        @tool
        def add(self, amount: float) -> str:
            return f"{amount}"

    app = restaurant(register=(Clock,))

    @app.post("/refund")
    @toolbox(Refunds)
    async def refund() -> None: ...

    async with running(app) as client:
        tools = {each["id"]: each for each in (await program_of(client))["tools"]}
        assert tools["now"]["offered_by"] == []
        assert tools["add~2"]["offered_by"] == ["POST /refund (refund)"]
        assert (await called(client, "add~2", '{"amount": 2.5}'))["text"] == "2.5"
        assert (await called(client, "now", "{}"))["text"] == "noon"


async def test_beans_are_shown_with_their_links(running: Any) -> None:
    async with running(restaurant()) as client:
        beans = {each["type"]: each for each in (await program_of(client))["beans"]}

    assert beans["Basket"]["scope"] == "request"
    assert beans["Basket"]["tools"] == ["add", "leave", "note"]
    assert beans["Waiter"]["links"] == [{"to": "basket", "manner": "calls"}]


async def test_values_of_settings_and_keys_are_never_shown(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "hunter2-env")
    monkeypatch.setenv("TOOLBOX_MODELS__OTHER__API_KEY", "hunter2-key")
    monkeypatch.setenv("TOOLBOX_MODELS__OTHER__MODEL", "small")

    class DbSettings(BaseSettings):
        db_password: SecretStr
        url: str = "postgres://hunter2-default@db"

    class Repository:
        def __init__(self, settings: DbSettings) -> None:
            self.settings = settings

    @register_ai_service(model="other")
    class Clerk(Protocol):
        async def ask(self, text: str) -> str: ...

    model = OpenAiChatModel("big", base_url="http://127.0.0.1:9/v1", api_key="hunter2-given")
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Waiter, Repository, Clerk), dev_ui=OPEN)

    async with running(app) as client:
        text = (await client.get("/dev-ui/api/program", headers=HERE)).text
    await model.aclose()

    assert "DbSettings" in text
    assert "OpenAiChatModel, big" in text
    assert "'other': OpenAiChatModel, small" in text
    assert "hunter2" not in text


# --- tools


async def test_a_tool_is_called_in_its_own_request_scope(running: Any) -> None:
    async with running(restaurant()) as client:
        first = await called(client, "add", '{"dish": "soup", "count": "2"}')
        second = await called(client, "add", '{"dish": "cake",}')

    assert (first["text"], first["is_error"]) == ('["soup","soup"]', False)
    assert first["duration"] > 0
    assert second["text"] == '["cake"]'


async def test_what_was_left_out_is_shown_with_the_reason(running: Any) -> None:
    @only_if(profile="prod")
    class Delivery: ...

    async with running(restaurant(register=(Delivery,))) as client:
        program = await program_of(client)

    assert program["left_out"] == [{"name": "Delivery", "why": "the profile 'prod' is not active (none is)"}]


async def test_beans_of_a_call_are_closed_when_it_ends(running: Any) -> None:
    happened: list[str] = []

    @call_scoped
    class Session:
        async def stop(self) -> None:
            happened.append("closed")

    class Till:
        def __init__(self, session: Session) -> None: ...

        @tool
        def pay(self, context: InvocationContext) -> str:
            happened.append(f"paid {context.service.__name__}")
            return "paid"

    async with running(restaurant(register=(Session, Till))) as client:
        assert (await called(client, "pay", "{}"))["text"] == "paid"
        assert happened == ["paid DevUiPage", "closed"]


async def test_invalid_arguments_get_the_message_that_a_model_reads(running: Any) -> None:
    async with running(restaurant()) as client:
        missing = await called(client, "add", "{}")
        broken = await called(client, "add", '{"dish": ')

    assert missing["is_error"]
    assert "dish" in missing["text"]
    assert broken["is_error"]


async def test_errors_of_the_framework_are_shown_to_the_developer(running: Any) -> None:
    class Till:
        @tool
        def pay(self) -> str:
            raise ValueError("no change")

    @register_ai_service
    class Nested(Protocol):
        @tool
        def ask_again(self, text: str) -> str: ...

    async with running(restaurant("never sent", register=(Till, Nested))) as client:
        assert await called(client, "leave", "{}") == {
            "type": "failure",
            "kind": "ToolAbort",
            "message": "the guest has left",
        }
        shown = await called(client, "pay", "{}")
        assert (shown["text"], shown["is_error"]) == ("no change", True)
        assert (await called(client, "ask_again", '{"text": "x"}'))["text"] == "never sent"


async def test_a_tool_gets_the_memory_id_it_needs(running: Any) -> None:
    async with running(restaurant()) as client:
        reply = await client.post(
            "/dev-ui/api/tool", json={"tool": "note", "arguments": '{"text": "hi"}'}, headers=HERE
        )
        assert (reply.status_code, reply.json()["detail"]) == (422, "this tool needs a memory id")
        assert (await called(client, "note", '{"text": "hi"}', memory_id="7"))["text"] == "7: hi"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{",
        '{"tool": "add"}',
        '{"tool": 1, "arguments": "{}"}',
        '{"tool": "add", "arguments": {}}',
        '{"tool": "nothing", "arguments": "{}"}',
        '{"tool": "add", "arguments": "{}", "more": 1}',
        '"' + "x" * 1_100_000 + '"',
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
async def test_invalid_tool_calls_are_rejected(running: Any, body: Any) -> None:
    async with running(restaurant()) as client:
        reply = await client.post(
            "/dev-ui/api/tool", content=body, headers={**HERE, "content-type": "application/json"}
        )

    assert reply.status_code == 422
    assert reply.json()["detail"]


# --- services


async def test_a_service_answers_and_its_tool_calls_are_shown(running: Any) -> None:
    async with running(restaurant(tool_call("add", {"dish": "soup"}), "Coming!")) as client:
        entries = await asked(client, "Waiter.serve", table="7", wish="Soup, please")

    [started] = [each for each in entries if each["type"] == "started"]
    assert started["where"] == "Waiter.serve"
    assert (started["user_message"], started["memory_id"], started["parent"]) == ("Soup, please", "7", None)
    [before] = [each for each in entries if each["type"] == "tool_started"]
    assert (before["name"], before["arguments"]) == ("add", '{"dish": "soup"}')
    [ran] = [each for each in entries if each["type"] == "tool"]
    assert (ran["call"], ran["result"], ran["is_error"]) == (before["call"], '["soup"]', False)
    assert ran["duration"] > 0
    asked_first, asked_again = [each["sent"] for each in entries if each["type"] == "model_started"]
    assert asked_first == "user: Soup, please"
    assert asked_again.endswith('model: → add {"dish": "soup"}\n\nadd: ["soup"]')
    assert [each["result"] for each in entries if each["type"] == "model"] == ['→ add {"dish": "soup"}', "Coming!"]
    assert [each["messages"] for each in entries if each["type"] == "memory"] == [4]
    assert (entries[-1]["type"], entries[-1]["value"]) == ("answer", "Coming!")


async def test_a_stream_arrives_in_pieces(running: Any) -> None:
    async with running(restaurant(tool_call("add", {"dish": "soup"}), "Coming right up!")) as client:
        entries = await asked(client, "Waiter.tell", table="7", wish="Soup")

    kinds = [each["type"] for each in entries]
    assert kinds.index("tool_started") < kinds.index("tool") < kinds.index("text")
    assert "".join(each["text"] for each in entries if each["type"] == "text") == "Coming right up!"
    assert kinds.count("tool") == 1


@pytest.mark.parametrize("method", ["Cook.recipe", "Cook.smell", "Cook.taste"])
async def test_each_kind_of_method_can_be_called(running: Any, method: str) -> None:
    async with running(restaurant("Stir it.")) as client:
        entries = await asked(client, method, dish="soup")

    assert entries[-1]["value"] == "Stir it."


async def test_structured_answers_and_items_are_shown_as_json(running: Any) -> None:
    async with running(restaurant('{"salt": 3}', '{"value": [1, 2]}')) as client:
        assert (await asked(client, "Cook.cook", dish="soup"))[-1]["value"] == {"salt": 3}
        entries = await asked(client, "Cook.steps", dish="soup")

    assert [each["value"] for each in entries if each["type"] == "item"] == [1, 2]


async def test_conversations_continue_with_their_memory_id(running: Any) -> None:
    model = ScriptedChatModel(["one", "two", "three"])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Waiter), dev_ui=OPEN)

    async with running(app) as client:
        for table in ("7", "7", "8"):
            await asked(client, "Waiter.serve", table=table, wish="hello")

    assert [len(each.messages) for each in model.requests] == [1, 3, 1]


async def test_images_are_entered_as_urls(running: Any) -> None:
    model = ScriptedChatModel(["nice"])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Cook), dev_ui=OPEN)

    async with running(app) as client:
        await asked(client, "Cook.look", message="Look", photos=["https://example.org/soup.png"])
        refused = await client.post(
            "/dev-ui/api/ask",
            json={"method": "Cook.look", "arguments": '{"message": "x", "photos": ["file:///etc/passwd"]}'},
            headers=HERE,
        )

    message = model.requests[0].messages[-1]
    assert isinstance(message, UserMessage)
    assert ImageContent(url="https://example.org/soup.png") in message.contents
    assert refused.status_code == 422


@register_ai_service(tools=[])
class Reader(Protocol):
    async def read(self, page: PdfContent | ImageContent, sound: AudioContent, question: str) -> str: ...


class Scanner:
    @tool
    def scan(self) -> list[Any]:
        return [
            "see",
            PdfContent(data=b"%PDF", name="bill.pdf"),
            AudioContent(b"RIFF\xff\xfe", "audio/x-wav"),
            ImageContent(data=b"\x89PNG\xff\xfe"),
            PdfContent("https://example.org/a.pdf"),
        ]


async def test_documents_and_recordings_are_entered_as_files(running: Any) -> None:
    model = ScriptedChatModel(["a bill", "a menu"])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Reader), dev_ui=OPEN)
    wav = "data:audio/wav;base64,UklGRg=="

    async with running(app) as client:
        fields = (await client.get("/dev-ui/api/program", headers=HERE)).json()
        await asked(client, "Reader.read", page="data:application/pdf;base64,JVBERg==", sound=wav, question="?")
        await asked(client, "Reader.read", page="https://example.org/menu.pdf", sound=wav, question="?")
        refused = [
            await client.post("/dev-ui/api/ask", json={"method": "Reader.read", "arguments": text}, headers=HERE)
            for text in (
                '{"page": "x", "sound": "y", "question": "?"}',
                '{"page": "https://a/b", "sound": "https://a/b.wav", "question": "?"}',
                '{"page": "data:application/pdf;base64,%", "sound": "data:image/png;base64,AA==", "question": "?"}',
            )
        ]

    sound = AudioContent("data:audio/wav;base64,UklGRg==", "audio/wav")
    assert [each.messages[-1] for each in model.requests] == [
        UserMessage([PdfContent("data:application/pdf;base64,JVBERg=="), sound, "?"]),
        UserMessage([PdfContent("https://example.org/menu.pdf"), sound, "?"]),
    ]
    assert [each.status_code for each in refused] == [422] * 3
    assert "a PDF document" in refused[0].text
    assert "a recording" in refused[1].text
    assert "invalid base64" in refused[2].text
    assert '"contentMediaType": "image/*,application/pdf"' in json.dumps(fields)
    assert '"contentMediaType": "audio/*"' in json.dumps(fields)


async def test_contents_of_a_tools_result_can_be_shown_and_saved(running: Any) -> None:
    async with running(restaurant(register=(Scanner,))) as client:
        answer = await called(client, "scan", "{}")

    assert answer["text"] == "see"
    assert answer["contents"] == [
        {"kind": "document", "name": "bill.pdf", "url": "data:application/pdf;base64,JVBERg=="},
        {"kind": "audio", "name": "audio.wav", "url": "data:audio/x-wav;base64,UklGRv/+"},
        {"kind": "image", "name": "image.png", "url": "data:image/png;base64,iVBOR//+"},
        {"kind": "document", "name": "document.pdf", "url": "https://example.org/a.pdf"},
    ]


async def test_an_error_is_shown_to_the_developer(running: Any) -> None:
    async with running(restaurant(RuntimeError("the oven is off"))) as client:
        entries = await asked(client, "Waiter.serve", table="7", wish="Soup")

    shown = {"type": "failure", "kind": "RuntimeError", "message": "the oven is off"}
    assert entries[-1] == shown | {"at": entries[-1]["at"], "duration": entries[-1]["duration"]}
    [ended] = [each for each in entries if each["type"] == "ended"]
    assert ended["failure"] == shown
    [model] = [each for each in entries if each["type"] == "model"]
    assert (model["is_error"], model["result"]) == (True, "RuntimeError: the oven is off")


@pytest.mark.parametrize(
    ("method", "arguments", "fault"),
    [
        ("Waiter.nothing", "{}", "unknown service method"),
        ("Waiter.serve", "{}", "table: missing; wish: missing"),
        ("Waiter.serve", "[]", "must be a JSON object"),
        ("Waiter.serve", "{", "not valid JSON"),
        ("Waiter.serve", '{"table": "7", "wish": 5}', "wish"),
        ("Waiter.serve", '{"table": "7", "wish": "x", "self": 1}', "self: unknown parameter"),
        ("Cook.cook", '{"dish": "soup", "guests": "many"}', "guests: Input should be a valid integer"),
        ("Cook.look", '{"message": 5, "photos": []}', "message: must be a string"),
    ],
)
async def test_invalid_arguments_are_rejected_before_the_model_is_called(
    running: Any, method: str, arguments: str, fault: str
) -> None:
    async with running(restaurant()) as client:
        reply = await client.post("/dev-ui/api/ask", json={"method": method, "arguments": arguments}, headers=HERE)

    assert reply.status_code == 422
    assert fault in reply.json()["detail"]


async def test_a_client_that_disconnects_cancels_its_call(connect: Any, running: Any) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    class Oven:
        @tool
        async def bake(self) -> str:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return "done"

    @register_ai_service(tools=Oven)
    class Baker(Protocol):
        async def bake(self, what: str) -> str: ...

    app = restaurant(tool_call("bake"), register=(Baker,))
    async with running(app):
        body = json.dumps({"method": "Baker.bake", "arguments": '{"what": "bread"}'}).encode()
        client = connect(app, "/dev-ui/api/ask", method="POST", body=body)
        client.scope["headers"] = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        task = client.start()
        await started.wait()
        client.leave()
        await ended.wait()
        await task

    assert b"bread" in client.body


async def test_an_overridden_service_is_the_one_that_is_called(running: Any) -> None:
    class FakeWaiter:
        async def serve(self, table: str, wish: str) -> str:
            return f"{wish} for {table}"

    app = FastAPI()
    container = Container(models={"default": ScriptedChatModel([])}).register(Waiter)
    install(app, container, dev_ui=OPEN)
    async with running(app) as client:
        with container.override(Waiter, FakeWaiter()):  # type: ignore[type-abstract]  # a Protocol is what is overridden
            entries = await asked(client, "Waiter.serve", table="7", wish="soup")

    assert entries[-1]["value"] == "soup for 7"


async def test_the_thread_of_each_tool_is_shown(running: Any) -> None:
    class Places:
        @tool
        def pooled(self) -> str:
            return threading.current_thread().name

        @tool
        @run_on_thread
        def fresh(self) -> None: ...

        @tool
        async def on_loop(self) -> None: ...

    calls = [tool_call("pooled"), tool_call("fresh"), tool_call("on_loop")]

    @register_ai_service(tools=Places)
    class Guide(Protocol):
        async def lead(self, where: str) -> str: ...
        def show(self, where: str) -> str: ...

    replies = [AiMessage(None, calls), "there", AiMessage(None, calls), "there"]
    async with running(restaurant(*replies, register=(Guide,))) as client:
        for method, pooled in (("Guide.lead", "toolbox-pool"), ("Guide.show", "AnyIO worker thread")):
            entries = await asked(client, method, where="home")
            names = {each["call"]: each["name"] for each in entries if each["type"] == "tool_started"}
            threads = {names[each["call"]]: each["thread"] for each in entries if each["type"] == "tool"}
            assert threads["pooled"].startswith(pooled)
            assert threads["fresh"] == "toolbox-thread"
            assert threads["on_loop"] == "event loop"


# --- the log


async def followed(connect: Any, app: FastAPI, is_enough: Callable[[bytes], bool]) -> list[dict[str, Any]]:
    """Return the entries of the log until there are enough."""
    client = connect(app, "/dev-ui/api/log")
    client.scope["headers"] = [(b"host", b"localhost")]
    task = client.start()
    while not is_enough(client.body):
        client._sent.clear()
        await client._sent.wait()
    client.leave()
    await task
    return entries_of(client.body.decode())


async def test_the_log_shows_past_and_new_entries(connect: Any, running: Any) -> None:
    app = restaurant("first", "second")
    async with running(app) as http:
        await asked(http, "Waiter.serve", table="7", wish="one")
        following = asyncio.create_task(followed(connect, app, lambda body: b"second" in body))
        await followed(connect, app, lambda body: b"first" in body)
        await asked(http, "Waiter.serve", table="7", wish="two")
        entries = await following

    assert [each["user_message"] for each in entries if each["type"] == "started"] == ["one", "two"]


async def test_calls_of_the_application_are_in_the_log_with_nested_calls(connect: Any, running: Any) -> None:
    @register_ai_service
    class Expert(Protocol):
        @tool
        async def advise(self, question: str) -> str: ...

    @register_ai_service(tools=Expert)
    class Desk(Protocol):
        async def help(self, question: str) -> str: ...

    replies = [tool_call("advise", {"question": "inner?"}), "inner!", "outer!"]
    app = restaurant(*replies, register=(Expert, Desk))

    @app.get("/help")
    async def help_(desk: Inject[Desk]) -> str:
        return await desk.help("outer?")

    async with running(app) as http:
        assert (await http.get("/help")).json() == "outer!"
        entries = await followed(connect, app, lambda body: b"outer!" in body.rpartition(b"ended")[2])

    outer, inner = [each for each in entries if each["type"] == "started"]
    assert (outer["where"], outer["user_message"]) == ("Desk.help", "outer?")
    assert (inner["where"], inner["parent"]) == ("Expert.advise", outer["run"])


async def test_a_suspended_call_has_ended_in_the_log_and_waits(connect: Any, running: Any) -> None:
    class Refunds:
        @tool(requires_approval=True)
        def refund(self, order: int) -> str:
            return "refunded"

    @register_ai_service(tools=Refunds)
    class Desk(Protocol):
        async def help(self, question: str) -> str: ...

    app = restaurant(tool_call("refund", {"order": 7}), register=(Desk,))

    @app.get("/help")
    async def help_(desk: Inject[Desk]) -> str:
        return await desk.help("Refund 7")

    async with running(app) as http:
        assert (await http.get("/help")).status_code == 202
        entries = await followed(connect, app, lambda body: b'"ended"' in body)

    [call] = [each for each in entries if each["type"] == "tool"]
    [ended] = [each for each in entries if each["type"] == "ended"]
    assert (call["result"], call["is_error"]) == ("waits for an answer", False)
    assert (ended["waits"], ended["failure"]) == (True, None)


async def test_a_tool_called_from_the_page_is_in_the_log(connect: Any, running: Any) -> None:
    app = restaurant()
    async with running(app) as http:
        await called(http, "add", '{"dish": "soup"}')
        await called(http, "leave", "{}")
        entries = await followed(connect, app, lambda body: body.count(b'"ended"') == 2)

    assert [each["where"] for each in entries if each["type"] == "started"] == ["DevUiPage.add", "DevUiPage.leave"]
    results = [each["result"] for each in entries if each["type"] == "tool"]
    assert results == ['["soup"]', "ToolAbort: the guest has left"]


async def test_a_program_that_injects_its_only_listener_still_gets_it(running: Any) -> None:
    class Listener(EventListener):
        def on_event(self, event: InvocationEvent) -> None: ...

    class Reader:
        def __init__(self, listener: EventListener) -> None:
            self.listener = listener

    app = FastAPI()
    container = Container().register(Listener, Reader)
    install(app, container, dev_ui=OPEN)
    async with running(app) as client:
        assert type((await container.aget(Reader)).listener) is Listener
        assert "DevUiListener" not in json.dumps(await program_of(client))


async def test_an_open_log_does_not_delay_shutdown(serving: Any) -> None:
    async with serving(restaurant("hello")) as client:
        await asked(client, "Waiter.serve", table="7", wish="one")
        async with client.stream("GET", "/dev-ui/api/log") as reply:
            lines = reply.aiter_lines()
            assert "Waiter.serve" in await anext(lines)
            await lines.aclose()


async def test_programs_with_async_producers_are_shown(running: Any) -> None:
    @produces(scope="application")
    async def numbers() -> list[int]:
        return [1]

    async with running(restaurant(register=(numbers,))) as client:
        assert "numbers" in json.dumps((await program_of(client))["beans"])


async def test_a_text_is_the_message_of_a_method_that_takes_only_a_history(running: Any) -> None:
    @register_ai_service
    class Guide(Protocol):
        async def go_on(self, history: list[Message]) -> str: ...

    async with running(restaurant("To the left.", register=(Guide,))) as client:
        [entry] = [each for each in await asked(client, "Guide.go_on", history="Where?") if "value" in each]
        reply = await client.post(
            "/dev-ui/api/ask", json={"method": "Guide.go_on", "arguments": '{"history": 3}'}, headers=HERE
        )

    assert entry["value"] == "To the left."
    assert "history: must be a string" in reply.text
