"""Invocations in logs: facts as attributes of the records, and nothing of what was said."""

import inspect
import logging
from contextlib import suppress
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    InvocationContext,
    InvocationLogFilter,
    LoggingListener,
    Progress,
    UnknownToolError,
    logs,
    register_ai_service,
    tool,
)
from toolbox.events import InvocationEvent
from toolbox.limits import UsageLimits
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

logger = logging.getLogger("program")


@tool
async def add(a: int, b: int) -> int:
    logger.info("adding")
    return a + b


@tool
def divide(a: int) -> float:
    logger.info("dividing")
    return a / 0


@register_ai_service(tools=(add, divide))
class Maths(Protocol):
    async def ask(self, question: str) -> str: ...


def there_is_none(error: UnknownToolError, context: InvocationContext) -> str:
    return "there is no such tool"


@register_ai_service(tools=add, on_unknown_tool=there_is_none)
class ForgivingMaths(Protocol):
    async def ask(self, question: str) -> str: ...


def container_with(*replies: Any) -> Container:
    container = Container(models={"default": ScriptedChatModel(replies)})
    return container.register(Maths, LoggingListener)


async def test_each_event_is_logged_with_its_attributes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "toolbox.invocations"):
        async with container_with(tool_call("add", {"a": 1, "b": 2}), "three") as container:
            await container.get(Maths).ask("one and two?")

    records: list[Any] = [each for each in caplog.records if each.name == "toolbox.invocations"]
    assert [each.event for each in records] == [
        "service_started",
        "model_request",
        "model_response",
        "tool_started",
        "tool_executed",
        "model_request",
        "model_response",
        "service_completed",
    ]
    assert len({each.invocation_id for each in records}) == 1
    assert {(each.service, each.method) for each in records} == {("Maths", "ask")}
    assert records[4].tool == "add"
    assert records[-1].duration > 0
    assert {each.levelno for each in records} == {logging.INFO}


async def test_messages_arguments_and_results_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "toolbox.invocations"):
        async with container_with(tool_call("divide", {"a": 918273645}), "a secret") as container:
            await container.get(Maths).ask("a private question")

    records = "".join(str(vars(each)) for each in caplog.records if each.name == "toolbox.invocations")
    assert not any(said in records for said in ("918273645", "secret", "private", "division"))
    assert "ZeroDivisionError" in records


@pytest.mark.parametrize("service", [Maths, ForgivingMaths])
async def test_names_of_unknown_tools_are_not_logged(
    caplog: pytest.LogCaptureFixture, service: type[Maths | ForgivingMaths]
) -> None:
    with caplog.at_level(logging.DEBUG, "toolbox.invocations"):
        async with container_with(tool_call("secret"), "x").register(ForgivingMaths) as container:
            with suppress(UnknownToolError):
                await container.get(service).ask("?")

    records = [vars(each) for each in caplog.records if each.name == "toolbox.invocations"]
    assert "secret" not in str(records)
    assert "UnknownToolError" in str(records)


OWN_EVENTS = {each.__name__ for each in InvocationEvent.__subclasses__() if each.__module__ == "toolbox.events"}


@pytest.mark.parametrize("event", sorted(OWN_EVENTS))
def test_each_kind_of_event_has_its_own_name_and_facts(event: str) -> None:
    assert f"case {event}(" in inspect.getsource(logs)


async def test_usage_and_progress_are_logged_with_their_facts(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def copy(progress: Progress) -> str:
        await progress(2, 3, "a private text")
        return "copied"

    @register_ai_service(tools=copy, limits=UsageLimits(model_calls=5))
    class Copier(Protocol):
        async def ask(self, question: str) -> str: ...

    with caplog.at_level(logging.DEBUG, "toolbox.invocations"):
        async with container_with(tool_call("copy"), "done").register(Copier) as container:
            await container.get(Copier).ask("Copy")

    records: list[Any] = [each for each in caplog.records if each.name == "toolbox.invocations"]
    [progress] = [each for each in records if each.event == "tool_progress"]
    assert (progress.levelno, progress.done, progress.total, progress.tool) == (logging.DEBUG, 2, 3, "copy")
    assert "private" not in str(vars(progress))
    assert [each.model_calls for each in records if each.event == "usage_counted"] == [1, 2]


async def test_failures_are_logged_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "toolbox.invocations"):
        async with container_with(tool_call("divide", {"a": 1}), ValueError("down")) as container:
            with pytest.raises(ValueError, match="down"):
                await container.get(Maths).ask("?")

    records: list[Any] = [each for each in caplog.records if each.name == "toolbox.invocations"]
    warned = [each for each in records if each.levelno == logging.WARNING]
    assert [each.event for each in warned] == ["tool_executed", "model_failed", "service_failed"]


async def test_records_of_the_program_have_the_invocation_and_tool(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(here := InvocationLogFilter())
    try:
        with caplog.at_level(logging.INFO):
            logger.info("before")
            async with container_with(tool_call("add", {"a": 1, "b": 2}), tool_call("divide", {"a": 1}), "x") as made:
                await made.get(Maths).ask("?")
    finally:
        caplog.handler.removeFilter(here)

    own: list[Any] = [each for each in caplog.records if each.name == "program"]
    events: list[Any] = [each for each in caplog.records if each.name == "toolbox.invocations"]
    assert [each.tool for each in own] == [None, "add", "divide"]
    assert own[0].invocation_id is None
    assert own[1].invocation_id == own[2].invocation_id == events[0].invocation_id
