"""Services without a container: `create_ai_service`.

Not here: what they do (`implementation`), services of a container (`hosting`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from typing_extensions import TypeForm

from ..chat import ChatModel
from ..context import ActiveScope
from ..di.beans import read_class
from ..di.points import MISSING
from ..errors import IllegalConfigurationError, Problem
from ..events import Listeners
from ..execution import (
    ExecutionModel,
    LoopThread,
    Workers,
    keep_inherited,
    renewed_after_fork,
    unknown_executor,
)
from ..models.selection import no_model
from ..tools.failures import ToolErrors
from ..tools.pipeline import InjectedParameter, Tool
from ..tools.standalone import NO_SCOPE
from ..type_keys import type_name
from .declaration import ServiceOptions, names_around, options_for
from .implementation import implementation_of
from .listing import as_sources, providers_of, service_cycles
from .memory import ChatMemories, InMemoryChatMemoryStore
from .planning import plan_service
from .plans import FunctionMessage, MethodPlan
from .running import Running

T = TypeVar("T")

logger = logging.getLogger("toolbox.services")


class _Process:
    """The loop thread and the pool that all services without a container share; made when first needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: LoopThread | None = None
        self.workers = Workers()
        renewed_after_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the loop thread, which runs in the parent."""
        keep_inherited(self._thread)
        self._lock, self._thread = Lock(), None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of synchronous methods; it begins to run now if need be."""
        with self._lock:
            if self._thread is None:
                thread = LoopThread()
                thread.start()
                self._thread = thread
            return self._thread.loop

    def end(self) -> None:
        """End the calls under way, at exit. Tools on threads that cannot be stopped have `stop_timeout` seconds."""
        thread, self._thread = self._thread, None
        if thread is None and not self.workers.abandoned:
            return
        end_by = monotonic() + (timeout := _stop_timeout())
        if thread is not None:
            thread.stop(timeout)
        if stuck := self.workers.wait_for_abandoned(max(end_by - monotonic(), 0)):
            logger.warning("the program ends although these tools still run: %s", ", ".join(stuck))


def _stop_timeout() -> float:
    """Return the time-out for the end of the process, in seconds: `TOOLBOX_STOP_TIMEOUT`, else 10."""
    if not any(name.upper() == "TOOLBOX_STOP_TIMEOUT" for name in os.environ):
        return 10.0  # without loading the settings' library at exit
    from ..settings import ToolboxSettings

    try:
        return ToolboxSettings().stop_timeout
    except ValueError:  # another setting is wrong; this is not the time to say so
        return 10.0


_process = _Process()
atexit.register(lambda: _process.end())


class _Host:
    """Hosts one service: its model, its memory, the process's threads."""

    loop: asyncio.AbstractEventLoop | None = None
    max_concurrent_tools = 16
    listeners: Listeners | None = None

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._memories = ChatMemories(InMemoryChatMemoryStore())
        self.workers = _process.workers
        self.running = Running()
        self.scope: ActiveScope = NO_SCOPE
        self.failures = ToolErrors()

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        return _process.loop()

    def model(self, name: str | None) -> ChatModel:
        return self._model

    async def memories(self) -> ChatMemories:
        return self._memories

    def tool_problems(self, where: str, tool: Tool) -> Iterator[Problem]:
        """See `ServiceHost.tool_problems`."""
        where = f"{where}, tool {tool.specification.name}"
        if tool.execution.model is ExecutionModel.EXECUTOR and self.workers.executor(tool.execution) is None:
            yield unknown_executor(where, tool.execution)
        if tool.bean is not None:
            yield Problem(where, "is of a class, and there is no container to make it", "give an instance of it")
        yield from _not_injected(where, tool.injected)


def create_ai_service(service: TypeForm[T], *, chat_model: ChatModel, tools: Any = (), **options: Any) -> T:
    """An implementation of the Protocol or ABC `service`, which need not be marked, without a container.

    `tools` holds instances, functions, other services, `AiServiceTool`s and mappings `{ToolSpecification:
    ToolExecutor}`, or is one mapping. `options` are those of `register_ai_service`; what is not given is as the class
    is marked. Raises `IllegalConfigurationError`.
    """
    cls: Any = service
    given = (tools,) if isinstance(tools, Mapping) else as_sources(tools)
    settings = options_for(cls, {**options, "tools": given} if given else options)
    around = names_around(cls, sys._getframe(1))
    plans, problems = plan_service(cls, settings, around=around)
    host = _Host(chat_model)
    if isinstance(cls, type):
        problems += service_cycles(cls)
        problems += _container_needed(cls, settings, plans.values(), host)
    if (problem := no_model(chat_model, getattr(cls, "__name__", repr(cls)), "chat_model=")) is not None:
        problems.append(problem)
    if problems:
        raise IllegalConfigurationError(dict.fromkeys(problems))
    made: T = implementation_of(cls, plans, host)()
    return made


def _container_needed(
    cls: type[Any], options: ServiceOptions, plans: Iterable[MethodPlan], host: _Host
) -> Iterator[Problem]:
    """A problem for all that only a container can find."""
    for point in read_class(cls).needs:
        if point.default is MISSING:
            fact = f"its constructor takes {point.parameter}, and there is no container to give it"
            yield Problem(point.where, fact, "register the service with a Container, or give the parameter a default")
    for provider in providers_of(cls, options):
        if provider.bean is not None:
            fact = f"tool provider {type_name(provider.bean)} is a class, and there is no container to make it"
            yield Problem(cls.__name__, fact, "give an instance of it")
    for plan in plans:
        for tool in plan.toolset.tools:
            # A class of the service itself is told once, not per method and tool.
            if tool.bean is not None:
                fact = f"tool {type_name(tool.bean)} is a class, and there is no container to make it"
                yield Problem(cls.__name__, fact, "give an instance of it in tools=")
            else:
                yield from host.tool_problems(plan.where, tool)
        if isinstance(plan.system, FunctionMessage):
            yield from _not_injected(f"{plan.where}, system message", plan.system.injected)


def _not_injected(where: str, injected: Iterable[InjectedParameter]) -> Iterator[Problem]:
    for each in injected:
        if not each.optional:
            fact = f"is injected {each.name}, and there is no container"
            yield Problem(where, fact, "register the service with a Container")
