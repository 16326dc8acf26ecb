"""Parameters that are the fields of one JSON body."""

from datetime import date
from enum import Enum
from typing import Annotated, Any, Protocol

import pytest
from pydantic import BaseModel, Field, SecretStr

from toolbox import rest
from toolbox.errors import IllegalConfigurationError, RestArgumentError
from toolbox.rest.annotations import PlaceMark

pytestmark = pytest.mark.anyio


class Size(Enum):
    LARGE = "large"


class Address(BaseModel):
    town: str = Field(alias="city")


class Orders(Protocol):
    @rest.post("/orders/{number}")
    async def place(
        self,
        number: int,
        dish: Annotated[str, rest.BodyField()],
        size: Annotated[Size, rest.BodyField("orderSize")] = Size.LARGE,
        note: Annotated[str | None, rest.BodyField()] = None,
        tip: Annotated[int | None, rest.BodyField()] = 5,
        q: str | None = None,
    ) -> None: ...

    @rest.put("/address")
    async def move(
        self, to: Annotated[Address, rest.BodyField()], days: Annotated[list[date], rest.BodyField()]
    ) -> None: ...

    @rest.patch("/all")
    async def change(self, note: Annotated[str | None, rest.BodyField] = None) -> None: ...

    @rest.post("/login")
    async def login(
        self,
        password: Annotated[SecretStr, rest.BodyField()],
        media_type: Annotated[str, rest.Header("Content-Type")] = "application/x-json",
    ) -> None: ...


def orders(server: Any) -> Orders:
    return rest.create_rest_client(Orders, url=server.url)


async def test_the_parameters_are_the_fields_of_one_object(server) -> None:
    await orders(server).place(7, "soup", q="x")

    assert server.last.json == {"dish": "soup", "orderSize": "large", "tip": 5}
    assert (server.last.path, server.last.query) == ("/orders/7", [("q", "x")])
    assert server.last.header("Content-Type") == "application/json"


async def test_none_is_left_out_if_it_is_the_default_and_else_null(server) -> None:
    await orders(server).place(7, "soup", note=None, tip=None)

    assert server.last.json == {"dish": "soup", "orderSize": "large", "tip": None}


async def test_values_are_written_as_in_a_model(server) -> None:
    await orders(server).move(Address(city="Rome"), [date(2026, 1, 2)])

    assert server.last.json == {"to": {"city": "Rome"}, "days": ["2026-01-02"]}


async def test_a_body_whose_fields_are_all_left_out_is_an_empty_object(server) -> None:
    await orders(server).change()

    assert server.last.json == {}


async def test_secrets_are_sent_and_a_header_sets_the_media_type(server) -> None:
    await orders(server).login(SecretStr("s3cret"))

    assert server.last.json == {"password": "s3cret"}
    assert server.last.header("Content-Type") == "application/x-json"


async def test_a_value_of_another_type_is_refused_before_anything_is_sent(server) -> None:
    with pytest.raises(RestArgumentError, match="days cannot be sent"):
        await orders(server).move(Address(city="Rome"), ["tomorrow"])  # type: ignore[list-item]

    assert server.received == []


@pytest.mark.parametrize(
    ("verb", "mark", "other", "what"),
    [
        (rest.post, rest.BodyField(), rest.BodyField("a"), "more than one parameter is the field 'a' of the body"),
        (rest.post, rest.BodyField(), rest.Body(), "b is the body, but the method has fields of a body too"),
        (rest.post, rest.BodyField(), rest.Form(), "the method has fields of a JSON body and form fields"),
        (rest.get, rest.BodyField(), rest.Query(), "a would be the body of a GET request, which cannot have one"),
        (rest.delete, rest.BodyField(), rest.Query(), "a would be the body of a DELETE request"),
    ],
)
def test_what_a_body_cannot_have_is_a_problem(verb: Any, mark: PlaceMark, other: PlaceMark, what: str) -> None:
    class Wrong(Protocol):
        @verb("/x")
        def send(self, a: Annotated[str, mark], b: Annotated[str, other]) -> None: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        rest.create_rest_client(Wrong, url="http://127.0.0.1:1")

    assert [what in each.what for each in raised.value.problems] == [True]
