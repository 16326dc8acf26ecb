"""Who may answer a call that waits: `approvers` and `not_self` hold for every kind of answer."""

import pickle
from typing import Any, Protocol

import pytest

from toolbox import Container, IllegalConfigurationError, Result, create_ai_service, register_ai_service, tool
from toolbox.errors import RunStoreError
from toolbox.runs import (
    AnswerForbiddenError,
    IdentityLoader,
    InMemoryRunStore,
    RunAnswerError,
    RunId,
    RunStore,
    ToolDeferred,
    approve,
    fail,
    reject,
    respond,
    retry,
)
from toolbox.security import SecurityIdentity, permit_all
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import ANN, BOB, asks, ran, says
from .test_durable import Kept

pytestmark = pytest.mark.anyio

BOTH = {"approvers": ("manager",), "not_self": True}
MANAGER_WHO_ASKED = SecurityIdentity("ann", {"manager"})
WAIT = asks(tool_call("pay", {}))


def service(**options: Any) -> type[Any]:
    @tool(**options)
    def pay() -> str:
        ran.append("paid")
        if options.get("deferred"):
            raise ToolDeferred(reason="the bank answers later")
        return "paid"

    @register_ai_service(tools=pay, durable=True)
    class Payments(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    return Payments


def container(store: RunStore, payments: type[Any], *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, seeds=(SecurityIdentity,), take_over_runs=False)
    return made.register(payments).register_instance(store, RunStore)


async def started(kind: str, starter: SecurityIdentity, **options: Any) -> tuple[Kept, type[Any]]:
    """Return a store with a run `r` whose call waits in this way, and its service."""
    ways: dict[str, dict[str, Any]] = {
        "approval": {"requires_approval": True},
        "deferred": {"deferred": True},
        "unknown_outcome": {"on_unknown_outcome": "ask"},
    }
    store, payments = Kept(), service(**ways[kind], **options)
    if kind == "unknown_outcome":
        store.dies_on = "result:0"
    async with container(store, payments, WAIT) as here, here.request_scope({SecurityIdentity: starter}):
        if kind == "unknown_outcome":
            with pytest.raises(RunStoreError):
                await here.get(payments).ask("r", "x")
        else:
            await here.get(payments).ask("r", "x")
    async with container(store.restarted(), payments) as here:
        [call] = (await here.runs.resume("r", {})).pending
    assert call.kind == kind
    ran.clear()
    return store, payments


ANSWERS: list[tuple[str, Any]] = [
    ("approval", approve()),
    ("approval", reject("no")),
    ("deferred", respond("paid")),
    ("deferred", fail("no")),
    ("unknown_outcome", respond("paid")),
    ("unknown_outcome", retry()),
    ("unknown_outcome", fail("no")),
]


@pytest.mark.parametrize(("kind", "answer"), ANSWERS, ids=lambda each: getattr(each, "kind", each))
async def test_only_another_person_with_the_role_may_answer_whatever_the_answer_is(kind: str, answer: Any) -> None:
    store, payments = await started(kind, ANN, **BOTH)
    async with container(store, payments, says("done")) as here:
        for by, status in [
            (None, 401),
            (SecurityIdentity.anonymous(), 401),
            ("bob", 403),
            (ANN, 403),
            (SecurityIdentity("carl"), 403),
            (MANAGER_WHO_ASKED, 403),
        ]:
            with pytest.raises(AnswerForbiddenError, match=r"another person|manager") as raised:
                await here.runs.resume("r", {"0": answer}, by=by)
            assert (raised.value.status, raised.value.is_anonymous) == (status, status == 401)
            assert (await here.runs.get("r")).status == "suspended"
        assert ran == []
        assert (await here.runs.resume("r", {"0": answer}, by=BOB)).content == "done"


async def test_the_error_of_a_refused_person_is_a_refused_answer_and_survives_pickling() -> None:
    error = AnswerForbiddenError("r", "call 0 needs another person", is_anonymous=True)
    assert isinstance(error, RunAnswerError)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.run_id, copied.reason, copied.problems, copied.status) == (
        "run r: call 0 needs another person",
        "r",
        "call 0 needs another person",
        (),
        401,
    )


