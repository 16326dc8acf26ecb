"""What a run finds where it continues: seeds, identity, roles, attributes and notes."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, SecretStr

from toolbox import (
    Container,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    Result,
    application_scoped,
    invocation_attributes,
    register_ai_service,
    tool,
)
from toolbox.runs import IdentityLoader, InMemoryRunStore, approve
from toolbox.security import ForbiddenError, SecurityIdentity, roles_allowed
from toolbox.testing import tool_call

from .approved_refunds import REFUND, Desk, container, refund
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


class User(BaseModel):
    name: str


@dataclass
class Tenant:
    name: str


class Tickets:
    def __init__(self, user: User) -> None:
        self.user = user

    @tool(requires_approval=True)
    def close(self, ticket: int, tenant: Inject[Tenant | None], who: Inject[SecurityIdentity | None]) -> str:
        current = InvocationContext.current()
        assert current is not None
        ran.append((self.user, tenant, who.name if who else None, dict(current.attributes)))
        return "closed"


@register_ai_service(tools=Tickets)
class Help(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


CLOSE = tool_call("close", {"ticket": 1})


def help_desk(*replies: Any, store: Any, **options: Any) -> Container:
    options = {"run_seeds": (User, Tenant), "seeds": (SecurityIdentity,), **options}
    return container(*replies, store=store, services=(Help,), **options)


async def suspended_help(store: Any, **attributes: Any) -> str:
    async with help_desk(asks(CLOSE), store=store) as here:
        seeds = {User: User(name="ann"), Tenant: Tenant("acme"), SecurityIdentity: SecurityIdentity("ann", {"support"})}
        async with here.request_scope(seeds):
            with invocation_attributes(**attributes):
                return (await here.get(Help).ask("x")).run_id or ""


async def test_seeds_identity_and_attributes_are_there_again_in_another_process() -> None:
    store = InMemoryRunStore()
    run_id = await suspended_help(store, tenant="acme", limit=Decimal("1.5"))
    async with help_desk(says("done"), store=store) as here:
        scope = here.request_scope({User: User(name="the person who answers")})
        async with scope:
            with invocation_attributes(tenant="other", more=1):
                await here.runs.resume(run_id, {"0": approve()})

    assert ran == [(User(name="ann"), Tenant("acme"), "ann", {"tenant": "acme", "limit": "1.5"})]


async def test_an_attribute_that_cannot_be_written_is_named_when_the_call_is_suspended() -> None:
    with pytest.raises(IllegalConfigurationError, match="'lock'"):
        await suspended_help(InMemoryRunStore(), lock=object())


class Vault(BaseModel):
    keys: dict[str, SecretStr]


async def test_a_secret_that_would_be_lost_is_named_when_the_call_is_suspended() -> None:
    vault = Vault(keys={"door": SecretStr("sesame")})
    async with container(asks(REFUND), run_seeds=(Vault,)) as here, here.request_scope({Vault: vault}):
        with pytest.raises(IllegalConfigurationError, match=r"seed Vault .* contains a SecretStr") as raised:
            await here.get(Desk).chat("room", "refund")
        assert "sesame" not in str(raised.value)
        assert await here.runs.list() == []
    async with container(asks(REFUND)) as here:
        with (
            invocation_attributes(key=[SecretStr("sesame")]),
            pytest.raises(IllegalConfigurationError, match="'key'") as raised,
        ):
            await here.get(Desk).chat("room", "refund")
        assert "sesame" not in str(raised.value)
    async with container(asks(REFUND), asks(REFUND), run_seeds=(Vault,)) as here:
        async with here.request_scope({Vault: Vault(keys={"**********": SecretStr("")})}):
            with pytest.raises(IllegalConfigurationError, match="SecretStr"):
                await here.get(Desk).chat("room", "**********")
        assert (await here.get(Desk).chat("room", "**********")).pending  # stars of the user's own


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_identity_loader_refreshes_the_identity_or_refuses(is_async: bool) -> None:
    answers: dict[str, Any] = {"ann": None}

    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            async def later() -> Any:
                return answers[identity.name]

            return later() if is_async else answers[identity.name]

    store = InMemoryRunStore()
    run_id = await suspended_help(store)
    async with help_desk(says("done"), store=store).register(Directory) as here:
        with pytest.raises(ForbiddenError, match=r"'ann' is not allowed .*: Directory no longer knows this identity"):
            await here.runs.resume(run_id, {"0": approve()})
        answers["ann"] = "ann b."
        with pytest.raises(TypeError, match=r"Directory\.load returned str; return a SecurityIdentity or None"):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"
        answers["ann"] = SecurityIdentity("ann b.")
        await here.runs.resume(run_id, {"0": approve()})
    assert ran[0][2] == "ann b."


async def test_roles_are_checked_again_on_resume() -> None:
    roles = {"ann": {"support"}}

    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            return SecurityIdentity(identity.name, roles[identity.name])

    @tool(requires_approval=True)
    @roles_allowed("support")
    def close() -> str:
        ran.append("closed")
        return "closed"

    @register_ai_service(tools=close, on_unknown_tool=lambda error, context: "no such tool")
    class Closing(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    store = InMemoryRunStore()
    made = container(asks(tool_call("close")), says("done"), store=store, services=(Closing, Directory))
    async with made.register_instance(SecurityIdentity("guest"), SecurityIdentity) as here:
        async with here.request_scope({SecurityIdentity: SecurityIdentity("ann", {"support"})}):
            run_id = (await here.get(Closing).ask("x")).run_id or ""
        roles["ann"] = set()
        result = await here.runs.resume(run_id, {"0": approve()})

    assert result.tool_executions[0].result == "no such tool"
    assert ran == []


async def test_a_person_who_may_no_longer_call_the_service_cannot_continue_and_the_run_stays() -> None:
    roles: dict[str, set[str]] = {"ann": set()}

    @application_scoped
    class Directory(IdentityLoader):
        def load(self, identity: Any) -> Any:
            return SecurityIdentity(identity.name, roles[identity.name])

    @register_ai_service(tools=refund)
    @roles_allowed("support")
    class Guarded(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    made = container(asks(REFUND), says("done"), services=(Guarded, Directory), seeds=(SecurityIdentity,))
    async with made as here:
        async with here.request_scope({SecurityIdentity: SecurityIdentity("ann", {"support"})}):
            run_id = (await here.get(Guarded).ask("x")).run_id or ""
        with pytest.raises(ForbiddenError, match="support"):
            await here.runs.resume(run_id, {"0": approve()})
        run = await here.runs.get(run_id)
        assert (run.status, len(run.pending), run.history) == ("suspended", 1, ())
        roles["ann"] = {"support"}
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "done"


async def test_notes_of_the_invocation_are_there_again() -> None:
    @tool
    def remember(context: InvocationContext) -> str:
        context.notes["seen"] = [1, 2]
        context.notes["lock"] = object()
        return "ok"

    @tool(requires_approval=True)
    def recall(context: InvocationContext) -> str:
        ran.append(dict(context.notes))
        return "ok"

    @register_ai_service(tools=[remember, recall])
    class Noting(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("remember"), tool_call("recall")), says("x"), services=(Noting,)) as here:
        waiting = await here.get(Noting).ask("x")
        await here.runs.resume(waiting.run_id or "", {"1": approve()})
    assert ran == [{"seen": [1, 2]}]
