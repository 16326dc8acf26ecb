"""Finding models by name, problems of missing models, and closing models."""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.models.messages_api import message, text
from tests.models.scripted_server import Scripted, Serve, completion
from toolbox import (
    AnthropicChatModel,
    ChatModel,
    ChatRequest,
    ChatResponse,
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    OpenAiChatModel,
    PydanticAiChatModel,
    ToolSpecification,
    UserMessage,
    register_ai_service,
)
from toolbox.chat_streams import stream_of
from toolbox.models.model_providers import PROVIDERS, server_providers
from toolbox.models.selection import NamedModels
from toolbox.settings import ModelSettings, ToolboxSettings
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])


def models(given: dict[str, ChatModel] | None = None, **settings: Any) -> NamedModels:
    return NamedModels(given, ToolboxSettings(**settings))


def test_a_model_passed_by_the_program_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__DEFAULT__MODEL", "other")
    monkeypatch.setenv("TOOLBOX_DEMO", "1")
    mine = ScriptedChatModel()

    assert models({"default": mine}).find() is mine
    assert models({"default": mine}).find("default") is mine


def test_settings_win_over_the_variables_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "from-outside")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("TOOLBOX_DEMO", "1")
    outside = models().find()
    monkeypatch.setenv("TOOLBOX_MODELS__DEFAULT__MODEL", "named")
    named = models().find()

    assert isinstance(outside, OpenAiChatModel)
    assert isinstance(named, OpenAiChatModel)
    assert (outside.model, named.model) == ("from-outside", "named")


@pytest.mark.parametrize("name", ["tool-use", "tool.use", "tool_use", "Tool-Use"])
def test_a_name_is_found_in_the_spelling_of_environment_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__MODEL", "qwen")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__BASE_URL", "http://127.0.0.1:1/v1")
    found = models()

    model = found.find(name)

    assert isinstance(model, OpenAiChatModel)
    assert model.model == "qwen"
    assert found.find(name) is model


def test_the_demo_is_chosen_only_if_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models().problem(None, "Assistant") is not None
    monkeypatch.setenv("TOOLBOX_DEMO", "1")

    assert isinstance(models().find(), DemoChatModel)
    assert models().problem("tool-use", "Assistant") is not None


def test_a_missing_model_is_reported_with_all_ways_to_configure_one() -> None:
    problem = models().problem(None, "Assistant.chat")

    assert problem is not None
    assert problem.where == "Assistant.chat"
    for way in (
        "Container(models=",
        "TOOLBOX_MODELS__DEFAULT__MODEL",
        "OPENAI_MODEL",
        "OPENAI_BASE_URL",
        "TOOLBOX_DEMO",
    ):
        assert way in problem.fix
    with pytest.raises(IllegalConfigurationError, match="TOOLBOX_DEMO"):
        models().find()


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "OPENAI_BASE_URL"])
def test_a_key_without_a_model_name_is_reported(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "sk-secret")

    problem = models().problem(None, "Assistant")

    assert problem is not None
    assert f"{variable} is set, but OPENAI_MODEL is not" in problem.what
    assert "sk-secret" not in str(problem)


def test_an_unknown_model_is_reported_with_the_closest_match() -> None:
    problem = models({"tool-use": ScriptedChatModel()}).problem("tool-uses", "Assistant")

    assert problem is not None
    assert "did you mean 'tool-use'?" in problem.what
    assert "TOOLBOX_MODELS__TOOL_USES__MODEL" in problem.fix


def test_settings_without_a_model_name_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__BIG__BASE_URL", "http://127.0.0.1:1")

    problem = models().problem("big", "Assistant")

    assert problem is not None
    assert problem.fix == "set TOOLBOX_MODELS__BIG__MODEL"


def test_an_unknown_fallback_is_reported() -> None:
    settings = ToolboxSettings.model_validate({"models": {"big": {"model": "m", "fallback": ["small"]}}})

    @register_ai_service(model="big")
    class Assistant(Protocol):
        def chat(self, text: str) -> str: ...

    [problem] = Container(settings=settings).register(Assistant).check()

    assert "small" in problem.what
    assert "fallback of model 'big'" in problem.where


