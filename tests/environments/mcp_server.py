"""A real MCP server with faults on demand: `mcp_server.py` over standard input, `mcp_server.py PORT` over HTTP; with
the one tool of the zoom task: `mcp_server.py PORT zoom [CALLS]`, which ends at that call."""

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


zooming = MCPServer("zoom")


@zooming.tool()
def zoom(box: list[float]) -> list:
    """Shows the part of the picture in a box [x1, y1, x2, y2], enlarged."""
    state["calls"] = state.get("calls", 0) + 1
    if sys.argv[3:] and state["calls"] >= int(sys.argv[3]):
        os._exit(3)
    return [Image(data=png("white", (64, 64)), format="png"), "Which digit is this? Answer with the digit only."]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chosen = zooming if sys.argv[2:] else server
        chosen.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        print("doors begin", file=sys.stderr)
        server.run("stdio")
