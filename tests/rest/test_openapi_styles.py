"""Parameters of an OpenAPI document are sent in the style that it names, as RFC 6570 expands them."""

import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from toolbox import ToolExecutionRequest
from toolbox.errors import IllegalConfigurationError, RestArgumentError, ToolArgumentsError
from toolbox.openapi import tools_from_openapi

pytestmark = pytest.mark.anyio

LIST, OBJECT, TEXT = ["red", "a,b", ""], {"R": 100, "G": "x/y;=", "B": ""}, "blue sky"


def document(place: str, path: str = "/c/{p}", **parameter: Any) -> dict[str, Any]:
    """A document with one operation, whose parameter `p` accepts anything."""
    names = {"R": {}, "G": {}, "B": {}}
    given = {"name": "p", "in": place, "required": place == "path", "schema": {"properties": names}, **parameter}
    operation = {"operationId": "op", "parameters": [given]}
    return {"openapi": "3.1.0", "info": {"title": "x", "version": "1"}, "paths": {path: {"get": operation}}}


async def call(source: dict[str, Any], url: str, value: object) -> object:
    [executor] = tools_from_openapi(source, url).values()
    return await executor(ToolExecutionRequest("1", "op", json.dumps({"p": value})), None)


@pytest.mark.parametrize(
    ("style", "explode", "value", "sent"),
    [
        ("simple", False, TEXT, "blue%20sky"),
        ("simple", False, LIST, "red,a%2Cb,"),
        ("simple", True, LIST, "red,a%2Cb,"),
        ("simple", False, {"R": 100, "B": True}, "R,100,B,true"),
        ("simple", True, {"R": 100, "B": True}, "R=100,B=true"),
        ("label", False, TEXT, ".blue%20sky"),
        ("label", True, TEXT, ".blue%20sky"),
        ("label", False, LIST, ".red,a%2Cb,"),
        ("label", True, LIST, ".red.a%2Cb."),
        ("label", False, {"R": 100, "G": "x;="}, ".R,100,G,x%3B%3D"),
        ("label", True, {"R": 100, "G": "x;=", "B": ""}, ".R=100.G=x%3B%3D.B="),
        ("matrix", False, TEXT, ";p=blue%20sky"),
        ("matrix", True, TEXT, ";p=blue%20sky"),
        ("matrix", False, "", ";p"),
        ("matrix", False, "..", ";p=.."),
        ("matrix", False, LIST, ";p=red,a%2Cb,"),
        ("matrix", True, LIST, ";p=red;p=a%2Cb;p"),
        ("matrix", False, {"R": 100, "G": "x;="}, ";p=R,100,G,x%3B%3D"),
        ("matrix", True, {"R": 100, "G": "x;=", "B": ""}, ";R=100;G=x%3B%3D;B"),
        ("matrix", True, [None, 1.5, False], ";p=1.5;p=false"),
        ("matrix", True, {"R": None, "G": 1}, ";G=1"),
    ],
)
async def test_path_parameters_are_sent_in_their_style(server, style, explode, value, sent) -> None:
    await call(document("path", style=style, explode=explode), server.url, value)

    assert server.last.target == f"/c/{sent}"


async def test_the_default_of_explode_is_false_in_paths(server) -> None:
    for style, sent in (("label", ".a,b"), ("matrix", ";p=a,b"), ("simple", "a,b")):
        await call(document("path", style=style), server.url, ["a", "b"])

        assert server.last.target == f"/c/{sent}"


async def test_a_label_can_follow_other_text(server) -> None:
    await call(document("path", "/report{p}", style="label"), server.url, "json")

    assert server.last.target == "/report.json"


async def test_the_name_of_a_matrix_parameter_is_encoded(server) -> None:
    source = document("path", "/c/{a;b=}", name="a;b=", style="matrix")
    [executor] = tools_from_openapi(source, server.url).values()

    await executor(ToolExecutionRequest("1", "op", '{"a_b": 1}'), None)

    assert server.last.target == "/c/;a%3Bb%3D=1"


