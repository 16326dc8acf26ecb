"""Guardrails that are ready to use: `MaxLength` limits texts, `Moderated` asks a moderation endpoint.

Not here: `MaskSecrets` (`masking`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, assert_never

from pydantic_core import to_json, to_jsonable_python

from ..chat import AiMessage, ToolExecutionResult
from ..contents import AudioContent, ImageContent, Media, PdfContent, joined_text, media_in, reason_against, url_of
from ..errors import IllegalConfigurationError, ModelProtocolError, Problem
from .guard_layers import find_model, with_texts
from .kinds import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
)

# --- length


class MaxLength(InputGuardrail, OutputGuardrail, ToolInputGuardrail, ToolOutputGuardrail):
    """Limits the length of texts: refuses longer messages and arguments, and cuts longer answers and results.

    A structured answer that is longer is refused, because a part of its JSON is not an answer.

        @input_guardrails(MaxLength(4_000))

    `chars` is the limit in characters; for arguments, of all their strings together. Raises `ValueError` below 1.
    """

    def __init__(self, chars: int) -> None:
        if isinstance(chars, bool) or not isinstance(chars, int) or chars < 1:
            raise ValueError(f"MaxLength: invalid chars={chars!r}; use 1 or more characters")
        self.chars = chars

    def __repr__(self) -> str:
        return f"MaxLength({self.chars})"

    async def validate(self, request: Any) -> GuardrailResult:
        """Accept a text within the limit; refuse or cut a longer one."""
        match request:
            case InputGuardrailRequest():
                return self._judge_length(len(request.user_message.text), "The message has {} characters")
            case ToolInputGuardrailRequest():
                return self._judge_length(
                    _count_characters(request.arguments), "The arguments have {} characters together"
                )
            case OutputGuardrailRequest():
                value, text = request.value, request.text
                is_text = value is None or isinstance(value, AiMessage) or (isinstance(value, str) and value == text)
                if not is_text:
                    return self._judge_length(len(request.text), "The answer has {} characters")
                long = len(request.text) > self.chars
                return self.success_with(request.text[: self.chars]) if long else self.success()
            case ToolOutputGuardrailRequest():
                result = request.result
                long = len(result.text) > self.chars
                return self.success_with(self._cut_result(result)) if long else self.success()
        raise TypeError(f"MaxLength does not support {type(request).__name__}")

    def _judge_length(self, length: int, fact: str) -> GuardrailResult:
        if length <= self.chars:
            return self.success()
        return self.failure(f"{fact.format(length)}; the limit is {self.chars}.")

    def _cut_result(self, result: ToolExecutionResult) -> ToolExecutionResult:
        left = self.chars

        def cut_text(text: str) -> str:
            nonlocal left
            kept = text[: max(left, 0)]
            left -= len(text) + 1
            return kept

        return replace(result, text=result.text[: self.chars], contents=with_texts(result.contents, cut_text))


def _count_characters(value: Any) -> int:
    """Return the number of characters in all strings of a value."""
    total, pending = 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            pending += each
        elif isinstance(each, (bytes, bytearray)):
            total += len(each)
        elif each is not None and not isinstance(each, (bool, int, float)):
            plain = to_jsonable_python(each, fallback=str, bytes_mode="base64")
            pending.append(plain)
    return total


# --- moderation


class Moderated(InputGuardrail, OutputGuardrail, ToolInputGuardrail, ToolOutputGuardrail):
    """Refuses texts and images that OpenAI's moderation endpoint flags.

        @input_guardrails(Moderated())

    It uses the address and the key of the default model, which must be an `OpenAiChatModel`. `model` is the moderation
    model. If the endpoint cannot be reached, the text is refused. The endpoint cannot judge PDF documents and audio:
    they are refused, or let through with `unjudged="allow"`. Raises `ValueError` for another `unjudged`.
    """

    def __init__(
        self, model: str = "omni-moderation-latest", *, unjudged: Literal["refuse", "allow"] = "refuse"
    ) -> None:
        if unjudged not in ("refuse", "allow"):
            raise ValueError(f"invalid unjudged={unjudged!r}; use 'refuse' or 'allow'")
        self.model, self.unjudged = model, unjudged

    def __repr__(self) -> str:
        return f"Moderated({self.model!r}, unjudged={self.unjudged!r})"

    async def validate(self, request: Any) -> GuardrailResult:
        """Send the text and the images to the endpoint. Raises `ModelError` if it does not answer."""
        text, media = _parts_to_moderate(request)
        inputs: list[Any] = [text] if text.strip() else []
        for part in media:
            if (reason := reason_against(part)) is not None:  # a part of a stored message
                return self.failure(f"moderation cannot judge {type(part).__name__}: {reason}")
            if (image := _image_to_moderate(part)) is not None:
                inputs.append([image])  # one image for each request, as the endpoint wants it
            elif self.unjudged == "refuse":
                return self.failure(f"moderation cannot judge {type(part).__name__}")
        flagged = dict.fromkeys([name for each in inputs for name in await self._find_flagged(each)])
        return self.failure(f"flagged by moderation: {', '.join(flagged)}") if flagged else self.success()

    async def _find_flagged(self, given: Any) -> list[str]:
        """Return the names of the categories that apply to an input of the endpoint."""
        model = await _find_default_model()
        reply = await model.call_endpoint("/moderations", {"model": self.model, "input": given})
        results = reply.get("results") if isinstance(reply, Mapping) else None
        if not isinstance(results, Sequence) or not results or not all(isinstance(each, Mapping) for each in results):
            raise ModelProtocolError("the reply of the moderation endpoint has no results", json.dumps(reply)[:200])
        names: dict[str, None] = {}
        for result in results:
            if not isinstance(result.get("flagged"), bool):
                raise ModelProtocolError("the reply of the moderation endpoint has no flag", json.dumps(reply)[:200])
            if result["flagged"]:
                categories = result.get("categories")
                found = [name for name, applies in categories.items() if applies] if categories else []
                names.update(dict.fromkeys(found or ["unspecified"]))
        return list(names)


def _image_to_moderate(part: Media) -> dict[str, Any] | None:
    """Return an image as the endpoint reads it; None for what it cannot judge."""
    match part:
        case ImageContent():
            return {"type": "image_url", "image_url": {"url": url_of(part)}}
        case PdfContent() | AudioContent():
            return None
        case _:
            assert_never(part)


def _parts_to_moderate(request: Any) -> tuple[str, tuple[Media, ...]]:
    """Return the text, and the images, documents and recordings that a guardrail got."""
    match request:
        case InputGuardrailRequest():
            return request.user_message.text, media_in(request.user_message.contents)
        case OutputGuardrailRequest():
            return request.text, ()
        case ToolInputGuardrailRequest():
            return to_json(request.arguments, fallback=str, bytes_mode="base64").decode(), ()
        case ToolOutputGuardrailRequest():
            text, more = request.result.text, joined_text(request.result.contents)
            # Beside images, models read the texts of the contents.
            return text if more in text else f"{text}\n{more}", media_in(request.result.contents)
    raise TypeError(f"Moderated does not support {type(request).__name__}")


async def _find_default_model() -> Any:
    """Return the default model, or the first of its fallbacks that has a moderation endpoint."""
    find = find_model.get()
    model = await find(None) if find is not None else None
    for each in (model, *getattr(model, "models", ())):
        if hasattr(each, "call_endpoint"):
            return each
    fact = f"the default model is {type(model).__name__}" if model is not None else "there is no default model"
    fix = "use an OpenAiChatModel as the default model, or replace Moderated in tests"
    raise IllegalConfigurationError([Problem("Moderated", fact, fix)])
