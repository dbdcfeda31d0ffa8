"""Faults that strike an engine from inside its own HTTP server, at one exact moment of a sync or of a request.

An ASGI middleware for the embedded engine and for vLLM (``--middleware``). Each engine process takes one fault from the
folder that RL_ASYNC_FAULTS names; standard library only, since it also runs in vLLM's environment.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

FOLDER = "RL_ASYNC_FAULTS"
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
# Of the one request nothing more is answered, or a byte each second and never the last; or from now on each is answered
# shortly before its deadline.
KINDS = (*SIGNALS, "swallow", "drip", "tarry")
TARRY_S = 4.8
BYTE_S = 1.0
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Faulty:
    """Strikes at the ``nth`` request of ``path``: ``before`` it is handled, ``during`` its answer, or ``after`` it was
    handled and before its answer is complete."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.fault = _take(Path(os.environ[FOLDER]))
        self.seen = 0
        self.tarries = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self.tarries and scope["type"] == "http" and scope["path"] != "/health":
            await asyncio.sleep(TARRY_S)
        fault = self.fault
        if fault is None or scope["type"] != "http" or scope["path"] != fault["path"]:
            return await self.app(scope, receive, send)
        self.seen += 1
        if self.seen != fault["nth"]:
            return await self.app(scope, receive, send)
        if fault["when"] == "before":
            await self._strike(receive)

        async def faulty_send(message: Message) -> None:
            if message["type"] == "http.response.body":
                last = not message.get("more_body")
                if last and fault["when"] == "after":
                    await self._strike(receive)
                if fault["kind"] == "drip" and self.fault is None:
                    return await _drip(message, receive, send)
                await send(message)
                if not last and fault["when"] == "during":
                    await self._strike(receive)
            else:
                await send(message)

        await self.app(scope, receive, faulty_send)

    async def _strike(self, receive: Receive) -> None:
        """Signals are for the whole engine: whatever it started is in its process group."""
        fault, self.fault = self.fault, None
        if fault is None:  # a later part of the same answer
            return
        os.rename(fault["file"], f"{fault['file'].removesuffix('.taken')}.fired")
        if (kind := fault["kind"]) in SIGNALS:
            os.killpg(os.getpgrp(), SIGNALS[kind])
        self.tarries = kind == "tarry"
        while kind == "swallow" and (await receive())["type"] != "http.disconnect":
            pass


async def _drip(message: Message, receive: Receive, send: Send) -> None:
    """Send all but the last byte of an answer's part, one after the other, until the client hangs up."""
    for byte in message["body"][:-1]:
        await send({**message, "body": bytes([byte]), "more_body": True})
        await asyncio.sleep(BYTE_S)
    while (await receive())["type"] != "http.disconnect":
        pass


def _take(folder: Path) -> Message | None:
    """The next fault, if one is left; no other process gets it."""
    for file in sorted(folder.glob("*.queued")):
        taken = file.with_suffix(".taken")
        try:
            file.rename(taken)
        except FileNotFoundError:
            continue  # another engine was faster
        return {**json.loads(taken.read_text()), "file": str(taken)}
    return None
