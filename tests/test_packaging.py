"""The wheel: its files, and that it works without the repository."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # starts processes

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.strip()[-200:]}")
    [built] = folder.glob("toolbox_di-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an empty folder; only its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("site")
    done = run("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder), str(wheel))
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_contains_both_packages_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"toolbox", "toolbox_fastapi"}
    assert {"toolbox/py.typed", "toolbox_fastapi/py.typed"} <= set(names)
    page = ROOT / "toolbox_fastapi" / "dev_ui" / "page"
    assert {each.name for each in page.iterdir()} == {Path(name).name for name in names if "/dev_ui/page/" in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, pathlib, toolbox\n"
        "from typing import Protocol\n"
        "from toolbox import DemoChatModel, create_ai_service, tool\n"
        f"assert pathlib.Path(toolbox.__file__).is_relative_to({str(installed)!r})\n"
        "class Echo(Protocol):\n"
        "    async def say(self, text: str) -> str: ...\n"
        "@tool\n"
        "def shout(text: str) -> str:\n"
        "    return text.upper()\n"
        "print(asyncio.run(create_ai_service(Echo, chat_model=DemoChatModel(), tools=[shout]).say('hello')))\n",
        encoding="utf-8",
    )

    done = run("-W", "error", str(program), PYTHONPATH=str(installed))

    assert done.returncode == 0, done.stderr
    assert "HELLO" in done.stdout


def test_the_program_of_the_readme_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    [menu] = re.findall(r"(?ms)^`menu\.py`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"))
    (tmp_path / "menu.py").write_text(menu, encoding="utf-8")
    client = (
        "import pathlib, menu, toolbox_fastapi\n"
        "from fastapi.testclient import TestClient\n"
        f"assert pathlib.Path(toolbox_fastapi.__file__).is_relative_to({str(installed)!r})\n"
        "with TestClient(menu.app) as client:\n"
        "    print(client.get('/ask?question=Is+there+soup').json())\n"
    )
    path = os.pathsep.join([str(installed), str(tmp_path)])

    done = run("-P", "-c", client, PYTHONPATH=path, TOOLBOX_DEMO="1")

    assert done.returncode == 0, done.stderr
    assert "pumpkin soup 7.5" in done.stdout
