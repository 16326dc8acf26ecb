"""The commands of `toolbox`: check, graph, reach, tools, chat, worker, migrate, new, mcp.

The package `cli` is the home of typer and rich. Not here: what the commands name (`targets`), what the terminal shows
and the conversation of `chat` (`terminal`), the `worker`, the files of a new project (`new_project`).
"""

from __future__ import annotations

import asyncio
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
from ..safe_text import for_terminal
from ..services.declaration import service_options_of
from .new_project import PLAIN, WITH_FRONT_END, new_project
from .store_tables import migrations_of, statements_of
from .targets import container_in, container_of, holds_container, load, load_container, load_made
from .terminal import (
    fail,
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
from .worker import work

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
    """Print the container's beans: their scopes, their dependencies, the tools they offer and use, what is left out."""
    container = load_container(target)
    nodes, left_out = nodes_of(internals_of(container).describe(), container), internals_of(container).left_out()
    if as_json:
        absent = [{"name": each.name, "why": each.why} for each in left_out]
        print_json({"beans": [asdict(node) for node in nodes], "left_out": absent})
    elif mermaid:
        typer.echo(for_terminal("\n".join(mermaid_lines(nodes, left_out))))
    else:
        for line in text_lines(nodes, left_out):
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
    identity: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the caller. Default: an anonymous caller.")
    ] = None,
    role: Annotated[
        list[str] | None, typer.Option(help="A role of the caller, with --identity; can be repeated.")
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
    from .terminal import (
        ShowJson,
        ShowText,
        TerminalChat,
        converse,
        exit_interrupted,
        identity_named,
        prompt_for,
    )

    service = load(target)
    if not isinstance(service, type) or service_options_of(service) is None:
        fail(f"{target} is not an AI service; use a class that is marked with @register_ai_service")
    try:
        given = dict(each.split("=", 1) for each in values or ())
    except ValueError:
        fail("invalid --set; write --set name=value")
    try:
        caller = identity_named(identity, role or ())
    except ValueError as error:
        fail(str(error))
    console = Console(soft_wrap=True)
    try:
        there = container_of(service, target, container)
        internals_of(there).take_over_runs(False)
        shown = ShowJson() if as_json else ShowText(console)
        conversation = TerminalChat(there, service, method, memory_id, given, shown, caller)
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
    front_end: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Add a chat page: vercel (React with useChat), or ag-ui (plain JavaScript)."),
    ] = None,
) -> None:
    """Create a new project: a FastAPI service with a tool, and tests."""
    if front_end is not None and front_end not in WITH_FRONT_END:
        fail(f"unknown front end {front_end!r}; use one of: {', '.join(WITH_FRONT_END)}")
    kind = PLAIN if front_end is None else WITH_FRONT_END[front_end]
    try:
        files = new_project(folder, kind)
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
    show(f"  pip install 'toolbox-di\\[{kind.extras}]' pytest\n  python -m pytest")
    show("README.md says how to start it.")


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


@app.command()
def migrate(
    target: Target,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements instead of executing them.")] = False,
) -> None:
    """Create and migrate the tables of all stores in SQL databases, with one transaction for each database.

    Conversations in Redis of an earlier release are migrated too.

    Run it before a new version starts, as a database user who may create tables. The programs then need only rights
    on the rows: start them with TOOLBOX_SQL__MIGRATE=false, and they check the tables and change none.
    """
    container = load_container(target)
    try:
        lines = asyncio.run(statements_of(container) if sql else migrations_of(container))
    except IllegalConfigurationError as error:
        fail_with_problems(error.problems)
    else:
        for line in lines:
            typer.echo(for_terminal(line))


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
        sources = [_load_tool_source(each) for each in tools or ()] or list(internals_of(container).mcp_beans())
    if not sources:
        fail(f"{target} has no bean with tools; add some with --tools module:Class")
    try:
        from ..mcp import serve_stdio

        asyncio.run(serve_stdio(container, sources, name))
    except ImportError:
        fail("the library mcp is not installed; run: pip install 'toolbox-di[mcp]'")
    except IllegalConfigurationError as error:
        fail_with_problems(error.problems)


def _load_tool_source(target: str) -> Any:
    """Return the object that a `--tools` option names; a method stays connected to its class."""
    found = load(target)
    owner, dot, attribute = target.rpartition(".")
    if dot and ":" in owner and inspect.isfunction(found):
        cls = load(owner)
        if isinstance(cls, type) and not isinstance(inspect.getattr_static(cls, attribute), staticmethod):
            from ..mcp.served_sources import ToolMember

            return ToolMember(cls, attribute)
    return found
