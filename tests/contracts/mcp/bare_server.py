"""An MCP server without the SDK: ``python bare_server.py TOOLS`` lists the tools given as JSON, and runs none."""

import json
import sys

INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "b", "version": "1"},
}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answers = {"initialize": INITIALIZED, "tools/list": {"tools": json.loads(sys.argv[1])}}
    if request["method"] in answers:
        reply = {"result": answers[request["method"]]}
    else:
        reply = {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)
