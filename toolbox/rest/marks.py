"""The marks a REST client is declared with: its class, its methods, their parameters, its fixed values.

A mark is an attribute on the object, which is returned as it was. Not here: what marks mean together (`plans`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

from ..signatures import local_names

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

CLIENT_MARK = "__toolbox_rest_client__"
REQUEST_MARK = "__toolbox_rest_request__"
FIXED_MARK = "__toolbox_rest_fixed__"
MAPPER_MARK = "__toolbox_rest_exception_mapper__"

Collaborator: TypeAlias = Callable[..., Any] | type[Any]
"""A function, or the class of a bean that can be called: looked up in the current scope at each request."""


class Place(StrEnum):
    """Where in a request a value goes."""

    PATH = "path"
    QUERY = "query"
    HEADER = "header"
    COOKIE = "cookie"
    FORM = "form"
    FILE = "file"
    BODY = "body"


# --- parameters


@dataclass(frozen=True, slots=True)
class Path:
    """`Annotated[T, Path("id")]`: one segment of the path; the name is the one in braces.

    A value with `/` or `\\` is refused: many servers decode `%2F` before they choose a route, so that `8/refunds` would
    reach another one. With `allow_slash=True` it is sent, encoded; `.` and `..` between slashes stay refused.
    """

    name: str | None = None
    allow_slash: bool = False
    place: ClassVar[Place] = Place.PATH


@dataclass(frozen=True, slots=True)
class Query:
    """`Annotated[T, Query("q")]`: lists repeat, None is left out, a model or mapping gives one for each field."""

    name: str | None = None
    place: ClassVar[Place] = Place.QUERY


@dataclass(frozen=True, slots=True)
class Header:
    """`Annotated[T, Header("X-Tenant")]`; without a name the parameter's, `_` read as `-`. None is left out."""

    name: str | None = None
    place: ClassVar[Place] = Place.HEADER


@dataclass(frozen=True, slots=True)
class Cookie:
    """`Annotated[T, Cookie("session")]`. None is left out."""

    name: str | None = None
    place: ClassVar[Place] = Place.COOKIE


@dataclass(frozen=True, slots=True)
class Form:
    """`Annotated[T, Form("name")]`: a field of a form; lists repeat, None is left out, a model gives its fields."""

    name: str | None = None
    place: ClassVar[Place] = Place.FORM


@dataclass(frozen=True, slots=True)
class File:
    """`Annotated[bytes, File("photo")]`: a part of a multipart form. The value is `bytes`, `str` or an `Upload`."""

    name: str | None = None
    filename: str | None = None
    media_type: str | None = None
    place: ClassVar[Place] = Place.FILE


@dataclass(frozen=True, slots=True)
class Body:
    """`Annotated[T, Body()]`: the whole body: `str` and `bytes` as they are, everything else as JSON."""

    media_type: str | None = None
    name: ClassVar[str | None] = None
    place: ClassVar[Place] = Place.BODY


PlaceMark: TypeAlias = Path | Query | Header | Cookie | Form | File | Body


@dataclass(frozen=True, slots=True)
class Upload:
    """A file to send: its content, the name and the media type the server is told."""

    content: bytes
    filename: str = "file"
    media_type: str = "application/octet-stream"


# --- fixed values


@dataclass(frozen=True, slots=True)
class FixedValue:
    """A value every request has: a constant, a list of them, text with `${NAME}`s, or a collaborator that computes it.

    When it is not `required`, it is left out if the environment has no `NAME`, or if what is computed is None.
    """

    place: Place
    name: str
    value: Any
    required: bool = True


def _fixed(place: Place, name: str, value: object, required: bool) -> Callable[[T], T]:
    given = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else value
    new = FixedValue(place, name, given, required)

    def leave(target: T) -> T:
        # Decorators run from below: the newest goes first, so that the order is that of the source.
        setattr(target, FIXED_MARK, (new, *fixed_values_of(target)))
        return target

    return leave


def fixed_values_of(target: object) -> tuple[FixedValue, ...]:
    """The fixed values declared on this very class or function."""
    fixed: tuple[FixedValue, ...] = getattr(target, "__dict__", {}).get(FIXED_MARK, ())
    return fixed


def client_query_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """A query parameter of every request of the method or class; a list repeats it."""
    return _fixed(Place.QUERY, name, value, required)


def client_header_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """A header of every request of the method or class; a list is joined by commas."""
    return _fixed(Place.HEADER, name, value, required)


def client_cookie_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """A cookie of every request of the method or class."""
    return _fixed(Place.COOKIE, name, value, required)


def client_form_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """A form field of every request of the method or class; a list repeats it."""
    return _fixed(Place.FORM, name, value, required)


# --- methods


@dataclass(frozen=True, slots=True)
class RequestMark:
    """What a verb's decorator says; `again` counts further verbs on the same method, which is a mistake."""

    verb: str
    path: str = ""
    timeout: float | None = None
    idempotent: bool = False
    again: int = 0


