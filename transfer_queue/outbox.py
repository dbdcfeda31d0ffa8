"""Samples on their way to the queue: those handed over while others travel go together in the next message.

One message costs the queue as much as taking in a few samples, so a busy worker's messages grow, and an idle one's
sample leaves at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rl_async import codec
from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.errors import ProtocolError

MAX_BYTES = 4 << 20  # of one message, unless a single sample is larger
MAX_ROWS = 1024  # of one message, unless a single sample has more; queue.limits.frames allows at least these

Answers = Sequence[m.Refused | None]
Send = Callable[[list[list[m.TrajectoryHeader]], list[Frame]], Awaitable[Answers]]


class _Parcel(NamedTuple):
    headers: list[m.TrajectoryHeader]
    payload: list[Frame]
    answer: "asyncio.Future[m.Done | m.Refused]"


class Outbox:
    """Sends samples through ``send``, one message at a time, in the order in which they came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Parcel] = []
        self._sending: asyncio.Task[None] | None = None

    def put(self, rows: Sequence[m.Trajectory]) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over all rows of one sample, at once; its answer, or what ``send`` raises, comes when awaited."""
        answer: asyncio.Future[m.Done | m.Refused] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Parcel([row.header() for row in rows], [codec.encode(row) for row in rows], answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._run(), name="queue client outbox")
        return answer

    async def _run(self) -> None:
        """Consumes what waits; produces the answers. Waits for the answer to each message; ends when nothing waits."""
        while self._waiting:
            parcels = self._take()
            headers = [parcel.headers for parcel in parcels]
            try:
                answers = await self._send(headers, [frame for parcel in parcels for frame in parcel.payload])
                if len(answers) != len(parcels):
                    raise ProtocolError(f"{len(parcels)} samples were put, {len(answers)} answered")
            except Exception as error:  # handed to whoever awaits, whatever it is
                for parcel in parcels:
                    if not parcel.answer.done():  # else whoever put it no longer waits
                        parcel.answer.set_exception(error)
            else:
                for parcel, refused in zip(parcels, answers, strict=True):
                    if not parcel.answer.done():
                        parcel.answer.set_result(refused or m.Done())
        self._sending = None

    def _take(self) -> list[_Parcel]:
        """The first that wait: at least one, and as many as one message may hold."""
        size, rows, count = 0, 0, 0
        for parcel in self._waiting:
            size += sum(memoryview(frame).nbytes for frame in parcel.payload)
            rows += len(parcel.payload)
            if count and (size > MAX_BYTES or rows > MAX_ROWS):
                break
            count += 1
        parcels, self._waiting = self._waiting[:count], self._waiting[count:]
        return parcels
