"""Calls of services: what is said to the model, what comes back, what runs in between."""

import asyncio
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    AiServiceTool,
    BlockingCallNotAllowedError,
    ChatRequest,
    ChatResponse,
    FinishReason,
    FrameworkError,
    IllegalConfigurationError,
    ImageContent,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    MemoryInUseError,
    Message,
    MessageWindow,
    OutputParsingError,
    Result,
    ReturnBehavior,
    SystemMessage,
    TextContent,
    TokenUsage,
    ToolAbort,
    ToolArgumentsError,
    ToolCallsLimitExceededError,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProviderRequest,
    ToolProviderResult,
    ToolRetry,
    ToolRoundsExceededError,
    ToolSpecification,
    UnknownToolError,
    UserMessage,
    create_ai_service,
    hide_details,
    invocation_attributes,
    invocation_record,
    return_to_model,
    system_message,
    time_limit,
    tool,
    toolbox,
    user_message,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


def calls(*requests: ToolExecutionRequest) -> AiMessage:
    return AiMessage(None, requests)


class Calculator:
    """Counts its calls."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    @tool("Adds")
    def add(self, a: int, b: int) -> int:
        self.threads.append(threading.current_thread())
        return a + b

    @tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiplies."""
        self.threads.append(threading.current_thread())
        return a * b

    @tool
    def fail(self, text: str = "") -> str:
        raise ValueError(text)


class Assistant(Protocol):
    async def chat(self, question: str) -> str: ...


class ResultAssistant(Protocol):
    async def chat(self, question: str) -> Result[str]: ...


def texts(request: ChatRequest) -> list[str]:
    return [f"{type(each).__name__}: {each.text}" for each in request.messages]


# --- messages


async def test_the_one_parameter_is_the_users_message() -> None:
    model = ScriptedChatModel(["Hello!"])

    assert await create_ai_service(Assistant, chat_model=model).chat("Hi {name}") == "Hello!"
    assert model.requests[0].messages == (UserMessage("Hi {name}"),)
    assert model.requests[0].tool_specifications == ()


class Translator(Protocol):
    @system_message("You translate into {language}.", "Be brief.")
    @user_message("Translate {{literally}}: {it_}")
    async def translate(self, it_: str, language: str = "French") -> str: ...

    @system_message("You translate into {language}.")
    async def plain(self, text: str, language: str) -> str: ...

    @user_message("Say {it}")
    async def say(self, session: MemoryId[str], what: str) -> str: ...


async def test_templates_take_parameters_and_defaults() -> None:
    model = ScriptedChatModel(["un", "deux", "trois"])
    service = create_ai_service(Translator, chat_model=model)
    await service.translate("{one}")
    await service.plain("two", language="German")
    await service.say("s", "hi")

    assert texts(model.requests[0]) == [
        "SystemMessage: You translate into French.\nBe brief.",
        "UserMessage: Translate {literally}: {one}",
    ]
    assert texts(model.requests[1]) == ["SystemMessage: You translate into German.", "UserMessage: two"]
    assert texts(model.requests[2]) == ["UserMessage: Say hi"]


async def test_a_message_may_stand_in_a_file_beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt.txt").write_text("Répondez en {language}.", encoding="utf-8")
    module = ModuleType("prompts")
    module.__file__ = str(tmp_path / "prompts.py")
    monkeypatch.setitem(sys.modules, "prompts", module)

    class FromFile(Protocol):
        __module__ = "prompts"

        @system_message(file="prompt.txt")
        async def ask(self, text: str, language: str) -> str: ...

    model = ScriptedChatModel(["oui"])
    await create_ai_service(FromFile, chat_model=model).ask("quoi", "français")

    assert model.requests[0].messages[0] == SystemMessage("Répondez en français.")


