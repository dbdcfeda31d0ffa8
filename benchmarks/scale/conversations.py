"""One real pool of engines, as an agent worker has it, and conversations that use it without a pause.

    python -m benchmarks.scale.conversations QUEUE CONVERSATIONS ENGINES

Prints ``ready`` once the pool has every engine. Then each command that comes on stdin is answered with a line of JSON:
``go SECONDS`` with the requests that were answered in that time and the processor time that the process spent, ``idle
SECONDS`` with that of the process without requests, ``lost COUNT`` with the clock's time at which that many engines
had been given up since the last such command.
"""

import asyncio
import json
import logging
import sys
import time
from typing import Any

import psutil
import uvloop

from benchmarks.queue.arms import ready
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.messages import Sampling
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.pool import EnginePool, engine_pool
from rl_async.transfer_queue.client import QueueClient

PROMPT = list(range(200))
BATCH = 8  # requests that an engine decodes at once


class Losses(logging.Handler):
    """When the pool gave engines up, as it logs."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []
        self._more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning about an engine that does not answer probes."""
        if "missed" in record.msg:
            self._times.append(time.time())
            self._more.set()

    async def last_of(self, count: int) -> float:
        """When ``count`` engines had been given up, which are then forgotten here."""
        while len(self._times) < count:
            self._more.clear()
            await self._more.wait()
        last = self._times[count - 1]
        self._times.clear()
        return last


def request_of(conversation: int) -> GenerateRequest:
    """A request with a prompt of its own: those for the same one would be sent together."""
    return GenerateRequest(
        request_id=f"r{conversation}",
        token_ids=[conversation, *PROMPT],
        sampling=Sampling(),
        max_tokens=64,
        stop_token_ids=[0],
    )


async def converse(pool: EnginePool, number: int, answered: list[int]) -> None:
    """Ask again and again, as one conversation, until cancelled."""
    request = request_of(number)
    while True:
        await pool.generate(request, session=str(number))
        answered[0] += 1


async def go(pool: EnginePool, conversations: int, seconds: float) -> dict[str, float]:
    """Requests, and processor seconds, of so many conversations in this time, after half of it for warming up."""
    answered = [0]
    running = [asyncio.ensure_future(converse(pool, number, answered)) for number in range(conversations)]
    await asyncio.sleep(seconds / 2)
    before, cpu = answered[0], time.process_time()
    await asyncio.sleep(seconds)
    found = {"requests": answered[0] - before, "cpu_s": time.process_time() - cpu}
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    return found


async def idle(seconds: float, empty: int) -> dict[str, float]:
    """Processor seconds of this process meanwhile, and its memory, now and before it had engines."""
    cpu = time.process_time()
    await asyncio.sleep(seconds)
    return {"cpu_s": time.process_time() - cpu, "bytes": psutil.Process().memory_info().rss, "empty": empty}


async def main(queue: str, conversations: int, engines: int) -> None:
    """Obey until killed."""
    losses = Losses()
    log = logging.getLogger("rl_async.pool")
    log.addHandler(losses)
    log.propagate = False
    async with QueueClient(queue, role="agent", name="pool") as client:
        pool = engine_pool(RolloutConfig(max_batch_size=BATCH), "")
        empty = psutil.Process().memory_info().rss
        watch = asyncio.ensure_future(pool.watch(client))
        listed = await client.engines()
        while len(listed.engines) < engines:
            listed = await client.engines(listed.revision, 60.0)
        await pool.generate(request_of(0), session="first")
        ready()
        while not watch.done():
            command, argument = (await asyncio.to_thread(sys.stdin.readline)).split()
            answer: dict[str, Any]
            if command == "go":
                answer = await go(pool, conversations, float(argument))
            elif command == "idle":
                answer = await idle(float(argument), empty)
            else:
                answer = {"at": await losses.last_of(int(argument))}
            print(json.dumps(answer), flush=True)
        watch.result()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
