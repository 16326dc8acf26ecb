"""Real model servers, which `make compat` installs: aimock, and llama.cpp with a tiny random model."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import pytest

from tests.compat.conftest import node_module, python_with
from tests.conftest import free_port
from toolbox import (
    ChatRequest,
    CompleteResponse,
    FinishReason,
    ModelError,
    ModelHttpError,
    ModelTruncatedError,
    OpenAiChatModel,
    PartialResponse,
    ResponseFormat,
    Result,
    StreamEvent,
    TokenStream,
    ToolExecutionRequest,
    ToolSpecification,
    UserMessage,
    create_ai_service,
)
from toolbox.chat_streams import stream_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes

ROOT = Path(__file__).parent.parent.parent
FIXTURES = {
    "fixtures": [
        {
            "match": {"userMessage": "weather", "hasToolResult": False},
            "response": {
                "toolCalls": [
                    {"name": "forecast", "arguments": {"city": "Nürnberg", "days": 3}},
                    {"name": "now", "arguments": {}},
                ]
            },
        },
        {"match": {"userMessage": "weather", "hasToolResult": True}, "response": {"content": "Sunny, und 😀."}},
        {"match": {"userMessage": "person"}, "response": {"content": '{"name": "Ada", "age": 36}'}},
    ]
}


@contextmanager
def process(*command: str, ports: Sequence[int], path: str) -> Iterator[list[str]]:
    """A process with a server on each port, from when they answer until the end of the block."""
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        for port in ports:
            while not answers(f"http://127.0.0.1:{port}{path}"):
                if child.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"{command[0]} did not start")
                time.sleep(0.05)  # another process, with no other way to tell
        yield [f"http://127.0.0.1:{port}/v1" for port in ports]
    finally:
        child.terminate()
        child.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def aimock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = node_module("@copilotkit/aimock") / "dist" / "cli.js"
    fixtures = tmp_path_factory.mktemp("aimock") / "fixtures.json"
    fixtures.write_text(json.dumps(FIXTURES), encoding="utf-8")
    port = free_port()
    command = ("node", str(script), "-p", str(port), "-f", str(fixtures), "--strict")
    with process(*command, ports=[port], path="/health") as [url]:
        yield url


class Assistant(Protocol):
    async def ask(self, question: str) -> Result[str]: ...
    def stream(self, question: str) -> TokenStream: ...


def tools(ran: list[Any]) -> list[Any]:
    async def forecast(city: str, days: Annotated[int, "how many"]) -> str:
        ran.append((city, days))
        return "sunny"

    async def now() -> str:
        ran.append("now")
        return "noon"

    return [forecast, now]


@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_aimock_calls_tools_and_answers(aimock: str, wire: Any) -> None:
    ran: list[Any] = []
    model = OpenAiChatModel("gpt-4o", aimock, "test", wire=wire)
    service = create_ai_service(Assistant, chat_model=model, tools=tools(ran))

    result = await service.ask("How is the weather?")
    await model.aclose()

    assert result.content == "Sunny, und 😀."
    assert ran == [("Nürnberg", 3), "now"]
    assert result.token_usage is not None


@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_aimock_streams_tools_and_text(aimock: str, wire: Any) -> None:
    ran: list[Any] = []
    model = OpenAiChatModel("gpt-4o", aimock, "test", wire=wire)
    service = create_ai_service(Assistant, chat_model=model, tools=tools(ran))

    events = [event async for event in service.stream("How is the weather?")]
    await model.aclose()

    assert ran == [("Nürnberg", 3), "now"]
    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == "Sunny, und 😀."
    assert isinstance(events[-1], CompleteResponse)


async def test_aimock_errors_and_broken_streams_raise_model_errors(aimock: str) -> None:
    dropped = OpenAiChatModel("m", aimock, "test", max_retries=0, extra_headers={"x-aimock-chaos-disconnect": "1"})
    unmatched = OpenAiChatModel("m", aimock, "test", max_retries=0)

    for ask in (dropped.chat, lambda request: anext(stream_of(dropped, request))):
        with pytest.raises(ModelError):
            await ask(ChatRequest([UserMessage("weather")]))
    with pytest.raises(ModelHttpError):
        await unmatched.chat(ChatRequest([UserMessage("nothing that matches")]))
    await dropped.aclose()
    await unmatched.aclose()


# --- llama.cpp: what a random model says is noise, but its grammar is not


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Addresses of a model that says anything, and of one that calls tools."""
    python = python_with("models")
    ports = [free_port(), free_port()]
    folder = tmp_path_factory.mktemp("llama")
    command = (python, "-m", "tests.compat.tiny_llama", str(folder), *map(str, ports))
    with process(*command, ports=ports, path="/v1/models") as urls:
        yield urls


