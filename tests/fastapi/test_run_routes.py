"""`runs_router`: an application's front end lists, shows, follows, answers and cancels runs."""

import asyncio
import functools
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, Protocol
from uuid import uuid4

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request

from toolbox import (
    AiMessage,
    ChatResponse,
    Container,
    MemoryId,
    ToolboxSettings,
    application_scoped,
    register_ai_service,
    sql,
    tool,
)
from toolbox.runs import HistoryEntry, PendingCall, Retries, Run, RunSuspended, ToolDeferred
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install, runs_router
from toolbox_fastapi.run_endpoints import HistoryEntryView, PendingCallView, RunView

pytestmark = pytest.mark.anyio


@application_scoped
class Refunds:
    def __init__(self) -> None:
        self.refunded: list[int] = []

    @tool(requires_approval=True, approvers=("manager",))
    def refund(self, order: int) -> str:
        self.refunded.append(order)
        return f"refunded {order}"

    @tool(deferred=True)
    def ask_bank(self, question: str) -> dict[str, int]:
        raise ToolDeferred(reason="the bank answers later", attributes={"ticket": 5})


@register_ai_service(tools=Refunds)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...


def asks(*calls: Any) -> ChatResponse:
    return ChatResponse(AiMessage(None, calls))


def current_user(request: Request) -> SecurityIdentity | None:
    name = request.headers.get("x-user")
    return SecurityIdentity(name, {"manager"} if name == "mia" else set()) if name else None


def made(*replies: Any) -> tuple[FastAPI, Container]:
    container = Container(models={"default": ScriptedChatModel(replies)}).register(Desk)
    app = FastAPI()
    install(app, container, identity=current_user)

    def operator(request: Request) -> None:
        if "x-user" not in request.headers:
            raise HTTPException(401)

    app.include_router(runs_router(container), dependencies=[Depends(operator)])
    app.include_router(runs_router(container, prefix="/open"))
    return app, container


MIA = {"x-user": "mia"}


async def suspended(container: Container) -> str:
    run = await container.runs.start(Desk.chat, "hello")
    async for each in container.runs.events(run.id):
        if isinstance(each.event, RunSuspended):
            break
    return run.id


async def test_the_application_decides_who_may_use_it(running: Callable[..., Any]) -> None:
    app, _ = made()
    async with running(app) as client:
        assert (await client.get("/runs")).status_code == 401
        assert (await client.get("/runs", headers=MIA)).json() == {"runs": []}


async def test_a_pending_call_is_shown_and_approved(running: Callable[..., Any]) -> None:
    app, container = made(asks(tool_call("refund", {"order": 7})), "done")
    async with running(app) as client:
        run_id = await suspended(container)

        [listed] = (await client.get("/runs", params={"status": "suspended"}, headers=MIA)).json()["runs"]
        shown = (await client.get(f"/runs/{run_id}", headers=MIA)).json()
        answered = await client.post(
            f"/runs/{run_id}/answers", json={"answers": {"0": {"kind": "approve"}}}, headers=MIA
        )
        ended = (await client.get(f"/runs/{run_id}", headers=MIA)).json()

        assert listed == shown
        [call] = shown["pending"]
        assert (call["id"], call["tool_name"], call["arguments"], call["kind"]) == (
            "0",
            "refund",
            {"order": 7},
            "approval",
        )
        assert (answered.status_code, answered.json()) == (
            200,
            {"run_id": run_id, "status": "completed", "content": "done"},
        )
        assert container.get(Refunds).refunded == [7]
        assert (ended["status"], ended["pending"]) == ("completed", [])
        [entry] = ended["history"]
        assert (entry["by"], entry["answer"], entry["call_id"]) == ("mia", "approve", "0")


@tool(requires_approval=True, may_remember=True)
async def ship(order: int) -> str:
    """Ship an order."""
    return f"shipped {order}"


