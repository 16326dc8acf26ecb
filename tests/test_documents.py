"""The documentation: every Python block of README and docs/ runs, and every link inside the repository is valid.

Each block is a program. It runs in a new process with the embedded model, in an empty folder. A comment directly before
a block changes that:

- `<!-- file: menu.py -->`: the block is stored under this name in the folder of each program of its page; test files
  are run by pytest.
- `<!-- not run: why -->`: it is only compiled.
- `<!-- prints -->`, before a text block: the output of the Python block directly before it.
- `<!-- runs -->`, before a console block: its commands print the lines below them; `…` matches anything.
- `<!-- served -->`, before a console block: `uvicorn module:app`, and `curl` commands that return the lines below
  them. The files of the page have their content of this place.

A block that starts with `# continues` is the next part of the previous program.
"""

import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.timeout(400)  # starts processes

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"^ *(?:import|from) (celery|taskiq)\b", re.MULTILINE)
"""Imports of libraries of other authors, which pages show and toolbox does not need."""
# The reference is written from signatures and docstrings, and has no programs.
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.exists() and page.parent.name != "reference"
]

FENCE = re.compile(
    r"(?:<!-- (?P<note>[^>]*?) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]*)(?:#(?P<place>[^)\s]*))?\)")
# The README has absolute links, so that it reads the same on a package index.
PUBLISHED = (
    "https://github.com/toolbox-di/toolbox/blob/main/",
    "https://raw.githubusercontent.com/toolbox-di/toolbox/main/",
)
# Printed between the parts of a program, so that the output of each is known.
SEPARATOR = "\x1e"


@dataclass(frozen=True)
class Block:
    """A fenced block: its text, place, annotations and expected output (None: anything)."""

    page: Path
    line: int
    language: str
    text: str
    note: str
    prints: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """Return its file name in the folder of the page."""
        return self.note[6:] if self.note.startswith("file: ") else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for number, fence in enumerate(fences):
        following = fences[number + 1] if number + 1 < len(fences) else None
        prints = following["text"] if following is not None and following["note"] == "prints" else None
        line = text.count("\n", 0, fence.start("language")) + 1
        found.append(Block(page, line, fence["language"], fence["text"], fence["note"] or "", prints))
    return found


def programs_of(page: Path) -> list[tuple[Block, ...]]:
    """Return the programs of a page, each with its blocks in order."""
    programs: list[tuple[Block, ...]] = []
    for block in blocks_of(page):
        if block.language == "python" and block.text.startswith("# continues"):
            programs[-1] = (*programs[-1], block)
        elif block.language == "python":
            programs.append((block,))
    return programs


def consoles_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.note == "runs"]


def commands_of(block: Block) -> list[tuple[list[str], str]]:
    """Return the typed command as a list of words, and the output below it."""
    parts = [part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]]
    return [(shlex.split(typed, comments=True), shown.strip()) for typed, _, shown in parts]


def first(program: tuple[Block, ...]) -> str:
    return str(program[0])


def served_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.note == "served"]


OPTIONAL = ("taskiq",)
"""Packages without which the programs of a page that imports them are skipped."""


def missing_packages(page: Path) -> list[str]:
    """Return the optional packages that the programs of a page import, and that are not installed."""
    code = "\n".join(block.text for block in blocks_of(page) if block.language == "python")
    used = [each for each in OPTIONAL if re.search(rf"^\s*(?:from|import) {each}\b", code, re.MULTILINE)]
    return [each for each in used if find_spec(each) is None]


def lay_out(page: Path, folder: Path, until: int = sys.maxsize) -> None:
    """Write the files of the page in their last version above line `until`."""
    if missing := missing_packages(page):
        pytest.skip(f"not installed: {', '.join(missing)}")
    for block in blocks_of(page):
        if block.file is not None and block.line < until:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")


