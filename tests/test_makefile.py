"""The Makefile: output of the installation."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A fake Python: creates "environments" with itself, and prints what pip would print.
PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
    *"-m pip --version"*) ;;
    *"-m pip"*"--quiet"*) ;;
    *"-m pip"*install*) echo "Collecting dependency-injector" ;;
    *"-m sample_app"*) echo "served" ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_run_prints_what_it_installs_and_installs_it_once(tmp_path: Path) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)

    def run() -> list[str]:
        done = subprocess.run(
            ["make", "run", f"PYTHON={python}", f"VENV={environment}"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},  # of `make test`
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    assert run() == [
        f"Creating the environment {environment} with {python}",
        f"Installing -e '.[fastapi,sql]' into {environment}. This is done once and may take a few minutes.",
        "Collecting dependency-injector",
        "Installed.",
        "served",
    ]
    assert run() == ["served"]
