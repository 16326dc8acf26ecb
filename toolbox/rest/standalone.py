"""REST clients and single requests without a container.

Their connections end with the event loop, or when nobody holds them any more. Not here: what a container does with a
client (`implementation`).
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
    """Stands in for a container: a collaborator's class is called once, and its object kept."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def get(self, wanted: Any, name: str | None = None) -> Any:
        if wanted not in self._made:
            self._made[wanted] = wanted()
        return self._made[wanted]

    async def aget(self, wanted: Any, name: str | None = None) -> Any:
        return self.get(wanted, name)


def create_rest_client(client: TypeForm[T], *, transport: Any = None, auth: Any = None, **settings: Any) -> T:
    """An object of a REST client's class, without a container.

    `settings` are those of `rest_settings`, over those of the environment. Collaborators are made by calling their
    classes. Raises `IllegalConfigurationError`.
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
            what = f"no {getattr(point.wants, '__name__', point.wants)} can be made by calling it without arguments"
            yield Problem(point.where, what, "register the client in a container, which makes its collaborators")


def standalone_exchange(where: str, settings: KeySettings) -> RestExchange:
    """An exchange for plans that come from no class. Raises `IllegalConfigurationError`."""
    raise_problems(endpoint_problems(where, settings.key, settings.settings, None))
    return _exchange(settings, None, ClientPlan(()), where)


def _exchange(settings: KeySettings, base_url: str | None, plan: ClientPlan, where: str) -> RestExchange:
    from .connections import RestConnection
    from .exchange import RestExchange

    connection = RestConnection(read_endpoint(settings, base_url))
    return RestExchange(connection, plan, cast("ActiveScope", _StandaloneScope()), read_auth(settings.auth, where))


async def send_request(exchange: RestExchange, plan: RequestPlan, values: Mapping[str, Any]) -> Any:
    """The value of one request."""
    from .drivers import call_async

    return await call_async(exchange, plan, values)
