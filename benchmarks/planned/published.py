"""The planner against runs that others have published.

Rows that calibrate give costs and are not predicted; no cost comes from a row that is predicted.

- Of one table, the generation times of two runs give what an iteration of an engine takes for each layer
  besides reading memory: all tables have the same engine, vLLM. It decides how long the longest answers take, whatever
  the number of engines.
- Of each table without the lengths of answers, a colocated run gives the median length, with which the simulated
  generation takes as long as the published one, and the cost of training a token.
- Where the disaggregated runs train in another way, one of them gives their cost of training.

A table with the lengths is predicted from the device's data sheet. Settings that tables do not give (tensor
parallelism, mini-batches, answers to a prompt, the engine's share of memory) are those of the scripts that come with
them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from rl_async.launcher.capacity import (
    Costs,
    Device,
    DeviceSplit,
    EpisodeShape,
    Simulation,
    SimulationResult,
    assumed,
)
from rl_async.launcher.plan.memory import ModelSize
from rl_async.transfer_queue.admission import QueueSettings

TABLES = Path(__file__).parent / "published.json"
SPREAD = 0.7  # of the logarithm of lengths, as in ``costs.assumed_episodes``
SHORTEST = 0.01  # median lengths that are tried, in longest ones
LATENCIES_S = 0.0, 0.001  # of a layer, that are tried
DECODED = 1024  # sequences at once per engine, verl's default (verl/trainer/config/rollout/rollout.yaml, max_num_seqs)
WARM, MEASURED = 2, 8
HALVINGS = 8
DRAWS = 200  # of mini-batches


class PublishedDevice(msgspec.Struct, forbid_unknown_fields=True):
    """A device's data sheet: dense bfloat16, memory bandwidth and memory."""

    name: str
    tflops: float
    bandwidth_gb_s: float
    memory_gb: float


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """The colocated run of a table that calibrates: seconds of a step and of its phases.

    The phases are means over the steps of which one takes ``phases_of_s``, if that is not ``step_s``, and are taken to
    be the same shares of both.
    """

    ranks: int
    step_s: float
    generate_s: float
    update_s: float
    logprob_s: float  # in which log-probabilities are computed again before the update
    phases_of_s: float | None = None

    def scaled(self) -> "Measured":
        """The same with the phases of ``step_s``."""
        scale = self.step_s / (self.phases_of_s or self.step_s)
        phases = {name: getattr(self, name) * scale for name in ("generate_s", "update_s", "logprob_s")}
        return msgspec.structs.replace(self, **phases, phases_of_s=None)


class Decoded(msgspec.Struct, forbid_unknown_fields=True):
    """Another run with the measured one's lengths: seconds in which its engines generate a batch."""

    engines: int
    tensor_parallel: int
    group_size: int
    generate_s: float


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """A run that is predicted. ``bound`` on staleness is in steps of a whole batch."""

    name: str
    engines: int
    ranks: int
    bound: int
    step_s: float
    recomputes: bool = True  # whether the trainer computes log-probabilities again before the update
    passes: bool = False  # whether a batch takes what is ready first, and stragglers get as old as it needs
    group_size: int | None = None  # if it is not the table's
    sampled: float | None = None  # mean tokens of an answer


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """One published table: ``kv_per_token`` in numbers; ``groups`` of a step."""

    source: str
    settings: str  # where those come from that the table does not give
    model: str
    layers: int
    attention_width: int  # of the queries of all heads
    parameters: int
    kv_per_token: int
    device: PublishedDevice
    groups: int
    group_size: int
    max_tokens: int
    tensor_parallel: int  # devices of an engine
    training_parallel: int  # ranks that share a sequence or a model, so that they are one data-parallel rank
    memory_share: float  # of a device's memory that is the engine's
    mini_rows: int  # of a mini-batch of the trainer
    predicted: list[Run]
    measured: Measured | None = None
    decoded: Decoded | None = None
    apart: Run | None = None  # the disaggregated run that calibrates their training
    forwards: int = 1  # passes without gradients over the tokens of a step: policy, and reference


