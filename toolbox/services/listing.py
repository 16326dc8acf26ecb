"""Collects what a service lists: tools, tool providers, and other services as tools.

Not here: reading tools (`tools.sources`), the tools of one method (`planning`).
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from ..bean_references import DEFAULT_SCOPE_MARK, BeanReference, all_named
from ..chat import ToolSpecification
from ..errors import Problem
from ..introspection import takes
from ..tools.marks import toolbox_of
from ..tools.sources import AiServiceTool, bean_types
from .declaration import PROVIDERS_MARK, ServiceOptions, method_names, service_options_of
from .plans import Provider


def service_cycles(cls: type[Any]) -> Iterator[Problem]:
    """Yield a problem for each cycle of services that are tools of each other and in which `cls` is the first by name.

    For each service that lists `cls`, only the shortest cycle is reported: there may be very many cycles.
    """
    paths: dict[type[Any], tuple[type[Any], ...]] = {cls: (cls,)}
    queue = deque([cls])
    while queue:
        here = queue.popleft()
        for following in _services_offered_by(here):
            if following is cls:
                circle = " -> ".join(each.__name__ for each in (*paths[here], cls))
                fix = "remove one of them from the tools= of another"
                yield Problem(cls.__name__, f"these services are tools of each other: {circle}", fix)
            elif following not in paths and _name_of(following) > _name_of(cls):
                paths[following] = (*paths[here], following)
                queue.append(following)


def _name_of(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{id(cls)}"


def _services_offered_by(cls: type[Any]) -> Iterator[type[Any]]:
    services = [each for each in sources_of(cls) if isinstance(each, type) and service_options_of(each) is not None]
    yield from dict.fromkeys(bean_types(services))


def sources_of(cls: type[Any], options: ServiceOptions | None = None) -> tuple[Any, ...]:
    """Return everything that a service's options and methods list as tools."""
    options = options or service_options_of(cls) or ServiceOptions()
    listed = [*as_sources(options.tools)]
    for name in method_names(cls):
        listed += toolbox_of(getattr(cls, name)) or ()
    return tuple(listed)


def providers_of(cls: type[Any], options: ServiceOptions, method: str | None = None) -> tuple[Provider, ...]:
    """Return the tool providers of one method, or of all methods."""
    methods = method_names(cls) if method is None else [method]
    marked = [each for target in (cls, *(getattr(cls, name) for name in methods)) for each in _providers_at(target)]
    given = [*as_sources(options.tool_provider), *dict.fromkeys(marked)]
    return tuple(Provider(bean=each) if is_bean_type(each) else Provider(each) for each in given)


def _providers_at(target: Any) -> tuple[type[Any], ...]:
    marked: tuple[type[Any], ...] = vars(target).get(PROVIDERS_MARK, ())
    return marked


def is_bean_type(listed: object) -> bool:
    """Return True for a type to look up, also `Annotated` with a name."""
    return isinstance(listed, type) or get_origin(listed) is Annotated


def provider_problems(cls: type[Any], options: ServiceOptions) -> Iterator[Problem]:
    """Yield problems with the tool providers."""
    where = cls.__name__
    for each in providers_of(cls, options):
        named = each.bean.__origin__ if get_origin(each.bean) is Annotated else each.bean
        provide = getattr(named or each.given, "provide_tools", each.given if named is None else None)
        if not takes(provide, 1) and not (named is not None and takes(provide, 2)):
            name = getattr(named, "__name__", None) or repr(each.given)
            yield Problem(where, f"{name} is not a tool provider", "add a method `provide_tools(self, request)`")


def named_beans(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """Yield the classes that decorators name at services, tools and their members: beans to register."""
    for each in listed:
        if isinstance(each, Mapping):
            yield from named_beans(each.values())
            continue
        for target in _definitions_in(each):
            for reference in all_named(target):
                named = reference.type
                # An interface is bound to a bean. A class of a wrong kind is reported as such.
                if reference.bean is not None and hasattr(named, DEFAULT_SCOPE_MARK) and not inspect.isabstract(named):
                    yield named


def _definitions_in(listed: Any) -> tuple[Any, ...]:
    """Return the functions and classes with the marks of something that can be listed as a tool."""
    target = get_args(listed)[0] if get_origin(listed) is Annotated else listed
    if isinstance(target, AiServiceTool):
        target = target.executor
    if isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type):
        return (target,)
    if inspect.ismethod(target):
        return target, type(target.__self__)
    return (target,) if inspect.isroutine(target) else (target, type(target))


def strategies(options: ServiceOptions) -> Iterator[type[Any]]:
    """Yield the class of the tool search: a bean to register."""
    bean = BeanReference.to(options.tool_search).bean
    if isinstance(bean, type) and not inspect.isabstract(bean):
        yield bean


def search_problems(where: str, options: ServiceOptions) -> Iterator[Problem]:
    """Yield problems with the strategy of the tool search."""
    strategy = options.tool_search
    if strategy is None:
        return
    named = BeanReference.to(strategy)
    if not takes(
        getattr(strategy if named.bean is None else named.type, "search", None), 1 if named.bean is None else 2
    ):
        name = getattr(strategy, "__name__", None) or repr(strategy)
        fix = "use KeywordToolSearch(), Bm25ToolSearch(), or a class or instance of ToolSearchStrategy"
        yield Problem(where, f"tool_search is {name}, which is not a ToolSearchStrategy", fix)
    elif named.bean is None and not isinstance(getattr(strategy, "specification", None), ToolSpecification):
        fix = "set `specification` to the ToolSpecification of the search tool"
        yield Problem(where, f"the tool_search {type(strategy).__name__} has no specification", fix)


def as_sources(given: Any) -> tuple[Any, ...]:
    """Return tools or providers as a tuple: one, several, or none."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple, set, frozenset)):
        return tuple(given)
    return (given,)
