"""Creates a new project from the files in `template/`, in which `$name` marks a value of the project.

Not here: the command (`commands`).
"""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import PathFinder
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from string import Template

from ..safe_text import for_line

FILES = {
    "{package}.py": "service.py.txt",
    "tests/test_{package}.py": "test_service.py.txt",
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
"""The files of a project, each with its template."""


def new_project(folder: Path) -> list[Path]:
    """Create a project in `folder`, and return the files.

    Raises `FileExistsError` if the folder is not empty. Raises `ValueError` if its name contains control characters,
    is not usable as a module name, or is the name of an installed module.
    """
    title = folder.resolve().name
    package = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
    if for_line(title) != title:
        raise ValueError(f"invalid folder name {title!r}: it contains control characters; use another name")
    if not package.isidentifier() or iskeyword(package):
        raise ValueError(f"{title!r} is not a valid module name; start with a letter, and do not use a Python keyword")
    if is_taken(package):
        raise ValueError(f"a Python module {package!r} already exists and the project would hide it; use another name")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; use another folder")
    values = {
        "name": package.replace("_", "-"),
        "package": package,
        "title": title,
        "quoted_title": json.dumps(title, ensure_ascii=False),  # a JSON string is also a Python string
    }
    templates = files("toolbox.cli") / "template"
    written = []
    for path, template in FILES.items():
        file = folder / path.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = Template((templates / template).read_text(encoding="utf-8")).substitute(values)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written


def is_taken(module: str) -> bool:
    """Return True if a module of this name exists outside the current folder."""
    if module in sys.stdlib_module_names:
        return True
    elsewhere = [each for each in sys.path if each and Path(each).resolve() != Path.cwd()]
    found = PathFinder.find_spec(module, elsewhere)
    return found is not None and found.origin is not None