def request_mark_of(member: object) -> RequestMark | None:
    """The mark a verb left on this function, if any."""
    mark: RequestMark | None = getattr(member, "__dict__", {}).get(REQUEST_MARK)
    return mark


class _Verb:
    """The decorator of one verb. `idempotent` says whether its requests may be sent again."""

    def __init__(self, verb: str, idempotent: bool) -> None:
        self._verb, self._idempotent = verb, idempotent
        self.__name__ = verb.lower()
        self.__doc__ = f"The method sends {verb} to this path below the class's; `{{name}}` stands for a parameter."

    def __call__(
        self, path: str = "", *, timeout: float | None = None, idempotent: bool | None = None
    ) -> Callable[[F], F]:
        if not isinstance(path, str):
            said = getattr(path, "__name__", "…")
            raise TypeError(f"@rest.{self.__name__} takes a path: @rest.{self.__name__}('/{said}')")
        retried = self._idempotent if idempotent is None else idempotent
        mark = RequestMark(self._verb, path, timeout, retried)

        def leave(function: F) -> F:
            earlier = request_mark_of(function)
            setattr(function, REQUEST_MARK, mark if earlier is None else replace(mark, again=earlier.again + 1))
            return function

        return leave


get = _Verb("GET", True)
head = _Verb("HEAD", True)
put = _Verb("PUT", True)
delete = _Verb("DELETE", True)
post = _Verb("POST", False)
patch = _Verb("PATCH", False)


@dataclass(frozen=True, slots=True)
class MapperMark:
    """The failures a static method of the class makes exceptions of: those of one status, or all."""

    status: int | None = None


def client_exception_mapper(status: int | None = None) -> Callable[[T], T]:
    """A static method of the class: takes the `Response[bytes]` of a failure, gives the exception to raise, or None.

    With `status` only failures of that status are shown to it. None leaves the failure to the next mapper.
    """

    def leave(method: T) -> T:
        setattr(method, MAPPER_MARK, MapperMark(status))
        return method

    return leave


# --- the class


@dataclass(frozen=True, slots=True)
class ClientMark:
    """What `register_rest_client` says of a class; `names` are local ones its annotations need to be understood."""

    config_key: str
    path: str = ""
    base_url: str | None = field(default=None, repr=False)
    headers: Collaborator | None = None
    auth: Any = None
    request_filters: tuple[Collaborator, ...] = ()
    response_filters: tuple[Collaborator, ...] = ()
    exception_mappers: tuple[Collaborator, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)


def client_mark_of(target: object) -> ClientMark | None:
    """The mark of this very class: a subclass is no REST client by accident."""
    mark: ClientMark | None = vars(target).get(CLIENT_MARK) if isinstance(target, type) else None
    return mark


@overload
def register_rest_client(target: type[T], /) -> type[T]: ...
@overload
def register_rest_client(
    *,
    config_key: str | None = None,
    path: str = "",
    base_url: str | None = None,
    headers: Collaborator | None = None,
    auth: Any = None,
    request_filters: Sequence[Collaborator] = (),
    response_filters: Sequence[Collaborator] = (),
    exception_mappers: Sequence[Collaborator] = (),
) -> Callable[[type[T]], type[T]]: ...
def register_rest_client(
    target: type[T] | None = None,
    /,
    *,
    config_key: str | None = None,
    path: str = "",
    base_url: str | None = None,
    headers: Collaborator | None = None,
    auth: Any = None,
    request_filters: Sequence[Collaborator] = (),
    response_filters: Sequence[Collaborator] = (),
    exception_mappers: Sequence[Collaborator] = (),
) -> type[T] | Callable[[type[T]], type[T]]:
    """Marks a Protocol or an ABC as a REST client, whose marked methods send requests.

    `config_key` names its settings (`TOOLBOX_REST__<KEY>__…`), by default the class's name. `path` goes before that of
    each method; `base_url` serves where the settings have no URL. `headers` computes a mapping of headers per request.
    `auth` is an `httpx2.Auth`, or a collaborator that gives one. Filters are called with the `httpx2.Request` that is
    about to be sent and the `httpx2.Response` that came, mappers with the `Response[bytes]` of a failure.
    """
    if target is not None and not isinstance(target, type):
        raise TypeError(f"@register_rest_client marks a class; its options have names: config_key={target!r}")
    caller = sys._getframe(1)

    def leave(cls: type[T]) -> type[T]:
        mark = ClientMark(
            cls.__name__ if config_key is None else config_key,
            path,
            base_url,
            headers,
            auth,
            tuple(request_filters),
            tuple(response_filters),
            tuple(exception_mappers),
            local_names(filter(inspect.isfunction, vars(cls).values()), caller),
        )
        setattr(cls, CLIENT_MARK, mark)
        return cls

    return leave if target is None else leave(target)
