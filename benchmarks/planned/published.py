"""The planner against runs that others have published, of which none that is predicted gives a cost.

A table without the lengths of answers has the times of phases: its first run, a colocated one on-policy, is taken as
measured. The median length is the one with which the simulated generation takes as long as the published one, and the
rest of the published phases gives the cost of training. The engine's costs are those of ``costs.assumed`` for the
device. A table with the lengths is predicted from the device's data sheet alone, as ``rl-async plan`` without a run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from rl_async.launcher.capacity.costs import Costs, Device, EpisodeShape, assumed
from rl_async.launcher.capacity.simulation import DeviceSplit, Simulation, SimulationResult
from rl_async.launcher.plan.memory import ModelSize
from rl_async.transfer_queue.policy.admission import QueueSettings

TABLES = Path(__file__).parent / "published.json"
SPREAD = 0.7  # of the logarithm of lengths, as in ``costs.assumed_episodes``
SHORTEST = 0.01  # median lengths that are tried, in longest ones
DECODED = 1024  # sequences at once per engine, verl's default (verl/trainer/config/rollout/rollout.yaml, max_num_seqs)
STEPS, WARM = 4, 1
HALVINGS = 7


class PublishedDevice(msgspec.Struct, forbid_unknown_fields=True):
    """A device's data sheet: dense bfloat16, and memory bandwidth."""

    name: str
    tflops: float
    bandwidth_gb_s: float


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """The run of a table that costs are taken from: seconds of a step, and of its phases."""

    gpus: int
    step_s: float
    generate_s: float
    train_s: float  # all that the trainer computes
    logprob_s: float = 0.0  # the part of it in which log-probabilities are computed again before the update


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """A run that is predicted. ``bound`` on staleness is in steps of a whole batch."""

    name: str
    engines: int
    ranks: int
    bound: int
    step_s: float
    train_s: float | None = None  # all that its trainer computes; only for the second prediction
    recomputes: bool = True  # whether the trainer computes log-probabilities again before the update
    tensor_parallel: int = 1  # devices of an engine
    sampled: float | None = None  # mean tokens of an answer


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """One published table: ``kv_per_token`` in numbers; ``groups`` of a step."""

    source: str
    model: str
    parameters: int
    kv_per_token: int
    device: PublishedDevice
    groups: int
    group_size: int
    max_tokens: int
    measured: Measured | None
    predicted: list[Run]
    forwards: int = 1  # passes without gradients over the tokens of a step: policy, and reference


class Prediction(msgspec.Struct):
    """One line of the report."""

    source: str
    run: str
    step_s: float
    own_step_s: float | None  # with the training time of the run itself, which tells errors of the two sides apart
    published_step_s: float
    trainer_idle: float
    engine_idle: float

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the published one."""
        return self.step_s / self.published_step_s - 1

    @property
    def own_error(self) -> float | None:
        """Of the step predicted with the run's own training time, if that is published."""
        return None if self.own_step_s is None else self.own_step_s / self.published_step_s - 1


def tables() -> list[Table]:
    """All published tables."""
    return msgspec.json.decode(TABLES.read_bytes(), type=list[Table])


def lengths(table: Table, median: float) -> list[EpisodeShape]:
    """Answers, log-normal around ``median`` tokens and cut off at the table's longest."""
    draws = np.random.default_rng(0).lognormal(np.log(median), SPREAD, 2048)
    return [EpisodeShape(int(n) + 128, max(1, int(n)), 1, 0.0) for n in np.minimum(draws, table.max_tokens)]


def sheet_costs(table: Table, episodes: Sequence[EpisodeShape], tensor_parallel: int = 1) -> Costs:
    """What the device's data sheet says, with engines of so many devices."""
    mean = sum(episode.tokens for episode in episodes) / len(episodes)
    device = Device(tflops=table.device.tflops, bandwidth_gb_s=table.device.bandwidth_gb_s * tensor_parallel)
    size = ModelSize(parameters=table.parameters, kv_per_token=table.kv_per_token)
    costs = assumed(size, device, int(mean / 2))
    operations = 6 + 2 * table.forwards  # per parameter; ``assumed`` counts 8
    return msgspec.structs.replace(costs, train_token_s=costs.train_token_s * operations / 8)