async def test_every_setting_of_a_model_reaches_it(serve: Serve) -> None:
    server = await serve([completion({"content": "ok"})])
    section = {
        "model": "m",
        "base_url": server.url,
        "api_key": "sk-1",
        "timeout": 5,
        "read_timeout": 4,
        "max_retries": 1,
        "max_concurrent_requests": 3,
        "temperature": 0.1,
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "seed": 7,
        "parallel_tool_calls": False,
        "parameters": {"stop": "x"},
        "extra_body": {"top_k": 3},
        "headers": {"X-Team": "a"},
        "query": {"v": "1"},
        "supports_response_format": False,
        "send_tool_metadata": ["k"],
        "strict_tools": True,
        "stream_usage": False,
        "transport": "httpx2",
    }
    found = NamedModels({}, ToolboxSettings.model_validate({"models": {"default": section}}))

    model = found.find()
    await model.chat(ChatRequest(HI.messages, [ToolSpecification("look", metadata={"k": 1})]))
    await found.aclose()

    assert isinstance(model, OpenAiChatModel)
    assert model.supports_response_format is False
    assert "sk-1" not in repr(model)
    assert (server.headers[0]["authorization"], server.headers[0]["x-team"]) == ("Bearer sk-1", "a")
    assert server.paths == ["/v1/chat/completions?v=1"]
    assert server.requests[0]["tools"][0]["function"]["k"] == 1
    sent = {key: value for key, value in server.requests[0].items() if key not in ("messages", "tools")}
    assert sent == {
        "model": "m", "temperature": 0.1, "max_tokens": 9, "max_completion_tokens": 8, "seed": 7, "stop": "x",
        "parallel_tool_calls": False, "top_k": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"api_key": "sec ret"}, "API key"),
        ({"base_url": "http://"}, "base URL"),
        ({"base_url": "http://u:sec ret@127.0.0.1"}, "base URL"),
        ({"headers": {"X-Team": "sec ret\n"}}, "X-Team"),
    ],
)
def test_invalid_model_settings_are_reported_at_startup(settings: dict[str, Any], says: str) -> None:
    section = {"model": "m", "base_url": "http://127.0.0.1:9/v1", **settings}
    problem = models(models={"default": section}).problem(None, "Assistant")

    assert problem is not None
    assert says in problem.what
    assert "TOOLBOX_MODELS__DEFAULT__" in problem.fix
    assert "sec ret" not in str(problem)


def test_every_argument_of_a_model_is_a_setting() -> None:
    renamed = {"extra_headers": "headers", "extra_query": "query"}
    kinds = (*(provider.load_model() for provider in server_providers()), PydanticAiChatModel)
    taken = {renamed.get(each, each) for kind in kinds for each in inspect.signature(kind).parameters}

    assert set(ModelSettings.model_fields) == {*taken, "provider"}


def test_an_unknown_provider_is_a_problem() -> None:
    section = {"model": "m", "provider": "openia"}
    problem = models(models={"big-one": section}).problem("big-one", "Assistant")

    assert problem is not None
    assert problem.what == "unknown provider 'openia' of model 'big-one'"
    assert problem.fix == f"set TOOLBOX_MODELS__BIG_ONE__PROVIDER to one of: {', '.join(PROVIDERS)}"


@pytest.mark.parametrize("page", ["docs/models.md", "docs/settings.md"])
def test_all_providers_are_documented(page: str) -> None:
    documented = (Path(__file__).parents[2] / page).read_text()
    [place] = [
        each for each in re.split(r"\n\n|\n(?=\|)", documented) if "__PROVIDER`" in each and "pydantic-ai" in each
    ]

    assert [name for name in PROVIDERS if f"`{name}`" not in place] == []


async def test_a_provider_chooses_the_wire(serve: Serve) -> None:
    said = {"type": "message", "role": "assistant", "content": "ok"}
    server = await serve([Scripted(json.dumps({"status": "completed", "output": [said]}).encode())])
    section = {"model": "m", "provider": "openai-responses", "base_url": server.url}
    found = NamedModels({}, ToolboxSettings.model_validate({"models": {"default": section}}))

    assert (await found.find().chat(HI)).ai_message.text == "ok"
    await found.aclose()
    assert server.paths == ["/v1/responses"]


