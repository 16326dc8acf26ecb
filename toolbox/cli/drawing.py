"""The graph of a container as text and as a Mermaid drawing.

Not here: the graph itself (`di`), the command (`commands`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.markup import escape

from ..container import Container
from ..di.description import BeanDescription
from ..errors import IllegalConfigurationError
from ..rest.marks import client_mark_of
from ..services.declaration import service_options_of
from ..services.planning import sources_of
from ..tools.sources import bean_types
from ..tools.standalone import tool_specifications_from


@dataclass(frozen=True, slots=True)
class Node:
    """A bean as it is shown; `dependencies`, `lazy` and `toolbox` name other beans, `tools` what it offers itself."""

    name: str
    type: str
    scope: str
    made_by: str
    dependencies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lazy: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    toolbox: tuple[str, ...] = ()

    @property
    def links(self) -> Iterator[tuple[str, str]]:
        """What it is bound to, each with the manner."""
        yield from ((bean, "holds") for beans in self.dependencies.values() for bean in beans)
        yield from ((bean, "looks up") for beans in self.lazy.values() for bean in beans)
        yield from ((bean, "calls") for bean in self.toolbox)


SCOPES = ("application", "request", "call", "dependent")
ARROWS = {"holds": "-->", "looks up": "-.->", "calls": "==>"}


def nodes_of(container: Container) -> list[Node]:
    """The container's beans, the longest-lived first."""
    beans = container.describe()
    names = {bean.source: bean.name for bean in beans if isinstance(bean.source, type)}

    def node(bean: BeanDescription) -> Node:
        source = bean.source
        is_service = isinstance(source, type) and service_options_of(source) is not None
        used = bean_types(sources_of(source)) if is_service and isinstance(source, type) else ()
        return Node(
            name=bean.name,
            type=bean.type,
            scope=str(bean.scope),
            made_by="AI service" if is_service else "REST client" if client_mark_of(source) else bean.made_by,
            dependencies=dict(bean.dependencies),
            lazy=dict(bean.lazy),
            tools=tool_names(source),
            toolbox=tuple(names[each] for each in used if each in names),
        )

    nodes = sorted(map(node, beans), key=lambda each: SCOPES.index(each.scope))
    linked = {name for each in nodes for name, _ in each.links}
    # The container is a bean of its own, which says nothing unless something asks for it.
    itself = {bean.name for bean in beans if bean.source is container}
    return [each for each in nodes if each.name not in itself - linked]


def tool_names(source: object) -> tuple[str, ...]:
    """The names of the tools a class has; none where they cannot be read, which `check` reports."""
    try:
        return tuple(each.name for each in tool_specifications_from(source)) if isinstance(source, type) else ()
    except IllegalConfigurationError:
        return ()


def text_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """The graph as text: a paragraph for each scope."""
    scope = ""
    for node in nodes:
        if node.scope != scope:
            yield f"{'' if not scope else chr(10)}[bold]{node.scope}[/bold]"
            scope = node.scope
        yield f"  {escape(node.name)}: [cyan]{escape(node.type)}[/cyan] [dim]({escape(node.made_by)})[/dim]"
        if node.tools:
            yield f"    offers the tools {escape(', '.join(node.tools))}"
        for bean, manner in node.links:
            yield f"    {manner} {escape(bean)}"


def mermaid_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """The graph as a Mermaid flowchart: solid for what is held, dotted for what is looked up, thick for tools."""
    nodes = list(nodes)
    ids = {node.name: f"bean{number}" for number, node in enumerate(nodes)}
    yield "flowchart LR"
    for scope in SCOPES:
        members = [node for node in nodes if node.scope == scope]
        if not members:
            continue
        yield f"  subgraph {scope}"
        for node in members:
            offered = f"<br><small>{', '.join(node.tools)}</small>" if node.tools else ""
            text = node.type.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
            yield f'    {ids[node.name]}["{text}{offered}"]'
        yield "  end"
    for node in nodes:
        for bean, manner in node.links:
            yield f"  {ids[node.name]} {ARROWS[manner]} {ids[bean]}"
