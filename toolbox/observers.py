"""`@observes`: functions and methods that receive events after the fact, in separate tasks.

Not here: the events and listeners, which run at once (`events`), how marked functions are read and called
(`called_functions`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, overload

from .called_functions import CallDecorator, CalledFunction, call_in_scope, called_problems
from .context import current_observers
from .di.graph import BeanGraph, Registration
from .errors import Problem
from .events import InvocationEvent
from .execution.runners import LoopRunner
from .execution.threads import Workers, running_loop
from .introspection import is_union, type_name, unwrapped
from .services.declaration import service_options_of
from .tools.specification import ToolParameter

if TYPE_CHECKING:
    from .di.wiring import Wiring

logger = logging.getLogger("toolbox.events")

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

MOST_WAITING: Final = 10_000
"""How many events wait for one observer at most; then the oldest are dropped."""


@overload
def observes(function: F, /) -> F: ...


@overload
def observes(*, service: type[Any] | Sequence[type[Any]] = ()) -> Callable[[F], F]: ...


def observes(function: Any = None, /, *, service: Any = ()) -> Any:
    """Call a registered function, or a method of a bean, after each event of a type.

        @observes
        async def audit(event: ToolExecutedEvent, journal: Inject[Journal]) -> None: ...

        class Alarm:
            @observes(service=Desk)
            def ring(self, event: ServiceFailedEvent | ToolFailedEvent) -> None: ...

    Exactly one parameter has the type of an event, also a union or a base class. The others are `Inject[…]`. `service`
    restricts it to the events of one AI service, or of several.

    It runs after the fact, one event after another, and never delays the call. Each event has its own request scope
    with the seeds and the identity of the event's scope, and a call scope in it. A `def` runs on a thread, as a tool
    does. Errors are logged. At most 10,000 events wait, then the oldest are dropped. Events that it causes do not reach
    it. Raises `TypeError` for anything but a function or method, and for services that are not classes.
    """
    services = tuple(service) if isinstance(service, (tuple, list)) else (service,)
    if not all(isinstance(each, type) for each in services):
        raise TypeError(f"@observes: service= must be a class or a tuple of classes, got {service!r}")
    if function is not None:
        return OBSERVES.mark(function, services, sys._getframe(1))
    return lambda target: OBSERVES.mark(target, services, sys._getframe(1))


def event_types_of(annotation: Any) -> tuple[type[InvocationEvent], ...]:
    """Return the event classes of a parameter: the class, or the members of a union; empty for other types."""
    form = unwrapped(annotation).type
    types = get_args(form) if is_union(form) else (form,)
    return tuple(types) if all(isinstance(each, type) and issubclass(each, InvocationEvent) for each in types) else ()


def _parameter_problems(where: str, parameters: tuple[ToolParameter, ...]) -> Iterator[Problem]:
    of_events = [each.name for each in parameters if event_types_of(each.annotation)]
    if len(of_events) != 1:
        found = f"found {', '.join(of_events)}" if of_events else "found none"
        fix = "annotate one with an event, such as `event: ToolExecutedEvent`; use a union for several events"
        yield Problem(where, f"@observes needs exactly one parameter with the type of an event, {found}", fix)
    for each in parameters:
        if each.name not in of_events and not each.has_default:
            fix = f"annotate it as a bean, `{each.name}: Inject[…]`, or give it a default"
            yield Problem(where, f"the parameter {each.name!r} has no value", fix)


OBSERVES: Final = CallDecorator("@observes", "__toolbox_observes__", _parameter_problems)


def observing_functions(readings: Iterable[Registration], graph: BeanGraph) -> tuple[CalledFunction, ...]:
    """Return everything that is marked, in the order of registration."""
    return tuple(OBSERVES.functions_in(readings, graph))


def observer_problems(functions: Iterable[CalledFunction], graph: BeanGraph, workers: Workers) -> Iterator[Problem]:
    """Yield the problems of observers, and of the services whose events they receive."""
    for each in functions:
        yield from called_problems([each], graph, workers)
        for service in each.options:
            if service_options_of(service) is None:
                fact = f"{type_name(service)} is not an AI service, so it has no events"
                yield Problem(each.where, fact, "name a class with @register_ai_service")


# --- delivering events


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An event that waits: the seeds of its scope, and the observers whose calls have led to it."""

    event: InvocationEvent
    seeds: Mapping[Any, Any]
    causes: frozenset[int]


