"""The words with which servers end a reply: what each means, and those that say that there is no whole reply.

Not here: where the words are in a reply (the wires), refusals of requests (`server_errors`).
"""

from __future__ import annotations

from ..chat import FinishReason
from ..errors import ContextLengthError, ModelHttpError

_STOP, _LENGTH, _FILTER = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTENT_FILTER

_FINISH = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed"), _STOP),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "max_new_tokens", "token_limit"), _LENGTH),
    **dict.fromkeys(("model_length", "error_limit"), _LENGTH),  # Mistral, Cohere
    **dict.fromkeys(("tool_calls", "tool_call", "function_call", "tool_use"), FinishReason.TOOL_EXECUTION),
    **dict.fromkeys(("content_filter", "refusal"), _FILTER),
    **dict.fromkeys(("safety", "recitation", "blocklist", "prohibited_content", "spii", "image_safety"), _FILTER),
    **dict.fromkeys(("content_filtered", "guardrail_intervened"), _FILTER),  # Bedrock
    **dict.fromkeys(("sensitive", "error_toxic"), _FILTER),  # Z.ai, Cohere
}

_GAVE_UP = frozenset(
    {"error", "model_error", "server_error", "internal_error", "internal_server_error", "api_error", "provider_error"}
    | {"upstream_error", "engine_error", "inference_error", "generation_error", "unknown_error", "failed", "failure"}
    | {"insufficient_system_resource", "insufficient_system_resources", "resource_exhausted"}  # DeepSeek
    | {"network_error", "connection_error", "disconnected", "interrupted", "preempted"}  # Z.ai
    | {"abort", "aborted", "cancel", "canceled", "cancelled", "user_cancel"}  # vLLM, SGLang, the Responses API
    | {"timeout", "timed_out", "time_limit", "deadline_exceeded"}  # Cohere, watsonx
    | {"overloaded", "overloaded_error", "server_overloaded", "unavailable", "service_unavailable"}
)
"""The server could not finish the reply: another try, or another model, may."""

_FULL = frozenset({"model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded"})
"""The context window was full before the reply was complete: Anthropic, Z.ai, Bedrock."""

_MALFORMED = frozenset(
    {"malformed_function_call", "malformed_response", "unexpected_tool_call", "too_many_tool_calls"}  # Gemini
    | {"malformed_model_output", "malformed_tool_use"}  # Bedrock
)
"""The model wrote a tool call that the server cannot read. A text before it is not the answer."""


def finish_reason_of(word: str) -> FinishReason | None:
    """Return what a server's word for the end means; None for an unknown one."""
    return _FINISH.get(_normalize(word))


def error_of_ending(word: str) -> ModelHttpError | None:
    """Return the error of a server that ends its reply with this word, because it cannot complete it; else None."""
    meant = _normalize(word)
    if meant in _GAVE_UP:
        return ModelHttpError(503, f"the server gave up: it ended the reply with finish_reason {word}")
    if meant in _FULL:
        what = "the model's context window was full before its reply was complete"
        return ContextLengthError(400, f"{what}: finish_reason {word}")
    return None


def is_failure(word: str) -> bool:
    """Return True if a server that ends its reply with this word has no whole reply."""
    return _normalize(word) in _GAVE_UP | _FULL | _MALFORMED


def is_malformed_call(word: str) -> bool:
    """Return True if a server's word for the end says that it cannot read the model's tool call."""
    return _normalize(word) in _MALFORMED


def _normalize(word: str) -> str:
    # Gemini's API for clients of OpenAI sends "content_filter: SAFETY".
    return word.rpartition(":")[2].strip().lower().replace("-", "_")
