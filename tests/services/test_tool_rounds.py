"""The tool loop: rounds, order, concurrency, limits, immediate return, forced choices, parameters."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    AiServiceTool,
    ChatRequest,
    ChatResponse,
    Container,
    FinishReason,
    IllegalConfigurationError,
    MemoryId,
    Problem,
    Result,
    ReturnBehavior,
    SystemMessage,
    TokenStream,
    TokenUsage,
    ToolAbort,
    ToolboxSettings,
    ToolCallsLimitExceededError,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProviderResult,
    ToolRoundsExceededError,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    return_to_model,
    system_message,
    tool,
    tool_specifications_from,
    toolbox,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


class Tools:
    def __init__(self) -> None:
        self.ran: list[Any] = []

    @tool
    def sync(self, n: int = 0) -> int:
        self.ran.append(("sync", n))
        return n

    @tool
    async def later(self, n: int = 0) -> int:
        self.ran.append(("later", n))
        return n

    @tool
    def fail(self) -> str:
        self.ran.append("fail")
        raise ValueError("broken")

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now(self, n: int = 0) -> int:
        self.ran.append(("now", n))
        return n

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now_fails(self) -> str:
        raise ValueError("broken now")

    @tool(return_behavior=ReturnBehavior.IMMEDIATE)
    def now_nothing(self) -> None:
        self.ran.append("now_nothing")


def calls(*names: str) -> AiMessage:
    return AiMessage(
        None, [tool_call(name, {"n": number} if "fail" not in name else {}) for number, name in enumerate(names)]
    )


def assistant(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel, Tools]:
    model, tools = ScriptedChatModel(replies), Tools()
    return create_ai_service(Assistant, chat_model=model, tools=(tools,), **options), model, tools


def results(model: ScriptedChatModel, number: int = -1) -> list[str]:
    return [each.text for each in model.requests[number].messages if isinstance(each, ToolExecutionResultMessage)]


# --- rounds


async def test_tool_results_go_back_to_the_model() -> None:
    service, model, _ = assistant(calls("sync", "later"), calls("sync"), "done")
    result = await service.chat("x")

    assert [len(request.messages) for request in model.requests] == [1, 4, 6]
    kinds = [type(each).__name__ for each in model.requests[2].messages]
    assert kinds == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
    ]
    assert [each.request.name for each in result.tool_executions] == ["sync", "later", "sync"]
    assert all(request.tool_specifications is model.requests[0].tool_specifications for request in model.requests)


async def test_text_next_to_tool_calls_does_not_end_the_loop() -> None:
    request = tool_call("sync", {"n": 3})
    service, _, _ = assistant(AiMessage("Let me see.", [request]), "done")
    result = await service.chat("x")

    assert result.content == "done"
    assert result.messages[1] == AiMessage("Let me see.", [request])


async def test_results_are_sent_in_call_order() -> None:
    message = calls("later", "sync", "fail", "later")
    service, model, _ = assistant(message, "done")
    result = await service.chat("x")

    answers = [each for each in model.requests[1].messages if isinstance(each, ToolExecutionResultMessage)]
    assert [each.id for each in answers] == [each.id for each in message.tool_execution_requests]
    assert [each.tool_name for each in answers] == ["later", "sync", "fail", "later"]
    assert [each.text for each in answers] == ["0", "1", "broken", "3"]
    assert [each.is_error for each in answers] == [False, False, True, False]
    assert [each.is_error for each in result.tool_executions] == [False, False, True, False]


async def test_tools_run_one_after_another_by_default() -> None:
    service, _, tools = assistant(calls("later", "sync", "later"), "done")
    await service.chat("x")
    assert tools.ran == [("later", 0), ("sync", 1), ("later", 2)]


async def test_calls_without_an_id_or_with_the_same_id_all_run() -> None:
    requests = [ToolExecutionRequest("1", "sync", '{"n": 1}'), ToolExecutionRequest("1", "sync", '{"n": 2}')]
    for together in (False, True):
        service, model, _ = assistant(AiMessage(None, requests), "done", concurrent_tools=together)
        await service.chat("x")
        assert results(model) == ["1", "2"]


# --- concurrent tools


class Meeting:
    """Tools that end only if all of them run at the same time."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=60)
        self.met = asyncio.Event()
        self.waiting = 0
        self.parties = parties
        self.threads: list[threading.Thread] = []

    @tool
    def block(self, n: int) -> int:
        self.threads.append(threading.current_thread())
        self.barrier.wait()
        return n

    @tool
    async def wait(self, n: int) -> int:
        self.waiting += 1
        if self.waiting == self.parties:
            self.met.set()
        await asyncio.wait_for(self.met.wait(), 60)
        return n


