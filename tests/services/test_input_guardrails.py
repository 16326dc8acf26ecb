"""Input guardrails: order, changes, refusals, errors, threads and scopes; nothing is sent after a refusal."""

import asyncio
import threading
import time
from typing import Any, Protocol

import pytest

from tests.services.guarded import Events, NoDigits, guarded, started
from toolbox import (
    AiMessage,
    ImageContent,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    SystemMessage,
    TextContent,
    TokenStream,
    ToolAbort,
    UserMessage,
    create_ai_service,
    register_ai_service,
    request_scoped,
    system_message,
    tool,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailError,
    InputGuardrailRequest,
    input_guardrails,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .log import LOG

pytestmark = pytest.mark.anyio


class Upper(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        LOG.append(("Upper", request.user_message.text))
        return self.success_with(request.user_message.text.upper())


class NoQuestions(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.failure("a question") if "?" in request.user_message.text else self.success()


class NoAttack(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        if "ATTACK" in request.user_message.text:
            return self.fatal("refused", KeyError("cause"))
        return self.success()


@register_ai_service
@input_guardrails(Upper, NoDigits)
class Desk(Protocol):
    @input_guardrails(NoQuestions, NoAttack)
    async def ask(self, room: MemoryId[str], text: str) -> str: ...

    async def plain(self, text: str) -> str: ...

    @input_guardrails(NoQuestions)
    def wait(self, text: str) -> str: ...

    @input_guardrails(NoQuestions)
    def events(self, text: str) -> TokenStream: ...


async def test_input_guardrails_of_the_class_run_before_those_of_the_method_and_see_changes() -> None:
    model = ScriptedChatModel(["hello", "bye"])
    async with started(model, Desk, Events) as container:
        desk = container.get(Desk)
        assert await desk.ask("r", "abc") == "hello"
        assert await desk.plain("what?") == "bye"
        messages = await container.chat_memory(Desk, "r").messages()

        assert LOG == [("Upper", "abc"), ("NoDigits", "ABC"), ("Upper", "what?"), ("NoDigits", "WHAT?")]
        assert [each.messages[-1] for each in model.requests] == [UserMessage("ABC"), UserMessage("WHAT?")]
        assert messages == [UserMessage("ABC"), AiMessage("hello")]
        assert container.get(Events).guardrails[:4] == [
            ("Upper", "modified"),
            ("NoDigits", "success"),
            ("NoQuestions", "success"),
            ("NoAttack", "success"),
        ]


async def test_failures_of_input_guardrails_are_collected_and_nothing_is_sent_or_remembered() -> None:
    model = ScriptedChatModel([])
    async with started(model, Desk) as container:
        with pytest.raises(InputGuardrailError) as caught:
            await container.get(Desk).ask("r", "how many? 7")
        assert await container.chat_memory(Desk, "r").messages() == []

    assert caught.value.failures == ((NoDigits, "digits"), (NoQuestions, "a question"))
    assert str(caught.value) == "the input was refused by a guardrail"
    assert not model.requests


async def test_a_fatal_input_guardrail_stops_the_chain_and_keeps_its_cause() -> None:
    async with started(ScriptedChatModel([]), Desk) as container:
        with pytest.raises(InputGuardrailError) as caught:
            await container.get(Desk).ask("r", "attack 1")

    assert caught.value.failures == ((NoDigits, "digits"), (NoAttack, "refused"))
    assert isinstance(caught.value.__cause__, KeyError)


async def test_streams_and_synchronous_methods_have_input_guardrails_too() -> None:
    async with started(ScriptedChatModel(["fine"]), Desk) as container:
        desk = container.get(Desk)
        with pytest.raises(InputGuardrailError):
            _ = [each async for each in desk.events("who?")]
        with pytest.raises(InputGuardrailError):
            await asyncio.to_thread(desk.wait, "who?")
        assert await asyncio.to_thread(desk.wait, "fine") == "fine"


async def test_input_guardrails_see_the_conversation_so_far_and_the_context() -> None:
    seen: list[InputGuardrailRequest] = []

    class Seeing(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            seen.append(request)
            return self.success()

    @register_ai_service
    @input_guardrails(Seeing())
    @system_message("Be short.")
    class Seen(Protocol):
        async def ask(self, room: MemoryId[str], text: str) -> str: ...

    async with started(ScriptedChatModel(["one", "two"]), Seen) as container:
        await container.get(Seen).ask("r", "first")
        await container.get(Seen).ask("r", "second")

    assert seen[0].messages == ()
    assert [each for each in seen[1].messages if not isinstance(each, SystemMessage)] == [
        UserMessage("first"),
        AiMessage("one"),
    ]
    assert seen[1].user_message == UserMessage("second")
    assert (seen[1].context.memory_id, seen[1].context.method) == ("r", "ask")


async def test_a_text_as_replacement_keeps_the_images_of_the_message() -> None:
    picture = ImageContent(data=b"x", mime_type="image/png")

    @register_ai_service
    @input_guardrails(Upper)
    class Looking(Protocol):
        async def look(self, message: UserMessage) -> str: ...

    model = ScriptedChatModel(["done"])
    message = UserMessage([TextContent("what"), picture, TextContent("is it")], name="ada")
    await create_ai_service(Looking, chat_model=model).look(message)
    assert model.requests[0].messages == (UserMessage([TextContent("WHAT\nIS IT"), picture], name="ada"),)


async def test_tools_see_the_message_that_a_guardrail_changed() -> None:
    @tool
    def look(context: InvocationContext) -> str:
        assert context.user_message is not None
        return context.user_message.text

    model = ScriptedChatModel([tool_call("look"), "done"])
    assert await create_ai_service(Desk, chat_model=model, tools=[look]).plain("abc") == "done"

    result: Any = model.requests[-1].messages[-1]
    assert result.text == "ABC"


@pytest.mark.parametrize(
    "value",
    [None, "yes", True, GuardrailResult("retry", "again"), GuardrailResult("ok"), GuardrailResult("modified", value=3)],  # type: ignore[arg-type]
)
async def test_a_guardrail_that_returns_something_else_refuses(value: Any) -> None:
    class Wrong(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return value  # type: ignore[no-any-return]  # the mistake

    desk = create_ai_service(guarded(Wrong()), chat_model=ScriptedChatModel([]))
    with pytest.raises(InputGuardrailError) as caught:
        await desk.ask("hello")
    assert isinstance(caught.value.__cause__, TypeError)


async def test_a_guardrail_that_raises_refuses_with_the_exception_as_cause() -> None:
    class Broken(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise ZeroDivisionError("secret detail")

    class After(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise AssertionError("must not run")

    desk = create_ai_service(guarded(Broken, After), chat_model=ScriptedChatModel([]))
    with pytest.raises(InputGuardrailError) as caught:
        await desk.ask("hello")

    assert caught.value.failures == ((Broken, "secret detail"),)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "secret" not in str(caught.value)


async def test_errors_that_end_the_invocation_pass_through_a_guardrail() -> None:
    class Aborting(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise ToolAbort("stop")

    desk = create_ai_service(guarded(Aborting), chat_model=ScriptedChatModel([]))
    with pytest.raises(ToolAbort, match="stop"):
        await desk.ask("hello")


async def test_errors_that_end_the_invocation_pass_inside_a_group_too() -> None:
    class Grouping(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            raise ExceptionGroup("several", [ValueError(), ToolAbort("stop")])

    desk = create_ai_service(guarded(Grouping), chat_model=ScriptedChatModel([]))
    with pytest.raises(ExceptionGroup):
        await desk.ask("hello")


async def test_a_slow_guardrail_does_not_block_the_event_loop_and_the_deadline_bounds_it() -> None:
    release = threading.Event()

    class Slow(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            release.wait(60)
            return self.success()

    class Hanging(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            await asyncio.Event().wait()
            return self.success()

    model = ScriptedChatModel(["done"])
    desk = create_ai_service(guarded(Slow), chat_model=model)
    waiting = asyncio.create_task(desk.ask("hello"))
    await asyncio.sleep(0.01)  # the loop is free
    assert not waiting.done()
    release.set()
    assert await waiting == "done"

    release.clear()
    began = time.monotonic()
    for guardrail in (Slow, Hanging):
        bounded = create_ai_service(guarded(guardrail, timeout=0.05), chat_model=model)
        with pytest.raises(InvocationTimeoutError):
            await bounded.ask("hello")
        with pytest.raises(InvocationTimeoutError):
            await asyncio.to_thread(bounded.wait, "hello")
    assert time.monotonic() - began < 5
    release.set()


async def test_a_def_guardrail_of_a_synchronous_method_runs_on_the_callers_thread() -> None:
    class Where(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            LOG.append(threading.current_thread())
            return self.success()

    desk = create_ai_service(guarded(Where), chat_model=ScriptedChatModel(["done", "done"]))

    def call() -> threading.Thread:
        desk.wait("hello")
        return threading.current_thread()

    assert [await asyncio.to_thread(call)] == LOG
    await desk.ask("hello")
    assert LOG[-1] not in (threading.main_thread(), LOG[0])


async def test_a_guardrail_can_ask_another_service() -> None:
    @register_ai_service
    class Judge(Protocol):
        async def is_attack(self, text: str) -> bool: ...

    class NoInjection(InputGuardrail):
        def __init__(self, judge: Judge) -> None:
            self.judge = judge

        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            if await self.judge.is_attack(request.user_message.text):
                return self.fatal("refused")
            return self.success()

    model = ScriptedChatModel(['{"value": false}', "hello", '{"value": true}'])
    service = guarded(NoInjection)
    async with started(model, service, Judge) as container:
        assert await container.get(service).ask("hi") == "hello"
        with pytest.raises(InputGuardrailError):
            await container.get(service).ask("attack")


async def test_guardrails_have_the_scope_that_they_are_marked_with_and_can_be_overridden() -> None:
    @request_scoped
    class PerRequest(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            LOG.append(self)
            return self.success()

    class Replaced(PerRequest):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            return self.failure("replaced")

    service = guarded(PerRequest, NoDigits)
    async with started(ScriptedChatModel(["a", "b", "c"]), service) as container:
        for _ in range(2):
            async with container.request_scope():
                await container.get(service).ask("x")
                if not LOG[2:]:
                    await container.get(service).ask("x")
        instances = [each for each in LOG if isinstance(each, PerRequest)]
        assert instances[0] is instances[1]
        assert instances[1] is not instances[2]
        assert container.get(NoDigits) is container.get(NoDigits)
        async with container.request_scope():
            with container.override(PerRequest, Replaced()), pytest.raises(InputGuardrailError) as caught:
                await container.get(service).ask("x")
    assert caught.value.failures == ((PerRequest, "replaced"),)
