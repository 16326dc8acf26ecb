"""Creates the object behind a REST client class, and describes the class to a container.

The HTTP library is loaded when the first client is created. Connections of a client without a container are closed when
the event loop ends or the client is garbage-collected. Not here: describing requests (`client_plans`), sending them
(`exchange`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import TypeForm, is_protocol

from ..context import ActiveScope, current_scope
from ..di.beans import BeanDefinition
from ..di.decorators import Scope, application_scoped
from ..di.graph import BeanGraph, Registration
from ..di.injection_points import MISSING, point_of
from ..errors import IllegalConfigurationError, Problem
from ..execution.threads import refuse_on_event_loop
from ..introspection import plain
from ..oauth.grants import Grant, subject_classes
from ..oauth.token_sources import TokenAuth, TokenSource, TokenSources, subject_points, subject_problems
from .annotations import ClientMark, client_mark_of
from .authorization import auth_in_force, authorization_problems, definition_of_source, grant_in_force
from .client_plans import ClientPlan, RestMethodPlan, is_context, read_client
from .endpoint import KeySettings, endpoint_problems, merge_settings, read_endpoint, rest_settings
from .replies import ReplyStream

if TYPE_CHECKING:
    from ..settings import ToolboxSettings
    from .connections import RestConnection
    from .endpoint import RestEndpoint
    from .exchange import RestExchange


T = TypeVar("T")


@application_scoped
class RestConnections:
    """Holds the connections of all REST clients of a container and closes them when it stops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[RestEndpoint, RestConnection] = {}

    def connection(self, settings: KeySettings, base_url: str | None) -> RestConnection:
        """Return the connection for these settings; clients with equal settings share it."""
        from .connections import RestConnection

        endpoint = read_endpoint(settings, base_url)
        with self._lock:
            kept = self._connections.get(endpoint)
            if kept is None:
                kept = self._connections[endpoint] = RestConnection(endpoint)
            return kept

    async def stop(self) -> None:
        """Close all connections. Raises an `ExceptionGroup` of the errors."""
        closing = (connection.aclose() for connection in self._connections.values())
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        if errors := [each for each in outcomes if isinstance(each, Exception)]:
            raise ExceptionGroup("closing connections of REST clients", errors)


# --- registration


def read_rest_client(
    registered: object, scope: ActiveScope, settings: Callable[[], ToolboxSettings]
) -> Registration | None:
    """Describe a REST client class, or the settings of a key, to a container; return None for other objects.

    `scope` is where each call looks up collaborators. `settings` returns the container's settings.
    """
    if isinstance(registered, KeySettings):
        return Registration((_definition_of_settings(registered),), _implied_grants(registered.auth))
    if isinstance(registered, Grant):
        return Registration((definition_of_source(registered),), subject_classes(registered))
    mark = client_mark_of(registered)
    if mark is None:
        return None
    cls = cast("type[Any]", registered)
    plan, problems = read_client(cls, mark)
    points = (point for each in plan.collaborators() for point in each.all_points())
    later = (*(each for each in points if not is_context(each)), *subject_points(mark.auth, cls.__name__))

    def make_client(connections: RestConnections, given: list[KeySettings], sources: TokenSources) -> Any:
        from .exchange import RestExchange

        found = settings_in_force(mark, settings(), given)
        raise_problems(client_problems(cls.__name__, found, mark, plan))
        connection = connections.connection(found, mark.base_url)
        auth = auth_in_force(found, mark, cls.__name__, sources.source_of)
        return make_implementation(cls, plan, RestExchange(connection, plan, scope, auth))

    def check_client(graph: BeanGraph) -> Iterator[Problem]:
        yield from problems
        for point in later:
            yield from graph.problems_of(point)
        yield from _problems_of_settings(cls, mark, plan, settings(), graph)

    needs = (
        point_of(RestConnections, f"{cls.__name__}.connections", parameter="connections"),
        point_of(list[KeySettings], f"{cls.__name__}.given", parameter="given"),
        point_of(TokenSources, f"{cls.__name__}.sources", parameter="sources"),
    )
    definition = BeanDefinition(
        provides=cls, factory=make_client, scope=Scope.APPLICATION, needs=needs, later=later, source=cls
    )
    implied = (RestConnections, TokenSources, *_implied_grants(mark.auth), *_implied_collaborators(plan))
    return Registration((definition,), implied, check_client)


