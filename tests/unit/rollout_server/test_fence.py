"""Which requests pass the fence around an engine's routes."""

from typing import Any

import pytest

from rl_async.rollout_server.fence import LINEAGE_HEADER, REPLACED, LineageFence


async def status_of(fence: LineageFence, lineage: str | None, path: str = "/pause") -> int:
    """The status of the answer to a request that names this lineage."""
    header = [] if lineage is None else [(LINEAGE_HEADER.lower().encode(), lineage.encode())]
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await fence({"type": "http", "path": path, "headers": header}, None, send)
    return int(sent[0]["status"])


async def engine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def test_an_older_lineage_is_refused_from_the_first_request_of_a_newer_one_on() -> None:
    fence = LineageFence(engine)
    named = ["0", "0", "2", "1", "0", "2", None, "3", "2"]
    assert [await status_of(fence, lineage) for lineage in named] == [
        *(200, 200, 200, REPLACED, REPLACED, 200, 200, 200, REPLACED)
    ]


async def test_a_health_probe_needs_no_token_and_so_fences_nobody_off() -> None:
    fence = LineageFence(engine)
    assert await status_of(fence, "7", "/health") == 200
    assert await status_of(fence, "0") == 200


@pytest.mark.parametrize("lineage", ["", "-1", "x", "9" * 5000, "9" * 19])
async def test_a_lineage_is_a_number(lineage: str) -> None:
    assert await status_of(LineageFence(engine), lineage) == 400
