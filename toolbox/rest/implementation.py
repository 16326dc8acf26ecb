"""Makes the object behind a REST client's class, and says to a container what registering one means.

The HTTP library is loaded when the first client is made. Not here: what a method's request is (`plans`), how it is sent
(`exchange`).
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..errors import BlockingCallNotAllowedError, IllegalConfigurationError
from .endpoint import KeySettings, endpoint_problems, merged, read_endpoint, rest_settings
from .marks import ClientMark, client_mark_of
from .plans import MethodPlan, read_methods
from .replies import Stream

if TYPE_CHECKING:
    from .connections import Connection
    from .exchange import Exchange

T = TypeVar("T")


class RestConnections:
    """The connections of a container's REST clients, by config key; a bean, which closes them at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, str], Connection] = {}

    def connection(self, settings: KeySettings, base_url: str | None) -> Connection:
        """The connection of these settings, one for all clients of the key (and URL)."""
        from .connections import Connection

        endpoint = read_endpoint(settings, base_url)
        with self._lock:
            kept = self._connections.get((endpoint.key, endpoint.url))
            if kept is None:
                kept = self._connections[endpoint.key, endpoint.url] = Connection(endpoint)
            return kept

    async def stop(self) -> None:
        """Closes all of them."""
        for connection in self._connections.values():
            await connection.aclose()


def implement(cls: type[T], methods: tuple[MethodPlan, ...], exchange: Exchange) -> T:
    """An object of the class whose marked methods send requests; its other methods stay as they are."""
    from . import drivers

    members = {method.name: _method(method, exchange, drivers) for method in methods}
    made = type(cls.__name__, (cls,), {**members, "__init__": object.__init__, "__module__": cls.__module__})
    made.__qualname__ = cls.__qualname__
    return cast(T, made())


def _method(method: MethodPlan, exchange: Exchange, drivers: Any) -> Callable[..., Any]:
    plan, signature = method.request, method.signature

    def values(self: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Mapping[str, Any]:
        bound = signature.bind(self, *arguments, **named)
        bound.apply_defaults()
        return bound.arguments

    if method.is_async:

        @functools.wraps(method.function)
        async def send_async(self: object, *arguments: Any, **named: Any) -> Any:
            return await drivers.call_async(exchange, plan, values(self, arguments, named))

        return send_async

    perform = {Stream.NO: drivers.call, Stream.SYNC: drivers.stream, Stream.ASYNC: drivers.stream_async}
    chosen = perform[plan.reply.stream]

    @functools.wraps(method.function)
    def send(self: object, *arguments: Any, **named: Any) -> Any:
        if plan.reply.stream is not Stream.ASYNC and _runs_a_loop():
            raise BlockingCallNotAllowedError(plan.where)
        return chosen(exchange, plan, values(self, arguments, named))

    return send


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def create_rest_client(cls: type[T], *, transport: Any = None, auth: Any = None, **settings: Any) -> T:
    """A REST client without a container: `settings` as in `rest_settings`, over those of the environment.

    Its collaborators are made by calling their classes. Its connections end with the event loop, or with itself. Raises
    `IllegalConfigurationError`.
    """
    from ..settings import ToolboxSettings, settings_key
    from .connections import Connection
    from .exchange import Exchange

    mark = client_mark_of(cls) or ClientMark(cls.__name__)
    key = settings_key(mark.config_key)
    given = rest_settings(key, transport=transport, auth=auth, **settings)
    methods, problems = read_methods(cls, mark)
    in_force = merged(key, ToolboxSettings().rest, [given])
    problems += tuple(endpoint_problems(cls.__name__, key, in_force.settings, mark.base_url))
    if problems:
        raise IllegalConfigurationError(problems)
    connection = Connection(read_endpoint(in_force, mark.base_url))
    return implement(cls, methods, Exchange(connection, mark, None))
