"""The dev UI over HTTP: nothing when it is off, its files, and what it shows of services, tools and beans.

Not here: access (`test_dev_ui_access`), calls (`test_dev_ui_tools`, `test_dev_ui_services`), and the log
(`test_dev_ui_log`).
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from tests import programs
from tests.fastapi.restaurant import HERE, OPEN, Waiter, called, program_of, restaurant
from toolbox import Container, IllegalConfigurationError, OpenAiChatModel, produces, register_ai_service, tool, toolbox
from toolbox_fastapi import DevUi, install
from toolbox_fastapi.dev_ui import routes

pytestmark = pytest.mark.anyio


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
    read = routes.PageFiles.read_files.__wrapped__  # type: ignore[attr-defined]  # without the cache
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


async def test_programs_with_async_producers_are_shown(running: Any) -> None:
    @produces(scope="application")
    async def numbers() -> list[int]:
        return [1]

    async with running(restaurant(register=(numbers,))) as client:
        assert "numbers" in json.dumps((await program_of(client))["beans"])
