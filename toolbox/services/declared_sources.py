"""Finds what a service lists: its sources of tools, its tool providers, the services that are its tools, its models.

Not here: reading the tools (`tools.sources`), the beans to register for them (`implied_beans`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, get_origin

from ..conversations.views import Summary
from ..errors import Problem
from ..handover import handovers_of
from ..introspection import takes
from ..models.routing import model_names_of
from ..retrieval import retrieves_of
from ..tools.marks import toolbox_of
from ..tools.retrievers import is_retriever
from ..tools.single_methods import class_defining
from ..tools.sources import bean_types, classes_of_methods
from .declaration import PROVIDERS_MARK, ServiceOptions, method_names, service_options_of
from .toolsets import Provider


def sources_of(cls: type[Any], options: ServiceOptions | None = None) -> tuple[Any, ...]:
    """Return everything that a service's options and methods list as tools."""
    options = options or service_options_of(cls) or ServiceOptions()
    listed = [*as_sources(options.tools)]
    for name in method_names(cls):
        listed += toolbox_of(getattr(cls, name)) or ()
    return tuple(listed)


def model_names_in(options: ServiceOptions) -> tuple[str | None, ...]:
    """Return the names of the models that a service may use, also for summaries; None is the default model."""
    names = model_names_of(options.model)
    view = options.chat_memory
    return (*names, view.model) if isinstance(view, Summary) and isinstance(view.model, str) else names


def as_sources(given: Any) -> tuple[Any, ...]:
    """Return tools or providers as a tuple: one, several, or none."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple, set, frozenset)):
        return tuple(given)
    return (given,)


def retrievers_in(cls: type[Any], options: ServiceOptions, sources: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Return the retrievers that a service's options and methods list, and those among its `sources` of tools."""
    of_methods = (each for name in method_names(cls) for each in retrieves_of(getattr(cls, name)) or ())
    return (*as_sources(options.retrievers), *of_methods, *filter(is_retriever, sources))


def services_offered_by(cls: type[Any]) -> Iterable[type[Any]]:
    """Return the services that a service lists as tools."""
    sources = sources_of(cls)
    listed = (*bean_types(sources), *classes_of_methods(sources))
    return dict.fromkeys(each for each in listed if service_options_of(each) is not None)


def services_taking_over(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield the services whose methods `@hands_over_to` names; not those that it names by a text."""
    for name in method_names(cls):
        for mark in handovers_of(getattr(cls, name)):
            service = class_defining(mark.target)
            if service is not None and service_options_of(service) is not None:
                yield service


def service_cycles(cls: type[Any], offered_by: Callable[[type[Any]], Iterable[type[Any]]]) -> Iterator[Problem]:
    """Yield a problem for each cycle of services that are tools of each other and in which `cls` is the first by name.

    For each service that lists `cls`, only the shortest cycle is reported: there may be very many cycles. `offered_by`
    is `services_offered_by`; the checks of all services share its results.
    """
    paths: dict[type[Any], tuple[type[Any], ...]] = {cls: (cls,)}
    queue, name = deque([cls]), _name_of(cls)
    while queue:
        here = queue.popleft()
        for following in offered_by(here):
            if following is cls:
                circle = " -> ".join(each.__name__ for each in (*paths[here], cls))
                fix = "remove one of them from the tools= of another"
                yield Problem(cls.__name__, f"these services are tools of each other: {circle}", fix)
            elif following not in paths and _name_of(following) > name:
                paths[following] = (*paths[here], following)
                queue.append(following)


def _name_of(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{id(cls)}"


def providers_of(cls: type[Any], options: ServiceOptions, method: str | None = None) -> tuple[Provider, ...]:
    """Return the tool providers of one method, or of all methods."""
    methods = method_names(cls) if method is None else [method]
    marked = [each for target in (cls, *(getattr(cls, name) for name in methods)) for each in _providers_at(target)]
    given = [*as_sources(options.tool_provider), *dict.fromkeys(marked)]
    return tuple(Provider(bean=each) if _is_bean_type(each) else Provider(each) for each in given)


def _providers_at(target: Any) -> tuple[type[Any], ...]:
    marked: tuple[type[Any], ...] = vars(target).get(PROVIDERS_MARK, ())
    return marked


def _is_bean_type(listed: object) -> bool:
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
