"""The program as the page shows it: services with their methods, tools and beans; names and types, no values.

Each method has a form: a JSON schema of its parameters, and the conversion of JSON input into arguments. Not here:
calling tools and methods (`routes`), the arguments of tools, which the tool's codec reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from toolbox.chat import UserMessage
from toolbox.container import Container, internals_of
from toolbox.contents import CONTENT_TYPES, PDF, AudioContent, Content, ImageContent, Media, PdfContent, TextContent
from toolbox.execution.markers import Execution
from toolbox.introspection import EMPTY, Unresolved, read_signature, type_name, unwrapped
from toolbox.json_text import parse_json
from toolbox.overview import Node, nodes_of
from toolbox.security import Reach
from toolbox.services.declaration import local_names_of
from toolbox.services.hosting import ContainerHost
from toolbox.services.memory import MessageWindow, TokenWindow, Window, estimate_tokens
from toolbox.services.outputs import Output, Shape
from toolbox.services.plans import MethodPlan, Provider
from toolbox.tools.pipeline import Tool
from toolbox.tools.sources import read_tools

from ..streaming import as_json
from .journal import DevUiListener


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool with its id on the page and the methods that offer it."""

    id: str
    tool: Tool
    offered_by: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Method:
    """A service method and its form."""

    plan: MethodPlan
    form: MethodForm


class ProgramView:
    """The services, tools and beans of a started container, and its reach; read once."""

    def __init__(
        self, container: Container, endpoint_tools: Iterable[tuple[str, Tool]] = (), reach: Iterable[Reach] = ()
    ) -> None:
        self.reach = tuple(reach)
        self.host = internals_of(container).host
        self.nodes = [each for each in nodes_of(container) if each.type != DevUiListener.__name__]
        self.methods = {
            plan.where: Method(plan, form_of(plan)) for plans in self.host.plans.values() for plan in plans.values()
        }
        self.tools: dict[str, ListedTool] = {}
        self._by_place: dict[tuple[Any, ...], ListedTool] = {}
        for where, method in self.methods.items():
            for tool in method.plan.toolset.tools:
                self._list(tool).offered_by.append(where)
        for where, tool in endpoint_tools:
            self._list(tool).offered_by.append(where)
        for tool in read_tools(internals_of(container).tool_beans(), "the dev UI")[0]:
            self._list(tool)

    def _list(self, tool: Tool) -> ListedTool:
        name = tool.specification.name
        # A class and its only bean are the same tool; functions and instances are compared by identity.
        place = (name, tool.where, repr(tool.bean), id(tool.function) if tool.bean is None else None)
        if (listed := self._by_place.get(place)) is None:
            number = sum(each.tool.specification.name == name for each in self.tools.values())
            id_ = name if not number else f"{name}~{number + 1}"
            listed = self._by_place[place] = self.tools[id_] = ListedTool(id_, tool)
        return listed

    def method(self, where: str) -> Method:
        """Return a method by its id. Raises `BadInputError` for an unknown one."""
        if where not in self.methods:
            raise BadInputError(f"unknown service method {where!r}")
        return self.methods[where]

    def tool(self, id_: str) -> Tool:
        """Return a tool by its id. Raises `BadInputError` for an unknown one."""
        if id_ not in self.tools:
            raise BadInputError(f"unknown tool {id_!r}")
        return self.tools[id_].tool

    def as_json(self, title: str) -> dict[str, Any]:
        """Return the JSON data for the page."""
        by_service: dict[type[Any], list[MethodPlan]] = {}
        for method in self.methods.values():
            by_service.setdefault(method.plan.service, []).append(method.plan)
        return {
            "title": title,
            "services": [self._service(cls, plans) for cls, plans in by_service.items()],
            "tools": [_tool_as_json(each) for each in self.tools.values()],
            "beans": [_bean_as_json(each) for each in self.nodes],
            "reach": [each.as_json() for each in self.reach],
        }

    def _service(self, cls: type[Any], plans: Iterable[MethodPlan]) -> dict[str, Any]:
        plans = list(plans)
        return {
            "name": cls.__name__,
            "module": cls.__module__,
            "doc": _first_paragraph(cls.__doc__),
            "model": _model_of(self.host, plans[0].options.model),
            "methods": [self._method(plan) for plan in plans],
        }

    def _method(self, plan: MethodPlan) -> dict[str, Any]:
        form = self.methods[plan.where].form
        return {
            "id": plan.where,
            "name": plan.name,
            "doc": _first_paragraph(getattr(plan.service, plan.name).__doc__),
            "returns": _returns(plan.output),
            "streams": plan.output.is_stream,
            "memory": _memory(plan.window) if plan.memory_parameter is not None else None,
            "memory_parameter": plan.memory_parameter,
            "user_parameter": plan.user_parameter,
            "schema": form.schema,
            "tools": [each.id for each in self.tools.values() if plan.where in each.offered_by],
            "providers": [_provider_name(each) for each in plan.providers],
        }


