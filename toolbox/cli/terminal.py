"""A conversation with a service on the terminal: text as it comes, tools as they are called.

Not here: the command itself (`cli`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

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
from ..container import Container
from ..errors import ToolboxError
from ..services.declaration import ServiceOptions, service_options_of
from ..services.driver import Invocation
from ..services.outputs import Kind
from ..services.planning import plan_service
from ..services.plans import MethodPlan
from ..services.streams import EventStream


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
    """One service method, asked turn by turn; `show` prints rich text, `end` ends its line or not."""

    def __init__(
        self, container: Container, plan: MethodPlan, memory_id: object, given: Mapping[str, str], console: Console
    ) -> None:
        self._container, self._plan, self._console = container, plan, console
        self._given: dict[str, Any] = dict(given)
        if plan.memory_parameter is not None:
            self._given[plan.memory_parameter] = memory_id
        self._parameter = spoken_parameter(plan, given)

    async def say(self, text: str) -> None:
        """One turn, in a request scope of its own; what fails is shown, and the conversation goes on."""
        bound = self._plan.signature.bind(**self._given, **{self._parameter: text})
        bound.apply_defaults()
        made: list[Invocation] = []

        def begin() -> Invocation:
            made.append(Invocation(self._plan, self._container.host, bound.arguments, streaming=True))
            return made[0]

        async with self._container.request_scope():
            try:
                async for event in EventStream(begin, lambda invocation: invocation.events()):
                    self._show(event)
            except ToolboxError as error:
                self._print(f"\n[red]{escape(str(error))}[/]")
                return
        value = made[0].value()
        if self._plan.output.kind is Kind.STRUCTURED and not self._plan.output.is_stream:
            self._print(escape(to_json(getattr(value, "content", value), indent=2).decode()))

    def _show(self, event: ServiceEvent) -> None:
        match event:
            case PartialResponse(text) if self._plan.output.kind is not Kind.STRUCTURED:
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

    def _print(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end, highlight=False, soft_wrap=True)


async def converse(
    container: Container,
    plan: MethodPlan,
    memory_id: object,
    given: Mapping[str, str],
    console: Console,
    read: Callable[[], str],
) -> None:
    """Talks until the input ends, or says `exit`. `read` gives a line, and raises `EOFError` after the last."""
    async with container:
        conversation = Conversation(container, plan, memory_id, given, console)
        began = time.monotonic()
        turns = 0
        while (line := await asyncio.to_thread(_line_of, read)) not in (None, "exit"):
            if line:
                turns += 1
                await conversation.say(line)
        console.print(f"[dim]{turns} turns in {time.monotonic() - began:.0f} s[/]")


def _line_of(read: Callable[[], str]) -> str | None:
    try:
        return read().strip()
    except EOFError:
        return None
