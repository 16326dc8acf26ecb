"""Ready-made guardrails: `MaxLength`, `MaskSecrets` and `Moderated`. Import them from `toolbox.guardrails`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json, to_jsonable_python

from .chat import ToolExecutionResult
from .errors import IllegalConfigurationError, ModelProtocolError, Problem
from .guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
    find_model,
    with_texts,
)
from .tools.codec import parsed_exactly, written_exactly

# --- length


class MaxLength(InputGuardrail, OutputGuardrail, ToolInputGuardrail, ToolOutputGuardrail):
    """Limits the length of texts: refuses longer messages and arguments, and cuts longer answers and results.

        @input_guardrails(MaxLength(4_000))

    `chars` is the limit in characters; for arguments, of all their strings together.
    """

    def __init__(self, chars: int) -> None:
        if isinstance(chars, bool) or not isinstance(chars, int) or chars < 1:
            raise ValueError(f"MaxLength({chars!r}); use 1 or more characters")
        self.chars = chars

    def __repr__(self) -> str:
        return f"MaxLength({self.chars})"

    async def validate(self, request: Any) -> GuardrailResult:
        """Compare the length with the limit."""
        match request:
            case InputGuardrailRequest():
                return self._limited(len(request.user_message.text), "The message")
            case ToolInputGuardrailRequest():
                return self._limited(_length(request.arguments), "The arguments have together")
            case OutputGuardrailRequest():
                long = len(request.text) > self.chars
                return self.success_with(request.text[: self.chars]) if long else self.success()
            case ToolOutputGuardrailRequest():
                result = request.result
                long = len(result.text) > self.chars
                return self.success_with(self._cut(result)) if long else self.success()
        raise TypeError(f"MaxLength does not support {type(request).__name__}")

    def _limited(self, length: int, what: str) -> GuardrailResult:
        if length <= self.chars:
            return self.success()
        verb = "" if what.endswith("together") else " has"
        return self.failure(f"{what}{verb} {length} characters; the limit is {self.chars}.")

    def _cut(self, result: ToolExecutionResult) -> ToolExecutionResult:
        left = self.chars

        def cut(text: str) -> str:
            nonlocal left
            kept = text[: max(left, 0)]
            left -= len(text) + 1
            return kept

        return replace(result, text=result.text[: self.chars], contents=with_texts(result.contents, cut))


def _length(value: Any) -> int:
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


# --- secrets

MASK = "***"

_NAMES = (
    r"passw(?:or)?d|passphrase|passcode|\bpwd|secret|credentials?|authorization|"
    r"(?:api|access|private|signing|encryption|client|account|auth|master|shared|subscription|ssh|service)[_ -]?key"
)
_SECRET_NAME = re.compile(_NAMES + r"|\bpwd\b|\bpin\b|\bcvv\b|\bcvc\b|cookie", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"token(?!ize|_?type|_?count)", re.IGNORECASE)
# An assignment in text: `password=…`, `"api_key": "…"`, `token: …`. The length limits keep the search linear.
_ASSIGNED = re.compile(
    rf"""((?:{_NAMES}|token(?!s|ize|_?type|_?count))[\w-]{{0,30}}["']?\s{{0,5}}(?:[:=]|=>)\s{{0,5}})"""
    r"""("(?:[^"\\\n]|\\.){1,4096}"|'(?:[^'\\\n]|\\.){1,4096}'|(?:(?:bearer|basic)\s{1,5})?[^\s,;&"'<>{}\[\]]{1,4096})""",
    re.IGNORECASE,
)
_SAID = re.compile(
    rf"((?:{_NAMES}|token|\bpin)\s{{1,5}}(?:is|was)\s{{1,5}}:?\s{{0,5}})(?=\S{{0,200}}[\d!@#$%^*_+=-])([^\s,;]{{4,4096}})",
    re.IGNORECASE,
)
_SECRETS = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|(?<![\w-])eyJ[\w-]{5,8192}\.[\w-]{5,16384}\.[\w-]{0,8192}"  # JSON web tokens
    r"|(?<![\w-])(?:sk|rk|pk)[-_](?:[\w-]{16,512})"  # OpenAI, Anthropic, Stripe
    r"|(?<![\w-])(?:gh[pousr]_|github_pat_|glpat-|npm_|hf_|pypi-|dop_v1_|shpat_|xox[abeprs]-|xapp-)[\w-]{10,512}"
    r"|(?<![\w-])(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}(?![0-9A-Z])"  # AWS
    r"|(?<![\w-])AIza[\w-]{30,60}|(?<![\w-])ya29\.[\w-]{20,512}|(?<![\w-])SG\.[\w-]{16,64}\.[\w-]{16,128}",
    re.DOTALL,
)
_BEARER = re.compile(r"\b(bearer|basic)(\s{1,5})[\w.~+/=-]{8,8192}", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(://[^\s:/@\"']{0,256}:)[^\s/@\"']{1,256}(?=@)")
_DIGITS = re.compile(r"(?<![\d.])(?:\d[ -]?){12,18}\d(?![\d])")


class MaskSecrets(ToolOutputGuardrail):
    """Replaces secrets in the results of tools by `***`: keys, tokens, passwords and card numbers.

        @tool
        @tool_output_guardrails(MaskSecrets)
        def configuration(self) -> dict[str, str]: ...

    JSON stays valid JSON. The result's object is dropped, because it may contain the same secrets. It finds secrets by
    their names and by well-known formats, so it cannot find all of them.
    """

    def validate(self, request: ToolOutputGuardrailRequest) -> GuardrailResult:
        """Mask the text, the text contents and the attributes of the result."""
        result = request.result
        contents = with_texts(result.contents, masked)
        attributes = _masked_value(result.attributes) if result.attributes else result.attributes
        changed = ToolExecutionResult(masked(result.text), None, result.is_error, attributes, contents)
        return self.success() if changed == result else self.success_with(changed)


def masked(text: str) -> str:
    """Return a text, which may be JSON, with its secrets replaced."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = parsed_exactly(text)
            hidden = _masked_value(value)
            return text if hidden == value else written_exactly(hidden)
        except (ValueError, RecursionError):
            pass
    return _masked_text(text)


def _masked_value(value: Any, secret: bool = False, token: bool = False) -> Any:
    """Mask the strings of a JSON value; in a `secret`, all strings and numbers; in a `token`, all strings."""
    if isinstance(value, Mapping):
        return {
            name: _masked_value(
                each,
                secret or _SECRET_NAME.search(_words(name)) is not None,
                token or _TOKEN_NAME.search(name) is not None,
            )
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_masked_value(each, secret, token) for each in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    is_text = type(value) is str  # numbers are of a subclass, exactly as written
    if secret or (token and is_text):
        return MASK
    if not is_text:
        return MASK if _is_card(str(value)) else value
    return _masked_text(value)


def _words(name: str) -> str:
    """Return a name in camel case or snake case as words, so that `userPin` is found and `shipping` is not."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_.-]", " ", name)


def _masked_text(text: str) -> str:
    text = _SECRETS.sub(MASK, text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _IN_ADDRESS.sub(rf"\1{MASK}", text)
    text = _ASSIGNED.sub(_assigned, text)
    text = _SAID.sub(rf"\1{MASK}", text)
    return _DIGITS.sub(lambda found: MASK if _is_card(found.group()) else found.group(), text)


def _assigned(found: re.Match[str]) -> str:
    name, value = found.groups()
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{quote}{MASK}{quote}"


def _is_card(text: str) -> bool:
    """Return True for 13 to 19 digits with a valid check digit (Luhn)."""
    digits = [int(each) for each in text if each.isdigit()]
    if not 13 <= len(digits) <= 19 or not text.replace(" ", "").replace("-", "").isdigit():
        return False
    doubled = [sum(divmod(2 * each, 10)) for each in digits[-2::-2]]
    return any(digits) and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


# --- moderation


class Moderated(InputGuardrail, OutputGuardrail, ToolInputGuardrail, ToolOutputGuardrail):
    """Refuses texts that OpenAI's moderation endpoint flags.

        @input_guardrails(Moderated())

    It uses the address and the key of the default model, which must be an `OpenAiChatModel`. `model` is the moderation
    model. If the endpoint cannot be reached, the text is refused.
    """

    def __init__(self, model: str = "omni-moderation-latest") -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"Moderated({self.model!r})"

    async def validate(self, request: Any) -> GuardrailResult:
        """Send the text to the endpoint. Raises `ModelError` if it does not answer."""
        text = _text_to_moderate(request)
        flagged = await self._flagged(text) if text.strip() else []
        return self.failure(f"flagged by moderation: {', '.join(flagged)}") if flagged else self.success()

    async def _flagged(self, text: str) -> list[str]:
        """Return the names of the categories that apply to the text."""
        reply = await _default_model().call_endpoint("/moderations", {"model": self.model, "input": text})
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


def _text_to_moderate(request: Any) -> str:
    match request:
        case InputGuardrailRequest():
            return request.user_message.text
        case OutputGuardrailRequest():
            return request.text
        case ToolInputGuardrailRequest():
            return to_json(request.arguments, fallback=str, bytes_mode="base64").decode()
        case ToolOutputGuardrailRequest():
            return request.result.text
    raise TypeError(f"Moderated does not support {type(request).__name__}")


def _default_model() -> Any:
    """Return the default model, or the first of its fallbacks that has a moderation endpoint."""
    find = find_model.get()
    model = find(None) if find is not None else None
    for each in (model, *getattr(model, "models", ())):
        if hasattr(each, "call_endpoint"):
            return each
    fact = f"the default model is {type(model).__name__}" if model is not None else "there is no default model"
    fix = "use an OpenAiChatModel as the default model, or replace Moderated in tests"
    raise IllegalConfigurationError([Problem("Moderated", fact, fix)])
