"""`Container.injected`: functions that other libraries call; their beans come from a request scope for each call.

Not here: functions that the container calls itself (`called_functions`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .context import ActiveScope
from .di.graph import BeanGraph
from .di.injection_points import MISSING, InjectionPoint, point_of
from .di.scopes import RequestScope
from .di.values import LazyBean, SingleBean, beans_in
from .errors import AsyncBeanError, IllegalConfigurationError, MissingBeanError, Problem
from .execution.threads import refuse_idle, running_loop
from .introspection import EMPTY, Parameter, Unresolved, names_around, read_signature, type_name
from .parameters import InjectMark
from .security import SecurityIdentity

T = TypeVar("T")


class ScopesOfCalls(ActiveScope, Protocol):
    """The scopes of a container, which may be started later. A Protocol, because the container imports this module."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the started container."""
        ...

    async def at_home(self, work: Callable[[], Coroutine[Any, Any, T]], what: Any) -> T:
        """Await `work()` on the event loop of the container. Raises `ContainerNotStartedError`."""
        ...

    def open_scope(self) -> RequestScope:
        """Return a new request scope. Raises `ContainerNotStartedError`."""
        ...


@dataclass(frozen=True, slots=True)
class InjectedFunction:
    """A function with injected parameters: `points`, by name in `wanted` with their annotations."""

    where: str
    function: Callable[..., Any]
    points: tuple[InjectionPoint, ...]
    wanted: Mapping[str, Any]
    whole: inspect.Signature
    left: inspect.Signature

    def problems(self, graph: BeanGraph) -> Iterator[Problem]:
        """Yield the problems of the injected parameters: missing beans, and seeds, which calls do not have."""
        for point in self.points:
            yield from graph.problems_of(point)
            value = graph.resolve(point)
            if isinstance(value, SingleBean) and value.absent is not MISSING:
                continue
            for path in graph.seeds_behind(value, {SecurityIdentity}):
                labels = [graph.definitions[key].label for key in path]
                fact = f"it needs the request seed {labels[-1]}, which calls of this function do not have"
                fix = f"take `{labels[-1]} | None`, or pass what it needs as an argument"
                yield Problem(" -> ".join((point.where, *labels)), fact, fix)

    def keys_in(self, graph: BeanGraph) -> Iterator[int]:
        """Yield the keys of the beans that the injected parameters get, or can look up."""
        for value in map(graph.resolve, self.points):
            yield from value.found if isinstance(value, LazyBean) else beans_in(value)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], beans: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the arguments of a call, with those that are injected. Raises `TypeError` for wrong ones."""
        given = {**self.left.bind(*args, **kwargs).arguments, **beans}
        ordered = {name: given[name] for name in self.whole.parameters if name in given}
        return inspect.BoundArguments(self.whole, ordered)


def read_function(function: Any) -> InjectedFunction:
    """Read a function with `Inject[…]` parameters.

    Raises `IllegalConfigurationError` for classes, generators and annotations that cannot be read, and `TypeError` for
    anything that cannot be called.
    """
    where = type_name(function)
    if isinstance(function, type):
        what, fix = "injected(…) does not support classes", "register the class, and request it with Inject[…]"
        raise IllegalConfigurationError([Problem(where, what, fix)])
    if not callable(function):
        raise TypeError(f"injected(…) expects a function, got {function!r}")
    inner = inspect.unwrap(getattr(function, "func", function))
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        fix = "use a function that returns, and let it open what it needs with Inject[…]"
        raise IllegalConfigurationError([Problem(where, "injected(…) does not support generators", fix)])
    signature = read_signature(function, names_around(inner))
    declared = inspect.signature(function)
    points: list[InjectionPoint] = []
    wanted: dict[str, Any] = {}
    left: list[inspect.Parameter] = []
    for each, parameter in zip(signature.parameters, declared.parameters.values(), strict=True):
        if _is_injected(each, where):
            default = MISSING if each.default is EMPTY else each.default
            points.append(point_of(each.annotation, f"{where}.{each.name}", parameter=each.name, default=default))
            wanted[each.name] = each.annotation
        else:
            left.append(parameter.replace(annotation=_choose_readable(each.annotation, parameter.annotation)))
    returns = _choose_readable(signature.returns, declared.return_annotation)
    whole = inspect.Signature([each.replace(annotation=EMPTY) for each in declared.parameters.values()])
    remaining = inspect.Signature(left, return_annotation=returns)
    return InjectedFunction(where, function, tuple(points), wanted, whole, remaining)


def _is_injected(parameter: Parameter, where: str) -> bool:
    if isinstance(parameter.annotation, Unresolved) and "Inject" in parameter.annotation.text:
        note = parameter.annotation
        what = f"the annotation {note.text!r} cannot be resolved ({note.reason})"
        raise IllegalConfigurationError(
            [Problem(f"{where}.{parameter.name}", what, "import the type at run time, above the function")]
        )
    return any(isinstance(each, InjectMark) for each in parameter.metadata)


def _choose_readable(resolved: Any, declared: Any) -> Any:
    return declared if isinstance(resolved, Unresolved) else resolved


def with_injection(read: InjectedFunction, scopes: ScopesOfCalls) -> Callable[..., Any]:
    """Return the function with the parameters that are left. Each call has its own request scope."""
    function = read.function

    if any(
        inspect.iscoroutinefunction(each) for each in (function, type(getattr(function, "func", function)).__call__)
    ):

        async def call_coroutine(*args: Any, **kwargs: Any) -> Any:
            read.left.bind(*args, **kwargs)  # wrong arguments are a mistake of the caller, not of the request

            async def call() -> Any:
                async with scopes.open_scope():
                    beans = {
                        name: bean
                        for name in read.wanted
                        if (bean := await _find_argument_async(read, name, scopes)) is not MISSING
                    }
                    bound = read.bind(args, kwargs, beans)
                    return await function(*bound.args, **bound.kwargs)

            return await scopes.at_home(call, function)

        return _copy_signature(call_coroutine, read)

    def call_function(*args: Any, **kwargs: Any) -> Any:
        read.left.bind(*args, **kwargs)
        with scopes.open_scope():
            beans = {name: bean for name in read.wanted if (bean := _find_argument(read, name, scopes)) is not MISSING}
            bound = read.bind(args, kwargs, beans)
            return function(*bound.args, **bound.kwargs)

    return _copy_signature(call_function, read)


async def _find_argument_async(read: InjectedFunction, name: str, scopes: ScopesOfCalls) -> Any:
    try:
        return await scopes.aget(read.wanted[name])
    except MissingBeanError:
        if read.whole.parameters[name].default is EMPTY:
            raise
        return MISSING


def _find_argument(read: InjectedFunction, name: str, scopes: ScopesOfCalls) -> Any:
    wanted = read.wanted[name]
    try:
        try:
            return scopes.get(wanted)
        except AsyncBeanError:
            if (loop := scopes.loop) is None or running_loop() is not None:
                raise
            refuse_idle(loop, type_name(wanted))
            # As for a tool that is a `def`: the container's loop creates what must be awaited, in this scope.
            asyncio.run_coroutine_threadsafe(scopes.prepare(wanted), loop).result()
            return scopes.get(wanted)
    except MissingBeanError:
        if read.whole.parameters[name].default is EMPTY:
            raise
        return MISSING


def _copy_signature(wrapper: Any, read: InjectedFunction) -> Callable[..., Any]:
    """Give a wrapper the name of its function, and the signature that is left."""
    functools.update_wrapper(wrapper, read.function)
    # Libraries follow `__wrapped__` to the signature, and would ask their callers for the injected parameters.
    del wrapper.__wrapped__
    if not hasattr(read.function, "__name__"):
        wrapper.__name__ = wrapper.__qualname__ = type_name(getattr(read.function, "func", type(read.function)))
    wrapper.__signature__ = read.left
    annotations = {each.name: each.annotation for each in read.left.parameters.values() if each.annotation is not EMPTY}
    if read.left.return_annotation is not EMPTY:
        annotations["return"] = read.left.return_annotation
    wrapper.__annotations__ = annotations
    function: Callable[..., Any] = wrapper
    return function
