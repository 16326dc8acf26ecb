"""The support desk and the experts over HTTP, on their embedded defaults."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date, timedelta
from threading import Event
from typing import Any

import pytest

from sample_app.bookings import CustomerSupportAgent
from sample_app.support import with_support
from toolbox import Container, UserMessage
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, offered_tools

from .conftest import served


@pytest.fixture(scope="module")
def desk() -> Any:
    """A separate sample, because these tests change its bookings."""
    with served() as address:
        yield address


def say(desk: Any, conversation: str, message: str) -> Any:
    reply = desk.post("/support", {"conversation": conversation, "message": message})
    assert reply.status == 200, reply.text
    return reply.json


def decide(desk: Any, answer: Any, *, confirmed: bool) -> Any:
    """Confirm or reject the one call that waits, and return the agent's answer."""
    [call] = answer["pending"]
    assert (answer["answer"], call["name"]) == ("", "cancel_booking")
    decision = {"run_id": answer["run_id"], "call_id": call["id"], "confirmed": confirmed}
    reply = desk.post("/support/decision", decision)
    assert reply.status == 200, reply.text
    return reply.json


def names(answer: Any) -> list[str]:
    return [each["name"] for each in answer["tool_executions"]]


def status_of(desk: Any, number: int) -> str:
    [booking] = [each for each in desk.get("/bookings").json if each["id"] == number]
    return str(booking["status"])


def test_the_agent_remembers_the_customer_and_cancels_a_booking(desk: Any) -> None:
    first = say(desk, "a", "I am Speedy McWheels. Which bookings do I have?")
    assert names(first) == ["list_bookings"]
    assert [each["id"] for each in json.loads(first["tool_executions"][0]["result"])] == [1, 2, 3]

    asked = say(desk, "a", "Please cancel booking 2.")
    assert status_of(desk, 2) == "booked"
    second = decide(desk, asked, confirmed=True)
    assert names(second) == ["cancel_booking"]
    assert second["tool_executions"][0]["arguments"]["first_name"] == "Speedy"
    assert "cancelled" in second["answer"]
    assert status_of(desk, 2) == "cancelled"

    third = decide(desk, say(desk, "a", "Please cancel booking 1."), confirmed=True)
    assert "less than 7 days" in third["answer"]
    assert third["tool_executions"][0]["is_error"]
    assert status_of(desk, 1) == "booked"


def test_a_cancellation_that_the_customer_rejects_does_not_happen(desk: Any) -> None:
    asked = say(desk, "h", "I am Vroom Lightyear. Please cancel booking 7.")

    answer = decide(desk, asked, confirmed=False)

    assert answer["tool_executions"][0]["result"] == "The customer does not want this."
    assert status_of(desk, 7) == "booked"
    call = {"run_id": asked["run_id"], "call_id": asked["pending"][0]["id"], "confirmed": True}
    assert desk.post("/support/decision", call).status == 409


def test_another_message_withdraws_a_cancellation(desk: Any) -> None:
    asked = say(desk, "i", "I am Vroom Lightyear. Please cancel booking 7.")

    assert names(say(desk, "i", "I am Vroom Lightyear. Which bookings do I have?")) == ["list_bookings"]

    call = {"run_id": asked["run_id"], "call_id": asked["pending"][0]["id"], "confirmed": True}
    assert desk.post("/support/decision", call).status == 409
    assert status_of(desk, 7) == "booked"


def test_conversations_are_separate(desk: Any) -> None:
    say(desk, "b", "I am Zoom Thunderfoot. Which bookings do I have?")

    answer = say(desk, "c", "Please cancel booking 4.")

    assert names(answer) == []
    assert "name" in answer["answer"]
    assert status_of(desk, 4) == "booked"


def test_customers_cannot_see_or_cancel_bookings_of_others(desk: Any) -> None:
    answer = say(desk, "d", "I am Turbo Gearshift. Show me booking 5.")
    assert "has no booking 5" in answer["answer"]
    answer = decide(desk, say(desk, "d", "I am Turbo Gearshift. Cancel booking 5."), confirmed=True)
    assert "has no booking 5" in answer["answer"]
    assert status_of(desk, 5) == "booked"


def test_a_car_can_be_booked_while_one_is_free(desk: Any) -> None:
    begins = date.today() + timedelta(days=200)
    asked = f"I am Drifty Skidmark. Please book a convertible from {begins} to {begins + timedelta(days=5)}."

    assert "booked" in say(desk, "e", asked)["answer"]
    assert "no convertible is free" in say(desk, "f", asked)["answer"]


