"""The conversation of `toolbox chat`: sends input to a service, and prints text and tool calls as they arrive.

Not here: the command `chat` (`commands`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NoReturn, Protocol

from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape

from ..chat import (
    BeforeToolExecution,
    CompleteResponse,
    PartialReasoning,
    PartialResponse,
    ServiceEvent,
    ToolExecuted,
    ToolProgress,
)
from ..container import Container, internals_of
from ..errors import ToolboxError
from ..printable import for_json, for_terminal
from ..services.declaration import ServiceOptions, service_options_of
from ..services.implementation import watched_call
from ..services.outputs import Kind
from ..services.planning import plan_service
from ..services.plans import MethodPlan

logger = logging.getLogger("toolbox.cli")


def plan_of(service: type[Any], method: str | None) -> MethodPlan:
    """Return the plan of the named method, else of the first one. Raises `LookupError` for an unknown name."""
    plans, _ = plan_service(service, service_options_of(service) or ServiceOptions())
    if not plans or (method is not None and method not in plans):
        raise LookupError(f"{service.__name__} has no method {method or ''}; it has {', '.join(plans) or 'none'}")
    plan = plans[method] if method is not None else next(iter(plans.values()))
    # The terminal prints parts as they arrive, on the running loop, also for `def` methods.
    return replace(plan, is_coroutine=True)


def message_parameter(plan: MethodPlan, given: Iterable[str]) -> str:
    """Return the parameter that gets the input. Raises `LookupError` unless there is exactly one."""
    taken = {plan.memory_parameter, *given}
    left = [
        each.name
        for each in plan.signature.parameters.values()
        if each.name not in taken and (each.default is each.empty or each.name == plan.user_parameter)
    ]
    if len(left) != 1:
        has = f"has the parameters {', '.join(left)}" if left else "has no parameter for the input"
        raise LookupError(f"{plan.where} {has}; set all but one with --set name=value")
    return left[0]


class Conversation:
    """A conversation with one service method.

    `given` are the values of further parameters. Raises `LookupError` for an unknown one.
    """

    def __init__(
        self, container: Container, plan: MethodPlan, memory_id: object, given: Mapping[str, str], show: Show
    ) -> None:
        self._container, self._plan, self.show = container, plan, show
        if unknown := [name for name in given if name not in plan.signature.parameters]:
            raise LookupError(
                f"{plan.where} has no parameter {unknown[0]}; it has {', '.join(plan.signature.parameters)}"
            )
        self._given: dict[str, Any] = dict(given)
        if plan.memory_parameter is not None:
            self._given[plan.memory_parameter] = memory_id
        self._parameter = message_parameter(plan, given)

    async def say(self, text: str) -> bool:
        """Send a message in its own request scope; show an error and return False if the call fails."""
        host = internals_of(self._container).host
        events, value_of_call = watched_call(self._plan, host, {**self._given, self._parameter: text})
        is_structured = self._plan.output.kind is Kind.STRUCTURED
        async with self._container.request_scope():
            try:
                async for event in events:
                    if not (is_structured and isinstance(event, PartialResponse)):
                        self.show.event(event)
            except Exception as error:  # the conversation continues after any error
                if not isinstance(error, ToolboxError):
                    logger.error("%s failed", self._plan.where, exc_info=error)
                self.show.failure(error)
                return False
        if is_structured and not self._plan.output.is_stream:
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
        """See `Show`."""
        match event:
            case PartialResponse(text):
                self._print(escape(text), end="")
            case PartialReasoning(text):
                self._print(f"[dim italic]{escape(text)}[/]", end="")
            case BeforeToolExecution(request):
                self._print(f"[dim]→ {escape(request.name)} {escape(request.arguments)}[/]")
            case ToolProgress(request, done, total, message):
                of = f"/{total:g}" if total is not None else ""
                self._print(f"[dim]· {escape(request.name)} {done:g}{of} {escape(message or '')}[/]")
            case ToolExecuted(execution):
                took = f"{execution.duration * 1000:.0f} ms"
                colour = "red" if execution.is_error else "dim"
                self._print(f"[{colour}]← {escape(execution.result)} ({took})[/]")
            case CompleteResponse():
                self._print("")

    def value(self, value: object) -> None:
        """See `Show`."""
        self._print(escape(to_json(value, indent=2).decode()))

    def failure(self, error: Exception) -> None:
        """See `Show`."""
        text = str(error) if isinstance(error, ToolboxError) else f"{type(error).__name__}: {error}"
        self._print(f"\n[red]{escape(text)}[/]")

    def end(self, turns: int, seconds: float) -> None:
        """See `Show`."""
        self._print(f"[dim]{turns} {'turn' if turns == 1 else 'turns'} in {seconds:.0f} s[/]")

    def _print(self, text: str, end: str = "\n") -> None:
        # Text of a model or a tool must not control the terminal. Our own colours are markup, not control characters.
        self._console.print(for_terminal(text), end=end, highlight=False, soft_wrap=True, emoji=False)


class ShowJson:
    """Output for programs: one JSON object per line, on the standard output at the time of creation."""

    def __init__(self) -> None:
        self._out = sys.stdout

    def event(self, event: ServiceEvent) -> None:
        """See `Show`."""
        self._print(type(event).__name__, {each.name: getattr(event, each.name) for each in fields(event)})

    def value(self, value: object) -> None:
        """See `Show`."""
        self._print("value", {"value": value})

    def failure(self, error: Exception) -> None:
        """See `Show`."""
        self._print("failure", {"error": type(error).__name__, "message": str(error)})

    def end(self, turns: int, seconds: float) -> None:
        """See `Show`."""
        self._print("end", {"turns": turns, "seconds": round(seconds, 3)})

    def _print(self, event: str, facts: dict[str, Any]) -> None:
        print(for_json(to_json({"event": event, **facts}, fallback=str).decode()), file=self._out, flush=True)


async def converse(container: Container, conversation: Conversation, read: Callable[[], str]) -> int:
    """Run the conversation until the input ends or is `exit`; return how many turns failed.

    `read` returns a line, and raises `EOFError` at the end. Ctrl-C cancels the conversation.
    """
    task = asyncio.current_task()
    if task is not None:
        with suppress(NotImplementedError, RuntimeError):  # Windows; not the main thread
            # Without this, a Ctrl-C between two waits would only take effect after the next line.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    async with container:
        began = time.monotonic()
        turns = failed = 0
        while (line := await _typed(read)) not in (None, "exit"):
            if line:
                turns += 1
                failed += not await conversation.say(line)
        conversation.show.end(turns, time.monotonic() - began)
    return failed


async def _typed(read: Callable[[], str]) -> str | None:
    """Return the next line, or None at the end. `read` runs on a daemon thread, because it cannot be interrupted."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def settle(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def wait() -> None:
        try:
            text: str | None = read().strip()
        except (EOFError, OSError, ValueError):  # the end, or no standard input
            text = None
        with suppress(RuntimeError):  # the loop is already closed
            loop.call_soon_threadsafe(settle, text)

    threading.Thread(target=wait, name="toolbox-input", daemon=True).start()
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
