"""Tools that are called from the dev UI: scopes, arguments and errors."""

from typing import Any, Protocol

import pytest

from tests.fastapi.restaurant import HERE, called, program_of, restaurant
from toolbox import InvocationContext, ToolExecutionResult, call_scoped, only_if, register_ai_service, tool
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, global_interceptor, interceptors

pytestmark = pytest.mark.anyio


async def test_a_tool_is_called_in_its_own_request_scope(running: Any) -> None:
    async with running(restaurant()) as client:
        first = await called(client, "add", '{"dish": "soup", "count": "2"}')
        second = await called(client, "add", '{"dish": "cake",}')

    assert (first["text"], first["is_error"]) == ('["soup","soup"]', False)
    assert first["duration"] > 0
    assert second["text"] == '["cake"]'


async def test_what_was_left_out_is_shown_with_the_reason(running: Any) -> None:
    @only_if(profile="prod")
    class Delivery: ...

    async with running(restaurant(register=(Delivery,))) as client:
        program = await program_of(client)

    assert program["left_out"] == [{"name": "Delivery", "why": "the profile 'prod' is not active (none is)"}]


async def test_beans_of_a_call_are_closed_when_it_ends(running: Any) -> None:
    happened: list[str] = []

    @call_scoped
    class Session:
        async def stop(self) -> None:
            happened.append("closed")

    class Till:
        def __init__(self, session: Session) -> None: ...

        @tool
        def pay(self, context: InvocationContext) -> str:
            happened.append(f"paid {context.service.__name__}")
            return "paid"

    async with running(restaurant(register=(Session, Till))) as client:
        assert (await called(client, "pay", "{}"))["text"] == "paid"
        assert happened == ["paid DevUiPage", "closed"]


@pytest.mark.parametrize("with_global", [False, True])
async def test_interceptors_of_a_service_do_not_run_when_the_page_calls_a_tool(running: Any, with_global: bool) -> None:
    happened: list[str] = []

    class Noting(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            happened.append(type(self).__name__)
            return await proceed(call)

    @global_interceptor
    class Everywhere(Noting): ...

    class OfService(Noting): ...

    @tool
    def pay() -> str:
        return "paid"

    @register_ai_service(tools=pay)
    @interceptors(OfService())
    class Shop(Protocol):
        async def ask(self, text: str) -> str: ...

    register = (Shop, Everywhere) if with_global else (Shop,)
    async with running(restaurant(register=register)) as client:
        assert (await called(client, "pay", "{}"))["text"] == "paid"
    assert happened == (["Everywhere"] if with_global else [])


async def test_invalid_arguments_get_the_message_that_a_model_reads(running: Any) -> None:
    async with running(restaurant()) as client:
        missing = await called(client, "add", "{}")
        broken = await called(client, "add", '{"dish": ')

    assert missing["is_error"]
    assert "dish" in missing["text"]
    assert broken["is_error"]


async def test_errors_of_the_framework_are_shown_to_the_developer(running: Any) -> None:
    class Till:
        @tool
        def pay(self) -> str:
            raise ValueError("no change")

    @register_ai_service
    class Nested(Protocol):
        @tool
        def ask_again(self, text: str) -> str: ...

    async with running(restaurant("never sent", register=(Till, Nested))) as client:
        assert await called(client, "leave", "{}") == {
            "type": "failure",
            "kind": "ToolAbort",
            "message": "the guest has left",
        }
        shown = await called(client, "pay", "{}")
        assert (shown["text"], shown["is_error"]) == ("no change", True)
        assert (await called(client, "ask_again", '{"text": "x"}'))["text"] == "never sent"


async def test_a_tool_gets_the_memory_id_it_needs(running: Any) -> None:
    async with running(restaurant()) as client:
        reply = await client.post(
            "/dev-ui/api/tool", json={"tool": "note", "arguments": '{"text": "hi"}'}, headers=HERE
        )
        assert (reply.status_code, reply.json()["detail"]) == (422, "this tool needs a memory id")
        assert (await called(client, "note", '{"text": "hi"}', memory_id="7"))["text"] == "7: hi"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{",
        '{"tool": "add"}',
        '{"tool": 1, "arguments": "{}"}',
        '{"tool": "add", "arguments": {}}',
        '{"tool": "nothing", "arguments": "{}"}',
        '{"tool": "add", "arguments": "{}", "more": 1}',
        '"' + "x" * 1_100_000 + '"',
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
async def test_invalid_tool_calls_are_rejected(running: Any, body: Any) -> None:
    async with running(restaurant()) as client:
        reply = await client.post(
            "/dev-ui/api/tool", content=body, headers={**HERE, "content-type": "application/json"}
        )

    assert reply.status_code == 422
    assert reply.json()["detail"]