@pytest.mark.parametrize("name", ["block", "wait"])
async def test_concurrent_tools_run_at_the_same_time_and_keep_the_order_of_results(name: str) -> None:
    meeting = Meeting(3)
    message = AiMessage(None, [tool_call(name, {"n": n}) for n in range(3)])
    model = ScriptedChatModel([message, "done"])
    service = create_ai_service(Assistant, chat_model=model, tools=(meeting,), concurrent_tools=True)
    result = await service.chat("x")

    assert results(model) == ["0", "1", "2"]
    assert [each.result_object for each in result.tool_executions] == [0, 1, 2]
    assert threading.current_thread() not in meeting.threads


async def test_concurrent_tools_can_run_on_a_given_executor() -> None:
    meeting = Meeting(2)
    message = AiMessage(None, [tool_call("block", {"n": n}) for n in range(2)])
    model = ScriptedChatModel([message, "done"])
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as executor:
        service = create_ai_service(Assistant, chat_model=model, tools=(meeting,), concurrent_tools=executor)
        await service.chat("x")
        assert set(meeting.threads) == set(executor._threads)


async def test_max_concurrent_tools_limits_concurrency() -> None:
    running: list[int] = [0]
    most: list[int] = [0]

    @tool
    async def count(n: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running[0] -= 1
        return n

    @register_ai_service(tools=(count,), concurrent_tools=True)
    class Together(Protocol):
        async def chat(self, text: str) -> str: ...

    message = AiMessage(None, [tool_call("count", {"n": n}) for n in range(7)])
    model = ScriptedChatModel([message, "done"])
    container = Container(models={"default": model}, settings=ToolboxSettings(max_concurrent_tools=2))
    async with container.register(Together):
        await container.get(Together).chat("x")
    assert most == [2]
    assert results(model) == [str(n) for n in range(7)]


async def test_errors_of_a_handler_cancel_the_other_concurrent_tools() -> None:
    cancelled = asyncio.Event()
    error = LookupError("handler")

    @tool
    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "never"

    @tool
    async def bad() -> str:
        await asyncio.sleep(0)
        raise ValueError

    def handler(failed: Exception, context: Any) -> str:
        raise error

    model = ScriptedChatModel([AiMessage(None, [tool_call("slow"), tool_call("bad")])])
    service = create_ai_service(
        Assistant, chat_model=model, tools=(slow, bad), concurrent_tools=True, on_tool_execution_error=handler
    )
    with pytest.raises(LookupError) as raised:
        await asyncio.wait_for(service.chat("x"), 60)
    assert raised.value is error
    assert cancelled.is_set()
    assert len(model.requests) == 1


def test_single_tool_calls_of_synchronous_methods_stay_on_the_callers_thread() -> None:
    threads: list[threading.Thread] = []

    @tool
    def where(n: int) -> int:
        threads.append(threading.current_thread())
        return n

    class Sync(Protocol):
        def chat(self, text: str) -> str: ...

    several = AiMessage(None, [tool_call("where", {"n": n}) for n in range(2)])
    model = ScriptedChatModel([tool_call("where", {"n": 0}), several, "done"])
    service = create_ai_service(Sync, chat_model=model, tools=(where,), concurrent_tools=True)
    assert service.chat("x") == "done"

    assert threads[0] is threading.current_thread()
    assert threading.current_thread() not in threads[1:]


# --- limits


async def test_an_answer_may_follow_the_last_allowed_round() -> None:
    service, _, tools = assistant(calls("sync"), calls("sync"), "done", max_tool_rounds=2)
    assert (await service.chat("x")).content == "done"
    assert len(tools.ran) == 2


async def test_exceeding_max_tool_rounds_raises_before_any_tool_runs() -> None:
    last = calls("sync", "later")
    service, model, tools = assistant(calls("sync"), calls("sync"), last, "never", max_tool_rounds=2)
    with pytest.raises(ToolRoundsExceededError) as raised:
        await service.chat("x")

    assert len(tools.ran) == 2
    assert len(model.requests) == 3
    assert "2" in str(raised.value)
    assert isinstance(raised.value.transcript, tuple)
    assert raised.value.transcript == (*model.requests[2].messages, last)


async def test_max_tool_rounds_can_be_zero() -> None:
    service, _, tools = assistant(calls("sync"), max_tool_rounds=0)
    with pytest.raises(ToolRoundsExceededError):
        await service.chat("x")
    assert tools.ran == []


async def test_default_max_tool_rounds_is_ten() -> None:
    service, _, tools = assistant(*[calls("sync")] * 10, "done")
    assert (await service.chat("x")).content == "done"
    service, _, tools = assistant(*[calls("sync")] * 11, "done")
    with pytest.raises(ToolRoundsExceededError):
        await service.chat("x")
    assert len(tools.ran) == 10


async def test_too_many_tool_calls_in_a_reply_raise_before_any_tool_runs() -> None:
    message = calls("sync", "sync", "sync")
    service, _, tools = assistant(calls("sync", "sync"), message, max_tool_calls_per_response=2)
    with pytest.raises(ToolCallsLimitExceededError) as raised:
        await service.chat("x")

    assert len(tools.ran) == 2
    assert raised.value.transcript[-1] == message
    assert raised.value.transcript[0] == UserMessage("x")
    assert "3" in str(raised.value)
    assert "2" in str(raised.value)


async def test_tool_calls_limit_applies_per_response() -> None:
    service, _, tools = assistant(calls("sync", "sync"), calls("sync", "sync"), "done", max_tool_calls_per_response=2)
    await service.chat("x")
    assert len(tools.ran) == 4


async def test_any_number_of_tool_calls_runs_without_a_limit() -> None:
    service, _, tools = assistant(calls(*["sync"] * 50), "done")
    await service.chat("x")
    assert len(tools.ran) == 50


async def test_limits_apply_to_streams_and_concurrent_tools() -> None:
    class Streaming(Protocol):
        def chat(self, text: str) -> TokenStream: ...

    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"max_tool_rounds": 1}, ToolRoundsExceededError),
        ({"max_tool_calls_per_response": 1}, ToolCallsLimitExceededError),
    ]
    for together in (False, True):
        for options, error in cases:
            tools = Tools()
            model = ScriptedChatModel([calls("sync"), calls("later", "sync"), "never"])
            service: Any = create_ai_service(
                Streaming, chat_model=model, tools=(tools,), concurrent_tools=together, **options
            )
            with pytest.raises(error):
                async for _ in service.chat("x"):
                    pass
            assert tools.ran == [("sync", 0)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tool_rounds": -1},
        {"max_tool_calls_per_response": -1},
        {"max_output_retries": -1},
        {"max_result_chars": -1},
        {"timeout": -1},
    ],
)
def test_negative_limits_are_a_problem(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(IllegalConfigurationError) as raised:
        assistant(**options)
    [problem] = raised.value.problems
    assert name in problem.what
    assert "-1" in problem.what
    assert problem.where == "Assistant"

    @register_ai_service(**options)
    class Marked(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Marked).check()
    assert name in problem.what


# --- forced choice and parameters


async def test_forced_tool_choice_is_relaxed_after_the_first_round() -> None:
    for choice in ("required", "sync"):
        service, model, _ = assistant(calls("sync"), calls("later"), "done", tool_choice=choice)
        await service.chat("x")
        assert model.requests[0].tool_choice == choice
        assert all(request.tool_choice in (None, "auto") for request in model.requests[1:])


async def test_tool_choices_auto_and_none_are_sent_in_every_round() -> None:
    for choice in ("auto", "none"):
        service, model, _ = assistant(calls("sync"), "done", tool_choice=choice)
        await service.chat("x")
        assert [request.tool_choice for request in model.requests] == [choice, choice]


def test_tool_choice_with_an_unknown_tool_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="nothing_like_it"):
        assistant(tool_choice="nothing_like_it")
    with pytest.raises(IllegalConfigurationError, match="invalid tool_choice='required': the method offers no tools"):
        create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tool_choice="required")


