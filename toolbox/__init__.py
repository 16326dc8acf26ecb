"""toolbox: dependency injection for AI services.

Everything public can be imported from here. `__all__` lists the names that programs use every day; the others are
errors, events, messages and parts for framework authors. Names in the `TYPE_CHECKING` block are loaded on first use, so
that `import toolbox` stays fast.
"""

from __future__ import annotations

import pkgutil
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from .chat import (
    AiMessage as AiMessage,
    BeforeToolExecution as BeforeToolExecution,
    ChatModel as ChatModel,
    ChatRequest as ChatRequest,
    ChatRequestParameters as ChatRequestParameters,
    ChatResponse as ChatResponse,
    CompleteResponse as CompleteResponse,
    CompleteToolCall as CompleteToolCall,
    FinishReason as FinishReason,
    IntermediateResponse as IntermediateResponse,
    Message as Message,
    PartialReasoning as PartialReasoning,
    PartialResponse as PartialResponse,
    PartialToolCall as PartialToolCall,
    ResponseFormat as ResponseFormat,
    ServiceEvent as ServiceEvent,
    StreamEvent as StreamEvent,
    StreamingChatModel as StreamingChatModel,
    SystemMessage as SystemMessage,
    TokenUsage as TokenUsage,
    ToolExecuted as ToolExecuted,
    ToolExecution as ToolExecution,
    ToolExecutionRequest as ToolExecutionRequest,
    ToolExecutionResult as ToolExecutionResult,
    ToolExecutionResultMessage as ToolExecutionResultMessage,
    ToolExecutor as ToolExecutor,
    ToolProgress as ToolProgress,
    ToolSpecification as ToolSpecification,
    UserMessage,
)
from .contents import (
    AudioContent as AudioContent,
    Content as Content,
    ImageContent,
    PdfContent,
    TextContent as TextContent,
)
from .context import Inject, InvocationContext, MemoryId, Progress as Progress, invocation_attributes, time_limit
from .di.decorators import Instance, Named, application_scoped, call_scoped, dependent, produces, request_scoped
from .errors import (
    AmbiguousBeanError as AmbiguousBeanError,
    AsyncBeanError as AsyncBeanError,
    BlockingCallNotAllowedError as BlockingCallNotAllowedError,
    ContainerNotStartedError as ContainerNotStartedError,
    FrameworkError as FrameworkError,
    IllegalConfigurationError,
    InputGuardrailError as InputGuardrailError,
    InvalidMemoryIdError as InvalidMemoryIdError,
    InvocationTimeoutError as InvocationTimeoutError,
    MemoryInUseError as MemoryInUseError,
    MissingBeanError as MissingBeanError,
    ModelConnectionError as ModelConnectionError,
    ModelError as ModelError,
    ModelHttpError as ModelHttpError,
    ModelProtocolError as ModelProtocolError,
    ModelRefusedError as ModelRefusedError,
    ModelTimeoutError as ModelTimeoutError,
    ModelTruncatedError as ModelTruncatedError,
    OutputGuardrailError as OutputGuardrailError,
    OutputParsingError as OutputParsingError,
    Problem as Problem,
    RestClientError as RestClientError,
    RestDecodeError as RestDecodeError,
    RestTimeoutError as RestTimeoutError,
    ScopeNotActiveError as ScopeNotActiveError,
    ToolAbort,
    ToolArgumentsError as ToolArgumentsError,
    ToolCallsLimitExceededError as ToolCallsLimitExceededError,
    ToolGuardrailError as ToolGuardrailError,
    ToolResultError as ToolResultError,
    ToolRetry,
    ToolRoundsExceededError as ToolRoundsExceededError,
    ToolTimeoutError as ToolTimeoutError,
    ToolboxError,
    UnknownToolError as UnknownToolError,
    UnsupportedContentError as UnsupportedContentError,
)
from .events import (
    EventListener,
    GuardrailExecutedEvent as GuardrailExecutedEvent,
    InvocationEvent as InvocationEvent,
    MemoryWrittenEvent as MemoryWrittenEvent,
    ModelFailedEvent as ModelFailedEvent,
    ModelRequestEvent as ModelRequestEvent,
    ModelResponseEvent as ModelResponseEvent,
    ServiceCompletedEvent as ServiceCompletedEvent,
    ServiceFailedEvent as ServiceFailedEvent,
    ServiceStartedEvent as ServiceStartedEvent,
    ToolExecutedEvent as ToolExecutedEvent,
    ToolFailedEvent as ToolFailedEvent,
    ToolProgressEvent as ToolProgressEvent,
    ToolStartedEvent as ToolStartedEvent,
)
from .execution.markers import blocking, non_blocking, run_on, run_on_thread
from .safe_text import protect_logs as _protect_logs
from .tools.marks import (
    ReturnBehavior,
    compensate_for as compensate_for,
    SearchBehavior as SearchBehavior,
    tool,
    toolbox,
)