@register_ai_service(tools=ship)
class Shop(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


async def test_an_approval_can_be_remembered(running: Callable[..., Any]) -> None:
    calls = [reply for order in (1, 2) for reply in (asks(tool_call("ship", {"order": order})), "done")]
    container = Container(models={"default": ScriptedChatModel(calls)}).register(Shop)
    app = FastAPI()
    install(app, container, identity=current_user)
    app.include_router(runs_router(container))

    @app.post("/chat")
    async def chat(shop: Inject[Shop]) -> str:
        return await shop.chat("room", "ship it")

    async with running(app) as client:
        waiting = (await client.post("/chat", headers=MIA)).json()
        assert [each["may_remember"] for each in waiting["pending"]] == [True]
        path, answer = f"/runs/{waiting['run_id']}", {"kind": "approve", "remember": "conversation"}
        for wrong in ({**answer, "remember": "always"}, {"kind": "reject", "remember": "conversation"}):
            refused = await client.post(f"{path}/answers", json={"answers": {"0": wrong}}, headers=MIA)
            assert refused.status_code == 422
        answered = await client.post(f"{path}/answers", json={"answers": {"0": answer}}, headers=MIA)
        assert answered.json()["content"] == "done"
        [entry] = (await client.get(path, headers=MIA)).json()["history"]
        assert (entry["answer"], entry["remembered"]) == ("approve", True)
        again = await client.post("/chat", headers=MIA)
        assert (again.status_code, again.json()) == (200, "done")


async def test_a_person_who_may_not_approve_is_refused(running: Callable[..., Any]) -> None:
    app, container = made(asks(tool_call("refund", {"order": 7})))
    async with running(app) as client:
        run_id = await suspended(container)
        body = {"answers": {"0": {"kind": "approve"}}}

        unknown = await client.post(f"/open/{run_id}/answers", json=body)
        assert (unknown.status_code, "www-authenticate" in unknown.headers) == (401, True)
        refused = await client.post(f"/runs/{run_id}/answers", json=body, headers={"x-user": "joe"})

        assert refused.status_code == 403
        assert refused.headers["content-type"] == "application/problem+json"
        assert (refused.json()["title"], refused.json()["status"]) == ("Forbidden", 403)
        assert refused.json()["detail"] == "call 0: 'joe' may not approve it; it needs one of: manager"
        assert container.get(Refunds).refunded == []
        assert (await container.runs.get(run_id)).status == "suspended"


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({"9": {"kind": "approve"}}, 409),
        ({"0": {"kind": "respond", "value": 1}}, 409),
        ({"0": {"kind": "approve", "arguments": {"order": "x"}}}, 422),
        ({"0": {"kind": "shrug"}}, 422),
        ({"0": {"kind": "approve", "reason": "because"}}, 422),
        ({"0": {"kind": "reject", "other": 1}}, 422),
        ({"0": {"kind": "reject", "reason": "x" * 10_001}}, 422),
    ],
)
async def test_answers_that_do_not_fit_change_nothing(
    running: Callable[..., Any], answers: dict[str, Any], status: int
) -> None:
    app, container = made(asks(tool_call("refund", {"order": 7})))
    async with running(app) as client:
        run_id = await suspended(container)

        refused = await client.post(f"/runs/{run_id}/answers", json={"answers": answers}, headers=MIA)

        assert refused.status_code == status, refused.text
        assert (await container.runs.get(run_id)).status == "suspended"


async def test_changed_arguments_that_are_invalid_are_explained(running: Callable[..., Any]) -> None:
    app, container = made(asks(tool_call("refund", {"order": 7})))
    async with running(app) as client:
        run_id = await suspended(container)
        answers = {"0": {"kind": "approve", "arguments": {"order": "x"}}}

        refused = await client.post(f"/runs/{run_id}/answers", json={"answers": answers}, headers=MIA)

        [problem] = refused.json()["problems"]
        assert problem["path"] == ["order"]
        assert problem["message"]


async def test_some_answers_leave_the_rest_pending(running: Callable[..., Any]) -> None:
    calls = tool_call("refund", {"order": 7}), tool_call("ask_bank", {"question": "limit?"})
    app, container = made(asks(*calls), "done")
    async with running(app) as client:
        run_id = await suspended(container)
        reject = {"answers": {"0": {"kind": "reject", "reason": "no"}}}
        respond = {"answers": {"1": {"kind": "respond", "value": {"limit": 5}}}}

        first = await client.post(f"/runs/{run_id}/answers", json=reject, headers=MIA)
        second = await client.post(f"/runs/{run_id}/answers", json=respond, headers=MIA)

        assert first.status_code == 202
        assert [(each["id"], each["attributes"]) for each in first.json()["pending"]] == [("1", {"ticket": 5})]
        assert (second.status_code, second.json()["content"]) == (200, "done")


