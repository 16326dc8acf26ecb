"""Which authentication a REST client has, of all that may declare one, and what else sets its header `Authorization`.

Not here: sending a token (`exchange`), credentials in settings (`endpoint`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..di.beans import BeanDefinition
from ..di.decorators import Scope
from ..errors import IllegalConfigurationError, Problem
from ..oauth.grants import Grant, grant_from, grant_problems, label_of, token_method
from ..oauth.token_sources import TokenSource, token_auth
from .annotations import ClientMark, Place
from .client_plans import ClientPlan, read_auth
from .endpoint import KeySettings, read_endpoint
from .replies import ReplyStream


def grant_in_force(found: KeySettings, mark: ClientMark) -> Grant | None:
    """Return the grant of a client: that of the settings in code, of the environment, or of its class."""
    if found.auth is not None:
        chosen = found.auth
    elif found.settings.auth is not None:
        chosen = grant_from(found.settings.auth)
    else:
        chosen = mark.auth
    return chosen if isinstance(chosen, Grant) else None


def auth_in_force(found: KeySettings, mark: ClientMark, where: str, source_of: Callable[[Grant], TokenSource]) -> Any:
    """Return the authentication of a client that replaces the one of its class; None to keep that."""
    grant = grant_in_force(found, mark)
    return read_auth(found.auth, where) if grant is None else token_auth(source_of(grant))


def definition_of_source(grant: Grant) -> BeanDefinition:
    """Return the bean with the tokens of a grant. Its secret is read at the start, with its problems."""
    # Equal grants of several clients are several beans of one type, which `TokenSources` puts together.
    return BeanDefinition(
        provides=TokenSource,
        factory=functools.partial(TokenSource, grant),
        scope=Scope.APPLICATION,
        implicit=True,
        source=grant,
        is_read_at_start=True,
    )


# --- checks


def authorization_problems(where: str, found: KeySettings, mark: ClientMark, plan: ClientPlan) -> Iterator[Problem]:
    """Yield the problems of the tokens of a client whose endpoint has no problems."""
    if found.settings.auth is not None:  # a grant in code is checked where its secret is read
        yield from grant_problems(grant_from(found.settings.auth), f"{where}: the settings AUTH of {found.key!r}")
    grant = grant_in_force(found, mark)
    if grant is None:
        return
    for other in _other_sources(found, mark, plan):
        yield Problem(where, f"{other} sets Authorization, but auth= sets it", "remove one of the two")
    if inspect.iscoroutinefunction(token_method(grant)):
        for method in plan.methods:
            if not method.is_async and method.request.reply.stream is not ReplyStream.ASYNC:
                what = f"the token of {label_of(grant)} must be awaited, but the method is a `def`"
                yield Problem(method.request.where, what, "make the method `async def`, or token() a `def`")


def _other_sources(found: KeySettings, mark: ClientMark, plan: ClientPlan) -> Iterator[str]:
    """Yield what sets the header besides the grant that is in force."""
    endpoint = read_endpoint(found, mark.base_url)
    for place, names in (
        ("a setting of its headers", [name for name, _ in endpoint.headers]),
        ("a setting of its credentials, or its URL,", [name for name, _ in endpoint.credentials]),
        ("propagate_headers", endpoint.settings.propagate_headers),
    ):
        if _has_authorization(names):
            yield place
    if found.auth is None and found.settings.auth is not None and mark.auth is not None:
        yield f"the settings AUTH of {found.key!r}"
    for method in plan.methods:
        request = method.request
        fixed = [each.name for each in request.fixed if each.place is Place.HEADER]
        sent = [each.wire_name for each in request.parameters if each.place is Place.HEADER]
        if _has_authorization((*fixed, *sent)):
            yield f"a header of {request.where}"


def refuse_other_authorization(names: Iterable[str], where: str) -> None:
    """Raise `IllegalConfigurationError` if the headers of a request have `Authorization`, which `auth=` sets.

    Computed headers are known only when a request is sent; the check at start has seen the other sources.
    """
    if _has_authorization(names):
        fact = "a computed header or a request filter sets Authorization, but auth= sets it"
        raise IllegalConfigurationError([Problem(where, fact, "remove one of the two")])


def _has_authorization(names: Iterable[str]) -> bool:
    return any(each.lower() == "authorization" for each in names)
