"""Creates tools from a published OpenAPI document (extra `openapi`): a specification and an executor per operation.

Documents are untrusted: they must not redirect a request or its credentials to another place. The home of
openapi_pydantic and jsonschema, which are loaded when a document is read. Not here: building and sending requests
(`rest`), schemas of Python types (`schemas`).
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote, urljoin, urlsplit, urlunsplit

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from .chat import ToolExecutionRequest, ToolExecutor, ToolSpecification
from .contents import PDF, AudioContent, ImageContent, PdfContent
from .errors import IllegalConfigurationError, Problem, ToolArgumentsError
from .json_text import compact_json, parse_json, read_arguments
from .rest import Body, KeySettings, Query, Response, create_rest_client, get, rest_settings
from .rest.annotations import FixedValue, Place
from .rest.client_plans import BODILESS, ParameterPlan, RequestPlan, path_parts
from .rest.clients import standalone_exchange
from .rest.encoding import PROTECTED_HEADERS, has_dot_segment, is_header_name, shown_url
from .rest.endpoint import RestEndpoint
from .rest.replies import ReplyPlan, ReplyShape
from .safe_text import SHOWN, brief
from .schemas import DEFINITION, Schema, readable, unknown_references

__all__ = ["tools_from_openapi"]

logger = logging.getLogger("toolbox.openapi")

Include: TypeAlias = Iterable[str] | Callable[["Operation"], bool]

_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_IN_PATHS = re.compile(r"[\x00-\x20\x7f\\?#]")
_SEPARATORS = {"spaceDelimited": " ", "pipeDelimited": "|"}
_PLACES = {"path": Place.PATH, "query": Place.QUERY, "header": Place.HEADER, "cookie": Place.COOKIE}
# OpenAPI ignores the first three: the body and the credentials determine them. The others would set cookies or change
# how the request is sent.
_IGNORED_HEADERS = frozenset({"accept", "content-type", "authorization", "accept-encoding", "cookie", "set-cookie"})
_IGNORED_HEADERS |= {"proxy-authorization", *PROTECTED_HEADERS}
_TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
_ACCEPT = FixedValue(Place.HEADER, "Accept", "application/json, */*;q=0.8")


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
    if plan is not None:
        for reference in sorted(plan.unknown_references):
            yield Problem(where, f"the reference {brief(reference)!r} is unknown", "add it to the components")


def _choose_operations(operations: tuple[Operation, ...], include: Include | None) -> Iterator[tuple[str, Operation]]:
    """Yield name and operation of each selected tool. Raises `IllegalConfigurationError`."""
    named: dict[str, Operation] = {}
    for operation in operations:
        named[_make_unique(_make_tool_name(operation), named)] = operation
    if include is None or callable(include):
        yield from ((name, each) for name, each in named.items() if include is None or include(each))
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


def _matches_pattern(name: str, operation: Operation, pattern: str) -> bool:
    words = (operation.operation_id or name, name, f"{operation.verb} {operation.path}", *operation.tags)
    return any(fnmatch.fnmatchcase(word, pattern) for word in words)


def _make_tool_name(operation: Operation) -> str:
    text = operation.operation_id or f"{operation.verb.lower()}{operation.path}"
    return _NAME.sub("_", text).strip("_")[:64] or "operation"


def _make_unique(name: str, taken: set[str] | Mapping[str, Any]) -> str:
    if name not in taken:
        return name
    return next(each for n in itertools.count(2) if (each := f"{name[:56]}_{n}") not in taken)


# --- planning


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of the tool: its name for the model, and how its value is sent."""

    name: str
    required: bool
    put: Callable[[Any], Any]
    parameter: ParameterPlan


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
        visible = _make_unique(_NAME.sub("_", parameter.name).strip("_")[:64] or "value", arguments)
        schema = request_schema(parameter.schema)
        arguments[visible] = _make_argument(visible, parameter, declared_properties(schema, definitions) - own.query)
        schemas[visible] = _with_description(schema, parameter.description)
    if operation.body is not None and operation.verb not in BODILESS:
        chosen = _choose_media_type(operation.body)
        if chosen is not None:
            visible = _make_unique("body", arguments)
            schema = request_schema(operation.body.schemas[chosen])
            arguments[visible] = _make_body_argument(
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


def _make_argument(visible: str, parameter: DocumentParameter, declared: set[str]) -> Argument:
    place = _PLACES[parameter.place]
    # A query parameter may become several, or get another name: `put` returns the fields to send.
    plan = ParameterPlan(visible, place, parameter.name, spread=place is Place.QUERY)
    return Argument(visible, parameter.required, lambda value: _write_in_style(parameter, value, declared), plan)


def _require_declared(value: Mapping[str, Any], declared: set[str]) -> Mapping[str, Any]:
    """Return a value whose properties become parameters. Raises `ValueError` for a property of another name."""
    if unknown := [name for name in value if name not in declared]:
        raise ValueError(
            f"unknown property {brief(unknown[0], 50)!r}; expected: {', '.join(sorted(declared)) or 'none'}"
        )
    return value


def _write_in_style(parameter: DocumentParameter, value: Any, declared: set[str]) -> Any:
    """Return the value in the style of the parameter; for a query parameter, the fields to send."""
    text = _write_as_text(parameter, value)
    if parameter.place != "query":
        return text
    if parameter.media_type is None and isinstance(value, Mapping):
        value = _require_declared(value, declared)
        if parameter.style == "deepObject":
            return {f"{parameter.name}[{key}]": each for key, each in value.items()}
        if parameter.explode:
            return value
    return {parameter.name: text}


def _write_as_text(parameter: DocumentParameter, value: Any) -> Any:
    """Return a value as one text; a list that repeats the parameter stays a list."""
    if parameter.media_type is not None:
        return compact_json(value)
    if isinstance(value, list):
        if parameter.place == "query" and parameter.explode:
            return value
        return _SEPARATORS.get(parameter.style, ",").join(_write_word(each) for each in value)
    if isinstance(value, Mapping):
        between = "=" if parameter.explode else ","
        return ",".join(f"{key}{between}{_write_word(each)}" for key, each in value.items())
    return value


def _write_word(value: Any) -> str:
    return value if isinstance(value, str) else compact_json(value)


def _choose_media_type(body: DocumentBody) -> str | None:
    """Return the media type to send: JSON is preferred to a form, and a form to text."""
    wanted = (r"application/json\b.*", r".*\+json\b.*", r"application/x-www-form-urlencoded\b.*", r"text/.*", r"\*/\*")
    for pattern in wanted:
        for media_type in body.schemas:
            if re.fullmatch(pattern, media_type):
                return media_type
    return None


def _make_body_argument(visible: str, body: DocumentBody, media_type: str, declared: set[str]) -> Argument:
    if media_type.startswith("application/x-www-form-urlencoded"):
        plan = ParameterPlan(visible, Place.FORM, visible, True)
        # A form without declared fields accepts any.
        return Argument(visible, body.required, lambda value: _require_declared(value, declared or set(value)), plan)
    sent_as = "application/json" if media_type == "*/*" else media_type
    plan = ParameterPlan(visible, Place.BODY, visible, mark=Body(sent_as))
    if media_type.startswith("text/"):
        return Argument(visible, body.required, _write_word, plan)
    return Argument(visible, body.required, lambda value: compact_json(value).encode(), plan)


# --- calling


def _make_executor(plan: OperationPlan, exchange: Any) -> Callable[[ToolExecutionRequest, Any], Awaitable[object]]:
    from .rest.exchange import call_async

    validator = ArgumentsValidator(plan.specification)

    async def execute_operation(request: ToolExecutionRequest, memory_id: Any) -> object:
        values = dict(_decode_arguments(plan, request, validator))
        return _convert_reply(await call_async(exchange, plan.request, values))

    execute_operation.__name__ = plan.specification.name
    return execute_operation


def _decode_arguments(
    plan: OperationPlan, request: ToolExecutionRequest, validator: ArgumentsValidator
) -> Iterator[tuple[str, Any]]:
    """Yield the values of the request's parameters. Raises `ToolArgumentsError`."""
    try:
        given = read_arguments(request.arguments, plan.specification.parameters)
    except ValueError as error:
        raise ToolArgumentsError(request, [("", str(error))]) from error
    missing = [each.name for each in plan.arguments if each.required and each.name not in given]
    if missing:
        raise ToolArgumentsError(request, [(name, "this argument is required") for name in missing])
    # Null omits an optional argument.
    values = {
        each.name: given[each.name]
        for each in plan.arguments
        if each.name in given and (each.required or given[each.name] is not None)
    }
    if faults := validator.faults(values):
        raise ToolArgumentsError(request, faults)
    for each in plan.arguments:
        try:
            yield each.name, each.put(values[each.name]) if each.name in values else None
        except ValueError as error:
            raise ToolArgumentsError(request, [(each.name, str(error))]) from error


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


# --- validation of arguments by the document's schema; jsonschema is loaded with the first tool


class ArgumentsValidator:
    """Validates the arguments of calls of one tool."""

    def __init__(self, specification: ToolSpecification) -> None:
        self._specification = specification
        self._library = _load_schema_library()
        self._validator: Any = None

    def faults(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the faults of these arguments, as (path, message); at most `SHOWN`.

        Raises `IllegalConfigurationError` if the schema is invalid.
        """
        if self._validator is None:
            self._validator = self._compile_validator()
        try:
            found = list(itertools.islice(self._validator.iter_errors(dict(arguments)), SHOWN))
        except RecursionError:
            return [("", "nested too deeply")]
        return [(brief(".".join(map(str, each.absolute_path))), brief(each.message)) for each in found]

    def _compile_validator(self) -> Any:
        import referencing

        jsonschema, schema = self._library, self._specification.parameters
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            what = f"invalid schema of the arguments: {brief(getattr(error, 'message', 'nested too deeply'))}"
            problem = Problem(f"tool {self._specification.name}", what, "correct the OpenAPI document")
            raise IllegalConfigurationError([problem]) from None
        # With an empty registry, the validator does not fetch references.
        return _make_validator_class()(schema, registry=referencing.Registry())


def _load_schema_library() -> Any:
    try:
        import jsonschema  # type: ignore[import-untyped]  # it comes without type hints
    except ModuleNotFoundError as error:
        text = "tools_from_openapi needs the library jsonschema; install it: pip install 'toolbox-di[openapi]'"
        raise ModuleNotFoundError(text, name="jsonschema") from error
    return jsonschema


@functools.cache
def _make_validator_class() -> Callable[..., Any]:
    jsonschema = _load_schema_library()

    def check_pattern(validator: Any, pattern: str, value: object, schema: Any) -> Iterator[Any]:
        if isinstance(value, str) and not _compile_pattern(pattern)(value):
            yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")

    made: Callable[..., Any] = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": check_pattern})
    return made


@functools.lru_cache(maxsize=256)
def _compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a check with a linear-time engine: a document's pattern could block Python's engine forever.

    Patterns that this engine does not support are left to the server.
    """
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return lambda value: True

    def check_text(value: str) -> bool:
        try:
            validator.validate_python(value)
        except ValidationError:
            return False
        return True

    return check_text


# --- reading the document: references are resolved, schemas converted to one dialect of JSON Schema


_COMPONENT = "#/components/schemas/"
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs"})
_VERBATIM = frozenset({"enum", "const", "required", "type", "examples"})
# Keywords that only OpenAPI has, and those that name parts of a schema: documents could use them to mislead.
_LEFT_OUT = frozenset(
    {"nullable", "xml", "externalDocs", "example", "discriminator", "deprecated", "patternProperties"}
)
_LEFT_OUT |= {"$id", "$schema", "$anchor", "$comment", "$vocabulary", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}
VERBS = ("get", "put", "post", "delete", "head", "patch")


@dataclass(frozen=True, slots=True)
class DocumentParameter:
    """A parameter in the document; `place` is `path`, `query`, `header` or `cookie`."""

    name: str
    place: str
    required: bool
    schema: Mapping[str, Any] = field(hash=False)
    description: str | None = None
    style: str = "form"
    explode: bool = True
    media_type: str | None = None


@dataclass(frozen=True, slots=True)
class DocumentBody:
    """The body of a request: a schema for each supported media type."""

    required: bool
    schemas: Mapping[str, Mapping[str, Any]] = field(hash=False)
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a document."""

    verb: str
    path: str
    operation_id: str | None
    description: str | None
    tags: tuple[str, ...] = ()
    parameters: tuple[DocumentParameter, ...] = ()
    body: DocumentBody | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A document: its operations, its component schemas and the URL of its first server."""

    version: str
    operations: tuple[Operation, ...]
    schemas: Mapping[str, Any] = field(hash=False)
    server: str | None = None


def read_document(source: Mapping[str, Any] | str | Path) -> Document:
    """Read a document from a dictionary, JSON text, a file or a URL.

    Raises `IllegalConfigurationError` for an invalid document, `RestClientError` if it cannot be fetched.
    """
    where, raw = _load_source(source)
    try:
        return _parse_document(where, raw, source)
    except RecursionError:
        raise _illegal(where, "it is nested too deeply", "check where the document is from") from None


def _parse_document(where: str, raw: dict[str, Any], source: Mapping[str, Any] | str | Path) -> Document:
    library = _load_document_library()
    try:
        parsed = library.parse_obj(raw)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)[:3]
        )
        raise _illegal(where, f"invalid OpenAPI 3.0 or 3.1 document ({faults})", "correct the document") from error
    reader = _Reader(parsed, where)
    schemas = {
        name: _as_written(each) for name, each in ((parsed.components and parsed.components.schemas) or {}).items()
    }
    server = _server_of(parsed.servers[0]) if raw.get("servers") else "/"
    return Document(str(parsed.openapi), tuple(reader.read_operations()), schemas, _make_absolute(server, source))


