"""``rl-async plan``: simulates throughput, idle time, staleness and memory for each split of devices."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from rl_async.configs.load import load_config, load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.insight.tail import LineTail
from rl_async.launcher.capacity_simulation import (
    Costs,
    Device,
    DeviceSplit,
    EpisodeShape,
    Fit,
    Saturation,
    Simulation,
    SimulationResult,
    assumed,
    assumed_episodes,
    measure,
    saturation,
    training_token_s,
)
from rl_async.launcher.plan.machine import Measured, ask_torch, cores, settle
from rl_async.launcher.plan.memory import engine_bytes, model_size, trainer_bytes
from rl_async.transfer_queue.admission import QueueSettings

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