async def test_a_system_message_function_sees_the_context_sync_and_async() -> None:
    async def later(context: InvocationContext) -> str:
        return f"{context.method} {context.attributes['tenant']}"

    class Functions(Protocol):
        @system_message(lambda context: f"{context.method} {context.memory_id}")
        async def one(self, text: str) -> str: ...

        @system_message(later)
        async def two(self, text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    service = create_ai_service(Functions, chat_model=model)
    with invocation_attributes(tenant="acme"):
        await service.one("x")
        await service.two("x")

    assert [each.messages[0].text for each in model.requests] == ["one None", "two acme"]


async def test_a_system_message_on_the_class_is_for_all_methods_without_their_own() -> None:
    @system_message("Class.")
    class OnClass(Protocol):
        async def one(self, text: str) -> str: ...

        @system_message("Method.")
        async def two(self, text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    service = create_ai_service(OnClass, chat_model=model)
    await service.one("x")
    await service.two("x")

    assert [each.messages[0].text for each in model.requests] == ["Class.", "Method."]


async def test_history_is_put_before_and_images_are_appended() -> None:
    class Seeing(Protocol):
        async def look(
            self, text: str, history: list[Message], image: ImageContent, more: list[ImageContent] | None = None
        ) -> Result[str]: ...

    model = ScriptedChatModel(["a cat"])
    image = ImageContent(url="https://example.org/cat.png")
    before = [UserMessage("before"), AiMessage("yes")]
    result = await create_ai_service(Seeing, chat_model=model).look("what?", before, image)

    asked = UserMessage([TextContent("what?"), image])
    assert model.requests[0].messages == (*before, asked)
    assert result.messages == (asked, AiMessage("a cat"))


class Level(Enum):
    LOW = "low"


async def test_values_in_templates_are_text_or_compact_json() -> None:
    class Show(Protocol):
        @user_message("{level} {items}")
        async def show(self, level: Level, items: list[int]) -> str: ...

    model = ScriptedChatModel(["ok"])
    await create_ai_service(Show, chat_model=model).show(Level.LOW, [1, 2])

    assert model.requests[0].messages == (UserMessage("low [1,2]"),)


# --- what comes back


class City(BaseModel):
    name: str
    people: int = 0


async def test_every_kind_of_return() -> None:
    class Returns(Protocol):
        async def text(self, q: str) -> str: ...
        async def nothing(self, q: str) -> None: ...
        async def message(self, q: str) -> AiMessage: ...
        async def number(self, q: str) -> int: ...
        async def city(self, q: str) -> City: ...
        async def cities(self, q: str) -> Result[list[City]]: ...
        async def choice(self, q: str) -> Literal["a", "b"]: ...
        async def flag(self, q: str) -> bool: ...

    model = ScriptedChatModel(
        [AiMessage(""), "x", "m", "42", '{"name": "Bern"}', '{"value": [{"name": "Bern"}]}', '"a"', "true"]
    )
    service = create_ai_service(Returns, chat_model=model)

    assert await service.text("q") == ""
    assert await service.nothing("q") is None  # type: ignore[func-returns-value]  # that is the point
    assert await service.message("q") == AiMessage("m")
    assert await service.number("q") == 42
    assert await service.city("q") == City(name="Bern")
    assert (await service.cities("q")).content == [City(name="Bern")]
    assert await service.choice("q") == "a"
    assert await service.flag("q") is True


class Cities(Protocol):
    async def city(self, session: MemoryId[str], q: str) -> City: ...


async def test_a_reply_that_does_not_validate_goes_back_and_only_the_good_one_is_remembered() -> None:
    model = ScriptedChatModel(["Bern", '{"name": "Bern"}', '{"name": "Basel"}'])
    service = create_ai_service(Cities, chat_model=model)

    assert await service.city("s", "capital?") == City(name="Bern")
    await service.city("s", "other?")

    assert len(model.requests) == 3
    assert model.requests[1].messages[1] == AiMessage("Bern")
    assert [type(each) for each in model.requests[2].messages] == [UserMessage, AiMessage, UserMessage]
    assert model.requests[2].messages[:2] == (UserMessage("capital?"), AiMessage('{"name": "Bern"}'))


async def test_after_all_retries_the_error_has_the_reply_and_its_faults() -> None:
    model = ScriptedChatModel(["a", "b", '{"people": 1}'])

    with pytest.raises(OutputParsingError) as caught:
        await create_ai_service(Cities, chat_model=model, max_output_retries=2).city("s", "q")

    assert caught.value.text == '{"people": 1}'
    assert caught.value.problems[0][0] == "name"


async def test_the_three_output_modes() -> None:
    plain = ScriptedChatModel(['{"name": "Bern"}'])
    await create_ai_service(Cities, chat_model=plain).city("s", "q")
    assert plain.requests[0].response_format is None
    assert '"name"' in plain.requests[0].messages[-1].text

    able = ScriptedChatModel(['{"name": "Bern"}'], supports_response_format=True)
    await create_ai_service(Cities, chat_model=able).city("s", "q")
    assert able.requests[0].response_format is not None
    assert able.requests[0].response_format.name == "City"
    assert able.requests[0].messages == (UserMessage("q"),)

    tools = ScriptedChatModel([lambda request: calls(tool_call(request.tool_specifications[0].name, {"name": "Bern"}))])
    assert await create_ai_service(Cities, chat_model=tools, output_mode="tool").city("s", "q") == City(name="Bern")


# --- tools


async def test_tools_run_and_their_results_go_back_in_call_order() -> None:
    model = ScriptedChatModel(
        [
            ChatResponse(
                calls(tool_call("add", {"a": 1, "b": 2}, id="x"), tool_call("multiply", {"a": 3, "b": 4}, id="y")),
                TokenUsage(10, 1),
                FinishReason.TOOL_EXECUTION,
            ),
            ChatResponse(AiMessage("3 and 12"), TokenUsage(20, 2), FinishReason.STOP),
        ]
    )
    calculator = Calculator()
    result = await create_ai_service(ResultAssistant, chat_model=model, tools=[calculator]).chat("?")

    assert result.content == "3 and 12"
    assert result.finish_reason is FinishReason.STOP
    assert result.token_usage == TokenUsage(30, 3)
    assert [each.result for each in result.tool_executions] == ["3", "12"]
    assert [each.result_object for each in result.tool_executions] == [3, 12]
    assert [type(each).__name__ for each in result.messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
    ]
    assert [each.name for each in model.requests[0].tool_specifications] == ["add", "multiply", "fail"]
    assert model.requests[0].tool_specifications is model.requests[1].tool_specifications
    assert calculator.threads[0] is not threading.current_thread()
    assert calculator.threads[1] is threading.current_thread()


async def test_a_toolbox_replaces_the_class_tools() -> None:
    def subtract(a: int, b: int) -> int:
        return a - b

    class Boxed(Protocol):
        async def all(self, q: str) -> str: ...

        @toolbox(tool(subtract))
        async def one(self, q: str) -> str: ...

        @toolbox()
        async def none(self, q: str) -> str: ...

    model = ScriptedChatModel(["a", "b", "c"])
    service = create_ai_service(Boxed, chat_model=model, tools=[Calculator()])
    await service.all("q")
    await service.one("q")
    await service.none("q")

    assert [[each.name for each in request.tool_specifications] for request in model.requests] == [
        ["add", "multiply", "fail"],
        ["subtract"],
        [],
    ]


async def test_tools_by_hand_get_the_request_and_the_memory_id() -> None:
    seen: list[Any] = []

    def execute(request: ToolExecutionRequest, memory_id: object) -> str:
        seen.append((request.arguments, memory_id))
        return "raw"

    class Remembering(Protocol):
        async def chat(self, session: MemoryId[int], q: str) -> str: ...

    specification = ToolSpecification("by_hand", "x", {"type": "object", "properties": {"a": {"type": "integer"}}})
    model = ScriptedChatModel([calls(tool_call("by_hand", {"a": 1})), "ok"])
    await create_ai_service(Remembering, chat_model=model, tools={specification: execute}).chat(7, "q")

    assert seen == [('{"a":1}', 7)] or seen == [('{"a": 1}', 7)]
    assert model.requests[1].messages[-1].text == "raw"


async def test_providers_add_tools_per_call_sync_and_async() -> None:
    def echo(text: str) -> str:
        return text

    class Provider:
        async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult | None:
            if "echo" not in request.user_message.text:
                return None
            return ToolProviderResult([tool(echo)])

    def function(request: ToolProviderRequest) -> ToolProviderResult:
        specification = ToolSpecification(f"for_{request.context.method}")
        return ToolProviderResult({specification: lambda request, memory_id: "x"})

    model = ScriptedChatModel([calls(tool_call("echo", {"text": "hi"})), "ok", "no"])
    service = create_ai_service(Assistant, chat_model=model, tools=[Calculator()], tool_provider=[Provider(), function])
    await service.chat("echo!")
    await service.chat("nothing")

    names = [[each.name for each in request.tool_specifications] for request in model.requests]
    assert names[0] == names[1] == ["add", "multiply", "fail", "echo", "for_chat"]
    assert names[2] == ["add", "multiply", "fail", "for_chat"]


async def test_a_providers_clash_fails_the_call_before_anything_is_sent() -> None:
    model = ScriptedChatModel(["never"])

    def clashing(request: ToolProviderRequest) -> ToolProviderResult:
        return ToolProviderResult({ToolSpecification("add"): lambda request, memory_id: "x"})

    service = create_ai_service(Assistant, chat_model=model, tools=[Calculator()], tool_provider=clashing)
    with pytest.raises(IllegalConfigurationError, match="add"):
        await service.chat("q")
    assert model.requests == []


# --- errors


async def outcome(*replies: Any, tools: Any = None, **options: Any) -> tuple[str, list[Message]]:
    model = ScriptedChatModel([*replies, "ok"])
    service = create_ai_service(Assistant, chat_model=model, tools=tools or [Calculator()], **options)
    answer = await service.chat("q")
    return answer, list(model.requests[-1].messages)


async def test_a_tools_own_exception_goes_to_the_model_by_default() -> None:
    _, messages = await outcome(calls(tool_call("fail", {"text": "no luck"})))
    last = messages[-1]
    assert isinstance(last, ToolExecutionResultMessage)
    assert (last.text, last.is_error) == ("no luck", True)

    _, messages = await outcome(calls(tool_call("fail", {})))
    assert "ValueError" in messages[-1].text


async def test_unknown_tools_and_bad_arguments_are_raised_by_default() -> None:
    with pytest.raises(UnknownToolError) as unknown:
        await outcome(calls(tool_call("nope", {})))
    assert unknown.value.tool_names == ("add", "multiply", "fail")

    with pytest.raises(ToolArgumentsError) as bad:
        await outcome(calls(tool_call("add", {"a": "x"})))
    assert [path for path, _ in bad.value.problems] == ["a", "b"]


async def test_return_to_model_tells_the_model() -> None:
    options = {
        "on_unknown_tool": return_to_model,
        "on_tool_arguments_error": return_to_model,
        "on_tool_execution_error": hide_details,
    }
    _, messages = await outcome(calls(tool_call("nope", {})), **options)
    assert "multiply" in messages[-1].text
    _, messages = await outcome(calls(tool_call("add", {"a": "x"})), **options)
    assert "a" in messages[-1].text
    _, messages = await outcome(calls(tool_call("fail", {"text": "secret"})), **options)
    assert "secret" not in messages[-1].text


async def test_handlers_may_be_async_return_results_and_raise() -> None:
    async def gentle(error: Exception, context: InvocationContext) -> ToolExecutionResult:
        assert context.request is not None
        return ToolExecutionResult(f"{context.request.name}: {error}", is_error=False)

    _, messages = await outcome(calls(tool_call("fail", {"text": "x"})), on_tool_execution_error=gentle)
    last = messages[-1]
    assert isinstance(last, ToolExecutionResultMessage)
    assert (last.text, last.is_error) == ("fail: x", False)

    problem = RuntimeError("mine")

    def strict(error: Exception, context: InvocationContext) -> str:
        raise problem

    with pytest.raises(RuntimeError) as caught:
        await outcome(calls(tool_call("fail", {"text": "x"})), on_tool_execution_error=strict)
    assert caught.value is problem


async def test_retry_goes_to_the_model_and_abort_to_the_caller() -> None:
    abort = ToolAbort("stop", 3)

    def retry() -> None:
        raise ToolRetry("again, please")

    def give_up() -> None:
        raise abort

    tools = [tool(retry), tool(give_up)]
    _, messages = await outcome(calls(tool_call("retry", {})), tools=tools)
    last = messages[-1]
    assert isinstance(last, ToolExecutionResultMessage)
    assert (last.text, last.is_error) == ("again, please", True)

    with pytest.raises(ToolAbort) as caught:
        await outcome(calls(tool_call("give_up", {})), tools=tools)
    assert caught.value is abort


async def test_framework_errors_never_reach_a_handler_or_the_model() -> None:
    class Inner(Protocol):
        def ask(self, q: str) -> str: ...

    inner = create_ai_service(Inner, chat_model=ScriptedChatModel(["x"]))

    @tool
    async def wrong() -> str:
        return inner.ask("q")

    with pytest.raises(BlockingCallNotAllowedError):
        await outcome(calls(tool_call("wrong", {})), tools=[wrong], on_tool_execution_error=return_to_model)


async def test_limits_fail_with_the_transcript_and_none_of_the_tools_runs() -> None:
    calculator = Calculator()
    add = calls(tool_call("add", {"a": 1, "b": 1}))
    model = ScriptedChatModel([add, add, add])
    with pytest.raises(ToolRoundsExceededError) as caught:
        await create_ai_service(Assistant, chat_model=model, tools=[calculator], max_tool_rounds=2).chat("q")
    assert len(calculator.threads) == 2
    assert caught.value.transcript[0] == UserMessage("q")
    assert caught.value.transcript[-1] == add

    both = calls(tool_call("add", {"a": 1, "b": 1}, id="1"), tool_call("add", {"a": 1, "b": 1}, id="2"))
    with pytest.raises(ToolCallsLimitExceededError):
        await outcome(both, tools=[calculator], max_tool_calls_per_response=1)
    assert len(calculator.threads) == 2


async def test_a_record_keeps_what_failed() -> None:
    with invocation_record() as record, pytest.raises(UnknownToolError):
        await outcome(calls(tool_call("add", {"a": 1, "b": 1})), calls(tool_call("nope", {})))

    assert [each.result for each in record.tool_executions] == ["2"]
    assert record.messages[0] == UserMessage("q")


async def test_a_forced_tool_choice_is_relaxed_after_the_first_round() -> None:
    model = ScriptedChatModel([calls(tool_call("add", {"a": 1, "b": 1})), "ok"])
    options: dict[str, Any] = {"tool_choice": "required", "temperature": 0.5, "parameters": {"seed": 1}}
    await create_ai_service(Assistant, chat_model=model, tools=[Calculator()], **options).chat("q")

    assert [each.tool_choice for each in model.requests] == ["required", None]
    assert model.requests[0].parameters == {"seed": 1, "temperature": 0.5}


# --- immediate return


class Immediate:
    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now(self, value: int = 1) -> int:
        return value

    @tool
    def later(self) -> str:
        return "later"


async def test_an_immediate_tool_ends_the_call() -> None:
    model = ScriptedChatModel([calls(tool_call("now", {"value": 3}))])
    result = await create_ai_service(ResultAssistant, chat_model=model, tools=[Immediate()]).chat("q")

    assert result.content is None
    assert result.finish_reason is FinishReason.TOOL_EXECUTION
    assert result.tool_executions[-1].result_object == 3
    assert len(model.requests) == 1


async def test_together_with_another_tool_the_results_go_to_the_model() -> None:
    model = ScriptedChatModel([calls(tool_call("now", {}, id="1"), tool_call("later", {}, id="2")), "ok"])
    result = await create_ai_service(ResultAssistant, chat_model=model, tools=[Immediate()]).chat("q")

    assert result.content == "ok"


async def test_an_immediate_call_is_remembered_and_the_next_turn_works() -> None:
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], q: str) -> Result[str]: ...

    model = ScriptedChatModel([calls(tool_call("now", {})), "ok"])
    service = create_ai_service(Remembering, chat_model=model, tools=[Immediate()])
    await service.chat("s", "one")
    await service.chat("s", "two")

    assert [type(each) for each in model.requests[1].messages] == [
        UserMessage,
        AiMessage,
        ToolExecutionResultMessage,
        UserMessage,
    ]


