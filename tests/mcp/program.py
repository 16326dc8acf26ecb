"""A program whose tools the command line serves."""

from toolbox import Container, tool


class Adder:
    @tool("Adds")
    def add(self, a: int, b: int = 1) -> int:
        return a + b


container = Container()
