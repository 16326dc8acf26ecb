"""Runs every test of this folder with generated functions and with providers."""

import pytest

from toolbox.di import wiring


@pytest.fixture(autouse=True, params=[True, False], ids=["generated", "providers"])
def resolution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select how beans are created: by generated functions, or by the graph of providers."""
    monkeypatch.setattr(wiring, "GENERATE", request.param)
