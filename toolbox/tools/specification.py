"""Creates the specification of a tool (name, description, JSON schema), and the pydantic adapter for its arguments.

Also reads docstrings. Not here: reading signatures (`parameters`), decoding a call (`codec`), finding tools
(`sources`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, Optional, Union, get_args, get_origin
from uuid import UUID

from typing_extensions import TypedDict

from ..chat import ToolSpecification, no_parameters
from ..errors import FrameworkError, Problem
from ..introspection import admits_none, is_union, type_name, unwrapped
from ..safe_text import brief
from ..schemas import Schema, schema_of, without_null
from .marks import ToolMark
from .parameters import Role, Taken, ToolParameter, is_field

if TYPE_CHECKING:
    from pydantic import TypeAdapter


import inspect
import textwrap
from dataclasses import field

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Some model servers refuse property names with other characters.
_ALIAS = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Described:
    """The specification of a tool, its visible parameters, and the adapter that validates them (None without any)."""

    specification: ToolSpecification
    visible: tuple[ToolParameter, ...]
    adapter: TypeAdapter[dict[str, Any]] | None


def describe_tool(
    name: str, documentation: str | None, mark: ToolMark, taken: Taken, where: str, problems: list[Problem]
) -> Described | None:
    """Return the description of the tool `name`; None if it has problems. `where` is the place that problems name."""
    problems += _mark_problems(name, mark, where)
    docstring = read_docstring(documentation)
    visible = tuple(each for each in taken.parameters if each.role is Role.MODEL)
    found = len(problems)
    problems += _alias_problems(visible, where)
    if len(problems) > found:
        return None
    adapter = _adapter(visible, where, problems) if visible else None
    schema = no_parameters()
    if adapter is not None:
        schema = _parameters_schema(adapter, visible, docstring.parameters, where, problems)
    problems += _default_problems(visible, where)
    if len(problems) > found:
        return None
    description = docstring.first_paragraph if mark.description is None else mark.description
    specification = ToolSpecification(name, description or None, schema, mark.metadata, mark.strict)
    return Described(specification, visible, adapter)


def name_problems(name: str, where: str) -> list[Problem]:
    """Return the problems with a tool's name."""
    if _NAME.fullmatch(name):
        return []
    fix = 'use 1 to 64 of the characters A-Z a-z 0-9 _ - in @tool(name="…")'
    return [Problem(where, f"invalid tool name {name!r}", fix)]


def limit_problems(where: str, timeout: float | None, max_result_chars: int | None = None) -> list[Problem]:
    """Return the problems with a tool's limits."""
    problems = []
    if timeout is not None and not timeout > 0:
        problems.append(Problem(where, f"timeout is {timeout}", "use a number of seconds greater than 0, or None"))
    if max_result_chars is not None and max_result_chars < 1:
        problems.append(Problem(where, f"max_result_chars is {max_result_chars}", "use 1 or more, or None"))
    return problems


def _mark_problems(name: str, mark: ToolMark, where: str) -> list[Problem]:
    return [*name_problems(name, where), *limit_problems(where, mark.timeout, mark.max_result_chars)]


# --- names and defaults of parameters


def _alias_problems(visible: Sequence[ToolParameter], where: str) -> Iterator[Problem]:
    shown: dict[str, str] = {}
    for each in visible:
        if each.alias is not None and not (isinstance(each.alias, str) and _ALIAS.fullmatch(each.alias)):
            yield Problem(
                where,
                f"the alias {each.alias!r} of parameter {each.name!r} is invalid",
                "use a string of 1 to 64 of the characters A-Z a-z 0-9 _ . -",
            )
        elif (other := shown.setdefault(each.shown_name, each.name)) != each.name:
            yield Problem(
                where,
                f"the parameters {other!r} and {each.name!r} have the same name {each.shown_name!r} for the model",
                "give one of them another alias",
            )


def _default_problems(visible: Sequence[ToolParameter], where: str) -> Iterator[Problem]:
    for each in visible:
        default = each.default
        if is_field(default):  # a default_factory is called for each call only
            default = None if default.default_factory is not None else default.default
        if each.has_default and not _is_fitting(default, each.annotation):
            yield Problem(
                where,
                f"the default {brief(repr(default), 80)} of parameter {each.name!r} is not valid for its type "
                f"{type_name(each.annotation)}",
                "use a default of this type, or None"
                + ("" if each.admits_none else f": `{each.name}: {type_name(each.annotation)} | None = None`"),
            )


# An object of another class may be the program's own sentinel for an absent argument.
_DATA = (str, bytes, bool, int, float, list, tuple, dict, set, frozenset, date, time, timedelta, Decimal, UUID, Enum)


def _is_fitting(default: Any, annotation: Any) -> bool:
    """Return False if a default has a type that pydantic would refuse; limits such as `ge=1` are not checked."""
    from pydantic import TypeAdapter, ValidationError

    bare, optional = unwrapped(annotation).type, admits_none(annotation)
    if default is None or (isinstance(bare, type) and isinstance(default, bare)) or not isinstance(default, _DATA):
        return True
    or_none: Any = Optional[bare] if optional else bare  # noqa: UP045 - `bare` is a value
    for expected in (annotation, or_none):
        try:
            TypeAdapter(expected).validate_python(default)
        except ValidationError:
            continue
        except Exception:  # exceptions of a type's own validators do not mean that the default has the wrong type
            return True
        return True
    return False


