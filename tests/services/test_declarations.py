"""Declarations of services: Protocols, ABCs, options, and services with and without a container."""

import asyncio
import inspect
import os
import textwrap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest

from tests import programs
from tests.problems import problems_of
from toolbox import (
    AiMessage,
    AiServiceTool,
    Container,
    ContainerNotStartedError,
    IllegalConfigurationError,
    MemoryId,
    OutputParsingError,
    Result,
    ToolRoundsExceededError,
    ToolSpecification,
    UserMessage,
    application_scoped,
    create_ai_service,
    register_ai_service,
    system_message,
    tool,
    toolbox,
    user_message,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@tool
def add(a: int, b: int) -> int:
    return a + b


class Clock:
    def now(self) -> str:
        return "noon"


# --- the decorator


def test_register_ai_service_returns_the_class_unchanged() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

    before = dict(vars(Plain))
    assert register_ai_service(Plain) is Plain
    assert register_ai_service(tools=(add,))(Plain) is Plain
    assert all(vars(Plain)[name] is value for name, value in before.items())


def test_all_options_are_optional_keywords() -> None:
    @register_ai_service()
    class Empty(Protocol):
        async def chat(self, text: str) -> str: ...

    @register_ai_service(
        tools=(add,),
        tool_provider=None,
        model=None,
        chat_memory=None,
        max_tool_rounds=10,
        max_tool_calls_per_response=None,
        max_output_retries=2,
        max_result_chars=None,
        timeout=None,
        concurrent_tools=False,
        on_unknown_tool=None,
        on_tool_arguments_error=None,
        on_tool_execution_error=None,
        output_mode=None,
        temperature=None,
        tool_choice=None,
        parameters={},
        reasoning=None,
    )
    class Full(Protocol):
        async def chat(self, text: str) -> str: ...

    assert Container(models={"default": ScriptedChatModel([])}).register(Empty, Full).check() == []


def test_unknown_options_are_rejected_by_the_decorator() -> None:
    with pytest.raises(TypeError, match="max_tool_round"):

        @register_ai_service(max_tool_round=3)  # type: ignore[call-overload]
        class Service(Protocol):
            async def chat(self, text: str) -> str: ...

    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    with pytest.raises(TypeError, match="max_tool_rounds"):
        create_ai_service(Other, chat_model=ScriptedChatModel([]), max_tool_round=3)


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("instructions", "@system_message"),
        ("output_type", "the return type"),
        ("guardrails", "@output_guardrails"),
        ("handoffs", "@hands_over_to"),
    ],
)
def test_an_option_of_another_library_is_led_to_what_takes_its_place(option: str, place: str) -> None:
    given: dict[str, Any] = {option: "x"}

    with pytest.raises(TypeError, match=f"unknown option {option}=; use .*{place}"):
        register_ai_service(**given)


# --- the implementation


@register_ai_service(tools=(add,))
class Assistant(Protocol):
    """Answers."""

    async def chat(self, text: str) -> Result[str]:
        """Chats."""
        ...


async def test_container_returns_one_implementation_of_a_service() -> None:
    async with Container(models={"default": ScriptedChatModel(["hi"])}).register(Assistant) as container:
        assistant = container.get(Assistant)
        assert container.get(Assistant) is assistant
        async with container.request_scope():
            assert container.get(Assistant) is assistant
        assert Assistant in type(assistant).__mro__
        assert (await assistant.chat("x")).content == "hi"
        assert inspect.iscoroutinefunction(assistant.chat)
        assert assistant.chat.__doc__ == "Chats."


async def test_services_are_injected_like_other_beans() -> None:
    @application_scoped
    class Desk:
        def __init__(self, assistant: Assistant) -> None:
            self.assistant = assistant

    async with Container(models={"default": ScriptedChatModel(["hi"])}).register(Assistant, Desk) as container:
        assert (await container.get(Desk).assistant.chat("x")).content == "hi"


async def test_services_are_instances_of_runtime_checkable_protocols() -> None:
    @register_ai_service
    @runtime_checkable
    class Checkable(Protocol):
        async def chat(self, text: str) -> str: ...

    async with Container(models={"default": ScriptedChatModel(["hi"])}).register(Checkable) as container:
        assert isinstance(container.get(Checkable), Checkable)


async def test_named_models_come_from_the_container() -> None:
    @register_ai_service(model="tool-use")
    class Other(Protocol):
        async def chat(self, text: str) -> str: ...

    models = {"default": ScriptedChatModel(["default"]), "tool-use": ScriptedChatModel(["tool-use"])}
    async with Container(models=models).register(Assistant, Other) as container:
        assert (await container.get(Assistant).chat("x")).content == "default"
        assert await container.get(Other).chat("x") == "tool-use"


