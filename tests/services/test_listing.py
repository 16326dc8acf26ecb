"""Cycles of services that are tools of each other."""

from itertools import pairwise
from typing import Any, Protocol

from toolbox import Container, DemoChatModel, register_ai_service, tool
from toolbox.service_names import SERVICE_MARK
from toolbox.services.declaration import ServiceOptions


def service(name: str) -> type[Any]:
    async def ask(self: Any, question: str) -> str: ...

    ask.__name__ = f"ask_{name}"
    ask.__qualname__ = f"{name}.{ask.__name__}"
    cls = type(name, (Protocol,), {ask.__name__: tool(ask), "__module__": __name__})
    return register_ai_service(cls)


def lists(cls: type[Any], *tools: type[Any]) -> None:
    setattr(cls, SERVICE_MARK, ServiceOptions(tools=tools))


def circles(*services: type[Any]) -> list[str]:
    problems = Container(models={"default": DemoChatModel()}).register(*services).check()
    return [each.what for each in problems if "each other" in each.what]


def test_every_service_cycle_is_reported_by_its_shortest_path() -> None:
    a, b, c = service("A"), service("B"), service("C")
    lists(a, b, c)
    lists(b, a)
    lists(c, b, a)

    assert circles(a, b, c) == [
        "these services are tools of each other: A -> B -> A",
        "these services are tools of each other: A -> C -> A",
    ]


def test_service_graphs_with_very_many_paths_are_checked_quickly() -> None:
    layers = [[service(f"S{number:02}_{each}") for each in range(3)] for number in range(30)]
    for above, below in pairwise(layers):
        for cls in above:
            lists(cls, *below)

    assert circles(*(cls for layer in layers for cls in layer)) == []
