"""MCP servers that ask for input suspend the call, and get the answer when the run goes on; approval of their tools."""

from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.mcp.warm_servers import stdio_command
from toolbox import AiMessage, Container, Result, register_ai_service
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.mcp import McpError, McpInputRequiredError, McpServer, McpServers, mcp_server, mcp_toolbox
from toolbox.runs import Runs, RunStore, approve, fail, reject, respond
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
ASKING = Path(__file__).parent / "asking_server.py"
LIBRARY = Path(__file__).parent / "library_server.py"


@register_ai_service
class Waiter(Protocol):
    @mcp_toolbox("kitchen")
    async def serve(self, wish: str) -> Result[str]: ...


def kitchen() -> McpServer:
    command, *arguments = stdio_command(ASKING)
    return mcp_server("kitchen", command=command, args=arguments, connect_timeout=110)


def restaurant(*replies: Any, server: McpServer | None = None) -> tuple[Container, ScriptedChatModel]:
    model = ScriptedChatModel(list(replies))
    container = Container(models={"default": model}).register(Waiter)
    return container.register_instance(server or kitchen(), name="kitchen"), model


def orders(dish: str = "soup") -> AiMessage:
    return AiMessage(None, [tool_call("order", {"dish": dish})])


async def test_a_question_of_a_server_suspends_the_call_until_it_is_answered() -> None:
    container, model = restaurant(orders(), "Coming!")
    async with container:
        result = await container.get(Waiter).serve("Soup, please.")
        [pending] = result.pending
        assert result.run_id is not None
        resumed = await container.runs.resume(result.run_id, {pending.id: respond({"seats": 3})})

    assert (pending.kind, pending.tool_name, pending.arguments) == ("deferred", "order", {"dish": "soup"})
    assert pending.reason == "How many portions of soup?"
    [question] = pending.attributes["requests"].values()
    assert question["message"] == "How many portions of soup?"
    assert question["schema"]["properties"]["seats"]["type"] == "integer"
    assert resumed.content == "Coming!"
    assert [each.result for each in resumed.tool_executions] == ["3 x soup"]
    assert model.requests[-1].messages[-1].text == "3 x soup"  # type: ignore[union-attr]  # a result


async def test_a_server_may_ask_again_with_what_it_knows() -> None:
    container, _ = restaurant(orders(), "Coming!")
    async with container:
        first = await container.get(Waiter).serve("Soup, please.")
        assert first.run_id is not None
        second = await container.runs.resume(first.run_id, {first.pending[0].id: respond({"seats": 30})})
        [pending] = second.pending
        assert pending.reason == "Really 30?"
        third = await container.runs.resume(first.run_id, {pending.id: respond({"sure": True})})

    assert third.content == "Coming!"
    assert [each.result for each in third.tool_executions] == ["30 x soup"]


async def test_a_server_that_forgot_its_question_asks_again_in_another_process(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    def process(*replies: Any) -> tuple[Container, Any]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
        container, _ = restaurant(*replies)
        return container.register_instance(SqlRunStore(engine), as_type=RunStore), engine

    asking, engine = process(orders())
    async with asking:
        result = await asking.get(Waiter).serve("Soup, please.")
    await engine.dispose()
    answering, engine = process("Coming!")
    async with answering:
        runs = answering.get(Runs)
        [pending] = (await runs.get(result.run_id or "")).pending
        asked = await runs.resume(result.run_id or "", {pending.id: respond({"seats": 3})})
        [again] = asked.pending
        resumed = await runs.resume(result.run_id or "", {again.id: respond({"seats": 4})})
    await engine.dispose()

    assert again.reason == pending.reason == "How many portions of soup?"
    assert again.id != pending.id
    assert resumed.content == "Coming!"
    assert [each.result for each in resumed.tool_executions] == ["4 x soup"]


class Vegetarian(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.success_with({"dish": request.arguments["dish"].replace("beef", "bean")})


@register_ai_service
@tool_input_guardrails(Vegetarian)
class Careful(Protocol):
    @mcp_toolbox("kitchen")
    async def serve(self, wish: str) -> Result[str]: ...


@pytest.mark.parametrize(
    ("edit", "result"), [(None, "3 x bean soup"), ({"dish": "beef stew"}, "3 x bean stew")], ids=["approve", "edit"]
)
async def test_a_server_that_got_an_answer_gets_the_arguments_that_guardrails_and_persons_let_through(
    edit: Any, result: str
) -> None:
    command, *arguments = stdio_command(ASKING)
    server = mcp_server("kitchen", command=command, args=arguments, connect_timeout=110, approval="all")
    model = ScriptedChatModel([orders("beef soup"), "Coming!"])
    async with Container(models={"default": model}).register(Careful).register_instance(server, name="kitchen") as here:
        waiting = await here.get(Careful).serve("Soup, please.")
        assert waiting.pending[0].arguments == {"dish": "bean soup"}
        run_id = waiting.run_id or ""
        waiting = await here.runs.resume(run_id, {"0": approve(arguments=edit)})
        assert waiting.pending[0].arguments == {"dish": result.removeprefix("3 x ")}
        ended = await here.runs.resume(run_id, {waiting.pending[0].id: respond({"seats": 3})})

    [execution] = ended.tool_executions
    assert (execution.result, execution.arguments) == (result, {"dish": result.removeprefix("3 x ")})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("many", "expected an object with the values"),
        ({"seats": "many"}, "seats: 'many' is not of type 'integer'"),
        ({"seats": {"a": 1}}, "seats: expected a string, a number"),
        ({}, "'seats' is a required property"),
    ],
)
async def test_an_answer_that_does_not_fit_is_asked_for_again(value: Any, text: str) -> None:
    container, _ = restaurant(orders(), "Coming!")
    async with container:
        first = await container.get(Waiter).serve("Soup, please.")
        assert first.run_id is not None
        second = await container.runs.resume(first.run_id, {first.pending[0].id: respond(value)})
        [pending] = second.pending
        assert "How many portions of soup? (the last answer was invalid: " in str(pending.reason)
        assert text in str(pending.reason)
        third = await container.runs.resume(first.run_id, {pending.id: respond({"seats": 2})})

    assert [each.result for each in third.tool_executions] == ["2 x soup"]


