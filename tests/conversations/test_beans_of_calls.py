"""Conversation-scoped beans in calls: one write with the turn, blocks around calls, and tools one after another."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tests.conversations.three_methods import ThreeMethods
from toolbox import (
    AccessDeniedError,
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    IllegalConfigurationError,
    Inject,
    InputGuardrailError,
    Instance,
    MemoryId,
    MemoryInUseError,
    MemoryLeaseLostError,
    ScopeNotActiveError,
    StoredBeanError,
    ToolExecutionResult,
    UserMessage,
    application_scoped,
    compensate_for,
    produces,
    register_ai_service,
    tool,
)
from toolbox.conversations import conversation_scoped
from toolbox.conversations.log import fork_log
from toolbox.conversations.stores import InMemoryChatMemoryStore
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.security import SecurityIdentity
from toolbox.service_names import stored_name
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

NAME = f"{__name__}.Reservation"


@conversation_scoped
class Reservation(BaseModel):
    departure: date | None = None
    seats: list[str] = []

    @tool
    def set_departure(self, day: date) -> str:
        """Set the day of departure."""
        self.departure = day
        return f"departure: {day}"

    @tool
    def add_seat(self, seat: str) -> str:
        """Add a seat."""
        self.seats.append(seat)
        return f"seats: {', '.join(self.seats)}"

    @tool
    def fail(self, seat: str) -> str:
        """Add a seat, and fail."""
        self.seats.append(seat)
        raise RuntimeError("the ferry is full")


@register_ai_service(name="assistant", tools=Reservation)
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...
    def stream(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...
    def wait(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service(name="clerk", tools=Reservation, chat_memory=None)
class Clerk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


def model_of(*script: Any) -> dict[str, Any]:
    return {"default": ScriptedChatModel(script)}


def seat(name: str) -> Any:
    return tool_call("add_seat", {"seat": name})


def key(room: str = "7", service: str = "assistant") -> ChatMemoryKey:
    return ChatMemoryKey(service, room)


async def stored(container: Container, where: ChatMemoryKey | None = None) -> Any:
    """Return the beans that the store has for a conversation; None if it has no such conversation."""
    store = await container.aget(ChatMemoryStore)
    assert isinstance(store, InMemoryChatMemoryStore)
    log = await store.read_since(where or key(), lambda head: 0)
    return None if log is None else dict(log.head.beans)


@contextmanager
def desk(*script: Any, more: Any = ()) -> Iterator[Container]:
    store = InMemoryChatMemoryStore()
    container = Container(models=model_of(*script), seeds=[SecurityIdentity]).register(Assistant, Clerk, *more)
    yield container.register_instance(store, as_type=ChatMemoryStore)


# --- a call


async def test_what_tools_change_is_there_in_the_next_call_and_only_in_this_conversation() -> None:
    day = tool_call("set_departure", {"day": "2027-05-01"})
    with desk(day, "Noted.", seat("1A"), "Done.", seat("9C"), "Done.") as program:
        async with program as container:
            assistant = container.get(Assistant)
            await assistant.chat("7", "On May 1st")
            await assistant.chat("7", "Seat 1A")
            await assistant.chat("8", "Seat 9C")

            assert await stored(container) == {NAME: {"departure": "2027-05-01", "seats": ["1A"]}}
            assert await stored(container, key("8")) == {NAME: {"departure": None, "seats": ["9C"]}}


async def test_the_beans_are_stored_in_the_write_of_the_turn() -> None:
    writes: list[Any] = []

    class Store(InMemoryChatMemoryStore):
        async def write(self, key: Any, write: Any) -> None:
            writes.append(write)
            await super().write(key, write)

    container = Container(models=model_of(seat("1A"), "Done.", "Hello.")).register(Assistant)
    async with container.register_instance(Store(), as_type=ChatMemoryStore):
        await container.get(Assistant).chat("7", "Seat 1A")
        await container.get(Assistant).chat("7", "Hello")

    assert [(len(each.turn.messages), each.turn.beans) for each in writes] == [
        (4, {NAME: {"departure": None, "seats": ["1A"]}}),
        (2, {}),
    ]


async def test_streams_and_synchronous_methods_store_the_beans() -> None:
    with desk(seat("1A"), "Done.", seat("1B"), "Done.") as program:
        async with program as container:
            assistant = container.get(Assistant)
            assert "".join([each async for each in assistant.stream("7", "Seat 1A")]) == "Done."
            await asyncio.to_thread(assistant.wait, "7", "Seat 1B")

            assert await stored(container) == {NAME: {"departure": None, "seats": ["1A", "1B"]}}


async def test_a_call_that_stores_no_turn_stores_no_bean() -> None:
    class Refusing(InputGuardrail):
        def __init__(self, reservation: Instance[Reservation]) -> None:
            self._reservation = reservation

        def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            self._reservation.get().seats.append("1A")
            return self.failure("refused")

    @register_ai_service(name="guarded", tools=Reservation)
    class Guarded(Protocol):
        @input_guardrails(Refusing)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    with desk("unused", more=(Guarded, Refusing)) as container:
        async with container:
            with pytest.raises(InputGuardrailError):
                await container.get(Guarded).chat("7", "Hello")
            assert await stored(container, key(service="guarded")) is None


async def test_without_chat_memory_only_the_beans_are_stored() -> None:
    with desk(seat("1A"), "Done.", seat("1B"), "Done.", "Hello.") as program:
        async with program as container:
            clerk = container.get(Clerk)
            await clerk.chat("7", "Seat 1A")
            await clerk.chat("7", "Seat 1B")
            await clerk.chat("8", "Hello")

            model = container.models["default"]
            assert isinstance(model, ScriptedChatModel)
            assert [len(each.messages) for each in model.requests] == [1, 3, 1, 3, 1]
            assert await stored(container, key(service="clerk")) == {NAME: {"departure": None, "seats": ["1A", "1B"]}}
            assert await container.chat_memory(Clerk, "7").messages() == []
            assert await stored(container, key("8", "clerk")) is None


async def test_a_call_without_a_memory_id_has_no_beans() -> None:
    @register_ai_service(tools=Reservation)
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

    with desk(seat("1A"), "Done.", more=(Plain,)) as container:
        async with container:
            with pytest.raises(ScopeNotActiveError):
                await container.get(Plain).chat("Seat 1A")


async def test_services_as_tools_interceptors_and_guardrails_see_the_beans_of_their_caller() -> None:
    seen: list[int] = []

    @application_scoped
    class Watching(ToolInterceptor):
        def __init__(self, reservation: Instance[Reservation]) -> None:
            self._reservation = reservation

        async def around_tool(self, invocation: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            seen.append(len(self._reservation.get().seats))
            return await proceed(invocation)

    @register_ai_service(tools=Reservation)
    class Seats(Protocol):
        @tool
        async def book(self, text: str) -> str:
            """Book seats."""
            ...

    @register_ai_service(name="outer", tools=[Seats, Reservation])
    class Outer(Protocol):
        @interceptors(Watching)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    script = (tool_call("book", {"text": "1A"}), seat("1A"), "Booked.", seat("1B"), "Done.")
    with desk(*script, more=(Outer, Seats, Watching)) as container:
        async with container:
            await container.get(Outer).chat("7", "Seats 1A and 1B")
            assert await stored(container, key(service="outer")) == {NAME: {"departure": None, "seats": ["1A", "1B"]}}
    assert seen == [0, 1]


async def test_a_call_of_another_conversation_in_a_tool_has_its_own_beans() -> None:
    @application_scoped
    class Friends:
        @tool
        async def tell(self, text: str, assistant: Inject[Assistant]) -> str:
            """Tell a friend."""
            return await assistant.chat("friend", text)

    @register_ai_service(name="outer", tools=[Friends, Reservation])
    class Outer(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    script = (seat("1A"), tool_call("tell", {"text": "1B"}), seat("1B"), "Booked.", seat("1C"), "Done.")
    with desk(*script, more=(Outer, Friends)) as container:
        async with container:
            await container.get(Outer).chat("7", "Seats")
            assert await stored(container, key("friend")) == {NAME: {"departure": None, "seats": ["1B"]}}
            assert await stored(container, key(service="outer")) == {NAME: {"departure": None, "seats": ["1A", "1C"]}}


# --- calls that do not end well, and persons


async def test_a_turn_that_did_not_end_well_stores_the_bean_as_it_is_then() -> None:
    with desk(seat("1A"), ConnectionError("away")) as program:
        async with program as container:
            with pytest.raises(ConnectionError):
                await container.get(Assistant).chat("7", "Seat 1A")
            history = await container.conversations.of(Assistant, "7").history()
            assert {each.state for each in history} == {"failed"}
            assert await stored(container) == {NAME: {"departure": None, "seats": ["1A"]}}


async def test_what_undoes_a_tool_sees_the_bean_and_does_not_undo_it() -> None:
    @application_scoped
    class Ferries:
        def __init__(self, reservation: Instance[Reservation]) -> None:
            self._reservation = reservation

        @tool
        def book(self) -> str:
            """Book a ferry."""
            self._reservation.get().seats.append("booked")
            return "booked"

        @compensate_for(book)
        def undo(self) -> None:
            self._reservation.get().seats.append("undone")

    @register_ai_service(name="careful", tools=Ferries, compensate_on_failure=True)
    class Careful(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    with desk(tool_call("book", {}), ConnectionError("away"), more=(Careful, Ferries)) as container:
        async with container:
            with pytest.raises(ConnectionError):
                await container.get(Careful).chat("7", "Book")
            assert (await stored(container, key(service="careful")))[NAME]["seats"] == ["booked", "undone"]


async def test_a_failed_call_is_kept_without_a_bean_that_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    @application_scoped
    class Wrong:
        def __init__(self, reservation: Instance[Reservation]) -> None:
            self._reservation = reservation

        @tool
        def set(self) -> str:
            """Set a wrong value."""
            self._reservation.get().departure = "tomorrow"  # type: ignore[assignment]
            return "ok"

    @register_ai_service(name="outer", tools=Wrong)
    class Outer(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    with desk(tool_call("set", {}), "Done.", more=(Outer, Wrong)) as container:
        async with container:
            with pytest.raises(StoredBeanError):
                await container.get(Outer).chat("7", "Tomorrow")
            assert await stored(container, key(service="outer")) == {}
            history = await container.conversations.of(Outer, "7").history()
    assert {each.state for each in history} == {"failed"}
    assert "its conversation-scoped beans are not stored: Reservation.departure" in caplog.text
    assert "tomorrow" not in caplog.text.replace("Tomorrow", "")


async def test_a_block_checks_the_owner_and_gives_the_conversation() -> None:
    ann, bob = SecurityIdentity("ann"), SecurityIdentity("bob")
    with desk("Hello.", seat("1A"), "Done.") as program:
        async with program as container:
            async with (
                container.request_scope({SecurityIdentity: ann}),
                container.conversation_scope(Assistant, "7") as room,
            ):
                (await container.aget(Reservation)).seats.append("1B")
            async with container.request_scope({SecurityIdentity: bob}):
                with pytest.raises(AccessDeniedError):
                    async with container.conversation_scope(Assistant, "7"):
                        raise AssertionError
                with pytest.raises(AccessDeniedError):
                    await container.get(Assistant).chat("7", "Hello")
            async with container.conversation_scope(Assistant, "7"):  # the program itself
                assert (await container.aget(Reservation)).seats == ["1B"]
            assert (await room.info()).owner == "ann"


async def test_the_first_caller_owns_what_a_block_of_the_program_has_prepared() -> None:
    with desk("Hello.") as program:
        async with program as container:
            async with container.conversation_scope(Assistant, "7") as room:
                (await container.aget(Reservation)).seats.append("1B")
            assert (await room.info()).owner is None
            async with container.request_scope({SecurityIdentity: SecurityIdentity("ann")}):
                await container.get(Assistant).chat("7", "Hello")
            assert (await room.info()).owner == "ann"


# --- what cannot be read or written


async def test_what_no_longer_validates_reaches_the_caller_and_is_not_overwritten() -> None:
    with desk("Hello.", seat("1A"), "unused") as container:
        async with container:
            await container.get(Assistant).chat("7", "Hello")
            store = await container.aget(ChatMemoryStore)
            assert isinstance(store, InMemoryChatMemoryStore)
            log = await store.read_since(key(), lambda head: 0)
            assert log is not None
            await store.change(key(), lambda head: replace(head, beans={NAME: {"seats": "secret"}}))

            with pytest.raises(StoredBeanError) as raised:
                await container.get(Assistant).chat("7", "Seat 1A")

            assert (raised.value.bean, raised.value.field) == ("Reservation", "seats")
            assert "secret" not in str(raised.value)
            assert await stored(container) == {NAME: {"seats": "secret"}}


# --- blocks of the program


async def test_a_block_prepares_the_beans_of_a_conversation() -> None:
    with desk(seat("1B"), "Done.") as program:
        async with program as container:
            async with container.conversation_scope(Assistant, "7"):
                (await container.aget(Reservation)).seats.append("1A")
            await container.get(Assistant).chat("7", "Seat 1B")
            async with container.conversation_scope(stored_name(Assistant), "7"):
                assert (await container.aget(Reservation)).seats == ["1A", "1B"]
            with pytest.raises(TypeError, match="the class of a service, or its stored name"):
                async with container.conversation_scope(7, "7"):  # type: ignore[arg-type]
                    pass
            with pytest.raises(ScopeNotActiveError):
                container.get(Reservation)


async def test_a_block_that_only_reads_does_not_create_the_conversation() -> None:
    with desk() as program:
        async with program as container:
            async with container.conversation_scope(Assistant, "7") as room:
                assert (await container.aget(Reservation)).seats == []
                assert await room.messages() == []
            assert await stored(container) is None


async def test_a_block_on_a_thread_works_as_well() -> None:
    def use(container: Container) -> str:
        with container.conversation_scope(Assistant, "7"):
            container.get(Reservation).seats.append("1A")
            return container.get(Assistant).wait("7", "Seat 1B")

    with desk(seat("1B"), "Done.") as program:
        async with program as container:
            assert await asyncio.to_thread(use, container) == "Done."
            assert await stored(container) == {NAME: {"departure": None, "seats": ["1A", "1B"]}}


@pytest.mark.parametrize("raises", [False, True])
async def test_a_call_inside_a_block_stores_its_turn_and_the_block_what_changed_after_it(raises: bool) -> None:
    with desk(seat("1B"), "Done.") as program:
        async with program as container:
            with pytest.raises(RuntimeError) if raises else nullcontext():
                async with container.conversation_scope(Assistant, "7"):
                    reservation = await container.aget(Reservation)
                    reservation.seats.append("1A")
                    await container.get(Assistant).chat("7", "Seat 1B")
                    assert await stored(container) == {NAME: {"departure": None, "seats": ["1A", "1B"]}}
                    reservation.seats.append("1C")
                    if raises:
                        raise RuntimeError
            last = ["1A", "1B"] if raises else ["1A", "1B", "1C"]
            assert await stored(container) == {NAME: {"departure": None, "seats": last}}
            assert len(await container.chat_memory(Assistant, "7").messages()) == 4


async def test_a_call_in_an_own_request_inside_a_block_joins_the_block() -> None:
    with desk(seat("1B"), "Done.") as program:
        async with program as container, container.conversation_scope(Assistant, "7"):
            reservation = await container.aget(Reservation)
            async with container.request_scope():
                await container.get(Assistant).chat("7", "Seat 1B")
            assert reservation.seats == ["1B"]


async def test_calls_inside_a_block_take_turns_and_others_wait_for_its_end() -> None:
    order: list[str] = []

    @application_scoped
    class Slow:
        @tool
        async def work(self, name: str) -> str:
            """Work."""
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")
            return name

    @register_ai_service(name="worker", tools=Slow)
    class Worker(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    def by_text(request: Any) -> Any:
        last = request.messages[-1]
        return tool_call("work", {"name": last.text}) if isinstance(last, UserMessage) else "Done."

    with desk(*[by_text] * 6, more=(Worker, Slow)) as program:
        async with program as container:
            worker = container.get(Worker)
            async with container.conversation_scope(Worker, "7"):
                in_block = [asyncio.create_task(worker.chat("7", name)) for name in "ab"]
                outside = asyncio.Event()

                async def call_outside() -> None:
                    outside.set()
                    await worker.chat("7", "c")

                context = Context()
                other = asyncio.get_running_loop().create_task(call_outside(), context=context)
                await outside.wait()
                await asyncio.gather(*in_block)
                assert order == ["a begins", "a ends", "b begins", "b ends"]
            await other
            assert order[4:] == ["c begins", "c ends"]


async def test_code_inside_cannot_hold_the_conversation_again() -> None:
    async def hold(container: Container) -> None:
        async with container.conversation_scope(Assistant, "7"):
            raise AssertionError

    class Holding(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            with pytest.raises(MemoryInUseError):
                await container.get(Guarded).chat("7", "again")
            with pytest.raises(MemoryInUseError):
                async with container.conversation_scope(Guarded, "7"):
                    raise AssertionError
            return self.success()

    @register_ai_service(name="guarded", tools=Reservation)
    class Guarded(Protocol):
        @input_guardrails(Holding)
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    with desk("Hello.", "Hello.", more=(Guarded, Holding)) as container:
        async with container, asyncio.timeout(5):
            await container.get(Guarded).chat("7", "Hello")
            async with container.conversation_scope(Guarded, "7"):
                await container.get(Guarded).chat("7", "Hello")
            async with container.conversation_scope(Assistant, "7"):
                with pytest.raises(MemoryInUseError):
                    await hold(container)
                with pytest.raises(MemoryInUseError):
                    await container.chat_memory(Assistant, "7").clear()


async def test_a_call_that_outlives_its_block_is_not_stored() -> None:
    began, release = asyncio.Event(), asyncio.Event()

    @application_scoped
    class Slow:
        @tool
        async def work(self) -> str:
            """Work."""
            began.set()
            await release.wait()
            return "done"

    @register_ai_service(name="worker", tools=Slow)
    class Worker(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    with desk(tool_call("work", {}), "Done.", more=(Worker, Slow)) as program:
        async with program as container:
            async with container.conversation_scope(Worker, "7"):
                late = asyncio.create_task(container.get(Worker).chat("7", "Work"))
                await began.wait()
            release.set()
            with pytest.raises(MemoryLeaseLostError):
                await late
            assert await stored(container, key(service="worker")) is None


async def test_beans_are_replaced_by_overrides_and_not_stored() -> None:
    fake = Reservation(seats=["fake"])
    with desk(seat("1A"), "Done.") as program:
        async with program as container:
            with container.override(Reservation, fake):
                await container.get(Assistant).chat("7", "Seat 1A")
            assert fake.seats == ["fake", "1A"]
            assert await stored(container) == {}


# --- tools one after another


async def test_tools_that_reach_a_bean_run_one_after_another_and_others_at_the_same_time() -> None:
    running: list[str] = []
    seen: list[tuple[str, ...]] = []
    both = asyncio.Barrier(2)

    async def work(name: str) -> str:
        running.append(name)
        for _ in range(20):  # steps in which others would begin
            await asyncio.sleep(0)
        seen.append(tuple(running))
        running.remove(name)
        return name

    @application_scoped
    class Through:
        def __init__(self, reservation: Instance[Reservation]) -> None: ...

    class Tools:
        def __init__(self, through: Through) -> None: ...

        @tool
        async def one(self) -> str:
            """Work through a bean that holds an Instance."""
            return await work("one")

    @tool
    async def two(reservation: Inject[Reservation]) -> str:
        """Work with an injected bean."""
        return await work("two")

    @tool
    async def three() -> str:
        """Work without a bean."""
        async with asyncio.timeout(5):
            await both.wait()
        return "three"

    @register_ai_service(tools=[two])
    class Inner(Protocol):
        @tool
        async def ask(self, text: str) -> str:
            """Ask the inner service."""
            ...

    @register_ai_service(name="outer", tools=[Tools, two, three, Inner], concurrent_tools=True)
    class Outer(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    def reply(request: Any) -> Any:
        last = request.messages[-1]
        if isinstance(last, UserMessage) and last.text == "inner":
            return tool_call("two", {})
        if isinstance(last, UserMessage):
            ask = tool_call("ask", {"text": "inner"})
            calls = [tool_call(each, {}) for each in ("one", "two", "three", "three")]
            return AiMessage(None, [*calls, ask])
        return "Done."

    with desk(*[reply] * 8, more=(Outer, Inner, Tools, Through)) as container:
        async with container:
            assert await container.get(Outer).chat("7", "Work") == "Done."
    assert seen == [("one",), ("two",), ("two",)]


async def test_a_tool_that_uses_a_bean_may_call_a_service_with_such_a_tool() -> None:
    @register_ai_service(tools=Reservation)
    class Inner(Protocol):
        async def ask(self, text: str) -> str: ...

    class Asking:
        def __init__(self, reservation: Reservation) -> None: ...

        @tool
        async def ask(self, inner: Inject[Inner]) -> str:
            """Ask."""
            return await inner.ask("inner")

    @register_ai_service(name="outer", tools=Asking)
    class Outer(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    with desk(tool_call("ask", {}), seat("1A"), "Booked.", "Done.", more=(Outer, Inner, Asking)) as container:
        async with container, asyncio.timeout(5):
            await container.get(Outer).chat("7", "Ask")
            assert await stored(container, key(service="outer")) == {NAME: {"departure": None, "seats": ["1A"]}}


# --- stores


@pytest.mark.parametrize("is_known_at_check", [True, False])
async def test_a_store_of_three_methods_and_a_bean_that_a_service_reaches_are_a_problem_at_start(
    is_known_at_check: bool,
) -> None:
    @produces(scope="application")
    def make_store() -> ChatMemoryStore:
        return ThreeMethods()

    container = Container(models=model_of()).register(Assistant)
    if is_known_at_check:
        container.register_instance(ThreeMethods(), as_type=ChatMemoryStore)
    else:
        container.register(make_store)
    with pytest.raises(IllegalConfigurationError) as raised:
        async with container:
            pass
    [problem] = raised.value.problems
    assert problem.where == "Assistant"
    assert "bean Reservation, but ThreeMethods keeps only messages" in problem.what


async def test_a_store_of_three_methods_is_no_problem_for_services_that_reach_no_bean() -> None:
    @register_ai_service
    class Plain(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    container = Container(models=model_of("Hello.", "Hello.")).register(Plain, Reservation)
    async with container.register_instance(ThreeMethods(), as_type=ChatMemoryStore):
        await container.get(Plain).chat("7", "Hello")
        assert len(await container.chat_memory(Plain, "7").messages()) == 2


async def test_a_rewind_and_a_fork_find_the_state_of_their_time_also_what_blocks_stored() -> None:
    with desk(seat("1A"), "Done.", seat("1C"), "Done.") as program:
        async with program as container:
            store = await container.aget(ChatMemoryStore)
            assert isinstance(store, InMemoryChatMemoryStore)
            assistant = container.get(Assistant)
            await assistant.chat("7", "Seat 1A")
            async with container.conversation_scope(Assistant, "7"):
                (await container.aget(Reservation)).seats.append("1B")
            await assistant.chat("7", "Seat 1C")
            log = await store.read_since(key(), lambda head: 0)
            assert log is not None
            first, _, last = log.turns

            after_first = fork_log(log, key("8"), f"{first.id}.0", datetime.now(UTC))
            whole = fork_log(log, key("9"), None, datetime.now(UTC))
            await store.rewind(key(), f"{last.id}.0")

            assert after_first.head.beans[NAME]["seats"] == ["1A"]
            assert whole.head.beans[NAME]["seats"] == ["1A", "1B", "1C"]
            assert (await stored(container))[NAME]["seats"] == ["1A", "1B"]


async def test_a_store_in_memory_that_drops_old_messages_keeps_the_state_for_a_rewind() -> None:
    store = InMemoryChatMemoryStore(max_messages=4)
    container = Container(models=model_of(seat("1A"), "Done.", "Hello.", "Hello.")).register(Assistant)
    async with container.register_instance(store, as_type=ChatMemoryStore):
        for text in ("Seat 1A", "Hello", "Hello"):
            await container.get(Assistant).chat("7", text)
        log = await store.read_since(key(), lambda head: 0)
        assert log is not None
        await store.rewind(key(), f"{log.turns[1].id}.0")

        assert (await stored(container))[NAME]["seats"] == ["1A"]
