"""An MCP server over HTTP with the tool of the zoom task: `zoom_server.py PORT [CALLS]`; it ends at that call."""

import os
import sys

from mcp.server.mcpserver import Image, MCPServer

from tests.environments.mcp_server import png

server = MCPServer("zoom")
left = [int(sys.argv[2]) if len(sys.argv) > 2 else 10**9]


@server.tool()
def zoom(box: list[float]) -> list:
    """Shows the part of the picture in a box [x1, y1, x2, y2], enlarged."""
    left[0] -= 1
    if left[0] <= 0:
        os._exit(3)
    return [Image(data=png("white", (64, 64)), format="png"), "Which digit is this? Answer with the digit only."]


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