def _implied_grants(auth: Any) -> tuple[Grant, ...]:
    return (auth,) if isinstance(auth, Grant) else ()


def _definition_of_settings(given: KeySettings) -> BeanDefinition:
    # Several settings may be registered for one key, so the bean must not require a unique name.
    return BeanDefinition(
        provides=KeySettings,
        factory=given.bean,
        scope=Scope.APPLICATION,
        name=given.key,
        implicit=True,
        source=given,
    )


def _implied_collaborators(plan: ClientPlan) -> tuple[type[Any], ...]:
    """Return the collaborator classes that can be created as beans without being registered."""
    wanted = (each.point.wants for each in plan.collaborators() if each.point is not None)
    return tuple(dict.fromkeys(each for each in wanted if not inspect.isabstract(each) and not is_protocol(each)))


def settings_in_force(mark: ClientMark, settings: ToolboxSettings, given: list[KeySettings]) -> KeySettings:
    """Return the settings of a client from the environment, overridden by those set in code."""
    from ..settings import settings_key

    return merge_settings(settings_key(mark.config_key), settings.rest, given)


def _problems_of_settings(
    cls: type[Any], mark: ClientMark, plan: ClientPlan, settings: ToolboxSettings, graph: BeanGraph
) -> Iterator[Problem]:
    if "rest" not in settings.model_fields_set and any(
        name.upper().startswith("TOOLBOX_REST__") for name in os.environ
    ):
        return  # the invalid environment is reported as a separate problem
    factories = [each.factory for each in graph.definitions if plain(each.provides) is KeySettings]
    given = [getattr(factory, "__self__", None) for factory in factories]
    known = [each for each in given if isinstance(each, KeySettings)]
    if len(known) == len(given):  # otherwise a producer creates settings, which are unknown until it runs
        found = settings_in_force(mark, settings, known)
        yield from client_problems(cls.__name__, found, mark, plan)
        yield from subject_problems(grant_in_force(found, mark), graph, cls.__name__)


