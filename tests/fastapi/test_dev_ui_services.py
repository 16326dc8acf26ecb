"""Services that are called from the dev UI: answers, streams, conversations, contents and errors."""

import asyncio
import json
import threading
from typing import Any, Protocol

import pytest
from fastapi import FastAPI

from tests.fastapi.restaurant import HERE, OPEN, Cook, Waiter, asked, called, restaurant
from toolbox import (
    AiMessage,
    AudioContent,
    Container,
    ImageContent,
    Message,
    PdfContent,
    UserMessage,
    register_ai_service,
    run_on_thread,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio


async def test_a_service_answers_and_its_tool_calls_are_shown(running: Any) -> None:
    async with running(restaurant(tool_call("add", {"dish": "soup"}), "Coming!")) as client:
        entries = await asked(client, "Waiter.serve", table="7", wish="Soup, please")

    [started] = [each for each in entries if each["type"] == "started"]
    assert started["where"] == "Waiter.serve"
    assert (started["user_message"], started["memory_id"], started["parent"]) == ("Soup, please", "7", None)
    [before] = [each for each in entries if each["type"] == "tool_started"]
    assert (before["name"], before["arguments"]) == ("add", '{"dish": "soup"}')
    [ran] = [each for each in entries if each["type"] == "tool"]
    assert (ran["call"], ran["result"], ran["is_error"]) == (before["call"], '["soup"]', False)
    assert ran["duration"] > 0
    asked_first, asked_again = [each["sent"] for each in entries if each["type"] == "model_started"]
    assert asked_first == "user: Soup, please"
    assert asked_again.endswith('model: → add {"dish": "soup"}\n\nadd: ["soup"]')
    assert [each["result"] for each in entries if each["type"] == "model"] == ['→ add {"dish": "soup"}', "Coming!"]
    assert [each["messages"] for each in entries if each["type"] == "memory"] == [4]
    assert (entries[-1]["type"], entries[-1]["value"]) == ("answer", "Coming!")


async def test_a_stream_arrives_in_pieces(running: Any) -> None:
    async with running(restaurant(tool_call("add", {"dish": "soup"}), "Coming right up!")) as client:
        entries = await asked(client, "Waiter.tell", table="7", wish="Soup")

    kinds = [each["type"] for each in entries]
    assert kinds.index("tool_started") < kinds.index("tool") < kinds.index("text")
    assert "".join(each["text"] for each in entries if each["type"] == "text") == "Coming right up!"
    assert kinds.count("tool") == 1


@pytest.mark.parametrize("method", ["Cook.recipe", "Cook.smell", "Cook.taste"])
async def test_each_kind_of_method_can_be_called(running: Any, method: str) -> None:
    async with running(restaurant("Stir it.")) as client:
        entries = await asked(client, method, dish="soup")

    assert entries[-1]["value"] == "Stir it."


async def test_structured_answers_and_items_are_shown_as_json(running: Any) -> None:
    async with running(restaurant('{"salt": 3}', '{"value": [1, 2]}')) as client:
        assert (await asked(client, "Cook.cook", dish="soup"))[-1]["value"] == {"salt": 3}
        entries = await asked(client, "Cook.steps", dish="soup")

    assert [each["value"] for each in entries if each["type"] == "item"] == [1, 2]


async def test_conversations_continue_with_their_memory_id(running: Any) -> None:
    model = ScriptedChatModel(["one", "two", "three"])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Waiter), dev_ui=OPEN)

    async with running(app) as client:
        for table in ("7", "7", "8"):
            await asked(client, "Waiter.serve", table=table, wish="hello")

    assert [len(each.messages) for each in model.requests] == [1, 3, 1]


async def test_images_are_entered_as_urls(running: Any) -> None:
    model = ScriptedChatModel(["nice"])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Cook), dev_ui=OPEN)

    async with running(app) as client:
        await asked(client, "Cook.look", message="Look", photos=["https://example.org/soup.png"])
        refused = await client.post(
            "/dev-ui/api/ask",
            json={"method": "Cook.look", "arguments": '{"message": "x", "photos": ["file:///etc/passwd"]}'},
            headers=HERE,
        )

    message = model.requests[0].messages[-1]
    assert isinstance(message, UserMessage)
    assert ImageContent(url="https://example.org/soup.png") in message.contents
    assert refused.status_code == 422


