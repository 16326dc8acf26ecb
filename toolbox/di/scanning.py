"""Finds what a package offers to a container: the marked objects in its modules.

Not here: what counts as marked (the container knows all marks).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType


def marked_in(module: ModuleType | str, is_marked: Callable[[object], bool]) -> Iterator[object]:
    """The marked objects defined in a module and in all modules below it, which are imported for this."""
    for each in modules_of(importlib.import_module(module) if isinstance(module, str) else module):
        for member in list(vars(each).values()):
            # What is only imported there is registered where it is defined, if that is scanned.
            if getattr(member, "__module__", None) == each.__name__ and is_marked(member):
                yield member


def modules_of(module: ModuleType) -> Iterator[ModuleType]:
    """The module and all below it, in order of their names; `__main__` modules are programs, and left out."""
    yield module
    for found in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda each: each.name):
        if found.name != "__main__":
            yield from modules_of(importlib.import_module(f"{module.__name__}.{found.name}"))