def costs_of(table: Table, run: Measured, episodes: Sequence[EpisodeShape]) -> Costs:
    """Of the device, with the training of the measured run: ``rest`` of its step is what no phase accounts for."""
    mean = sum(episode.tokens for episode in episodes) / len(episodes)
    return msgspec.structs.replace(
        sheet_costs(table, episodes),
        train_token_s=run.train_s * run.gpus / (mean * table.groups * table.group_size),
        sync_s=0.0,
        other_s=max(0.0, run.step_s - run.generate_s - run.train_s),
    )


def simulated(
    table: Table, split: DeviceSplit, bound: int, episodes: Sequence[EpisodeShape], costs: Costs
) -> SimulationResult:
    """The run of this split."""
    settings = QueueSettings(
        steps=STEPS,
        batch_groups=table.groups,
        group_size=table.group_size,
        max_staleness=bound,
        max_bytes=1 << 50,
        lease_s=1e9,
        max_lease_s=1e9,
    )
    return Simulation(settings, split, costs, episodes).run(WARM)


def split(engines: int, ranks: int, *, colocated: bool) -> DeviceSplit:
    """So many devices, with workers enough for every sequence."""
    return DeviceSplit(engines=engines, ranks=ranks, colocated=colocated, max_batch=DECODED, concurrency=1 << 20)


def generation_s(table: Table, run: Measured, median: float) -> float:
    """Seconds that the measured run generates for, were its answers of this median length."""
    episodes = lengths(table, median)
    layout = split(run.gpus, run.gpus, colocated=True)
    result = simulated(table, layout, 0, episodes, costs_of(table, run, episodes))
    return result.step_s * result.trainer_idle


def bisect(function: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Where a growing function has the value, to 1/2**HALVINGS of the range; the nearer end if it has not."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


def predict(table: Table) -> list[Prediction]:
    """The runs that are predicted."""
    if table.measured is None:
        return [from_sheet(table, run) for run in table.predicted]
    longest, measured = table.max_tokens, table.measured
    median = bisect(lambda n: generation_s(table, measured, n), SHORTEST * longest, longest, measured.generate_s)
    episodes = lengths(table, median)
    return [from_measured(table, measured, run, episodes) for run in table.predicted]


def from_measured(table: Table, measured: Measured, run: Run, episodes: Sequence[EpisodeShape]) -> Prediction:
    """A run predicted from the measured one."""
    costs = costs_of(table, measured, episodes)
    share = 1.0 if run.recomputes else 1 - measured.logprob_s / measured.train_s
    own = None
    if run.train_s is not None:
        slower = run.train_s * run.ranks / (measured.train_s * measured.gpus)
        own = msgspec.structs.replace(costs, train_token_s=costs.train_token_s * slower)
    costs = msgspec.structs.replace(costs, train_token_s=costs.train_token_s * share)
    return predicted(table, run, episodes, costs, own)


def from_sheet(table: Table, run: Run) -> Prediction:
    """A run predicted from the device's data sheet and the mean length of its answers."""
    wanted, longest = run.sampled or 0.0, table.max_tokens

    def mean(median: float) -> float:
        return float(np.mean([episode.sampled for episode in lengths(table, median)]))

    episodes = lengths(table, bisect(mean, SHORTEST * longest, longest, wanted))
    return predicted(table, run, episodes, sheet_costs(table, episodes, run.tensor_parallel), None)


def predicted(
    table: Table, run: Run, episodes: Sequence[EpisodeShape], costs: Costs, own_costs: Costs | None
) -> Prediction:
    """The run simulated with these costs, and with its ``own_costs`` if they are known."""
    colocated = run.name != "disaggregated"
    layout = split(run.engines, run.ranks, colocated=colocated)
    result = simulated(table, layout, run.bound, episodes, costs)
    own = None if own_costs is None else simulated(table, layout, run.bound, episodes, own_costs).step_s
    devices = f"{run.ranks} in turns" if colocated else f"{run.ranks} : {run.engines * run.tensor_parallel}"
    return Prediction(
        source=table.source,
        run=f"{run.name}, {devices}, bound {run.bound}",
        step_s=result.step_s,
        own_step_s=own,
        published_step_s=run.step_s,
        trainer_idle=result.trainer_idle,
        engine_idle=result.engine_idle,
    )
