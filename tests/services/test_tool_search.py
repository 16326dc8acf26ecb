"""Tool search: which tools a request offers, and how the two strategies rank them."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    AiServiceTool,
    ChatRequestParameters,
    Container,
    IllegalConfigurationError,
    InvocationContext,
    MemoryId,
    Result,
    SearchBehavior,
    TokenStream,
    ToolArgumentsError,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolProviderRequest,
    ToolProviderResult,
    ToolSearchRequest,
    ToolSearchResult,
    ToolSearchStrategy,
    ToolSpecification,
    UnknownToolError,
    create_ai_service,
    dependent,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.events import EventListener, InvocationEvent, ToolExecutedEvent, ToolStartedEvent
from toolbox.search import Bm25ToolSearch, KeywordToolSearch
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Tools:
    @tool("Returns the weather forecast")
    def get_weather(self, city: str) -> str:
        return f"sunny in {city}"

    @tool("Returns the time in a city")
    def get_time(self, city: str) -> str:
        return "noon"

    @tool("Sends a letter")
    def send_letter(self, to: str) -> str:
        return "sent"


class Assistant(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> str: ...

    def events(self, text: str) -> TokenStream: ...

    def wait(self, text: str) -> str: ...

    async def with_options(self, text: str, options: ChatRequestParameters) -> str: ...

    async def number(self, text: str) -> int: ...


def find(*terms: str, name: str = "tool_search_tool") -> ToolExecutionRequest:
    return tool_call(name, {"terms": list(terms)})


def assistant(*replies: Any, tool_search: Any = None, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    options = {"tools": [Tools()], **options}
    strategy = KeywordToolSearch() if tool_search is None else tool_search
    return create_ai_service(Assistant, chat_model=model, tool_search=strategy, **options), model


def offered(model: ScriptedChatModel) -> list[list[str]]:
    return [[each.name for each in request.tool_specifications] for request in model.requests]


def results(model: ScriptedChatModel) -> list[ToolExecutionResultMessage]:
    return [each for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage)]


# --- what a request offers


async def test_the_first_request_offers_the_search_tool_only() -> None:
    service, model = assistant("hi")
    await service.ask("q")

    [[specification]] = [request.tool_specifications for request in model.requests]
    assert specification == ToolSpecification(
        "tool_search_tool",
        "Finds available tools whose name or description contains given search terms",
        {
            "type": "object",
            "properties": {
                "terms": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "A list of search terms used to find relevant tools",
                }
            },
            "required": ["terms"],
        },
    )
    assert specification.parameters["required"] == ["terms"]
    assert specification.parameters["properties"]["terms"]["items"] == {"type": "string"}


async def test_found_tools_are_visible_in_the_next_request_and_can_be_called() -> None:
    service, model = assistant(find("weather"), tool_call("get_weather", {"city": "Bonn"}), "sunny")
    result = await service.ask("q")

    both = ["tool_search_tool", "get_weather"]
    assert offered(model) == [["tool_search_tool"], both, both]
    [found, weather] = results(model)
    assert (found.text, found.attributes) == ("Tools found: get_weather", {"found_tools": ["get_weather"]})
    assert weather.text == "sunny in Bonn"
    assert [each.request.name for each in result.tool_executions] == ["tool_search_tool", "get_weather"]
    assert result.tool_executions[0].result_object == ToolSearchResult(["get_weather"])


async def test_found_tools_stay_visible_in_the_conversation_in_the_order_found() -> None:
    service, model = assistant(find("letter"), "one", find("weather"), "two", "three")
    for text in ("a", "b", "c"):
        await service.chat("room", text)

    assert offered(model) == [
        ["tool_search_tool"],
        ["tool_search_tool", "send_letter"],
        ["tool_search_tool", "send_letter"],
        ["tool_search_tool", "send_letter", "get_weather"],
        ["tool_search_tool", "send_letter", "get_weather"],
    ]


async def test_a_search_runs_over_the_tools_that_are_not_yet_visible() -> None:
    seen: list[list[str]] = []

    class Recording(KeywordToolSearch):
        def search(self, request: ToolSearchRequest) -> ToolSearchResult:
            seen.append([each.name for each in request.tools])
            return super().search(request)

    service, _ = assistant(find("weather"), "one", find("letter"), "two", tool_search=Recording())
    await service.chat("room", "a")
    await service.chat("room", "b")
    assert seen == [["get_weather", "get_time", "send_letter"], ["get_time", "send_letter"]]


async def test_without_memory_every_call_starts_with_the_search_tool() -> None:
    service, model = assistant(find("weather"), "one", "two")
    await service.ask("a")
    await service.ask("b")
    assert offered(model)[-1] == ["tool_search_tool"]


async def test_two_searches_in_one_reply_each_have_a_result_and_show_the_union() -> None:
    both = AiMessage(None, [find("city"), find("weather", "city")])
    service, model = assistant(both, "done")
    await service.ask("q")

    assert [each.attributes["found_tools"] for each in results(model)] == [["get_time"], ["get_weather", "get_time"]]
    assert offered(model)[-1] == ["tool_search_tool", "get_time", "get_weather"]


async def test_a_search_without_a_result_changes_nothing() -> None:
    service, model = assistant(find("nothing"), "done")
    await service.ask("q")
    [found] = results(model)
    assert (found.text, found.attributes, found.is_error) == ("Tools found: ", {"found_tools": []}, False)
    assert offered(model)[-1] == ["tool_search_tool"]


async def test_provided_tools_are_searched_like_others() -> None:
    def provide(request: ToolProviderRequest) -> ToolProviderResult:
        specification = ToolSpecification("book_hotel", "Books a hotel room")
        shown = ToolSpecification("help", "Helps", metadata={"searchBehavior": SearchBehavior.ALWAYS_VISIBLE})
        return ToolProviderResult({specification: lambda r, m: "booked", shown: lambda r, m: "help"})

    service, model = assistant(find("hotel"), tool_call("book_hotel"), "done", tool_provider=provide)
    await service.ask("q")
    assert offered(model)[0] == ["help", "tool_search_tool"]
    assert offered(model)[1] == ["help", "tool_search_tool", "book_hotel"]
    assert results(model)[-1].text == "booked"


async def test_a_search_and_a_visible_tool_in_one_reply_run_in_order() -> None:
    both = AiMessage(None, [find("time"), tool_call("get_weather", {"city": "Bonn"})])
    service, model = assistant(find("weather"), both, "done")
    await service.ask("q")
    assert [each.tool_name for each in results(model)] == ["tool_search_tool", "tool_search_tool", "get_weather"]
    assert offered(model)[-1] == ["tool_search_tool", "get_weather", "get_time"]


async def test_tools_that_are_always_visible_are_not_searched_and_appear_once() -> None:
    class Mixed:
        @tool(search_behavior=SearchBehavior.ALWAYS_VISIBLE)
        def weather_help(self) -> str:
            return "help"

        @tool
        def weather(self) -> str:
            return "sunny"

    executor = AiServiceTool(
        ToolSpecification("weather_map"), lambda r, m: "", search_behavior=SearchBehavior.ALWAYS_VISIBLE
    )
    service, model = assistant(find("weather"), "done", tools=[Mixed(), executor])
    await service.ask("q")
    assert offered(model) == [
        ["weather_help", "weather_map", "tool_search_tool"],
        ["weather_help", "weather_map", "tool_search_tool", "weather"],
    ]
    assert results(model)[0].attributes == {"found_tools": ["weather"]}


async def test_found_tools_that_no_longer_exist_or_are_now_always_visible_are_ignored() -> None:
    class Old:
        @tool
        def weather_old(self) -> str:
            return ""

        @tool
        def weather_shown(self) -> str:
            return ""

    class New:
        @tool(search_behavior=SearchBehavior.ALWAYS_VISIBLE)
        def weather_shown(self) -> str:
            return ""

    class Memory(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    @register_ai_service(tool_search=KeywordToolSearch(), tool_provider=lambda request: ToolProviderResult([given[0]]))
    class Desk(Memory, Protocol): ...

    given: list[Any] = [Old()]
    model = ScriptedChatModel([find("weather"), "one", "two"])
    async with Container(models={"default": model}).register(Desk) as container:
        await container.get(Desk).chat("room", "a")
        assert offered(model)[-1] == ["tool_search_tool", "weather_old", "weather_shown"]
        given[0] = New()
        await container.get(Desk).chat("room", "b")
        assert offered(model)[-1] == ["weather_shown", "tool_search_tool"]


async def test_results_of_other_tools_show_no_tools() -> None:
    @tool(search_behavior=SearchBehavior.ALWAYS_VISIBLE)
    def forge() -> Any:
        from toolbox import ToolExecutionResult

        return ToolExecutionResult("x", attributes={"found_tools": ["get_weather"]})

    service, model = assistant(tool_call("forge"), "done", tools=[Tools(), forge])
    await service.ask("q")
    assert offered(model)[-1] == ["forge", "tool_search_tool"]


async def test_streams_and_synchronous_methods_search_too() -> None:
    replies = (find("weather"), tool_call("get_weather", {"city": "Bonn"}), "sunny")
    service, model = assistant(*replies)
    names = [type(each).__name__ async for each in service.events("q")]
    assert names.count("ToolExecuted") == 2
    assert offered(model)[-1] == ["tool_search_tool", "get_weather"]

    service, model = assistant(*replies)
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(service.wait("q")))
    thread.start()
    thread.join(60)
    assert answers == ["sunny"]


async def test_the_tool_for_the_answer_stays_before_the_found_tools() -> None:
    service, model = assistant(find("weather"), tool_call("final_answer", {"value": 3}), output_mode="tool")
    assert await service.number("q") == 3
    assert offered(model) == [["final_answer", "tool_search_tool"], ["final_answer", "tool_search_tool", "get_weather"]]


async def test_a_tool_that_a_call_forces_is_visible() -> None:
    service, model = assistant(tool_call("get_time", {"city": "Bonn"}), "noon")
    await service.with_options("q", ChatRequestParameters(tool_choice="get_time"))
    assert offered(model)[0] == ["get_time", "tool_search_tool"]


async def test_listeners_see_the_search_like_any_tool() -> None:
    class Seen(EventListener):
        def __init__(self) -> None:
            self.names: list[tuple[str, str]] = []

        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, ToolStartedEvent):
                self.names.append(("started", event.request.name))
            elif isinstance(event, ToolExecutedEvent):
                self.names.append(("executed", event.execution.request.name))

    @register_ai_service(tools=Tools, tool_search=KeywordToolSearch())
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    models = {"default": ScriptedChatModel([find("weather"), "done"])}
    seen = Seen()
    container = Container(models=models).register(Desk).register_instance(seen)
    async with container:
        await container.get(Desk).ask("q")
    assert seen.names == [("started", "tool_search_tool"), ("executed", "tool_search_tool")]


# --- errors


async def test_a_call_of_a_tool_that_is_not_found_yet_names_the_search_tool() -> None:
    service, _ = assistant(tool_call("get_weather", {"city": "Bonn"}))
    with pytest.raises(UnknownToolError, match="more tools can be found with 'tool_search_tool'") as raised:
        await service.ask("q")
    assert raised.value.tool_names == ("tool_search_tool",)
    assert raised.value.search_tool == "tool_search_tool"

    service, model = assistant(tool_call("get_weather", {"city": "Bonn"}), "done", on_unknown_tool=return_to_model)
    await service.ask("q")
    [message] = results(model)
    assert message.is_error
    assert "Find more tools with 'tool_search_tool'." in message.text
    assert "get_time" not in message.text


async def test_a_tool_that_is_found_and_called_in_the_same_reply_is_unknown() -> None:
    both = AiMessage(None, [find("weather"), tool_call("get_weather", {"city": "Bonn"})])
    service, model = assistant(both, "done", on_unknown_tool=return_to_model)
    await service.ask("q")
    assert [each.is_error for each in results(model)] == [False, True]


@pytest.mark.parametrize("strategy", [KeywordToolSearch, Bm25ToolSearch])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [("{}", "terms: missing"), ('{"terms": "weather"}', "terms: must be a list"), ("nonsense", "not a JSON object")],
)
async def test_bad_arguments_of_a_search_are_an_error_result(
    strategy: type[ToolSearchStrategy], arguments: str, problem: str
) -> None:
    call = ToolExecutionRequest("1", "tool_search_tool", arguments)

    def never(error: Exception, context: InvocationContext) -> str:
        raise AssertionError

    handlers = {"on_tool_arguments_error": never, "on_tool_execution_error": never}
    service, model = assistant(call, "done", tool_search=strategy(), **handlers)
    await service.ask("q")
    [message] = results(model)
    assert message.is_error
    assert problem in message.text


async def test_a_strategy_that_fails_is_a_failed_tool() -> None:
    class Broken(ToolSearchStrategy):
        specification = ToolSpecification("look")

        async def search(self, request: ToolSearchRequest) -> ToolSearchResult:
            raise ConnectionError("index is down")

    service, model = assistant(tool_call("look"), "done", tool_search=Broken())
    await service.ask("q")
    assert [(each.text, each.is_error) for each in results(model)] == [("index is down", True)]


async def test_a_strategy_that_returns_something_else_ends_the_call() -> None:
    class Wrong(ToolSearchStrategy):
        specification = ToolSpecification("look")

        def search(self, request: ToolSearchRequest) -> Any:
            return ["get_weather"]

    service, _ = assistant(tool_call("look"), tool_search=Wrong())
    with pytest.raises(IllegalConfigurationError, match=r"Wrong\.search returned list; return a ToolSearchResult"):
        await service.ask("q")


async def test_a_search_tool_with_the_name_of_a_tool_is_refused_before_anything_is_sent() -> None:
    service, model = assistant(tool_search=KeywordToolSearch(tool_name="get_weather"))
    with pytest.raises(IllegalConfigurationError, match="the search tool has the same name as the tool Tools"):
        await service.ask("q")
    assert model.requests == []


def test_what_is_not_a_strategy_is_a_problem() -> None:
    class NoSpecification:
        def search(self, request: ToolSearchRequest) -> ToolSearchResult:
            return ToolSearchResult(())

    class Needs(KeywordToolSearch):
        def __init__(self, index: str) -> None:
            super().__init__()

    for wrong, what in (
        ("keyword", "it is not a ToolSearchStrategy"),
        (Tools, "invalid tool_search=Tools: it is not"),
        (NoSpecification(), "has no specification"),
        (Needs, "Needs needs arguments"),
    ):
        with pytest.raises(IllegalConfigurationError, match=what):
            assistant(tool_search=wrong)


# --- strategies as beans


class Index:
    topics: Sequence[str] = ("weather",)


class ByTopic(ToolSearchStrategy):
    made = 0

    def __init__(self, index: Index) -> None:
        ByTopic.made += 1
        self.index = index
        self.specification = ToolSpecification("search_tools", "Find tools.")

    async def search(self, request: ToolSearchRequest) -> ToolSearchResult:
        assert request.context is not None
        assert request.context.request is request.request
        names = [each.name for each in request.tools if any(topic in each.name for topic in self.index.topics)]
        return ToolSearchResult([*names, "no_such_tool"], text="Have a look.")


@register_ai_service(tools=Tools, tool_search=ByTopic)
class Desk(Protocol):
    async def ask(self, text: str) -> str: ...


async def test_a_strategy_class_is_one_bean_with_injected_parts() -> None:
    ByTopic.made = 0
    model = ScriptedChatModel([tool_call("search_tools"), "one", tool_call("search_tools"), "two"])
    async with Container(models={"default": model}).register(Desk, Index) as container:
        await container.get(Desk).ask("a")
        await container.get(Desk).ask("b")
    assert ByTopic.made == 1
    assert offered(model)[:2] == [["search_tools"], ["search_tools", "get_weather"]]
    assert results(model)[0].text == "Have a look."
    assert results(model)[0].attributes == {"found_tools": ["get_weather"]}


async def test_a_strategy_can_be_overridden_in_a_test() -> None:
    model = ScriptedChatModel([find("time"), "one"])
    container = Container(models={"default": model}).register(Desk, Index)
    async with container:
        with container.override(ByTopic, KeywordToolSearch()):
            await container.get(Desk).ask("a")
    assert offered(model)[-1] == ["tool_search_tool", "get_time"]


async def test_a_missing_part_of_a_strategy_is_a_problem_at_start() -> None:
    problems = Container(models={"default": ScriptedChatModel([])}).register(Desk).check()
    assert any("Index" in each.what and "ByTopic" in each.where for each in problems)


async def test_the_scope_of_a_marked_strategy_is_kept() -> None:
    made: list[object] = []

    @dependent
    class PerCall(KeywordToolSearch):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    @register_ai_service(tools=Tools, tool_search=PerCall)
    class Scoped(Protocol):
        async def ask(self, text: str) -> str: ...

    async with Container(models={"default": ScriptedChatModel(["a", "b"])}).register(Scoped) as container:
        await container.get(Scoped).ask("a")
        await container.get(Scoped).ask("b")
    assert len(made) == 2


async def test_a_strategy_that_no_service_names_changes_nothing() -> None:
    @register_ai_service(tools=Tools)
    class Plain(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel(["a"])
    async with Container(models={"default": model}).register(Plain, ByTopic, Index) as container:
        await container.get(Plain).ask("a")
    assert offered(model) == [["get_weather", "get_time", "send_letter"]]


async def test_synchronous_strategies_run_on_a_worker_thread() -> None:
    threads: list[threading.Thread] = []

    class Where(KeywordToolSearch):
        def search(self, request: ToolSearchRequest) -> ToolSearchResult:
            threads.append(threading.current_thread())
            return super().search(request)

    service, _ = assistant(find("weather"), "done", tool_search=Where)
    await service.ask("q")
    assert threads[0] is not threading.current_thread()


# --- keyword search


def specification(name: str, description: str | None = None) -> ToolSpecification:
    return ToolSpecification(name, description)


def searched(strategy: Any, tools: Sequence[ToolSpecification], *terms: str) -> list[str]:
    return list(strategy.search(ToolSearchRequest(find(*terms), tools)).tool_names)


@pytest.mark.parametrize(
    ("terms", "score"),
    [
        (["returns"], 1),
        (["get"], 2),
        (["weather"], 3),
        (["train"], 0),
        (["weather", "forecast"], 4),
        (["weather", "weather", "WEATHER"], 3),
        (["weather forecast"], 4),
        (["forecast weather returns"], 5),
        ([], 0),
    ],
)
def test_names_count_two_and_descriptions_one(terms: list[str], score: int) -> None:
    tool = specification("get_weather", "Returns weather forecast")
    assert KeywordToolSearch().score(tool, terms) == score


def test_a_tool_without_description_is_found_by_its_name() -> None:
    assert KeywordToolSearch().score(specification("GetWeather"), ["weather"]) == 2
    assert KeywordToolSearch().score(specification("WEATHER_I"), ["weather_i"]) == 2


def test_keyword_search_returns_the_best_tools_first() -> None:
    tools = [
        specification("time", "Returns weather"),
        specification("get_weather"),
        specification("list_weather", "Lists the weather"),
    ]
    assert searched(KeywordToolSearch(), tools, "weather") == ["list_weather", "get_weather", "time"]
    assert searched(KeywordToolSearch(max_results=1), tools, "weather") == ["list_weather"]
    assert searched(KeywordToolSearch(), tools, "train") == []


def test_common_words_do_not_count_next_to_others() -> None:
    tools = [specification("what_is_the", "the the"), specification("get_rain")]
    assert searched(KeywordToolSearch(), tools, "what is the rain") == ["get_rain"]
    assert searched(KeywordToolSearch(), tools, "the") == ["what_is_the"]


def test_among_equal_tools_rare_words_win() -> None:
    tools = [specification(f"list_{thing}s") for thing in ("issue", "file", "page")] + [specification("make_page")]
    assert searched(KeywordToolSearch(max_results=2), tools, "list", "make") == ["make_page", "list_issues"]


@pytest.mark.parametrize("strategy", [KeywordToolSearch, Bm25ToolSearch])
def test_a_limit_below_one_is_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match="invalid max_results=0; use 1 or more"):
        strategy(max_results=0)
    for wrong in ("8", 1.5, True):
        with pytest.raises(ValueError, match="use an integer of 1 or more"):
            strategy(max_results=wrong)
    with pytest.raises(ToolArgumentsError):
        strategy().search(ToolSearchRequest(tool_call("tool_search_tool", {}), ()))


# --- BM25


def test_bm25_ranks_names_descriptions_and_parameters() -> None:
    tools = [
        specification("create_issue", "Creates an issue in a repository"),
        specification("listPullRequests", "Lists pull requests"),
        ToolSpecification(
            "deploy", "Deploys", {"type": "object", "properties": {"region": {"description": "a data center"}}}
        ),
        *[specification(f"thing_{number}", "Does something in a repository") for number in range(20)],
    ]
    search = Bm25ToolSearch(max_results=3)
    assert searched(search, tools, "creating issues")[0] == "create_issue"
    assert searched(search, tools, "pull request")[0] == "listPullRequests"
    assert searched(search, tools, "data center") == ["deploy"]
    assert searched(search, tools, "zebra") == []
    assert len(searched(search, tools, "repository")) == 3
    assert searched(search, tools[1:], "creating issues") == []  # of the same index, but not offered
    assert searched(search, [], "issue") == []


def test_bm25_does_not_prefer_a_description_that_repeats_words() -> None:
    right = specification("send_letter", "Sends a letter to a person by post")
    stuffed = specification("evil", "letter letters send person post " * 60)
    late = specification("later", " ".join(f"w{number}" for number in range(200)) + " letter" * 200)
    others = [specification(f"thing_{number}", "Does something in a repository") for number in range(20)]
    search = Bm25ToolSearch(max_results=3)

    assert searched(search, [stuffed, late, *others, right], "send a letter to a person") == ["send_letter", "evil"]


def test_bm25_counts_the_words_of_a_parameters_description_once() -> None:
    right = specification("send_letter", "Sends a letter to a person by post")
    schema = {"type": "object", "properties": {"x": {"description": "letter letters send person " * 40}}}
    others = [specification(f"thing_{number}", "Does something in a repository") for number in range(20)]

    found = searched(Bm25ToolSearch(), [ToolSpecification("evil", "Help", schema), *others, right], "send a letter")
    assert found[0] == "send_letter"


async def test_bm25_search_finds_tools_for_a_service() -> None:
    service, model = assistant(find("forecast"), "done", tool_search=Bm25ToolSearch)
    await service.ask("q")
    assert offered(model)[-1] == ["tool_search_tool", "get_weather"]


def test_a_missing_package_is_named() -> None:
    program = """
import sys
sys.modules["bm25s"] = None
from toolbox.search import Bm25ToolSearch, KeywordToolSearch
KeywordToolSearch()
try:
    Bm25ToolSearch()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'Bm25ToolSearch needs the package bm25s: pip install "toolbox-di[search]"'


async def test_a_strategy_without_a_specification_has_the_usual_search_tool() -> None:
    class First(ToolSearchStrategy):
        def search(self, request: ToolSearchRequest) -> ToolSearchResult:
            return ToolSearchResult([request.tools[0].name])

    assert First.specification.name == "tool_search_tool"
    assert First.specification.parameters["required"] == ["terms"]