@register_ai_service(tools=[])
class Reader(Protocol):
    async def read(self, page: PdfContent | ImageContent, sound: AudioContent, question: str) -> str: ...


class Scanner:
    @tool
    def scan(self) -> list[Any]:
        return [
            "see",
            PdfContent(data=b"%PDF", name="bill.pdf"),
            AudioContent(b"RIFF\xff\xfe", "audio/x-wav"),
            ImageContent(data=b"\x89PNG\xff\xfe"),
            PdfContent("https://example.org/a.pdf"),
        ]


async def test_documents_and_recordings_are_entered_as_files(running: Any) -> None:
    model = ScriptedChatModel(["a bill", "a menu"])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Reader), dev_ui=OPEN)
    wav = "data:audio/wav;base64,UklGRg=="

    async with running(app) as client:
        fields = (await client.get("/dev-ui/api/program", headers=HERE)).json()
        await asked(client, "Reader.read", page="data:application/pdf;base64,JVBERg==", sound=wav, question="?")
        await asked(client, "Reader.read", page="https://example.org/menu.pdf", sound=wav, question="?")
        refused = [
            await client.post("/dev-ui/api/ask", json={"method": "Reader.read", "arguments": text}, headers=HERE)
            for text in (
                '{"page": "x", "sound": "y", "question": "?"}',
                '{"page": "https://a/b", "sound": "https://a/b.wav", "question": "?"}',
                '{"page": "data:application/pdf;base64,%", "sound": "data:image/png;base64,AA==", "question": "?"}',
            )
        ]

    sound = AudioContent("data:audio/wav;base64,UklGRg==", "audio/wav")
    assert [each.messages[-1] for each in model.requests] == [
        UserMessage([PdfContent("data:application/pdf;base64,JVBERg=="), sound, "?"]),
        UserMessage([PdfContent("https://example.org/menu.pdf"), sound, "?"]),
    ]
    assert [each.status_code for each in refused] == [422] * 3
    assert "a PDF document" in refused[0].text
    assert "a recording" in refused[1].text
    assert "invalid base64" in refused[2].text
    assert '"contentMediaType": "image/*,application/pdf"' in json.dumps(fields)
    assert '"contentMediaType": "audio/*"' in json.dumps(fields)


async def test_contents_of_a_tools_result_can_be_shown_and_saved(running: Any) -> None:
    async with running(restaurant(register=(Scanner,))) as client:
        answer = await called(client, "scan", "{}")

    assert answer["text"] == "see"
    assert answer["contents"] == [
        {"kind": "document", "name": "bill.pdf", "url": "data:application/pdf;base64,JVBERg=="},
        {"kind": "audio", "name": "audio.wav", "url": "data:audio/x-wav;base64,UklGRv/+"},
        {"kind": "image", "name": "image.png", "url": "data:image/png;base64,iVBOR//+"},
        {"kind": "document", "name": "document.pdf", "url": "https://example.org/a.pdf"},
    ]


async def test_an_error_is_shown_to_the_developer(running: Any) -> None:
    async with running(restaurant(RuntimeError("the oven is off"))) as client:
        entries = await asked(client, "Waiter.serve", table="7", wish="Soup")

    shown = {"type": "failure", "kind": "RuntimeError", "message": "the oven is off"}
    assert entries[-1] == shown | {"at": entries[-1]["at"], "duration": entries[-1]["duration"]}
    [ended] = [each for each in entries if each["type"] == "ended"]
    assert ended["failure"] == shown
    [model] = [each for each in entries if each["type"] == "model"]
    assert (model["is_error"], model["result"]) == (True, "RuntimeError: the oven is off")


