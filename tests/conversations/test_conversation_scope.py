"""Conversation-scoped beans: loaded from JSON, made at first use, and what changed of them."""

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from toolbox import (
    Container,
    Instance,
    ScopeNotActiveError,
    StoredBeanError,
    application_scoped,
    call_scoped,
    produces,
    request_scoped,
)
from toolbox.container import internals_of
from toolbox.conversations import conversation_scoped
from toolbox.di.decorators import Scope
from toolbox.di.scopes import ConversationScope, find_conversation
from toolbox.di.stored_beans import StoredBeans
from toolbox.di.wiring import Wiring

NAME = f"{__name__}.Reservation"


@conversation_scoped
class Reservation(BaseModel):
    departure: date | None = None
    seats: list[str] = []


@conversation_scoped
@dataclass
class Mood:
    level: int = 0


@application_scoped
class Desk:
    def __init__(self, reservation: Instance[Reservation]) -> None:
        self.reservation = reservation


@call_scoped
class Step:
    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation


def wiring_of(container: Container) -> Wiring:
    wiring = internals_of(container).wiring
    assert wiring is not None
    return wiring


@pytest.fixture
def container() -> Iterator[Container]:
    with Container().register(Reservation, Mood, Desk, Step) as container:
        yield container


def open_room(container: Container, loaded: Any = None, recorded: Any = None, key: str = "room") -> ConversationScope:
    return wiring_of(container).open_conversation(key, StoredBeans(loaded, recorded))


# --- in the scope


def test_all_in_a_conversation_get_one_bean(container: Container) -> None:
    with open_room(container):
        reservation = container.get(Reservation)
        assert container.get(Desk).reservation.get() is reservation
        with container.request_scope(), pytest.raises(ScopeNotActiveError):  # an independent request
            container.get(Reservation)
        call = internals_of(container).open_call_scope()
        assert container.get(Step).reservation is reservation
        call.leave()


def test_outside_of_conversations_the_error_names_what_opens_one(container: Container) -> None:
    with container.request_scope(), pytest.raises(ScopeNotActiveError) as raised:
        container.get(Reservation)

    assert raised.value.reason == "no conversation is active here"
    assert "container.conversation_scope(Service, memory_id)" in str(raised.value)


def test_a_task_that_outlives_its_conversation_gets_no_bean_of_it(container: Container) -> None:
    with open_room(container):
        container.get(Reservation)
        later = copy_context()

    with pytest.raises(ScopeNotActiveError, match="its conversation scope has ended"):
        later.run(container.get, Reservation)


def test_each_of_two_conversations_in_each_other_has_its_beans(container: Container) -> None:
    with open_room(container, key="a") as outer:
        first = container.get(Reservation)
        with open_room(container, key="b") as inner:
            second = container.get(Reservation)
            assert find_conversation("a") is outer
            assert find_conversation("b") is inner
            assert find_conversation("c") is None

    assert first is not second


def test_a_request_can_join_a_conversation() -> None:
    async def run() -> None:
        async with Container().register(Reservation) as container:
            wiring = wiring_of(container)
            async with open_room(container) as room:
                reservation = await container.aget(Reservation)
                request = wiring.open_request({})
                request.join(room)
                async with request:
                    assert await container.aget(Reservation) is reservation
                async with container.request_scope():
                    assert find_conversation("room") is room

    asyncio.run(run())


def test_threads_that_ask_at_the_same_time_get_one_bean(container: Container) -> None:
    with open_room(container, {NAME: {"seats": ["1A"]}}), ThreadPoolExecutor(8) as pool:
        barrier = threading.Barrier(8)

        def get() -> Reservation:
            barrier.wait()
            return container.get(Reservation)

        found = [pool.submit(copy_context().run, get) for _ in range(8)]
        assert len({id(each.result()) for each in found}) == 1


def test_beans_of_the_request_and_of_the_call_are_those_around_and_inside(container: Container) -> None:
    @request_scoped
    class Basket: ...

    with Container().register(Reservation, Basket, Step) as container, container.request_scope():
        basket = container.get(Basket)
        with open_room(container):
            assert container.get(Basket) is basket
            assert container.get(Step) is container.get(Step)


# --- loading and what changed