async def test_an_immediate_tool_by_hand() -> None:
    by_hand = AiServiceTool(ToolSpecification("by_hand"), lambda request, memory_id: "42", ReturnBehavior.IMMEDIATE)
    model = ScriptedChatModel([calls(tool_call("by_hand", {}))])
    result = await create_ai_service(ResultAssistant, chat_model=model, tools=[by_hand]).chat("q")

    assert (result.content, result.tool_executions[-1].result) == (None, "42")


# --- memory


class Chat(Protocol):
    @system_message("You are {name}.")
    async def chat(self, session: MemoryId[str], question: str, name: str = "Bob") -> str: ...


async def test_a_conversation_is_kept_per_id_and_the_system_message_is_not() -> None:
    model = ScriptedChatModel(["a1", "b1", "a2"])
    service = create_ai_service(Chat, chat_model=model)
    await service.chat("a", "one")
    await service.chat("b", "uno")
    await service.chat("a", "two", name="Eve")

    assert texts(model.requests[2]) == [
        "SystemMessage: You are Eve.",
        "UserMessage: one",
        "AiMessage: a1",
        "UserMessage: two",
    ]
    assert len(model.requests[1].messages) == 2


async def test_a_call_that_fails_is_not_remembered() -> None:
    model = ScriptedChatModel(["a1", RuntimeError("down"), "a3"])
    service = create_ai_service(Chat, chat_model=model)
    await service.chat("a", "one")
    with pytest.raises(RuntimeError, match="down"):
        await service.chat("a", "two")
    await service.chat("a", "three")

    assert [each.text for each in model.requests[2].messages][1:] == ["one", "a1", "three"]


