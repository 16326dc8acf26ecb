"""Functions for `api_key=`: `def` and `async def`, with beans of the call, and their problems at start."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from tests.models import messages_api
from tests.models.scripted_server import Scripted, Serve, chunk, completion, stream
from toolbox import (
    AnthropicChatModel,
    ChatRequest,
    Container,
    IllegalConfigurationError,
    Inject,
    ModelHttpError,
    OpenAiChatModel,
    UserMessage,
    create_ai_service,
    register_ai_service,
)
from toolbox.chat import ChatModel

pytestmark = pytest.mark.anyio


class Vault:
    def key(self, tenant: str) -> str:
        return f"key-of-{tenant}"


class Tenant:
    def __init__(self, name: str) -> None:
        self.name = name


@register_ai_service
class Desk(Protocol):
    async def ask(self, question: str) -> str: ...
    def asks(self, question: str) -> AsyncIterator[str]: ...


def simple_key(vault: Inject[Vault], tenant: Inject[Tenant]) -> str:
    return vault.key(tenant.name)


async def awaited_key(vault: Inject[Vault], tenant: Inject[Tenant], prefix: str = "") -> str:
    return prefix + vault.key(tenant.name)


def model_of(kind: str, url: str, key: Any) -> Any:
    if kind == "anthropic":
        return AnthropicChatModel("m", key, base_url=url.removesuffix("/v1"))
    return OpenAiChatModel("m", url, key)


def key_in(headers: dict[str, str]) -> str:
    return headers.get("x-api-key") or headers["authorization"].removeprefix("Bearer ")


@pytest.mark.parametrize("key", [simple_key, awaited_key], ids=["def", "async def"])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_a_key_function_gets_beans_of_the_call(serve: Serve, kind: str, key: Any) -> None:
    whole = {
        "openai": [completion({"content": "ok"}), stream(chunk({"content": "ok"}), chunk({}, "stop"))],
        "anthropic": [messages_api.message(messages_api.text("ok")), messages_api.streamed(messages_api.text("ok"))],
    }[kind]
    server = await serve(whole)
    model = model_of(kind, server.url, key)
    container = Container(models={"default": model}, seeds=(Tenant,)).register(Desk, Vault)

    async with container:
        async with container.request_scope({Tenant: Tenant("red")}):
            assert await container.get(Desk).ask("Hi") == "ok"
        async with container.request_scope({Tenant: Tenant("blue")}):
            assert "".join([each async for each in container.get(Desk).asks("Hi")]) == "ok"
    await model.aclose()

    assert [key_in(each) for each in server.headers] == ["key-of-red", "key-of-blue"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_key_function_without_parameters_works_without_a_service(serve: Serve, is_async: bool) -> None:
    async def awaited() -> str:
        return "key-1"

    server = await serve([completion({"content": "ok"}), completion({"content": "ok"})])
    model = OpenAiChatModel("m", server.url, awaited if is_async else lambda: "key-1")

    await model.chat(ChatRequest([UserMessage("Hi")]))
    await create_ai_service(Desk, chat_model=model).ask("Hi")
    await model.aclose()

    assert [key_in(each) for each in server.headers] == ["key-1", "key-1"]


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_the_keys_of_concurrent_requests_are_all_hidden_in_errors(serve: Serve, kind: str) -> None:
    keys = ["key-5f1c9a77d0e4b238", "key-61b8f3c2a94d07e5"]
    others_wait, remaining = asyncio.Event(), iter(keys)
    text = f"bad keys: {' '.join(keys)}"
    refusal = Scripted(json.dumps({"error": {"message": text}}).encode(), status=401, wait=others_wait)
    server = await serve([refusal] * 2)
    model = model_of(kind, server.url, lambda: next(remaining))

    calls = [asyncio.create_task(model.chat(ChatRequest([UserMessage("Hi")]))) for _ in keys]
    await server.until(lambda: len(server.headers) == len(keys))
    others_wait.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    await model.aclose()

    assert sorted(map(key_in, server.headers)) == keys
    for error in errors:
        assert isinstance(error, ModelHttpError)
        assert not any(part in f"{error} {error.body}" for part in ("5f1c9a77", "61b8f3c2"))


@pytest.mark.parametrize("is_tried_again", [True, False], ids=["retry", "next request"])
async def test_a_key_that_was_replaced_is_still_hidden(serve: Serve, is_tried_again: bool) -> None:
    keys = iter(["key-5f1c9a77d0e4b238", "key-61b8f3c2a94d07e5"])
    text = json.dumps({"error": {"message": "bad key: key-5f1c9a77d0e4b238"}}).encode()
    first = Scripted(status=503, headers={"retry-after-ms": "1"}) if is_tried_again else completion({"content": "ok"})
    server = await serve([first, Scripted(text, status=400)])
    model = OpenAiChatModel("m", server.url, lambda: next(keys))

    with pytest.raises(ModelHttpError, match=r"bad key: \*\*\*$"):
        for _ in range(2):
            await model.chat(ChatRequest([UserMessage("Hi")]))
    await model.aclose()

    assert [key_in(each)[-16:] for each in server.headers] == ["5f1c9a77d0e4b238", "61b8f3c2a94d07e5"]


def test_beans_that_no_bean_provides_are_problems_at_start() -> None:
    def unknown(tenant: str) -> str:
        return tenant

    for key, what in ((simple_key, "no bean provides Vault"), (unknown, "the parameter 'tenant' has no value")):
        model: ChatModel = OpenAiChatModel("m", "http://127.0.0.1:1/v1", key)
        problems = Container(models={"default": model}).register(Desk).check()
        [first, *_] = [each for each in problems if what in each.what]
        assert "api_key function of model 'default'" in first.where


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_without_a_container_such_a_function_is_a_configuration_error(kind: str) -> None:
    with pytest.raises(IllegalConfigurationError, match="needs a container"):
        create_ai_service(Desk, chat_model=model_of(kind, "http://127.0.0.1:1/v1", simple_key))
