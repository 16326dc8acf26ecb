"""Problems of client declarations are reported together at startup, with fixes."""

import abc
from collections.abc import AsyncIterator
from typing import Annotated, Any, Protocol, TypeVar

import pytest
from pydantic import BaseModel

from toolbox import rest
from toolbox.context import InvocationContext
from toolbox.errors import IllegalConfigurationError, Problem
from toolbox.parameters import Inject, MemoryId

pytestmark = pytest.mark.anyio


class Thing(BaseModel):
    name: str


def problems_of(cls: type[Any], **settings: Any) -> list[Problem]:
    with pytest.raises(IllegalConfigurationError) as caught:
        rest.create_rest_client(cls, **{"url": "http://127.0.0.1:1", **settings})
    return list(caught.value.problems)


def test_the_decorator_returns_the_same_class_and_subclasses_are_not_clients() -> None:
    class Plain(Protocol):
        @rest.get("/x")
        async def find(self) -> str: ...

    marked = rest.register_rest_client(config_key="plain")(Plain)

    assert marked is Plain
    assert rest.register_rest_client(Plain) is Plain


def test_the_problem_of_a_missing_url_lists_the_ways_to_set_one() -> None:
    @rest.register_rest_client(config_key="open-meteo.v1")
    class Weather(Protocol):
        @rest.get("/x")
        async def find(self) -> str: ...

    [problem] = problems_of(Weather, url=None)

    assert problem.where == "Weather"
    assert "TOOLBOX_REST__OPEN_METEO_V1__URL" in problem.fix
    assert "rest_settings(" in problem.fix


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "example.com", "http://", "http://host/x?key=1", "http://host#x", "http://host:port", "http://["),
        *("http://ho st/x", "http://host\\x", "http://host/a b", "http://host/{tenant}"),
    ],
)
def test_invalid_base_urls_are_problems(url) -> None:
    @rest.register_rest_client
    class Weather(Protocol):
        @rest.get("/x")
        async def find(self) -> str: ...

    [problem] = problems_of(Weather, url=url)

    assert "URL" in problem.what


@pytest.mark.parametrize("verb", [rest.get, rest.head, rest.delete])
def test_bodies_of_get_head_and_delete_are_problems(verb) -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @verb("/x")
        async def send(self, thing: Thing) -> None: ...

    [problem] = problems_of(Api)

    assert problem.where == "Api.send"
    assert "thing" in problem.what


def test_all_problems_of_a_class_are_reported_together() -> None:
    @rest.register_rest_client(path="/v1")
    class Api(Protocol):
        @rest.get("/a/{missing}")
        async def a(self) -> str: ...

        @rest.get("/b")
        async def b(self, name: Annotated[str, rest.Path()]) -> str: ...

        @rest.get("/c")
        async def c(self, plain) -> str: ...

        @rest.get("/d")
        async def d(self): ...

        @rest.get("/e")
        async def e(self, *names: str, **more: str) -> str: ...

        async def f(self) -> str: ...

        @rest.get("/g")
        @rest.post("/g")
        async def g(self) -> str: ...

        @rest.post("/h")
        async def h(self, one: Thing, two: Thing) -> str: ...

        @rest.post("/i")
        async def i(self, one: Thing, two: Annotated[str, rest.Form()]) -> str: ...

        @rest.get("/j?x=1")
        async def j(self) -> str: ...

        @rest.get("/../k")
        async def k(self) -> str: ...

        @rest.get("/l")
        async def l(self, host: Annotated[str, rest.Header("Host")]) -> str: ...  # noqa: E743

        @rest.get("/m")
        async def m(self, tenant: Annotated[str, rest.Header("X Tenant")]) -> str: ...

        @rest.get("/n/{names}")
        async def n(self, names: list[str]) -> str: ...

        @rest.get("/o")
        async def o(self) -> "Nowhere": ...  # noqa: F821

        @rest.get("/p")
        async def p(self) -> AsyncIterator[str]: ...

        @rest.head("/q")
        async def q(self) -> Thing: ...

        @rest.get("/r")
        async def r(self) -> object.__init__.__class__: ...

        @rest.get("/s/{x")
        async def s(self) -> str: ...

        @rest.get("/t")
        @staticmethod
        def t() -> str: ...

        @rest.get("/u")
        async def u(self, things: Annotated[list[Thing], rest.Query()]) -> str: ...

        @rest.get("/v")
        async def v(self, data: Annotated[bytes, rest.Query()]) -> str: ...

    problems = problems_of(Api, url="")

    wheres = [problem.where.removeprefix("Api.") for problem in problems]
    assert sorted(set(wheres)) == sorted([*"abcdefghijklmnopqrstuv", "Api"])
    text = str(IllegalConfigurationError(problems))
    for each in problems:
        assert each.what in text
        assert each.fix


