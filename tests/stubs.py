"""Writes what type checkers and editors read of packages whose names are loaded on first use.

    make stubs                                 # or python -m tests.stubs

Each `__init__.pyi` has the names of the tables in the `__init__.py` beside it. `test_exports` compares the two.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

PACKAGES = ("toolbox", "toolbox.conversations", "toolbox.runs")
ROOT = Path(__file__).parent.parent


def stub_path(package: str) -> Path:
    """Return the file of a package's stub."""
    return ROOT / package.replace(".", "/") / "__init__.pyi"


def stub_text(package: str) -> str:
    """Return the stub of a package. It imports names outside of `__all__` as `X as X`, which makes them public."""
    module = import_module(package)
    lines = ["# Written by `make stubs` from the tables of names in the __init__.py beside this file."]
    for tables, form in ((module._LISTED, "{0}"), (getattr(module, "_UNLISTED", {}), "{0} as {0}")):
        for home, names in tables.items():
            lines += [f"from {home} import (", *(f"    {form.format(name)}," for name in sorted(names.split())), ")"]
    return "\n".join([*lines, "", "__all__ = [", *(f'    "{name}",' for name in module.__all__), "]", ""])


if __name__ == "__main__":
    for each in PACKAGES:
        stub_path(each).write_text(stub_text(each), encoding="utf-8")