async def test_memory_may_be_limited_or_off() -> None:
    model = ScriptedChatModel(["a1", "a2", "a3"])
    service = create_ai_service(Chat, chat_model=model, chat_memory=MessageWindow(2))
    for question in ("one", "two", "three"):
        await service.chat("a", question)
    assert [each.text for each in model.requests[2].messages][1:] == ["two", "a2", "three"]

    model = ScriptedChatModel(["a1", "a2"])
    service = create_ai_service(Chat, chat_model=model, chat_memory=None)
    await service.chat("a", "one")
    await service.chat("a", "two")
    assert len(model.requests[1].messages) == 2


async def test_a_tool_that_calls_its_own_service_with_the_same_id_is_refused() -> None:
    services: list[Chat] = []

    @tool
    async def again() -> str:
        return await services[0].chat("a", "inner")

    model = ScriptedChatModel([calls(tool_call("again", {}))])
    services.append(create_ai_service(Chat, chat_model=model, tools=[again]))
    with pytest.raises(MemoryInUseError):
        await services[0].chat("a", "outer")


# --- services as tools


class Expert(Protocol):
    @tool("Answers questions about law")
    async def law(self, session: MemoryId[str], question: str) -> Result[str]: ...

    @tool("Answers questions about medicine")
    def medicine(self, question: str) -> str: ...


