"""Beans of a module with `from __future__ import annotations`, whose types are local to a function that runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic_settings import BaseSettings

from toolbox import (
    Container,
    DemoChatModel,
    Named,
    application_scoped,
    compensate_for,
    produces,
    register_ai_service,
    tool,
)


def test_beans_can_name_types_of_the_running_function() -> None:
    class Mail: ...

    class Limits(BaseSettings):
        size: int = 3

    Primary = Annotated[Mail, Named("primary")]

    @produces(scope="application", name="primary")
    def mail() -> Iterator[Mail]:
        yield Mail()

    @produces(scope="application")
    def boxes(mail: Primary) -> list[Mail]:
        return [mail]

    @application_scoped
    @dataclass
    class Post:
        mail: Primary
        limits: Limits

    with Container().register(mail, boxes, Post) as container:
        post = container.get(Post)
        assert (post.mail, post.limits.size) == (container.get(Mail), 3)
        assert container.get(list[Mail]) == [post.mail]


def test_producers_keep_the_local_names_of_a_function_that_has_returned() -> None:
    def registered() -> tuple[Container, type[object]]:
        class Mail: ...

        class Post:
            def __init__(self, mail: Mail) -> None:
                self.mail = mail

        @produces(scope="application")
        def mail() -> Mail:
            return Mail()

        return Container().register(mail, Post), Post

    container, post = registered()

    with container:
        assert vars(container.get(post))["mail"]


def test_tools_and_compensations_can_name_types_of_the_running_function() -> None:
    @dataclass
    class Item:
        name: str

    def add(item: Item) -> str:
        return item.name

    class Basket:
        @tool
        def put(self, item: Item) -> str:
            return item.name

        @compensate_for(put)
        def take(self, item: Item) -> None: ...

    @register_ai_service(tools=(Basket, add), compensate_on_tool_errors=True)
    class Shop(Protocol):
        def sell(self, text: str) -> str: ...

    with Container(models={"default": DemoChatModel()}).register(Shop) as container:
        assert container.get(Shop)
