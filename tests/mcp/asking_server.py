"""An MCP server over stdio with the newer protocol whose tools ask the user before they answer."""

from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import CallToolResult, CreateMessageRequest, InputRequiredResult
from pydantic import BaseModel

server = MCPServer("asking")


class Seats(BaseModel):
    seats: int


class Sure(BaseModel):
    sure: bool


def how_many(dish: str) -> Elicit[Seats]:
    return Elicit(f"How many portions of {dish}?", Seats)


def sure(dish: str, seats: Annotated[Seats, Resolve(how_many)]) -> Any:
    return Elicit(f"Really {seats.seats}?", Sure) if seats.seats > 10 else Sure(sure=True)


@server.tool()
def order(dish: str, seats: Annotated[Seats, Resolve(how_many)], really: Annotated[Sure, Resolve(sure)]) -> str:
    """Orders a dish."""
    return f"{seats.seats} x {dish}" if really.sure else "nothing"


@server.tool()
def sample() -> CallToolResult | InputRequiredResult:
    """Asks for a deprecated feature."""
    request = CreateMessageRequest.model_validate(
        {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
    )
    return InputRequiredResult(input_requests={"a": request})


if __name__ == "__main__":
    server.run("stdio")
