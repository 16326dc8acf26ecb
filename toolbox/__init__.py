"""toolbox: dependency injection for AI services.

`__all__` lists what programs import from here: the container, tools, services, models and messages, and all errors and
events. What belongs to one capability is in its module: `toolbox.guardrails`, `toolbox.runs`, `toolbox.sql` and others.
Names are loaded on first use, so that `import toolbox` stays fast. Type checkers and editors read `__init__.pyi`, which
`make stubs` writes from the tables below.
"""

from __future__ import annotations

from . import errors, events
from .first_use import names_on_first_use
from .safe_text import protect_logs as _protect_logs

_LISTED = {
    ".chat": """
        AiMessage BeforeToolExecution ChatModel ChatRequest ChatRequestParameters ChatResponse CompleteResponse
        CompleteToolCall FinishReason IntermediateResponse Message PartialReasoning PartialResponse PartialToolCall
        ResponseFormat Retrieved StreamEvent SystemMessage TokenUsage ToolExecuted ToolExecution ToolExecutionRequest
        ToolExecutionResult ToolExecutionResultMessage ToolExecutor ToolProgress ToolSpecification UserMessage
    """,
    ".container": "Container",
    ".contents": "AudioContent ImageContent PdfContent TextContent",
    ".context": "InvocationContext invocation_attributes time_limit",
    ".demo": "DemoChatModel",
    ".conversations.keys": "ChatMemoryKey",
    ".conversations.stores": "ChatMemoryStore",
    ".conversations.views": "MessageWindow TokenWindow",
    ".di.conditions": "only_if",
    ".di.decorating": "decorates",
    ".di.decorators": "Instance Named application_scoped call_scoped dependent produces request_scoped",
    ".errors": " ".join(errors.__all__),
    ".events": " ".join(events.__all__),
    ".execution.markers": "blocking non_blocking run_on run_on_thread",
    ".hosts.executors": "tool_executor_from tool_specification_from tool_specifications_from tools_from",
    ".hosts.standalone": "create_ai_service",
    ".limits": "UsageLimitExceededError",
    ".models.anthropic": "AnthropicChatModel",
    ".models.openai": "OpenAiChatModel",
    ".models.pydantic_ai": "PydanticAiChatModel",
    ".observers": "observes",
    ".parameters": "Inject MemoryId Progress",
    ".request_hooks": "on_success",
    ".rest": "register_rest_client",
    ".search": "ToolSearchRequest ToolSearchResult ToolSearchStrategy",
    ".security": "AccessDeniedError ForbiddenError UnauthenticatedError",
    ".service_events": "HandedOver InnerEvent",
    ".services.declaration": """
        DEFAULT handle_tool_arguments_error handle_tool_execution_error handle_unknown_tool register_ai_service
        system_message user_message
    """,
    ".services.invocation_records": "invocation_record",
    ".services.outputs": "Result TokenStream",
    ".settings": "ToolboxSettings",
    ".startup": "on_start",
    ".tools.failures": "ToolErrors hide_details return_to_model",
    ".tools.marks": "ReturnBehavior SearchBehavior compensate_for tool toolbox",
    ".tools.sources": "AiServiceTool ToolProvider ToolProviderRequest ToolProviderResult",
}

_UNLISTED = {
    ".chat": "StreamingChatModel",
    ".contents": "Content",
    ".conversations.memories": "ChatMemory",
    ".conversations.stores": "InMemoryChatMemoryStore",
    ".conversations.views": "estimate_tokens",
    ".logs": "InvocationLogFilter LoggingListener",
    ".service_events": "ServiceEvent",
    ".services.invocation_records": "InvocationRecord",
    ".services.outputs": "Compensation",
}
"""Names that can be imported from here too, but that documents import from their modules."""

__getattr__, __dir__ = names_on_first_use(__name__, _LISTED, _UNLISTED)
__all__ = sorted(" ".join(_LISTED.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the .pyi

_protect_logs()
