"""What is on the way of a call: only what it needs."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

import pytest

from toolbox import Container, LoggingListener, MemoryId, register_ai_service, time_limit, tool
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

PACKAGE = Path(sys.modules["toolbox"].__file__ or "").parent
NOT_NEEDED = {
    "services/layers.py",
    "services/conversation_beans.py",
    "services/usage_layers.py",
    "conversations/memories.py",
    "services/compaction.py",
    "services/compensation.py",
    "services/fallback_answers.py",
    "services/added_tools.py",
    "services/tool_tasks.py",
    "services/streamed_call.py",
    "services/streams.py",
    "services/abandoned_runs.py",
    "services/retrieving.py",
    "tools/retrievers.py",
    "retrieval.py",
    "passages.py",
    "services/inner_events.py",
    "services/handing_over.py",
    "services/teams.py",
    "handover.py",
    "events.py",
    "limits.py",
    "security.py",
}


class Clock:
    @tool
    async def time(self, city: str) -> str:
        """Return the time in a city."""
        return "12:00"


@register_ai_service(tools=Clock)
class Assistant(Protocol):
    async def chat(self, question: str) -> str: ...
    async def remember(self, session: MemoryId[str], question: str) -> str: ...
    def stream(self, question: str) -> AsyncIterator[str]: ...


async def files_passed(call: Callable[[], Awaitable[object]]) -> set[str]:
    """Return the files of the package whose functions run during `call()`, after it has run once."""
    await call()
    passed: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            passed.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(watch)
    try:
        await call()
    finally:
        sys.setprofile(None)
    return passed


def answers(times: int) -> ScriptedChatModel:
    return ScriptedChatModel([tool_call("time", {"city": "Rome"}), "It is noon."] * times)


async def test_a_plain_call_passes_nothing_that_only_other_calls_need() -> None:
    async with Container(models={"default": answers(2)}).register(Assistant) as container:
        assistant = container.get(Assistant)

        passed = await files_passed(lambda: assistant.chat("What time is it in Rome?"))

    assert "services/driver.py" in passed
    assert passed & NOT_NEEDED == set()
    assert {each.partition("/")[0] for each in passed} & {"runs", "guardrails", "interceptors"} == set()


async def test_a_conversation_adds_its_turn_only() -> None:
    async with Container(models={"default": answers(2)}).register(Assistant) as container:
        assistant = container.get(Assistant)

        passed = await files_passed(lambda: assistant.remember("s", "What time is it in Rome?"))

    assert passed & NOT_NEEDED <= {"services/layers.py", "conversations/memories.py"}


async def test_a_stream_adds_its_reader_only() -> None:
    async with Container(models={"default": answers(2)}).register(Assistant) as container:
        assistant = container.get(Assistant)

        async def read() -> None:
            assert "".join([each async for each in assistant.stream("What time is it in Rome?")])

        passed = await files_passed(read)

    assert passed & NOT_NEEDED == {"services/streams.py", "services/streamed_call.py", "services/tool_tasks.py"}


async def test_a_listener_and_a_time_limit_add_what_they_need() -> None:
    container = Container(models={"default": answers(2)}).register(Assistant).register_instance(LoggingListener())
    async with container:
        assistant = container.get(Assistant)

        async def call() -> None:
            with time_limit(60):
                await assistant.chat("What time is it in Rome?")

        passed = await files_passed(call)

    assert passed & NOT_NEEDED == {"services/layers.py", "events.py"}
