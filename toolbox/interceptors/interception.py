"""What programs write as interceptors: their base classes, what they see, their decorators, and the checks.

Not here: running them around calls (`intercepted_calls`), the ready-made one (`retries`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

from ..bean_references import GLOBAL_INTERCEPTOR_MARK, name_beans
from ..chat import ChatRequest, ChatResponse, ToolExecutionRequest, ToolExecutionResult, ToolSpecification
from ..context import InvocationContext
from ..di.decorators import Scope
from ..errors import Problem
from ..introspection import method_takes

C = TypeVar("C", bound=type[Any])
D = TypeVar("D")


# --- what an interceptor sees and calls


@dataclass(frozen=True, slots=True)
class ToolInvocation:
    """One tool call, for an interceptor.

    `request` is the model's call. `arguments` are the validated arguments that the model can see, with defaults, by the
    names of the parameters. `context` is that of the call. `replayed` is True if a stored run has the result, so that
    `proceed` returns it and the tool does not run. That is for calls of the last recorded reply: a run that continues
    restores the results of earlier rounds, without interceptors.
    """

    request: ToolExecutionRequest
    specification: ToolSpecification
    arguments: Mapping[str, Any] = field(hash=False)
    context: InvocationContext
    replayed: bool = False

    def with_arguments(self, **changes: Any) -> ToolInvocation:
        """Return a copy with changed arguments, which `proceed` validates again. Raises `TypeError` for unknown ones.

        An interceptor passes it on: `proceed(call.with_arguments(limit=10))`.
        """
        known = {*self.arguments, *self.specification.parameters.get("properties", ())}
        for name in changes:
            if name not in known:
                offered = ", ".join(sorted(known)) or "none"
                raise TypeError(f"tool {self.specification.name!r} has no argument {name!r}; it has: {offered}")
        return replace(self, arguments={**self.arguments, **changes})


@dataclass(frozen=True, slots=True)
class ModelInvocation:
    """One model request, for an interceptor. `model` is the configured name, `"default"` for the default model.

    Change the request with `dataclasses.replace(call, request=…)`. `replayed` is True if a stored run has the reply:
    `proceed` returns it, and nothing is sent. It is final, so what `around_model` returns is ignored then.
    """

    request: ChatRequest
    model: str
    context: InvocationContext
    replayed: bool = False


ToolProceed: TypeAlias = Callable[[ToolInvocation], Awaitable[ToolExecutionResult]]
"""Runs the tool, in a new call scope each time. Raises what the tool raises."""

ModelProceed: TypeAlias = Callable[[ModelInvocation], Awaitable[ChatResponse]]
"""Sends the request to the model. In a stream, it returns when the reply is complete."""


class ToolInterceptor(ABC):
    """Wraps tool calls. A subclass is a bean, application-scoped without a scope decorator.

        @global_interceptor
        class Timing(ToolInterceptor):
            async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
                started = time.perf_counter()
                try:
                    return await proceed(call)
                finally:
                    print(call.specification.name, time.perf_counter() - started)

    Not awaiting `proceed` skips the tool; awaiting it again runs the tool again. Error handlers get the exceptions of
    `around_tool`, as if the tool had raised them. Errors that end the invocation, such as `ToolAbort`, end it even if
    `around_tool` catches them.
    """

    __toolbox_default_scope__: ClassVar[Scope] = Scope.APPLICATION
    __toolbox_innermost__: ClassVar[bool] = False
    """True for interceptors that run inside of all others, and of the record of a durable run."""

    @abstractmethod
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        """Return the result of the call, for the model and the program."""


class ModelInterceptor(ABC):
    """Wraps model requests. A subclass is a bean, application-scoped without a scope decorator.

        class Cached(ModelInterceptor):
            async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
                key = repr(call.request)
                if key not in self.replies:
                    self.replies[key] = await proceed(call)
                return self.replies[key]

    Its exceptions end the invocation. In a stream, changes of the reply reach `CompleteResponse` and the memory, but
    not the pieces that were already sent.
    """

    __toolbox_default_scope__: ClassVar[Scope] = Scope.APPLICATION

    @abstractmethod
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        """Return the reply to the request."""


# --- decorators


def interceptors(*interceptors: object) -> Callable[[D], D]:
    """Wrap the tool calls and model requests of a service class or one of its methods, or the calls of a tool.

        @register_ai_service(tools=Orders)
        @interceptors(Cached, Timing())
        class Desk(Protocol): ...

    Each is a class, which becomes a bean, or an instance. The first is outermost. Those of a class are outside of those
    of a method, which are outside of those of a tool. Raises `TypeError` without interceptors.
    """
    return name_beans("interceptors", interceptors)


@overload
def global_interceptor(cls: C, /) -> C: ...


@overload
def global_interceptor(*, priority: int = 0) -> Callable[[C], C]: ...


def global_interceptor(cls: C | None = None, /, *, priority: int = 0) -> C | Callable[[C], C]:
    """Use an interceptor for every tool call and every model request of the container that it is registered with.

    A smaller `priority` is further outside. Equal ones are in the order of their registration. Raises `TypeError` for
    anything but a class, and for a `priority` that is not a number.
    """
    if isinstance(priority, bool) or not isinstance(priority, (int, float)):
        raise TypeError(f"@global_interceptor: invalid priority={priority!r}; use a number")

    def leave_mark(target: C) -> C:
        if not isinstance(target, type):
            raise TypeError(f"@global_interceptor: expected a class, got {target!r}")
        setattr(target, GLOBAL_INTERCEPTOR_MARK, priority)
        return target

    return leave_mark if cls is None else leave_mark(cls)


def interceptor_problems(where: str, decorator: str, named: object, *, of_tool: bool) -> Iterator[Problem]:
    """Yield problems with the class of an interceptor; `of_tool` if it is named at a tool."""
    name = getattr(named, "__name__", None) or repr(named)
    kinds = {"around_tool": ToolInterceptor, "around_model": ModelInterceptor}
    found = [method for method, kind in kinds.items() if isinstance(named, type) and issubclass(named, kind)]
    if not found:
        fact = f"{name} is neither a ToolInterceptor nor a ModelInterceptor"
        yield Problem(where, fact, "inherit from one of them")
    elif of_tool and "around_tool" not in found:
        yield Problem(where, f"{name} is a ModelInterceptor, but a tool sends no model requests", "put it on a service")
    for method in found:
        function = inspect.getattr_static(named, method)
        if not inspect.iscoroutinefunction(getattr(function, "__func__", function)):
            yield Problem(f"{name}.{method}", "is not a coroutine function", f"declare it `async def {method}(…)`")
        elif isinstance(named, type) and not method_takes(named, method, 2):
            fix = f"declare it `async def {method}(self, call, proceed)`"
            yield Problem(f"{name}.{method}", "does not take two arguments, the call and proceed", fix)
