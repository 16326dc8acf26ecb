"""Models as beans: injection, producers, names, overrides and seeds, and models that a program uses directly."""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Protocol

import pytest
from dependency_injector import containers, providers
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.listening import Events
from tests.models import messages_api
from tests.models.scripted_server import Scripted, Serve, chunk, completion, stream
from toolbox import (
    AiMessage,
    AnthropicChatModel,
    ChatModel,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    DemoChatModel,
    Inject,
    Instance,
    InvocationTimeoutError,
    MissingBeanError,
    ModelError,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    Named,
    OpenAiChatModel,
    PartialResponse,
    ScopeNotActiveError,
    TokenUsage,
    UsageCountedEvent,
    UserMessage,
    application_scoped,
    produces,
    register_ai_service,
    request_scoped,
    time_limit,
    tool,
)
from toolbox.limits import CostEstimator, UsageLimitExceededError, UsageLimits, current_usage, usage_limits
from toolbox.settings import ToolboxSettings
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
Small = Annotated[ChatModel, Named("small")]


@register_ai_service
class Desk(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(model="small")
class Titles(Protocol):
    async def ask(self, text: str) -> str: ...


def says(text: str) -> ScriptedChatModel:
    """A model that always answers the same."""
    return ScriptedChatModel([text] * 20)


async def answer(model: ChatModel) -> str | None:
    return (await model.chat(HI)).ai_message.text


def problem_of(container: Container) -> str:
    [problem] = container.check()
    return str(problem)


# --- injection


class Everything:
    def __init__(
        self,
        model: ChatModel,
        small: Small,
        all_models: dict[str, ChatModel],
        models: list[ChatModel],
        later: Instance[ChatModel],
        small_later: Instance[Small],
        other: Annotated[ChatModel, Named("other")] | None,
    ) -> None:
        self.model, self.small, self.all_models, self.models = model, small, all_models, models
        self.later, self.small_later, self.other = later, small_later, other


async def test_models_are_injected_by_their_names() -> None:
    container = Container(models={"small": says("small"), "default": says("default")}).register(Everything)

    async with container:
        found = await container.aget(Everything)

        assert await answer(found.model) == "default"
        assert await answer(found.small) == "small"
        assert {name: await answer(each) for name, each in found.all_models.items()} == {
            "small": "small",
            "default": "default",
        }
        assert len(found.models) == 2
        assert await answer(found.later.get()) == "default"
        assert await answer(await found.small_later.aget()) == "small"
        assert found.other is None
        assert container.get(ChatModel) is found.model


async def test_the_default_model_is_never_another_one() -> None:
    class Titled:
        def __init__(self, model: ChatModel) -> None: ...

    container = Container(models={"small": says("small")}).register(Titled, Desk)

    problems = [each for each in container.check() if "no default model is configured" in each.what]

    assert sorted(each.where for each in problems) == ["Desk", "Titled.model"]
    async with Container(models={"small": says("small")}) as started:
        with pytest.raises(MissingBeanError, match="Container"):
            started.get(ChatModel)


def test_an_unknown_name_is_a_problem_with_the_nearest_name() -> None:
    class Titled:
        def __init__(self, model: Annotated[ChatModel, Named("smal")]) -> None: ...

    container = Container(models={"small": says("small")}).register(Titled)

    assert "unknown model 'smal'; did you mean 'small'?" in problem_of(container)


def test_a_name_that_no_variable_can_have_is_not_offered_as_one() -> None:
    @register_ai_service(model="openai:gpt-5-mini")
    class Clerk(Protocol):
        async def chat(self, text: str) -> str: ...

    text = problem_of(Container().register(Clerk))

    assert "unknown model 'openai:gpt-5-mini'" in text
    assert "TOOLBOX_MODELS" not in text


def test_services_are_never_suggested_for_a_model() -> None:
    @register_ai_service(model="small")
    class Chat(Protocol):
        async def chat(self, request: str) -> str: ...

    class Titled:
        def __init__(self, model: ChatModel) -> None: ...

    container = Container(models={"small": says("small")}).register(Titled, Chat)

    assert "Chat " not in problem_of(container)
    with Container(models={"small": says("small")}).register(Chat) as started, pytest.raises(MissingBeanError) as error:
        started.get(ChatModel)
    assert "Chat " not in str(error.value)


def test_check_without_models_ignores_missing_models() -> None:
    class Titled:
        def __init__(self, model: ChatModel, small: Small) -> None: ...

    assert Container().register(Titled, Desk).check(models=False) == []


async def test_endpoints_get_models() -> None:
    app = FastAPI()
    install(app, Container(models={"default": says("default"), "small": says("small")}))

    @app.get("/")
    async def ask(model: Inject[ChatModel], small: Inject[Annotated[ChatModel, Named("small")]]) -> list[str | None]:
        return [await answer(model), await answer(small)]

    with TestClient(app) as client:
        assert client.get("/").json() == ["default", "small"]


async def test_what_is_injected_has_the_attributes_of_the_model() -> None:
    class Own(ScriptedChatModel):
        region = "eu"

    own = Own(["hi"], supports_response_format=True)
    remote = OpenAiChatModel("gpt-5-mini", "http://127.0.0.1:9/v1")
    async with Container(models={"default": own, "remote": remote}) as container:
        model: Any = container.get(ChatModel)
        other: Any = container.get(ChatModel, "remote")

        assert (model.model, model.supports_response_format, model.region) == ("Own", True, "eu")
        assert (other.model, other.base_url) == ("gpt-5-mini", "http://127.0.0.1:9/v1")
        with pytest.raises(AttributeError, match="nothing"):
            _ = model.nothing


async def test_settings_and_the_demo_are_beans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__MODEL", "qwen")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("TOOLBOX_DEMO", "1")

    class Named_:
        def __init__(self, model: ChatModel, tools: Annotated[ChatModel, Named("tool-use")]) -> None:
            self.model, self.tools = model, tools

    async with Container().register(Named_) as container:
        found: Any = container.get(Named_)

        assert (found.model.model, found.tools.model) == ("DemoChatModel", "qwen")
        assert list(container.get(dict[str, ChatModel])) == ["tool_use", "default"]


# --- producers and other sources


@dataclass
class Tenant:
    name: str


@produces(scope="request", name="default")
def model_of_tenant(tenant: Tenant) -> ChatModel:
    return says(f"for {tenant.name}")


async def test_a_service_uses_the_model_of_its_request() -> None:
    container = Container(seeds=[Tenant]).register(model_of_tenant, Desk)
    async with container:
        desk = await container.aget(Desk)
        for name in ("ada", "bob"):
            async with container.request_scope({Tenant: Tenant(name)}):
                assert await desk.ask("Hi") == f"for {name}"
        with pytest.raises(ScopeNotActiveError):
            await desk.ask("Hi")


def test_an_application_bean_cannot_hold_the_model_of_a_request() -> None:
    @application_scoped
    class Titled:
        def __init__(self, model: ChatModel) -> None: ...

    text = problem_of(Container(seeds=[Tenant]).register(model_of_tenant, Titled))

    assert "Titled is application_scoped but holds ChatModel 'default', which is request_scoped" in text
    assert "Instance[ChatModel" in text


@produces()
def sync_model() -> ChatModel:
    return says("sync")


@produces()
async def async_model() -> ChatModel:
    return says("async")


closed: list[str] = []


@produces(scope="request")
def yielded_model() -> Iterator[ChatModel]:
    yield says("yielded")
    closed.append("yielded")


@produces(scope="request")
async def async_yielded_model() -> AsyncIterator[ChatModel]:
    yield says("async yielded")
    closed.append("async yielded")


@produces(scope="call")
def model_of_call() -> ChatModel:
    return says("call")


@pytest.mark.parametrize("producer", [sync_model, async_model, yielded_model, async_yielded_model, model_of_call])
async def test_producers_of_every_kind_and_scope_take_part(producer: Any) -> None:
    closed.clear()
    async with Container().register(producer, Desk) as container:
        desk = await container.aget(Desk)
        async with container.request_scope():
            said = await desk.ask("Hi")
            assert said == await answer(await container.aget(ChatModel))

    assert said.replace(" ", "_") in producer.__name__ or said == "call"
    assert closed == ([said] if "yielded" in said else [])


@produces(scope="application", name="small")
def typed_model() -> OpenAiChatModel:
    return OpenAiChatModel("m", "http://127.0.0.1:9/v1")


async def test_a_producer_of_a_model_class_provides_that_class_and_the_model() -> None:
    async with Container().register(typed_model) as container:
        own = container.get(OpenAiChatModel)
        model: Any = container.get(ChatModel, "small")

        assert isinstance(own, OpenAiChatModel)
        assert model.own_model is own


class Own(ChatModel):
    async def chat(self, request: ChatRequest) -> ChatResponse:
        return await says("own").chat(request)


class Structural:
    async def chat(self, request: ChatRequest) -> ChatResponse:
        return await says("structural").chat(request)


async def test_classes_instances_and_bindings_are_sources() -> None:
    container = Container().register(Own, Desk, Titles)
    container.register_instance(says("instance"), as_type=ChatModel, name="small")
    container.bind(ChatModel, Structural, name="bound")
    async with container:
        assert await (await container.aget(Desk)).ask("Hi") == "own"
        assert await (await container.aget(Titles)).ask("Hi") == "instance"
        assert await answer(container.get(ChatModel, "bound")) == "structural"
        assert isinstance(container.get(Own), Own)


async def test_a_bound_class_has_only_the_name_of_its_binding() -> None:
    async with Container().bind(ChatModel, Own, name="small").register(Titles) as container:
        assert await (await container.aget(Titles)).ask("Hi") == "own"
        with pytest.raises(MissingBeanError):
            container.get(ChatModel)


class Models(containers.DeclarativeContainer):
    small = providers.Singleton(ScriptedChatModel, ["of the container"] * 9)
    chat_model = providers.Factory(ScriptedChatModel, ["by the factory"])


async def test_providers_of_dependency_injector_are_sources() -> None:
    models = Models()
    async with Container().include(models).register(Desk, Titles) as container:
        desk, titles = await container.aget(Desk), await container.aget(Titles)
        assert await titles.ask("Hi") == "of the container"
        assert await desk.ask("Hi") == "by the factory"
        with models.small.override(providers.Object(says("overridden"))):
            assert await titles.ask("Hi") == "overridden"
        assert await titles.ask("Hi") == "of the container"


def test_a_model_that_a_program_passes_may_be_an_instance_of_its_class_too() -> None:
    scripted = says("hi")

    with Container(models={"default": scripted}).register_instance(scripted) as container:
        assert container.get(ScriptedChatModel) is scripted


@produces(name="small")
def small_model() -> ChatModel:
    return says("small")


@produces(name="small")
def another_small_model() -> ChatModel:
    return says("small")


def test_a_name_of_two_models_is_a_problem() -> None:
    settings = ToolboxSettings.model_validate(
        {"models": {"small": {"model": "m", "base_url": "http://127.0.0.1:9/v1"}}}
    )

    for container, other in (
        (Container().register(small_model, another_small_model), "small_model is a model of this name too"),
        (Container(models={"small": says("")}).register(small_model), "models={'small': …}"),
        (Container(settings=settings).register(small_model), "the settings have a model of this name too"),
        (Container().register(Own, sync_model), "Own is a model of this name too"),
    ):
        text = problem_of(container)
        assert "two models are called" in text
        assert other in text


def test_a_producer_wins_over_the_environment_and_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "from-outside")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("TOOLBOX_DEMO", "1")

    with Container().register(sync_model) as container:
        assert list(container.get(dict[str, ChatModel])) == ["default"]
        assert container.get(ChatModel).model == "ScriptedChatModel"  # type: ignore[attr-defined]


