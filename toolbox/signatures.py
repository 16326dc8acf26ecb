"""Reads functions: signatures with resolved annotations, local names of enclosing functions, empty bodies.

Local names of a function are available only while it runs; `local_names` collects them then.
Not here: unwrapping annotations (`type_keys`), the meaning of parameters (`di.beans`, `tools.specification`,
`services.planning`).
"""

from __future__ import annotations

import dis
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, get_args, get_origin

from .type_keys import metadata_of

EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Unresolved:
    """An annotation with a name that cannot be resolved."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: its annotation (resolved, `EMPTY` or `Unresolved`) and its default (or `EMPTY`)."""

    name: str
    annotation: Any
    default: Any
    kind: Any

    @property
    def is_variadic(self) -> bool:
        """Return True for `*args` and `**kwargs`."""
        return self.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @property
    def metadata(self) -> tuple[object, ...]:
        """Return the metadata of `Annotated`, also inside `| None`."""
        return metadata_of(self.annotation)


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function in order, and its return annotation (resolved, `EMPTY` or `Unresolved`)."""

    parameters: tuple[Parameter, ...]
    returns: Any


def read_signature(
    function: Callable[..., Any], known: Mapping[str, Any] | None = None, nearer: Mapping[str, Any] | None = None
) -> Signature:
    """Return the signature of `function`.

    `known` are additional names for annotations. `nearer` are names that take precedence over those of the module,
    for example local names of the enclosing function. For an unbound method, the parameters include `self`.
    """
    plain = inspect.unwrap(function)
    signature = inspect.signature(plain)
    where = getattr(plain, "__func__", plain)
    names = getattr(where, "__globals__", None) or vars(sys.modules.get(where.__module__, typing))
    if nearer:
        names = {**names, **nearer}
    parameters = tuple(
        Parameter(each.name, resolve(each.annotation, names, known), each.default, each.kind)
        for each in signature.parameters.values()
    )
    return Signature(parameters, resolve(signature.return_annotation, names, known))


def resolve(annotation: Any, names: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> Any:
    """Return the annotation with all text in it evaluated, or `Unresolved` if a name is missing."""
    if annotation is EMPTY or isinstance(annotation, type):
        return annotation
    if isinstance(annotation, str) and isinstance(named := names.get(annotation), type):
        return named
    holder = SimpleNamespace(__annotations__={"it": annotation})
    local = {name: value for name, value in (known or {}).items() if name not in names}
    # Evaluation adds `__builtins__` to the names. Names of a module already have it and need no copy.
    namespace = names if isinstance(names, dict) and "__builtins__" in names else dict(names)
    try:
        return typing.get_type_hints(holder, namespace, local, include_extras=True)["it"]
    except Exception as error:  # user annotations may raise any error
        text = annotation if isinstance(annotation, str) else repr(annotation)
        return Unresolved(text, str(error) or type(error).__name__)


def takes(function: object, count: int) -> bool:
    """Return True if `function` accepts `count` positional arguments, or if its signature is unknown."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


# --- bodies


_EMPTY_BODY = frozenset(
    {
        "CALL_INTRINSIC_1",
        "LOAD_CONST",
        "NOP",
        "POP_TOP",
        "RERAISE",
        "RESUME",
        "RETURN_CONST",
        "RETURN_GENERATOR",
        "RETURN_VALUE",
    }
)
_RAISING = frozenset({"CALL", "LOAD_GLOBAL", "PRECALL", "PUSH_NULL", "RAISE_VARARGS"})


def has_body(function: Any) -> bool:
    """Return False for a function that consists of `...`, `pass`, a docstring or `raise NotImplementedError`."""
    code = function.__code__
    done = {each.opname for each in dis.get_instructions(function)}
    if "RAISE_VARARGS" in done and code.co_names == ("NotImplementedError",):
        return not done <= _EMPTY_BODY | _RAISING
    constants = set(map(repr, code.co_consts)) <= set(map(repr, (None, function.__doc__, ...)))
    return not (constants and done <= _EMPTY_BODY)


# --- local names


def local_names(functions: Iterable[Any], frame: FrameType | None) -> dict[str, Any]:
    """Return the local names that the annotations of `functions` use, with their values.

    Text annotations cannot be resolved after the enclosing function returned. The names are looked up in `frame` and
    in the calling frames of the same module.
    """
    local = [each for each in functions if "<locals>" in getattr(each, "__qualname__", "")]
    annotations = [note for each in local for note in getattr(each, "__annotations__", {}).values()]
    wanted = {name for note in annotations for text in _texts_in(note) for name in _names_in(text)}
    modules = [getattr(each, "__globals__", None) for each in local]
    found: dict[str, Any] = {}
    while wanted and frame is not None:
        if any(frame.f_globals is each for each in modules):  # skip frames of other modules
            if frame.f_code.co_name == "<module>":
                break
            here = wanted.intersection(frame.f_locals)  # since 3.13 its keys() are a list
            found |= {name: frame.f_locals[name] for name in here}
            wanted -= here
        frame = frame.f_back
    return found


def names_around(function: Any) -> dict[str, Any]:
    """Return the `local_names` of `function` if its enclosing function still runs on this thread."""
    around = getattr(function, "__qualname__", "").rpartition(".<locals>.")[0]
    frame = sys._getframe(1) if around else None
    while frame is not None and (frame.f_code.co_qualname != around or frame.f_globals is not function.__globals__):
        frame = frame.f_back
    return local_names([function], frame)


def _texts_in(annotation: object) -> Iterator[str]:
    if isinstance(annotation, str):
        yield annotation
    elif isinstance(annotation, typing.ForwardRef):
        yield annotation.__forward_arg__
    elif get_origin(annotation) is not typing.Literal:
        for each in get_args(annotation):
            yield from _texts_in(each)


def _names_in(text: str) -> Iterator[str]:
    try:
        code: CodeType = compile(text, "<annotation>", "eval")
    except SyntaxError:
        return
    yield from code.co_names
    for constant in code.co_consts:  # a nested quoted name
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
