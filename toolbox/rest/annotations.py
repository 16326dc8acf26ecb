"""Decorators and markers that declare a REST client: its class, methods, parameters and fixed values.

Each decorator sets one attribute and returns the same object. Not here: reading these marks (`client_plans`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

from ..bean_references import CLIENT_MARK, REST_MARKS
from ..introspection import local_names
from ..tools.marks import with_effects

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

REQUEST_MARK, FIXED_MARK, MAPPER_MARK = REST_MARKS

Collaborator: TypeAlias = Callable[..., Any] | type[Any]
"""A function, or the class of a callable bean that is looked up in the current scope for each request."""


class Place(StrEnum):
    """The part of a request that a value is sent in."""

    PATH = "path"
    QUERY = "query"
    HEADER = "header"
    COOKIE = "cookie"
    FORM = "form"
    FILE = "file"
    BODY = "body"
    BODY_FIELD = "body field"
    URL = "whole address"


# --- parameters


@dataclass(frozen=True, slots=True)
class Path:
    """Send the parameter as one segment of the path: `Annotated[T, Path("id")]` for `{id}`.

    `name` is the name in braces, by default that of the parameter. Values with `/` or `\\` raise `RestArgumentError`,
    because many servers decode `%2F` before they choose a route: `8/refunds` would reach another one.
    `allow_slash=True` sends such values, encoded; `.` and `..` between slashes are never allowed.
    """

    name: str | None = None
    allow_slash: bool = False
    place: ClassVar[Place] = Place.PATH


@dataclass(frozen=True, slots=True)
class Query:
    """Send the parameter in the query: `Annotated[T, Query("q")]`.

    A list repeats the name. None is omitted. A model, dataclass or mapping sends one parameter for each field.
    """

    name: str | None = None
    place: ClassVar[Place] = Place.QUERY


@dataclass(frozen=True, slots=True)
class Header:
    """Send the parameter as a header: `Annotated[T, Header("X-Tenant")]`. None is omitted.

    Without a name, the parameter's name is used with `-` for `_`.
    """

    name: str | None = None
    place: ClassVar[Place] = Place.HEADER


@dataclass(frozen=True, slots=True)
class Cookie:
    """Send the parameter as a cookie: `Annotated[T, Cookie("session")]`. None is omitted."""

    name: str | None = None
    place: ClassVar[Place] = Place.COOKIE


@dataclass(frozen=True, slots=True)
class Form:
    """Send the parameter as a form field: `Annotated[T, Form("name")]`.

    A list repeats the name. None is omitted. A model, dataclass or mapping sends its fields.
    """

    name: str | None = None
    place: ClassVar[Place] = Place.FORM


@dataclass(frozen=True, slots=True)
class File:
    """Send the parameter as a file of a multipart form: `Annotated[bytes, File("photo")]`.

    The value is `bytes`, `str`, an `Upload`, or a list of them.
    """

    name: str | None = None
    filename: str | None = None
    media_type: str | None = None
    place: ClassVar[Place] = Place.FILE


@dataclass(frozen=True, slots=True)
class Body:
    """Send the parameter as the whole body: `Annotated[T, Body()]`.

    `str` and `bytes` are sent unchanged, everything else as JSON.
    """

    media_type: str | None = None
    name: ClassVar[str | None] = None
    place: ClassVar[Place] = Place.BODY


@dataclass(frozen=True, slots=True)
class BodyField:
    """Send the parameter as one field of a JSON body: `Annotated[T, BodyField("maxTokens")]`.

    All parameters so marked make one object. `name` is the field's name, by default that of the parameter. None is
    omitted if it is the parameter's default, and `null` otherwise.
    """

    name: str | None = None
    place: ClassVar[Place] = Place.BODY_FIELD


@dataclass(frozen=True, slots=True)
class Url:
    """Send the request to the address that the parameter holds: `Annotated[str, Url()]`, such as the next page's.

    The path of the verb must be empty. The address must have the client's own origin, a path below its base path, and
    no user info; otherwise `RestArgumentError` is raised before anything is sent. Query parameters are added to it.
    """

    name: ClassVar[str | None] = None
    place: ClassVar[Place] = Place.URL


PlaceMark: TypeAlias = Path | Query | Header | Cookie | Form | File | Body | BodyField | Url


@dataclass(frozen=True, slots=True)
class Upload:
    """A file to send: its content, and the file name and media type for the server."""

    content: bytes
    filename: str = "file"
    media_type: str = "application/octet-stream"


# --- fixed values


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedValue:
    """A value that every request sends: a constant, a list, text with `${NAME}`, or a collaborator that computes it.

    If it is not `required`, it is omitted when the variable is not set or the computed value is None.
    """

    place: Place
    name: str
    value: Any
    required: bool = True


def _fix_value(place: Place, name: str, value: object, required: bool) -> Callable[[T], T]:
    given = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else value
    new = FixedValue(place=place, name=name, value=given, required=required)

    def leave_value(target: T) -> T:
        # Decorators run from the bottom up. Prepending keeps the order of the source.
        setattr(target, FIXED_MARK, (new, *fixed_values_of(target)))
        return target

    return leave_value


def fixed_values_of(target: object) -> tuple[FixedValue, ...]:
    """Return the fixed values declared on this class or function; inherited ones are not included."""
    fixed: tuple[FixedValue, ...] = getattr(target, "__dict__", {}).get(FIXED_MARK, ())
    return fixed


def client_query_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """Add a query parameter to every request of the method or class; a list repeats it.

        @rest.get("/forecast")
        @rest.client_query_param("days", 7)
        async def forecast(self, city: str) -> Forecast: ...

    `value` is a constant, text with `${NAME}` from the environment, or a function that is called for each request.
    With `required=False`, a missing value is omitted. Otherwise a missing variable is a problem at start, and a call
    for which the function returns None raises `RestClientError`.
    """
    return _fix_value(Place.QUERY, name, value, required)


def client_header_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """Add a header to every request of the method or class; a list is joined by commas.

    `value` and `required` are those of `client_query_param`.
    """
    return _fix_value(Place.HEADER, name, value, required)


def client_cookie_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """Add a cookie to every request of the method or class.

    `value` and `required` are those of `client_query_param`.
    """
    return _fix_value(Place.COOKIE, name, value, required)


def client_form_param(name: str, value: object, *, required: bool = True) -> Callable[[T], T]:
    """Add a form field to every request of the method or class; a list repeats it.

    `value` and `required` are those of `client_query_param`.
    """
    return _fix_value(Place.FORM, name, value, required)


# --- methods


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMark:
    """The arguments of a verb decorator. `again` counts additional verbs on the same method, which are a mistake."""

    verb: str
    path: str = ""
    timeout: float | None = None
    idempotent: bool = False
    again: int = 0


def request_mark_of(member: object) -> RequestMark | None:
    """Return the mark of a verb decorator on this function, if any."""
    mark: RequestMark | None = getattr(member, "__dict__", {}).get(REQUEST_MARK)
    return mark


def join_paths(*paths: str) -> str:
    """Join paths with one slash between them; a trailing slash of the last one is kept."""
    joined = ""
    for path in paths:
        if path:
            joined = f"{joined.rstrip('/')}/{path.lstrip('/')}"
    return joined


def _request_line(mark: RequestMark, owner: type | None) -> str:
    """Return the verb and the path of a request, such as `DELETE /menu/{dish}`, for a method of the client `owner`."""
    clients = (client_mark_of(base) for base in (owner.__mro__ if owner is not None else ()))
    prefix = next((each.path for each in clients if each is not None), "")
    return f"{mark.verb} {join_paths(prefix, mark.path)}"


class _Verb:
    """The decorator of one HTTP verb. `idempotent` requests may be sent again by retries."""

    def __init__(self, verb: str, idempotent: bool) -> None:
        self._verb, self._idempotent = verb, idempotent
        self.__name__ = verb.lower()
        self.__doc__ = (
            f"Send a {verb} request to `path`, below the path of the class; `{{name}}` inserts a parameter.\n\n"
            f"    @rest.{self.__name__}('/orders/{{number}}')\n    async def order(self, number: int) -> Order: ...\n\n"
            "`timeout` is in seconds, for the whole request. `idempotent=True` allows retries; by default, all verbs\n"
            "but POST and PATCH do. A call raises `RestClientError` or a subclass of it, or the exception of a mapper."
        )

    def __call__(
        self, path: str = "", *, timeout: float | None = None, idempotent: bool | None = None
    ) -> Callable[[F], F]:
        if not isinstance(path, str):
            said = getattr(path, "__name__", "…")
            raise TypeError(f"@rest.{self.__name__} takes a path: @rest.{self.__name__}('/{said}')")
        retried = self._idempotent if idempotent is None else idempotent
        mark = RequestMark(verb=self._verb, path=path, timeout=timeout, idempotent=retried)

        def leave_verb(function: F) -> F:
            earlier = request_mark_of(function)
            setattr(function, REQUEST_MARK, mark if earlier is None else replace(mark, again=earlier.again + 1))
            return function if earlier is not None else with_effects(function, partial(_request_line, mark))

        return leave_verb


get = _Verb("GET", True)
head = _Verb("HEAD", True)
put = _Verb("PUT", True)
delete = _Verb("DELETE", True)
post = _Verb("POST", False)
patch = _Verb("PATCH", False)


@dataclass(frozen=True, slots=True)
class MapperMark:
    """The failures that a mapper method converts to exceptions: those of one status, or all if it is None."""

    status: int | None = None


def client_exception_mapper(status: int | None = None) -> Callable[[T], T]:
    """Convert failed replies to exceptions in a static method of the client class.

        @rest.client_exception_mapper(status=404)
        @staticmethod
        def not_found(response: rest.Response[bytes]) -> Exception | None: ...

    The method gets the reply and returns the exception to raise; None passes the failure to the next mapper. With
    `status`, it is only called for that status.
    """

    def leave_mapper(method: T) -> T:
        setattr(method, MAPPER_MARK, MapperMark(status))
        return method

    return leave_mapper


# --- the class


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMark:
    """The arguments of `register_rest_client`; `names` are local names that the annotations of the class use."""

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
    """Return the mark of this class. A mark is not inherited: a subclass must be registered itself."""
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
    """Mark a Protocol or an ABC as a REST client: its methods with a verb decorator send HTTP requests.

        @rest.register_rest_client(config_key="weather", path="/v1")
        class Weather(Protocol):
            @rest.get("/forecast/{city}")
            async def forecast(self, city: str) -> Forecast: ...

    `config_key` names its settings (`TOOLBOX_REST__<KEY>__URL`, …), by default the class name. `path` is the prefix of
    all method paths. `base_url` is used if the settings have no URL. `headers` returns a mapping of headers for each
    request. `auth` is an `httpx2.Auth`, a function or bean class that returns one, or a `ClientCredentials` or
    `TokenExchange` of `toolbox.oauth`. Request filters get the
    `httpx2.Request` before it is sent, response filters the `httpx2.Response`, exception mappers the
    `Response[bytes]` of a failure. Returns the same class. Raises `TypeError` for anything but a class; other mistakes
    are problems at start.
    """
    if target is not None and not isinstance(target, type):
        raise TypeError(f"@register_rest_client takes a class; pass options by name: config_key={target!r}")
    caller = sys._getframe(1)

    def leave_client(cls: type[T]) -> type[T]:
        mark = ClientMark(
            config_key=cls.__name__ if config_key is None else config_key,
            path=path,
            base_url=base_url,
            headers=headers,
            auth=auth,
            request_filters=tuple(request_filters),
            response_filters=tuple(response_filters),
            exception_mappers=tuple(exception_mappers),
            names=local_names(filter(inspect.isfunction, vars(cls).values()), caller),
        )
        setattr(cls, CLIENT_MARK, mark)
        return cls

    return leave_client if target is None else leave_client(target)
