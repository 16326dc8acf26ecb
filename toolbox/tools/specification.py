"""Creates the specification of a tool (name, description, JSON schema), and the pydantic adapter for its arguments.

Reads the parameters first: which ones the model fills, which ones are hidden, their types and defaults; and docstrings.
Not here: resolving annotations (`toolbox.introspection`), decoding a call (`codec`), finding tools (`sources`).
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, Optional, Union, get_args, get_origin
from uuid import UUID

from typing_extensions import Doc, TypedDict, TypeIs

from ..chat import ChatRequestParameters, ToolSpecification, no_parameters
from ..context import InvocationContext
from ..errors import FrameworkError, Problem
from ..introspection import (
    EMPTY,
    Unresolved,
    admits_none,
    is_count,
    is_number,
    is_plain_data,
    is_union,
    names_around,
    resolve,
    substitute,
    type_name,
    unwrapped,
    with_lists,
)
from ..parameters import (
    IdempotencyKeyMark,
    Inject,
    InjectMark,
    MemoryId,
    MemoryIdMark,
    Progress,
    RunIdMark,
)
from ..safe_text import brief
from ..schemas import Schema, schema_of, without_null
from ..security import SecurityIdentity
from .marks import ToolMark

if TYPE_CHECKING:
    from pydantic import TypeAdapter


# --- parameters


class Role(Enum):
    """The source of a parameter's value: the model, or the framework for hidden parameters."""

    MODEL = "model"
    MEMORY_ID = "memory id"
    CONTEXT = "context"
    INJECTED = "injected"
    RUN_ID = "run id"
    IDEMPOTENCY_KEY = "idempotency key"
    CALL_OPTIONS = "call options"
    PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """One parameter of a tool. `default` is `EMPTY` without a default.

    `annotation` is resolved. `admits_none` is True for `| None`, also behind type aliases, and for `Any`. `wanted` is
    the type of an injected bean. `description` comes from the annotation. `alias` is another name for the model.
    """

    name: str
    kind: Any
    annotation: Any
    default: Any
    role: Role = Role.MODEL
    admits_none: bool = False
    wanted: Any = None
    description: str | None = None
    alias: Any = None

    @property
    def has_default(self) -> bool:
        """True if the argument is optional."""
        return self.default is not EMPTY

    @property
    def shown_name(self) -> str:
        """The name in the schema: the alias, or the parameter's own name."""
        return self.name if self.alias is None else str(self.alias)


@dataclass(frozen=True, slots=True)
class Taken:
    """The parameters and the return annotation of a function. `returns` is resolved, `EMPTY` or `Unresolved`."""

    parameters: tuple[ToolParameter, ...]
    returns: Any


