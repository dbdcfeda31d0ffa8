"""One simulated run: the queue's store, an agent worker and its pool of engines as they are, on a simulated clock.

Simulated are the engines (``engines.py``), the trainer's computing and the weight transfer, which take a fixed time,
and the messages between them, which take none.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.tails.clock import SimulatedLoop
from benchmarks.tails.engines import CAPACITY, MAX_BATCH, Engine
from rl_async import messages as m
from rl_async.agent_loop.episode import AsRecorded
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.pool import EnginePool
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.store import Store

ENGINES, GROUPS, GROUP_SIZE = 4, 64, 8
SHORT, LONG, LONG_SHARE = (50, 150), 2000, 0.01  # tokens of an answer; a long one is 20 times as long as the mean
SYNC_SHARE = 0.02  # of a step's training
STUCK_S = 600.0  # without a finished answer
WARM_UP = 6  # steps before those that are measured; as many come after them
WORKER = "worker"


class Arm(NamedTuple):
    """A setting that is simulated."""

    max_staleness: int
    on_straggler: str
    concurrency: int = 4096  # agent.concurrency
    drained: bool = False  # engines finish what runs before each update, instead of going on with the new weights


class Lengths:
    """The drawn length of every answer, the same for every arm, by group and sample."""

    def __init__(self, steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = steps * GROUPS, GROUP_SIZE
        short = rng.integers(SHORT[0], SHORT[1] + 1, shape)
        self.tokens = np.where(rng.random(shape) < LONG_SHARE, LONG, short)

    def of(self, group: int, sample: int) -> int:
        """Tokens of one answer; those of groups that replace dropped ones begin again."""
        return int(self.tokens[group % len(self.tokens), sample])

    @property
    def step_s(self) -> float:
        """Seconds in which engines that are always full sample the answers of a step."""
        return self.tokens.mean() * GROUPS * GROUP_SIZE / (ENGINES * CAPACITY)


class Outcome(NamedTuple):
    """What one run came to, over the measured steps."""

    seconds_per_step: float
    trainer_idle: float  # share of the time in which the trainer waited for a batch
    engines_idle: float  # share of the tokens that full engines would have sampled
    staleness: float  # mean over trained tokens
    oldest: int
    masked: float  # share of the batches' tokens that are beyond the bound
    long_trained: float  # answers of LONG tokens that were trained, of those expected
    wasted: float  # share of the sampled tokens that came to no batch
    in_flight: float  # samples leased at a time, on the average


class _Queue:
    """The agents' verbs, answered by a store in this process."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stored, self.freed = asyncio.Event(), asyncio.Event()

    async def lease(self, max_groups: int, wait_s: float) -> m.Leased:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not ((leased := self._leased(max_groups)).groups or leased.finished):
                    self.freed.clear()
                    await self.freed.wait()
        return leased

    def _leased(self, max_groups: int) -> m.Leased:
        now = asyncio.get_running_loop().time()
        self.store.delivery.renew(WORKER, now)
        return self.store.delivery.lease(WORKER, max_groups, now)

    async def renew(self, held: list[m.SampleKey]) -> m.Done:
        return self.store.delivery.renew(WORKER, asyncio.get_running_loop().time(), held)

    async def put(self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None) -> m.Done | m.Refused:
        headers = [row.header() for row in rows]
        reply = self.store.delivery.put(WORKER, headers, asyncio.get_running_loop().time())
        self.stored.set()
        return reply

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> m.Done | m.Refused:
        raise AssertionError(f"sample {group_id}.{sample} failed: {error}")


