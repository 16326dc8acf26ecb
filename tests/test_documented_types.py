"""The programs of README and docs/ pass `mypy --strict`, without pydantic's plugin."""

import re
from pathlib import Path

import pytest

from tests import programs
from tests.test_documents import PAGES, ROOT, Block, blocks_of, environment, missing_packages, programs_of

pytestmark = pytest.mark.timeout(900)  # mypy reads all libraries, once


def is_checked(program: tuple[Block, ...]) -> bool:
    return program[0].file is None and not program[0].note.startswith("not run")


def write_programs(page: Path, folder: Path) -> list[str]:
    """Write the programs of a page and the files that they import. Return the names of the programs.

    The names begin with that of the page, because several pages have a file `shop.py`.
    """
    prefix = page.stem.replace("-", "_").lower()
    files = {Path(block.file).stem: block.text for block in blocks_of(page) if (block.file or "").endswith(".py")}
    stems = "|".join(map(re.escape, files)) or "(?!)"

    def write(name: str, text: str) -> str:
        text = re.sub(rf"^(\s*from )({stems})(?= import)", rf"\1{prefix}_\2", text, flags=re.MULTILINE)
        text = re.sub(rf"^(\s*import )({stems})$", rf"\1{prefix}_\2 as \2", text, flags=re.MULTILINE)
        (folder / f"{prefix}_{name}.py").write_text(text, encoding="utf-8")
        return f"{prefix}_{name}.py"

    for stem, text in files.items():
        write(stem, text)
    checked = [each for each in programs_of(page) if is_checked(each)]
    return [write(f"line_{each[0].line}", "\n".join(block.text for block in each)) for each in checked]


def test_documented_programs_pass_strict_type_checks(tmp_path: Path) -> None:
    pages = [page for page in PAGES if not missing_packages(page)]
    names = [name for page in pages for name in write_programs(page, tmp_path)]
    options = ["--strict", "--config-file=", "--python-version=3.11", "--follow-imports=silent"]
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'pages'}"

    done = programs.run(["-m", "mypy", *options, cache, *names], tmp_path, environment(), timeout=850)

    assert len(names) > 100
    assert done.returncode == 0, done.stdout + done.stderr