async def test_the_provider_anthropic_creates_an_anthropic_model(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve([message(text("ok"))])
    for name, value in {
        "PROVIDER": "anthropic",
        "MODEL": "claude-sonnet-4-6",
        "API_KEY": "a-key",
        "BASE_URL": server.url.removesuffix("/v1"),
        "MAX_TOKENS": "99",
        "CACHE": "false",
        "REASONING": "low",
        "HEADERS": '{"x-team": "red"}',
    }.items():
        monkeypatch.setenv(f"TOOLBOX_MODELS__CLAUDE__{name}", value)
    found = models()

    assert found.problem("claude", "Assistant") is None
    model = found.find("claude")
    assert isinstance(model, AnthropicChatModel)
    assert (await model.chat(HI)).ai_message.text == "ok"
    await found.aclose()
    [body] = server.requests
    assert (body["model"], body["max_tokens"], body["thinking"]) == ("claude-sonnet-4-6", 99, {"type": "adaptive"})
    assert "cache_control" not in json.dumps(body)
    assert (server.headers[0]["authorization"], server.headers[0]["x-team"]) == ("Bearer a-key", "red")


def test_the_provider_pydantic_ai_creates_a_model_of_that_library() -> None:
    section = {"provider": "pydantic-ai", "model": "test", "reasoning": "low", "max_tokens": 99, "timeout": 5}
    found = models(models={"default": section})

    assert found.problem(None, "Assistant") is None
    model = found.find()
    assert isinstance(model, PydanticAiChatModel)
    assert (model.model, model.parameters["max_tokens"]) == ("test", 99)


@pytest.mark.parametrize(
    ("section", "what", "fix"),
    [
        ({"provider": "anthropic", "seed": 1}, "has no setting seed", "TOOLBOX_MODELS__DEFAULT__SEED"),
        ({"provider": "anthropic", "wire": "chat"}, "has no setting wire", "TOOLBOX_MODELS__DEFAULT__WIRE"),
        ({"provider": "openai", "cache": True}, "has no setting cache", "TOOLBOX_MODELS__DEFAULT__CACHE"),
        ({"provider": "openai-responses", "cache": "1h"}, "has no setting cache", "TOOLBOX_MODELS__DEFAULT__CACHE"),
        ({"provider": "pydantic-ai", "base_url": "http://x"}, "has no setting base_url", "BASE_URL"),
        ({"provider": "openai", "reasoning": "much"}, "unknown reasoning 'much'", "minimal"),
        ({"provider": "anthropic", "reasoning": "much"}, "unknown reasoning 'much'", "minimal"),
        ({"provider": "pydantic-ai", "model": "test", "reasoning": "much"}, "unknown reasoning 'much'", "minimal"),
        ({"provider": "pydantic-ai", "model": "nobody:x"}, "nobody", "provider:name"),
        ({"provider": "anthropic", "base_url": "localhost"}, "invalid base URL", "http"),
    ],
    ids=str,
)
def test_settings_that_a_provider_does_not_have_are_problems(section: dict[str, Any], what: str, fix: str) -> None:
    problem = models(models={"default": {"model": "m", **section}}).problem(None, "Assistant")

    assert problem is not None
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize(("provider", "package"), [("anthropic", "anthropic"), ("pydantic-ai", "pydantic_ai")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, provider: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    problem = models(models={"default": {"model": "m", "provider": provider}}).problem(None, "Assistant")

    assert problem is not None
    assert problem.fix == f"install it with: pip install 'toolbox-di[{provider}]'"


def test_problems_of_models_keep_a_container_from_starting() -> None:
    @register_ai_service
    class Assistant(Protocol):
        def chat(self, text: str) -> str: ...

    section = {"model": "claude-opus-5", "provider": "anthropic", "seed": 1, "api_key": "k"}
    settings = ToolboxSettings.model_validate({"models": {"default": section}})

    [problem] = Container(settings=settings).register(Assistant).check()

    assert "has no setting seed" in problem.what


def test_providers_of_models_that_no_service_uses_are_checked_too() -> None:
    sections = {
        "one": {"model": "m", "provider": "openia"},
        "two": {"model": "m", "provider": "anthropic", "seed": 1, "api_key": "k"},
        "three": {"model": "m", "provider": "openai-responses"},
    }
    container = Container(settings=ToolboxSettings.model_validate({"models": sections}))

    first, second = container.check()

    assert "unknown provider 'openia'" in first.what
    assert "has no setting seed" in second.what
    assert container.check(models=False) == []


class Closing(ScriptedChatModel):
    closed = 0

    async def aclose(self) -> None:
        self.closed += 1


async def test_only_models_created_from_settings_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__BIG__MODEL", "m")
    monkeypatch.setenv("TOOLBOX_MODELS__BIG__BASE_URL", "http://127.0.0.1:1")
    mine = Closing()
    found = models({"default": mine})

    first = found.find("big")
    found.find()
    await found.aclose()

    assert mine.closed == 0
    assert found.find("big") is not first


class WithoutStream:
    async def chat(self, request: ChatRequest) -> ChatResponse:
        return await ScriptedChatModel(["Hello there"]).chat(request)


async def test_a_model_without_stream_streams_its_whole_reply() -> None:
    events = [event async for event in stream_of(WithoutStream(), HI)]

    assert [type(each).__name__ for each in events] == ["PartialResponse", "CompleteResponse"]