@pytest.mark.parametrize(
    "answer", [respond(None), respond(False), respond({"action": "decline"}), respond({"action": "cancel"})]
)
async def test_a_declined_question_is_a_failure_of_the_tool(answer: Any) -> None:
    container, model = restaurant(orders(), "Sorry.")
    async with container:
        first = await container.get(Waiter).serve("Soup, please.")
        assert first.run_id is not None
        second = await container.runs.resume(first.run_id, {first.pending[0].id: answer})

    assert second.content == "Sorry."
    assert second.tool_executions[0].is_error
    assert len(model.requests) == 2


async def test_a_failed_answer_goes_to_the_model() -> None:
    container, _ = restaurant(orders(), "Sorry.")
    async with container:
        first = await container.get(Waiter).serve("Soup, please.")
        assert first.run_id is not None
        second = await container.runs.resume(first.run_id, {first.pending[0].id: fail("unknown color")})

    assert [(each.result, each.is_error) for each in second.tool_executions] == [("unknown color", True)]


async def test_deprecated_questions_are_failures_of_the_tool() -> None:
    container, _ = restaurant(AiMessage(None, [tool_call("sample")]), "Sorry.")
    async with container:
        result = await container.get(Waiter).serve("Sample.")

    assert result.tool_executions[0].is_error
    assert not result.pending


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        "JavaScript:alert(1)",
        " java\nscript:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "file:///etc/passwd",
        "vscode://open",
        "https:",
        "https://good.example/\u202egpj.exe",
        "/relative",
        "",
        "https://bank.example@evil.example/",
        "https://bank.example:443@evil.example/",
        "https://@evil.example/",
        "https://bank.example%2Flogin@evil.example",
        "https://evil.example\\@bank.example/",
        "https://evil.example\\.bank.example/",
        "https://bank.exam\nple/",
        "https://bank.example/a b",
        "https://bank.example/\u2028",
    ],
)
async def test_an_address_that_could_mislead_is_declined_without_asking_anybody(url: str) -> None:
    container, _ = restaurant(AiMessage(None, [tool_call("sign_in", {"url": url})]), "No.")
    async with container:
        result = await container.get(Waiter).serve("Sign me in.")

    assert result.content == "No."
    assert [each.result for each in result.tool_executions] == ["a: decline"]


async def test_the_user_info_of_a_declined_address_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    url = "https://me:pass@word@evil.example/?x=1"
    container, _ = restaurant(AiMessage(None, [tool_call("sign_in", {"url": url})]), "No.")
    async with container:
        await container.get(Waiter).serve("Sign me in.")

    assert "'https://***@evil.example/?x=1' is not an http or https address without user info" in caplog.text


@pytest.mark.parametrize(
    "url", ["https://login.example/x?y=1", "HTTP://127.0.0.1:8000/", "https://login.example/@me?to=a@b.example#@"]
)
async def test_a_web_address_is_shown_to_the_person(url: str) -> None:
    container, _ = restaurant(AiMessage(None, [tool_call("sign_in", {"url": url})]), "Done.")
    async with container:
        first = await container.get(Waiter).serve("Sign me in.")
        [pending] = first.pending
        second = await container.runs.resume(first.run_id or "", {pending.id: respond(True)})

    assert pending.attributes["requests"] == {"a": {"message": "Sign in", "url": url}}
    assert [each.result for each in second.tool_executions] == ["a: accept"]


async def test_a_program_can_answer_itself() -> None:
    container = Container().register(McpServers).register_instance(kitchen(), name="kitchen")
    async with container:
        server = container.get(McpServers).server("kitchen")
        with pytest.raises(McpInputRequiredError) as raised:
            await server.call("order", {"dish": "soup"})
        error = raised.value
        [key] = error.requests
        answers = {key: {"action": "accept", "content": {"seats": 4}}}
        result = await server.call("order", {"dish": "soup"}, answers=answers, state=error.state)
        with pytest.raises(McpError, match=r"asks for .*sampling|sampling"):
            await server.call("sample", {})

    assert str(error) == "MCP server 'kitchen' asks for input: How many portions of soup?"
    assert result.content[0].text == "4 x soup"  # type: ignore[union-attr]  # a text


# --- approval


async def test_calls_of_destructive_tools_wait_for_approval() -> None:
    command, *arguments = stdio_command(LIBRARY)
    library = mcp_server("kitchen", command=command, args=arguments, approval="destructive", connect_timeout=110)
    calls = [tool_call("find", {"title": "a"}), tool_call("burn", {"title": "a"}), tool_call("burn", {"title": "b"})]
    container, _ = restaurant(AiMessage(None, calls), "done", server=library)
    async with container:
        first = await container.get(Waiter).serve("Burn them.")
        assert [each.result for each in first.tool_executions] == ["shelf of a"]
        assert [(each.kind, each.arguments) for each in first.pending] == [
            ("approval", {"title": "a"}),
            ("approval", {"title": "b"}),
        ]
        one, two = first.pending
        answers = {one.id: approve(), two.id: reject("a rare book")}
        second = await container.runs.resume(first.run_id or "", answers)

    assert [(each.result, each.is_error) for each in second.tool_executions] == [
        ("shelf of a", False),
        ("ashes", False),
        ("a rare book", True),
    ]
