"""A real MCP server with faults on demand: `mcp_server.py` over standard input, `mcp_server.py PORT` over HTTP."""

import io
import os
import subprocess
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent
from PIL import Image as Pictures

server = MCPServer("doors")
state = {"seed": None}


def png(colour, size=(40, 30)):
    file = io.BytesIO()
    Pictures.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@server.tool()
def open_door(number: int) -> list:
    """Opens a door and shows what is behind it."""
    return [Image(data=png("gold" if number == 2 else "grey"), format="png"), f"Door {number} is open."]


@server.tool()
def start(seed: int) -> str:
    """Begins anew."""
    state["seed"] = seed
    return f"There are doors, seed {seed}."


@server.tool()
def guess(number: int) -> CallToolResult:
    """Ends the game."""
    right = number == 2
    return CallToolResult(content=[TextContent(type="text", text="Right." if right else "Wrong.")],
                          structured_content={"reward": float(right), "done": True, "success": right})


@server.tool()
def fault(kind: str) -> CallToolResult:
    """Does something wrong."""
    if kind == "die":
        os._exit(3)
    if kind == "sleep":
        time.sleep(600)
    if kind == "raise":
        raise KeyError("lost")
    if kind == "child":
        subprocess.Popen(["sleep", "987"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if kind == "environment":
        return CallToolResult(content=[TextContent(type="text", text=" ".join(sorted(os.environ)))])
    if kind == "nap":
        time.sleep(2)
    told = {"pay": {"reward": 0.5, "progress": 0.25, "state": "paid"},
            "nan": {"reward": "much"}, "done": {"reward": 1.0, "done": "yes"}}.get(kind)
    data = {"broken": "iVBORw0KGgo" + "A" * 200, "text": "no picture"}.get(kind)
    shown = [ImageContent(type="image", data=data, mime_type="image/png")] if data else [
        TextContent(type="text", text=kind if kind != "long" else "y" * 50_000)]
    if kind == "many":
        shown *= 100
    return CallToolResult(content=shown, structured_content=told)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        print("doors begin", file=sys.stderr)
        server.run("stdio")
