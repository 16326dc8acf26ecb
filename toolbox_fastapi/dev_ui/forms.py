"""The forms of service methods: a JSON schema of the parameters, and the conversion of JSON input into arguments.

Not here: the arguments of tools, which the tool's codec reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from toolbox.chat import UserMessage
from toolbox.contents import (
    CONTENT_TYPES,
    PDF,
    AudioContent,
    Content,
    ImageContent,
    Media,
    PdfContent,
    TextContent,
)
from toolbox.introspection import EMPTY, Unresolved, read_signature, unwrapped
from toolbox.json_text import parse_json
from toolbox.services.declaration import local_names_of
from toolbox.services.plans import MethodPlan


class BadInputError(Exception):
    """The page sent invalid input; the message says why."""


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter: its JSON schema, the function that converts the input, and whether it is required."""

    schema: dict[str, Any]
    read: Callable[[Any], Any]
    required: bool


@dataclass(frozen=True, slots=True)
class MethodForm:
    """The form of a method; `absent` are the arguments that the form does not ask for."""

    fields: Mapping[str, Field]
    absent: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """Return the fields as one JSON schema."""
        required = [name for name, field in self.fields.items() if field.required]
        properties = {name: field.schema for name, field in self.fields.items()}
        return {"type": "object", "properties": properties, "required": required}

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the method's arguments by name. Raises `BadInputError` with all problems."""
        try:
            typed = parse_json(text)
        except ValueError as error:
            raise BadInputError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(typed, dict):
            raise BadInputError("the arguments must be a JSON object")
        arguments, wrong = dict(self.absent), []
        for name, each in self.fields.items():
            if name in typed:
                try:
                    arguments[name] = each.read(typed[name])
                except ValidationError as error:
                    wrong += [
                        _error_text(name, fault) for fault in error.errors(include_url=False, include_input=False)
                    ]
                except (ValueError, TypeError) as error:
                    wrong.append(f"{name}: {error}")
            elif each.required:
                wrong.append(f"{name}: missing")
        wrong += [f"{name}: unknown parameter" for name in typed if name not in self.fields]
        if wrong:
            raise BadInputError("; ".join(wrong))
        return arguments


def form_of(plan: MethodPlan) -> MethodForm:
    """Create the form of a service method."""
    function = inspect.getattr_static(plan.service, plan.name)
    read = read_signature(function, nearer=local_names_of(plan.service))
    annotations = {each.name: each.annotation for each in read.parameters}
    fields: dict[str, Field] = {}
    absent: dict[str, Any] = {}
    for parameter in plan.signature.parameters.values():
        name, required = parameter.name, parameter.default is EMPTY
        annotation = annotations[name]
        if plan.messages.continues_history and name == plan.messages.history[-1]:
            fields[name] = Field({"type": "string"}, _read_history, required)
        elif name in plan.messages.history:
            if required:
                absent[name] = []
        elif name in plan.messages.contents:
            fields[name] = _make_contents_field(annotation, required)
        elif name == plan.messages.user_parameter and _is_message(annotation):
            fields[name] = Field({"type": "string"}, _make_message_reader(annotation), required)
        else:
            fields[name] = _make_field(annotation, required)
    return MethodForm(fields, absent)


def _make_field(annotation: Any, required: bool) -> Field:
    if annotation is EMPTY or isinstance(annotation, Unresolved):
        return Field({}, lambda value: value, required)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        schema = adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        return Field({}, lambda value: value, required)
    return Field(schema, adapter.validate_python, required)


def _error_text(name: str, error: Any) -> str:
    place = ".".join(map(str, (name, *error["loc"])))
    return f"{place}: {error['msg']}"


# --- messages and their contents


def _find_kinds(annotation: Any) -> set[Any]:
    """Return the types in an annotation, at any depth."""
    inner = {kind for each in get_args(annotation) for kind in _find_kinds(each)}
    return inner or {annotation}


def _is_message(annotation: Any) -> bool:
    return bool(_find_kinds(annotation) & {UserMessage, *CONTENT_TYPES})


def _read_history(value: Any) -> list[UserMessage]:
    """Return the messages of a method whose only messages are a history: the text is its first and last one."""
    if not isinstance(value, str):
        raise TypeError("must be a string")
    return [UserMessage(value)]


def _make_message_reader(annotation: Any) -> Callable[[Any], Any]:
    def read_message(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError("must be a string")
        kinds = _find_kinds(annotation)
        if str in kinds:
            return value
        return UserMessage(value) if UserMessage in kinds else [TextContent(value)]

    return read_message


_KINDS: tuple[tuple[type[Any], str, str], ...] = (
    (ImageContent, "image/", "an image"),
    (PdfContent, PDF, "a PDF document"),
    (AudioContent, "audio/", "a recording"),
)


def _make_contents_field(annotation: Any, required: bool) -> Field:
    """Return a field that takes texts as they are, and images, documents and recordings as URLs or files."""
    kinds = _find_kinds(annotation)
    media = [each for each in _KINDS if each[0] in kinds]
    has_text = TextContent in kinds

    def read_content(value: Any) -> Content:
        if isinstance(value, str):
            if value.startswith("data:") or (not has_text and value.startswith(("https://", "http://"))):
                return _read_media(value, media)
            if has_text:
                return TextContent(value)
        raise ValueError(f"must be a file, or the URL of {_join_names(each[2] for each in media)}: https://… or data:…")

    def read_contents(value: Any) -> list[Content]:
        if not isinstance(value, list):
            raise TypeError("must be a list of URLs")
        return [read_content(each) for each in value]

    entry: dict[str, Any] = {"type": "string"}
    if not has_text:
        accepted = ",".join(start if start == PDF else f"{start}*" for _, start, _ in media)
        about = f"{_join_names(each[2] for each in media)}: a file or its URL"
        entry |= {"format": "uri", "contentMediaType": accepted, "description": about}
    origin = get_origin(unwrapped(annotation).type)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return Field({"type": "array", "items": entry}, read_contents, required)
    return Field(entry, read_content, required)


def _read_media(url: str, kinds: Sequence[tuple[type[Any], str, str]]) -> Media:
    """Return the content at a URL. Raises `ValueError` if the parameter does not take it."""
    if url.startswith("data:"):
        found = next((kind for kind, start, _ in kinds if url[5:].lower().startswith(start)), None)
    else:
        by_url = [kind for kind, _, _ in kinds if kind is not AudioContent]
        is_pdf = urlsplit(url).path.lower().endswith(".pdf")
        found = PdfContent if is_pdf and PdfContent in by_url else next(iter(by_url), None)
    if found is ImageContent:
        return ImageContent(url=url)
    if found is PdfContent:
        return PdfContent(url=url)
    if found is AudioContent:
        return AudioContent(url, url[5:].partition(",")[0].partition(";")[0])
    raise ValueError(f"must be {_join_names(each[2] for each in kinds)}")


def _join_names(names: Iterable[str]) -> str:
    return " or ".join(names)
