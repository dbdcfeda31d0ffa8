"""``rl-async plan``: simulates throughput, idle time, staleness and memory for each split of devices.

A discrete-event simulation runs the real queue (``Store``) on a simulated clock, with engines and a trainer that only
take time. It consumes settings, costs and recorded episodes; it produces the figures of ``metrics.jsonl`` and the
resource that saturates first. Costs and lengths are measured on a recorded run, or assumed from a device's figures.
Model of an engine: one iteration gives every running sequence a token and takes ``base + per_sequence * sequences``.
Model of the trainer: a step takes ``per_token`` for each token that passes through it, divided by the ranks.

The simulation is pure: no clock, no files, and the same seed gives the same run. The store sees each group as a single
sample, put when the group's last conversation ends: its decisions depend on groups alone, and this makes a simulation
several times as fast. To add a cost, add it to ``Costs`` and spend it in ``Simulation``.
"""

import gc
import heapq
import math
import multiprocessing
import os
import random
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rl_async.configs.load import load_config, load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ProtocolError, UserError
from rl_async.insight.tail import LineTail, Record
from rl_async.launcher.plan.machine import Measured, ask_torch, cores, settle
from rl_async.launcher.plan.memory import ModelSize, engine_bytes, model_size, trainer_bytes
from rl_async.messages import LeasedGroup, Refused, Reserved, TrajectoryHeader, Version, VersionRun
from rl_async.recording import files_of_step, read_trajectories
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.store import Store

# The first steps of a run are slower and left out of all measurements.
SKIPPED = 1
# Each split is measured over STEPS steps. Means over large batches vary less, so steps of together more than ROWS rows
# are not needed, except for the FEWEST_STEPS.
STEPS, FEWEST_STEPS = 24, 2
ROWS = 200_000
# The first steps of recorded runs are slower and left out.
WARM = 2
# With fewer devices, simulations take less time than starting processes for them.
PARALLEL = 64
# Shares of the devices that the trainer may get.
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)


class EpisodeShape(msgspec.Struct, frozen=True):
    """The size of one episode: all tokens and the sampled ones, turns, seconds in tools and scorers."""

    tokens: int
    sampled: int
    turns: int
    outside_s: float


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The cost model of a run, in seconds."""

    # An engine's decoding iteration: a fixed part, and one for each running sequence.
    iteration_base_s: float
    iteration_sequence_s: float
    # From a request to its first token: prefill, HTTP, the agent loop.
    turn_s: float
    # On a single rank.
    train_token_s: float
    sync_s: float
    # The rest of a step: checkpoint, metrics.
    other_s: float

    def iteration_s(self, sequences: int) -> float:
        return self.iteration_base_s + self.iteration_sequence_s * sequences


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one accelerator. The defaults are an H100 SXM's, with shares that are usual in practice.

    ``tflops`` counts dense bfloat16 arithmetic, of which training reaches ``training_share``; decoding reaches
    ``decoding_share`` of the memory bandwidth. Weights travel to other machines at ``link_gb_s``.
    """

    tflops: float = 989.0
    bandwidth_gb_s: float = 3350.0
    training_share: float = 0.4
    decoding_share: float = 0.6
    link_gb_s: float = 50.0


def assumed(size: ModelSize, device: Device, tokens: int) -> Costs:
    """Estimate costs from a device's figures.

    Training a token costs 8 operations per active parameter (in a mixture, only the chosen experts count): forward (2),
    backward (4), and the forward pass for the proximal policy (2). Decoding reads every weight once per iteration, and
    the cache of each sequence, ``tokens`` long on average while it decodes; both in 2-byte numbers.
    """
    bandwidth = device.bandwidth_gb_s * 1e9 * device.decoding_share
    return Costs(
        iteration_base_s=2 * size.parameters / bandwidth,
        iteration_sequence_s=2 * size.kv_per_token * tokens / bandwidth,
        turn_s=0.05,
        train_token_s=8 * (size.parameters - size.idle) / (device.tflops * 1e12 * device.training_share),
        sync_s=0.2 + 2 * size.parameters / (device.link_gb_s * 1e9),
        other_s=0.1,
    )


def assumed_episodes(config: RunConfig) -> list[EpisodeShape]:
    """Draw 512 lengths: log-normal, with a median of a third of ``agent.max_tokens``, clipped at that maximum."""
    draw = np.random.default_rng(config.seed)
    lengths = np.minimum(draw.lognormal(np.log(config.agent.max_tokens / 3), 0.7, 512), config.agent.max_tokens)
    return [EpisodeShape(int(length) + 64, max(1, int(length)), 1, 0.0) for length in lengths]


class Fit(NamedTuple):
    """Fitted seconds, none negative. ``explained`` is the share of explained variance of episode times (R squared)."""

    iteration_base_s: float
    iteration_sequence_s: float
    turn_s: float
    explained: float


