"""How problems name beans, and the fixes for missing beans, with similar beans and objects to register.

Not here: which bean is missing (`graph`, `graph_checks`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, overload

from typing_extensions import is_protocol

from ..introspection import class_of, forms_of, type_name
from ..security import SecurityIdentity
from .beans import BeanDefinition
from .conditions import LeftOut
from .injection_points import InjectionPoint, PointShape


def wanted_text(point: InjectionPoint) -> str:
    """Return the requested type and name of an injection point, for messages."""
    text = type_name(point.wants if point.shape is PointShape.INSTANCE else point.whole)
    return f"{text} named {point.name!r}" if point.name is not None else text


def chain_text(labels: Sequence[str]) -> str:
    """Return a chain of beans as text; shorten long chains in the middle."""
    if len(labels) > 16:
        labels = [*labels[:10], f"({len(labels) - 15} more)", *labels[-5:]]
    return " -> ".join(labels)


# --- fixes for missing beans


def suggest_fix(point: InjectionPoint, near: Sequence[str], definitions: Sequence[BeanDefinition]) -> str:
    """Return the fix for an injection point without a bean; `near` are similar beans."""
    wanted = wanted_text(point)
    if wide := find_wider_producer(point.wants, definitions):
        where, produced = type_name(wide.source), type_name(wide.provides)
        return f"if {where} returns {wanted}, annotate it so: it says {produced}; else request {produced}"
    if found := [each for each in find_look_alikes(point.wants, definitions) if each in near]:
        return f"{found[0]} has the same methods: call bind({wanted}, {found[0]}) if you mean it"
    cls = class_of(point.wants)
    module = getattr(cls, "__module__", "")
    if module == "builtins" and cls not in (list, dict):
        return f"add a default value, inject a BaseSettings class that has it, or use Annotated[{wanted}, Named(…)]"
    path = f"{module}.{getattr(cls, '__qualname__', '')}"
    optional = f"`{type_name(point.wants)} | None`"
    if fix := web_request_fix(point.wants):
        return fix
    if fix := identity_fix(point.wants):
        return f"{fix}; or use {optional}"
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


def identity_fix(wanted: Any) -> str:
    """Return the fix for a missing `SecurityIdentity`, which is never a bean by itself; "" for other types."""
    if class_of(wanted) is not SecurityIdentity:
        return ""
    return (
        "declare it: Container(seeds=[SecurityIdentity]), also if identity= of install(…) provides it in another "
        "module; or pass identity= to install(…), or register a producer"
    )


def _to_register(cls: Any) -> str:
    """Return the object to register for a type: the class itself, or an implementation of an interface."""
    is_marked = isinstance(cls, type) and any(name.startswith("__toolbox_") for name in vars(cls))
    return cls.__name__ if is_marked or (isinstance(cls, type) and not _members_of(cls)) else "an implementation"


def find_wider_producer(wanted: Any, definitions: Sequence[BeanDefinition]) -> BeanDefinition | None:
    """Return a producer that says that it returns a base class of the wanted type."""
    bases = forms_of(wanted)[1:]
    return next((each for each in definitions if inspect.isroutine(each.source) and each.provides in bases), None)


def find_similar(wanted: Any, definitions: Sequence[BeanDefinition]) -> list[str]:
    """Return similar beans: same members, or a similar name."""
    labels = {type_name(class_of(each.provides)): each.label for each in definitions}
    sounding = difflib.get_close_matches(type_name(class_of(wanted)), labels, n=3, cutoff=0.7)
    return [*find_look_alikes(wanted, definitions), *(labels[each] for each in sounding)]


def find_look_alikes(wanted: Any, definitions: Sequence[BeanDefinition]) -> list[str]:
    """Return the beans that have all members of a Protocol or abstract class, but do not inherit from it."""
    cls = class_of(wanted)
    members = {each for each in _members_of(cls) if not each.startswith("_")}  # most classes have `__iter__` and others
    if not members:
        return []
    return [
        each.label
        for each in definitions
        if not each.implicit
        and isinstance(class_of(each.provides), type)
        and cls not in class_of(each.provides).__mro__
        and all(hasattr(class_of(each.provides), member) for member in members)
    ]


def _members_of(cls: Any) -> set[str]:
    if is_protocol(cls):
        members = {name for base in cls.__mro__ if is_protocol(base) for name in vars(base)}
        members |= {name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())}
        return {name for name in members if not name.startswith("_")}
    return set(getattr(cls, "__abstractmethods__", ())) if inspect.isclass(cls) and inspect.isabstract(cls) else set()


def left_out_fix(point: InjectionPoint, absent: Sequence[LeftOut]) -> str:
    fixes = dict.fromkeys(each.fix for each in absent)
    return f"{', or '.join(fixes)}, or use `{type_name(point.wants)} | None`"


# --- similar beans


class NearMisses(Sequence[str]):
    """Similar beans for "did you mean", found when somebody reads them: many lookups expect that a bean is missing."""

    def __init__(self, find: Callable[[], tuple[str, ...]]) -> None:
        self._find = find

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return self._find()

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...

    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        return self._names[place]

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(self._names)

    def __eq__(self, other: object) -> bool:
        return self._names == (other._names if isinstance(other, NearMisses) else other)

    def __hash__(self) -> int:
        return hash(self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._names,)
