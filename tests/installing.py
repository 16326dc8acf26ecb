"""Installs counterparts that others wrote into `.cache`, once; where one cannot be had, its test is skipped."""

import shutil
import subprocess
import sys
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
    if not all((modules / name).is_dir() for name in packages):
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        prefix.mkdir(parents=True, exist_ok=True)
        run("npm", "install", "--prefix", str(prefix), "--no-audit", "--no-fund", "--ignore-scripts", *packages)
    return modules


def from_pypi(folder: str, *packages: str) -> Path:
    """The Python of an environment with these packages."""
    environment = CACHE / folder / f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = environment / "bin" / "python"
    if not (environment / ".installed").exists():
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
        run(*pip, "install", "--quiet", "--no-compile", *packages)  # the tests use a small part of what is installed
        (environment / ".installed").touch()
    return python


def run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} took too long to install {command[-1]}")
    if done.returncode:
        pytest.skip(f"{command[0]} could not install {command[-1]}: {done.stderr[-300:]}")