async def test_a_run_is_cancelled(running: Callable[..., Any]) -> None:
    app, container = made(asks(tool_call("refund", {"order": 7})))
    async with running(app) as client:
        run_id = await suspended(container)

        cancelled = await client.post(f"/runs/{run_id}/cancel", json={"reason": "too late"}, headers=MIA)
        again = await client.post(f"/runs/{run_id}/cancel", headers=MIA)

        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        [entry] = cancelled.json()["history"]
        assert (entry["answer"], entry["by"], entry["reason"]) == ("cancel", "mia", "too late")
        assert (again.status_code, again.json()["error"]) == (200, "too late")


async def test_an_unknown_run_is_404(running: Callable[..., Any]) -> None:
    app, _ = made()
    async with running(app) as client:
        replies = [
            await client.get("/runs/unknown", headers=MIA),
            await client.get("/runs/unknown/events", headers=MIA),
            await client.post("/runs/unknown/cancel", headers=MIA),
            await client.post("/runs/unknown/answers", json={"answers": {"0": {"kind": "approve"}}}, headers=MIA),
        ]

    assert [each.status_code for each in replies] == [404] * 4


async def test_the_text_of_an_error_stays_here(running: Callable[..., Any]) -> None:
    app, container = made(RuntimeError("password=secret"))
    async with running(app) as client:
        run = await container.runs.start(Desk.chat, "hello")
        async for _ in container.runs.events(run.id):
            pass
        shown = await client.get(f"/runs/{run.id}", headers=MIA)
        events = await client.get(f"/runs/{run.id}/events", headers=MIA)

    assert shown.json()["error"] == "RuntimeError"
    assert "secret" not in shown.text + events.text


async def test_the_text_of_an_error_stays_here_between_tries(running: Callable[..., Any]) -> None:
    @register_ai_service(run_retries=Retries())
    class Patient(Protocol):
        async def ask(self, text: str) -> str: ...

    app, container = made(RuntimeError("password=secret"))
    container.register(Patient)
    async with running(app) as client, asyncio.timeout(60):
        run = await container.runs.start(Patient.ask, "hello")
        while (await container.runs.get(run.id)).error is None:  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0.01)
        shown, listed = await client.get(f"/runs/{run.id}", headers=MIA), await client.get("/runs", headers=MIA)

    assert (shown.json()["status"], shown.json()["error"]) == ("running", "RuntimeError")
    assert "secret" not in shown.text + listed.text


async def test_events_continue_after_the_last_one(running: Callable[..., Any]) -> None:
    app, container = made("done")
    async with running(app) as client:
        run = await container.runs.start(Desk.chat, "hello")
        await container.runs.result(run)
        whole = await client.get(f"/runs/{run.id}/events", headers=MIA)
        numbers = [line[4:] for line in whole.text.splitlines() if line.startswith("id: ")]
        rest = await client.get(f"/runs/{run.id}/events", headers={**MIA, "Last-Event-ID": numbers[-2]})
        over = await client.get(f"/runs/{run.id}/events", headers={**MIA, "Last-Event-ID": numbers[-1]})

    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert json.loads(rest.text.split("data: ")[1].split("\n")[0]) == {"status": "completed", "error": None}
    assert over.status_code == 204


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"status": "lost"}, {"service": "x" * 501}])
async def test_queries_are_validated(running: Callable[..., Any], query: dict[str, Any]) -> None:
    app, _ = made()
    async with running(app) as client:
        assert (await client.get("/runs", params=query, headers=MIA)).status_code == 422


# --- runs that a caller may see


@register_ai_service(tools=Refunds)
class Chats(Protocol):
    async def chat(self, session: MemoryId[str], text: str) -> str: ...


def only_own(identity: SecurityIdentity, run: Run[Any]) -> bool:
    return run.started_by == identity.name


async def only_own_later(identity: SecurityIdentity, run: Run[Any]) -> bool:
    return only_own(identity, run)


class OnlyOwn:
    async def __call__(self, identity: SecurityIdentity, run: Run[Any]) -> bool:
        return only_own(identity, run)

    async def ask(self, identity: SecurityIdentity, run: Run[Any]) -> bool:
        return only_own(identity, run)


def in_a_thread(identity: SecurityIdentity, run: Run[Any]) -> "Future[bool]":
    found: Future[bool] = Future()
    found.set_result(only_own(identity, run))
    return found


