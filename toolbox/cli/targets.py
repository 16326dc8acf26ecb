"""Loads what the commands name: `module:name` of a container, an application, a service or a tool.

Not here: the commands (`commands`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from ..container import APPLICATION_CONTAINER, Container, internals_of
from ..errors import ToolboxError
from ..introspection import read_signature
from .terminal import fail, fail_in_program


def load(target: str) -> Any:
    """Return the object that `module:name` names, imported from the current folder or the environment."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        example = f"{target.removesuffix('.py')}:container" if target and not colon else "my_app.main:container"
        fail(f"invalid target {target!r}; write module:name, such as {example}")
    found: Any = import_module(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "use a name that it defines"
            fail(f"{module_name} has no {path!r}; {hint}")
    return found


def import_module(name: str) -> ModuleType:
    """Import a module from the current folder or the environment; exit with an error if this fails."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # keep the output of imported modules out of the command's output
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            fail_in_program(f"{name} cannot be imported", error)
        if name.endswith(".py"):
            fail(f"{name!r} is a file; use the module name {name.removesuffix('.py').replace('/', '.')!r}")
        fail(f"no module named {error.name!r}; run this command in the folder that contains it, or install it")
    except ToolboxError as error:
        fail(f"{name} cannot be imported: {error}")
    except Exception as error:
        fail_in_program(f"{name} cannot be imported", error)


def load_container(target: str) -> Container:
    """Return the container at `target`: a container, an application that has one, or a function that returns either."""
    return container_in(load_made(target), target)


def load_made(target: str) -> Any:
    """Return the object at `target`; for a function that returns a container or an application, what it returns."""
    found = load(target)
    if is_container_factory(found):
        try:
            with redirect_stdout(sys.stderr):
                found = found()
        except ToolboxError as error:
            fail(f"{target} failed: {error}")
        except Exception as error:
            fail_in_program(f"{target} failed", error)
    return found


def container_in(found: object, target: str) -> Container:
    """Return the container itself, or that of an application; exit with an error for other objects."""
    found = installed_in(found)
    if not isinstance(found, Container):
        kind = "class" if isinstance(found, type) else type(found).__name__
        module = target.partition(":")[0]
        there = [name for name, each in containers_in(module)]
        if is_application(found):
            fail(f"{target} has no container; call install({target.partition(':')[2]}, container)")
        hint = f"the Container, {module}:{there[0]}" if there else "a Container, or a function `-> Container`"
        fail(f"{target} is a {kind}, not a container; use {hint}")
    return found


def containers_in(module: str) -> list[tuple[str, Container]]:
    """Return the containers in an imported module, with their names."""
    return [(name, each) for name, each in vars(sys.modules[module]).items() if isinstance(each, Container)]


def container_of(service: type, target: str, address: str | None) -> Container:
    """Return the container at `address`, else the first one in the module, else a new one; register the service."""
    in_module = (found for _, found in containers_in(target.partition(":")[0]))
    container = load_container(address) if address is not None else next(in_module, None) or Container()
    return container if internals_of(container).knows(service) else container.register(service)


def installed_in(found: Any) -> Any:
    """Return the container that `install` connected to an application; other objects unchanged."""
    if not is_application(found):
        return found
    return getattr(found.state, APPLICATION_CONTAINER, found)


def is_application(found: object) -> bool:
    """Return True for a FastAPI or Starlette application, without importing these libraries."""
    return any(is_application_class(each) for each in type(found).__mro__)


def is_application_class(cls: type) -> bool:
    """Return True for Starlette's application class itself."""
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
