"""Requests to Anthropic's Messages API: messages, tools, cache marks, thinking, schemas, other models' data."""

import base64
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.models.messages_api import message, text, thinking, tool_use
from tests.models.scripted_server import Serve
from toolbox import (
    AiMessage,
    AnthropicChatModel,
    AudioContent,
    ChatRequest,
    IllegalConfigurationError,
    ImageContent,
    Message,
    PdfContent,
    ResponseFormat,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UnsupportedContentError,
    UserMessage,
)

pytestmark = pytest.mark.anyio

MARK = {"type": "ephemeral"}
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 16
ADD = ToolSpecification("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
NOW = ToolSpecification("now", None)
HI = UserMessage("Hi")
OK = message(text("ok"))


async def body_of(serve: Serve, request: ChatRequest, name: str = "claude-sonnet-4-6", **options: Any) -> Any:
    server = await serve([OK])
    model = AnthropicChatModel(name, base_url=server.url.removesuffix("/v1"), **{"cache": False, **options})
    try:
        await model.chat(request)
    finally:
        await model.aclose()
    assert server.paths == ["/v1/messages"]
    return server.requests[0]


async def messages_of(serve: Serve, *messages: Message, **options: Any) -> Any:
    return (await body_of(serve, ChatRequest(messages), **options))["messages"]


def call(id: str, name: str = "add", arguments: str = '{"a": 1}') -> ToolExecutionRequest:  # noqa: A002
    return ToolExecutionRequest(id, name, arguments)


def result(id: str, said: str = "2", **more: Any) -> ToolExecutionResultMessage:  # noqa: A002
    return ToolExecutionResultMessage(id, "add", said, **more)


# --- messages


async def test_a_plain_request_contains_model_messages_and_the_token_limit(serve: Serve) -> None:
    body = await body_of(serve, ChatRequest([SystemMessage("Be brief."), UserMessage("Hé 😀")]))

    assert body == {
        "model": "claude-sonnet-4-6",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hé 😀"}]}],
        "max_tokens": 4096,
    }


async def test_system_messages_are_one_system_prompt(serve: Serve) -> None:
    later = SystemMessage("Be kind.", role="developer")
    body = await body_of(serve, ChatRequest([SystemMessage("Be brief."), SystemMessage(" "), HI, later]))

    assert [each["text"] for each in body["system"]] == ["Be brief.", "Be kind."]
    assert [each["role"] for each in body["messages"]] == ["user"]


async def test_results_and_the_next_words_of_the_user_are_one_turn(serve: Serve) -> None:
    asked = AiMessage("Let me see.", [call("toolu_1"), call("toolu_2", "now", "")])
    *_, reply, turn = await messages_of(
        serve, HI, asked, result("toolu_1"), result("toolu_2", "", is_error=True), UserMessage("Well?")
    )

    assert reply == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
        ],
    }
    assert turn == {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
            {"type": "text", "text": "Well?"},
        ],
    }


async def test_images_and_documents_are_sent_as_blocks(serve: Serve) -> None:
    contents = [
        "Look",
        " ",
        ImageContent(data=PNG),
        ImageContent("https://pictures.example/a.jpg"),
        PdfContent(data=b"%PDF-1.4", name="plan.pdf"),
        PdfContent("https://papers.example/a.pdf"),
    ]
    [turn] = await messages_of(serve, UserMessage(contents))

    assert turn["content"] == [
        {"type": "text", "text": "Look"},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
        },
        {"type": "image", "source": {"type": "url", "url": "https://pictures.example/a.jpg"}},
        {
            "type": "document",
            "source": {
                "type": "base64",
                "media_type": "application/pdf",
                "data": base64.b64encode(b"%PDF-1.4").decode(),
            },
            "title": "plan.pdf",
        },
        {"type": "document", "source": {"type": "url", "url": "https://papers.example/a.pdf"}},
    ]


