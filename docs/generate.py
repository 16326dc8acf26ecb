"""Writes the parts of the documentation that repeat the code: the tables of all settings, and of all commands.

    make docs                                  # or python docs/generate.py

Each part is between two comments, `<!-- generated: NAME -->` and `<!-- end -->`. The descriptions come from the
docstrings of the settings classes and from the help of the commands. Not here: the figures of benchmarks, which
`benchmarks.charts` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe
from pydantic import BaseModel, SecretStr
from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.main import get_command

from toolbox.cli import commands
from toolbox.settings import McpSettings, ModelSettings, RedisSettings, RestSettings, SqlSettings, ToolboxSettings

DOCS = Path(__file__).parent
PAGES = ("settings.md", "command-line.md")
PART = re.compile(r"<!-- generated: (?P<name>[^>]+) -->.*?<!-- end -->", re.DOTALL)

SECTIONS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "program": ("TOOLBOX_", ToolboxSettings),
    "models": ("TOOLBOX_MODELS__<NAME>__", ModelSettings),
    "sql": ("TOOLBOX_SQL__", SqlSettings),
    "redis": ("TOOLBOX_REDIS__", RedisSettings),
    "rest": ("TOOLBOX_REST__<KEY>__", RestSettings),
    "mcp": ("TOOLBOX_MCP__<NAME>__", McpSettings),
}

SOURCE = griffe.load("toolbox.settings", search_paths=[DOCS.parent])
"""The settings classes with the docstrings of their fields, which Python does not keep."""


def main() -> None:
    """Write the generated parts of the pages."""
    for page in PAGES:
        path = DOCS / page
        path.write_text(with_parts(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_parts(page: str) -> str:
    """Return a page with new generated parts."""
    return PART.sub(lambda part: f"<!-- generated: {part['name']} -->\n\n{part_of(part['name'])}\n\n<!-- end -->", page)


def part_of(name: str) -> str:
    """Return the text of a part, such as `settings sql` or `command check`."""
    kind, _, subject = name.partition(" ")
    if kind == "settings":
        return "\n".join(settings_table(*SECTIONS[subject]))
    return "\n".join(command_table(subject))


# --- settings


def settings_table(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of a table: the variable, its default and its meaning. Raises `KeyError` for one without text."""
    meanings = meanings_of(section)
    yield "| Variable | Default | Meaning |"
    yield "|---|---|---|"
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if name not in SECTIONS:  # a section has a separate table
            yield f"| `{prefix}{name.upper()}` | {shown_default(default)} | {meanings[name]} |"


def meanings_of(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field, on one line."""
    attributes = SOURCE[section.__name__].attributes
    return {
        name: " ".join(each.docstring.value.split()) for name, each in attributes.items() if each.docstring is not None
    }


def shown_default(value: Any) -> str:
    """Return a default as it stands in a table."""
    if value is None or value in ((), {}) or isinstance(value, SecretStr):
        return "–"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    if isinstance(value, float) and value.is_integer():
        return f"`{int(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- commands


def command_table(name: str) -> Iterator[str]:
    """Yield the lines about a command: how to call it, what it does, and its options."""
    group = get_command(commands.app)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    arguments = {
        each.metavar or str(each.name).upper(): each for each in command.params if isinstance(each, TyperArgument)
    }
    yield "```console"
    yield f"$ toolbox {name} {' '.join(arguments)}"
    yield "```"
    yield ""
    yield re.sub(r"(?<!\n)\n(?!\n)", " ", (command.help or "").strip())
    yield ""
    yield "| Argument or option | Meaning |"
    yield "|---|---|"
    for metavar, argument in arguments.items():
        yield f"| `{metavar}` | {argument.help} |"
    for each in command.params:
        if isinstance(each, TyperOption) and not each.hidden:
            yield f"| {', '.join(f'`{name}`' for name in (*each.opts, *each.secondary_opts))} | {each.help} |"


if __name__ == "__main__":
    main()
