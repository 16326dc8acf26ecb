"""Decides which tools of a server's listing can be used; one bad tool must not cost a service the others.

A server is not trusted: one broken tool would fail the SDK's reading of the whole list, or the model server's of the
whole request. Not here: what becomes of the usable ones (`offering`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ..validation_text import brief

logger = logging.getLogger("toolbox.mcp")

MAX_TOOLS = 1000
"""Tools of one server that are read."""
MAX_TOOL_CHARS = 64 * 2**10
"""Characters of JSON that a tool's name, description and schema may have: a model reads them with every request."""
MAX_DEPTH = 64
"""Levels of a schema."""
_LOGGED = 20
"""Tools that a log message names; of more, how many they are."""
# Control characters, and what is invisible or turns the reading direction: a person who reviews a tool would not see
# what the model reads. Joiners stay: emoji and several scripts need them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Return a text of a server without characters that are invisible or control a terminal."""
    return _INVISIBLE.sub("", text.replace("\r\n", "\n"))


def too_large(what: str, limit: int) -> str:
    """Return the text of an error about something that is larger than `max_reply_bytes`."""
    return f"{what} is larger than {limit} bytes; raise max_reply_bytes if that is right"


class LeftOut:
    """The tools of one server that are not offered, with the reasons; `log` writes one message."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._count = 0
        self._shown: list[str] = []

    def add(self, name: object, reason: str) -> None:
        """Note a tool; the name may be anything that the server sent."""
        self._count += 1
        if len(self._shown) < _LOGGED:
            self._shown.append(f"{brief(str(name), 80)!r} ({reason})")

    def log(self) -> None:
        """Write the log message, if a tool was left out."""
        if self._count:
            more = f" and {self._count - len(self._shown)} more" if self._count > len(self._shown) else ""
            logger.warning(
                "MCP server %r: %d tool(s) not offered: %s%s", self._server, self._count, ", ".join(self._shown), more
            )


def screen_tools(server: str, version: str | None, result: dict[str, Any]) -> dict[str, Any]:
    """Remove from a `tools/list` result the tools that cannot be used, and log them; other results are unchanged.

    Returns the output schemas of the remaining tools, by name, which are removed too: the SDK would run patterns and
    follow references in them that a server chose.
    """
    tools = result.get("tools")
    if not isinstance(tools, list) or "content" in result:
        return {}
    left_out = LeftOut(server)
    usable: list[Any] = []
    outputs: dict[str, Any] = {}
    for tool in tools[:MAX_TOOLS]:
        reason = _fault_of(tool)
        if reason is None:
            output = tool.pop("outputSchema", None)
            reason = _shape_fault(version, {**result, "tools": [tool]})
            if reason is None:
                usable.append(tool)
                if isinstance(output, dict):
                    outputs[tool["name"]] = output
                continue
        left_out.add(tool.get("name") if isinstance(tool, dict) else type(tool).__name__, reason)
    for tool in tools[MAX_TOOLS:]:
        left_out.add(tool.get("name") if isinstance(tool, dict) else type(tool).__name__, f"more than {MAX_TOOLS}")
    left_out.log()
    result["tools"] = usable
    return outputs


def _fault_of(tool: Any) -> str | None:
    """Return why a tool cannot be used, or None; its description and schema are cleaned."""
    if not isinstance(tool, dict):
        return "not an object"
    name, schema = tool.get("name"), tool.get("inputSchema")
    if not isinstance(name, str) or not name.strip():
        return "missing name"
    if not name.isprintable():
        return "control characters in its name"
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "its input schema is not that of an object"
    execution = tool.get("execution")
    if isinstance(execution, dict) and execution.get("taskSupport") == "required":
        return "it can only run as a task, which is not supported"
    if (reason := _schema_fault(schema)) is not None:
        return reason
    if isinstance(tool.get("description"), str):
        tool["description"] = visible(tool["description"])
    size = len(json.dumps([name, tool.get("description"), schema], ensure_ascii=False))
    if size > MAX_TOOL_CHARS:
        return f"its description and schema have {size} characters, more than {MAX_TOOL_CHARS}"
    return None


def _schema_fault(schema: dict[str, Any]) -> str | None:
    """Return what is wrong with an input schema, or None; its descriptions are cleaned."""
    references: set[str] = set()
    anchors: set[object] = set()
    for count, (value, depth) in enumerate(_values_in(schema), 1):
        if depth > MAX_DEPTH:
            return f"its input schema has more than {MAX_DEPTH} levels"
        if count > MAX_TOOL_CHARS:
            return "its input schema is too large"
        if isinstance(value, dict):
            for key in ("description", "title"):
                if isinstance(value.get(key), str):
                    value[key] = visible(value[key])
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            if isinstance(value.get("$anchor"), str):
                anchors.add(value["$anchor"])
    if not all(each[:1] == "#" and (each[1:] in anchors or _is_place(each[1:], schema)) for each in references):
        return "its input schema has a reference that leads nowhere, or to another document"
    from jsonschema import SchemaError  # type: ignore[import-untyped]  # it has no types
    from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]  # no types

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError:
        return "its input schema is not a valid JSON schema"
    except Exception as error:  # of a schema that the library itself cannot cope with
        return f"its input schema cannot be read ({type(error).__name__})"
    return None


def _values_in(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield each value of a schema with its depth, without recursion."""
    waiting = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(each, depth + 1) for each in inner]


def _is_place(pointer: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON pointer leads to a place in the schema."""
    if pointer and not pointer.startswith("/"):
        return False
    found: Any = schema
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return False
    return True


def _shape_fault(version: str | None, result: Mapping[str, Any]) -> str | None:
    """Return what the SDK would find wrong with a listing of one tool, or None."""
    from mcp_types import ListToolsResult
    from mcp_types.methods import validate_server_result
    from pydantic import ValidationError

    try:
        validate_server_result("tools/list", version or "2025-11-25", result)
        ListToolsResult.model_validate(result, by_name=False)
    except KeyError:  # a version that the SDK has no rules for
        return None
    except ValidationError as error:
        place = ".".join(map(str, error.errors(include_input=False, include_url=False)[0]["loc"][2:]))
        return f"invalid {brief(place, 80)}" if place else "not as the protocol says"
    return None
