"""Requests have the format that strict servers accept."""

import gc
import json
import weakref
from typing import Any

import pytest

from tests.models.scripted_server import Scripted, Serve, call, chunk, completion, stream
from toolbox import (
    AiMessage,
    ChatRequest,
    IllegalConfigurationError,
    ImageContent,
    Message,
    ModelHttpError,
    OpenAiChatModel,
    ResponseFormat,
    SystemMessage,
    TextContent,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from toolbox.models.anthropic_wire import AnthropicWire
from toolbox.models.chat_wire import ChatWire
from toolbox.models.responses_wire import ResponsesWire

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
OK = completion({"content": "ok"})
LOOK = ToolSpecification("look", "Looks", metadata={"cache_control": {"type": "ephemeral"}, "secret": 1})


async def body_of(serve: Serve, request: ChatRequest, **options: Any) -> dict[str, Any]:
    server = await serve([OK])
    model = OpenAiChatModel("m", server.url, "test", **options)
    await model.chat(request)
    await model.aclose()
    return server.requests[0]


async def messages_of(serve: Serve, *messages: Message) -> list[dict[str, Any]]:
    body = await body_of(serve, ChatRequest(messages))
    found: list[dict[str, Any]] = body["messages"]
    return found


async def test_a_plain_request_contains_only_model_and_messages(serve: Serve) -> None:
    body = await body_of(serve, ChatRequest([SystemMessage("Be brief."), UserMessage("Hé 😀")]))

    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 😀"}],
    }


async def test_streams_request_token_counts(serve: Serve) -> None:
    server = await serve([stream(chunk({"content": "ok"}), chunk({}, "stop"))])
    model = OpenAiChatModel("m", server.url, "test")

    assert [event async for event in model.stream(HI)]
    await model.aclose()

    assert server.requests[0]["stream"] is True
    assert server.requests[0]["stream_options"] == {"include_usage": True}


async def test_stream_options_are_not_sent_again_after_a_server_rejected_them(serve: Serve) -> None:
    def reply(body: dict[str, Any]) -> Scripted:
        if "stream_options" in body:
            return Scripted(b'{"error": {"message": "Unknown field: stream_options"}}', status=400)
        return stream(chunk({"content": "ok"}), chunk({}, "stop"))

    server = await serve(reply)
    model = OpenAiChatModel("m", server.url, "test")

    for _ in range(2):
        assert [event async for event in model.stream(HI)]
    await model.aclose()

    assert ["stream_options" in body for body in server.requests] == [True, False, False]


async def test_stream_usage_can_be_disabled(serve: Serve) -> None:
    server = await serve([stream(chunk({"content": "ok"}), chunk({}, "stop"))])
    model = OpenAiChatModel("m", server.url, "test", stream_usage=False)

    assert [event async for event in model.stream(HI)]
    await model.aclose()

    assert "stream_options" not in server.requests[0]


async def test_parameters_come_from_the_model_and_the_request_which_wins(serve: Serve) -> None:
    request = ChatRequest(
        [UserMessage("Hi")], parameters={"temperature": 0.5, "seed": None, "extra_body": {"top_k": 3}}
    )

    body = await body_of(
        serve,
        request,
        temperature=1.0,
        seed=7,
        max_completion_tokens=5,
        parameters={"stop": ["x"]},
        extra_body={"n": 1},
    )

    assert {key: value for key, value in body.items() if key not in ("model", "messages")} == {
        "temperature": 0.5,
        "max_completion_tokens": 5,
        "stop": ["x"],
        "n": 1,
        "top_k": 3,
    }


async def test_temperature_and_token_limit_of_a_request_win_over_parameters(serve: Serve) -> None:
    request = ChatRequest([UserMessage("Hi")], parameters={"temperature": 0.5}, temperature=0.0, max_output_tokens=9)

    body = await body_of(serve, request, temperature=1.0)
    assert (body["temperature"], body["max_tokens"]) == (0.0, 9)
    body = await body_of(serve, request, max_completion_tokens=5)
    assert body["max_completion_tokens"] == 9
    assert "max_tokens" not in body


def test_the_responses_api_has_a_name_for_the_token_limit() -> None:
    model = OpenAiChatModel("m", api_key="test", wire="responses", max_tokens=5)
    body = json.loads(model._encode_body(ChatRequest([UserMessage("Hi")], max_output_tokens=9), None, streams=False)[0])
    assert body["max_output_tokens"] == 9


def test_openai_gets_the_newest_name_of_the_token_limit() -> None:
    [limit] = [
        name
        for name, value in json.loads(
            OpenAiChatModel("m", api_key="test")._encode_body(
                ChatRequest([UserMessage("Hi")], max_output_tokens=9), None, streams=False
            )[0]
        ).items()
        if value == 9
    ]
    assert limit == "max_completion_tokens"