@pytest.mark.parametrize(
    ("method", "arguments", "fault"),
    [
        ("Waiter.nothing", "{}", "unknown service method"),
        ("Waiter.serve", "{}", "table: missing; wish: missing"),
        ("Waiter.serve", "[]", "must be a JSON object"),
        ("Waiter.serve", "{", "not valid JSON"),
        ("Waiter.serve", '{"table": "7", "wish": 5}', "wish"),
        ("Waiter.serve", '{"table": "7", "wish": "x", "self": 1}', "self: unknown parameter"),
        ("Cook.cook", '{"dish": "soup", "guests": "many"}', "guests: Input should be a valid integer"),
        ("Cook.look", '{"message": 5, "photos": []}', "message: must be a string"),
    ],
)
async def test_invalid_arguments_are_rejected_before_the_model_is_called(
    running: Any, method: str, arguments: str, fault: str
) -> None:
    async with running(restaurant()) as client:
        reply = await client.post("/dev-ui/api/ask", json={"method": method, "arguments": arguments}, headers=HERE)

    assert reply.status_code == 422
    assert fault in reply.json()["detail"]


async def test_a_client_that_disconnects_cancels_its_call(connect: Any, running: Any) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    class Oven:
        @tool
        async def bake(self) -> str:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return "done"

    @register_ai_service(tools=Oven)
    class Baker(Protocol):
        async def bake(self, what: str) -> str: ...

    app = restaurant(tool_call("bake"), register=(Baker,))
    async with running(app):
        body = json.dumps({"method": "Baker.bake", "arguments": '{"what": "bread"}'}).encode()
        client = connect(app, "/dev-ui/api/ask", method="POST", body=body)
        client.scope["headers"] = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        task = client.start()
        await started.wait()
        client.leave()
        await ended.wait()
        await task

    assert b"bread" in client.body


async def test_an_overridden_service_is_the_one_that_is_called(running: Any) -> None:
    class FakeWaiter:
        async def serve(self, table: str, wish: str) -> str:
            return f"{wish} for {table}"

    app = FastAPI()
    container = Container(models={"default": ScriptedChatModel([])}).register(Waiter)
    install(app, container, dev_ui=OPEN)
    async with running(app) as client:
        with container.override(Waiter, FakeWaiter()):  # type: ignore[type-abstract]  # a Protocol is what is overridden
            entries = await asked(client, "Waiter.serve", table="7", wish="soup")

    assert entries[-1]["value"] == "soup for 7"


async def test_the_thread_of_each_tool_is_shown(running: Any) -> None:
    class Places:
        @tool
        def pooled(self) -> str:
            return threading.current_thread().name

        @tool
        @run_on_thread
        def fresh(self) -> None: ...

        @tool
        async def on_loop(self) -> None: ...

    calls = [tool_call("pooled"), tool_call("fresh"), tool_call("on_loop")]

    @register_ai_service(tools=Places)
    class Guide(Protocol):
        async def lead(self, where: str) -> str: ...
        def show(self, where: str) -> str: ...

    replies = [AiMessage(None, calls), "there", AiMessage(None, calls), "there"]
    async with running(restaurant(*replies, register=(Guide,))) as client:
        for method, pooled in (("Guide.lead", "toolbox-pool"), ("Guide.show", "AnyIO worker thread")):
            entries = await asked(client, method, where="home")
            names = {each["call"]: each["name"] for each in entries if each["type"] == "tool_started"}
            threads = {names[each["call"]]: each["thread"] for each in entries if each["type"] == "tool"}
            assert threads["pooled"].startswith(pooled)
            assert threads["fresh"] == "toolbox-thread"
            assert threads["on_loop"] == "event loop"


async def test_a_text_is_the_message_of_a_method_that_takes_only_a_history(running: Any) -> None:
    @register_ai_service
    class Guide(Protocol):
        async def go_on(self, history: list[Message]) -> str: ...

    async with running(restaurant("To the left.", register=(Guide,))) as client:
        [entry] = [each for each in await asked(client, "Guide.go_on", history="Where?") if "value" in each]
        reply = await client.post(
            "/dev-ui/api/ask", json={"method": "Guide.go_on", "arguments": '{"history": 3}'}, headers=HERE
        )

    assert entry["value"] == "To the left."
    assert "history: must be a string" in reply.text