@pytest.fixture
def talking(llamas: list[str]) -> str:
    return llamas[0]


@pytest.fixture
def calling(llamas: list[str]) -> str:
    return llamas[1]


SHORT: dict[str, Any] = {"seed": 1, "max_tokens": 24}


async def test_llama_streams_the_same_text_that_it_returns_whole(talking: str) -> None:
    model = OpenAiChatModel("tiny", talking, **SHORT, temperature=0.0)
    request = ChatRequest([UserMessage("Hello")])

    whole = await model.chat(request)
    events = [event async for event in model.stream(request)]
    await model.aclose()

    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.token_usage is not None
    assert whole.token_usage.output_tokens == 24
    assert isinstance(events[-1], CompleteResponse)
    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == (
        events[-1].response.ai_message.text or ""
    )


async def test_llama_follows_a_response_format(talking: str) -> None:
    schema = {
        "type": "object",
        "properties": {"k": {"enum": ["a", "b"]}, "n": {"enum": [1, 2]}},
        "required": ["k", "n"],
    }
    model = OpenAiChatModel("tiny", talking, seed=1, max_tokens=200)

    reply = await model.chat(ChatRequest([UserMessage("Hello")], response_format=ResponseFormat("Answer", schema)))
    await model.aclose()

    value = json.loads(reply.ai_message.text or "")
    assert value["k"] in ("a", "b")
    assert value["n"] in (1, 2)


LOOK = ToolSpecification(
    "look", "Looks", {"type": "object", "properties": {"unit": {"enum": ["c", "k"]}}, "required": ["unit"]}
)
FORCED = ChatRequest([UserMessage("Hello")], [LOOK], tool_choice="required")


async def calls_of(url: str, limit: int, streamed: bool) -> list[ToolExecutionRequest]:
    model = OpenAiChatModel("tiny", url, seed=1, max_tokens=limit)
    try:
        *_, last = [event async for event in (model.stream(FORCED) if streamed else whole_of(model))]
    finally:
        await model.aclose()
    assert isinstance(last, CompleteResponse)
    return list(last.response.ai_message.tool_execution_requests)


async def whole_of(model: OpenAiChatModel) -> AsyncIterator[StreamEvent]:
    yield CompleteResponse(await model.chat(FORCED))


@pytest.mark.parametrize("streamed", [False, True])
async def test_llama_calls_tools_side_by_side(calling: str, streamed: bool) -> None:
    calls = await calls_of(calling, 400, streamed)

    assert len(calls) > 1
    assert len({each.id for each in calls}) == len(calls)
    assert {each.name for each in calls} == {"look"}
    assert {json.loads(each.arguments)["unit"] for each in calls} <= {"c", "k"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_truncated_llama_replies_contain_whole_calls_or_raise(calling: str, streamed: bool) -> None:
    cut = 0
    for limit in range(20, 50, 3):
        try:
            for call in await calls_of(calling, limit, streamed):
                assert json.loads(call.arguments)["unit"] in ("c", "k")
        except ModelTruncatedError:
            cut += 1

    assert cut
