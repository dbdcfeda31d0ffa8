"""Messages of servers, measured piece by piece."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_async.agent_loop.tools.mcp_connection import MOST_BYTES, BoundedBody, Measure, TooLarge

pytest.importorskip("mcp", reason="python -m pip install 'rl-async[mcp]' installs the SDK for MCP servers")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values, inner))


def refused(most: int, *pieces: bytes) -> bool:
    measure = Measure("server", most)
    try:
        for piece in pieces:
            measure.add(piece)
    except TooLarge as error:
        assert "server" in str(error)
        return True
    return False


@settings(max_examples=40)
@given(JSON, st.booleans(), st.integers(1, 7))
def test_values_are_counted_wherever_a_message_is_cut(value: Any, ascii_only: bool, size: int) -> None:
    """No text counts as more than one value. An empty container counts as two."""
    data, count = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass"), values(value)
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    assert not refused(2 * count, *pieces)
    assert count < 3 or refused(count - 2, *pieces)


def test_bytes_are_counted() -> None:
    assert not refused(1, b'"', b"x" * (MOST_BYTES - 2), b'"')
    assert refused(1, b'"', b"x" * MOST_BYTES)


class Body(httpx2.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def read(kind: str, *pieces: bytes) -> bytes:
    response = httpx2.Response(200, headers={"content-type": kind}, stream=Body(list(pieces)))
    return b"".join([data async for data in BoundedBody(response, lambda: Measure("server", 10))])


EVENT = b"event: message\r\ndata: [1,2,3,4,5,6]\r\n\r\n"
FULL = b"[1,2,3,4,5,6]"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
async def test_each_event_of_a_stream_is_measured_by_itself(size: int) -> None:
    for stream in (EVENT * 3, EVENT.replace(b"\r", b"") * 3):
        pieces = [stream[place : place + size] for place in range(0, len(stream), size)]
        assert await read("text/event-stream", *pieces) == stream


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "stream",
    [
        b"data: " + FULL + b"\r\ndata: " + FULL + b"\r\n\r\n",
        b"data: " + FULL + b"\rdata: " + FULL + b"\r\r",
        b'id: "\ndata: ' + FULL * 2 + b"\n\n",
        b'id: "\rdata: ' + FULL * 2 + b"\r\r",
        b': \\"\\\ndata: ' + FULL * 2 + b"\n\n",
    ],
)
async def test_no_line_of_an_event_hides_another(stream: bytes, size: int) -> None:
    pieces = [stream[place : place + size] for place in range(0, len(stream), size)]
    with pytest.raises(TooLarge):
        await read("text/event-stream; charset=utf-8", *pieces)


async def test_blank_lines_divide_no_other_body() -> None:
    with pytest.raises(TooLarge):
        await read("application/json", FULL, b"\n\n", FULL)