async def test_a_producer_that_returns_no_model_is_named() -> None:
    @produces()
    def broken() -> ChatModel:
        return "gpt-5"  # type: ignore[return-value]

    async with Container().register(broken) as container:
        with pytest.raises(Exception, match="'gpt-5' is not a model"):
            container.get(ChatModel)


async def test_a_producer_may_return_no_model() -> None:
    @produces(name="small")
    def maybe() -> ChatModel | None:
        return None

    async with Container(models={"default": says("hi")}).register(maybe) as container:
        assert list(container.get(dict[str, ChatModel])) == ["default"]
        with pytest.raises(MissingBeanError):
            container.get(ChatModel, "small")


async def test_one_model_may_be_another_under_a_second_name() -> None:
    @produces(name="cheap")
    def cheap(small: Small) -> ChatModel:
        return small

    events = Events()
    async with Container(models={"small": says("small")}).register(cheap).register_instance(events) as container:
        assert await answer(container.get(ChatModel, "cheap")) == "small"

    assert len(events.of(ModelRequestEvent)) == 1


def test_names_of_providers_tell_models_from_other_beans() -> None:
    container = Container(models={"small": says(""), "default": says("")}).register(Desk)

    with container as started:
        assert {"chat_model", "small_chat_model"} <= set(started.providers.providers)
        assert started.providers.chat_model() is started.get(ChatModel)


