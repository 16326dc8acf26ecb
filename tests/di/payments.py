"""An interface and its implementations, for the tests of injection."""

from abc import ABC, abstractmethod
from typing import Protocol

from toolbox import produces


class Payments(Protocol):
    def pay(self, amount: int) -> str: ...


class CardPayments(Payments):
    def pay(self, amount: int) -> str:
        return f"card {amount}"


class LookAlike:
    def pay(self, amount: int) -> str:
        return f"look-alike {amount}"


class Shape(ABC):
    @abstractmethod
    def area(self) -> int: ...


class Square(Shape):
    def area(self) -> int:
        return 4


@produces(scope="application", name="card")
def named_card() -> Payments:
    return CardPayments()


class User:
    pass


class Order:
    pass


class FromProtocol(Payments):
    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def pay(self, amount: int) -> str:
        return ""


class Heir(FromProtocol):
    pass