async def test_images_of_tool_results_stay_in_the_result(serve: Serve) -> None:
    seen = result("toolu_1", "a map", contents=[ImageContent(data=PNG)])
    *_, turn = await messages_of(serve, HI, AiMessage(None, [call("toolu_1")]), seen)

    [block] = turn["content"]
    assert [each["type"] for each in block["content"]] == ["text", "image"]


@pytest.mark.parametrize(
    "content", [AudioContent(b"RIFF", "audio/wav"), ImageContent(data=b"BM", mime_type="image/bmp")]
)
async def test_contents_that_the_api_cannot_carry_raise_before_anything_is_sent(serve: Serve, content: Any) -> None:
    server = await serve([OK])
    model = AnthropicChatModel("claude-sonnet-4-6", base_url=server.url.removesuffix("/v1"))

    with pytest.raises(UnsupportedContentError, match=r"messages\.1\.contents\.1"):
        await model.chat(ChatRequest([SystemMessage("Be brief."), UserMessage(["Listen", content])]))
    await model.aclose()

    assert server.requests == []


async def test_white_space_at_the_end_of_a_prefix_is_removed(serve: Serve) -> None:
    *_, prefix = await messages_of(serve, HI, AiMessage("The answer is (\\n \n"))

    assert prefix == {"role": "assistant", "content": [{"type": "text", "text": "The answer is (\\n"}]}


# --- replies that are sent back

SAID = [thinking("Hm."), {"type": "redacted_thinking", "data": "x"}, text("\n\n"), tool_use("add", {"a": 1})]


def reply_of(*blocks: dict[str, Any], said: str | None, **more: Any) -> AiMessage:
    return AiMessage(said, [call("toolu_1")], "Hm.", {"anthropic": list(blocks)}, **more)


async def test_blocks_are_sent_back_unchanged_without_blank_texts(serve: Serve) -> None:
    _, reply, _ = await messages_of(serve, HI, reply_of(*SAID, said="\n\n"), result("toolu_1"))

    assert reply["content"] == [SAID[0], SAID[1], SAID[3]]


def server_call(name: str = "code_execution", id: str = "srvtoolu_1") -> dict[str, Any]:  # noqa: A002
    return {"type": "server_tool_use", "id": id, "name": name, "input": {}}