# --- overrides and seeds


async def test_an_override_replaces_the_default_model_and_no_other() -> None:
    container = Container(models={"default": says("default"), "small": says("small")}).register(
        Desk, Titles, Everything
    )
    async with container:
        desk, titles = await container.aget(Desk), await container.aget(Titles)
        with container.override(ChatModel, says("fake")):
            assert (await desk.ask("Hi"), await titles.ask("Hi")) == ("fake", "small")
            assert await answer((await container.aget(Everything)).model) == "fake"
        assert await desk.ask("Hi") == "default"
        with container.override(ChatModel, says("fake"), name="small"):
            assert (await desk.ask("Hi"), await titles.ask("Hi")) == ("default", "fake")


async def test_an_overridden_model_need_not_be_configured() -> None:
    container = Container().register(Desk)

    with container.override(ChatModel, says("fake")):
        async with container:
            assert await (await container.aget(Desk)).ask("Hi") == "fake"


async def test_a_provider_can_be_overridden() -> None:
    async with Container(models={"default": says("default")}).register(Desk) as container:
        desk = await container.aget(Desk)
        with container.providers.chat_model.override(providers.Object(says("fake"))):
            assert await desk.ask("Hi") == "fake"


@pytest.mark.parametrize("seeded_type", [ChatModel, Annotated[ChatModel, Named("default")]], ids=str)
async def test_a_seed_replaces_the_model_in_its_request(seeded_type: Any) -> None:
    @request_scoped
    class Page:
        def __init__(self, model: ChatModel) -> None:
            self.model = model

    container = Container(models={"default": says("default"), "small": says("small")}).register(Desk, Titles, Page)
    async with container:
        desk, titles = await container.aget(Desk), await container.aget(Titles)
        async with container.request_scope({seeded_type: says("seed")}):
            assert (await desk.ask("Hi"), await titles.ask("Hi")) == ("seed", "small")
            assert await answer((await container.aget(Page)).model) == "seed"
        assert await desk.ask("Hi") == "default"


