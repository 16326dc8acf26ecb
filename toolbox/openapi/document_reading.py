"""Reads an OpenAPI document from a dictionary, text, a file or a URL: its operations, with references resolved.

The home of openapi_pydantic, which is loaded when a document is read. Not here: converting the schemas of a document
(`document_schemas`), creating tools (`operation_tools`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import parse_qsl, urljoin, urlsplit, urlunsplit

from pydantic_core import ValidationError

from ..errors import IllegalConfigurationError, Problem
from ..rest import Query, create_rest_client, get
from ..schemas import decode_pointer_part

VERBS = ("get", "put", "post", "delete", "head", "patch")


@dataclass(frozen=True, slots=True, kw_only=True)
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
        body = operation.requestBody
        return Operation(
            verb=verb.upper(),
            path=path,
            operation_id=operation.operationId,
            description="\n".join(dict.fromkeys(texts)) or None,
            tags=tuple(operation.tags or ()),
            parameters=tuple(parameters.values()),
            body=None if body is None else self._read_body(self._resolve_reference(body)),
        )

    def _read_parameter(self, parameter: Any) -> DocumentParameter:
        place = str(parameter.param_in.value)
        default = "form" if place in ("query", "cookie") else "simple"
        style = default if parameter.style is None else parameter.style
        media_type, content = next(iter((parameter.content or {}).items()), (None, None))
        schema = content.media_type_schema if content is not None else parameter.param_schema
        return DocumentParameter(
            name=parameter.name,
            place=place,
            required=parameter.required or place == "path",
            schema=_as_written(schema) if schema is not None else {},
            description=parameter.description,
            style=style,
            explode=style == "form" if parameter.explode is None else parameter.explode,
            media_type=media_type,
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
            name = decode_pointer_part(name)
            components = getattr(self._parsed.components, kind, None) or {}
            if reference in seen or not reference.startswith("#/components/") or name not in components:
                what = f"unknown reference {reference!r}"
                raise _illegal(self._where, what, "add it to the document's components")
            seen.add(reference)
            part = components[name]
        return part
