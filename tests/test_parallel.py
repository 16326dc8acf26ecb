"""The processes that run the tests: each file is in one share, and the whole ends as its parts do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel import SECONDS, TESTS, seconds_of, shares


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_each_file_is_in_one_share(count: int) -> None:
    files = [file for share in shares(count) for file in share]

    assert sorted(files) == sorted(TESTS.rglob("test_*.py"))
    assert len(shares(count)) == count + 1


def test_the_shares_take_equally_long() -> None:
    taken = [sum(map(seconds_of, share)) for share in shares(5)[1:]]

    assert max(taken) - min(taken) <= 2


def test_files_with_a_known_time_exist() -> None:
    assert [name for name in SECONDS if not Path(TESTS, name).is_file()] == []


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.parallel", "--processes=2", "-q", *arguments]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=110, check=False)


def test_the_processes_run_each_test_once_and_print_one_sum() -> None:
    done = run("tests/test_parallel.py", "tests/test_wording.py", "-k", "in_one_share")

    *_, last = done.stdout.splitlines()
    assert re.fullmatch(r"4 passed, \d+ deselected in \d+ s, in 3 processes", last), done.stdout
    assert done.returncode == 0


def test_an_error_of_one_process_is_the_status_of_all() -> None:
    assert run("tests/test_parallel.py", "--no-such-option").returncode == pytest.ExitCode.USAGE_ERROR