async def test_parallel_tool_calls_is_sent_only_with_tools(serve: Serve) -> None:
    assert "parallel_tool_calls" not in await body_of(serve, HI, parallel_tool_calls=False)
    assert "parallel_tool_calls" not in await body_of(serve, ChatRequest(HI.messages, [LOOK]))
    body = await body_of(serve, ChatRequest(HI.messages, [LOOK]), parallel_tool_calls=False)
    assert body["parallel_tool_calls"] is False


async def test_headers_and_query_go_with_every_request(serve: Serve) -> None:
    server = await serve([OK])
    model = OpenAiChatModel(
        "m", server.url, "key", extra_headers={"X-Team": "a"}, extra_query={"api-version": "2026-01-01"}
    )

    await model.chat(ChatRequest(HI.messages, parameters={"extra_headers": {"X-Call": "b"}}))
    await model.aclose()

    assert server.paths == ["/v1/chat/completions?api-version=2026-01-01"]
    assert server.headers[0]["x-team"] == "a"
    assert server.headers[0]["x-call"] == "b"
    assert server.headers[0]["authorization"] == "Bearer key"
    assert server.headers[0]["content-type"] == "application/json"
    assert "extra_headers" not in server.requests[0]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ("look", {"type": "function", "function": {"name": "look"}}),
    ],
)
async def test_tool_choice_is_encoded_for_each_api(serve: Serve, choice: str, sent: object) -> None:
    body = await body_of(serve, ChatRequest(HI.messages, [LOOK], tool_choice=choice))

    assert body["tool_choice"] == sent
    assert "tool_choice" not in await body_of(serve, ChatRequest(HI.messages, tool_choice=choice))


async def test_only_configured_metadata_keys_are_sent(serve: Serve) -> None:
    request = ChatRequest(HI.messages, [LOOK])
    plain = {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}}

    assert (await body_of(serve, request))["tools"] == [{"type": "function", "function": plain}]
    named = await body_of(serve, request, send_tool_metadata=("cache_control", "absent"))
    assert named["tools"][0]["function"] == {**plain, "cache_control": {"type": "ephemeral"}}


async def test_a_missing_tool_description_is_not_sent(serve: Serve) -> None:
    body = await body_of(serve, ChatRequest(HI.messages, [ToolSpecification("look")]))

    assert "description" not in body["tools"][0]["function"]


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "qualifies"),
    [
        ({"type": "object", "properties": {"a": STRING}, "required": ["a"]}, True),
        ({"type": "object", "properties": {}}, True),
        ({"type": "object", "properties": {"a": STRING}}, True),  # null instead of leaving it out
        ({"type": "object", "properties": {}, "additionalProperties": True}, False),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "object", "additionalProperties": STRING}},
                "required": ["a"],
            },
            False,
        ),
        ({"type": "object", "properties": {"a": {"anyOf": [STRING, {"type": "null"}]}}, "required": ["a"]}, True),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, False),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": STRING}},
            True,
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": STRING}}}},
                "required": ["a"],
            },
            False,
        ),
    ],
)
async def test_strict_is_sent_if_the_schema_allows_it(serve: Serve, schema: dict[str, Any], qualifies: bool) -> None:
    request = ChatRequest(HI.messages, [ToolSpecification("t", parameters=schema)])

    strict = (await body_of(serve, request, strict_tools=True))["tools"][0]["function"]
    loose = (await body_of(serve, request))["tools"][0]["function"]

    assert strict.get("strict", False) is qualifies
    assert not qualifies or strict["parameters"]["additionalProperties"] is False
    assert "strict" not in loose
    assert loose["parameters"] == schema