async def test_a_seed_replaces_the_model_that_a_producer_makes_for_the_request() -> None:
    container = Container(seeds=[Tenant]).register(model_of_tenant, Desk)
    async with container, container.request_scope({ChatModel: says("seed")}):
        assert await (await container.aget(Desk)).ask("Hi") == "seed"


async def test_a_declared_seed_is_the_model_of_the_request() -> None:
    container = Container(seeds=[ChatModel]).register(Desk)
    async with container, container.request_scope({ChatModel: says("seed")}):
        assert await (await container.aget(Desk)).ask("Hi") == "seed"


# --- a model that a program uses directly


async def test_a_model_that_is_used_directly_sends_events() -> None:
    events = Events()
    async with Container(models={"default": says("Hello there")}).register_instance(events) as container:
        model: Any = container.get(ChatModel)
        await model.chat(HI)
        pieces = [each async for each in model.stream(HI)]

    assert [type(each) for each in events.seen] == [ModelRequestEvent, ModelResponseEvent] * 2
    assert [each.streaming for each in events.of(ModelRequestEvent)] == [False, True]
    assert {(each.context.service, each.context.method) for each in events.seen} == {(ChatModel, "chat")}
    assert [type(each) for each in pieces] == [PartialResponse, PartialResponse, CompleteResponse]


