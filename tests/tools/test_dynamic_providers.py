"""Dynamic tool providers: asked before each model request."""

from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    AiServiceTool,
    Container,
    IllegalConfigurationError,
    Message,
    Result,
    ReturnBehavior,
    TokenStream,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.search import KeywordToolSearch
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    def events(self, text: str) -> TokenStream: ...


def provided(*names: str) -> ToolProviderResult:
    return ToolProviderResult({ToolSpecification(name): lambda request, memory_id: request.name for name in names})


class Growing:
    """Provides the tools of the n-th list at the n-th request."""

    dynamic = True

    def __init__(self, *lists: tuple[str, ...]) -> None:
        self.lists = lists
        self.seen: list[ToolProviderRequest] = []

    def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult | None:
        self.seen.append(request)
        names = self.lists[min(len(self.seen), len(self.lists)) - 1]
        return provided(*names) if names else None


def assistant(provider: Any, *replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    return create_ai_service(Assistant, chat_model=model, tool_provider=provider, **options), model


def offered(model: ScriptedChatModel) -> list[list[str]]:
    return [[each.name for each in request.tool_specifications] for request in model.requests]


async def test_a_dynamic_provider_is_asked_before_each_request_and_a_static_one_once() -> None:
    asked: list[str] = []

    def static(request: ToolProviderRequest) -> ToolProviderResult:
        asked.append("static")
        return provided("fixed")

    growing = Growing(("first",))
    service, model = assistant([static, growing], tool_call("first"), "done")
    await service.ask("q")

    assert asked == ["static"]
    assert len(growing.seen) == 2
    assert offered(model) == [["fixed", "first"], ["fixed", "first"]]


async def test_tools_of_a_later_request_are_added_and_can_be_called() -> None:
    growing = Growing((), ("second",), ("third",))

    @tool
    def add(a: int) -> int:
        return a

    service, model = assistant(growing, tool_call("add", {"a": 1}), tool_call("second"), "done", tools=[add])
    result = await service.ask("q")
    assert offered(model) == [["add"], ["add", "second"], ["add", "second", "third"]]
    assert [each.result for each in result.tool_executions] == ["1", "second"]


async def test_tools_that_are_no_longer_provided_stay_until_the_call_ends() -> None:
    growing = Growing(("first",), ())
    service, model = assistant(growing, tool_call("first"), "done", "again")
    await service.ask("q")
    await service.ask("q")
    assert offered(model) == [["first"], ["first"], []]


async def test_names_that_are_known_are_skipped() -> None:
    @tool
    async def first() -> str:
        return "of the service"

    service, model = assistant([Growing(("first", "new")), Growing(("new",))], tool_call("first"), "x", tools=[first])
    result = await service.ask("q")
    assert offered(model) == [["first", "new"], ["first", "new"]]
    assert result.tool_executions[0].result == "of the service"


async def test_a_dynamic_provider_sees_the_conversation_so_far_and_the_first_user_message() -> None:
    growing = Growing(("first",))
    service, _ = assistant(growing, tool_call("first"), "done")
    await service.ask("q")

    kinds: list[list[type[Message]]] = [[type(each) for each in request.messages] for request in growing.seen]
    assert [[kind.__name__ for kind in each] for each in kinds] == [
        ["UserMessage"],
        ["UserMessage", "AiMessage", "ToolExecutionResultMessage"],
    ]
    assert [request.user_message for request in growing.seen] == [UserMessage("q")] * 2
    assert [request.tool_names for request in growing.seen] == [(), ("first",)]


async def test_streams_ask_dynamic_providers_too() -> None:
    growing = Growing(("first",), ("first", "second"))
    service, model = assistant(growing, tool_call("first"), "done")
    names = [type(each).__name__ async for each in service.events("q")]
    assert offered(model) == [["first"], ["first", "second"]]
    assert names[-1] == "CompleteResponse"


async def test_an_immediate_tool_of_a_dynamic_provider_ends_the_call() -> None:
    class Immediate:
        dynamic = True

        async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            return ToolProviderResult(
                [AiServiceTool(ToolSpecification("now"), lambda r, m: 7, ReturnBehavior.IMMEDIATE)]
            )

    service, model = assistant(Immediate(), tool_call("now"))
    result = await service.ask("q")
    assert result.tool_executions[0].result_object == 7
    assert len(model.requests) == 1


async def test_invalid_tools_of_a_dynamic_provider_end_the_call() -> None:
    class Wrong:
        dynamic = True

        def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
            return provided("not a name")

    service, model = assistant(Wrong(), "x")
    with pytest.raises(IllegalConfigurationError, match="invalid tool name"):
        await service.ask("q")
    assert model.requests == []


async def test_tools_of_a_dynamic_provider_are_searched() -> None:
    growing = Growing(("weather",), ("weather_map",))
    search = tool_call("tool_search_tool", {"terms": ["weather"]})
    service, model = assistant(growing, search, search, "done", tool_search=KeywordToolSearch())
    await service.ask("q")
    assert offered(model) == [
        ["tool_search_tool"],
        ["tool_search_tool", "weather"],
        ["tool_search_tool", "weather", "weather_map"],
    ]


async def test_a_dynamic_provider_can_be_a_bean_that_decides_when_it_is_created() -> None:
    class Provider(Growing):
        def __init__(self) -> None:
            super().__init__(("first",), ("second",))
            self.dynamic = True

    Provider.dynamic = False

    @register_ai_service(tool_provider=Provider)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("first")]), "done"])
    async with Container(models={"default": model}).register(Desk) as container:
        await container.get(Desk).ask("q")
    assert offered(model) == [["first"], ["first", "second"]]
