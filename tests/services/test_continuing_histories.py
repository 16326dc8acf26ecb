"""Methods whose only message is a `list[Message]`: a conversation goes on without a new message."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    IllegalConfigurationError,
    ImageContent,
    InvocationContext,
    MemoryId,
    Message,
    PartialResponse,
    Result,
    SystemMessage,
    TokenStream,
    ToolboxSettings,
    ToolExecutionResultMessage,
    UserMessage,
    create_ai_service,
    invocation_record,
    register_ai_service,
    system_message,
    tool,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    input_guardrails,
)
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed
from toolbox.runs import InMemoryRunStore, RunId, RunStore, approve, durable
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

HELLO = (UserMessage("Hello"), AiMessage("Good morning!"))
LOOKED = tool_call("look", id="call_7")
AFTER_A_TOOL = (UserMessage("Is it open?"), AiMessage(None, (LOOKED,)), ToolExecutionResultMessage.of(LOOKED, "closed"))


class Answer(BaseModel):
    euros: int


@tool
def look(context: InvocationContext) -> str:
    """Return the message that the call answers."""
    assert context.user_message is not None
    return context.user_message.text


class Clerk(Protocol):
    async def go_on(self, history: list[Message]) -> Result[str]: ...

    async def price(self, history: list[Message]) -> Result[Answer]: ...

    def texts(self, history: list[Message]) -> AsyncIterator[str]: ...

    def events(self, history: list[Message]) -> TokenStream: ...

    def wait(self, history: list[Message]) -> str: ...


def clerk(*replies: Any, **options: Any) -> tuple[Clerk, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    return create_ai_service(Clerk, chat_model=model, tools=look, **options), model


async def test_the_history_is_sent_as_it_is() -> None:
    service, model = clerk("At nine.")

    result = await service.go_on([*HELLO, UserMessage("When?")])

    assert result.content == "At nine."
    assert model.requests[0].messages == (*HELLO, UserMessage("When?"))


async def test_a_history_may_end_with_the_result_of_a_tool() -> None:
    service, model = clerk("It is closed.")

    result = await service.go_on([*AFTER_A_TOOL])

    assert result.content == "It is closed."
    assert model.requests[0].messages == AFTER_A_TOOL


async def test_the_messages_of_the_result_are_the_new_ones() -> None:
    service, model = clerk(tool_call("look", id="call_1"), "Forty.")

    with invocation_record() as record:
        result = await service.go_on([*HELLO, UserMessage("How many?")])

    kinds = [AiMessage, ToolExecutionResultMessage, AiMessage]
    assert [type(each) for each in result.messages] == kinds
    assert tuple(record.messages) == result.messages
    assert [each.result for each in result.tool_executions] == ["How many?"]
    assert model.requests[1].messages == (*HELLO, UserMessage("How many?"), *result.messages[:2])


async def test_a_caller_that_adds_the_new_messages_has_the_whole_conversation() -> None:
    service, model = clerk(tool_call("look", id="call_1"), "Forty.", "At noon.")
    history: list[Message] = [UserMessage("How many?")]

    history += (await service.go_on(history)).messages
    history.append(UserMessage("When?"))
    history += (await service.go_on(history)).messages

    assert model.requests[2].messages == tuple(history[:-1])


async def test_the_context_has_the_last_user_message_of_the_history() -> None:
    service, _ = clerk(tool_call("look"), "yes")

    result = await service.go_on([*AFTER_A_TOOL])

    assert [each.result for each in result.tool_executions] == ["Is it open?"]


@pytest.mark.parametrize(
    ("history", "fact"),
    [
        (UserMessage("Hello"), "a list of messages, got UserMessage$"),
        ("Hello", "a list of messages, got str$"),
        ([1, UserMessage("Hello")], r"messages such as UserMessage\(…\), got int; messages_from_json"),
    ],
)
async def test_a_history_of_other_types_names_its_parameter(history: Any, fact: str) -> None:
    service, model = clerk("never")

    with pytest.raises(TypeError, match=rf"Clerk\.go_on\(\), parameter history: expected {fact}"):
        await service.go_on(history)
    assert model.requests == []


@pytest.mark.parametrize(
    "history", [[], [AiMessage("Hello")], [UserMessage("Hello"), AiMessage("Hi")], [SystemMessage("Be brief.")]]
)
async def test_a_history_that_a_model_cannot_answer_is_a_value_error(history: list[Message]) -> None:
    service, model = clerk("never")

    with pytest.raises(ValueError, match=r"Clerk\.go_on\(\): history must end with a UserMessage or a ToolExec"):
        await service.go_on(history)
    with pytest.raises(ValueError, match="must end with"):
        service.texts(history)

    assert not model.requests


async def test_streams_and_synchronous_methods_continue_too() -> None:
    service, model = clerk("one", tool_call("look"), "two", "three")

    assert [each async for each in service.texts([UserMessage("Hello")])] == ["one"]
    events = [each async for each in service.events([*AFTER_A_TOOL])]
    assert [each.text for each in events if isinstance(each, PartialResponse)] == ["two"]
    assert isinstance(events[-1], CompleteResponse)
    assert await asyncio.to_thread(service.wait, [UserMessage("Bye")]) == "three"
    assert model.requests[-1].messages == (UserMessage("Bye"),)


async def test_tools_that_run_together_start_before_the_reply_is_complete() -> None:
    service, _ = clerk(AiMessage(None, [tool_call("look"), tool_call("look")]), "done", concurrent_tools=True)

    events = [each async for each in service.events([UserMessage("Hello")])]

    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message.text == "done"


async def test_instructions_about_the_answer_are_in_the_last_user_message() -> None:
    service, model = clerk('{"euros": 9}')

    result = await service.price([*HELLO, UserMessage("How much?")])

    assert result.content == Answer(euros=9)
    *before, last = model.requests[0].messages
    assert tuple(before) == HELLO
    assert isinstance(last, UserMessage)
    assert last.text.startswith("How much?\nAnswer with JSON only")


async def test_instructions_about_the_answer_follow_the_result_of_a_tool() -> None:
    service, model = clerk("nine", '{"euros": 9}')

    result = await service.price([*AFTER_A_TOOL])

    assert result.messages == (AiMessage('{"euros": 9}'),)
    *before, last = model.requests[0].messages
    assert tuple(before) == AFTER_A_TOOL
    assert isinstance(last, UserMessage)
    assert last.text.startswith("Answer with JSON only")
    assert [type(each) for each in model.requests[1].messages[4:]] == [AiMessage, UserMessage]


async def test_a_system_message_and_its_parameters_are_no_user_message() -> None:
    class Guide(Protocol):
        @system_message("Answer in {language}.")
        async def go_on(self, history: list[Message], language: str) -> str: ...

    model = ScriptedChatModel(["Guten Tag"])
    await create_ai_service(Guide, chat_model=model).go_on([UserMessage("Hello")], "German")

    assert model.requests[0].messages == (SystemMessage("Answer in German."), UserMessage("Hello"))


def test_a_history_alone_and_a_memory_id_are_a_problem_at_start() -> None:
    @register_ai_service
    class Twice(Protocol):
        async def go_on(self, room: MemoryId[str], history: list[Message]) -> str: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(Twice, chat_model=ScriptedChatModel([]))

    [problem] = raised.value.problems
    assert problem.where == "Twice.go_on"
    assert "'history' is the only message and the method has a memory id" in problem.what
    assert "remove the MemoryId" in problem.fix


def test_a_history_beside_another_parameter_is_still_reported() -> None:
    class Odd(Protocol):
        async def go_on(self, history: list[Message], numbers: dict[str, int]) -> str: ...

    with pytest.raises(IllegalConfigurationError, match="parameter 'numbers' is not used in any message"):
        create_ai_service(Odd, chat_model=ScriptedChatModel([]))


# --- guardrails, interceptors


class Seen(InputGuardrail):
    """Keeps what it sees, and writes a message that begins with `card` without its number."""

    def __init__(self) -> None:
        self.requests: list[InputGuardrailRequest] = []

    async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        self.requests.append(request)
        return self.success_with("card ***") if request.user_message.text.startswith("card") else self.success()


async def test_input_guardrails_judge_the_last_user_message() -> None:
    seen = Seen()

    @input_guardrails(seen)
    class Guarded(Protocol):
        async def go_on(self, history: list[Message]) -> str: ...

    model = ScriptedChatModel(["ok"])
    await create_ai_service(Guarded, chat_model=model).go_on([*HELLO, UserMessage("card 4111")])

    [request] = seen.requests
    assert (request.user_message.text, request.messages) == ("card 4111", HELLO)
    assert model.requests[0].messages == (*HELLO, UserMessage("card ***"))


async def test_input_guardrails_do_not_judge_the_result_of_a_tool() -> None:
    seen = Seen()

    @input_guardrails(seen)
    class Guarded(Protocol):
        async def go_on(self, history: list[Message]) -> str: ...

    model = ScriptedChatModel(["ok"])
    history = [UserMessage("card 4111"), *AFTER_A_TOOL[1:]]
    await create_ai_service(Guarded, chat_model=model).go_on(history)

    assert not seen.requests
    assert model.requests[0].messages == tuple(history)


async def test_interceptors_see_the_whole_history() -> None:
    class Counting(ModelInterceptor):
        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
            counts.append(len(call.request.messages))
            return await proceed(call)

    counts: list[int] = []
    service, _ = clerk("ok", interceptors=Counting())

    await service.go_on([*AFTER_A_TOOL])

    assert counts == [3]


# --- runs


class KeptStore(InMemoryRunStore):
    persistent = True


@tool(requires_approval=True)
def refund(euros: int) -> str:
    """Refund."""
    return f"refunded {euros}"


@register_ai_service(tools=[look, refund])
class Desk(Protocol):
    async def go_on(self, history: list[Message]) -> Result[str]: ...

    @durable
    async def go_on_safely(self, run: RunId, history: list[Message]) -> Result[str]: ...


def desk_with(store: RunStore, *replies: Any) -> tuple[Container, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    container = Container(models={"default": model}).register(Desk)
    return container.register_instance(store, as_type=RunStore), model


@pytest.mark.parametrize("history", [(*HELLO, UserMessage("Refund me")), AFTER_A_TOOL])
@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_suspended_call_continues_in_another_process(history: tuple[Message, ...], is_durable: bool) -> None:
    store = KeptStore()
    first, _ = desk_with(store, tool_call("refund", {"euros": 9}))
    async with first:
        desk = first.get(Desk)
        result = await (desk.go_on_safely("r", [*history]) if is_durable else desk.go_on([*history]))
        [call] = result.pending
        assert result.run_id is not None

    second, model = desk_with(store, tool_call("look"), "Done.")
    async with second:
        result = await second.runs.resume(result.run_id, {call.id: approve()})

    assert result.content == "Done."
    assert len(result.messages) == 5
    assert isinstance(result.messages[0], AiMessage)
    assert model.requests[0].messages == (*history, *result.messages[:2])
    asked = [each.text for each in history if isinstance(each, UserMessage)][-1]
    assert [each.result for each in result.tool_executions] == ["refunded 9", asked]


class Silent:
    """A model that does not answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_durable_call_without_a_reply_begins_again_with_the_stored_history() -> None:
    store, silent = KeptStore(), Silent()
    history = [*HELLO, UserMessage(["Look:", ImageContent(url="https://example.com/a.png")])]
    settings = ToolboxSettings(stop_timeout=0.05)
    first = Container(models={"default": silent}, settings=settings).register(Desk)
    async with first.register_instance(store, as_type=RunStore):
        await first.runs.start(first.get(Desk).go_on_safely, "r", history)
        await silent.asked.wait()

    second, model = desk_with(store, "Nice.")
    async with second:
        await second.runs.execute("r")
        result = await second.get(Desk).go_on_safely("r", history)

    assert result.content == "Nice."
    assert model.requests[0].messages == tuple(history)


async def test_a_durable_call_is_refused_before_its_run_is_stored() -> None:
    store = KeptStore()
    container, _ = desk_with(store)
    async with container:
        with pytest.raises(ValueError, match="must end with"):
            await container.get(Desk).go_on_safely("r", [AiMessage("Hello")])
        with pytest.raises(ValueError, match="must end with"):
            await container.runs.start(container.get(Desk).go_on_safely, "r", [])
        assert not await container.runs.list()
