"""What a model sees of a service, a class or a function, and about how many tokens it takes.

Not here: the specifications themselves (`tools`), the command (`commands`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.markup import escape

from ..chat import ToolSpecification, UserMessage
from ..container import internals_of
from ..errors import IllegalConfigurationError
from ..services.declaration import service_options_of
from ..services.memory import estimate_tokens
from ..services.planning import plan_service
from ..tools.standalone import tool_specification_from, tool_specifications_from
from .addresses import fail, holds_container, load_container, refuse


@dataclass(frozen=True, slots=True)
class Offer:
    """What a model is offered by `where`: a service's method, a class, a function."""

    where: str
    specifications: tuple[ToolSpecification, ...]

    @property
    def tokens(self) -> int:
        """About how many tokens of each request it takes."""
        return sum(map(tokens_of, self.specifications))

    def as_json(self) -> dict[str, Any]:
        """As a program reads it."""
        tools = [
            {
                "name": each.name,
                "description": each.description,
                "parameters": each.parameters,
                "metadata": each.metadata,
                "tokens": tokens_of(each),
            }
            for each in self.specifications
        ]
        return {"where": self.where, "tokens": self.tokens, "tools": tools}


def offers_of(found: Any, target: str) -> Iterator[Offer]:
    """What is offered by a container's services, a service, a class, an object or a function."""
    if holds_container(found):
        for bean in internals_of(load_container(target)).describe():
            if isinstance(bean.source, type) and service_options_of(bean.source) is not None:
                yield from offers_of(bean.source, target)
        return
    if isinstance(found, type) and (options := service_options_of(found)) is not None:
        plans, problems = plan_service(found, options)
        refuse(problems)
        for plan in plans.values():
            yield Offer(plan.where, plan.toolset.specifications)
        return
    read: Callable[[Any], Any] = (
        (lambda function: [tool_specification_from(function)])
        if callable(found) and not isinstance(found, type)
        else tool_specifications_from
    )
    try:
        specifications = tuple(read(found))
    except IllegalConfigurationError as error:
        refuse(error.problems)
        return
    if not specifications:
        fail(f"{target} has no tools; mark a method with @tool, or name a service or a container")
    yield Offer(getattr(found, "__name__", target), specifications)


def tokens_of(specification: ToolSpecification) -> int:
    """About how many tokens a specification takes in a request."""
    shown = [specification.name, specification.description, specification.parameters]
    return estimate_tokens(UserMessage(json.dumps(shown, ensure_ascii=False, separators=(",", ":"))))


def specification_lines(specification: ToolSpecification) -> Iterator[str]:
    """A tool as text: its name, what it says of itself, its parameters."""
    yield f"[cyan]{escape(specification.name)}[/cyan]  [dim]about {tokens_of(specification)} tokens[/dim]"
    for line in (specification.description or "").splitlines():
        yield f"  {escape(line)}"
    required = specification.parameters.get("required", ())
    for name, schema in specification.parameters.get("properties", {}).items():
        facts = "" if name in required else ", optional"
        described = f": {schema['description']}" if schema.get("description") else ""
        yield f"  - {escape(name)} ({escape(kind_of(schema))}{facts}){escape(described)}"


def kind_of(schema: dict[str, Any]) -> str:
    """A schema in a word or two."""
    if "enum" in schema:
        return " | ".join(json.dumps(each, ensure_ascii=False) for each in schema["enum"])
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(kind_of, branches)))
    if schema.get("type") == "array":
        return f"array of {kind_of(schema.get('items') or {})}"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type", "any")
    return " | ".join(kind) if isinstance(kind, list) else str(kind)
