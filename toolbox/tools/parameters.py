"""Reads the parameters of a tool: which ones the model fills, which ones are hidden, and their types and defaults.

Not here: resolving annotations (`toolbox.introspection`), the JSON schema (`specification`), decoding values (`codec`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Annotated, Any, Union

from typing_extensions import Doc, TypeIs

from ..chat import ChatRequestParameters
from ..context import (
    IdempotencyKeyMark,
    Inject,
    InjectMark,
    InvocationContext,
    MemoryId,
    MemoryIdMark,
    Progress,
    RunIdMark,
)
from ..errors import Problem
from ..introspection import EMPTY, Unresolved, admits_none, names_around, resolve, substitute, unwrapped, with_lists


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
            fix = "if this is a method, list its class or an instance instead of the function"
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
        return _described(name, declared.kind, annotation, declared.default)
    return None


def _described(name: str, kind: Any, annotation: Any, default: Any) -> ToolParameter:
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


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
