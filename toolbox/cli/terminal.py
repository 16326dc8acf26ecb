"""The terminal: lines, JSON, the beans and tools of a program, errors with their exit status, and the conversation.

Not here: the commands, and loading a program (`commands`).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Protocol

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape

from ..capabilities import Capabilities
from ..chat import (
    BeforeToolExecution,
    CompleteResponse,
    PartialReasoning,
    PartialResponse,
    RunSuspended,
    ToolExecuted,
    ToolProgress,
    ToolSpecification,
    UserMessage,
)
from ..container import Container, internals_of
from ..conversations.views import estimate_tokens
from ..di.conditions import LeftOut
from ..di.decorators import SCOPES
from ..errors import IllegalConfigurationError, Problem, ToolboxError
from ..hosts.executors import tool_specification_from, tool_specifications_from
from ..overview import Node
from ..safe_text import for_json, for_terminal
from ..security import Reach, SecurityIdentity
from ..service_events import InnerEvent, ServiceEvent
from ..services.declaration import service_options_of
from ..services.outputs import Kind
from ..services.planning import plan_service
from ..services.plans import MethodPlan
from ..services.streams import watched_call

_reports_json: ContextVar[bool] = ContextVar("toolbox.cli.json", default=False)


def report_json(wanted: bool) -> bool:
    """Print errors as JSON as well; the callback of `--json`."""
    _reports_json.set(wanted)
    return wanted


# --- lines and JSON


def show(text: str, *, stderr: bool = False, end: str = "\n") -> None:
    """Print a line with rich's markup; without colours and line breaks if the output is not a terminal.

    Control characters become visible, because the text may come from documents, servers and models.
    """
    Console(stderr=stderr).print(for_terminal(text), soft_wrap=True, highlight=False, emoji=False, end=end)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(for_json(json.dumps(value, ensure_ascii=False, indent=2, default=str)))


# --- errors


_INTERNAL_FRAMES = ("<frozen importlib", str(Path(importlib.__file__).parent), str(Path(__file__).parent))


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 2, as for all usage errors."""
    if _reports_json.get():
        typer.echo(for_json(json.dumps({"error": message}, ensure_ascii=False)))
    show(f"toolbox: {escape(message)}", stderr=True)
    raise typer.Exit(2)


