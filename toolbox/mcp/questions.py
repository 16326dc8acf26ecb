"""Questions that MCP servers ask during a call, and the answers of a person in the form of the protocol.

Not here: suspending a call that waits for an answer (`server_tools`), sending the answers (`connection`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..deferred_answers import DeferredAnswer
from ..errors import McpError, ToolDeferred
from ..safe_text import brief
from .screening import MAX_MESSAGE_CHARS, visible

_MISLEADING = re.compile(r"[\s\\]")

# --- questions


def read_question(server: str, request: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    """Return a question of a server as JSON values, without secrets in its texts. Raises `McpError` for old kinds."""
    params = request.params
    if request.method != "elicitation/create":
        raise McpError(server, f"the server asks for {request.method}, which is not supported")
    message = hide(visible(brief(params.message, MAX_MESSAGE_CHARS)))
    if params.mode == "url":
        # As it is: a changed address would not open, and the client id of a login is often a value of `env`.
        return {"message": message, "url": params.url}
    return {"message": message, "schema": _hide_in_schema(params.requested_schema, hide)}


def _hide_in_schema(value: Any, hide: Callable[[str], str]) -> Any:
    """Return a schema without secrets in texts for people. Its names and values stay, because answers repeat them."""
    if isinstance(value, list):
        return [_hide_in_schema(each, hide) for each in value]
    if not isinstance(value, dict):
        return value
    is_text = {key for key in ("title", "description") if isinstance(value.get(key), str)}
    return {key: hide(each) if key in is_text else _hide_in_schema(each, hide) for key, each in value.items()}


def is_web_address(url: object) -> bool:
    """Return True for an address of http or https that a person can be asked to open.

    A page that shows `javascript:`, `data:` or `file:` addresses as links would run the server's code, or open files.
    User info is not allowed, as `https://bank.example@evil.example` leads to the last name, nor are backslashes, which
    browsers read as slashes.
    """
    text = str(url)
    try:
        parts = urlsplit(text)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        return is_web and visible(text) == url and not _MISLEADING.search(text)
    except ValueError:
        return False


# --- answers

_ACTIONS = ("accept", "decline", "cancel")
_CHECKED = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")


def read_answers(answer: DeferredAnswer | None) -> tuple[dict[str, dict[str, Any]] | None, str | None]:
    """Return a person's answers to the questions of a server, as its protocol wants them, and the server's state.

    Raises `ToolDeferred` if the answer is invalid, so that the question is asked again.
    """
    if answer is None:
        return None, None
    requests: dict[str, dict[str, Any]] = answer.attributes["requests"]
    value = answer.value
    if len(requests) == 1 and not (isinstance(value, Mapping) and value.keys() == requests.keys()):
        value = dict.fromkeys(requests, value)
    if not isinstance(value, Mapping) or value.keys() != requests.keys():
        wrong = f"expected an object with the answers to: {', '.join(requests)}"
        raise _ask_again(answer, wrong)
    found = {key: _answer_to(each) for key, each in value.items()}
    for key, each in found.items():
        misfit = _find_misfit(requests[key], each.get("content")) if each["action"] == "accept" else None
        if misfit is not None:
            raise _ask_again(answer, misfit)
    return found, answer.attributes["state"]


def _answer_to(value: Any) -> dict[str, Any]:
    """Return an answer in the protocol's form: an object accepts with its values, None and False decline."""
    if value is None or value is False:
        return {"action": "decline"}
    if isinstance(value, Mapping) and value.keys() <= {"action", "content"} and value.get("action") in _ACTIONS:
        return dict(value)
    return {"action": "accept"} if value is True else {"action": "accept", "content": value}


def _find_misfit(request: Mapping[str, Any], content: Any) -> str | None:
    """Return why values do not match the schema of a question, or None."""
    if "schema" not in request:
        return None if content is None else "this question needs no values: answer True or False"
    from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]  # no type hints

    values = {} if content is None else content
    if not isinstance(values, Mapping):
        return "expected an object with the values"
    for name, value in values.items():
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not (value is None or is_list or isinstance(value, (str, int, float))):
            return f"{name}: expected a string, a number, a boolean or a list of strings"
    try:
        error = next(iter(Draft202012Validator(_flatten_schema(request["schema"])).iter_errors(values)), None)
    except Exception as failure:  # schemas of servers can be invalid
        return f"the server's schema cannot be read ({type(failure).__name__})"
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {error.message}" if place else str(error.message)


def _flatten_schema(schema: Any) -> dict[str, Any]:
    """Return a question's schema with what the protocol allows: no references to follow, no patterns to run."""
    given = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = {
        name: {key: value for key, value in about.items() if key in _CHECKED}
        for name, about in (given.items() if isinstance(given, Mapping) else ())
        if isinstance(about, Mapping)
    }
    required = schema.get("required", []) if isinstance(schema, Mapping) else []
    return {"type": "object", "properties": properties, "required": required}


def _ask_again(answer: DeferredAnswer, wrong: str) -> ToolDeferred:
    messages = "; ".join(str(each.get("message", "")) for each in answer.attributes["requests"].values())
    return ToolDeferred(f"{messages} (the last answer was invalid: {brief(wrong, 500)})", answer.attributes)
