"""Views: what is sent of a log."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from tests.generated import Choices, made
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatRequest,
    InMemoryChatMemoryStore,
    Message,
    MessageWindow,
    TokenWindow,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from toolbox.conversations.log import Log, LogWrite, Position, Turn, ViewNotes, begin_head, entries_of
from toolbox.conversations.log_forms import time_from_number
from toolbox.conversations.memories import ChatMemories
from toolbox.conversations.views import (
    Excerpt,
    FullHistory,
    Summary,
    Window,
    alternating,
    as_view,
    pieces_of,
)
from toolbox.services import loop

from .made_logs import check_alternation, check_pairs, make_turn
from .server_rules import check_request

pytestmark = pytest.mark.anyio

KEY = ChatMemoryKey("shop.Assistant", "room 7")
NOW = time_from_number(0)


def one(message: Message) -> int:
    return 1


class Newest:
    """An object with `newest`, as a program may write."""

    def newest(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages[-5:]


VIEWS: dict[str, Any] = {
    "messages": MessageWindow(6),
    "tokens": TokenWindow(6, count=one),
    "everything": FullHistory(),
    "summary": Summary(MessageWindow(6), keep_messages=3),
    "own": Newest(),
}


def turn(number: int, *messages: Message, **fields: Any) -> Turn:
    return Turn(id=str(number), number=number, messages=messages, at=NOW, **fields)


def log(*turns: Turn, notes: ViewNotes | None = None) -> Log:
    shown = sum(len(each.shown) for each in turns)
    return Log(replace(begin_head(KEY, NOW), messages=shown, notes=notes or ViewNotes()), turns)


def talk(*numbers: int) -> list[Turn]:
    return [turn(each, UserMessage(f"q{each}"), AiMessage(f"a{each}")) for each in numbers]


def texts(excerpt: Excerpt) -> list[str | None]:
    return [each.text for each in excerpt.messages]


# --- any log, any view


@settings(deadline=None)
@given(made(lambda choices: choices, size=160))
def test_what_is_sent_of_any_log_obeys_the_rules_of_models(drawn: tuple[Choices]) -> None:
    [choices] = drawn
    asyncio.run(go_through(choices, VIEWS[choices.one_of(list(VIEWS))]))


async def go_through(choices: Choices, chosen: Any) -> None:
    """Appends turns, ends waiting ones and rewinds, as calls do, and checks what each next call sends."""
    store = InMemoryChatMemoryStore(max_messages=choices.one_of((12, 1000)))
    memories, waiting = ChatMemories(store), list[str]()
    for name in range(2 + choices.below(12)):
        excerpt = await memories.load(KEY, chosen)
        check(excerpt, chosen)
        again = await memories.load(KEY, chosen)
        assert again.messages == excerpt.messages
        is_full = choices.below(8) == 7
        if is_full and isinstance(chosen, Summary):
            excerpt = chosen.shortened(excerpt) or excerpt
        if excerpt.unsummarized is not None and choices.below(4):
            assert isinstance(chosen, Summary)
            check_request(ChatRequest(chosen.request(excerpt.unsummarized)))
            excerpt = chosen.with_summary(excerpt, f"summary {name}")
            await memories.note(KEY, excerpt)
            check(excerpt, chosen)
            assert (await memories.load(KEY, chosen)).messages == excerpt.messages
        elif is_full:
            excerpt = as_view(chosen).halved(excerpt) or excerpt
            check(excerpt, None)
        if choices.below(8) == 7:
            await memories.add(KEY, [UserMessage(f"added {name}")])
            excerpt = await memories.load(KEY, chosen)
            check(excerpt, chosen)
        new = make_turn(choices, str(name))
        if new.state == "waiting":
            waiting.append(new.id)
        elif waiting and choices.below(2):
            new = Turn(id=f"{waiting[0]} ended", run_id=waiting.pop(0), messages=new.messages, state=new.state)
        await memories.append(KEY, new, excerpt, chosen)
        if choices.below(5) == 4:
            await rewind(store, choices)
    check(await memories.load(KEY, chosen), chosen)


async def rewind(store: InMemoryChatMemoryStore, choices: Choices) -> None:
    log = await store.read_since(KEY, lambda head: 0)
    assert log is not None
    asked = [each for each in entries_of(log.turns) if isinstance(each.message, UserMessage)]
    if asked:
        await store.rewind(KEY, choices.one_of(asked).id)


def check(excerpt: Excerpt, chosen: Any) -> None:
    messages = excerpt.messages
    check_pairs(messages)
    check_alternation(messages)
    if messages:
        assert isinstance(messages[0], UserMessage)
    _, asking = loop.begin(loop.Rules(), None, messages, UserMessage("new"), recalled=len(messages))
    check_request(asking.request)
    if isinstance(chosen, Window):
        pieces = pieces_of(excerpt.turns)
        sent = [each for each in pieces if excerpt.notes.begin is None or each.begins >= excerpt.notes.begin]
        assert len(sent) <= 1 or chosen.size([m for each in sent for m in each.counted]) <= chosen.limit


# --- cuts


def test_a_cut_stays_until_the_window_is_exceeded_and_then_leaves_two_thirds() -> None:
    window, notes, begins = MessageWindow(6), ViewNotes(), list[Any]()
    for last in range(1, 12):
        excerpt = window.excerpt(log(*talk(*range(1, last + 1)), notes=notes))
        notes = excerpt.notes
        begins.append((texts(excerpt)[0], len(excerpt.messages)))

    assert begins == [
        ("q1", 2),
        ("q1", 4),
        ("q1", 6),
        ("q3", 4),
        ("q3", 6),
        ("q5", 4),
        ("q5", 6),
        ("q7", 4),
        ("q7", 6),
        ("q9", 4),
        ("q9", 6),
    ]


@pytest.mark.parametrize("window", [MessageWindow(1), TokenWindow(1)])
def test_the_newest_turn_is_sent_even_if_it_is_larger_than_the_window(window: Window) -> None:
    assert texts(window.excerpt(log(*talk(1, 2)))) == ["q2", "a2"]


def test_a_view_ignores_where_another_one_has_cut() -> None:
    notes = MessageWindow(1).excerpt(log(*talk(1, 2))).notes

    assert texts(FullHistory().excerpt(log(*talk(1, 2), notes=notes))) == ["q1", "a1", "q2", "a2"]
    head = log(notes=notes).head
    assert FullHistory().first_turn(head) == 0
    assert MessageWindow(1).first_turn(head) == 2


def test_a_log_whose_beginning_is_gone_begins_with_a_user_message() -> None:
    rest = turn(1, AiMessage("a0"), UserMessage("q1"), AiMessage("a1"), start=3)

    assert texts(FullHistory().excerpt(log(rest))) == ["q1", "a1"]
    assert texts(as_view(Newest()).excerpt(log(*talk(1, 2, 3)))) == ["q2", "a2", "q3", "a3"]


def test_a_greeting_of_the_assistant_is_sent() -> None:
    greeted = [turn(1, AiMessage("Hello!")), *talk(2)]

    assert texts(MessageWindow(20).excerpt(log(*greeted))) == ["Hello!", "q2", "a2"]
    assert texts(MessageWindow(2).excerpt(log(*greeted))) == ["q2", "a2"]


def test_half_of_the_turns_are_left_out_of_a_full_context_and_of_one_nothing_stays() -> None:
    excerpt = FullHistory().excerpt(log(*talk(1, 2, 3)))
    for expected in (["q3", "a3"], []):
        shorter = FullHistory().halved(excerpt)
        assert shorter is not None
        assert texts(shorter) == expected
        excerpt = FullHistory().excerpt(log(*talk(1, 2, 3), notes=shorter.notes))
        assert texts(excerpt) == expected
    assert FullHistory().halved(excerpt) is None
    assert texts(FullHistory().excerpt(log(*talk(1, 2, 3, 4), notes=excerpt.notes))) == ["q4", "a4"]


# --- turns that did not end well


@pytest.mark.parametrize("state", ["failed", "stopped", "waiting"])
def test_such_a_turn_ends_with_a_note_of_the_assistant(state: Any) -> None:
    call = ToolExecutionRequest("1", "pay", "{}")
    unfinished = turn(1, UserMessage("pay"), AiMessage(None, [call]), state=state)

    messages = FullHistory().excerpt(log(unfinished, *talk(2))).messages

    assert [type(each) for each in messages] == [
        UserMessage,
        AiMessage,
        ToolExecutionResultMessage,
        AiMessage,
        UserMessage,
        AiMessage,
    ]
    assert messages[2].text.startswith("This call was interrupted")  # type: ignore[union-attr]
    check_pairs(messages)


def test_the_note_follows_the_text_so_far() -> None:
    unfinished = turn(1, UserMessage("tell"), AiMessage("Once upon"), state="stopped", note="[stopped by ann]")

    assert texts(FullHistory().excerpt(log(unfinished))) == ["tell", "Once upon\n\n[stopped by ann]"]


def test_messages_of_one_side_that_follow_each_other_are_joined() -> None:
    call = ToolExecutionRequest("1", "pay", "{}")
    told = [UserMessage("a"), UserMessage(["b"]), AiMessage("c"), AiMessage("d", [call])]

    assert alternating(told) == (UserMessage(["a", "b"]), AiMessage("c\n\nd", [call]))


# --- summaries


def test_an_empty_answer_is_a_note_for_the_model() -> None:
    """Servers refuse an empty message of the assistant; without one, the user would speak twice."""
    thoughts = {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]}
    for empty in (
        AiMessage(""),
        AiMessage(None),
        AiMessage(" \n"),
        AiMessage(None, reasoning="Hm.", attributes=thoughts),
    ):
        excerpt = FullHistory().excerpt(log(turn(1, UserMessage("q1"), empty), *talk(2)))

        assert texts(excerpt) == ["q1", "[This answer was empty.]", "q2", "a2"]
    picture = AiMessage(None, attributes={"output": [{"type": "image_generation_call", "id": "ig_1"}]})
    assert FullHistory().excerpt(log(turn(1, UserMessage("q1"), picture))).messages[1] is picture


def test_calls_of_one_message_are_sent_with_different_ids() -> None:
    calls = [ToolExecutionRequest(id_, "add", f'{{"a": {n}}}') for n, id_ in enumerate(("c", "c", "", "c_1"))]
    results = [ToolExecutionResultMessage(each.id, "add", str(n)) for n, each in enumerate(calls)]

    excerpt = FullHistory().excerpt(log(turn(1, UserMessage("q"), AiMessage(None, calls), *results, AiMessage("a"))))

    _, asked, *answered, _ = excerpt.messages
    assert isinstance(asked, AiMessage)
    ids = [each.id for each in asked.tool_execution_requests]
    assert len({*ids, ""}) == 5
    assert (ids[0], ids[3]) == ("c", "c_1")
    assert [each.arguments for each in asked.tool_execution_requests] == [each.arguments for each in calls]
    assert [(each.id, each.text) for each in answered] == [(id_, str(n)) for n, id_ in enumerate(ids)]  # type: ignore[union-attr]  # they are results


def test_a_summary_replaces_all_but_the_newest_turns_and_builds_on_the_last_one() -> None:
    view, notes = Summary(MessageWindow(6), keep_messages=3), ViewNotes()
    first = view.excerpt(log(*talk(1, 2, 3, 4)))
    assert first.unsummarized is not None
    assert [each.text for each in first.unsummarized.messages] == ["q1", "a1", "q2", "a2"]
    assert texts(first) == ["q3", "a3", "q4", "a4"]  # as the window alone leaves it

    done = view.with_summary(first, "They met.")
    assert texts(done) == ["Summary of the conversation so far:\nThey met.\nq3", "a3", "q4", "a4"]
    assert done.notes == ViewNotes(summary="They met.", summarized=Position(3, 0))

    notes = done.notes
    assert view.excerpt(log(*talk(1, 2, 3, 4, 5), notes=notes)).unsummarized is None
    second = view.excerpt(log(*talk(3, 4, 5, 6), notes=notes))
    assert second.unsummarized is not None
    assert [each.text for each in view.request(second.unsummarized)][:2] == [
        "Summary of the conversation so far:\nThey met.\nq3",
        "a3",
    ]
    assert view.with_summary(second, "More.").notes.summarized == Position(5, 0)


@pytest.mark.parametrize(
    ("view", "fact"),
    [
        (Summary(MessageWindow(10), keep_messages=10), "not smaller"),
        (Summary(FullHistory()), "window"),  # type: ignore[arg-type]
        (Summary(TokenWindow(0)), "TokenWindow"),
        (Summary(TokenWindow(9), keep_messages=0), "keep_messages=0"),
        (MessageWindow(0), "limit=0"),
        (object(), "invalid view"),
    ],
)
def test_invalid_options_are_problems(view: Any, fact: str) -> None:
    [(what, _)] = as_view(view).problems()

    assert fact in what


async def test_a_window_of_a_store_with_three_methods_moves_in_steps_too() -> None:
    from tests.conversations.three_methods import ThreeMethods

    store = ThreeMethods()
    memories = ChatMemories(store)
    for name in range(1, 6):
        excerpt = await memories.load(KEY, MessageWindow(6))
        new = Turn(messages=(UserMessage(f"q{name}"), AiMessage(f"a{name}")))
        await memories.append(KEY, new, excerpt, MessageWindow(6))

    assert [each.text for each in await store.get_messages(KEY)] == ["q3", "a3", "q4", "a4", "q5", "a5"]


async def test_a_store_with_three_methods_keeps_a_summary() -> None:
    from tests.conversations.three_methods import ThreeMethods

    view = Summary(MessageWindow(4), keep_messages=2)
    memories = ChatMemories(ThreeMethods())
    await memories.add(KEY, [each for turn in talk(1, 2, 3) for each in turn.messages])
    excerpt = view.with_summary(await memories.load(KEY, view), "They met.")
    await memories.note(KEY, excerpt)

    loaded = await memories.load(KEY, view)
    assert loaded.messages == excerpt.messages
    await memories.append(KEY, Turn(messages=talk(4)[0].messages), loaded, view)
    assert texts(await memories.load(KEY, view))[-2:] == ["q4", "a4"]
    assert (await memories.load(KEY, view)).notes.summary == "They met."


@pytest.mark.parametrize("window", [MessageWindow(20), TokenWindow(20, count=one), MessageWindow(3000)])
async def test_of_a_long_log_that_was_not_cut_a_window_reads_the_end_only(window: Window) -> None:
    class Counting(InMemoryChatMemoryStore):
        most = 0

        async def read_newest(self, key: ChatMemoryKey, messages: int, before: str | None = None) -> Log | None:
            log = await super().read_newest(key, messages, before)
            self.most = max(self.most, len(log.turns) if log is not None else 0)
            return log

    store = Counting(max_messages=10_000)
    for each in talk(*range(1, 1001)):
        await store.write(KEY, LogWrite(turn=each))

    excerpt = await ChatMemories(store).load(KEY, window)

    expected = window.excerpt(log(*talk(*range(1, 1001))))
    assert (excerpt.messages, excerpt.notes) == (expected.messages, expected.notes)
    assert store.most == (100 if window.limit == 20 else 1000)


async def test_an_own_view_gets_the_newest_1000_messages_also_of_a_turn_with_more() -> None:
    given: list[int] = []

    class Counting(Newest):
        def newest(self, messages: Sequence[Message]) -> Sequence[Message]:
            given.append(len(messages))
            return messages

    store = InMemoryChatMemoryStore(max_messages=10_000)
    said = tuple(message for each in talk(*range(1, 701)) for message in each.messages)
    await store.write(KEY, LogWrite(turn=Turn(messages=said)))

    excerpt = await ChatMemories(store).load(KEY, Counting())

    assert given == [1000]
    assert excerpt.messages == said[-1000:]


async def test_the_write_of_a_turn_moves_the_cut() -> None:
    store = InMemoryChatMemoryStore()
    for each in talk(1, 2, 3):
        await store.write(KEY, LogWrite(turn=each))
    memories = ChatMemories(store)

    excerpt = await memories.load(KEY, MessageWindow(4))
    await memories.append(KEY, Turn(messages=talk(4)[0].messages), excerpt, MessageWindow(4))

    [head] = await store.find_heads(limit=1)
    assert head.notes.begin == Position(3, 0)
    assert len(await store.get_messages(KEY)) == 8
