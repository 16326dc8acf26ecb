"""The command line `toolbox`: what is wrong with a program, what is wired to what, what its models see.

The home of typer and rich. Not here: the checks, the graph and the specifications themselves; they are only shown.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..container import internals_of
from ..errors import IllegalConfigurationError
from ..overview import nodes_of
from ..printable import for_terminal
from ..services.declaration import service_options_of
from .addresses import (
    container_of,
    fail,
    leave_interrupted,
    load,
    load_container,
    print_json,
    prompt_for,
    refuse,
    show,
    tell_json,
)
from .drawing import mermaid_lines, text_lines
from .offers import offers_of, specification_lines

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where it is, such as my_app.main:container")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, for programs to read.", callback=tell_json, is_eager=True)
]


def main() -> None:
    """The console script."""
    app()


def print_version(wanted: bool) -> None:
    """What `--version` does."""
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
    """Looks into a program written with toolbox."""


@app.command()
def check(
    target: Target,
    as_json: AsJson = False,
    models: Annotated[
        bool, typer.Option("--models/--no-models", help="Check that every model is there; needs the model's settings.")
    ] = True,
) -> None:
    """Prints everything that would keep the program from starting; the exit status is 1 when there is anything.

    The target is a container, or a FastAPI application that `install` joined to one.
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
            show("[dim]To check without models, as where there is no key: --no-models[/dim]")
        raise typer.Exit(1)


@app.command()
def graph(
    target: Target,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid drawing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prints the container's beans: their scopes, what they hold, the tools they offer and use."""
    nodes = nodes_of(load_container(target))
    if as_json:
        print_json({"beans": [asdict(node) for node in nodes]})
    elif mermaid:
        typer.echo(for_terminal("\n".join(mermaid_lines(nodes))))
    else:
        for line in text_lines(nodes):
            show(line)


@app.command()
def tools(target: Target, as_json: AsJson = False) -> None:
    """Prints what a model is told of the tools of a service, a class, a function, or of a container's services."""
    offers = list(offers_of(load(target), target))
    if as_json:
        print_json({"offers": [offer.as_json() for offer in offers]})
        return
    if not offers:
        show("There is no service in this container.")
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
        str | None, typer.Option(help="Its container, module:container. Else: the one of its module, or a new one.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method to talk to. Else: the first.")] = None,
    memory_id: Annotated[str, typer.Option(help="Which conversation to keep.")] = "terminal",
    values: Annotated[
        list[str] | None, typer.Option("--set", help="A further parameter, name=value; may be repeated.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print what happens as JSON, an object in each line.",
            callback=tell_json,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Talks to a service on the terminal: text as it comes, tools as they are called. `exit` or Ctrl-D ends it.

    What is piped into it is asked line by line; the exit status is 1 when one of these questions failed.
    """
    import asyncio

    from .terminal import Conversation, ShowJson, ShowText, converse, plan_of

    service = load(target)
    if not isinstance(service, type) or service_options_of(service) is None:
        fail(f"{target} is no AI service; name a class that is marked @register_ai_service")
    try:
        given = dict(each.split("=", 1) for each in values or ())
    except ValueError:
        fail("--set takes name=value")
    console = Console(soft_wrap=True)
    try:
        plan = plan_of(service, method)
        there = container_of(service, target, container)
        conversation = Conversation(there, plan, memory_id, given, ShowJson() if as_json else ShowText(console))
        read = prompt_for(console, quiet=as_json)
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what tools print is no line of this
            failed = asyncio.run(converse(there, conversation, read))
    except LookupError as error:
        fail(str(error.args[0]))
    except IllegalConfigurationError as error:
        refuse(error.problems)
    except (KeyboardInterrupt, asyncio.CancelledError):
        leave_interrupted()
    else:
        if failed and not sys.stdin.isatty():
            raise typer.Exit(1)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to make; its name is the project's.")],
    as_json: AsJson = False,
) -> None:
    """Writes a new project: a FastAPI service with a tool of its own, and the tests that it passes."""
    from .scaffold import new_project

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
    show("Now:")
    if folder.resolve() != Path.cwd():
        show(f"  cd {escape(shlex.quote(str(folder)))}")
    show("  pip install 'toolbox-di\\[fastapi]' pytest\n  python -m pytest")
    show("README.md there says more.")


@app.command("mcp")
def serve_mcp(
    target: Target,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            help="What to offer: module:Class, module:Class.method, module:function or module:object; may be repeated. "
            "Default: all tools of all beans."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The server's name.")] = "toolbox",
) -> None:
    """Serves a container's tools as an MCP server, on standard input and output."""
    import asyncio

    with redirect_stdout(sys.stderr):  # what modules print as they are loaded is nothing the client could read
        container = load_container(target)
        sources = [_tool_source(each) for each in tools or ()] or list(internals_of(container).tool_beans())
    if not sources:
        fail(f"{target} has no bean with tools; name some: --tools module:Class")
    try:
        from ..mcp import serve_stdio

        asyncio.run(serve_stdio(container, sources, name))
    except ImportError:
        fail("the library mcp is missing: pip install 'toolbox-di[mcp]'")
    except IllegalConfigurationError as error:
        refuse(error.problems)


def _tool_source(target: str) -> Any:
    """Return what `--tools` names; a method named through its class as the member of that class."""
    found = load(target)
    owner, dot, attribute = target.rpartition(".")
    if dot and ":" in owner and inspect.isfunction(found):
        cls = load(owner)
        if isinstance(cls, type) and not isinstance(inspect.getattr_static(cls, attribute), staticmethod):
            from ..mcp.serving import ToolMember

            return ToolMember(cls, attribute)
    return found