async def test_parameters_are_sent_with_their_wire_names() -> None:
    service, model, _ = assistant(
        calls("sync"), "done", temperature=0.5, parameters={"seed": 1, "reasoning_effort": "low"}
    )
    await service.chat("x")
    assert all(
        (request.parameters, request.temperature) == ({"seed": 1, "reasoning_effort": "low"}, 0.5)
        for request in model.requests
    )


async def test_temperature_zero_is_sent_and_none_is_not() -> None:
    service, model, _ = assistant("done", temperature=0)
    await service.chat("x")
    assert model.requests[0].temperature == 0
    service, model, _ = assistant("done")
    await service.chat("x")
    assert model.requests[0].temperature is None
    assert model.requests[0].parameters == {}
    assert model.requests[0].tool_choice is None


# --- immediate return


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (("now",), True),
        (("now", "now"), True),
        (("now", "now_nothing"), True),
        (("sync",), False),
        (("now", "sync"), False),
        (("sync", "now"), False),
        (("now_fails",), False),
        (("now", "now_fails"), False),
        (("now", "fail"), False),
        (("now", "unknown"), False),
    ],
)
@pytest.mark.parametrize("together", [False, True])
async def test_immediate_return_requires_that_every_tool_is_immediate_and_succeeds(
    names: tuple[str, ...], ends: bool, together: bool
) -> None:
    service, model, _ = assistant(calls(*names), "done", concurrent_tools=together, on_unknown_tool=return_to_model)
    result = await service.chat("x")

    assert len(result.tool_executions) == len(names)
    if ends:
        assert len(model.requests) == 1
        assert result.content is None
        assert result.finish_reason is FinishReason.TOOL_EXECUTION
        assert isinstance(result.messages[-1], ToolExecutionResultMessage)
    else:
        assert result.content == "done"
        assert results(model)[-1] is not None