def _tool_as_json(listed: ListedTool) -> dict[str, Any]:
    tool, specification = listed.tool, listed.tool.specification
    shown = [specification.name, specification.description, specification.parameters]
    return {
        "id": listed.id,
        "name": specification.name,
        "description": specification.description,
        "schema": specification.parameters,
        "where": tool.where,
        "runs": _place(tool.execution),
        "returns_immediately": str(tool.return_behavior) == "immediate",
        "timeout": tool.timeout,
        "wants_memory_id": bool(tool.memory_id_names),
        "needs_memory_id": tool.needs_memory_id,
        "offered_by": listed.offered_by,
        "tokens": estimate_tokens(UserMessage(as_json(shown))),
    }


def _bean_as_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "type": node.type,
        "scope": node.scope,
        "made_by": node.made_by,
        "tools": node.tools,
        "links": [{"to": bean, "manner": manner} for bean, manner in node.links],
    }


def _place(execution: Execution) -> str:
    """Describe where a tool runs."""
    if execution.is_coroutine:
        return "the event loop"
    if isinstance(execution.executor, str):
        return f"the executor {execution.executor!r}"
    words: Mapping[str, str] = {
        "blocking": "a worker thread",
        "non_blocking": "the event loop",
        "thread": "a new thread",
        "executor": "its own executor",
    }
    return words[str(execution.model)]


def _memory(window: Window | None) -> str | None:
    match window:
        case None:
            return None
        case MessageWindow(max_messages=count):
            return f"the last {count} messages"
        case TokenWindow(max_tokens=count):
            return f"the last messages with {count} tokens"
        case _:
            return type(window).__name__


def _model_of(host: ContainerHost, name: str | None) -> str:
    """Return the model's name and class; not its address, which may contain a secret."""
    try:
        model = host.model(name)
    except Exception as error:  # a program whose services are all replaced by fakes needs no model
        return f"none ({type(error).__name__})"
    kind, known_as = type(model).__name__, getattr(model, "model", None)
    shown = f"{kind}, {known_as}" if isinstance(known_as, str) else kind
    return shown if name is None else f"{name!r}: {shown}"


def _returns(output: Output) -> str:
    inner = type_name(output.type)
    match output.shape:
        case Shape.RESULT:
            return f"Result[{inner}]"
        case Shape.EVENT_STREAM:
            return "a stream of events"
        case Shape.TEXT_STREAM:
            return "a stream of text"
        case Shape.ITEM_STREAM:
            return f"a stream of {inner}"
        case Shape.VALUE:
            return inner


def _provider_name(provider: Provider) -> str:
    found = provider.bean or provider.given
    return getattr(found, "__name__", None) or type(found).__name__


def _first_paragraph(text: str | None) -> str | None:
    return inspect.cleandoc(text).partition("\n\n")[0] if text else None


# --- forms of service methods


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
        if name in plan.history:
            if required:
                absent[name] = []
        elif name in plan.contents:
            fields[name] = _contents_field(annotation, required)
        elif name == plan.user_parameter and _is_message(annotation):
            fields[name] = Field({"type": "string"}, _message_reader(annotation), required)
        else:
            fields[name] = _field(annotation, required)
    return MethodForm(fields, absent)


def _field(annotation: Any, required: bool) -> Field:
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


def _kinds(annotation: Any) -> set[Any]:
    """Return the types in an annotation, at any depth."""
    inner = {kind for each in get_args(annotation) for kind in _kinds(each)}
    return inner or {annotation}


def _is_message(annotation: Any) -> bool:
    return bool(_kinds(annotation) & {UserMessage, *CONTENT_TYPES})


def _message_reader(annotation: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError("must be a text")
        kinds = _kinds(annotation)
        if str in kinds:
            return value
        return UserMessage(value) if UserMessage in kinds else [TextContent(value)]

    return read


_KINDS: tuple[tuple[type[Any], str, str], ...] = (
    (ImageContent, "image/", "an image"),
    (PdfContent, PDF, "a PDF document"),
    (AudioContent, "audio/", "a recording"),
)


def _contents_field(annotation: Any, required: bool) -> Field:
    """Return a field that takes texts as they are, and images, documents and recordings as URLs or files."""
    kinds = _kinds(annotation)
    media = [each for each in _KINDS if each[0] in kinds]
    has_text = TextContent in kinds

    def content(value: Any) -> Content:
        if isinstance(value, str):
            if value.startswith("data:") or (not has_text and value.startswith(("https://", "http://"))):
                return _media(value, media)
            if has_text:
                return TextContent(value)
        raise ValueError(f"must be a file, or the URL of {_either(each[2] for each in media)}: https://… or data:…")

    def contents(value: Any) -> list[Content]:
        if not isinstance(value, list):
            raise TypeError("must be a list of URLs")
        return [content(each) for each in value]

    entry: dict[str, Any] = {"type": "string"}
    if not has_text:
        accepted = ",".join(start if start == PDF else f"{start}*" for _, start, _ in media)
        about = f"{_either(each[2] for each in media)}: a file or its URL"
        entry |= {"format": "uri", "contentMediaType": accepted, "description": about}
    origin = get_origin(unwrapped(annotation).type)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return Field({"type": "array", "items": entry}, contents, required)
    return Field(entry, content, required)


def _media(url: str, kinds: Sequence[tuple[type[Any], str, str]]) -> Media:
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
    raise ValueError(f"must be {_either(each[2] for each in kinds)}")


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
