"""Fixtures for the tests of the testing tools."""

from collections.abc import AsyncIterator

import pytest

from tests.models.scripted_server import Serve

pytest_plugins = ["pytester"]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with Serve() as serve:
        yield serve


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove environment variables that would change the tests."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "TOOLBOX_DEMO", "TOOLBOX_RECORDING", "CI"):
        monkeypatch.delenv(name, raising=False)