async def test_the_value_of_an_immediate_tool_is_in_the_last_execution() -> None:
    service, _, _ = assistant(calls("sync"), calls("now", "now"))
    result = await service.chat("x")

    assert result.tool_executions[-1].result_object == 1
    assert result.tool_executions[-1].result == "1"
    assert [each.result_object for each in result.tool_executions] == [0, 0, 1]


async def test_immediate_tools_without_a_value_succeed() -> None:
    service, _, _ = assistant(calls("now_nothing"))
    result = await service.chat("x")
    assert result.tool_executions[-1].result == "Success"
    assert result.tool_executions[-1].result_object is None
    assert result.content is None


async def test_immediate_results_have_usage_and_messages() -> None:

    message = calls("now")
    service, _, _ = assistant(ChatResponse(message, TokenUsage(1, 2), FinishReason.TOOL_EXECUTION))
    result = await service.chat("x")
    assert result.token_usage == TokenUsage(1, 2)
    assert result.messages[:2] == (UserMessage("x"), message)
    assert len(result.messages) == 3


async def test_immediate_returns_are_remembered() -> None:
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([calls("now"), calls("now"), "answer"])
    service = create_ai_service(Remembering, chat_model=model, tools=(Tools(),))
    assert (await service.chat("room", "one")).content is None
    assert (await service.chat("room", "two")).content is None
    assert (await service.chat("room", "three")).content == "answer"
    assert [type(each).__name__ for each in model.requests[2].messages] == [
        *("UserMessage", "AiMessage", "ToolExecutionResultMessage") * 2,
        "UserMessage",
    ]


async def test_immediate_tools_work_with_every_allowed_return_type() -> None:
    class Allowed(Protocol):
        async def result(self, text: str) -> Result[str]: ...

        async def structured(self, text: str) -> Result[int]: ...

        async def none(self, text: str) -> None: ...

        def events(self, text: str) -> TokenStream: ...

    model = ScriptedChatModel([calls("now")] * 4)
    service = create_ai_service(Allowed, chat_model=model, tools=(Tools(),))
    assert (await service.result("x")).content is None
    assert (await service.structured("x")).content is None
    await service.none("x")
    events = [each async for each in service.events("x")]
    assert type(events[-1]).__name__ == "CompleteResponse"
    assert events[-1].response.ai_message.has_tool_execution_requests  # type: ignore[union-attr]
    assert len(model.requests) == 4


def test_immediate_tools_of_another_type_than_the_method_are_problems() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

        @toolbox()
        async def without(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=(Tools(),))
    assert raised.value.problems == (
        Problem(
            "Plain.chat",
            "the immediate tool 'now' returns int, which cannot be the method's str",
            "return Result[…], None or a stream, or let the result go to the model",
        ),
        Problem(
            "Plain.chat",
            "the immediate tool 'now_nothing' returns None, which cannot be the method's str",
            "return Result[…], None or a stream, or let the result go to the model",
        ),
    )