def test_the_reservation_that_a_customer_is_making_is_kept_with_the_conversation(desk: Any) -> None:
    def reservation(conversation: str) -> Any:
        return desk.get(f"/support/reservation?conversation={conversation}").json

    begins = date.today() + timedelta(days=300)
    ends = begins + timedelta(days=2)
    nothing = {"car_group": None, "date_from": None, "date_to": None}

    assert reservation("g") == nothing
    assert names(say(desk, "g", "I am Drifty Skidmark. I would like a van.")) == ["plan_reservation"]
    assert reservation("g") == {**nothing, "car_group": "van"}
    say(desk, "g", f"From {begins} to {ends}, please.")
    assert reservation("g") == {"car_group": "van", "date_from": str(begins), "date_to": str(ends)}
    assert reservation("k") == nothing

    say(desk, "g", f"Please book the van from {begins} to {ends}.")
    assert reservation("g") == nothing
    say(desk, "g", "Please cancel booking 8.")
    assert desk.get("/support/reservation?conversation=g").status == 409


@pytest.mark.anyio
async def test_card_numbers_reach_neither_the_model_nor_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", "sqlite://")
    model = ScriptedChatModel(["Thank you."])
    async with with_support(Container(models={"default": model})) as container, container.request_scope():
        agent = await container.aget(CustomerSupportAgent)
        await agent.chat("card", "My card is 4111 1111-11111111, booking 12345.")
        remembered = await container.chat_memory(CustomerSupportAgent, "card").messages()

    expected = UserMessage("My card is [card number], booking 12345.")
    assert model.requests[0].messages[-1] == expected
    assert remembered[0] == expected


def test_visitors_list_and_read_only_their_own_conversations(desk: Any) -> None:
    ann, bob, nobody = (replace(desk, cookie=each) for each in ("visitor=ann", "visitor=bob", ""))
    say(ann, "own-1", "I am Speedy McWheels. Which bookings do I have?")
    say(ann, "own-2", "Hello.")
    say(bob, "own-3", "Hello.")
    say(nobody, "own-4", "Hello.")

    def listed(visitor: Any) -> list[str]:
        return [each["memory_id"] for each in visitor.get("/support/conversations").json]

    assert (listed(ann), listed(bob), listed(nobody)) == (["own-2", "own-1"], ["own-3"], [])
    said = ann.get("/support/conversations/own-1").json
    assert [each["message"]["type"] for each in said] == ["user", "ai", "tool_result", "ai"]
    assert {each["state"] for each in said} == {"answered"}
    for other in (bob, nobody):
        assert other.get("/support/conversations/own-1").status == 403
        assert other.post("/support", {"conversation": "own-1", "message": "Hello."}).status == 403
        assert other.post("/support/conversations/own-1/stop", {}).status == 403


def test_an_answer_can_be_stopped_while_it_is_made(wire_server: Any) -> None:
    asked, answering = Event(), Event()

    def reply(request: Any) -> dict[str, Any]:
        asked.set()
        answering.wait(60)
        return {"content": "Hello."}

    model = wire_server(reply)
    with served(OPENAI_BASE_URL=model.url, OPENAI_API_KEY="k") as desk, ThreadPoolExecutor() as pool:
        assert desk.post("/support/conversations/a/stop", {}).json is False
        waiting = pool.submit(desk.post, "/support", {"conversation": "a", "message": "Hello."})
        assert asked.wait(60)
        stopped = desk.post("/support/conversations/a/stop", {})
        answering.set()
        said = desk.get("/support/conversations/a").json

    assert (stopped.json, waiting.result(60).status) == (True, 409)
    assert [(each["message"]["type"], each["state"]) for each in said] == [("user", "stopped")]


@pytest.mark.parametrize("body", [{}, {"conversation": "", "message": "hi"}, {"conversation": "a", "message": ""}])
def test_invalid_messages_are_rejected(desk: Any, body: object) -> None:
    assert desk.post("/support", body).status == 422


@pytest.mark.parametrize(
    ("question", "expert"),
    [
        ("I broke my leg, what should I do?", "medical_request"),
        ("My landlord broke our contract.", "legal_request"),
        ("My computer shows an error.", "technical_request"),
    ],
)
def test_the_chosen_expert_gets_the_question(desk: Any, question: str, expert: str) -> None:
    answer = desk.post("/experts", {"question": question}).json

    assert names(answer) == [expert]
    assert answer["tool_executions"][0]["arguments"] == {"request": question}
    assert answer["answer"] == answer["tool_executions"][0]["result"]


def test_a_question_without_an_expert_calls_no_tool(desk: Any) -> None:
    assert names(desk.post("/experts", {"question": "What is love?"}).json) == []


def test_injected_parameters_are_not_in_the_openapi_document(desk: Any) -> None:
    paths = desk.get("/openapi.json").json["paths"]

    assert "parameters" not in paths["/bookings"]["get"]
    assert "session" not in json.dumps(paths["/bookings"])


@pytest.mark.anyio
@pytest.mark.parametrize("is_staff", [True, False])
async def test_only_staff_can_list_all_customers(is_staff: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", "sqlite://")
    model = ScriptedChatModel(["Hello."])
    who = SecurityIdentity("ann", frozenset({"staff"} if is_staff else ()))
    opened = with_support(Container(models={"default": model}))
    async with opened as container, container.request_scope({SecurityIdentity: who}):
        await (await container.aget(CustomerSupportAgent)).chat("c", "Who are your customers?")

    assert ("list_customers" in offered_tools(model.requests[0])) == is_staff
