"""What users do in front ends: the gesture, what the model says, and what the page shows in the end.

`tests/compat` makes the gestures with the real clients, and can keep what they sent. `test_recorded_clients.py` sends
that again. The gestures are in `tests/compat/use_chat.js` and `tests/compat/ag_ui_client.js`.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from toolbox import AiMessage, ChatResponse, Container, MemoryId, register_ai_service, tool
from toolbox.chat import ChatRequest, FinishReason, PartialResponse, StreamEvent, TokenUsage
from toolbox.conversations import conversation_scoped
from toolbox.errors import ModelHttpError
from toolbox.handover import hands_over_to
from toolbox.retrieval import Passage, Query, Retriever
from toolbox.testing import ScriptedChatModel, tool_call

from .front_desk import REFUND, Desk, Refunds, made, says
from .test_vercel_ai import Gated

RECORDED = Path(__file__).parent / "recorded"
ROOM = "room"


class Handbook(Retriever):
    async def retrieve(self, query: Query) -> list[Passage]:
        return [Passage("Text.", source="https://example.org/leave", title="Leave"), Passage("More.", source="a.pdf")]


@register_ai_service(retrievers=Handbook)
class Hr(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service
class Billing(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service
class Greeter(Protocol):
    @hands_over_to(Billing.chat)
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@conversation_scoped
class Reservation(BaseModel):
    departure: str | None = None

    @tool
    def set_departure(self, day: str) -> str:
        """Set the departure."""
        self.departure = day
        return "ok"


@register_ai_service(tools=[Reservation, Refunds])
class Travel(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


def refuses() -> ModelHttpError:
    return ModelHttpError(500, "https://secret.example")


@register_ai_service(tools=Refunds, on_suspended="continue")
class Calm(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


class GatedAtHello(Gated):
    """A model that waits before the last pieces of a reply that begins with "Hello"."""

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        events = [each async for each in ScriptedChatModel.stream(self, request)]
        is_gated = any(isinstance(each, PartialResponse) and each.text.startswith("Hello") for each in events)
        for number, each in enumerate(events):
            if is_gated and number == len(events) - 2:
                self.waits.set()
                await self.may_go_on.wait()
            yield each


SURE = says(REFUND, text="Sure.")
TWO = says(REFUND, tool_call("refund", {"order": 8}), text="Sure.")
PICK = says(tool_call("pick_date", {"hint": "soon"}))
WHERE = says(tool_call("where_am_i", {"exact": True}))
LOOK = says(tool_call("look_up", {"order": 7}), tool_call("fail", {}), text="Let me see.", thought="Hm.")
COUNTED = ChatResponse(AiMessage("Hello."), TokenUsage(5, 2), FinishReason.STOP)
HELP = says(tool_call("help", {"question": "?"}))


@dataclass(frozen=True)
class Scene:
    """A gesture. `shows` are the messages on the page in the end, `stored` those of `history` if they differ.

    With `gated`, the model waits in a reply that begins with "Hello" until the page posts to `/go-on`: such a scene is
    not recorded.
    """

    gesture: str
    replies: Sequence[Any]
    shows: Sequence[str]
    stored: Sequence[str] | None = None
    name: str = ""
    refunded: Sequence[int] = ()
    errors: Sequence[str] = ()
    gated: bool = False
    services: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name or self.gesture

    def open(self) -> tuple[FastAPI, Container, ScriptedChatModel]:
        """Return the application, with what the gestures need besides."""
        model = (GatedAtHello if self.gated else ScriptedChatModel)(list(self.replies))
        method = self.services[0].chat if self.services else Desk.chat
        app, container = made(model, method, *self.services, **self.options)

        @app.post("/go-on")
        async def go_on() -> None:
            assert isinstance(model, Gated)
            model.may_go_on.set()

        @app.post("/tell")
        async def tell() -> None:
            [run] = await container.runs.list()
            await container.runs.tell(run.id, "only direct flights", by="ann")

        return app, container, model


PROBLEM = "The language model did not return a usable answer."
HI, SURE_WAITS = "user: hi", "assistant: Sure. [refund approval-requested]"
DONE = "assistant: Sure. [refund output-available] Done."
STOPPED = "assistant: Hello there "

LEFT_OR_STOPPED = [
    Scene(
        "loses its connection",
        ["Hello there you."],
        [HI, "assistant: Hello there you."],
        errors=["network error"],
        gated=True,
    ),
    Scene("stops", ["Hello there you."], [HI, STOPPED], gated=True),
    Scene("stops and reloads", ["Hello there you."], [HI, STOPPED], gated=True),
    Scene(
        "stops and goes on",
        ["Hello there you.", "Yes."],
        [HI, STOPPED, "user: again", "assistant: Yes."],
        gated=True,
    ),
]
"""Scenes that show the same in both clients."""

USE_CHAT = [
    Scene(
        "says",
        [LOOK, "Done."],
        [HI, "assistant: (Hm.) Let me see. [look_up output-available] [fail output-error] [tool-progress] Done."],
        [HI, "assistant: (Hm.) Let me see. [look_up output-available] [fail output-error] Done."],
    ),
    Scene("twice", ["Hello.", "Again."], [HI, "assistant: Hello.", "user: again", "assistant: Again."]),
    Scene("sends a file", ["Nice."], ["user: [file] Look", "assistant: Nice."]),
    Scene(
        "sends the last message only",
        [SURE, "Done.", "A2.", "A3.", "A4."],
        [HI, DONE, "user: changed", "assistant: A4."],
        refunded=[7],
    ),
    Scene("says", [refuses()], [HI, "assistant: "], [], "fails", errors=[PROBLEM]),
    Scene("says", [COUNTED], [HI, "assistant: Hello."], name="counts tokens"),
    # edit, answer again
    Scene("edits", ["A1.", "A2.", "A3."], ["user: changed", "assistant: A3."]),
    Scene("edits after a reload", ["A1.", "A2.", "A3."], [HI, "assistant: A1.", "user: changed", "assistant: A3."]),
    Scene("edits while a call waits", [SURE, "A2."], ["user: changed", "assistant: A2."]),
    Scene("regenerates", ["A1.", "A2.", "A3."], [HI, "assistant: A1.", "user: again", "assistant: A3."]),
    Scene("regenerates an earlier answer", ["A1.", "A2.", "A3."], [HI, "assistant: A3."]),
    Scene("regenerates a question", ["A1.", "A2.", "A3."], [HI, "assistant: A1.", "user: again", "assistant: A3."]),
    Scene("regenerates while a call waits", [SURE, "A2."], [HI, "assistant: A2."]),
    Scene(
        "regenerates what failed",
        ["A1.", refuses(), "A3."],
        [HI, "assistant: A1.", "user: again", "assistant: A3."],
        errors=[PROBLEM],
    ),
    # approvals
    Scene("approves", [SURE, "Done."], [HI, DONE], refunded=[7]),
    Scene(
        "approves what fails then, and goes on",
        [SURE, refuses(), "More."],
        [HI, "assistant: Sure. [refund output-available]", "user: again", "assistant: More."],
        refunded=[7],
        errors=[PROBLEM],
    ),
    Scene("rejects", [SURE, "No."], [HI, "assistant: Sure. [refund output-denied] No."]),
    Scene("approves after a reload", [SURE, "Done."], [HI, DONE], refunded=[7]),
    Scene("rejects after a reload", [SURE, "No."], [HI, "assistant: Sure. [refund output-denied] No."]),
    Scene("reloads after an approval", [SURE, "Done."], [HI, DONE], refunded=[7]),
    Scene("is slower than another tab", [SURE, "Done."], [HI, DONE], refunded=[7]),
    Scene(
        "answers two",
        [TWO, "Done."],
        [HI, "assistant: Sure. [refund output-available] [refund output-denied] Done."],
        refunded=[7],
    ),
    Scene(
        "answers one of two",
        [TWO, "Done."],
        [HI, "assistant: Sure. [refund output-available] [refund output-denied] Done."],
        refunded=[7],
    ),
    Scene(
        "answers one while another tab answers the other",
        [TWO, "Done."],
        [HI, "assistant: Sure. [refund output-available] [refund output-available] Done."],
        refunded=[7, 8],
    ),
    # a message while calls wait
    Scene(
        "writes instead",
        [SURE, "As you like."],
        [HI, SURE_WAITS, "user: never mind", "assistant: As you like."],
        [HI, "assistant: Sure. [refund output-denied]", "user: never mind", "assistant: As you like."],
    ),
    Scene(
        "writes instead and approves too late",
        [SURE, "As you like.", "More."],
        [
            HI,
            "assistant: Sure. [refund approval-responded]",
            "user: never mind",
            "assistant: As you like.",
            "user: again",
            "assistant: More.",
        ],
        [
            HI,
            "assistant: Sure. [refund output-denied]",
            "user: never mind",
            "assistant: As you like.",
            "user: again",
            "assistant: More.",
        ],
    ),
    Scene(
        "writes instead",
        [SURE],
        [HI, SURE_WAITS, "user: never mind"],
        [HI, SURE_WAITS],
        "writes where that is refused",
        errors=["The conversation waits for answers to pending calls."],
        options={"while_waiting": "refuse"},
    ),
    Scene(
        "writes instead and regenerates",
        [SURE, "As you like.", "Well."],
        [HI, SURE_WAITS, "user: never mind", "assistant: Well."],
        [HI, "assistant: Sure. [refund output-denied]", "user: never mind", "assistant: Well."],
    ),
    Scene(
        "writes instead and edits that",
        [SURE, "As you like.", "Well."],
        [HI, SURE_WAITS, "user: changed", "assistant: Well."],
        [HI, "assistant: Sure. [refund output-denied]", "user: changed", "assistant: Well."],
    ),
    Scene(
        "writes instead and edits the question",
        [SURE, "As you like.", "Well."],
        ["user: changed", "assistant: Well."],
    ),
    Scene("edits what is before a call that waits", ["A1.", SURE, "A3."], ["user: changed", "assistant: A3."]),
    Scene(
        "approves an earlier answer",
        [SURE, "Again.", "Done."],
        [HI, DONE, "user: again", "assistant: Again."],
        ["user: again", "assistant: Again.", HI, DONE],
        services=(Calm,),
    ),
    Scene(
        "writes while it streams",
        ["Hello there you.", "Second."],
        [HI, "assistant: Hello there you.", "user: again", "assistant: Second."],
        gated=True,
    ),
    # tools of the page
    Scene("runs a tool", [PICK, "Monday."], [HI, "assistant: [pick_date output-available] Monday."]),
    Scene("runs a tool when it is called", [PICK, "Monday."], [HI, "assistant: [pick_date output-available] Monday."]),
    Scene("runs a tool after a reload", [PICK, "Monday."], [HI, "assistant: [pick_date output-available] Monday."]),
    Scene("fails to run a tool", [PICK, "Never."], [HI, "assistant: [pick_date output-error] Never."]),
    Scene(
        "approves and runs a tool",
        [says(tool_call("pick_date", {"hint": "soon"}), REFUND), "Done."],
        [HI, "assistant: [pick_date output-available] [refund output-available] Done."],
        refunded=[7],
    ),
    # services, sources, messages that others add
    Scene(
        "approves",
        [HELP, says(REFUND), "helped", "Done."],
        [HI, "assistant: [help output-available] [subagent] [refund output-available] Done."],
        [HI, "assistant: [help output-available] Done."],
        "approves within a service",
        refunded=[7],
    ),
    Scene(
        "approves after a reload",
        [HELP, says(REFUND), "helped", "Done."],
        [HI, "assistant: [help output-available] [subagent] [refund output-available] Done."],
        [HI, "assistant: [help output-available] Done."],
        "approves within a service after a reload",
        refunded=[7],
    ),
    Scene(
        "says",
        [tool_call("transfer_to_billing", {}), "Billing."],
        [HI, "assistant: [transfer_to_billing output-available] [handed-over] Billing."],
        [HI, "assistant: [transfer_to_billing output-available] Billing."],
        "is handed over",
        services=(Greeter, Billing),
        options={"client_tools": ()},
    ),
    Scene(
        "says",
        ["30 days [1]."],
        [HI, "assistant: [source-url] [source-document] 30 days [1]."],
        name="gets sources",
        services=(Hr, Handbook),
    ),
    Scene(
        "is told something before it approves",
        [SURE, "Direct, then."],
        [HI, "assistant: Sure. [refund output-available] [told] Direct, then."],
        refunded=[7],
    ),
    # reload and stop
    Scene("reloads", ["A1.", "A2."], [HI, "assistant: A1.", "user: again", "assistant: A2."]),
    Scene("reloads while it waits", [SURE], [HI, SURE_WAITS]),
    Scene("reloads while it streams", ["Hello there you."], [HI, "assistant: Hello there you."], gated=True),
    *LEFT_OR_STOPPED,
    Scene(
        "stops an answer after an approval",
        [SURE, "Hello there you."],
        [HI, "assistant: Sure. [refund output-available] Hello there "],
        refunded=[7],
        gated=True,
    ),
    Scene("stops and regenerates", ["Hello there you.", "Yes."], [HI, "assistant: Yes."], gated=True),
    Scene("stops and edits", ["Hello there you.", "Yes."], ["user: changed", "assistant: Yes."], gated=True),
    Scene("stops what waits and regenerates", [SURE, "Yes."], [HI, "assistant: Yes."]),
    Scene("stops what waits", [SURE], [HI, "assistant: Sure. [refund output-error]"]),
    Scene("answers what was stopped", [SURE], [HI, "assistant: Sure. [refund output-error]"]),
]

CALLS, DONE_AGUI = "assistant: Sure. refund", [HI, "assistant: Sure. refund", "tool: refunded 7", "assistant: Done."]
AG_UI = [
    Scene(
        "says",
        [LOOK, "Done."],
        [
            HI,
            "reasoning: Hm.",
            "assistant: Let me see. look_up fail",
            'tool: {"order":7,"euros":20}',
            "tool: no such order",
            "assistant: Done.",
        ],
    ),
    Scene("twice", ["Hello.", "Again."], [HI, "assistant: Hello.", "user: again", "assistant: Again."]),
    Scene("sends an image", ["Nice."], ["user: Look [image]", "assistant: Nice."]),
    Scene("says", [refuses()], [HI], [], "fails", errors=[PROBLEM]),
    # approvals
    Scene("approves", [SURE, "Done."], DONE_AGUI, refunded=[7]),
    Scene("approves with true", [SURE, "Done."], DONE_AGUI, refunded=[7]),
    Scene(
        "approves what fails then, and goes on",
        [SURE, refuses(), "More."],
        [HI, CALLS, "tool: refunded 7", "user: again", "assistant: More."],
        refunded=[7],
        errors=[PROBLEM],
    ),
    Scene("edits", [SURE, "Done."], [HI, CALLS, "tool: refunded 8", "assistant: Done."], refunded=[8]),
    Scene("rejects", [SURE, "No."], [HI, CALLS, "tool: too much", "assistant: No."]),
    Scene("cancels", [SURE, "No."], [HI, CALLS, "tool: The call was rejected.", "assistant: No."]),
    Scene(
        "answers two",
        [TWO, "Done."],
        [HI, "assistant: Sure. refund refund", "tool: refunded 7", "tool: The call was rejected.", "assistant: Done."],
        refunded=[7],
    ),
    Scene("approves after a reload", [SURE, "Done."], DONE_AGUI, refunded=[7]),
    Scene("reloads after an approval", [SURE, "Done."], DONE_AGUI, refunded=[7]),
    Scene("is slower than another tab", [SURE, "Done."], DONE_AGUI, refunded=[7]),
    Scene(
        "answers what another tab has answered in part",
        [TWO, "Done."],
        [HI, "assistant: Sure. refund refund", "tool: refunded 7", "tool: The call was rejected.", "assistant: Done."],
        refunded=[7],
    ),
    Scene(
        "answers a question",
        [says(tool_call("ask_bank", {"question": "?"})), "Done."],
        [HI, "assistant: ask_bank", "tool: by mail", "assistant: Done."],
    ),
    # a message while calls wait
    Scene(
        "writes instead",
        [SURE, "As you like."],
        [HI, CALLS, "user: never mind", "assistant: As you like."],
        [HI, CALLS, "tool: The call was rejected.", "user: never mind", "assistant: As you like."],
    ),
    Scene(
        "writes instead and goes on",
        [SURE, "As you like.", "More."],
        [HI, CALLS, "user: never mind", "assistant: As you like.", "user: again", "assistant: More."],
        [
            HI,
            CALLS,
            "tool: The call was rejected.",
            "user: never mind",
            "assistant: As you like.",
            "user: again",
            "assistant: More.",
        ],
    ),
    Scene(
        "writes after a reload",
        [SURE, "As you like."],
        [HI, CALLS, "user: never mind", "assistant: As you like."],
        [HI, CALLS, "tool: the user wrote instead", "user: never mind", "assistant: As you like."],
    ),
    # tools of the page
    Scene("runs a tool", [WHERE, "In Rome."], [HI, "assistant: where_am_i", "tool: Rome", "assistant: In Rome."]),
    Scene(
        "runs a tool after a reload",
        [WHERE, "In Rome."],
        [HI, "assistant: where_am_i", "tool: Rome", "assistant: In Rome."],
    ),
    Scene(
        "fails to run a tool",
        [WHERE, "Lost."],
        [HI, "assistant: where_am_i", "tool: ", "assistant: Lost."],
        [HI, "assistant: where_am_i", "tool: no signal", "assistant: Lost."],
    ),
    Scene(
        "approves and runs a tool",
        [says(tool_call("where_am_i", {}), REFUND), "Done."],
        [HI, "assistant: where_am_i refund", "tool: refunded 7", "tool: Rome", "assistant: Done."],
        [HI, "assistant: where_am_i refund", "tool: Rome", "tool: refunded 7", "assistant: Done."],
        refunded=[7],
    ),
    Scene(
        "runs one of two tools, then the other",
        [says(tool_call("where_am_i", {}), tool_call("where_am_i", {"exact": True})), "Here."],
        [HI, "assistant: where_am_i where_am_i", "tool: Rome", "tool: Oslo", "assistant: Here."],
    ),
    Scene(
        "runs a tool and writes",
        [WHERE, "In Rome."],
        [HI, "assistant: where_am_i", "tool: Rome", "user: hurry", "assistant: In Rome."],
    ),
    Scene(
        "writes instead of running a tool",
        [WHERE, "As you like."],
        [HI, "assistant: where_am_i", "user: never mind", "assistant: As you like."],
        [HI, "assistant: where_am_i", "tool: the user wrote instead", "user: never mind", "assistant: As you like."],
    ),
    Scene("offers an unknown tool", [], [HI], [], errors=["'format_disk' is not one that a client may offer."]),
    # services, sources, state
    Scene(
        "approves",
        [HELP, says(REFUND), "helped", "Done."],
        [HI, "assistant: help", "tool: helped", "assistant: refund", "tool: ", "assistant: Done."],
        [HI, "assistant: help", "tool: helped", "assistant: Done."],
        "approves within a service",
        refunded=[7],
    ),
    Scene(
        "says",
        [tool_call("transfer_to_billing", {}), "Billing."],
        [HI, "assistant: transfer_to_billing", "tool: Handed over to Billing.chat.", "assistant: Billing."],
        name="is handed over",
        services=(Greeter, Billing),
        options={"client_tools": ("where_am_i",)},
    ),
    Scene("says", ["30 days [1]."], [HI, "assistant: 30 days [1]."], name="gets sources", services=(Hr, Handbook)),
    Scene(
        "says",
        [says(tool_call("set_departure", {"day": "monday"})), "Done."],
        [HI, "assistant: set_departure", "tool: ok", "assistant: Done."],
        name="gets the state",
        services=(Travel, Reservation),
        options={"state": (Reservation,)},
    ),
    # reload and stop
    Scene("reloads", ["A1.", "A2."], [HI, "assistant: A1.", "user: again", "assistant: A2."]),
    Scene("reloads while it waits", [SURE], [HI, CALLS]),
    Scene(
        "reloads while it streams",
        ["Hello there you."],
        [HI, "assistant: Hello there you."],
        errors=["aborted"],
        gated=True,
    ),
    *LEFT_OR_STOPPED,
    Scene(
        "stops an answer after an approval",
        [SURE, "Hello there you."],
        [HI, CALLS, "tool: refunded 7", STOPPED],
        refunded=[7],
        gated=True,
    ),
    Scene("stops what waits", [SURE], [HI, CALLS, "tool: interrupted"]),
    Scene("answers what was stopped", [SURE], [HI, CALLS, "tool: interrupted"]),
]


# --- what pages show


def shown_by_use_chat(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each message of `useChat`."""

    def show(part: Mapping[str, Any]) -> str:
        kind = part["type"].removeprefix("tool-").removeprefix("data-")
        if kind == "text":
            return str(part["text"])
        if kind == "reasoning":
            return f"({part['text']})"
        return f"[{kind} {part['state']}]" if "toolCallId" in part else f"[{kind}]"

    return [
        f"{each['role']}: {' '.join(show(part) for part in each['parts'] if part['type'] != 'step-start')}"
        for each in messages
    ]