async def test_failures_of_a_model_that_is_used_directly_are_events() -> None:
    events = Events()
    model = ScriptedChatModel([ValueError("bug"), ValueError("bug")])
    async with Container(models={"default": model}).register_instance(events) as container:
        injected: Any = container.get(ChatModel)
        with pytest.raises(ValueError, match="bug"):
            await injected.chat(HI)
        with pytest.raises(ValueError, match="bug"):
            async for _ in injected.stream(HI):
                pass

    assert len(events.of(ModelFailedEvent)) == 2


class Prices(CostEstimator):
    def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
        return usage.total_tokens * Decimal("0.01")


def with_usage(text: str) -> ChatResponse:
    return ChatResponse(AiMessage(text), token_usage=TokenUsage(10, 5))


async def test_limits_count_a_model_that_is_used_directly() -> None:
    events = Events()
    model = ScriptedChatModel([with_usage("a"), with_usage("b"), with_usage("c")])
    container = Container(models={"default": model}).register(Prices).register_instance(events)
    async with container:
        injected: Any = container.get(ChatModel)
        with usage_limits(model_calls=2, cost=Decimal(1)):
            await injected.chat(HI)
            async for _ in injected.stream(HI):
                pass
            assert current_usage().tokens.total_tokens == 30
            assert current_usage().cost == Decimal("0.30")
            with pytest.raises(UsageLimitExceededError) as error:
                await injected.chat(HI)

    assert error.value.limit == "model_calls"
    assert error.value.transcript == tuple(HI.messages)
    assert len(model.requests) == 2
    assert len(events.of(UsageCountedEvent)) == 2


async def test_a_model_that_a_tool_uses_draws_on_the_limits_of_the_call() -> None:
    class Summaries:
        def __init__(self, small: Small) -> None:
            self.small = small

        @tool
        async def summary(self) -> str:
            """Summarize."""
            await self.small.chat(HI)
            await self.small.chat(HI)
            return "short"

    @register_ai_service(tools=Summaries, limits=UsageLimits(model_calls=2))
    class Reader(Protocol):
        async def read(self, text: str) -> str: ...

    events = Events()
    models: dict[str, ChatModel] = {"default": ScriptedChatModel([tool_call("summary"), "done"]), "small": says("s")}
    async with Container(models=models).register(Reader).register_instance(events) as container:
        with pytest.raises(UsageLimitExceededError):
            await (await container.aget(Reader)).read("Hi")

    services = [each.context.service for each in events.of(ModelRequestEvent)]
    assert services == [Reader, Reader]


async def test_time_limits_end_a_model_that_is_used_directly() -> None:
    class Slow(ChatModel):
        async def chat(self, request: ChatRequest) -> ChatResponse:
            await asyncio.Event().wait()
            raise AssertionError

    async with Container(models={"default": Slow()}) as container:
        with pytest.raises(InvocationTimeoutError, match=r"ChatModel\.chat"), time_limit(0.01):
            await container.get(ChatModel).chat(HI)


async def test_a_model_inside_another_model_is_one_request() -> None:
    class Loud(ChatModel):
        def __init__(self, small: Small) -> None:
            self.small = small

        async def chat(self, request: ChatRequest) -> ChatResponse:
            reply = await self.small.chat(request)
            return ChatResponse(type(reply.ai_message)((reply.ai_message.text or "").upper()))

    events = Events()
    container = Container(models={"small": says("hi")}).register(Loud, Desk).register_instance(events)
    async with container:
        with usage_limits(model_calls=5):
            assert await (await container.aget(Desk)).ask("Hi") == "HI"
            assert await answer(container.get(ChatModel)) == "HI"
            assert current_usage().model_calls == 2

    assert len(events.of(ModelRequestEvent)) == 2


async def test_functions_of_keys_get_beans_when_the_model_is_used_directly(serve: Serve) -> None:
    server = await serve(lambda _: completion({"content": "ok"}))

    def key(tenant: Inject[Tenant]) -> str:
        return f"key-{tenant.name}"

    container = Container(models={"default": OpenAiChatModel("m", server.url, api_key=key)}, seeds=[Tenant])
    async with container:
        for name in ("ada", "bob"):
            async with container.request_scope({Tenant: Tenant(name)}):
                await container.get(ChatModel).chat(HI)

    assert [each["authorization"] for each in server.headers] == ["Bearer key-ada", "Bearer key-bob"]


