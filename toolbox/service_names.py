"""The stored names of AI services: their conversations and runs lie under them.

Not here: the decorator that sets them (`services.declaration`), what is stored (`services`, `runs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .errors import Problem

SERVICE_MARK: Final = "__toolbox_service__"
"""At the class of an AI service, its options; and at its methods as tools."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def stored_names(service: type[Any]) -> tuple[str, ...]:
    """Return the names under which a service is stored: its present name first, then its former ones.

    The present name is that of `@register_ai_service(name=…)`, by default the qualified name of the class.
    """
    given, former = _names_given_to(service)
    name = f"{service.__module__}.{service.__qualname__}" if given is None else given
    return (name, *(each for each in former if each != name))


def check_service(service: object) -> None:
    """Raise `TypeError` for anything but the class or a stored name of a service."""
    if not isinstance(service, (type, str)):
        raise TypeError(f"invalid service={service!r}; use the class of a service, or its stored name")


def _names_given_to(service: type[Any]) -> tuple[str | None, tuple[str, ...]]:
    """Return the `name=` and the `former_names=` of a service, without what is not a name: that is a problem."""
    options = vars(service).get(SERVICE_MARK)
    name, former = getattr(options, "name", None), getattr(options, "former_names", ())
    former = former if isinstance(former, tuple) else ()
    return name if isinstance(name, str) else None, tuple(each for each in former if isinstance(each, str))


def stored_name(service: type[Any]) -> str:
    """Return the present name under which a service is stored."""
    return stored_names(service)[0]


def invalid_name_problems(where: str, name: object, former_names: object) -> Iterator[Problem]:
    """Yield a problem for an invalid `name=` or `former_names=` of a service."""
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        yield Problem(where, f"invalid name={name!r}", "use 1 to 200 characters of A-Z a-z 0-9 _ . -")
    if not isinstance(former_names, tuple):
        yield Problem(where, f"invalid former_names={former_names!r}", 'use a tuple of names: ("app.agent.Assistant",)')
        return
    for each in former_names:
        if not (isinstance(each, str) and (_NAME.fullmatch(each) or _is_qualified_name(each))):
            yield Problem(where, f"invalid former name {each!r}", "use names that the service was stored under")


def _is_qualified_name(name: str) -> bool:
    """Return True for what can be the qualified name of a class, also of one in a function."""
    return all(part == "<locals>" or part.isidentifier() for part in name.split("."))


def same_name_problems(services: Iterable[type[Any]]) -> Iterator[Problem]:
    """Yield a problem for each service with a stored name, also a former one, that another service has.

    Classes that have the same qualified name by default do not count: a function can make several.
    """
    owners: dict[str, type[Any]] = {}
    given: set[str] = set()
    for service in services:
        present, former = _names_given_to(service)
        own = {*former} if present is None else {present, *former}
        for name in stored_names(service):
            other = owners.setdefault(name, service)
            if other is not service and name in own | given:
                fact = f"its stored name {name!r} is also one of {other.__name__}, so they would mix what they store"
                yield Problem(service.__name__, fact, "change name= or former_names= of one of them")
        given |= own
