"""Tests the public names of the packages: complete, sorted, real, and fast to import."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stubs import PACKAGES, stub_path, stub_text
from toolbox import errors, events

ROOT = Path(__file__).parent.parent

HEAVY = (
    "dependency_injector",
    "openai",
    "httpx2",
    "pydantic_settings",
    "fastapi",
    "starlette",
    "typer",
    "rich",
    "aiohttp",
    "sqlalchemy",
    "redis",
)

PUBLIC_MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("toolbox", "toolbox_fastapi")
    for path in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"^__all__\b", path.read_text(encoding="utf-8"), re.MULTILINE)
]
PRIVATE_EVENTS = {"Listeners"}


@pytest.mark.parametrize("package", ["toolbox", "toolbox_fastapi"])
def test_public_names_are_sorted_and_exist(package: str) -> None:
    module = importlib.import_module(package)

    assert list(module.__all__) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_lists_of_errors_and_events_are_complete() -> None:
    for module in (errors, events):
        defined = {name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
        names = {name for name in defined if inspect.isclass(getattr(module, name)) and not name.startswith("_")}

        assert set(module.__all__) == names - PRIVATE_EVENTS


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_names_that_are_loaded_on_first_use(package: str) -> None:
    assert stub_path(package).read_text(encoding="utf-8") == stub_text(package), "run `make stubs`"


@pytest.mark.parametrize("package", PACKAGES)
def test_names_that_are_loaded_on_first_use_exist(package: str) -> None:
    module = importlib.import_module(package)

    assert [name for name in dir(module) if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_module_lists_its_names(module: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in found.__all__ if not hasattr(found, name)] == []


def test_unknown_names_raise_attribute_error() -> None:
    module = importlib.import_module("toolbox")

    with pytest.raises(AttributeError, match=re.escape("'toolbox'") + ".*" + re.escape("'Calculatr'")):
        module.Calculatr  # noqa: B018 - the access is the test


def loaded_by(*programs: str) -> list[list[str]]:
    """Run programs one after another in a new process; return what is imported after each of them."""
    after_each = "\nseen.append(sorted(sys.modules))\n"
    script = f"import json, sys\nseen = []\n{after_each.join([*programs, ''])}print(json.dumps(seen))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: list[list[str]] = json.loads(done.stdout)
    return seen


IMPORTS = (
    "import toolbox",
    "from toolbox import Container, tool, toolbox, register_ai_service, Result",
    "import toolbox.testing",
)


@pytest.fixture(scope="module")
def loaded_by_imports() -> dict[str, list[str]]:
    return dict(zip(IMPORTS, loaded_by(*IMPORTS), strict=True))


@pytest.mark.parametrize("statement", IMPORTS)
def test_importing_the_library_loads_nothing_heavy(loaded_by_imports: dict[str, list[str]], statement: str) -> None:
    assert [name for name in loaded_by_imports[statement] if name in HEAVY] == []


PLAIN_PROGRAM = """
from typing import Protocol
from toolbox import Container, DemoChatModel, register_ai_service, tool

class Clock:
    @tool
    def time(self, city: str) -> str:
        return "12:00"

@register_ai_service(tools=Clock)
class Assistant(Protocol):
    def chat(self, question: str) -> str: ...

container = Container(models={"default": DemoChatModel()}).register(Assistant)
assert container.check() == []
with container:
    assert "12:00" in container.get(Assistant).chat("What is the time in Rome")
"""

CAPABILITIES = (
    "runs",
    "rest",
    "guardrails",
    "interceptors",
    "search",
    "services.offering",
    "services.compensation",
    "recordings",
    "testing",
    "models.openai",
    "models.anthropic",
    "mcp",
    "openapi",
    "otel",
    "sql",
    "redis",
    "dbos",
    "overview",
    "cli",
)
"""Modules and packages of `toolbox` for capabilities that a program with one service and one tool does not use."""


BEAN_OF_A_CAPABILITY = """
import sys
from toolbox import Container

with Container() as container:
    assert "toolbox.runs" not in sys.modules
    from toolbox.runs import Runs
    assert container.get(Runs) is container.runs
"""

LATER_IMPORTS = """
import importlib
for module in ("rest", "testing", "container", "cli", "tools.marks", "services.planning", "di.decorators"):
    importlib.import_module(f"toolbox.{module}")
package = importlib.import_module("toolbox")
assert (package.toolbox, package.tool, package.produces) == first
assert all(map(callable, first))
"""


@pytest.fixture(scope="module")
def loaded_by_programs() -> dict[str, list[str]]:
    decorators = "from toolbox import toolbox, tool, produces\nfirst = (toolbox, tool, produces)\n"
    programs = (PLAIN_PROGRAM, BEAN_OF_A_CAPABILITY, LATER_IMPORTS)
    return dict(zip(programs, loaded_by(decorators + PLAIN_PROGRAM, *programs[1:]), strict=True))


def test_a_plain_program_imports_no_capability_that_it_does_not_use(loaded_by_programs: dict[str, list[str]]) -> None:
    imported = loaded_by_programs[PLAIN_PROGRAM]

    assert "toolbox.services.driver" in imported
    unused = tuple(f"toolbox.{each}" for each in CAPABILITIES)
    assert [each for each in imported if each in unused or each.startswith(tuple(f"{name}." for name in unused))] == []


def test_a_bean_of_a_capability_that_is_imported_after_the_start_is_found(
    loaded_by_programs: dict[str, list[str]],
) -> None:
    assert "toolbox.runs.runs_bean" in loaded_by_programs[BEAN_OF_A_CAPABILITY]


def test_the_toolbox_decorator_is_not_replaced_by_later_imports(loaded_by_programs: dict[str, list[str]]) -> None:
    assert "toolbox.cli" in loaded_by_programs[LATER_IMPORTS]  # the program's assertions were true


def test_both_packages_are_marked_as_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in ("toolbox", "toolbox_fastapi"))
