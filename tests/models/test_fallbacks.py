"""Chains of models, the models that cool down, and the events of both."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Protocol

import pytest

from tests.listening import Events
from tests.models.scripted_server import Scripted, Serve, chunk, completion, stream
from toolbox import (
    ChatModel,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    InvocationTimeoutError,
    LoggingListener,
    ModelConnectionError,
    ModelFailedEvent,
    ModelHttpError,
    ModelRefusedError,
    ModelRequestEvent,
    ModelResponseEvent,
    ModelSkippedEvent,
    ModelTimeoutError,
    OpenAiChatModel,
    TokenUsage,
    UserMessage,
    produces,
    register_ai_service,
    time_limit,
)
from toolbox.limits import CostEstimator, usage_limits
from toolbox.models.fallbacks import CoolingModels
from toolbox.settings import ToolboxSettings
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
HTTP = ModelHttpError(503, "overloaded")


@register_ai_service
class Desk(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service
class Streaming(Protocol):
    def ask(self, text: str) -> AsyncIterator[str]: ...


class First(ScriptedChatModel):
    fallback = ("second", "third")
    cooldown = 0.0


def chain(*replies: Any) -> list[ScriptedChatModel]:
    return [First([replies[0]]), ScriptedChatModel([replies[1]]), ScriptedChatModel([replies[2]])]


def named(parts: list[ScriptedChatModel]) -> dict[str, ChatModel]:
    return dict(zip(("default", "second", "third"), parts, strict=True))


async def asked(models: dict[str, ChatModel]) -> ChatResponse:
    async with Container(models=models) as container:
        return await (await container.aget(ChatModel)).chat(HI)


@pytest.mark.parametrize(
    "error", [HTTP, ModelHttpError(401, "who?"), ModelConnectionError("gone"), ModelTimeoutError("slow")]
)
async def test_the_next_model_is_called_if_one_fails(error: Exception) -> None:
    parts = chain(error, HTTP, "third says hi")

    reply = await asked(named(parts))

    assert reply.ai_message.text == "third says hi"
    assert [len(each.requests) for each in parts] == [1, 1, 1]


async def test_the_error_of_the_last_model_is_raised() -> None:
    with pytest.raises(ModelConnectionError):
        await asked(named(chain(HTTP, HTTP, ModelConnectionError("gone"))))


@pytest.mark.parametrize("error", [ModelHttpError(400, "too long"), ModelRefusedError("No."), ValueError("bug")])
async def test_errors_of_the_request_do_not_fall_back(error: Exception) -> None:
    parts = chain(error, "second", "third")

    with pytest.raises(type(error)):
        await asked(named(parts))

    assert [len(each.requests) for each in parts] == [1, 0, 0]


async def test_a_stream_falls_back_before_its_first_event() -> None:
    async with Container(models=named(chain(HTTP, HTTP, "third says hi"))) as container:
        model: Any = await container.aget(ChatModel)
        *_, last = [event async for event in model.stream(HI)]

    assert isinstance(last, CompleteResponse)
    assert last.response.ai_message.text == "third says hi"


async def test_a_stream_does_not_fall_back_after_its_first_event(serve: Serve) -> None:
    server = await serve([stream(chunk({"content": "Hel"}), done=False, cut=True)])
    first = OpenAiChatModel("m", server.url, fallback=("second",), max_retries=0)
    second = ScriptedChatModel(["hello"])

    async with Container(models={"default": first, "second": second}) as container:
        model: Any = await container.aget(ChatModel)
        with pytest.raises(ModelConnectionError):
            async for _ in model.stream(HI):
                pass

    assert second.requests == []


async def test_a_named_model_falls_back_by_its_settings(serve: Serve) -> None:
    bad = await serve(lambda _: Scripted(b"{}", status=401))
    good = await serve([completion({"content": "ok"})])
    sections = {
        "default": {"model": "a", "base_url": bad.url, "fallback": "big-one"},
        "big_one": {"model": "b", "base_url": good.url},
    }
    async with Container(settings=ToolboxSettings.model_validate({"models": sections})) as container:
        reply = await (await container.aget(ChatModel)).chat(HI)

    assert reply.ai_message.text == "ok"


async def test_the_cost_of_a_reply_without_a_name_is_that_of_the_model_that_answered() -> None:
    asked_for: list[str] = []

    class Prices(CostEstimator):
        def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
            asked_for.append(model)
            return Decimal(1)

    class Large(First):
        model = "gpt-5"

    class Small(ScriptedChatModel):
        model = "gpt-5-mini"

    models = {"default": Large(["a", HTTP, HTTP]), "second": Small(["b", "c"]), "third": DemoChatModel()}
    async with Container(models=models).register(Prices) as container:
        injected = await container.aget(ChatModel)
        with usage_limits(cost=Decimal(100)):
            await injected.chat(HI)
            await injected.chat(HI)
            async for _ in injected.stream(HI):  # type: ignore[attr-defined]  # an injected model can always stream
                pass

    assert asked_for == ["gpt-5", "gpt-5-mini", "gpt-5-mini"]


async def test_a_service_sends_the_schema_only_if_all_models_of_the_chain_support_it() -> None:
    @register_ai_service
    class Sums(Protocol):
        async def add(self, text: str) -> int: ...

    first = First([HTTP], supports_response_format=True)
    second = ScriptedChatModel(['{"value": 3}'])
    models: dict[str, ChatModel] = {"default": first, "second": second, "third": DemoChatModel()}
    async with Container(models=models).register(Sums) as container:
        assert await (await container.aget(Sums)).add("one and two") == 3

    assert second.requests[0].response_format is None


async def test_an_unknown_fallback_of_a_produced_model_is_named_at_its_first_request() -> None:
    @produces(scope="request")
    def model() -> ChatModel:
        return First(["hi"])

    async with Container().register(model, Desk) as container, container.request_scope():
        with pytest.raises(IllegalConfigurationError, match="unknown model 'second'"):
            await (await container.aget(Desk)).ask("Hi")


# --- cooling down


class Flaky(ScriptedChatModel):
    """A model whose server is down until `works` is set."""

    fallback = ("local",)
    cooldown = 30.0

    def __init__(self, error: Exception = HTTP) -> None:
        super().__init__()
        self.works, self.error = False, error

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.will_reply("from the first" if self.works else self.error)
        return await super().chat(request)


class Local(ScriptedChatModel):
    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.will_reply("from the local")
        return await super().chat(request)


async def test_a_model_that_failed_is_skipped_by_the_whole_container() -> None:
    flaky, events = Flaky(), Events()
    container = Container(models={"default": flaky, "local": Local()}).register(Desk).register_instance(events)
    before = datetime.now(UTC)
    async with container:
        desk, model = await container.aget(Desk), await container.aget(ChatModel)
        assert await desk.ask("1") == "from the local"
        assert await desk.ask("2") == "from the local"
        assert (await model.chat(HI)).ai_message.text == "from the local"

    assert len(flaky.requests) == 1
    [first, second] = events.of(ModelSkippedEvent)
    assert (first.model, second.model) == ("default", "default")
    assert first.until - before >= timedelta(seconds=30)
    assert (first.context.service, first.context.method) == (Desk, "ask")
    assert (second.context.service, second.context.method) == (ChatModel, "chat")


@pytest.mark.parametrize("error", [HTTP, ModelConnectionError("gone"), ModelTimeoutError("slow")], ids=str)
async def test_failures_of_the_server_count(error: Exception) -> None:
    flaky = Flaky(error)
    async with Container(models={"default": flaky, "local": Local()}).register(Desk) as container:
        desk = await container.aget(Desk)
        await desk.ask("1")
        await desk.ask("2")

    assert len(flaky.requests) == 1


@pytest.mark.parametrize("error", [ModelHttpError(429, "slow down"), ModelHttpError(401, "who?")], ids=str)
async def test_a_server_that_refuses_has_not_failed(error: Exception) -> None:
    flaky = Flaky(error)
    async with Container(models={"default": flaky, "local": Local()}).register(Desk) as container:
        desk = await container.aget(Desk)
        await desk.ask("1")
        await desk.ask("2")

    assert len(flaky.requests) == 2


async def test_a_cooldown_of_zero_turns_it_off() -> None:
    flaky = Flaky()
    flaky.cooldown = 0  # type: ignore[misc]  # an attribute of the instance
    async with Container(models={"default": flaky, "local": Local()}).register(Desk) as container:
        desk = await container.aget(Desk)
        await desk.ask("1")
        await desk.ask("2")

    assert len(flaky.requests) == 2


class Slow(Flaky):
    """Answers when it is released."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        if not self.works:
            return await super().chat(request)
        self.asked.set()
        await self.released.wait()
        return await ScriptedChatModel(["from the first"]).chat(request)

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.released = asyncio.Event(), asyncio.Event()


