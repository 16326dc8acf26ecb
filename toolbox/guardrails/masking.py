"""`MaskSecrets`: finds keys, tokens, passwords and card numbers in the results of tools, and replaces them.

Not here: secrets that the program knows, such as its own keys (`safe_text`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..chat import ToolExecutionResult
from ..json_text import doubled_name, parsed_exactly, written_exactly
from .guard_layers import with_texts
from .kinds import GuardrailResult, ToolOutputGuardrail, ToolOutputGuardrailRequest

MASK = "***"

_NAMES = (
    r"passw(?:or)?d|passphrase|passcode|\bpwd|secret|credentials?|authorization|"
    r"(?:api|access|private|signing|encryption|client|account|auth|master|shared|subscription|ssh|service)[_ -]?key"
)
_PASS = r"(?:db|database|user|smtp|mail|ftp|ssh|login|admin|root|proxy|mysql|postgres|pg|redis)[_ -]?pass(?![a-z])"
_SECRET_NAME = re.compile(rf"{_NAMES}|\b{_PASS}|\bpwd\b|\bpin\b|\bcvv\b|\bcvc\b|cookie", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"token(?!ize|_?type|_?count)", re.IGNORECASE)

# Named secrets in a text are found in two steps, in the text in lower case: a name, then what follows it. One pattern
# for both, which ignores case, takes twice as long, and no other thread can run while `re` searches. The length limits
# keep the search linear.
_ASSIGNED_NAME = re.compile(rf"{_NAMES}|{_PASS}|token(?!s|ize|_?type|_?count)")
_ASSIGNED_VALUE = re.compile(  # `password=…`, `"api_key": "…"`, `token => …`
    r"""[\w-]{0,30}["']?\s{0,5}(?:[:=]|=>)\s{0,5}"""
    r"""(?:"((?:[^"\\\n]|\\.){1,4096})"|'((?:[^'\\\n]|\\.){1,4096})'|((?:(?:bearer|basic)\s{1,5})?[^\s,;&"'<>{}\[\]]{1,4096}))"""
)
_TOLD_NAME = re.compile(rf"{_NAMES}|token|\bpin")
_TOLD_VALUE = re.compile(  # `the password is hunter2`, but not `the password is required`
    r"\s{1,5}(?:is|was)\s{1,5}:?\s{0,5}(?=\S{0,200}[\d!@#$%^*_+=-])([^\s,;]{4,4096})"
)
_COOKIE = re.compile(r"((?:set-)?cookie:[ \t]{0,5})[\w!#$%&'*.^`|~+-]{1,256}=[^\r\n\"]{1,8192}", re.IGNORECASE)
_KNOWN_FORMAT = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|(?<![\w-])(?:"
    r"eyJ[\w-]{5,8192}\.[\w-]{5,16384}\.[\w-]{0,8192}"  # JSON web tokens
    r"|(?:sk|rk|pk)[-_][\w-]{16,512}"  # OpenAI, Anthropic, Stripe
    r"|(?:gh[pousr]_|github_pat_|glpat-|npm_|hf_|pypi-|dop_v1_|shpat_|xox[abeprs]-|xapp-)[\w-]{10,512}"
    r"|(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}(?![0-9A-Z])"  # AWS
    r"|AIza[\w-]{30,60}|ya29\.[\w-]{20,512}|SG\.[\w-]{16,64}\.[\w-]{16,128}"  # Google, SendGrid
    r")",
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
        """Return the result with masked text, text contents and attributes, and without its object."""
        result = request.result
        contents = with_texts(result.contents, masked)
        attributes = _mask_value(result.attributes) if result.attributes else result.attributes
        changed = ToolExecutionResult(masked(result.text), None, result.is_error, attributes, contents)
        return self.success() if changed == result else self.success_with(changed)


def masked(text: str) -> str:
    """Return a text, which may be JSON, with its secrets replaced."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = parsed_exactly(text)
            hidden = _mask_value(value)
            # The value has only the last of two values with one name. The other one may be a secret.
            return text if hidden == value and doubled_name(text) is None else written_exactly(hidden)
        except (ValueError, RecursionError):
            pass
    return _mask_text(text)


def _mask_value(value: Any, secret: bool = False, token: bool = False) -> Any:
    """Mask the strings of a JSON value; in a `secret`, all strings and numbers; in a `token`, all strings."""
    if isinstance(value, Mapping):
        return {
            name: _mask_value(
                each,
                secret or _SECRET_NAME.search(_split_words(name)) is not None,
                token or _TOKEN_NAME.search(name) is not None,
            )
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mask_value(each, secret, token) for each in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    is_text = type(value) is str  # numbers are of a subclass, exactly as written
    if secret or (token and is_text):
        return MASK
    if not is_text:
        return MASK if _is_card(str(value)) else value
    return _mask_text(value)


def _split_words(name: str) -> str:
    """Return a name in camel case or snake case as words, so that `userPin` is found and `shipping` is not."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_.-]", " ", name)


def _mask_text(text: str) -> str:
    text = _KNOWN_FORMAT.sub(MASK, text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _IN_ADDRESS.sub(rf"\1{MASK}", text)
    text = _COOKIE.sub(rf"\1{MASK}", text)
    text = _mask_after(_ASSIGNED_NAME, _ASSIGNED_VALUE, text)
    text = _mask_after(_TOLD_NAME, _TOLD_VALUE, text)
    return _DIGITS.sub(lambda found: MASK if _is_card(found.group()) else found.group(), text)


def _mask_after(names: re.Pattern[str], values: re.Pattern[str], text: str) -> str:
    """Replace each value, a group of `values`, that follows one of the names."""
    lower, end = _lower(text), 0
    pieces: list[str] = []
    for name in names.finditer(lower):
        if name.start() < end:
            continue  # a part of the value before it
        if found := values.match(lower, name.end()):
            begin, until = found.span(found.lastindex or 0)
            pieces += text[end:begin], MASK
            end = until
    return "".join([*pieces, text[end:]])


def _lower(text: str) -> str:
    """Return the text in lower case, with each character at its place.

    Letters that `re.IGNORECASE` takes for an ASCII letter become that letter.
    """
    return text.replace("\u0130", "i").replace("\u0131", "i").replace("\u017f", "s").lower()


def _is_card(text: str) -> bool:
    """Return True for 13 to 19 digits with a valid check digit (Luhn)."""
    digits = [int(each) for each in text if each.isdigit()]
    if not 13 <= len(digits) <= 19 or not text.replace(" ", "").replace("-", "").isdigit():
        return False
    doubled = [sum(divmod(2 * each, 10)) for each in digits[-2::-2]]
    return any(digits) and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0
