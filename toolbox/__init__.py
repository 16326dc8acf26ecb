"""toolbox: dependency injection for AI services.

The public names, by hand. Those that bring a library with them are loaded when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .chat import (
    AiMessage,
    BeforeToolExecution,
    ChatModel,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    Content,
    FinishReason,
    ImageContent,
    IntermediateResponse,
    Message,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    ResponseFormat,
    ServiceEvent,
    StreamEvent,
    StreamingChatModel,
    SystemMessage,
    TextContent,
    TokenUsage,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolExecutor,
    ToolSpecification,
    UserMessage,
)
from .context import Inject, InvocationContext, MemoryId, invocation_attributes, time_limit
from .di.marks import Instance, Named, application_scoped, call_scoped, dependent, produces, request_scoped
from .errors import (
    AmbiguousBeanError,
    AsyncBeanError,
    BlockingCallNotAllowedError,
    ContainerNotStartedError,
    FrameworkError,
    IllegalConfigurationError,
    InvalidMemoryIdError,
    InvocationTimeoutError,
    MemoryInUseError,
    MissingBeanError,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTimeoutError,
    ModelTruncatedError,
    OutputParsingError,
    Problem,
    RestClientError,
    RestDecodeError,
    RestTimeoutError,
    ScopeNotActiveError,
    ToolAbort,
    ToolArgumentsError,
    ToolboxError,
    ToolCallsLimitExceededError,
    ToolResultError,
    ToolRetry,
    ToolRoundsExceededError,
    ToolTimeoutError,
    UnknownToolError,
)
from .events import (
    EventListener,
    InvocationEvent,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
)
from .execution import blocking, non_blocking, run_on, run_on_thread
from .printable import protect_logs as _protect_logs
from .tools.marks import ReturnBehavior, tool, toolbox

if TYPE_CHECKING:
    from .container import Container
    from .demo import DemoChatModel
    from .logs import InvocationLogFilter, LoggingListener
    from .models.openai import OpenAiChatModel
    from .rest import register_rest_client
    from .services.declaration import DEFAULT, register_ai_service, system_message, user_message
    from .services.memory import (
        ChatMemory,
        ChatMemoryKey,
        ChatMemoryStore,
        InMemoryChatMemoryStore,
        MessageWindow,
        TokenWindow,
        estimate_tokens,
    )
    from .services.outputs import Result, TokenStream
    from .services.records import InvocationRecord, invocation_record
    from .services.standalone import create_ai_service
    from .settings import ToolboxSettings
    from .tools.failures import ToolErrors, hide_details, return_to_model
    from .tools.sources import AiServiceTool, ToolProvider, ToolProviderRequest, ToolProviderResult
    from .tools.standalone import tool_executor_from, tool_specification_from, tool_specifications_from, tools_from

_LOADED_WHEN_ASKED_FOR = {
    "Container": "container",
    "InvocationLogFilter": "logs",
    "LoggingListener": "logs",
    "DemoChatModel": "demo",
    "OpenAiChatModel": "models.openai",
    "register_rest_client": "rest",
    "DEFAULT": "services.declaration",
    "register_ai_service": "services.declaration",
    "system_message": "services.declaration",
    "user_message": "services.declaration",
    "ChatMemory": "services.memory",
    "ChatMemoryKey": "services.memory",
    "ChatMemoryStore": "services.memory",
    "InMemoryChatMemoryStore": "services.memory",
    "MessageWindow": "services.memory",
    "TokenWindow": "services.memory",
    "estimate_tokens": "services.memory",
    "Result": "services.outputs",
    "TokenStream": "services.outputs",
    "InvocationRecord": "services.records",
    "invocation_record": "services.records",
    "create_ai_service": "services.standalone",
    "ToolboxSettings": "settings",
    "ToolErrors": "tools.failures",
    "hide_details": "tools.failures",
    "return_to_model": "tools.failures",
    "AiServiceTool": "tools.sources",
    "ToolProvider": "tools.sources",
    "ToolProviderRequest": "tools.sources",
    "ToolProviderResult": "tools.sources",
    "tool_executor_from": "tools.standalone",
    "tool_specification_from": "tools.standalone",
    "tool_specifications_from": "tools.standalone",
    "tools_from": "tools.standalone",
}


_protect_logs()


def __getattr__(name: str) -> object:
    if (module := _LOADED_WHEN_ASKED_FOR.get(name)) is None:
        raise AttributeError(f"module 'toolbox' has no attribute {name!r}")
    value: object = getattr(import_module(f"toolbox.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AiMessage",
    "AiServiceTool",
    "AmbiguousBeanError",
    "AsyncBeanError",
    "BeforeToolExecution",
    "BlockingCallNotAllowedError",
    "ChatMemory",
    "ChatMemoryKey",
    "ChatMemoryStore",
    "ChatModel",
    "ChatRequest",
    "ChatResponse",
    "CompleteResponse",
    "CompleteToolCall",
    "Container",
    "ContainerNotStartedError",
    "Content",
    "DEFAULT",
    "DemoChatModel",
    "EventListener",
    "FinishReason",
    "FrameworkError",
    "IllegalConfigurationError",
    "ImageContent",
    "InMemoryChatMemoryStore",
    "Inject",
    "Instance",
    "IntermediateResponse",
    "InvalidMemoryIdError",
    "InvocationContext",
    "InvocationEvent",
    "InvocationLogFilter",
    "InvocationRecord",
    "InvocationTimeoutError",
    "LoggingListener",
    "MemoryId",
    "MemoryInUseError",
    "MemoryWrittenEvent",
    "Message",
    "MessageWindow",
    "MissingBeanError",
    "ModelConnectionError",
    "ModelError",
    "ModelFailedEvent",
    "ModelHttpError",
    "ModelProtocolError",
    "ModelRefusedError",
    "ModelRequestEvent",
    "ModelResponseEvent",
    "ModelTimeoutError",
    "ModelTruncatedError",
    "Named",
    "OpenAiChatModel",
    "OutputParsingError",
    "PartialReasoning",
    "PartialResponse",
    "PartialToolCall",
    "Problem",
    "ResponseFormat",
    "RestClientError",
    "RestDecodeError",
    "RestTimeoutError",
    "Result",
    "ReturnBehavior",
    "ScopeNotActiveError",
    "ServiceCompletedEvent",
    "ServiceEvent",
    "ServiceFailedEvent",
    "ServiceStartedEvent",
    "StreamEvent",
    "StreamingChatModel",
    "SystemMessage",
    "TextContent",
    "TokenStream",
    "TokenUsage",
    "TokenWindow",
    "ToolAbort",
    "ToolArgumentsError",
    "ToolCallsLimitExceededError",
    "ToolErrors",
    "ToolExecuted",
    "ToolExecutedEvent",
    "ToolExecution",
    "ToolExecutionRequest",
    "ToolExecutionResult",
    "ToolExecutionResultMessage",
    "ToolExecutor",
    "ToolFailedEvent",
    "ToolProvider",
    "ToolProviderRequest",
    "ToolProviderResult",
    "ToolResultError",
    "ToolRetry",
    "ToolRoundsExceededError",
    "ToolSpecification",
    "ToolStartedEvent",
    "ToolTimeoutError",
    "ToolboxError",
    "ToolboxSettings",
    "UnknownToolError",
    "UserMessage",
    "application_scoped",
    "blocking",
    "call_scoped",
    "create_ai_service",
    "dependent",
    "estimate_tokens",
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
    "tool_executor_from",
    "tool_specification_from",
    "tool_specifications_from",
    "toolbox",
    "tools_from",
    "user_message",
]
