"""A container's beans for display: their scopes, their dependencies, and the tools they offer and use.

Not here: the bean graph itself (`di`), the output (`cli`, `toolbox_fastapi.dev_ui`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .bean_references import is_rest_client
from .container import Container, internals_of
from .di.graph import BeanDescription
from .errors import IllegalConfigurationError
from .services.declaration import service_options_of
from .services.listing import sources_of
from .tools.executors import tool_specifications_from
from .tools.sources import bean_types


@dataclass(frozen=True, slots=True)
class Node:
    """A bean for display; `dependencies`, `lazy` and `toolbox` name other beans, `tools` are its own tools."""

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
        """Yield the names of linked beans with the kind of link: holds, looks up or calls."""
        yield from ((bean, "holds") for beans in self.dependencies.values() for bean in beans)
        yield from ((bean, "looks up") for beans in self.lazy.values() for bean in beans)
        yield from ((bean, "calls") for bean in self.toolbox)


SCOPES = ("application", "request", "call", "dependent")


def nodes_of(container: Container) -> list[Node]:
    """Return the container's beans, those with the longest lifetime first."""
    beans = internals_of(container).describe()
    names = {bean.source: bean.name for bean in beans if isinstance(bean.source, type)}

    def node(bean: BeanDescription) -> Node:
        source = bean.source
        is_service = isinstance(source, type) and service_options_of(source) is not None
        used = bean_types(sources_of(source)) if is_service and isinstance(source, type) else ()
        return Node(
            name=bean.name,
            type=bean.type,
            scope=str(bean.scope),
            made_by="AI service" if is_service else "REST client" if is_rest_client(source) else bean.made_by,
            dependencies=dict(bean.dependencies),
            lazy=dict(bean.lazy),
            tools=tool_names(source),
            toolbox=tuple(names[each] for each in used if each in names),
        )

    nodes = sorted(map(node, beans), key=lambda each: SCOPES.index(each.scope))
    linked = {name for each in nodes for name, _ in each.links}
    # The container itself is a bean as well; it is only shown if another bean uses it.
    itself = {bean.name for bean in beans if bean.source is container}
    return [each for each in nodes if each.name not in itself - linked]


def tool_names(source: object) -> tuple[str, ...]:
    """Return the names of a class's tools; empty if they are invalid, which `check` reports."""
    try:
        return tuple(each.name for each in tool_specifications_from(source)) if isinstance(source, type) else ()
    except IllegalConfigurationError:
        return ()
