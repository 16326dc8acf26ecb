"""Recordings: replay without the server, hidden credentials, modes and invalid files."""

import asyncio
import gzip
import importlib
import inspect
import json
import pickle
import pkgutil
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest

from tests.models import messages_api
from tests.models.scripted_server import Scripted, Serve, call, chunk, completion, sse, stream
from toolbox import (
    AiMessage,
    AnthropicChatModel,
    ChatRequest,
    Container,
    ModelHttpError,
    OpenAiChatModel,
    PartialResponse,
    Result,
    SystemMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    models,
    register_ai_service,
    tool,
)
from toolbox.chat import ResponseFormat
from toolbox.recordings import HIDDEN, RecordedRequest, Recording, RecordingError
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
UNUSED_URL = "http://127.0.0.1:9/v1"


def add(a: int, b: int) -> int:
    return a + b


class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


SUM = [
    completion({"tool_calls": [call("add", '{"a": 2, "b": 3}', id="c1", type="function")]}, "tool_calls"),
    completion({"content": "It is 5 – fünf."}),
]


async def asked(recording: Recording, url: str = UNUSED_URL, question: str = "2 + 3?", **options: Any) -> Result[str]:
    model = OpenAiChatModel("m", url, transport=recording, **options)
    try:
        return await create_ai_service(Assistant, chat_model=model, tools=[add]).ask(question)
    finally:
        await model.aclose()


async def recorded(serve: Serve, file: Path, replies: list[Scripted], **options: Any) -> Result[str]:
    server = await serve(replies)
    return await asked(Recording(file), server.url, **options)


async def streamed(recording: Recording, url: str = UNUSED_URL, request: ChatRequest = HI) -> list[Any]:
    model = OpenAiChatModel("m", url, transport=recording)
    events = [event async for event in model.stream(request)]
    await model.aclose()
    return events


