"""Fake engines, many in one process: each a server of HTTP on a port of its own that speaks as much of vLLM's dialect
as a pool uses.

    python -m benchmarks.scale.engines COUNT DELAY_S

The process prints the ports as a line of JSON. An answer comes whole after DELAY_S: a few tokens of version 0.0.
"""

import asyncio
import json
import sys
from typing import cast

import uvloop

TOKENS = 16  # of an answer
_VALUES = {
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.1,
    "num_preemptions_total": 0,
    "prompt_tokens_total": 0,
    "generation_tokens_total": 0,
    "prefix_cache_queries_total": 0,
    "prefix_cache_hits_total": 0,
}
METRICS = "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in _VALUES.items()).encode()
ANSWER = (
    b"data: "
    + json.dumps(
        {
            "choices": [
                {
                    "index": 0,
                    "token_ids": list(range(TOKENS)),
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"logprob": -0.5}] * TOKENS},
                    "weight_versions": [{"version": "0.0", "start": 0, "end": TOKENS}],
                }
            ]
        }
    ).encode()
    + b"\n\ndata: [DONE]\n\n"
)


def response(body: bytes, kind: bytes) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (kind, len(body), body)


class Engine(asyncio.Protocol):
    """One connection to an engine, whose requests come one at a time."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s, self._received = delay_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for the answers."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer a request when it is complete."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        headers = head.lower().split(b"\r\n")
        length = next((int(h.split(b":")[1]) for h in headers if h.startswith(b"content-length:")), 0)
        if not end or len(body) < length:
            return
        self._received = b""
        keeps = b"connection: close" not in headers
        if head.startswith(b"GET"):
            self._answer(response(METRICS, b"text/plain"), keeps)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._delay_s, self._answer, response(ANSWER, b"text/event-stream"), keeps)

    def _answer(self, answer: bytes, keeps: bool) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(answer)
        if not keeps:
            self._transport.close()


async def main(count: int, delay_s: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Engine(delay_s), "127.0.0.1", 0, backlog=512) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))
