"""Samples on their way to the queue: those handed over while others travel go together in the next message.

One message costs the queue as much as taking in a few samples, so a busy worker's messages grow, and an idle one's
sample leaves at once. A message that has grown to its full size does not wait for the answer to the last one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.transfer_queue.client.conversations import Parcel

MAX_BYTES = 1 << 21  # of one message, unless a single sample is larger: what other clients ask for waits behind it
AT_ONCE = 4  # messages on their way
MAX_ROWS = 1024  # of one message, unless a single sample has more; queue.limits.frames allows at least these

Answers = Sequence[m.Refused | None]
Send = Callable[[list[Parcel]], Awaitable[Answers]]


class _Waiting(NamedTuple):
    parcel: Parcel
    nbytes: int  # of rows and media together
    answer: "asyncio.Future[m.Done | m.Refused]"


class Outbox:
    """Sends samples through ``send``, at most AT_ONCE messages at a time, in the order in which they came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._nbytes = 0  # of what waits
        self._due = False  # what waits is looked at soon
        self._sending: set[asyncio.Task[None]] = set()

    def put(self, parcel: Parcel) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over one sample, at once; its answer, or what ``send`` raises, comes when awaited."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(parcel, parcel.nbytes, loop.create_future())
        self._waiting.append(waiting)
        self._nbytes += waiting.nbytes
        if not self._due:
            self._due = True
            loop.call_soon(self._start)
        return waiting.answer

    def _start(self) -> None:
        """Send what waits if nothing is on its way, and full messages while not too many are."""
        self._due = False
        while self._waiting and (not self._sending or (self._nbytes >= MAX_BYTES and len(self._sending) < AT_ONCE)):
            task = asyncio.create_task(self._deliver(self._take()), name="queue client outbox")
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        if not task.cancelled():  # else the event loop ends
            self._start()

    async def _deliver(self, taken: list[_Waiting]) -> None:
        """Send one message; its answers, or the error, go to whoever handed the samples over."""
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

    def _take(self) -> list[_Waiting]:
        """The first that wait: at least one, and as many as one message may hold."""
        size, rows, count = 0, 0, 0
        for waiting in self._waiting:
            size += waiting.nbytes
            rows += len(waiting.parcel.rows) + len(waiting.parcel.media)
            if count and (size > MAX_BYTES or rows > MAX_ROWS):
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._nbytes -= sum(waiting.nbytes for waiting in taken)
        return taken
