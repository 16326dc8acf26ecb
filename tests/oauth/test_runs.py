"""The token of the user in runs: never stored, there while the user is, asked for again when a run goes on."""

import asyncio
import json
import logging
from dataclasses import fields
from datetime import timedelta
from typing import Any, Protocol

import pytest

from tests.oauth.guarded_mcp_server import guarded_server
from tests.oauth.oauth_server import SECRET, OAuthServer, Resource
from tests.rest.http_server import Answer
from toolbox import (
    Container,
    Result,
    RunFailedError,
    application_scoped,
    compensate_for,
    register_ai_service,
    rest,
    tool,
)
from toolbox.mcp import mcp_server, mcp_toolbox
from toolbox.oauth import TokenExchange
from toolbox.runs import IdentityLoader, InMemoryRunStore, Retries, RunEngine, RunStore, approve, durable
from toolbox.security import SecurityIdentity, UnauthenticatedError
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

pytestmark = pytest.mark.anyio


class Orders(Protocol):
    @rest.get("/orders")
    async def list(self) -> dict[str, Any]: ...


class Kept(InMemoryRunStore):
    """A store that survives a process, as the tests say."""

    persistent = True


ran: list[str] = []


def asking_first(requests: Any) -> Any:
    """Let the model pay once, and then answer with the result; the same in each process."""
    texts = [each.text for each in requests.messages if hasattr(each, "tool_name")]
    return tool_call("pay") if not texts else f"done: {texts[-1]}"


class Program:
    """A container of one process, with a durable and a plain service whose tool acts for the user."""

    def __init__(
        self, orders: Resource, oauth: OAuthServer, store: RunStore, *beans: Any, needs_approval: bool, **desk: Any
    ) -> None:
        client = type("Orders", (Orders, Protocol), {})
        auth = TokenExchange(oauth.url, "desk", SECRET, audience="orders")
        rest.register_rest_client(config_key="orders", auth=auth)(client)

        class Tools:
            def __init__(self, orders: client) -> None:  # type: ignore[valid-type]  # a class of this program
                self._orders: Any = orders

            @tool(requires_approval=needs_approval)
            async def pay(self) -> str:
                """Pay the order."""
                ran.append("pay")
                return f"paid for {(await self._orders.list())['subject']}"

        @register_ai_service(tools=Tools, **desk)
        class Desk(Protocol):
            @durable
            async def chat(self, text: str) -> Result[str]: ...

        @register_ai_service(tools=Tools)
        class Counter(Protocol):
            async def chat(self, text: str) -> Result[str]: ...

        for each in (Desk, Counter):
            each.__module__, each.__qualname__ = __name__, each.__name__  # the same in each program of a test
        self.desk, self.counter = Desk, Counter
        model = ScriptedChatModel([asking_first] * 20)
        options: Any = {"run_identity": ("tenant",), "take_over_runs": False}
        self.container = Container(models={"default": model}, seeds=(SecurityIdentity,), **options)
        self.container.register(Tools, client, Desk, Counter, rest.rest_settings("orders", url=orders.url), *beans)
        self.container.register_instance(store, RunStore)

    def acting_for(self, identity: SecurityIdentity) -> Any:
        return self.container.request_scope({SecurityIdentity: identity})

    async def ask(self, identity: SecurityIdentity, service: Any = None) -> Result[str]:
        async with self.acting_for(identity):
            return await self.container.get(service or self.desk).chat("Pay")


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


def user(name: str, token: str | None = None, **attributes: Any) -> SecurityIdentity:
    return SecurityIdentity(name, attributes={**attributes, **({} if token is None else {"token": token})})


async def everything_in(store: InMemoryRunStore, run_id: str) -> str:
    """Return all that a store has of a run, as text."""
    stored = await store.load(run_id)
    assert stored is not None
    records = await store.records(run_id)
    texts = [repr(getattr(stored, each.name)) for each in fields(stored)] + [repr(each) for each in records]
    return json.dumps(texts)


