"""Images, PDF documents and audio: their checks, their form on the wires, and where they are kept."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from tests.models.scripted_server import Scripted, Serve, completion
from tests.models.test_responses import text, whole
from toolbox import (
    AiMessage,
    AudioContent,
    ChatMemoryKey,
    ChatMemoryStore,
    ChatRequest,
    Container,
    Content,
    ImageContent,
    MemoryId,
    Message,
    ModelError,
    OpenAiChatModel,
    PdfContent,
    Result,
    TextContent,
    TokenWindow,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    UnsupportedContentError,
    UserMessage,
    create_ai_service,
    register_ai_service,
)
from toolbox import contents as contents_module
from toolbox.contents import bytes_of, media_type_of, url_of
from toolbox.conversations.views import estimate_tokens
from toolbox.recordings import Recording
from toolbox.services.state import State
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox.transcripts import messages_from_json, messages_to_json

pytestmark = pytest.mark.anyio

PDF = b"%PDF-1.4 <</Type /Pages>> <</Type /Page>> <</Type/Page>>"
PDF_TEXT = base64.b64encode(PDF).decode()
WAV = b"RIFF\x00\x00\x00\x00WAVE"
WAV_TEXT = base64.b64encode(WAV).decode()
PNG = b"\x89PNG\xff\xfe"
PNG_TEXT = base64.b64encode(PNG).decode()

Wire = Literal["chat", "responses"]


# --- what a content is


def test_contents_take_their_fields_by_position_and_compare_by_value() -> None:
    assert PdfContent("https://a/b.pdf") == PdfContent(url="https://a/b.pdf", data=None, name=None)
    assert PdfContent(None, PDF, "a.pdf") == PdfContent(data=PDF, name="a.pdf")
    assert AudioContent(WAV, "audio/wav") == AudioContent(data=WAV, mime_type="audio/wav")
    assert ImageContent(None, PNG, "image/png", "low") == ImageContent(data=PNG, mime_type="image/png", detail="low")
    assert len({PdfContent(data=PDF), PdfContent(data=PDF), AudioContent(WAV, "audio/wav")}) == 2


def test_other_buffers_become_bytes() -> None:
    given: Any = bytearray(PDF)

    assert PdfContent(data=given) == PdfContent(data=PDF)
    assert AudioContent(memoryview(WAV), "audio/wav").data == WAV  # type: ignore[arg-type]  # converted


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: PdfContent(), ValueError, "a PdfContent needs either url= or data="),
    (lambda: PdfContent("https://a", b"x"), ValueError, "a PdfContent needs either url= or data="),
    (lambda: ImageContent(), ValueError, "an ImageContent needs either url= or data="),
    (lambda: PdfContent(data="%%%"), ValueError, "PdfContent.data: invalid base64"),
    (lambda: PdfContent(data="AAA"), ValueError, "PdfContent.data: invalid base64"),
    (lambda: PdfContent(data="é"), ValueError, "PdfContent.data: invalid base64"),
    (lambda: ImageContent(data="%%%"), ValueError, "ImageContent.data: invalid base64"),
    (lambda: AudioContent("%%%", "audio/wav"), ValueError, "AudioContent.data: invalid base64"),
    (lambda: AudioContent(WAV, "video/mp4"), ValueError, "AudioContent.mime_type: invalid media type 'video/mp4'"),
    (lambda: AudioContent(WAV, "audio"), ValueError, "AudioContent.mime_type: invalid media type 'audio'"),
    (lambda: AudioContent(WAV, "audio/a\r\nb"), ValueError, "AudioContent.mime_type: invalid media type"),
    (lambda: AudioContent(None, "audio/wav"), ValueError, "an AudioContent needs data="),  # type: ignore[arg-type]  # on purpose
    (lambda: ImageContent(data=PNG, mime_type="text/html"), ValueError, "ImageContent.mime_type: invalid media type"),
    (lambda: ImageContent(data=PNG, mime_type=""), ValueError, "ImageContent.mime_type: invalid media type ''"),
    (lambda: PdfContent(f"data:image/png;base64,{PNG_TEXT}"), ValueError, "PdfContent.url: invalid media type"),
    (lambda: PdfContent("data:application/pdf,hello"), ValueError, "PdfContent.url: expected a data URL in base64"),
    (lambda: ImageContent("data:image/png;base64,%%"), ValueError, "ImageContent.url: invalid base64"),
    (lambda: PdfContent(data=7), TypeError, "PdfContent.data: expected bytes or base64 text, got int"),  # type: ignore[arg-type]  # on purpose
    (lambda: PdfContent(7), TypeError, "PdfContent.url: expected a str, got int"),  # type: ignore[arg-type]  # on purpose
    (lambda: PdfContent(data=PDF, name=7), TypeError, "PdfContent.name: expected a str, got int"),  # type: ignore[arg-type]  # on purpose
    (lambda: AudioContent(WAV, 7), TypeError, "AudioContent.mime_type: expected a str, got int"),  # type: ignore[arg-type]  # on purpose
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG, ids=[each[2] for each in WRONG])
def test_invalid_contents_are_errors_that_name_the_place(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        make()

    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("data", [bytes(101), base64.b64encode(bytes(101)).decode(), "A" * 1000])
def test_contents_are_limited_in_size(monkeypatch: pytest.MonkeyPatch, data: bytes | str) -> None:
    monkeypatch.setattr(contents_module, "MAX_CONTENT_BYTES", 100)
    assert PdfContent(data=bytes(100)).data == bytes(100)

    with pytest.raises(ValueError, match=r"PdfContent\.data: .*100"):
        PdfContent(data=data)
    with pytest.raises(ValueError, match=r"ImageContent\.url: .*100"):
        ImageContent(f"data:image/png;base64,{base64.b64encode(bytes(101)).decode()}")


def test_bytes_types_and_urls_of_contents() -> None:
    spaced = f"{PDF_TEXT[:8]}\n{PDF_TEXT[8:]}\n"

    assert bytes_of(PdfContent(data=spaced)) == PDF
    assert bytes_of(PdfContent(f"data:application/pdf;base64,{PDF_TEXT}")) == PDF
    assert bytes_of(PdfContent(data=f"data:application/pdf;base64,{PDF_TEXT}")) == PDF
    assert bytes_of(PdfContent("https://a/b.pdf")) is None
    assert url_of(PdfContent(data=spaced)) == f"data:application/pdf;base64,{PDF_TEXT}"
    assert url_of(AudioContent(WAV, "audio/wav")) == f"data:audio/wav;base64,{WAV_TEXT}"
    assert media_type_of(ImageContent(data=PNG)) == "image/png"
    assert media_type_of(ImageContent("data:image/gif;base64,R0lGODdh")) == "image/gif"
    assert media_type_of(ImageContent(data=b"RIFF1234WEBP")) == "image/webp"


# --- the wires

IMAGE_PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG_TEXT}", "detail": "high"}}
PDF_PART = {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF_TEXT}"}}
WAV_PART = {"type": "input_audio", "input_audio": {"data": WAV_TEXT, "format": "wav"}}
INPUT_PDF = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF_TEXT}"}
INPUT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG_TEXT}", "detail": "high"}
IMAGE = ImageContent(data=PNG, detail="high")
DOCUMENT = PdfContent(data=PDF, name="a.pdf")
SOUND = AudioContent(WAV, "audio/wav")


async def sent(serve: Serve, wire: Wire, *messages: Message) -> list[dict[str, Any]]:
    server = await serve([completion({"content": "ok"}) if wire == "chat" else whole(text("ok"))])
    model = OpenAiChatModel("m", server.url, "test", wire=wire)
    try:
        await model.chat(ChatRequest(messages))
    finally:
        await model.aclose()
    found: list[dict[str, Any]] = server.requests[0]["messages" if wire == "chat" else "input"]
    return found


async def test_the_chat_wire_sends_documents_and_audio_in_their_order(serve: Serve) -> None:
    [message] = await sent(serve, "chat", UserMessage([DOCUMENT, "What is this?", SOUND, IMAGE]))

    assert message["content"] == [PDF_PART, {"type": "text", "text": "What is this?"}, WAV_PART, IMAGE_PART]


@pytest.mark.parametrize(
    ("mime_type", "name"),
    [("audio/wav", "wav"), ("audio/x-wav", "wav"), ("audio/mpeg", "mp3"), ("AUDIO/MP3; codecs=x", "mp3")],
)
async def test_the_chat_wire_names_the_format_of_audio(serve: Serve, mime_type: str, name: str) -> None:
    [message] = await sent(serve, "chat", UserMessage([AudioContent(WAV, mime_type)]))

    assert message["content"][0]["input_audio"]["format"] == name


async def test_documents_without_a_name_get_one_and_data_urls_are_data(serve: Serve) -> None:
    url = f"data:application/pdf;base64,{PDF_TEXT}"

    [chat] = await sent(serve, "chat", UserMessage([PdfContent(url)]))
    [responses] = await sent(serve, "responses", UserMessage([PdfContent(url)]))

    assert chat["content"] == [{"type": "file", "file": {"filename": "document.pdf", "file_data": url}}]
    assert responses["content"] == [{"type": "input_file", "filename": "document.pdf", "file_data": url}]


async def test_the_responses_wire_sends_documents_as_data_or_url(serve: Serve) -> None:
    [message] = await sent(serve, "responses", UserMessage([DOCUMENT, PdfContent("https://a/b.pdf"), "?", IMAGE]))

    assert message["content"] == [
        INPUT_PDF,
        {"type": "input_file", "file_url": "https://a/b.pdf"},
        {"type": "input_text", "text": "?"},
        INPUT_IMAGE,
    ]


CALLS = AiMessage(None, [ToolExecutionRequest("1", "read", "{}"), ToolExecutionRequest("2", "hear", "{}")])
RESULTS = (
    ToolExecutionResultMessage("1", "read", "one", contents=[TextContent("one"), DOCUMENT]),
    ToolExecutionResultMessage("2", "hear", "two", contents=[IMAGE, TextContent("two")]),
)


async def test_contents_of_results_follow_in_a_user_message_on_the_chat_wire(serve: Serve) -> None:
    heard = ToolExecutionResultMessage("2", "hear", "", contents=[SOUND, IMAGE])

    found = await sent(serve, "chat", UserMessage("Go"), CALLS, RESULTS[0], heard, UserMessage("And?"))

    assert [each["role"] for each in found] == ["user", "assistant", "tool", "tool", "user"]  # never two of the user
    text = {"type": "text", "text": "And?"}
    assert [each["content"] for each in found[2:]] == ["one", "", [PDF_PART, WAV_PART, IMAGE_PART, text]]


async def test_contents_of_results_stay_in_the_result_on_the_responses_wire(serve: Serve) -> None:
    found = await sent(serve, "responses", UserMessage("Go"), CALLS, *RESULTS)

    assert [each["output"] for each in found if each.get("type") == "function_call_output"] == [
        [{"type": "input_text", "text": "one"}, INPUT_PDF],
        [INPUT_IMAGE, {"type": "input_text", "text": "two"}],
    ]


UNSUPPORTED: list[tuple[Wire, Content, str]] = [
    ("chat", PdfContent("https://a/b.pdf"), "pass data="),
    ("chat", AudioContent(WAV, "audio/midi"), "pass audio/wav or audio/mpeg"),
    ("responses", SOUND, "the Responses API does not support audio"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("in_result", [False, True])
@pytest.mark.parametrize(("wire", "content", "reason"), UNSUPPORTED, ids=[f"{w} {c!r:.30}" for w, c, _ in UNSUPPORTED])
async def test_a_part_that_the_wire_cannot_carry_is_an_error_before_anything_is_sent(
    serve: Serve, wire: Wire, content: Content, reason: str, in_result: bool, streamed: bool
) -> None:
    server = await serve([])
    model = OpenAiChatModel("m", server.url, "test", wire=wire)
    messages: list[Message] = [UserMessage("Go"), CALLS, *RESULTS]
    if in_result:
        messages[-1] = ToolExecutionResultMessage("2", "hear", "", contents=[content])
    else:
        messages.append(UserMessage(["x", content]))

    with pytest.raises(UnsupportedContentError) as raised:
        if streamed:
            [event async for event in model.stream(ChatRequest(messages))]
        else:
            await model.chat(ChatRequest(messages))
    await model.aclose()

    error = raised.value
    assert error.content == type(content).__name__
    assert error.place == ("messages.3.contents.0" if in_result else "messages.4.contents.1")
    assert reason in error.reason
    assert str(error) == f"{error.place}: {error.content}: {error.reason}"
    assert isinstance(error, ModelError)
    assert server.requests == []


# --- services


async def test_contents_keep_the_order_of_the_parameters() -> None:
    class Reader(Protocol):
        async def compare(self, first: PdfContent, question: str, second: PdfContent | None = None) -> str: ...

        async def hear(self, sounds: list[AudioContent], question: UserMessage, picture: ImageContent) -> str: ...

        async def any(self, part: ImageContent | PdfContent, question: str) -> str: ...

    model = ScriptedChatModel(["ok"] * 4)
    reader = create_ai_service(Reader, chat_model=model)
    other = PdfContent(data=b"%PDF")
    await reader.compare(DOCUMENT, "Equal?", other)
    await reader.compare(question="Equal?", first=DOCUMENT)
    await reader.hear([SOUND, SOUND], UserMessage(["What?", IMAGE], name="Ann"), IMAGE)
    await reader.any(DOCUMENT, "?")

    assert [each.messages[-1] for each in model.requests] == [
        UserMessage([DOCUMENT, "Equal?", other]),
        UserMessage([DOCUMENT, "Equal?"]),
        UserMessage([SOUND, SOUND, "What?", IMAGE, IMAGE], name="Ann"),
        UserMessage([DOCUMENT, "?"]),
    ]


@pytest.mark.parametrize(
    ("value", "text", "contents"),
    [
        (DOCUMENT, "", (DOCUMENT,)),
        (SOUND, "", (SOUND,)),
        ([TextContent("see"), DOCUMENT, SOUND], "see", (TextContent("see"), DOCUMENT, SOUND)),
        (["see", DOCUMENT, "and hear", SOUND], "see\nand hear", ("see", DOCUMENT, "and hear", SOUND)),
        (ToolExecutionResult("t", contents=[DOCUMENT]), "t", (DOCUMENT,)),
    ],
)
async def test_tools_return_contents(value: Any, text: str, contents: Sequence[Any]) -> None:
    def scan() -> Any:
        return value

    class Desk(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("scan"), "ok"])
    desk = create_ai_service(Desk, chat_model=model, tools=[scan])

    result = await desk.ask("Scan it.")

    message = model.requests[1].messages[-1]
    assert isinstance(message, ToolExecutionResultMessage)
    assert message.text == result.tool_executions[0].result == text
    assert message.contents == UserMessage(contents).contents


async def test_contents_survive_transcripts_stores_and_the_state_of_an_invocation() -> None:
    class Texts:
        """A store of JSON texts."""

        text = messages_to_json(())

        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return messages_from_json(self.text)

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            self.text = messages_to_json(messages)

        async def delete_messages(self, key: ChatMemoryKey) -> None:
            self.text = messages_to_json(())

    def scan() -> list[PdfContent | AudioContent]:
        return [PdfContent(data=PDF_TEXT), SOUND]

    class Desk(Protocol):
        async def ask(self, session: MemoryId[str], question: str, page: PdfContent) -> str: ...

    model = ScriptedChatModel([tool_call("scan"), "ok", "ok"])
    container = Container(models={"default": model}).register(register_ai_service(tools=scan)(Desk))
    container.register_instance(Texts(), as_type=ChatMemoryStore)
    async with container:
        desk = container.get(Desk)
        await desk.ask("s", "Read.", DOCUMENT)
        await desk.ask("s", "Again.", PdfContent("https://a/b.pdf"))

    before, now = model.requests[1].messages, model.requests[2].messages
    assert now[: len(before)] == before
    assert before[0] == UserMessage(["Read.", DOCUMENT])
    assert now[-1] == UserMessage(["Again.", PdfContent("https://a/b.pdf")])
    state = State(None, before, (UserMessage([DOCUMENT, SOUND, IMAGE]),))
    assert State.from_json(state.to_json()) == state


def test_windows_count_the_tokens_of_contents() -> None:
    empty = estimate_tokens(UserMessage(""))

    assert estimate_tokens(UserMessage([DOCUMENT])) == empty + 2 * 1500
    assert estimate_tokens(UserMessage([PdfContent("https://a/b.pdf")])) == empty + 1500
    assert estimate_tokens(UserMessage([AudioContent(bytes(16_000), "audio/wav")])) == empty + 10
    assert estimate_tokens(ToolExecutionResultMessage("1", "", "", contents=[DOCUMENT, IMAGE])) == empty + 3085
    kept = TokenWindow(3100).newest([UserMessage([DOCUMENT]), UserMessage("Why?")])
    assert kept == (UserMessage([DOCUMENT]), UserMessage("Why?"))
    assert TokenWindow(3000).newest([UserMessage([DOCUMENT]), UserMessage("Why?")]) == (UserMessage("Why?"),)


async def test_recordings_replay_contents(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    server = await serve([completion({"content": "A bill."})])
    request = ChatRequest([UserMessage([DOCUMENT, SOUND, IMAGE, "?"])])
    modes: list[Literal["record", "replay"]] = ["record", "replay"]
    for mode in modes:
        model = OpenAiChatModel("m", server.url, "test", transport=Recording(path, mode))
        assert (await model.chat(request)).ai_message.text == "A bill."
        await model.aclose()
    assert len(server.requests) == 1


async def test_the_answer_to_a_document_is_scripted_at_the_wire(serve: Serve) -> None:
    def answer(body: dict[str, Any]) -> Scripted:
        kinds = [part["type"] for part in body["messages"][-1]["content"]]
        return completion({"content": ",".join(kinds)})

    class Reader(Protocol):
        async def read(self, page: PdfContent, sound: AudioContent, question: str) -> str: ...

    server = await serve(answer)
    model = OpenAiChatModel("m", server.url, "test")
    assert await create_ai_service(Reader, chat_model=model).read(DOCUMENT, SOUND, "?") == "file,input_audio,text"
    await model.aclose()
