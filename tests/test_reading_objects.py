"""Annotations, local names and empty bodies are read in the same way in all packages."""

import functools
import inspect
import json
import typing
from collections.abc import Callable
from typing import Annotated, Any, NewType, Optional, Protocol

import pytest
from typing_extensions import TypeAliasType

from toolbox import Container, DemoChatModel, application_scoped, produces, register_ai_service, rest
from toolbox.introspection import admits_none, declared_signature, has_body, unwrapped
from toolbox.services.declaration import method_names


def dots(self: Any) -> str: ...
def passes(self: Any) -> None:
    pass


def documented(self: Any) -> None:
    """Say hello."""


def raising(self: Any) -> str:
    raise NotImplementedError


def raising_with_text(self: Any) -> str:
    """Say hello."""
    raise NotImplementedError("implemented by the library")


async def dots_async(self: Any) -> str: ...
async def raising_async(self: Any) -> str:
    raise NotImplementedError


def answering(self: Any) -> str:
    return "hello"


def failing(self: Any) -> str:
    raise LookupError("hello")


def raising_later(self: Any) -> str:
    print("hello")
    raise NotImplementedError


async def answering_async(self: Any) -> str:
    return "hello"


EMPTY_BODIES = [dots, passes, documented, raising, raising_with_text, dots_async, raising_async]
BODIES = [answering, failing, raising_later, answering_async]


def class_with(method: Callable[..., Any]) -> Any:
    namespace = {"__module__": __name__, "method": method}
    return type(Protocol)("Interface", (Protocol,), namespace)  # type: ignore[arg-type]  # a Protocol, made by hand


@pytest.mark.parametrize("method", EMPTY_BODIES, ids=lambda each: each.__name__)
def test_services_and_rest_clients_agree_which_methods_have_no_body(method: Callable[..., Any]) -> None:
    client = rest.register_rest_client(base_url="http://127.0.0.1:1")(class_with(method))

    assert not has_body(method)
    assert method_names(class_with(method)) == ["method"]
    [problem] = Container().register(client).check()
    assert problem.what == "missing HTTP verb"


@pytest.mark.parametrize("method", BODIES, ids=lambda each: each.__name__)
def test_services_and_rest_clients_agree_which_methods_have_a_body(method: Callable[..., Any]) -> None:
    client = rest.register_rest_client(base_url="http://127.0.0.1:1")(class_with(method))

    assert has_body(method)
    assert Container().register(client).check() == []
    assert method_names(class_with(method)) == []


Count = NewType("Count", int)
Maybe = TypeAliasType("Maybe", Annotated[int | None, "alias"])


@pytest.mark.parametrize(
    ("annotation", "inner", "metadata", "optional"),
    [
        (int, int, (), False),
        (int | None, int, (), True),
        (Optional[int], int, (), True),  # noqa: UP045 - the old spelling is the point
        (int | str | None, int | str, (), True),
        (Annotated[int, "a"], int, ("a",), False),
        (Optional[Annotated[int, "a"]], int, ("a",), True),  # noqa: UP045 - pyright does not know `Annotated | None` as a value
        (Annotated[Optional[Annotated[int, "a"]], "b"], int, ("a", "b"), True),  # noqa: UP045 - pyright does not know `Annotated | None` as a value
        (Annotated[Maybe, "b"], int, ("alias", "b"), True),
        (typing.List[int] | None, list[int], (), True),  # noqa: UP006 - the old spelling is the point
        (Any, Any, (), False),
    ],
    ids=repr,
)
def test_annotations_are_unwrapped(annotation: Any, inner: Any, metadata: tuple[object, ...], optional: bool) -> None:
    taken = unwrapped(annotation)

    assert (taken.type, taken.metadata, taken.optional) == (inner, metadata, optional)


@pytest.mark.parametrize(
    ("annotation", "admits"),
    [(int, False), (Any, True), (object, True), (None, True), (int | None, True), (Count, False), (Maybe, True)],
    ids=repr,
)
def test_which_types_admit_none(annotation: Any, admits: bool) -> None:
    assert admits_none(annotation) is admits


def test_a_rest_client_and_a_service_find_local_names_of_outer_functions() -> None:
    class Answer:
        pass

    def make() -> tuple[Any, Any]:
        class Client(Protocol):
            @rest.get("/x")
            def find(self) -> "Annotated[list[Answer], 'found']": ...

        class Service(Protocol):
            def ask(self, text: str) -> "str | Answer": ...

        return rest.register_rest_client(base_url="http://127.0.0.1:1")(Client), register_ai_service(Service)

    client, service = make()
    problems = Container(models={"default": DemoChatModel()}).register(client, service).check()

    assert [each for each in problems if "resolved" in each.what] == []


def many(a: int, /, b: "str" = "b", *rest: float, c: bool, d: None = None, **more: Any) -> "list[int]": ...
def positional(a, b=1, /): ...  # type: ignore[no-untyped-def]
def keywords(*, a, b: int = 2, c): ...  # type: ignore[no-untyped-def]
def variadic(*rest: int, **more: str) -> None: ...
def all_defaults(a: int = 1, *, b: int = 2) -> None: ...
async def awaited(a: int) -> str: ...
@functools.wraps(many)
def wrapping(*args: Any, **kwargs: Any) -> Any: ...


@application_scoped
class WithConstructor:
    def __init__(self, a: int, *, b: str = "") -> None: ...


@produces(scope="application")
def producing(a: int, b: str = "b") -> int: ...
def declaring(*args: Any) -> None: ...


declaring.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect
    [inspect.Parameter("b", inspect.Parameter.KEYWORD_ONLY, annotation=int)]
)


@pytest.mark.parametrize(
    "function",
    [
        *(many, positional, keywords, variadic, all_defaults, awaited, wrapping, producing, declaring),
        *(lambda: None, lambda a, *b: a, WithConstructor.__init__, WithConstructor, WithConstructor(1).__init__),
        *(functools.partial(many, 1), functools.partialmethod(many, 1).__get__(1, int), len, json.dumps, dict.get),
    ],
    ids=lambda function: getattr(function, "__qualname__", "partial"),
)
def test_signatures_are_read_as_inspect_reads_them(function: Callable[..., Any]) -> None:
    expected = inspect.signature(function)

    parameters, returns = declared_signature(function)

    assert [(each.name, each.annotation, each.default, each.kind) for each in parameters] == [
        (each.name, each.annotation, each.default, each.kind) for each in expected.parameters.values()
    ]
    assert returns is expected.return_annotation or returns == expected.return_annotation


def test_functions_without_a_signature_are_refused_as_inspect_does() -> None:
    with pytest.raises(ValueError, match="signature"):
        declared_signature(type)
    with pytest.raises(TypeError):
        declared_signature(3)  # type: ignore[arg-type]