async def test_a_durable_call_has_the_token_of_its_caller_and_does_not_store_it(oauth, orders) -> None:
    store, token = Kept(), oauth.log_in("ann")
    program = Program(orders, oauth, store, needs_approval=False)

    async with program.container:
        result = await program.ask(user("ann", token))
        [run] = await program.container.runs.list()
        stored = await everything_in(store, run.id)

    assert result.content == "done: paid for ann"
    assert not any(each in stored for each in oauth.tokens)


@pytest.mark.parametrize("needs_approval", [False, True])
async def test_a_run_that_this_process_starts_has_the_token_until_it_is_suspended(
    oauth, orders, needs_approval
) -> None:
    store, token = Kept(), oauth.log_in("ann")
    program = Program(orders, oauth, store, needs_approval=needs_approval)

    async with program.container:
        runs = program.container.runs
        async with program.acting_for(user("ann", token)):
            run = await runs.start(program.container.get(program.desk).chat, "Pay")
        if not needs_approval:
            assert (await runs.result(run)).content == "done: paid for ann"
        else:
            await suspended(runs, run.id)
            [pending] = (await runs.get(run.id)).pending
            with pytest.raises(UnauthenticatedError):
                await runs.resume(run.id, {pending.id: approve()}, by=user("bob", oauth.log_in("bob")))
        stored = await everything_in(store, run.id)

    assert not any(each in stored for each in oauth.tokens)


class Interrupted(Kept):
    """A store that fails once, after a run has been taken."""

    has_failed = False

    async def records(self, run_id: str) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise ConnectionError("the database is away")
        return await super().records(run_id)


async def test_a_run_keeps_the_token_while_this_process_tries_to_execute_it(oauth, orders) -> None:
    store = Interrupted()
    program = Program(orders, oauth, store, needs_approval=False)

    async with program.container as here:
        async with program.acting_for(user("ann", oauth.log_in("ann"))):
            run = await here.runs.start(program.container.get(program.desk).chat, "Pay")
        async with asyncio.timeout(30):
            while not store.has_failed:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        await here.runs.execute(run.id)
        assert (await here.runs.result(run)).content == "done: paid for ann"


async def test_a_run_keeps_the_token_until_its_next_try(oauth, orders) -> None:
    retries = Retries(attempts=3, wait=timedelta(minutes=1))
    program = Program(orders, oauth, Kept(), needs_approval=False, run_retries=retries)
    oauth.reply = Answer({"error": "temporarily_unavailable"}, 503)

    async with program.container as here:
        async with program.acting_for(user("ann", oauth.log_in("ann"))):
            run = await here.runs.start(here.get(program.desk).chat, "Pay")
        async with asyncio.timeout(30):
            while (await here.runs.get(run.id)).error is None:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        oauth.reply = None
        await skip_time(here, timedelta(hours=1))
        await here.runs.execute(run.id)
        assert (await here.runs.result(run)).content == "done: paid for ann"

    assert ran == ["pay"] * 2


async def suspended(runs: Any, run_id: str) -> None:
    async with asyncio.timeout(30):
        while (await runs.get(run_id)).status != "suspended":  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("service", ["desk", "counter"])
async def test_a_resumed_run_has_the_token_of_the_starter_who_answers(oauth, orders, service) -> None:
    store = Kept()
    first = Program(orders, oauth, store, needs_approval=True)
    async with first.container:
        result = await first.ask(user("ann", oauth.log_in("ann")), getattr(first, service))
    oauth.revoke()  # the first token has ended in the meantime

    second = Program(orders, oauth, store, needs_approval=True)
    async with second.container as here:
        [pending] = result.pending
        answered = await here.runs.resume(
            result.run_id or "", {pending.id: approve()}, by=user("ann", oauth.log_in("ann"))
        )
        stored = await everything_in(store, result.run_id or "")

    assert answered.content == "done: paid for ann"
    assert not any(each in stored for each in oauth.tokens)


