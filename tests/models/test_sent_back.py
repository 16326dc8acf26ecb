"""What a request repeats of earlier replies: reasoning, phases, items of server-side tools. Strict schemas."""

import json
from typing import Any, Literal, Protocol

import pytest

from tests.models.scripted_server import Scripted, Serve, call, chunk, completion, stream
from toolbox import (
    AiMessage,
    ChatRequest,
    CompleteResponse,
    IllegalConfigurationError,
    MemoryId,
    Message,
    OpenAiChatModel,
    ResponseFormat,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
    tool_specifications_from,
)
from toolbox.models.openai_settings import OpenAiSettings
from toolbox.testing import ScriptedChatModel
from toolbox.transcripts import messages_from_json, messages_to_json, specification_from_json, specification_to_json

pytestmark = pytest.mark.anyio

HI = UserMessage("Hi")
THOUGHT = {"reasoning_field": "reasoning_content"}
ASKED = AiMessage(None, [ToolExecutionRequest("c1", "add", "{}")], "Hm.", THOUGHT)
PLAIN = AiMessage("Yes", (), "Hm.", THOUGHT)
RESULT = ToolExecutionResultMessage("c1", "add", "2")


async def sent(serve: Serve, *messages: Message, **options: Any) -> list[dict[str, Any]]:
    server = await serve([completion({"content": "ok"})])
    model = OpenAiChatModel("m", server.url, **options)
    await model.chat(ChatRequest(messages))
    await model.aclose()
    found: list[dict[str, Any]] = server.requests[0]["messages"]
    return found


# --- chat completions


@pytest.mark.parametrize(
    ("setting", "beside_call", "beside_text"),
    [(None, True, False), ("with_calls", True, False), ("always", True, True), ("never", False, False)],
)
async def test_reasoning_is_sent_back_as_the_settings_say(
    serve: Serve, setting: Any, beside_call: bool, beside_text: bool
) -> None:
    _, asked, _, plain, _ = await sent(serve, HI, ASKED, RESULT, PLAIN, HI, send_reasoning=setting)

    assert (asked.get("reasoning_content") == "Hm.") is beside_call
    assert (plain.get("reasoning_content") == "Hm.") is beside_text


@pytest.mark.parametrize(
    ("address", "wire", "expected"),
    [
        ("https://api.openai.com/v1", "chat", "with_calls"),
        ("https://api.deepseek.com", "chat", "with_calls"),
        ("https://api.z.ai/api/paas/v4", "chat", "always"),
        ("https://open.bigmodel.cn/api/paas/v4", "chat", "always"),
        ("http://localhost:11434/v1", "chat", "always"),
        ("https://not-z.ai.example/v1", "chat", "with_calls"),
        ("https://api.openai.com/v1", "responses", "always"),
    ],
)
def test_the_default_depends_on_the_server(address: str, wire: Literal["chat", "responses"], expected: str) -> None:
    assert OpenAiSettings("m", address, wire=wire).sent_reasoning == expected


def test_an_unknown_choice_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="invalid send_reasoning='often'"):
        OpenAiChatModel("m", "http://127.0.0.1:1", send_reasoning="often")  # type: ignore[arg-type]  # not a choice


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_empty_reasoning_with_a_call_is_sent_back(serve: Serve, streamed: bool) -> None:
    """DeepSeek rejects a call whose `reasoning_content` is missing, also if it was empty."""
    asking = {"content": None, "reasoning_content": "", "tool_calls": [call("add", "{}", id="c1", index=0)]}
    reply = stream(chunk(asking), chunk({}, "tool_calls")) if streamed else completion(asking, "tool_calls")
    server = await serve([reply, completion({"content": "ok", "reasoning_content": ""})])
    model = OpenAiChatModel("m", server.url)
    request = ChatRequest([HI], (ToolSpecification("add"),))
    if streamed:
        *_, last = [event async for event in model.stream(request)]
        assert isinstance(last, CompleteResponse)
        first = last.response.ai_message
    else:
        first = (await model.chat(request)).ai_message
    kept = messages_from_json(messages_to_json([HI, first, RESULT]))
    plain = (await model.chat(ChatRequest(kept))).ai_message
    await model.aclose()

    assert server.requests[1]["messages"][1]["reasoning_content"] == ""
    assert plain.attributes == {}


# --- the Responses API


def item(said: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": said, "annotations": []}]
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content, **more}


REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}


