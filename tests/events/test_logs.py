"""Invocations in logs: facts as attributes of the records, and nothing of what was said."""

import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    InvocationContext,
    InvocationLogFilter,
    LoggingListener,
    MemoryId,
    Progress,
    UnknownToolError,
    create_ai_service,
    logs,
    produces,
    register_ai_service,
    tool,
)
from toolbox.events import InvocationEvent
from toolbox.limits import UsageLimits
from toolbox.security import ForbiddenError, SecurityIdentity, roles_allowed
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


# --- the conversation and the user


@register_ai_service(tools=(add, divide))
class Tutor(Protocol):
    async def ask(self, pupil: MemoryId[Any], question: str) -> str: ...


ANN = SecurityIdentity("ann", attributes={"token": "secret"})


@produces(scope="request")
def found() -> SecurityIdentity:
    return ANN


@produces(scope="request")
async def loaded() -> SecurityIdentity:
    return ANN


@produces()
def found_each_time() -> SecurityIdentity:
    return ANN


@produces(scope="request")
def unknown() -> SecurityIdentity | None:
    return None


@produces(scope="request")
def refused() -> SecurityIdentity:
    raise PermissionError("no token")


PROVIDED: list[tuple[Any, dict[Any, Any], str | None]] = [
    (None, {SecurityIdentity: ANN}, "ann"),
    (None, {}, None),
    (None, {SecurityIdentity: SecurityIdentity.anonymous()}, None),
    (None, {SecurityIdentity: SecurityIdentity("ann\nroot")}, "ann\\nroot"),
    (found, {}, "ann"),
    (loaded, {}, "ann"),
    (found_each_time, {}, None),
    (unknown, {}, None),
]


async def test_an_identity_that_cannot_be_made_is_the_error_of_a_conversation_and_logged_without_a_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Tutor, LoggingListener, refused)
    with caplog.at_level(logging.INFO):
        async with container, container.request_scope({}):
            with pytest.raises(PermissionError):
                await container.get(Tutor).ask(7, "?")

    assert [vars(each)["user"] for each in caplog.records if each.name == "toolbox.invocations"] == [None, None]


@pytest.mark.parametrize(("producer", "seeds", "user"), PROVIDED)
async def test_records_have_the_conversation_and_the_user(
    producer: Any, seeds: dict[Any, Any], user: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = ScriptedChatModel([tool_call("add", {"a": 1, "b": 2}), tool_call("divide", {"a": 1}), "x"])
    container = Container(models={"default": model}).register(Tutor, LoggingListener)
    if producer is not None:
        container.register(producer)
    caplog.handler.addFilter(here := InvocationLogFilter())
    try:
        with caplog.at_level(logging.INFO):
            async with container, container.request_scope(seeds):
                logger.info("outside")
                await container.get(Tutor).ask(7, "?")
    finally:
        caplog.handler.removeFilter(here)

    outside, *inside = [each for each in caplog.records if each.name in ("program", "toolbox.invocations")]
    assert (outside.conversation, outside.user) == (None, None)  # type: ignore[attr-defined]  # the filter sets them
    assert {(each.conversation, each.user) for each in inside} == {("7", user)}  # type: ignore[attr-defined]
    assert {each.name for each in inside} == {"program", "toolbox.invocations"}
    assert "secret" not in str([vars(each) for each in caplog.records])


async def test_the_user_is_that_of_the_declared_identity(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedChatModel(["x"])
    container = Container(models={"default": model}, seeds=[SecurityIdentity]).register(Tutor, LoggingListener)
    with caplog.at_level(logging.INFO):
        async with container, container.request_scope({SecurityIdentity: ANN}):
            await container.get(Tutor).ask(7, "?")

    assert {each.user for each in caplog.records if each.name == "toolbox.invocations"} == {"ann"}  # type: ignore[attr-defined]


async def test_all_records_of_a_run_have_the_user(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedChatModel(["x"])
    container = Container(models={"default": model}, seeds=[SecurityIdentity]).register(Tutor, LoggingListener)
    with caplog.at_level(logging.INFO):
        async with container, container.request_scope({SecurityIdentity: ANN}):
            await container.runs.result(await container.runs.start(Tutor.ask, 7, "?"))

    records = [vars(each) for each in caplog.records if each.name == "toolbox.invocations"]
    assert {each["event"] for each in records} > {"run_started", "service_started"}
    assert {each["user"] for each in records} == {"ann"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_call_has_the_user_too(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    @register_ai_service
    class Office(Protocol):
        @roles_allowed("boss")
        def watch(self, question: str) -> AsyncIterator[str]: ...

        @roles_allowed("boss")
        async def ask(self, question: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel()}, seeds=[SecurityIdentity])
    with caplog.at_level(logging.INFO):
        async with container.register(Office, LoggingListener), container.request_scope({SecurityIdentity: ANN}):
            with pytest.raises(ForbiddenError):
                if stream:
                    async for _ in container.get(Office).watch("?"):
                        pass
                else:
                    await container.get(Office).ask("?")

    assert [each.user for each in caplog.records if each.name == "toolbox.invocations"] == ["ann"] * 2  # type: ignore[attr-defined]


async def test_services_without_a_container_have_the_user(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    @tool
    async def note(context: InvocationContext) -> str:
        seen.append((context.user, context.memory_id))
        return "noted"

    @register_ai_service(tools=note)
    class Notes(Protocol):
        async def ask(self, pupil: MemoryId[Any], question: str) -> str: ...

    service = create_ai_service(Notes, chat_model=ScriptedChatModel([tool_call("note"), "x"]), identity=ANN)
    await service.ask("p", "?")

    assert seen == [("ann", "p")]