class Directory(IdentityLoader):
    """Loads identities with a token that the program got without the user."""

    token = ""

    async def load(self, identity: SecurityIdentity) -> SecurityIdentity:
        return SecurityIdentity(identity.name, attributes={"token": self.token})


@pytest.mark.parametrize("by", ["bob", "boss", "ann without a token", None])
async def test_a_resumed_run_has_the_token_of_the_identity_loader(oauth, orders, by) -> None:
    store = Kept()
    program = Program(orders, oauth, store, Directory, needs_approval=True)
    async with program.container as here:
        result = await program.ask(user("ann", oauth.log_in("ann")))
        Directory.token = oauth.log_in("ann, loaded")
        persons = {"bob": user("bob", oauth.log_in("bob")), "ann without a token": user("ann"), "boss": "boss"}
        [pending] = result.pending
        answered = await here.runs.resume(result.run_id or "", {pending.id: approve()}, by=persons.get(by or ""))

    assert answered.content == "done: paid for ann, loaded"


async def test_the_token_of_the_starter_who_answers_comes_first(oauth, orders) -> None:
    program = Program(orders, oauth, Kept(), Directory, needs_approval=True)
    async with program.container as here:
        result = await program.ask(user("ann", oauth.log_in("ann")))
        Directory.token = oauth.log_in("ann, loaded")
        [pending] = result.pending
        answers = {pending.id: approve()}
        answered = await here.runs.resume(result.run_id or "", answers, by=user("ann", oauth.log_in("ann")))

    assert answered.content == "done: paid for ann"


@pytest.mark.parametrize("service", ["desk", "counter"])
async def test_without_a_token_the_run_stays_with_its_answers_until_its_user_continues_it(
    oauth, orders, service
) -> None:
    store = Kept()
    program = Program(orders, oauth, store, needs_approval=True)
    async with program.container as here:
        result = await program.ask(user("ann", oauth.log_in("ann")), getattr(program, service))
        run_id, [pending] = result.run_id or "", result.pending
        for answers in ({pending.id: approve()}, {}, {}):
            with pytest.raises(UnauthenticatedError, match="no token of the user"):
                await here.runs.resume(run_id, answers, by=user("bob", oauth.log_in("bob")))
        run = await here.runs.get(run_id)
        assert (run.status, [each.answer for each in run.history]) == ("running", ["approve"])
        assert orders.http.received == []

        answered = await here.runs.resume(run_id, {}, by=user("ann", oauth.log_in("ann")))

    assert answered.content == "done: paid for ann"
    assert ran == ["pay"] * 4  # nobody was asked whether a call that has ended may run again


async def test_only_the_same_person_gives_a_run_the_token(oauth, orders) -> None:
    """A person of the same name in another tenant is somebody else."""
    program = Program(orders, oauth, Kept(), needs_approval=True)
    async with program.container as here:
        result = await program.ask(user("ann", oauth.log_in("ann"), tenant="acme"))
        [pending] = result.pending
        other = user("ann", oauth.log_in("the other ann"), tenant="evil")
        with pytest.raises(UnauthenticatedError):
            await here.runs.resume(result.run_id or "", {pending.id: approve()}, by=other)
        same = user("ann", oauth.log_in("ann"), tenant="acme")
        answered = await here.runs.resume(result.run_id or "", {}, by=same)

    assert answered.content == "done: paid for ann"


async def test_a_first_call_without_a_token_fails(oauth, orders) -> None:
    store = Kept()
    program = Program(orders, oauth, store, needs_approval=False)
    async with program.container as here:
        with pytest.raises(UnauthenticatedError):
            await program.ask(user("ann"))
        [run] = await here.runs.list()

    assert run.status == "failed"


