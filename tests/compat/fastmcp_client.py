"""Uses an MCP server with the client of fastmcp, and prints what it got as JSON. Argument: the URL, or a script."""

import asyncio
import json
import sys
from typing import Any


async def main() -> None:
    from fastmcp import Client  # type: ignore[import-not-found]  # in a separate environment

    progress: list[Any] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append([done, total])

    async with Client(sys.argv[1]) as client:
        found = {
            "tools": [each.name for each in await client.list_tools()],
            "sum": plain(await client.call_tool_mcp("add", {"a": 2, "b": 3})),
            "wrong": plain(await client.call_tool_mcp("add", {"a": "many"})),
            "counted": plain(await client.call_tool_mcp("count", {}, progress_handler=on_progress)),
            "resources": [str(each.uri) for each in await client.list_resources()],
            "templates": [
                plain(each).get("uriTemplate") or plain(each)["uri_template"]
                for each in await client.list_resource_templates()
            ],
            "note": {"contents": [plain(each) for each in await client.read_resource("notes://7")]},
            "prompts": [each.name for each in await client.list_prompts()],
            "prompt": plain(await client.get_prompt("greet", {"name": "Ann"})),
        }
    print(json.dumps({**found, "progress": progress}))


def plain(value: Any) -> Any:
    return json.loads(value.model_dump_json(by_alias=True))


if __name__ == "__main__":
    asyncio.run(main())
