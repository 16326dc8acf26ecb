"""Log lines of the library: input from outside cannot start a new line."""

import importlib
import io
import logging
import re
from pathlib import Path
from typing import Protocol

import httpx2
import pytest
from fastapi import FastAPI

from toolbox import Container, LoggingListener, ToolboxError, register_ai_service, tool
from toolbox.safe_text import LOGGERS, for_json, for_line, for_terminal
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent.parent
FORGED = "2026-11-22 INFO admin logged in"


def test_every_logger_of_the_library_writes_single_lines() -> None:
    files = [file for package in ("toolbox", "toolbox_fastapi") for file in (ROOT / package).rglob("*.py")]
    names = {name for file in files for name in re.findall(r'getLogger\("(toolbox[\w.]*)"\)', file.read_text("utf-8"))}

    assert names <= set(LOGGERS)
    importlib.import_module("toolbox")
    assert all(logging.getLogger(name).filters for name in LOGGERS)


@pytest.fixture
def written() -> io.StringIO:
    """Return the lines that a plain handler writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    yield stream  # type: ignore[misc]  # of a generator fixture
    root.removeHandler(handler)


async def test_a_line_break_in_a_request_path_does_not_start_a_log_line(written: io.StringIO) -> None:
    app = FastAPI()
    install(app, Container(), dev_ui=True)

    @app.get("/{name}")
    async def fail(name: str) -> None:
        raise TimeoutError_()

    transport = httpx2.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url="http://app") as web:
        await web.get(f"/x%0a{FORGED}%0d%1b[2J")
        await web.get("/dev-ui/", headers={"host": "localhost", "x-forwarded-for": f"1.2.3.4\t{FORGED}"})
    lines = written.getvalue().splitlines()
    assert any(f"/x\\n{FORGED}" in line for line in lines)
    assert not any(line.startswith(FORGED) for line in lines)
    assert "\x1b" not in written.getvalue()


class TimeoutError_(ToolboxError, TimeoutError):
    """Answered with 504 and logged with its path."""


class Desk(Protocol):
    async def ask(self, question: str) -> str: ...


@tool
def look(at: str) -> str:
    """Looks."""
    raise ValueError(f"cannot look\n{FORGED}")


async def test_texts_of_models_and_tools_do_not_start_a_log_line(written: io.StringIO) -> None:
    model = ScriptedChatModel([tool_call("look", {"at": "x"}), tool_call(f"no\n{FORGED}"), "done"])
    service = register_ai_service(tools=look, on_unknown_tool=lambda *_: "unknown")(Desk)
    container = Container(models={"default": model}).register(service)
    container.register_instance(LoggingListener(level=logging.WARNING))
    async with container:
        assert await container.get(Desk).ask("?") == "done"
    assert "cannot look" in written.getvalue()
    lines = [line for line in written.getvalue().splitlines() if line.startswith(FORGED)]
    traceback_lines = written.getvalue().count(f"ValueError: cannot look\n{FORGED}")
    assert len(lines) == traceback_lines  # a traceback has more lines than one in any case


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain é 漢 🙂", "plain é 漢 🙂"),
        ("a\nb\r\nc", r"a\nb\r\nc"),
        ("\x1b[0m\x9b", r"\x1b[0m\x9b"),
        ("\u202ex\u2028\ud800", r"\u202ex\u2028\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("pay\u3164\u115f\u2800\ufe00\U000e0100", r"pay\u3164\u115f\u2800\ufe00\U000e0100"),
        ("❤\ufe0f 👩\u200d🔬", "❤\ufe0f 👩\u200d🔬"),
    ],
)
def test_unsafe_characters_become_visible(text: str, line: str) -> None:
    import json

    assert for_line(text) == line
    assert "\x1b" not in for_terminal(text)
    assert json.loads(for_json(json.dumps(text, ensure_ascii=False))) == text