class _Runner:
    """Plays an episode of one turn."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def run(self, group: m.LeasedGroup, sample: int, images: dict[str, bytes]) -> list[m.Trajectory]:
        name = f"{group.group_id}.{sample}"
        request = GenerateRequest(
            request_id=name,
            token_ids=[1],
            sampling=m.Sampling(),
            max_tokens=LONG,
            stop_token_ids=[],
            min_version=group.min_version,
        )
        result = await self._pool.generate(request, session=name)
        count = len(result.token_ids)
        return [
            m.Trajectory(
                task_id=group.task.task_id,
                group_id=group.group_id,
                sample=sample,
                attempt=group.attempt,
                episode_id=name,
                token_ids=np.full(count, 7, np.int32),
                loss_mask=np.ones(count, bool),
                logprobs=np.zeros(count, np.float32),
                versions=result.versions,
                sampling=m.Sampling(),
                reward=0.0,
            )
        ]


def config_of(arm: Arm, steps: int) -> RunConfig:
    """The config of a run with this setting."""
    return load_config(
        "calculator",
        [
            f"trainer.steps={steps}",
            f"data.train_batch_groups={GROUPS}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.max_batch_size={MAX_BATCH}",
            f"agent.concurrency={arm.concurrency}",
            "agent.episode_timeout_s=14400",
            f"queue.max_staleness={arm.max_staleness}",
            f"queue.on_straggler={arm.on_straggler}",
            f"queue.max_bytes={1 << 40}",
        ],
    )


class _Run:
    """The trainer's loop, with the others around it."""

    def __init__(self, arm: Arm, steps: int, train_s: float, lengths: Lengths) -> None:
        self._arm, self._steps, self._train_s, self._lengths = arm, steps + 2 * WARM_UP, train_s, lengths
        self._measured = range(WARM_UP, WARM_UP + steps)
        config = config_of(arm, self._steps)
        self._store = Store(QueueSettings.of(config), Counted(), [], lambda _: None)
        self._queue = _Queue(self._store)
        self._engines = {f"engine-{n}": Engine(self._tokens) for n in range(ENGINES)}
        self._pool = EnginePool(lambda record: self._engines[record.engine_id], 1e9, MAX_BATCH)
        for name in self._engines:
            self._store.engines.register(name, f"http://{name}", "embedded")
        self._worker = AgentWorker(self._queue, _Runner(self._pool), AsRecorded(), config)
        self._loop = asyncio.get_running_loop()
        self._waited = 0.0
        self._held: list[int] = []
        self._batches: list[tuple[int, Sequence[m.TrajectoryHeader]]] = []

    def _tokens(self, request_id: str) -> int:
        group, sample = request_id.split(".")
        return self._lengths.of(int(group), int(sample))

    async def outcome(self) -> Outcome:
        """Run to the end."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._worker.run())
            await self._publish(0)
            for step in range(self._steps):
                if step == self._measured.start:
                    began, waited, sampled = self._loop.time(), self._waited, self._sampled()
                if step == self._measured.stop:
                    took = self._loop.time() - began
                    waited, sampled = self._waited - waited, self._sampled() - sampled
                await self._step(step)
            self._store.finish()
            self._queue.freed.set()
        return self._report(took, waited, sampled)

    async def _step(self, step: int) -> None:
        began = self._loop.time()
        while isinstance(reply := self._store.batches.reserve(step, self._loop.time()), m.NotReady):
            self._queue.stored.clear()
            async with asyncio.timeout(STUCK_S):
                await self._queue.stored.wait()
        assert isinstance(reply, m.Reserved), reply
        self._waited += self._loop.time() - began
        if step in self._measured:
            self._batches.append((step, reply.headers))
            self._held.append(self._worker.held)
        await asyncio.sleep(self._train_s)
        self._store.batches.commit(step)
        await self._publish(step + 1)
        self._store.retire(step + 1)

    async def _publish(self, step: int) -> None:
        if self._arm.drained:
            await asyncio.gather(*(engine.drain() for engine in self._engines.values()))
        for engine in self._engines.values():
            engine.pause()
        await asyncio.sleep(SYNC_SHARE * self._train_s)
        for engine in self._engines.values():
            engine.resume(m.Version(0, step))
        self._store.publish(m.Version(0, step), list(self._engines))
        self._pool.update(self._store.engine_list())
        self._queue.freed.set()

    def _sampled(self) -> float:
        for engine in self._engines.values():
            engine.advance()
        return sum(engine.sampled for engine in self._engines.values())

    def _report(self, took: float, waited: float, sampled: float) -> Outcome:
        bound = self._arm.max_staleness
        ages = [
            (step - run.version.step, run.end - run.start)
            for step, headers in self._batches
            for header in headers
            for run in header.versions
        ]
        tokens = sum(count for _, count in ages)
        fresh = [(age, count) for age, count in ages if age <= bound]
        kept = sum(count for _, count in fresh)
        rows = [header for _, headers in self._batches for header in headers]
        return Outcome(
            seconds_per_step=took / len(self._measured),
            trainer_idle=waited / took,
            engines_idle=1 - sampled / (ENGINES * CAPACITY * took),
            staleness=sum(age * count for age, count in fresh) / kept,
            oldest=max(age for age, _ in fresh),
            masked=1 - kept / tokens,
            long_trained=sum(row.sampled == LONG for row in rows) / (len(rows) * LONG_SHARE),
            wasted=max(0.0, 1 - tokens / sampled),
            in_flight=sum(self._held) / len(self._held),
        )


def simulate(arm: Arm, steps: int, train: float, seed: int = 0) -> tuple[Outcome, float]:
    """What comes of this setting, and the seconds of a step of an ideal schedule.

    ``train``: time of a training step in times that full engines need for a step's answers. No schedule is faster than
    engines that are always full, nor than a trainer that never waits; the ideal one is as fast as the slower of them.
    """
    lengths = Lengths(steps + 2 * WARM_UP, seed)
    train_s = train * lengths.step_s

    async def run() -> Outcome:
        return await _Run(arm, steps, train_s, lengths).outcome()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run()), max(lengths.step_s, train_s * (1 + SYNC_SHARE))