async def test_a_service_is_a_tool_of_another_without_memory() -> None:
    inner = ScriptedChatModel(["Sue!", "Rest!", "Sue again!"])
    expert = create_ai_service(Expert, chat_model=inner)
    outer = ScriptedChatModel(
        [calls(tool_call("law", {"question": "l"}, id="1"), tool_call("medicine", {"question": "m"}, id="2")), "done"]
    )
    seen: list[InvocationContext | None] = []
    router = create_ai_service(ResultAssistant, chat_model=outer, tools=[expert])
    result = await router.chat("q")

    assert [each.result for each in result.tool_executions] == ["Sue!", "Rest!"]
    assert "session" not in str(outer.requests[0].tool_specifications[0].parameters)
    assert await expert.law("s", "again") is not None
    assert len(inner.requests[2].messages) == 1
    assert seen == []


async def test_an_inner_services_errors_are_the_tools_failure() -> None:
    expert = create_ai_service(Expert, chat_model=ScriptedChatModel([RuntimeError("model down")]))
    outer = ScriptedChatModel([calls(tool_call("law", {"question": "l"})), "sorry"])

    assert await create_ai_service(Assistant, chat_model=outer, tools=[expert]).chat("q") == "sorry"
    assert outer.requests[1].messages[-1].text == "model down"


