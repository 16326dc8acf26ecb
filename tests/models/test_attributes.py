"""Unknown fields of replies are kept as attributes, and attributes of messages are sent."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

import pytest

from tests.models.scripted_server import HI, OK, Scripted, Serve, chunk, completion, stream
from tests.models.test_responses import events, response, text, whole
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    IllegalConfigurationError,
    ImageContent,
    MemoryId,
    Message,
    OpenAiChatModel,
    ResponseFormat,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    register_ai_service,
)
from toolbox.services.state import State
from toolbox.transcripts import messages_from_json, messages_to_json

pytestmark = pytest.mark.anyio

LOOK = ToolSpecification("look")
MARK = {"type": "ephemeral"}
CITED = {"type": "url_citation", "url_citation": {"url": "https://example.com", "title": "A", "start_index": 0}}
PROBABLE = {"content": [{"token": "Hel", "logprob": -0.1}]}
PROBABLE_TOO = {"content": [{"token": "lo", "logprob": -0.2}]}


async def asked(
    serve: Serve, reply: Scripted, streamed: bool = False, wire: Literal["chat", "responses"] = "chat"
) -> ChatResponse:
    server = await serve([reply])
    model = OpenAiChatModel("m", server.url, "test", wire=wire, max_retries=0)
    try:
        if not streamed:
            return await model.chat(HI)
        *_, last = [event async for event in model.stream(HI)]
        assert isinstance(last, CompleteResponse)
        return last.response
    finally:
        await model.aclose()


def choices(*messages: Any, **more: Any) -> Scripted:
    each = [{"index": n, "message": message, "finish_reason": "stop"} for n, message in enumerate(messages)]
    return Scripted(json.dumps({"id": "c", "choices": each, **more}).encode())


# what is read, the reply, attributes of the response, attributes of the message
READ: list[tuple[str, Scripted, dict[str, Any], dict[str, Any]]] = [
    ("nothing", completion({"content": "Hello"}), {}, {}),
    (
        "the fields of OpenAI",
        completion({"content": "Hello", "annotations": []}, created=7, system_fingerprint="fp", service_tier="default"),
        {"created": 7, "system_fingerprint": "fp", "service_tier": "default"},
        {},
    ),
    (
        "citations of Perplexity",
        completion({"content": "Hello"}, citations=["https://a"]),
        {"citations": ["https://a"]},
        {},
    ),
    ("annotations", completion({"content": "Hello", "annotations": [CITED]}), {}, {"annotations": [CITED]}),
    (
        "annotations of a stream",
        stream(chunk({"content": "Hello", "annotations": [CITED]}), chunk({"annotations": [CITED]}), chunk({}, "stop")),
        {},
        {"annotations": [CITED, CITED]},
    ),
    (
        "citations that each chunk repeats",
        stream(*(chunk({"content": each}, citations=["https://a"]) for each in ("Hel", "lo")), chunk({}, "stop")),
        {"citations": ["https://a"]},
        {},
    ),
    (
        "logprobs",
        Scripted(
            json.dumps(
                {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop", "logprobs": PROBABLE}]}
            ).encode()
        ),
        {"logprobs": PROBABLE},
        {},
    ),
    (
        "logprobs of a stream",
        stream(
            {"choices": [{"index": 0, "delta": {"content": "Hel"}, "logprobs": PROBABLE}]},
            {"choices": [{"index": 0, "delta": {"content": "lo"}, "logprobs": PROBABLE_TOO}]},
            {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]},
        ),
        {"logprobs": {"content": [*PROBABLE["content"], *PROBABLE_TOO["content"]]}},
        {},
    ),
    (
        "further choices",
        choices({"content": "Hello"}, {"role": "assistant", "content": "Hi"}),
        {"choices": [{"index": 1, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]},
        {},
    ),
    (
        "further choices of a stream",
        stream(
            {"choices": [{"index": 0, "delta": {"content": "Hel"}}, {"index": 1, "delta": {"content": "H"}}]},
            {"choices": [{"index": 1, "delta": {"content": "i"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
            {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]},
        ),
        {"choices": [{"index": 1, "message": {"content": "Hi"}, "finish_reason": "stop"}]},
        {},
    ),
    (
        "costs and details of the usage",
        completion(
            {"content": "Hello"},
            usage={
                "prompt_tokens": 1,
                "completion_tokens": 2,
                "total_tokens": 3,
                "cost": 0.5,
                "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 0, "video_tokens": 4},
            },
        ),
        {"usage": {"cost": 0.5, "prompt_tokens_details": {"video_tokens": 4}}},
        {},
    ),
    (
        "audio of a stream",
        stream(
            chunk({"content": "Hello", "audio": {"id": "a", "data": "UklG", "transcript": "Hel"}}),
            chunk({"audio": {"data": "Rg==", "transcript": "lo"}}),
            chunk({}, "stop"),
        ),
        {},
        {"audio": {"id": "a", "data": "UklGRg==", "transcript": "Hello"}},
    ),
    (
        "a part of the content that is not a text",
        completion({"content": [{"type": "text", "text": "Hello"}, {"type": "reference", "reference_ids": [1]}]}),
        {},
        {"content_parts": [{"type": "reference", "reference_ids": [1]}]},
    ),
    (
        "a refusal beside a text",
        completion({"content": "Hello", "refusal": "No."}),
        {},
        {"refusal": "No."},
    ),
    (
        "an unknown end",
        completion({"content": "Hello"}, "pause"),
        {"finish_reason": "pause"},
        {},
    ),
    (
        "a number that JSON does not have",
        Scripted(b'{"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}], "score": NaN}'),
        {"score": None},
        {},
    ),
    (
        "fields that would be sent back",
        completion({"content": "Hello", "prefix": True, "cache_control": MARK, "name": "x", "reasoning_field": "role"}),
        {},
        {},
    ),
]


@pytest.mark.parametrize(("what", "reply", "of_response", "of_message"), READ, ids=[each[0] for each in READ])
async def test_unknown_fields_are_kept_as_attributes(
    serve: Serve, what: str, reply: Scripted, of_response: dict[str, Any], of_message: dict[str, Any]
) -> None:
    found = await asked(serve, reply, streamed=reply.chunks is not None)

    assert found.ai_message.text == "Hello"
    assert found.attributes == of_response
    assert found.ai_message.attributes == of_message
    assert messages_from_json(messages_to_json([found.ai_message])) == (found.ai_message,)


CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}, "signature": "s"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_attributes_of_tool_calls_and_numbers_that_json_does_not_have_can_be_stored(
    serve: Serve, streamed: bool
) -> None:
    thought = {"type": "reasoning.text", "text": "Hm", "score": float("nan")}
    call = {**CALLED, "index": 0, "extra_content": {"google": {"x": float("inf")}}}
    said = {"tool_calls": [call], "reasoning_details": [thought]}
    reply = stream(chunk(said), chunk({}, "tool_calls")) if streamed else completion(said, "tool_calls")

    found = (await asked(serve, reply, streamed)).ai_message

    [request] = found.tool_execution_requests
    assert request.attributes == {"signature": "s", "extra_content": {"google": {"x": None}}}
    assert found.attributes == {"reasoning_details": [{**thought, "score": None}]}
    assert messages_from_json(messages_to_json([found])) == (found,)


async def test_a_character_that_is_cut_in_half_does_not_lose_an_attribute(serve: Serve) -> None:
    body = b'{"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}], "seen": "\\ud800x"}'

    assert (await asked(serve, Scripted(body))).attributes == {"seen": "\ufffdx"}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_attributes_survive_the_state_of_an_invocation_as_json(
    serve: Serve, wire: Literal["chat", "responses"], streamed: bool
) -> None:
    if wire == "chat":
        said = {"content": "Hello", "annotations": [CITED]}
        more = {"citations": ["https://a"], "service_tier": "flex"}
        reply = stream(chunk(said, **more), chunk({}, "stop", **more)) if streamed else completion(said, **more)
    else:
        item = {**text("Hello"), "content": [{"type": "output_text", "text": "Hello", "annotations": [CITED]}]}
        more = {"citations": ["https://a"], "service_tier": "flex"}
        done = {"type": "response.completed", "response": response(item, **more)}
        reply = events(done) if streamed else whole(item, **more)
    found = await asked(serve, reply, streamed, wire)
    assert found.ai_message.attributes == {"annotations": [CITED]}
    assert found.attributes.items() >= more.items()

    state = State(None, (), (*HI.messages, found.ai_message), response=found)

    assert State.from_json(state.to_json()) == state


@pytest.mark.parametrize("streamed", [False, True])
async def test_attributes_survive_a_memory_store(serve: Serve, streamed: bool) -> None:
    class Texts:
        """A store of JSON texts."""

        def __init__(self) -> None:
            self.texts: dict[str, str] = {}

        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return messages_from_json(self.texts[key.memory_id]) if key.memory_id in self.texts else ()

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            self.texts[key.memory_id] = messages_to_json(messages)

        async def delete_messages(self, key: ChatMemoryKey) -> None:
            self.texts.pop(key.memory_id, None)

    class Chat(Protocol):
        async def ask(self, session: MemoryId[str], question: str) -> str: ...

        def stream(self, session: MemoryId[str], question: str) -> AsyncIterator[str]: ...

    said = {"content": "Hello", "annotations": [CITED]}
    server = await serve([stream(chunk(said), chunk({}, "stop")) if streamed else completion(said)])
    model = OpenAiChatModel("m", server.url, "test", max_retries=0)
    container = Container(models={"default": model}).register(register_ai_service(Chat))
    container.register_instance(Texts(), as_type=ChatMemoryStore)
    async with container:
        chat = container.get(Chat)
        if streamed:
            assert [piece async for piece in chat.stream("s", "Hi")] == ["Hello"]
        else:
            assert await chat.ask("s", "Hi") == "Hello"
        *_, answer = await container.chat_memory(Chat, "s").messages()
    await model.aclose()

    assert isinstance(answer, AiMessage)
    assert answer.attributes == {"annotations": [CITED]}


SEARCH = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}}


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_responses_wire_keeps_server_side_tools_annotations_and_tiers(serve: Serve, streamed: bool) -> None:
    part = {"type": "output_text", "text": "Hello", "annotations": [CITED], "logprobs": PROBABLE["content"]}
    message = {**text("Hello"), "phase": "final_answer", "content": [part]}
    more = {"service_tier": "flex", "tools": [{"type": "web_search"}], "temperature": 1.0, "created_at": 7}
    done = {"type": "response.completed", "response": response(SEARCH, message, **more)}
    reply = (
        events(
            {"type": "response.output_item.done", "output_index": 0, "item": SEARCH},
            {"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "delta": "Hello"},
            {"type": "response.output_item.done", "output_index": 1, "item": message},
            done,
        )
        if streamed
        else whole(SEARCH, message, **more)
    )

    found = await asked(serve, reply, streamed, "responses")

    assert found.ai_message.text == "Hello"
    assert found.attributes == {
        "service_tier": "flex",
        "created_at": 7,
        "logprobs": PROBABLE["content"],
        "output_items": [SEARCH],
    }
    assert found.ai_message.attributes == {"annotations": [CITED], "phase": "final_answer"}


async def test_large_attributes_are_kept_in_the_response_only_and_very_large_ones_are_dropped(serve: Serve) -> None:
    message = {"content": "Hello", "annotations": [CITED], "images": ["x" * 100_000]}

    found = await asked(serve, completion(message, debug="y" * 5_000_000, service_tier="flex"))

    assert found.ai_message.attributes == {"annotations": [CITED]}
    assert found.attributes == {"images": ["x" * 100_000], "service_tier": "flex", "left_out": ["debug"]}


async def test_attributes_are_compared_for_equality() -> None:
    assert SystemMessage("a") == SystemMessage("a", attributes={})
    assert SystemMessage("a", "developer") != SystemMessage("a")
    assert UserMessage("a", name="Ann") != UserMessage("a", name="Bob")
    assert UserMessage("a", attributes={"cache_control": MARK}) != UserMessage("a")
    assert ChatResponse(AiMessage("a"), attributes={"x": 1}) != ChatResponse(AiMessage("a"))
    with pytest.raises(ValueError, match="unknown role 'user'"):
        SystemMessage("a", "user")  # type: ignore[arg-type]  # on purpose


# --- what is sent

IMAGE = ImageContent("https://example.com/a.png", detail="low")
# the message, its form on the chat wire, its items on the Responses wire
SENT: list[tuple[Message, dict[str, Any], list[dict[str, Any]]]] = [
    (
        SystemMessage("Be brief.", role="developer"),
        {"role": "developer", "content": "Be brief."},
        [{"role": "developer", "content": "Be brief."}],
    ),
    (
        SystemMessage("Be brief.", name="rules", attributes={"cache_control": MARK}),
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": MARK}], "name": "rules"},
        [{"role": "system", "content": "Be brief."}],
    ),
    (
        UserMessage("Hi", name="Ann"),
        {"role": "user", "content": "Hi", "name": "Ann"},
        [{"role": "user", "content": "Hi"}],
    ),
    (
        UserMessage(["Hi", "there"], attributes={"cache_control": MARK}),
        {"role": "user", "content": [{"type": "text", "text": "Hi\nthere", "cache_control": MARK}]},
        [{"role": "user", "content": "Hi\nthere"}],
    ),
    (
        UserMessage(["Hi", IMAGE], attributes={"cache_control": MARK}),
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hi"},
                {"type": "image_url", "image_url": {"url": IMAGE.url, "detail": "low"}, "cache_control": MARK},
            ],
        },
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Hi"},
                    {"type": "input_image", "image_url": IMAGE.url, "detail": "low"},
                ],
            }
        ],
    ),
    (
        AiMessage("Once", attributes={"prefix": True, "annotations": [1]}),
        {"role": "assistant", "content": "Once", "prefix": True},
        [{"role": "assistant", "content": "Once"}],
    ),
    (
        AiMessage("Once", attributes={"partial": True}, name="poet"),
        {"role": "assistant", "name": "poet", "content": "Once", "partial": True},
        [{"role": "assistant", "content": "Once"}],
    ),
    (
        AiMessage("Once", attributes={"cache_control": MARK}),
        {"role": "assistant", "content": [{"type": "text", "text": "Once", "cache_control": MARK}]},
        [{"role": "assistant", "content": "Once"}],
    ),
    (
        AiMessage(None, [ToolExecutionRequest("c", "look", "{}")], attributes={"cache_control": MARK}),
        {
            "role": "assistant",
            "cache_control": MARK,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        [{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}],
    ),
    (
        ToolExecutionResultMessage("c", "look", "x", attributes={"cache_control": MARK}),
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x", "cache_control": MARK}]},
        [{"type": "function_call_output", "call_id": "c", "output": "x"}],
    ),
]


async def sent(serve: Serve, request: ChatRequest, wire: Literal["chat", "responses"], **more: Any) -> dict[str, Any]:
    server = await serve([OK if wire == "chat" else whole(text("ok"))])
    model = OpenAiChatModel("m", server.url, "test", wire=wire, **more)
    await model.chat(request)
    await model.aclose()
    return server.requests[0]


@pytest.mark.parametrize(("message", "chat", "items"), SENT, ids=[repr(each[0])[:60] for each in SENT])
async def test_message_attributes_are_sent_in_the_request(
    serve: Serve, message: Message, chat: dict[str, Any], items: list[dict[str, Any]]
) -> None:
    assert (await sent(serve, ChatRequest([message]), "chat"))["messages"] == [chat]
    assert (await sent(serve, ChatRequest([message]), "responses"))["input"] == items
    assert messages_from_json(messages_to_json([message])) == (message,)


async def test_a_response_format_has_a_description(serve: Serve) -> None:
    schema = {"type": "object", "properties": {}}
    request = ChatRequest(HI.messages, response_format=ResponseFormat("answer", schema, "The answer."))

    assert (await sent(serve, request, "chat"))["response_format"]["json_schema"]["description"] == "The answer."
    assert (await sent(serve, request, "responses"))["text"]["format"]["description"] == "The answer."


def names_of(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [each.get("name") or each.get("function", {}).get("name") or each["type"] for each in tools]


@pytest.mark.parametrize("wire", ["chat", "responses"])
@pytest.mark.parametrize(
    ("own", "of_model", "of_request", "expected"),
    [
        ([LOOK], None, [{"type": "web_search"}], ["look", "web_search"]),
        ([LOOK], [{"type": "mcp"}], [{"type": "web_search"}], ["look", "mcp", "web_search"]),
        ([LOOK], [{"type": "mcp"}], None, ["look"]),
        ([LOOK], [{"type": "mcp"}], "absent", ["look", "mcp"]),
        ([LOOK], None, [], ["look"]),
        ([], None, [{"type": "web_search"}], ["web_search"]),
    ],
)
async def test_server_side_tools_are_added_to_the_request(
    serve: Serve, wire: Literal["chat", "responses"], own: Any, of_model: Any, of_request: Any, expected: list[str]
) -> None:
    parameters = {} if of_request == "absent" else {"tools": of_request}
    of_its_own = {} if of_model is None else {"parameters": {"tools": of_model}}
    body = await sent(
        serve, ChatRequest(HI.messages, own, parameters=parameters, tool_choice="required"), wire, **of_its_own
    )

    assert names_of(body["tools"]) == expected
    assert body["tool_choice"] == "required"


async def test_requests_without_tools_have_no_tool_choice(serve: Serve) -> None:
    body = await sent(serve, ChatRequest(HI.messages, tool_choice="required"), "chat")

    assert body.keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("wire", "tools", "expected"),
    [
        ("chat", [LOOK], "any"),
        ("chat", [LOOK, ToolSpecification("any")], {"type": "function", "function": {"name": "any"}}),
        ("responses", [LOOK], "required"),
        ("responses", [ToolSpecification("any")], {"type": "function", "name": "any"}),
    ],
)
async def test_any_is_sent_as_a_tool_choice(
    serve: Serve, wire: Literal["chat", "responses"], tools: list[ToolSpecification], expected: object
) -> None:
    assert (await sent(serve, ChatRequest(HI.messages, tools, tool_choice="any"), wire))["tool_choice"] == expected


async def test_a_service_keeps_the_name_and_the_attributes_of_a_user_message(serve: Serve) -> None:
    class Desk(Protocol):
        async def ask(self, message: UserMessage) -> str: ...

        async def count(self, message: UserMessage) -> int: ...

    server = await serve([OK, completion({"content": '{"value": 3}'})])
    model = OpenAiChatModel("m", server.url, "test", supports_response_format=False)
    desk = create_ai_service(Desk, chat_model=model)
    message = UserMessage("Hi", name="Ann", attributes={"cache_control": MARK})
    await desk.ask(message)
    await desk.count(message)
    await model.aclose()

    for request in server.requests:
        [sent_message] = request["messages"]
        assert sent_message["name"] == "Ann"
        assert sent_message["content"][-1]["cache_control"] == MARK


async def test_a_service_offers_its_tools_together_with_server_side_tools(serve: Serve) -> None:
    def look() -> str:
        return "x"

    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    server = await serve([OK] * 2)
    model = OpenAiChatModel("m", server.url, "test")
    more = {"tools": [{"type": "web_search"}]}
    await create_ai_service(Desk, chat_model=model, tools=[look], parameters=more, tool_choice="any").ask("Hi")
    await create_ai_service(Desk, chat_model=model, parameters=more, tool_choice="required").ask("Hi")
    await model.aclose()

    assert [names_of(each["tools"]) for each in server.requests] == [["look", "web_search"], ["web_search"]]
    assert [each["tool_choice"] for each in server.requests] == ["any", "required"]
    with pytest.raises(IllegalConfigurationError, match="the method offers no tools"):
        create_ai_service(Desk, chat_model=model, tool_choice="required")
