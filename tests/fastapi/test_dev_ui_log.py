"""The log of the dev UI: its entries, nested calls, and that it delays nothing."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, get_args

import pytest
from fastapi import FastAPI

from tests.fastapi.restaurant import OPEN, asked, called, entries_of, program_of, restaurant
from toolbox import AiMessage, ChatModel, ChatRequest, ChatResponse, Container, UserMessage, register_ai_service, tool
from toolbox.events import EventListener, InvocationEvent
from toolbox.handover import hands_over_to
from toolbox.retrieval import Passage, Query, Retriever
from toolbox.testing import tool_call
from toolbox_fastapi import Inject, install
from toolbox_fastapi.dev_ui import journal

pytestmark = pytest.mark.anyio


async def followed(connect: Any, app: FastAPI, is_enough: Callable[[bytes], bool]) -> list[dict[str, Any]]:
    """Return the entries of the log until there are enough."""
    client = connect(app, "/dev-ui/api/log")
    client.scope["headers"] = [(b"host", b"localhost")]
    task = client.start()
    while not is_enough(client.body):
        client._sent.clear()
        await client._sent.wait()
    client.leave()
    await task
    return entries_of(client.body.decode())


async def test_the_log_shows_past_and_new_entries(connect: Any, running: Any) -> None:
    app = restaurant("first", "second")
    async with running(app) as http:
        await asked(http, "Waiter.serve", table="7", wish="one")
        following = asyncio.create_task(followed(connect, app, lambda body: b"second" in body))
        await followed(connect, app, lambda body: b"first" in body)
        await asked(http, "Waiter.serve", table="7", wish="two")
        entries = await following

    assert [each["user_message"] for each in entries if each["type"] == "started"] == ["one", "two"]


async def test_calls_of_the_application_are_in_the_log_with_nested_calls(connect: Any, running: Any) -> None:
    @register_ai_service
    class Expert(Protocol):
        @tool
        async def advise(self, question: str) -> str: ...

    @register_ai_service(tools=Expert)
    class Desk(Protocol):
        async def help(self, question: str) -> str: ...

    replies = [tool_call("advise", {"question": "inner?"}), "inner!", "outer!"]
    app = restaurant(*replies, register=(Expert, Desk))

    @app.get("/help")
    async def help_(desk: Inject[Desk]) -> str:
        return await desk.help("outer?")

    async with running(app) as http:
        assert (await http.get("/help")).json() == "outer!"
        entries = await followed(connect, app, lambda body: b"outer!" in body.rpartition(b"ended")[2])

    outer, inner = [each for each in entries if each["type"] == "started"]
    assert (outer["where"], outer["user_message"]) == ("Desk.help", "outer?")
    assert (inner["where"], inner["parent"]) == ("Expert.advise", outer["invocation"])


async def test_one_request_that_is_sent_several_times_at_once_is_several_calls(connect: Any, running: Any) -> None:
    all_asked = asyncio.Barrier(2)

    class Together:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            await all_asked.wait()
            return ChatResponse(AiMessage("hi"))

    app, container = FastAPI(), Container(models={"default": Together()})
    install(app, container, dev_ui=OPEN)
    async with running(app):
        model, request = await container.aget(ChatModel), ChatRequest([UserMessage("Hello")])
        await asyncio.gather(model.chat(request), model.chat(request))
        entries = await followed(connect, app, lambda body: body.count(b'"model"') == 2)

    assert sorted(each["call"] for each in entries if each["type"] == "model") == [1, 2]


async def test_a_suspended_call_has_ended_in_the_log_and_waits(connect: Any, running: Any) -> None:
    class Refunds:
        @tool(requires_approval=True)
        def refund(self, order: int) -> str:
            return "refunded"

    @register_ai_service(tools=Refunds)
    class Desk(Protocol):
        async def help(self, question: str) -> str: ...

    app = restaurant(tool_call("refund", {"order": 7}), register=(Desk,))

    @app.get("/help")
    async def help_(desk: Inject[Desk]) -> str:
        return await desk.help("Refund 7")

    async with running(app) as http:
        assert (await http.get("/help")).status_code == 202
        entries = await followed(connect, app, lambda body: b'"ended"' in body)

    [call] = [each for each in entries if each["type"] == "tool"]
    [ended] = [each for each in entries if each["type"] == "ended"]
    assert (call["result"], call["is_error"]) == ("waits for an answer", False)
    assert (ended["waits"], ended["failure"]) == (True, None)


async def test_a_tool_called_from_the_page_is_in_the_log(connect: Any, running: Any) -> None:
    app = restaurant()
    async with running(app) as http:
        await called(http, "add", '{"dish": "soup"}')
        await called(http, "leave", "{}")
        entries = await followed(connect, app, lambda body: body.count(b'"ended"') == 2)

    assert [each["where"] for each in entries if each["type"] == "started"] == ["DevUiPage.add", "DevUiPage.leave"]
    results = [each["result"] for each in entries if each["type"] == "tool"]
    assert results == ['["soup"]', "ToolAbort: the guest has left"]


async def test_a_program_that_injects_its_only_listener_still_gets_it(running: Any) -> None:
    class Listener(EventListener):
        def on_event(self, event: InvocationEvent) -> None: ...

    class Reader:
        def __init__(self, listener: EventListener) -> None:
            self.listener = listener

    app = FastAPI()
    container = Container().register(Listener, Reader)
    install(app, container, dev_ui=OPEN)
    async with running(app) as client:
        assert type((await container.aget(Reader)).listener) is Listener
        assert "DevUiListener" not in json.dumps(await program_of(client))


async def test_an_open_log_does_not_delay_shutdown(serving: Any) -> None:
    async with serving(restaurant("hello")) as client:
        await asked(client, "Waiter.serve", table="7", wish="one")
        async with client.stream("GET", "/dev-ui/api/log") as reply:
            lines = reply.aiter_lines()
            assert "Waiter.serve" in await anext(lines)
            await lines.aclose()


async def test_searches_and_hand_overs_are_moments_of_the_log(connect: Any, running: Any) -> None:
    class Handbook(Retriever):
        async def retrieve(self, query: Query) -> list[Passage]:
            return [Passage("Pay within 30 days.", source="terms.md", title="Terms")]

    @register_ai_service(retrievers=Handbook)
    class Billing(Protocol):
        """Invoices."""

        async def chat(self, question: str) -> str: ...

    @register_ai_service
    class Desk(Protocol):
        @hands_over_to(Billing.chat)
        async def chat(self, question: str) -> str: ...

    app = restaurant(tool_call("transfer_to_billing", {}), "In 30 days.", register=(Billing, Desk))
    async with running(app) as http:
        entries = await asked(http, "Desk.chat", question="When?")
        beans = {each["name"]: each for each in (await program_of(http))["beans"]}

    moments = {each["type"]: each for each in entries if each["type"] in ("handover", "retrieval")}
    assert moments["handover"]["result"] == "Desk.chat → Billing.chat"
    assert moments["retrieval"]["name"] == "retriever Handbook"
    assert moments["retrieval"]["result"] == "Query: When?\n\nTerms terms.md\nPay within 30 days."
    [billing] = [each for each in beans.values() if each["type"] == "Billing"]
    assert {"to": "handbook", "manner": "searches"} in billing["links"]


def test_the_page_knows_the_fields_of_each_entry() -> None:
    page = Path(journal.__file__).parent / "page" / "timeline.js"
    tables = dict(re.findall(r"@typedef \{\{(.*)\}\} (\w+) \*/", page.read_text(encoding="utf-8")))
    known = {name: set(re.findall(r"(\w+)\??: ", text)) for text, name in tables.items()}

    assert known == {each.__name__: set(each.__annotations__) for each in get_args(journal.LogEntry)}
