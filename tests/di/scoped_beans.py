"""Beans of the tests of scopes."""

from toolbox import (
    Container,
    application_scoped,
    call_scoped,
    dependent,
    request_scoped,
)


@application_scoped
class Pool:
    pass


@request_scoped
class Basket:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool


@call_scoped
class Transaction:
    def __init__(self, basket: Basket) -> None:
        self.basket = basket


@dependent
class Line:
    def __init__(self, basket: Basket) -> None:
        self.basket = basket


class Unmarked:
    pass


def container() -> Container:
    return Container().register(Pool, Basket, Transaction, Line, Unmarked)
