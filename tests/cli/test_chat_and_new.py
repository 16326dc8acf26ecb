"""`toolbox chat` and `toolbox new`, as processes a user starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
from typing import Protocol
from pydantic import BaseModel
from toolbox import AiMessage, Container, MemoryId, register_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call

class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        return a + b

class Sum(BaseModel):
    total: int

@register_ai_service(tools=Calculator)
class Assistant(Protocol):
    async def chat(self, session: MemoryId[str], question: str) -> str: ...
    async def total(self, question: str) -> Sum: ...

replies = [AiMessage(None, [tool_call("add", {"a": 2, "b": 3})]), "It is [five].", "You asked for a sum."]
model = ScriptedChatModel(replies)
container = Container(models={"default": model})
container.register(Assistant)
"""


def toolbox(*arguments: str, folder: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "toolbox.cli", *arguments],
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_conversation_shows_text_and_tool_calls_and_remembers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    done = toolbox("chat", "program:Assistant", folder=tmp_path, typed="What is 2 + 3?\n\nWhat did I ask?\nexit\n")

    assert done.returncode == 0, done.stderr
    assert '→ add {"a": 2, "b": 3}' in done.stdout
    assert "← 5 (" in done.stdout
    assert "It is [five]." in done.stdout
    assert "You asked for a sum." in done.stdout
    assert "2 turns" in done.stdout


def test_a_failure_is_shown_and_the_conversation_goes_on(tmp_path: Path) -> None:
    broken = PROGRAM.replace(
        "replies = [", "from toolbox import ModelHttpError\nreplies = [ModelHttpError(503, 'down'), "
    )
    (tmp_path / "program.py").write_text(broken)

    done = toolbox("chat", "program:Assistant", folder=tmp_path, typed="one\ntwo\n")

    assert done.returncode == 0, done.stderr
    assert "503" in done.stdout
    assert "It is [five]." in done.stdout


def test_a_method_is_named_and_its_structured_reply_printed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("replies = [", "replies = ['{\"total\": 7}', "))

    done = toolbox("chat", "program:Assistant", "--method", "total", folder=tmp_path, typed="q\n")

    assert '"total": 7' in done.stdout, done.stdout + done.stderr


def test_mistakes_get_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    nowhere = toolbox("chat", "program:Nobody", folder=tmp_path)
    method = toolbox("chat", "program:Assistant", "--method", "nope", folder=tmp_path)

    assert (nowhere.returncode, method.returncode) == (2, 2)
    assert "Traceback" not in nowhere.stderr + method.stderr
    assert "nope" in method.stderr + method.stdout


def test_a_new_project_passes_its_own_tests(tmp_path: Path) -> None:
    made = toolbox("new", "my-shop", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    project = tmp_path / "my-shop"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)

    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "1 passed" in tests.stdout
    checked = toolbox("check", "my_shop:container", folder=project)
    assert "no default model" in checked.stdout + checked.stderr


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").write_text("mine")

    done = toolbox("new", "shop", folder=tmp_path)

    assert done.returncode == 2
    assert "not empty" in done.stderr + done.stdout
    assert [each.name for each in (tmp_path / "shop").iterdir()] == ["mine.txt"]
