"""Seeds: objects that the caller of a request scope gives to it, in place of the beans of their types.

Not here: reading the declarations of seeds (`beans`, `registry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from ..errors import ScopeNotActiveError
from ..introspection import forms_of, plain
from ..security import SecurityIdentity
from .beans import BeanDefinition, FactoryKind, seed_of
from .decorators import Named, Scope
from .graph import BeanGraph
from .injection_points import MISSING
from .scopes import OpenScope, RequestScope
from .values import SingleBean


class Seeding:
    """Stores seeds where lookups find them."""

    def __init__(self, graph: BeanGraph) -> None:
        self._graph = graph
        self._keys: dict[Any, int | None] = {}

    def give(self, scope: RequestScope, seeds: Mapping[Any, Any]) -> None:
        """Add seeds, by type, to a scope that is not entered yet."""
        scope.given = seeds
        for form, value in seeds.items():
            if form not in self._keys:
                wanted = seed_of(form)
                found = self._graph.resolve_type(wanted.provides, wanted.name)
                self._keys[form] = found.bean if isinstance(found, SingleBean) else None
            self._put(scope, form, self._keys[form], value)

    def _put(self, scope: RequestScope, form: Any, key: int | None, value: Any) -> None:
        if key is None:
            scope.extras = {**scope.extras, plain(form): value}
            return
        definition = self._graph.definitions[key]
        value = definition.adapted(value)
        if definition.is_stored and definition.scope is Scope.REQUEST:
            scope.store[key] = value
            scope.is_seeded = True
        else:
            # No lookup of this bean looks in the request's store.
            scope.seeds = {**scope.seeds, key: value}
            scope.is_seeded = True


def find_extra(scope: OpenScope, wanted: Any, instead: Any) -> Any:
    """Return the seed for a type that no bean provides, or `instead` if there is none."""
    request = scope.request
    if request is None or not request.extras:
        return instead
    form = plain(wanted)
    for given, value in request.extras.items():
        if form == given or form in forms_of(given):
            if request.closing:
                raise ScopeNotActiveError(str(form), "its request scope has ended")
            return value
    return instead


def find_given(graph: BeanGraph, request: OpenScope | None) -> dict[Any, Any]:
    """Return the seeds and the identity of a request scope; without one, the anonymous identity.

    They are those that the scope was given, and those that are found now, such as the `Request`.
    """
    seeds: dict[Any, Any] = {}
    for key, definition in enumerate(graph.definitions):
        if definition.factory_kind is FactoryKind.SEED and (found := definition.factory()) is not MISSING:
            seeds[_form_of(definition)] = found
        elif request is not None and definition.provides is SecurityIdentity and key in request.store:
            seeds[_form_of(definition)] = request.store[key]
    if request is None:
        return {SecurityIdentity: SecurityIdentity.anonymous(), **seeds}
    assert isinstance(request, RequestScope)
    return {**seeds, **request.given}


def _form_of(definition: BeanDefinition) -> Any:
    """Return the type under which a seed of this bean is given."""
    return definition.provides if definition.name is None else Annotated[definition.provides, Named(definition.name)]