# --- context, limits, synchronous methods


async def test_the_context_is_seen_by_tools_on_every_thread() -> None:
    seen: list[InvocationContext] = []

    def look(context: InvocationContext) -> str:
        current = InvocationContext.current()
        assert current == context
        seen.append(context)
        return "ok"

    model = ScriptedChatModel([calls(tool_call("look", {}, id="7")), "ok"])
    service = create_ai_service(Chat, chat_model=model, tools=[tool(look)], timeout=60)
    with invocation_attributes(tenant="acme", user=1), invocation_attributes(user=2):
        await service.chat("a", "one")

    [context] = seen
    assert (context.service, context.method, context.memory_id) == (Chat, "chat", "a")
    assert context.user_message == UserMessage("one")
    assert dict(context.attributes) == {"tenant": "acme", "user": 2}
    assert context.request is not None
    assert context.request.id == "7"
    assert context.deadline is not None
    assert not context.cancelled
    assert InvocationContext.current() is None


async def test_a_time_limit_ends_the_outermost_invocation_and_cancels_the_inner() -> None:
    started, ended = asyncio.Event(), []

    @tool
    async def wait() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return ""

    class Waiting(Protocol):
        @tool
        async def inner(self, q: str) -> str: ...

    inner = create_ai_service(Waiting, chat_model=ScriptedChatModel([calls(tool_call("wait", {}))]), tools=[wait])
    outer_model = ScriptedChatModel([calls(tool_call("inner", {"q": "x"}))])
    outer = create_ai_service(Assistant, chat_model=outer_model, tools=[inner])
    with pytest.raises(InvocationTimeoutError) as caught, time_limit(0.05):
        await outer.chat("q")

    assert caught.value.service == "Assistant"
    assert isinstance(caught.value, TimeoutError)
    assert ended == ["cancelled"]


