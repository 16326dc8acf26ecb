"""Runs that this program cannot read or show: every list has them with an error, and they can be cancelled."""

import json
from collections.abc import Callable
from typing import Any, Protocol

import pytest
from fastapi import FastAPI

from toolbox import AiMessage, ChatResponse, Container, register_ai_service, tool
from toolbox.errors import RunSuspendedError
from toolbox.runs import InMemoryRunStore, RunChanges, RunStore, RunSuspended, reject
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, install, runs_router

pytestmark = pytest.mark.anyio


class Refunds:
    @tool(requires_approval=True)
    def refund(self, order: dict[str, Any]) -> str:
        return "refunded"


@register_ai_service(tools=Refunds)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...


def nested(depth: int) -> str:
    return '{"order": ' + '{"a": ' * depth + "1" + "}" * depth + "}"


UNREADABLE: dict[str, tuple[str, Callable[[str], str]]] = {
    "half a surrogate": ('{"order": {"id": "?"}}', lambda text: text.replace('"?"', '"\\ud800"')),
    "deep arguments": (nested(250), lambda text: text),
    "a deep document": ('{"order": {}}', lambda text: "[" * 100_000),
    "a newer format": ('{"order": {}}', lambda text: json.dumps({**json.loads(text), "version": 99})),
    "another text": ('{"order": {}}', lambda text: "not JSON"),
}


async def made(kind: str) -> tuple[FastAPI, Container, str]:
    """Return an application whose store has one run that can be read, and one that cannot."""
    arguments, change = UNREADABLE[kind]
    replies = [
        ChatResponse(AiMessage(None, [tool_call("refund", '{"order": {}}')])),
        ChatResponse(AiMessage(None, [tool_call("refund", arguments)])),
    ]
    store = InMemoryRunStore()
    async with container_of(store, *replies) as here:
        ids = []
        for _ in replies:
            with pytest.raises(RunSuspendedError) as raised:
                await here.get(Desk).chat("hello")
            ids.append(raised.value.run_id)
    stored = await store.load(ids[1])
    assert stored is not None
    await store.change(ids[1], stored.version, RunChanges(document=change(stored.document)))
    container = container_of(store)
    app = FastAPI()
    install(app, container, dev_ui=DevUi(token=False))
    app.include_router(runs_router(container))
    return app, container, ids[1]


def container_of(store: InMemoryRunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}).register(Desk)
    return made.register_instance(store, RunStore)


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_a_run_that_cannot_be_read_is_listed_and_can_be_cancelled(kind: str, running: Callable[..., Any]) -> None:
    app, container, bad = await made(kind)
    async with running(app) as client:
        listed = {each.id: each for each in await container.runs.list()}
        assert (await container.runs.get(bad)) == listed[bad]
        assert (await client.get("http://127.0.0.1/dev-ui/api/runs")).status_code == 200
        reply = await client.get("/runs")
        assert reply.status_code == 200
        shown = {each["id"]: each for each in reply.json()["runs"]}
        one = await client.get(f"/runs/{bad}")
        cancelled = await container.runs.cancel(bad, "a\ud800b")
        after = {each["id"]: each for each in (await client.get("/runs")).json()["runs"]}

    assert (listed[bad].status, listed[bad].pending) == ("suspended", ())
    assert str(listed[bad].error).startswith("RunIncompatibleError: ")
    assert shown[bad]["error"] == one.json()["error"] == listed[bad].error
    assert [each.error for each in listed.values() if each.id != bad] == [None]
    assert (cancelled.status, cancelled.error) == ("cancelled", "a\\ud800b")
    assert (after[bad]["status"], after[bad]["error"]) == ("cancelled", "a\\ud800b")


async def test_half_a_surrogate_in_a_reason_or_in_an_error_does_not_break_lists(running: Callable[..., Any]) -> None:
    store = InMemoryRunStore()

    def broken(request: Any) -> Any:
        raise LookupError("half \ud800")

    call: Any = ChatResponse(AiMessage(None, [tool_call("refund", {"order": {}})]))
    container = container_of(store, call, broken)
    app = FastAPI()
    install(app, container)
    app.include_router(runs_router(container))
    async with running(app) as client:
        with pytest.raises(RunSuspendedError) as raised:
            await container.get(Desk).chat("hello")
        with pytest.raises(LookupError):
            await container.runs.resume(raised.value.run_id, {"0": reject("half \ud800")})
        run = await container.runs.get(raised.value.run_id)
        reply = await client.get("/runs")

    assert reply.status_code == 200
    assert (run.status, run.error) == ("failed", "LookupError: half \\ud800")
    assert [each.reason for each in run.history] == ["half \\ud800"]


async def test_the_events_of_a_call_with_half_a_surrogate_are_sent(running: Callable[..., Any]) -> None:
    call = tool_call("refund", '{"order": {"id": "\\ud800"}}')
    container = container_of(InMemoryRunStore(), ChatResponse(AiMessage(None, [call])))
    app = FastAPI()
    install(app, container)
    app.include_router(runs_router(container))
    async with running(app) as client:
        run = await container.runs.start(Desk.chat, "hello")
        async for each in container.runs.events(run.id):
            if isinstance(each.event, RunSuspended):
                break
        await container.runs.cancel(run.id)
        reply = await client.get(f"/runs/{run.id}/events")

    assert "event: RunSuspended" in reply.text
    assert "event: RunEnded" in reply.text
    assert "failure" not in reply.text
