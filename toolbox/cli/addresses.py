"""What `module:name` means on the command line, and how the program ends when it means nothing.

Not here: the commands (`commands`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ..container import Container
from ..errors import Problem, ToolboxError
from ..signatures import read_signature


def load(target: str) -> Any:
    """What `module:name` means, imported from the current folder or the environment."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        fail(f"{target!r} is no address; write module:name, such as my_app.main:container")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        fail(f"there is no module {error.name!r}; run this in the folder that holds it, or install it")
    except ToolboxError as error:
        fail(f"{module_name} cannot be imported: {error}")
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            fail(f"{module_name} has no {path!r}; name what it defines")
    return found


def load_container(target: str) -> Container:
    """The container, or what the function found there returns."""
    found = load(target)
    found = found() if is_container_factory(found) else found
    if not isinstance(found, Container):
        fail(f"{target} is a {type(found).__name__}; name a Container, or a function `-> Container`")
    return found


def container_of(service: type, target: str, address: str | None) -> Container:
    """The container at `address`, else the one in the service's module, else a new one with the service."""
    if address is not None:
        return load_container(address)
    module = importlib.import_module(target.partition(":")[0])
    found = next((each for each in vars(module).values() if isinstance(each, Container)), None)
    return found if found is not None else Container().register(service)


def prompt_for(console: Console) -> Callable[[], str]:
    """What asks for a line: with a prompt for a person, without for a pipe."""
    if sys.stdin.isatty():
        return lambda: console.input("[bold]> [/]")
    return input


def is_container_factory(found: object) -> bool:
    """Whether it is a function declared to return a container."""
    return inspect.isfunction(found) and read_signature(found).returns is Container


def fail(message: str) -> NoReturn:
    """Ends the program with status 2, as for every wrong use."""
    Console(stderr=True).print(f"toolbox: {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


def show(text: str) -> None:
    """Prints a line with rich's markup; a pipe gets it without colours and unbroken."""
    Console().print(text, soft_wrap=True, highlight=False)


def print_json(value: object) -> None:
    """Prints JSON, as it is in a pipe."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def refuse(problems: Iterable[Problem]) -> None:
    """Ends the program with status 1 when there are problems, which it prints."""
    if problems := list(problems):
        for problem in problems:
            Console(stderr=True).print(escape(str(problem)), soft_wrap=True, highlight=False)
        raise typer.Exit(1)