def fail_in_program(message: str, error: Exception) -> NoReturn:
    """Print an error of the user's program with its traceback, without our own frames, and exit with status 2."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [each for each in shown.stack if not each.filename.startswith(_INTERNAL_FRAMES)]
    shown.stack = traceback.StackSummary.from_list(frames)
    show(escape("".join(shown.format())), stderr=True, end="")
    fail(f"{message}: {type(error).__name__}, see above")


def fail_with_problems(problems: Iterable[Problem]) -> None:
    """Print the problems and exit with status 1, if there are any."""
    if problems := list(problems):
        if _reports_json.get():
            text = json.dumps({"problems": [asdict(each) for each in problems]}, ensure_ascii=False, default=str)
            typer.echo(for_json(text))
        for problem in problems:
            show(escape(str(problem)), stderr=True)
        raise typer.Exit(1)


# --- beans

ARROWS = {"holds": "-->", "looks up": "-.->", "calls": "==>", "searches": "==o"}


def text_lines(nodes: Iterable[Node], left_out: Sequence[LeftOut] = ()) -> Iterator[str]:
    """Yield the bean graph as text, with a paragraph for each scope, and one for what was left out."""
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
    if left_out:
        yield "\n[bold]left out[/bold]"
    for each in left_out:
        yield f"  {escape(each.name)}: [dim]{escape(each.why)}[/dim]"


# --- the reach of a program


def reach_as_table(ways: Sequence[Reach]) -> Iterator[str]:
    """Yield the ways to tools as the lines of a table, with rich's markup."""
    if not ways:
        yield "No tool can be reached."
        return
    rows = [("entry", "path", "tool", "roles", "approval", "guardrails", "effects")]
    for way in ways:
        roles = _write_roles(way)
        guardrails = ", ".join(each.__name__ for each in way.guardrails)
        approval = ", ".join(way.approvers) or ("yes" if way.requires_approval else "")
        rows.append((way.entry, " → ".join(way.path), way.tool, roles, approval, guardrails, ", ".join(way.effects)))
    widths = [max(len(for_terminal(row[column])) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "  ".join(for_terminal(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield f"[bold]{escape(line)}[/bold]" if number == 0 else escape(line)


def _write_roles(way: Reach) -> str:
    """Return the roles of which one is enough; if no single role is, what each check on the way needs."""
    if not way.checks:
        return "any identity" if way.needs_identity else ""
    if all(way.roles <= each for each in way.checks):
        return ", ".join(sorted(way.roles))
    return ", and ".join(" or ".join(sorted(each)) for each in way.checks)


def reach_as_mermaid(ways: Sequence[Reach]) -> Iterator[str]:
    """Yield the ways to tools as a Mermaid flowchart. A label on an arrow names the roles that a caller needs."""
    yield "flowchart LR"
    ids: dict[tuple[str, ...], str] = {}
    for way in ways:
        steps = (way.entry, *way.path, way.tool)
        for depth, text in enumerate(steps):
            last = depth == len(steps) - 1
            place = (*steps[: depth + 1], "tool") if last else steps[: depth + 1]
            if place in ids:
                continue
            ids[place] = f"n{len(ids)}"
            more = f"<br><small>{_write_mermaid(', '.join(way.effects))}</small>" if last and way.effects else ""
            yield f'  {ids[place]}["{_write_mermaid(text)}{more}"]'
            if depth:
                roles = _write_roles(way)
                label = f'|"{_write_mermaid(roles)}"|' if last and roles else ""
                yield f"  {ids[steps[:depth]]} -->{label} {ids[place]}"


def _write_mermaid(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def mermaid_lines(nodes: Iterable[Node], left_out: Sequence[LeftOut] = ()) -> Iterator[str]:
    """Yield the bean graph as a Mermaid flowchart.

    Solid arrows are injected beans, dotted ones are looked up when they are used, thick ones are tools, with a
    circle at their end retrievers. What was left out has a group without arrows.
    """
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
            yield f'    {ids[node.name]}["{_write_mermaid(node.type)}{offered}"]'
        yield "  end"
    if left_out:
        yield "  subgraph left_out[left out]"
        for number, each in enumerate(left_out):
            text = f"{_write_mermaid(each.name)}<br><small>{_write_mermaid(each.why)}</small>"
            yield f'    absent{number}["{text}"]'
        yield "  end"
    for node in nodes:
        for bean, manner in node.links:
            yield f"  {ids[node.name]} {ARROWS[manner]} {ids[bean]}"


# --- tools


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that `where` offers to a model: a service's method, a class or a function."""

    where: str
    specifications: tuple[ToolSpecification, ...]

    @property
    def tokens(self) -> int:
        """Return the estimated number of tokens that the tools add to each request."""
        return sum(map(tokens_of, self.specifications))

    def as_json(self) -> dict[str, Any]:
        """Return the offer as JSON data."""
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
    """Yield the offers of a container's services and endpoints, of a service, a class, an object or a function."""
    if isinstance(found, Container):
        for bean in internals_of(found).describe():
            if isinstance(bean.source, type) and service_options_of(bean.source) is not None:
                yield from offers_of(bean.source, target)
        for where, specifications in internals_of(found).offers():
            yield Offer(where, specifications)
        return
    if isinstance(found, type) and (options := service_options_of(found)) is not None:
        plans, problems = plan_service(found, options, Capabilities())
        fail_with_problems(problems)
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
        fail_with_problems(error.problems)
        return
    if not specifications:
        fail(f"{target} has no tools; mark a method with @tool, or use a service or a container as the target")
    yield Offer(getattr(found, "__name__", target), specifications)


def tokens_of(specification: ToolSpecification) -> int:
    """Estimate how many tokens a specification adds to a request."""
    shown = [specification.name, specification.description, specification.parameters]
    return estimate_tokens(UserMessage(json.dumps(shown, ensure_ascii=False, separators=(",", ":"))))


def specification_lines(specification: ToolSpecification) -> Iterator[str]:
    """Yield a tool as text: its name, description and parameters."""
    yield f"[cyan]{escape(specification.name)}[/cyan]  [dim]about {tokens_of(specification)} tokens[/dim]"
    for line in (specification.description or "").splitlines():
        yield f"  {escape(line)}"
    required = specification.parameters.get("required", ())
    for name, schema in specification.parameters.get("properties", {}).items():
        facts = "" if name in required else ", optional"
        described = f": {schema['description']}" if schema.get("description") else ""
        yield f"  - {escape(name)} ({escape(kind_of(schema))}{facts}){escape(described)}"


def kind_of(schema: dict[str, Any]) -> str:
    """Return the type of a schema in a word or two."""
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


# --- the conversation of `toolbox chat`


logger = logging.getLogger("toolbox.cli")


def plan_of(container: Container, service: type[Any], method: str | None) -> MethodPlan:
    """Return the started container's plan of the named method, else of the first one. Raises `LookupError`."""
    plans = internals_of(container).host.plans.get(service)
    if plans is None:
        raise LookupError(f"the container replaces {service.__name__} by another object, which has no conversation")
    if not plans or (method is not None and method not in plans):
        raise LookupError(f"{service.__name__} has no method {method or ''}; it has {', '.join(plans) or 'none'}")
    return plans[method] if method is not None else next(iter(plans.values()))


def message_parameter(plan: MethodPlan, given: Iterable[str]) -> str:
    """Return the parameter that gets the input. Raises `LookupError` unless there is exactly one."""
    taken = {plan.memory_parameter, *given}
    left = [
        each.name
        for each in plan.signature.parameters.values()
        if each.name not in taken and (each.default is each.empty or each.name == plan.messages.user_parameter)
    ]
    if len(left) != 1:
        has = f"has the parameters {', '.join(left)}" if left else "has no parameter for the input"
        raise LookupError(f"{plan.where} {has}; set all but one with --set name=value")
    return left[0]


def identity_named(name: str | None, roles: Sequence[str]) -> SecurityIdentity | None:
    """Return the caller with this name and these roles; None without a name. Raises `ValueError` for an invalid one."""
    if name is None and roles:
        raise ValueError("--role has no effect without --identity; add --identity NAME")
    return None if name is None else SecurityIdentity(name, roles)


class TerminalChat:
    """A conversation with one service method, the first one if `method` is None.

    `given` are the values of further parameters. Without a `caller`, the identity is that of the program.
    """

    def __init__(
        self,
        container: Container,
        service: type[Any],
        method: str | None,
        memory_id: object,
        given: Mapping[str, str],
        show: Show,
        caller: SecurityIdentity | None = None,
    ) -> None:
        self._container, self._service, self._method = container, service, method
        self._memory_id, self._given, self.show = memory_id, given, show
        self._seeds = {} if caller is None else {SecurityIdentity: caller}
        if caller is not None:  # the identity= of an application that is not loaded here cannot provide it
            internals_of(container).declare_seed(SecurityIdentity, SecurityIdentity.anonymous, is_optional=True)

    def begin(self) -> None:
        """Read the method's plan. The container is started. Raises `LookupError` for an unknown method or parameter."""
        self._plan = plan = plan_of(self._container, self._service, self._method)
        if unknown := [name for name in self._given if name not in plan.signature.parameters]:
            raise LookupError(
                f"{plan.where} has no parameter {unknown[0]}; it has {', '.join(plan.signature.parameters)}"
            )
        self._arguments: dict[str, Any] = dict(self._given)
        if plan.memory_parameter is not None:
            self._arguments[plan.memory_parameter] = self._memory_id
        self._parameter = message_parameter(plan, self._given)

    async def say(self, text: str) -> bool:
        """Send a message in its own request scope; show an error and return False if the call fails."""
        host = internals_of(self._container).host
        said = [UserMessage(text)] if self._parameter in self._plan.messages.history else text
        arguments = {**self._arguments, self._parameter: said}
        is_structured = self._plan.output.kind is Kind.STRUCTURED
        is_suspended = False
        try:
            async with self._container.request_scope(self._seeds):
                events, value_of_call = watched_call(self._plan, host, arguments)  # a stream belongs to this scope
                async for event in events:
                    is_suspended = isinstance(event, RunSuspended)
                    if not (is_structured and isinstance(event, PartialResponse)):
                        self.show.event(event)
        except Exception as error:  # the conversation continues after any error
            if not isinstance(error, ToolboxError):
                logger.error("%s failed", self._plan.where, exc_info=error)
            self.show.failure(error)
            return False
        if is_structured and not self._plan.output.is_stream and not is_suspended:
            value = value_of_call()
            self.show.value(getattr(value, "content", value))
        return True


class Show(Protocol):
    """The output of a conversation."""

    def event(self, event: ServiceEvent) -> None:
        """Show an event of a turn."""

    def value(self, value: object) -> None:
        """Show the answer of a turn if it is not text."""

    def failure(self, error: Exception) -> None:
        """Show the error of a turn."""

    def end(self, turns: int, seconds: float) -> None:
        """Show the end of the conversation."""


class ShowText:
    """Output for people: text as it arrives, and tool calls."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def event(self, event: ServiceEvent) -> None:
        match event:
            case PartialResponse(text):
                self._print_line(escape(text), end="")
            case PartialReasoning(text):
                self._print_line(f"[dim italic]{escape(text)}[/]", end="")
            case BeforeToolExecution(request):
                self._print_line(f"[dim]→ {escape(request.name)} {escape(request.arguments)}[/]")
            case ToolProgress(request, done, total, message):
                of = f"/{total:g}" if total is not None else ""
                self._print_line(f"[dim]· {escape(request.name)} {done:g}{of} {escape(message or '')}[/]")
            case ToolExecuted(execution):
                took = f"{execution.duration * 1000:.0f} ms"
                colour = "red" if execution.is_error else "dim"
                self._print_line(f"[{colour}]← {escape(execution.result)} ({took})[/]")
            case RunSuspended(run_id, pending):
                for call in pending:
                    arguments = escape(to_json(call.arguments).decode())
                    self._print_line(
                        f"[yellow]waiting for {call.kind}: {escape(call.tool_name)} {arguments} (run {run_id})[/]"
                    )
            case CompleteResponse():
                self._print_line("")

    def value(self, value: object) -> None:
        self._print_line(escape(to_json(value, indent=2).decode()))

    def failure(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ToolboxError) else f"{type(error).__name__}: {error}"
        self._print_line(f"\n[red]{escape(text)}[/]")

    def end(self, turns: int, seconds: float) -> None:
        self._print_line(f"[dim]{turns} {'turn' if turns == 1 else 'turns'} in {seconds:.0f} s[/]")

    def _print_line(self, text: str, end: str = "\n") -> None:
        # Text of a model or a tool must not control the terminal. Our own colours are markup, not control characters.
        self._console.print(for_terminal(text), end=end, highlight=False, soft_wrap=True, emoji=False)


class ShowJson:
    """Output for programs: one JSON object per line, on the standard output at the time of creation."""

    def __init__(self) -> None:
        self._out = sys.stdout

    def event(self, event: ServiceEvent) -> None:
        self._print_line(type(event).__name__, _facts_of(event))

    def value(self, value: object) -> None:
        self._print_line("value", {"value": value})

    def failure(self, error: Exception) -> None:
        self._print_line("failure", {"error": type(error).__name__, "message": str(error)})

    def end(self, turns: int, seconds: float) -> None:
        self._print_line("end", {"turns": turns, "seconds": round(seconds, 3)})

    def _print_line(self, event: str, facts: dict[str, Any]) -> None:
        print(for_json(to_json({"event": event, **facts}, fallback=str).decode()), file=self._out, flush=True)


def _facts_of(event: ServiceEvent) -> dict[str, Any]:
    """Return the fields of an event, without the context of its call."""
    if isinstance(event, InnerEvent):
        inner = {"event": type(event.event).__name__, **_facts_of(event.event)}
        return {"service": event.service, "call_id": event.call_id, "inner": inner}
    return {each.name: getattr(event, each.name) for each in fields(event) if each.name != "context"}


async def converse(container: Container, conversation: TerminalChat, read: Callable[[], str]) -> int:
    """Run the conversation until the input ends or is `exit`; return how many turns failed.

    `read` returns a line, and raises `EOFError` at the end. Ctrl-C cancels the conversation.
    """
    task = asyncio.current_task()
    if task is not None:
        with suppress(NotImplementedError, RuntimeError):  # Windows; not the main thread
            # Without this, a Ctrl-C between two waits would only take effect after the next line.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    async with container:
        conversation.begin()
        began = time.monotonic()
        turns = failed = 0
        while (line := await _read_line(read)) not in (None, "exit"):
            if line:
                turns += 1
                failed += not await conversation.say(line)
        conversation.show.end(turns, time.monotonic() - began)
    return failed


async def _read_line(read: Callable[[], str]) -> str | None:
    """Return the next line, or None at the end. `read` runs on a daemon thread, because it cannot be interrupted."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def settle_future(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def wait_for_line() -> None:
        try:
            text: str | None = read().strip()
        except (EOFError, OSError, ValueError):  # the end, or no standard input
            text = None
        with suppress(RuntimeError):  # the loop is already closed
            loop.call_soon_threadsafe(settle_future, text)

    threading.Thread(target=wait_for_line, name="toolbox-input", daemon=True).start()
    return await line


def prompt_for(console: Console, *, quiet: bool) -> Callable[[], str]:
    """Return a function that reads a line, with a prompt if the input is a terminal and `quiet` is False."""
    if sys.stdin is not None and sys.stdin.isatty() and not quiet:
        return lambda: console.input("[bold]> [/]")
    return input


def exit_interrupted() -> NoReturn:
    """Exit with the status of Ctrl-C. Immediately: Python's normal exit would wait for the thread that reads input."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)
