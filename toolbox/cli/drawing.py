"""The graph of a container as text and as a Mermaid drawing.

Not here: what there is to draw (`overview`), the command (`commands`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.markup import escape

from ..overview import SCOPES, Node

ARROWS = {"holds": "-->", "looks up": "-.->", "calls": "==>"}


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
