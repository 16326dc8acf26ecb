"""A program for `toolbox mcp` that prints text at import, at creation and in its tool."""

from toolbox import Container, application_scoped, tool

print("loaded")


@application_scoped
class Adder:
    def __init__(self) -> None:
        print("made")

    @tool("Adds")
    def add(self, a: int, b: int = 1) -> int:
        print("called")
        return a + b


class Doubler(Adder):
    def add(self, a: int, b: int = 1) -> int:
        return 2 * super().add(a, b)


@tool
def lonely(a: int) -> int:
    return a


adder = Adder()
container = Container()
