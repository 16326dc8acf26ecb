"""What is stored of runs: the JSON of each kind of value, compared with files that earlier releases wrote.

In a rolling deployment, the previous release reads what this one writes. A file in `stored/` therefore only changes
together with a reason why the previous release can read the new form.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from toolbox import (
    AiMessage,
    AudioContent,
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    FinishReason,
    ImageContent,
    InnerEvent,
    IntermediateResponse,
    InvocationContext,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    PdfContent,
    Retrieved,
    SystemMessage,
    TextContent,
    TokenUsage,
    ToldEvent,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolProgress,
    ToolRetry,
    TranscriptError,
    UserMessage,
)
from toolbox.chat import PendingCall, RunSuspended
from toolbox.deferred_answers import ToolOrigin
from toolbox.limits import Usage, UsageLimits
from toolbox.passages import Passage
from toolbox.runs.documents import (
    GivenAnswer,
    OuterCall,
    RunDocument,
    UnreadableDocumentError,
    WaitingCall,
    read_stored_json,
    reduced_document,
    shown_document,
)
from toolbox.runs.event_log import event_from_json, event_to_json
from toolbox.runs.run_answers import Answer, HistoryEntry
from toolbox.runs.service_calls.record_contents import (
    has_run_in,
    reply_from_dict,
    reply_to_json,
    result_from_dict,
    result_to_json,
    snapshot_to_json,
    state_from_dict,
)
from toolbox.service_events import ServiceWork
from toolbox.services.loop import ModelReplied
from toolbox.services.outputs import Compensation
from toolbox.services.recording_needs import FAILURE, MODEL_CHOICE, SUMMARY, RecordedFailure, SummaryReply
from toolbox.services.retrieving import SOURCES
from toolbox.services.state import PendingToolCall, ReachedLimit, State
from toolbox.tools.results import EncodedInFull
from toolbox.tools.tool_calls import ToolOutcome

STORED = Path(__file__).with_name("stored")

AT = datetime(2026, 1, 2, 3, 4, 5, 678900, UTC)
LATER = datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
REQUEST = ToolExecutionRequest("call_1", "pay", '{"amount": 3}', {"signature": "s"})
OTHER = ToolExecutionRequest("call_2", "seats", "not { json")
EXECUTION = ToolExecution(
    REQUEST, "paid", {"id": 7, "tags": [1, 2.5, None]}, False, AT, 0.25, {"cached": True}, {"amount": 4}
)
FAILED = ToolExecution(OTHER, "no\ud800seats", None, True, LATER, 1.0)
USAGE = TokenUsage(10, 20, 3, 4, 5)
CONTENTS = (
    TextContent("Is this it?"),
    ImageContent(data=b"\x89PNG", mime_type="image/png", detail="low"),
    ImageContent("https://example.com/a.png"),
    ImageContent(data="aGVsbG8=", mime_type="image/jpeg"),
    PdfContent(data=b"%PDF-1.7", name="a.pdf"),
    PdfContent("https://example.com/a.pdf"),
    AudioContent(b"RIFF", "audio/wav"),
)
REPLY = AiMessage("Here \u2603", (REQUEST, OTHER), "thinking", {"annotations": [1]}, "bot")
RESPONSE = ChatResponse(REPLY, USAGE, FinishReason.TOOL_EXECUTION, "resp_1", "gpt", {"service_tier": "flex"})
MESSAGES = (
    UserMessage(CONTENTS, "ann", {"cache_control": {"type": "ephemeral"}}),
    AiMessage(None, (OTHER,)),
    ToolExecutionResultMessage("call_2", "seats", "no seats", True, {"k": 1}, (CONTENTS[1],)),
    AiMessage("", (), None, {"deep": {"big": 2**70}}),
)
SOURCES_WITHOUT_TEXT = (Passage("", "a.md", "A", 0.5, {"page": 1}), Passage(""))
FULL_STATE = State(
    system=SystemMessage("Be kind.", "developer", "boss", {"cache_control": {"type": "ephemeral"}}),
    history=(SystemMessage("Older."), UserMessage("Hi"), AiMessage("Hello")),
    messages=MESSAGES,
    prompted=UserMessage("Hi. Answer as JSON."),
    mode="schema",
    offered=("pay", "seats"),
    unremembered=frozenset({3, 1}),
    rounds=2,
    output_retries=1,
    answer_retries=2,
    executions=(EXECUTION, FAILED),
    token_usage=USAGE,
    response=RESPONSE,
    pending=(
        PendingToolCall(REQUEST, "finished", ToolOutcome(EXECUTION, (CONTENTS[0],), False, True)),
        PendingToolCall(OTHER, "finished", ToolOutcome(FAILED, (), True, False)),
        PendingToolCall(OTHER, "suspended", None, {"place": "0/1", "kind": "approval", "n": [1]}),
        PendingToolCall(REQUEST),
    ),
    failed=frozenset({1}),
    ran=frozenset({0, 1}),
    undone=frozenset({0}),
    sent=("pay",),
    compensations=(Compensation("pay", {"amount": 4}), Compensation("seats", {}, "ValueError: no")),
    arguments={0: {"amount": 4}, 1: {}},
    model="strong",
    recalled=2,
    compactions=1,
    omitted=frozenset({2}),
    noted_usage=TokenUsage(1, 2),
    stopped=ReachedLimit("cost", Decimal("0.5"), Decimal("0.75"), Usage(3, 2, USAGE, Decimal("0.75")), AT),
    added=frozenset({2}),
)
STATES = {
    "full": FULL_STATE,
    "new": State(None, (), ()),
    "passages": State(None, (), (), passages=SOURCES_WITHOUT_TEXT),
    "empty_values": State(
        None, (), (AiMessage(),), sent=(), response=ChatResponse(AiMessage(), finish_reason=FinishReason.OTHER)
    ),
    "prompt": State(SystemMessage(""), (), (UserMessage(""),), mode="tool"),
}

ORIGIN = ToolOrigin("weather", "abc", "def")
CALL = PendingCall("0/1", "pay", {"amount": 3}, "m.Shop", "approval", "large", {"url": "x"}, "ann", "call_1", LATER)
WAITING = (
    WaitingCall(
        call=CALL,
        method="buy",
        approvers=("boss", "cfo"),
        not_self=True,
        outer=(OuterCall(id="0", service="m.Desk", method="ask", tool_name="shop", arguments='{"q": 1}'),),
        origin=ORIGIN,
        since=AT,
        requested='{"amount": 3}',
        expires_after=timedelta(hours=1),
    ),
    WaitingCall(call=PendingCall("1", "wait", {}, "m.Shop", "deferred", started_by="ann"), method="buy"),
)
ANSWERS = (
    GivenAnswer(call_id="0", answer=Answer("approve", {"amount": 2}), asked={"amount": 3}, by="cfo", origin=ORIGIN),
    GivenAnswer(
        call_id="0.2",
        answer=Answer("respond", None, [1, None]),
        asked={},
        by={"name": "ann", "roles": ["a"], "attributes": {"k": 1}},
    ),
    GivenAnswer(call_id="2", answer=Answer("reject", reason="no"), asked={}),
)
DOCUMENTS = {
    "full": RunDocument(
        arguments={"question": "Hi", "n": [1, {"a": None}]},
        unwritten=("stream",),
        output="0123456789abcdef",
        seeds={"m.Tenant": {"name": "acme"}},
        identity={"name": "ann", "roles": ["a", "b"], "attributes": {"k": [1]}},
        attributes={"channel": "web"},
        waiting=WAITING,
        answers=ANSWERS,
        history=(
            HistoryEntry(AT, "ann", "0", "pay", "approve"),
            HistoryEntry(LATER, None, None, None, "cancel", "late"),
        ),
        result=[{"text": "done", "at": None}],
        error_type="ValueError",
        error_text="no \u2603",
        reason="late",
        follows=True,
        added_by="POST /chat",
        cancels=True,
        limits=UsageLimits(1, 2, 3, 4, 5, Decimal("0.50")),
        memory_id="room 7",
        details={"state": json.loads(FULL_STATE.to_json()), "finish_reason": "stop", "response_id": "r"},
        trace={"traceparent": "00-1"},
        dropped=("secret",),
        digest="salt:hash",
        is_checked=True,
        message={"type": "user", "contents": [{"type": "text", "text": "Hi"}]},
        is_reduced=False,
        identity_attributes={"k": [1]},
        attempts=3,
        failures=2,
        asks_again=True,
        client_tools=({"name": "pick_date", "description": None, "parameters": {"type": "object", "properties": {}}},),
        beans_until="1",
        front_end=True,
    ),
    "new": RunDocument(),
    "limits": RunDocument(limits=UsageLimits(tool_calls=3), is_reduced=True),
}
EVENTS = {
    "PartialResponse": PartialResponse("a\u2603"),
    "PartialReasoning": PartialReasoning(""),
    "PartialToolCall": PartialToolCall(1, "call_1", "pay", '{"a'),
    "PartialToolCall.unnamed": PartialToolCall(0, None, None, ""),
    "CompleteToolCall": CompleteToolCall(1, REQUEST),
    "CompleteResponse": CompleteResponse(RESPONSE),
    "IntermediateResponse": IntermediateResponse(ChatResponse(AiMessage("a"))),
    "BeforeToolExecution": BeforeToolExecution(OTHER),
    "ToolExecuted": ToolExecuted(EXECUTION),
    "ToolExecuted.failed": ToolExecuted(FAILED),
    "ToolProgress": ToolProgress(REQUEST, 1, 2.5, "half"),
    "ToolProgress.unknown": ToolProgress(OTHER, 0.5),
    "RunSuspended": RunSuspended(
        "run", (CALL, replace(CALL, id="1", kind="unknown_outcome", call_id="", expires_at=None))
    ),
    "RunSuspended.empty": RunSuspended("run", ()),
    "Retrieved": Retrieved(SOURCES_WITHOUT_TEXT),
    "ToldEvent": ToldEvent(InvocationContext(object, "ask", "room", outer_invocation_id="o"), MESSAGES[0], "ann"),
    "ServiceWork": ServiceWork("0.2", "0", "", "shop.Desk", "replied", "a"),
    "InnerEvent": InnerEvent(InvocationContext(object, "ask"), "shop.Desk", "call_1", ToolExecuted(EXECUTION)),
}
BEFORE = STATES["full"].changed(messages=MESSAGES[:2], executions=(EXECUTION,))
REPLIED = ModelReplied(RESPONSE, (AiMessage("aside"),), sent=("pay",))
RESULT = EncodedInFull(
    "paid",
    {"id": 7},
    is_error=True,
    contents=(CONTENTS[1],),
    attributes={"cache_control": {"type": "ephemeral"}},
    failed=True,
)
RECORDS = {
    "reply": reply_to_json(FULL_STATE, None, REPLIED, {"model_calls": 1}, [1]),
    "reply.after": reply_to_json(FULL_STATE, BEFORE, REPLIED),
    "model": json.dumps({"version": 1, **MODEL_CHOICE.write("strong")}),
    "sources": json.dumps({"version": 1, **SOURCES.write(SOURCES_WITHOUT_TEXT)}),
    "snapshot": snapshot_to_json(FULL_STATE, 3, 1.5, {"limits": {"a": 1}}, {"model_calls": 1}),
    "snapshot.new": snapshot_to_json(STATES["new"], 0, None, {}),
    "failure": json.dumps({"version": 1, **FAILURE.write(RecordedFailure.of(ValueError("no"), [{"position": 0}]))}),
    "summary": json.dumps({"version": 1, **SUMMARY.write(SummaryReply("0123", RESPONSE))}),
    "result": result_to_json(RESULT, {"amount": 4}, has_run=True, is_judged=True),
    "result.error": result_to_json(ValueError("no\ud800"), has_run=False),
    "result.retry": result_to_json(ToolRetry("again"), has_run=False),
}


def stored(name: str) -> dict[str, Any]:
    return dict(json.loads((STORED / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_stored_as_before_and_read_again(name: str) -> None:
    expected = stored("states")[name]

    assert json.loads(STATES[name].to_json()) == expected
    assert State.from_json(json.dumps(expected)) == STATES[name]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_stored_as_before_and_read_again(name: str) -> None:
    expected = stored("documents")[name]

    assert json.loads(DOCUMENTS[name].to_json()) == expected
    assert RunDocument.from_json(json.dumps(expected)) == DOCUMENTS[name]


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_stored_as_before_and_read_again(name: str) -> None:
    expected = stored("events")[name]

    written = json.loads(event_to_json(EVENTS[name]))
    if (context := written.get("context")) is not None:
        context["id"] = expected["context"]["id"]  # a new one in each process
    assert written == expected
    assert event_from_json(json.dumps(expected)) == EVENTS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_stored_as_before(name: str) -> None:
    assert json.loads(RECORDS[name]) == stored("records")[name]


def test_records_are_read_again() -> None:
    records = {name: read_stored_json(json.dumps(each)) for name, each in stored("records").items()}

    assert state_from_dict(records["reply"]["before"], None) == FULL_STATE
    assert state_from_dict(records["reply.after"]["before"], BEFORE) == FULL_STATE
    assert state_from_dict(records["snapshot"]["state"], None) == FULL_STATE
    assert reply_from_dict(records["reply"]) == REPLIED
    result = result_from_dict(records["result"])
    assert isinstance(result, EncodedInFull)
    assert (result.text, result.value, result.is_error) == (RESULT.text, RESULT.value, RESULT.is_error)
    assert (result.contents, result.attributes, result.failed) == (RESULT.contents, RESULT.attributes, True)
    assert has_run_in(records["result"])
    assert isinstance(result_from_dict(records["result.retry"]), ToolRetry)
    assert SUMMARY.read(records["summary"]) == SummaryReply("0123", RESPONSE)


@pytest.mark.parametrize("make", [shown_document, reduced_document])
def test_a_part_of_a_document_is_stored_as_before(make: Callable[[str], str]) -> None:
    text = json.dumps(stored("documents")["full"])

    assert json.loads(make(text)) == stored("parts")[make.__name__]


# --- earlier and later releases

ADDED_TO_STATES = {
    *("answer_retries", "failed", "ran", "undone", "sent", "model", "compensations", "arguments"),
    *("recalled", "compactions", "omitted", "noted_usage"),
}
WITHOUT_ARGUMENTS = replace(EXECUTION, arguments={})
ADDED_TO_DOCUMENTS = {
    *("added_by", "cancels", "limits", "memory_id", "details", "trace", "dropped", "digest", "is_checked", "message"),
    *("is_reduced", "identity_attributes", "attempts", "failures", "asks_again", "client_tools", "beans_until"),
    "front_end",
}


def without(written: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if name not in names}


def test_a_state_of_an_earlier_release_is_read() -> None:
    written = without(stored("states")["full"], ADDED_TO_STATES)
    for execution in (*written["executions"], *(each["execution"] for each in written["pending"][:2])):
        del execution["arguments"]
    for call in written["pending"]:
        for name in ("failed", "ran"):
            call.pop(name, None)

    state = State.from_json(json.dumps(written))

    assert state.ran == {0}
    assert (state.sent, state.model, state.answer_retries, state.arguments) == (None, None, 0, {})
    assert state.executions == (WITHOUT_ARGUMENTS, FAILED)
    first, second, *_ = state.pending
    assert first.outcome == ToolOutcome(WITHOUT_ARGUMENTS, (CONTENTS[0],), False, True)
    assert second.outcome == ToolOutcome(FAILED, (), False, False)


def test_an_earlier_release_wrote_changed_arguments_beside_the_call_that_finished() -> None:
    written = stored("states")["full"]
    del written["pending"][0]["execution"]["arguments"]
    written["pending"][0]["arguments"] = {"amount": 5}

    outcome = State.from_json(json.dumps(written)).pending[0].outcome

    assert outcome == ToolOutcome(replace(EXECUTION, arguments={"amount": 5}), (CONTENTS[0],), False, True)


def test_a_failed_tool_of_an_earlier_release_has_not_run() -> None:
    written = {**without(stored("states")["full"], {"ran"}), "failed": [0]}

    assert State.from_json(json.dumps(written)).ran == frozenset()


def test_the_result_of_a_tool_of_an_earlier_release_says_if_it_has_run() -> None:
    judged = without(stored("records")["result"], {"ran", "failed"})
    accepted = {**judged, "message": {**judged["message"], "is_error": False}}
    error = without(stored("records")["result.error"], {"ran"})

    assert [has_run_in(each) for each in (judged, accepted, error)] == [False, True, False]
    result = result_from_dict(judged)
    assert isinstance(result, EncodedInFull)
    assert not result.failed


def test_what_is_remembered_is_written_only_where_something_is() -> None:
    call = replace(CALL, may_remember=True)
    event = RunSuspended("run", (CALL, replace(call, id="1")))
    entry = HistoryEntry(AT, "ann", "1", "pay", "approve", remembered=True)
    document = RunDocument(identity=DOCUMENTS["full"].identity, waiting=(WaitingCall(call=call, method="buy"),))
    document = document.changed(history=(entry, replace(entry, remembered=False)))

    assert event_from_json(event_to_json(event)) == event
    assert RunDocument.from_json(document.to_json()) == document
    for written in (DOCUMENTS["full"].to_json(), event_to_json(EVENTS["RunSuspended"])):
        assert "may_remember" not in written
        assert '"remembered"' not in written


def test_a_document_of_an_earlier_release_is_read() -> None:
    written = without(stored("documents")["full"], ADDED_TO_DOCUMENTS)
    for waiting in written["waiting"]:
        for name in ("call_id", "outer", "origin", "since", "requested", "expires_after", "expires_at"):
            del waiting[name]
    for answer in written["answers"]:
        del answer["origin"]

    document = RunDocument.from_json(json.dumps(written))

    assert document.waiting == (
        WaitingCall(
            call=replace(CALL, call_id="", expires_at=None), method="buy", approvers=("boss", "cfo"), not_self=True
        ),
        WAITING[1],
    )
    assert document.answers == tuple(replace(each, origin=None) for each in ANSWERS)
    assert document.changed(waiting=(), answers=()) == RunDocument(
        **{
            name: getattr(DOCUMENTS["full"], name)
            for name in ("arguments", "unwritten", "output", "seeds", "identity", "attributes", "history", "result")
        },
        **{name: getattr(DOCUMENTS["full"], name) for name in ("error_type", "error_text", "reason", "follows")},
    )


def test_an_event_of_an_earlier_release_is_read() -> None:
    written = without(stored("events")["RunSuspended"], {"started_by", "call_ids"})

    event = event_from_json(json.dumps(written))

    assert isinstance(event, RunSuspended)
    assert event.pending[0] == replace(CALL, started_by=None, call_id="")


PROGRAM_VALUES = {"arguments", "attributes", "details", "result_object"}
"""Fields whose values come from models, tools and programs."""


def with_new_fields(written: Any) -> Any:
    """Return the JSON with a new field in each object of its form."""
    if isinstance(written, list):
        return [with_new_fields(each) for each in written]
    if not isinstance(written, dict):
        return written
    known = {name: value if name in PROGRAM_VALUES else with_new_fields(value) for name, value in written.items()}
    return {**known, "new": 1}


def test_fields_of_a_later_release_are_ignored() -> None:
    document = stored("documents")["full"]
    document["new"] = 1
    document["waiting"][0]["new"] = document["waiting"][0]["call"]["new"] = document["answers"][0]["new"] = 1
    state = with_new_fields(stored("states")["full"])

    assert RunDocument.from_json(json.dumps(document)) == DOCUMENTS["full"]
    assert State.from_json(json.dumps(state)) == FULL_STATE
    for name, event in EVENTS.items():
        assert event_from_json(json.dumps(with_new_fields(stored("events")[name]))) == event


# --- what cannot be written or read


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), AT, USAGE])
def test_attributes_that_are_not_json_values_are_refused(value: Any) -> None:
    state = State(None, (), (AiMessage("a", attributes={"k": value}),))

    with pytest.raises(TranscriptError, match="cannot be written as JSON"):
        state.to_json()
    with pytest.raises(TranscriptError, match="cannot be written as JSON"):
        event_to_json(IntermediateResponse(ChatResponse(AiMessage("a"), attributes={"k": value})))


def test_attributes_keep_what_json_can_have() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    attributes = {"deep": deep, "big": 10**400, "lone": "\ud800", "float": 1.0, "zero": -0.0}
    state = State(None, (), (AiMessage("a", attributes=attributes),), arguments={0: {"deep": deep}})
    response = ChatResponse(AiMessage("a", attributes=attributes), attributes=attributes)
    document = RunDocument(arguments=attributes, result=[deep], message={"deep": deep})

    assert State.from_json(state.to_json()) == state
    assert event_from_json(event_to_json(IntermediateResponse(response))) == IntermediateResponse(response)
    assert RunDocument.from_json(document.to_json()) == document


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history", 3),
        ("history", [{"type": "other"}]),
        ("system", {"type": "user", "contents": []}),
        ("executions", [{}]),
        ("response", []),
        ("response", {"ai_message": {"type": "system", "text": ""}, "token_usage": None, "finish_reason": None}),
        ("pending", [{"request": 1}]),
        ("compensations", [{"tool_name": "a"}]),
        ("token_usage", 3),
        ("offered", 3),
    ],
)
def test_an_invalid_state_is_refused(name: str, value: Any) -> None:
    written = {**stored("states")["full"], name: value}

    with pytest.raises(TranscriptError):
        State.from_json(json.dumps(written))


@pytest.mark.parametrize("name", ["system", "history", "messages"])
def test_a_state_without_a_required_field_is_refused(name: str) -> None:
    with pytest.raises(TranscriptError, match=name):
        State.from_json(json.dumps(without(stored("states")["full"], {name})))


def test_json_of_something_else_is_no_document() -> None:
    with pytest.raises(UnreadableDocumentError, match="missing required field"):
        RunDocument.from_json('{"version": 1, "arguments": {}}')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("waiting", [{}]),
        ("waiting", [3]),
        ("identity", {"roles": []}),
        ("answers", [3]),
        ("answers", [{"call_id": "0"}]),
        ("history", [{"at": "yesterday"}]),
        ("limits", {"tool_calls": -1, "cost": None}),
        ("version", 2),
        ("unreadable", "too deep"),
    ],
)
def test_an_invalid_document_is_refused(name: str, value: Any) -> None:
    written = {**stored("documents")["full"], name: value}

    with pytest.raises(UnreadableDocumentError):
        RunDocument.from_json(json.dumps(written))