async def test_an_inner_services_own_timeout_is_its_tools_failure() -> None:
    @tool
    async def wait() -> str:
        await asyncio.Event().wait()
        return ""

    class Waiting(Protocol):
        @tool
        async def inner(self, q: str) -> str: ...

    model = ScriptedChatModel([calls(tool_call("wait", {}))])
    inner = create_ai_service(Waiting, chat_model=model, tools=[wait], timeout=0.02)
    outer = ScriptedChatModel([calls(tool_call("inner", {"q": "x"})), "gave up"])

    assert await create_ai_service(Assistant, chat_model=outer, tools=[inner]).chat("q") == "gave up"
    assert "0.02" in outer.requests[1].messages[-1].text


class Sync(Protocol):
    def chat(self, question: str) -> str: ...


def test_a_synchronous_method_runs_its_tools_on_the_callers_thread() -> None:
    calculator = Calculator()
    model = ScriptedChatModel(
        [calls(tool_call("add", {"a": 1, "b": 2}, id="1"), tool_call("multiply", {"a": 1, "b": 2}, id="2")), "ok"]
    )

    assert create_ai_service(Sync, chat_model=model, tools=[calculator]).chat("q") == "ok"
    assert calculator.threads[0] is threading.current_thread()
    assert calculator.threads[1] is not threading.current_thread()


async def test_a_synchronous_method_is_refused_on_a_loops_thread_before_anything_is_sent() -> None:
    model = ScriptedChatModel(["x"])
    with pytest.raises(BlockingCallNotAllowedError):
        create_ai_service(Sync, chat_model=model).chat("q")
    assert model.requests == []


async def test_an_abc_keeps_its_concrete_methods() -> None:
    class Polite(ABC):
        @abstractmethod
        async def chat(self, question: str) -> str: ...

        async def greet(self, name: str) -> str:
            return await self.chat(f"Greet {name}")

    model = ScriptedChatModel(["Hello Ann"])
    assert await create_ai_service(Polite, chat_model=model).greet("Ann") == "Hello Ann"
    assert model.requests[0].messages == (UserMessage("Greet Ann"),)


# --- concurrency


async def test_together_the_results_keep_the_order_of_the_calls() -> None:
    release = asyncio.Event()

    @tool
    async def slow() -> str:
        await release.wait()
        return "slow"

    @tool
    async def fast() -> str:
        release.set()
        return "fast"

    model = ScriptedChatModel([calls(tool_call("slow", {}, id="1"), tool_call("fast", {}, id="2")), "ok"])
    service = create_ai_service(ResultAssistant, chat_model=model, tools=[slow, fast], concurrent_tools=True)
    result = await service.chat("q")

    assert [each.result for each in result.tool_executions] == ["slow", "fast"]


async def test_together_an_abort_cancels_the_rest() -> None:
    ended: list[str] = []
    started = asyncio.Event()

    @tool
    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    @tool
    async def abort() -> None:
        await started.wait()
        raise ToolAbort("stop")

    model = ScriptedChatModel([calls(tool_call("wait", {}, id="1"), tool_call("abort", {}, id="2"))])
    with pytest.raises(ToolAbort):
        await create_ai_service(Assistant, chat_model=model, tools=[wait, abort], concurrent_tools=True).chat("q")

    assert ended == ["wait"]