def test_the_fix_of_a_missing_path_parameter_names_it() -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("/orders")
        async def order(self, number: Annotated[int, rest.Path("id")]) -> str: ...

    [problem] = problems_of(Api)

    assert problem.what == "the path parameter id is missing in the path"
    assert problem.fix == "write {id} into the path"


def test_parameters_that_the_library_fills_are_not_sent(server) -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("/x")
        def find(
            self, memory: MemoryId[str], context: InvocationContext | None = None, thing: Inject[Thing] | None = None
        ) -> str: ...

    server.answer("ok")
    api = rest.create_rest_client(Api, url=server.url)

    assert api.find("m1") == "ok"
    assert server.last.query == [("memory", "m1")]


def test_concrete_methods_of_an_abstract_class_stay(server) -> None:
    @rest.register_rest_client
    class Api(abc.ABC):
        greeting = "hello"

        @rest.get("/{name}")
        @abc.abstractmethod
        def find(self, name: str) -> str: ...

        def hello(self) -> str:
            return self.find(self.greeting)

    server.answer("ok")
    api = rest.create_rest_client(Api, url=server.url)

    assert api.hello() == "ok"
    assert isinstance(api, Api)
    assert server.last.path == "/hello"


def test_methods_and_fixed_values_are_inherited(server) -> None:
    @rest.client_query_param("key", "k")
    class Base(Protocol):
        @rest.get("/a")
        def a(self) -> str: ...

        @rest.get("/b")
        def b(self) -> str: ...

    @rest.register_rest_client
    @rest.client_query_param("version", 2)
    class Api(Base, Protocol):
        @rest.get("/other")
        def b(self) -> str: ...

    server.answer("ok")
    api = rest.create_rest_client(Api, url=server.url)

    api.a()
    assert server.last.target == "/a?key=k&version=2"
    api.b()
    assert server.last.path == "/other"


@pytest.mark.parametrize(
    ("base", "of_class", "of_method", "path"),
    [
        ("", "", "", ""),
        ("/api", "", "", "/api"),
        ("/api/", "v1/", "x", "/api/v1/x"),
        ("/api", "/v1", "", "/api/v1"),
        ("", "", "/", "/"),
        ("", "/v1", "/x/", "/v1/x/"),
    ],
)
def test_paths_are_joined_with_one_slash(server, base, of_class, of_method, path) -> None:
    @rest.register_rest_client(path=of_class)
    class Api(Protocol):
        @rest.get(of_method)
        def find(self) -> None: ...

    rest.create_rest_client(Api, url=server.url + base).find()

    assert server.last.path == (path or "/")


def test_a_class_path_may_name_parameters(server) -> None:
    @rest.register_rest_client(path="/{tenant}/v1")
    class Api(Protocol):
        @rest.get("/x")
        def find(self, tenant: str) -> None: ...

    rest.create_rest_client(Api, url=server.url).find("a b")

    assert server.last.path == "/a%20b/v1/x"


def test_the_url_of_the_decorator_is_used_without_a_setting(server) -> None:
    @rest.register_rest_client(base_url=server.url)
    class Api(Protocol):
        @rest.get("/x")
        def find(self) -> None: ...

    rest.create_rest_client(Api).find()

    assert server.last.path == "/x"


