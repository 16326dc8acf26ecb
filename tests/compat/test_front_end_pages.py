"""The front ends of the documentation, in a browser, with the libraries from npm."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import HTMLResponse, Response

from tests.compat.conftest import INSTALLED, node_module
from tests.compat.test_front_ends import NODE
from tests.fastapi.conftest import serving_on_a_thread  # noqa: F401 - a fixture
from tests.fastapi.front_desk import REFUND, Refunds, made, says
from tests.fastapi.test_vercel_ai import Gated
from toolbox import Container
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.timeout(400)  # starts a browser
PAGE = Path(__file__).parent.parent.parent / "docs" / "use-chat-and-ag-ui.md"
MAIN = """
import { createRoot } from "react-dom/client";
import { Desk } from "./desk.jsx";
const messages = await (await fetch("/api/chat/room/messages")).json();
createRoot(document.querySelector("#root")).render(<Desk room="room" messages={messages} />);
"""
BODY = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
FORM = f'{BODY}<div id="log"></div><form><input name="text"><button>Send</button></form>'

Serving = Callable[..., Any]


def bundle(folder: Path, name: str, react: str | None = None) -> str:
    """Return the code of a page with its libraries. `react` is the package with `useChat`."""
    esbuild = node_module("esbuild") / "bin" / "esbuild"
    options = ["--bundle", "--jsx=automatic", "--format=esm", "--log-level=error"]
    if react is not None:
        chat = node_module(react)
        own = chat / "node_modules" / "ai"
        options += [f"--alias:@ai-sdk/react={chat}", f"--alias:ai={own if own.exists() else node_module('ai')}"]
    environment = {"NODE_PATH": str(INSTALLED / "node_modules")}
    # The binary of the platform, or the script that finds it.
    is_script = esbuild.read_bytes()[:2] == b"#!"
    command = [*([str(NODE)] if is_script else []), str(esbuild), name, *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


@contextmanager
def served(serving: Serving, model: ScriptedChatModel, page: str, code: str) -> Iterator[tuple[str, Container]]:
    app, container = made(model)

    @app.get("/")
    async def show() -> Response:
        return HTMLResponse(f'{page}<script type="module" src="/code.js"></script>')

    @app.get("/code.js")
    async def script() -> Response:
        return Response(code, media_type="text/javascript")

    @app.post("/go-on")
    async def go_on() -> None:
        assert isinstance(model, Gated)
        model.may_go_on.set()

    with serving(app) as url:
        yield url, container


def say_hi(tab: Any, url: str, selector: str) -> None:
    """Open the page, send a message, and wait for what the answer shows."""
    tab.goto(url)
    tab.fill("input", "hi")
    tab.click("text=Send")
    tab.wait_for_selector(selector)


@pytest.fixture(scope="module", params=["ai-sdk-react-6", "ai-sdk-react-7"])
def react_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    [component] = re.findall(r"^```jsx\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (folder / "desk.jsx").write_text(component, "utf-8")
    (folder / "main.jsx").write_text(MAIN, "utf-8")
    return bundle(folder, "main.jsx", request.param)


def test_the_react_component_approves_a_call_after_a_reload(
    react_code: str,
    serving_on_a_thread: Serving,  # noqa: F811
    tab: Any,
) -> None:
    model = ScriptedChatModel([says(REFUND, text="Sure."), "It is done."])
    with served(serving_on_a_thread, model, f'{BODY}<div id="root"></div>', react_code) as (url, container):
        say_hi(tab, url, "text=Yes")
        tab.reload()
        tab.click("text=Yes")
        tab.wait_for_selector("text=It is done.")

        assert container.get(Refunds).refunded == [7]
        assert tab.locator("section").all_inner_texts() == ["hi", "Sure.\n\nIt is done."]
        tab.goto("about:blank")


def test_the_react_component_stops_an_answer(
    react_code: str,
    serving_on_a_thread: Serving,  # noqa: F811
    tab: Any,
) -> None:
    model = Gated(["Hello there you."])
    with served(serving_on_a_thread, model, f'{BODY}<div id="root"></div>', react_code) as (url, _):
        say_hi(tab, url, "text=Hello there")
        tab.click("text=Stop")
        tab.wait_for_selector("text=Stop", state="detached")

        # The run has ended: nothing is left that a page could show.
        assert tab.request.get(f"{url}/api/chat/room/stream").status == 204
        assert tab.locator("[role=alert]").count() == 0
        tab.goto("about:blank")


def test_the_react_component_is_loaded_again_while_an_answer_streams(
    react_code: str,
    serving_on_a_thread: Serving,  # noqa: F811
    tab: Any,
) -> None:
    model = Gated(["Hello there you."])
    with served(serving_on_a_thread, model, f'{BODY}<div id="root"></div>', react_code) as (url, _):
        say_hi(tab, url, "text=Hello there")
        tab.reload()
        tab.wait_for_selector("text=Hello there")
        tab.request.post(f"{url}/go-on")
        tab.wait_for_selector("text=Hello there you.")
        tab.wait_for_selector("text=Stop", state="detached")
        streamed = tab.locator("section").all_inner_texts()
        tab.reload()
        tab.wait_for_selector("text=Hello there you.")
        stored = tab.locator("section").all_inner_texts()

        assert streamed == stored == ["hi", "Hello there you."]
        tab.goto("about:blank")


def test_the_react_component_stops_an_answer_after_a_reload(
    react_code: str,
    serving_on_a_thread: Serving,  # noqa: F811
    tab: Any,
) -> None:
    model = Gated(["Hello there you."])
    with served(serving_on_a_thread, model, f'{BODY}<div id="root"></div>', react_code) as (url, _):
        say_hi(tab, url, "text=Hello there")
        tab.reload()
        tab.click("text=Stop")
        tab.wait_for_selector("text=Stop", state="detached")
        tab.reload()
        tab.wait_for_selector("text=Hello there")

        assert tab.locator("section").all_inner_texts() == ["hi", "Hello there"]
        assert tab.locator("[role=alert]").count() == 0
        tab.goto("about:blank")


def test_the_page_in_plain_javascript_approves_a_call(
    serving_on_a_thread: Serving,  # noqa: F811
    tab: Any,
    tmp_path: Path,
) -> None:
    [code] = re.findall(r"^```js\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "main.js").write_text(code, "utf-8")
    asked: list[str] = []

    def accept(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept()

    tab.on("dialog", accept)
    model = ScriptedChatModel([says(REFUND, text="Sure."), "It is done."])
    with served(serving_on_a_thread, model, FORM, bundle(tmp_path, "main.js")) as (url, container):
        say_hi(tab, url, "text=It is done.")

        assert container.get(Refunds).refunded == [7]
        assert asked == ["Approve refund?"]
        tab.goto("about:blank")
    tab.remove_listener("dialog", accept)