def test_beans_are_read_from_json_at_first_use(container: Container) -> None:
    with open_room(container, {NAME: {"departure": "2026-12-01", "seats": ["1A"]}}) as room:
        assert container.get(Reservation) == Reservation(departure=date(2026, 12, 1), seats=["1A"])
        assert room.beans.changed() == {}


def test_a_new_bean_that_is_only_read_is_no_change(container: Container) -> None:
    with open_room(container) as room:
        assert container.get(Mood).level == 0
        assert room.beans.changed() == {}


def test_what_changed_in_place_is_found(container: Container) -> None:
    with open_room(container, {NAME: {"seats": ["1A"]}}) as room:
        container.get(Reservation).seats.append("1B")
        container.get(Mood)

    assert room.beans.changed() == {NAME: {"departure": None, "seats": ["1A", "1B"]}}


def test_equal_values_of_different_json_are_a_change(container: Container) -> None:
    @conversation_scoped
    class Flag(BaseModel):
        value: int | bool = 1

    with Container().register(Flag) as container, open_room(container) as room:
        container.get(Flag).value = True
        assert [*room.beans.changed().values()] == [{"value": True}]


def test_fields_that_the_class_no_longer_has_are_dropped_with_the_next_change(container: Container) -> None:
    with open_room(container, {f"{__name__}.Mood": {"level": 1, "colour": "red"}}) as room:
        mood = container.get(Mood)
        assert room.beans.changed() == {}
        mood.level = 2
        assert room.beans.changed() == {f"{__name__}.Mood": {"level": 2}}


def test_unknown_fields_are_dropped_by_strict_models_too() -> None:
    @conversation_scoped
    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid")
        level: int = 0

    with Container().register(Strict) as container, open_room(container, {f"{__name__}.Strict": {"level": 3, "x": 1}}):
        assert container.get(Strict).level == 3


def test_fields_are_stored_by_their_names_in_python() -> None:
    @conversation_scoped
    class Aliased(BaseModel):
        first: int = Field(0, alias="First")
        second: int = Field(0, validation_alias="in", serialization_alias="out")

    name = f"{__name__}.Aliased"
    with Container().register(Aliased) as container:
        with open_room(container) as room:
            bean = container.get(Aliased)
            bean.first, bean.second = 1, 2
        assert room.beans.changed() == {name: {"first": 1, "second": 2}}
        with open_room(container, room.beans.changed()):
            assert container.get(Aliased) == bean


def test_what_was_stored_is_no_change_any_more_but_what_follows_is(container: Container) -> None:
    with open_room(container) as room:
        mood = container.get(Mood)
        mood.level = 1
        written = room.beans.changed()
        mood.level = 2
        room.beans.note_stored(written)
        assert room.beans.loaded == {f"{__name__}.Mood": {"level": 1}}
        assert room.beans.changed() == {f"{__name__}.Mood": {"level": 2}}
        mood.level = 1
        assert room.beans.changed() == {}


def test_each_change_is_noted_once_for_a_run_and_stays_a_change_of_the_turn(container: Container) -> None:
    name = f"{__name__}.Mood"
    with open_room(container) as room:
        mood = container.get(Mood)
        mood.level = 1
        assert room.beans.note_changes() == {name: {"level": 1}}
        assert room.beans.note_changes() == {}
        assert room.beans.changed() == {name: {"level": 1}}
    with open_room(container, {}, recorded={name: {"level": 1}}) as again:  # the run goes on in another process
        assert again.beans.changed() == {name: {"level": 1}}
        container.get(Mood).level += 1
        assert again.beans.note_changes() == {name: {"level": 2}}
        assert again.beans.changed() == {name: {"level": 2}}


@pytest.mark.parametrize("value", [float("inf"), 1e-300, "half \ud800 a character", "ä\u2028"])
def test_values_come_back(value: Any) -> None:
    @conversation_scoped
    @dataclass
    class Kept:
        number: float = 0
        text: str = ""

    with Container().register(Kept) as container:
        with open_room(container) as room:
            setattr(container.get(Kept), "text" if isinstance(value, str) else "number", value)
        stored = json.loads(json.dumps(room.beans.changed()))
        with open_room(container, stored):
            again = container.get(Kept)
            expected = value.replace("\ud800", "\ufffd") if isinstance(value, str) else value
            assert expected in (again.text, again.number)


