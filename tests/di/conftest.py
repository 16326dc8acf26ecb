"""Runs every test of this folder with generated functions and with providers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from toolbox import Container
from toolbox.container import internals_of
from toolbox.di import wiring
from toolbox.di.scopes import CallScope


@pytest.fixture(autouse=True, params=[True, False], ids=["generated", "providers"])
def resolution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select how beans are created: by generated functions, or by the graph of providers."""
    monkeypatch.setattr(wiring, "GENERATE", request.param)


@contextmanager
def call_scope(container: Container) -> Iterator[CallScope]:
    """The call scope of a tool, active inside the block; it is not closed."""
    scope = internals_of(container).open_call_scope()
    try:
        yield scope
    finally:
        scope.leave()
