"""Writes what repeats the code in the documentation: the reference, and the tables of all settings and commands.

    make docs                                  # or python docs/generate.py

The pages in `docs/reference/` are written whole, from signatures and docstrings; `docs/reference.toml` lists the names
of each. In `settings.md` and `command-line.md` a part is between two comments, `<!-- generated: NAME -->` and
`<!-- end -->`. Not here: the figures of benchmarks, which `benchmarks.charts` writes.
"""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
from pydantic import BaseModel, SecretStr
from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.main import get_command
from typing_extensions import is_protocol

from toolbox.cli import commands
from toolbox.settings import (
    McpSettings,
    ModelSettings,
    OAuthSettings,
    OtelSettings,
    RedisSettings,
    RestSettings,
    SqlSettings,
    ToolboxSettings,
)

DOCS = Path(__file__).parent
PAGES = ("settings.md", "command-line.md")
PART = re.compile(r"<!-- generated: (?P<name>[^>]+) -->.*?<!-- end -->", re.DOTALL)

SECTIONS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "program": ("TOOLBOX_", ToolboxSettings),
    "models": ("TOOLBOX_MODELS__<NAME>__", ModelSettings),
    "sql": ("TOOLBOX_SQL__", SqlSettings),
    "redis": ("TOOLBOX_REDIS__", RedisSettings),
    "otel": ("TOOLBOX_OTEL__", OtelSettings),
    "rest": ("TOOLBOX_REST__<KEY>__", RestSettings),
    "oauth": ("TOOLBOX_REST__<KEY>__AUTH__", OAuthSettings),
    "mcp": ("TOOLBOX_MCP__<NAME>__", McpSettings),
}

SOURCES = {name: griffe.load(name, search_paths=[DOCS.parent]) for name in ("toolbox", "toolbox_fastapi")}
"""The source with the docstrings of fields and aliases, which Python does not keep."""


def main() -> None:
    """Write the reference, and the generated parts of the other pages."""
    for page in PAGES:
        path = DOCS / page
        path.write_text(with_parts(path.read_text(encoding="utf-8")), encoding="utf-8")
    pages = reference_pages()
    for old in (DOCS / "reference").glob("*.md"):
        old.unlink()
    for name, text in pages.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


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
            shown = "required" if field.is_required() else shown_default(default)
            yield f"| `{prefix}{name.upper()}` | {shown} | {meanings[name]} |"


