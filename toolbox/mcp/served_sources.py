"""What an MCP server offers: the tools, resources and prompts of classes, functions, instances and single methods.

Not here: answering the requests of clients (`serving`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from ..container import Container, internals_of
from ..errors import Problem
from ..tools.marks import tool_mark_of
from ..tools.single_methods import class_defining
from ..tools.sources import AiServiceTool, Member, is_function, members_of, read_member, read_tools
from ..tools.tool_calls import Tool
from .resources import Offers, mark_of, marked_members


@dataclass(frozen=True, slots=True)
class ToolMember:
    """One tool of a class: `Orders.find` as (`Orders`, `"find"`)."""

    owner: type
    attribute: str


def read_source(source: Any, offers: Offers, where: str, problems: list[Problem]) -> Sequence[Tool]:
    """Return the tools of a source, and add its resources and prompts to `offers`."""
    if isinstance(source, ToolMember):
        return _read_single_method(source, offers, where, problems)
    owner = _class_of(source)
    has_offers = has_tools = False
    if is_function(source):
        if has_offers := mark_of(source) is not None:
            offers.add_function(source, problems)
        has_tools = tool_mark_of(source) is not None
    elif isinstance(owner, type):
        bean, instance = (source, None) if source is owner or get_origin(source) is not None else (None, source)
        for member in marked_members(owner):
            offers.add_member(member, bean, instance, problems)
            has_offers = True
        has_tools = any(True for _ in members_of(owner))
    if has_offers and not has_tools:
        return ()
    tools, found = read_tools([source], where)
    problems += found
    return tools


def _class_of(source: Any) -> Any:
    """Return the class of an item: itself, the class of an annotation such as `Annotated[Orders, …]`, or its type."""
    if isinstance(source, (type, Mapping, AiServiceTool)):
        return source
    if get_origin(source) is Annotated:
        return _class_of(get_args(source)[0])
    return get_origin(source) or type(source)


def _read_single_method(source: ToolMember, offers: Offers, where: str, problems: list[Problem]) -> Sequence[Tool]:
    """Return a single method of a class as a tool, or add it to `offers`, or both."""
    offered = [each for each in marked_members(source.owner) if each.attribute == source.attribute]
    for each in offered:
        offers.add_member(each, source.owner, None, problems)
    member = next((each for each in members_of(source.owner) if each.attribute == source.attribute), None)
    if member is None:
        if not offered:
            fact = f"{source.owner.__name__}.{source.attribute} is not a tool"
            problems.append(Problem(where, fact, "mark the method with @tool, @mcp_resource or @mcp_prompt"))
        return ()
    tool = read_member(member, source.owner, None, problems)
    return () if tool is None else (tool,)


def has_bean_offers(owner: Any) -> bool:
    """Return True for a class whose resources or prompts need an instance."""
    return isinstance(owner, type) and any(each.bound_to == "instance" for each in marked_members(owner))


def _member_of(owner: type, attribute: str) -> Member | None:
    found = (*members_of(owner), *marked_members(owner))
    return next((each for each in found if each.attribute == attribute), None)


def with_owner(source: Any, container: Container) -> Any:
    """Return `Orders.find`, which is a plain function, as a `ToolMember` of its class; other sources unchanged."""
    if not inspect.isfunction(source) or (defining := class_defining(source)) is None:
        return source
    for owner in (*_beans_with(source, container), defining):
        member = _member_of(owner, source.__name__)
        if member is not None and member.function is source and member.bound_to == "instance":
            return ToolMember(owner, member.attribute)
    return source


def _beans_with(function: Any, container: Container) -> Iterator[type]:
    """Yield the bean class that has this method, possibly inherited, if there is exactly one."""
    if container.is_started:
        return
    found = [each for each in internals_of(container).mcp_beans() if getattr(each, function.__name__, None) is function]
    if len(found) == 1:
        yield found[0]