class Observers:
    """Delivers the events of one started container to its observers. It is an `EventListener`."""

    def __init__(self, functions: Iterable[CalledFunction], scopes: Wiring, workers: Workers) -> None:
        self._observers = [_Observer(each, scopes, LoopRunner(workers)) for each in functions]
        self._scopes = scopes
        self._by_type: dict[type[InvocationEvent], list[_Observer]] = {}

    def on_event(self, event: InvocationEvent) -> None:
        """Let the observers of this event wait for their turn to receive it."""
        kind = type(event)
        if (observers := self._by_type.get(kind)) is None:
            observers = self._by_type[kind] = [each for each in self._observers if issubclass(kind, each.types)]
        causes = current_observers.get()
        chosen = [each for each in observers if id(each) not in causes and each.is_for(event)]
        if chosen:
            waiting = _Waiting(event, self._scopes.given_seeds(), causes)
            for each in chosen:
                each.add_event(waiting)

    async def stop(self, timeout: float) -> None:
        """Deliver the waiting events for up to `timeout` seconds, then drop the rest and log how many."""
        await asyncio.gather(*(each.stop(timeout) for each in self._observers))


class _Observer:
    """One observer, and the events that wait for it. A task calls it while there are any."""

    def __init__(self, called: CalledFunction, scopes: Wiring, runner: LoopRunner) -> None:
        self._called, self._scopes, self._runner = called, scopes, runner
        parameter = next(each for each in called.others if event_types_of(each.annotation))
        self._parameter, self.types = parameter.name, event_types_of(parameter.annotation)
        self._services: tuple[type[Any], ...] = called.options
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._has_dropped = False

    def is_for(self, event: InvocationEvent) -> bool:
        """Return True if the event is of one of the observed services."""
        return not self._services or event.context.service in self._services

    def add_event(self, waiting: _Waiting) -> None:
        """Let an event wait. May be called on any thread."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            if not self._has_dropped:
                self._has_dropped = True
                text = "more than %d events wait for the observer %s; the oldest are dropped from now on"
                logger.warning(text, MOST_WAITING, self._called.where)
        self._waiting.append(waiting)
        loop = self._scopes.loop
        if loop is None or loop.is_closed():
            return
        if running_loop() is loop:
            self._begin_delivery()
        else:
            loop.call_soon_threadsafe(self._begin_delivery, context=Context())

    def _begin_delivery(self) -> None:
        if self._task is None and self._waiting:
            # An empty context: what the caller has set, such as limits, does not hold for observers.
            self._task = asyncio.get_running_loop().create_task(self._deliver_all(), context=Context())

    async def _deliver_all(self) -> None:
        task = asyncio.current_task()
        try:
            while self._waiting:
                waiting = self._waiting.popleft()
                try:
                    await self._deliver(waiting)
                except asyncio.CancelledError as error:
                    if task is None or task.cancelling():
                        raise
                    self._log_failure(waiting, error)  # something that the observer awaited was cancelled
                except Exception as error:
                    self._log_failure(waiting, error)
        finally:
            self._task = None

    def _log_failure(self, waiting: _Waiting, error: BaseException) -> None:
        kind = type(waiting.event).__name__
        logger.error("the observer %s failed on %s", self._called.where, kind, exc_info=error)

    async def _deliver(self, waiting: _Waiting) -> None:
        token = current_observers.set(waiting.causes | {id(self)})
        try:
            async with self._scopes.open_request(waiting.seeds):
                opened = self._scopes.open_call_scope()
                failure: BaseException | None = None
                try:
                    given = {self._parameter: waiting.event}
                    await call_in_scope(self._called, self._scopes, self._runner, given)
                except BaseException as error:
                    failure = error
                    raise
                finally:
                    try:
                        await opened.aclose(failure)
                    finally:
                        opened.leave()
        finally:
            current_observers.reset(token)

    async def stop(self, timeout: float) -> None:
        """Deliver the waiting events for up to `timeout` seconds; drop the rest."""
        self._begin_delivery()
        task = self._task
        if task is not None:
            _, late = await asyncio.wait({task}, timeout=max(timeout, 0.0))
            if late:
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
                left = len(self._waiting) + 1
                text = "the container is stopping: %d events were not delivered to the observer %s"
                logger.warning(text, left, self._called.where)
        self._waiting.clear()