FOUND = {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_1", "content": {}}
CODE, WEB = {"type": "code_execution_20260521", "name": "c"}, {"type": "web_search_20260318", "name": "web_search"}


@pytest.mark.parametrize(
    ("name", "tools", "is_sent"),
    [
        ("code_execution", (), False),
        ("bash_code_execution", (), False),
        ("invented!", (), False),
        ("", (CODE,), False),
        ("tool_search_tool_bm25", (CODE, WEB), False),
        ("web_search", (CODE,), False),
        ("web_search", (WEB,), True),
        ("code_execution", (CODE,), True),
        ("bash_code_execution", (CODE,), True),
        ("code_execution", (WEB,), True),
    ],
)
async def test_a_server_call_without_a_result_is_left_out_unless_its_tool_is_sent(
    serve: Serve, name: str, tools: Any, is_sent: bool
) -> None:
    open_call = server_call(name)
    said = AiMessage("So.", (), None, {"anthropic": [open_call, {"type": "text", "text": "So."}]})
    request = ChatRequest([HI, said, UserMessage("And?")], parameters={"tools": list(tools)})

    _, reply, _ = (await body_of(serve, request))["messages"]

    assert reply["content"] == [*([open_call] if is_sent else []), {"type": "text", "text": "So."}]


async def test_a_server_call_stays_if_its_result_came_in_a_later_reply(serve: Serve) -> None:
    own = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
    first = AiMessage(None, [call("toolu_1", arguments="{}")], None, {"anthropic": [server_call(), own]})
    second = AiMessage("3", (), None, {"anthropic": [FOUND, {"type": "text", "text": "3"}]})

    _, before, _, after, _ = await messages_of(serve, HI, first, result("toolu_1"), second, HI)

    assert before["content"] == [server_call(), own]
    assert after["content"][0] == FOUND


async def test_a_reply_of_nothing_but_an_invented_server_call_is_not_sent_back(serve: Serve) -> None:
    said = AiMessage("", (), None, {"anthropic": [server_call(id="a"), {**server_call(id="b"), "id": None}]})

    [turn] = await messages_of(serve, HI, said, UserMessage("Hello?"))

    assert [each["text"] for each in turn["content"]] == ["Hi", "Hello?"]


async def test_a_reply_whose_text_or_calls_changed_is_written_again(serve: Serve) -> None:
    other = AiMessage("\n\n", [call("toolu_1", arguments='{"a": 2}')], "Hm.", {"anthropic": SAID})
    for changed in (reply_of(*SAID, said="Sum:"), other):
        _, reply, _ = await messages_of(serve, HI, changed, result("toolu_1"))

        assert not {"thinking", "redacted_thinking"} & {each["type"] for each in reply["content"]}


async def test_data_of_other_providers_is_not_sent(serve: Serve) -> None:
    foreign = {"reasoning_details": [{"type": "x"}], "responses_output": [""], "prefix": True, "anthropic": "?"}
    _, reply = await messages_of(serve, HI, AiMessage("Yes", (), "Hm.", foreign))

    assert reply == {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}


async def test_ids_of_other_models_become_valid_and_stay_paired(serve: Serve) -> None:
    first = AiMessage(None, [call("functions.add:0"), call("ok-1_A"), call("x" * 90)])
    _, reply, turn = await messages_of(serve, HI, first, result("functions.add:0"), result("ok-1_A"), result("x" * 90))

    ids = [each["id"] for each in reply["content"]]
    assert [each["tool_use_id"] for each in turn["content"]] == ids
    assert ids[1] == "ok-1_A"
    assert len(set(ids)) == 3
    assert all(each.replace("-", "").replace("_", "").isalnum() and len(each) <= 64 for each in ids)


async def test_ids_that_repeat_in_a_conversation_become_unique(serve: Serve) -> None:
    rounds = [AiMessage(None, [call("call_1"), call("call_1")]), result("call_1", "a"), result("call_1", "b")]
    sent = await messages_of(serve, HI, *rounds, *rounds)

    ids = [each["id"] for turn in (sent[1], sent[3]) for each in turn["content"]]
    answered = [(each["tool_use_id"], each["content"]) for turn in (sent[2], sent[4]) for each in turn["content"]]
    assert len(set(ids)) == 4
    assert answered == list(zip(ids, "abab", strict=True))


async def test_thoughts_without_a_signature_are_sent_to_other_servers_only() -> None:
    from toolbox.models.anthropic_wire import AnthropicWire

    reply = AiMessage("Yes", (), "Hm.", {"anthropic": [thinking("Hm.", None), text("Yes")]})
    sent = {
        keeps: json.loads(AnthropicWire(keeps_unsigned=keeps).fields(ChatRequest([HI, reply]))["messages"])
        for keeps in (True, False)
    }

    assert [each["type"] for each in sent[True][1]["content"]] == ["thinking", "text"]
    assert [each["type"] for each in sent[False][1]["content"]] == ["text"]


# --- tools


async def test_tools_and_the_tool_choice_have_the_names_of_the_api(serve: Serve) -> None:
    choices = {
        None: None,
        "auto": {"type": "auto"},
        "none": {"type": "none"},
        "required": {"type": "any"},
        "any": {"type": "any"},
        "add": {"type": "tool", "name": "add"},
    }
    for choice, expected in choices.items():
        body = await body_of(serve, ChatRequest([HI], (ADD, NOW), tool_choice=choice))

        assert body.get("tool_choice") == expected
    assert body["tools"] == [
        {"name": "add", "description": "Adds", "input_schema": ADD.parameters},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}},
    ]