class Prediction(msgspec.Struct):
    """One line of the report."""

    source: str
    run: str
    step_s: float
    published_step_s: float
    trainer_idle: float
    engine_idle: float

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the published one."""
        return self.step_s / self.published_step_s - 1


def tables() -> list[Table]:
    """All published tables."""
    return msgspec.json.decode(TABLES.read_bytes(), type=list[Table])


def lengths(table: Table, median: float) -> list[EpisodeShape]:
    """Answers, log-normal around ``median`` tokens and cut off at the table's longest."""
    draws = np.random.default_rng(0).lognormal(np.log(median), SPREAD, 2048)
    return [EpisodeShape(int(n) + 128, max(1, int(n)), 1, 0.0) for n in np.minimum(draws, table.max_tokens)]


def mean_tokens(episodes: Sequence[EpisodeShape]) -> float:
    return sum(episode.tokens for episode in episodes) / len(episodes)


def held_tokens(episodes: Sequence[EpisodeShape]) -> int:
    """How long a sequence is while it decodes, a mean over running ones: long answers run for longer."""
    return int(sum(e.tokens**2 for e in episodes) / sum(2 * e.tokens for e in episodes))


def sheet_costs(table: Table, episodes: Sequence[EpisodeShape], latency_s: float) -> Costs:
    """What the device's data sheet says, and the ``latency_s`` of a layer in each iteration.

    Attention costs a forward pass 4 operations for each number of a query and each token before it.
    """
    bandwidth = table.device.bandwidth_gb_s * table.tensor_parallel
    size = ModelSize(parameters=table.parameters, kv_per_token=table.kv_per_token)
    device = Device(tflops=table.device.tflops, bandwidth_gb_s=bandwidth)
    costs = assumed(size, device, held_tokens(episodes))
    passes = 3 + table.forwards  # a backward pass costs two forward ones; ``assumed`` counts 4
    attention = 4 * held_tokens(episodes) * table.attention_width * table.layers / (2 * table.parameters)
    return msgspec.structs.replace(
        costs,
        iteration_base_s=costs.iteration_base_s + latency_s * table.layers,
        train_token_s=costs.train_token_s * passes / 4 * (1 + attention),
    )


