"""Fixtures for the tests of models."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.models.scripted_server import Serve


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with Serve() as serve:
        yield serve


@pytest.fixture(autouse=True, scope="module")
def no_environment() -> Iterator[None]:
    """A developer's own key and models change nothing."""
    names = ("API_KEY", "BASE_URL", "MODEL", "AUTH_TOKEN", "CUSTOM_HEADERS")
    variables = [f"{provider}_{name}" for provider in ("OPENAI", "ANTHROPIC") for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for name in (*variables, "TOOLBOX_DEMO", "TOOLBOX_MODELS"):
            patch.delenv(name, raising=False)
        yield
