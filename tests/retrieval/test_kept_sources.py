"""What streams, conversations and runs keep of passages, and what a run that continues finds again."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from toolbox import (
    ChatMemoryKey,
    ChatMemoryStore,
    CompleteResponse,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    ModelConnectionError,
    PartialResponse,
    Result,
    Retrieved,
    TokenStream,
    ToolboxSettings,
    ToolExecuted,
    UserMessage,
    register_ai_service,
    sql,
    tool,
)
from toolbox.conversations.log import entries_of
from toolbox.retrieval import Passage, Query, Retriever, retrieves
from toolbox.runs import InMemoryRunStore, RunFailedError, RunId, RunStore, approve, durable
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

A, B, C = (
    Passage(f"secret {name}", source=f"{name}.md", title=name.upper(), score=0.5, attributes={"page": 1, "at": name})
    for name in "abc"
)
STORED = Passage("", source="a.md", title="A", score=0.5, attributes={"page": 1, "at": "a"})


class Handbook(Retriever):
    found: ClassVar[list[Passage]] = []
    asked: ClassVar[list[str]] = []

    async def retrieve(self, query: Query) -> list[Passage]:
        self.asked.append(query.text)
        return list(self.found)


class Archive(Retriever):
    async def retrieve(self, query: Query) -> list[Passage]:
        return [B] if query.text == "b" else [C]


class Bank:
    @tool(requires_approval=True)
    async def pay(self, euros: int) -> str:
        return "paid"


@register_ai_service(retrievers=Handbook, tools=[Archive, Bank])
class Clerk(Protocol):
    async def answer(self, room: MemoryId[str], question: str) -> Result[str]: ...

    def events(self, question: str) -> TokenStream: ...

    def texts(self, question: str) -> AsyncIterator[str]: ...

    @retrieves()
    def plain(self, question: str) -> TokenStream: ...

    @durable
    async def surely(self, run: RunId, question: str) -> Result[str]: ...


class Kept(InMemoryRunStore):
    persistent = True


@pytest.fixture(autouse=True)
def the_handbook_has_one_page() -> None:
    Handbook.found[:] = [A]
    Handbook.asked.clear()


def started(*replies: Any, **options: Any) -> tuple[Container, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    container = Container(models={"default": model}, **options).register(Clerk)
    return container.register_instance(Kept(), RunStore), model


def asked_in(request: Any) -> str:
    return str(next(each for each in reversed(request.messages) if isinstance(each, UserMessage)).text)


# --- streams


async def test_a_stream_begins_with_the_passages() -> None:
    container, _ = started(tool_call("search_archive", {"query": "b"}), "done", "done", "done")
    async with container:
        events = [each async for each in container.get(Clerk).events("x")]
        texts = [each async for each in container.get(Clerk).texts("x")]
        others = [each async for each in container.get(Clerk).plain("x")]

    assert events[0] == Retrieved((A,))
    assert [type(each) for each in events[1:] if isinstance(each, (Retrieved, ToolExecuted, CompleteResponse))] == [
        ToolExecuted,
        CompleteResponse,
    ]
    assert "".join(texts) == "done"
    assert isinstance(others[0], PartialResponse)


async def test_a_stream_without_passages_has_no_such_event() -> None:
    Handbook.found.clear()
    container, _ = started("done")
    async with container:
        events = [each async for each in container.get(Clerk).events("x")]

    assert not [each for each in events if isinstance(each, Retrieved)]


# --- conversations


async def test_the_log_has_the_message_as_it_was_typed_and_the_sources_at_the_answer() -> None:
    container, _ = started(tool_call("search_archive", {"query": "b"}), "see [1] and [2]")
    container.register_instance(store := InMemoryChatMemoryStore(), ChatMemoryStore)
    async with container:
        await container.get(Clerk).answer("ada", "How much?")

    log = await store.read_newest(ChatMemoryKey.of(Clerk, "ada"), 100)
    assert log is not None
    entries = [*entries_of(log.turns)]
    assert entries[0].message == UserMessage("How much?")
    assert [each.sources for each in entries[:-1]] == [(), (), ()]
    assert entries[-1].sources[0] == STORED
    assert [each.source for each in entries[-1].sources] == ["a.md", "b.md"]
    assert all(each.text == "" for each in entries[-1].sources)
    assert "secret a" not in repr(log)
    assert "secret b" in repr(log)  # the result of a tool


# --- runs


async def test_a_resumed_run_asks_again_and_known_passages_keep_their_numbers() -> None:
    container, model = started(
        tool_call("search_archive", {"query": "b"}),
        tool_call("pay", {"euros": 1}),
        tool_call("search_archive", {"query": "c"}),
        "done",
    )
    async with container:
        suspended = await container.get(Clerk).answer("ada", "x")
        assert suspended.sources == (A, B)
        Handbook.found[:] = [Passage("new", source="new.md"), Passage("changed", source="a.md", title="A")]

        result = await container.runs.resume(suspended.run_id or "", {suspended.pending[0].id: approve()})

        assert Handbook.asked == ["x", "x"]
        assert "[1] A (a.md)\nsecret a" in asked_in(model.requests[1])
        assert "[3] (new.md)\nnew" in asked_in(model.requests[2])
        assert "[1] A (a.md)\nchanged" in asked_in(model.requests[2])
        assert "secret a" not in asked_in(model.requests[2])
        assert "[4] C" in result.tool_executions[-1].result
        assert [each.source for each in result.sources] == ["a.md", "b.md", "new.md", "c.md"]
        stored: Any = await container.runs.result(suspended.run_id or "")
        assert [each.source for each in stored.sources] == ["a.md", "b.md", "new.md", "c.md"]
        assert stored.sources[0] == Passage("", source="a.md", title="A")
        assert all(each.text == "" for each in stored.sources)


async def test_a_run_that_crashed_keeps_the_numbers_of_what_its_model_has_cited() -> None:
    container, model = started(tool_call("search_archive", {"query": "b"}), ModelConnectionError("down"), "done")
    async with container:
        with pytest.raises(ModelConnectionError):
            await container.get(Clerk).surely("7", "x")
        Handbook.found[:] = [C, A]

        result = await container.runs.retry("7")

    assert "[1] A (a.md)" in asked_in(model.requests[-1])
    assert "[3] C (c.md)" in asked_in(model.requests[-1])
    assert "[2] B (b.md)" in result.tool_executions[0].result
    assert [each.source for each in result.sources] == ["a.md", "b.md", "c.md"]
    assert Handbook.asked == ["x", "x"]


@pytest.mark.parametrize("crashes", [True, False])
async def test_parts_of_one_document_keep_their_numbers_when_a_run_goes_on(crashes: bool) -> None:
    then = ModelConnectionError("down") if crashes else tool_call("pay", {"euros": 1})
    container, model = started(tool_call("search_archive", {"query": "b"}), then, "done")
    Handbook.found[:] = parts = [replace(B, text="part 1"), replace(B, text="part 2")]
    async with container:
        if crashes:
            with pytest.raises(ModelConnectionError):
                await container.get(Clerk).surely("7", "x")
            result = await container.runs.retry("7")
        else:
            waiting = await container.get(Clerk).answer("ada", "x")
            result = await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})

    assert "[1] B (b.md)\npart 1" in asked_in(model.requests[-1])
    assert "[3] B (b.md)\nsecret b" in result.tool_executions[0].result
    assert result.sources == (*parts, B)


async def test_a_durable_run_stores_the_event_without_texts() -> None:
    container, _ = started("done")
    async with container:
        run = await container.runs.start(Clerk.surely, "8", "x")
        events = [each.event async for each in container.runs.events(run.id)]

    assert events[0] == Retrieved((STORED,))


async def test_followers_of_a_run_get_what_is_found_after_a_crash_once() -> None:
    container, _ = started(ModelConnectionError("down"), ModelConnectionError("down"), "done")
    async with container:
        run = await container.runs.start(Clerk.surely, "9", "x")
        with pytest.raises(RunFailedError):
            await container.runs.result(run.id)
        with pytest.raises(ModelConnectionError):  # the same is found again
            await container.runs.retry(run.id)
        Handbook.found[:] = [C, A]
        await container.runs.retry(run.id)
        events = [each.event async for each in container.runs.events(run.id)]

    found = [[passage.source for passage in each.passages] for each in events if isinstance(each, Retrieved)]
    assert found == [["a.md"], ["a.md", "c.md"]]


async def test_a_run_asks_under_the_identity_of_whoever_continues_it() -> None:
    class Files(Retriever):
        def __init__(self, user: SecurityIdentity) -> None:
            self.user = user

        async def retrieve(self, query: Query) -> list[Passage]:
            return [Passage(f"for {self.user.name}", source="x")]

    @register_ai_service(retrievers=Files, tools=Bank)
    class Guide(Protocol):
        async def answer(self, question: str) -> Result[str]: ...

    container, model = started(tool_call("pay", {"euros": 1}), "done", seeds=[SecurityIdentity])
    async with container.register(Guide):
        async with container.request_scope({SecurityIdentity: SecurityIdentity("ann")}):
            suspended = await container.get(Guide).answer("x")
        await container.runs.resume(suspended.run_id or "", {suspended.pending[0].id: approve()})

    assert "for ann" in asked_in(model.requests[0])
    assert "for ann" in asked_in(model.requests[1])  # the run's own identity, not that of the code that resumes it


async def test_cancelling_a_run_asks_nobody() -> None:
    container, _ = started(tool_call("pay", {"euros": 1}))
    async with container:
        suspended = await container.get(Clerk).answer("ada", "x")
        await container.runs.cancel(suspended.run_id or "", "no")

    assert Handbook.asked == ["x"]


async def test_what_json_cannot_have_is_stored_as_text_or_left_out() -> None:
    Handbook.found[:] = [Passage("a", score=float("nan"), attributes={"at": b"x", "far": float("inf"), (1, 2): 3})]  # type: ignore[dict-item]  # wrong on purpose
    container, _ = started("done")
    container.register_instance(store := InMemoryChatMemoryStore(), ChatMemoryStore)
    async with container:
        await container.get(Clerk).answer("ada", "x")

    log = await store.read_newest(ChatMemoryKey.of(Clerk, "ada"), 100)
    assert log is not None
    [source] = [*entries_of(log.turns)][-1].sources
    assert source == Passage("", attributes={"at": "b'x'", "far": "Infinity"})


async def test_a_service_that_is_a_tool_has_its_own_retrievers_and_numbers() -> None:
    @register_ai_service(retrievers=Handbook, tools=Bank)
    class Inner(Protocol):
        @tool
        async def look_up(self, question: str) -> Result[str]:
            """Look up and pay."""
            ...

    @register_ai_service(retrievers=Archive, tools=Inner)
    class Outer(Protocol):
        async def answer(self, question: str) -> Result[str]: ...

    replies = [tool_call("look_up", {"question": "inner"}), tool_call("pay", {"euros": 1}), "inner [1]", "outer [1]"]
    container, model = started(*replies)
    async with container.register(Inner, Outer):
        suspended = await container.get(Outer).answer("outer")
        result = await container.runs.resume(suspended.run_id or "", {suspended.pending[0].id: approve()})

    assert [each.source for each in result.sources] == ["c.md"]
    assert "[1] C" in asked_in(model.requests[0])
    assert "[1] A" in asked_in(model.requests[1])
    assert "[1] A" in asked_in(model.requests[2])
    assert "[1] C" in asked_in(model.requests[3])


def bytes_in(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.iterdir())


async def test_no_file_of_a_database_has_the_text_of_a_passage(tmp_path: Path) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{tmp_path / 'data.db'}"))
    model = ScriptedChatModel([tool_call("pay", {"euros": 1}), "see [1]", "see [1]"])
    container = Container(models={"default": model}, settings=settings)
    async with container.register(sql.engine, sql.SqlRunStore, sql.SqlChatMemoryStore, Clerk):
        suspended = await container.get(Clerk).answer("ada", "x")
        await container.runs.resume(suspended.run_id or "", {suspended.pending[0].id: approve()})
        await container.get(Clerk).surely("7", "x")
        store: Any = await container.aget(ChatMemoryStore)
        log = await store.read_newest(ChatMemoryKey.of(Clerk, "ada"), 100)

    assert [*entries_of(log.turns)][-1].sources == (STORED,)
    stored = bytes_in(tmp_path)
    assert b"see [1]" in stored
    assert b"a.md" in stored
    assert b"secret a" not in stored