# --- the adapter


class _NoneWhenAbsent:
    """Sets a required parameter whose type includes None to None if the model leaves it out."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import with_default_schema

        return with_default_schema(handler(source), default=None)


class _NullIsAbsent:
    """Accepts null for a parameter with a default; the default is used then."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import nullable_schema

        return nullable_schema(handler(source))


def _field(parameter: ToolParameter) -> Any:
    annotation = parameter.annotation
    if parameter.alias is not None:
        from pydantic import Field

        annotation = Annotated[_without_aliases_below(annotation), Field(validation_alias=parameter.alias)]
    if not parameter.has_default and not parameter.admits_none:
        return annotation
    if not parameter.admits_none:
        annotation = Annotated[annotation, _NullIsAbsent()]
    return NotRequired[annotation if parameter.has_default else Annotated[annotation, _NoneWhenAbsent()]]


def _without_aliases_below(annotation: Any) -> Any:
    """Return the annotation without the aliases in members of a union, which pydantic warns about."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        whole: Any = (_without_aliases_below(arguments[0]), *arguments[1:])
        return Annotated[whole]
    if not is_union(annotation):
        return annotation
    members: list[Any] = []
    for member in arguments:
        if get_origin(member) is Annotated:
            kept: list[Any] = [member.__origin__]
            for each in member.__metadata__:
                kept += each.metadata if is_field(each) and each.validation_alias is not None else [each]
            member = Annotated[tuple(kept)] if len(kept) > 1 else kept[0]
        members.append(member)
    return Union[tuple(members)]  # noqa: UP007 - the members are values


def adapter_of(visible: Sequence[ToolParameter]) -> TypeAdapter[dict[str, Any]]:
    """Return the adapter that validates a dictionary with these parameters."""
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
        return adapter_of(visible)
    except FrameworkError:
        raise
    except Exception as error:  # pydantic and the types' own hooks raise many kinds of exceptions
        culprits = [each for each in visible if len(visible) > 1 and not _can_be_validated(each)]
        names = ", ".join(repr(each.name) for each in culprits or visible)
        reason = _reason(error)
        problems.append(
            Problem(
                where,
                f"cannot create a JSON schema for parameter {names} ({reason})",
                "use a type that pydantic supports, or Inject[…] if it is a bean",
            )
        )
        return None


def _reason(error: Exception) -> str:
    """Return the first sentence of pydantic's message, without its advice about model settings."""
    first, *more = str(error).partition(". Set `")[0].strip().splitlines() or [type(error).__name__]
    return f"{first} {more[-1].strip()}".rstrip(".") if first.endswith(":") and more else first.rstrip(".")


def _can_be_validated(parameter: ToolParameter) -> bool:
    try:
        schema_of(adapter_of([parameter]))
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
        reason = _reason(error)
        fix = "use a type with a JSON schema, or Inject[…] if it is a bean"
        problems.append(Problem(where, f"cannot create a JSON schema for parameter {names} ({reason})", fix))
        return no_parameters()
    properties: Schema = {}
    for each in visible:
        schema = made["properties"][each.shown_name]
        if each.has_default:  # null means the default, which the model does not need to know
            schema = without_null(schema)
        description = each.description or documented.get(each.name) or documented.get(each.shown_name)
        properties[each.shown_name] = {**schema, "description": description} if description else schema
    parameters: Schema = {"type": "object", "properties": properties}
    if required := [each.shown_name for each in visible if not each.has_default]:
        parameters["required"] = required
    if "$defs" in made:
        parameters["$defs"] = made["$defs"]
    return parameters


# --- docstrings

SECTIONS = frozenset({"Args:", "Arguments:", "Parameters:", "Params:", "Returns:", "Raises:", "Yields:"})
"""Headings that may begin a Google-style docstring without a summary."""


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring: the first paragraph (or None), and descriptions by parameter name."""

    first_paragraph: str | None = None
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docstring:
    """Parse a docstring. Never raises."""
    if not text or not text.strip():
        return Docstring()
    import docstring_parser

    cleaned = inspect.cleandoc(text.replace("\r\n", "\n"))
    # docstring_parser treats a section at the beginning as the description.
    first, _, rest = cleaned.partition("\n")
    begins_with_section = first.strip() in SECTIONS
    if begins_with_section and not rest.startswith((" ", "-")):  # the indentation of the first line is unknown
        cleaned = f"{first}\n{textwrap.indent(rest, '    ')}"
    try:
        parsed = docstring_parser.parse(f"…\n\n{cleaned}" if begins_with_section else cleaned)
    except docstring_parser.ParseError:
        return Docstring(_first_paragraph(cleaned))
    parameters = {
        each.arg_name.lstrip("*"): " ".join(each.description.split())
        for each in parsed.params
        if each.description and each.args[:1] != ["attribute"]
    }
    return Docstring(None if begins_with_section else _first_paragraph(parsed.description), parameters)


def _first_paragraph(text: str | None) -> str | None:
    return text.strip().split("\n\n", 1)[0].rstrip() if text and text.strip() else None