async def test_a_response_format_is_sent_as_strict_if_the_schema_allows_it(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": STRING}, "required": ["a"]}
    form = (await body_of(serve, ChatRequest(HI.messages, response_format=ResponseFormat("My answer", schema))))[
        "response_format"
    ]
    loose = await body_of(
        serve, ChatRequest(HI.messages, response_format=ResponseFormat("a", {**schema, "required": []}))
    )

    assert form["type"] == "json_schema"
    assert form["json_schema"] == {
        "name": "My_answer",
        "schema": {**schema, "additionalProperties": False},
        "strict": True,
    }
    assert "strict" not in loose["response_format"]["json_schema"]


async def test_contents_with_images_are_sent_as_parts_and_texts_as_one_text(serve: Serve) -> None:
    [first, second, third] = await messages_of(
        serve,
        UserMessage([TextContent("a"), TextContent("b")]),
        UserMessage(["See", ImageContent("https://example.org/x.png")]),
        UserMessage([ImageContent(data=b"\xff\xd8\xff\xe0"), ImageContent(data="R0lGODdh", mime_type="image/gif")]),
    )

    assert first["content"] == "a\nb"
    assert second["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
    ]
    assert [part["image_url"]["url"] for part in third["content"]] == [
        "data:image/jpeg;base64,/9j/4A==",
        "data:image/gif;base64,R0lGODdh",
    ]


async def test_images_of_results_follow_all_results_in_a_user_message(serve: Serve) -> None:
    calls = [ToolExecutionRequest("c1", "look", "{}"), ToolExecutionRequest("c2", "look", "{}")]
    image = ImageContent("https://example.org/x.png")

    sent = await messages_of(
        serve,
        UserMessage("Go"),
        AiMessage(None, calls),
        ToolExecutionResultMessage("c1", "look", "a picture", contents=[TextContent("a picture"), image]),
        ToolExecutionResultMessage("c2", "look", ""),
    )

    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert "content" not in sent[1]
    assert sent[2]["content"] == "a picture"
    assert sent[3]["content"] == ""
    assert sent[4]["content"] == [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]


async def test_invalid_arguments_and_names_are_not_sent_back(serve: Serve) -> None:
    calls = [ToolExecutionRequest("c", "do it!" + "x" * 99, '{"a": '), ToolExecutionRequest("d", "", "[1]")]

    [sent] = await messages_of(serve, AiMessage("Hm", calls))

    assert [each["function"]["arguments"] for each in sent["tool_calls"]] == ["{}", "{}"]
    assert [each["function"]["name"] for each in sent["tool_calls"]] == ["do_it_" + "x" * 58, "unknown"]


async def test_empty_replies_are_not_sent_back(serve: Serve) -> None:
    sent = await messages_of(serve, UserMessage("a"), AiMessage(""), AiMessage(None, reasoning="Hm"), UserMessage("b"))

    assert [each["content"] for each in sent] == ["a", "b"]


async def test_lone_surrogates_do_not_break_a_request(serve: Serve) -> None:
    assert await messages_of(serve, UserMessage("a\ud83d"), ToolExecutionResultMessage("c", "t", "\udc00"))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_sent_back_with_its_calls_under_the_original_field_name(serve: Serve, field: str) -> None:
    details = [{"type": "reasoning.text", "text": "Hm.", "signature": "s", "index": 0}]
    signed = {"google": {"thought_signature": "abc"}}
    thinking = {"content": None, field: "Hm.", "reasoning_details": details}
    server = await serve(
        [completion({**thinking, "tool_calls": [call("look", "{}", id="c", extra_content=signed)]}), OK]
    )
    model = OpenAiChatModel("m", server.url, "test")

    reply = (await model.chat(ChatRequest(HI.messages, [LOOK]))).ai_message
    await model.chat(ChatRequest([*HI.messages, reply, ToolExecutionResultMessage("c", "look", "x")], [LOOK]))
    await model.aclose()

    sent = server.requests[1]["messages"][1]
    assert reply.reasoning == "Hm."
    assert sent[field] == "Hm."
    assert sent["reasoning_details"] == details
    assert sent["tool_calls"][0]["extra_content"] == signed


async def test_streamed_reasoning_is_joined(serve: Serve) -> None:
    pieces = [{"type": "reasoning.text", "text": each, "index": 0} for each in ("H", "m.")]
    chunks = [chunk({"reasoning_content": each["text"], "reasoning_details": [each]}) for each in pieces]
    server = await serve([stream(*chunks, chunk({"content": "Hello"}), chunk({}, "stop"))])
    model = OpenAiChatModel("m", server.url, "test")

    *_, last = [event async for event in model.stream(HI)]
    await model.aclose()

    message = last.response.ai_message  # type: ignore[union-attr]  # a CompleteResponse is the last
    assert message.reasoning == "Hm."
    assert message.attributes["reasoning_details"] == [{"type": "reasoning.text", "text": "Hm.", "index": 0}]


async def test_reasoning_is_not_sent_without_calls(serve: Serve) -> None:
    message = AiMessage("Hello", reasoning="Hm.", attributes={"reasoning_field": "reasoning_content"})

    assert await messages_of(serve, message) == [{"role": "assistant", "content": "Hello"}]


async def test_a_message_and_the_tools_are_encoded_once(serve: Serve) -> None:
    server = await serve([OK, OK])
    model = OpenAiChatModel("m", server.url, "test")
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    message, tool = UserMessage("Hi"), ToolSpecification("look", parameters=schema)
    tools = (tool,)

    await model.chat(ChatRequest([message], tools))
    schema["changed"] = True  # do not do this in a program; here it shows that nothing is read again
    await model.chat(ChatRequest([message], tools))
    await model.aclose()

    assert server.requests[0] == server.requests[1]


async def test_address_and_key_come_from_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve([OK])
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "from-outside")
    model = OpenAiChatModel("m")

    await model.chat(HI)
    await model.aclose()

    assert server.headers[0]["authorization"] == "Bearer from-outside"
    assert "from-outside" not in repr(model)


