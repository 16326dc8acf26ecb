"""What a type checker knows of tools, AI services and REST clients. Checked by mypy and pyright, never run."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Protocol, assert_type

from pydantic import BaseModel

from toolbox import (
    ChatModel,
    ChatResponse,
    Container,
    DemoChatModel,
    Inject,
    InvocationContext,
    MemoryId,
    MessageWindow,
    OpenAiChatModel,
    Result,
    ReturnBehavior,
    TokenStream,
    TokenUsage,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutor,
    ToolSpecification,
    blocking,
    create_ai_service,
    hide_details,
    invocation_attributes,
    invocation_record,
    non_blocking,
    register_ai_service,
    rest,
    return_to_model,
    run_on,
    run_on_thread,
    system_message,
    time_limit,
    tool,
    tool_specifications_from,
    toolbox,
    tools_from,
    user_message,
)
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    MaskSecrets,
    MaxLength,
    OutputGuardrail,
    OutputGuardrailRequest,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.interceptors import (
    ModelInterceptor,
    ModelInvocation,
    ModelProceed,
    ToolInterceptor,
    ToolInvocation,
    ToolProceed,
    global_interceptor,
    interceptors,
)
from toolbox.search import KeywordToolSearch
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject as EndpointInject


class Weather(BaseModel):
    summary: str


class Database:
    pass


@tool
def add(a: int, b: Annotated[int, "the second"] = 0) -> int:
    """Adds."""
    return a + b


@tool("Multiplies", "two numbers")
@non_blocking
def multiply(a: float, b: float) -> float:
    return a * b


class Tools:
    @tool(name="sum", return_behavior=ReturnBehavior.IMMEDIATE, metadata={"k": 1}, timeout=5.0, max_result_chars=None)
    @blocking
    def add(self, a: int, memory: MemoryId[str], context: InvocationContext, database: Inject[Database]) -> int:
        assert_type(memory, str)
        assert_type(database, Database)
        return a

    @tool
    @run_on_thread
    def wait(self) -> None: ...

    @tool
    @run_on("cpu")
    def count(self) -> int:
        return 1

    @run_on(ThreadPoolExecutor())
    @tool
    @staticmethod
    def still(a: int) -> str:
        return str(a)

    @tool
    async def look(self, where: str) -> list[str]:
        return [where]


@register_ai_service
class Plain(Protocol):
    async def chat(self, question: str) -> str: ...


@register_ai_service(
    tools=(Tools, add, Plain),
    model="tool-use",
    chat_memory=MessageWindow(max_messages=20),
    max_tool_rounds=3,
    concurrent_tools=True,
    on_unknown_tool=return_to_model,
    on_tool_arguments_error=return_to_model,
    on_tool_execution_error=hide_details,
    output_mode="schema",
    temperature=0.0,
    tool_choice="required",
    parameters={"seed": 1},
    reasoning="low",
    tool_search=KeywordToolSearch(max_results=8),
    compensate_on_tool_errors=True,
    compensate_on_failure=True,
)
class Assistant(Protocol):
    @system_message("You answer in {language}.")
    @user_message("Question: {question}")
    @toolbox(Tools, multiply)
    async def chat(self, session: MemoryId[str], question: str, language: str) -> Result[str]: ...

    async def weather(self, question: str) -> Weather: ...

    def wait(self, question: str) -> Result[Weather]: ...

    def stream(self, question: str) -> AsyncIterator[str]: ...

    def events(self, question: str) -> TokenStream: ...


@register_ai_service(chat_memory=None)
class Abstract(ABC):
    @abstractmethod
    async def chat(self, question: str) -> str: ...

    async def shout(self, question: str) -> str:
        return (await self.chat(question)).upper()


async def a_call_keeps_its_declared_type(assistant: Assistant, abstract: Abstract) -> None:
    result = await assistant.chat("room 7", "How many seats?", "English")
    assert_type(result, Result[str])
    assert_type(result.content, str)
    assert_type(result.token_usage, TokenUsage | None)
    for execution in result.tool_executions:
        assert_type(execution, ToolExecution)
    assert_type(await assistant.weather("Oslo?"), Weather)
    assert_type(assistant.wait("Oslo?"), Result[Weather])
    assert_type(await abstract.shout("Oslo?"), str)
    async for text in assistant.stream("Oslo?"):
        assert_type(text, str)
    async with assistant.events("Oslo?") as events:
        async for event in events:
            print(event)


async def a_tool_stays_the_function_it_was(tools: Tools, database: Database, context: InvocationContext) -> None:
    assert_type(add(1, b=2), int)
    assert_type(multiply(1, 2), float)
    assert_type(tools.add(1, "room 7", context, database), int)
    assert_type(await tools.look("here"), list[str])
    assert_type(Tools.still(1), str)


async def a_service_comes_out_of_the_container_as_its_protocol(container: Container) -> None:
    assert_type(container.get(Assistant), Assistant)
    assert_type(await container.aget(Abstract), Abstract)


def a_service_without_a_container_is_its_protocol_too(model: ChatModel) -> None:
    assert_type(create_ai_service(Assistant, chat_model=model, tools=[Tools(), add]), Assistant)


def models_are_chat_models() -> list[ChatModel]:
    return [DemoChatModel(), OpenAiChatModel("gpt-5-mini"), ScriptedChatModel(["hi", ValueError()])]


def low_level_pieces_have_their_types(tools: Tools) -> None:
    assert_type(tool_specifications_from(Tools), list[ToolSpecification])
    assert_type(tools_from(tools), dict[ToolSpecification, ToolExecutor])
    assert_type(tool_call("add", {"a": 1}), ToolExecutionRequest)
    assert_type(InvocationContext.current(), InvocationContext | None)


async def blocks_around_calls_have_their_types() -> None:
    with invocation_attributes(tenant="a"), time_limit(5), invocation_record() as record:
        pass
    for execution in record.tool_executions:
        assert_type(execution, ToolExecution)
    assert_type(record.token_usage, TokenUsage | None)


@rest.register_rest_client(config_key="openmeteo", path="/v1")
class Forecasts(Protocol):
    @rest.get("/forecast")
    @rest.client_query_param("forecast_days", 7)
    @tool("Forecasts the weather")
    async def forecast(self, latitude: float, tenant: Annotated[str, rest.Header("X-Tenant")] = "a") -> Weather: ...

    @rest.post("/forecast/{place}")
    def correct(self, place: int, weather: Weather) -> None: ...


async def a_rest_call_keeps_its_declared_type(forecasts: Forecasts) -> None:
    assert_type(await forecasts.forecast(1.0), Weather)


async def an_endpoint_sees_the_bean(assistant: EndpointInject[Assistant]) -> str:
    assert_type(assistant, Assistant)
    return (await assistant.chat("room 7", "How many seats?", "English")).content


# --- guardrails and interceptors


class Careful(InputGuardrail):
    async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.success_with(request.user_message.text)


class Quick(OutputGuardrail):
    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        return self.reprompt("why", "again")


@global_interceptor(priority=3)
class Timed(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        result = await proceed(call.with_arguments(n=1))
        assert_type(result, ToolExecutionResult)
        return result


class Cached(ModelInterceptor):
    async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> ChatResponse:
        return await proceed(call)


@register_ai_service
@input_guardrails(Careful, MaxLength(3))
@interceptors(Timed, Cached())
class Guarded(Protocol):
    @output_guardrails(Quick, max_retries=1)
    async def ask(self, text: str) -> int: ...


@tool_input_guardrails(MaxLength(3))
@tool_output_guardrails(MaskSecrets)
@interceptors(Timed)
def guarded_tool(text: str) -> int:
    return len(text)


async def decorators_keep_the_types_of_services_and_tools(guarded: Guarded) -> None:
    assert_type(await guarded.ask("x"), int)
    assert_type(guarded_tool("x"), int)
    assert_type(Timed(), Timed)