def measure(run: Path, engines: int, ranks: int) -> tuple[Costs, list[EpisodeShape], Fit]:
    """Fit the costs to a recorded run with this number of engines and ranks.

    Raises UserError if the run is too short, or its episodes' times do not grow with their lengths.

    The costs of an iteration and of a turn are fitted by least squares. The fit assumes that the episodes of a step
    began together, as they do in an on-policy run whose ``agent.concurrency`` is as large as the batch: an episode of n
    tokens took ``turn * turns``, and for each token ``base + per_sequence * (episodes of at least that length) /
    engines``.
    """
    metrics = LineTail(run / "metrics.jsonl").records()[SKIPPED:]
    steps = recorded_steps(run)
    if len(metrics) < 3 or len(steps) < 3:
        raise UserError(f"--run: {run} has fewer than {3 + SKIPPED} recorded steps; let it train longer")
    fit = fit_engine([steps[step] for step in sorted(steps)], engines)
    if fit.iteration_base_s + fit.iteration_sequence_s <= 0:
        raise UserError(
            f"--run: the times of {run}'s episodes do not grow with their lengths, so the cost of a token cannot be "
            "fitted; record a run with queue.max_staleness=0 and agent.concurrency at least as large as a batch"
        )
    spent = ("time/wait_batch_s", "time/train_s", "time/sync_s")
    costs = Costs(
        iteration_base_s=fit.iteration_base_s,
        iteration_sequence_s=fit.iteration_sequence_s,
        turn_s=fit.turn_s,
        train_token_s=training_token_s(metrics, ranks),
        sync_s=statistics.median(m["time/sync_s"] for m in metrics),
        other_s=statistics.median(max(0.0, m["time/step_s"] - sum(m[key] for key in spent)) for m in metrics),
    )
    return costs, [episode for episodes in steps.values() for episode, _ in episodes], fit


def training_token_s(metrics: Sequence[Record], ranks: int) -> float:
    """Return the seconds that one rank takes for a token: the median over the steps."""
    return statistics.median(m["time/train_s"] * ranks / m["rollout/tokens"] for m in metrics)


# An episode and the seconds that it spent generating.
Timed = tuple[EpisodeShape, float]


def recorded_steps(run: Path) -> dict[int, list[Timed]]:
    """Return the episodes of each recorded step after the first ``SKIPPED``, with their generation times."""
    found: dict[int, list[Timed]] = defaultdict(list)
    folder = run / "trajectories"
    steps = sorted({int(file.name.split("-")[1].split(".")[0]) for file in folder.glob("step-*.jsonl.gz")})
    # A step that was trained again after a restart is recorded in several lineages; ``files_of_step`` takes the newest.
    for file in (file for step in steps for file in files_of_step(folder, step)):
        step = int(file.name.split("-")[1])
        for row in read_trajectories(file):
            generate = row.timings.get("generate", 0.0)
            outside = max(0.0, row.timings.get("total", generate) - generate) + row.timings.get("reward", 0.0)
            turns = sum(turn.role == "assistant" for turn in row.turns)
            sampled = int(row.loss_mask.sum())
            found[step].append((EpisodeShape(len(row.token_ids), max(1, sampled), max(1, turns), outside), generate))
    return {step: rows for step, rows in found.items() if step >= SKIPPED}


def fit_engine(steps: Sequence[Sequence[Timed]], engines: int) -> Fit:
    """Fit the costs of an iteration, of a sequence in it, and of a turn; see ``measure``."""
    rows, seconds = [], []
    for episodes in steps:
        longest = max(episode.sampled for episode, _ in episodes)
        lengths = np.array([episode.sampled for episode, _ in episodes])
        alive = np.array([(lengths > k).sum() for k in range(longest)]) / engines  # [longest]
        # shared[k] counts the iterations of all sequences until token k.
        shared = np.concatenate([[0.0], np.cumsum(alive)])
        rows += [(episode.sampled, shared[episode.sampled], episode.turns) for episode, _ in episodes]
        seconds += [generate for _, generate in episodes]
    inputs, target = np.array(rows, dtype=np.float64), np.array(seconds)
    fitted = _nonnegative(inputs, target)
    spread = float(((target - target.mean()) ** 2).sum())
    residual = float(((target - inputs @ fitted) ** 2).sum())
    return Fit(float(fitted[0]), float(fitted[1]), float(fitted[2]), 1 - residual / spread if spread else 0.0)


