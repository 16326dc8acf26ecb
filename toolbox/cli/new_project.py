"""Creates a new project from the files in `template/`, in which `$name` marks a value of the project.

Not here: the command (`commands`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib.machinery import PathFinder
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from string import Template

from ..safe_text import for_line


@dataclass(frozen=True, slots=True)
class ProjectKind:
    """What a project contains: its files, each with its template, and the extras of toolbox that it needs."""

    files: Mapping[str, str]
    extras: str = "fastapi"


PLAIN = ProjectKind(
    {
        "{package}.py": "service.py.txt",
        "tests/test_{package}.py": "test_service.py.txt",
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        ".gitignore": "gitignore.txt",
    }
)
"""A project without a page."""

WITH_FRONT_END = {
    "vercel": ProjectKind(
        {
            "{package}.py": "vercel/service.py.txt",
            "tests/test_{package}.py": "vercel/test_service.py.txt",
            "frontend/package.json": "vercel/package.json.txt",
            "frontend/vite.config.js": "vercel/vite.config.js.txt",
            "frontend/index.html": "vercel/index.html.txt",
            "frontend/src/main.jsx": "vercel/main.jsx.txt",
            "frontend/src/style.css": "style.css.txt",
            "pyproject.toml": "pyproject.toml.txt",
            "Makefile": "vercel/Makefile.txt",
            "README.md": "vercel/README.md.txt",
            ".gitignore": "vercel/gitignore.txt",
        }
    ),
    "ag-ui": ProjectKind(
        {
            "{package}.py": "ag_ui/service.py.txt",
            "tests/test_{package}.py": "ag_ui/test_service.py.txt",
            "page/index.html": "ag_ui/index.html.txt",
            "page/chat.js": "ag_ui/chat.js.txt",
            "page/style.css": "style.css.txt",
            "pyproject.toml": "pyproject.toml.txt",
            "Makefile": "ag_ui/Makefile.txt",
            "README.md": "ag_ui/README.md.txt",
            ".gitignore": "gitignore.txt",
        },
        extras="fastapi,ag-ui",
    ),
}
"""The projects with a page, by the protocol that it speaks."""


def new_project(folder: Path, kind: ProjectKind = PLAIN) -> list[Path]:
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
        "html_title": escape(title),
        "extras": kind.extras,
        "quoted_title": json.dumps(title, ensure_ascii=False),  # a JSON string is also a Python string
    }
    templates = files("toolbox.cli") / "template"
    written = []
    for path, template in kind.files.items():
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
