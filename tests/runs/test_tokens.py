"""The caller's own access token, `SecurityIdentity.attributes["token"]`, is used in memory and written nowhere."""

import json
import logging
import pickle
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json

from toolbox import (
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    MemoryId,
    Result,
    create_ai_service,
    invocation_attributes,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.logs import LoggingListener
from toolbox.runs import IdentityLoader, InMemoryRunStore, RunId, RunStore, ToolDeferred, approve, respond, runs_of
from toolbox.runs.documents import GivenAnswer, RunDocument, reduced_document
from toolbox.runs.run_answers import approve as approved
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks, ran, says

pytestmark = pytest.mark.anyio

TOKEN = "t0p-s3cret"


def person(name: str) -> SecurityIdentity:
    return SecurityIdentity(name, {"manager"}, {"tenant": "acme", "token": f"{TOKEN}-of-{name}"})


ANN, BOB = person("ann"), person("bob")


@dataclass
class Session:
    """A seed that is kept with runs, and knows its user."""

    user: SecurityIdentity


class Order(BaseModel):
    buyer: SecurityIdentity
    anything: Any = None


class Desk:
    @tool(requires_approval=True)
    def pay(self, who: Inject[SecurityIdentity], context: InvocationContext) -> Order:
        ran.append((who.attributes.get("token"), context.approved_by))
        return Order(buyer=who, anything=[who])

    @tool(deferred=True)
    def ask_bank(self, who: Inject[SecurityIdentity]) -> str:
        raise ToolDeferred(reason="the bank", attributes={"who": who})

    @tool
    def whose(self, who: Inject[SecurityIdentity]) -> str:
        ran.append(who.attributes.get("token"))
        return who.name


CALLS = asks(tool_call("whose"), tool_call("pay"), tool_call("ask_bank"))


@register_ai_service(tools=Desk, durable=True)
class Durable(Protocol):
    @user_message("{text}: {order}")
    async def ask(self, run: RunId, room: MemoryId[str], order: Order, text: str) -> Result[str]: ...


@register_ai_service(tools=Desk)
class Suspending(Protocol):
    @user_message("{text}: {order}")
    async def ask(self, run: RunId, room: MemoryId[str], order: Order, text: str) -> Result[str]: ...


def container(*replies: Any) -> Container:
    return Container(
        models={"default": ScriptedChatModel(replies)},
        seeds=(SecurityIdentity,),
        run_seeds=(Session, SecurityIdentity),
        run_identity=("tenant",),
        take_over_runs=False,
    ).register(Durable, Suspending, Desk, LoggingListener)


@asynccontextmanager
async def in_database(path: Path, made: Container) -> AsyncIterator[Container]:
    async with sql.open_engine(f"sqlite:///{path}") as engine:
        made.register_instance(sql.SqlRunStore(engine), RunStore)
        async with made.register_instance(sql.SqlChatMemoryStore(engine)) as here:
            yield here


def everything_in(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        return "\n".join(connection.iterdump())


@pytest.mark.parametrize("service", [Durable, Suspending])
async def test_a_token_is_in_no_table_no_event_and_no_log(
    tmp_path: Path, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "runs.db"
    async with in_database(path, container(CALLS)) as here:
        seeds = {SecurityIdentity: ANN, Session: Session(ANN)}
        async with here.request_scope(seeds), invocation_attributes_of(ANN):
            result = await here.get(service).ask("r", "room", Order(buyer=ANN, anything=ANN), "Pay")
        assert [each.tool_name for each in result.pending] == ["pay", "ask_bank"]
        assert TOKEN not in everything_in(path)
    async with in_database(path, container(says("done"))) as here:
        await here.runs.resume("r", {"1": approve({})}, by=BOB)
        await here.runs.resume("r", {"2": respond("yes")}, by=BOB)
        run = await here.runs.get("r")
        events = [each async for each in here.runs.events("r")] if service is Durable else []

    assert (run.status, run.identity_attributes) == ("completed", {"tenant": "acme"})
    everything = everything_in(path)
    assert "acme" in everything  # the other attributes are stored
    assert TOKEN not in everything + caplog.text + repr(run) + repr(events)
    assert [each.by for each in run.history] == ["bob", "bob"]


@asynccontextmanager
async def invocation_attributes_of(identity: SecurityIdentity) -> AsyncIterator[None]:
    with invocation_attributes(who=identity, several=[{"of": identity}]):
        yield


async def ask_for_payment(store: RunStore, service: Any, run_id: str) -> None:
    made, seeds = container(CALLS).register_instance(store, RunStore), {SecurityIdentity: ANN, Session: Session(ANN)}
    async with made as here, here.request_scope(seeds):
        await here.get(service).ask(run_id, "room", Order(buyer=ANN), "Pay")


async def test_a_cancelled_run_does_not_keep_the_token_of_who_cancelled_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with in_database(path, container(CALLS)) as here:
        async with here.request_scope({SecurityIdentity: ANN, Session: Session(ANN)}):
            await here.get(Durable).ask("r", "room", Order(buyer=ANN), "Pay")

        await here.runs.cancel("r", "late", by=BOB)

    assert TOKEN not in everything_in(path)


async def test_the_process_that_starts_a_run_has_the_token_and_a_resumed_run_has_none() -> None:
    store = InMemoryRunStore()
    store.persistent = True
    for service in (Durable, Suspending):
        await ask_for_payment(store, service, service.__name__)
        assert ran == [ANN.attributes["token"]]
        ran.clear()
        async with container(says("done")).register_instance(store, RunStore) as here:
            await here.runs.resume(service.__name__, {"1": approve()}, by=BOB)
        assert ran == [(None, SecurityIdentity("bob", {"manager"}, {"tenant": "acme"}))]
        ran.clear()


async def test_an_identity_loader_can_bring_a_token() -> None:
    class Vault(IdentityLoader):
        async def load(self, identity: SecurityIdentity) -> SecurityIdentity:
            assert "token" not in identity.attributes
            return SecurityIdentity(identity.name, attributes={"token": "fresh"})

    store = InMemoryRunStore()
    store.persistent = True
    await ask_for_payment(store, Durable, "r")
    ran.clear()
    async with container(says("done")).register_instance(store, RunStore).register(Vault) as here:
        await here.runs.resume("r", {"1": approve()})

    assert [token for token, _ in ran] == ["fresh"]
    assert "fresh" not in "".join(each.document for each in await store.find())


async def test_a_service_without_a_container_stores_none() -> None:
    model = ScriptedChatModel([asks(tool_call("pay"))])
    desk = create_ai_service(Suspending, chat_model=model, tools=Desk(), identity=lambda: ANN)
    await desk.ask("r", "room", Order(buyer=ANN), "Pay")

    store = await runs_of(desk).store()
    assert TOKEN not in "".join(each.document for each in await store.find())


# --- what earlier releases have stored


def stored_by_an_earlier_release() -> str:
    attributes = {"tenant": "acme", "token": TOKEN}
    answer = GivenAnswer(
        call_id="0", answer=approved(), asked={}, by={"name": "bob", "roles": [], "attributes": attributes}
    )
    document = json.loads(RunDocument(arguments={"text": "Pay"}, answers=(answer,)).to_json())
    document["identity"] = {"name": "ann", "roles": [], "attributes": attributes}
    document["answers"][0]["by"]["attributes"] = attributes
    return json.dumps(document)


def test_a_token_that_an_earlier_release_has_stored_is_dropped() -> None:
    written = stored_by_an_earlier_release()
    assert written.count(TOKEN) == 2

    document = RunDocument.from_json(written)

    assert document.identity == {"name": "ann", "roles": [], "attributes": {"tenant": "acme"}}
    assert document.answers[0].by == {"name": "bob", "roles": [], "attributes": {"tenant": "acme"}}
    assert TOKEN not in document.to_json()
    assert TOKEN not in reduced_document(written)
    assert '"token"' not in reduced_document(written)  # no hash of it either


# --- where the token could leave the program


def test_no_run_is_told_apart_by_the_token() -> None:
    with pytest.raises(IllegalConfigurationError, match=r"'token' is the caller's own access token"):
        Container(run_identity=("tenant", "token")).__enter__()


def test_the_json_and_the_repr_of_an_identity_hide_the_token() -> None:
    @dataclass(frozen=True, init=False)
    class Customer(SecurityIdentity):
        number: int

        def __init__(self, number: int) -> None:
            super().__init__("ann", attributes={"token": TOKEN, "tenant": "acme"})
            object.__setattr__(self, "number", number)

    order = Order(buyer=ANN, anything={"who": Customer(7)})
    texts = [
        *(str(each) + repr(each) for each in (ANN, Customer(7), [ANN], order)),
        TypeAdapter(SecurityIdentity).dump_json(ANN).decode(),
        TypeAdapter(Customer).dump_json(Customer(7)).decode(),
        TypeAdapter(list[Any]).dump_json([ANN, Customer(7)]).decode(),
        order.model_dump_json(),
        to_json({"who": ANN, "also": [Customer(7)]}).decode(),
    ]

    assert TOKEN not in "".join(texts)
    assert all("acme" in each for each in texts[4:])
    assert TypeAdapter(SecurityIdentity).validate_json(texts[4]).attributes == {"tenant": "acme"}
    assert pickle.loads(pickle.dumps(ANN)) == ANN  # worker processes of this program get it
