"""What models take from the environment to reach their server: the proxy, and nothing else."""

from pathlib import Path
from typing import Literal

import pytest

from tests.models.scripted_server import Scripted, Serve
from toolbox import ChatRequest, OpenAiChatModel, UserMessage

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])]

Transport = Literal["aiohttp", "httpx2"]

REPLY = Scripted(b'{"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}')


async def ask(url: str, transport: Transport) -> str | None:
    model = OpenAiChatModel("m", url, "a-secret-key", transport=transport, max_retries=0)
    try:
        return (await model.chat(ChatRequest((UserMessage("Hi"),)))).ai_message.text
    finally:
        await model.aclose()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own proxies change nothing."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_requests_go_through_the_proxy_of_the_environment(
    serve: Serve, transport: Transport, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await serve([REPLY])
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1").replace("http://", f"{scheme}user:pass@"))

    assert await ask("http://models.invalid/v1", transport) == "ok"

    assert proxy.paths == ["http://models.invalid/v1/chat/completions"]
    assert proxy.headers[0]["host"] == "models.invalid"
    assert proxy.headers[0]["proxy-authorization"] == "Basic dXNlcjpwYXNz"
    assert proxy.headers[0]["authorization"] == "Bearer a-secret-key"


async def test_a_server_in_no_proxy_is_reached_directly(
    serve: Serve, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve([REPLY])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")

    assert await ask(server.url, transport) == "ok"
    assert server.paths == ["/v1/chat/completions"]


async def test_a_user_of_the_server_in_netrc_does_not_replace_the_key(
    serve: Serve, transport: Transport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = await serve([REPLY])
    file = tmp_path / "netrc"
    file.write_text("machine 127.0.0.1 login me password mine\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))

    assert await ask(server.url, transport) == "ok"
    assert server.headers[0]["authorization"] == "Bearer a-secret-key"