async def test_after_the_cooldown_one_request_tries_the_model() -> None:
    slow = Slow()
    slow.cooldown = 0.05  # type: ignore[misc]
    async with Container(models={"default": slow, "local": Local()}).register(Desk) as container:
        desk = await container.aget(Desk)
        await desk.ask("1")
        await asyncio.sleep(0.06)
        slow.works = True
        trying = asyncio.create_task(desk.ask("2"))
        await slow.asked.wait()
        others = await asyncio.gather(*(desk.ask("meanwhile") for _ in range(5)))
        slow.released.set()
        tried = await trying
        after = await desk.ask("3")

    assert others == ["from the local"] * 5
    assert (tried, after) == ("from the first", "from the first")


async def test_a_try_that_is_cancelled_decides_nothing() -> None:
    slow = Slow()
    slow.cooldown = 0.05  # type: ignore[misc]
    async with Container(models={"default": slow, "local": Local()}).register(Desk) as container:
        desk = await container.aget(Desk)
        await desk.ask("1")
        await asyncio.sleep(0.06)
        slow.works = True
        with pytest.raises(InvocationTimeoutError), time_limit(0.02):
            await desk.ask("2")
        slow.released.set()

        assert await desk.ask("3") == "from the first"


async def test_if_all_models_cool_down_the_first_is_asked() -> None:
    class Broken(Local):
        async def chat(self, request: ChatRequest) -> ChatResponse:
            self.requests.append(request)
            raise HTTP

    flaky, local = Flaky(), Broken()
    async with Container(models={"default": flaky, "local": local}).register(Desk) as container:
        desk = await container.aget(Desk)
        for _ in range(3):
            with pytest.raises(ModelHttpError):
                await desk.ask("Hi")

    assert (len(flaky.requests), len(local.requests)) == (3, 1)


