"""An application for front ends, and what their clients make of its streams."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response

from toolbox import AiMessage, Container, MemoryId, Progress, ToolRetry, application_scoped, register_ai_service, tool
from toolbox.conversations import Conversations
from toolbox.runs import Runs, ToolDeferred
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, ag_ui, install, vercel_ai


@application_scoped
class Refunds:
    def __init__(self) -> None:
        self.refunded: list[int] = []

    @tool(requires_approval=True)
    def refund(self, order: int) -> str:
        """Refund an order."""
        self.refunded.append(order)
        return f"refunded {order}"

    @tool(requires_approval=True, approvers=("manager",))
    def pay_out(self, euros: int) -> str:
        """Pay out euros."""
        return f"paid {euros}"

    @tool
    async def look_up(self, order: int, progress: Progress) -> dict[str, int]:
        """Look up an order."""
        await progress(1, 2, "half")
        return {"order": order, "euros": 20}

    @tool
    def fail(self) -> str:
        """Fail."""
        raise ToolRetry("no such order")

    @tool(deferred=True)
    def pick_date(self, hint: str) -> str:
        """Let the user pick a date."""
        raise ToolDeferred("the user picks a date")

    @tool(deferred=True)
    def ask_bank(self, question: str) -> str:
        """Ask the bank."""
        raise ToolDeferred("the bank answers by mail")


@register_ai_service(tools=Refunds)
class Clerk(Protocol):
    @tool
    async def help(self, question: str) -> str:
        """Help with refunds."""
        ...


@register_ai_service(tools=[Refunds, Clerk])
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


CLIENT_TOOLS = ("pick_date", "where_am_i")
MIA, ANN, BOB = ({"x-user": name} for name in ("mia", "ann", "bob"))  # mia is a manager

REFUND = tool_call("refund", {"order": 7})


def says(*calls: Any, text: str | None = None, thought: str | None = None) -> AiMessage:
    return AiMessage(text, calls, thought)


def find_user(request: Request) -> SecurityIdentity | None:
    name, tenant = request.headers.get("x-user"), request.headers.get("x-tenant", "")
    roles = {"manager"} if name == "mia" else set()
    return SecurityIdentity(name, roles, {"tenant": tuple(tenant.split("/"))}) if name else None


def made(
    replies: Iterable[Any],
    method: Any = Desk.chat,
    *services: type,
    models: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[FastAPI, Container]:
    """An application with both protocols. `options` are those of `respond`; only `ag_ui` has a `state`.

    `models` replace the model of `replies`.
    """
    model = replies if isinstance(replies, ScriptedChatModel) else ScriptedChatModel(replies)
    container = Container(models=models or {"default": model}, run_identity=("tenant",)).register(
        Desk, Clerk, *services
    )
    app = FastAPI()
    install(app, container, identity=find_user)
    state = options.pop("state", ())
    options = {"client_tools": CLIENT_TOOLS, **options}

    @app.post("/api/chat")
    async def chat(body: vercel_ai.ChatBody, runs: Inject[Runs]) -> Response:
        return await vercel_ai.respond(runs, method, body, **options)

    @app.get("/api/chat/{room}/stream")
    async def reconnect(room: str, runs: Inject[Runs]) -> Response:
        return await vercel_ai.reconnect(runs, method, room, client_tools=CLIENT_TOOLS)

    @app.post("/api/chat/{room}/stop")
    async def stop(room: str, runs: Inject[Runs]) -> bool:
        return await vercel_ai.stop(runs, method, room)

    service = services[0] if services else Desk

    @app.get("/api/chat/{room}/messages")
    async def messages(room: str, conversations: Inject[Conversations]) -> list[dict[str, Any]]:
        return await vercel_ai.history(conversations.of(service, room), client_tools=CLIENT_TOOLS)

    @app.get("/agui/{room}/messages")
    async def agui_messages(room: str, conversations: Inject[Conversations]) -> list[dict[str, Any]]:
        return await ag_ui.history(conversations.of(service, room))

    @app.post("/agui")
    async def agui(body: ag_ui.RunInput, runs: Inject[Runs]) -> Response:
        return await ag_ui.respond(runs, method, body, state=state, **options)

    return app, container


def said(text: str, room: str = "room", **more: Any) -> dict[str, Any]:
    """The body of `useChat` with a new message."""
    message = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": text}]}
    return {"id": room, "messages": [message], "trigger": "submit-message", **more}


def events_in(text: str) -> list[dict[str, Any]]:
    """The JSON of the frames of a response, without `[DONE]`."""
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame.startswith("data: ")]
    return [json.loads(frame) for frame in frames if frame != "[DONE]"]


# --- what `useChat` makes of its chunks

TEXT, ANY, FLAG = str, object, bool
CHUNKS: Mapping[str, tuple[Mapping[str, type], Mapping[str, type]]] = {
    "start": ({}, {"messageId": TEXT, "messageMetadata": ANY}),
    "start-step": ({}, {}),
    "finish-step": ({}, {}),
    "finish": ({}, {"finishReason": TEXT, "messageMetadata": ANY}),
    "message-metadata": ({"messageMetadata": ANY}, {}),
    "abort": ({}, {"reason": TEXT}),
    "error": ({"errorText": TEXT}, {}),
    **{f"{kind}-{step}": ({"id": TEXT}, {}) for kind in ("text", "reasoning") for step in ("start", "end")},
    **{f"{kind}-delta": ({"id": TEXT, "delta": TEXT}, {}) for kind in ("text", "reasoning")},
    "tool-input-start": ({"toolCallId": TEXT, "toolName": TEXT}, {"dynamic": FLAG}),
    "tool-input-delta": ({"toolCallId": TEXT, "inputTextDelta": TEXT}, {}),
    "tool-input-available": ({"toolCallId": TEXT, "toolName": TEXT, "input": ANY}, {"dynamic": FLAG}),
    "tool-approval-request": ({"approvalId": TEXT, "toolCallId": TEXT}, {"reason": TEXT}),
    "tool-output-available": ({"toolCallId": TEXT, "output": ANY}, {}),
    "tool-output-error": ({"toolCallId": TEXT, "errorText": TEXT}, {}),
    "tool-output-denied": ({"toolCallId": TEXT}, {}),
    "source-url": ({"sourceId": TEXT, "url": TEXT}, {"title": TEXT}),
    "source-document": ({"sourceId": TEXT, "mediaType": TEXT, "title": TEXT}, {"filename": TEXT}),
    "tool-input-error": ({"toolCallId": TEXT, "toolName": TEXT, "input": ANY, "errorText": TEXT}, {}),
}
"""The chunks that `ai` 6.0.326 and 7.0.173 both know (`ui-message-stream/ui-message-chunks.ts`): required and optional
fields. Both also take every type that begins with `data-`."""
FINISH_REASONS = {"stop", "length", "content-filter", "tool-calls", "error", "other"}


def check_chunk(chunk: dict[str, Any]) -> None:
    kind = chunk["type"]
    if kind.startswith("data-"):
        assert chunk.keys() <= {"type", "id", "data", "transient"}
        assert "data" in chunk
        return
    required, optional = CHUNKS[kind]
    assert required.keys() <= chunk.keys() - {"type"} <= required.keys() | optional.keys(), chunk
    for name, value in chunk.items():
        assert name == "type" or isinstance(value, {**required, **optional}[name]), chunk
    assert chunk.get("finishReason", "stop") in FINISH_REASONS


def message_of(chunks: Iterable[dict[str, Any]], message: dict[str, Any] | None = None) -> dict[str, Any]:
    """The message that the client shows: as `process-ui-message-stream.ts` makes it, `message` is its beginning.

    Fails for what makes the client throw.
    """
    message = json.loads(json.dumps(message)) if message is not None else {"id": None, "role": "assistant", "parts": []}
    parts: list[dict[str, Any]] = message["parts"]
    active: dict[str, dict[str, Any]] = {}

    def call(chunk: dict[str, Any]) -> dict[str, Any]:
        return next(each for each in reversed(parts) if each.get("toolCallId") == chunk["toolCallId"])

    for chunk in chunks:
        check_chunk(chunk)
        match chunk["type"]:
            case "start":
                message["id"] = chunk["messageId"]
            case "start-step":
                parts.append({"type": "step-start"})
            case "text-start" | "reasoning-start" as kind:
                assert chunk["id"] not in active
                active[chunk["id"]] = {"type": kind.partition("-")[0], "text": ""}
                parts.append(active[chunk["id"]])
            case "text-delta" | "reasoning-delta":
                active[chunk["id"]]["text"] += chunk["delta"]
            case "text-end" | "reasoning-end":
                del active[chunk["id"]]
            case "tool-input-start":
                assert all(each.get("toolCallId") != chunk["toolCallId"] for each in parts), "a call came twice"
                parts.append({"type": f"tool-{chunk['toolName']}", "toolCallId": chunk["toolCallId"], "raw": ""})
            case "tool-input-delta":
                call(chunk)["raw"] += chunk["inputTextDelta"]
            case "tool-input-available":
                shown = call(chunk)
                assert json.loads(shown.pop("raw") or "{}") == chunk["input"]
                shown |= {"state": "input-available", "input": chunk["input"]}
            case "tool-input-error":
                call(chunk).update(state="output-error", errorText=chunk["errorText"])
            case "tool-approval-request":
                call(chunk).update(state="approval-requested", approval={"id": chunk["approvalId"]})
            case "tool-output-available":
                call(chunk).update(state="output-available", output=chunk["output"])
            case "tool-output-error":
                call(chunk).update(state="output-error", errorText=chunk["errorText"])
            case "tool-output-denied":
                call(chunk).update(state="output-denied")
            case "finish":
                message["metadata"] = chunk.get("messageMetadata", message.get("metadata"))
            case kind if kind.startswith("data-"):
                known = [each for each in parts if each["type"] == kind and each.get("id") == chunk.get("id")]
                if known:
                    known[0]["data"] = chunk["data"]
                else:
                    parts.append(dict(chunk))
    return message


def answered(message: dict[str, Any], approved: bool = True, reason: str | None = None) -> dict[str, Any]:
    """The message after the user has decided about all requested approvals."""
    copy: dict[str, Any] = json.loads(json.dumps(message))
    for part in copy["parts"]:
        if part.get("state") == "approval-requested":
            part["state"] = "approval-responded"
            part["approval"] |= {"approved": approved} | ({} if reason is None else {"reason": reason})
    return copy


def with_output(message: dict[str, Any], name: str, output: Any) -> dict[str, Any]:
    """The message after the client has run its tool."""
    copy: dict[str, Any] = json.loads(json.dumps(message))
    for part in copy["parts"]:
        if part["type"] == f"tool-{name}" and part["state"] == "input-available":
            part |= {"state": "output-available", "output": output}
    return copy


def answers(message: dict[str, Any], room: str = "room") -> dict[str, Any]:
    """The body of `useChat` with the answers in a message."""
    return {"id": room, "messages": [message], "trigger": "submit-message", "messageId": message["id"]}


# --- what an AG-UI client posts


def posted(*messages: Any, room: str = "room", **more: Any) -> dict[str, Any]:
    """The body of an AG-UI client; a text is a message of the user."""
    written = [
        {"id": f"m{index}", "role": "user", "content": each} if isinstance(each, str) else each
        for index, each in enumerate(messages)
    ]
    about = {"tools": [], "context": [], "state": {}, "forwardedProps": {}}
    return {"threadId": room, "runId": "client-run", "messages": written, **about, **more}