def shown_by_ag_ui(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each message of an AG-UI client, without those of services within."""

    def show(message: Mapping[str, Any]) -> str:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        texts = [each["text"] if each["type"] == "text" else f"[{each['type']}]" for each in parts]
        names = [each["function"]["name"] for each in message.get("toolCalls") or ()]
        return f"{message['role']}: {' '.join([*filter(None, texts), *names])}"

    return [show(each) for each in messages if "subagentRunId" not in each]


# --- recorded requests


def read_recorded(client: str) -> dict[str, list[dict[str, Any]]]:
    """The requests of each scene, by its name."""
    found: dict[str, list[dict[str, Any]]] = json.loads((RECORDED / f"{client}.json").read_text("utf-8"))["scenes"]
    return found


def write_recorded(client: str, versions: Mapping[str, str], scenes: Mapping[str, Sequence[Any]]) -> None:
    """Keep the requests of each scene, one a line, and the versions of the packages that sent them."""
    written = (
        f"{json.dumps(name)}: [\n{lines}\n]"
        for name, sent in scenes.items()
        for lines in [",\n".join(map(json.dumps, sent))]
    )
    text = f'{{"versions": {json.dumps(versions)}, "scenes": {{\n' + ",\n".join(written) + "\n}}\n"
    (RECORDED / f"{client}.json").write_text(text, "utf-8")


async def run_ids(container: Container) -> list[str]:
    """The ids of all runs, the oldest first: `RUN1` is the first one in recorded requests."""
    return [each.id for each in reversed(await container.runs.list(limit=100))]


def with_names_for_runs(requests: Any, ids: Sequence[str]) -> Any:
    """Recorded requests without the ids of their runs."""
    text = json.dumps(requests)
    for number, each in enumerate(ids, 1):
        text = text.replace(each, f"RUN{number}")
    return json.loads(text)


def with_ids_of_runs(request: Any, ids: Sequence[str]) -> Any:
    """A recorded request with the ids of the runs of this program."""
    return json.loads(re.sub(r"RUN(\d+)", lambda found: ids[int(found[1]) - 1], json.dumps(request)))