# --- tenants, and the connections of their models


@dataclass
class Customer:
    key: str
    url: str


@produces(scope="request")
def model_of_customer(customer: Customer) -> ChatModel:
    return OpenAiChatModel("m", customer.url, customer.key, max_retries=0)


async def test_the_keys_of_tenants_never_cross(serve: Serve) -> None:
    server = await serve(lambda body: completion({"content": body["messages"][-1]["content"]}))

    @register_ai_service
    class Echo(Protocol):
        async def ask(self, text: str) -> str: ...

    container = Container(seeds=[Customer]).register(model_of_customer, Echo)
    async with container:
        echo = await container.aget(Echo)

        async def call(number: int) -> None:
            name = f"tenant-{number % 7}"
            async with container.request_scope({Customer: Customer(f"sk-{name}-{number % 7:08}", server.url)}):
                if number % 2:
                    assert await echo.ask(f"{name}/{number}") == f"{name}/{number}"
                else:
                    request = ChatRequest([UserMessage(f"{name}/{number}")])
                    model = await container.aget(ChatModel)
                    assert (await model.chat(request)).ai_message.text == f"{name}/{number}"

        await asyncio.gather(*(call(number) for number in range(400)))

    assert len(server.requests) == 400
    for body, headers in zip(server.requests, server.headers, strict=True):
        tenant = body["messages"][-1]["content"].partition("/")[0]
        assert headers["authorization"].startswith(f"Bearer sk-{tenant}-")


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
async def test_models_of_one_address_share_connections_and_no_cookies(serve: Serve, transport: Any) -> None:
    replies = completion({"content": "ok"})
    server = await serve(lambda _: Scripted(replies.body, headers={"set-cookie": "session=of-ada; Path=/"}))
    url = server.url.replace("127.0.0.1", "localhost")

    @produces(scope="request")
    async def model(customer: Customer) -> AsyncIterator[ChatModel]:
        made = OpenAiChatModel("m", url, customer.key, transport=transport)
        yield made
        await made.aclose()

    async with Container(seeds=[Customer]).register(model, Desk) as container:
        desk = await container.aget(Desk)
        for number in range(5):
            async with container.request_scope({Customer: Customer(f"sk-{number:09}", url)}):
                assert await desk.ask("Hi") == "ok"

    assert server.connections == 1
    assert len({each["authorization"] for each in server.headers}) == 5
    assert not any("cookie" in each for each in server.headers)


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
async def test_one_model_for_all_tenants_keeps_no_cookies(serve: Serve, transport: Any) -> None:
    cookie = {"set-cookie": "session=of-ada; Path=/"}
    server = await serve(lambda body: Scripted(completion({"content": "ok"}).body, headers=cookie))
    url = server.url.replace("127.0.0.1", "localhost")

    def key(customer: Inject[Customer]) -> str:
        return customer.key

    model = OpenAiChatModel("m", url, key, transport=transport, extra_headers={"x-trace": "1"})
    async with Container(models={"default": model}, seeds=[Customer]).register(Desk) as container:
        desk = await container.aget(Desk)
        for number in range(3):
            async with container.request_scope({Customer: Customer(f"sk-{number:09}", url)}):
                assert await desk.ask("Hi") == "ok"
    await model.aclose()

    assert len({each["authorization"] for each in server.headers}) == 3
    assert not any("cookie" in each for each in server.headers)


