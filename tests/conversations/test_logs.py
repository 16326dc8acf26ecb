"""Logs as data: owners, the exported form, forks of a turn with several questions."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from toolbox import AiMessage, ChatMemoryKey, UserMessage
from toolbox.conversations.keys import Owner
from toolbox.conversations.log import Log, Turn, begin_head, entries_of, fork_log
from toolbox.conversations.log_forms import export_log, head_from_json, head_to_json, restore_log
from toolbox.errors import TranscriptError
from toolbox.security import SecurityIdentity

NESTED: Any = []
for _ in range(10_000):
    NESTED = [NESTED]

KEY = ChatMemoryKey("shop.Assistant", "room 7")
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def turn(number: int, **fields: Any) -> Turn:
    messages = (UserMessage(f"q{number}"), AiMessage(f"a{number}"))
    return Turn(**{"id": str(number), "number": number, "messages": messages, "at": NOW, **fields})


# --- owners


def test_an_owner_is_a_name_and_the_attributes_that_are_named() -> None:
    identity = SecurityIdentity("ann", attributes={"tenant": UUID(int=1), "plan": "free", "token": "secret"})

    owner = Owner.of(identity, ["tenant", "missing", "token"])

    assert owner == Owner("ann", {"tenant": str(UUID(int=1))})
    assert Owner.of(identity) == Owner("ann")
    assert Owner.of(SecurityIdentity.anonymous(), ["tenant"]) is None
    head = begin_head(KEY, NOW, owner)
    assert "secret" not in head_to_json(head)[0]
    fields = {"key": KEY, "id": head.id, "created_at": NOW, "updated_at": NOW}
    assert head_from_json(*head_to_json(head), **fields) == head


def test_owners_are_equal_if_name_and_attributes_are() -> None:
    owners = [
        Owner("ann"),
        Owner("ann", {"tenant": "a"}),
        Owner("ann", {"tenant": "b"}),
        Owner("ann", {"tenant": None}),
        Owner("bob", {"tenant": "a"}),
        Owner("ann\x00 \ud800"),
    ]

    assert len({each.digest for each in owners}) == len(owners)
    assert Owner("a", {"x": 1, "y": 2}).digest == Owner("a", {"y": 2, "x": 1}).digest
    assert hash(Owner("a", {"x": 1})) == hash(Owner("a", {"x": 1}))


# --- the exported form


def test_the_exported_form_is_the_documented_one() -> None:
    turns = (
        turn(1, in_charge="Billing.chat", answered_by="Billing.chat"),
        turn(2, hidden_from=0),
        turn(3, state="stopped", hidden_from=1),
        turn(4, messages=(), beans={"Cart": {"items": 1}}),
    )
    head = begin_head(KEY, NOW, Owner("ann"), "Trip")

    assert export_log(Log(head, turns)) == {
        "version": 1,
        "service": "shop.Assistant",
        "memory_id": "room 7",
        "owner": "ann",
        "title": "Trip",
        "created_at": "2026-11-28T12:00:00+00:00",
        "turns": [
            {
                "at": "2026-11-28T12:00:00+00:00",
                "state": "answered",
                "messages": [
                    {"type": "user", "contents": [{"type": "text", "text": "q1"}]},
                    {"type": "ai", "text": "a1"},
                ],
                "in_charge": "Billing.chat",
                "answered_by": "Billing.chat",
            },
            {
                "at": "2026-11-28T12:00:00+00:00",
                "state": "answered",
                "messages": [{"type": "user", "contents": [{"type": "text", "text": "q3"}]}],
            },
        ],
        "beans": {},
    }


def test_the_least_that_can_be_restored_are_messages() -> None:
    log = restore_log(KEY, {"turns": [{"messages": [{"type": "ai", "text": "hi"}]}]}, None, NOW)

    [restored] = log.turns
    assert (restored.messages, restored.state, restored.at) == ((AiMessage("hi"),), "answered", NOW)
    assert (log.head.messages, log.head.created_at, log.head.next_number) == (1, NOW, 2)


@pytest.mark.parametrize(
    ("exported", "path"),
    [
        (None, ""),
        ({}, "turns"),
        ({"version": 2, "turns": []}, "version"),
        ({"turns": [{}]}, "turns.0.messages"),
        ({"turns": [{"messages": [{"type": "x"}]}]}, "turns.0.messages.0.type"),
        ({"turns": [{"messages": [], "state": "odd"}]}, "turns.0.state"),
        ({"turns": [{"messages": [], "at": "yesterday"}]}, "turns.0.at"),
        ({"turns": [], "created_at": 1}, "created_at"),
        ({"turns": [], "beans": []}, "beans"),
        ({"turns": [], "beans": {"Cart": NESTED}}, "beans.Cart"),
        ({"turns": [], "beans": {"Cart": float("nan")}}, "beans.Cart"),
        ({"turns": [], "created_at": "0001-01-01T00:00:00+14:00"}, "created_at"),
        ({"turns": [{"messages": [{"type": "ai", "attributes": {"x": NESTED}}]}]}, "turns.0.messages.0"),
        ({"turns": [{"messages": [{"type": "ai", "attributes": {"x": {1}}}]}]}, "turns.0.messages.0"),
        ({"turns": [{"messages": [{"type": "y" * 10**6}]}]}, "turns.0.messages.0.type"),
    ],
)
def test_the_place_of_what_cannot_be_restored_is_named(exported: Any, path: str) -> None:
    with pytest.raises(TranscriptError) as raised:
        restore_log(KEY, exported, None, NOW)

    assert raised.value.path == path
    assert len(str(raised.value)) < 2000


def test_restored_beans_belong_to_the_last_turn() -> None:
    said = [{"messages": [{"type": "user", "contents": [{"type": "text", "text": each}]}]} for each in "abc"]
    empty: dict[str, Any] = {"messages": []}
    log = restore_log(KEY, {"turns": [said[0], empty, *said[1:]], "beans": {"Cart": {"items": 1}}}, None, NOW)

    assert [(each.number, dict(each.beans)) for each in log.turns] == [(1, {}), (2, {}), (3, {"Cart": {"items": 1}})]
    assert log.head.messages == 3
    copy = ChatMemoryKey("shop.Assistant", "room 8")
    assert fork_log(log, copy, None, NOW).head.beans == log.head.beans == {"Cart": {"items": 1}}
    only_beans = restore_log(KEY, {"turns": [], "beans": {"Cart": {"items": 1}}}, None, NOW)
    assert fork_log(only_beans, copy, None, NOW).head.beans == {"Cart": {"items": 1}}
    assert only_beans.head.messages == 0


# --- forks


def test_a_fork_ends_with_what_answers_the_entry() -> None:
    several = turn(1, messages=tuple(UserMessage(each) if each in "ac" else AiMessage(each) for each in "abcd"))
    log = Log(begin_head(KEY, NOW), (several, turn(2, state="waiting"), turn(3)))

    def forked(upto: str | None) -> list[str | None]:
        copy = fork_log(log, ChatMemoryKey("shop.Assistant", "room 8"), upto, NOW)
        assert copy.head.messages == sum(len(each.messages) for each in copy.turns)
        assert {each.id for each in copy.turns}.isdisjoint({"1", "2", "3"})
        return [each.message.text for each in entries_of(copy.turns)]

    assert forked("1.0") == forked("1.1") == ["a", "b"]
    assert forked("1.2") == ["a", "b", "c", "d"]
    assert forked("3.0") == forked(None) == ["a", "b", "c", "d", "q3", "a3"]
    with pytest.raises(ValueError, match="unknown entry"):
        forked("9.0")
