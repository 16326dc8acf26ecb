"""The commands of `toolbox`: check, graph, reach, tools, chat, worker, new, mcp; the worker and the new project.

The package `cli` is the home of typer and rich. Not here: what the terminal shows and the conversation of `chat`
(`terminal`), the checks, the bean graph, the tool specifications, taking over runs (`toolbox.runs`).
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from datetime import datetime
from importlib.machinery import PathFinder
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..container import APPLICATION_CONTAINER, Container, internals_of
from ..errors import IllegalConfigurationError, ToolboxError
from ..introspection import read_signature
from ..overview import nodes_of
from ..safe_text import for_line, for_terminal
from ..services.declaration import service_options_of
from .terminal import (
    fail,
    fail_in_program,
    fail_with_problems,
    mermaid_lines,
    offers_of,
    print_json,
    reach_as_mermaid,
    reach_as_table,
    report_json,
    show,
    specification_lines,
    text_lines,
)

if TYPE_CHECKING:
    from ..runs.store import StoredRun

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="The target, such as my_app.main:container")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON for other programs.", callback=report_json, is_eager=True)
]


def main() -> None:
    """Run the command line; the entry point of the console script."""
    app()


def print_version(wanted: bool) -> None:
    """Print the version and exit; the callback of `--version`."""
    if wanted:
        from importlib.metadata import version

        typer.echo(version("toolbox-di"))
        raise typer.Exit


@app.callback()
def toolbox(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Check, inspect and try a program written with toolbox."""


@app.command()
def check(
    target: Target,
    as_json: AsJson = False,
    models: Annotated[
        bool,
        typer.Option("--models/--no-models", help="Check that every model exists; needs their settings."),
    ] = True,
) -> None:
    """Print all configuration problems of a program. The exit status is 1 if there are any.

    The target is a container, or a FastAPI application that `install` connected to one.
    """
    container = load_container(target)
    problems = container.check(models=models)
    if as_json:
        print_json({"problems": [asdict(problem) for problem in problems]})
    elif not problems:
        show("[green]No problems.[/green]")
    for problem in () if as_json else problems:
        show(f"[bold]{escape(problem.where)}[/bold]: {escape(problem.what)}\n  [dim]→[/dim] {escape(problem.fix)}")
    if problems:
        if models and not as_json and len(container.check(models=False)) < len(problems):
            show("[dim]To check without models, for example where no key is set: --no-models[/dim]")
        raise typer.Exit(1)


