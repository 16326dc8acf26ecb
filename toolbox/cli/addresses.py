"""What `module:name` means on the command line, and how the program ends when it means nothing.

Not here: the commands (`commands`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ..container import APPLICATION_CONTAINER, Container
from ..errors import Problem, ToolboxError
from ..printable import for_json, for_terminal
from ..signatures import read_signature

_telling_json: ContextVar[bool] = ContextVar("toolbox.cli.json", default=False)


def tell_json(wanted: bool) -> bool:
    """What `--json` does before anything else: a program can read too why there is nothing to read."""
    _telling_json.set(wanted)
    return wanted


def load(target: str) -> Any:
    """What `module:name` means, imported from the current folder or the environment."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        example = f"{target.removesuffix('.py')}:container" if target and not colon else "my_app.main:container"
        fail(f"{target!r} is no address; write module:name, such as {example}")
    found: Any = import_module(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "name what it defines"
            fail(f"{module_name} has no {path!r}; {hint}")
    return found


def import_module(name: str) -> ModuleType:
    """A module of the current folder or the environment."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # what modules print as they are loaded is not what was asked for
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            fail_in_program(f"{name} cannot be imported", error)
        if name.endswith(".py"):
            fail(f"{name!r} is a file; write the module's name, {name.removesuffix('.py').replace('/', '.')!r}")
        fail(f"there is no module {error.name!r}; run this in the folder that holds it, or install it")
    except ToolboxError as error:
        fail(f"{name} cannot be imported: {error}")
    except Exception as error:
        fail_in_program(f"{name} cannot be imported", error)


def load_container(target: str) -> Container:
    """The container, or what the function found there returns."""
    found = load(target)
    if is_container_factory(found):
        try:
            with redirect_stdout(sys.stderr):
                found = found()
        except ToolboxError as error:
            fail(f"{target} failed: {error}")
        except Exception as error:
            fail_in_program(f"{target} failed", error)
    found = installed_in(found)
    if not isinstance(found, Container):
        kind = "class" if isinstance(found, type) else type(found).__name__
        module = target.partition(":")[0]
        there = [name for name, each in containers_in(module)]
        if is_application(found):
            fail(f"{target} is an application without a container; call install({target.partition(':')[2]}, container)")
        hint = f"the Container, {module}:{there[0]}" if there else "a Container, or a function `-> Container`"
        fail(f"{target} is a {kind}; name {hint}")
    return found


def containers_in(module: str) -> list[tuple[str, Container]]:
    """The containers of a module that has been imported, by name."""
    return [(name, each) for name, each in vars(sys.modules[module]).items() if isinstance(each, Container)]


def container_of(service: type, target: str, address: str | None) -> Container:
    """The container at `address`, else the one in the service's module, else a new one with the service."""
    if address is not None:
        return load_container(address)
    for _, found in containers_in(target.partition(":")[0]):
        return found
    return Container().register(service)


def prompt_for(console: Console, *, quiet: bool) -> Callable[[], str]:
    """What asks for a line: with a prompt for a person, unless it should be `quiet`; without for a pipe."""
    if sys.stdin is not None and sys.stdin.isatty() and not quiet:
        return lambda: console.input("[bold]> [/]")
    return input


def leave_interrupted() -> NoReturn:
    """Ends the program as Ctrl-C does. At once: a thread may still wait for input, on which Python would choke."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def installed_in(found: Any) -> Any:
    """Return the container that `install` joined to an application; anything else as it is."""
    if not is_application(found):
        return found
    return getattr(found.state, APPLICATION_CONTAINER, found)


def is_application(found: object) -> bool:
    """Return True for a FastAPI or Starlette application; neither library is imported to find out."""
    return any(is_application_class(each) for each in type(found).__mro__)


def is_application_class(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("starlette.applications", "Starlette")


def holds_container(found: object) -> bool:
    """Return True for a container, an application that has one, and a function that is declared to return either."""
    return isinstance(installed_in(found), Container) or is_container_factory(found)


def is_container_factory(found: object) -> bool:
    """Return True for a function that is declared to return a container or an application."""
    if not inspect.isfunction(found) or inspect.iscoroutinefunction(found):
        return False
    returns = read_signature(found).returns
    return returns is Container or (isinstance(returns, type) and any(map(is_application_class, returns.__mro__)))


def fail(message: str) -> NoReturn:
    """Ends the program with status 2, as for every wrong use."""
    if _telling_json.get():
        typer.echo(for_json(json.dumps({"error": message}, ensure_ascii=False)))
    show(f"toolbox: {escape(message)}", stderr=True)
    raise typer.Exit(2)


def fail_in_program(message: str, error: Exception) -> NoReturn:
    """The same for what the user's program raised, with where in it, and without the frames that led there."""
    told = traceback.TracebackException.from_exception(error)
    frames = [each for each in told.stack if not each.filename.startswith(_NOT_THE_PROGRAM)]
    told.stack = traceback.StackSummary.from_list(frames)
    show(escape("".join(told.format())), stderr=True, end="")
    fail(f"{message}: {type(error).__name__}, see above")


_NOT_THE_PROGRAM = ("<frozen importlib", str(Path(importlib.__file__).parent), str(Path(__file__).parent))


def show(text: str, *, stderr: bool = False, end: str = "\n") -> None:
    """Print a line with rich's markup; a pipe gets it without colours and unbroken.

    Control characters become visible: what is shown may come from documents, servers and models.
    """
    Console(stderr=stderr).print(for_terminal(text), soft_wrap=True, highlight=False, emoji=False, end=end)


def print_json(value: object) -> None:
    """Prints JSON, as it is in a pipe."""
    typer.echo(for_json(json.dumps(value, ensure_ascii=False, indent=2, default=str)))


def refuse(problems: Iterable[Problem]) -> None:
    """Ends the program with status 1 when there are problems, which it prints."""
    if problems := list(problems):
        if _telling_json.get():
            told = json.dumps({"problems": [asdict(each) for each in problems]}, ensure_ascii=False, default=str)
            typer.echo(for_json(told))
        for problem in problems:
            show(escape(str(problem)), stderr=True)
        raise typer.Exit(1)