async def test_a_model_that_failed_without_a_chain_is_skipped_in_chains() -> None:
    @register_ai_service(model="local")
    class Small(Protocol):
        async def ask(self, text: str) -> str: ...

    class Broken(ScriptedChatModel):
        async def chat(self, request: ChatRequest) -> ChatResponse:
            self.requests.append(request)
            raise HTTP

    flaky, local = Flaky(), Broken()
    async with Container(models={"default": flaky, "local": local}).register(Desk, Small) as container:
        with pytest.raises(ModelHttpError):
            await (await container.aget(Small)).ask("Hi")
        with pytest.raises(ModelHttpError):
            await (await container.aget(Desk)).ask("Hi")

    assert len(local.requests) == 1


async def test_models_of_different_servers_with_one_name_cool_down_apart(serve: Serve) -> None:
    broken = await serve(lambda _: Scripted(b"{}", status=500))
    sound = await serve(lambda _: completion({"content": "sound"}))

    class Tenant:
        def __init__(self, url: str) -> None:
            self.url = url

    @produces(scope="request")
    def model(tenant: Tenant) -> ChatModel:
        return OpenAiChatModel("m", tenant.url, fallback=("local",), max_retries=0)

    container = Container(models={"local": Local()}, seeds=[Tenant]).register(model, Desk)
    async with container:
        desk = await container.aget(Desk)
        async with container.request_scope({Tenant: Tenant(broken.url)}):
            assert await desk.ask("1") == "from the local"
            assert await desk.ask("2") == "from the local"
        async with container.request_scope({Tenant: Tenant(sound.url)}):
            assert await desk.ask("3") == "sound"

    assert len(broken.requests) == 1


# --- what listeners see of a chain


class Named(ScriptedChatModel):
    """A model with a name, as a server has it."""

    def __init__(self, name: str, *replies: Any, fallback: tuple[str, ...] = ()) -> None:
        super().__init__(replies)
        self.model, self.fallback = name, fallback