# --- problems at start


def problems_of(service: Any, **options: Any) -> str:
    with pytest.raises(IllegalConfigurationError) as caught:
        create_ai_service(service, chat_model=ScriptedChatModel([]), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tool_rounds": -1}, "max_tool_rounds"),
        ({"max_tool_rounds": True}, "max_tool_rounds"),
        ({"max_tool_calls_per_response": -1}, "max_tool_calls_per_response"),
        ({"timeout": 0}, "timeout"),
        ({"output_mode": "yaml"}, "output_mode"),
        ({"tools": [Calculator(), Calculator()]}, "2 tools are called 'add'"),
        ({"tools": [object()]}, "tool"),
        ({"tools": [Calculator]}, "instance"),
        ({"tools": [Immediate()]}, "immediate"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], text: str) -> None:
    assert text in problems_of(Assistant, **options)


def service_with(method: Callable[..., Any]) -> Any:
    return type(Protocol)("Bad", (Protocol,), {"method": method, "__module__": __name__})


def unannotated(self, q: str): ...  # type: ignore[no-untyped-def]


async def left_over(self: Any, a: str, b: int) -> str: ...


async def nothing_to_say(self: Any) -> str: ...


@user_message("{nope}")
async def unknown_variable(self: Any, q: str) -> str: ...


@user_message("Hi {{q}}")
async def java_braces(self: Any, q: str) -> str: ...


@user_message("Hi {q.x}")
async def attribute(self: Any, q: str) -> str: ...


@system_message(file="nowhere.txt")
async def no_file(self: Any, q: str) -> str: ...


async def async_stream(self: Any, q: str) -> "asyncio.Queue[str]": ...


async def variadic(self: Any, *q: str) -> str: ...


async def two_ids(self: Any, a: MemoryId[str], b: MemoryId[str], q: str) -> str: ...


async def bad_name(self: Any, q: str) -> "Nowhere": ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (unannotated, "return annotation"),
        (left_over, "parameter b"),
        (nothing_to_say, "nothing to say"),
        (unknown_variable, "{nope}"),
        (java_braces, "one brace"),
        (attribute, "doubled"),
        (no_file, "nowhere.txt"),
        (variadic, "*q"),
        (two_ids, "MemoryId"),
        (bad_name, "Nowhere"),
    ],
)
def test_declarations_that_cannot_be(method: Callable[..., Any], text: str) -> None:
    message = problems_of(service_with(method))

    assert text in message
    assert "Bad.method" in message


def test_a_tool_that_needs_a_memory_id_is_a_problem_where_there_is_none() -> None:
    @tool
    def needs(session: MemoryId[str], q: str) -> str:
        return session + q

    @tool
    def may(session: MemoryId[str | None], q: str) -> str:
        return str(session) + q

    assert "memory id" in problems_of(Assistant, tools=[needs])
    create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tools=[may])


def test_all_problems_are_told_at_once() -> None:
    text = problems_of(service_with(left_over), tools=[Calculator(), Calculator()], max_tool_rounds=-1)

    assert "parameter b" in text
    assert "'add'" in text
    assert "max_tool_rounds" in text


def test_a_class_that_is_no_interface_is_refused() -> None:
    class Concrete:
        async def chat(self, q: str) -> str:
            return q

    assert "Protocol" in problems_of(Concrete)


def test_framework_errors_are_told_apart() -> None:
    assert issubclass(MemoryInUseError, FrameworkError)
    assert not issubclass(UnknownToolError, FrameworkError)


async def test_together_thousands_of_calls_cost_what_their_number_does() -> None:
    """With a cost that grows as the square, these would take minutes."""

    @tool
    async def note(n: int) -> int:
        await asyncio.sleep(0)
        return n

    calls = [tool_call("note", {"n": n}) for n in range(10_000)]
    model = ScriptedChatModel([AiMessage(tool_execution_requests=calls), "noted"])

    class Assistant(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    assistant = create_ai_service(Assistant, chat_model=model, tools=[note], concurrent_tools=True)
    async with asyncio.timeout(60):
        result = await assistant.chat("x")

    assert [execution.result for execution in result.tool_executions] == [str(n) for n in range(10_000)]
