"""Fixtures for the tests of models."""

from collections.abc import AsyncIterator

import pytest

from tests.models.scripted_server import Serve


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with Serve() as serve:
        yield serve


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own key and models change nothing."""
    names = ("API_KEY", "BASE_URL", "MODEL", "AUTH_TOKEN", "CUSTOM_HEADERS")
    variables = [f"{provider}_{name}" for provider in ("OPENAI", "ANTHROPIC") for name in names]
    for name in (*variables, "TOOLBOX_DEMO", "TOOLBOX_MODELS"):
        monkeypatch.delenv(name, raising=False)
