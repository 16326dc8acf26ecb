"""Who gets the answer of a `RunId`: only a caller with the method's roles and the same identity and attributes."""

from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from toolbox import (
    Container,
    EventListener,
    InvocationEvent,
    MemoryId,
    Result,
    ServiceFailedEvent,
    application_scoped,
    invocation_attributes,
    register_ai_service,
)
from toolbox.runs import RunConflictError, RunId, RunStore, StoredRun
from toolbox.security import ForbiddenError, SecurityIdentity, UnauthenticatedError, roles_allowed
from toolbox.testing import ScriptedChatModel

from .approved_refunds import REFUND, refund
from .replies import ANN, BOB, asks, says
from .test_durable import Kept

pytestmark = pytest.mark.anyio

NOBODY = SecurityIdentity.anonymous()


class Tenant(BaseModel):
    name: str


@register_ai_service(durable=True)
class Desk(Protocol):
    async def ask(self, run: RunId, room: MemoryId[str | None], text: str) -> str: ...

    @roles_allowed("support")
    async def secret(self, run: RunId, text: str) -> str: ...


def container(*replies: Any, store: Kept | None = None, **options: Any) -> Container:
    options = {"seeds": (SecurityIdentity, Tenant), "take_over_runs": False, **options}
    made = Container(models={"default": ScriptedChatModel(replies)}, **options).register(Desk)
    return made.register_instance(store or Kept(), RunStore)


@application_scoped
class Failures(EventListener):
    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, ServiceFailedEvent):
            self.errors.append(type(event.error).__name__)


async def asked(here: Container, by: SecurityIdentity, starts: bool, *args: Any, **seeds: Any) -> None:
    given = {SecurityIdentity: by, **({Tenant: seeds["tenant"]} if seeds else {})}
    async with here.request_scope(given):
        if starts:
            await here.runs.start(Desk.ask, "r", *(args or (None, "x")))
        else:
            await here.get(Desk).ask("r", *(args or (None, "x")))


BOTH_WAYS = pytest.mark.parametrize("starts", [False, True], ids=["call", "start"])


@BOTH_WAYS
async def test_a_caller_without_the_role_gets_the_error_of_the_roles_and_no_run_is_stored(starts: bool) -> None:
    async with container(says("hidden")).register(Failures) as here:

        async def secret(by: SecurityIdentity, run_id: str) -> Any:
            async with here.request_scope({SecurityIdentity: by}):
                if starts:
                    return await here.runs.start(Desk.secret, run_id, "x")
                return await here.get(Desk).secret(run_id, "x")

        await secret(ANN, "r")
        for run_id in ("r", "another"):
            with pytest.raises(ForbiddenError, match=r"Desk\.secret"):
                await secret(BOB, run_id)
            with pytest.raises(UnauthenticatedError):
                await secret(NOBODY, run_id)
        assert [each.id for each in await here.runs.list()] == ["r"]
        assert here.get(Failures).errors == ["ForbiddenError", "UnauthenticatedError"] * 2
        with pytest.raises(ForbiddenError):  # the role was revoked
            await secret(SecurityIdentity("ann"), "r")


@BOTH_WAYS
async def test_another_person_another_conversation_and_other_attributes_are_a_conflict(starts: bool) -> None:
    async with container(says("done")) as here:
        with invocation_attributes(tenant="acme", channel="web"):
            await asked(here, ANN, starts, "room", "x")
            await asked(here, ANN, starts, "room", "x")
            with pytest.raises(RunConflictError, match="another identity"):
                await asked(here, BOB, starts, "room", "x")
            with pytest.raises(RunConflictError, match="another identity"):
                await asked(here, NOBODY, starts, "room", "x")
            with pytest.raises(RunConflictError, match="other arguments"):
                await asked(here, ANN, starts, "another room", "x")
        with (
            invocation_attributes(tenant="other", request=7),
            pytest.raises(RunConflictError, match="other invocation attributes: channel, request, tenant;"),
        ):
            await asked(here, ANN, starts, "room", "x")


@BOTH_WAYS
async def test_named_attributes_of_the_identity_count(starts: bool) -> None:
    def ann(**attributes: Any) -> SecurityIdentity:
        return SecurityIdentity("ann", attributes=attributes)

    async with container(says("done"), run_identity=("tenant", "region")) as here:
        await asked(here, ann(tenant="acme", session=1), starts)
        await asked(here, ann(tenant="acme", session=2), starts)
        with pytest.raises(RunConflictError, match="other attributes of the identity: region, tenant"):
            await asked(here, ann(tenant="other", region="eu"), starts)
        with pytest.raises(RunConflictError, match="tenant"):
            await asked(here, ann(), starts)


@BOTH_WAYS
async def test_the_kept_seeds_of_an_anonymous_caller_count(starts: bool) -> None:
    acme, other = Tenant(name="acme"), Tenant(name="other")
    async with container(says("done"), run_seeds=(Tenant,), seeds=(SecurityIdentity,)) as here:
        await asked(here, NOBODY, starts, tenant=acme)
        await asked(here, NOBODY, starts, tenant=acme)
        with pytest.raises(RunConflictError, match=r"other seeds: .*Tenant"):
            await asked(here, NOBODY, starts, tenant=other)
    async with container(says("done"), run_seeds=(Tenant,), seeds=(SecurityIdentity,)) as here:
        await asked(here, ANN, starts, tenant=acme)
        await asked(here, ANN, starts, tenant=other)


@pytest.mark.parametrize("names", ["tenant", (1,), [None]])
def test_the_names_of_attributes_are_a_collection_of_texts(names: Any) -> None:
    with pytest.raises(TypeError, match="run_identity="):
        Container(run_identity=names)


class LosesConnections(Kept):
    """Creates a run, and loses the connection: a second try finds the run."""

    async def create(self, run: StoredRun, *args: Any, **options: Any) -> bool:
        await super().create(run, *args, **options)
        return await super().create(run, *args, **options)


@register_ai_service(tools=refund)
class Clerk(Protocol):
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


async def test_a_suspension_that_was_stored_before_its_connection_was_lost_is_no_conflict() -> None:
    store = LosesConnections()
    made = Container(models={"default": ScriptedChatModel([asks(REFUND), asks(REFUND)])}, take_over_runs=False)
    async with made.register(Clerk).register_instance(store, RunStore) as here:
        result = await here.get(Clerk).ask("r", "hi")
        assert (result.run_id, [each.id for each in result.pending]) == ("r", ["0"])
        with pytest.raises(RunConflictError):  # the same call again, whose run is another one
            await here.get(Clerk).ask("r", "hi")
