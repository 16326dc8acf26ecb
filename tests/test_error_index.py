"""The error index has an entry for every public error and no other entries."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from toolbox import errors

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
MODULES = (
    "toolbox.errors",
    "toolbox",
    "toolbox.rest",
    "toolbox.sql",
    "toolbox.mcp",
    "toolbox.recordings",
    "toolbox.limits",
    "toolbox.security",
    "toolbox_fastapi",
)
INTERNAL_NAMES_THAT_USERS_SEE = {"ApplicationStoppingError"}


def entries() -> list[str]:
    return re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def public_errors(module: str) -> set[str]:
    there = importlib.import_module(module)
    names = getattr(there, "__all__", [name for name in vars(there) if not name.startswith("_")])
    found = {name: getattr(there, name) for name in names}
    return {name for name, each in found.items() if inspect.isclass(each) and issubclass(each, Exception)}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_error_has_its_entry(module: str) -> None:
    assert public_errors(module) - {*entries(), errors.ToolboxError.__name__} == set()


def test_every_entry_is_an_existing_error_and_occurs_once() -> None:
    known = {name for module in MODULES for name in public_errors(module)} | INTERNAL_NAMES_THAT_USERS_SEE
    ours = [name for name in entries() if name not in ("TypeError", "ModuleNotFoundError", "AssertionError")]

    assert set(ours) - known == set()
    assert len(ours) == len(set(ours))
