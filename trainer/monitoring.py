"""Monitors a rank beside training: its memory, profiles, the engines' loads and the queue's depth.

Memory is measured by stage of a step and compared with the run's budget: on a GPU that of the device, the engines'
share included, on a CPU that of this process. Profiles are of the config's steps and of those that ``rl-async
profile`` asks for:

    RUN/profiles/step-000010-rank0.json.gz        a timeline, for https://ui.perfetto.dev
    RUN/profiles/step-000010-rank0.memory.pickle  every allocation on a CUDA device, for https://pytorch.org/memory_viz

``RankCollector`` exports a rank's step, phase, memory and newest metrics to Prometheus.
``Guard`` watches how far the data is from the policy, and acts when it is too far: a pure state machine, fed each step.
A step is in band if ``correction/ess`` is at least ``min_ess`` and ``correction/k3`` at most ``max_kl``. All ranks see
the same metrics, so all decide alike.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from prometheus_client.core import GaugeMetricFamily, Metric
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from rl_async.concurrency import in_daemon_thread
from rl_async.configs.schema.algorithm import GuardConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import OutOfMemory, PolicyDrifted, UserError
from rl_async.messages import FAILED, EngineList, EngineRecord
from rl_async.process.allocation import give_back_freed_memory
from rl_async.process.http_server import by_label, gauge
from rl_async.process.run_files import (
    PHASES,
    DeviceBudget,
    Holder,
    Phase,
    ProfileRequest,
    Stage,
    read_beats,
    read_request,
    trace_file,
)
from rl_async.rollout_server.api import EngineLoad, EngineTokens
from rl_async.rollout_server.pool import EngineClient, ask_loads
from rl_async.torch_shared import is_out_of_memory
from rl_async.transfer_queue.client import SyncQueueClient

STAGES: tuple[Stage, ...] = get_args(Stage)
STAGE_OF: Mapping[Phase, Stage] = {
    "starting": "start",
    "waiting for a batch": "rollout",
    "training": "train",
    "meeting the ranks": "train",
    "publishing": "gather",
}
log = logging.getLogger("rl_async.trainer")


class Meter(Protocol):
    """Measures bytes."""

    def peak(self) -> int:
        """Return the peak since the last ``reset``, as it is compared with the budget."""
        ...

    def reset(self) -> None:
        """Start a new peak."""
        ...


class HostMeter:
    """Resident memory of this process, by Linux's ``/proc``."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def peak(self) -> int:
        return self._bytes("VmHWM")

    def now(self) -> int:
        """Return the bytes that are resident now."""
        return self._bytes("VmRSS")

    def _bytes(self, key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", (self._proc / "status").read_text())
        return int(found[1]) << 10 if found else 0

    def reset(self) -> None:
        # A container may hide the file or forbid writing. Then the peak is that since the start.
        with suppress(OSError):
            (self._proc / "clear_refs").write_text("5")


class DeviceMeter:
    """Memory of a device taken by any process: this one's peak, and the others' share at the time of the call.

    If this process has freed memory since the reset, others may have taken it. Then their share at the reset counts.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        # The shares at the latest reset.
        self._own_then = self._others_then = 0

    def peak(self) -> int:
        own, others = self._taken()
        given_back = own < self._own_then
        return torch.accelerator.max_memory_reserved(self._device) + (self._others_then if given_back else others)

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._own_then, self._others_then = self._taken()

    def _taken(self) -> tuple[int, int]:
        """Return the bytes that this process and that all others have."""
        free, total = torch.accelerator.get_memory_info(self._device)
        own = torch.accelerator.memory_reserved(self._device)
        return own, total - free - own


# Plans are estimates: a run is not told of a stage that takes this share more than was planned for it.
BEYOND_PLAN = 0.1


def exceeds(peak: int, planned: int) -> bool:
    """Whether a stage took so much more than was planned, in bytes, that a user should hear of it."""
    return peak > (1 + BEYOND_PLAN) * planned


class MemoryWatch:
    """Follows a rank through the stages of its steps.

    ``budget`` is that of its device and its own share, or None if none was planned.
    """

    def __init__(self, device: str, budget: tuple[DeviceBudget, Holder] | None) -> None:
        on_gpu = device != "cpu"
        self._host = HostMeter()
        self._device = device
        self._meter: Meter = DeviceMeter(device) if on_gpu else self._host
        self._budget, self._limits = budget, dict.fromkeys(STAGES, 0)
        if budget is not None:
            whose = budget[0] if on_gpu else budget[1]
            self._limits = {stage: whose.total(stage) for stage in STAGES}
        self.stage: Stage = "start"
        self._phase: Phase = "starting"
        self._peaks: dict[Stage, int] = {}
        self._host_peak = self._allocated_peak = 0
        self._warned: set[Stage] = set()

    def at(self, phase: Phase) -> None:
        """End the phase before this one, and count its peak for its stage.

        On a CPU, what malloc kept of the last stage goes back if the process would begin the next with more than
        planned. The engines of a laptop need it, and the peak of the next stage would count it.
        """
        self._read()
        self._phase, self.stage = phase, STAGE_OF.get(phase, self.stage)
        if self._meter is self._host and 0 < self._limits[self.stage] < self._host.now():
            give_back_freed_memory()
            self._host.reset()

    def metrics(self) -> dict[str, float]:
        """Return the peaks of the last step, over ranks, and their budgets. A collective."""
        self._read()
        stages: tuple[Stage, ...] = ("rollout", "train", "gather")
        numbers = [self._host_peak, self._allocated_peak]
        numbers += [self._peaks.get(stage, 0) for stage in stages] + [self._limits[stage] for stage in stages]
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        host, allocated, *rest = found.tolist()
        metrics = {"memory/host_peak_bytes": host}
        if self._device != "cpu":
            metrics["memory/device_peak_bytes"] = allocated
        for stage, peak, limit in zip(stages, rest[:3], rest[3:], strict=True):
            metrics[f"memory/{stage}_peak_bytes"] = peak
            if limit:
                metrics[f"memory/{stage}_budget_bytes"] = limit
        self._peaks, self._allocated_peak = {}, 0
        return metrics

    def _read(self) -> None:
        self._host_peak = max(self._host_peak, self._host.peak())
        peak = self._meter.peak()
        if self._device != "cpu":
            allocated = torch.accelerator.max_memory_allocated(self._device)
            self._allocated_peak = max(self._allocated_peak, allocated)
        self._meter.reset()
        if self._phase not in STAGE_OF:
            return
        self._peaks[self.stage] = max(self._peaks.get(self.stage, 0), peak)
        if self._budget is not None and exceeds(peak, self._limits[self.stage]) and self.stage not in self._warned:
            self._warned.add(self.stage)
            log.warning("memory: stage '%s' took %s. %s", self.stage, _gib(peak), self._planned())

    def _planned(self) -> str:
        """Describe the plan for this stage, and the remedy if it does not suffice."""
        if self._budget is None:
            return "No budget was planned, since the size of model.path was unknown."
        device, mine = self._budget
        holders = device.holders if self._device != "cpu" else (mine,)
        needs = "; ".join(
            f"{holder.process} {_gib(holder.total(self.stage))}, {holder.remedy(self.stage)}" for holder in holders
        )
        return f"Planned was {_gib(self._limits[self.stage])} ({needs}). See docs/how-to/memory.md"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise OutOfMemory, with the stage and its plan, if the block runs out of memory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            first = str(error).strip().partition("\n")[0]
            raise OutOfMemory(
                f"{self._device} is out of memory in stage '{self.stage}' of a step: {first}. {self._planned()}"
            ) from error


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


# --- Profiles

# The number of allocations that are kept of a step.
ALLOCATIONS = 1 << 20


class StepProfiler:
    """Records the wanted steps of one rank, with the phases of a step as ranges, which nsys shows too (NVTX).

    A request older than this process is ignored.
    """

    def __init__(self, run: Path, rank: int, steps: Collection[int], device: str) -> None:
        self._run, self._rank, self._steps = run, rank, frozenset(steps)
        self._device: Any = None if device == "cpu" else torch.get_device_module(device)
        self._nvtx = getattr(self._device, "nvtx", None)
        # What could not be read has been reported once.
        self._reported = False
        request = self._request()
        self._answered = request.id if request else ""
        self._steps_left = 0
        self._step = -1
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._in_phase = False

    def at(self, step: int, phase: str) -> None:
        """Begin a phase. With the first of a step, write the profile of the last one, and begin one if it is wanted."""
        self._leave_phase()
        if step != self._step:
            self._finish()
            self._step = step
            if self._wanted():
                self._begin()
        self._enter_phase(phase)

    def close(self) -> None:
        """Write the profile of the last step."""
        self._leave_phase()
        self._finish()

    def _wanted(self) -> bool:
        request = self._request()
        if request is not None and request.id != self._answered:
            self._answered, self._steps_left = request.id, request.steps
        if self._steps_left:
            self._steps_left -= 1
            return True
        return self._step in self._steps

    def _request(self) -> ProfileRequest | None:
        """Return the newest request. A file that is damaged asks for nothing, and must not end a run of days."""
        try:
            request = read_request(self._run)
        except UserError as error:
            if not self._reported:
                log.warning("%s; ask again with rl-async profile", error)
            self._reported = True
            return None
        self._reported = False
        return request

    def _begin(self) -> None:
        trace_file(self._run, self._step, self._rank).parent.mkdir(exist_ok=True)
        if self._device is not None:
            self._device.memory._record_memory_history(max_entries=ALLOCATIONS)
        self._profile = profile(activities=supported_activities() if self._device else [ProfilerActivity.CPU])
        self._profile.start()

    def _finish(self) -> None:
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        done.stop()
        file = trace_file(self._run, self._step, self._rank)
        if self._device is not None:
            self._device.memory._dump_snapshot(str(file).removesuffix(".json.gz") + ".memory.pickle")
            self._device.memory._record_memory_history(enabled=None)
        # PyTorch compresses by the end of the name, so the unfinished file keeps it.
        unfinished = file.with_name(f".{file.name}")
        done.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
        log.info("profile of step %d: %s", self._step, file)

    def _enter_phase(self, phase: str) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(phase)
        if self._profile is not None:
            self._range = record_function(phase)
            self._range.__enter__()
        self._in_phase = True

    def _leave_phase(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._nvtx is not None and self._in_phase:
            self._nvtx.range_pop()
        self._in_phase = False


# --- Engines and queue

EVERY_S = 2.0
ANSWER_S = 2.0


@dataclass(frozen=True)
class Observation:
    """The loads of the engines that answered, by id, at a time of a monotonic clock."""

    at: float
    loads: Mapping[str, EngineLoad]


class EngineLoads:
    """Asks every engine of ``directory()`` for its load between two steps, in a thread, at most every EVERY_S.

    The answers become metrics of the next step that finds them complete; a step without answers has no ``engine/...``.
    """

    def __init__(
        self,
        directory: Callable[[], EngineList],
        connect: Callable[[EngineRecord], EngineClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._connect, self._clock = directory, connect, clock
        self._pending: Future[Observation] | None = None
        self._last = Observation(-EVERY_S, {})

    def metrics(self) -> dict[str, float]:
        """Return the metrics of complete answers, and ask again when due. Raises QueueLost."""
        found: dict[str, float] = {}
        if self._pending is not None and self._pending.done():
            observed, self._pending = self._pending.result(), None
            found = engine_metrics(self._last, observed)
            self._last = observed
        if self._pending is None and self._clock() - self._last.at >= EVERY_S:
            engines = self._directory().engines
            self._pending = in_daemon_thread(lambda: asyncio.run(self._observe(engines)), "engine loads")
        return found

    async def _observe(self, engines: list[EngineRecord]) -> Observation:
        loads = await ask_loads([self._connect(record) for record in engines], ANSWER_S)
        answered = {record.engine_id: load for record, load in zip(engines, loads, strict=True) if load is not None}
        return Observation(self._clock(), answered)


def engine_metrics(before: Observation, now: Observation) -> dict[str, float]:
    """Return the engines' state at ``now`` and their rates since ``before``, or nothing if none answered.

    Values are sums over engines, except ``engine/cache_usage``, a mean over engines, and ``engine/prefix_hit_rate``, a
    mean over tokens. Engines that are new since ``before``, or do not count tokens or preemptions, have no rates.
    """
    loads = list(now.loads.values())
    if not loads:
        return {}
    found = {
        "engine/answering": float(len(loads)),
        "engine/running": float(sum(load.running for load in loads)),
        "engine/waiting": float(sum(load.waiting for load in loads)),
        "engine/cache_usage": sum(load.cache_usage for load in loads) / len(loads),
    }
    pairs = [(before.loads[engine], load) for engine, load in now.loads.items() if engine in before.loads]
    if not pairs:
        return found
    counts = [(old.preemptions, new.preemptions) for old, new in pairs]
    counted = [new - old for old, new in counts if old is not None and new is not None]
    if counted:
        found["engine/preemptions"] = float(sum(counted))
    tokens = [(old.tokens, new.tokens) for old, new in pairs if old.tokens is not None and new.tokens is not None]
    return found | _token_metrics(tokens, now.at - before.at)


def _token_metrics(pairs: list[tuple[EngineTokens, EngineTokens]], seconds: float) -> dict[str, float]:
    if not pairs:
        return {}
    looked_up = sum(new.looked_up - old.looked_up for old, new in pairs)
    rates = {
        "engine/prompt_tokens_per_s": sum(new.prompt - old.prompt for old, new in pairs) / seconds,
        "engine/sampled_tokens_per_s": sum(new.sampled - old.sampled for old, new in pairs) / seconds,
    }
    if looked_up:
        rates["engine/prefix_hit_rate"] = sum(new.found - old.found for old, new in pairs) / looked_up
    return rates


class QueueDepth:
    """Reads the queue's status, and warns once if workers wait because it is full."""

    def __init__(self, queue: SyncQueueClient) -> None:
        self._queue = queue
        self._warned = False
        self._counted = queue.status().counters

    def depth(self) -> dict[str, float]:
        """Return groups by state and the queue's counters as ``queue/...``, with ``rollout/failed_attempts``.

        These are the attempts at training samples that have failed since the previous call, by cause.
        """
        status = self._queue.status()
        failed = {
            f"rollout/failed_attempts/{name.removeprefix(FAILED)}": max(0, count - self._counted.get(name, 0))
            for name, count in status.counters.items()
            if name.startswith(FAILED)
        }
        self._counted = status.counters
        states = {
            "queue/ready_groups": status.ready,
            "queue/leased_groups": status.leased,
            "queue/slots_used": status.slots_used,
            "queue/max_staleness": status.max_staleness,
            "queue/payload_bytes": status.payload_bytes,
        }
        if status.counters.get("short_of_bytes") and not self._warned:
            self._warned = True
            log.warning(
                "queue is full (%d payload bytes), so workers are waiting; raise queue.max_bytes", status.payload_bytes
            )
        counters = {f"queue/{name}": n for name, n in status.counters.items() if not name.startswith(FAILED)}
        failed["rollout/failed_attempts"] = sum(failed.values())
        return {key: float(value) for key, value in (states | counters | failed).items()}


class RankCollector:
    """Exports rank ``rank`` of the run in ``folder``. ``latest`` returns the newest value of each metric."""

    def __init__(self, folder: Path, rank: int, latest: Callable[[], Mapping[str, float]]) -> None:
        self._folder, self._rank, self._latest = folder, rank, latest

    def collect(self) -> Iterator[Metric]:
        """Yield the current values. The step and the phase are those of the rank's heartbeat."""
        for beat in read_beats(self._folder):
            if beat.rank == self._rank:
                yield gauge("rl_async_trainer_step", "Step that the rank works on, from 0.", beat.step)
                now = {phase: float(phase == beat.phase) for phase in PHASES}
                yield by_label("phase", "rl_async_trainer_phase", "1 for the phase that the rank is in.", now)
                yield gauge("rl_async_trainer_phase_seconds", "Time in that phase.", time.time() - beat.since)
        if torch.accelerator.is_available():
            in_tensors = torch.accelerator.memory_allocated()
            yield gauge("rl_async_trainer_device_bytes", "Device memory in tensors.", in_tensors)
        step = GaugeMetricFamily("rl_async_step", "Newest value of each metric of steps.", labels=["metric"])
        for name, value in self._latest().items():
            step.add_metric([name], float(value))
        yield step


class Breach(NamedTuple):
    """A metric that is beyond its limit in a step."""

    metric: str
    value: float
    limit: float
    # The config key that sets the limit.
    key: str

    def __str__(self) -> str:
        sign = "<" if self.value < self.limit else ">"
        return f"{self.metric} = {self.value:.4g} {sign} {self.limit:g} (algorithm.guard.{self.key})"


@dataclass(frozen=True)
class GuardAction:
    """What to do after a step: log a warning, and/or set the queue's bound on staleness."""

    warning: str = ""
    # If None, the bound stays as it is.
    max_staleness: int | None = None


# Single steps scatter; three in a row, out of band or back in it, are a trend.
PATIENCE = 3


class Guard:
    """Acts when ``patience`` consecutive steps were out of band.

    ``adapt`` halves the bound on staleness then, and again after every further ``patience`` steps out of band, since
    samples already drawn are still old. It raises the bound by one after every ``patience`` steps in band.
    """

    def __init__(self, config: GuardConfig, max_staleness: int, least: int = 0, patience: int = PATIENCE) -> None:
        """``max_staleness`` is the configured bound; with a bound below ``least`` the run could not continue."""
        self._config, self._configured, self._least = config, max_staleness, min(least, max_staleness)
        self._bound, self._patience = max_staleness, patience
        # The number of consecutive steps out of band.
        self._outside = 0
        self._inside = 0
        self._said_blind = False

    @classmethod
    def of(cls, config: RunConfig) -> "Guard":
        """Build the guard of a run. Weights published every k steps need slots for k batches, a bound of k - 1."""
        return cls(config.algorithm.guard, config.queue.max_staleness, config.weight_sync.every - 1)

    def observe(self, step: int, metrics: Mapping[str, float]) -> GuardAction:
        """Take in a step's metrics. Raises PolicyDrifted if ``action`` is stop and the patience is exhausted.

        A step without the metrics is ignored: it trained no token, or only tokens that were sampled under a grammar's
        mask; the first such step warns.
        """
        if self._config.action == "off":
            return GuardAction()
        if "correction/ess" not in metrics:
            return self._blind(step, metrics)
        breaches = self._breaches(metrics)
        if not breaches:
            return self._in_band()
        self._inside = 0
        self._outside += 1
        what = f"step {step}, out of band for {self._outside} consecutive steps: {'; '.join(map(str, breaches))}"
        if self._config.action == "stop" and self._outside >= self._patience:
            raise PolicyDrifted(
                f"{what}. The data is too far from the policy: lower queue.max_staleness or trainer.learning_rate, or "
                "check that engines and trainer compute the same log-probabilities"
            )
        warning = f"off-policy: {what}" if self._outside == self._patience else ""
        if self._config.action == "adapt" and self._outside % self._patience == 0:
            return self._set_bound(max(self._bound // 2, self._least), warning)
        return GuardAction(warning)

    def _blind(self, step: int, metrics: Mapping[str, float]) -> GuardAction:
        if self._said_blind or "constrained/share" not in metrics:
            return GuardAction()
        self._said_blind = True
        return GuardAction(
            f"step {step}: algorithm.guard sees nothing, since all tokens were sampled under a JSON format's mask; "
            "later steps will not say so"
        )

    def _in_band(self) -> GuardAction:
        self._outside = 0
        self._inside += 1
        if self._config.action == "adapt" and self._inside % self._patience == 0:
            return self._set_bound(min(self._bound + 1, self._configured), "")
        return GuardAction()

    def _set_bound(self, max_staleness: int, warning: str) -> GuardAction:
        if max_staleness == self._bound:
            return GuardAction(warning)
        self._bound = max_staleness
        return GuardAction(warning, max_staleness)

    def _breaches(self, metrics: Mapping[str, float]) -> list[Breach]:
        found = []
        # Negated, so that NaN is out of band.
        if not metrics["correction/ess"] >= self._config.min_ess:
            found.append(Breach("correction/ess", metrics["correction/ess"], self._config.min_ess, "min_ess"))
        if not metrics["correction/k3"] <= self._config.max_kl:
            found.append(Breach("correction/k3", metrics["correction/k3"], self._config.max_kl, "max_kl"))
        return found
