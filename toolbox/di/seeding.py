"""What a request scope is given when it is opened: instances that stand for beans of their types.

Not here: which types the check expects (`beans.seed_of`), how a seed is found by who asks (`providers`, `resolvers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ScopeNotActiveError
from ..type_keys import forms_of, plain
from .beans import seed_of
from .graph import BeanGraph, One
from .marks import Scope
from .providers import has_place
from .scopes import OpenScope, RequestScope


class Seeding:
    """Puts seeds where the beans of their types are looked for."""

    def __init__(self, graph: BeanGraph) -> None:
        self._graph = graph
        self._keys: dict[Any, int | None] = {}

    def give(self, scope: RequestScope, seeds: Mapping[Any, Any]) -> None:
        """Gives a scope that is not entered yet its seeds, by type."""
        for form, value in seeds.items():
            if form not in self._keys:
                wanted = seed_of(form)
                found = self._graph.choose(wanted.provides, wanted.name)
                self._keys[form] = found.bean if isinstance(found, One) else None
            self._put(scope, form, self._keys[form], value)

    def _put(self, scope: RequestScope, form: Any, key: int | None, value: Any) -> None:
        if key is None:
            scope.extras = {**(scope.extras or {}), plain(form): value}
            scope.direct = None
        elif has_place(self._graph.definitions[key]) and self._graph.definitions[key].scope is Scope.REQUEST:
            scope.store[key] = value
            scope.is_seeded = True
        else:
            # A bean that is not looked up in a request's store: the generated functions would not see the seed.
            scope.seeds = {**(scope.seeds or {}), key: value}
            scope.is_seeded = True
            scope.direct = None


def given_besides(scope: OpenScope, wanted: Any) -> Any:
    """What the request scope was given for a type that no bean has; else raises the error under way."""
    request = scope.request
    form = plain(wanted)
    for given, value in (request.extras or {}).items() if request is not None else ():
        if form == given or form in forms_of(given):
            if request is not None and request.closing:
                raise ScopeNotActiveError(str(form), "its request scope has ended, and this code outlived it")
            return value
    raise
