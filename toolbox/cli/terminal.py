"""A conversation with a service on the terminal: text as it comes, tools as they are called.

Not here: the command itself (`cli`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Protocol

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
    """The method to talk to: the one named, else the first. Raises `LookupError` with what there is."""
    plans, _ = plan_service(service, service_options_of(service) or ServiceOptions())
    if not plans or (method is not None and method not in plans):
        raise LookupError(f"{service.__name__} has no method {method or ''}; it has {', '.join(plans) or 'none'}")
    plan = plans[method] if method is not None else next(iter(plans.values()))
    # Whatever the method returns, the terminal shows it as it comes, on the loop it runs.
    return replace(plan, is_coroutine=True)


def spoken_parameter(plan: MethodPlan, given: Iterable[str]) -> str:
    """The parameter that takes what is typed. Raises `LookupError` when that is not one."""
    taken = {plan.memory_parameter, *given}
    left = [
        each.name
        for each in plan.signature.parameters.values()
        if each.name not in taken and (each.default is each.empty or each.name == plan.user_parameter)
    ]
    if len(left) != 1:
        raise LookupError(f"{plan.where} takes {', '.join(left) or 'nothing'}; give all but one with --set name=value")
    return left[0]


class Conversation:
    """One service method, asked turn by turn.

    Raises `LookupError` for a value in `given` that it does not take.
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
        self._parameter = spoken_parameter(plan, given)

    async def say(self, text: str) -> bool:
        """One turn, in a request scope of its own; what fails is shown, and False, and the conversation goes on."""
        host = internals_of(self._container).host
        events, value_of_call = watched_call(self._plan, host, {**self._given, self._parameter: text})
        is_structured = self._plan.output.kind is Kind.STRUCTURED
        async with self._container.request_scope():
            try:
                async for event in events:
                    if not (is_structured and isinstance(event, PartialResponse)):
                        self.show.event(event)
            except Exception as error:  # the program's own too: the conversation goes on
                if not isinstance(error, ToolboxError):
                    logger.error("%s failed", self._plan.where, exc_info=error)
                self.show.failure(error)
                return False
        if is_structured and not self._plan.output.is_stream:
            value = value_of_call()
            self.show.value(getattr(value, "content", value))
        return True


class Show(Protocol):
    """Where a conversation is shown."""

    def event(self, event: ServiceEvent) -> None:
        """Something that happens in a turn."""

    def value(self, value: object) -> None:
        """What a turn came to, when that is no text."""

    def failure(self, error: Exception) -> None:
        """Why a turn came to nothing."""

    def end(self, turns: int, seconds: float) -> None:
        """The conversation is over."""


class ShowText:
    """For a person: text as it comes, tools as they are called."""

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
        told = str(error) if isinstance(error, ToolboxError) else f"{type(error).__name__}: {error}"
        self._print(f"\n[red]{escape(told)}[/]")

    def end(self, turns: int, seconds: float) -> None:
        """See `Show`."""
        self._print(f"[dim]{turns} {'turn' if turns == 1 else 'turns'} in {seconds:.0f} s[/]")

    def _print(self, text: str, end: str = "\n") -> None:
        # What a model or a tool says must not control the terminal. Our own colours are markup, not characters.
        self._console.print(for_terminal(text), end=end, highlight=False, soft_wrap=True, emoji=False)


class ShowJson:
    """For a program: an object in each line, named after what happened; to where standard output leads now."""

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
    """Talks until the input ends, or says `exit`; how many turns failed.

    `read` gives a line, and raises `EOFError` after the last. Ctrl-C cancels it.
    """
    task = asyncio.current_task()
    if task is not None:
        with suppress(NotImplementedError, RuntimeError):  # Windows; not the main thread
            # Else a Ctrl-C between two waits would be seen only after the next line.
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
    """The next line; None after the last. Its thread is left behind when the program ends: nobody can end `read`."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def settle(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def wait() -> None:
        try:
            text: str | None = read().strip()
        except (EOFError, OSError, ValueError):  # at the end, or without an input
            text = None
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, text)

    threading.Thread(target=wait, name="toolbox-input", daemon=True).start()
    return await line