def _load_document_library() -> Any:
    try:
        import openapi_pydantic
    except ModuleNotFoundError as error:
        text = "tools_from_openapi needs the library openapi-pydantic; install it: pip install 'toolbox-di[openapi]'"
        raise ModuleNotFoundError(text, name="openapi_pydantic") from error
    return openapi_pydantic


def _illegal(where: str, what: str, fix: str) -> IllegalConfigurationError:
    return IllegalConfigurationError([Problem(where, what, fix)])


# --- loading


class _Published(Protocol):
    @get()
    def get_document(self, query: Annotated[dict[str, list[str]], Query()]) -> bytes: ...


def _load_source(source: Mapping[str, Any] | str | Path) -> tuple[str, dict[str, Any]]:
    """Return a name for the source, and the parsed JSON."""
    if isinstance(source, Mapping):
        return "the OpenAPI document", dict(source)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        where, text = "the OpenAPI document", source.encode()
    elif isinstance(source, str) and source.startswith(("http://", "https://")):
        where, text = source.partition("?")[0].rpartition("@")[2], _fetch_document(source)
    elif isinstance(source, str) and "\n" in source:
        where, text = "the OpenAPI document", source.encode()
    else:
        where, text = str(source), Path(source).read_bytes()
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "convert it to JSON, or read it yourself and pass the dictionary"
        raise _illegal(where, f"it is not JSON ({error})", fix) from error
    if not isinstance(raw, dict):
        raise _illegal(where, "expected a JSON object", "pass an OpenAPI 3.x document")
    return where, raw


