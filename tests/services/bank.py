"""A bank whose tools have compensations, and a service that uses them."""

from decimal import Decimal
from typing import Any, Protocol

from tests.listening import Events
from toolbox import (
    Container,
    EventListener,
    MemoryId,
    Result,
    TokenStream,
    ToolExecution,
    ToolExecutionResultMessage,
    ToolRetry,
    application_scoped,
    call_scoped,
    compensate_for,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import InMemoryRunStore, RunStore
from toolbox.testing import ScriptedChatModel, tool_call


class Bank:
    def __init__(self) -> None:
        self.accounts: dict[str, Decimal] = {}
        self.undone: list[Any] = []

    @tool
    def credit(self, name: str, euros: Decimal, note: str = "none") -> str:
        self.accounts[name] = self.accounts.get(name, Decimal()) + euros
        return f"TX-{name}"

    @compensate_for(credit)
    def uncredit(self, execution: ToolExecution) -> None:
        self.undone.append((execution.request.name, execution.request.arguments, execution.result))
        name = execution.result.removeprefix("TX-")
        self.accounts[name] = Decimal()

    @tool
    async def book(self, what: str, nights: int = 1) -> str:
        if what == "full":
            raise ValueError("no room")
        return f"booked {what}"

    @compensate_for("book")
    async def _cancel(self, what: str, nights: int) -> None:
        self.undone.append((what, nights))
        if what == "stuck":
            raise RuntimeError("cannot cancel")

    @tool
    def withdraw(self, name: str) -> str:
        raise ValueError(f"{name} has no money")

    @tool
    def again(self) -> str:
        raise ToolRetry("try again")


class Assistant(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> str: ...

    def events(self, text: str) -> TokenStream: ...

    def wait(self, text: str) -> str: ...


CREDIT = tool_call("credit", {"name": "ada", "euros": "10.50"})

WITHDRAW = tool_call("withdraw", {"name": "bob"})


def book(what: str, **more: Any) -> Any:
    return tool_call("book", {"what": what, **more})


def assistant(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel, Bank]:
    model, bank = ScriptedChatModel(replies), Bank()
    options = {"tools": [bank], "compensate_on_tool_errors": True, **options}
    return create_ai_service(Assistant, chat_model=model, **options), model, bank


def results(model: ScriptedChatModel) -> list[tuple[str, bool]]:
    found = (each for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage))
    return [(each.text, each.is_error) for each in found]


def rolled_back(name: str, by: str = "withdraw") -> tuple[str, bool]:
    return f"Tool '{name}' was executed successfully but was rolled back due to failure of tool '{by}'", True


@call_scoped
class Session:
    def __init__(self) -> None:
        self.rows: list[str] = []


@application_scoped
class Doubles(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> Any:
        return await proceed(call.with_arguments(seats=call.arguments["seats"] * 2))


class Hotel:
    @tool
    @interceptors(Doubles)
    def book(self, seats: int) -> str:
        return f"booked {seats}"

    @compensate_for(book)
    def unbook(self, seats: int) -> None:
        if seats > 10:
            raise ValueError("too late")

    @tool
    def pay(self) -> str:
        raise ValueError("no money")

    @tool(requires_approval=True)
    def sign(self) -> str:
        raise ValueError("no pen")


@register_ai_service(tools=Hotel, compensate_on_tool_errors=True)
class Trips(Protocol):
    async def plan(self, text: str) -> Result[str]: ...


def trips(*replies: Any, events: Events | None = None, store: RunStore | None = None) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    made.register(Trips, Hotel, Doubles).register_instance(events or Events(), EventListener)
    return made.register_instance(store or InMemoryRunStore(), RunStore)
