"""Invalid but common replies pass through a service and are sent back correctly.

What is sent back is judged as a strict server would. Not here: the replies (`seen_replies`, `generated_replies`).
"""

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import pytest

from tests.models.generated_replies import GENERATED
from tests.models.scripted_server import ScriptedServer, chunk, completion, stream
from tests.models.seen import KINDS, Case, read_seen
from toolbox import (
    CompleteResponse,
    CompleteToolCall,
    OpenAiChatModel,
    PartialResponse,
    Result,
    TokenStream,
    create_ai_service,
    return_to_model,
)

pytestmark = pytest.mark.anyio

CASES = [*(case for kind in KINDS for case in read_seen(kind)), *GENERATED]


class Whole(Protocol):
    async def ask(self, message: str) -> Result[str]: ...


class Streamed(Protocol):
    def ask(self, message: str) -> TokenStream: ...


@pytest.mark.parametrize("case", [each for each in CASES if each.error is not None], ids=str)
async def test_a_failure_raises_the_expected_error_and_no_tool_runs(scripted: ScriptedServer, case: Case) -> None:
    scripted.script([case.reply])
    ran: list[tuple[str, dict[str, Any]]] = []
    model = OpenAiChatModel("m", scripted.url, "test", max_retries=0)
    assert case.error is not None

    with pytest.raises(case.error) as caught:
        await (ask_streamed if case.is_stream else ask)(model, tools(ran))
    await model.aclose()

    assert caught.type is case.error
    assert case.says in str(caught.value)
    assert case.status in (None, getattr(caught.value, "status", None))
    assert (ran, len(scripted.requests)) == ([], 1)


@pytest.mark.parametrize("case", [each for each in CASES if each.error is None], ids=str)
async def test_a_reply_is_understood_and_sent_back_in_the_strict_format(scripted: ScriptedServer, case: Case) -> None:
    end = stream(chunk({"content": "done"}), chunk({}, "stop")) if case.is_stream else completion({"content": "done"})
    scripted.script([case.reply, end])
    ran: list[tuple[str, dict[str, Any]]] = []
    model = OpenAiChatModel("m", scripted.url, "test", max_retries=0)

    answer = await (ask_streamed if case.is_stream else ask)(model, tools(ran))
    await model.aclose()

    assert ran == case.calls
    assert answer == (case.text if case.text is not None else "done")
    judge(scripted.requests, case)


Ran = list[tuple[str, dict[str, Any]]]
ran_in: ContextVar[Ran] = ContextVar("ran_in")


async def add(a: int, b: int) -> int:
    ran_in.get().append(("add", {"a": a, "b": b}))
    return a + b


async def now() -> str:
    ran_in.get().append(("now", {}))
    return "noon"


async def echo(text: str) -> str:
    ran_in.get().append(("echo", {"text": text}))
    return text[:100]


def tools(ran: Ran) -> list[Callable[..., Any]]:
    """Return the tools; calls of the current test are added to `ran`."""
    ran_in.set(ran)
    return [add, now, echo]


HANDLERS: dict[str, Any] = dict.fromkeys(
    ("on_unknown_tool", "on_tool_arguments_error", "on_tool_execution_error"), return_to_model
)


async def ask(model: OpenAiChatModel, offered: list[Any]) -> str | None:
    service = create_ai_service(Whole, chat_model=model, tools=offered, **HANDLERS)
    return (await service.ask("Go.")).content


async def ask_streamed(model: OpenAiChatModel, offered: list[Any]) -> str | None:
    service = create_ai_service(Streamed, chat_model=model, tools=offered, **HANDLERS)
    text, partial, complete = None, "", []
    async for event in service.ask("Go."):
        if isinstance(event, PartialResponse):
            event.text.encode()
            partial += event.text
        elif isinstance(event, CompleteToolCall):
            complete.append(event)
        elif isinstance(event, CompleteResponse):
            text = event.response.ai_message.text
    assert partial.endswith(text or "")
    return text


def judge(requests: list[dict[str, Any]], case: Case) -> None:
    """Fail if a strict server would refuse one of the requests."""
    if case.text is not None:
        assert len(requests) == 1
        return
    [_, follow_up] = requests
    assert "null" not in json.dumps(follow_up).replace('"null', "").replace('null"', "")
    messages = follow_up["messages"]
    reply = next(each for each in messages if each["role"] == "assistant")
    ids = [each["id"] for each in reply["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert all(0 < len(each.strip()) <= 64 for each in ids)
    for each in reply["tool_calls"]:
        assert each["type"] == "function"
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", each["function"]["name"])
        assert isinstance(json.loads(each["function"]["arguments"]), dict)
        assert "NaN" not in each["function"]["arguments"]
    results = messages[messages.index(reply) + 1 :]
    assert [each["tool_call_id"] for each in results] == ids
    if case.result is not None:
        assert any(case.result in each["content"] for each in results)
    if case.sent_back is not None:
        assert has_part(reply, case.sent_back)


def has_part(sent: Any, part: Any) -> bool:
    """Return True if the value contains this part of it; None is the value of a field that is missing."""
    if isinstance(part, dict):
        return all(has_part(sent.get(key), each) for key, each in part.items())
    if isinstance(part, list):
        return len(sent) == len(part) and all(map(has_part, sent, part))
    return bool(sent == part)
