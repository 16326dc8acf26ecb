"""Creates a new project: a FastAPI service with a tool, and tests.

Not here: the command `new` (`commands`).
"""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import PathFinder
from keyword import iskeyword
from pathlib import Path

from ..printable import for_line

APP = '''"""A FastAPI service whose model can call the tools in this file."""

from typing import Protocol

from fastapi import FastAPI

from toolbox import Container, Inject, MemoryId, Result, register_ai_service, system_message, tool
from toolbox_fastapi import install


class Articles:
    """Tools are methods that the model can call. The docstring and the type hints describe them to the model."""

    @tool
    def find_articles(self, words: str) -> dict[str, float]:
        """Find the articles that match these words, with their prices in euros."""
        prices = {{"blue paint": 12.5, "white paint": 11.0, "paper": 3.2}}
        return {{name: price for name, price in prices.items() if set(name.split()) & set(words.lower().split())}}


@register_ai_service(tools=Articles)
class Assistant(Protocol):
    @system_message("You are a helpful assistant. Use your tools.")
    async def chat(self, session: MemoryId[str], question: str) -> Result[str]: ...


container = Container().register(Assistant)
app = FastAPI(title={quoted_title})
install(app, container)


@app.get("/chat/{{session}}")
async def chat(session: str, question: str, assistant: Inject[Assistant]) -> dict[str, object]:
    # Anyone who knows a session's id can read its conversation: take the id from the user's login.
    result = await assistant.chat(session, question)
    return {{"answer": result.content, "tools": [each.request.name for each in result.tool_executions]}}
'''

TEST = '''"""Tests of the service with a scripted model, without a key or a network."""

import pytest
from fastapi.testclient import TestClient

from {package} import app, container
from toolbox.testing import ExpectedCall, ScriptedChatModel, assert_tool_calls, tool_call


def test_the_assistant_looks_prices_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedChatModel([tool_call("find_articles", {{"words": "paper"}}), "It is 3.20 €."])
    monkeypatch.setitem(container.models, "default", model)

    with TestClient(app) as client:
        reply = client.get("/chat/me", params={{"question": "What is paper?"}}).json()

    assert reply == {{"answer": "It is 3.20 €.", "tools": ["find_articles"]}}
    assert_tool_calls(model, ExpectedCall("find_articles", {{"words": "paper"}}, result='{{"paper":3.2}}'))
'''

PROJECT = """[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["toolbox-di[fastapi]"]

[dependency-groups]
dev = ["pytest>=9.2"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

README = """# {title}

    pip install 'toolbox-di[fastapi]' pytest
    TOOLBOX_DEMO=1 uvicorn {package}:app          # without a model; or set OPENAI_MODEL and OPENAI_API_KEY
    curl 'localhost:8000/chat/me?question=Have+you+got+white+paint'
    python -m pytest
    toolbox check {package}:container             # and: graph, tools, chat {package}:Assistant
"""

FILES = {
    "{package}.py": APP,
    "tests/test_{package}.py": TEST,
    "pyproject.toml": PROJECT,
    "README.md": README,
    ".gitignore": "__pycache__/\n.venv/\n.pytest_cache/\n",
}


def new_project(folder: Path) -> list[Path]:
    """Create a project in `folder`, and return the files.

    Raises `FileExistsError` if the folder is not empty. Raises `ValueError` if its name contains control characters,
    is not usable as a module name, or is the name of an installed module.
    """
    title = folder.resolve().name
    package = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
    if for_line(title) != title:
        raise ValueError(f"invalid folder name {title!r}: it contains control characters; use another name")
    if not package.isidentifier() or iskeyword(package):
        raise ValueError(f"{title!r} is not a valid module name; start with a letter, and do not use a Python keyword")
    if is_taken(package):
        raise ValueError(f"a Python module {package!r} already exists and the project would hide it; use another name")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; use another folder")
    name = package.replace("_", "-")
    quoted = json.dumps(title, ensure_ascii=False)  # a JSON string is also a Python string
    written = []
    for path, text in FILES.items():
        file = folder / path.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(name=name, package=package, title=title, quoted_title=quoted), encoding="utf-8")
        written.append(file)
    return written


def is_taken(module: str) -> bool:
    """Return True if a module of this name exists outside the current folder."""
    if module in sys.stdlib_module_names:
        return True
    elsewhere = [each for each in sys.path if each and Path(each).resolve() != Path.cwd()]
    found = PathFinder.find_spec(module, elsewhere)
    return found is not None and found.origin is not None