async def test_a_process_that_takes_over_leaves_the_run_to_its_user(oauth, orders, caplog) -> None:
    caplog.set_level(logging.WARNING)
    store = Kept()
    first = Program(orders, oauth, store, needs_approval=True)
    async with first.container as here:
        result = await first.ask(user("ann", oauth.log_in("ann")))
        run_id, [pending] = result.run_id or "", result.pending
        with pytest.raises(UnauthenticatedError):
            await here.runs.resume(run_id, {pending.id: approve()}, by="boss")

    second = Program(orders, oauth, store, needs_approval=True)
    async with second.container as here:
        await here.runs.execute_in_background(run_id)
        async with asyncio.timeout(30):
            while "waits for its user" not in caplog.text:  # noqa: ASYNC110 - nothing else tells of it
                await asyncio.sleep(0.01)
        assert (await here.runs.get(run_id)).status == "running"
        assert (await here.runs.resume(run_id, {}, by=user("ann", oauth.log_in("ann")))).content == "done: paid for ann"


class Elsewhere(RunEngine):
    """An engine that leaves the runs of this process to others."""

    async def submit(self, run_id: str, generation: int) -> None: ...


@pytest.mark.parametrize("name", ["ann", ""])
async def test_a_process_that_begins_the_run_of_another_one_leaves_it_to_its_user(oauth, orders, name) -> None:
    """If it has one; the run of an anonymous caller fails."""
    store = Kept()
    first = Program(orders, oauth, store, Elsewhere, needs_approval=False)
    async with first.container as here:
        starter = user(name, oauth.log_in(name)) if name else SecurityIdentity.anonymous()
        async with first.acting_for(starter):
            run = await here.runs.start(here.get(first.desk).chat, "Pay")

    second = Program(orders, oauth, store, needs_approval=False)
    async with second.container as here:
        if not name:
            await here.runs.execute(run.id)
            assert (await here.runs.get(run.id)).status == "failed"
            return
        with pytest.raises(UnauthenticatedError):
            await here.runs.execute(run.id)
        assert (await here.runs.get(run.id)).status == "running"
        assert (await here.runs.resume(run.id, {}, by=user("ann", oauth.log_in("ann")))).content == "done: paid for ann"


async def test_a_run_that_is_started_without_a_token_fails(oauth, orders) -> None:
    program = Program(orders, oauth, Kept(), needs_approval=False)
    async with program.container as here:
        async with program.acting_for(user("ann")):
            run = await here.runs.start(here.get(program.desk).chat, "Pay")
        with pytest.raises(RunFailedError, match="no token of the user"):
            await here.runs.result(run)


async def test_the_tools_of_an_mcp_server_wait_for_the_user_too(oauth) -> None:
    auth = TokenExchange(oauth.url, "desk", SECRET, audience="crm")

    @register_ai_service
    @mcp_toolbox("crm")
    class Desk(Protocol):
        @durable
        async def chat(self, text: str) -> Result[str]: ...

    replies = [tool_call("whoami"), "done", "done", "done"]
    async with guarded_server(oauth) as (url, _):
        container = Container(models={"default": ScriptedChatModel(replies)}, seeds=(SecurityIdentity,))
        container.register(Desk).register_instance(Kept(), RunStore)
        server = mcp_server("crm", url=url, auth=auth, approval="all")
        async with container.register_instance(server, name="crm") as here:
            async with here.request_scope({SecurityIdentity: user("ann", oauth.log_in("ann"))}):
                result = await here.get(Desk).chat("Who?")
            run_id, [pending] = result.run_id or "", result.pending
            with pytest.raises(UnauthenticatedError):
                await here.runs.resume(run_id, {pending.id: approve()}, by="boss")
            answered = await here.runs.resume(run_id, {}, by=user("ann", oauth.log_in("ann")))

    assert [each.result for each in answered.tool_executions] == ["ann"]


