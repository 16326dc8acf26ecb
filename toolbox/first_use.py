"""Loads the public names of a package on first use, so that importing it stays fast.

Not here: the names, which each package lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def names_on_first_use(
    package: str, *homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    `homes` have the names of each module, with spaces between them: `{".container": "Container"}`.
    """
    modules = {name: module for each in homes for module, names in each.items() for name in names.split()}

    def load_name(name: str) -> object:
        if (module := modules.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(module, package), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load_name, list_names
