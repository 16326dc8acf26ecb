"""Creates the tools of an OpenAPI document: chooses operations, plans the request of each, and executes calls.

Documents are untrusted: they must not redirect a request or its credentials to another place. Not here: reading the
document (`document_reading`), validating and writing the arguments of a call (`arguments`), sending requests (`rest`).
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..chat import ToolExecutionRequest, ToolExecutor, ToolSpecification
from ..contents import PDF, AudioContent, ImageContent, PdfContent
from ..errors import IllegalConfigurationError, Problem
from ..json_text import parse_json
from ..rest import KeySettings, Response, rest_settings
from ..rest.annotations import FixedValue, Place
from ..rest.client_plans import BODILESS, RequestPlan, path_parts
from ..rest.clients import standalone_exchange
from ..rest.encoding import PROTECTED_HEADERS, has_dot_segment, is_header_name, shown_url
from ..rest.endpoint import RestEndpoint
from ..rest.replies import ReplyPlan, ReplyShape
from ..safe_text import brief
from ..schemas import readable, unknown_references
from .arguments import (
    STYLES,
    Argument,
    ArgumentsValidator,
    choose_media_type,
    decode_arguments,
    make_argument,
    make_body_argument,
)
from .document_reading import DocumentParameter, Operation, read_document
from .document_schemas import declared_properties, request_schema

logger = logging.getLogger("toolbox.openapi")

Include: TypeAlias = Iterable[str] | Callable[[Operation], bool]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_IN_PATHS = re.compile(r"[\x00-\x20\x7f\\?#]")
# OpenAPI ignores the first three: the body and the credentials determine them. The others would set cookies or change
# how the request is sent.
_IGNORED_HEADERS = frozenset({"accept", "content-type", "authorization", "accept-encoding", "cookie", "set-cookie"})
_IGNORED_HEADERS |= {"proxy-authorization", *PROTECTED_HEADERS}
_TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
_ACCEPT = FixedValue(place=Place.HEADER, name="Accept", value="application/json, */*;q=0.8")


def tools_from_openapi(
    document: Mapping[str, Any] | str | Path,
    base_url: str | None = None,
    include: Include | None = None,
    **settings: Any,
) -> dict[ToolSpecification, ToolExecutor]:
    """Create a tool for each operation of an OpenAPI 3.0 or 3.1 document.

        tools = tools_from_openapi("pets.json", base_url="https://pets.example", include=["getPet", "GET /pets"])

    `document` is a dictionary, JSON text, the path of a file, or a URL, which is fetched at once. Requests go to
    `base_url`, by default to the first server in the document. `base_url` is required if `settings` contain
    credentials. `include` selects operations with a predicate, or with patterns for operation ids, tool names, tags or
    `"GET /path"`; each pattern must match an operation. `settings` are those of `rest.rest_settings` (`bearer_token`,
    `headers`, `timeout` in seconds, `retries`, …). Operations whose body is neither JSON, a form nor text are skipped.
    Raises `IllegalConfigurationError` for an invalid document or setting, `RestClientError` if it cannot be fetched.
    """
    read = read_document(document)
    url = base_url or read.server
    if not url:
        raise IllegalConfigurationError(
            [Problem("tools_from_openapi", "the document has no server URL", "pass base_url=")]
        )
    given = rest_settings("openapi", url=url, **settings)
    if not base_url and (named := _describe_credentials(given)):
        what = f"{named} would go to {shown_url(url)}, which only the document specifies"
        fix = "pass base_url= to say where credentials go"
        raise IllegalConfigurationError([Problem("tools_from_openapi", what, fix)])
    exchange = standalone_exchange("tools_from_openapi", given)
    chosen = tuple(_choose_operations(read.operations, include))
    try:
        definitions = {name: request_schema(each) for name, each in read.schemas.items()}
        own = _find_own_names(exchange.connection.endpoint)
        planned = [(operation, _plan_operation(operation, name, definitions, own)) for name, operation in chosen]
    except RecursionError:
        problem = Problem("tools_from_openapi", "a schema is nested too deeply", "check where the document is from")
        raise IllegalConfigurationError([problem]) from None
    if problems := [each for operation, plan in planned for each in _problems_of_operation(operation, plan)]:
        raise IllegalConfigurationError(problems)
    tools: dict[ToolSpecification, ToolExecutor] = {}
    for operation, plan in planned:
        if plan is None:
            logger.info("%s %s is skipped: its body is neither JSON, a form nor text", operation.verb, operation.path)
        else:
            tools[plan.specification] = _make_executor(plan, exchange)
    return tools


def _describe_credentials(given: KeySettings) -> str | None:
    """Return the name of a setting that must not be sent to a server of an untrusted document, if there is one."""
    settings = given.settings
    found = {
        "bearer_token": settings.bearer_token,
        "username": settings.username,
        "password": settings.password,
        "api_key": settings.api_key,
        "headers": settings.headers,
        "client_certificate": settings.client_certificate,
        "propagate_headers": {each.lower() for each in settings.propagate_headers} - _TRACE_HEADERS,
        "auth": given.auth,
    }
    return next((name for name, value in found.items() if value), None)


@dataclass(frozen=True, slots=True)
class OwnNames:
    """Names of headers (in lower case) and query parameters that the settings set: arguments must not set them."""

    headers: frozenset[str]
    query: frozenset[str]


def _find_own_names(endpoint: RestEndpoint) -> OwnNames:
    headers = (name.lower() for name, _ in (*endpoint.headers, *endpoint.credentials))
    propagated = (name.lower() for name in endpoint.settings.propagate_headers)
    return OwnNames(frozenset({*headers, *propagated}), frozenset(name for name, _ in endpoint.query))


def _problems_of_operation(operation: Operation, plan: OperationPlan | None) -> Iterator[Problem]:
    """Yield the problems of an operation."""
    where, path = f"{operation.verb} {brief(operation.path)}", operation.path
    if not path.startswith("/") or path.startswith("//") or _NOT_IN_PATHS.search(path):
        fix = "check where the document is from: a path starts with one '/' and has no query, fragment or backslash"
        yield Problem(where, "invalid path", fix)
    elif has_dot_segment(path):
        yield Problem(where, "invalid path: it has the segment '.' or '..'", "check where the document is from")
    named = {each.name for each in operation.parameters if each.place == "path"}
    for name in path_parts(path)[1::2]:
        if name not in named:
            yield Problem(where, f"missing path parameter {brief(name)!r}", "add it to the document")
    for each in operation.parameters:
        if each.place in ("header", "cookie") and not is_header_name(each.name):
            yield Problem(where, f"invalid name of a {each.place}: {brief(each.name)!r}", "correct the document")
        if each.media_type is None and each.style not in (known := STYLES[each.place]):
            what = f"unknown style {brief(each.style)!r} of the {each.place} parameter {brief(each.name)!r}"
            yield Problem(where, what, f"use one of: {', '.join(known)}")
    if plan is not None:
        for reference in sorted(plan.unknown_references):
            yield Problem(where, f"the reference {brief(reference)!r} is unknown", "add it to the components")


def _choose_operations(operations: tuple[Operation, ...], include: Include | None) -> Iterator[tuple[str, Operation]]:
    """Yield name and operation of each selected tool. Raises `IllegalConfigurationError`."""
    named: dict[str, Operation] = {}
    for operation in operations:
        named[_make_unique(_make_tool_name(operation), named)] = operation
    if include is None or callable(include):
        yield from ((name, each) for name, each in named.items() if include is None or _is_chosen(include, each))
        return
    patterns = (include,) if isinstance(include, str) else tuple(include)
    for pattern in patterns:
        if not any(_matches_pattern(name, each, pattern) for name, each in named.items()):
            problem = Problem(
                "tools_from_openapi", f"include={pattern!r} matches no operation", f"use one of: {', '.join(named)}"
            )
            raise IllegalConfigurationError([problem])
    yield from (
        (name, each) for name, each in named.items() if any(_matches_pattern(name, each, one) for one in patterns)
    )


def _is_chosen(include: Callable[[Operation], object], operation: Operation) -> bool:
    """Ask a predicate. Raises `IllegalConfigurationError` for an awaitable, which is true whatever it says."""
    found = include(operation)
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        fact = f"include={include!r} returned an awaitable"
        raise IllegalConfigurationError([Problem("tools_from_openapi", fact, "use a `def` that returns True or False")])
    return bool(found)


def _matches_pattern(name: str, operation: Operation, pattern: str) -> bool:
    words = (operation.operation_id or name, name, f"{operation.verb} {operation.path}", *operation.tags)
    return any(fnmatch.fnmatchcase(word, pattern) for word in words)


def _make_tool_name(operation: Operation) -> str:
    text = operation.operation_id or f"{operation.verb.lower()}{operation.path}"
    return _make_valid(text) or "operation"


def _make_valid(name: str) -> str:
    """Return the name with the characters and the length that model servers accept; it may be empty."""
    return _NOT_IN_NAMES.sub("_", name).strip("_")[:64]


def _make_unique(name: str, taken: set[str] | Mapping[str, Any]) -> str:
    if name not in taken:
        return name
    return next(each for n in itertools.count(2) if (each := f"{name[:56]}_{n}") not in taken)


# --- planning


@dataclass(frozen=True, slots=True)
class OperationPlan:
    """All that a call of an operation needs."""

    specification: ToolSpecification
    request: RequestPlan
    arguments: tuple[Argument, ...] = field(hash=False)
    unknown_references: frozenset[str] = frozenset()


def _plan_operation(
    operation: Operation, name: str, definitions: Mapping[str, Any], own: OwnNames
) -> OperationPlan | None:
    """Return the plan of an operation; None when its body cannot be written by a model."""
    arguments: dict[str, Argument] = {}
    schemas: dict[str, Any] = {}
    for parameter in operation.parameters:
        if _is_ignored(parameter, own):
            continue
        visible = _make_unique(_make_valid(parameter.name) or "value", arguments)
        schema = request_schema(parameter.schema)
        arguments[visible] = make_argument(visible, parameter, declared_properties(schema, definitions) - own.query)
        schemas[visible] = _with_description(schema, parameter.description)
    if operation.body is not None and operation.verb not in BODILESS:
        chosen = choose_media_type(operation.body)
        if chosen is not None:
            visible = _make_unique("body", arguments)
            schema = request_schema(operation.body.schemas[chosen])
            arguments[visible] = make_body_argument(
                visible, operation.body, chosen, declared_properties(schema, definitions)
            )
            schemas[visible] = _with_description(schema, operation.body.description)
        elif operation.body.required:
            return None
    whole = _build_object_schema(schemas, arguments, definitions)
    specification = ToolSpecification(name, operation.description, readable(whole))
    request = RequestPlan(
        where=name,
        verb=operation.verb,
        path=path_parts(operation.path),
        parameters=tuple(each.parameter for each in arguments.values()),
        reply=ReplyPlan(ReplyShape.BYTES, whole=True),
        fixed=(_ACCEPT,),
        idempotent=operation.verb not in ("POST", "PATCH"),
    )
    unknown = frozenset(unknown_references(whole))
    return OperationPlan(specification, request, tuple(arguments.values()), unknown)


def _is_ignored(parameter: DocumentParameter, own: OwnNames) -> bool:
    """Return True for a parameter that would replace what the settings send, or change how a request is sent."""
    match parameter.place:
        case "header":
            return parameter.name.lower() in _IGNORED_HEADERS | own.headers
        case "cookie":
            return "cookie" in own.headers
        case "query":
            return parameter.name in own.query
    return False


def _build_object_schema(
    schemas: dict[str, Any], arguments: Mapping[str, Argument], definitions: Mapping[str, Any]
) -> dict[str, Any]:
    definitions = dict(definitions)
    for schema in schemas.values():
        definitions |= schema.pop("$defs", {})
    parameters: dict[str, Any] = {"type": "object", "properties": schemas}
    if required := [name for name, each in arguments.items() if each.required]:
        parameters["required"] = required
    return parameters | ({"$defs": definitions} if definitions else {})


def _with_description(schema: dict[str, Any], description: str | None) -> dict[str, Any]:
    return {**schema, "description": description} if description else schema


# --- calling


def _make_executor(plan: OperationPlan, exchange: Any) -> Callable[[ToolExecutionRequest, Any], Awaitable[object]]:
    from ..rest.exchange import call_async

    validator = ArgumentsValidator(plan.specification)

    async def execute_operation(request: ToolExecutionRequest, memory_id: Any) -> object:
        values = dict(decode_arguments(plan.arguments, request, validator))
        return _convert_reply(await call_async(exchange, plan.request, values))

    execute_operation.__name__ = plan.specification.name
    return execute_operation


def _convert_reply(response: Response[bytes]) -> object:
    """Return the tool result for a reply: a JSON value, text, an image, a PDF document or audio."""
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not response.body:
        return None
    try:
        if media_type.startswith("image/") and media_type != "image/svg+xml":
            return ImageContent(data=response.body, mime_type=media_type)
        if media_type == PDF:
            return PdfContent(data=response.body)
        if media_type.startswith("audio/"):
            return AudioContent(response.body, media_type)
        if media_type == "application/json" or media_type.endswith("+json"):
            return parse_json(response.body)
        return response.body.decode()
    except ValueError:
        return f"{len(response.body)} bytes of {media_type or 'unknown type'}"