def client_problems(where: str, found: KeySettings, mark: ClientMark, plan: ClientPlan) -> Iterator[Problem]:
    """Yield the problems in the settings of a client, also together with what its class declares."""
    of_endpoint = [*endpoint_problems(where, found.key, found.settings, mark.base_url)]
    yield from of_endpoint
    if not of_endpoint:  # else it is not known what is sent where
        yield from authorization_problems(where, found, mark, plan)


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise `IllegalConfigurationError` with all problems, if there are any."""
    if found := tuple(problems):
        raise IllegalConfigurationError(found)


# --- the object


def make_implementation(cls: type[T], plan: ClientPlan, exchange: RestExchange) -> T:
    """Create an object of the class whose decorated methods send requests; other methods stay unchanged."""
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}Implementation",
        "__doc__": cls.__doc__,
        "__init__": object.__init__,
    }
    for method in plan.methods:
        members[method.name] = _implement_method(method, exchange)
        members[method.name].__dict__.pop("__isabstractmethod__", None)
    make: Any = type(cls)
    made: type[T] = make(f"{cls.__name__}Implementation", (cls,), members)
    return made()


def _implement_method(method: RestMethodPlan, exchange: RestExchange) -> Callable[..., Any]:
    from .exchange import call, call_async, stream, stream_async

    plan, signature = method.request, method.signature

    def bind_values(self: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Mapping[str, Any]:
        bound = signature.bind(self, *arguments, **named)
        bound.apply_defaults()
        return bound.arguments

    if method.is_async:

        @functools.wraps(method.function)
        async def send_async(self: object, *arguments: Any, **named: Any) -> Any:
            return await call_async(exchange, plan, bind_values(self, arguments, named))

        return send_async

    perform = {ReplyStream.NO: call, ReplyStream.SYNC: stream, ReplyStream.ASYNC: stream_async}
    chosen = perform[plan.reply.stream]

    @functools.wraps(method.function)
    def send_or_stream(self: object, *arguments: Any, **named: Any) -> Any:
        if plan.reply.stream is not ReplyStream.ASYNC:
            refuse_on_event_loop(plan.where)
        return chosen(exchange, plan, bind_values(self, arguments, named))

    return send_or_stream


# --- clients and single requests without a container


class _StandaloneScope:
    """Replaces a container: creates one object of each collaborator class and keeps it.

    Only what has the user's token, `of_caller`, is that of the container whose tool makes the call. It is never kept:
    the next call may be that of another user.
    """

    def __init__(self, of_caller: Any) -> None:
        self._of_caller = of_caller
        self._made: dict[Any, Any] = {}

    def get(self, wanted: Any, name: str | None = None) -> Any:
        if wanted == self._of_caller:
            found = self.find_now(wanted, name)
            return wanted() if found is None else found
        if wanted not in self._made:
            self._made[wanted] = wanted()
        return self._made[wanted]

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        found = await self.find(wanted, name)
        return self.get(wanted, name) if found is None else found

    async def find(self, wanted: Any, name: str | None = None) -> Any:
        scope = current_scope.get()
        return await scope.find(wanted, name) if scope is not None and wanted == self._of_caller else None

    def find_now(self, wanted: Any, name: str | None = None) -> Any:
        scope = current_scope.get()
        return scope.find_now(wanted, name) if scope is not None and wanted == self._of_caller else None


def create_rest_client(client: TypeForm[T], *, transport: Any = None, auth: Any = None, **settings: Any) -> T:
    """Create a REST client without a container.

        weather = rest.create_rest_client(Weather, url="https://weather.example", timeout=10)

    `settings`, `transport` and `auth` are those of `rest_settings`; they override the environment. Collaborator classes
    are created without arguments. Raises `IllegalConfigurationError` with all problems of the class and its settings.
    """
    from ..settings import ToolboxSettings

    cls = cast("type[T]", client)
    mark = client_mark_of(cls) or ClientMark(config_key=cls.__name__)
    plan, problems = read_client(cls, mark)
    given = rest_settings(mark.config_key, transport=transport, auth=auth, **settings)
    found = settings_in_force(mark, ToolboxSettings(), [given])
    unmade = dict.fromkeys(_problems_of_collaborators(plan))
    raise_problems((*problems, *unmade, *client_problems(cls.__name__, found, mark, plan)))
    return make_implementation(cls, plan, _make_exchange(found, mark, plan, cls.__name__))


def _problems_of_collaborators(plan: ClientPlan) -> Iterator[Problem]:
    for point in (point for each in plan.collaborators() for point in each.all_points()):
        if is_context(point) or point.optional or point.default is not MISSING:
            continue
        try:
            inspect.signature(point.wants).bind()
        except (TypeError, ValueError):
            what = f"{getattr(point.wants, '__name__', point.wants)} cannot be created without arguments"
            yield Problem(
                point.where, what, "register the client in a container, which creates it with its dependencies"
            )


def standalone_exchange(where: str, settings: KeySettings) -> RestExchange:
    """Return an exchange for request plans without a client class. Raises `IllegalConfigurationError`."""
    mark = ClientMark(config_key=settings.key)
    raise_problems(client_problems(where, settings, mark, ClientPlan()))
    return _make_exchange(settings, mark, ClientPlan(), where)


def _make_exchange(settings: KeySettings, mark: ClientMark, plan: ClientPlan, where: str) -> RestExchange:
    from .connections import RestConnection
    from .exchange import RestExchange

    connection = RestConnection(read_endpoint(settings, mark.base_url))
    auth = auth_in_force(settings, mark, where, TokenSource)
    subject = auth.subject if isinstance(auth, TokenAuth) else None
    return RestExchange(connection, plan, _StandaloneScope(None if subject is None else subject.wants), auth)
