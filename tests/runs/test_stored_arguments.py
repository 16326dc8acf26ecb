"""Messages and their parts as arguments of runs: another process gets them as the caller passed them."""

from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    AudioContent,
    ChatRequestParameters,
    Container,
    ImageContent,
    Message,
    PdfContent,
    SystemMessage,
    TextContent,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
)
from toolbox.errors import RunConflictError
from toolbox.runs import InMemoryRunStore, RunId, RunStore
from toolbox.runs.program_values import write_and_read
from toolbox.runs.service_calls.call_documents import read_arguments
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio

PNG = b"\x89PNG\r\n\x1a\n\xff\xfe"
CONTENTS = [
    ImageContent(data=PNG),
    ImageContent(data=PNG, mime_type="image/png", detail="low"),
    ImageContent(data="aGVsbG8=", mime_type="image/png"),
    ImageContent("https://example.com/a.png"),
    PdfContent(data=b"%PDF-1.7 \xff", name="a.pdf"),
    AudioContent(b"RIFF\xff", "audio/wav"),
    AudioContent("aGVsbG8=", "audio/wav"),
    TextContent("a"),
]
CALL = ToolExecutionRequest("1", "look", "{}", {"signature": "s"})
MESSAGES = [
    SystemMessage("Be kind.", name="boss"),
    UserMessage(["What is this?", *CONTENTS], "ann", {"cache_control": {"type": "ephemeral"}}),
    AiMessage(None, (CALL,), "thinking"),
    ToolExecutionResultMessage("1", "look", "a plan", contents=(ImageContent(data=PNG),)),
]


class Kept(InMemoryRunStore):
    persistent = True


@register_ai_service(durable=True)
class Viewer(Protocol):
    async def look(self, run: RunId, message: UserMessage) -> str: ...
    async def compare(self, question: str, images: list[ImageContent]) -> str: ...
    async def listen(self, question: str, audio: AudioContent, more: PdfContent | None = None) -> str: ...
    async def go_on(self, history: list[Message], options: ChatRequestParameters | None = None) -> str: ...


def viewer(store: RunStore, *replies: str) -> tuple[Container, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    made = Container(models={"default": model}).register(Viewer)
    return made.register_instance(store, as_type=RunStore), model


@pytest.mark.parametrize("content", CONTENTS, ids=lambda each: type(each).__name__)
async def test_a_started_run_gets_the_parts_of_a_message_as_they_were_passed(content: Any) -> None:
    message = UserMessage(["What is this?", content])
    made, model = viewer(Kept(), "a plan")
    async with made:
        viewing = made.get(Viewer)
        run = await made.runs.start(viewing.look, "run", message)
        assert await made.runs.result(run) == "a plan"
        assert await viewing.look("run", message) == "a plan"
        with pytest.raises(RunConflictError, match="other arguments"):
            await viewing.look("run", UserMessage(["What is this?", ImageContent(data=PNG + b"0")]))
    assert [each.messages for each in model.requests] == [(message,)]


async def test_other_methods_get_contents_and_histories_as_they_were_passed() -> None:
    made, model = viewer(Kept(), "one", "two", "three")
    image, audio = CONTENTS[0], CONTENTS[5]
    assert isinstance(image, ImageContent)
    assert isinstance(audio, AudioContent)
    async with made:
        for run in (
            await made.runs.start(made.get(Viewer).compare, "Same?", [image, image]),
            await made.runs.start(made.get(Viewer).listen, "What?", audio),
            await made.runs.start(made.get(Viewer).go_on, MESSAGES),
        ):
            await made.runs.result(run)
    asked = {each.messages for each in model.requests}
    assert asked == {
        (UserMessage(["Same?", image, image]),),
        (UserMessage(["What?", audio]),),
        tuple(MESSAGES),
    }


@pytest.mark.parametrize("kind", [Message, UserMessage | None, dict[str, list[Message]], tuple[Message, ...]])
def test_messages_inside_of_other_types_are_stored_too(kind: Any) -> None:
    message = MESSAGES[1]
    value: Any = {dict[str, list[Message]]: {"a": MESSAGES}, tuple[Message, ...]: tuple(MESSAGES)}.get(kind, message)

    assert write_and_read(kind, value)[1] == value


def test_a_message_that_an_earlier_version_stored_is_read() -> None:
    from toolbox.runs.documents import RunDocument

    written = {"contents": [{"text": "Hi"}, {"url": "https://example.com/a.png"}], "name": None, "attributes": {}}
    made, _ = viewer(Kept())
    with made:
        plan = made._internals.host.plans[Viewer]["look"]
    document = RunDocument(arguments={"run": "run", "message": written})

    message = UserMessage(["Hi", ImageContent("https://example.com/a.png")])
    assert read_arguments("run", plan, document) == {"run": "run", "message": message}
