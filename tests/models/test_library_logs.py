"""What other libraries log about requests has no keys, cookies and queries, at any level."""

import logging
from typing import Any

import httpx2
import pytest

from tests.models import messages_api
from tests.models.scripted_server import HI, Scripted, Serve, completion
from toolbox import AnthropicChatModel, OpenAiChatModel

pytestmark = pytest.mark.anyio

LOGGERS = ("httpx2", "anthropic._base_client", "openai._base_client", "httpcore2.http11", "mcp.client.streamable_http")


def filters() -> list[Any]:
    return [each for name in LOGGERS for each in logging.getLogger(name).filters]


@pytest.mark.parametrize("status", [200, 401])
@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("kind", [OpenAiChatModel, AnthropicChatModel])
async def test_logs_at_debug_contain_no_secret(
    serve: Serve, kind: Any, transport: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = completion({"content": "ok"}) if kind is OpenAiChatModel else messages_api.message(messages_api.text("ok"))
    reply = Scripted(said.body if status == 200 else b"{}", status=status, headers={"set-cookie": "id=SECRET-cookie"})
    server = await serve(lambda _: reply)
    about: Any = {
        "extra_headers": {"x-portkey": "SECRET-header"},
        "extra_query": {"sig": "SECRET-query"},
        "extra_body": {"metadata": {"key": "SECRET-body"}},
        "transport": transport,
        "max_retries": 0,
    }
    request = type(HI)(HI.messages, parameters={"extra_headers": {"x-tenant-key": "SECRET-tenant"}})
    for key in ("SECRET-key-1234567", lambda: "SECRET-key-1234567"):
        model = kind("m", base_url=server.url, api_key=key, **about)
        try:
            await model.chat(request)
        except Exception:
            assert status == 401
        await model.aclose()

    text = "\n".join([*caplog.messages, *(str(each.exc_text) for each in caplog.records if each.exc_text)])
    assert "SECRET" not in text
    assert "/messages?…" in text or "/chat/completions?…" in text


async def test_the_programs_own_requests_are_logged_as_before(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = await serve(lambda _: completion({"content": "ok"}))
    model = OpenAiChatModel("m", server.url, "k", extra_query={"sig": "SECRET"})
    await model.chat(HI)
    await model.aclose()

    async with httpx2.AsyncClient() as client:
        await client.post(f"{server.url}/own?page=2", content=b"{}")

    assert any("/own?page=2" in each for each in caplog.messages)
    assert "SECRET" not in caplog.text


async def test_filters_of_loggers_do_not_grow_with_models_and_addresses() -> None:
    OpenAiChatModel("m", "http://127.0.0.1:9/v1", "k", extra_query={"sig": "x"})
    before = filters()

    for number in range(20):
        OpenAiChatModel("m", f"http://127.0.0.1:9/v{number}", "k", extra_query={"sig": "x"})
        AnthropicChatModel("m", "k", f"http://127.0.0.1:9/v{number}", extra_query={"sig": "x"})

    assert filters() == before
