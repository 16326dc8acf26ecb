"""What a type checker knows of runs. Checked by mypy and pyright, never run."""

from typing import Any, Protocol, assert_type

from pydantic import BaseModel

from toolbox import Container, InvocationContext, Result, TokenStream, register_ai_service, tool
from toolbox.runs import (
    IdempotencyKey,
    Run,
    RunEngine,
    RunEvent,
    RunId,
    Runs,
    approve,
    durable,
)


class Order(BaseModel):
    euros: int


class Receipt(BaseModel):
    number: str


class Mail:
    @tool(on_unknown_outcome="ask")
    async def send(self, to: str, key: IdempotencyKey) -> None: ...


@register_ai_service(tools=[Mail], durable=True)
class Transfers(Protocol):
    async def transfer(self, run: RunId, order: Order) -> Receipt: ...

    async def explain(self, question: str, *, language: str = "English") -> Result[str]: ...

    @durable
    async def count(self, text: str) -> int: ...


class Engine:
    async def submit(self, run_id: str, generation: int) -> None: ...


def needs_a_reason(arguments: dict[str, Any], context: InvocationContext) -> bool | str:
    return "too much" if arguments["euros"] > 100 else False


async def needs_a_person(arguments: dict[str, Any], context: InvocationContext) -> str | bool:
    return True


class Payments:
    @tool(requires_approval=needs_a_reason)
    def pay(self, euros: int) -> None: ...

    @tool(requires_approval=needs_a_person)
    def give(self, euros: int) -> None: ...


def a_result_has_ids(result: Result[str]) -> None:
    assert_type(result.response_id, str | None)
    assert_type([each.call_id for each in result.pending], list[str])


async def starting_a_bound_method(runs: Runs, transfers: Transfers, order: Order) -> None:
    run = await runs.start(transfers.transfer, "order-7", order)
    assert_type(run, Run[Receipt])
    assert_type(await runs.result(run), Receipt)
    assert_type(await runs.result(run, timeout=5.0), Receipt)
    counted = await runs.start(transfers.count, text="how many?")
    assert_type(await runs.result(counted), int)


async def starting_a_method_of_the_class(runs: Runs, order: Order) -> None:
    run = await runs.start(Transfers.transfer, "order-7", order)
    assert_type(run, Run[Receipt])


async def the_result_of_a_method_that_returns_a_result(runs: Runs, transfers: Transfers) -> None:
    run = await runs.start(transfers.explain, "why?", language="German")
    assert_type(run, Run[Result[str]])
    assert_type((await runs.result(run)).content, str)


async def wrong_arguments_are_errors(runs: Runs, transfers: Transfers, order: Order) -> None:
    await runs.start(transfers.transfer, "order-7")  # type: ignore[call-overload]  # no order
    await runs.start(transfers.transfer, "order-7", 5)  # type: ignore[call-overload]  # no Order
    await runs.start(transfers.transfer, "order-7", order, 5)  # type: ignore[call-overload]  # one too many
    await runs.start(transfers.explain, "why?", lang="German")  # type: ignore[call-arg]  # an unknown name
    await runs.start(order, "order-7")  # type: ignore[call-overload]  # no method


async def the_rest_of_runs(container: Container, runs: Runs) -> None:
    assert_type(container.runs, Runs)
    assert_type(await runs.get("order-7"), Run[Any])
    assert_type(await runs.list(status="suspended", service=Transfers, limit=5), list[Run[Any]])
    assert_type(await runs.resume("order-7", {"0": approve()}, by="ann"), Result[Any])
    assert_type(await runs.result("order-7"), Any)
    assert_type(await runs.execute("order-7", timeout=5.0), Run[Any])
    async for event in runs.events("order-7", after="3"):
        assert_type(event, RunEvent)
    await runs.list(status="done")  # type: ignore[arg-type]  # an unknown status
    await runs.resume("order-7", {"0": True})  # type: ignore[dict-item]  # no answer


def an_engine_needs_only_submit() -> RunEngine:
    return Engine()


class Streams(Protocol):
    def talk(self, text: str) -> TokenStream: ...


async def a_stream_is_not_started(runs: Runs, streams: Streams) -> None:
    await runs.start(streams.talk, "hello")  # type: ignore[call-overload]  # not async
