"""What spans and metrics say of an event, by the names that OpenTelemetry's conventions for generative AI have.

The names are written here, as they move from one package of constants to the next. Not here: what was said
(`content`), spans (`listener`), metrics (`instruments`).
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
from ..models.selection import FallbackModel

Attributes = dict[str, AttributeValue]

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
ERROR = "error.type"


# --- the service


def service_attributes(context: InvocationContext) -> Attributes:
    """Which call it is. By `toolbox.invocation.id`, which all spans of a call have, its logs are found."""
    service = context.service
    return {
        OPERATION: "invoke_agent",
        AGENT: service.__name__,
        "code.function.name": f"{service.__module__}.{service.__qualname__}.{context.method}",
        **_of_call(context),
    }


def _of_call(context: InvocationContext) -> Attributes:
    found: Attributes = {"toolbox.invocation.id": context.invocation_id}
    if context.memory_id is not None:
        found["gen_ai.conversation.id"] = str(context.memory_id)
    return found


def usage_attributes(usage: TokenUsage | None) -> Attributes:
    """The tokens used, as far as they are known."""
    if usage is None:
        return {}
    found: Attributes = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }
    if usage.cached_input_tokens:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_input_tokens
    if usage.reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return found


# --- the model


def model_attributes(model: ChatModel) -> Attributes:
    """Which model is asked, and where: what a span and its metrics have in common.

    A model of one's own may say it by attributes: `model`, `base_url`, `provider_name`.
    """
    found: Attributes = {OPERATION: "chat"}
    if isinstance(model, FallbackModel):  # who will answer is not known; the reply names its model
        asked = model_attributes(model.models[0])
        return {name: value for name, value in asked.items() if not name.startswith("server.")}
    base_url, name = getattr(model, "base_url", None), getattr(model, "model", None)
    provider, server = _place(base_url) if isinstance(base_url, str) else (type(model).__name__, {})
    said = getattr(model, "provider_name", None)
    found["gen_ai.provider.name"] = said if isinstance(said, str) else provider
    if isinstance(name, str):
        found[REQUEST_MODEL] = name
    return found | server


# What the conventions call those that answer under these names.
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
def _place(base_url: str) -> tuple[str, Attributes]:
    """The provider behind an address, and the server's attributes; whoever speaks OpenAI's API is `openai` else."""
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        return "openai", {}
    if host is None:
        return "openai", {}
    known = (name for suffix, name in _PROVIDERS.items() if host == suffix or host.endswith(f".{suffix}"))
    return next(known, "openai"), {"server.address": host, "server.port": port}


# The wires' names of parameters; numbers unless said otherwise.
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
    """What else a span says of a request to a model."""
    own = getattr(model, "parameters", None)
    parameters: dict[str, Any] = {**(own if isinstance(own, Mapping) else {}), **request.parameters}
    found = _of_call(context)
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
    """What a span says of a model's answer."""
    found = usage_attributes(response.token_usage) | finish_attributes(response)
    if response.id is not None:
        found["gen_ai.response.id"] = response.id
    if response.model is not None:
        found[RESPONSE_MODEL] = response.model
    return found


def finish_attributes(response: ChatResponse) -> Attributes:
    """Why an answer ended."""
    reason = finish_reason(response)
    return {} if reason is None else {"gen_ai.response.finish_reasons": (reason,)}


def finish_reason(response: ChatResponse) -> str | None:
    """Why an answer ended, in the conventions' word."""
    reason = response.finish_reason
    return "tool_call" if reason is FinishReason.TOOL_EXECUTION else reason.value if reason is not None else None


# --- tools


def tool_attributes(
    context: InvocationContext, request: ToolExecutionRequest, specification: ToolSpecification | None
) -> Attributes:
    """Which tool is called. One that nobody offers has no name: the model made it up."""
    found: Attributes = {OPERATION: "execute_tool", "gen_ai.tool.call.id": request.id, **_of_call(context)}
    if specification is not None:
        found |= {TOOL: specification.name, TOOL_TYPE: "function"}
        if specification.description:
            found["gen_ai.tool.description"] = specification.description
    return found


# --- errors


def error_type(error: BaseException) -> str:
    """What kind of error it is: the status a model's server answered with, else the full name of the class."""
    if isinstance(error, ModelHttpError):
        return str(error.status)
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_cancellation(error: BaseException) -> bool:
    """Whether somebody wanted no more, rather than that something failed."""
    return isinstance(error, (asyncio.CancelledError, GeneratorExit))
