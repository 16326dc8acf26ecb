"""An MCP server over stdio with the newer protocol whose tools ask the user before they answer."""

from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import (
    CallToolResult,
    CreateMessageRequest,
    ElicitRequest,
    ElicitRequestURLParams,
    InputRequiredResult,
    TextContent,
)
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


@server.tool()
def sign_in(url: str, context: Context) -> CallToolResult | InputRequiredResult:
    """Asks the user to open an address."""
    answers = context.input_responses
    if answers is not None:
        actions = ", ".join(f"{key}: {each.model_dump()['action']}" for key, each in sorted(answers.items()))
        return CallToolResult(content=[TextContent(type="text", text=actions)])
    params = ElicitRequestURLParams(message="Sign in", url=url, elicitation_id="1")
    return InputRequiredResult(input_requests={"a": ElicitRequest(params=params)}, request_state="asked")


if __name__ == "__main__":
    server.run("stdio")