def _nonnegative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve least squares of ``rows`` [N, K] for [K], dropping one by one the columns with negative solutions."""
    active = list(range(rows.shape[1]))
    solved = np.zeros(rows.shape[1])
    while active:
        found = np.linalg.lstsq(rows[:, active], target, rcond=None)[0]
        if (found >= 0).all():
            solved[active] = found
            break
        active.pop(int(found.argmin()))
    return solved


# A sequence has ended when less than this part of its last token is missing: times are rounded.
_TOKEN_ROUNDING = 1e-6

# The engine's token count at which a sequence ends, its order among equals, and the action that follows.
_Running = tuple[float, int, Callable[[], None]]


class SimulatedClock:
    """A clock that jumps from one scheduled action to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` in ``seconds``; of two at the same time, the one scheduled first runs first."""
        self._count += 1
        heapq.heappush(self._due, (self.now + max(0.0, seconds), self._count, action))

    def step(self) -> bool:
        """Run the next action; return False if nothing is scheduled."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        action()
        return True


class SimulatedEngine:
    """A batch of sequences that gain tokens together.

    ``_tokens`` counts the tokens that a sequence would have gained since the start, so that a sequence ends when the
    count has grown by its length. At most one scheduled action of an engine is in force, the one for ``_due``. A
    sequence that joins slows down the others, so an action scheduled earlier comes too early and is then rescheduled.
    """

    def __init__(
        self, clock: SimulatedClock, costs: Costs, max_batch: int, left: Callable[[], None] = lambda: None
    ) -> None:
        """``left`` is called when sequences have ended, before their own actions."""
        self._clock, self._max_batch, self._left = clock, max_batch, left
        self._base_s, self._sequence_s = costs.iteration_base_s, costs.iteration_sequence_s
        self._running: list[_Running] = []
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._tokens, self._since, self._added = 0.0, 0.0, 0
        self._due = math.inf
        # The number of sequences, including waiting ones.
        self.load = 0
        self.paused = False
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds spent decoding until now."""
        self._advance()
        return self._busy_s

    def add(self, tokens: int, done: Callable[[], None]) -> None:
        """Decode ``tokens``, now or when there is room."""
        self.load += 1
        if len(self._running) < self._max_batch:
            self._advance()
            # Unless the new sequence ends first, the scheduled end only moves back, and ``_look`` reschedules it.
            if self._start(tokens, done) is self._running[0]:
                self._schedule()
        else:
            self._waiting.append((tokens, done))

    def pause(self, on: bool) -> None:
        """Stop decoding and keep the sequences, or resume."""
        self._advance()
        self.paused = on
        self._schedule()

    def _start(self, tokens: int, done: Callable[[], None]) -> _Running:
        self._added += 1
        started = (self._tokens + tokens, self._added, done)
        heapq.heappush(self._running, started)
        return started

    def _advance(self) -> None:
        now = self._clock.now
        if now == self._since:
            return
        if self._running and not self.paused:
            passed = now - self._since
            self._tokens += passed / (self._base_s + self._sequence_s * len(self._running))
            self._busy_s += passed
        self._since = now

    def _schedule(self) -> None:
        """Schedule ``_look`` no later than the first sequence ends."""
        if not self._running or self.paused:
            return
        now, tokens = self._clock.now, self._running[0][0] - self._tokens
        due = now + tokens * (self._base_s + self._sequence_s * len(self._running))
        # Time has to pass even if the remaining tokens round to nothing.
        due = max(due, math.nextafter(now, math.inf))
        if due < self._due:
            self._due = due
            self._clock.after(due - now, lambda: self._look(due))

    def _look(self, due: float) -> None:
        """End the sequences that have all their tokens by now."""
        # An earlier action has been scheduled since.
        if due != self._due:
            return
        self._due = math.inf
        self._advance()
        if self.paused or not self._running:
            return
        ended = []
        while self._running and self._running[0][0] <= self._tokens + _TOKEN_ROUNDING:
            ended.append(heapq.heappop(self._running)[2])
        self.load -= len(ended)
        while self._waiting and len(self._running) < self._max_batch:
            self._start(*self._waiting.popleft())
        self._schedule()
        if ended:
            self._left()
        for done in ended:
            done()


class Pool:
    """Engines with least-loaded routing. ``_by_load`` is a heap that also holds outdated entries."""

    def __init__(self, clock: SimulatedClock, costs: Costs, engines: int, max_batch: int) -> None:
        self._by_load = [(0, number) for number in range(engines)]
        self._engines = [
            SimulatedEngine(clock, costs, max_batch, lambda number=number: self._note(number))  # type: ignore[misc]
            for number in range(engines)
        ]

    def _note(self, number: int) -> None:
        heapq.heappush(self._by_load, (self._engines[number].load, number))

    def add(self, tokens: int, done: Callable[[], None]) -> None:
        """Decode ``tokens`` on the least-loaded engine."""
        while self._by_load[0][0] != self._engines[self._by_load[0][1]].load:
            heapq.heappop(self._by_load)
        load, number = self._by_load[0]
        heapq.heapreplace(self._by_load, (load + 1, number))
        self._engines[number].add(tokens, done)

    def pause(self, on: bool) -> None:
        """Stop decoding on all engines, or resume."""
        for engine in self._engines:
            engine.pause(on)

    def busy_s(self) -> float:
        """Return the busy seconds of an engine, averaged over the engines."""
        return sum(engine.busy_s for engine in self._engines) / len(self._engines)


WORKER = "simulated"


class DeviceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How devices are divided between engines and trainer ranks. Colocated, both have all of them and take turns."""

    engines: int
    ranks: int
    colocated: bool
    # Sequences that each engine decodes at once.
    max_batch: int
    # Concurrent conversations of all workers together.
    concurrency: int


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the measured steps.

    ``trainer_idle`` is the share of time that the trainer waits for batches, ``engine_idle`` the share that an engine
    decodes nothing. Staleness is that of the first token of each row.
    """

    step_s: float
    tokens_per_s: float
    trainer_idle: float
    engine_idle: float
    staleness_mean: float
    staleness_max: float


class Simulation:
    """A simulated run: the queue's ``Store`` with simulated engines, workers and trainer."""

    def __init__(
        self,
        settings: QueueSettings,
        layout: DeviceSplit,
        costs: Costs,
        episodes: Sequence[EpisodeShape],
        seed: int = 0,
    ) -> None:
        """Set up a run with ``settings``, assuming that every group has a learning signal, so that none is refilled."""
        self._settings, self._layout, self._costs, self._episodes = settings, layout, costs, episodes
        self._random = random.Random(seed)
        self._clock = SimulatedClock()
        whole = msgspec.structs.replace(settings, group_size=1, max_refills=0)
        self._store = Store(whole, Counted(), [], lambda transition: None)
        self._engines = Pool(self._clock, costs, layout.engines, layout.max_batch)
        self._live_conversations = 0
        self._step, self._published = 0, 0
        self._waiting_since: float | None = None
        self._ends: list[float] = []
        self._waits: list[float] = []
        # An engine's busy seconds until the end of each step.
        self._busy: list[float] = []
        self._tokens: list[int] = []
        # For each step, the staleness of its groups.
        self._staleness: list[list[int]] = []

    def run(self, warm: int = 2, measured: int | None = None) -> SimulationResult:
        """Train ``measured`` steps after the first ``warm`` ones, or all others, and return means over them.

        With fewer than all, the end of the run is left out, when engines run out of groups. Raises ProtocolError if the
        run stalls earlier.
        """
        steps = self._settings.steps if measured is None else warm + measured
        if not 1 <= warm < steps - 1 or steps > self._settings.steps:
            raise UserError(f"a simulated run needs at least {warm + 2} steps")
        self._publish()
        with _uncollected():
            while len(self._ends) < steps:
                if not self._clock.step():
                    raise ProtocolError(f"the simulated run stalls at step {self._step}")
        first, last = self._ends[warm - 1], self._ends[-1]
        ages = [age for of_step in self._staleness[warm:steps] for age in of_step]
        busy = (self._busy[-1] - self._busy[warm - 1]) / (last - first)
        return SimulationResult(
            step_s=(last - first) / (steps - warm),
            tokens_per_s=sum(self._tokens[warm:steps]) / (last - first),
            trainer_idle=sum(self._waits[warm:steps]) / (last - first),
            engine_idle=1 - busy,
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
        )

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._step < self._settings.steps:
            self._waiting_since = self._clock.now
            self._reserve()

    def _reserve(self) -> None:
        if self._waiting_since is None or self._store.batches.is_short(self._step):
            return
        reply = self._store.batches.reserve(self._step, self._clock.now)
        # ``_ended`` tries again with every finished group.
        if not isinstance(reply, Reserved):
            return
        self._waits.append(self._clock.now - self._waiting_since)
        self._waiting_since = None
        tokens = sum(header.tokens for header in reply.headers)
        self._tokens.append(tokens)
        self._staleness.append([self._step - header.versions[0].version.step for header in reply.headers])
        if self._layout.colocated:
            self._engines.pause(True)
        self._clock.after(tokens * self._costs.train_token_s / self._layout.ranks, self._trained)

    def _trained(self) -> None:
        self._store.batches.commit(self._step)
        # Engines do not decode while they receive weights.
        self._engines.pause(True)
        self._clock.after(self._costs.sync_s, self._synced)

    def _synced(self) -> None:
        self._step += 1
        self._published = self._step
        self._publish()
        self._store.retire(self._step)

    def _publish(self) -> None:
        self._store.publish(Version(0, self._published), [])
        self._engines.pause(False)
        self._lease()
        self._clock.after(
            self._costs.other_s if self._step else 0.0, self._end_step if self._step else self._begin_step
        )

    def _end_step(self) -> None:
        self._ends.append(self._clock.now)
        self._busy.append(self._engines.busy_s())
        self._begin_step()

    # --- the workers ------------------------------------------------------------------------------------------------

    def _lease(self) -> None:
        size = self._settings.group_size
        room = (self._layout.concurrency - self._live_conversations) // size
        if room <= 0:
            return
        self._store.delivery.renew(WORKER, self._clock.now)
        for leased in self._store.delivery.lease(WORKER, room, self._clock.now).groups:
            self._live_conversations += size
            group = _Group(leased, self._published, self._random.choices(self._episodes, k=size))
            self._clock.after(self._costs.turn_s, partial(self._begin, group))

    def _begin(self, group: "_Group") -> None:
        """Decode the first turns of a group after its prefill."""
        # Single-turn episodes are most of a simulation's work, so they share one action.
        ended = partial(self._ended, group)
        for episode in group.episodes:
            if episode.turns == 1 and not episode.outside_s:
                self._engines.add(max(1, episode.sampled), ended)
            else:
                self._decode(group, episode, 0)

    def _decode(self, group: "_Group", episode: EpisodeShape, turn: int) -> None:
        tokens = episode.sampled // episode.turns + (turn < episode.sampled % episode.turns)
        self._engines.add(max(1, tokens), partial(self._decoded, group, episode, turn))

    def _decoded(self, group: "_Group", episode: EpisodeShape, turn: int) -> None:
        """Schedule the end of a turn's tools, then the next turn or the end of the episode."""
        last = turn + 1 == episode.turns
        seconds = episode.outside_s / episode.turns + (0.0 if last else self._costs.turn_s)
        following = partial(self._ended, group) if last else partial(self._decode, group, episode, turn + 1)
        if seconds:
            self._clock.after(seconds, following)
        else:
            following()

    def _ended(self, group: "_Group") -> None:
        self._live_conversations -= 1
        group.missing -= 1
        if not group.missing:
            self._put(group)
            self._reserve()
            self._lease()

    def _put(self, group: "_Group") -> None:
        leased = group.leased
        sampled = sum(episode.sampled for episode in group.episodes)
        header = TrajectoryHeader(
            group_id=leased.group_id,
            sample=0,
            attempt=leased.attempt,
            partition=leased.partition,
            episode_id=str(leased.group_id),
            segment=0,
            tokens=sum(episode.tokens for episode in group.episodes),
            sampled=sampled,
            reward=0.0,
            finish_reason="stop",
            versions=[VersionRun(Version(0, group.version), 0, sampled)],
            tokens_hash="",
        )
        reply = self._store.delivery.put(WORKER, [header], self._clock.now)
        if isinstance(reply, Refused):
            raise ProtocolError(f"the queue refused group {leased.group_id}: {reply.reason}")


class _Group:
    """A leased group whose conversations are played."""

    __slots__ = ("episodes", "leased", "missing", "version")

    def __init__(self, leased: LeasedGroup, version: int, episodes: Sequence[EpisodeShape]) -> None:
        self.leased, self.version, self.episodes = leased, version, episodes
        # Conversations that have not ended yet.
        self.missing = len(episodes)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the cyclic garbage collector: a simulation makes no cycles, and searching for them dominates large ones."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# Seconds of the queue's process on a 2.6 GHz core (docs/explanation/results.md): for a row and, in each second, for
# an idle worker, as measured by ``python -m benchmarks.scale --workers 10000`` with groups of 8 rows and their workers'
# polls and renewals; and for a token, as measured by ``python -m benchmarks.transfer_queue`` with rows of 1,536 and
# 32,768 tokens.
QUEUE_ROW_S = 1.0e-4
QUEUE_WORKER_S = 4.0e-5
QUEUE_TOKEN_S = 1.8e-8


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a step's time, by resource.

    ``engines`` is relative to the tokens per second of full batches, ``queue`` to one processor; ``publication`` is the
    time that engines and trainer wait for weights. ``longest_answer`` is the longest episode of a batch, decoded alone
    and without its tools; ``tools`` is the longest time that an episode spends in tools. Both of these may last as many
    steps as the bound on staleness allows.
    """

    trainer: float
    engines: float
    queue: float
    publication: float
    longest_answer: float
    tools: float

    @property
    def first(self) -> str:
        """The name of the resource with the largest share."""
        shares = msgspec.structs.asdict(self)
        return max(shares, key=shares.__getitem__).replace("_", " ")

    @property
    def largest(self) -> float:
        return max(msgspec.structs.astuple(self))


def saturation(
    costs: Costs,
    episodes: Sequence[EpisodeShape],
    layout: DeviceSplit,
    bound: int,
    rows: int,
    workers: int,
    outcome: SimulationResult,
) -> Saturation:
    """Return the shares that a simulated run with this bound on staleness and ``rows`` in a batch used."""
    tokens = sum(episode.tokens for episode in episodes) / len(episodes)
    sampled = sum(episode.sampled for episode in episodes) / len(episodes)
    rows_per_s = rows / outcome.step_s
    row_tokens = outcome.tokens_per_s / rows_per_s
    most = layout.engines * layout.max_batch / costs.iteration_s(layout.max_batch)
    within = (bound + 1) * outcome.step_s
    answers = [episode.turns * costs.turn_s + episode.sampled * costs.iteration_s(1) for episode in episodes]
    return Saturation(
        trainer=row_tokens * rows * costs.train_token_s / layout.ranks / outcome.step_s,
        engines=outcome.tokens_per_s * sampled / tokens / most,
        queue=rows_per_s * (QUEUE_ROW_S + row_tokens * QUEUE_TOKEN_S) + workers * QUEUE_WORKER_S,
        publication=costs.sync_s / outcome.step_s,
        longest_answer=longest(answers, rows) / within,
        tools=longest([episode.outside_s for episode in episodes], rows) / within,
    )


def longest(seconds: Sequence[float], rows: int) -> float:
    """Return the expected maximum of ``rows`` draws with replacement."""
    ordered = sorted(seconds)
    count = len(ordered)
    # below[k] is the probability that all draws are among the k shortest.
    below = [(place / count) ** rows for place in range(count + 1)]
    return sum(each * (below[place + 1] - below[place]) for place, each in enumerate(ordered))


class SplitEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated figures of one split of devices: a row of the table.

    ``memory_bytes`` is an upper bound for the fullest device, and None if the model's size is unknown.
    """

    mode: str
    trainers: int
    engines: int
    max_staleness: int
    outcome: SimulationResult
    used: Saturation
    memory_bytes: int | None


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run and its simulation: mean seconds of a step, share of waiting, staleness."""

    run: str
    step_s: float
    recorded_step_s: float
    # Simulated with the training speed of this run, which depends on the other load of its cores.
    own_step_s: float
    trainer_idle: float
    recorded_idle: float
    staleness: float
    recorded_staleness: float

    @property
    def error(self) -> float:
        """Relative error of the simulated length of a step."""
        return self.step_s / self.recorded_step_s - 1


def plan_devices(
    name: str, overrides: Sequence[str], gpus: int, run: Path | None, check: Sequence[Path], out: Path | None
) -> int:
    """Print the table and the errors on recorded runs; return the exit code. Raises UserError if a cost is unknown."""
    config, _ = settle(load_config(name, overrides), gpus, 1, planned_accelerator)
    if gpus < config.rollout.ranks:
        raise UserError(f"--gpus: {gpus} devices cannot run anything; give {config.rollout.ranks} or more")
    costs, episodes, source = estimate(config, run)
    checks = [validate(recorded, costs, episodes) for recorded in check]
    rows = sorted(simulate_all(config, gpus, costs, episodes), key=lambda row: -row.outcome.tokens_per_s)
    print(
        "\n".join(
            [*source_lines(costs, episodes, source), *table(rows), *used_lines(rows[0], gpus), *check_lines(checks)]
        )
    )
    if out is not None:
        out.write_bytes(msgspec.json.encode({"costs": costs, "rows": rows, "checks": checks}) + b"\n")
    return 0


def planned_accelerator(device: str, shape: tuple[int, int], threads: int) -> Measured:
    """Answer in place of ``ask_torch`` for planned devices, which may be absent here and count as having bfloat16."""
    planned = Measured("", accelerator="the planned device", has_bfloat16=True)
    return ask_torch(device, shape, threads) if device == "cpu" else planned


def estimate(config: RunConfig, run: Path | None) -> tuple[Costs, list[EpisodeShape], str]:
    """Return costs and episodes, and a sentence on their source."""
    if run is not None:
        recorded = load_resolved(run / "config.yaml")
        costs, episodes, fit = measure(run, recorded.rollout.engines, recorded.trainer.ranks)
        return costs, episodes, f"measured on {run}: {fit_note(fit, recorded)}"
    size = model_size(config)
    if size is None:
        raise UserError(f"model.path: the size of {config.model.path} is unknown; give a recorded run with --run")
    episodes = assumed_episodes(config)
    # A sequence that is being decoded is on average halfway through.
    tokens = sum(episode.tokens for episode in episodes) // len(episodes) // 2
    device = Device(bandwidth_gb_s=Device().bandwidth_gb_s * config.rollout.tensor_parallel)
    return assumed(size, device, tokens), episodes, "assumed: an H100's figures and log-normal lengths, not measured"


def fit_note(fit: Fit, recorded: RunConfig) -> str:
    """Say how well the engine's costs were fitted to a run with this config."""
    batch = recorded.data.train_batch_groups * recorded.rollout.group_size
    overlaps = {
        "queue.max_staleness=0": recorded.queue.max_staleness > 0,
        f"agent.concurrency={batch}": recorded.agent.workers * recorded.agent.concurrency < batch,
    }
    missing = " and ".join(setting for setting, found in overlaps.items() if found)
    quality = f"the engine's explain {fit.explained:.0%} of the differences between episodes' times"
    return f"{quality}; a run with {missing} gives a better fit" if missing else quality


def candidates(config: RunConfig, gpus: int) -> Iterator[tuple[DeviceSplit, int]]:
    """Yield the splits to simulate, each with a bound on staleness: 0, 1 and the config's."""
    bounds, each = sorted({0, 1, config.queue.max_staleness}), config.rollout.ranks
    concurrency = config.agent.workers * config.agent.concurrency
    batch = config.rollout.max_batch_size

    def split(engines: int, ranks: int, *, colocated: bool) -> DeviceSplit:
        # Workers are cheap: as many as keep every engine full, unless the config has more.
        room = max(concurrency, engines * batch)
        return DeviceSplit(engines=engines, ranks=ranks, colocated=colocated, max_batch=batch, concurrency=room)

    for bound in bounds:
        yield split(gpus // each, gpus, colocated=True), bound
    for ranks in sorted({min(gpus - each, max(1, round(share * gpus))) for share in SHARES if gpus > each}):
        for bound in bounds:
            yield split((gpus - ranks) // each, ranks, colocated=False), bound


def simulate_all(
    config: RunConfig, gpus: int, costs: Costs, episodes: Sequence[EpisodeShape]
) -> Iterator[SplitEstimate]:
    """Simulate every split of the devices, with many devices in a process per core, and announce each one's end."""
    wanted = list(candidates(config, gpus))
    simulated = partial(_simulate_split, config, costs, episodes)
    with ExitStack() as stack:
        rows: Iterator[SplitEstimate] = map(simulated, wanted)
        workers = min(int(cores()), len(wanted))
        if workers > 1 and gpus >= PARALLEL:
            # Otherwise a spawned process imports a user's random.py, if the working directory has one.
            stack.enter_context(_without_working_directory())
            context = multiprocessing.get_context("spawn")
            rows = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context)).map(simulated, wanted)
        for number, ((layout, bound), row) in enumerate(zip(wanted, rows), start=1):
            text = f"simulated {number} of {len(wanted)}: {described(layout)}, bound {bound}"
            print(text, file=sys.stderr, flush=True)
            yield row


@contextmanager
def _without_working_directory() -> Iterator[None]:
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ.pop("PYTHONSAFEPATH")
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _simulate_split(
    config: RunConfig, costs: Costs, episodes: Sequence[EpisodeShape], candidate: tuple[DeviceSplit, int]
) -> SplitEstimate:
    """Call ``simulate`` in another process, which takes one argument at a time."""
    return simulate(config, *candidate, costs, episodes)


def steps_to_simulate(rows: int, bound: int) -> tuple[int, int]:
    """Return the numbers of warm-up steps and of measured steps for batches of ``rows``.

    Where engines wait for the longest answers, bound + 1 batches are generated together, so step lengths repeat with
    that period. Measuring whole periods keeps the mean independent of where it starts.
    """
    cycle = bound + 1
    wanted = max(FEWEST_STEPS, min(STEPS, ROWS // rows))
    return cycle, -(-wanted // cycle) * cycle


def simulate(
    config: RunConfig,
    layout: DeviceSplit,
    bound: int,
    costs: Costs,
    episodes: Sequence[EpisodeShape],
    steps: int | None = None,
) -> SplitEstimate:
    """Simulate one split of the devices under one bound on staleness.

    With ``steps`` the run is simulated to its end; otherwise the middle of a longer run is measured.
    """
    queue = QueueSettings.of(config)
    rows = config.data.train_batch_groups * config.rollout.group_size
    warm, measured = steps_to_simulate(rows, bound)
    settings = msgspec.structs.replace(
        queue,
        steps=steps or warm + measured + bound + 1,
        max_staleness=bound,
        slack=min(queue.slack, bound),
        # Neither payloads nor data sets are simulated.
        replicas=0,
        sampling="fifo" if queue.sampling == "quota" else queue.sampling,
        weights={},
    )
    simulation = Simulation(settings, layout, costs, episodes, config.seed)
    outcome = simulation.run(WARM) if steps else simulation.run(warm, measured)
    workers = -(-layout.concurrency // config.agent.concurrency)
    return SplitEstimate(
        mode="colocated" if layout.colocated else "disaggregated",
        trainers=layout.ranks,
        engines=layout.engines,
        max_staleness=bound,
        outcome=outcome,
        used=saturation(costs, episodes, layout, bound, rows, workers, outcome),
        memory_bytes=memory(config, layout),
    )


def memory(config: RunConfig, layout: DeviceSplit) -> int | None:
    """Estimate the memory of the fullest device; None if unknown.

    Engines and trainer are never together on a device: colocated, the sleeping one is on the host.
    """
    size = model_size(config)
    trainer = msgspec.structs.replace(config.trainer, ranks=layout.ranks)
    trains = trainer_bytes(msgspec.structs.replace(config, trainer=trainer), size)
    decodes = engine_bytes(config, size, on_gpu=config.model.device != "cpu")
    return None if trains is None or decodes is None else max(trains, decodes // config.rollout.ranks)


def validate(run: Path, costs: Costs, episodes: Sequence[EpisodeShape]) -> RunComparison:
    """Simulate a recorded run with its own split of devices. Raises UserError if it is too short."""
    config = load_resolved(run / "config.yaml")
    metrics = LineTail(run / "metrics.jsonl").records()[WARM:]
    if len(metrics) < 3:
        raise UserError(f"--check: {run} has fewer than {WARM + 3} recorded steps")
    layout = DeviceSplit(
        engines=config.rollout.engines,
        ranks=config.trainer.ranks,
        colocated=config.mode == "colocated",
        max_batch=config.rollout.max_batch_size,
        concurrency=config.agent.workers * config.agent.concurrency,
    )
    own = msgspec.structs.replace(costs, train_token_s=training_token_s(metrics, config.trainer.ranks))
    outcome, own_outcome = (
        simulate(config, layout, config.queue.max_staleness, each, episodes, len(metrics) + WARM).outcome
        for each in (costs, own)
    )
    total = sum(record["time/step_s"] for record in metrics)
    return RunComparison(
        run=str(run),
        step_s=outcome.step_s,
        recorded_step_s=total / len(metrics),
        own_step_s=own_outcome.step_s,
        trainer_idle=outcome.trainer_idle,
        recorded_idle=sum(record["time/wait_batch_s"] for record in metrics) / total,
        staleness=outcome.staleness_mean,
        recorded_staleness=sum(record["staleness/mean"] for record in metrics) / len(metrics),
    )


# --- text -------------------------------------------------------------------------------------------------------------


def described(layout: DeviceSplit) -> str:
    if layout.colocated:
        return f"colocated on {layout.ranks} devices"
    return f"disaggregated, {layout.ranks} trainers and {layout.engines} engines"


def source_lines(costs: Costs, episodes: Sequence[EpisodeShape], source: str) -> list[str]:
    """Describe the costs and episodes that the simulation uses."""
    sampled = sorted(episode.sampled for episode in episodes)
    return [
        f"costs {source}",
        f"an iteration: {costs.iteration_base_s * 1e3:.2f} ms + {costs.iteration_sequence_s * 1e3:.4f} ms a sequence; "
        f"a turn: {costs.turn_s:.2f} s; training: {costs.train_token_s * 1e6:.1f} us a token and rank; "
        f"weights: {costs.sync_s:.2f} s; the rest of a step: {costs.other_s:.2f} s",
        f"episodes: {len(sampled)}, sampled tokens {sampled[len(sampled) // 2]} (median) to {sampled[-1]}",
    ]


def table(rows: Sequence[SplitEstimate]) -> list[str]:
    """Format a header and one line per split, in the given order."""
    heads = ("mode", "trainers", "engines", "bound", "tokens/s", "step", "trainer idle", "engines idle")
    widths = (14, 9, 8, 6, 11, 9, 13, 13)
    head = "".join(
        text.ljust(width) if n == 0 else text.rjust(width) for n, (text, width) in enumerate(zip(heads, widths))
    )
    lines = [head + "  staleness mean max    memory  saturates first"]
    for row in rows:
        out = row.outcome
        held = "unknown" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.1f} GiB"
        lines.append(
            f"{row.mode:14}{row.trainers:9}{row.engines:8}{row.max_staleness:6}{out.tokens_per_s:11.0f}"
            f"{out.step_s:7.2f} s{out.trainer_idle:13.0%}{out.engine_idle:13.0%}{out.staleness_mean:16.2f}"
            f"{out.staleness_max:4.0f}{held:>10}  {row.used.first} {row.used.largest:.0%}"
        )
    return lines


def used_lines(row: SplitEstimate, gpus: int) -> list[str]:
    """Describe a split's share of each resource, and the number of devices that saturates one queue process."""
    shares = [f"{name.replace('_', ' ')} {share:.1%}" for name, share in msgspec.structs.asdict(row.used).items()]
    return [
        f"of the first row's step: {', '.join(shares)}",
        f"at its rate per device, the queue's process is full at about {gpus / row.used.queue:,.0f} devices",
    ]


def check_lines(checks: Sequence[RunComparison]) -> list[str]:
    """Describe how far the simulation is from recorded runs."""
    return [
        f"checked against {check.run}: a step of {check.step_s:.2f} s, recorded {check.recorded_step_s:.2f} s "
        f"({check.error:+.0%}; {check.own_step_s / check.recorded_step_s - 1:+.0%} with its own training speed); "
        f"waiting {check.trainer_idle:.0%}, recorded {check.recorded_idle:.0%}; staleness {check.staleness:.2f}, "
        f"recorded {check.recorded_staleness:.2f}"
        for check in checks
    ]