# --- what cannot be read or written


def test_what_no_longer_validates_names_the_field_and_no_value(container: Container) -> None:
    loaded = {f"{__name__}.Mood": {"level": "a secret"}}
    with open_room(container, loaded) as room:
        for _ in range(2):
            with pytest.raises(StoredBeanError) as raised:
                container.get(Mood)
        container.get(Reservation).seats.append("1A")
        assert [*room.beans.changed()] == [NAME]

    assert (raised.value.bean, raised.value.field) == ("Mood", "level")
    assert "int_parsing" in raised.value.reason
    assert "secret" not in str(raised.value)
    assert raised.value.__context__ is None


def test_errors_of_validators_and_keys_of_dictionaries_are_not_in_the_text() -> None:
    @conversation_scoped
    class Guests(BaseModel):
        rooms: dict[str, int] = {}

        @field_validator("rooms")
        @classmethod
        def refuse(cls, rooms: dict[str, int]) -> dict[str, int]:
            if rooms:
                raise ValueError(f"{rooms} are full")
            return rooms

    name = f"{__name__}.Guests"
    with Container().register(Guests) as container:
        for stored in ({"Ann Smith": "x"}, {"Ann Smith": 1}):
            with open_room(container, {name: {"rooms": stored}}), pytest.raises(StoredBeanError) as raised:
                container.get(Guests)
            assert raised.value.field == "rooms"
            assert "Ann" not in str(raised.value)


def test_reset_begins_with_defaults_and_overwrites_when_something_changes(caplog: pytest.LogCaptureFixture) -> None:
    @conversation_scoped(on_invalid="reset")
    class Count(BaseModel):
        number: int = 0

    name = f"{__name__}.Count"
    with Container().register(Count) as container, open_room(container, {name: {"number": "a secret"}}) as room:
        with caplog.at_level(logging.WARNING, "toolbox"):
            count = container.get(Count)
        assert (count.number, room.beans.changed()) == (0, {})
        count.number = 5
        assert room.beans.changed() == {name: {"number": 5}}
    assert "Count begins with its defaults" in caplog.text
    assert "secret" not in caplog.text


def test_a_value_that_could_not_be_read_again_is_not_stored(container: Container) -> None:
    with open_room(container) as room:
        container.get(Mood).level = "high"  # type: ignore[assignment]
        with pytest.raises(StoredBeanError) as raised:
            room.beans.changed()

    assert (raised.value.bean, raised.value.field) == ("Mood", "level")


def test_a_value_that_has_no_json_names_its_field() -> None:
    @conversation_scoped
    class Bag(BaseModel):
        name: str = ""
        content: Any = None

    with Container().register(Bag) as container, open_room(container) as room:
        container.get(Bag).content = object()
        with pytest.raises(StoredBeanError) as raised:
            room.beans.changed()

    assert raised.value.field == "content"


# --- replaced beans


def test_overrides_and_seeds_replace_the_bean_and_are_not_stored(container: Container) -> None:
    fake = Reservation(seats=["9Z"])
    with container.override(Reservation, fake), open_room(container) as room:
        assert container.get(Reservation) is fake
        assert container.get(Step).reservation is fake
        fake.seats.append("9Y")
        assert room.beans.changed() == {}
    with container.request_scope({Reservation: fake}), open_room(container) as room:
        assert container.get(Desk).reservation.get() is fake
        assert room.beans.changed() == {}


# --- declarations


@pytest.mark.parametrize("kind", [BaseModel, None])
def test_fields_are_never_injected(kind: Any) -> None:
    @application_scoped
    class Clock: ...

    @conversation_scoped
    @dataclass
    class Plain:
        clock: str = "none"
        level: int = field(default=3)

    with Container().register(Clock, Plain) as container, open_room(container):
        assert container.get(Plain) == Plain()


def problems_of(*classes: type[Any]) -> list[str]:
    return [f"{each.where}: {each.what}" for each in Container().register(*classes).check()]


class Engine:
    """A class that pydantic does not know."""