def test_settings_that_cannot_work_are_problems() -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("/x")
        def find(self) -> str: ...

    assert "Host" in problems_of(Api, headers={"Host": "evil"})[0].what
    assert "control character" in problems_of(Api, bearer_token="token\n")[0].what
    assert "which does not exist" in problems_of(Api, verify="/nowhere/ca.pem")[0].what
    assert "proxy" in problems_of(Api, proxy="ftp://x")[0].what
    assert "certificate" in problems_of(Api, verify=__file__)[0].what
    assert "PEM" in problems_of(Api, client_certificate=__file__)[0].fix


def test_constants_that_cannot_be_sent_are_problems() -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("/a")
        @rest.client_header_param("X-Note", "a\r\nHost: b")
        async def a(self) -> str: ...

        @rest.get("/b")
        @rest.client_cookie_param("session", "a; b")
        async def b(self) -> str: ...

        @rest.get("/c")
        @rest.client_query_param("like", Thing(name="x"))
        async def c(self) -> str: ...

    whats = {problem.where: problem.what for problem in problems_of(Api)}

    assert list(whats) == ["Api.a", "Api.b", "Api.c"]
    assert "X-Note" in whats["Api.a"]
    assert "session" in whats["Api.b"]
    assert "like" in whats["Api.c"]


def test_whole_urls_as_paths_and_timeouts_of_zero_are_problems() -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("https://elsewhere.example/x")
        async def a(self) -> str: ...

        @rest.get("/b", timeout=0)
        async def b(self) -> str: ...

    a, b = problems_of(Api)

    assert "whole URL" in a.what
    assert "base_url" in a.fix
    assert "0 seconds" in b.what


def test_verbs_on_static_and_class_methods_are_problems() -> None:
    @rest.register_rest_client
    class Api(Protocol):
        @staticmethod
        @rest.get("/a")
        async def a() -> str: ...

        @rest.get("/b")
        @staticmethod
        async def b() -> str: ...

        @property
        @rest.get("/c")
        def c(self) -> str: ...

    assert [(each.where, "instance" in each.what) for each in problems_of(Api)] == [
        ("Api.a", True),
        ("Api.b", True),
        ("Api.c", True),
    ]


def test_missing_parentheses_and_option_names_raise_at_the_decorator() -> None:
    with pytest.raises(TypeError, match=r"@rest\.get\('/orders'\)"):

        @rest.get  # type: ignore[arg-type]  # the mistake
        def orders() -> str: ...

    with pytest.raises(TypeError, match="config_key='shop'"):
        rest.register_rest_client("shop")  # type: ignore[call-overload]  # the mistake


def test_without_a_container_a_collaborator_that_needs_something_is_a_problem() -> None:
    class Key:
        def __init__(self, secret: str) -> None:
            self.secret = secret

        def __call__(self) -> str:
            return self.secret

    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("/x")
        @rest.client_header_param("X-Key", Key)
        async def find(self) -> str: ...

    [problem] = problems_of(Api)

    assert "Key" in problem.what
    assert "container" in problem.fix


def test_type_arguments_of_a_generic_interface_are_filled_in(server) -> None:
    T = TypeVar("T")

    class Crud(Protocol[T]):
        @rest.get("/{key}")
        def find(self, key: int) -> list[T]: ...

        @rest.post("")
        def create(self, item: T) -> T: ...

    @rest.register_rest_client(path="/things")
    class Things(Crud[Thing], Protocol): ...

    things = rest.create_rest_client(Things, url=server.url)

    server.answer([{"name": "tea"}])
    assert things.find(1) == [Thing(name="tea")]
    server.answer({"name": "tea"})
    assert things.create(Thing(name="tea")) == Thing(name="tea")
    assert (server.last.path, server.last.json) == ("/things", {"name": "tea"})


async def test_a_signature_written_as_text_is_understood_inside_a_function(server) -> None:
    class Local(BaseModel):
        n: int

    @rest.register_rest_client
    class Api(Protocol):
        @rest.get("/x")
        async def find(self) -> "list[Local]": ...

    server.answer([{"n": 1}])

    assert await rest.create_rest_client(Api, url=server.url).find() == [Local(n=1)]