@pytest.mark.parametrize("keys", ["texts", "functions"])
@pytest.mark.parametrize("kind", [OpenAiChatModel, AnthropicChatModel])
async def test_the_models_of_requests_are_limited_together_for_each_server_model_and_key(
    serve: Serve, kind: Any, keys: str
) -> None:
    gate = asyncio.Event()
    reply = completion({"content": "ok"}) if kind is OpenAiChatModel else messages_api.message(messages_api.text("ok"))
    reply.wait = gate
    server = await serve(lambda _: reply)

    @produces(scope="request")
    async def model(customer: Customer) -> AsyncIterator[ChatModel]:
        key: Any = customer.key if keys == "texts" else lambda: customer.key
        name = "small" if customer.key == "sk-third" else "m"
        made = kind(name, base_url=server.url, api_key=key, max_concurrent_requests=2)
        yield made
        await made.aclose()

    def sent() -> dict[tuple[str, str], int]:
        """Return how many requests came, by key and model."""
        found = [each.get("x-api-key") or each["authorization"].removeprefix("Bearer ") for each in server.headers]
        return Counter(zip(found, (each["model"] for each in server.requests), strict=True))

    async with Container(seeds=[Customer]).register(model, Desk) as container:
        desk = await container.aget(Desk)

        async def call(key: str) -> None:
            async with container.request_scope({Customer: Customer(key, server.url)}):
                assert await desk.ask("Hi") == "ok"

        calls = [asyncio.create_task(call(key)) for key in ("sk-first", "sk-second", "sk-third") * 4]
        await server.until(lambda: server.open == 6)
        assert sent() == {("sk-first", "m"): 2, ("sk-second", "m"): 2, ("sk-third", "small"): 2}
        gate.set()
        await asyncio.gather(*calls)

    assert (server.most_open, len(server.requests)) == (6, 12)


async def test_a_cookie_of_the_program_is_sent(serve: Serve) -> None:
    server = await serve([completion({"content": "ok"})])
    model = OpenAiChatModel("m", server.url, "k", extra_headers={"cookie": "session=mine"})

    await model.chat(ChatRequest([UserMessage("Hi")]))
    await model.aclose()

    assert server.headers[0]["cookie"] == "session=mine"


async def test_the_models_of_two_containers_share_no_connections(serve: Serve) -> None:
    server = await serve(lambda _: completion({"content": "ok"}))
    model = OpenAiChatModel("m", server.url)

    for _ in range(2):
        async with Container(models={"default": model}).register(Desk) as container:
            await (await container.aget(Desk)).ask("Hi")

    assert server.connections == 2


async def test_a_streamed_reply_uses_the_shared_connections(serve: Serve) -> None:
    server = await serve(lambda _: stream(chunk({"content": "Hello"}), chunk({}, finish="stop")))
    async with Container(seeds=[Customer]).register(model_of_customer) as container:
        for number in range(3):
            async with container.request_scope({Customer: Customer(f"sk-{number:09}", server.url)}):
                model: Any = await container.aget(ChatModel)
                assert [each.text async for each in model.stream(HI) if isinstance(each, PartialResponse)] == ["Hello"]

    assert server.connections == 1


async def test_models_of_ended_requests_are_garbage(serve: Serve) -> None:
    server = await serve(lambda _: completion({"content": "ok"}))
    made: list[weakref.ref[ChatModel]] = []

    @produces(scope="request")
    def model(customer: Customer) -> ChatModel:
        new = OpenAiChatModel("m", customer.url, customer.key)
        made.append(weakref.ref(new))
        return new

    async with Container(seeds=[Customer]).register(model, Desk) as container:
        desk = await container.aget(Desk)

        async def ask_as(customer: Customer) -> None:
            async with container.request_scope({Customer: customer}):
                await desk.ask("Hi")
                await (await container.aget(ChatModel)).chat(HI)

        for number in range(20):
            await ask_as(Customer(f"sk-{number:09}", server.url))
        gc.collect()

        # The event loop keeps the contexts of cancelled timers for a while.
        assert [each() for each in made] == [None] * 20
    assert server.connections == 1


async def test_failures_of_a_tenant_do_not_show_its_key(serve: Serve) -> None:
    server = await serve(lambda _: Scripted(b'{"error": {"message": "bad key sk-ada-secret-key"}}', status=401))
    container = Container(seeds=[Customer]).register(model_of_customer, Desk)
    customer = Customer("sk-ada-secret-key", server.url)
    async with container, container.request_scope({Customer: customer}):
        with pytest.raises(ModelError) as error:
            await (await container.aget(Desk)).ask("Hi")

    assert "sk-ada" not in f"{error.value!r}{error.value}"


def test_the_demo_model_is_a_source_when_a_program_registers_it() -> None:
    with Container().register(DemoChatModel) as container:
        assert isinstance(container.get(DemoChatModel), DemoChatModel)
        assert list(container.get(dict[str, ChatModel])) == ["default"]