async def test_parallel_calls_can_be_turned_off(serve: Serve) -> None:
    expected = {None: {"type": "auto"}, "required": {"type": "any"}, "none": {"type": "none"}}
    for choice, sent in expected.items():
        request = ChatRequest([HI], (ADD,), tool_choice=choice)
        body = await body_of(serve, request, parallel_tool_calls=False)

        assert body["tool_choice"] == sent | ({"disable_parallel_tool_use": True} if choice != "none" else {})
        assert "parallel_tool_calls" not in body


async def test_a_tool_choice_without_tools_is_not_sent(serve: Serve) -> None:
    assert "tool_choice" not in await body_of(serve, ChatRequest([HI], tool_choice="required"))


async def test_server_side_tools_are_added_to_the_tools_of_the_service(serve: Serve) -> None:
    search, code = (
        {"type": "web_search_20260318", "name": "web_search"},
        {"type": "code_execution_20260521", "name": "c"},
    )
    request = ChatRequest([HI], (ADD,), parameters={"tools": [search]}, tool_choice="auto")
    body = await body_of(serve, request, parameters={"tools": [code]})
    only = await body_of(serve, ChatRequest([HI], parameters={"tools": [search]}), cache=True)

    assert [each["name"] for each in body["tools"]] == ["add", "c", "web_search"]
    assert body["tool_choice"] == {"type": "auto"}
    assert only["tools"] == [{**search, "cache_control": MARK}]


async def test_strict_tools_have_closed_schemas(serve: Serve) -> None:
    limited = ToolSpecification(
        "grade", None, {"type": "object", "properties": {"n": {"type": "integer", "maximum": 6}}}
    )
    open_ = ToolSpecification("save", None, {"type": "object", "additionalProperties": {"type": "string"}})
    body = await body_of(serve, ChatRequest([HI], (limited, open_)), strict_tools=True)

    assert body["tools"][0] == {
        "name": "grade",
        "input_schema": {
            "type": "object",
            "properties": {"n": {"type": "integer", "description": "maximum: 6"}},
            "additionalProperties": False,
        },
        "strict": True,
    }
    assert body["tools"][1] == {"name": "save", "input_schema": {**open_.parameters, "properties": {}}}


async def test_metadata_is_sent_only_if_it_is_configured(serve: Serve) -> None:
    tool = ToolSpecification("look", None, metadata={"defer_loading": True, "secret": 1})
    body = await body_of(serve, ChatRequest([HI], (tool,)), send_tool_metadata="defer_loading")

    assert body["tools"][0]["defer_loading"] is True
    assert "secret" not in body["tools"][0]


# --- the cache


def marks_in(value: Any) -> int:
    if isinstance(value, dict):
        return ("cache_control" in value) + sum(map(marks_in, value.values()))
    return sum(map(marks_in, value)) if isinstance(value, list) else 0


async def test_system_tools_and_the_last_turn_of_the_user_have_cache_marks(serve: Serve) -> None:
    said = [SystemMessage("A"), SystemMessage("B"), HI, AiMessage(None, [call("toolu_1")]), result("toolu_1")]
    body = await body_of(serve, ChatRequest([*said, UserMessage(["Well?", "So?"])], (NOW, ADD)), cache=True)

    assert body["system"][-1] == {"type": "text", "text": "B", "cache_control": MARK}
    assert body["tools"][-1]["cache_control"] == MARK
    assert body["messages"][-1]["content"][-1] == {"type": "text", "text": "So?", "cache_control": MARK}
    assert marks_in(body) == 3


async def test_the_last_tool_result_has_a_cache_mark(serve: Serve) -> None:
    asked = AiMessage(None, [call("toolu_1"), call("toolu_2")])
    sent = await messages_of(serve, HI, asked, result("toolu_1"), result("toolu_2"), cache=True)

    assert "cache_control" not in sent[-1]["content"][0]
    assert sent[-1]["content"][1]["cache_control"] == MARK


