"""The command line `toolbox`: what is wrong with a program, what is wired to what, what its models see.

The home of typer and rich. Not here: the checks, the graph and the specifications themselves; they are only shown.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from .chat import ToolSpecification, UserMessage
from .container import Container
from .di.description import BeanDescription
from .errors import IllegalConfigurationError, Problem, ToolboxError
from .rest.marks import client_mark_of
from .services.declaration import service_options_of
from .services.memory import estimate_tokens
from .services.planning import plan_service, sources_of
from .signatures import read_signature
from .tools.sources import bean_types
from .tools.standalone import tool_specification_from, tool_specifications_from

app = typer.Typer(
    help="Looks into a program written with toolbox.", no_args_is_help=True, pretty_exceptions_enable=False
)

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where it is, such as my_app.main:container")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs to read.")]


def main() -> None:
    """The console script."""
    app()


@app.command()
def check(target: Target, as_json: AsJson = False) -> None:
    """Prints everything that would keep the container from starting; the exit status is 1 when there is anything."""
    problems = load_container(target).check()
    if as_json:
        print_json({"problems": [asdict(problem) for problem in problems]})
    elif not problems:
        show("[green]No problems.[/green]")
    for problem in () if as_json else problems:
        show(f"[bold]{escape(problem.where)}[/bold]: {escape(problem.what)}\n  [dim]→[/dim] {escape(problem.fix)}")
    if problems:
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
        typer.echo("\n".join(mermaid_lines(nodes)))
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
) -> None:
    """Talks to a service on the terminal: text as it comes, tools as they are called. `exit` or Ctrl-D ends it."""
    import asyncio

    from .terminal import converse, plan_of

    service = load(target)
    if not isinstance(service, type):
        fail(f"{target} is no class; name an AI service, module:Service")
    try:
        given = dict(each.split("=", 1) for each in values or ())
    except ValueError:
        fail("--set takes name=value")
    console = Console(soft_wrap=True)
    try:
        plan = plan_of(service, method)
        asyncio.run(
            converse(container_of(service, target, container), plan, memory_id, given, console, prompt_for(console))
        )
    except LookupError as error:
        fail(str(error.args[0]))
    except IllegalConfigurationError as error:
        refuse(error.problems)
    except KeyboardInterrupt:
        console.print()


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="The folder to make; its name is the project's.")]) -> None:
    """Writes a new project: a FastAPI service with a tool of its own, and the tests that it passes."""
    from .scaffold import new_project

    try:
        for file in new_project(folder):
            show(f"[dim]wrote[/] {escape(str(file))}")
    except (OSError, ValueError) as error:
        fail(str(error))
    show(f"Now: cd {escape(str(folder))} && python -m pytest, and see README.md")


@app.command("mcp")
def serve_mcp(
    target: Target,
    tools: Annotated[
        list[str] | None, typer.Option(help="What to offer, module:name; may be repeated. Else: every tool of a bean.")
    ] = None,
    name: Annotated[str, typer.Option(help="The server's name.")] = "toolbox",
) -> None:
    """Serves a container's tools as an MCP server, on standard input and output."""
    import asyncio

    container = load_container(target)
    sources = [load(each) for each in tools or ()] or list(container.tool_beans())
    if not sources:
        fail(f"{target} has no bean with tools; name some: --tools module:Class")
    try:
        from .mcp import serve_stdio

        asyncio.run(serve_stdio(container, sources, name))
    except ImportError:
        fail("the library mcp is missing: pip install 'toolbox-di[mcp]'")
    except IllegalConfigurationError as error:
        refuse(error.problems)


# --- what is looked at


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


# --- the graph


@dataclass(frozen=True, slots=True)
class Node:
    """A bean as it is shown; `dependencies`, `lazy` and `toolbox` name other beans, `tools` what it offers itself."""

    name: str
    type: str
    scope: str
    made_by: str
    dependencies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lazy: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    toolbox: tuple[str, ...] = ()

    @property
    def links(self) -> Iterator[tuple[str, str]]:
        """What it is bound to, each with the manner."""
        yield from ((bean, "holds") for beans in self.dependencies.values() for bean in beans)
        yield from ((bean, "looks up") for beans in self.lazy.values() for bean in beans)
        yield from ((bean, "calls") for bean in self.toolbox)


SCOPES = ("application", "request", "call", "dependent")
ARROWS = {"holds": "-->", "looks up": "-.->", "calls": "==>"}


def nodes_of(container: Container) -> list[Node]:
    """The container's beans, the longest-lived first."""
    beans = container.describe()
    names = {bean.source: bean.name for bean in beans if isinstance(bean.source, type)}

    def node(bean: BeanDescription) -> Node:
        source = bean.source
        is_service = isinstance(source, type) and service_options_of(source) is not None
        used = bean_types(sources_of(source)) if is_service and isinstance(source, type) else ()
        return Node(
            name=bean.name,
            type=bean.type,
            scope=str(bean.scope),
            made_by="AI service" if is_service else "REST client" if client_mark_of(source) else bean.made_by,
            dependencies=dict(bean.dependencies),
            lazy=dict(bean.lazy),
            tools=tool_names(source),
            toolbox=tuple(names[each] for each in used if each in names),
        )

    nodes = sorted(map(node, beans), key=lambda each: SCOPES.index(each.scope))
    linked = {name for each in nodes for name, _ in each.links}
    # The container is a bean of its own, which says nothing unless something asks for it.
    itself = {bean.name for bean in beans if bean.source is container}
    return [each for each in nodes if each.name not in itself - linked]


