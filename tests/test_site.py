"""The documentation site: navigation, reference and links.

Not here: the pages' programs, and their links as GitHub shows them (`test_documents`).
"""

import importlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)  # starts processes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
MODULES = (
    "toolbox",
    "toolbox.rest",
    "toolbox.sql",
    "toolbox.redis",
    "toolbox.mcp",
    "toolbox.openapi",
    "toolbox.otel",
    "toolbox.recordings",
    "toolbox.testing",
    "toolbox_fastapi",
)
# Whole modules in the reference.
SPELT_OUT = ("toolbox.errors", "toolbox.transcripts")

REFERENCE = [
    name
    for page in tomllib.loads((DOCS / "reference.toml").read_text(encoding="utf-8")).values()
    for name in page["names"]
]


def pages_of(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
        return
    for each in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from pages_of(each)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(pages_of(CONFIG["nav"])) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    there = importlib.import_module(module)
    # A name that is also at the root, or in a module that is spelt out, need not be listed again.
    listed = {each.rpartition(".")[2] for each in REFERENCE}
    spelt_out = {name for each in SPELT_OUT for name in vars(importlib.import_module(each))}

    # The root also exports names that its `__all__` does not advertise, written `X as X`.
    others = re.findall(r"\b(\w+) as \1\b", Path(str(there.__file__)).read_text(encoding="utf-8"))

    assert [f"{module}.{name}" for name in (*there.__all__, *others) if name not in listed | spelt_out] == []


def test_no_name_is_in_the_reference_twice() -> None:
    assert len(REFERENCE) == len(set(REFERENCE))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without a network and return its folder."""
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", folder)
    shutil.copytree(DOCS, folder / "docs")
    # The colors of code are not tested: pygments reads all code.
    (folder / "pygments.py").write_text("raise ImportError\n")
    build = "import gc, runpy; gc.disable(); runpy.run_module('zensical', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", build, "build", "--strict"],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_link_of_the_site_is_valid(site: Path) -> None:
    site = site.resolve()
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    places = {page: set(re.findall(r'\bid="?([^"\s>]+)', text)) for page, text in pages.items()}
    wrong = []
    for page, text in pages.items():
        for link in sorted(set(re.findall(r'href="?([^"\s>]+)', text))):
            target, _, place = link.partition("#")
            if "://" in link or link.startswith("data:"):
                continue
            there = (page.parent / target).resolve() if target else page
            inside = there.is_relative_to(site)
            if not inside or not there.exists() or (place and there in places and place not in places[there]):
                wrong.append((page.parent.name, link))

    assert wrong == []


def test_pages_that_repeat_the_code_are_up_to_date() -> None:
    """The tables of settings and commands, and the reference, are those of the program. `make docs` writes them."""
    generate = runpy.run_path(str(DOCS / "generate.py"))
    reference = {"reference.md": "", **{f"reference/{each.name}": "" for each in (DOCS / "reference").glob("*.md")}}
    written = {name: (DOCS / name).read_text(encoding="utf-8") for name in reference}

    for name in generate["PAGES"]:
        page = (DOCS / name).read_text(encoding="utf-8")
        assert generate["with_parts"](page) == page, f"run `make docs`: {name}"
    assert generate["reference_pages"]() == written, "run `make docs`: reference"
