"""Collects requests that arrive while the model is busy into its next batch."""

import asyncio
import time
from collections.abc import Callable, Sequence

from rl_async.concurrency import gather_or_cancel

Scoring = Callable[[Sequence[Sequence[int]]], list[float]]
Waiting = tuple[Sequence[int], "asyncio.Future[float]"]


class Batcher:
    """Calls ``scoring`` in a thread, with up to ``batch_size`` rows at a time."""

    def __init__(self, scoring: Scoring, batch_size: int) -> None:
        self._scoring, self._batch_size = scoring, batch_size
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self.rows = self.batches = 0  # scored
        self.seconds = 0.0  # of scoring

    @property
    def waiting(self) -> int:
        """Rows that wait for a batch."""
        return self._waiting.qsize()

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return a number for each row once it was scored. Has no deadline: the process ends if ``run`` fails."""
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        for waiting in zip(rows, futures):
            self._waiting.put_nowait(waiting)
        return await gather_or_cancel(*futures)

    async def run(self) -> None:
        """Consumes rows; produces their numbers. Waits for the next row; runs until cancelled or ``scoring`` raises."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [waiting for waiting in batch if not waiting[1].done()]  # the others' clients disconnected
            if not batch:
                continue
            began = time.perf_counter()
            numbers = await asyncio.to_thread(self._scoring, [row for row, _ in batch])
            self.seconds += time.perf_counter() - began
            self.rows += len(batch)
            self.batches += 1
            for (_, future), number in zip(batch, numbers):
                if not future.done():
                    future.set_result(number)