@functools.wraps(only_own_later)
def wrapped(identity: SecurityIdentity, run: Run[Any]) -> Any:
    return only_own_later(identity, run)


RULES: dict[str, Any] = {
    "def": only_own,
    "async def": only_own_later,
    "lambda": lambda identity, run: only_own_later(identity, run),
    "wrapper": wrapped,
    "object": OnlyOwn(),
    "method": OnlyOwn().ask,
    "partial": functools.partial(only_own_later),
    "partial of a lambda": functools.partial(lambda later, identity, run: later(identity, run), only_own_later),
    "future": in_a_thread,
}


def with_rule(may_see: Any, *replies: Any) -> tuple[FastAPI, Container]:
    container = Container(models={"default": ScriptedChatModel(replies)}).register(Chats)
    app = FastAPI()
    install(app, container, identity=current_user)
    app.include_router(runs_router(container, may_see=may_see))
    return app, container


async def started_by(name: str | None, container: Container) -> str:
    who = SecurityIdentity(name) if name else SecurityIdentity.anonymous()
    async with container.request_scope({SecurityIdentity: who}):
        run = await container.runs.start(Chats.chat, f"session of {name}", "hello")
    async for each in container.runs.events(run.id):
        if isinstance(each.event, RunSuspended):
            break
    return run.id


@pytest.mark.parametrize("may_see", RULES.values(), ids=RULES)
async def test_a_run_that_a_caller_may_not_see_is_unknown(running: Callable[..., Any], may_see: Any) -> None:
    call = asks(tool_call("ask_bank", {"question": "limit?"}))
    app, container = with_rule(may_see, call, call, call, "done")
    async with running(app) as client:
        ann, bob, nobody = [await started_by(name, container) for name in ("ann", "bob", None)]
        headers = {"x-user": "ann"}

        async def requests(run_id: str) -> list[Any]:
            body = {"answers": {"0": {"kind": "respond", "value": {"limit": 5}}}}
            return [
                await client.get(f"/runs/{run_id}", headers=headers),
                await client.post(f"/runs/{run_id}/answers", json=body, headers=headers),
                await client.post(f"/runs/{run_id}/cancel", headers=headers),
                await client.get(f"/runs/{run_id}/events", headers=headers),
            ]

        hidden = [await requests(run_id) for run_id in (bob, nobody, "unknown")]
        listed = (await client.get("/runs", headers=headers)).json()["runs"]
        suspended_ones = [(await container.runs.get(each)).status for each in (bob, nobody)]
        own = await requests(ann)

    assert [[reply.status_code for reply in replies] for replies in hidden] == [[404] * 4] * 3
    assert len({reply.text for replies in hidden for reply in replies}) == 1
    assert suspended_ones == ["suspended", "suspended"]
    assert [each["id"] for each in listed] == [ann]
    assert [reply.status_code for reply in own] == [200] * 4


class Later:
    def __await__(self) -> Any:
        yield from ()
        return self


@pytest.mark.parametrize("verdict", [1, "yes", [True], object(), None, Later()], ids=lambda each: type(each).__name__)
async def test_only_true_shows_a_run(running: Callable[..., Any], verdict: Any) -> None:
    app, container = with_rule(lambda identity, run: verdict, "done")
    async with running(app) as client:
        run = await container.runs.start(Chats.chat, "s", "hello")
        await container.runs.result(run)
        found = await client.get(f"/runs/{run.id}", headers=MIA)
        listed = await client.get("/runs", headers=MIA)

    assert (found.status_code, listed.json()) == (404, {"runs": []})


def same_tenant(identity: SecurityIdentity, run: Run[Any]) -> bool:
    return run.identity_attributes == {"tenant": identity.attributes["tenant"]}