def _fetch_document(url: str) -> bytes:
    parts = urlsplit(url)
    query: dict[str, list[str]] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        query.setdefault(name, []).append(value)
    published = create_rest_client(_Published, url=urlunsplit((*parts[:3], "", "")), follow_redirects=True)
    # On a separate thread, because programs also read documents on the thread of an event loop at startup.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(published.get_document, query).result()


def _server_of(server: Any) -> str:
    """Return the URL of a server; its variables get their defaults."""
    url: str = server.url
    for name, variable in (server.variables or {}).items():
        url = url.replace(f"{{{name}}}", variable.default)
    return url


def _make_absolute(server: str, source: object) -> str | None:
    """Return the absolute URL of a server; a relative one is resolved against the URL of the document."""
    if server.startswith(("http://", "https://")):
        return server
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return urljoin(source, server)
    return None


# --- parsing


def _as_written(model: Any) -> dict[str, Any]:
    """Return a part of the document as it was written."""
    written: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return written


class _Reader:
    """Converts the library's model of a document to operations."""

    def __init__(self, parsed: Any, where: str) -> None:
        self._parsed, self._where = parsed, where

    def read_operations(self) -> Iterator[Operation]:
        for path, item in (self._parsed.paths or {}).items():
            for verb in VERBS:
                operation = getattr(item, verb, None)
                if operation is not None:
                    yield self._read_operation(verb, path, item, operation)

    def _read_operation(self, verb: str, path: str, item: Any, operation: Any) -> Operation:
        # A parameter of an operation replaces the one of its path with the same name and place.
        parameters: dict[tuple[str, str], DocumentParameter] = {}
        for each in (*(item.parameters or ()), *(operation.parameters or ())):
            parameter = self._read_parameter(self._resolve_reference(each))
            parameters[parameter.name, parameter.place] = parameter
        texts = [text.strip() for text in (operation.summary, operation.description) if text and text.strip()]
        return Operation(
            verb.upper(),
            path,
            operation.operationId,
            "\n".join(dict.fromkeys(texts)) or None,
            tuple(operation.tags or ()),
            tuple(parameters.values()),
            self._read_body(self._resolve_reference(operation.requestBody))
            if operation.requestBody is not None
            else None,
        )

    def _read_parameter(self, parameter: Any) -> DocumentParameter:
        place = str(parameter.param_in.value)
        style = parameter.style or ("form" if place in ("query", "cookie") else "simple")
        media_type, content = next(iter((parameter.content or {}).items()), (None, None))
        schema = content.media_type_schema if content is not None else parameter.param_schema
        return DocumentParameter(
            parameter.name,
            place,
            parameter.required or place == "path",
            _as_written(schema) if schema is not None else {},
            parameter.description,
            style,
            style == "form" if parameter.explode is None else parameter.explode,
            media_type,
        )

    def _read_body(self, body: Any) -> DocumentBody:
        schemas = {
            media_type.lower(): _as_written(each.media_type_schema) if each.media_type_schema is not None else {}
            for media_type, each in body.content.items()
        }
        return DocumentBody(body.required, schemas, body.description)

    def _resolve_reference(self, part: Any) -> Any:
        """Return a part, or the component that it refers to. Raises `IllegalConfigurationError`."""
        seen: set[str] = set()
        while (reference := getattr(part, "ref", None)) is not None:
            kind, _, name = reference.removeprefix("#/components/").partition("/")
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            components = getattr(self._parsed.components, kind, None) or {}
            if reference in seen or not reference.startswith("#/components/") or name not in components:
                what = f"unknown reference {reference!r}"
                raise _illegal(self._where, what, "add it to the document's components")
            seen.add(reference)
            part = components[name]
        return part