def imbalance(table: Table, episodes: Sequence[EpisodeShape], ranks: int) -> float:
    """How much longer a mini-batch takes than its tokens divided by the ranks: it ends with the rank that has most."""
    replicas = max(1, ranks // table.training_parallel)
    rows = max(1, round(table.mini_rows / replicas))
    tokens = np.array([episode.tokens for episode in episodes])
    sums = np.random.default_rng(0).choice(tokens, (DRAWS, replicas, rows)).sum(axis=2)  # [DRAWS, replicas]
    return float(sums.max(axis=1).mean() / sums.mean())


def simulated(
    table: Table,
    run: Run,
    episodes: Sequence[EpisodeShape],
    costs: Costs,
    *,
    warm: int = WARM,
    measured: int = MEASURED,
) -> SimulationResult:
    """The run with these lengths and costs, and workers enough for every sequence that fits into the cache."""
    colocated = run.name == "colocated"
    settings = QueueSettings(
        steps=warm + measured + run.bound + 1,
        batch_groups=table.groups,
        group_size=run.group_size or table.group_size,
        max_staleness=run.bound,
        on_straggler="mask" if run.passes else "wait",
        max_bytes=1 << 50,
        lease_s=1e9,
        max_lease_s=1e9,
    )
    room = table.device.memory_gb * 1e9 * table.memory_share * table.tensor_parallel - 2 * table.parameters
    fitting = int(room / (2 * table.kv_per_token * held_tokens(episodes)))
    layout = DeviceSplit(
        engines=run.engines,
        ranks=run.ranks,
        colocated=colocated,
        max_batch=max(1, min(DECODED, fitting)),
        concurrency=1 << 20,
    )
    return Simulation(settings, layout, costs, episodes).run(warm, measured)


def generation_s(table: Table, run: Run, median: float, latency_s: float) -> float:
    """Seconds in which the engines of a run generate a batch, were its answers of this median length."""
    episodes = lengths(table, median)
    costs = msgspec.structs.replace(sheet_costs(table, episodes, latency_s), sync_s=0.0, other_s=0.0)
    result = simulated(table, msgspec.structs.replace(run, bound=0), episodes, costs, warm=1)
    return result.step_s * result.trainer_idle


def bisect(function: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Where a growing function has the value, to 1/2**HALVINGS of the range; the nearer end if it has not."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


def colocated(table: Table, ranks: int) -> Run:
    """An on-policy run on so many devices."""
    return Run(name="colocated", engines=ranks // table.tensor_parallel, ranks=ranks, bound=0, step_s=0.0)


def median_length(table: Table, run: Measured, latency_s: float) -> float:
    """The median with which the simulated generation takes as long as the measured one."""
    longest, layout = table.max_tokens, colocated(table, run.ranks)
    return bisect(
        lambda n: generation_s(table, layout, n, latency_s), SHORTEST * longest, longest, run.scaled().generate_s
    )


def engine_latency(table: Table) -> float:
    """Seconds of a layer in an iteration besides reading memory, with which two runs generate as long as they did."""
    assert table.measured is not None and table.decoded is not None
    measured, other = table.measured, table.decoded
    fewer = msgspec.structs.replace(table, tensor_parallel=other.tensor_parallel, group_size=other.group_size)
    layout = Run(name="colocated", engines=other.engines, ranks=1, bound=0, step_s=0.0)

    def shortened(latency_s: float) -> float:  # the more of the time is latency, the fewer tokens explain the rest
        return -generation_s(fewer, layout, median_length(table, measured, latency_s), latency_s)

    return bisect(shortened, *LATENCIES_S, -other.generate_s)


def predict(table: Table, latency_s: float) -> list[Prediction]:
    """The runs that are predicted, with this latency of a layer."""
    if table.measured is None:
        return [from_sheet(table, run, latency_s) for run in table.predicted]
    measured = table.measured.scaled()
    episodes = lengths(table, median_length(table, measured, latency_s))
    costs = msgspec.structs.replace(
        sheet_costs(table, episodes, latency_s),
        sync_s=0.0,
        other_s=max(0.0, measured.step_s - measured.generate_s - measured.update_s - measured.logprob_s),
    )
    token_s = measured.ranks / (mean_tokens(episodes) * table.groups * table.group_size)
    update_s = measured.update_s * token_s / imbalance(table, episodes, measured.ranks)
    again_s = measured.logprob_s * token_s
    apart_s = update_s if table.apart is None else training_apart(table, table.apart, episodes, costs)

    def trained(run: Run) -> Costs:
        each = update_s if run.name == "colocated" else apart_s
        cost = each * imbalance(table, episodes, run.ranks) + again_s * run.recomputes
        return msgspec.structs.replace(costs, train_token_s=cost)

    return [predicted(table, run, episodes, trained(run)) for run in table.predicted]


def training_apart(table: Table, run: Run, episodes: Sequence[EpisodeShape], costs: Costs) -> float:
    """Seconds of a balanced rank for a token, with which a disaggregated run's step takes as long as published."""

    def step_s(token_s: float) -> float:
        return simulated(table, run, episodes, msgspec.structs.replace(costs, train_token_s=token_s)).step_s

    most = run.step_s * run.ranks / (mean_tokens(episodes) * table.groups * (run.group_size or table.group_size))
    return bisect(step_s, 0.0, most, run.step_s) / imbalance(table, episodes, run.ranks)


def from_sheet(table: Table, run: Run, latency_s: float) -> Prediction:
    """A run predicted from the device's data sheet and the mean length of its answers."""
    wanted, longest = run.sampled or 0.0, table.max_tokens

    def mean(median: float) -> float:
        return float(np.mean([episode.sampled for episode in lengths(table, median)]))

    episodes = lengths(table, bisect(mean, SHORTEST * longest, longest, wanted))
    costs = sheet_costs(table, episodes, latency_s)
    slower = costs.train_token_s * imbalance(table, episodes, run.ranks)
    return predicted(table, run, episodes, msgspec.structs.replace(costs, train_token_s=slower))


def predicted(table: Table, run: Run, episodes: Sequence[EpisodeShape], costs: Costs) -> Prediction:
    """The run simulated with these costs."""
    result = simulated(table, run, episodes, costs)
    devices = f"{run.ranks} : {run.engines * table.tensor_parallel}"
    if run.name == "colocated":
        devices = f"{run.ranks} in turns"
    return Prediction(
        source=table.source,
        run=f"{run.name}, {devices}, bound {run.bound}",
        step_s=result.step_s,
        published_step_s=run.step_s,
        trainer_idle=result.trainer_idle,
        engine_idle=result.engine_idle,
    )