async def answered(serve: Serve, *output: Any, streamed: bool = False, **options: Any) -> tuple[AiMessage, list[Any]]:
    """The reply, and the input of the next request, after the conversation was stored."""
    whole = {"id": "resp_1", "status": "completed", "output": list(output), "store": options.pop("store", True)}
    replies = [Scripted(json.dumps(whole).encode())]
    if streamed:
        values = [
            *(
                {"type": "response.output_item.done", "output_index": at, "item": each}
                for at, each in enumerate(output)
            ),
            {"type": "response.completed", "response": whole},
        ]
        lines = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in values]
        replies = [Scripted(chunks=lines, content_type="text/event-stream")]
    server = await serve([*replies, Scripted(json.dumps({"status": "completed", "output": [item("ok")]}).encode())])
    model = OpenAiChatModel("m", server.url, wire="responses", **options)
    if streamed:
        *_, last = [event async for event in model.stream(ChatRequest([HI]))]
        assert isinstance(last, CompleteResponse)
        reply = last.response.ai_message
    else:
        reply = (await model.chat(ChatRequest([HI]))).ai_message
    await model.chat(ChatRequest(messages_from_json(messages_to_json([HI, reply, HI]))))
    await model.aclose()
    return reply, server.requests[1]["input"][1:-1]


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_before_a_plain_answer_is_sent_back_with_the_message(serve: Serve, streamed: bool) -> None:
    reply, following = await answered(serve, REASONING, item("Yes"), streamed=streamed)

    assert reply.text == "Yes"
    assert following == [REASONING, item("Yes")]


async def test_reasoning_that_the_server_did_not_store_is_not_sent_back(serve: Serve) -> None:
    _, following = await answered(serve, REASONING, item("Yes"), store=False)

    assert following == [{"role": "assistant", "content": "Yes"}]


async def test_reasoning_can_be_kept_from_plain_answers(serve: Serve) -> None:
    _, following = await answered(serve, REASONING, item("Yes"), send_reasoning="with_calls")

    assert following == [{key: value for key, value in item("Yes").items() if key != "id"}]


@pytest.mark.parametrize("streamed", [False, True])
async def test_phases_of_messages_are_read_and_sent(serve: Serve, streamed: bool) -> None:
    first, last = item("I look. ", phase="commentary"), item("Yes.", id="msg_2", phase="final_answer")
    asked = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    reply, following = await answered(serve, first, last, asked, streamed=streamed)

    assert reply.text == "I look. Yes."
    assert following[:2] == [first, last]
    assert following[2]["call_id"] == "c1"


async def test_the_phase_of_a_single_message_is_sent_with_its_text(serve: Serve) -> None:
    reply, following = await answered(serve, item("Yes", phase="final_answer"))

    assert reply.attributes == {"phase": "final_answer"}
    assert following == [{"role": "assistant", "content": "Yes", "phase": "final_answer"}]


async def test_a_changed_text_is_sent_instead_of_the_messages(serve: Serve) -> None:
    reply, _ = await answered(serve, REASONING, item("Yes", phase="final_answer"))
    changed = AiMessage("No", (), None, reply.attributes)
    server = await serve([Scripted(json.dumps({"status": "completed", "output": [item("ok")]}).encode())])
    model = OpenAiChatModel("m", server.url, wire="responses")
    await model.chat(ChatRequest([HI, changed, HI]))
    await model.aclose()

    assert server.requests[0]["input"][1:-1] == [{"role": "assistant", "content": "No", "phase": "final_answer"}]


@pytest.mark.parametrize("beside", [False, True])
async def test_an_answer_of_the_answer_tool_is_sent_as_text_without_reasoning(serve: Serve, beside: bool) -> None:
    class Counting(Protocol):
        async def count(self, room: MemoryId[str], text: str) -> int: ...

    @tool
    def look() -> str:
        return "seven"

    def called(name: str, arguments: str, number: int) -> dict[str, Any]:
        return {"type": "function_call", "id": f"fc_{number}", "call_id": name, "name": name, "arguments": arguments}

    answer = called("final_answer", '{"value": 7}', 2)
    output = [REASONING, called("look", "{}", 1), answer] if beside else [REASONING, answer]
    whole = {"id": "r", "status": "completed", "output": output}
    server = await serve([Scripted(json.dumps(whole).encode())] * 2)
    model = OpenAiChatModel("m", server.url, wire="responses")
    counting: Any = create_ai_service(Counting, chat_model=model, tools=look, output_mode="tool")
    assert await counting.count("r", "one") == 7
    assert await counting.count("r", "two") == 7
    await model.aclose()

    asked, *sent, _ = server.requests[1]["input"]
    assert asked["content"] == "one"
    assert sent[-1] == {"role": "assistant", "content": '{"value": 7}'}
    assert [each.get("call_id") for each in sent[:-1]] == (["look", "look"] if beside else [])


