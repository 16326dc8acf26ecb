"""Output mode `tool`: calls beside the answer tool run first, then the first answer call counts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest

from tests.runs.replies import asks
from tests.services.bank import CREDIT, WITHDRAW, Assistant, Bank, rolled_back
from toolbox import (
    AiMessage,
    Container,
    FinishReason,
    MemoryId,
    Message,
    MessageWindow,
    OutputParsingError,
    Result,
    ReturnBehavior,
    TokenUsage,
    ToolAbort,
    ToolExecutionResultMessage,
    ToolRetry,
    UnknownToolError,
    UserMessage,
    create_ai_service,
    register_ai_service,
    return_to_model,
    tool,
)
from toolbox.errors import (
    ToolArgumentsError,
    ToolCallsLimitExceededError,
    ToolRoundsExceededError,
)
from toolbox.guardrails import GuardrailResult, OutputGuardrail, OutputGuardrailRequest, output_guardrails
from toolbox.limits import UsageLimitExceededError, UsageLimits
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG as ran

pytestmark = pytest.mark.anyio

NOT_VALID = "Your answer is not valid"


@tool
async def save(text: str) -> str:
    ran.append(text)
    return f"saved {text}"


@tool
def fails() -> str:
    raise ValueError("no disk")


@tool
def again() -> str:
    raise ToolRetry("try again")


@tool
def abort() -> str:
    raise ToolAbort("stop")


@tool(return_behavior=ReturnBehavior.IMMEDIATE_IF_LAST)
def show() -> int:
    ran.append("show")
    return 3


class Counting(Protocol):
    async def count(self, text: str) -> Result[int]: ...

    async def plain(self, text: str) -> int: ...

    async def chat(self, room: MemoryId[str], text: str) -> int: ...


TOOLS = [save, fails, again, abort, show]
SAVE = tool_call("save", {"text": "a"}, id="s1")


def answer(value: Any, **more: Any) -> Any:
    return tool_call("final_answer", {"value": value}, **more)


def service(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    options = {"tools": TOOLS, "output_mode": "tool", **options}
    return create_ai_service(Counting, chat_model=model, **options), model


def told(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the results that a model reads, by the id of their call."""
    return [
        (each.id, each.text.partition("\n")[0]) for each in messages if isinstance(each, ToolExecutionResultMessage)
    ]


async def test_calls_beside_the_answer_run_and_the_answer_ends_the_call() -> None:
    for order in [(SAVE, answer(7)), (answer(7), SAVE), (answer(7), SAVE, answer(8))]:
        ran.clear()
        counting, model = service(asks(*order))

        result = await counting.count("x")

        assert (result.content, ran, len(model.requests)) == (7, ["a"], 1)
        assert result.finish_reason is FinishReason.STOP
        assert result.token_usage == TokenUsage(10, 1)
        assert [each.request.name for each in result.tool_executions] == ["save"]
        assert result.messages == (
            UserMessage("x"),
            AiMessage(None, [SAVE]),
            ToolExecutionResultMessage.of(SAVE, "saved a"),
            AiMessage('{"value": 7}'),
        )


async def test_the_words_beside_the_calls_stay_in_the_round() -> None:
    counting, _ = service(AiMessage("I save it.", [SAVE, answer(7)], "Hm."))

    result = await counting.count("x")

    assert [each.text for each in result.messages[1:]] == ["I save it.", "saved a", '{"value": 7}']
    assert [each.reasoning for each in result.messages if isinstance(each, AiMessage)] == ["Hm.", None]


