"""Samples on their way to the queue: those handed over while others travel go together in the next message.

One message costs the queue as much as taking in a few samples, so a busy worker's messages grow, and an idle one's
sample leaves at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.transfer_queue.client.conversations import Parcel

MAX_BYTES = 4 << 20  # of one message, unless a single sample is larger
MAX_ROWS = 1024  # of one message, unless a single sample has more; queue.limits.frames allows at least these

Answers = Sequence[m.Refused | None]
Send = Callable[[list[Parcel]], Awaitable[Answers]]


class _Waiting(NamedTuple):
    parcel: Parcel
    answer: "asyncio.Future[m.Done | m.Refused]"


class Outbox:
    """Sends samples through ``send``, one message at a time, in the order in which they came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    def put(self, parcel: Parcel) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over one sample, at once; its answer, or what ``send`` raises, comes when awaited."""
        answer: asyncio.Future[m.Done | m.Refused] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(parcel, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._run(), name="queue client outbox")
        return answer

    async def _run(self) -> None:
        """Consumes what waits; produces the answers. Waits for the answer to each message; ends when nothing waits."""
        while self._waiting:
            taken = self._take()
            try:
                answers = await self._send([waiting.parcel for waiting in taken])
                if len(answers) != len(taken):
                    raise ProtocolError(f"{len(taken)} samples were put, {len(answers)} answered")
            except Exception as error:  # handed to whoever awaits, whatever it is
                for waiting in taken:
                    if not waiting.answer.done():  # else whoever put it no longer waits
                        waiting.answer.set_exception(error)
            else:
                for waiting, refused in zip(taken, answers, strict=True):
                    if not waiting.answer.done():
                        waiting.answer.set_result(refused or m.Done())
        self._sending = None

    def _take(self) -> list[_Waiting]:
        """The first that wait: at least one, and as many as one message may hold."""
        size, rows, count = 0, 0, 0
        for waiting in self._waiting:
            frames = [*waiting.parcel.rows, *waiting.parcel.media.values()]
            size += sum(memoryview(frame).nbytes for frame in frames)
            rows += len(frames)
            if count and (size > MAX_BYTES or rows > MAX_ROWS):
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken
