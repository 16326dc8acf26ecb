"""Programs that changed while a run waited."""

from dataclasses import replace
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from toolbox import Container, Inject, Result, register_ai_service, system_message, tool
from toolbox.runs import InMemoryRunStore, RunIncompatibleError, approve, reject
from toolbox.testing import tool_call

from .approved_refunds import REFUND, Desk, Invoice, container, run_id_of
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


def changed(kind: str) -> Any:
    """Return a service named Desk that differs in one respect from the one whose run is stored."""
    name = "other" if kind == "tool" else "pay"

    if kind == "tool arguments":

        @tool(requires_approval=True, name=name)
        def paying_to(euros: int, to: str) -> str:
            return "paid"

        pays: Any = paying_to
    else:

        @tool(requires_approval=True, name=name)
        def paying(euros: int) -> str:
            return "paid"

        pays = paying

    class Changed(Protocol):
        if kind == "method":

            async def asking(self, text: str) -> str: ...
        elif kind == "argument type":

            async def ask(self, number: int, text: str) -> str: ...  # type: ignore[misc]
        elif kind == "new parameter":

            async def ask(self, text: str, language: str) -> str: ...  # type: ignore[misc]
        elif kind == "return type":

            async def ask(self, number: int) -> Invoice: ...  # type: ignore[misc]
        else:

            async def ask(self, number: int) -> str: ...  # type: ignore[misc]

    from toolbox import user_message

    for method in ("ask", "asking"):
        if hasattr(Changed, method):
            parameters = "{text}" if kind in ("method", "argument type", "new parameter") else ""
            shown = "{number}" if kind == "argument type" or not parameters else ""
            shown += "{language}" if kind == "new parameter" else ""
            user_message(f"say {parameters} {shown}")(getattr(Changed, method))
    assert system_message
    Changed.__qualname__ = "Gone" if kind == "service" else "Stored"
    Changed.__name__ = Changed.__qualname__
    return register_ai_service(tools=pays)(Changed)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("service", "no service"),
        ("method", "no method"),
        ("tool", "no longer offers the tool 'pay'"),
        ("tool arguments", "no longer accepts the arguments"),
        ("argument type", "'text'"),
        ("new parameter", "number"),
        ("return type", "return type"),
    ],
)
async def test_a_program_that_changed_refuses_the_run_with_the_reason(kind: str, reason: str) -> None:
    store = InMemoryRunStore()
    original = changed("nothing")
    async with container(asks(tool_call("pay", {"euros": 5})), store=store, services=(original,)) as here:
        run_id = await run_id_of(here.get(original).ask(3))
    async with container(says("x"), store=store, services=(changed(kind),)) as here:
        with pytest.raises(RunIncompatibleError, match=reason):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"
    async with container(says("x"), store=store, services=(changed("nothing"),)) as here:
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "x"


async def test_a_seed_whose_type_changed_refuses_the_run() -> None:
    def program(seed: Any, *replies: Any) -> Container:
        def pay(user: Any) -> str:
            ran.append(user.name)
            return "paid"

        pay.__annotations__["user"] = Inject[seed]
        pay = tool(requires_approval=True)(pay)

        class Stored(Protocol):
            async def ask(self, text: str) -> Result[str]: ...

        Stored.__qualname__ = "Stored"
        return container(*replies, store=store, services=(register_ai_service(tools=pay)(Stored),), run_seeds=(seed,))

    class Older(BaseModel):
        name: str

    class Newer(BaseModel):
        name: str
        age: int

    Older.__qualname__ = Newer.__qualname__ = "Customer"
    store = InMemoryRunStore()
    async with program(Older, asks(tool_call("pay"))) as here, here.request_scope({Older: Older(name="ann")}):
        [service] = [cls for cls in here._internals.host.plans if cls.__qualname__ == "Stored"]
        run_id = (await here.get(service).ask("x")).run_id or ""
    async with program(Newer, says("x")) as here:
        with pytest.raises(RunIncompatibleError, match="age"):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"
    async with program(Older, says("x")) as here:
        assert (await here.runs.resume(run_id, {"0": approve()})).content == "x"
    assert ran == ["ann"]


class Wine(BaseModel):
    name: str


def nested(kind: str) -> Any:
    """Return a service whose tool is another service; one of them differs from those whose run is stored."""

    class Cellar:
        if kind != "inner tool":

            @tool(requires_approval=True)
            def fetch(self, wine: str) -> str:
                ran.append(wine)
                return "fetched"

        @tool
        def look(self) -> str: ...

    class Sommelier(Protocol):
        if kind == "inner method":

            @tool(name="advise")
            async def recommend(self, wish: str) -> str: ...
        elif kind == "inner parameter":

            @tool
            async def advise(self, wish: str, budget: int) -> str: ...  # type: ignore[misc]
        else:

            @tool
            async def advise(self, wish: str) -> str: ...  # type: ignore[misc]

    if kind == "inner parameter":
        from toolbox import user_message

        user_message("{wish} {budget}")(Sommelier.advise)

    @tool
    def advise(wish: str) -> str:
        ran.append(wish)
        return "water"

    class Waiter(Protocol):
        async def serve(self, wish: str) -> Result[str]: ...

    for each, name in ((Sommelier, "Sommelier"), (Waiter, "Waiter")):
        each.__qualname__ = each.__name__ = "Renamed" if (kind, name) == ("inner service", "Sommelier") else name
    inner = register_ai_service(tools=Cellar)(Sommelier)
    tools = {"outer tool": (), "no service": advise}.get(kind, inner)
    return register_ai_service(tools=tools)(Waiter), inner


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("inner service", "no method 'advise' in .*Sommelier"),
        ("inner method", "no method 'advise'"),
        ("inner tool", "no longer offers the tool 'fetch'"),
        ("inner parameter", r"tool 'advise' no longer accepts the arguments of call 0 \(budget: Field required\)"),
        ("outer tool", "no longer offers the tool 'advise'"),
        ("no service", r"the tool 'advise' of Waiter.serve is no longer .*Sommelier.advise"),
    ],
)
async def test_a_nested_service_that_changed_refuses_the_run_with_the_reason(kind: str, reason: str) -> None:
    store = InMemoryRunStore()
    advice, fetching = tool_call("advise", {"wish": "red"}), tool_call("fetch", {"wine": "merlot"})
    outer, inner = nested("nothing")
    async with container(asks(advice), asks(fetching), store=store, services=(outer, inner)) as here:
        suspended = await here.get(outer).serve("wine")
        assert [each.id for each in suspended.pending] == ["0/0"]
    changed_outer, changed_inner = nested(kind)
    services = (changed_outer,) if kind in ("outer tool", "no service") else (changed_outer, changed_inner)
    if kind in ("outer tool", "no service"):
        services = (*services, changed_inner)
    async with container(says("x"), store=store, services=services) as here:
        for answers in ({"0/0": approve()}, {"0/0": reject()}):
            with pytest.raises(RunIncompatibleError, match=reason):
                await here.runs.resume(suspended.run_id or "", answers)
        run = await here.runs.get(suspended.run_id or "")
        assert (run.status, run.pending) == ("suspended", suspended.pending)
    assert ran == []
    async with container(says("inner"), says("x"), store=store, services=nested("nothing")) as here:
        assert (await here.runs.resume(suspended.run_id or "", {"0/0": approve()})).content == "x"
    assert ran == ["merlot"]


class User(BaseModel):
    name: str


async def test_a_seed_that_is_not_kept_any_more_refuses_the_run() -> None:
    store = InMemoryRunStore()
    async with (
        container(asks(REFUND), store=store, run_seeds=(User,)) as here,
        here.request_scope({User: User(name="ann")}),
    ):
        run_id = (await here.get(Desk).chat("room", "x")).run_id or ""
    async with container(says("x"), store=store) as here:
        with pytest.raises(RunIncompatibleError, match=r"seed .*User, which is not in run_seeds= any more"):
            await here.runs.resume(run_id, {"0": approve()})
        assert (await here.runs.get(run_id)).status == "suspended"


def paying(requires_approval: Any, deferred: bool = False) -> Any:
    @tool(requires_approval=requires_approval, deferred=deferred)
    def pay(euros: int) -> str:
        ran.append(euros)
        return "paid"

    class Paying(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    Paying.__qualname__ = "Paying"
    return register_ai_service(tools=pay)(Paying)


@pytest.mark.parametrize(
    ("answer", "paid"),
    [(approve(), [5]), (reject("no"), []), (approve(arguments={"euros": 6}), [6])],
    ids=["approve", "reject", "edit"],
)
async def test_a_tool_that_needs_no_approval_any_more_takes_the_answer_all_the_same(answer: Any, paid: Any) -> None:
    store, before = InMemoryRunStore(), paying(True)
    async with container(asks(tool_call("pay", {"euros": 5})), store=store, services=(before,)) as here:
        run_id = (await here.get(before).ask("x")).run_id or ""
    async with container(says("x"), store=store, services=(paying(False),)) as here:
        assert (await here.runs.resume(run_id, {"0": answer})).content == "x"
    assert ran == paid


async def test_a_document_of_another_version_refuses_the_run() -> None:
    store = InMemoryRunStore()
    async with container(asks(REFUND), store=store) as here:
        run_id = (await here.get(Desk).chat("room", "x")).run_id or ""
        stored = await store.load(run_id)
        assert stored is not None
        newer = replace(stored, document=stored.document.replace('"version": 1', '"version": 2'))
        store._runs[run_id].run = newer
        with pytest.raises(RunIncompatibleError, match="format version 2"):
            await here.runs.resume(run_id, {"0": approve()})
