"""Services without a container: `create_ai_service`.

Not here: what they do (`implementation`), services of a container (`hosting`).
"""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any, TypeVar

from typing_extensions import TypeForm

from ..chat import ChatModel
from ..context import ActiveScope, CallScope
from ..di.beans import read_class
from ..di.points import MISSING
from ..errors import IllegalConfigurationError, MissingBeanError, Problem
from ..execution import ExecutionModel, LoopThread, Workers, unknown_executor
from ..models.selection import no_model
from ..tools.failures import ToolErrors
from ..tools.sources import bean_types
from .declaration import ServiceOptions, names_around, options_for
from .implementation import implementation_of
from .memory import ChatMemories, InMemoryChatMemoryStore
from .planning import as_sources, is_bean_type, plan_service, providers_of, service_cycles, sources_of
from .plans import FunctionMessage, MethodPlan
from .running import Running

T = TypeVar("T")


class _Nothing:
    """A call scope in which nothing is made."""

    def __enter__(self) -> CallScope:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close_here(self, error: BaseException | None) -> None: ...

    async def aclose(self, error: BaseException | None) -> None: ...


_NOTHING = _Nothing()


class _NoBeans:
    """The scope of a program without a container."""

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        """See `ActiveScope`."""
        raise MissingBeanError(f"{getattr(wanted, '__name__', wanted)} (this service was made without a container)")

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        return self.get(wanted, name)

    async def prepare(self, wanted: TypeForm[Any], name: str | None = None) -> None: ...

    def open_call_scope(self) -> CallScope:
        return _NOTHING


class _Process:
    """The loop thread and the pool that all services without a container share; made when first needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._loop: LoopThread | None = None
        self.workers = Workers()

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread()
                self._loop.start()
                atexit.register(self._loop.stop)
            return self._loop.loop


_process = _Process()


class _Host:
    """Hosts one service: its model, its memory, the process's threads."""

    loop: asyncio.AbstractEventLoop | None = None
    max_result_chars: int | None = None
    max_concurrent_tools = 16

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._memories = ChatMemories(InMemoryChatMemoryStore())
        self.workers = _process.workers
        self.running = Running()
        self.scope: ActiveScope = _NoBeans()
        self.failures = ToolErrors()

    def sync_loop(self) -> asyncio.AbstractEventLoop:
        return _process.loop()

    def model(self, name: str | None) -> ChatModel:
        return self._model

    async def memories(self) -> ChatMemories:
        return self._memories


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
    if isinstance(cls, type):
        problems += service_cycles(cls)
        problems += _container_needed(cls, settings, plans.values())
    if (problem := no_model(chat_model, getattr(cls, "__name__", repr(cls)), "chat_model=")) is not None:
        problems.append(problem)
    if problems:
        raise IllegalConfigurationError(problems)
    made: T = implementation_of(cls, plans, _Host(chat_model))()
    return made


def _container_needed(cls: type[Any], options: ServiceOptions, plans: Iterable[MethodPlan]) -> Iterator[Problem]:
    """A problem for all that only a container can find."""
    for listed in sources_of(cls, options):
        if bean_types([listed]) or (is_bean_type(listed) and not isinstance(listed, type)):
            name = getattr(listed, "__name__", str(listed))
            fact = f"tool {name} is a class, and there is no container to make it"
            yield Problem(cls.__name__, fact, "give an instance of it in tools=")
    for point in read_class(cls).needs:
        if point.default is MISSING:
            fact = f"its constructor takes {point.parameter}, and there is no container to give it"
            yield Problem(point.where, fact, "register the service with a Container, or give the parameter a default")
    for provider in providers_of(cls, options):
        if provider.bean is not None:
            name = getattr(provider.bean, "__name__", str(provider.bean))
            fact = f"tool provider {name} is a class, and there is no container to make it"
            yield Problem(cls.__name__, fact, "give an instance of it")
    for plan in plans:
        for tool in plan.toolset.tools:
            if tool.execution.model is ExecutionModel.EXECUTOR and _process.workers.executor(tool.execution) is None:
                yield unknown_executor(f"{plan.where}, tool {tool.specification.name}", tool.execution)
        wanted = [(f"tool {tool.specification.name!r}", tool.injected) for tool in plan.toolset.tools]
        if isinstance(plan.system, FunctionMessage):
            wanted.append(("the system message function", plan.system.injected))
        for taker, injected in wanted:
            for each in injected:
                if not each.optional:
                    fact = f"{taker} is injected {each.name}, and there is no container"
                    yield Problem(plan.where, fact, "register the service with a Container")
