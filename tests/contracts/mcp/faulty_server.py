"""An MCP server whose tools go wrong on request: ``python faulty_server.py [http]``. Over HTTP it prints its port."""

import os
import signal
import socket
import sys
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp_types import CallToolResult, TextContent

server = MCPServer("faulty")
refuse_next = False


@server.tool()
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def fail() -> str:
    """Fail as tools do."""
    raise ValueError("this always fails")


@server.tool()
async def die() -> str:
    """End the server in the middle of a call."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
async def big() -> CallToolResult:
    """Return ten million characters."""
    return CallToolResult(content=[TextContent(type="text", text="x" * 10_000_000)])


@server.tool()
async def picture() -> Image:
    """Return an image."""
    return Image(data=b"0123", format="png")


@server.tool()
async def junk() -> str:
    """Write what is no message to the standard output."""
    print("Hello! I am a banner.", flush=True)
    return "after junk"


@server.tool()
async def refuse() -> str:
    """Answer the next request as a server does whose session has expired. Only over HTTP."""
    global refuse_next
    refuse_next = True
    return "the next request is refused"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Pass requests on, or refuse one."""
    global refuse_next
    if scope["type"] == "http" and scope["method"] == "POST" and refuse_next:
        refuse_next = False
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"no such session"})
        return
    await inner(scope, receive, send)


if sys.argv[1:] == ["http"]:
    import uvicorn

    inner = server.streamable_http_app()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
else:
    server.run()