async def test_inherited_methods_are_implemented() -> None:
    class Base(Protocol):
        @system_message("Base.")
        async def base(self, text: str) -> str: ...

    @register_ai_service
    class Derived(Base, Protocol):
        async def own(self, text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    async with Container(models={"default": model}).register(Derived) as container:
        assert await container.get(Derived).base("x") == "a"
        assert await container.get(Derived).own("x") == "b"


@register_ai_service(tools=(add,))
class Abstract(ABC):
    greeting = "Hello"

    @abstractmethod
    @user_message("Q: {text}")
    async def chat(self, text: str) -> str: ...

    @user_message("T: {text}")
    @abstractmethod
    async def tell(self, text: str) -> str: ...

    async def shout(self, text: str) -> str:
        return (await self.chat(text)).upper()

    @property
    def name(self) -> str:
        return f"{self.greeting} {type(self).__name__}"

    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def cls_method(cls) -> str:
        return cls.greeting


async def test_concrete_methods_of_an_abc_are_kept() -> None:
    model = ScriptedChatModel(["one", "two"])
    async with Container(models={"default": model}).register(Abstract) as container:
        service = container.get(Abstract)
        assert await service.shout("x") == "ONE"
        assert await service.tell("y") == "two"
        assert service.name.startswith("Hello")
        assert service.static() == 1
        assert service.cls_method() == "Hello"
        assert isinstance(service, Abstract)
    assert [request.messages[0] for request in model.requests] == [UserMessage("Q: x"), UserMessage("T: y")]


async def test_concrete_methods_of_a_protocol_are_kept() -> None:
    @register_ai_service
    class Mixed(Protocol):
        async def chat(self, text: str) -> str: ...

        async def twice(self, text: str) -> list[str]:
            return [await self.chat(text), await self.chat(text)]

    async with Container(models={"default": ScriptedChatModel(["a", "b"])}).register(Mixed) as container:
        assert await container.get(Mixed).twice("x") == ["a", "b"]


async def test_methods_with_empty_bodies_are_implemented() -> None:
    @register_ai_service
    class Kinds(Protocol):
        async def dots(self, text: str) -> str: ...

        async def passes(self, text: str) -> str:  # type: ignore[empty-body]
            pass

        async def documented(self, text: str) -> str:  # pyright: ignore[reportReturnType]  # its body is empty
            """Says something."""

        async def both(self, text: str) -> str:
            """Says something."""
            ...

        async def raises(self, text: str) -> str:
            raise NotImplementedError

        async def raises_with_text(self, text: str) -> str:
            raise NotImplementedError("the container implements it")

        def sync(self, text: str) -> str:
            raise NotImplementedError()

    model = ScriptedChatModel(["a"] * 6)
    async with Container(models={"default": model}).register(Kinds) as container:
        service = container.get(Kinds)
        for name in ("dots", "passes", "documented", "both", "raises", "raises_with_text"):
            assert await getattr(service, name)("x") == "a", name


async def test_beans_are_injected_into_the_constructor_of_an_abc() -> None:
    @register_ai_service
    class WithBeans(ABC):
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        @abstractmethod
        async def chat(self, text: str) -> str: ...

        async def at(self, text: str) -> str:
            return f"{self.clock.now()}: {await self.chat(text)}"

    async with Container(models={"default": ScriptedChatModel(["hi"])}).register(WithBeans, Clock) as container:
        assert await container.get(WithBeans).at("x") == "noon: hi"


def test_missing_beans_of_an_abc_constructor_are_a_problem() -> None:
    @register_ai_service
    class WithBeans(ABC):
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        @abstractmethod
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(WithBeans).check()
    assert problem.where == "WithBeans.clock"
    assert "Clock" in problem.what


def test_abcs_with_required_constructor_parameters_need_a_container() -> None:
    class WithBeans(ABC):
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        @abstractmethod
        async def chat(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError, match="clock"):
        create_ai_service(WithBeans, chat_model=ScriptedChatModel([]))


async def test_abcs_with_optional_constructor_parameters_need_no_container() -> None:
    class Counting(ABC):
        def __init__(self, start: int = 3) -> None:
            self.count = start

        @abstractmethod
        async def chat(self, text: str) -> str: ...

        async def counted(self, text: str) -> str:
            self.count += 1
            return f"{self.count} {await self.chat(text)}"

    service = create_ai_service(Counting, chat_model=ScriptedChatModel(["hi"]))
    assert await service.counted("x") == "4 hi"


# --- problems


def test_concrete_classes_are_a_problem() -> None:
    class Plain:
        async def chat(self, text: str) -> str:
            return text

    [problem] = problems_of(Plain)
    assert problem.where == "Plain"
    assert "Protocol" in problem.what + problem.fix


def test_services_without_methods_are_a_problem() -> None:
    class Empty(Protocol): ...

    [problem] = problems_of(Empty)
    assert problem.where == "Empty"


def test_values_that_are_not_classes_are_rejected() -> None:
    def function(text: str) -> str:
        return text

    with pytest.raises((TypeError, IllegalConfigurationError)):
        register_ai_service(function)  # type: ignore[type-var]
    for wrong in (function, 5, "Assistant", None):
        with pytest.raises((TypeError, IllegalConfigurationError), match=r"Protocol|class"):
            create_ai_service(wrong, chat_model=ScriptedChatModel([]))  # type: ignore[arg-type]


def test_variadic_parameters_of_methods_are_a_problem() -> None:
    class Variadic(Protocol):
        async def chat(self, text: str, *more: str) -> str: ...

        async def keywords(self, text: str, **more: str) -> str: ...

    assert [problem.where for problem in problems_of(Variadic)] == ["Variadic.chat", "Variadic.keywords"]


def test_two_memory_ids_in_one_method_are_a_problem() -> None:
    class Two(Protocol):
        async def chat(self, a: MemoryId[str], b: MemoryId[str], text: str) -> str: ...

    [problem] = problems_of(Two)
    assert problem.where == "Two.chat"


def test_parameters_without_annotation_are_a_problem() -> None:
    class Bare(Protocol):
        async def chat(self, text) -> str: ...  # type: ignore[no-untyped-def]

    [problem] = problems_of(Bare)
    assert problem.where == "Bare.chat"
    assert "text" in problem.what


def test_all_problems_of_all_services_are_reported_together() -> None:
    @register_ai_service(max_tool_rounds=-1)
    class One(Protocol):
        async def chat(self, text: str): ...  # type: ignore[no-untyped-def]

    @register_ai_service(model="missing")
    class Two(Protocol):
        @user_message("{nothing}")
        async def chat(self) -> str: ...

    problems = Container(models={"default": ScriptedChatModel([])}).register(One, Two).check()
    assert [problem.where for problem in problems] == ["One", "One.chat", "Two.chat", "Two"]
    container = Container(models={"default": ScriptedChatModel([])}).register(One, Two)
    with pytest.raises(IllegalConfigurationError) as raised, container:
        pass
    assert list(raised.value.problems) == problems
    assert all(str(problem) in str(raised.value) for problem in problems)


def test_each_problem_is_reported_once() -> None:
    class Tools:
        @tool
        def broken(self, *args: int) -> int:
            return 1

    @register_ai_service(tools=(Tools,))
    class Several(Protocol):
        async def one(self, text: str) -> str: ...

        async def two(self, text: str) -> str: ...

        @toolbox(Tools)
        async def three(self, text: str) -> str: ...

    @register_ai_service(tools=(Tools,))
    class Another(Protocol):
        async def one(self, text: str) -> str: ...

    problems = Container(models={"default": ScriptedChatModel([])}).register(Several, Another).check()
    assert [problem.where for problem in problems] == ["Tools.broken"]


async def test_calls_after_the_container_stopped_are_rejected() -> None:
    async with Container(models={"default": ScriptedChatModel(["a"])}).register(Assistant) as container:
        assistant = container.get(Assistant)
    with pytest.raises(ContainerNotStartedError):
        await assistant.chat("x")


async def test_containers_can_be_started_again() -> None:
    container = Container(models={"default": ScriptedChatModel(["a", "b"])}).register(Assistant)
    async with container:
        assert (await container.get(Assistant).chat("x")).content == "a"
    async with container:
        assert (await container.get(Assistant).chat("x")).content == "b"


async def test_services_can_be_overridden_with_a_fake() -> None:
    class Fake:
        async def chat(self, text: str) -> Result[str]:
            return Result("fake")

    async with Container(models={"default": ScriptedChatModel([])}).register(Assistant) as container:
        with container.override(Assistant, Fake()):
            assert (await container.get(Assistant).chat("x")).content == "fake"


# --- without a container


async def test_create_ai_service_accepts_unmarked_classes_and_all_options() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> Result[int]: ...

    model = ScriptedChatModel(["no", "3"])
    service: Plain = create_ai_service(Plain, chat_model=model, tools=[add], max_output_retries=1, temperature=0.1)
    assert (await service.chat("x")).content == 3
    assert model.requests[0].temperature == 0.1
    with pytest.raises(OutputParsingError):
        await create_ai_service(Plain, chat_model=ScriptedChatModel(["no"]), max_output_retries=0).chat("x")


async def test_options_of_the_decorator_apply_unless_overridden() -> None:
    @register_ai_service(tools=(add,), max_tool_rounds=0, temperature=0.5)
    class Marked(Protocol):
        async def chat(self, text: str) -> str: ...

    call = tool_call("add", {"a": 1, "b": 2})
    model = ScriptedChatModel([call])
    with pytest.raises(ToolRoundsExceededError):
        await create_ai_service(Marked, chat_model=model).chat("x")
    assert [each.name for each in model.requests[0].tool_specifications] == ["add"]
    assert model.requests[0].temperature == 0.5

    model = ScriptedChatModel([call, "done"])
    assert await create_ai_service(Marked, chat_model=model, max_tool_rounds=1).chat("x") == "done"


async def test_services_can_be_tools_of_other_services() -> None:
    class Expert(Protocol):
        @tool("Asks the expert")
        async def ask(self, question: str) -> Result[str]: ...

    class Router(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> Result[str]: ...

    expert_model = ScriptedChatModel(["expert answer"])
    expert = create_ai_service(Expert, chat_model=expert_model)
    model = ScriptedChatModel([tool_call("ask", {"question": "q"}), "done"])
    result = await create_ai_service(Router, chat_model=model, tools=(expert,)).chat("s", "x")
    assert result.tool_executions[0].result_object == "expert answer"
    assert len(result.messages) == 4
    assert model.requests[0].tool_specifications[0].description == "Asks the expert"


async def test_a_bound_method_of_a_service_can_be_a_tool() -> None:
    class Expert(Protocol):
        @tool
        async def ask(self, session: MemoryId[str], question: str) -> Result[str]: ...

        @tool
        async def other(self, question: str) -> str: ...

    class Router(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    expert = create_ai_service(Expert, chat_model=ScriptedChatModel(["expert answer"]))
    model = ScriptedChatModel([tool_call("ask", {"question": "q"}), "done"])
    result = await create_ai_service(Router, chat_model=model, tools=(expert.ask,)).chat("x")
    assert result.tool_executions[0].result == "expert answer"
    assert [each.name for each in model.requests[0].tool_specifications] == ["ask"]


async def test_tools_of_all_kinds_work_without_a_container() -> None:
    class Held:
        @tool
        def who(self) -> str:
            return "Ada"

    class Router(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    tools = [
        Held(),
        add,
        AiServiceTool(ToolSpecification("ready"), lambda request, memory_id: "ready"),
        {ToolSpecification("mapped"): lambda request, memory_id: "mapped"},
    ]
    names = ["who", "add", "ready", "mapped"]
    calls = AiMessage(None, [tool_call(name, {"a": 1, "b": 2}) for name in names])
    result = await create_ai_service(Router, chat_model=ScriptedChatModel([calls, "done"]), tools=tools).chat("x")
    assert [each.result for each in result.tool_executions] == ["Ada", "3", "ready", "mapped"]


def test_synchronous_services_do_not_keep_the_process_alive(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = """
        from typing import Protocol
        from toolbox import create_ai_service, tool
        from toolbox.testing import ScriptedChatModel, tool_call

        @tool
        async def later() -> str:
            return "later"

        @tool
        def now() -> str:
            return "now"

        class Assistant(Protocol):
            def chat(self, text: str) -> str: ...

        model = ScriptedChatModel([tool_call("later"), tool_call("now"), "done"])
        print(create_ai_service(Assistant, chat_model=model, tools=(later, now)).chat("x"))
    """
    program.write_text(textwrap.dedent(text))
    ended = programs.run(["-W", "error", str(program)], tmp_path, dict(os.environ))
    assert (ended.stdout, ended.stderr, ended.returncode) == ("done\n", "", 0)


async def test_services_work_from_threads_and_the_event_loop_at_the_same_time() -> None:
    class Both(Protocol):
        async def chat(self, text: str) -> str: ...

        def wait(self, text: str) -> str: ...

    service = create_ai_service(Both, chat_model=ScriptedChatModel(["x"] * 20))
    answers = await asyncio.gather(
        *(service.chat("a") for _ in range(10)), *(asyncio.to_thread(service.wait, "b") for _ in range(10))
    )
    assert answers == ["x"] * 20
