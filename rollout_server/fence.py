"""Keeps a trainer that another has replaced away from an engine: an ASGI middleware around the engine's routes.

A trainer's client names its lineage in every request; agent workers name none.
"""

from rl_async.process.http_auth import HEALTH, App, Receive, Scope, Send, answer

LINEAGE_HEADER = "X-Trainer-Lineage"
REPLACED = 412  # no engine answers with this status for another reason
_DIGITS = 18  # more are no count of resumes, and Python refuses to read thousands of them


class LineageFence:
    """Refuses requests of an older lineage than the newest that was named to this process so far.

    So a successor fences its predecessor off with its first request, which every publication begins with. An engine
    that was restarted has forgotten the newest lineage; it serves nobody before the successor has updated it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._newest = -1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 412 (400 if its lineage is no number)."""
        named = dict(scope["headers"]).get(LINEAGE_HEADER.lower().encode()) if scope["type"] == "http" else None
        if named is None or scope["path"] == HEALTH:  # a probe, which needs no token, must fence nobody off
            return await self._app(scope, receive, send)
        if not named.isdigit() or len(named) > _DIGITS:
            return await _refuse(send, 400, f"{LINEAGE_HEADER} is not a number")
        lineage = int(named)
        if lineage < self._newest:
            message = f"the trainer of lineage {lineage} was replaced by one of lineage {self._newest}"
            return await _refuse(send, REPLACED, message)
        self._newest = lineage
        await self._app(scope, receive, send)


async def _refuse(send: Send, status: int, reason: str) -> None:
    body, headers = answer(status, reason)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