@pytest.mark.parametrize("concurrent", [False, True])
async def test_an_invalid_answer_is_asked_for_again_and_the_other_calls_keep_their_results(concurrent: bool) -> None:
    other = tool_call("save", {"text": "b"}, id="s2")
    first = [answer("no", id="f1"), SAVE, answer("none", id="f2"), other]
    counting, model = service(asks(*first), asks(answer(8)), concurrent_tools=concurrent)

    result = await counting.count("x")

    sent = model.requests[1].messages
    assert sent[1] == AiMessage(None, first)
    invalid = f"{NOT_VALID}:"
    assert told(sent) == [("f1", invalid), ("s1", "saved a"), ("f2", invalid), ("s2", "saved b")]
    assert [each.is_error for each in sent if isinstance(each, ToolExecutionResultMessage)] == [True, False] * 2
    assert (result.content, sorted(ran)) == (8, ["a", "b"])
    assert result.messages == (
        UserMessage("x"),
        AiMessage(None, [SAVE, other]),
        ToolExecutionResultMessage.of(SAVE, "saved a"),
        ToolExecutionResultMessage.of(other, "saved b"),
        AiMessage('{"value": 8}'),
    )


async def test_retries_of_the_answer_count_and_the_last_one_fails() -> None:
    counting, model = service(asks(SAVE, answer("no")), asks(SAVE, answer("no")), max_output_retries=1)

    with pytest.raises(OutputParsingError):
        await counting.plain("x")

    assert (len(model.requests), ran) == (2, ["a", "a"])


async def test_the_conversation_remembers_what_ran_and_the_valid_answer() -> None:
    @register_ai_service(tools=TOOLS, output_mode="tool", chat_memory=MessageWindow(50))
    class Rooms(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> int: ...

    replies = [asks(answer("no"), SAVE), asks(SAVE, answer(7)), asks(answer(8))]
    model = ScriptedChatModel(replies)
    async with Container(models={"default": model}).register(Rooms) as container:
        assert await container.get(Rooms).chat("r", "one") == 7
        assert await container.get(Rooms).chat("r", "two") == 8
        stored = await container.chat_memory(Rooms, "r").messages()

    round_ = [AiMessage(None, [SAVE]), ToolExecutionResultMessage.of(SAVE, "saved a")]
    first = [UserMessage("one"), *round_, *round_, AiMessage('{"value": 7}')]
    assert model.requests[2].messages == (*first, UserMessage("two"))
    assert stored == [*first, UserMessage("two"), AiMessage('{"value": 8}')]


# --- what ends the call, and what does not


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        (tool_call("fails"), "no disk"),
        (tool_call("again"), "try again"),
        (tool_call("save", {"text": []}), "text"),
        (tool_call("made_up"), "made_up"),
    ],
)
async def test_a_call_that_fails_beside_a_valid_answer_leaves_it_valid(beside: Any, text: str) -> None:
    handlers = {"on_unknown_tool": return_to_model, "on_tool_arguments_error": return_to_model}
    counting, model = service(asks(beside, answer(7)), **handlers)

    result = await counting.count("x")

    assert (result.content, len(model.requests)) == (7, 1)
    [execution] = result.tool_executions
    assert execution.is_error
    assert text in execution.result


@pytest.mark.parametrize(
    ("beside", "options", "error"),
    [
        ([tool_call("abort")], {}, ToolAbort),
        ([tool_call("made_up")], {}, UnknownToolError),
        ([tool_call("save", {"text": []})], {}, ToolArgumentsError),
        ([SAVE], {"max_tool_rounds": 0}, ToolRoundsExceededError),
        ([SAVE, SAVE], {"max_tool_calls_per_response": 1}, ToolCallsLimitExceededError),
        ([SAVE, SAVE], {"limits": UsageLimits(tool_calls=1)}, UsageLimitExceededError),
    ],
)
async def test_what_ends_a_call_ends_it_beside_an_answer_too(beside: Any, options: Any, error: type[Any]) -> None:
    counting, _ = service(asks(*beside, answer(7)), **options)

    with pytest.raises(error):
        await counting.plain("x")

    assert ran == []


async def test_the_answer_itself_is_no_tool_call_for_limits() -> None:
    allowed = {"max_tool_calls_per_response": 1, "max_tool_rounds": 1, "limits": UsageLimits(tool_calls=1)}
    counting, _ = service(asks(SAVE, answer(7)), **allowed)

    assert await counting.plain("x") == 7


