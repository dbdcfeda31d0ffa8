"""An MCP server without the SDK, whose import takes a server longer than all else: ``python bare_server.py [TOOLS]``.

It lists the tools given as JSON, and runs none of them. By default it has tools of its own, which tell about its
process, end it, or start another.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "b", "version": "1"},
}


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def slow() -> None:
    """Never answer."""


def die() -> None:
    """End the server in the middle of a call."""
    os.kill(os.getpid(), signal.SIGKILL)


def about() -> str:
    """Return the server's pid, the names of its variables and its arguments."""
    return json.dumps({"pid": os.getpid(), "variables": sorted(os.environ), "arguments": sys.argv[1:]})


def leave_behind() -> str:
    """Start a process in a session of its own, which outlives a server that is merely killed; return its pid."""
    # It does not hold the pipes, as children of a server with the SDK do not.
    nothing = subprocess.DEVNULL
    return str(subprocess.Popen(["sleep", "3600"], start_new_session=True, stdin=nothing, stdout=nothing).pid)


OWN: dict[str, Callable[..., str | None]] = {tool.__name__: tool for tool in (add, slow, die, about, leave_behind)}
GIVEN = json.loads(sys.argv[1]) if sys.argv[1:] and sys.argv[1].startswith("[") else None


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The reply's result or error; None for no reply."""
    if method == "initialize":
        return {"result": INITIALIZED}
    if method == "tools/list":
        own = [
            {"name": name, "description": tool.__doc__, "inputSchema": {"type": "object"}} for name, tool in OWN.items()
        ]
        return {"result": {"tools": own if GIVEN is None else GIVEN}}
    if method == "tools/call" and GIVEN is None:
        text = OWN[parameters["name"]](**parameters.get("arguments", {}))
        return None if text is None else {"result": {"content": [{"type": "text", "text": text}]}}
    return {"error": {"code": -32601, "message": "no such method"}}


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    if (reply := answer(request["method"], request.get("params", {}))) is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)
