"""An MCP server without the SDK whose answers have no measure: ``python immense_server.py TOOLS [TYPE]``.

It lists the tools given as JSON, and runs them: ``blocks``, ``values`` and ``nested`` answer with many JSON values,
``endless`` without end, ``text`` with one long text, ``pings`` with events without end, ``late`` with the same once a
call was cancelled, ``pinging`` with the number of answers of these two that have not ended, and any other with its
name. With TYPE, a content type, it answers over HTTP, and prints its port.
"""

import contextlib
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The answers that are events without end.
pinging = set[object]()
cancelled = threading.Event()
BLOCK = '{"type":"text","text":"x"}'
COUNT = 300_000
INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "b", "version": "1"},
}


def result(tool: str) -> Iterator[str]:
    """Yield the JSON of a tool's result in parts."""
    yield '{"content":['
    match tool:
        case "blocks":
            yield ",".join([BLOCK] * COUNT) + "]}"
        case "values":
            yield '],"structuredContent":{"rows":[' + ",".join(["[1,2]"] * COUNT) + "]}}"
        case "nested":
            yield '{"type":"text","text":"x","_meta":{"a":' + "[" * COUNT + "]" * COUNT + "}}]}"
        case "endless":
            yield '{"type":"text","text":"'
            yield from itertools.repeat("x" * 65536)
        case "pinging":
            yield '{"type":"text","text":"' + str(len(pinging)) + '"}]}'
        case "text":
            yield '{"type":"text","text":"' + '\\"[,\\\\' * 1_000_000 + '"}]}'
        case _:
            yield '{"type":"text","text":"' + tool + '"}]}'


def answer(request: Any) -> Iterator[str]:
    """Yield the JSON of an answer in parts."""
    answers = {"initialize": INITIALIZED, "tools/list": {"tools": json.loads(sys.argv[1])}}
    yield f'{{"jsonrpc":"2.0","id":{json.dumps(request["id"])},'
    if request["method"] == "tools/call":
        yield from itertools.chain(['"result":'], result(request["params"]["name"]), ["}"])
    elif request["method"] in answers:
        yield f'"result":{json.dumps(answers[request["method"]])}}}'
    else:
        yield '"error":{"code":-32601,"message":"no such method"}}'


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = request.get("params", {}).get("name")
        if request["method"] == "notifications/cancelled":
            cancelled.set()
        if name in ("pings", "late"):
            pinging.add(self)
        if name == "late":
            cancelled.wait()
        self.send_response(200 if "id" in request else 202)
        self.send_header("Content-Type", sys.argv[2])
        self.end_headers()
        if "id" not in request:
            return
        if self in pinging:
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(b"event: ping\ndata: {}\n\n")
            pinging.remove(self)
            return
        if sys.argv[2] == "text/event-stream":
            self.wfile.write(b"data: ")
        for part in answer(request):
            self.wfile.write(part.encode())
        self.wfile.write(b"\n\n")

    def do_GET(self) -> None:
        self.send_error(405)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


if len(sys.argv) > 2:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
for line in sys.stdin:
    if "id" in (request := json.loads(line)):
        sys.stdout.writelines(answer(request))
        print(flush=True)
