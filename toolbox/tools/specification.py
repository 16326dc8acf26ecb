"""Makes, of what a tool takes, the specification that a model reads and the adapter that validates its calls.

Not here: reading signatures (`parameters`) and docstrings, decoding a call (`codec`), finding tools (`sources`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from typing_extensions import TypedDict

from ..chat import ToolSpecification, no_parameters
from ..errors import FrameworkError, Problem
from ..schemas import Schema, schema_of, without_null
from .docstrings import read_docstring
from .marks import ToolMark
from .parameters import Role, Taken, ToolParameter, is_field

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Described:
    """A tool as the model sees it, and what validates its arguments: None where it takes none."""

    specification: ToolSpecification
    visible: tuple[ToolParameter, ...]
    adapter: TypeAdapter[dict[str, Any]] | None


def describe_tool(
    name: str, documentation: str | None, mark: ToolMark, taken: Taken, where: str, problems: list[Problem]
) -> Described | None:
    """The description of the tool `name`, `where` in the program; None when a problem keeps it from being made."""
    problems += _mark_problems(name, mark, where)
    docstring = read_docstring(documentation)
    visible = tuple(each for each in taken.parameters if each.role is Role.MODEL)
    found = len(problems)
    adapter = _adapter(visible, where, problems) if visible else None
    schema = no_parameters()
    if adapter is not None:
        schema = _parameters_schema(adapter, visible, docstring.parameters, where, problems)
    if len(problems) > found:
        return None
    description = docstring.first_paragraph if mark.description is None else mark.description
    specification = ToolSpecification(name, description or None, schema, mark.metadata)
    return Described(specification, visible, adapter)


def name_problems(name: str, where: str) -> list[Problem]:
    """What is wrong with a tool's name."""
    if _NAME.fullmatch(name):
        return []
    fact = f"the tool name {name!r} is not 1 to 64 of the characters A-Z a-z 0-9 _ -"
    return [Problem(where, fact, 'give another: @tool(name="…")')]


def limit_problems(where: str, timeout: float | None, max_result_chars: int | None = None) -> list[Problem]:
    """What is wrong with a tool's limits."""
    problems = []
    if timeout is not None and not timeout > 0:
        problems.append(Problem(where, f"timeout is {timeout}", "use a number of seconds above 0, or None"))
    if max_result_chars is not None and max_result_chars < 1:
        problems.append(Problem(where, f"max_result_chars is {max_result_chars}", "use 1 or more, or None"))
    return problems


def _mark_problems(name: str, mark: ToolMark, where: str) -> list[Problem]:
    return [*name_problems(name, where), *limit_problems(where, mark.timeout, mark.max_result_chars)]


# --- the adapter


class _NoneWhenAbsent:
    """Makes a required parameter, whose type admits None, None when the model leaves it out."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import with_default_schema

        return with_default_schema(handler(source), default=None)


class _NullIsAbsent:
    """Lets null through for a parameter with a default, which it then takes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import nullable_schema

        return nullable_schema(handler(source))


def _field(parameter: ToolParameter) -> Any:
    annotation = parameter.annotation
    if is_field(parameter.default):
        for constraint in parameter.default.metadata:
            annotation = Annotated[annotation, constraint]
    if not parameter.has_default and not parameter.admits_none:
        return annotation
    if not parameter.admits_none:
        annotation = Annotated[annotation, _NullIsAbsent()]
    return NotRequired[annotation if parameter.has_default else Annotated[annotation, _NoneWhenAbsent()]]


def _adapter_of(visible: Sequence[ToolParameter]) -> TypeAdapter[dict[str, Any]]:
    from pydantic import ConfigDict, TypeAdapter

    make: Any = TypedDict  # a type checker wants to read the fields
    arguments = make("Arguments", {each.name: _field(each) for each in visible})
    arguments.__pydantic_config__ = ConfigDict(allow_inf_nan=False)
    adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
    return adapter


def _adapter(
    visible: Sequence[ToolParameter], where: str, problems: list[Problem]
) -> TypeAdapter[dict[str, Any]] | None:
    try:
        return _adapter_of(visible)
    except FrameworkError:
        raise
    except Exception as error:  # pydantic, and the types' own hooks, raise many kinds
        culprits = [each for each in visible if len(visible) > 1 and not _can_be_validated(each)]
        names = ", ".join(repr(each.name) for each in culprits or visible)
        reason = str(error).split("\n", 1)[0].rstrip(".")
        problems.append(
            Problem(
                where,
                f"no schema can be made of parameter {names} ({reason})",
                "use a type that pydantic validates, or Inject[…] if it is a bean",
            )
        )
        return None


def _can_be_validated(parameter: ToolParameter) -> bool:
    try:
        schema_of(_adapter_of([parameter]))
    except Exception:  # as above
        return False
    return True


# --- the schema


def _parameters_schema(
    adapter: TypeAdapter[Any],
    visible: Sequence[ToolParameter],
    documented: dict[str, str],
    where: str,
    problems: list[Problem],
) -> Schema:
    try:
        made = schema_of(adapter)
    except Exception as error:  # as above
        culprits = [each for each in visible if not _can_be_validated(each)] or visible
        names = ", ".join(repr(each.name) for each in culprits)
        reason = str(error).split("\n", 1)[0].rstrip(".")
        fix = "use a type that JSON can say, or Inject[…] if it is a bean"
        problems.append(Problem(where, f"no schema can be made of parameter {names} ({reason})", fix))
        return no_parameters()
    properties: Schema = {}
    for each in visible:
        schema = made["properties"][each.shown_name]
        if each.has_default:  # null means the default: there is no need to tell the model of it
            schema = without_null(schema)
        description = each.description or documented.get(each.name)
        properties[each.shown_name] = {**schema, "description": description} if description else schema
    parameters: Schema = {"type": "object", "properties": properties}
    if required := [each.shown_name for each in visible if not each.has_default]:
        parameters["required"] = required
    if "$defs" in made:
        parameters["$defs"] = made["$defs"]
    return parameters