@pytest.mark.parametrize("how", ["call", "stream", "direct", "direct stream"])
async def test_each_model_that_is_asked_has_its_own_events(how: str, caplog: pytest.LogCaptureFixture) -> None:
    big, small = Named("big", HTTP, fallback=("small",)), Named("small", "ok", "ok")
    container = Container(models={"default": big, "small": small}).register(Desk, Streaming, LoggingListener)
    events = Events()

    async def ask() -> None:
        model: Any = await container.aget(ChatModel)
        match how:
            case "call":
                assert await (await container.aget(Desk)).ask("Hi") == "ok"
            case "stream":
                assert [each async for each in (await container.aget(Streaming)).ask("Hi")] == ["ok"]
            case "direct":
                assert (await model.chat(HI)).model == "small"
            case _:
                assert [each async for each in model.stream(HI)][-1].response.model == "small"

    with caplog.at_level("INFO", "toolbox.invocations"):
        async with container.register_instance(events):
            await ask()
            await ask()  # the first model cools down

    seen = events.of(ModelRequestEvent, ModelFailedEvent, ModelSkippedEvent, ModelResponseEvent)
    assert [type(each).__name__ for each in seen] == [
        *("ModelRequestEvent", "ModelFailedEvent", "ModelRequestEvent", "ModelResponseEvent"),
        *("ModelSkippedEvent", "ModelRequestEvent", "ModelResponseEvent"),
    ]
    asked = events.of(ModelRequestEvent)
    assert [each.model_name for each in asked] == ["big", "small", "small"]
    assert [each.model for each in asked] == [big, small, small]
    assert seen[1].request is asked[0].request
    assert seen[3].request is asked[1].request
    assert {id(each.request) for each in asked} == {id(seen[at].request) for at in (0, 2, 5)}
    assert [each.response.model for each in events.of(ModelResponseEvent)] == ["small", "small"]
    assert "model=big" in caplog.text
    assert "FallbackModel" not in caplog.text


# --- models of tenants, whose objects differ


@dataclass
class Patience:
    """What a tenant wants of its model."""

    timeout: float = 60.0
    cooldown: float = 30.0


def desk_of_tenants(url: str) -> Container:
    @produces(scope="request")
    async def model(tenant: Patience) -> AsyncIterator[ChatModel]:
        options: Any = {"timeout": tenant.timeout, "cooldown": tenant.cooldown, "max_retries": 0}
        made = OpenAiChatModel("m", url, fallback=("local",), **options)
        yield made
        await made.aclose()

    return Container(models={"local": Local()}, seeds=[Patience]).register(model, Desk)


async def ask_as(container: Container, tenant: Patience) -> str:
    async with container.request_scope({Patience: tenant}):
        return await (await container.aget(Desk)).ask("Hi")


async def test_a_timeout_counts_only_for_models_that_wait_no_longer(serve: Serve, loaded: None) -> None:
    released = asyncio.Event()
    slow = completion({"content": "sound"})
    slow.wait = released
    server = await serve(lambda _: slow)
    hasty, patient, hastier = Patience(1.0), Patience(60.0), Patience(0.5)
    async with desk_of_tenants(server.url) as container:
        assert await ask_as(container, hasty) == "from the local"
        assert await ask_as(container, hasty) == "from the local"
        assert await ask_as(container, hastier) == "from the local"
        assert len(server.requests) == 1
        released.set()
        assert await ask_as(container, patient) == "sound"
        # An answer for which the others would not have waited does not make their model faster.
        assert await ask_as(container, hasty) == "from the local"

    assert len(server.requests) == 2


async def test_a_failure_of_the_server_stays_when_an_impatient_model_times_out_after_it(
    serve: Serve, loaded: None
) -> None:
    never = completion({"content": "late"})
    never.wait = asyncio.Event()
    replies = iter([Scripted(b"{}", status=500), never])
    server = await serve(lambda _: next(replies))
    async with desk_of_tenants(server.url) as container:
        assert await ask_as(container, Patience()) == "from the local"
        assert await ask_as(container, Patience(timeout=1.0, cooldown=0)) == "from the local"
        assert await ask_as(container, Patience()) == "from the local"

    never.wait.set()
    assert len(server.requests) == 2