async def test_a_tool_that_returns_immediately_does_not_replace_the_answer() -> None:
    counting, _ = service(asks(answer(7), tool_call("show")))
    assert await counting.plain("x") == 7

    counting, model = service(asks(answer("no"), tool_call("show")), asks(answer(8)))
    assert await counting.plain("x") == 8
    assert len(model.requests) == 2
    assert ran == ["show", "show"]


async def test_the_other_output_modes_read_a_call_named_so_as_any_call() -> None:
    counting, _ = service(asks(SAVE, answer(7)), output_mode="prompt")

    with pytest.raises(UnknownToolError):
        await counting.plain("x")


# --- guardrails


class Judge(OutputGuardrail):
    def __init__(self, *decisions: Callable[[OutputGuardrail], GuardrailResult]) -> None:
        self.seen: list[OutputGuardrailRequest] = []
        self.left = list(decisions)

    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        self.seen.append(request)
        return self.left.pop(0)(self)


def reprompt(judge: OutputGuardrail) -> GuardrailResult:
    return judge.reprompt("bad", "Another one.")


async def test_a_guardrail_judges_the_answer_after_the_other_calls_have_run() -> None:
    judge = Judge(reprompt, lambda it: it.retry("bad"), lambda it: it.success_with(9))

    @output_guardrails(judge)
    class Judged(Counting, Protocol): ...

    model = ScriptedChatModel([asks(answer(7), SAVE), asks(answer(8), SAVE), asks(answer(1))])
    result = await create_ai_service(Judged, chat_model=model, tools=TOOLS, output_mode="tool").count("x")

    saved = [AiMessage(None, [SAVE]), ToolExecutionResultMessage.of(SAVE, "saved a")]
    again = [AiMessage('{"value": 7}'), UserMessage("Another one.")]
    assert [each.value for each in judge.seen] == [7, 8, 1]
    assert judge.seen[0].messages == (UserMessage("x"), *saved)
    assert model.requests[1].messages == (UserMessage("x"), *saved, *again)
    assert model.requests[2].messages == (UserMessage("x"), *saved, *again, *saved)
    assert result.content == 9
    assert result.messages == (UserMessage("x"), *saved, *saved, AiMessage("9"))


# --- compensation


@pytest.mark.parametrize("valid", [True, False])
async def test_a_failure_beside_the_answer_undoes_the_tools_that_succeeded(valid: bool) -> None:
    bank, model = Bank(), ScriptedChatModel([asks(CREDIT, answer(7 if valid else "no"), WITHDRAW), asks(answer(7))])
    options = {"tools": [bank], "compensate_on_tool_errors": True, "output_mode": "tool"}

    result = await create_ai_service(Counting, chat_model=model, **options).count("x")

    assert result.content == 7
    assert [each[0] for each in bank.undone] == ["credit"]
    assert [each.tool_name for each in result.compensations] == ["credit"]
    texts = [(each.text, each.is_error) for each in result.messages if isinstance(each, ToolExecutionResultMessage)]
    assert texts == [rolled_back("credit"), ("bob has no money", True)]


async def test_a_tool_that_fails_in_a_round_of_immediate_tools_undoes_the_others() -> None:
    class Wallet(Bank):
        @tool(return_behavior=ReturnBehavior.IMMEDIATE_IF_LAST)
        def burn(self) -> str:
            raise ValueError("no fire")

    bank, model = Wallet(), ScriptedChatModel([asks(CREDIT, tool_call("burn")), "done"])
    options = {"on_tool_execution_error": lambda error, context: "it did not burn"}
    bank_service: Any = create_ai_service(
        Assistant, chat_model=model, tools=[bank], compensate_on_tool_errors=True, **options
    )
    await bank_service.ask("x")

    assert [each[0] for each in bank.undone] == ["credit"]


# --- cancellation


async def test_a_call_that_is_cancelled_beside_an_answer_ends() -> None:
    began = asyncio.Event()

    @tool
    async def wait() -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    counting, _ = service(asks(tool_call("wait"), answer(7)), tools=[wait])
    task = asyncio.create_task(counting.plain("x"))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