async def test_a_custom_server_needs_no_key(serve: Serve) -> None:
    server = await serve([OK])
    model = OpenAiChatModel("m", server.url)

    assert (await model.chat(HI)).ai_message.text == "ok"
    await model.aclose()


async def test_a_key_function_is_called_for_each_request(serve: Serve) -> None:
    server = await serve([OK])

    async def key() -> str:
        return "fresh"

    model = OpenAiChatModel("m", server.url, key)
    await model.chat(HI)
    await model.aclose()

    assert server.headers[0]["authorization"] == "Bearer fresh"


def test_missing_base_url_and_key_are_a_problem_with_a_fix() -> None:
    with pytest.raises(IllegalConfigurationError, match="OPENAI_API_KEY"):
        OpenAiChatModel("m")


def test_an_unknown_wire_is_rejected() -> None:
    with pytest.raises(ValueError, match="responses"):
        OpenAiChatModel("m", "http://127.0.0.1:1", wire="smoke")  # type: ignore[arg-type]  # on purpose


async def test_values_that_json_does_not_support_raise_type_error(serve: Serve) -> None:
    server = await serve([OK])
    model = OpenAiChatModel("m", server.url, parameters={"stop": object()})

    with pytest.raises(TypeError):
        await model.chat(HI)
    await model.aclose()


async def test_a_server_error_is_shown_with_status_request_id_and_excerpt(serve: Serve) -> None:
    server = await serve([Scripted(json.dumps({"error": {"message": "no such model"}}).encode(), status=404)])
    model = OpenAiChatModel("m", server.url)

    with pytest.raises(ModelHttpError) as caught:
        await model.chat(HI)
    await model.aclose()

    assert (caught.value.status, caught.value.request_id) == (404, "req_1")
    assert caught.value.message == "no such model"
    assert "no such model" in caught.value.body


@pytest.mark.parametrize("level", ["none", "minimal", "low", "medium", "high"])
async def test_reasoning_is_sent_by_the_name_of_the_api(serve: Serve, level: Any) -> None:
    of_model = await body_of(serve, HI, reasoning=level)
    of_request = await body_of(serve, ChatRequest([UserMessage("Hi")], reasoning=level), reasoning="low")

    assert of_model["reasoning_effort"] == of_request["reasoning_effort"] == level


def test_unknown_levels_of_reasoning_are_problems() -> None:
    with pytest.raises(IllegalConfigurationError, match="unknown reasoning 'much'; use one of: none, minimal"):
        OpenAiChatModel("m", "http://127.0.0.1:1", reasoning="much")  # type: ignore[arg-type]  # not a level


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3},
            },
            (9, 4, 3),
        ),
        (
            {
                "input_tokens": 9,
                "output_tokens": 2,
                "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3},
            },
            (9, 4, 3),
        ),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": 3,
            },
            (9, 4, 3),
        ),
        (
            {"input_tokens": 2, "output_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3},
            (9, 4, 3),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}, (9, 4, 0)),
    ],
)
async def test_input_tokens_count_all_input(serve: Serve, usage: Any, expected: tuple[int, int, int]) -> None:
    server = await serve([completion({"content": "ok"}, usage=usage)])
    model = OpenAiChatModel("m", server.url)
    found = (await model.chat(HI)).token_usage
    await model.aclose()

    assert found is not None
    assert (found.input_tokens, found.cached_input_tokens, found.cache_write_tokens) == expected


# --- encoded forms


@pytest.mark.parametrize("make", [ChatWire, ResponsesWire, AnthropicWire])
def test_models_with_equal_settings_share_encoded_forms_and_are_released(make: type[Any]) -> None:
    message = UserMessage("Hi")
    tool = ToolSpecification("look", "Looks")
    request = ChatRequest([message], [tool])

    first = make()
    first.fields(request)
    counts = len(message._encoded), len(tool._encoded)
    released = weakref.ref(first)
    for _ in range(3):
        make().fields(request)
    make(strict_tools=True).fields(request)
    del first
    gc.collect()

    assert counts == (1, 1)
    assert (len(message._encoded), len(tool._encoded)) == (1, 2)
    assert released() is None