class Point(BaseModel):
    x: int


class Circle(Point):
    radius: int


IMMEDIATE = ReturnBehavior.IMMEDIATE
IF_LAST = ReturnBehavior.IMMEDIATE_IF_LAST


@pytest.mark.parametrize(
    ("declared", "wanted", "fits"),
    [
        (int, int, True),
        (int, float, True),
        (float, int, False),
        (bool, int, False),
        (int, str | int, True),
        (str | None, str, True),
        (None, str, False),
        (None, str | None, True),
        (Any, str, True),
        (object, int, True),
        (Circle, Point, True),
        (Point, Circle, True),
        (Point, str, False),
        (dict[str, int], Point, True),
        (list[int], list[str], True),
        (list[int], dict[str, int], False),
        (Literal["a"], str, True),
        (Literal["a"], Literal["b", 1], True),
        (Literal[1], str, False),
        (Annotated[int, "n"], int, True),
        (Result[int], int, True),
        (Result[int], str, False),
        (ToolExecutionResult, str, True),
    ],
)
async def test_the_declared_type_of_an_immediate_tool_must_fit_that_of_the_method(
    declared: Any, wanted: Any, fits: bool
) -> None:
    async def given() -> Any: ...

    class Plain(Protocol):
        async def chat(self, text: str) -> Any: ...

    given.__annotations__["return"] = declared
    Plain.chat.__annotations__["return"] = wanted
    tools = [tool(return_behavior=IMMEDIATE)(given)]
    if fits:
        create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=tools)
    else:
        with pytest.raises(IllegalConfigurationError, match="the immediate tool 'given' returns"):
            create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=tools)


@pytest.mark.parametrize(
    ("wanted", "values", "answer"),
    [
        (str, ["x"], "x"),
        (str, [3], "done"),
        (int, [3], 3),
        (int, [True], 3),
        (float, [1], 1.0),
        (str, ["x", "y"], "done"),
        (str, [None, "x", None], "x"),
        (str, [None], "done"),
        (str | None, [None], None),
        (Point, [Circle(x=1, radius=2)], Circle(x=1, radius=2)),
        (Point, ["x"], Point(x=9)),
        (AiMessage, [AiMessage("now")], AiMessage("now")),
    ],
)
async def test_one_immediate_value_of_the_methods_type_is_the_answer(
    wanted: Any, values: list[Any], answer: Any
) -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> Any: ...

    Plain.chat.__annotations__["return"] = wanted
    left = iter(values)
    fast = AiServiceTool(ToolSpecification("fast"), lambda r, m: next(left), IMMEDIATE)
    replies = {int: "3", Point: '{"x": 9}', float: "1.0"}
    model = ScriptedChatModel([AiMessage(None, [tool_call("fast")] * len(values)), replies.get(wanted, "done")])
    service: Any = create_ai_service(Plain, chat_model=model, tools=[fast])

    assert await service.chat("x") == answer
    assert len(model.requests) == (2 if answer in ("done", Point(x=9)) or values[0] is True else 1)


async def test_provided_immediate_tools_of_another_type_fail_the_call() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

    @tool(return_behavior=IMMEDIATE)
    async def fast() -> int:
        return 1

    model = ScriptedChatModel([])
    service = create_ai_service(Plain, chat_model=model, tool_provider=lambda request: ToolProviderResult([fast]))
    with pytest.raises(IllegalConfigurationError, match="fast"):
        await service.chat("x")
    assert model.requests == []


def behaving(letters: str, fails: int | None = None) -> list[AiServiceTool]:
    def executor(request: Any, memory_id: Any) -> str:
        if fails is not None and request.name == f"t{fails}":
            raise ValueError("broken")
        return request.name

    kinds = {"L": ReturnBehavior.TO_LLM, "I": IMMEDIATE, "Z": IF_LAST}
    return [
        AiServiceTool(ToolSpecification(f"t{number}"), executor, kinds[letter]) for number, letter in enumerate(letters)
    ]