if TYPE_CHECKING:
    from .container import Container
    from .demo import DemoChatModel
    from .logs import InvocationLogFilter as InvocationLogFilter, LoggingListener as LoggingListener
    from .models.anthropic import AnthropicChatModel as AnthropicChatModel
    from .models.openai import OpenAiChatModel
    from .models.pydantic_ai import PydanticAiChatModel as PydanticAiChatModel
    from .rest import register_rest_client
    from .search import (
        ToolSearchRequest as ToolSearchRequest,
        ToolSearchResult as ToolSearchResult,
        ToolSearchStrategy as ToolSearchStrategy,
    )
    from .services.declaration import (
        DEFAULT as DEFAULT,
        handle_tool_arguments_error as handle_tool_arguments_error,
        handle_tool_execution_error as handle_tool_execution_error,
        handle_unknown_tool as handle_unknown_tool,
        register_ai_service,
        system_message,
        user_message,
    )
    from .services.invocation import InvocationRecord as InvocationRecord, invocation_record
    from .services.memory import (
        ChatMemory as ChatMemory,
        ChatMemoryKey as ChatMemoryKey,
        ChatMemoryStore,
        InMemoryChatMemoryStore as InMemoryChatMemoryStore,
        MessageWindow,
        TokenWindow,
        estimate_tokens as estimate_tokens,
    )
    from .services.outputs import Result, TokenStream
    from .services.standalone import create_ai_service
    from .settings import ToolboxSettings
    from .tools.failures import ToolErrors, hide_details, return_to_model
    from .tools.sources import AiServiceTool as AiServiceTool, ToolProvider, ToolProviderRequest, ToolProviderResult
    from .tools.executors import (
        tool_executor_from as tool_executor_from,
        tool_specification_from as tool_specification_from,
        tool_specifications_from as tool_specifications_from,
        tools_from as tools_from,
    )


_protect_logs()


@cache
def _lazy_names() -> dict[str, str]:
    """Return the module of each name in the `TYPE_CHECKING` block above, which is the only list of them."""
    try:
        source = pkgutil.get_data(__name__, "__init__.py") or b""
    except OSError as error:
        fix = "toolbox needs its source files, which this bundle left out; with PyInstaller use --collect-all toolbox"
        raise ImportError(fix) from error
    block = source.decode().partition("\nif TYPE_CHECKING:\n")[2].partition("\n\n\n")[0]
    return {
        name: module
        for module, names in re.findall(r"from (\.[\w.]+) import (\([^)]*\)|.*)", block)
        for name in re.findall(r"\b(\w+)(?=,|\)|\s*$)", names)
    }


def __getattr__(name: str) -> object:
    if (module := _lazy_names().get(name)) is None:
        raise AttributeError(f"module 'toolbox' has no attribute {name!r}")
    value: object = getattr(import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals(), *_lazy_names()})


__all__ = [
    "ChatMemoryStore",
    "Container",
    "DemoChatModel",
    "EventListener",
    "IllegalConfigurationError",
    "ImageContent",
    "Inject",
    "Instance",
    "InvocationContext",
    "MemoryId",
    "MessageWindow",
    "Named",
    "OpenAiChatModel",
    "PdfContent",
    "Result",
    "ReturnBehavior",
    "TokenStream",
    "TokenWindow",
    "ToolAbort",
    "ToolErrors",
    "ToolProvider",
    "ToolProviderRequest",
    "ToolProviderResult",
    "ToolRetry",
    "ToolboxError",
    "ToolboxSettings",
    "UserMessage",
    "application_scoped",
    "blocking",
    "call_scoped",
    "create_ai_service",
    "dependent",
    "hide_details",
    "invocation_attributes",
    "invocation_record",
    "non_blocking",
    "produces",
    "register_ai_service",
    "register_rest_client",
    "request_scoped",
    "return_to_model",
    "run_on",
    "run_on_thread",
    "system_message",
    "time_limit",
    "tool",
    "toolbox",
    "user_message",
]
