"""Continuing a run: streams, synchronous services, conversations, scopes, identities, and programs that changed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, SecretStr

from tests.conftest import Clock
from toolbox import (
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    EventListener,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    InvocationEvent,
    InvocationTimeoutError,
    MemoryId,
    Result,
    TokenStream,
    TokenUsage,
    ToolExecuted,
    ToolProviderResult,
    application_scoped,
    create_ai_service,
    invocation_attributes,
    register_ai_service,
    system_message,
    tool,
)
from toolbox.events import (
    RunAnsweredEvent,
    RunResumedEvent,
    RunStartedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToolSuspendedEvent,
)
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed, interceptors
from toolbox.limits import UsageLimitExceededError, UsageLimits
from toolbox.runs import (
    ConversationSuspendedError,
    IdentityLoader,
    InMemoryRunStore,
    RunAnswerError,
    RunCancelledError,
    RunFailedError,
    RunIncompatibleError,
    RunNotFoundError,
    RunStateError,
    RunStore,
    RunSuspended,
    RunSuspendedError,
    approve,
    reject,
    runs_of,
)
from toolbox.security import ForbiddenError, SecurityIdentity, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
async def refund(order: int) -> str:
    ran.append(order)
    return f"refunded {order}"


REFUND = tool_call("refund", {"order": 7})


class Invoice(BaseModel):
    number: int


@register_ai_service(tools=refund)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    async def invoice(self, text: str) -> Invoice: ...
    def events(self, text: str) -> TokenStream: ...
    def texts(self, text: str) -> AsyncIterator[str]: ...
    def items(self, text: str) -> AsyncIterator[Invoice]: ...
    def waiting(self, text: str) -> str: ...
    def waiting_texts(self, text: str) -> Iterator[str]: ...


def container(*replies: Any, store: Any = None, services: Any = (Desk,), **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, **options).register(*services)
    return made if store is None else made.register_instance(store, RunStore)


async def run_id_of(awaited: Any) -> str:
    with pytest.raises(RunSuspendedError) as raised:
        await awaited
    return raised.value.run_id


# --- streams and synchronous services


async def test_a_stream_of_events_ends_with_the_suspension_and_continues_as_a_stream() -> None:
    async with container(asks(REFUND), says("done")) as here:
        events = [each async for each in here.get(Desk).events("refund")]
        last = events[-1]
        assert isinstance(last, RunSuspended)
        assert [each.id for each in last.pending] == ["0"]
        assert not any(isinstance(each, CompleteResponse) for each in events)

        events = [each async for each in here.runs.resume_stream(last.run_id, {"0": approve()})]

    assert [each.execution.result for each in events if isinstance(each, ToolExecuted)] == ["refunded 7"]
    assert isinstance(events[-1], CompleteResponse)
    assert events[-1].response.ai_message.text == "done"
    assert events[-1].response.token_usage == TokenUsage(20, 6)


async def test_a_resumed_stream_may_be_suspended_again() -> None:
    async with container(asks(REFUND), asks(REFUND), says("done")) as here:
        [*_, first] = [each async for each in here.get(Desk).events("refund")]
        assert isinstance(first, RunSuspended)
        [*_, second] = [each async for each in here.runs.resume_stream(first.run_id, {"0": approve()})]
        assert isinstance(second, RunSuspended)
        assert [each.id for each in second.pending] == ["1"]
        result = await here.runs.resume(second.run_id, {"1": reject("enough")})
    assert result.content == "done"
    assert ran == [7]


async def test_refused_answers_of_a_stream_are_raised_at_its_first_step() -> None:
    async with container(asks(REFUND)) as here:
        [*_, last] = [each async for each in here.get(Desk).events("refund")]
        with pytest.raises(RunAnswerError):
            _ = [each async for each in here.runs.resume_stream(last.run_id, {"9": approve()})]


async def test_a_resumed_stream_that_has_begun_stores_its_answers_once() -> None:
    async with container(asks(REFUND), says("done")) as here:
        [*_, last] = [each async for each in here.get(Desk).events("refund")]
        stream = here.runs.resume_stream(last.run_id, {"0": approve()})
        await stream.begin()
        assert len((await here.runs.get(last.run_id)).history) == 1
        await stream.begin()
        events = [each async for each in stream]
        await stream.aclose()
    assert isinstance(events[-1], CompleteResponse)
    assert ran == [7]


async def test_a_resumed_stream_that_is_closed_unread_leaves_the_run_as_it_was() -> None:
    async with container(asks(REFUND), says("done")) as here:
        [*_, last] = [each async for each in here.get(Desk).events("refund")]
        stream = here.runs.resume_stream(last.run_id, {"0": approve()})
        await stream.aclose()
        assert [each async for each in stream] == []
        assert (await here.runs.get(last.run_id)).status == "suspended"
        assert (await here.runs.resume(last.run_id, {"0": approve()})).content == "done"


@pytest.mark.parametrize("method", ["texts", "items"])
async def test_other_streams_raise_the_suspension_at_their_end(method: str) -> None:
    answer = "done" if method == "texts" else '{"value": [{"number": 1}]}'
    async with container(asks(REFUND), says(answer)) as here:
        with pytest.raises(RunSuspendedError) as raised:
            _ = [each async for each in getattr(here.get(Desk), method)("refund")]
        result = await here.runs.resume(raised.value.run_id, {"0": approve()})
    assert result.content == ("done" if method == "texts" else [Invoice(number=1)])


async def test_the_content_of_a_resumed_call_has_the_type_of_the_method() -> None:
    async with container(asks(REFUND), says('{"number": 3}')) as here:
        run_id = await run_id_of(here.get(Desk).invoice("refund"))
        result = await here.runs.resume(run_id, {"0": approve()})
        again = await here.runs.resume(run_id, {})
    assert result.content == again.content == Invoice(number=3)


def test_synchronous_services_raise_the_suspension_and_are_resumed() -> None:
    with container(asks(REFUND), asks(REFUND), says("done")) as here:
        with pytest.raises(RunSuspendedError) as raised:
            here.get(Desk).waiting("refund")
        with pytest.raises(RunSuspendedError):
            list(here.get(Desk).waiting_texts("refund"))
        result = asyncio.run(here.runs.resume(raised.value.run_id, {"0": approve()}))
        streamed = asyncio.run(_collected(here, raised.value.run_id))
    assert result.content == "done"
    assert streamed == []


async def _collected(here: Container, run_id: str) -> list[Any]:
    return [each async for each in here.runs.resume_stream(run_id, {})]


def test_blocking_tools_of_a_resumed_synchronous_service_run_once() -> None:
    @tool(requires_approval=True)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        def ask(self, text: str) -> Result[str]: ...

    with container(asks(tool_call("pay", {"euros": 5})), says("done"), services=(Payments,)) as here:
        result = here.get(Payments).ask("x")
        assert asyncio.run(here.runs.resume(result.run_id or "", {"0": approve()})).content == "done"
    assert ran == [5]


# --- conversations


async def test_a_suspended_run_holds_no_turn_and_blocks_new_calls_of_its_conversation() -> None:
    async with container(asks(REFUND), says("other room"), says("done"), says("next")) as here:
        desk = here.get(Desk)
        waiting = await desk.chat("room", "refund")
        with pytest.raises(ConversationSuspendedError) as raised:
            await desk.chat("room", "hello?")
        assert raised.value.run_id == waiting.run_id
        assert (await desk.chat("other", "hello")).content == "other room"
        assert await here.chat_memory(Desk, "room").messages() == []

        await here.runs.resume(waiting.run_id or "", {"0": approve()})
        messages = await here.chat_memory(Desk, "room").messages()
        assert [type(each).__name__ for each in messages] == [
            "UserMessage",
            "AiMessage",
            "ToolExecutionResultMessage",
            "AiMessage",
        ]
        assert (await desk.chat("room", "and now?")).content == "next"


async def test_a_service_can_cancel_the_suspended_run_of_a_conversation() -> None:
    @register_ai_service(tools=refund, on_suspended="cancel")
    class Eager(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with container(asks(REFUND), says("fine"), services=(Eager,)) as here:
        waiting = await here.get(Eager).chat("room", "refund")
        assert (await here.get(Eager).chat("room", "never mind")).content == "fine"
        assert (await here.runs.get(waiting.run_id or "")).status == "cancelled"
        with pytest.raises(RunAnswerError, match="cancelled"):
            await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert ran == []


# --- limits and deadlines


async def test_usage_rounds_and_limits_carry_over() -> None:
    @register_ai_service(tools=refund, limits=UsageLimits(model_calls=2))
    class Limited(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    @register_ai_service(tools=refund, max_tool_rounds=1)
    class Short(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(REFUND), asks(REFUND), says("never"), services=(Limited,)) as here:
        run_id = (await here.get(Limited).ask("x")).run_id or ""
        await here.runs.resume(run_id, {"0": approve()})
        with pytest.raises(UsageLimitExceededError):
            await here.runs.resume(run_id, {"1": approve()})
        assert (await here.runs.get(run_id)).status == "failed"
    async with container(asks(REFUND), asks(REFUND), services=(Short,)) as here:
        run_id = (await here.get(Short).ask("x")).run_id or ""
        with pytest.raises(Exception, match="1 round"):
            await here.runs.resume(run_id, {"0": approve()})


async def test_waiting_does_not_count_for_the_deadline_of_a_suspended_run(clock: Clock) -> None:
    @tool
    async def wait() -> str:
        clock.advance(101)
        await asyncio.Event().wait()
        return "x"

    @register_ai_service(tools=[refund, wait], timeout=100)
    class Timed(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(REFUND), asks(tool_call("wait")), services=(Timed,)) as here:
        waiting = await here.get(Timed).ask("x")
        clock.advance(1000)
        with pytest.raises(InvocationTimeoutError):
            await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert ran == [7]


# --- where it runs on


class User(BaseModel):
    name: str


@dataclass
class Tenant:
    name: str


class Tickets:
    def __init__(self, user: User) -> None:
        self.user = user

    @tool(requires_approval=True)
    def close(self, ticket: int, tenant: Inject[Tenant | None], who: Inject[SecurityIdentity | None]) -> str:
        current = InvocationContext.current()
        assert current is not None
        ran.append((self.user, tenant, who.name if who else None, dict(current.attributes)))
        return "closed"


@register_ai_service(tools=Tickets)
class Help(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


CLOSE = tool_call("close", {"ticket": 1})


def help_desk(*replies: Any, store: Any, **options: Any) -> Container:
    options = {"run_seeds": (User, Tenant), "seeds": (SecurityIdentity,), **options}
    return container(*replies, store=store, services=(Help,), **options)


async def suspended_help(store: Any, **attributes: Any) -> str:
    async with help_desk(asks(CLOSE), store=store) as here:
        seeds = {User: User(name="ann"), Tenant: Tenant("acme"), SecurityIdentity: SecurityIdentity("ann", {"support"})}
        async with here.request_scope(seeds):
            with invocation_attributes(**attributes):
                return (await here.get(Help).ask("x")).run_id or ""


async def test_seeds_identity_and_attributes_are_there_again_in_another_process() -> None:
    store = InMemoryRunStore()
    run_id = await suspended_help(store, tenant="acme", limit=Decimal("1.5"))
    async with help_desk(says("done"), store=store) as here:
        scope = here.request_scope({User: User(name="the person who answers")})
        async with scope:
            with invocation_attributes(tenant="other", more=1):
                await here.runs.resume(run_id, {"0": approve()})

    assert ran == [(User(name="ann"), Tenant("acme"), "ann", {"tenant": "acme", "limit": "1.5"})]


async def test_an_attribute_that_cannot_be_written_is_named_when_the_call_is_suspended() -> None:
    with pytest.raises(IllegalConfigurationError, match="'lock'"):
        await suspended_help(InMemoryRunStore(), lock=object())


class Vault(BaseModel):
    keys: dict[str, SecretStr]


async def test_a_secret_that_would_be_lost_is_named_when_the_call_is_suspended() -> None:
    vault = Vault(keys={"door": SecretStr("sesame")})
    async with container(asks(REFUND), run_seeds=(Vault,)) as here, here.request_scope({Vault: vault}):
        with pytest.raises(IllegalConfigurationError, match=r"seed Vault .* contains a SecretStr") as raised:
            await here.get(Desk).chat("room", "refund")
        assert "sesame" not in str(raised.value)
        assert await here.runs.list() == []
    async with container(asks(REFUND)) as here:
        with (
            invocation_attributes(key=[SecretStr("sesame")]),
            pytest.raises(IllegalConfigurationError, match="'key'") as raised,
        ):
            await here.get(Desk).chat("room", "refund")
        assert "sesame" not in str(raised.value)
    async with container(asks(REFUND), asks(REFUND), run_seeds=(Vault,)) as here:
        async with here.request_scope({Vault: Vault(keys={"**********": SecretStr("")})}):
            with pytest.raises(IllegalConfigurationError, match="SecretStr"):
                await here.get(Desk).chat("room", "**********")
        assert (await here.get(Desk).chat("room", "**********")).pending  # stars of the user's own


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_identity_loader_refreshes_the_identity_or_refuses(is_async: bool) -> None:
    answers: dict[str, Any] = {"ann": None}

    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            async def later() -> Any:
                return answers[identity.name]

            return later() if is_async else answers[identity.name]

    store = InMemoryRunStore()
    run_id = await suspended_help(store)
    async with help_desk(says("done"), store=store).register(Directory) as here:
        with pytest.raises(ForbiddenError, match=r"'ann' is not allowed .*: Directory no longer knows this identity"):
            await here.runs.resume(run_id, {"0": approve()})
        answers["ann"] = "ann b."
        with pytest.raises(TypeError, match=r"Directory\.load returned str; return a SecurityIdentity or None"):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"
        answers["ann"] = SecurityIdentity("ann b.")
        await here.runs.resume(run_id, {"0": approve()})
    assert ran[0][2] == "ann b."


async def test_roles_are_checked_again_on_resume() -> None:
    roles = {"ann": {"support"}}

    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            return SecurityIdentity(identity.name, roles[identity.name])

    @tool(requires_approval=True)
    @roles_allowed("support")
    def close() -> str:
        ran.append("closed")
        return "closed"

    @register_ai_service(tools=close, on_unknown_tool=lambda error, context: "no such tool")
    class Closing(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    store = InMemoryRunStore()
    made = container(asks(tool_call("close")), says("done"), store=store, services=(Closing, Directory))
    async with made.register_instance(SecurityIdentity("guest"), SecurityIdentity) as here:
        async with here.request_scope({SecurityIdentity: SecurityIdentity("ann", {"support"})}):
            run_id = (await here.get(Closing).ask("x")).run_id or ""
        roles["ann"] = set()
        result = await here.runs.resume(run_id, {"0": approve()})

    assert result.tool_executions[0].result == "no such tool"
    assert ran == []


async def test_a_person_who_may_no_longer_call_the_service_cannot_continue_and_the_run_stays() -> None:
    roles: dict[str, set[str]] = {"ann": set()}

    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            return SecurityIdentity(identity.name, roles[identity.name])

    @register_ai_service(tools=refund)
    @roles_allowed("support")
    class Guarded(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    made = container(asks(REFUND), says("done"), services=(Guarded, Directory), seeds=(SecurityIdentity,))
    async with made as here:
        async with here.request_scope({SecurityIdentity: SecurityIdentity("ann", {"support"})}):
            run_id = (await here.get(Guarded).ask("x")).run_id or ""
        with pytest.raises(ForbiddenError, match="support"):
            await here.runs.resume(run_id, {"0": approve()})
        run = await here.runs.get(run_id)
        assert (run.status, len(run.pending), run.history) == ("suspended", 1, ())
        roles["ann"] = {"support"}
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "done"


# --- services in a tool's own code


@register_ai_service(tools=refund)
class Clerk(Protocol):
    async def do(self, text: str) -> str: ...


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("catches", [False, True])
async def test_a_service_called_in_a_tools_own_code_raises_its_suspension_there(catches: bool, grouped: bool) -> None:
    seen: list[str] = []

    class Office:
        def __init__(self, clerk: Clerk) -> None:
            self.clerk = clerk

        @tool
        async def forward(self, text: str) -> str:
            try:
                return await self.clerk.do(text)
            except RunSuspendedError as error:
                seen.append(error.run_id)
                if not catches and grouped:
                    raise ExceptionGroup("both", [ExceptionGroup("inner", [error]), ValueError()]) from None
                if not catches:
                    raise
                return f"waiting: {error.run_id}"

    @register_ai_service(tools=[Office, refund])
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...

    replies = asks(tool_call("forward", {"text": "x"})), asks(REFUND), says("forwarded")
    async with container(*replies, services=(Front, Clerk)) as here:
        if catches:
            assert await here.get(Front).ask("x") == "forwarded"
        else:
            with pytest.raises(IllegalConfigurationError, match="list Clerk as a tool") as raised:
                await here.get(Front).ask("x")
            assert raised.value.problems[0].where.endswith("Office.forward")
        assert (await here.runs.get(seen[0])).status == ("suspended" if catches else "cancelled")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("place", ["guardrail", "interceptor"])
async def test_a_service_that_suspends_in_a_guardrail_or_an_interceptor_is_cancelled(
    place: str, streamed: bool
) -> None:
    class Asking(InputGuardrail, ModelInterceptor):
        def __init__(self, clerk: Clerk) -> None:
            self.clerk = clerk

        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            await self.clerk.do("x")
            return self.success()

        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
            await self.clerk.do("x")
            return await proceed(call)

    decorate = input_guardrails(Asking) if place == "guardrail" else interceptors(Asking)

    @register_ai_service
    @decorate
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...
        def events(self, text: str) -> TokenStream: ...

    async with container(asks(REFUND), says("never"), services=(Front, Clerk)) as here:
        with pytest.raises(RunSuspendedError):
            if streamed:
                _ = [event async for event in here.get(Front).events("x")]
            else:
                await here.get(Front).ask("x")
        [run] = await here.runs.list()
        assert (run.service.rpartition(".")[2], run.status) == ("Clerk", "cancelled")


async def test_a_suspended_run_of_another_host_does_not_hide_the_error() -> None:
    outside = create_ai_service(Clerk, chat_model=ScriptedChatModel([asks(REFUND)]), tools=[refund])

    @tool
    async def forward() -> str:
        return await outside.do("x")

    @register_ai_service(tools=forward)
    class Front(Protocol):
        async def ask(self, text: str) -> str: ...

    async with container(asks(tool_call("forward")), services=(Front,)) as here:
        with pytest.raises(IllegalConfigurationError, match="list Clerk as a tool") as raised:
            await here.get(Front).ask("x")
        assert isinstance(raised.value.__cause__, RunSuspendedError)


# --- a program that changed


def changed(kind: str) -> Any:
    """Return a service named Desk that differs in one respect from the one whose run is stored."""
    name = "other" if kind == "tool" else "pay"

    if kind == "tool arguments":

        @tool(requires_approval=True, name=name)
        def paying(euros: int, to: str) -> str:
            return "paid"
    else:

        @tool(requires_approval=True, name=name)
        def paying(euros: int) -> str:  # type: ignore[misc]  # the other variant
            return "paid"

    class Changed(Protocol):
        if kind == "method":

            async def asking(self, text: str) -> str: ...
        elif kind == "argument type":

            async def ask(self, number: int, text: str) -> str: ...  # type: ignore[misc]
        elif kind == "new parameter":

            async def ask(self, text: str, language: str) -> str: ...  # type: ignore[misc]
        elif kind == "return type":

            async def ask(self, number: int) -> Invoice: ...  # type: ignore[misc]
        else:

            async def ask(self, number: int) -> str: ...  # type: ignore[misc]

    from toolbox import system_message, user_message

    for method in ("ask", "asking"):
        if hasattr(Changed, method):
            parameters = "{text}" if kind in ("method", "argument type", "new parameter") else ""
            shown = "{number}" if kind == "argument type" or not parameters else ""
            shown += "{language}" if kind == "new parameter" else ""
            user_message(f"say {parameters} {shown}")(getattr(Changed, method))
    assert system_message
    Changed.__qualname__ = "Gone" if kind == "service" else "Stored"
    Changed.__name__ = Changed.__qualname__
    return register_ai_service(tools=paying)(Changed)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("service", "no service"),
        ("method", "no method"),
        ("tool", "no longer offers the tool 'pay'"),
        ("tool arguments", "no longer accepts the arguments"),
        ("argument type", "'text'"),
        ("new parameter", "number"),
        ("return type", "return type"),
    ],
)
async def test_a_program_that_changed_refuses_the_run_with_the_reason(kind: str, reason: str) -> None:
    store = InMemoryRunStore()
    original = changed("nothing")
    async with container(asks(tool_call("pay", {"euros": 5})), store=store, services=(original,)) as here:
        run_id = await run_id_of(here.get(original).ask(3))
    async with container(says("x"), store=store, services=(changed(kind),)) as here:
        with pytest.raises(RunIncompatibleError, match=reason):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"
    async with container(says("x"), store=store, services=(changed("nothing"),)) as here:
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "x"


async def test_a_seed_whose_type_changed_refuses_the_run() -> None:
    def program(seed: Any, *replies: Any) -> Container:
        @tool(requires_approval=True)
        def pay(user: Inject[seed]) -> str:
            ran.append(user.name)
            return "paid"

        class Stored(Protocol):
            async def ask(self, text: str) -> Result[str]: ...

        Stored.__qualname__ = "Stored"
        return container(*replies, store=store, services=(register_ai_service(tools=pay)(Stored),), run_seeds=(seed,))

    class Older(BaseModel):
        name: str

    class Newer(BaseModel):
        name: str
        age: int

    Older.__qualname__ = Newer.__qualname__ = "Customer"
    store = InMemoryRunStore()
    async with program(Older, asks(tool_call("pay"))) as here, here.request_scope({Older: Older(name="ann")}):
        [service] = [cls for cls in here._internals.host.plans if cls.__qualname__ == "Stored"]
        run_id = (await here.get(service).ask("x")).run_id or ""
    async with program(Newer, says("x")) as here:
        with pytest.raises(RunIncompatibleError, match="age"):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"
    async with program(Older, says("x")) as here:
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "x"
    assert ran == ["ann"]


class Wine(BaseModel):
    name: str


def nested(kind: str) -> Any:
    """Return a service whose tool is another service; one of them differs from those whose run is stored."""

    class Cellar:
        if kind != "inner tool":

            @tool(requires_approval=True)
            def fetch(self, wine: str) -> str:
                ran.append(wine)
                return "fetched"

        @tool
        def look(self) -> str: ...

    class Sommelier(Protocol):
        if kind == "inner method":

            @tool(name="advise")
            async def recommend(self, wish: str) -> str: ...
        elif kind == "inner parameter":

            @tool
            async def advise(self, wish: str, budget: int) -> str: ...  # type: ignore[misc]
        else:

            @tool
            async def advise(self, wish: str) -> str: ...  # type: ignore[misc]

    if kind == "inner parameter":
        from toolbox import user_message

        user_message("{wish} {budget}")(Sommelier.advise)

    @tool
    def advise(wish: str) -> str:
        ran.append(wish)
        return "water"

    class Waiter(Protocol):
        async def serve(self, wish: str) -> Result[str]: ...

    for each, name in ((Sommelier, "Sommelier"), (Waiter, "Waiter")):
        each.__qualname__ = each.__name__ = "Renamed" if (kind, name) == ("inner service", "Sommelier") else name
    inner = register_ai_service(tools=Cellar)(Sommelier)
    tools = {"outer tool": (), "no service": advise}.get(kind, inner)
    return register_ai_service(tools=tools)(Waiter), inner


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("inner service", "no method 'advise' in .*Sommelier"),
        ("inner method", "no method 'advise'"),
        ("inner tool", "no longer offers the tool 'fetch'"),
        ("inner parameter", r"tool 'advise' no longer accepts the arguments of call 0 \(budget: Field required\)"),
        ("outer tool", "no longer offers the tool 'advise'"),
        ("no service", r"the tool 'advise' of Waiter.serve is no longer .*Sommelier.advise"),
    ],
)
async def test_a_nested_service_that_changed_refuses_the_run_with_the_reason(kind: str, reason: str) -> None:
    store = InMemoryRunStore()
    advice, fetching = tool_call("advise", {"wish": "red"}), tool_call("fetch", {"wine": "merlot"})
    outer, inner = nested("nothing")
    async with container(asks(advice), asks(fetching), store=store, services=(outer, inner)) as here:
        suspended = await here.get(outer).serve("wine")
        assert [each.id for each in suspended.pending] == ["0/0"]
    changed_outer, changed_inner = nested(kind)
    services = (changed_outer,) if kind in ("outer tool", "no service") else (changed_outer, changed_inner)
    if kind in ("outer tool", "no service"):
        services = (*services, changed_inner)
    async with container(says("x"), store=store, services=services) as here:
        for answers in ({"0/0": approve()}, {"0/0": reject()}):
            with pytest.raises(RunIncompatibleError, match=reason):
                await here.runs.resume(suspended.run_id or "", answers)
        run = await here.runs.get(suspended.run_id or "")
        assert (run.status, run.pending) == ("suspended", suspended.pending)
    assert ran == []
    async with container(says("inner"), says("x"), store=store, services=nested("nothing")) as here:
        assert (await here.runs.resume(suspended.run_id or "", {"0/0": approve()})).content == "x"
    assert ran == ["merlot"]


async def test_a_seed_that_is_not_kept_any_more_refuses_the_run() -> None:
    store = InMemoryRunStore()
    async with (
        container(asks(REFUND), store=store, run_seeds=(User,)) as here,
        here.request_scope({User: User(name="ann")}),
    ):
        run_id = (await here.get(Desk).chat("room", "x")).run_id or ""
    async with container(says("x"), store=store) as here:
        with pytest.raises(RunIncompatibleError, match=r"seed .*User, which is not in run_seeds= any more"):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"


def paying(requires_approval: Any, deferred: bool = False) -> Any:
    @tool(requires_approval=requires_approval, deferred=deferred)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    class Paying(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    Paying.__qualname__ = "Paying"
    return register_ai_service(tools=pay)(Paying)


@pytest.mark.parametrize(
    ("answer", "paid"),
    [(approve(), [5]), (reject("no"), []), (approve(arguments={"euros": 6}), [6])],
    ids=["approve", "reject", "edit"],
)
async def test_a_tool_that_needs_no_approval_any_more_takes_the_answer_all_the_same(answer: Any, paid: Any) -> None:
    store, before = InMemoryRunStore(), paying(True)
    async with container(asks(tool_call("pay", {"euros": 5})), store=store, services=(before,)) as here:
        run_id = (await here.get(before).ask("x")).run_id or ""
    async with container(says("x"), store=store, services=(paying(False),)) as here:
        assert (await here.runs.resume(run_id, {"0": answer})).content == "x"
    assert ran == paid


async def test_a_document_of_another_version_refuses_the_run() -> None:
    store = InMemoryRunStore()
    async with container(asks(REFUND), store=store) as here:
        run_id = (await here.get(Desk).chat("room", "x")).run_id or ""
        stored = await store.load(run_id)
        assert stored is not None
        newer = replace(stored, document=stored.document.replace('"version": 1', '"version": 2'))
        store._runs[run_id].run = newer
        with pytest.raises(RunIncompatibleError, match="format version 2"):
            await here.runs.resume(run_id, {"0": approve()})


# --- managing runs


async def test_runs_are_listed_cancelled_deleted_and_purged() -> None:
    async with container(asks(REFUND), asks(REFUND), says("done")) as here:
        first = await run_id_of(here.get(Desk).invoice("one"))
        second = (await here.get(Desk).chat("room", "two")).run_id or ""
        assert [each.id for each in await here.runs.list(status="suspended")] == [second, first]
        assert [each.id for each in await here.runs.list(service=Desk, limit=1)] == [second]
        assert await here.runs.list(service="shop:Other") == []

        with pytest.raises(RunStateError, match="suspended"):
            await here.runs.delete(first)
        run = await here.runs.cancel(first, "not needed")
        assert (run.status, run.pending, run.error) == ("cancelled", (), "not needed")
        assert [(each.answer, each.reason) for each in run.history] == [("cancel", "not needed")]
        with pytest.raises(RunCancelledError, match="not needed"):
            await here.runs.resume(first, {})
        assert await here.runs.purge(timedelta(days=1)) == 0
        assert await here.runs.purge(timedelta(0)) == 1
        with pytest.raises(RunNotFoundError):
            await here.runs.get(first)
        await here.runs.resume(second, {"0": reject()})
        await here.runs.delete(second)
        assert await here.runs.list() == []


async def test_a_tool_that_ends_a_resumed_call_fails_the_run() -> None:
    from toolbox import ToolAbort

    @tool(requires_approval=True)
    def stop() -> str:
        raise ToolAbort("the customer has no account")

    @register_ai_service(tools=stop)
    class Stopping(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("stop")), services=(Stopping,)) as here:
        run_id = (await here.get(Stopping).ask("x")).run_id or ""
        with pytest.raises(ToolAbort):
            await here.runs.resume(run_id, {"0": approve()})
        run = await here.runs.get(run_id)
        assert (run.status, run.error) == ("failed", "ToolAbort: the customer has no account")
        with pytest.raises(RunFailedError):
            await here.runs.resume(run_id, {})


# --- events


class Seen(EventListener):
    def __init__(self) -> None:
        self.events: list[InvocationEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        self.events.append(event)


async def test_listeners_see_suspensions_answers_and_the_continuation() -> None:
    seen = Seen()
    async with container(asks(REFUND), says("done")).register_instance(seen, EventListener) as here:
        result = await here.get(Desk).chat("room", "refund")
        assert isinstance(seen.events[-1], ServiceSuspendedEvent)
        assert (seen.events[-1].run_id, seen.events[-1].pending) == (result.run_id, result.pending)
        [suspended] = [each for each in seen.events if isinstance(each, ToolSuspendedEvent)]
        assert (suspended.kind, suspended.request.name) == ("approval", "refund")
        seen.events.clear()
        await here.runs.resume(result.run_id or "", {"0": approve()}, by="bob")

    answered, resumed = seen.events[0], seen.events[1]
    assert isinstance(answered, RunAnsweredEvent)
    assert (answered.call.id, answered.answer, answered.by) == ("0", "approve", "bob")
    assert isinstance(resumed, RunResumedEvent)
    assert type(seen.events[-1]).__name__ == "ServiceCompletedEvent"


async def test_a_run_is_started_once_and_then_resumed() -> None:
    seen = Seen()
    async with container(asks(REFUND), says("done")).register_instance(seen, EventListener) as here:
        run = await here.runs.start(here.get(Desk).chat, "room", "refund")
        async for event in here.runs.events(run):
            if isinstance(event.event, RunSuspended):
                break
        kinds = [type(each) for each in seen.events]
        assert kinds.index(RunStartedEvent) == kinds.index(ServiceStartedEvent) - 1
        assert RunResumedEvent not in kinds
        seen.events.clear()
        await here.runs.resume(run.id, {"0": approve()})

    kinds = [type(each) for each in seen.events]
    assert kinds.count(RunResumedEvent) == 1
    assert RunStartedEvent not in kinds


# --- without a container


async def test_services_without_a_container_are_suspended_and_resumed() -> None:
    store = InMemoryRunStore()
    model = ScriptedChatModel([asks(REFUND)])
    desk = create_ai_service(Clerk, chat_model=model, run_store=store)
    run_id = await run_id_of(desk.do("refund"))

    again = create_ai_service(Clerk, chat_model=ScriptedChatModel([says("done")]), run_store=store)
    result = await runs_of(again).resume(run_id, {"0": approve()})

    assert result.content == "done"
    assert ran == [7]
    with pytest.raises(TypeError, match="create_ai_service"):
        runs_of("desk")


async def test_nested_services_without_a_container_share_the_run() -> None:
    class Inner(Protocol):
        @tool
        async def help(self, text: str) -> str:
            """Help."""
            ...

    class Outer(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    inner = create_ai_service(Inner, chat_model=ScriptedChatModel([asks(REFUND), says("inner")]), tools=[refund])
    outer_model = ScriptedChatModel([asks(tool_call("help", {"text": "x"})), says("outer")])
    outer = create_ai_service(Outer, chat_model=outer_model, tools=[inner])
    waiting = await outer.ask("x")
    assert [each.id for each in waiting.pending] == ["0/0"]
    result = await runs_of(outer).resume(waiting.run_id or "", {"0/0": approve()})

    assert result.content == "outer"
    assert ran == [7]


# --- traces and logs


async def test_spans_of_a_suspended_call_end_and_name_the_run(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from toolbox import LoggingListener
    from toolbox.otel import OpenTelemetryListener

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    listener = OpenTelemetryListener(provider)
    made = container(asks(REFUND), says("done")).register_instance(listener, EventListener)
    with caplog.at_level("INFO", "toolbox.invocations"):
        async with made.register_instance(LoggingListener(), EventListener) as here:
            result = await here.get(Desk).chat("room", "refund")
            before = {each.name: dict(each.attributes or {}) for each in spans.get_finished_spans()}
            spans.clear()
            await here.runs.resume(result.run_id or "", {"0": approve()}, by="bob")
    after = {each.name: dict(each.attributes or {}) for each in spans.get_finished_spans()}

    assert before["invoke_agent Desk"]["toolbox.run.suspended"] is True
    assert before["invoke_agent Desk"]["toolbox.run.id"] == result.run_id
    assert before["execute_tool refund"]["toolbox.run.suspended_by"] == "approval"
    assert after["answer refund"]["toolbox.run.answer"] == "approve"
    assert "bob" not in str(after)
    assert after["invoke_agent Desk"]["toolbox.run.resumed"] is True
    assert after["invoke_agent Desk"]["toolbox.run.id"] == result.run_id
    assert "execute_tool refund" in after
    logged = [record.event for record in caplog.records]  # type: ignore[attr-defined]  # set by the listener
    assert [
        each for each in logged if each in ("tool_suspended", "service_suspended", "run_answered", "run_resumed")
    ] == [
        "tool_suspended",
        "service_suspended",
        "run_answered",
        "run_resumed",
    ]


# --- with guardrails, interceptors and concurrent tools


async def test_guardrails_see_edited_arguments_but_not_the_original_ones_again() -> None:
    from toolbox.guardrails import (
        ToolInputGuardrail,
        ToolOutputGuardrail,
        tool_input_guardrails,
        tool_output_guardrails,
    )

    seen: list[Any] = []

    class Known(ToolInputGuardrail):
        async def validate(self, request: Any) -> Any:
            seen.append(dict(request.arguments))
            return self.failure("unknown") if request.arguments["euros"] > 100 else self.success()

    class Loud(ToolOutputGuardrail):
        async def validate(self, request: Any) -> Any:
            return self.success_with(request.result.text + "!")

    @tool(requires_approval=True)
    @tool_input_guardrails(Known)
    @tool_output_guardrails(Loud)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    calls = [tool_call("pay", {"euros": euros}) for euros in (5, 500, 6)]
    async with container(asks(*calls), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        assert [each.id for each in waiting.pending] == ["0", "2"]
        assert seen == [{"euros": 5}, {"euros": 500}, {"euros": 6}]
        seen.clear()
        answers = {"0": approve(arguments={"euros": 7}), "2": approve(arguments={"euros": 700})}
        result = await here.runs.resume(waiting.run_id or "", answers)

    assert seen == [{"euros": 7}, {"euros": 700}]
    assert ran == [7]
    assert [each.result for each in result.tool_executions] == [
        "paid!",
        "Input validation failed: unknown",
        "Input validation failed: unknown",
    ]


async def test_arguments_that_an_interceptor_changes_need_approval_again() -> None:
    from toolbox.interceptors import ToolInterceptor, interceptors

    @application_scoped
    class Doubling(ToolInterceptor):
        async def around_tool(self, call: Any, proceed: Any) -> Any:
            ran.append("around")
            return await proceed(call.with_arguments(euros=call.arguments["euros"] * 2))

    @tool(requires_approval=True)
    @interceptors(Doubling)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay", {"euros": 5})), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        assert (ran, [each.arguments for each in waiting.pending]) == ([], [{"euros": 5}])
        waiting = await here.runs.resume(waiting.run_id or "", {"0": approve()})
        assert (ran, [each.arguments for each in waiting.pending]) == (["around"], [{"euros": 10}])
        result = await here.runs.resume(waiting.run_id or "", {"0": approve()})

    assert result.content == "done"
    assert ran == ["around", "around", 10]


async def test_a_rejection_does_not_reach_interceptors() -> None:
    from toolbox.interceptors import ToolInterceptor, interceptors

    @application_scoped
    class Around(ToolInterceptor):
        async def around_tool(self, call: Any, proceed: Any) -> Any:
            ran.append("around")
            return await proceed(call)

    @tool(requires_approval=True)
    @interceptors(Around)
    def pay() -> str:
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay")), says("done"), services=(Payments,)) as here:
        waiting = await here.get(Payments).ask("x")
        await here.runs.resume(waiting.run_id or "", {"0": reject("no")})
    assert ran == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_concurrent_tools_are_suspended_and_continued(streamed: bool) -> None:
    @tool
    async def look(n: int) -> int:
        ran.append(("look", n))
        return n

    @register_ai_service(tools=[refund, look], concurrent_tools=True)
    class Many(Protocol):
        async def ask(self, text: str) -> Result[str]: ...
        def events(self, text: str) -> TokenStream: ...

    calls = [REFUND, tool_call("look", {"n": 1}), tool_call("refund", {"order": 8}), tool_call("look", {"n": 2})]
    async with container(asks(*calls), says("done"), services=(Many,)) as here:
        if streamed:
            events = [each async for each in here.get(Many).events("x")]
            run_id, pending = events[-1].run_id, events[-1].pending
            assert sum(type(each).__name__ == "BeforeToolExecution" for each in events) == 4
        else:
            result = await here.get(Many).ask("x")
            run_id, pending = result.run_id, result.pending
        assert [each.id for each in pending] == ["0", "2"]
        assert sorted(ran) == [("look", 1), ("look", 2)]
        result = await here.runs.resume(run_id, {"2": approve()})
        result = await here.runs.resume(run_id, {"0": approve()})

    assert [each.result for each in result.tool_executions] == ["refunded 7", "1", "refunded 8", "2"]
    assert ran[2:] == [8, 7]


async def test_a_run_that_is_cancelled_while_it_continues_ends_with_the_cancellation() -> None:
    started = asyncio.Event()

    @tool(requires_approval=True)
    async def slow() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    @register_ai_service(tools=slow)
    class Slow(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    store = InMemoryRunStore(lease=0.1)
    async with container(asks(tool_call("slow")), store=store, services=(Slow,)) as here:
        run_id = (await here.get(Slow).ask("x")).run_id or ""
        resuming = asyncio.create_task(here.runs.resume(run_id, {"0": approve()}))
        await started.wait()
        await here.runs.cancel(run_id, "changed our minds")
        with pytest.raises(RunCancelledError, match="changed our minds"):
            await resuming


async def test_a_process_whose_event_loop_stood_still_for_a_lease_does_not_take_its_own_run_over() -> None:
    class Late(InMemoryRunStore):
        """Renews a lease only after the process has looked for lapsed runs."""

        def __init__(self) -> None:
            super().__init__(lease=0.05)
            self.looked = asyncio.Event()

        async def renew(self, run_id: str, generation: int) -> bool:
            await self.looked.wait()
            for _ in range(20):
                await asyncio.sleep(0)  # and after it has tried to take them over
            return await super().renew(run_id, generation)

        async def lapsed(self, limit: int = 100) -> list[str]:
            if found := await super().lapsed(limit):
                self.looked.set()
            return found

    store = Late()

    @tool(requires_approval=True)
    async def slow() -> str:
        ran.append("slow")
        await store.looked.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        return "done"

    @register_ai_service(tools=slow)
    class Slow(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("slow")), says("done"), store=store, services=(Slow,)) as here:
        run_id = (await here.get(Slow).ask("x")).run_id or ""
        result = await here.runs.resume(run_id, {"0": approve()})

    assert result.content == "done"
    assert ran == ["slow"]


async def test_tools_that_need_approval_do_not_run_outside_of_services() -> None:
    from toolbox.hosts.hosting import ContainerHost

    async with container(says("x")) as here:
        host: ContainerHost = here._internals.host
        tools = host.plans[Desk]["events"].toolset.by_name
        outcome = await host.execute(tools, REFUND, Desk, host.failures)
    assert outcome.execution.is_error
    assert "approval" in outcome.execution.result
    assert ran == []


async def test_notes_of_the_invocation_are_there_again() -> None:
    @tool
    def remember(context: InvocationContext) -> str:
        context.notes["seen"] = [1, 2]
        context.notes["lock"] = object()
        return "ok"

    @tool(requires_approval=True)
    def recall(context: InvocationContext) -> str:
        ran.append(dict(context.notes))
        return "ok"

    @register_ai_service(tools=[remember, recall])
    class Noting(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("remember"), tool_call("recall")), says("x"), services=(Noting,)) as here:
        waiting = await here.get(Noting).ask("x")
        await here.runs.resume(waiting.run_id or "", {"1": approve()})
    assert ran == [{"seen": [1, 2]}]


@tool(name="pay", requires_approval=True)
def pay_euros(euros: int) -> str:
    ran.append(("pay", euros))
    return "paid"


async def test_replaced_arguments_of_a_providers_tool_are_checked_before_anything_changes() -> None:
    class Provider:
        async def provide_tools(self, request: Any) -> ToolProviderResult:
            return ToolProviderResult([pay_euros])

    @register_ai_service(tool_provider=Provider)
    class Paying(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("pay", {"euros": 5})), says("done"), services=(Paying,)) as here:
        run_id = (await here.get(Paying).ask("x")).run_id or ""
        with pytest.raises(RunAnswerError, match="euros") as raised:
            await here.runs.resume(run_id, {"0": approve(arguments={"euros": "many"})})
        assert raised.value.problems
        run = await here.runs.get(run_id)
        assert (run.status, len(run.pending), run.history) == ("suspended", 1, ())
        assert (await here.runs.resume(run_id, {"0": approve(arguments={"euros": 7})})).content == "done"
    assert ran == [("pay", 7)]


async def test_replaced_arguments_of_a_nested_providers_tool_are_checked_before_anything_changes() -> None:
    seen: list[str] = []

    class Provider:
        def provide_tools(self, request: Any) -> ToolProviderResult:
            seen.append(request.user_message.text)

            return ToolProviderResult([pay_euros])

    @register_ai_service(tool_provider=Provider)
    class Paying(Protocol):
        @tool
        @system_message("Pay in {currency}.")
        async def order(self, room: MemoryId[str | None], text: str, currency: str = "EUR") -> str: ...

    @register_ai_service(tools=Paying)
    class Outer(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    replies = [asks(tool_call("order", {"text": "tea"})), asks(tool_call("pay", {"euros": 5})), says("in"), says("out")]
    async with container(*replies, services=(Outer,)) as here:
        run_id = (await here.get(Outer).ask("x")).run_id or ""
        [call] = (await here.runs.get(run_id)).pending
        with pytest.raises(RunAnswerError, match="euros") as raised:
            await here.runs.resume(run_id, {call.id: approve(arguments={"euros": "many"})})
        assert raised.value.problems
        run = await here.runs.get(run_id)
        assert (run.status, len(run.pending), run.history) == ("suspended", 1, ())
        assert (await here.runs.resume(run_id, {call.id: approve(arguments={"euros": 7})})).content == "out"
    assert ran == [("pay", 7)]
    assert set(seen) == {"tea"}


async def test_tools_of_a_provider_can_need_approval() -> None:
    from toolbox import ToolProviderRequest

    def provide(request: ToolProviderRequest) -> Any:
        return [refund]

    @register_ai_service(tool_provider=provide)
    class Provided(Protocol):
        async def ask(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with container(asks(REFUND), says("done"), services=(Provided,)) as here:
        waiting = await here.get(Provided).ask("room", "x")
        with pytest.raises(ConversationSuspendedError):
            await here.get(Provided).ask("room", "y")
        result = await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert result.content == "done"
    assert ran == [7]


async def test_errors_about_another_run_fail_the_run_whose_tool_raised_them() -> None:
    from toolbox.errors import RunStoreError

    @tool(requires_approval=True)
    def other() -> str:
        raise RunStoreError("another run", "its database is down")

    @register_ai_service(tools=other)
    class Other(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("other")), services=(Other,)) as here:
        run_id = (await here.get(Other).ask("x")).run_id or ""
        with pytest.raises(RunStoreError):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "failed"


# --- limits of calls that are started or continued as a stream


class Waiting(ScriptedChatModel):
    """Never answers the second request: the time limit ends instead."""

    def __init__(self, clock: Clock, *replies: Any) -> None:
        super().__init__(replies)
        self._clock = clock

    async def chat(self, request: Any) -> ChatResponse:
        if len(self.requests) == 1:
            self._clock.advance(101)
            await asyncio.Event().wait()
        return await super().chat(request)

    stream: Any = None


@register_ai_service(tools=refund, timeout=100)
class Hurried(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


async def test_a_time_limit_ends_a_call_that_continues_as_a_stream(clock: Clock) -> None:
    async with Container(models={"default": Waiting(clock, asks(REFUND))}).register(Hurried) as here:
        run_id = (await here.get(Hurried).ask("x")).run_id or ""
        with pytest.raises(InvocationTimeoutError):
            _ = [each async for each in here.runs.resume_stream(run_id, {"0": approve()})]
        assert (await here.runs.get(run_id)).status == "failed"


async def test_a_time_limit_ends_a_started_call(clock: Clock) -> None:
    model = Waiting(clock, "never", "never")
    model.requests.append(ChatRequest([]))
    async with Container(models={"default": model}).register(Hurried) as here:
        run = await here.runs.start(here.get(Hurried).ask, "x")
        with pytest.raises(RunFailedError, match="longer than its limit"):
            await here.runs.result(run)


@register_ai_service(timeout=100)
class Rooms(Protocol):
    async def ask(self, room: MemoryId[str], text: str) -> str: ...


async def test_waiting_for_the_conversation_does_not_count_for_the_timeout_of_a_run(clock: Clock) -> None:
    async def answer_after_a_minute(request: ChatRequest) -> str:
        await both_have_begun.wait()
        clock.advance(60)
        return "done"

    class Begun(EventListener):
        def __init__(self) -> None:
            self.count = 0

        def on_event(self, event: InvocationEvent) -> None:
            self.count += isinstance(event, ServiceStartedEvent)
            if self.count == 2:  # the other one waits as soon as it is its turn on the loop
                asyncio.get_running_loop().call_later(0.05, both_have_begun.set)

    both_have_begun = asyncio.Event()
    model = ScriptedChatModel([answer_after_a_minute, answer_after_a_minute])
    made = Container(models={"default": model}).register(Rooms).register_instance(Begun(), EventListener)
    async with made as here:
        first = await here.runs.start(here.get(Rooms).ask, "7", "first")
        second = await here.runs.start(here.get(Rooms).ask, "7", "second")

        assert await here.runs.result(first) == "done"
        assert await here.runs.result(second) == "done"  # 60 seconds of waiting and 60 of work


@register_ai_service
class Inside(Protocol):
    @tool
    async def inside(self, text: str) -> str: ...


@register_ai_service(tools=Inside, limits=UsageLimits(model_calls=1))
class Thrifty(Protocol):
    async def ask(self, text: str) -> str: ...


async def test_a_limit_that_an_inner_service_reaches_ends_a_started_call() -> None:
    async with container(asks(tool_call("inside", {"text": "x"})), says("never"), services=(Thrifty,)) as here:
        run = await here.runs.start(here.get(Thrifty).ask, "x")
        with pytest.raises(RunFailedError, match="model_calls=1"):
            await here.runs.result(run, timeout=60)


async def test_code_of_a_started_call_sees_its_context() -> None:
    seen: list[str] = []

    class Noting(InputGuardrail):
        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            seen.append(InvocationContext.current().method)
            return self.success()

    @register_ai_service
    @input_guardrails(Noting)
    class Noted(Protocol):
        async def ask(self, text: str) -> str: ...

    async with container(says("done"), services=(Noted,)) as here:
        run = await here.runs.start(here.get(Noted).ask, "x")
        assert await here.runs.result(run, timeout=60) == "done"
    assert seen == ["ask"]


# --- the store of a service without a container


@pytest.mark.parametrize("store", [InMemoryRunStore(), InMemoryRunStore, None])
async def test_services_without_a_container_take_a_store_or_its_class(store: Any) -> None:
    made = create_ai_service(
        Clerk, chat_model=ScriptedChatModel([asks(REFUND), says("done")]), tools=[refund], run_store=store
    )
    run_id = await run_id_of(made.do("x"))
    assert (await runs_of(made).resume(run_id, {"0": approve()})).content == "done"


@pytest.mark.parametrize("store", [3, [], "sqlite:///runs.db", int])
def test_what_is_not_a_store_is_a_problem(store: Any) -> None:
    with pytest.raises(IllegalConfigurationError, match=r"run_store=: .* is not a RunStore"):
        create_ai_service(Clerk, chat_model=ScriptedChatModel([]), run_store=store)


async def test_a_run_that_runs_here_ends_at_once_when_it_is_cancelled() -> None:
    async def never(request: ChatRequest) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    asked, ended = asyncio.Event(), asyncio.Event()
    store = InMemoryRunStore(lease=600)  # the next renewal would be much later
    made = Container(models={"default": ScriptedChatModel([never])}).register(Clerk).register_instance(store, RunStore)
    async with made as here:
        run = await here.runs.start(here.get(Clerk).do, "x")
        await asked.wait()

        assert (await here.runs.cancel(run.id, "enough")).status == "cancelled"

        async with asyncio.timeout(60):
            await ended.wait()
        with pytest.raises(RunCancelledError, match="enough"):
            await here.runs.result(run)
