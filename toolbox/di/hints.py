"""Fixes for missing beans: similar beans, and objects to register.

Not here: finding the bean of an injection point (`graph`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

from ..type_keys import class_of, type_name
from .beans import BeanDefinition
from .points import InjectionPoint, PointShape


def wanted_text(point: InjectionPoint) -> str:
    """Return the requested type and name of an injection point, for messages."""
    text = type_name(point.wants if point.shape is PointShape.INSTANCE else point.whole)
    return f"{text} named {point.name!r}" if point.name is not None else text


def chain_text(labels: Sequence[str]) -> str:
    """Return a chain of beans as text; shorten long chains in the middle."""
    if len(labels) > 16:
        labels = [*labels[:10], f"({len(labels) - 15} more)", *labels[-5:]]
    return " -> ".join(labels)


def suggestion(point: InjectionPoint, near: Sequence[str], definitions: Sequence[BeanDefinition]) -> str:
    """Return the fix for an injection point without a bean; `near` are similar beans."""
    wanted = wanted_text(point)
    if found := [each for each in look_alikes(point.wants, definitions) if each in near]:
        return f"{found[0]} has the same methods: call bind({wanted}, {found[0]}) if you mean it"
    cls = class_of(point.wants)
    module = getattr(cls, "__module__", "")
    if module == "builtins" and cls not in (list, dict):
        return f"add a default value, inject a BaseSettings class that has it, or use Annotated[{wanted}, Named(…)]"
    path = f"{module}.{getattr(cls, '__qualname__', '')}"
    optional = f"`{type_name(point.wants)} | None`"
    if fix := web_request_fix(point.wants):
        return fix
    one = _READY_MADE.get(path, "") or _to_register(cls)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"register {one}{hint}, add it to Container(seeds=…) if request scopes receive it, or use {optional}"


_READY_MADE = {
    "sqlalchemy.ext.asyncio.engine.AsyncEngine": "toolbox.sql.engine",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "toolbox.sql.session",
    "sqlalchemy.engine.base.Engine": "toolbox.sql.sync_engine",
    "sqlalchemy.orm.session.Session": "toolbox.sql.sync_session",
    "redis.asyncio.client.Redis": "toolbox.redis.client",
}
"""Our producers for types of other libraries, by name, so that these libraries are not loaded."""

_OF_WEB_REQUESTS = frozenset(
    {"starlette.requests.HTTPConnection", "starlette.requests.Request", "starlette.websockets.WebSocket"}
)
"""Types that only `toolbox_fastapi` provides."""


def web_request_fix(wanted: Any) -> str:
    """Return the fix for a missing `Request` or `WebSocket`, which cannot be registered; "" for other types."""
    cls = class_of(wanted)
    if f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', '')}" not in _OF_WEB_REQUESTS:
        return ""
    serve = "serve it with FastAPI: toolbox_fastapi.install(app, container) provides it in requests"
    return f"{serve}; if this also runs outside requests, use `{type_name(wanted)} | None`"


def _to_register(cls: Any) -> str:
    """Return the object to register for a type: the class itself, or an implementation of an interface."""
    is_marked = isinstance(cls, type) and any(name.startswith("__toolbox_") for name in vars(cls))
    return cls.__name__ if is_marked or (isinstance(cls, type) and not _members_of(cls)) else "an implementation"


def alike(wanted: Any, definitions: Sequence[BeanDefinition]) -> list[str]:
    """Return similar beans: same members, or a similar name."""
    labels = {type_name(class_of(each.provides)): each.label for each in definitions}
    sounding = difflib.get_close_matches(type_name(class_of(wanted)), labels, n=3, cutoff=0.7)
    return [*look_alikes(wanted, definitions), *(labels[each] for each in sounding)]


def look_alikes(wanted: Any, definitions: Sequence[BeanDefinition]) -> list[str]:
    """Return the beans that have all members of a Protocol or abstract class, but do not inherit from it."""
    cls = class_of(wanted)
    members = _members_of(cls)
    if not members:
        return []
    return [
        each.label
        for each in definitions
        if isinstance(class_of(each.provides), type)
        and cls not in class_of(each.provides).__mro__
        and all(hasattr(class_of(each.provides), member) for member in members)
    ]


def _members_of(cls: Any) -> set[str]:
    if getattr(cls, "_is_protocol", False):
        members = {name for base in cls.__mro__ if getattr(base, "_is_protocol", False) for name in vars(base)}
        members |= {name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())}
        return {name for name in members if not name.startswith("_")}
    return set(getattr(cls, "__abstractmethods__", ())) if inspect.isclass(cls) and inspect.isabstract(cls) else set()
