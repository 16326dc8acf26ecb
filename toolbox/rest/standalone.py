"""REST clients and single requests without a container.

Connections are closed when the event loop ends or the client is garbage-collected. Not here: clients in a container
(`implementation`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import TypeForm

from ..context import ActiveScope
from ..di.beans import MISSING
from ..errors import Problem
from .collaborators import is_context
from .endpoint import KeySettings, endpoint_problems, read_endpoint, rest_settings
from .implementation import implement, raise_problems, settings_in_force
from .marks import ClientMark, client_mark_of
from .plans import ClientPlan, RequestPlan
from .reading import read_auth, read_client

if TYPE_CHECKING:
    from .exchange import RestExchange

T = TypeVar("T")


class _StandaloneScope:
    """Replaces a container: creates one object of each collaborator class and keeps it."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def get(self, wanted: Any, name: str | None = None) -> Any:
        if wanted not in self._made:
            self._made[wanted] = wanted()
        return self._made[wanted]

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        return self.get(wanted, name)


def create_rest_client(client: TypeForm[T], *, transport: Any = None, auth: Any = None, **settings: Any) -> T:
    """Create a REST client without a container.

        weather = rest.create_rest_client(Weather, url="https://weather.example", timeout=10)

    `settings`, `transport` and `auth` are those of `rest_settings`; they override the environment. Collaborator classes
    are created without arguments. Raises `IllegalConfigurationError` with all problems of the class and its settings.
    """
    from ..settings import ToolboxSettings

    cls = cast("type[T]", client)
    mark = client_mark_of(cls) or ClientMark(cls.__name__)
    plan, problems = read_client(cls, mark)
    given = rest_settings(mark.config_key, transport=transport, auth=auth, **settings)
    found = settings_in_force(mark, ToolboxSettings(), [given])
    unmade = dict.fromkeys(_problems_of_collaborators(plan))
    raise_problems((*problems, *unmade, *endpoint_problems(cls.__name__, found.key, found.settings, mark.base_url)))
    return implement(cls, plan, _exchange(found, mark.base_url, plan, cls.__name__))


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
    raise_problems(endpoint_problems(where, settings.key, settings.settings, None))
    return _exchange(settings, None, ClientPlan(()), where)


def _exchange(settings: KeySettings, base_url: str | None, plan: ClientPlan, where: str) -> RestExchange:
    from .connections import RestConnection
    from .exchange import RestExchange

    connection = RestConnection(read_endpoint(settings, base_url))
    return RestExchange(connection, plan, cast("ActiveScope", _StandaloneScope()), read_auth(settings.auth, where))


async def send_request(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Any:
    """Send one request and return its value."""
    from .drivers import call_async

    return await call_async(exchange, plan, values)