# --- not_self and anonymous callers


@pytest.mark.parametrize("is_open", [False, True], ids=["", "permit_all"])
async def test_a_tool_with_not_self_is_not_offered_to_anonymous_callers(is_open: bool) -> None:
    @tool(requires_approval=True, not_self=True)
    def pay() -> str:
        return "paid"

    if is_open:
        permit_all(pay)

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([says("hello"), says("hello")])
    made = Container(models={"default": model}, seeds=(SecurityIdentity,)).register(Payments)
    async with made as here:
        await here.get(Payments).ask("x")
        async with here.request_scope({SecurityIdentity: ANN}):
            await here.get(Payments).ask("x")
    assert [len(each.tool_specifications) for each in model.requests] == [0, 1]


def test_not_self_in_a_service_that_never_has_an_identity_is_a_problem() -> None:
    @tool(requires_approval=True, not_self=True)
    def pay() -> str:
        return "paid"

    @register_ai_service(tools=pay)
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    with pytest.raises(IllegalConfigurationError, match="identity="):
        create_ai_service(Payments, chat_model=ScriptedChatModel([]))


@pytest.mark.parametrize(("kind", "answer"), ANSWERS, ids=lambda each: getattr(each, "kind", each))
async def test_a_run_of_an_unknown_starter_may_only_be_rejected_and_failed(kind: str, answer: Any) -> None:
    store, payments = await started(kind, SecurityIdentity.anonymous())  # of an older program, without not_self
    ways: dict[str, Any] = {"approval": {"requires_approval": True}, "deferred": {"deferred": True}}
    payments = service(**ways.get(kind, {"on_unknown_outcome": "ask"}), not_self=True)
    async with container(store, payments, says("done")) as here:
        if answer.kind in ("reject", "fail"):
            result = await here.runs.resume("r", {"0": answer}, by=BOB)
            assert result.content == "done"
            assert [(each.result, each.is_error) for each in result.tool_executions] == [("no", True)]
        else:
            with pytest.raises(AnswerForbiddenError, match=r"unknown who asked .* cancel the run"):
                await here.runs.resume("r", {"0": answer}, by=BOB)
            assert (await here.runs.cancel("r")).status == "cancelled"
    assert ran == []


@pytest.mark.parametrize("options", [{"deferred": True}, {"on_unknown_outcome": "ask"}, {"requires_approval": True}])
def test_approvers_are_allowed_wherever_a_call_can_wait(options: Any) -> None:
    assert tool(**options, **BOTH) is not None
    with pytest.raises(TypeError, match="deferred=True"):
        tool(approvers=("manager",))


async def test_stores_in_memory_keep_the_persons_of_every_kind_of_call() -> None:
    """The stored rules count if the tool is gone from the program of the person who answers."""
    store = InMemoryRunStore()
    store.persistent = True

    @tool(deferred=True, approvers=("manager",))
    def order() -> str:
        raise ToolDeferred

    @register_ai_service(tool_provider=lambda request: (order,), durable=True)
    class Orders(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    async with container(store, Orders, asks(tool_call("order", {})), says("done")) as here:
        await here.get(Orders).ask("r", "x")
        with pytest.raises(AnswerForbiddenError, match="manager"):
            await here.runs.resume("r", {"0": respond("ordered")}, by=ANN)
        assert (await here.runs.resume("r", {"0": respond("ordered")}, by=BOB)).content == "done"


# --- the identity of a run


async def test_the_identity_is_loaded_again_when_a_run_continues_not_for_the_call_that_makes_it() -> None:
    asked: list[str] = []

    class Directory(IdentityLoader):
        def load(self, identity: SecurityIdentity) -> SecurityIdentity:
            asked.append(identity.name)
            return identity

    store, payments = Kept(), service(requires_approval=True)
    here = container(store, payments, WAIT, says("done")).register(Directory)
    async with here:
        async with here.request_scope({SecurityIdentity: ANN}):
            await here.get(payments).ask("r", "x")
        assert asked == []
        assert (await here.runs.resume("r", {"0": approve()})).content == "done"
    assert set(asked) == {"ann"}