def environment() -> dict[str, str]:
    """Return the environment of this process without settings of models."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TOOLBOX_"))}
    return kept | {"TOOLBOX_DEMO": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"}


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(arguments, folder, environment())


@pytest.mark.parametrize("program", [each for page in PAGES for each in programs_of(page)], ids=first)
def test_programs_print_the_documented_output(program: tuple[Block, ...], tmp_path: Path) -> None:
    """Run a program and compare its output with the text blocks below its parts."""
    for block in program:
        compile(block.text, str(block), "exec")
    if program[0].note.startswith("not run: "):
        return
    for each in SHOWN.findall("\n".join(block.text for block in program)):
        pytest.importorskip(each)
    lay_out(program[0].page, tmp_path)
    file = program[0].file or "program.py"
    if file.startswith("test_"):
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", file]
    else:
        text = f"\nprint({SEPARATOR!r}, flush=True)\n".join(block.text for block in program)
        (tmp_path / file).write_text(text, encoding="utf-8")
        command = ["-W", "error", file]

    done = run(command, tmp_path)

    assert done.returncode == 0, f"{program[0]}\n{done.stdout}\n{done.stderr}"
    for block, printed in zip(program, done.stdout.split(f"{SEPARATOR}\n"), strict=True):
        if block.prints is not None:
            assert printed.strip() == block.prints.strip(), str(block)


@pytest.mark.parametrize("block", [each for page in PAGES for each in consoles_of(page)], ids=str)
def test_commands_print_the_documented_output(block: Block, tmp_path: Path) -> None:
    lay_out(block.page, tmp_path)
    for (program, *arguments), shown in commands_of(block):
        module = {"toolbox": ["-m", "toolbox.cli"], "python": []}[program]

        done = run([*module, *arguments], tmp_path)

        pattern = ".*".join(map(re.escape, shown.split("…")))
        assert re.fullmatch(pattern, (done.stdout + done.stderr).strip(), re.DOTALL), done.stdout + done.stderr


@contextmanager
def served(application: str, folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run an application under uvicorn on a free port and return its address."""
    server = subprocess.Popen(
        programs.command("-m", "uvicorn", application, "--port", "0"),
        cwd=folder,
        env=environment() | dict(variables or {}),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        said: list[str] = []
        while not (address := re.search(r"http://127\.0\.0\.1:\d+", said[-1] if said else "")):
            said.append(server.stderr.readline())
            assert said[-1], f"it did not start: {''.join(said)}"
        yield address[0]
    finally:
        server.terminate()
        server.wait(timeout=60)
        server.stderr.close()


@pytest.mark.parametrize("block", [each for page in PAGES for each in served_of(page)], ids=str)
def test_servers_return_the_documented_responses(block: Block, tmp_path: Path) -> None:
    lay_out(block.page, tmp_path, block.line)
    [([program, application], _), *requests] = commands_of(block)
    assert program == "uvicorn"

    with served(application, tmp_path) as address:
        for (_, url), shown in requests:
            with urllib.request.urlopen(url.replace("localhost:8000", address)) as reply:
                assert reply.read().decode() == shown, url


def headings_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_inside_the_repository_are_valid(page: Path) -> None:
    wrong = []
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target, place = match["target"], match["place"]
        there = published_file(target) or (page.parent / target if target else page)
        if ("://" in str(target) and published_file(target) is None) or target.startswith("mailto:"):
            continue
        if not there.exists() or (place and there.suffix == ".md" and place not in headings_of(there)):
            wrong.append(match[0])

    assert wrong == []


def published_file(link: str) -> Path | None:
    """Return the file of this repository that an absolute link shows, or None for other links."""
    for start in PUBLISHED:
        if link.startswith(start):
            return ROOT / link.removeprefix(start)
    return None


def test_links_and_pictures_of_the_readme_work_outside_of_the_repository() -> None:
    text = FENCE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    targets = {match["target"] for match in LINK.finditer(text)} | set(re.findall(r'src(?:set)?="([^"]+)"', text))

    assert [each for each in targets if "://" not in each] == []
    assert [each for each in targets if (there := published_file(each)) and not there.exists()] == []


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {published_file(match["target"]) for match in LINK.finditer(text)}

    assert {page for page in PAGES if page.parent == ROOT / "docs"} - linked == set()


def test_the_programs_of_the_readme_are_short() -> None:
    [[first_program], [second_program]] = programs_of(ROOT / "README.md")

    assert len(first_program.text.splitlines()) <= 25
    assert len(second_program.text.splitlines()) <= 40


def test_the_programs_of_the_readme_answer_over_http(tmp_path: Path) -> None:
    """Run the commands below each program of the README."""
    programs_in_order = programs_of(ROOT / "README.md")
    consoles = [block for block in blocks_of(ROOT / "README.md") if "uvicorn" in block.text]
    for [program], console in zip(programs_in_order, consoles, strict=True):
        *preparations, ([*settings, _, application], _) = [
            each for each in commands_of(console) if each[0][0] != "curl"
        ]
        (tmp_path / f"{application.partition(':')[0]}.py").write_text(program.text, encoding="utf-8")
        for (_, *arguments), _ in preparations:
            assert run(arguments, tmp_path).returncode == 0
        variables = dict(each.split("=", 1) for each in settings)

        with served(application, tmp_path, variables) as address:
            for (_, *arguments), shown in commands_of(console):
                if arguments and "localhost:8000" in arguments[-1]:
                    pattern = ".*".join(map(re.escape, shown.split("…")))
                    assert re.fullmatch(pattern, reply_to(arguments, address))


def reply_to(arguments: list[str], address: str) -> str:
    """Send the request of a `curl` command, and return the body of the reply."""
    options = dict(zip(arguments[:-1:2], arguments[1:-1:2], strict=True))
    name, _, value = options.get("-H", "accept: */*").partition(": ")
    url = arguments[-1].replace("localhost:8000", address)
    request = urllib.request.Request(url, headers={name: value}, method=options.get("-X", "GET"))
    with urllib.request.urlopen(request) as reply:
        return str(reply.read().decode())
