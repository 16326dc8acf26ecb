"""The documentation: programs of the pages from M to Z. With two files, two workers share the programs."""

from pathlib import Path

import pytest

from tests.test_documents import PAGES, Block, first, later, programs_of, run_program

pytestmark = pytest.mark.timeout(400)  # starts processes


@pytest.mark.parametrize("program", [each for page in PAGES if later(page) for each in programs_of(page)], ids=first)
def test_programs_print_the_documented_output(program: tuple[Block, ...], tmp_path: Path, warm_executable: str) -> None:
    run_program(program, tmp_path, warm_executable)
