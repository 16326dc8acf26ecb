"""Checks the tool lists of MCP servers and removes tools that cannot be used, so that the other tools still work.

Servers are not trusted: without this check, the SDK rejects a list because of one invalid tool, and the model server
rejects the whole request. Not here: offering the usable tools to services (`server_tools`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ..safe_text import UNSEEN, brief
from ..schemas import decode_pointer_part

logger = logging.getLogger("toolbox.mcp")

MAX_TOOLS = 1000
"""Limit of tools that one server may offer."""
MAX_TOOL_CHARS = 64 * 2**10
"""Limit of a tool's name, description and schema, in characters of JSON: they are sent with every model request."""
MAX_DEPTH = 64
"""Limit of the nesting depth of a schema."""
MAX_MESSAGE_CHARS = 4000
"""Characters that are kept of a server's question or error message."""
_MAX_LOGGED = 20
"""Limit of tools that one log message names; the others are only counted."""
_INVISIBLE = re.compile(UNSEEN)
_LINE_END = re.compile("\r\n|[\u2028\u2029]")


def visible(text: str) -> str:
    """Remove the characters of a server's text that a person who reviews it would not see.

    All line separators become line breaks.
    """
    return _INVISIBLE.sub("", _LINE_END.sub("\n", text))


def too_large(what: str, limit: int) -> str:
    """Return the error text for data that exceeds `max_reply_bytes`."""
    return f"{what} is larger than {limit} bytes; raise max_reply_bytes to accept it"