def read_parameters(
    function: Callable[..., Any],
    where: str,
    names: Mapping[str, Any],
    problems: list[Problem],
    *,
    bound: bool,
    variables: Mapping[Any, Any] | None = None,
) -> Taken:
    """Read the signature of `function`, without the first parameter if `bound`. Adds mistakes to `problems`.

    `names` are additional names for its annotations, besides the globals of its module. `variables` are the types that
    replace the type variables of a generic base class.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        problems.append(Problem(where, f"the signature cannot be read ({error})", "wrap it in a Python function"))
        return Taken((), EMPTY)
    inner: Any = inspect.unwrap(getattr(function, "func", function))
    inner = getattr(inner, "__func__", inner)
    known = {
        **getattr(inner, "__globals__", {}),
        **dict(_closed_over(inner)),
        **{each.__name__: each for each in getattr(inner, "__type_params__", ())},
        **names,
    }
    declared = list(signature.parameters.values())
    if bound and declared and declared[0].kind in (declared[0].POSITIONAL_ONLY, declared[0].POSITIONAL_OR_KEYWORD):
        if declared[0].annotation is not EMPTY and declared[0].name not in ("self", "cls"):
            fact = f"the first parameter of a method is the object itself, but it is called {declared[0].name!r}"
            problems.append(Problem(where, fact, "add `self` before it, or use @staticmethod"))
        del declared[0]
    annotations = [*(each.annotation for each in declared), signature.return_annotation]
    *resolved, returns = [resolve(each, known) for each in annotations]
    if any(isinstance(each, Unresolved) for each in (*resolved, returns)):
        known |= names_around(inner)
        *resolved, returns = [resolve(each, known) for each in annotations]
    if variables:
        *resolved, returns = [substitute(each, variables) for each in (*resolved, returns)]
    found = [_read(each, annotation, where, problems) for each, annotation in zip(declared, resolved, strict=True)]
    return Taken(tuple(each for each in found if each is not None), returns)


def _read(declared: inspect.Parameter, annotation: Any, where: str, problems: list[Problem]) -> ToolParameter | None:
    name = declared.name
    if declared.kind in (declared.VAR_POSITIONAL, declared.VAR_KEYWORD):
        stars = "*" if declared.kind is declared.VAR_POSITIONAL else "**"
        problems.append(
            Problem(
                where,
                f"{stars}{name} is not supported: a model needs the name and type of each parameter",
                "declare each parameter by name",
            )
        )
    elif annotation is EMPTY:
        fix = f"add one, for example `{name}: str`"
        if name in ("self", "cls"):
            fix = "if this is a method, mark it with @tool, or list its class or an instance"
        problems.append(Problem(where, f"parameter {name!r} has no type annotation", fix))
    elif isinstance(annotation, Unresolved):
        problems.append(
            Problem(
                where,
                f"the annotation {annotation.text!r} of parameter {name!r} cannot be resolved ({annotation.reason})",
                "import or define its names at module level, not under `if TYPE_CHECKING`",
            )
        )
    elif annotation in (MemoryId, Inject):
        example = "Inject[TheBean]" if annotation is Inject else "MemoryId[str]"
        fact = f"parameter {name!r} uses {example.partition('[')[0]} without a type"
        problems.append(Problem(where, fact, f"write `{name}: {example}`"))
    else:
        return _describe_parameter(name, declared.kind, annotation, declared.default)
    return None


def _describe_parameter(name: str, kind: Any, annotation: Any, default: Any) -> ToolParameter:
    annotation = with_lists(annotation)
    taken, optional = unwrapped(annotation), admits_none(annotation)
    bare, metadata = taken.type, taken.metadata
    role, wanted = Role.MODEL, None
    if any(isinstance(each, MemoryIdMark) for each in metadata):
        role = Role.MEMORY_ID
    elif any(isinstance(each, RunIdMark) for each in metadata):
        role = Role.RUN_ID
    elif any(isinstance(each, IdempotencyKeyMark) for each in metadata):
        role = Role.IDEMPOTENCY_KEY
    elif isinstance(bare, type) and issubclass(bare, InvocationContext):
        role = Role.CONTEXT
    elif bare is Progress:
        role = Role.PROGRESS
    elif bare is ChatRequestParameters:
        role = Role.CALL_OPTIONS
    elif any(isinstance(each, InjectMark) for each in metadata):
        role = Role.INJECTED
        others = tuple(takewhile(lambda each: not isinstance(each, InjectMark), metadata))
        wanted = Annotated[(bare, *others)] if others else bare
        wanted = Union[wanted, None] if optional else wanted  # noqa: UP007 - `wanted` is a value
    fields = [each for each in (*metadata, default) if is_field(each)]
    texts = (
        [each for each in metadata if isinstance(each, str)]
        or [each.documentation for each in metadata if isinstance(each, Doc)]
        or [each.description for each in fields if each.description][:1]
    )
    aliases = [each.validation_alias for each in fields if each.validation_alias is not None]
    alias = aliases[0] if aliases else None
    if is_field(default):
        for constraint in default.metadata:
            annotation = Annotated[annotation, constraint]
        if default.is_required():  # `Field(…)` without a default describes the parameter only
            default = EMPTY
    for each in fields:  # Field(default=…), in the annotation or as the default
        default = each if default is EMPTY and not each.is_required() else default
    return ToolParameter(name, kind, annotation, default, role, optional, wanted, "\n".join(texts) or None, alias)


def is_field(metadata: object) -> TypeIs[Any]:
    """Return True for a pydantic `Field(…)`, without importing pydantic."""
    return type(metadata).__name__ == "FieldInfo" and type(metadata).__module__.startswith("pydantic.")


def given_or_default(value: Any) -> Any:
    """Return an argument; for a pydantic field that was not given, its default."""
    return value.get_default(call_default_factory=True) if is_field(value) else value


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


# --- the specification


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
    problems += _identity_problems(visible, where)
    if len(problems) > found:
        return None
    adapter, schema = None, no_parameters()
    if visible and (known := _adapter_and_schema(visible, where, problems)) is not None:
        adapter, made = known
        schema = _parameters_schema(made, visible, docstring.parameters)
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
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        problems.append(
            Problem(where, f"invalid timeout={timeout!r}", "use a number of seconds greater than 0, or None")
        )
    if max_result_chars is not None and not is_count(max_result_chars, 1):
        problems.append(Problem(where, f"invalid max_result_chars={max_result_chars!r}", "use 1 or more, or None"))
    return problems


def _mark_problems(name: str, mark: ToolMark, where: str) -> list[Problem]:
    limits = limit_problems(where, mark.timeout, mark.max_result_chars)
    return [*name_problems(name, where), *limits, *_remembering_problems(mark, where)]


def _remembering_problems(mark: ToolMark, where: str) -> Iterator[Problem]:
    if not mark.may_remember:
        return
    if mark.requires_approval is False:
        yield Problem(where, "may_remember=True has no effect without an approval", "add requires_approval=")
    if mark.not_self:
        fact = "may_remember=True contradicts not_self=True, by which another person must approve each call"
        yield Problem(where, fact, "remove one of them")


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


def _identity_problems(visible: Sequence[ToolParameter], where: str) -> Iterator[Problem]:
    """Yield a problem for each parameter that would let the model say who calls."""
    for each in visible:
        if unwrapped(each.annotation).type is SecurityIdentity:
            fact = f"the model fills parameter {each.name!r}, so it could pass any identity"
            yield Problem(where, fact, f"write `{each.name}: Inject[SecurityIdentity]` to get the caller")


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


_of_plain_data: dict[tuple[tuple[str, str, bool], ...], tuple[TypeAdapter[dict[str, Any]], Schema]] = {}
_MOST_OF_PLAIN_DATA = 1000


def _adapter_and_schema(
    visible: Sequence[ToolParameter], where: str, problems: list[Problem]
) -> tuple[TypeAdapter[dict[str, Any]], Schema] | None:
    """Return the adapter and the schema that pydantic makes of these parameters; None if they have problems.

    Tools with the same parameters of plain types, such as `(city: str)`, share them: to make them takes most of the
    time of a start.
    """
    is_shared = all(each.alias is None and is_plain_data(each.annotation) for each in visible)
    # Annotations as text, because `int | str` and `str | int` are equal.
    key = tuple((each.name, repr(each.annotation), each.has_default) for each in visible) if is_shared else ()
    known = _of_plain_data.get(key)
    if known is None:
        adapter = _adapter(visible, where, problems)
        made = None if adapter is None else _schema(adapter, visible, where, problems)
        if adapter is None or made is None:
            return None
        known = adapter, made
        if is_shared and len(_of_plain_data) < _MOST_OF_PLAIN_DATA:
            _of_plain_data[key] = known
    return known[0], _copy_schema(known[1]) if is_shared else known[1]


def _copy_schema(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _copy_schema(each) for key, each in schema.items()}
    return [_copy_schema(each) for each in schema] if isinstance(schema, list) else schema


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


def _schema(
    adapter: TypeAdapter[Any], visible: Sequence[ToolParameter], where: str, problems: list[Problem]
) -> Schema | None:
    try:
        return schema_of(adapter)
    except Exception as error:  # as above
        culprits = [each for each in visible if not _can_be_validated(each)] or visible
        names = ", ".join(repr(each.name) for each in culprits)
        reason = _reason(error)
        fix = "use a type with a JSON schema, or Inject[…] if it is a bean"
        problems.append(Problem(where, f"cannot create a JSON schema for parameter {names} ({reason})", fix))
        return None


def _parameters_schema(made: Schema, visible: Sequence[ToolParameter], documented: dict[str, str]) -> Schema:
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
    cleaned = inspect.cleandoc(text.replace("\r\n", "\n"))
    if cleaned.isprintable() and not _MORE_THAN_A_SENTENCE.search(cleaned):
        return Docstring(_first_paragraph(cleaned))
    import docstring_parser

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


# Without them, a docstring of one line has no section and no field of any style.
_MORE_THAN_A_SENTENCE = re.compile(r"[:@]")


def _first_paragraph(text: str | None) -> str | None:
    return text.strip().split("\n\n", 1)[0].rstrip() if text and text.strip() else None
