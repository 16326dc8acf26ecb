"""What the documents promise: every Python block of README and docs/ runs, and every link inside the repository leads.

A block is a program of its own, run in a fresh process with the embedded model, beside the files of its page's folder.
Blocks of one page that build on each other say so: one that begins with `# continues` is put behind the ones before it
up to the last that does not. A block after `<!-- not run: why -->` is only compiled; a text block directly after one
that begins `<!-- prints -->` is what it must print.
"""

import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"(?:<!-- (?P<note>[^>]*?) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A program of a page: its text, where it stands, what it must print (None: anything), why it is not run."""

    page: Path
    line: int
    text: str
    prints: str | None
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found: list[Block] = []
    before = ""
    for number, fence in enumerate(fences):
        if fence["language"] != "python":
            continue
        program = before + fence["text"] if fence["text"].startswith("# continues") else fence["text"]
        before = program
        following = fences[number + 1] if number + 1 < len(fences) else None
        prints = following["text"] if following is not None and following["note"] == "prints" else None
        note = fence["note"] or ""
        line = text.count("\n", 0, fence.start("language")) + 1
        found.append(Block(page, line, program, prints, note[9:] if note.startswith("not run: ") else None))
    return found


BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    compile(block.text, str(block), "exec")
    if block.not_run:
        return
    program = tmp_path / "program.py"
    program.write_text(block.text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TOOLBOX_"))}
    environment |= {"TOOLBOX_DEMO": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}

    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    if block.prints is not None:
        assert done.stdout.strip() == block.prints.strip()


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]

    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_readme_shows_one_program_of_at_most_25_lines() -> None:
    [program] = blocks_of(ROOT / "README.md")

    assert len(program.text.splitlines()) <= 25


def test_the_readme_s_program_answers_over_http(tmp_path: Path) -> None:
    """The commands below the program, as they stand there."""
    [program] = blocks_of(ROOT / "README.md")
    (tmp_path / "menu.py").write_text(program.text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TOOLBOX_"))}
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "menu:app", "--port", "0"],
        cwd=tmp_path,
        env=environment | {"TOOLBOX_DEMO": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        said: list[str] = []
        while not (address := re.search(r"http://127\.0\.0\.1:\d+", said[-1] if said else "")):
            said.append(server.stderr.readline())
            assert said[-1], f"it did not start: {''.join(said)}"
        with urllib.request.urlopen(f"{address[0]}/ask?question=Is+there+soup+or+cake+today") as reply:
            answer = reply.read().decode()
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stderr.close()

    assert all(dish in answer for dish in ("pumpkin soup", "lentil soup", "apple cake"))
    assert "lentil curry" not in answer