async def test_conversations_with_tools_are_replayed_without_a_server(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "in" / "a" / "folder" / "sum.json"

    live = await recorded(serve, file, SUM)
    again = await asked(Recording(file))

    assert again.content == live.content == "It is 5 – fünf."
    assert again.messages == live.messages
    assert again.token_usage == live.token_usage


async def test_response_bodies_are_replayed_byte_for_byte(serve: Serve, tmp_path: Path) -> None:
    value = {"choices": [{"message": {"content": "a–b"}, "finish_reason": "stop"}], "x": 1e-7}
    bodies = [
        json.dumps(value).encode(),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
        json.dumps(value, ensure_ascii=False, indent=2).encode() + b"\n",
        b' {"choices":[{"message":{"content":"odd" },"finish_reason":"stop"}], "x": 1E-7}\r\n',
    ]
    for number, body in enumerate(bodies):
        file = tmp_path / f"{number}.json"
        await recorded(serve, file, [Scripted(body)])

        [exchange] = Recording(file)._traffic.exchanges

        assert exchange.reply.chunks == (body,)


async def test_streams_are_replayed_in_their_pieces(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "stream.json"
    deltas = [chunk({"content": "Größe "}), chunk({"content": "drei"}), chunk({}, "stop")]
    whole = b"".join(sse(*[json.dumps(each, ensure_ascii=False) for each in deltas]))
    cut = whole.index("ö".encode()) + 1  # within a character
    pieces = [whole[:cut], whole[cut : cut + 30], whole[cut + 30 :]]
    server = await serve([Scripted(chunks=pieces, content_type="text/event-stream")])

    live = await streamed(Recording(file), server.url)
    recording = Recording(file)
    again = await streamed(recording)

    assert again == live
    assert b"".join(recording._traffic.exchanges[0].reply.chunks) == whole
    assert "drei" in file.read_text(encoding="utf-8")


async def test_recordings_contain_no_credentials(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    secrets = {
        name: f"{name}-5f1c9a77d0"
        for name in (
            "apikey",
            "organisation",
            "header",
            "query",
            "body",
            "cookie",
            "path",
            "given",
            "inner",
            "harmless",
            "tenant",
            "field",
        )
    }
    replies = [
        Scripted(
            completion({"content": f"you are {', '.join(secrets.values())}"}).body,
            headers={"set-cookie": f"id={secrets['given']}", "openai-organization": secrets["given"]},
        ),
    ]
    server = await serve(replies)
    recording = Recording(file)
    mcp = {"type": "mcp", "authorization": secrets["inner"], "headers": {"X-Team": secrets["inner"]}}
    model = OpenAiChatModel(
        "m",
        f"{server.url}/{secrets['path']}",
        secrets["apikey"],
        transport=recording,
        extra_headers={
            "OpenAI-Organization": secrets["organisation"],
            "X-Gateway-Key": secrets["header"],
            "X-Team": secrets["harmless"],
            "Cookie": f"id={secrets['cookie']}",
        },
        extra_query={"api-key": secrets["query"], "team": secrets["tenant"]},
        extra_body={"api_key": secrets["body"], "team": {"name": secrets["field"]}, "tools": [mcp]},
    )
    await model.chat(HI)
    await model.aclose()

    sent = f"{server.paths}{server.headers}{server.requests}"
    text = file.read_text(encoding="utf-8")
    assert [name for name in secrets.keys() - {"given"} if secrets[name] not in sent] == []
    # The server made `given` itself, and may say it in its answer; `path` is a part of the address.
    assert [name for name in secrets.keys() - {"given", "path"} if secrets[name] in text] == []


async def test_secrets_are_hidden_in_the_pieces_of_a_stream(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    secret = 'team "platform"/5f1c9a77d0'
    body = b"".join(sse(chunk({"content": f"you are {secret}"}), chunk({"content": "!"}), chunk({}, "stop")))
    cuts = [body[start : start + 5] for start in range(0, len(body), 5)]
    server = await serve([Scripted(chunks=cuts, content_type="text/event-stream")])
    model = OpenAiChatModel("m", server.url, transport=Recording(file), extra_headers={"X-Team": secret})
    said = [event.text async for event in model.stream(HI) if isinstance(event, PartialResponse)]
    await model.aclose()
    played = OpenAiChatModel("m", server.url, transport=Recording(file, "replay"))
    again = [event.text async for event in played.stream(HI) if isinstance(event, PartialResponse)]
    await played.aclose()

    assert "".join(said) == f"you are {secret}!"
    assert "5f1c9a77d0" not in file.read_text(encoding="utf-8")
    assert "".join(again).endswith("!")
    assert "platform" not in "".join(again)


async def test_texts_like_the_versions_in_headers_are_not_hidden(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    said = "on 2023-06-15 and 2025-06-30, context-management of example.com"
    server = await serve([messages_api.message(messages_api.text(said))])
    headers = {"anthropic-beta": "context-management-2025-06-27", "HTTP-Referer": "https://example.com/"}
    address = server.url.removesuffix("/v1")
    model = AnthropicChatModel("m", "key-5f1c9a77d0", address, transport=Recording(file), extra_headers=headers)
    await model.chat(HI)
    await model.aclose()

    assert said in file.read_text(encoding="utf-8")


async def test_compressed_replies_are_recorded_as_text_without_secrets(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    body = gzip.compress(completion({"content": "you are sk-5f1c9a77d0"}).body)
    server = await serve([Scripted(body, headers={"content-encoding": "gzip"})])
    model = OpenAiChatModel("m", server.url, "sk-5f1c9a77d0", transport=Recording(file))
    assert (await model.chat(HI)).ai_message.text == "you are sk-5f1c9a77d0"
    await model.aclose()

    assert "you are" in file.read_text(encoding="utf-8")
    assert "5f1c9a77d0" not in file.read_text(encoding="utf-8")


async def test_other_wires_can_be_recorded(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    server = await serve([Scripted(b'{"content": "Hello"}')])
    body = {"model": "m", "max_tokens": 5, "thinking": {"type": "enabled"}}
    for mode in ("record", "replay"):
        recording = Recording(file, mode, paths=["/messages"], fields=["thinking"])  # type: ignore[arg-type]  # a mode
        async with httpx2.AsyncClient(transport=recording) as client:
            assert (await client.post(f"{server.url}/messages", json=body)).json() == {"content": "Hello"}

    assert len(server.requests) == 1
    assert json.loads(file.read_text(encoding="utf-8"))["exchanges"][0]["request"] == {
        "path": "/messages",
        "body": body,
    }


async def test_recordings_do_not_follow_redirects(serve: Serve, tmp_path: Path) -> None:
    there = await serve([completion({"content": "Hello"})])
    here = await serve([Scripted(status=307, headers={"location": f"{there.url}/chat/completions"})])
    model = OpenAiChatModel("m", here.url, "sk-5f1c9a77d0", transport=Recording(tmp_path / "r.json", "record"))
    with pytest.raises(ModelHttpError, match="redirects are not followed"):
        await model.chat(HI)
    await model.aclose()

    assert there.requests == []
    assert not (tmp_path / "r.json").exists()


async def test_recordings_are_readable_and_have_a_version(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    await recorded(serve, file, SUM, api_key="sk-never-written", temperature=0.5)

    written = json.loads(file.read_text(encoding="utf-8"))

    assert written["version"] == 1
    first, second = written["exchanges"]
    assert first["request"]["path"] == "/chat/completions"
    assert first["request"]["body"]["temperature"] == 0.5
    assert first["reply"].keys() == {"status", "content_type", "layout", "json"}
    assert second["reply"]["json"]["choices"][0]["message"] == {"content": "It is 5 – fünf."}


async def test_unrecorded_requests_are_reported_with_their_differences(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    await recorded(serve, file, SUM)
    recording = Recording(file)

    with pytest.raises(RecordingError) as raised:
        await asked(recording, question="2 + 4?", temperature=0.1)

    text = str(raised.value)
    assert str(file) in text
    assert "request 1 is not in the recording (2 requests)" in text
    assert 'messages[0].content: recorded "2 + 3?", now "2 + 4?"' in text
    assert "temperature: recorded nothing, now 0.1" in text
    assert "TOOLBOX_RECORDING=record" in text
    assert recording.missed == [raised.value]
    assert str(pickle.loads(pickle.dumps(raised.value))) == text


async def test_changed_tool_results_are_reported(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    await recorded(serve, file, SUM)

    @tool(name="add")
    def wrong(a: int, b: int) -> int:
        return a - b

    model = OpenAiChatModel("m", transport=Recording(file))
    service = create_ai_service(Assistant, chat_model=model, tools=[wrong])
    with pytest.raises(RecordingError) as raised:
        await service.ask("2 + 3?")
    await model.aclose()

    assert 'messages[2].content: recorded "5", now "-1"' in str(raised.value)


async def test_requests_are_replayed_as_often_as_they_were_recorded(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    server = await serve([completion({"content": "one"}), completion({"content": "two"})])
    live = Recording(file)
    for _ in range(2):
        await asked(live, server.url)
    again = Recording(file)

    assert [(await asked(again)).content, (await asked(again)).content] == ["one", "two"]
    with pytest.raises(RecordingError, match="was recorded 2 times and was sent once more"):
        await asked(again)


async def test_concurrent_requests_get_their_own_replies(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    server = await serve(lambda body: completion({"content": body["messages"][0]["content"].upper()}))
    words = [f"word {number}" for number in range(8)]
    live = Recording(file)

    await asyncio.gather(*(asked(live, server.url, word) for word in words))
    again = Recording(file)
    replies = await asyncio.gather(*(asked(again, question=word) for word in reversed(words)))

    assert [each.content for each in replies] == [word.upper() for word in reversed(words)]
    order = [each["request"]["body"]["messages"][0]["content"] for each in json.loads(file.read_text())["exchanges"]]
    assert sorted(order) == words


async def test_retried_requests_are_not_recorded(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    busy = Scripted(b"{}", status=503, headers={"retry-after-ms": "1"})

    live = await recorded(serve, file, [busy, completion({"content": "at last"})])

    assert (await asked(Recording(file))).content == live.content == "at last"
    assert len(json.loads(file.read_text())["exchanges"]) == 1


async def test_rejected_keys_leave_no_recording(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"

    with pytest.raises(ModelHttpError):
        await recorded(serve, file, [Scripted(b'{"error": {"message": "wrong key sk-12345678"}}', status=401)])

    assert not file.exists()


async def test_server_errors_are_replayed(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    reply = Scripted(b'{"error": {"message": "no such model"}}', status=404)

    with pytest.raises(ModelHttpError):
        await recorded(serve, file, [reply])

    with pytest.raises(ModelHttpError, match="no such model"):
        await asked(Recording(file))


async def test_modes_control_recording_and_replay(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.json"
    assert Recording(file).is_recording
    with pytest.raises(RecordingError, match="the recording does not exist"):
        Recording(file, "replay")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RecordingError, match="the recording does not exist"):
        Recording(file)
    with pytest.raises(ValueError, match="nonsense"):
        Recording(file, "nonsense")  # type: ignore[arg-type]
    monkeypatch.delenv("CI")

    await recorded(serve, file, SUM)

    assert not Recording(file).is_recording
    monkeypatch.setenv("TOOLBOX_RECORDING", "record")
    assert Recording(file).is_recording
    await recorded(serve, file, [completion({"content": "again"})])
    assert len(json.loads(file.read_text())["exchanges"]) == 1


async def test_values_that_change_between_runs_can_be_rewritten(serve: Serve, tmp_path: Path) -> None:
    def timeless(body: dict[str, Any]) -> dict[str, Any]:
        body["messages"][0]["content"] = "what time is it?"
        return body

    file = tmp_path / "r.json"
    server = await serve([completion({"content": "noon"})])
    await asked(Recording(file, rewrite=timeless), server.url, "it is 11:59, what time is it?")

    assert (await asked(Recording(file, rewrite=timeless), question="at 12:34?")).content == "noon"
    assert server.requests[0]["messages"][0]["content"] == "it is 11:59, what time is it?"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 99, "exchanges": []}', '{"version": 1, "exchanges": [{}]}']
)
async def test_invalid_recording_files_are_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(text)

    with pytest.raises(RecordingError, match="invalid recording"):
        Recording(file)


async def test_closed_streams_are_recorded_up_to_that_point(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    pieces = sse(chunk({"content": "a"}), chunk({"content": "b"}), chunk({}, "stop"))

    async def first(recording: Recording, url: str = UNUSED_URL) -> Any:
        model = OpenAiChatModel("m", url, transport=recording)
        events = model.stream(HI)
        try:
            return await anext(events)
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            await model.aclose()

    server = await serve([Scripted(chunks=pieces, content_type="text/event-stream")])
    live = await first(Recording(file), server.url)

    assert await first(Recording(file)) == live


async def test_cancelled_calls_leave_no_recording(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    never = asyncio.Event()
    server = await serve([Scripted(b"{}", wait=never)])
    task = asyncio.create_task(asked(Recording(file), server.url))
    await server.until(lambda: server.open == 1)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    never.set()

    assert not file.exists()


async def test_tool_arguments_named_token_are_recorded(serve: Serve, tmp_path: Path) -> None:
    """Only request fields with such a name are removed, not tool parameters."""
    file = tmp_path / "r.json"
    server = await serve([completion({"content": "ok"})])
    schema = {"type": "object", "properties": {"token": {"type": "string", "description": "as on the ticket"}}}
    model = OpenAiChatModel("m", server.url, transport=Recording(file))

    await model.chat(ChatRequest([UserMessage("Hi")], [ToolSpecification("look", None, schema)]))

    assert "as on the ticket" in file.read_text(encoding="utf-8")


async def test_recording_errors_in_nested_services_reach_the_test(serve: Serve, tmp_path: Path) -> None:
    """Recording errors are framework errors: they never become tool results."""
    file = tmp_path / "r.json"
    await recorded(serve, file, [SUM[0], completion({"content": "ok"})])

    @register_ai_service(model="recorded")
    class Inner(Protocol):
        @tool
        async def think(self, thought: str) -> str: ...

    @register_ai_service(tools=Inner)
    class Outer(Protocol):
        async def ask(self, question: str) -> str: ...

    model = OpenAiChatModel("m", transport=Recording(file))
    outer = ScriptedChatModel([AiMessage(None, [tool_call("think", {"thought": "?"})])])
    async with Container(models={"default": outer, "recorded": model}).register(Inner, Outer) as container:
        with pytest.raises(RecordingError):
            await container.get(Outer).ask("?")
    await model.aclose()


async def test_other_addresses_are_not_recorded(serve: Serve, tmp_path: Path) -> None:
    recording = Recording(tmp_path / "r.json")
    async with httpx2.AsyncClient(transport=recording) as client:
        with pytest.raises(RecordingError, match="only requests to /chat/completions and /responses"):
            await client.post("http://127.0.0.1:9/v1/embeddings", json={})


async def test_the_responses_wire_is_recorded(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    reply = {
        "id": "resp_1",
        "object": "response",
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}],
    }
    live = await recorded(serve, file, [Scripted(json.dumps(reply).encode())], wire="responses")

    assert (await asked(Recording(file), wire="responses")).content == live.content == "Hello"


async def test_streams_with_tools_and_unicode_are_replayed(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    request = ChatRequest([UserMessage("é \ud83d\ude00")], [ToolSpecification("look")])
    delta = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a": "é"}'}}]}
    server = await serve([stream(chunk(delta), chunk({}, "tool_calls"))])

    live = await streamed(Recording(file), server.url, request)

    assert await streamed(Recording(file), request=request) == live


def wires() -> list[type]:
    """Return the classes of `toolbox.models` that encode requests."""
    found = []
    for module in pkgutil.iter_modules(models.__path__, "toolbox.models."):
        if module.name.endswith("_wire"):
            classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
            found += [each for name, each in classes if name.endswith("Wire") and each.__module__ == module.name]
    return found


@pytest.mark.parametrize("wire", wires())
async def test_the_requests_of_every_wire_are_recorded_with_their_values(wire: Any, tmp_path: Path) -> None:
    encoder = wire()
    request = ChatRequest(
        [SystemMessage("Be brief."), UserMessage("Hi")],
        [ToolSpecification("add", "Adds.", {"type": "object", "properties": {}})],
        response_format=ResponseFormat("answer", {"type": "object", "properties": {}}),
        tool_choice="required",
    )
    stream_fields = encoder.stream_fields(True) if hasattr(encoder, "stream_fields") else {"stream": b"true"}
    sent = {"model": b'"m"', **encoder.fields(request), **stream_fields}

    body = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in sent.items())
    asked = RecordedRequest.of(f"/v1{wire.path}", b"{%s}" % body)

    assert asked.path == wire.path
    assert {*asked.body} == {*sent}
    assert HIDDEN not in asked.body.values()
