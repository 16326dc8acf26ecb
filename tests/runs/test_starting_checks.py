"""Checks at start: what a run needs later is known before anything runs."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import InitVar, dataclass
from datetime import date, datetime
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Protocol

import pytest
from pydantic import (
    AliasChoices,
    AliasGenerator,
    AliasPath,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    PlainSerializer,
    Secret,
    SecretStr,
    computed_field,
    field_serializer,
    model_serializer,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from toolbox import (
    ChatModel,
    Container,
    DemoChatModel,
    IllegalConfigurationError,
    Inject,
    Instance,
    InvocationContext,
    OpenAiChatModel,
    Result,
    application_scoped,
    compensate_for,
    create_ai_service,
    produces,
    register_ai_service,
    request_scoped,
    rest,
    system_message,
    tool,
    user_message,
)
from toolbox.handover import hands_over_to
from toolbox.interceptors import ToolInterceptor, interceptors
from toolbox.models import ModelRouter
from toolbox.runs import InMemoryRunStore, RunId, RunStore, durable
from toolbox.search import KeywordToolSearch
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel


class Connection:
    """A seed that cannot be kept."""


class User(BaseModel):
    name: str


@dataclass
class Tenant:
    name: str


class Kept(InMemoryRunStore):
    persistent = True


@request_scoped
class Audit:
    def __init__(self, connection: Connection, user: User) -> None:
        self.connection, self.user = connection, user


class Refunds:
    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    @tool(requires_approval=True)
    def refund(self, order: int) -> str:
        return "ok"


@register_ai_service(tools=Refunds)
class Clerk(Protocol):
    @tool
    async def help(self, text: str) -> str:
        """Help."""
        ...


@register_ai_service(tools=Clerk)
class Desk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def problems(*registered: Any, store: Any = None, **options: Any) -> list[str]:
    options = {"seeds": (Connection, User), **options}
    container = Container(models={"default": DemoChatModel()}, **options).register(*registered)
    if store is not None:
        container.register_instance(store, RunStore)
    return [str(each) for each in container.check()]


def test_a_request_seed_that_is_not_kept_is_reported_with_its_path() -> None:
    found = problems(Desk, Clerk, Audit, run_seeds=(User,))

    assert len(found) == 2
    assert found[0].startswith("Desk.chat -> Clerk.help -> Refunds.refund -> Refunds -> Audit -> Connection: ")
    assert found[1].startswith("Clerk.help -> Refunds.refund -> Refunds -> Audit -> Connection: ")
    assert "run_seeds" in found[0]


def test_kept_seeds_and_services_that_cannot_be_suspended_are_fine() -> None:
    class Plain:
        @tool
        def look(self, audit: Inject[Audit]) -> str:
            return "x"

    @register_ai_service(tools=Plain)
    class Viewer(Protocol):
        async def chat(self, text: str) -> str: ...

    @tool(requires_approval=True)
    def pay(user: Inject[User], who: Inject[SecurityIdentity | None], here: Inject[Connection | None]) -> str:
        return "x"

    @register_ai_service(tools=pay)
    class Payer(Protocol):
        async def chat(self, text: str) -> str: ...

    assert problems(Viewer, Audit) == []
    assert problems(Payer, run_seeds=(User,)) == []
    assert len(problems(Payer)) == 1


@request_scoped
class Lazy:
    def __init__(self, connection: Instance[Connection]) -> None: ...


@application_scoped
class Mailer:
    def __init__(self, audit: Instance[Audit]) -> None: ...


@request_scoped
class Careful:
    def __init__(self, connection: Instance[Connection | None], other: Connection | None) -> None: ...


@produces(scope="request")
def bytes_of(mailer: Mailer) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("wanted", "way"),
    [
        (Instance[Connection], "Connection"),
        (Instance[Audit], "Audit -> Connection"),
        (Lazy, "Lazy -> Connection"),
        (Mailer, "Mailer -> Audit -> Connection"),
        (Instance[Mailer], "Mailer -> Audit -> Connection"),
        (list[Mailer], "Mailer -> Audit -> Connection"),
        (bytes, "bytes -> Mailer -> Audit -> Connection"),
        (Careful, None),
        (Instance[Careful], None),
        (Instance[User], None),
    ],
)
@pytest.mark.parametrize("durable", [False, True])
def test_what_an_instance_looks_up_counts_on_each_way(wanted: Any, way: str | None, durable: bool) -> None:
    def pay(bean: Any) -> str:
        return "x"

    pay.__annotations__["bean"] = Inject[wanted]

    @register_ai_service(tools=tool(requires_approval=not durable)(pay), durable=durable)
    class Payer(Protocol):
        @user_message("{text}")
        async def chat(self, run: RunId, text: str) -> str: ...

    found = problems(Payer, Audit, Lazy, Mailer, Careful, bytes_of, run_seeds=(User,), store=Kept())

    assert [each.partition(":")[0] for each in found] == ([] if way is None else [f"Payer.chat -> pay -> {way}"])
    assert all("Container(run_seeds=…)" in each and "`Connection | None`" in each for each in found)


def test_what_a_client_and_the_key_of_a_model_look_up_counts_too() -> None:
    @request_scoped
    class Headers:
        def __init__(self, connection: Connection) -> None: ...

        def __call__(self) -> dict[str, str]:
            return {}

    def key(connection: Inject[Connection]) -> str:
        return "key"

    @rest.register_rest_client(base_url="http://127.0.0.1:9", headers=Headers)
    class Shop(Protocol):
        @rest.get("/orders")
        async def orders(self) -> str: ...

    @tool(requires_approval=True)
    def pay(shop: Inject[Shop]) -> str:
        return "x"

    @register_ai_service(tools=pay, model="small")
    class Payer(Protocol):
        async def chat(self, text: str) -> str: ...

    last = OpenAiChatModel("m", base_url="http://127.0.0.1:9/v1", api_key=key)
    small = OpenAiChatModel("m", base_url="http://127.0.0.1:9/v1", api_key="k", fallback=("last",))
    container = Container(models={"small": small, "last": last}, seeds=(Connection,)).register(Payer, Shop)

    assert {each.where for each in container.check()} == {
        "Payer.chat -> pay -> Shop -> Headers -> Connection",
        "Payer.chat -> ChatModel 'small' -> ChatModel 'last' -> Connection",
    }


def test_interceptors_that_need_a_seed_are_reported_too() -> None:
    class Logged(ToolInterceptor):
        def __init__(self, connection: Connection) -> None: ...

        async def around_tool(self, call: Any, proceed: Any) -> Any:
            return await proceed(call)

    @tool(requires_approval=True)
    def pay() -> str:
        return "x"

    @register_ai_service(tools=pay)
    @interceptors(request_scoped(Logged))
    class Payer(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = problems(Payer)
    assert problem.startswith("Payer.chat -> ")
    assert "Connection" in problem


@produces(scope="request")
def model_of_the_connection(connection: Connection) -> ChatModel:
    return DemoChatModel()


@produces(name="small", scope="request")
def small(connection: Connection) -> ChatModel:
    return DemoChatModel()


class Routed(ModelRouter):
    names = ("small",)

    def choose(self, request: Any, context: Any) -> str:
        return "small"


@request_scoped
class Found(KeywordToolSearch):
    def __init__(self, connection: Connection) -> None:
        super().__init__()


class Orders:
    @tool
    def order(self) -> str:
        return "x"

    @compensate_for("order")
    def undo(self, connection: Inject[Connection]) -> None: ...


@pytest.mark.parametrize(
    ("options", "models"),
    [
        pytest.param({}, [model_of_the_connection], id="the default model"),
        pytest.param({"model": "small"}, [small, DemoChatModel], id="a named model"),
        pytest.param({"model": Routed}, [small, DemoChatModel], id="a model that a router may choose"),
        pytest.param({"tools": Orders, "tool_search": Found}, [DemoChatModel], id="the tool search"),
        pytest.param({"tools": Orders, "compensate_on_failure": True}, [DemoChatModel], id="what undoes a tool"),
    ],
)
def test_models_searches_and_compensations_that_need_a_seed_are_reported_too(
    options: dict[str, Any], models: list[Any]
) -> None:
    @register_ai_service(durable=True, **options)
    class Durable(Protocol):
        async def ask(self, run: RunId, text: str) -> str: ...

    container = Container(seeds=(Connection,)).register(Durable, *models).register_instance(Kept(), RunStore)

    [problem] = container.check()
    assert problem.where.startswith("Durable.ask -> ")
    assert "the request seed Connection" in problem.what


def greeting(context: InvocationContext, connection: Inject[Connection]) -> str:
    return "Hello."


@register_ai_service
class Greeter(Protocol):
    @system_message(greeting)
    @tool
    async def greet(self, text: str) -> str:
        """Greet somebody."""
        ...


class Asking:
    """Asks a service in code of its own."""

    def __init__(self, greeter: Instance[Greeter]) -> None: ...

    @tool
    async def ask_greeter(self) -> str:
        return "x"


class Paying:
    @tool(requires_approval=True)
    def pay(self) -> str:
        return "x"


@register_ai_service(tools=[Paying, Greeter])
class WithTool(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(tools=[Paying, Asking])
class InCode(Protocol):
    async def ask(self, text: str) -> str: ...


@register_ai_service(tools=Paying)
class HandingOver(Protocol):
    @hands_over_to(Greeter.greet)
    async def ask(self, text: str) -> str: ...


@pytest.mark.parametrize("service", [WithTool, InCode, HandingOver])
def test_calls_within_a_run_that_need_a_seed_are_reported_too(service: type[Any]) -> None:
    [problem] = problems(service, Greeter)

    assert problem.startswith(f"{service.__name__}.ask -> ")
    assert "Greeter.greet -> Connection: " in problem


def test_a_service_that_reaches_itself_is_checked_once() -> None:
    class Again:
        def __init__(self, service: "Instance[Recursive]") -> None: ...

    def recall(context: InvocationContext, again: Inject[Again]) -> str:
        return "x"

    @register_ai_service(tools=Paying)
    class Recursive(Protocol):
        @system_message(recall)
        async def ask(self, text: str) -> str: ...

    Again.__init__.__annotations__["service"] = Instance[Recursive]

    assert problems(Recursive, Again) == []


def test_kept_seeds_must_be_pydantic_models_or_dataclasses() -> None:
    assert problems(run_seeds=(User, Tenant)) == []
    [problem] = problems(run_seeds=(User, Connection))
    assert "Connection" in problem
    assert "run_seeds" in problem


@register_ai_service(durable=True)
class Durable(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


def test_durable_methods_need_a_persistent_store() -> None:
    assert problems(Durable, store=Kept()) == []
    for store in (None, InMemoryRunStore()):
        [problem] = problems(Durable, store=store)
        assert problem.startswith("Durable.ask: ")
        assert "persistent" in problem


@pytest.mark.anyio
async def test_the_store_of_a_producer_is_checked_when_the_container_starts() -> None:
    from toolbox import produces

    @produces(scope="application")
    def store() -> RunStore:
        return InMemoryRunStore()

    container = Container(models={"default": DemoChatModel()}).register(Durable, store)
    with pytest.raises(IllegalConfigurationError, match="persistent"):
        async with container:
            await container.get(Durable).ask("r", "x")


def test_durable_methods_return_no_streams_and_take_values_that_can_be_stored() -> None:
    @register_ai_service
    class Streams(Protocol):
        @durable
        def ask(self, text: str) -> AsyncIterator[str]: ...

    class Opaque:
        pass

    @register_ai_service(durable=True)
    class Takes(Protocol):
        from toolbox import user_message

        @user_message("{text} {callback} {opaque}")
        async def ask(self, text: str, callback: Callable[[], int], opaque: Opaque) -> str: ...

    [stream] = problems(Streams, store=Kept())
    assert "stream" in stream
    callback, opaque = problems(Takes, store=Kept())
    assert "'callback'" in callback
    assert "'opaque'" in opaque


def test_services_without_a_container_are_checked_too() -> None:
    with pytest.raises(IllegalConfigurationError, match="persistent"):
        create_ai_service(Durable, chat_model=DemoChatModel())
    create_ai_service(Durable, chat_model=DemoChatModel(), run_store=Kept())


@pytest.mark.parametrize("options", [{"on_suspended": "wait"}, {"durable": "yes"}])
def test_invalid_options_of_services_are_problems(options: Any) -> None:
    @register_ai_service(**options)
    class Wrong(Protocol):
        async def ask(self, text: str) -> str: ...

    assert any(next(iter(options)) in each for each in problems(Wrong, store=Kept()))


# --- arguments that a person approves


class Hidden(BaseModel):
    amount: int
    to: str = Field("", exclude=True)


class Nested(BaseModel):
    items: list[Hidden]


class Rounded(BaseModel):
    amount: Decimal

    @field_serializer("amount")
    def show(self, amount: Decimal) -> str:
        return f"{amount:.0f}"


class Rewritten(BaseModel):
    amount: int

    @model_serializer
    def show(self) -> str:
        return "harmless"


@dataclass
class Initial:
    note: InitVar[str]
    amount: int = 0


class Paid(BaseModel):
    """Everything is shown: aliases and computed fields hide nothing."""

    model_config = ConfigDict(populate_by_name=True)

    amount: Decimal = Field(alias="Amount")
    at: datetime
    site: HttpUrl
    place: Path
    network: IPv4Address
    pattern: re.Pattern[str]
    code: Base64Bytes
    tags: Sequence[str] = ()
    next: "Paid | None" = None

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation shows
    @property
    def double(self) -> Decimal:
        return self.amount * 2


@dataclass
class Person:
    full_name: str


@pytest.mark.parametrize(
    ("kind", "path", "reason"),
    [
        (Hidden, "invoice.to", "exclude="),
        (Nested, "invoice.items.to", "exclude="),
        (dict[str, Hidden], "invoice.to", "exclude="),
        (Rounded, "invoice.amount", "serializer"),
        (Rewritten, "invoice", "serializer"),
        (Annotated[int, PlainSerializer(lambda value: 0)], "invoice", "serializer"),
        (SecretStr, "invoice", "secret"),
        (list[Secret[int]], "invoice", "secret"),
        (Initial, "invoice.note", "InitVar"),
    ],
)
def test_arguments_that_the_approving_person_would_not_see_are_problems(kind: Any, path: str, reason: str) -> None:
    def pay(invoice: Any) -> None: ...

    pay.__annotations__["invoice"] = kind

    @register_ai_service(tools=tool(requires_approval=True)(pay))
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Payments)
    [problem] = [each for each in container.check() if "approve" in str(each)]
    assert repr(path) in str(problem)
    assert reason in str(problem)
    with pytest.raises(IllegalConfigurationError, match="needs approval"):
        create_ai_service(Payments, chat_model=ScriptedChatModel([]))


class Split(BaseModel):
    amount: int = Field(validation_alias="euros", serialization_alias="total")


class ReadElsewhere(BaseModel):
    amount: int = Field(validation_alias="euros")


class WrittenElsewhere(BaseModel):
    amount: int = Field(serialization_alias="euros")


class FromPath(BaseModel):
    amount: int = Field(validation_alias=AliasPath("amounts", 0))


class Generated(BaseModel):
    model_config = ConfigDict(
        alias_generator=AliasGenerator(validation_alias=str.upper, serialization_alias=str.title),
    )
    amount: int


@pydantic_dataclass
class SplitData:
    amount: int = Field(validation_alias="euros", serialization_alias="total")


class Chosen(BaseModel):
    one: int = Field(validation_alias=AliasChoices("uno", "one"))
    two: int = Field(alias="due")
    three: int = Field(validation_alias=AliasChoices("tre", AliasPath("all", 3)), serialization_alias="tre")


class ByName(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: int = Field(validation_alias="euros")


@pydantic_dataclass(config=ConfigDict(validate_by_name=True))
class DataByName:
    amount: int = Field(validation_alias="euros")


@pytest.mark.parametrize("around", [lambda kind: kind, lambda kind: list[kind], lambda kind: dict[str, kind | None]])
@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (Split, "total"),
        (ReadElsewhere, "amount"),
        (WrittenElsewhere, "euros"),
        (FromPath, "amount"),
        (Generated, "Amount"),
        (SplitData, "total"),
        (Chosen, None),
        (ByName, None),
        (DataByName, None),
    ],
)
def test_fields_that_are_read_and_written_under_different_aliases_are_problems(
    kind: Any, written: str | None, around: Callable[[Any], Any]
) -> None:
    def pay(invoice: Any) -> None: ...

    pay.__annotations__["invoice"] = around(kind)

    @register_ai_service(tools=tool(requires_approval=True)(pay))
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    found = Container(models={"default": ScriptedChatModel([])}).register(Payments).check()

    assert len(found) == (0 if written is None else 1)
    for each in found:
        assert "'invoice.amount'" in each.what
        assert f"it is written as {written!r}" in each.what


@pytest.mark.parametrize("needs_approval", [False, True])
def test_arguments_that_are_shown_as_they_are_have_no_problem(needs_approval: bool) -> None:
    @tool(requires_approval=needs_approval)
    def pay(invoice: Paid, to: Person, when: date, euros: Decimal = Decimal(0)) -> None: ...

    @tool
    def look(secret: SecretStr, invoice: Hidden) -> None: ...

    @register_ai_service(tools=[pay, look])
    class Payments(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    assert Container(models={"default": ScriptedChatModel([])}).register(Payments).check() == []
