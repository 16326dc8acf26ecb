"""One conversation on every wire: models for a scripted server, its replies, and what a request contains.

Not here: what only one wire can say.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.models import messages_api
from tests.models.scripted_server import Scripted, ScriptedServer, call, chunk, completion, sse, stream
from toolbox import (
    AnthropicChatModel,
    ChatRequest,
    ChatResponse,
    OpenAiChatModel,
    PydanticAiChatModel,
    StreamEvent,
)

WIRES = ("chat", "responses", "anthropic", "bridge")
OWN_WIRES = WIRES[:3]


class Model(Protocol):
    """A model of this library."""

    async def chat(self, request: ChatRequest) -> ChatResponse: ...
    def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]: ...
    async def aclose(self) -> None: ...


class Connect:
    """`model = connect(wire, server)`: models that send to a server, closed at the end of a test."""

    def __init__(self) -> None:
        self._models: list[Model] = []

    def __call__(self, wire: str, server: ScriptedServer, **options: Any) -> Model:
        """Return a model for this wire; `bridge` is a model of pydantic-ai."""
        model: Model
        match wire:
            case "anthropic":
                model = AnthropicChatModel("claude-sonnet-4-6", "test", server.url, **options)
            case "bridge":
                theirs = OpenAIChatModel("m", provider=OpenAIProvider(base_url=server.url, api_key="test"))
                model = PydanticAiChatModel(theirs, **options)
            case "chat":
                model = OpenAiChatModel("m", server.url, "test", **options)
            case _:
                model = OpenAiChatModel("m", server.url, "test", wire="responses", **options)
        self._models.append(model)
        return model

    async def aclose(self) -> None:
        for each in self._models:
            await each.aclose()


def reply_of(
    wire: str,
    said: str | None = None,
    calls: Sequence[tuple[str, str, Mapping[str, Any]]] = (),
    ending: str | None = None,
    streamed: bool = False,
    usage: Mapping[str, Any] | None = None,
) -> Scripted:
    """Return a reply with a text and calls, each with id, name and arguments. `ending` is the server's own word."""
    match wire:
        case "anthropic":
            blocks = [messages_api.text(said)] if said else []
            blocks += [messages_api.tool_use(name, dict(given), id=identity) for identity, name, given in calls]
            word = ending or ("tool_use" if calls else "end_turn")
            more = {} if usage is None else {"usage": usage}
            return (messages_api.streamed if streamed else messages_api.message)(*blocks, stop=word, **more)
        case "responses":
            return _response(said, calls, ending, streamed, usage)
        case _:
            requested = [
                call(name, json.dumps(given), id=identity, type="function", **({"index": at} if streamed else {}))
                for at, (identity, name, given) in enumerate(calls)
            ]
            message: dict[str, Any] = {"role": "assistant", "content": said}
            message |= {"tool_calls": requested} if requested else {}
            word = ending or ("tool_calls" if calls else "stop")
            if streamed:
                return stream(chunk(message), chunk({}, word), *([{"choices": [], "usage": usage}] if usage else []))
            return completion(message, word, **({} if usage is None else {"usage": usage}))


def _response(
    said: str | None,
    calls: Sequence[tuple[str, str, Mapping[str, Any]]],
    ending: str | None,
    streamed: bool,
    usage: Mapping[str, Any] | None,
) -> Scripted:
    output: list[dict[str, Any]] = [
        {"type": "function_call", "id": f"fc_{identity}", "call_id": identity, "name": name, "arguments": json.dumps(g)}
        for identity, name, g in calls
    ]
    if said:
        part = {"type": "output_text", "text": said, "annotations": []}
        output.insert(0, {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]})
    value = {
        "id": "resp_1",
        "object": "response",
        "status": "completed" if ending is None else "incomplete",
        "incomplete_details": None if ending is None else {"reason": ending},
        "output": output,
        "usage": usage,
    }
    if not streamed:
        return Scripted(json.dumps(value).encode())
    events: list[Any] = [
        {"type": f"response.output_item.{name}", "output_index": at, "item": item}
        for at, item in enumerate(output)
        for name in ("added", "done")
    ]
    last = {"type": "response.completed" if ending is None else "response.incomplete", "response": value}
    return Scripted(chunks=sse(*events, last, done=False), content_type="text/event-stream")


# --- requests


def parameters_in(body: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the tools in a request."""
    found = [each.get("function", each) for each in body["tools"]]
    return [each.get("parameters", each.get("input_schema")) for each in found]


def called_names_in(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tools that the messages of a request call."""
    for message in [*body.get("messages", ()), *body.get("input", ())]:
        yield from (each["function"]["name"] for each in message.get("tool_calls") or ())
        blocks = message.get("content")
        for block in blocks if isinstance(blocks, list) else ():
            if block.get("type", "").endswith("tool_use"):
                yield block["name"]
        if message.get("type") == "function_call":
            yield message["name"]


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts of a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)
