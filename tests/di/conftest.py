"""Every test of this folder runs on both ways over the graph."""

import pytest

from toolbox.di import wiring


@pytest.fixture(autouse=True, params=[True, False], ids=["generated", "providers"])
def resolution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generated functions, and the graph of providers alone."""
    monkeypatch.setattr(wiring, "GENERATE", request.param)