async def test_each_model_has_its_own_cooldown_after_the_failure_of_another(serve: Serve, clock: Any) -> None:
    server = await serve(lambda _: Scripted(b"{}", status=500))
    async with desk_of_tenants(server.url) as container:
        await ask_as(container, Patience(cooldown=0))  # remembered, also by a model that is never skipped
        for cooldown, requests in ((100, 1), (10, 1), (0, 2)):
            await ask_as(container, Patience(cooldown=cooldown))
            assert len(server.requests) == requests
        clock.advance(50)
        for cooldown, requests in ((100, 2), (10, 3)):
            await ask_as(container, Patience(cooldown=cooldown))
            assert len(server.requests) == requests


async def test_models_of_a_class_of_the_program_cool_down_one_by_one() -> None:
    made: list[Flaky] = []

    @produces(scope="request")
    def model() -> ChatModel:
        made.append(Flaky())
        return made[-1]

    async with Container(models={"local": Local()}).register(model, Desk) as container:
        for _ in range(2):
            async with container.request_scope():
                desk = await container.aget(Desk)
                for _ in range(2):
                    assert await desk.ask("Hi") == "from the local"

    assert [len(each.requests) for each in made] == [1, 1]


def test_the_failures_of_a_model_of_the_program_are_forgotten_with_it() -> None:
    cooling = CoolingModels()
    for _ in range(100):
        model = Flaky()
        assert cooling.skipped_until("default", model) is None
        cooling.note_error("default", model, HTTP)
        assert cooling.skipped_until("default", model) is not None
        del model


@pytest.mark.parametrize("cooldown", [1e12, float("inf")])
async def test_a_model_is_skipped_for_a_year_at_most(cooldown: float) -> None:
    flaky, events = Flaky(), Events()
    flaky.cooldown = cooldown  # type: ignore[misc]  # an attribute of the instance
    container = Container(models={"default": flaky, "local": Local()}).register(Desk).register_instance(events)
    async with container:
        desk = await container.aget(Desk)
        assert [await desk.ask("1"), await desk.ask("2")] == ["from the local"] * 2

    [skipped] = events.of(ModelSkippedEvent)
    assert timedelta(days=364) < skipped.until - datetime.now(UTC) < timedelta(days=366)


def test_a_cooldown_of_any_length_is_accepted() -> None:
    assert OpenAiChatModel("m", "http://127.0.0.1:9/v1", cooldown=1e12).cooldown == 1e12


async def test_a_stream_counts_until_its_first_event(serve: Serve) -> None:
    pieces = stream(chunk({"content": "Hel"}), done=False, cut=True)
    server = await serve(lambda _: pieces)
    first = OpenAiChatModel("m", server.url, fallback=("local",), max_retries=0)

    async with Container(models={"default": first, "local": Local()}) as container:
        model: Any = await container.aget(ChatModel)
        for _ in range(2):
            with pytest.raises(ModelConnectionError):
                async for _ in model.stream(HI):
                    pass

    assert len(server.requests) == 2


def test_a_cooldown_can_be_set_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__BIG__MODEL", "m")
    monkeypatch.setenv("TOOLBOX_MODELS__BIG__COOLDOWN", "5")
    monkeypatch.setenv("TOOLBOX_MODELS__BIG__BASE_URL", "http://127.0.0.1:9/v1")
    container = Container()
    container.register(Desk).register_instance(ScriptedChatModel(), as_type=ChatModel)

    with container:
        model: Any = container.get(ChatModel, "big")
        assert (model.cooldown, model.model) == (5.0, "m")


def test_an_invalid_cooldown_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="invalid cooldown=-1"):
        OpenAiChatModel("m", "http://127.0.0.1:9/v1", cooldown=-1)


def test_a_model_of_the_program_may_have_no_fallback() -> None:
    class Own(ScriptedChatModel):
        fallback: Any = None

    model = Own(["hello"])
    assert Container(models={"default": model}).register(Desk).check() == []

    model.fallback = 5
    with pytest.raises(TypeError, match=r"Own\.fallback: expected a tuple of names of models, got 5"):
        Container(models={"default": model}).register(Desk).check()
