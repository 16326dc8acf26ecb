"""Scopes for the tests of this folder."""

from collections.abc import Iterator
from contextlib import contextmanager

from toolbox import Container
from toolbox.container import internals_of
from toolbox.di.scopes import CallScope


@contextmanager
def call_scope(container: Container) -> Iterator[CallScope]:
    """The call scope of a tool, active inside the block; it is not closed."""
    scope = internals_of(container).open_call_scope()
    try:
        yield scope
    finally:
        scope.leave()