def test_fields_that_cannot_be_stored_are_problems_that_name_them() -> None:
    from collections.abc import Callable
    from typing import Annotated

    from pydantic import BeforeValidator, PlainSerializer, SecretStr

    @conversation_scoped
    class Model(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        required: int
        engine: Engine | None = None
        engines: dict[str, list[Engine]] = {}
        call: Callable[[], int] | None = None
        excluded: int = Field(0, exclude=True)
        key: SecretStr = SecretStr("x")
        own: Annotated[Engine, BeforeValidator(lambda _: Engine()), PlainSerializer(str)] = Engine()
        when: date | None = None
        anything: Any = None

    @conversation_scoped
    @dataclass
    class Data:
        required: int
        later: int = field(default=1, init=False)
        given: dataclasses.InitVar[int] = 3
        fine: set[date] = field(default_factory=set)

    @conversation_scoped
    @dataclass
    class Holder:
        engine: Engine | None = None

    fields = {each.partition(":")[0] for each in problems_of(Model)}
    assert fields == {f"Model.{name}" for name in ("required", "engine", "engines", "call", "excluded", "key")}
    assert [each.partition(":")[0] for each in problems_of(Holder)] == ["Holder.engine"]
    fields = {each.partition(":")[0] for each in problems_of(Data)}
    assert fields == {"Data.required", "Data.later", "Data.given"}


def test_other_classes_cannot_be_conversation_scoped() -> None:
    @conversation_scoped
    class Plain: ...

    @conversation_scoped
    class Names(RootModel[list[str]]):
        root: list[str] = []

    @conversation_scoped
    class Prices(RootModel[dict[str, int]]): ...

    @conversation_scoped
    class Empty(BaseModel): ...

    assert problems_of(Empty) == []
    assert [each.partition(":")[0] for each in problems_of(Prices)] == ["Prices.root"]
    assert problems_of(Plain) == ["Plain: a conversation-scoped class must be a pydantic model or a dataclass"]
    assert problems_of(Names) == []


def test_the_decorator_takes_classes_and_known_options() -> None:
    with pytest.raises(TypeError, match="supports only classes"):
        conversation_scoped(print)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="on_invalid='drop'"):
        conversation_scoped(on_invalid="drop")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="two scopes"):
        conversation_scoped(Desk)
    with pytest.raises(ValueError, match="unknown scope 'conversation'; use one of: application, request, call"):
        produces(scope="conversation")  # type: ignore[arg-type]


def test_beans_of_longer_scopes_need_an_instance() -> None:
    @request_scoped
    class Cart:
        def __init__(self, reservation: Reservation) -> None: ...

    @application_scoped
    class Till:
        def __init__(self, reservation: Reservation) -> None: ...

    for cls in (Cart, Till):
        [problem] = Container().register(Reservation, cls).check()
        assert "holds Reservation, which is conversation_scoped" in problem.what
        assert "Instance[Reservation]" in problem.fix
    assert Container().register(Reservation, Step, Desk).check() == []


# --- what can be reached


def test_beans_that_can_reach_a_conversation_are_found(container: Container) -> None:
    class Line:
        def __init__(self, desk: Desk) -> None: ...

    @application_scoped
    class Clock: ...

    @produces(name="late")
    def late(line: Line) -> dict[str, int]:
        return {}

    graph = internals_of(Container().register(Reservation, Desk, Step, Line, Clock, late)).graph

    for wanted in (Reservation, Desk, Step, Line, Instance[Line], Line | None, list[Line]):
        assert graph.find_reached([Clock, wanted], Scope.CONVERSATION)
    assert not graph.find_reached([Clock], Scope.CONVERSATION)
    assert not graph.find_reached([], Scope.CONVERSATION)


def test_what_a_service_as_a_tool_reaches_does_not_count() -> None:
    from typing import Protocol

    from toolbox import register_ai_service, tool
    from toolbox.testing import ScriptedChatModel

    class Booking:
        def __init__(self, reservation: Instance[Reservation]) -> None: ...

        @tool
        def book(self) -> str:
            """Book."""
            return "booked"

    @register_ai_service(tools=Booking)
    class Clerk(Protocol):
        @tool
        def ask(self, text: str) -> str:
            """Ask the clerk."""
            ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Clerk, Reservation)
    graph = internals_of(container).graph

    assert graph.find_reached([Booking], Scope.CONVERSATION)
    assert not graph.find_reached([Clerk], Scope.CONVERSATION)