def tool_names(source: object) -> tuple[str, ...]:
    """The names of the tools a class has; none where they cannot be read, which `check` reports."""
    try:
        return tuple(each.name for each in tool_specifications_from(source)) if isinstance(source, type) else ()
    except IllegalConfigurationError:
        return ()


def text_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """The graph as text: a paragraph for each scope."""
    scope = ""
    for node in nodes:
        if node.scope != scope:
            yield f"{'' if not scope else chr(10)}[bold]{node.scope}[/bold]"
            scope = node.scope
        yield f"  {escape(node.name)}: [cyan]{escape(node.type)}[/cyan] [dim]({escape(node.made_by)})[/dim]"
        if node.tools:
            yield f"    offers the tools {escape(', '.join(node.tools))}"
        for bean, manner in node.links:
            yield f"    {manner} {escape(bean)}"


def mermaid_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """The graph as a Mermaid flowchart: solid for what is held, dotted for what is looked up, thick for tools."""
    nodes = list(nodes)
    ids = {node.name: f"bean{number}" for number, node in enumerate(nodes)}
    yield "flowchart LR"
    for scope in SCOPES:
        members = [node for node in nodes if node.scope == scope]
        if not members:
            continue
        yield f"  subgraph {scope}"
        for node in members:
            offered = f"<br><small>{', '.join(node.tools)}</small>" if node.tools else ""
            text = node.type.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
            yield f'    {ids[node.name]}["{text}{offered}"]'
        yield "  end"
    for node in nodes:
        for bean, manner in node.links:
            yield f"  {ids[node.name]} {ARROWS[manner]} {ids[bean]}"


# --- the tools


@dataclass(frozen=True, slots=True)
class Offer:
    """What a model is offered by `where`: a service's method, a class, a function."""

    where: str
    specifications: tuple[ToolSpecification, ...]

    @property
    def tokens(self) -> int:
        """About how many tokens of each request it takes."""
        return sum(map(tokens_of, self.specifications))

    def as_json(self) -> dict[str, Any]:
        """As a program reads it."""
        tools = [
            {
                "name": each.name,
                "description": each.description,
                "parameters": each.parameters,
                "metadata": each.metadata,
                "tokens": tokens_of(each),
            }
            for each in self.specifications
        ]
        return {"where": self.where, "tokens": self.tokens, "tools": tools}


def offers_of(found: Any, target: str) -> Iterator[Offer]:
    """What is offered by a container's services, a service, a class, an object or a function."""
    if isinstance(found, Container) or is_container_factory(found):
        for bean in load_container(target).describe():
            if isinstance(bean.source, type) and service_options_of(bean.source) is not None:
                yield from offers_of(bean.source, target)
        return
    if isinstance(found, type) and (options := service_options_of(found)) is not None:
        plans, problems = plan_service(found, options)
        refuse(problems)
        for plan in plans.values():
            yield Offer(plan.where, plan.toolset.specifications)
        return
    read: Callable[[Any], Any] = (
        (lambda function: [tool_specification_from(function)])
        if callable(found) and not isinstance(found, type)
        else tool_specifications_from
    )
    try:
        specifications = tuple(read(found))
    except IllegalConfigurationError as error:
        refuse(error.problems)
        return
    if not specifications:
        fail(f"{target} has no tools; mark a method with @tool, or name a service or a container")
    yield Offer(getattr(found, "__name__", target), specifications)


def refuse(problems: Iterable[Problem]) -> None:
    """Ends the program with status 1 when there are problems, which it prints."""
    if problems := list(problems):
        for problem in problems:
            Console(stderr=True).print(escape(str(problem)), soft_wrap=True, highlight=False)
        raise typer.Exit(1)


def tokens_of(specification: ToolSpecification) -> int:
    """About how many tokens a specification takes in a request."""
    shown = [specification.name, specification.description, specification.parameters]
    return estimate_tokens(UserMessage(json.dumps(shown, ensure_ascii=False, separators=(",", ":"))))


def specification_lines(specification: ToolSpecification) -> Iterator[str]:
    """A tool as text: its name, what it says of itself, its parameters."""
    yield f"[cyan]{escape(specification.name)}[/cyan]  [dim]about {tokens_of(specification)} tokens[/dim]"
    for line in (specification.description or "").splitlines():
        yield f"  {escape(line)}"
    required = specification.parameters.get("required", ())
    for name, schema in specification.parameters.get("properties", {}).items():
        facts = "" if name in required else ", optional"
        described = f": {schema['description']}" if schema.get("description") else ""
        yield f"  - {escape(name)} ({escape(kind_of(schema))}{facts}){escape(described)}"


def kind_of(schema: dict[str, Any]) -> str:
    """A schema in a word or two."""
    if "enum" in schema:
        return " | ".join(json.dumps(each, ensure_ascii=False) for each in schema["enum"])
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(kind_of, branches)))
    if schema.get("type") == "array":
        return f"array of {kind_of(schema.get('items') or {})}"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type", "any")
    return " | ".join(kind) if isinstance(kind, list) else str(kind)


if __name__ == "__main__":
    main()
