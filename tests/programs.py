"""Runs Python programs in new processes, as a user does."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(*arguments: str) -> list[str]:
    """Return the command `python ARGUMENTS…` with the interpreter of the tests."""
    return [sys.executable, *arguments]


def run(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 110
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS…` in `folder` and return its output. `timeout` is in seconds."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=timeout,
        check=False,
    )