async def test_the_last_turn_of_the_user_is_marked_before_a_prefix(serve: Serve) -> None:
    sent = await messages_of(serve, HI, AiMessage("The answer is"), cache=True)

    assert sent[0]["content"][-1]["cache_control"] == MARK
    assert marks_in(sent[1]) == 0


@pytest.mark.parametrize("marked", range(1, 6))
@pytest.mark.parametrize("cache", [True, False])
async def test_marked_system_messages_are_counted_with_several_results_in_a_row(
    serve: Serve, marked: int, cache: bool
) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    calls = [ToolExecutionRequest(each, "add", '{"a":1}') for each in ("c1", "c2")]
    results = [ToolExecutionResultMessage.of(each, "5") for each in calls]
    system = [SystemMessage(f"rule {number}", attributes=mark) for number in range(marked)]
    request = ChatRequest([*system, UserMessage("Hi"), AiMessage(None, calls), *results], [ADD])

    body = await body_of(serve, request, cache=cache)

    assert marks_in(body) == (3 if cache else min(marked, 4))
    assert "cache_control" in body["system"][-1]


async def test_a_request_never_has_more_than_four_cache_marks(serve: Serve) -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    said = [UserMessage(f"{number}", attributes={"cache_control": hour}) for number in range(7)]
    system = SystemMessage("Be brief.", attributes={"cache_control": hour})
    for cache in (True, False):
        body = await body_of(serve, ChatRequest([system, *said], (ADD,)), cache=cache)

        assert marks_in(body) <= 4
        assert body["messages"][-1]["content"][-1]["cache_control"] == hour


async def test_the_cache_can_be_turned_off_and_last_an_hour(serve: Serve) -> None:
    request = ChatRequest([SystemMessage("Be brief."), HI], (ADD,))

    assert marks_in(await body_of(serve, request, cache=False)) == 0
    assert (await body_of(serve, request, cache="1h"))["system"][0]["cache_control"] == {**MARK, "ttl": "1h"}


async def test_earlier_messages_are_the_same_bytes_in_the_next_request(serve: Serve) -> None:
    server = await serve([OK, OK])
    model = AnthropicChatModel("claude-sonnet-4-6", base_url=server.url.removesuffix("/v1"))
    messages: list[Message] = [SystemMessage("Be brief."), UserMessage("One")]
    reply = await model.chat(ChatRequest(messages, (ADD,)))
    await model.chat(ChatRequest([*messages, reply.ai_message, UserMessage("Two")], (ADD,)))
    await model.aclose()

    first, second = server.requests
    assert (first["system"], first["tools"]) == (second["system"], second["tools"])
    assert second["messages"][0] == {"role": "user", "content": [{"type": "text", "text": "One"}]}


# --- reasoning


