"""Output guardrails judge and replace what the caller will get, not the text around it."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    Container,
    MemoryId,
    OutputParsingError,
    Result,
    UserMessage,
    create_ai_service,
    register_ai_service,
)
from toolbox.guardrails import (
    GuardrailResult,
    MaxLength,
    OutputGuardrail,
    OutputGuardrailError,
    OutputGuardrailRequest,
    output_guardrails,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Query(BaseModel):
    sql: str


class Judge(OutputGuardrail):
    """Keeps the requests, and answers with a function."""

    def __init__(self, decide: Callable[["Judge", OutputGuardrailRequest], GuardrailResult] | None = None) -> None:
        self.decide = decide
        self.seen: list[OutputGuardrailRequest] = []

    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        self.seen.append(request)
        return self.success() if self.decide is None else self.decide(self, request)


def refuse_drop(judge: Judge, request: OutputGuardrailRequest) -> GuardrailResult:
    return judge.failure("no") if "DROP" in request.text else judge.success()


async def asked(returns: Any, judge: OutputGuardrail, *replies: Any, mode: Any = "prompt", **options: Any) -> Any:
    class Asking(Protocol):
        async def ask(self, text: str) -> Any: ...

    Asking.ask.__annotations__["return"] = returns
    guarded = output_guardrails(judge)(Asking)
    given = [tool_call("final_answer", each) if mode == "tool" else each for each in replies]
    model = ScriptedChatModel(given)
    return await create_ai_service(guarded, chat_model=model, output_mode=mode, **options).ask("x")


@pytest.mark.parametrize("mode", ["prompt", "schema", "tool"])
@pytest.mark.parametrize(
    "reply",
    [
        '{"sql": "DROP"}',
        '```json\n{"sql": "DROP"}\n```',
        'Here you are: {"sql": "DROP"}. SELECT is fine.',
        '{"sql": "\\u0044ROP"}',
    ],
)
async def test_nothing_around_an_answer_hides_it_from_a_guardrail(reply: str, mode: Any) -> None:
    judge = Judge(refuse_drop)

    with pytest.raises(OutputGuardrailError) as caught:
        await asked(Query, judge, reply, mode=mode)

    [request] = judge.seen
    assert request.value == Query(sql="DROP")
    assert json.loads(request.text) == {"sql": "DROP"}
    assert caught.value.text == request.text


@pytest.mark.parametrize(
    ("returns", "reply", "value", "text"),
    [
        (list[int], '```\n{"value": [1, 2]}\n```', [1, 2], "[1, 2]"),
        (list[str], "- a\n- b", ["a", "b"], '["a","b"]'),
        (Literal["good", "bad"], "GOOD", "good", '"good"'),
        (int, '{"value": 3}', 3, "3"),
        (str, "```\nhello\n```", "```\nhello\n```", "```\nhello\n```"),
        (AiMessage, "hello", AiMessage("hello"), "hello"),
        (None, "hello", None, "hello"),
        (Result[Query], 'So: {"sql": "a"}', Query(sql="a"), '{"sql": "a"}'),
    ],
)
async def test_the_request_has_the_value_and_its_text(returns: Any, reply: str, value: object, text: str) -> None:
    judge = Judge()

    await asked(returns, judge, reply)

    assert [(each.value, each.text) for each in judge.seen] == [(value, text)]


@pytest.mark.parametrize("mode", ["prompt", "schema", "tool"])
@pytest.mark.parametrize(
    "given", [Query(sql="SELECT"), {"sql": "SELECT"}, '{"sql": "SELECT"}', '```\n{"sql": "SELECT"}\n```']
)
async def test_a_guardrail_gives_a_value_a_dict_or_a_text(given: Any, mode: Any) -> None:
    first, second = Judge(lambda judge, _: judge.success_with(given)), Judge()

    @register_ai_service(output_mode=mode)
    @output_guardrails(first, second)
    class Sql(Protocol):
        async def ask(self, session: MemoryId[str], text: str) -> Query: ...

    reply = '```\n{"sql": "DROP"}\n```'
    model = ScriptedChatModel([tool_call("final_answer", '{"sql": "DROP"}') if mode == "tool" else reply])
    async with Container(models={"default": model}).register(Sql) as container:
        assert await container.get(Sql).ask("1", "x") == Query(sql="SELECT")
        remembered = await container.chat_memory(Sql, "1").messages()

    assert second.seen[0].value == Query(sql="SELECT")
    assert json.loads(second.seen[0].text) == {"sql": "SELECT"}
    assert isinstance(remembered[-1], AiMessage)
    assert "DROP" not in (remembered[-1].text or "")
    assert "SELECT" in (remembered[-1].text or "")


async def test_memory_has_the_reply_as_it_came_if_no_guardrail_replaced_it() -> None:
    @register_ai_service
    @output_guardrails(Judge())
    class Sql(Protocol):
        async def ask(self, session: MemoryId[str], text: str) -> Query: ...

    reply = '```\n{"sql": "SELECT"}\n```'
    async with Container(models={"default": ScriptedChatModel([reply])}).register(Sql) as container:
        await container.get(Sql).ask("1", "x")
        assert await container.chat_memory(Sql, "1").messages() == [UserMessage("x"), AiMessage(reply)]


@pytest.mark.parametrize(
    ("returns", "reply", "given"),
    [
        (Query, '{"sql": "a"}', {"sq": "a"}),
        (Query, '{"sql": "a"}', "SELECT"),
        (int, "3", "three"),
        (int, "3", None),
        (str, "hello", 3),
        (AiMessage, "hello", {"text": "a"}),
    ],
)
async def test_a_replacement_that_does_not_fit_raises_a_parsing_error(returns: Any, reply: str, given: Any) -> None:
    with pytest.raises(OutputParsingError):
        await asked(returns, Judge(lambda judge, _: judge.success_with(given)), reply)


async def test_an_answer_that_does_not_fit_is_asked_again_before_it_is_judged() -> None:
    judge = Judge()

    assert await asked(Query, judge, "I do not know", '{"sql": "a"}') == Query(sql="a")
    assert [each.text for each in judge.seen] == ['{"sql": "a"}']


async def test_messages_can_be_replaced() -> None:
    judge = Judge(lambda judge, _: judge.success_with(AiMessage("bye", attributes={"by": "us"})))

    assert await asked(AiMessage, judge, "hello") == AiMessage("bye", attributes={"by": "us"})


async def test_the_items_of_a_stream_are_judged_together_and_only_those_are_sent() -> None:
    judge = Judge(
        lambda judge, request: (
            judge.retry("bad")
            if any(each.sql == "DROP" for each in request.value)
            else judge.success_with([*request.value, Query(sql="last")])
        )
    )

    @output_guardrails(judge)
    class Sql(Protocol):
        def ask(self, text: str) -> AsyncIterator[Query]: ...

    replies = ["no list", '[{"sql": "DROP"}]', 'See [{"sql": "a"}]']
    sql = create_ai_service(Sql, chat_model=ScriptedChatModel(replies))

    assert [each.sql async for each in sql.ask("x")] == ["a", "last"]
    assert [each.text for each in judge.seen] == ['[{"sql": "DROP"}]', '[{"sql": "a"}]']


@pytest.mark.parametrize(
    ("returns", "reply"), [(Query, '{"sql": "SELECT"}'), (list[str], '["a long text"]'), (Literal["a long"], "a long")]
)
async def test_max_length_refuses_longer_structured_answers(returns: Any, reply: str) -> None:
    with pytest.raises(OutputGuardrailError) as caught:
        await asked(returns, MaxLength(5), reply)

    assert "the limit is 5" in caught.value.failures[0][1]
    assert await asked(str, MaxLength(5), "hello you") == "hello"
    assert await asked(AiMessage, MaxLength(5), "hello you") == AiMessage("hello")
