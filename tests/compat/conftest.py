"""Counterparts of other authors. `make compat` installs them; without that, the tests here are skipped."""

import shutil
from pathlib import Path

import pytest

INSTALLED = Path(__file__).parent.parent.parent / ".cache" / "compat"


def node_module(name: str) -> Path:
    """Return the folder of a package from npm; skip the test if it is not installed."""
    folder = INSTALLED / "node_modules" / name
    if not folder.exists() or shutil.which("node") is None:
        pytest.skip(f"{name} is not installed; run `make compat`")
    return folder


def python_with(requirements: str) -> str:
    """Return the Python of the environment of `requirements/NAME.txt`; skip the test if it is not installed."""
    python = INSTALLED / requirements / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{requirements} is not installed; run `make compat`")
    return str(python)