@pytest.mark.parametrize(
    ("level", "effort"), [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high")]
)
async def test_newer_models_think_adaptively_with_an_effort(serve: Serve, level: Any, effort: str) -> None:
    for name in ("claude-opus-4-6", "claude-sonnet-5", "anthropic.claude-opus-5-v1", "claude-next-9"):
        body = await body_of(serve, ChatRequest([HI]), name, reasoning=level)

        assert (body["thinking"], body["output_config"]) == ({"type": "adaptive"}, {"effort": effort})


@pytest.mark.parametrize("level", ["minimal", "low", "medium", "high"])
@pytest.mark.parametrize("limit", [2000, 4096, 64_000])
async def test_older_models_think_with_a_budget_below_the_token_limit(serve: Serve, level: Any, limit: int) -> None:
    for name in ("claude-sonnet-4-5", "claude-3-7-sonnet-20250219", "claude-haiku-4-5", "kimi-k2"):
        body = await body_of(serve, ChatRequest([HI]), name, reasoning=level, max_tokens=limit)

        assert body["thinking"]["type"] == "enabled"
        assert 1024 <= body["thinking"]["budget_tokens"] < limit
        assert "output_config" not in body


async def test_a_higher_level_has_a_larger_budget(serve: Serve) -> None:
    budgets = []
    for level in ("minimal", "low", "medium", "high"):
        request = ChatRequest([HI], reasoning=level, max_output_tokens=32_000)  # type: ignore[arg-type]  # a level
        budgets.append((await body_of(serve, request, "claude-sonnet-4-5"))["thinking"]["budget_tokens"])

    assert budgets == sorted(set(budgets))


@pytest.mark.parametrize("level", ["xhigh", "max"])
async def test_other_levels_are_sent_or_get_the_largest_budget(
    serve: Serve, level: Any, caplog: pytest.LogCaptureFixture
) -> None:
    high = ChatRequest([HI], reasoning="high", max_output_tokens=32_000)
    budget = (await body_of(serve, high, "claude-sonnet-4-5"))["thinking"]
    for request in (
        replace(high, reasoning=level),
        replace(high, reasoning=None, parameters={"reasoning_effort": level}),
    ):
        assert (await body_of(serve, request, "claude-sonnet-4-6"))["output_config"] == {"effort": level}
        assert not caplog.records

        assert (await body_of(serve, request, "claude-sonnet-4-5"))["thinking"] == budget
        assert f"has no level '{level}'" in caplog.text
        caplog.clear()


async def test_a_budget_without_a_token_limit_fits_the_limit_of_the_model(serve: Serve) -> None:
    request = ChatRequest([HI], reasoning="low", parameters={"max_tokens": None})

    assert (await body_of(serve, request, "claude-sonnet-4-5"))["thinking"]["budget_tokens"] < 4096


async def test_a_budget_that_does_not_fit_is_left_out(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    body = await body_of(serve, ChatRequest([HI]), "claude-sonnet-4-5", reasoning="high", max_tokens=1024)

    assert "thinking" not in body
    assert "leaves no room" in caplog.text


async def test_reasoning_can_be_turned_off(serve: Serve) -> None:
    off = {
        "claude-sonnet-4-5": None,
        "claude-opus-5": {"type": "disabled"},
        "claude-sonnet-5-5": {"type": "between_tools"},
        "claude-opus-5-5": None,
    }
    for name, expected in off.items():
        assert (await body_of(serve, ChatRequest([HI]), name, reasoning="none")).get("thinking") == expected


async def test_the_reasoning_of_a_request_wins(serve: Serve) -> None:
    body = await body_of(serve, ChatRequest([HI], reasoning="high"), reasoning="low")

    assert body["output_config"] == {"effort": "high"}


@pytest.mark.parametrize("choice", ["required", "any", "add"])
async def test_a_forced_tool_choice_turns_reasoning_off(serve: Serve, choice: str) -> None:
    for name in ("claude-sonnet-4-5", "claude-opus-4-6"):
        request = ChatRequest([HI], (ADD,), tool_choice=choice, temperature=0.5)
        body = await body_of(serve, request, name, reasoning="high")

        assert not {"thinking", "output_config"} & set(body)
        assert body["temperature"] == 0.5


async def test_the_temperature_is_left_out_with_reasoning(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("claude-sonnet-4-5", "claude-opus-4-6"):
        assert (await body_of(serve, ChatRequest([HI]), name, temperature=0.5))["temperature"] == 0.5
        assert not caplog.records

        body = await body_of(serve, ChatRequest([HI]), name, reasoning="low", temperature=0.5)

        assert "temperature" not in body
        assert [each.levelno for each in caplog.records] == [logging.WARNING]
        caplog.clear()


async def test_models_without_temperatures_get_none(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    assert "temperature" not in await body_of(serve, ChatRequest([HI], temperature=0.5), "claude-opus-5")
    assert "temperature is left out" in caplog.text


# --- parameters


async def test_parameters_of_the_request_win(serve: Serve) -> None:
    request = ChatRequest([HI], parameters={"top_k": 5, "stop": ["x"], "metadata": None}, max_output_tokens=99)
    body = await body_of(serve, request, max_tokens=7, parameters={"top_k": 1, "metadata": {"user_id": "u"}})

    assert body["top_k"] == 5
    assert body["stop_sequences"] == ["x"]
    assert body["max_tokens"] == 99
    assert "metadata" not in body


async def test_an_answer_with_a_schema_is_requested_with_a_closed_schema(serve: Serve) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/T"}},
        },
        "required": ["name"],
        "$defs": {"T": {"type": "object", "properties": {"t": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}},
    }
    request = ChatRequest([HI], response_format=ResponseFormat("person", schema))
    body = await body_of(serve, request, reasoning="low")

    assert body["output_config"] == {
        "effort": "low",
        "format": {
            "type": "json_schema",
            "schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "minLength: 1"},
                    "tags": {"type": "array", "items": {"$ref": "#/$defs/T"}},
                },
                "required": ["name"],
                "$defs": {
                    "T": {
                        "type": "object",
                        "properties": {"t": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
                        "additionalProperties": False,
                    }
                },
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"type": "string"}},
    ],
    ids=["free keys", "recursive", "not an object"],
)
async def test_a_schema_that_the_server_cannot_enforce_is_part_of_the_system_message(serve: Serve, schema: Any) -> None:
    body = await body_of(serve, ChatRequest([HI], response_format=ResponseFormat("any", schema)))

    assert "output_config" not in body
    assert json.dumps(schema, separators=(",", ":")) in body["system"][-1]["text"]


def test_old_models_get_the_schema_in_the_prompt() -> None:
    supported = {
        "claude-3-7-sonnet-20250219": False,
        "claude-opus-4-20250514": False,
        "claude-sonnet-4-5": True,
        "claude-opus-4-1": True,
        "claude-opus-5": True,
        "other": True,
    }

    for name, expected in supported.items():
        assert AnthropicChatModel(name, "k").supports_response_format is expected
    assert AnthropicChatModel("claude-opus-5", "k", supports_response_format=False).supports_response_format is False


# --- settings


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": ""}, "missing model name"),
        ({"reasoning": "much"}, "unknown reasoning 'much'"),
        ({"max_tokens": 0}, "invalid max_tokens=0"),
        ({"cache": "2h"}, "invalid cache='2h'"),
        ({"base_url": "localhost"}, "invalid base URL"),
        ({"timeout": 0}, "invalid timeout=0"),
        ({"max_retries": -1}, "invalid max_retries=-1"),
        ({"max_reply_bytes": 0}, "invalid max_reply_bytes=0"),
        ({"api_key": "a\nb"}, "invalid API key"),
        ({"transport": "requests"}, "unknown transport"),
        ({"api_key": None}, "missing API key"),
    ],
    ids=str,
)
def test_invalid_settings_are_problems(options: Any, problem: str) -> None:
    with pytest.raises(IllegalConfigurationError, match=problem):
        AnthropicChatModel(**{"model": "claude-opus-5", "api_key": "k", **options})


def test_the_positional_arguments_are_model_key_address_limit_and_cache() -> None:
    model = AnthropicChatModel("claude-opus-5", "key", "http://127.0.0.1:1", 99, False)

    assert (model.model, model.base_url, model.parameters["max_tokens"]) == ("claude-opus-5", "http://127.0.0.1:1", 99)
    assert "key" not in repr(model)


async def test_an_address_with_the_version_is_accepted(serve: Serve) -> None:
    server = await serve([OK])
    model = AnthropicChatModel("claude-opus-5", base_url=server.url)
    await model.chat(ChatRequest([HI]))
    await model.aclose()

    assert server.paths == ["/v1/messages"]
