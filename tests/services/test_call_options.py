"""`ChatRequestParameters`: the options of one call."""

from dataclasses import FrozenInstanceError
from typing import Any, Protocol

import pytest

from toolbox import (
    ChatRequestParameters,
    Container,
    IllegalConfigurationError,
    compensate_for,
    create_ai_service,
    register_ai_service,
    tool,
    toolbox,
    user_message,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@tool
async def add(a: int, b: int) -> int:
    return a + b


class Assistant(Protocol):
    async def ask(self, question: str, options: ChatRequestParameters | None = None) -> str: ...

    @toolbox()
    @user_message("{question}")
    async def plain(self, options: ChatRequestParameters, question: str) -> str: ...


def assistant(*replies: Any, **options: Any) -> tuple[Assistant, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    service: Assistant = create_ai_service(Assistant, chat_model=model, **{"tools": [add], **options})
    return service, model


async def test_options_of_a_call_apply_to_all_its_requests_and_to_no_other_call() -> None:
    service, model = assistant(tool_call("add", {"a": 1, "b": 2}), "3", "again", temperature=0.5, reasoning="low")
    options = ChatRequestParameters(
        temperature=0.1, reasoning="high", max_output_tokens=50, parameters={"top_p": 0.9, "seed": 1}
    )
    await service.ask("q", options)
    await service.ask("q")

    first, second, third = model.requests
    for each in (first, second):
        assert (each.temperature, each.reasoning, each.max_output_tokens) == (0.1, "high", 50)
        assert each.parameters == {"top_p": 0.9, "seed": 1}
        assert [tool.name for tool in each.tool_specifications] == ["add"]
    assert (third.temperature, third.reasoning, third.max_output_tokens, third.parameters) == (0.5, "low", None, {})


async def test_values_that_are_not_given_keep_those_of_the_service() -> None:
    service, model = assistant("x", temperature=0, reasoning="none", tool_choice="auto", parameters={"seed": 1})
    await service.ask("q", ChatRequestParameters(parameters={"top_p": 1}))

    [request] = model.requests
    assert (request.temperature, request.reasoning, request.tool_choice) == (0, "none", "auto")
    assert request.parameters == {"seed": 1, "top_p": 1}


async def test_a_temperature_by_the_servers_name_replaces_that_of_the_service() -> None:
    service, model = assistant("x", temperature=0.5)
    await service.ask("q", ChatRequestParameters(parameters={"temperature": 1.5}))

    assert (model.requests[0].temperature, model.requests[0].parameters) == (None, {"temperature": 1.5})


async def test_tools_of_the_server_are_added_to_those_of_the_service() -> None:
    service, model = assistant("x", parameters={"tools": [{"type": "web_search"}]})
    await service.ask("q", ChatRequestParameters(parameters={"tools": [{"type": "file_search"}]}))

    [request] = model.requests
    assert request.parameters["tools"] == [{"type": "web_search"}, {"type": "file_search"}]
    assert [each.name for each in request.tool_specifications] == ["add"]


async def test_a_forced_tool_choice_of_a_call_applies_to_the_first_round() -> None:
    service, model = assistant(tool_call("add", {"a": 1, "b": 2}), "3")
    await service.ask("q", ChatRequestParameters(tool_choice="add"))

    assert [each.tool_choice for each in model.requests] == ["add", None]


async def test_an_unknown_tool_choice_is_refused_before_anything_is_sent() -> None:
    service, model = assistant()
    with pytest.raises(IllegalConfigurationError, match="invalid tool_choice='subtract'"):
        await service.ask("q", ChatRequestParameters(tool_choice="subtract"))
    with pytest.raises(IllegalConfigurationError, match="invalid tool_choice='required'"):
        await service.plain(ChatRequestParameters(tool_choice="required"), "q")
    assert model.requests == []


async def test_a_call_can_choose_a_model_of_the_container() -> None:
    @register_ai_service
    class Desk(Protocol):
        async def ask(self, question: str, options: ChatRequestParameters | None = None) -> str: ...

    models = {"default": ScriptedChatModel(["weak"]), "strong": ScriptedChatModel(["strong"])}
    async with Container(models=models).register(Desk) as container:
        desk = container.get(Desk)
        assert await desk.ask("q", ChatRequestParameters("strong")) == "strong"
        assert await desk.ask("q") == "weak"
        with pytest.raises(IllegalConfigurationError, match="'strange'"):
            await desk.ask("q", ChatRequestParameters(model="strange"))


async def test_a_service_without_a_container_has_one_model() -> None:
    service, _ = assistant("x")
    assert await service.ask("q", ChatRequestParameters(model="default")) == "x"
    with pytest.raises(IllegalConfigurationError, match="only one model"):
        await service.ask("q", ChatRequestParameters(model="strong"))


async def test_call_options_accept_none_and_reject_other_values() -> None:
    service, _ = assistant("x")
    assert await service.ask("q", None) == "x"
    with pytest.raises(
        TypeError, match=r"Assistant.ask\(\): options must be a ChatRequestParameters or None, got dict"
    ):
        await service.ask("q", {"temperature": 1})  # type: ignore[arg-type]  # the mistake


async def test_a_service_that_is_called_as_a_tool_hides_its_options_from_the_model() -> None:
    class Expert(Protocol):
        @tool
        async def consult(self, question: str, options: ChatRequestParameters) -> str:
            """Answer a hard question."""
            ...

    inner = ScriptedChatModel(["42"])
    expert = create_ai_service(Expert, chat_model=inner)
    model = ScriptedChatModel([tool_call("consult", {"question": "q", "options": {"temperature": 2}}), "done"])
    service: Assistant = create_ai_service(Assistant, chat_model=model, tools=[expert])
    await service.ask("q")

    [specification] = model.requests[0].tool_specifications
    assert list(specification.parameters["properties"]) == ["question"]
    assert inner.requests[0].temperature is None


def test_required_options_of_a_plain_tool_or_a_compensation_are_a_problem() -> None:
    class Payments:
        @tool
        def pay(self, euros: int) -> str:
            return "paid"

        @compensate_for(pay)
        def refund(self, euros: int, options: ChatRequestParameters | None) -> None: ...

    @tool
    def consult(question: str, options: ChatRequestParameters) -> str:
        return question

    @tool
    def ask(question: str, options: ChatRequestParameters | None = None) -> str:
        return question

    with pytest.raises(IllegalConfigurationError) as raised:
        assistant("x", tools=[consult, ask, Payments()], compensate_on_failure=True)
    assert [(each.where, "'options'" in each.what) for each in raised.value.problems] == [
        ("consult", True),
        ("Payments.refund", True),
    ]


def test_wrong_declarations_are_problems() -> None:
    class Twice(Protocol):
        async def ask(self, q: str, a: ChatRequestParameters, b: ChatRequestParameters) -> str: ...

    class InTemplate(Protocol):
        @user_message("{q} {options}")
        async def ask(self, q: str, options: ChatRequestParameters) -> str: ...

    class Plain(Protocol):
        async def ask(self, q: str) -> str: ...

    model = ScriptedChatModel([])
    with pytest.raises(IllegalConfigurationError, match="has 2 ChatRequestParameters parameters: a, b"):
        create_ai_service(Twice, chat_model=model)
    with pytest.raises(IllegalConfigurationError, match="which contains the options of the call"):
        create_ai_service(InTemplate, chat_model=model)
    with pytest.raises(IllegalConfigurationError, match="invalid reasoning='much'"):
        create_ai_service(Plain, chat_model=model, reasoning="much")


def test_invalid_values_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown reasoning 'much'"):
        ChatRequestParameters(reasoning="much")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match="use 1 or more"):
        ChatRequestParameters(max_output_tokens=0)
    for given in (True, "3", len):
        with pytest.raises(ValueError, match="invalid max_output_tokens="):
            ChatRequestParameters(max_output_tokens=given)  # type: ignore[arg-type]  # the mistake
        with pytest.raises(ValueError, match="invalid temperature="):
            ChatRequestParameters(temperature=given)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(FrozenInstanceError):
        ChatRequestParameters().model = "x"  # type: ignore[misc]  # the mistake
