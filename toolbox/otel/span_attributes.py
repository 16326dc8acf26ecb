"""The attributes of spans and metrics, by OpenTelemetry's conventions for generative AI.

The names of the conventions are literals here, because they move between packages of constants. Not here: the content
of messages (`span_content`), the spans (`span_listener`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.util.types import AttributeValue

from ..chat import (
    ChatModel,
    ChatRequest,
    ChatResponse,
    FinishReason,
    TokenUsage,
    ToolExecutionRequest,
    ToolSpecification,
)
from ..context import InvocationContext
from ..errors import ModelHttpError

Attributes = dict[str, AttributeValue]

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
ERROR = "error.type"
RUN_ID = "toolbox.run.id"


# --- the service


def service_attributes(context: InvocationContext) -> Attributes:
    """Return the attributes of a service call. All its spans and log records share `toolbox.invocation.id`."""
    service = context.service
    return {
        OPERATION: "invoke_agent",
        AGENT: service.__name__,
        "code.function.name": f"{service.__module__}.{service.__qualname__}.{context.method}",
        **_call_attributes(context),
    }


def caller_attributes(context: InvocationContext) -> Attributes:
    """Return the name of the caller, unless it is anonymous."""
    return {} if context.user is None else {"user.id": context.user}


def conversation_attributes(context: InvocationContext) -> Attributes:
    """Return the id of the conversation, if the call has one."""
    return {} if context.memory_id is None else {"gen_ai.conversation.id": str(context.memory_id)}


def _call_attributes(context: InvocationContext) -> Attributes:
    return {"toolbox.invocation.id": context.invocation_id, **conversation_attributes(context)}


def usage_attributes(usage: TokenUsage | None) -> Attributes:
    """Return the token usage, if it is known."""
    if usage is None:
        return {}
    found: Attributes = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    if usage.cached_input_tokens:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_input_tokens
    if usage.cache_write_tokens:
        found["gen_ai.usage.cache_creation.input_tokens"] = usage.cache_write_tokens
    if usage.reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return found


# --- the model


def model_attributes(model: ChatModel) -> Attributes:
    """Return the attributes of a model and its server that spans and metrics share.

    Custom models can set them with the attributes `model`, `base_url` and `provider_name`.
    """
    found: Attributes = {OPERATION: "chat"}
    base_url, name = getattr(model, "base_url", None), getattr(model, "model", None)
    provider, server = _provider_and_server(base_url) if isinstance(base_url, str) else (type(model).__name__, {})
    provider_name = getattr(model, "provider_name", None)
    found["gen_ai.provider.name"] = provider_name if isinstance(provider_name, str) else provider
    if isinstance(name, str):
        found[REQUEST_MODEL] = name
    return found | server


# Provider names of the conventions, by domain.
_PROVIDERS = {
    "openai.azure.com": "azure.ai.openai",
    "services.ai.azure.com": "azure.ai.inference",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "amazonaws.com": "aws.bedrock",
    "anthropic.com": "anthropic",
    "cohere.com": "cohere",
    "cohere.ai": "cohere",
    "deepseek.com": "deepseek",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "moonshot.ai": "moonshot_ai",
    "perplexity.ai": "perplexity",
    "x.ai": "x_ai",
}


@lru_cache(maxsize=64)
def _provider_and_server(base_url: str) -> tuple[str, Attributes]:
    """Return the provider of a URL and the server's attributes. The provider of an unknown domain is `openai`."""
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return "openai", {}
    if host is None:
        return "openai", {}
    known = (name for suffix, name in _PROVIDERS.items() if host == suffix or host.endswith(f".{suffix}"))
    return next(known, "openai"), {"server.address": host, "server.port": port}


# Numeric request parameters, by their names in the providers' APIs.
_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
}


def request_attributes(
    model: ChatModel, request: ChatRequest, streaming: bool, context: InvocationContext
) -> Attributes:
    """Return the further attributes of the span of a model request."""
    own = getattr(model, "parameters", None)
    parameters: dict[str, Any] = {**(own if isinstance(own, Mapping) else {}), **request.parameters}
    named = {
        "temperature": request.temperature,
        "max_output_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning,
    }
    parameters |= {name: value for name, value in named.items() if value is not None}
    found = _call_attributes(context)
    for name, value in parameters.items():
        if name in _PARAMETERS and isinstance(value, (int, float)) and not isinstance(value, bool):
            found[_PARAMETERS[name]] = value
    stop = parameters.get("stop")
    if isinstance(stop, str):
        found["gen_ai.request.stop_sequences"] = (stop,)
    elif isinstance(stop, (list, tuple)):
        found["gen_ai.request.stop_sequences"] = tuple(str(each) for each in stop)
    if isinstance(effort := parameters.get("reasoning_effort"), str):
        found["gen_ai.request.reasoning.level"] = effort
    if isinstance(choices := parameters.get("n"), int) and choices != 1:
        found["gen_ai.request.choice.count"] = choices
    if request.response_format is not None:
        found["gen_ai.output.type"] = "json"
    if streaming:
        found["gen_ai.request.stream"] = True
    return found


def response_attributes(response: ChatResponse) -> Attributes:
    """Return the attributes of a model's response."""
    found = usage_attributes(response.token_usage) | finish_attributes(response)
    if response.id is not None:
        found["gen_ai.response.id"] = response.id
    if response.model is not None:
        found[RESPONSE_MODEL] = response.model
    return found


def finish_attributes(response: ChatResponse) -> Attributes:
    """Return the finish reason as an attribute, if it is known."""
    reason = finish_reason(response)
    return {} if reason is None else {"gen_ai.response.finish_reasons": (reason,)}


def finish_reason(response: ChatResponse) -> str | None:
    """Return the finish reason by its name in the conventions."""
    reason = response.finish_reason
    return "tool_call" if reason is FinishReason.TOOL_EXECUTION else reason.value if reason is not None else None


# --- tools


def tool_attributes(
    context: InvocationContext, request: ToolExecutionRequest, specification: ToolSpecification | None
) -> Attributes:
    """Return the attributes of a tool call. An unknown tool gets no name, because the model can invent any name."""
    found: Attributes = {OPERATION: "execute_tool", "gen_ai.tool.call.id": request.id, **_call_attributes(context)}
    if specification is not None:
        found |= {TOOL: specification.name, TOOL_TYPE: "function"}
        if specification.description:
            found["gen_ai.tool.description"] = specification.description
    return found


# --- errors


def error_type(error: BaseException) -> str:
    """Return the HTTP status of a `ModelHttpError`, otherwise the full name of the error's class."""
    if isinstance(error, ModelHttpError):
        return str(error.status)
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_cancellation(error: BaseException) -> bool:
    """Return True if the operation was cancelled, not failed."""
    return isinstance(error, (asyncio.CancelledError, GeneratorExit))