@pytest.mark.parametrize(
    ("style", "explode", "value"),
    [
        ("label", False, ""),
        ("label", False, "."),
        ("label", True, ["", ""]),
        ("label", False, "a/../b"),
        ("matrix", True, ["a", "b/c"]),
        ("matrix", True, {"R": "..\\.."}),
        ("label", False, []),
        ("matrix", False, {}),
        ("simple", False, [None]),
    ],
)
async def test_a_value_that_would_change_the_path_is_not_sent(server, style, explode, value) -> None:
    with pytest.raises(RestArgumentError):
        await call(document("path", style=style, explode=explode), server.url, value)

    assert server.received == []


@pytest.mark.parametrize(
    ("style", "explode", "value", "sent"),
    [
        ("form", True, LIST, "p=red&p=a%2Cb&p="),
        ("form", False, LIST, "p=red,a%2Cb,"),
        ("form", True, OBJECT, "R=100&G=x%2Fy%3B%3D&B="),
        ("form", False, OBJECT, "p=R,100,G,x%2Fy%3B%3D,B,"),
        ("form", False, TEXT, "p=blue%20sky"),
        ("spaceDelimited", False, ["a", "b|c"], "p=a%20b%7Cc"),
        ("spaceDelimited", False, {"R": 1, "G": 2}, "p=R%201%20G%202"),
        ("pipeDelimited", False, ["a", "b"], "p=a%7Cb"),
        ("pipeDelimited", False, {"R": 1, "G": 2}, "p=R%7C1%7CG%7C2"),
        ("pipeDelimited", True, ["a", "b"], "p=a&p=b"),
        ("deepObject", True, {"R": 1, "G": ["a", "b"]}, "p%5BR%5D=1&p%5BG%5D=a&p%5BG%5D=b"),
        ("form", False, [], ""),
    ],
)
async def test_query_parameters_are_sent_in_their_style(server, style, explode, value, sent) -> None:
    await call(document("query", "/c", style=style, explode=explode), server.url, value)

    assert urlsplit(server.last.target).query == sent


@pytest.mark.parametrize(
    ("explode", "value", "sent"),
    [(False, ["a", "b"], "a,b"), (False, {"R": 1, "G": 2}, "R,1,G,2"), (True, {"R": 1, "G": 2}, "R=1,G=2")],
)
async def test_headers_are_sent_in_the_simple_style(server, explode, value, sent) -> None:
    await call(document("header", "/c", style="simple", explode=explode), server.url, value)

    assert server.last.header("p") == sent


async def test_what_a_cookie_cannot_hold_is_not_sent(server) -> None:
    with pytest.raises(ToolArgumentsError, match="an object cannot be sent in a cookie"):
        await call(document("cookie", "/c"), server.url, {"R": 1})
    with pytest.raises(RestArgumentError, match="p cannot be sent"):
        await call(document("cookie", "/c"), server.url, ["a", "b"])

    assert server.received == []


@pytest.mark.parametrize("place", ["path", "query", "header", "cookie"])
@pytest.mark.parametrize("style", ["Label", "deepobject", "space", "", None])
def test_unknown_styles_are_problems(place, style) -> None:
    for_other_places = {"path": "form", "query": "matrix", "header": "form", "cookie": "simple"}
    source = document(
        place, "/c/{p}" if place == "path" else "/c", style=for_other_places[place] if style is None else style
    )

    with pytest.raises(IllegalConfigurationError) as caught:
        tools_from_openapi(source, "https://shop.example")

    [problem] = caught.value.problems
    assert problem.where.startswith("GET /c")
    assert "unknown style" in problem.what
    assert f"the {place} parameter 'p'" in problem.what
    assert problem.fix.startswith("use one of: ")


def test_the_style_of_an_operation_that_is_left_out_does_not_matter() -> None:
    source = document("query", "/c", style="sideways")
    source["paths"]["/good"] = {"get": {"operationId": "good"}}

    assert len(tools_from_openapi(source, "https://shop.example", include=["good"])) == 1
