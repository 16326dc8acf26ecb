"""Projects of `toolbox new --front-end`, as a user builds them, in a browser: approve, reload, stop, go back."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compat.conftest import node_module
from tests.conftest import complaints_of
from tests.fastapi.conftest import serving_on_a_thread  # noqa: F401 - a fixture
from tests.fastapi.test_vercel_ai import Gated
from toolbox.cli.new_project import WITH_FRONT_END, new_project

pytestmark = pytest.mark.timeout(600)  # installs packages, and starts a browser
Serving = Callable[..., Any]


@pytest.fixture(scope="module", params=WITH_FRONT_END)
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / f"shop_{request.param.replace('-', '_')}"
    new_project(folder, WITH_FRONT_END[request.param])
    if (page := folder / "frontend").exists():
        node_module("esbuild")  # else packages from npm are not wanted here
        for command in (["install", "--no-audit", "--no-fund"], ["run", "build"]):
            done = subprocess.run(["npm", *command], cwd=page, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def load(project: Path) -> Any:
    """Return the module of a project, with a new container."""
    specification = importlib.util.spec_from_file_location(project.name, project / f"{project.name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_MODEL", raising=False)


def say(tab: Any, text: str) -> None:
    tab.fill("input", text)
    tab.click("text=Send")


def test_a_page_orders_after_an_approval_and_keeps_its_conversations(
    project: Path,
    serving_on_a_thread: Serving,  # noqa: F811
    clean_tab: Any,
) -> None:
    tab = clean_tab
    with serving_on_a_thread(load(project).app) as url, complaints_of(tab, lambda asked: asked.startswith(url)) as said:
        tab.goto(url)
        say(tab, "Order 2 tins of white paint")
        tab.wait_for_selector("text=Yes")
        tab.reload()
        tab.click("text=Yes")
        tab.wait_for_selector("text=ordered: 2 x white paint")
        tab.wait_for_selector("text=Send")
        before = tab.locator("section.user").count()
        tab.click("text=New conversation")
        tab.wait_for_function("document.querySelectorAll('section').length === 0")
        say(tab, "Order 3 tins of blue paint")
        tab.click('button:text-is("No")')
        tab.wait_for_selector("text=/→ .*rejected/")
        tab.click("nav >> text=Order 2 tins")
        tab.wait_for_selector("text=ordered: 2 x white paint")
        texts = tab.locator("section.user").all_inner_texts()

    assert before == 1
    assert texts == ["Order 2 tins of white paint"]
    # An AG-UI client asks for an answer under way by posting: there is none, which browsers report.
    assert [each for each in said if "422" not in each] == []


def test_a_page_stops_an_answer(
    project: Path,
    serving_on_a_thread: Serving,  # noqa: F811
    clean_tab: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolbox.DemoChatModel", lambda: Gated(["Hello there you."]))
    tab = clean_tab
    with serving_on_a_thread(load(project).app) as url:
        tab.goto(url)
        say(tab, "hi")
        tab.wait_for_selector("text=Hello there")
        tab.reload()
        tab.wait_for_selector("text=Hello there")
        tab.click("text=Stop")
        tab.wait_for_selector("text=Send")

        assert tab.locator("[role=alert]:visible").count() == 0
        tab.reload()
        tab.wait_for_selector("text=Hello there")
        assert tab.locator("section.user").count() == 1
