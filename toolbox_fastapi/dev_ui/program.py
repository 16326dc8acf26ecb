"""The program as the page shows it: services with their methods, tools and beans. Names and types, no values.

Not here: the forms of methods (`forms`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbox.chat import UserMessage
from toolbox.container import Container, internals_of
from toolbox.conversations.views import as_view, estimate_tokens
from toolbox.execution.markers import Execution
from toolbox.hosts.hosting import ContainerHost
from toolbox.introspection import type_name
from toolbox.models.routing import names_of_router, router_in
from toolbox.overview import Node, nodes_of
from toolbox.security import Reach
from toolbox.services.outputs import Output, Shape
from toolbox.services.plans import MethodPlan
from toolbox.services.toolsets import Provider
from toolbox.tools.sources import read_tools
from toolbox.tools.tool_calls import Tool

from ..streaming import as_json
from .forms import BadInputError, MethodForm, form_of
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
        self.nodes = [
            each
            for each in nodes_of(internals_of(container).describe(), container)
            if each.type != DevUiListener.__name__
        ]
        self.left_out = internals_of(container).left_out()
        self.methods = {
            plan.where: Method(plan, form_of(plan)) for plans in self.host.plans.values() for plan in plans.values()
        }
        self.tools: dict[str, ListedTool] = {}
        self._by_place: dict[tuple[Any, ...], ListedTool] = {}
        for where, method in self.methods.items():
            for tool in method.plan.toolset.tools:
                self._add_tool(tool).offered_by.append(where)
        for where, tool in endpoint_tools:
            self._add_tool(tool).offered_by.append(where)
        for tool in read_tools(internals_of(container).tool_beans(), "the dev UI")[0]:
            self._add_tool(tool)

    def _add_tool(self, tool: Tool) -> ListedTool:
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
            "services": [self._describe_service(cls, plans) for cls, plans in by_service.items()],
            "tools": [_tool_as_json(each) for each in self.tools.values()],
            "beans": [_bean_as_json(each) for each in self.nodes],
            "left_out": [{"name": each.name, "why": each.why} for each in self.left_out],
            "reach": [each.as_json() for each in self.reach],
        }

    def _describe_service(self, cls: type[Any], plans: Iterable[MethodPlan]) -> dict[str, Any]:
        plans = list(plans)
        return {
            "name": cls.__name__,
            "module": cls.__module__,
            "doc": _take_first_paragraph(cls.__doc__),
            "model": _describe_model(self.host, plans[0].options.model),
            "methods": [self._describe_method(plan) for plan in plans],
        }

    def _describe_method(self, plan: MethodPlan) -> dict[str, Any]:
        form = self.methods[plan.where].form
        return {
            "id": plan.where,
            "name": plan.name,
            "doc": _take_first_paragraph(getattr(plan.service, plan.name).__doc__),
            "returns": _describe_output(plan.output),
            "streams": plan.output.is_stream,
            "memory": describe_memory(plan),
            "memory_parameter": plan.memory_parameter,
            "user_parameter": plan.messages.user_parameter,
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
        "runs": _describe_place(tool.execution),
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


def _describe_place(execution: Execution) -> str:
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


def describe_memory(plan: MethodPlan) -> str | None:
    """Describe what a model sees of the conversations of a method; None if it keeps none."""
    is_kept = plan.memory_parameter is not None and plan.window is not None
    return as_view(plan.window).describe() if is_kept else None


def _describe_model(host: ContainerHost, name: Any) -> str:
    """Return the model's name and class; not its address, which may contain a secret."""
    if (router := router_in(name)) is not None:
        return f"{router.__name__}: {', '.join(names_of_router(router))}"
    try:
        shown = host.models.describe(name)
    except Exception as error:  # a program whose services are all replaced by fakes needs no model
        return f"none ({type(error).__name__})"
    return shown if name is None else f"{name!r}: {shown}"


def _describe_output(output: Output) -> str:
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


def _take_first_paragraph(text: str | None) -> str | None:
    return inspect.cleandoc(text).partition("\n\n")[0] if text else None