async def test_items_of_server_side_tools_follow_their_reasoning(serve: Serve) -> None:
    reply, following = await answered(serve, REASONING, SEARCH, item("Found."))

    assert following == [REASONING, SEARCH, item("Found.")]
    assert reply.text == "Found."


@pytest.mark.parametrize("streamed", [False, True])
async def test_items_of_server_side_tools_keep_their_place_between_reasoning_and_call(
    serve: Serve, streamed: bool
) -> None:
    asked = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    _, following = await answered(serve, REASONING, SEARCH, asked, streamed=streamed)

    call = {key: value for key, value in asked.items() if key != "id"}
    assert following[:3] == [REASONING, SEARCH, call]


async def test_reasoning_is_left_out_if_the_item_that_followed_is_too_large(serve: Serve) -> None:
    asked = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    image = {"type": "code_interpreter_call", "id": "ci_1", "outputs": [{"url": "x" * 1_000_000}]}
    _, following = await answered(serve, REASONING, image, asked)

    assert following[0].get("type") == "function_call"


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_that_is_not_stored_but_whole_is_sent_back(serve: Serve, streamed: bool) -> None:
    """DeepSeek's Responses API stores nothing and encrypts nothing."""
    thought = {**REASONING, "content": [{"type": "reasoning_text", "text": "Hm."}]}
    asked = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    reply, following = await answered(serve, thought, asked, store=False, streamed=streamed)
    _, after_text = await answered(serve, thought, item("Yes"), store=False, streamed=streamed)

    assert reply.reasoning == "Hm."
    assert following[0] == after_text[0] == thought
    assert [following[1]["type"], after_text[1]["type"]] == ["function_call", "message"]


async def test_the_namespace_of_a_call_is_sent_back(serve: Serve) -> None:
    asked = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
    reply, following = await answered(
        serve, {**asked, "namespace": "math"}, asked | {"call_id": "c2", "namespace": None}
    )

    assert reply.tool_execution_requests[0].attributes == {"namespace": "math"}
    assert [each.get("namespace") for each in following[:2]] == ["math", None]


# --- strict schemas

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def strictness(serve: Serve, wire: Any, request: ChatRequest, **options: Any) -> tuple[list[Any], Any]:
    reply = {"status": "completed", "output": [item("{}")]} if wire == "responses" else None
    server = await serve([completion({"content": "{}"}) if reply is None else Scripted(json.dumps(reply).encode())])
    model = OpenAiChatModel("m", server.url, wire=wire, **options)
    await model.chat(request)
    await model.aclose()
    [body] = server.requests
    tools = [each.get("function", each).get("strict") for each in body.get("tools", ())]
    wanted = body["text"]["format"] if wire == "responses" else body["response_format"]["json_schema"]
    return tools, wanted.get("strict")


@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_tools_and_formats_decide_if_schemas_are_strict(serve: Serve, wire: Any) -> None:
    tools = [ToolSpecification(f"t{each}", None, SCHEMA, {}, each) for each in (None, True, False)]
    by_default = False if wire == "responses" else None

    for strict_tools in (False, True):
        for strict in (None, False):
            request = ChatRequest([HI], tools, ResponseFormat("x", SCHEMA, None, strict))
            found = await strictness(serve, wire, request, strict_tools=strict_tools)

            assert found == ([True if strict_tools else by_default, True, False], strict is None)


class Tools:
    @tool
    def plain(self, a: int) -> str:
        """A."""
        return ""

    @tool(strict=True)
    def strict(self, a: int) -> str:
        """B."""
        return ""


@register_ai_service(tools=Tools(), strict=False)
class Loose(Protocol):
    async def ask(self, text: str) -> list[int]: ...


async def test_a_service_decides_for_its_tools_and_answers() -> None:
    model = ScriptedChatModel(['{"value": [1]}'], supports_response_format=True)

    assert await create_ai_service(Loose, chat_model=model).ask("Hi") == [1]

    [request] = model.requests
    assert [each.strict for each in request.tool_specifications] == [False, True]
    assert request.response_format is not None
    assert request.response_format.strict is False


def test_the_choice_of_a_tool_survives_being_written() -> None:
    _, specification = tool_specifications_from(Tools)

    assert specification.strict is True
    assert specification_from_json(specification_to_json(specification)).strict is True
