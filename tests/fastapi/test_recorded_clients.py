"""What the real clients of front ends sent, as `tests/compat/test_front_ends.py` recorded it, is answered."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .front_desk import Refunds, check_chunk, events_in
from .front_end_scenes import (
    AG_UI,
    ROOM,
    USE_CHAT,
    Scene,
    read_recorded,
    run_ids,
    shown_by_ag_ui,
    shown_by_use_chat,
    with_ids_of_runs,
)
from .test_ag_ui import EVENTS

pytestmark = pytest.mark.anyio

Running = Callable[..., Any]


async def play(scene: Scene, client_name: str, running: Running, history: str) -> tuple[list[str], list[Any]]:
    """Send the recorded requests of a scene. Return the messages of the conversation, and all events."""
    app, container, _ = scene.open()
    events: list[Any] = []
    async with running(app) as client:
        for recorded in read_recorded(client_name)[str(scene)]:
            request = with_ids_of_runs(recorded, await run_ids(container))
            response = await client.request(request["method"], request["path"], json=request.get("body"))
            assert response.status_code == request["status"], response.text
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                events += events_in(response.text)
        messages = (await client.get(history.format(ROOM))).json()
        if not scene.services:
            assert container.get(Refunds).refunded == list(scene.refunded)
    show = shown_by_ag_ui if "agui" in history else shown_by_use_chat
    return show(messages), events


def without_gates(scenes: list[Scene]) -> list[Scene]:
    return [each for each in scenes if not each.gated]


def recorded_scenes() -> Iterator[Any]:
    """The scenes with each version whose requests differ."""
    old, new = read_recorded("ai-sdk-react-6"), read_recorded("ai-sdk-react-7")
    for each in without_gates(USE_CHAT):
        yield pytest.param(each, 6, id=f"{each}")
        if old[str(each)] != new[str(each)]:
            yield pytest.param(each, 7, id=f"{each} with version 7")


@pytest.mark.parametrize(("scene", "version"), [*recorded_scenes()])
async def test_what_use_chat_sent_is_answered(scene: Scene, version: int, running: Running) -> None:
    shown, chunks = await play(scene, f"ai-sdk-react-{version}", running, "/api/chat/{}/messages")

    assert shown == list(scene.shows if scene.stored is None else scene.stored)
    for each in chunks:
        check_chunk(each)


@pytest.mark.parametrize("scene", without_gates(AG_UI), ids=str)
async def test_what_an_ag_ui_client_sent_is_answered(scene: Scene, running: Running) -> None:
    shown, events = await play(scene, "ag-ui-client", running, "/agui/{}/messages")

    assert shown == list(scene.shows if scene.stored is None else scene.stored)
    for each in events:
        assert not getattr(EVENTS.validate_python(each), "model_extra", None), each


async def test_all_events_are_those_of_the_protocol(running: Running) -> None:
    names = ("says", "fails", "reloads while it waits", "approves within a service", "gets sources", "gets the state")
    seen = set()
    for each in (scene for scene in AG_UI if str(scene) in names):
        _, events = await play(each, "ag-ui-client", running, "/agui/{}/messages")
        seen |= {EVENTS.validate_python(event).type.value for event in events}

    blocks = {f"{kind}_{step}" for kind in ("TEXT", "REASONING") for step in ("START", "CONTENT", "END")}
    assert seen == {
        *(each.replace("_", "_MESSAGE_") for each in blocks),
        *(f"REASONING_{step}" for step in ("START", "END")),
        *(f"TOOL_CALL_{step}" for step in ("START", "ARGS", "END", "RESULT")),
        *("RUN_STARTED", "RUN_FINISHED", "RUN_ERROR", "MESSAGES_SNAPSHOT", "STATE_SNAPSHOT", "CUSTOM"),
        *("SUBAGENT_STARTED", "SUBAGENT_FINISHED"),
    }