@app.command()
def graph(
    target: Target,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid drawing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the container's beans: their scopes, their dependencies, and the tools they offer and use."""
    container = load_container(target)
    nodes = nodes_of(internals_of(container).describe(), container)
    if as_json:
        print_json({"beans": [asdict(node) for node in nodes]})
    elif mermaid:
        typer.echo(for_terminal("\n".join(mermaid_lines(nodes))))
    else:
        for line in text_lines(nodes):
            show(line)


@app.command()
def reach(
    target: Target,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid drawing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print which tools can be called from where: entries, services on the way, roles, approval, guardrails, effects.

    The target is a container, or a FastAPI application that `install` connected to one.
    """
    found = load_made(target)
    container = container_in(found, target)
    ways = container.reach(None if found is container else found)
    if as_json:
        print_json({"reach": [way.as_json() for way in ways]})
    elif mermaid:
        typer.echo(for_terminal("\n".join(reach_as_mermaid(ways))))
    else:
        for line in reach_as_table(ways):
            show(line)


@app.command()
def tools(target: Target, as_json: AsJson = False) -> None:
    """Print the tools that a model sees, of a service, a class or a function, or of a container or application."""
    found = load(target)
    offers = list(offers_of(load_container(target) if holds_container(found) else found, target))
    if as_json:
        print_json({"offers": [offer.as_json() for offer in offers]})
        return
    if not offers:
        show("This container has no AI services, and no endpoint has tools.")
    for offer in offers:
        count = len(offer.specifications)
        show(
            f"[bold]{escape(offer.where)}[/bold]  "
            f"[dim]{count} {'tool' if count == 1 else 'tools'}, about {offer.tokens} tokens[/dim]"
        )
        for specification in offer.specifications:
            for line in specification_lines(specification):
                show(f"  {line}")


@app.command()
def chat(
    target: Annotated[str, typer.Argument(help="The service, module:Service.")],
    container: Annotated[
        str | None,
        typer.Option(help="Its container, module:container. Default: the one in its module, or a new one."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method to call. Default: the first one.")] = None,
    memory_id: Annotated[str, typer.Option(help="The id of the conversation.")] = "terminal",
    values: Annotated[
        list[str] | None, typer.Option("--set", help="Another parameter, name=value; can be repeated.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print events as JSON, one object per line.",
            callback=report_json,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Chat with a service on the terminal: prints text as it arrives, and tool calls. `exit` or Ctrl-D ends it.

    Piped input is sent line by line. The exit status is then 1 if one of the questions failed.
    """
    from .terminal import Conversation, ShowJson, ShowText, converse, exit_interrupted, plan_of, prompt_for

    service = load(target)
    if not isinstance(service, type) or service_options_of(service) is None:
        fail(f"{target} is not an AI service; use a class that is marked with @register_ai_service")
    try:
        given = dict(each.split("=", 1) for each in values or ())
    except ValueError:
        fail("invalid --set; write --set name=value")
    console = Console(soft_wrap=True)
    try:
        plan = plan_of(service, method)
        there = container_of(service, target, container)
        internals_of(there).take_over_runs(False)
        conversation = Conversation(there, plan, memory_id, given, ShowJson() if as_json else ShowText(console))
        read = prompt_for(console, quiet=as_json)
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # keep tool output out of the JSON
            failed = asyncio.run(converse(there, conversation, read))
    except LookupError as error:
        fail(str(error.args[0]))
    except IllegalConfigurationError as error:
        fail_with_problems(error.problems)
    except (KeyboardInterrupt, asyncio.CancelledError):
        exit_interrupted()
    else:
        if failed and not sys.stdin.isatty():
            raise typer.Exit(1)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to create; its name is the project's name.")],
    as_json: AsJson = False,
) -> None:
    """Create a new project: a FastAPI service with a tool, and tests."""
    try:
        files = new_project(folder)
    except OSError as error:
        fail(f"{folder} cannot be written: {error.strerror}" if error.strerror else str(error))
    except ValueError as error:
        fail(str(error))
    if as_json:
        print_json({"files": [str(file) for file in files]})
        return
    for file in files:
        show(f"[dim]wrote[/] {escape(str(file))}")
    show("Next steps:")
    if folder.resolve() != Path.cwd():
        show(f"  cd {escape(shlex.quote(str(folder)))}")
    show("  pip install 'toolbox-di\\[fastapi]' pytest\n  python -m pytest")
    show("See README.md for more.")


@app.command()
def worker(
    target: Target,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Continue the runs of a container whose process is gone, and those that its run engine delivers.

    Needs a RunStore that keeps runs in a database, such as toolbox.sql.SqlRunStore. Any number of workers can share
    one database: each run has one owner at a time. SIGTERM or Ctrl-C stops the worker: running tools may finish within
    the container's stop_timeout, and other processes continue the runs at once.
    """
    container = load_container(target)

    def line(text: str) -> None:
        if not quiet:
            typer.echo(for_terminal(text))

    try:
        asyncio.run(work(container, line))
    except LookupError as error:
        fail(f"{target}: {error.args[0]}")
    except IllegalConfigurationError as error:
        fail_with_problems(error.problems)
    except KeyboardInterrupt:
        pass


@app.command("mcp")
def serve_mcp(
    target: Target,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            help="Tools to serve: module:Class, module:Class.method, module:function or module:object; repeatable. "
            "Default: all tools, resources and prompts of all beans."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The server's name.")] = "toolbox",
) -> None:
    """Serve a container's tools, resources and prompts as an MCP server on standard input and output."""
    with redirect_stdout(sys.stderr):  # standard output is for the MCP protocol only
        container = load_container(target)
        internals_of(container).take_over_runs(False)
        sources = [_tool_source(each) for each in tools or ()] or list(internals_of(container).mcp_beans())
    if not sources:
        fail(f"{target} has no bean with tools; add some with --tools module:Class")
    try:
        from ..mcp import serve_stdio

        asyncio.run(serve_stdio(container, sources, name))
    except ImportError:
        fail("the library mcp is not installed; run: pip install 'toolbox-di[mcp]'")
    except IllegalConfigurationError as error:
        fail_with_problems(error.problems)


def _tool_source(target: str) -> Any:
    """Return the object that a `--tools` option names; a method stays connected to its class."""
    found = load(target)
    owner, dot, attribute = target.rpartition(".")
    if dot and ":" in owner and inspect.isfunction(found):
        cls = load(owner)
        if isinstance(cls, type) and not isinstance(inspect.getattr_static(cls, attribute), staticmethod):
            from ..mcp.serving import ToolMember

            return ToolMember(cls, attribute)
    return found


# --- targets: `module:name` of a container, an application, a service or a tool


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
    """Return the container at `address`, else the first one in the service's module, else a new one."""
    if address is not None:
        return load_container(address)
    for _, found in containers_in(target.partition(":")[0]):
        return found
    return Container().register(service)


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


# --- the worker


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def work(container: Container, show: Callable[[str], None]) -> None:
    """Continue runs until SIGTERM or SIGINT; `show` gets one line for each start and end of a run.

    At a signal, running tools get the container's `stop_timeout` to finish; then the leases are released. Raises
    `LookupError` if the container has no persistent `RunStore`.
    """
    report = WorkerReport(show)
    internals_of(container).take_over_runs(True)
    async with container:
        runs = container.runs
        store = await runs.store()
        if not store.persistent:
            raise LookupError("its runs are in memory, so a worker finds none; register sql.engine and sql.SqlRunStore")
        runs.progress = report.tell
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            with suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt
                loop.add_signal_handler(number, stopped.set)
        show(f"{_now()} worker {runs.owner} is ready; it looks for runs with expired leases every {store.lease:g} s")
        try:
            await stopped.wait()
        finally:
            for number in STOP_SIGNALS:
                with suppress(NotImplementedError):
                    loop.remove_signal_handler(number)
            count = report.running
            show(f"{_now()} stopping" + (f"; {count} running {'run' if count == 1 else 'runs'}" if count else ""))
    show(f"{_now()} stopped; {report.ended} ended here")


class WorkerReport:
    """Counts the runs that this worker executes, and shows a line for each start and end."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._began: dict[str, float] = {}
        self.ended = 0

    @property
    def running(self) -> int:
        """The number of runs that are executed now."""
        return len(self._began)

    def tell(self, what: str, run: StoredRun) -> None:
        """Show that a run was taken (`executes`), or the status with which its execution here has ended."""
        where = f"{_now()} run {run.id} ({run.service}.{run.method})"
        if what == "executes":
            self._began[run.id] = time.monotonic()
            self._show(f"{where}: continues here")
            return
        seconds = time.monotonic() - self._began.pop(run.id, time.monotonic())
        self.ended += what in ("completed", "failed", "cancelled")
        self._show(f"{where}: {what} after {seconds:.1f} s")


def _now() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")


# --- a new project


APP = '''"""A FastAPI service whose model can call the tools in this file."""

from typing import Protocol

from fastapi import FastAPI

from toolbox import Container, Inject, MemoryId, Result, register_ai_service, system_message, tool
from toolbox_fastapi import install


class Articles:
    """Tools are methods that the model can call. The docstring and the type hints describe them to the model."""

    @tool
    def find_articles(self, words: str) -> dict[str, float]:
        """Find the articles that match these words, with their prices in euros."""
        prices = {{"blue paint": 12.5, "white paint": 11.0, "paper": 3.2}}
        return {{name: price for name, price in prices.items() if set(name.split()) & set(words.lower().split())}}


@register_ai_service(tools=Articles)
class Assistant(Protocol):
    @system_message("You are a helpful assistant. Use your tools.")
    async def chat(self, session: MemoryId[str], question: str) -> Result[str]: ...


container = Container().register(Assistant)
app = FastAPI(title={quoted_title})
install(app, container)


@app.get("/chat/{{session}}")
async def chat(session: str, question: str, assistant: Inject[Assistant]) -> dict[str, object]:
    # Anyone who knows a session's id can read its conversation: take the id from the user's login.
    result = await assistant.chat(session, question)
    return {{"answer": result.content, "tools": [each.request.name for each in result.tool_executions]}}
'''

TEST = '''"""Tests of the service with a scripted model, without a key or a network."""

import pytest
from fastapi.testclient import TestClient

from {package} import app, container
from toolbox.testing import ExpectedCall, ScriptedChatModel, assert_tool_calls, tool_call


def test_the_assistant_looks_prices_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedChatModel([tool_call("find_articles", {{"words": "paper"}}), "It is 3.20 €."])
    monkeypatch.setitem(container.models, "default", model)

    with TestClient(app) as client:
        reply = client.get("/chat/me", params={{"question": "What is paper?"}}).json()

    assert reply == {{"answer": "It is 3.20 €.", "tools": ["find_articles"]}}
    assert_tool_calls(model, ExpectedCall("find_articles", {{"words": "paper"}}, result='{{"paper":3.2}}'))
'''

PROJECT = """[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["toolbox-di[fastapi]"]

[dependency-groups]
dev = ["pytest>=9.2"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

README = """# {title}

    pip install 'toolbox-di[fastapi]' pytest
    TOOLBOX_DEMO=1 uvicorn {package}:app          # without a model; or set OPENAI_MODEL and OPENAI_API_KEY
    curl 'localhost:8000/chat/me?question=Have+you+got+white+paint'
    python -m pytest
    toolbox check {package}:container             # and: graph, tools, chat {package}:Assistant
"""

FILES = {
    "{package}.py": APP,
    "tests/test_{package}.py": TEST,
    "pyproject.toml": PROJECT,
    "README.md": README,
    ".gitignore": "__pycache__/\n.venv/\n.pytest_cache/\n",
}


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
    name = package.replace("_", "-")
    quoted = json.dumps(title, ensure_ascii=False)  # a JSON string is also a Python string
    written = []
    for path, text in FILES.items():
        file = folder / path.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(name=name, package=package, title=title, quoted_title=quoted), encoding="utf-8")
        written.append(file)
    return written


def is_taken(module: str) -> bool:
    """Return True if a module of this name exists outside the current folder."""
    if module in sys.stdlib_module_names:
        return True
    elsewhere = [each for each in sys.path if each and Path(each).resolve() != Path.cwd()]
    found = PathFinder.find_spec(module, elsewhere)
    return found is not None and found.origin is not None