# --- schemas


def request_schema(schema: Mapping[str, Any]) -> Schema:
    """Return the JSON schema of a sent value; read-only properties are omitted."""
    converted: Schema = _convert_schema(schema)
    return converted


def declared_properties(schema: object, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of all properties of a schema, also in its references and alternatives."""
    declared: set[str] = set()
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        properties = each.get("properties")
        declared.update(properties if isinstance(properties, Mapping) else ())
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += each[key] if isinstance(each.get(key), list) else ()
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(definitions.get(reference.removeprefix(DEFINITION)))
    return declared


def _convert_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_convert_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            converted[key] = value.replace(_COMPONENT, DEFINITION, 1)
        elif key in _BY_NAME and isinstance(value, Mapping):
            converted[key] = {name: _convert_schema(each) for name, each in value.items() if not _is_read_only(each)}
        elif key not in _LEFT_OUT:
            converted[key] = value if key in _VERBATIM else _convert_schema(value)
    if "required" in converted and "properties" in converted:
        converted["required"] = [name for name in converted["required"] if name in converted["properties"]]
    _convert_bounds(converted)
    return _allow_null(converted) if schema.get("nullable") is True else converted


def _is_read_only(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("readOnly") is True


def _convert_bounds(schema: dict[str, Any]) -> None:
    """Convert exclusive bounds of OpenAPI 3.0, which are flags next to the bound."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and bound in schema:
            schema[flag] = schema.pop(bound)


def _allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    description = {"description": schema["description"]} if "description" in schema else {}
    rest = {key: value for key, value in schema.items() if key != "description"}
    return {"anyOf": [rest, {"type": "null"}], **description}
