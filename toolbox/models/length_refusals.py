"""Recognizes the refusal of a request that is too long for a model: by its code, else by the texts of known servers.

Not here: reading the reply of a server that refuses (`server_errors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

STATUSES = (200, 400, 413)
"""The statuses of such a refusal. 200 is that of an error inside a reply. 429 is not one: less text does not help."""

CODES = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "model_context_window_exceeded",
        "max_context_length_exceeded",
    }
    | {"exceed_context_size_error"}  # llama.cpp
    | {"request_too_large"}  # Anthropic
    | {"tokens_limit_reached"}  # GitHub Models
    | {"prompt_too_long", "input_too_long"}
)
"""The codes and types of a request that is too long."""

OTHER_CODES = frozenset(
    {"rate_limit_exceeded", "rate_limit_error", "rate_limit_reached_error", "too_many_requests", "insufficient_quota"}
    | {"tokens_per_minute_exceeded", "throttlingexception"}
)
"""Codes and types of other refusals, whose texts may speak of tokens too: Groq's limit per minute has status 413."""

_NUMBER = r"\(?\d[\d,.]*"
TEXTS: Mapping[str, tuple[str, ...]] = {
    "OpenAI, Azure, DeepSeek, vLLM, SGLang, OpenRouter, Cerebras": (
        rf"maximum context (?:length|limit) (?:is |of )?{_NUMBER}",
        r"exceeds the context window",
        r"input tokens exceed the configured limit",
        r"invalid '(?:messages|input)[^']*': string too long",
        r"context[_ ]length[_ ]exceeded|context length exceeded",
        rf"current length is {_NUMBER} while limit is",
    ),
    "vLLM": (
        rf"context length is only {_NUMBER}",
        rf"longer than the maximum model length of {_NUMBER}",
        r"reduce the length of the input",
    ),
    "SGLang, Together": (r"longer than the model.s context length",),
    "Groq, OpenAI": (r"reduce the length of the messages",),
    "Anthropic, Fireworks": (r"prompt is too long", r"exceeds? context limit", r"request exceeds the maximum size"),
    "Gemini": (
        r"input token count.{0,40}exceeds the maximum",
        r"exceeds the maximum number of tokens allowed",
        rf"input token count is {_NUMBER} but (?:the )?model only supports",
        r"request payload size exceeds the limit",
    ),
    "Mistral": (rf"too large for model with {_NUMBER} maximum context length",),
    "llama.cpp": (r"exceeds the available context size", r"exceed_context_size"),
    "Ollama": (r"exceeded (?:max |maximum )?context length", r"input length exceeds (?:the |maximum )?context length"),
    "LM Studio": (
        r"greater than the context length",
        rf"context length of only {_NUMBER}",
        r"context overflow",
    ),
    "Bedrock": (
        r"input is too long for requested model",
        r"too many input tokens",
        r"input tokens exceeded",
    ),
    "xAI": (rf"maximum prompt length is {_NUMBER}",),
    "Cohere": (
        r"total number of tokens in the (?:prompt|request|messages) cannot exceed",
        r"too many tokens: size limit exceeded",
    ),
    "Hugging Face, Together": (r"`?inputs`? tokens \+ `?max_new_tokens`? must be", r"`inputs` must have less than"),
    "TensorRT-LLM, Baseten, Poolside": (r"exceeds (?:the )?maximum (?:allowed )?input length",),
    "GitHub Copilot, GitHub Models": (
        rf"prompt token count of {_NUMBER} exceeds the limit",
        r"request body too large for .{1,100} model",
    ),
    "MiniMax": (r"context window exceeds limit",),
    "Moonshot": (r"exceeded model token limit",),
    "Z.ai, Zhipu": (r"prompt exceeds max length", r"prompt 超长"),
    "Qwen": (rf"range of input length should be \[{_NUMBER}",),
    "Baidu": (r"prompt tokens too long",),
    "watsonx": (r"number of input tokens.{0,40}cannot exceed",),
    "DS4": (rf"configured context size is {_NUMBER}",),
    "nginx and other proxies": (r"request entity too large", r"payload too large", r"content too large"),
}
"""What known servers say, as regular expressions; case does not matter."""

_DEEPEST = 10


def is_too_long(status: int, said: str, value: object) -> bool:
    """Return True if a server refused a request because it is too long; `value` is the JSON of its reply, or None."""
    if status not in STATUSES:
        return False
    codes = set(_find_codes(value, 0))
    if codes & CODES:
        return True
    return not codes & OTHER_CODES and _texts().search(said) is not None


@cache
def _texts() -> re.Pattern[str]:
    return re.compile("|".join(each for patterns in TEXTS.values() for each in patterns), re.IGNORECASE)


def _find_codes(value: object, depth: int) -> Iterator[str]:
    """Yield the codes and types in the JSON of an error, in lower case."""
    if depth > _DEEPEST:
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            if isinstance(each, str):
                if str(name).lower().replace("_", "").endswith(("code", "type", "status")):
                    yield each.lower()
            else:
                yield from _find_codes(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _find_codes(each, depth + 1)
