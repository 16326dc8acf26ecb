"""A provider is a settings class, a wire, and the body of a request. This one streams lines of JSON, as Ollama does."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.models.scripted_server import Scripted, Serve
from toolbox import ChatRequest, IllegalConfigurationError, ModelHttpError, PartialResponse, UserMessage
from toolbox.chat import FinishReason
from toolbox.models.accumulator import ReplyAccumulator
from toolbox.models.model_providers import PROVIDERS, ServerProvider, server_providers
from toolbox.models.openai import OpenAiPackage
from toolbox.models.server_errors import error_in
from toolbox.models.server_model import ServerChatModel
from toolbox.models.server_settings import ApiKey, ServerSettings, taking
from toolbox.models.sse import JSON_LINES
from toolbox.models.wire_encoding import SHARED_FIELDS, Fields, join_fields, json_bytes
from toolbox.recordings import FIELDS, PATHS, Recording

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])


@dataclass(frozen=True, slots=True)
class LinesSettings(ServerSettings):
    variables = "LINES"
    public_url = "http://localhost:1"
    example_url = "http://localhost:1"
    needs_key = False

    base_url: str | None = field(default=None, repr=False)
    api_key: ApiKey | None = field(default=None, repr=False)
    _: KW_ONLY
    num_ctx: int | None = None

    def body_parameters(self) -> dict[str, Any]:
        named = {name: value for name in ("temperature", "num_ctx") if (value := getattr(self, name)) is not None}
        return {**named, **(self.parameters or {}), **(self.extra_body or {})}


class LinesWire:
    path = "/api/chat"
    recorded_fields = SHARED_FIELDS | {"text"}
    stream_type = JSON_LINES

    def fields(self, request: ChatRequest) -> Fields:
        last = request.messages[-1]
        assert isinstance(last, UserMessage)
        return {"text": json_bytes(last.text)}

    def interpreter(self, reply: ReplyAccumulator) -> LinesInterpreter:
        return LinesInterpreter(reply)


class LinesInterpreter:
    kind = "reply: it has no text"
    is_paused = False

    def __init__(self, reply: ReplyAccumulator) -> None:
        self.reply = reply
        self.answered = self.ended = self.final = False

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        if value.get("error") and (error := error_in(value)) is not None:
            raise error
        self.answered = True
        self.reply.text(value.get("text", ""))
        if value.get("done"):
            self.ended = self.final = True
            self.reply.finish_reason = FinishReason.STOP

    def close(self) -> None:
        pass


class LinesChatModel(ServerChatModel[LinesWire]):
    @taking(LinesSettings)
    def __init__(self, given: LinesSettings) -> None:
        super().__init__(given.with_environment(), OpenAiPackage, LinesWire)

    supports_response_format = False

    def _encode_body(
        self, request: ChatRequest, interpreter: LinesInterpreter, *, streams: bool
    ) -> tuple[bytes, dict[str, str] | None]:
        parameters, headers = self._read_parameters(request)
        if request.max_output_tokens is not None:
            parameters["num_predict"] = request.max_output_tokens
        if (level := request.reasoning or self._server.reasoning) is not None:
            parameters["think"] = level
        given = {"model": json_bytes(self.model), "stream": json_bytes(streams)}
        sent = {name: json_bytes(value) for name, value in parameters.items() if value is not None}
        return join_fields({**given, **self._wire.fields(request), **sent}), headers


def lines(*values: dict[str, Any], cut: bool = False) -> Scripted:
    return Scripted(chunks=[json.dumps(each).encode() + b"\n" for each in values], content_type=JSON_LINES, cut=cut)


async def test_a_provider_has_whole_replies_and_streams(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scripted(json.dumps({"text": "Hello", "done": True}).encode())
    server = await serve([whole, lines({"text": "Hel"}, {"text": "lo"}, {"done": True})])
    monkeypatch.setenv("LINES_BASE_URL", server.url)
    monkeypatch.setenv("LINES_API_KEY", "key-of-the-environment")
    model = LinesChatModel("m", temperature=0.5, num_ctx=9)

    reply = await model.chat(HI)
    events = [event async for event in model.stream(HI)]
    await model.aclose()

    assert reply.ai_message.text == events[-1].response.ai_message.text == "Hello"  # type: ignore[union-attr]
    assert events[:-1] == [PartialResponse("Hel"), PartialResponse("lo")]
    assert server.requests[1] == {"model": "m", "stream": True, "text": "Hi", "temperature": 0.5, "num_ctx": 9}
    assert server.paths == ["/v1/api/chat"] * 2
    assert server.headers[0]["authorization"] == "Bearer key-of-the-environment"


async def test_parameters_of_the_model_and_of_a_request_are_sent(serve: Serve) -> None:
    server = await serve([Scripted(b'{"text": "Hello", "done": true}')])
    model = LinesChatModel("m", server.url, temperature=0.5, num_ctx=9, reasoning="low", extra_body={"seed": 1})
    given = {"num_ctx": None, "top_p": 0.1, "extra_headers": {"x-tenant": "acme"}, "extra_body": {"seed": 2}}

    await model.chat(ChatRequest(HI.messages, temperature=0.7, max_output_tokens=5, parameters=given))
    await model.aclose()

    parameters = {"temperature": 0.7, "top_p": 0.1, "seed": 2, "num_predict": 5, "think": "low"}
    assert server.requests == [{"model": "m", "stream": False, "text": "Hi", **parameters}]
    assert server.headers[0]["x-tenant"] == "acme"


async def test_headers_of_the_package_from_the_environment_are_not_sent_to_another_provider(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-5f1c9a77")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway-Key: gw-5f1c9a77")
    server = await serve([Scripted(b'{"text": "Hello", "done": true}')])
    model = LinesChatModel("m", server.url)
    await model.chat(HI)
    await model.aclose()

    assert "5f1c9a77" not in str(server.headers)


def test_the_key_in_the_environment_is_not_for_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES_API_KEY", "key-of-the-environment")

    for url, is_sent in (("http://localhost:1/", True), ("http://localhost:9999", False), ("http://localhost", False)):
        assert (LinesSettings("m", base_url=url).with_environment().api_key is not None) == is_sent


def test_schemas_are_supported_unless_a_provider_says_otherwise() -> None:
    assert ServerChatModel.supports_response_format is True
    assert LinesChatModel("m", "http://localhost:1").supports_response_format is False


async def test_lines_of_json_are_events_while_they_arrive(serve: Serve) -> None:
    server = await serve([lines({"text": "first"}, {"error": "too busy"})])
    model = LinesChatModel("m", server.url)
    seen: list[Any] = []

    with pytest.raises(ModelHttpError, match="too busy"):
        async for event in model.stream(HI):
            seen.append(event)
    await model.aclose()

    assert seen == [PartialResponse("first")]


async def test_streams_of_json_lines_are_recorded_line_by_line(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    server = await serve([lines({"text": "my key is secret-key-1"}, {"text": "!"}, {"done": True})])
    recording = Recording(file, "record", paths=(LinesWire.path,), fields=LinesWire.recorded_fields)
    model = LinesChatModel("m", server.url, "secret-key-1", transport=recording)
    assert [event async for event in model.stream(HI)]
    await model.aclose()

    replay = Recording(file, "replay", paths=(LinesWire.path,), fields=LinesWire.recorded_fields)
    model = LinesChatModel("m", "http://127.0.0.1:9", transport=replay)
    pieces = [event async for event in model.stream(HI) if isinstance(event, PartialResponse)]
    await model.aclose()

    assert len(pieces) == 2
    assert "secret-key-1" not in file.read_text()


def test_shared_settings_are_checked_for_each_provider() -> None:
    with pytest.raises(IllegalConfigurationError) as caught:
        LinesChatModel("m", "localhost", timeout=-1, reasoning="much")  # type: ignore[arg-type]

    facts = [f"{each.where}: {each.what}; {each.fix}" for each in caught.value.problems]
    example = "set base_url= or LINES_BASE_URL, for example to http://localhost:1"
    assert facts == [
        "LinesChatModel('m'): invalid base URL: it must begin with http:// or https://; " + example,
        "LinesChatModel('m'): invalid timeout=-1; use seconds above 0, or None for no limit",
        "LinesChatModel('m'): unknown reasoning 'much'; use one of: none, minimal, low, medium, high",
    ]


each_provider = pytest.mark.parametrize(
    "provider", server_providers(), ids=[each for each in PROVIDERS if each != "pydantic-ai"]
)


@each_provider
async def test_each_setting_reaches_the_body(provider: ServerProvider) -> None:
    bodies: list[bytes] = []

    def refuse(request: httpx2.Request) -> httpx2.Response:
        bodies.append(request.content)
        return httpx2.Response(400)

    async def body_of(options: dict[str, Any], given: dict[str, Any]) -> bytes:
        transport = httpx2.MockTransport(refuse)
        fixed = {"api_key": "k", "transport": transport, **dict(provider.fixed)}
        model = provider.load_model()("m", **fixed, **options)  # type: ignore[call-arg]
        with pytest.raises(ModelHttpError):
            await model.chat(ChatRequest(HI.messages, **given))
        return bodies[-1]

    plain = await body_of({}, {})
    for setting, shown in (
        ({"temperature": 0.125}, b"0.125"),
        ({"parameters": {"top_p": 0.375}}, b"0.375"),
        ({"reasoning": "high"}, b""),
    ):
        for body in (await body_of(setting, {}), await body_of({}, setting)):
            assert body != plain
            assert shown in body
    assert b'"seed":77' in await body_of({"extra_body": {"seed": 77}}, {})
    assert b'"seed":77' in await body_of({}, {"parameters": {"extra_body": {"seed": 77}}})
    assert b"177" in await body_of({}, {"max_output_tokens": 177})


@each_provider
def test_the_classes_of_a_provider_belong_together(provider: ServerProvider) -> None:
    settings, wire = provider.load_settings(), provider.load_wire()
    model = provider.load_model()("m", api_key="k", **dict(provider.fixed))  # type: ignore[call-arg]

    assert is_dataclass(settings)
    assert {"base_url", "api_key"} <= {each.name for each in fields(settings)}
    assert isinstance(model, ServerChatModel)
    assert isinstance(model._server, settings)
    assert type(model._wire) is wire
    assert wire.path in PATHS
    assert wire.recorded_fields <= FIELDS