def meanings_of(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field, on one line."""
    attributes = SOURCES["toolbox"]["settings"][section.__name__].attributes
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


# --- the reference

REFERENCE: Mapping[str, Any] = tomllib.loads((DOCS / "reference.toml").read_text(encoding="utf-8"))

INDEX = """# Reference

All public names, with their parameters and docstrings. In a shell, `python -m pydoc toolbox.Container` prints the same.
"""


def reference_pages() -> dict[str, str]:
    """Return the text of each page of the reference, by its path below `docs/`."""
    pages = {"reference.md": "\n".join([INDEX, *index_lines()])}
    for slug, page in REFERENCE.items():
        lines = [f"# {page['title']}", "", page["intro"], ""]
        for name in page["names"]:
            lines += entry_lines(name)
        pages[f"reference/{slug}.md"] = "\n".join(lines).rstrip() + "\n"
    return pages


def index_lines() -> Iterator[str]:
    """Yield the lines that list the names of all pages."""
    for slug, page in REFERENCE.items():
        names = ", ".join(f"`{name.removeprefix('toolbox.')}`" for name in page["names"])
        text = f"- [{page['title']}](reference/{slug}.md): {names}"
        yield from textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    yield ""


def entry_lines(name: str) -> Iterator[str]:
    """Yield the lines about a public name, such as `toolbox.Container`, or about all classes of a public module."""
    module, _, attribute = name.rpartition(".")
    value = getattr(import_module(module), attribute)
    if isinstance(value, ModuleType):
        for each in vars(value).values():
            if getattr(each, "__module__", "") == name and not each.__name__.startswith("_"):
                yield from described(f"{name}.{each.__name__}", each, level=2)
        return
    yield from described(name, value, level=2)


def described(name: str, value: Any, level: int) -> Iterator[str]:
    """Yield the heading, the signature and the docstring of a name; of a class, also its public members."""
    shown = name.removeprefix("toolbox.") if level == 2 else name
    yield from (f"{'#' * level} {shown}", "")
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield from (docstring_of(value), "", f"Values: {', '.join(f'`{each.name}`' for each in value)}.", "")
        return
    if isinstance(value, type) or inspect.isroutine(value):
        yield from ("```python", signature_of(name, value), "```", "")
    elif not isinstance(value, property):
        yield from source_lines(name)
    if text := docstring_of(value):
        yield from (text, "")
    for member, each in vars(value).items() if isinstance(value, type) else ():
        if (function := documented_member(member, each)) is not None:
            yield from described(f"{value.__name__}.{member}", function, level + 1)


def source_lines(name: str) -> Iterator[str]:
    """Yield the lines about an alias or a constant: its definition, and the text below it."""
    package, _, path = name.partition(".")
    found: Any = SOURCES[package][path]
    while found.is_alias:
        found = SOURCES[found.target_path.partition(".")[0]][found.target_path.partition(".")[2]]
    shown = name.rpartition(".")[2]
    yield from ("```python", f"{shown} = {found.value}", "```", "")
    if found.docstring is not None:
        yield from (found.docstring.value, "")


def documented_member(name: str, value: Any) -> Any:
    """Return the function of a public member with a docstring; a property as it is; None for all others."""
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    is_shown = inspect.isfunction(function) or isinstance(function, property)
    return function if is_shown and not name.startswith("_") and function.__doc__ else None


def docstring_of(value: Any) -> str:
    """Return the docstring of a class, a function or a property, as it stands in the source; "" if it has none."""
    named = value.fget if isinstance(value, property) else value
    if not (isinstance(named, type) or inspect.isroutine(named)):
        return ""
    package, _, path = f"{named.__module__}.{named.__qualname__}".partition(".")
    docstring = SOURCES[package][path].docstring
    return "" if docstring is None else docstring.value


def signature_of(name: str, value: Any) -> str:
    """Return how a function or class is called, one parameter a line if it is long."""
    prefix = "async def " if inspect.iscoroutinefunction(value) else "class " if isinstance(value, type) else "def "
    result, name = "", name.rpartition(".")[2]
    if isinstance(value, type) and issubclass(value, BaseModel):
        parameters = list(field_texts(value))
    else:
        signature = inspect.signature(value.__init__ if is_plain_error(value) else value)
        # Until its first instance is made, a class below a protocol has the `__init__` of protocols.
        is_bare = isinstance(value, type) and not is_plain_error(value) and any(map(is_protocol, value.__mro__))
        shown = list(parameter_texts(signature))
        parameters = [] if is_bare and shown == ["*args", "**kwargs"] else shown
        result = "" if isinstance(value, type) else f" -> {annotation_of(signature.return_annotation)}"
    line = f"{prefix}{name}({', '.join(parameters)}){result}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{prefix}{name}(", *(f"    {each}," for each in parameters), f"){result}"])


def is_plain_error(value: Any) -> bool:
    """Return True for an error that takes what `Exception` takes, whose signature Python does not know."""
    return isinstance(value, type) and value.__init__ is Exception.__init__


def parameter_texts(signature: inspect.Signature) -> Iterator[str]:
    """Yield the parameters of a call as they are written, without `self`."""
    parameters = [each for name, each in signature.parameters.items() if name not in ("self", "cls", "_cls")]
    before: inspect.Parameter | None = None
    for each in parameters:
        if each.kind is not each.POSITIONAL_ONLY and before is not None and before.kind is each.POSITIONAL_ONLY:
            yield "/"
        if each.kind is each.KEYWORD_ONLY and (before is None or before.kind < each.VAR_POSITIONAL):
            yield "*"
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        annotated = "" if each.annotation is each.empty else f": {annotation_of(each.annotation)}"
        default = "" if each.default is each.empty else f"{' = ' if annotated else '='}{default_of(each.default)}"
        yield f"{star}{each.name}{annotated}{default}"
        before = each
    if before is not None and before.kind is before.POSITIONAL_ONLY:
        yield "/"


def field_texts(model: type[BaseModel]) -> Iterator[str]:
    """Yield the fields of a pydantic model as they are written, with the alias of a hidden one."""
    for cls in reversed(model.__mro__):
        package, _, path = f"{cls.__module__}.{cls.__name__}".partition(".")
        for name in model.model_fields if package in SOURCES else ():
            if (field := SOURCES[package][path].members.get(name)) is not None:
                default = "" if field.value is None else f" = {field.value}"
                yield f"{name}: {field.annotation}{default}"


def annotation_of(annotation: Any) -> str:
    """Return an annotation as it stands in the source."""
    if annotation is inspect.Signature.empty:
        return "None"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_of(value: Any) -> str:
    """Return a default as it stands in the source; "…" for one whose text says nothing."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__name__)
    if isinstance(value, tuple) and value:
        return f"({', '.join(map(default_of, value))}{',' * (len(value) == 1)})"
    text = repr(value)
    return "…" if text.startswith("<") else text


if __name__ == "__main__":
    main()
