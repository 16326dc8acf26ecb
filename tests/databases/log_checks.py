"""What every store of logs must do, a check for each: turns, rewinds, owners, former names, locks, wishes to stop.

A check gets a function that opens a store of the same conversations, like that of another process.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ConversationBusyError,
    Message,
    MessageWindow,
    ToolExecutionRequest,
    UserMessage,
)
from toolbox.chat import TokenUsage
from toolbox.conversations.keys import Owner
from toolbox.conversations.log import (
    Head,
    KeptApproval,
    Log,
    LogWrite,
    Position,
    RememberedApproval,
    Turn,
    ViewNotes,
    entries_of,
    fork_log,
    newest_entries,
    with_approval,
)
from toolbox.conversations.log_forms import export_log, restore_log
from toolbox.conversations.memories import ChatMemories
from toolbox.conversations.stores import Deleted, LogStore
from toolbox.store_checks.conversation_stores import EVERYTHING
from toolbox.store_clock import clock_of

NewStore: TypeAlias = Callable[[], Awaitable[LogStore]]
Check: TypeAlias = Callable[[NewStore], Awaitable[None]]

ANN, BOB = Owner("ann"), Owner("bob", {"tenant": "a"})


def new_key(memory_id: str = "room 7", *former: str) -> ChatMemoryKey:
    return ChatMemoryKey(f"shop.Assistant{uuid4().hex}", memory_id, former)


def say(number: int | str, **fields: Any) -> Turn:
    return Turn(**{"messages": (UserMessage(f"q{number}"), AiMessage(f"a{number}")), **fields})


async def read(store: LogStore, key: ChatMemoryKey) -> Log:
    log = await store.read_since(key, lambda head: 0)
    assert log is not None
    return log


async def texts(store: LogStore, key: ChatMemoryKey) -> list[str | None]:
    return [message.text for message in await store.get_messages(key)]


async def append(store: LogStore, key: ChatMemoryKey, *numbers: int | str) -> None:
    for each in numbers:
        await store.write(key, LogWrite(turn=say(each)))


# --- turns


async def a_turn_comes_back_as_it_was(new_store: NewStore) -> None:
    store, other, key = await new_store(), await new_store(), new_key()
    turn = Turn(
        messages=EVERYTHING,
        state="stopped",
        usage=TokenUsage(1, 2, 3, 4, 5),
        run_id=uuid4().hex,
        note="[stopped by \ud800]",
        client_ids={1: "from the client \x00"},
        sources=({"source": "https://example.org"},),
        answered_by="Desk.chat",
        in_charge="Billing.chat",
        beans={"Reservation": {"departure": None, "text": "\x00 \ud800"}},
    )
    await store.write(key, LogWrite(turn=turn, owner=Owner("ann \x00", {"tenant": ["a"]})))

    log = await read(other, key)
    [stored] = log.turns
    for name in ("id", "messages", "state", "usage", "run_id", "note", "client_ids", "sources", "answered_by"):
        assert getattr(stored, name) == getattr(turn, name), name
    assert (stored.in_charge, stored.beans) == (turn.in_charge, turn.beans)
    assert stored.at is not None
    assert (stored.number, stored.start, stored.hidden_from) == (1, 0, None)
    head = log.head
    assert (head.key, head.owner, head.messages, head.usage, head.next_number) == (
        key,
        Owner("ann \x00", {"tenant": ["a"]}),
        len(EVERYTHING),
        turn.usage,
        2,
    )
    assert (head.in_charge, head.beans) == (turn.in_charge, turn.beans)
    assert head.updated_at >= head.created_at


async def every_field_of_a_log_comes_back(new_store: NewStore) -> None:
    """A field that one of the stores forgets would be lost at the next start of the program."""
    store, other, key, at = await new_store(), await new_store(), new_key(), datetime(2026, 1, 2, 3, tzinfo=UTC)
    turn = Turn(
        id=uuid4().hex,
        messages=(UserMessage("q"), AiMessage("a"), UserMessage("hidden")),
        state="failed",
        usage=TokenUsage(1, 2, 3, 4, 5),
        run_id=uuid4().hex,
        note="[failed]",
        client_ids={0: "client"},
        sources=({"source": "https://example.org"},),
        answered_by="Desk.chat",
        in_charge="Billing.chat",
        beans={"Trip": {"days": 3}},
        at=at,
        number=4,
        start=2,
        hidden_from=4,
    )
    shown = RememberedApproval("pay", "ann", at)
    head = Head(
        key=key,
        id=uuid4().hex,
        created_at=at,
        updated_at=at.replace(hour=4),
        owner=BOB,
        title="Trips",
        messages=2,
        usage=TokenUsage(5, 4, 3, 2, 1),
        next_number=5,
        notes=ViewNotes(Position(4, 1), "a view", "what was said", Position(3, 1)),
        beans={"Trip": {"days": 3}},
        in_charge="Billing.chat",
        approvals=(
            KeptApproval(shown=shown, service="shop.Desk", owner=ANN, run_id="run", call_id="call", place=Position(4)),
        ),
    )
    for given in (turn, head, head.notes):  # so that a field that is added later must be here
        defaults = [each for each in fields(given) if each.default == getattr(given, each.name)]
        assert defaults == []

    assert await store.create(key, Log(head, (turn,)))

    assert await read(other, key) == Log(head, (turn,))


async def a_turn_that_is_appended_again_is_there_once(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    turn = say(1, usage=TokenUsage(1, 1))
    await store.write(key, LogWrite(turn=turn))
    await append(store, key, 2)
    await store.write(key, LogWrite(turn=turn))

    assert await texts(store, key) == ["q1", "a1", "q2", "a2"]
    head = (await read(store, key)).head
    assert (head.messages, head.usage) == (4, TokenUsage(1, 1))


async def a_turn_of_a_run_replaces_what_the_run_had_stored_and_is_at_the_end(new_store: NewStore) -> None:
    store, key, run_id = await new_store(), new_key(), uuid4().hex
    stopped = Turn(id=f"{run_id}:1", run_id=run_id, messages=(UserMessage("pay"),), state="stopped")
    await store.write(key, LogWrite(turn=replace(stopped, usage=TokenUsage(5, 2))))
    await append(store, key, 2)
    await store.write(key, LogWrite(turn=say("pay", id=f"{run_id}:2", run_id=run_id, usage=TokenUsage(9, 2))))

    assert await texts(store, key) == ["q2", "a2", "qpay", "apay"]
    log = await read(store, key)
    assert log.head.messages == 4
    assert log.head.usage == TokenUsage(9, 2)  # the turn has counted the requests of the one that it replaces, too
    assert [each.number for each in log.turns] == [2, 3]
    await store.write(key, LogWrite(turn=say("pay", id=f"{run_id}:2", run_id=run_id)))
    assert (await read(store, key)).head.messages == 4


async def a_turn_that_replaces_another_keeps_its_beans_as_they_are_now(new_store: NewStore) -> None:
    store, key, run_id = await new_store(), new_key(), uuid4().hex
    waiting = Turn(run_id=run_id, messages=(UserMessage("pay"),), state="waiting", beans={"a": {"n": 1}, "b": {"n": 1}})
    await store.write(key, LogWrite(turn=waiting))
    await store.write(key, LogWrite(turn=say(2, beans={"a": {"n": 2}})))
    await store.write(key, LogWrite(turn=say("pay", run_id=run_id, beans={"b": {"n": 3}})))
    await append(store, key, 4)

    log = await read(store, key)
    assert log.head.beans == {"a": {"n": 2}, "b": {"n": 3}}
    assert [dict(each.beans) for each in log.turns] == [{"a": {"n": 2}}, {"a": {"n": 2}, "b": {"n": 3}}, {}]
    [*_, last] = [each for each in entries_of(log.turns) if isinstance(each.message, UserMessage)]
    await store.rewind(key, last.id)
    assert (await read(store, key)).head.beans == {"a": {"n": 2}, "b": {"n": 3}}


async def what_a_run_has_stored_is_found_also_under_a_former_name(new_store: NewStore) -> None:
    store, other, key = await new_store(), await new_store(), new_key()
    assert await other.read_run(key, "run") is None
    await store.write(key, LogWrite(turn=say(1, id=f"{key.service}:1", run_id="run", state="waiting", note="waits")))
    await append(store, key, 2)
    found = await other.read_run(key, "run")
    assert found is not None
    assert (found.id, found.state, found.note, found.number) == (f"{key.service}:1", "waiting", "waits", 1)
    renamed = ChatMemoryKey(f"{key.service}.New", key.memory_id, (key.service,))
    assert await other.read_run(renamed, "run") == found
    assert await other.read_run(key, "another") is None
    assert await other.read_run(new_key(), "run") is None


async def another_run_with_an_equal_turn_replaces_nothing(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    for _ in range(2):
        await store.write(key, LogWrite(turn=say(1, run_id=uuid4().hex)))

    assert len(await texts(store, key)) == 4


async def notes_are_stored_with_a_turn_and_without(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    notes = ViewNotes(Position(1, 2), "MessageWindow", "They met. \x00", Position(2))
    await store.write(key, LogWrite(notes=notes))
    assert await store.read_since(key, lambda head: 0) is None

    await store.write(key, LogWrite(turn=say(1), notes=notes))
    assert (await read(store, key)).head.notes == notes
    before = (await read(store, key)).head
    await store.write(key, LogWrite(notes=ViewNotes(), usage=TokenUsage(1, 0)))
    after = (await read(store, key)).head
    assert (after.notes, after.usage, after.updated_at) == (ViewNotes(), TokenUsage(1, 0), before.updated_at)


async def beans_are_kept_with_a_turn_without_messages(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    await append(store, key, 1)
    before = (await read(store, key)).head
    await store.write(key, LogWrite(turn=Turn(beans={"Cart": {"items": 1}})))

    log = await read(store, key)
    assert (log.head.beans, log.head.messages, log.head.updated_at) == ({"Cart": {"items": 1}}, 2, before.updated_at)
    assert [len(each.shown) for each in log.turns] == [2, 0]  # for a fork, which copies the beans of each turn
    newest = await store.read_newest(key, 10)
    assert newest is not None
    assert len(newest.turns) == 1


# --- reading parts


async def parts_of_a_log_are_read_from_a_turn_on_and_backwards(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    assert await store.read_newest(key, 3) is None
    await append(store, key, *range(1, 8))

    log = await store.read_since(key, lambda head: head.next_number - 2)
    assert log is not None
    assert [each.number for each in log.turns] == [6, 7]
    seen, before, pages = list[str | None](), None, 0
    while log := await store.read_newest(key, 3, before):
        page = newest_entries(log.turns, 3)
        if not page:
            break
        assert len(log.turns) <= 2
        seen = [*(each.message.text for each in page), *seen]
        before, pages = page[0].id, pages + 1
    assert seen == [f"{kind}{number}" for number in range(1, 8) for kind in "qa"]
    assert pages == 5


async def unknown_entries_are_value_errors(new_store: NewStore) -> None:
    store, key, other = await new_store(), new_key(), new_key()
    await append(store, key, 1)
    await append(store, other, 1)
    [elsewhere, answer] = entries_of((await read(store, other)).turns)
    [_, mine] = entries_of((await read(store, key)).turns)

    for unknown in ("", "x", "x.1", f"{mine.id}0", f"{mine.id[:-1]}-1", elsewhere.id):
        with pytest.raises(ValueError, match="unknown entry"):
            await store.read_newest(key, 3, unknown)
        with pytest.raises(ValueError, match="unknown entry"):
            await store.rewind(key, unknown)
    with pytest.raises(ValueError, match="not a user message"):
        await store.rewind(other, answer.id)


# --- rewind


async def a_rewind_hides_what_follows(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    for number in range(1, 5):
        beans = {"Cart": {"items": number}} if number != 3 else {"Other": {}}
        await store.write(key, LogWrite(turn=say(number, beans=beans, in_charge=f"Desk.{number}")))
    third = [*entries_of((await read(store, key)).turns)][4]
    assert third.message == UserMessage("q3")

    head = await store.rewind(key, third.id)

    assert head == (await read(store, key)).head
    assert head is not None
    assert (head.messages, head.beans, head.in_charge) == (4, {"Cart": {"items": 2}}, "Desk.2")
    assert await texts(store, key) == ["q1", "a1", "q2", "a2"]
    with pytest.raises(ValueError, match="unknown entry"):
        await store.rewind(key, third.id)
    await append(store, key, "new")
    assert await texts(store, key) == ["q1", "a1", "q2", "a2", "qnew", "anew"]
    assert (await read(store, key)).head.messages == 6
    log = await store.read_newest(key, 3)
    assert log is not None
    assert [each.message.text for each in newest_entries(log.turns, 3)] == ["a2", "qnew", "anew"]


async def a_rewind_forgets_notes_of_what_it_hides(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    await append(store, key, 1, 2, 3)
    entries = [*entries_of((await read(store, key)).turns)]
    notes = ViewNotes(Position(2), "MessageWindow", "They met.", Position(2))
    await store.write(key, LogWrite(notes=notes))

    later = await store.rewind(key, entries[4].id)
    assert later is not None
    assert later.notes == notes
    earlier = await store.rewind(key, entries[0].id)
    assert earlier is not None
    assert (earlier.notes, earlier.messages) == (ViewNotes(), 0)
    assert await texts(store, key) == []


def approval(run_id: str, call_id: str = "c1", **fields: Any) -> KeptApproval:
    shown = RememberedApproval("refund", "boss \x00", datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC))
    person = {"name": "boss \x00", "roles": ["manager"], "attributes": {"text": "\ud800"}}
    about: dict[str, Any] = {"shown": shown, "service": "desk", "owner": BOB, "person": person}
    return KeptApproval(**{**about, "run_id": run_id, "call_id": call_id, **fields})


async def approvals_are_kept_until_a_rewind_to_before_their_call(new_store: NewStore) -> None:
    store, other, key, run_id = await new_store(), await new_store(), new_key(), uuid4().hex
    await append(store, key, 1)
    first, second = approval(run_id, "c1", owner=ANN), approval(run_id, "c2")
    await store.change(key, lambda head: with_approval(with_approval(head, first), second))
    assert [each.place for each in (await read(other, key)).head.approvals] == [Position(2), Position(2)]

    await append(store, key, 2)  # such as that of a call that did not wait for the run
    calls = [AiMessage(None, [ToolExecutionRequest(each, "refund", "{}")]) for each in ("c1", "c2")]
    said = (UserMessage("pay"), calls[0], UserMessage("and"), calls[1], AiMessage("done"))
    await store.write(key, LogWrite(turn=Turn(id=f"{run_id}:1", messages=said, run_id=run_id)))
    await append(store, key, 4)
    first, second = replace(first, place=Position(3, 1)), replace(second, place=Position(3, 3))
    assert (await read(other, key)).head.approvals == (first, second)

    entries = [*entries_of((await read(store, key)).turns)]
    for entry, kept in ((entries[-2], (first, second)), (entries[6], (first,)), (entries[4], ())):
        await store.rewind(key, entry.id)
        assert (await read(other, key)).head.approvals == kept


async def approvals_are_gone_with_the_log_and_in_its_copy(new_store: NewStore) -> None:
    store, key, copy = await new_store(), new_key(), new_key("copy")
    await append(store, key, 1)
    await store.change(key, lambda head: with_approval(head, approval("1")))
    log = await read(store, key)
    copied = fork_log(log, replace(copy, service=key.service), None, clock_of(store).now())
    assert await store.create(copied.head.key, copied)
    assert (await read(store, copied.head.key)).head.approvals == ()
    await store.replace(key, say("new"))
    assert (await read(store, key)).head.approvals == ()
    await store.delete(key)
    await append(store, key, 1)
    assert (await read(store, key)).head.approvals == ()


async def a_rewind_can_cut_a_turn_with_several_questions(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    asked = [UserMessage("q1"), AiMessage("a1"), UserMessage("q2"), AiMessage("a2")]
    await store.update_messages(key, asked)
    await append(store, key, 3)
    entries = [*entries_of((await read(store, key)).turns)]

    await store.rewind(key, entries[2].id)
    assert await texts(store, key) == ["q1", "a1"]
    await store.rewind(key, entries[0].id)
    assert await texts(store, key) == []


# --- the three methods


async def update_messages_appends_what_is_new_or_replaces_the_log(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    first: list[Message] = [UserMessage("q1"), AiMessage("a1")]
    await store.update_messages(key, first)
    await store.update_messages(key, first)
    await store.update_messages(key, [*first, UserMessage("q2")])
    assert [len(each.messages) for each in (await read(store, key)).turns] == [2, 1]
    await store.write(key, LogWrite(notes=ViewNotes(Position(1), "MessageWindow")))

    await store.update_messages(key, [UserMessage("other")])
    log = await read(store, key)
    assert [len(each.messages) for each in log.turns] == [1]
    assert (log.head.messages, log.head.notes) == (1, ViewNotes())
    assert await texts(store, key) == ["other"]


# --- whole logs


async def a_whole_log_is_created_once(new_store: NewStore) -> None:
    store, key, copy = await new_store(), new_key(), new_key()
    for number in range(1, 4):
        turn = say(number, beans={"Cart": {"items": number}}, usage=TokenUsage(1, 1))
        await store.write(key, LogWrite(turn=turn, owner=BOB))
    log = await read(store, key)
    second = [*entries_of(log.turns)][2]
    now = clock_of(store).now()

    forked = fork_log(log, copy, second.id, now)
    assert await store.create(copy, forked)
    assert not await store.create(copy, forked)
    assert await texts(store, copy) == ["q1", "a1", "q2", "a2"]
    head = (await read(store, copy)).head
    assert (head.owner, head.messages, head.beans) == (BOB, 4, {"Cart": {"items": 2}})
    await append(store, copy, "copy")
    assert await texts(store, key) == ["q1", "a1", "q2", "a2", "q3", "a3"]

    restored = new_key()
    exported = export_log(await read(store, copy))
    assert await store.create(restored, restore_log(restored, exported, ANN, now))
    again = export_log(await read(store, restored))
    assert again == {**exported, "service": restored.service, "owner": "ann"}


# --- heads


async def conversations_are_listed_by_their_newest_turn(new_store: NewStore) -> None:
    store = await new_store()
    keys = [new_key(str(number)) for number in range(5)]
    services = {each.service for each in keys}
    for key, owner in zip(keys, (ANN, BOB, None, ANN, ANN), strict=True):
        await store.write(key, LogWrite(turn=say(1), owner=owner))
        await asyncio.sleep(0.002)
    await append(store, keys[0], 2)

    async def listed(**conditions: Any) -> list[str]:
        found = await store.find_heads(**{"services": services, "limit": 10, **conditions})
        return [each.key.memory_id for each in found]

    assert await listed() == ["0", "4", "3", "2", "1"]
    assert await listed(owner=ANN) == ["0", "4", "3"]
    assert await listed(owner=BOB) == ["1"]
    assert await listed(owner=Owner("bob")) == []
    assert await listed(services={keys[2].service}) == ["2"]
    first = await store.find_heads(services=services, limit=2)
    position = first[-1].updated_at, first[-1].id
    assert await listed(before=position, limit=2) == ["3", "2"]
    await store.delete(keys[0])
    assert await listed() == ["4", "3", "2", "1"]


async def a_head_is_changed_without_a_turn(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    assert await store.change(key, lambda head: replace(head, title="x")) is None
    await append(store, key, 1)
    before = (await read(store, key)).head

    changes = [
        store.change(key, lambda head, each=each: replace(head, title=(head.title or "") + each, owner=ANN))  # type: ignore[misc]
        for each in "abcdef"
    ]
    await asyncio.gather(*changes, append(store, key, 2))

    head = (await read(store, key)).head
    assert head.title is not None
    assert sorted(head.title) == [*"abcdef"]
    assert (head.owner, head.messages) == (ANN, 4)
    assert before.owner is None


async def all_that_belongs_to_a_conversation_is_deleted(new_store: NewStore) -> None:
    store, key = await new_store(), new_key()
    await store.write(key, LogWrite(turn=say(1, id=f"turn {uuid4().hex}", beans={"Cart": {}})))
    turn = (await read(store, key)).turns[0]

    assert await store.delete(key) == Deleted(1, 2, 1)
    assert await store.delete(key) == Deleted()
    assert await store.read_since(key, lambda head: 0) is None
    assert await store.read_newest(key, 1) is None
    await store.write(key, LogWrite(turn=say(1, id=turn.id)))
    assert await texts(store, key) == ["q1", "a1"]
    assert (await read(store, key)).head.beans == {}


# --- former names


async def what_lies_under_a_former_name_is_found_and_moves_with_the_next_turn(new_store: NewStore) -> None:
    store, old = await new_store(), new_key()
    renamed = new_key("room 7", "shop.Other", old.service)
    await store.write(old, LogWrite(turn=say(1), owner=ANN))
    assert await texts(store, renamed) == ["q1", "a1"]
    assert (await read(store, renamed)).head.key == old

    await append(store, renamed, 2)
    assert await texts(store, renamed) == ["q1", "a1", "q2", "a2"]
    log = await read(store, renamed)
    assert (log.head.key.service, log.head.owner) == (renamed.service, ANN)
    assert await store.get_messages(old) == ()


async def what_lies_under_the_present_name_counts_and_both_are_deleted(new_store: NewStore) -> None:
    store, old = await new_store(), new_key()
    renamed = new_key("room 7", old.service)
    await append(store, ChatMemoryKey(renamed.service, "room 7"), "new")
    await append(store, old, "old")

    assert await texts(store, renamed) == ["qnew", "anew"]
    assert not await store.create(renamed, await read(store, old))
    assert await store.delete(renamed) == Deleted(2, 4, 0)
    assert await texts(store, old) == []


async def a_conversation_is_locked_under_all_its_names(new_store: NewStore) -> None:
    one, other, old = ChatMemories(await new_store()), ChatMemories(await new_store()), new_key()
    renamed = new_key("room 7", old.service)
    order: list[str] = []

    async def enter(memories: ChatMemories, key: ChatMemoryKey, name: str) -> None:
        async with memories.enter(key):
            order.append(name)
            await asyncio.sleep(0.02)
            order.append(name)

    async with asyncio.timeout(60):
        await asyncio.gather(*(enter(one, renamed, f"new {n}") for n in range(3)), enter(other, old, "old"))

    assert order[::2] == order[1::2]


# --- one caller at a time, and the wish to stop


async def the_one_who_holds_a_conversation_sees_the_wish_to_stop_it(new_store: NewStore) -> None:
    store, other, key, quiet = await new_store(), await new_store(), new_key(), new_key()
    assert not await other.ask_to_stop(key, "ann")
    assert await other.holder(key) is None

    async with AsyncExitStack() as held:
        await held.enter_async_context(store.lock(key))
        await held.enter_async_context(store.lock(quiet))
        token = await other.holder(key)
        assert token is not None
        assert await store.wishes() == {}
        assert await other.ask_to_stop(key, "ann \x00")
        assert await store.wishes() == {key: "ann \x00"}
        assert await other.ask_to_stop(quiet, None)
        assert await store.wishes() == {key: "ann \x00", quiet: None}
        assert await other.holder(key) == token
    assert await other.holder(key) is None
    async with store.lock(key):
        assert await store.wishes() == {}
        assert await other.holder(key) not in (None, token)


async def a_call_appends_what_it_was_given_by_a_view(new_store: NewStore) -> None:
    memories, key = ChatMemories(await new_store()), new_key()
    window = MessageWindow(4)
    sent = list[list[str | None]]()
    for number in range(1, 6):
        async with memories.enter(key):
            excerpt = await memories.load(key, window)
            sent.append([each.text for each in excerpt.messages])
            await memories.append(key, say(number), excerpt, window, owner=ANN)

    assert sent == [[], ["q1", "a1"], ["q1", "a1", "q2", "a2"], ["q3", "a3"], ["q3", "a3", "q4", "a4"]]
    assert len(await memories.store.get_messages(key)) == 10


async def a_caller_who_does_not_wait_gets_an_error_at_once(new_store: NewStore) -> None:
    store, other, key = await new_store(), await new_store(), new_key()
    async with store.lock(key):
        for each in (store, other):
            with pytest.raises(ConversationBusyError) as raised:
                async with ChatMemories(each).enter(key, wait=False):
                    pytest.fail("it is in use")
            assert (raised.value.service, raised.value.memory_id) == (key.service, key.memory_id)
    async with ChatMemories(other).enter(key, wait=False):
        pass


CHECKS: tuple[Check, ...] = (
    a_turn_comes_back_as_it_was,
    every_field_of_a_log_comes_back,
    a_turn_that_is_appended_again_is_there_once,
    a_turn_of_a_run_replaces_what_the_run_had_stored_and_is_at_the_end,
    a_turn_that_replaces_another_keeps_its_beans_as_they_are_now,
    what_a_run_has_stored_is_found_also_under_a_former_name,
    another_run_with_an_equal_turn_replaces_nothing,
    notes_are_stored_with_a_turn_and_without,
    beans_are_kept_with_a_turn_without_messages,
    parts_of_a_log_are_read_from_a_turn_on_and_backwards,
    unknown_entries_are_value_errors,
    a_rewind_hides_what_follows,
    a_rewind_forgets_notes_of_what_it_hides,
    approvals_are_kept_until_a_rewind_to_before_their_call,
    approvals_are_gone_with_the_log_and_in_its_copy,
    a_rewind_can_cut_a_turn_with_several_questions,
    update_messages_appends_what_is_new_or_replaces_the_log,
    a_whole_log_is_created_once,
    conversations_are_listed_by_their_newest_turn,
    a_head_is_changed_without_a_turn,
    all_that_belongs_to_a_conversation_is_deleted,
    what_lies_under_a_former_name_is_found_and_moves_with_the_next_turn,
    what_lies_under_the_present_name_counts_and_both_are_deleted,
    a_conversation_is_locked_under_all_its_names,
    the_one_who_holds_a_conversation_sees_the_wish_to_stop_it,
    a_caller_who_does_not_wait_gets_an_error_at_once,
    a_call_appends_what_it_was_given_by_a_view,
)
