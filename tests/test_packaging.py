"""The wheel: its files, and that it works without the repository."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # starts processes

ROOT = Path(__file__).parent.parent
PROGRAM = """
import asyncio, os, warnings
from typing import Protocol

import toolbox
from toolbox import DemoChatModel, create_ai_service, tool

class Echo(Protocol):
    async def say(self, text: str) -> str: ...

@tool
def shout(text: str) -> str:
    return text.upper()

print(asyncio.run(create_ai_service(Echo, chat_model=DemoChatModel(), tools=[shout]).say("hello")))

warnings.simplefilter("default")  # for other packages
os.environ["TOOLBOX_DEMO"] = "1"
import menu, toolbox_fastapi
from fastapi.testclient import TestClient

with TestClient(menu.app) as client:
    print(client.get("/ask?question=Is+there+soup").json())
print(toolbox.__file__, toolbox_fastapi.__file__, sep="\\n")
"""


def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it into an empty folder; only its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("site")
    done = run("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder), str(ROOT))
    if done.returncode:
        built = run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        assert built.returncode, f"the wheel cannot be installed: {done.stderr}"
        pytest.skip(f"no wheel can be built here: {built.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def output(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run two programs in one new process, with the wheel and without the repository; return what they print."""
    folder = tmp_path_factory.mktemp("programs")
    [menu] = re.findall(
        r"(?ms)^Save this as `menu\.py`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8")
    )
    (folder / "menu.py").write_text(menu, encoding="utf-8")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")

    done = run("-W", "error", str(folder / "program.py"), PYTHONPATH=str(installed))

    assert done.returncode == 0, done.stderr
    *printed, place, place_of_fastapi = done.stdout.splitlines()
    assert Path(place).is_relative_to(installed)
    assert Path(place_of_fastapi).is_relative_to(installed)
    return printed


def test_the_wheel_contains_both_packages_only(installed: Path) -> None:
    [record] = installed.glob("toolbox_di-*.dist-info/RECORD")
    names = [name for name, _, _ in csv.reader(record.read_text(encoding="utf-8").splitlines())]
    assert names.count("../../bin/toolbox") == 1  # the command, which pip writes

    folders = {name.partition("/")[0] for name in names if ".dist-info/" not in name and name != "../../bin/toolbox"}
    assert folders == {"toolbox", "toolbox_fastapi"}
    assert {"toolbox/py.typed", "toolbox_fastapi/py.typed"} <= set(names)
    page = ROOT / "toolbox_fastapi" / "dev_ui" / "page"
    assert {each.name for each in page.iterdir()} == {Path(name).name for name in names if "/dev_ui/page/" in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_without_the_repository(output: list[str]) -> None:
    assert "HELLO" in output[0]


def test_the_program_of_the_readme_runs_from_the_wheel(output: list[str]) -> None:
    assert "pumpkin soup 7.5" in output[1]


def test_tests_that_need_a_library_of_other_authors_skip_without_it() -> None:
    program = "import sys, pytest; sys.modules |= {'celery': None, 'taskiq': None}; sys.exit(pytest.main(sys.argv[1:]))"
    tests = str(ROOT / "tests/di/test_injected_functions.py"), "-k", "celery or taskiq or typer"

    done = run("-c", program, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests)

    assert (done.returncode, "1 passed, 3 skipped" in done.stdout) == (0, True), done.stdout
