"""Fences off a replaced trainer from an engine: an ASGI middleware around the engine's routes.

A trainer's client names its lineage in every request; agent workers do not. Every answer names the process that gave
it, by which ``rl-async engine add`` recognises a router over several engines.
"""

import secrets
from typing import Any

from rl_async.process.http_auth import HEALTH, App, Receive, Scope, Send, answer

LINEAGE_HEADER = "X-Trainer-Lineage"
PROCESS_HEADER = "X-Engine-Process"
# Engines do not use this status for any other purpose.
REPLACED = 412
# A longer number cannot count resumes, and Python refuses to parse thousands of digits.
_DIGITS = 18


class LineageFence:
    """Refuses requests of an older lineage than the newest one seen by this process.

    A successor thus fences off its predecessor with the first request of its first publication. A restarted engine has
    forgotten the newest lineage, but is not routed to until the successor has updated it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._newest = -1
        self._named = (PROCESS_HEADER.lower().encode(), secrets.token_hex(8).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 412, or 400 for a lineage that is not a number."""

        async def named_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], self._named]}
            await send(message)

        named = dict(scope["headers"]).get(LINEAGE_HEADER.lower().encode()) if scope["type"] == "http" else None
        # Health probes need no token, so they must not be able to fence off a trainer.
        if named is None or scope["path"] == HEALTH:
            return await self._app(scope, receive, named_send)
        if not named.isdigit() or len(named) > _DIGITS:
            return await _refuse(send, 400, f"{LINEAGE_HEADER} is not a number")
        lineage = int(named)
        if lineage < self._newest:
            message = f"the trainer of lineage {lineage} was replaced by one of lineage {self._newest}"
            return await _refuse(send, REPLACED, message)
        self._newest = lineage
        await self._app(scope, receive, named_send)


async def _refuse(send: Send, status: int, reason: str) -> None:
    body, headers = answer(status, reason)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
