"""Fixtures for the tests of models."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.models.every_wire import Connect
from tests.models.scripted_server import ScriptedServer, Serve, serving
from toolbox import ChatRequest, ModelConnectionError, OpenAiChatModel, UserMessage
from toolbox.models.model_providers import server_providers


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with Serve() as serve:
        yield serve


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    connect = Connect()
    yield connect
    await connect.aclose()


@pytest.fixture(scope="module")
async def scripted() -> AsyncIterator[ScriptedServer]:
    """One server on one event loop, for files with many short tests. Each test begins with `scripted.script([…])`."""
    async with serving([]) as server:
        yield server


@pytest.fixture
async def loaded() -> None:
    """A first request has imported the packages, so that a test measures only its own requests."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        model = OpenAiChatModel("m", f"http://127.0.0.1:{unused.getsockname()[1]}/v1", max_retries=0)
        with pytest.raises(ModelConnectionError):
            await model.chat(ChatRequest((UserMessage("Hi"),)))
        await model.aclose()


@pytest.fixture(autouse=True, scope="module")
def no_environment() -> Iterator[None]:
    """A developer's own key and models change nothing."""
    names = ("API_KEY", "BASE_URL", "MODEL", "AUTH_TOKEN", "CUSTOM_HEADERS")
    variables = [f"{each.load_settings().variables}_{name}" for each in server_providers() for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for name in (*variables, "TOOLBOX_DEMO", "TOOLBOX_MODELS"):
            patch.delenv(name, raising=False)
        yield