class Cancellable:
    """A program of one run that has paid, and waits for the approval of shipping; paying is undone for the user."""

    def __init__(self, orders: Resource, oauth: OAuthServer) -> None:
        client = type("Orders", (Orders, Protocol), {})
        auth = TokenExchange(oauth.url, "desk", SECRET, audience="orders")
        rest.register_rest_client(config_key="orders", auth=auth)(client)

        class Tools:
            def __init__(self, orders: client) -> None:  # type: ignore[valid-type]  # a class of this program
                self._orders: Any = orders

            @tool
            async def pay(self) -> str:
                """Pay the order."""
                return "paid"

            @compensate_for(pay)
            async def refund(self) -> None:
                ran.append(f"refunded for {(await self._orders.list())['subject']}")

            @tool(requires_approval=True)
            async def ship(self) -> str:
                """Ship the order."""
                return "shipped"

        @register_ai_service(tools=Tools, compensate_on_failure=True)
        class Desk(Protocol):
            @durable
            async def chat(self, text: str) -> Result[str]: ...

        self.desk = Desk
        model = ScriptedChatModel([tool_call("pay"), tool_call("ship")])
        self.container = Container(models={"default": model}, seeds=(SecurityIdentity,), take_over_runs=False)
        self.container.register(Tools, client, Desk, rest.rest_settings("orders", url=orders.url))
        self.container.register_instance(Kept(), RunStore)

    async def ask(self, identity: SecurityIdentity) -> str:
        async with self.container.request_scope({SecurityIdentity: identity}):
            result = await self.container.get(self.desk).chat("Pay and ship")
        return result.run_id or ""


async def test_the_tools_of_a_run_are_undone_with_the_token_of_the_starter_who_cancels_it(oauth, orders) -> None:
    program = Cancellable(orders, oauth)
    async with program.container as here:
        run_id = await program.ask(user("ann", oauth.log_in("ann")))
        run = await here.runs.cancel(run_id, by=user("ann", oauth.log_in("ann")))

    assert (run.status, ran) == ("cancelled", ["refunded for ann"])


@pytest.mark.parametrize("by", ["bob", None])
async def test_a_run_that_another_person_cancels_ends(oauth, orders, caplog, by) -> None:
    """It does not wait for a user who may never come, and its log names what is not undone."""
    program = Cancellable(orders, oauth)
    async with program.container as here:
        run_id = await program.ask(user("ann", oauth.log_in("ann")))
        run = await here.runs.cancel(run_id, by=None if by is None else user(by, oauth.log_in(by)))

    assert (run.status, ran) == ("cancelled", [])
    assert "failed to undo tool 'pay'" in caplog.text
    assert "no token of the user" in caplog.text


async def test_a_server_without_a_token_does_not_keep_other_tools_from_being_undone(oauth) -> None:
    @application_scoped
    class Tools:
        @tool
        def pay(self) -> str:
            """Pay the order."""
            return "paid"

        @compensate_for(pay)
        def refund(self) -> None:
            ran.append("refunded")

        @tool(requires_approval=True)
        def ship(self) -> str:
            """Ship the order."""
            return "shipped"

    @register_ai_service(tools=Tools, compensate_on_failure=True)
    @mcp_toolbox("crm")
    class Desk(Protocol):
        @durable
        async def chat(self, text: str) -> Result[str]: ...

    auth = TokenExchange(oauth.url, "desk", SECRET, audience="crm")
    models = {"default": ScriptedChatModel([tool_call("pay"), tool_call("ship")])}
    async with guarded_server(oauth) as (url, _):
        container = Container(models=models, seeds=(SecurityIdentity,), take_over_runs=False).register(Desk)
        container.register_instance(Kept(), RunStore)
        async with container.register_instance(mcp_server("crm", url=url, auth=auth), name="crm") as here:
            async with here.request_scope({SecurityIdentity: user("ann", oauth.log_in("ann"))}):
                result = await here.get(Desk).chat("Pay and ship")
            run = await here.runs.cancel(result.run_id or "", by="boss")

    assert (run.status, ran) == ("cancelled", ["refunded"])
