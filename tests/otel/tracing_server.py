"""An MCP server over stdio whose tool tells the span in which it is called."""

import asyncio

from opentelemetry import trace

from toolbox import Container, tool
from toolbox.mcp import serve_stdio


@tool
def trace_of_call() -> str:
    """Tells the trace and the span."""
    here = trace.get_current_span().get_span_context()
    return f"{here.trace_id:032x}-{here.span_id:016x}"


if __name__ == "__main__":
    asyncio.run(serve_stdio(Container(), [trace_of_call]))
