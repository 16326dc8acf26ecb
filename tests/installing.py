"""Installs counterparts that others wrote into `.cache`, once; where one cannot be had, its test is skipped."""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent / ".cache"
PATIENCE = 100.0
"""Seconds for one installation: less than a test is given."""


def from_npm(folder: str, *packages: str) -> Path:
    """The `node_modules` with these packages."""
    prefix = CACHE / folder
    modules = prefix / "node_modules"
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    with only_one_installs(prefix):
        record = modules / ".package-lock.json"  # npm writes it last
        installed = record.read_text(encoding="utf-8") if record.exists() else ""
        if not all(f'"node_modules/{name}"' in installed for name in packages):
            if shutil.which("npm") is None:
                pytest.skip("npm is not installed")
            run("npm", "install", "--prefix", str(prefix), "--no-audit", "--no-fund", "--ignore-scripts", *packages)
    return modules


def from_pypi(folder: str, *packages: str) -> Path:
    """The Python of an environment with these packages."""
    environment = CACHE / folder / f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = environment / "bin" / "python"
    with only_one_installs(environment.parent):
        if not (environment / ".installed").exists():
            run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment))
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
            run(*pip, "install", "--quiet", "--no-compile", *packages)  # the tests use a small part of them
            (environment / ".installed").touch()
    return python


@contextmanager
def only_one_installs(folder: Path) -> Iterator[None]:
    """Make the other test processes wait: an installer moves files that a server is about to read."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} took too long to install {command[-1]}")
    if done.returncode:
        pytest.skip(f"{command[0]} could not install {command[-1]}: {done.stderr[-300:]}")