class SkippedTools:
    """Collects the skipped tools of one server with their reasons; `log` writes one message."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._count = 0
        self._shown: list[str] = []

    def add(self, name: object, reason: str) -> None:
        """Add a tool. `name` can be any JSON value, because the server sent it."""
        self._count += 1
        if len(self._shown) < _MAX_LOGGED:
            self._shown.append(f"{brief(str(name), 80)!r} ({reason})")

    def log(self) -> None:
        """Log a warning if a tool was skipped."""
        if self._count:
            more = f" and {self._count - len(self._shown)} more" if self._count > len(self._shown) else ""
            logger.warning(
                "MCP server %r: %d tool(s) not offered: %s%s", self._server, self._count, ", ".join(self._shown), more
            )


def lists_tools(result: dict[str, Any]) -> bool:
    """Return True for a `tools/list` result."""
    return isinstance(result.get("tools"), list) and "content" not in result


def remove_unusable_tools(server: str, version: str | None, result: dict[str, Any]) -> dict[str, Any]:
    """Remove unusable tools from a `tools/list` result and log them.

    Returns the output schemas of the remaining tools, by name, and removes them from the result: the SDK would run the
    server's regular expressions and follow its references.
    """
    tools = result["tools"]
    skipped = SkippedTools(server)
    usable: list[Any] = []
    outputs: dict[str, Any] = {}
    for tool in tools[:MAX_TOOLS]:
        reason = _tool_problem(tool)
        if reason is None:
            output = tool.pop("outputSchema", None)
            reason = _protocol_problem(version, {**result, "tools": [tool]})
            if reason is None:
                usable.append(tool)
                if isinstance(output, dict):
                    outputs[tool["name"]] = output
                continue
        skipped.add(tool.get("name") if isinstance(tool, dict) else type(tool).__name__, reason)
    for tool in tools[MAX_TOOLS:]:
        skipped.add(tool.get("name") if isinstance(tool, dict) else type(tool).__name__, f"more than {MAX_TOOLS}")
    skipped.log()
    result["tools"] = usable
    return outputs


def _tool_problem(tool: Any) -> str | None:
    """Return why a tool cannot be used, or None. Removes invisible characters from its description and schema."""
    if not isinstance(tool, dict):
        return "not an object"
    name, schema = tool.get("name"), tool.get("inputSchema")
    if not isinstance(name, str) or not name.strip():
        return "missing name"
    if not name.isprintable() or _INVISIBLE.search(name):
        return "its name contains control characters or invisible characters"
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "its input schema is not of type object"
    execution = tool.get("execution")
    if isinstance(execution, dict) and execution.get("taskSupport") == "required":
        return "it only runs as a task, which is not supported"
    if (reason := _schema_problem(schema)) is not None:
        return reason
    for described in (tool, tool.get("annotations")):
        if isinstance(described, dict):
            _make_visible(described)
    size = len(json.dumps([name, tool.get("description"), schema], ensure_ascii=False))
    if size > MAX_TOOL_CHARS:
        return f"its description and schema have {size} characters; the limit is {MAX_TOOL_CHARS}"
    return None


_FOR_READERS = ("description", "title", "$comment")
"""The texts of a tool or a schema that only explain something."""


def _make_visible(described: dict[str, Any]) -> None:
    """Remove invisible characters from the explaining texts of a tool or a schema."""
    for key in _FOR_READERS:
        if isinstance(described.get(key), str):
            described[key] = visible(described[key])


def _has_invisible(value: Any) -> bool:
    """Return True if a text in a JSON value, or a name in it, contains invisible characters."""
    for each, _ in _values_in(value):
        texts = each if isinstance(each, dict) else (each,)
        if any(isinstance(text, str) and _INVISIBLE.search(text) for text in texts):
            return True
    return False


def _schema_problem(schema: dict[str, Any]) -> str | None:
    """Return why an input schema is invalid, or None. Removes invisible characters from its descriptions."""
    references: set[str] = set()
    anchors: set[object] = set()
    for count, (value, depth) in enumerate(_values_in(schema), 1):
        if depth > MAX_DEPTH:
            return f"its input schema has more than {MAX_DEPTH} levels"
        if count > MAX_TOOL_CHARS:
            return "its input schema is too large"
        if isinstance(value, dict):
            _make_visible(value)
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            if isinstance(value.get("$anchor"), str):
                anchors.add(value["$anchor"])
    if _has_invisible(schema):
        return "its input schema contains invisible characters in a name or a value, such as an enum"
    if not all(each[:1] == "#" and (each[1:] in anchors or _points_into(each[1:], schema)) for each in references):
        return "its input schema has a $ref to a missing definition or to another document"
    try:
        text = json.dumps(schema)
        is_valid = _is_valid_text(text) if len(text) <= _REMEMBERED_CHARS else _is_valid(schema)
    except Exception as error:  # some schemas make the library itself fail
        return f"its input schema cannot be read ({type(error).__name__})"
    return None if is_valid else "its input schema is not valid JSON Schema"


_REMEMBERED_CHARS = 4000


@lru_cache(maxsize=500)
def _is_valid_text(text: str) -> bool:
    """Do the same as `_is_valid` for a schema as JSON: servers list the same tools again and again."""
    return _is_valid(json.loads(text))


def _is_valid(schema: dict[str, Any]) -> bool:
    """Return True if the schema is valid JSON Schema."""
    from jsonschema import SchemaError  # type: ignore[import-untyped]  # no type hints
    from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]  # no type hints

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError:
        return False
    return True


def admits_null(schema: Mapping[str, Any], name: str) -> bool:
    """Return True if the property of this name may be null by a tool's schema, or if that cannot be decided."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    try:
        # With an empty registry, the validator fetches nothing: a schema can refer to other documents by `$dynamicRef`.
        validator = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
        return bool(validator.evolve(schema=schema["properties"][name]).is_valid(None))
    except Exception:  # a reference without end, or to another document
        return True


def _values_in(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield each value of a schema with its depth, without recursion."""
    pending = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending += [(each, depth + 1) for each in inner]


def _points_into(pointer: str, schema: Mapping[str, Any]) -> bool:
    """Return True if a JSON pointer names a place in the schema."""
    if pointer and not pointer.startswith("/"):
        return False
    found: Any = schema
    for part in pointer.split("/")[1:]:
        key = decode_pointer_part(part)
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return False
    return True


def _protocol_problem(version: str | None, result: Mapping[str, Any]) -> str | None:
    """Return why the SDK would reject a list that contains only this tool, or None."""
    from mcp_types import ListToolsResult
    from mcp_types.methods import validate_server_result
    from pydantic import ValidationError

    try:
        validate_server_result("tools/list", version or "2025-11-25", result)
        ListToolsResult.model_validate(result, by_name=False)
    except KeyError:  # the SDK has no rules for this protocol version
        return None
    except ValidationError as error:
        place = ".".join(map(str, error.errors(include_input=False, include_url=False)[0]["loc"][2:]))
        return f"invalid {brief(place, 80)}" if place else "it does not follow the MCP protocol"
    return None
