"""One method of a class as a tool: `tools=Calculator.add`, `@toolbox(Calculator.add)`."""

from typing import Any, ClassVar, Protocol

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    Inject,
    Result,
    ToolExecutionResult,
    application_scoped,
    compensate_for,
    create_ai_service,
    produces,
    register_ai_service,
    request_scoped,
    tool,
    tool_executor_from,
    tool_specification_from,
    tool_specifications_from,
    toolbox,
)
from toolbox.guardrails import (
    GuardrailResult,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
    tool_output_guardrails,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.security import SecurityIdentity, permit_all, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Rates:
    factor = 10


class Calculator:
    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    @tool
    def scale(self, number: int) -> int:
        """Multiply by the rate."""
        return number * self.rates.factor

    @tool
    def negate(self, number: int) -> int:
        return -number

    @tool
    @staticmethod
    def zero() -> int:
        return 0

    def unmarked(self, number: int) -> int:
        return number


class Ten(Calculator):
    """Inherits its tools."""


@register_ai_service(tools=Calculator.scale)
class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    @toolbox(Calculator.negate, Calculator.zero)
    async def turn(self, text: str) -> Result[str]: ...


def scripted(*replies: Any) -> dict[str, ScriptedChatModel]:
    return {"default": ScriptedChatModel([*replies, "done"])}


def names_in(model: ScriptedChatModel) -> list[str]:
    return [each.name for each in model.requests[0].tool_specifications]


async def test_a_method_is_the_only_tool_of_its_class_and_its_class_a_bean() -> None:
    models = scripted(tool_call("scale", {"number": 4}))
    async with Container(models=models).register(Assistant, Rates) as container:
        result = await container.get(Assistant).chat("4?")

    assert names_in(models["default"]) == ["scale"]
    assert [each.result_object for each in result.tool_executions] == [40]
    assert models["default"].requests[0].tool_specifications[0].description == "Multiply by the rate."


async def test_toolbox_takes_methods_and_static_methods() -> None:
    models = scripted(tool_call("negate", {"number": 4}), tool_call("zero"))
    async with Container(models=models).register(Assistant, Rates) as container:
        result = await container.get(Assistant).turn("4?")

    assert names_in(models["default"]) == ["negate", "zero"]
    assert [each.result_object for each in result.tool_executions] == [-4, 0]


async def test_a_class_inside_a_function_is_found() -> None:
    class Local:
        @tool
        def hello(self) -> str:
            return "from a local class"

    class Outer:
        class Inner:
            @tool
            def bye(self) -> str:
                return "from a class in a class"

    @register_ai_service(tools=[Local.hello, Outer.Inner.bye])
    class Greeter(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    async with Container(models=scripted(tool_call("hello"), tool_call("bye"))).register(Greeter) as container:
        result = await container.get(Greeter).chat("Hello")

    assert [each.result for each in result.tool_executions] == ["from a local class", "from a class in a class"]


async def test_the_bean_is_looked_up_for_each_call_in_its_scope() -> None:
    made: list[int] = []

    @request_scoped
    class Basket:
        def __init__(self) -> None:
            made.append(len(made))
            self.items = 0

        @tool
        def put(self) -> int:
            self.items += 1
            return self.items

    @register_ai_service(tools=Basket.put)
    class Shop(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    models = {"default": ScriptedChatModel([tool_call("put"), tool_call("put"), "ok"] * 2)}
    async with Container(models=models).register(Shop) as container:
        for _ in range(2):
            async with container.request_scope():
                result = await container.get(Shop).chat("Put")
                assert [each.result_object for each in result.tool_executions] == [1, 2]

    assert made == [0, 1]


async def test_an_inherited_method_belongs_to_the_registered_subclass() -> None:
    @register_ai_service(tools=Ten.scale)
    class Inheriting(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    seen: list[type] = []

    class Watching(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            seen.append(type(self))
            return await proceed(call)

    @interceptors(Watching)
    class Watched(Calculator):
        pass

    models = scripted(tool_call("scale", {"number": 1}))
    async with Container(models=models).register(Inheriting, Rates, Watched) as container:
        result = await container.get(Inheriting).chat("1?")

    assert seen == [Watching]
    assert [each.result_object for each in result.tool_executions] == [10]


async def test_a_producer_and_an_override_provide_the_class() -> None:
    @produces(scope="application")
    def calculator() -> Calculator:
        rates = Rates()
        rates.factor = 3
        return Calculator(rates)

    class Fake(Calculator):
        def scale(self, number: int) -> int:
            return -1

    models = {"default": ScriptedChatModel([tool_call("scale", {"number": 4}), "ok"] * 2)}
    async with Container(models=models).register(Assistant, Rates, calculator) as container:
        result = await container.get(Assistant).chat("4?")
        with container.override(Calculator, Fake(Rates())):
            replaced = await container.get(Assistant).chat("4?")

    assert [each.result_object for each in (*result.tool_executions, *replaced.tool_executions)] == [12, -1]


# --- services


@register_ai_service
class Cook(Protocol):
    @tool
    async def cook(self, dish: str) -> str:
        """Cook a dish."""
        ...

    @tool
    async def clean(self, room: str) -> str:
        """Clean the kitchen."""
        ...


@register_ai_service(tools=Cook.cook)
class Waiter(Protocol):
    async def serve(self, wish: str) -> Result[str]: ...


async def test_a_method_of_a_service_is_a_tool_without_memory() -> None:
    models = {"default": ScriptedChatModel([tool_call("cook", {"dish": "soup"}), "soup is ready", "Here."])}
    async with Container(models=models).register(Waiter) as container:
        result = await container.get(Waiter).serve("soup")

    assert names_in(models["default"]) == ["cook"]
    assert [each.result for each in result.tool_executions] == ["soup is ready"]


async def test_services_that_list_methods_of_each_other_are_a_cycle() -> None:
    @register_ai_service
    class Left(Protocol):
        @tool
        async def left(self, text: str) -> str:
            """Left."""
            ...

    @register_ai_service(tools=Left.left)
    class Right(Protocol):
        @tool
        async def right(self, text: str) -> str:
            """Right."""
            ...

    register_ai_service(tools=Right.right)(Left)
    found = [each.what for each in Container(models=scripted()).register(Left, Right).check()]

    assert [each for each in found if "tools of each other" in each]


# --- what decorators name at the class applies


@application_scoped
class Stars(ToolOutputGuardrail):
    async def validate(self, request: ToolOutputGuardrailRequest) -> GuardrailResult:
        return self.success_with(f"*{request.result.text}*")


class Doubling(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        first, second = await proceed(call), await proceed(call)
        return ToolExecutionResult(first.text + second.text)


@roles_allowed("clerk")
@interceptors(Doubling)
@tool_output_guardrails(Stars)
class Ledger:
    undone: ClassVar[list[str]] = []

    @tool
    def book(self, name: str) -> str:
        return name

    @tool
    @permit_all
    def read(self) -> str:
        return "read"

    @tool
    @permit_all
    def fail(self) -> str:
        raise ValueError("broken")

    @compensate_for(book)
    def unbook(self, name: str) -> None:
        self.undone.append(name)

    @compensate_for("read")
    def forget(self) -> None: ...


@register_ai_service(tools=[Ledger.book, Ledger.read])
class Clerk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


async def test_the_roles_guardrails_and_interceptors_of_the_class_apply() -> None:
    models = scripted(tool_call("book", {"name": "a"}))
    container = Container(models=models, seeds=[SecurityIdentity]).register(Clerk)
    async with container, container.request_scope({SecurityIdentity: SecurityIdentity("ann", {"clerk"})}):
        result = await container.get(Clerk).chat("Book a")

    assert [each.result for each in result.tool_executions] == ["*aa*"]
    assert names_in(models["default"]) == ["book", "read"]


async def test_a_tool_is_not_offered_without_the_role_of_the_class() -> None:
    models = scripted()
    container = Container(models=models, seeds=[SecurityIdentity]).register(Clerk)
    async with container, container.request_scope({SecurityIdentity: SecurityIdentity("bob")}):
        await container.get(Clerk).chat("Book a")

    assert names_in(models["default"]) == ["read"]


async def test_the_compensations_of_the_class_apply_to_the_listed_methods() -> None:
    @register_ai_service(tools=[Ledger.book, Ledger.fail], compensate_on_tool_errors=True)
    class Careful(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    Ledger.undone.clear()
    models = scripted(tool_call("book", {"name": "a"}), tool_call("fail"))
    container = Container(models=models, seeds=[SecurityIdentity]).register(Careful)
    async with container, container.request_scope({SecurityIdentity: SecurityIdentity("ann", {"clerk"})}):
        await container.get(Careful).chat("Book a")

    assert Ledger.undone == ["a"]


class Open:
    @tool
    def pay(self) -> str:
        return "paid"


@roles_allowed("boss")
class Closed(Open):
    pass


def test_a_stricter_class_that_inherits_the_method_is_a_problem_unless_it_is_the_bean() -> None:
    @register_ai_service(tools=Closed.pay)
    class Payer(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models=scripted(), seeds=[SecurityIdentity]).register(Payer).check()
    assert problem.where == "Open.pay"
    assert "is the same function as Closed.pay, whose class adds roles, guardrails" in problem.what
    assert "define Closed.pay as well" in problem.fix

    container = Container(models=scripted(), seeds=[SecurityIdentity]).register(Payer, Closed)
    assert not container.check()
    assert [each.roles for each in container.reach()] == [frozenset({"boss"})]


# --- mistakes, and other places


def test_a_method_without_tool_is_reported() -> None:
    @register_ai_service(tools=Calculator.unmarked)
    class Wrong(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models=scripted()).register(Wrong, Rates).check()
    assert problem.what == "parameter 'self' has no type annotation"
    assert "if this is a method, mark it with @tool" in problem.fix


def test_a_method_and_its_class_have_the_same_tool() -> None:
    @register_ai_service(tools=[Calculator, Calculator.scale])
    class Twice(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models=scripted()).register(Twice, Rates).check()
    assert "2 tools have the same name 'scale'" in problem.what


def test_a_service_without_a_container_needs_an_instance() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError, match="pass an instance"):
        create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=Calculator.scale)
    create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=[Calculator(Rates()).scale, Calculator.zero])


def test_the_specification_of_a_method_can_be_read_but_running_it_needs_an_instance() -> None:
    assert tool_specification_from(Calculator.scale) == tool_specifications_from(Calculator)[0]
    with pytest.raises(IllegalConfigurationError, match="needs an instance"):
        tool_executor_from(Calculator.scale)


async def test_a_method_can_be_listed_beside_injected_functions_and_beans_are_overridden() -> None:
    @tool
    def ask(rates: Inject[Rates]) -> int:
        return rates.factor

    @register_ai_service(tools=[ask, Calculator.scale])
    class Both(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    models = scripted(tool_call("ask"), tool_call("scale", {"number": 2}))
    async with Container(models=models).register(Both, Rates) as container:
        fake = Rates()
        fake.factor = 5
        with container.override(Rates, fake):
            result = await container.get(Both).chat("?")

    assert [each.result_object for each in result.tool_executions] == [5, 10]