@pytest.mark.parametrize("persistent", [False, True], ids=["memory", "SQLite"])
async def test_tenants_see_their_own_runs(running: Callable[..., Any], persistent: bool) -> None:
    def user_of_a_tenant(request: Request) -> SecurityIdentity:
        attributes = {"tenant": request.headers["x-tenant"], "token": "s3cret", "mail": "a@example.com"}
        return SecurityIdentity("ann", attributes=attributes)

    models = {"default": ScriptedChatModel(["done", "done"])}
    settings = ToolboxSettings(sql=SqlSettings(url="sqlite://", records_of_ended_runs="delete"))
    container = Container(models=models, run_identity=("tenant",), settings=settings).register(Chats)
    if persistent:
        container.register(sql.engine, sql.SqlRunStore)
    app = FastAPI()
    install(app, container, identity=user_of_a_tenant)
    app.include_router(runs_router(container, may_see=same_tenant))

    @app.post("/chat")
    async def chat() -> str:
        run = await container.runs.start(Chats.chat, uuid4().hex, "hello")
        await container.runs.result(run)
        return run.id

    async with running(app) as client:
        own, other = {"x-tenant": "acme"}, {"x-tenant": "evil"}
        ids = [(await client.post("/chat", headers=each)).json() for each in (own, other)]
        replies = [await client.get(f"/runs/{ids[0]}", headers=each) for each in (own, other)]
        lists = [(await client.get("/runs", headers=each)).json()["runs"] for each in (own, other)]

    assert [each.status_code for each in replies] == [200, 404]
    assert [[run["id"] for run in each] for each in lists] == [[ids[0]], [ids[1]]]
    assert "acme" not in replies[0].text


async def test_the_list_is_filled_with_older_runs_that_the_caller_may_see(running: Callable[..., Any]) -> None:
    app, container = with_rule(only_own, *["done"] * 130)
    async with running(app) as client:
        ids = []
        for number in range(130):
            async with container.request_scope({SecurityIdentity: SecurityIdentity("ann" if number < 5 else "bob")}):
                run = await container.runs.start(Chats.chat, f"s{number}", "hello")
                await container.runs.result(run)
            ids.append(run.id)
        newest = (await client.get("/runs", params={"limit": 3}, headers={"x-user": "ann"})).json()["runs"]
        everything = (await client.get("/runs", headers={"x-user": "ann"})).json()["runs"]

    assert [each["id"] for each in newest] == ids[4:1:-1]
    assert [each["id"] for each in everything] == ids[4::-1]


async def test_a_pending_call_has_the_same_fields_wherever_it_is_shown(running: Callable[..., Any]) -> None:
    app, _ = made(asks(tool_call("refund", {"order": 7}, id="c7"), tool_call("ask_bank", {"question": "?"})))

    @app.get("/chat")
    async def chat(desk: Inject[Desk]) -> str:
        return await desk.chat("hello")

    async with running(app) as client:
        body = (await client.get("/chat")).json()
        shown = (await client.get(f"/open/{body['run_id']}")).json()["pending"]
        answers = {body["pending"][1]["id"]: {"kind": "respond", "value": {}}}
        left = (await client.post(f"/runs/{body['run_id']}/answers", json={"answers": answers}, headers=MIA)).json()

    assert body["pending"][0]["call_id"] == "c7"
    assert shown == body["pending"]
    assert left["pending"] == body["pending"][:1]


async def test_runs_and_pending_calls_say_who_asked(running: Callable[..., Any]) -> None:
    calls = tool_call("refund", {"order": 7}), tool_call("ask_bank", {"question": "limit?"})
    app, container = with_rule(None, asks(*calls))
    async with running(app) as client:
        run_id = await started_by("ann", container)
        shown = (await client.get(f"/runs/{run_id}", headers=MIA)).json()
        body = {"answers": {"1": {"kind": "respond", "value": {"limit": 5}}}}
        left = (await client.post(f"/runs/{run_id}/answers", json=body, headers=MIA)).json()

    assert (shown["started_by"], shown["memory_id"]) == ("ann", "session of ann")
    assert [each["started_by"] for each in (*shown["pending"], *left["pending"])] == ["ann"] * 3


@pytest.mark.parametrize("may_see", [True, lambda run: True], ids=["no function", "one parameter"])
def test_a_rule_must_take_the_identity_and_the_run(may_see: Any) -> None:
    with pytest.raises(TypeError, match="runs_router: may_see must be a function"):
        runs_router(Container(), may_see=may_see)


@pytest.mark.parametrize(
    ("view", "shown", "hidden"),
    [
        (RunView, Run, {"identity_attributes"}),
        (HistoryEntryView, HistoryEntry, set()),
        (PendingCallView, PendingCall, set()),
    ],
)
def test_clients_see_every_field_but_the_attributes_of_identities(view: Any, shown: Any, hidden: set[str]) -> None:
    assert view.model_fields.keys() == {each.name for each in fields(shown)} - hidden