class Streaming(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def events(self, text: str) -> TokenStream: ...

    async def plain(self, text: str) -> str: ...


ENDS = ("I", "II", "Z", "ZZ", "LZ", "IZ", "ZI", "LIZ", "ILZ")
GOES_ON = ("L", "LL", "LI", "IL", "ZL", "LZI", "IZL", "ZLI", "ZIL")


@pytest.mark.parametrize("letters", [*ENDS, *GOES_ON])
async def test_the_last_tool_decides_whether_a_round_ends_the_call(letters: str) -> None:
    def fresh() -> tuple[Streaming, ScriptedChatModel]:
        calls = AiMessage(None, [tool_call(f"t{number}") for number in range(len(letters))])
        model = ScriptedChatModel([calls, "done"])
        return create_ai_service(Streaming, chat_model=model, tools=behaving(letters)), model

    service, model = fresh()
    result = await service.chat("x")
    ends = letters in ENDS
    assert (result.content, len(model.requests)) == ((None, 1) if ends else ("done", 2))
    assert len(result.tool_executions) == len(letters)

    service, model = fresh()
    events = [each async for each in service.events("x")]
    names = [type(each).__name__ for each in events]
    assert len(model.requests) == (1 if ends else 2)
    assert names.count("IntermediateResponse") == (0 if ends else 1)
    assert names[-1] == "CompleteResponse"
    assert names.count("CompleteResponse") == 1


@pytest.mark.parametrize("letters", ENDS)
async def test_a_failed_tool_sends_all_results_of_the_round_to_the_model(letters: str) -> None:
    for fails in range(len(letters)):
        calls = AiMessage(None, [tool_call(f"t{number}") for number in range(len(letters))])
        model = ScriptedChatModel([calls, "done"])
        service = create_ai_service(Streaming, chat_model=model, tools=behaving(letters, fails))
        assert (await service.chat("x")).content == "done"


async def test_the_value_of_the_last_tool_is_the_answer_of_a_plain_method() -> None:
    calls = AiMessage(None, [tool_call("t0"), tool_call("t1")])
    service = create_ai_service(Streaming, chat_model=ScriptedChatModel([calls]), tools=behaving("LZ"))
    assert await service.plain("x") == "t1"


# --- requests


async def test_tool_specifications_are_sent_unchanged() -> None:
    service, model, tools = assistant("done")
    await service.chat("x")
    assert list(model.requests[0].tool_specifications) == tool_specifications_from(tools)


async def test_system_message_is_first_in_every_round() -> None:
    class Brief(Protocol):
        @system_message("Be brief.")
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([calls("sync"), calls("sync"), "done"])
    result = await create_ai_service(Brief, chat_model=model, tools=(Tools(),)).chat("x")
    assert all(request.messages[0] == SystemMessage("Be brief.") for request in model.requests)
    assert SystemMessage("Be brief.") not in result.messages


async def test_model_errors_reach_the_caller() -> None:
    error = ConnectionError("gone")

    def reply(request: ChatRequest) -> str:
        raise error

    service, _, _ = assistant(calls("sync"), reply)
    with pytest.raises(ConnectionError) as raised:
        await service.chat("x")
    assert raised.value is error


async def test_tool_abort_ends_the_call_immediately() -> None:
    class Enough(ToolAbort):
        pass

    error = Enough("no more", 3)

    @tool
    def stop() -> str:
        raise error

    tools = Tools()
    for together in (False, True):
        model = ScriptedChatModel([AiMessage(None, [tool_call("stop"), tool_call("sync")]), "never"])
        service = create_ai_service(
            Assistant,
            chat_model=model,
            tools=(stop, tools),
            concurrent_tools=together,
            on_tool_execution_error=return_to_model,
        )
        with pytest.raises(Enough) as raised:
            await service.chat("x")
        assert raised.value is error
        assert len(model.requests) == 1
    assert len(tools.ran) <= 1


async def test_thousands_of_concurrent_tool_calls_run_in_linear_time() -> None:
    """With quadratic cost, this would take minutes."""
    count = 5000

    @tool
    async def note(n: int) -> int:
        await asyncio.sleep(0)
        return n

    calls = [tool_call("note", {"n": n}) for n in range(count)]
    model = ScriptedChatModel([AiMessage(tool_execution_requests=calls), "noted"])

    class Assistant(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    assistant = create_ai_service(Assistant, chat_model=model, tools=[note], concurrent_tools=True)
    async with asyncio.timeout(15):
        result = await assistant.chat("x")

    assert [execution.result for execution in result.tool_executions] == [str(n) for n in range(count)]
