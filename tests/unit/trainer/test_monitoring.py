"""A rank's memory and profiles, the engines' loads, and the queue's depth."""

import asyncio
import gzip
import json
import logging
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import GuardConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig, TrackerName, TrackingConfig
from rl_async.errors import ConfigError, EngineLost, OutOfMemory, PolicyDrifted
from rl_async.messages import EngineList, EngineRecord, StatusReport, Version
from rl_async.process.run_files import DeviceBudget, Holder, Phase, Stage, traces, write_request
from rl_async.rollout_server.api import EngineLoad, EngineTokens
from rl_async.trainer import monitoring
from rl_async.trainer.monitoring import (
    STAGES,
    DeviceMeter,
    EngineLoads,
    Guard,
    GuardAction,
    HostMeter,
    MemoryWatch,
    Observation,
    QueueDepth,
    StepProfiler,
    engine_metrics,
    exceeds,
)
from rl_async.trainer.trackers import TRACKERS, Destination, Tracking, mlflow_name
from rl_async.trainer.train import Run

MIB = 1 << 20


def budget(**limits: int) -> tuple[DeviceBudget, Holder]:
    stages: dict[Stage, dict[str, int]] = {
        stage: {"runtime": 1, "activations": limits.get(stage, 1 << 40)} for stage in STAGES
    }
    holder = Holder("trainer-0", "trainer", stages)  # type: ignore[arg-type]
    return DeviceBudget("cpu", None, None, (holder,)), holder


# Sizes of BLOCK are told apart although a process counts its pages on each processor, and takes some meanwhile. How
# much it has without the block differs by more if the kernel reclaims memory.
BLOCK, NEAR = 300 * MIB, 50 * MIB


def filled() -> int:
    """Have a block of memory for a moment; return the bytes that were resident then."""
    block = np.ones(BLOCK, dtype=np.uint8)
    resident = HostMeter().now()
    assert block[-1]
    return resident


def test_a_peak_is_that_since_the_reset() -> None:
    meter = HostMeter()
    filled()
    without = meter.now()
    meter.reset()
    assert meter.peak() <= without + NEAR
    full = filled()
    assert meter.peak() >= full - NEAR


def test_a_peak_that_cannot_be_forgotten_is_no_error(tmp_path: Path) -> None:
    HostMeter(tmp_path / "hidden").reset()


def test_a_device_that_changes_hands_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 bytes: the trainer has 60 at most and goes, then an engine has 70."""
    own = most = others = 0
    for name, value in {
        "get_memory_info": lambda device: (100 - own - others, 100),
        "memory_reserved": lambda device: own,
        "max_memory_reserved": lambda device: most,
        "reset_peak_memory_stats": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    meter = DeviceMeter("cuda:0")
    own, most, others = 50, 50, 5
    meter.reset()
    most, others = 60, 10
    assert meter.peak() == 70, "both are there"
    own, others = 2, 70
    assert meter.peak() == 65


@pytest.mark.parametrize(("peak", "told"), [(99, False), (100, False), (110, False), (111, True), (200, True)])
def test_only_a_stage_clearly_beyond_its_plan_is_told(peak: int, told: bool) -> None:
    assert exceeds(peak, 100) is told


@pytest.mark.usefixtures("one_rank")
def test_each_stage_has_its_own_peak() -> None:
    watch, meter = MemoryWatch("cpu", budget(train=7)), HostMeter()
    filled()
    without = {"rollout": meter.now()}
    watch.at("waiting for a batch")
    watch.at("training")
    full = filled()
    without["gather"] = meter.now()
    watch.at("publishing")
    watch.at("reporting")
    found = watch.metrics()
    assert found["memory/train_peak_bytes"] >= full - NEAR
    for stage, resident in without.items():
        assert found[f"memory/{stage}_peak_bytes"] <= resident + NEAR
    assert found["memory/train_budget_bytes"] == 8
    assert found["memory/host_peak_bytes"] >= found["memory/train_peak_bytes"]
    watch.at("waiting for a batch")
    assert watch.metrics()["memory/train_peak_bytes"] == 0, "of this step"


@pytest.mark.usefixtures("one_rank")
def test_without_a_budget_there_are_only_peaks() -> None:
    watch = MemoryWatch("cpu", None)
    watch.at("waiting for a batch")
    found = watch.metrics()
    assert found["memory/rollout_peak_bytes"] > MIB and not [name for name in found if name.endswith("budget_bytes")]


def test_more_than_planned_is_told_once_with_stage_and_key(caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch("cpu", budget(train=MIB))
    with caplog.at_level(logging.WARNING, "rl_async.trainer"):
        for _ in range(2):
            watch.at("waiting for a batch")
            watch.at("training")
            watch.at("publishing")
    [warning] = caplog.messages
    assert "'train'" in warning and "trainer.max_tokens_per_microbatch" in warning


def test_freed_memory_beyond_the_next_stages_plan_goes_back() -> None:
    """glibc keeps blocks that were freed beneath one that is in use, until it is asked."""
    plan = HostMeter().now() + 64 * MIB
    watch = MemoryWatch("cpu", budget(gather=plan))
    watch.at("training")
    # Each is smaller than a mapping of its own, and the last keeps the end of the heap.
    blocks = [np.ones(64 << 10, dtype=np.uint8) for _ in range(16 * 300)]
    last = np.ones(64 << 10, dtype=np.uint8)
    blocks.clear()
    watch.at("publishing")
    assert HostMeter().now() < plan and HostMeter().peak() < plan
    assert last.all()


def test_a_failed_allocation_is_explained_and_nothing_else() -> None:
    watch = MemoryWatch("cpu", budget(train=MIB))
    watch.at("training")
    with pytest.raises(OutOfMemory, match=r"'train'.*trainer\.max_tokens_per_microbatch"), watch.explained():
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match="No budget"), MemoryWatch("cpu", None).explained():
        np.empty(1 << 50, dtype=np.uint8)
    with pytest.raises(RuntimeError, match="shape"), watch.explained():
        torch.ones(2).view(3)


PHASES: tuple[Phase, ...] = ("waiting for a batch", "training", "reporting")


def work(profiler: StepProfiler, step: int) -> None:
    for phase in PHASES:
        profiler.at(step, phase)
        if phase == "training":
            torch.ones(8, 8) @ torch.ones(8, 8)


def names(file: Path) -> set[str]:
    return {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


def steps(run: Path) -> list[str]:
    return sorted(file.name for file in traces(run))


def test_a_step_of_the_config_is_recorded_with_its_phases(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 1, [1, 3], "cpu")
    for step in range(4):
        work(profiler, step)
        assert len(traces(tmp_path)) == (step > 1), "it is there from the next step on"
    profiler.close()
    assert steps(tmp_path) == ["step-000001-rank1.json.gz", "step-000003-rank1.json.gz"]
    assert {*PHASES, "aten::mm"} <= names(min(traces(tmp_path)))


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 0, [], "cpu")
    work(profiler, 0)
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_answered_once_with_the_next_steps(tmp_path: Path) -> None:
    write_request(tmp_path, 1)  # of an earlier process
    profiler = StepProfiler(tmp_path, 0, [], "cpu")
    work(profiler, 4)
    assert steps(tmp_path) == []
    write_request(tmp_path, 2)
    for step in range(5, 9):
        work(profiler, step)
    assert steps(tmp_path) == ["step-000005-rank0.json.gz", "step-000006-rank0.json.gz"]
    write_request(tmp_path, 1)
    work(profiler, 9)
    profiler.close()
    assert steps(tmp_path)[2:] == ["step-000009-rank0.json.gz"]
    assert not [file for file in (tmp_path / "profiles").iterdir() if file.name.startswith(".")]


class FakeDevice:
    """What torch.cuda offers, noting the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory = self.nvtx = self

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.calls.append(f"record {enabled}")

    def _dump_snapshot(self, file: str) -> None:
        self.calls.append("dump")
        Path(file).write_bytes(b"allocations")

    def range_push(self, name: str) -> None:
        self.calls.append(f"push {name}")

    def range_pop(self) -> None:
        self.calls.append("pop")


def test_on_a_device_allocations_are_written_and_phases_are_ranges_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"cuda": device}[name])
    monkeypatch.setattr(monitoring, "supported_activities", lambda: {ProfilerActivity.CPU})
    profiler = StepProfiler(tmp_path, 0, [1], "cuda")
    ranges = [call for phase in PHASES for call in (f"push {phase}", "pop")]
    for step in range(3):
        work(profiler, step)
    profiler.close()
    assert device.calls == [*ranges, "record all", *ranges, "dump", "record None", *ranges]
    assert steps(tmp_path) == ["step-000001-rank0.json.gz"]
    assert (tmp_path / "profiles" / "step-000001-rank0.memory.pickle").read_bytes() == b"allocations"
    assert set(PHASES) <= names(min(traces(tmp_path)))


def load(running: int, sampled: int = 0, *, looked_up: int = 0, found: int = 0, preemptions: int = 0) -> EngineLoad:
    tokens = EngineTokens(prompt=2 * sampled, sampled=sampled, looked_up=looked_up, found=found)
    return EngineLoad(running=running, waiting=1, cache_usage=running / 10, preemptions=preemptions, tokens=tokens)


def test_state_is_summed_and_what_happened_is_divided_by_the_time() -> None:
    before = Observation(10.0, {"a": load(1, 100, looked_up=50, found=10), "b": load(2, 10)})
    now = Observation(12.0, {"a": load(3, 140, looked_up=90, found=30, preemptions=2), "b": load(5, 30)})
    assert engine_metrics(before, now) == {
        "engine/answering": 2,
        "engine/running": 8,
        "engine/waiting": 2,
        "engine/cache_usage": pytest.approx(0.4),
        "engine/preemptions": 2,
        "engine/prompt_tokens_per_s": 60,
        "engine/sampled_tokens_per_s": 30,
        "engine/prefix_hit_rate": 0.5,
    }


def test_an_engine_that_was_not_there_before_counts_in_the_state_alone() -> None:
    found = engine_metrics(
        Observation(0.0, {"a": load(1, 10)}), Observation(2.0, {"a": load(1, 12), "b": load(1, 999)})
    )
    assert (found["engine/running"], found["engine/sampled_tokens_per_s"]) == (2, 1)
    assert "engine/sampled_tokens_per_s" not in engine_metrics(Observation(0.0, {}), Observation(1.0, {"a": load(1)}))
    assert engine_metrics(Observation(0.0, {}), Observation(1.0, {})) == {}


def test_an_engine_that_counts_nothing_has_a_state_and_no_rates() -> None:
    bare = EngineLoad(running=1, waiting=0, cache_usage=0.5)
    found = engine_metrics(Observation(0.0, {"a": bare}), Observation(1.0, {"a": bare}))
    assert found.keys() == {"engine/answering", "engine/running", "engine/waiting", "engine/cache_usage"}


class Engine:
    """Answers when it is told to, or is lost."""

    def __init__(self, answered: threading.Event | None) -> None:
        self._answered = answered

    async def load(self) -> EngineLoad:
        if self._answered is None:
            raise EngineLost("gone")
        await asyncio.to_thread(self._answered.wait, 10)
        return load(4, int(time.monotonic() * 1e6))

    async def close(self) -> None:
        """Do nothing, since nothing is open."""


def test_a_step_waits_for_no_engine_and_a_lost_one_is_left_out() -> None:
    answered, clock = threading.Event(), [100.0]
    engines = {"slow": Engine(answered), "lost": Engine(None)}
    records = [EngineRecord(engine_id=name, url=name, kind="embedded") for name in engines]
    loads = EngineLoads(
        lambda: EngineList(revision=0, published=Version(), engines=records),
        lambda record: engines[record.url],
        lambda: clock[0],
    )
    assert loads.metrics() == {} and loads.metrics() == {}, "nothing has answered"
    answered.set()
    assert until_metrics(loads)["engine/answering"] == 1
    assert loads.metrics() == {}, "it is not asked again so soon"
    clock[0] += 5.0
    assert loads.metrics() == {}
    assert until_metrics(loads)["engine/sampled_tokens_per_s"] > 0


def until_metrics(loads: EngineLoads) -> dict[str, float]:
    """The next metrics, which must come in time."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := loads.metrics():
            return found
        time.sleep(0.01)
    raise AssertionError("no metrics came")


class Queue:
    def __init__(self) -> None:
        self.counters: dict[str, int] = {}

    def status(self) -> StatusReport:
        return StatusReport(
            published=Version(),
            waiting=0,
            leased=1,
            ready=2,
            reserved=0,
            committed=0,
            slots_used=3,
            slots=4,
            max_staleness=1,
            admitted=5,
            payload_bytes=600,
            counters=dict(self.counters),
            oldest_lease_s=0.0,
            workers=1,
            finished=False,
        )


def test_a_queue_short_of_bytes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue()
    depth = QueueDepth(queue)
    with caplog.at_level(logging.WARNING):
        assert depth.depth()["queue/payload_bytes"] == 600.0
        assert not caplog.messages
        for count in (1, 2):
            queue.counters["short_of_bytes"] = count
            assert depth.depth()["queue/short_of_bytes"] == count
    (message,) = caplog.messages
    assert "600 payload bytes" in message and "queue.max_bytes" in message


def test_failed_attempts_are_those_since_the_step_before() -> None:
    queue = Queue()
    queue.counters = {"failed/EpisodeTimeout": 3, "dead_letters": 1}
    depth = QueueDepth(queue)
    assert depth.depth()["rollout/failed_attempts"] == 0.0
    queue.counters = {"failed/EpisodeTimeout": 5, "failed/lost_worker": 1}
    found = {name: value for name, value in depth.depth().items() if "failed" in name}
    assert found == {
        "rollout/failed_attempts": 3.0,
        "rollout/failed_attempts/EpisodeTimeout": 2.0,
        "rollout/failed_attempts/lost_worker": 1.0,
    }


# Trackers: what they write, what stops a run at its start, and that a later failure never does.


def config(*backends: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        tracking=TrackingConfig(backends=backends),  # type: ignore[arg-type]
        name="test",
    )


def test_every_tracker_of_the_config_is_there() -> None:
    assert TRACKERS.keys() == set(get_args(TrackerName))


def test_jsonl_is_always_written(tmp_path: Path) -> None:
    tracking = Tracking(config(), tmp_path)
    tracking.log(0, {"step": 0, "reward/mean": 0.5})
    tracking.log(1, {"step": 1, "reward/mean": 0.75})
    tracking.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in rows] == [0.5, 0.75]


def test_tensorboard_writes_what_can_be_read_back(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'rl-async[tensorboard]'"
    )
    tracking = Tracking(config("tensorboard"), tmp_path)
    tracking.log(3, {"reward/mean": 0.5, "loss/policy": math.nan, "step": 3})
    tracking.log(4, {"reward/mean": 0.75})
    tracking.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.5), (4, 0.75)]
    assert [(e.step, math.isnan(e.value)) for e in events.Scalars("loss/policy")] == [(3, True)]
    assert [(e.step, e.value) for e in events.Scalars("step")] == [(3, 3.0)]


def test_names_for_mlflow_have_only_characters_that_it_takes() -> None:
    assert mlflow_name("eval/math/pass@4/low") == "eval.math.pass_at_4.low"
    assert mlflow_name("eval/go as black, or \u00fc/avg") == "eval.go as black_ or \u00fc.avg"


def test_console_prints_a_line_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = Tracking(config("console"), tmp_path)
    tracking.log(0, {"reward/mean": 0.5, "time/step_s": 1.0})
    tracking.close()
    line = capsys.readouterr().err
    assert "1 of 100 steps" in line and "reward/mean 0.500" in line


def test_a_torn_last_line_of_a_crash_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0}\n{"step":1,"rew')
    tracking = Tracking(config(), tmp_path)
    tracking.log(1, {"step": 1})
    tracking.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":0}\n{"step":1}\n'


def test_an_evaluation_after_the_last_step_is_no_line_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, object]] = []
    remembering = Destination(lambda step, metrics: logged.append((step, metrics)), lambda: None)
    monkeypatch.setitem(TRACKERS, "wandb", lambda config, folder: remembering)
    tracking = Tracking(config("wandb"), tmp_path)
    tracking.log(0, {"step": 0})
    tracking.log_evaluation(1, {"eval/reward": 0.5})
    tracking.close()
    assert logged == [(0, {"step": 0}), (1, {"eval/reward": 0.5})]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_tracker_that_fails_later_never_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(step: int, metrics: object) -> None:
        calls.append(step)
        raise ConnectionError("the server is gone")

    def closed() -> None:
        raise AssertionError("it was dropped")

    monkeypatch.setitem(TRACKERS, "wandb", lambda config, folder: Destination(fail, closed))
    tracking = Tracking(config("wandb"), tmp_path)
    for step in range(3):
        tracking.log(step, {"step": step})
    tracking.close()
    assert calls == [0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_misconfigured_tracker_stops_the_run_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: RunConfig, folder: Path) -> Destination:
        raise ImportError("No module named 'wandb'")

    monkeypatch.setitem(TRACKERS, "wandb", missing)
    with pytest.raises(ConfigError, match=r"tracking\.backends: .*rl-async\[wandb\]"):
        Tracking(config("wandb"), tmp_path)


# The guard: patience, one warning per excursion, stop with a named error, halving and giving back.


IN = {"correction/ess": 0.9, "correction/k3": 0.01}
LOW_ESS = {"correction/ess": 0.1, "correction/k3": 0.01}
HIGH_KL = {"correction/ess": 0.9, "correction/k3": 0.5}


def observe(guard: Guard, steps: Iterable[dict[str, float]]) -> list[GuardAction]:
    return [guard.observe(number, metrics) for number, metrics in enumerate(steps)]


def guard_config(action: str, **changes: float) -> GuardConfig:
    return GuardConfig(**({"action": action, "min_ess": 0.3, "max_kl": 0.3} | changes))


def test_a_warning_comes_once_per_excursion_and_only_after_patience() -> None:
    steps = [LOW_ESS, IN, LOW_ESS, HIGH_KL, LOW_ESS, LOW_ESS, IN, HIGH_KL, HIGH_KL]
    verdicts = observe(Guard(guard_config("warn"), 4, patience=2), steps)
    assert [bool(verdict.warning) for verdict in verdicts] == [False, False, False, True, *[False] * 4, True]
    assert all(verdict.max_staleness is None for verdict in verdicts)
    assert "correction/k3 = 0.5 > 0.3 (algorithm.guard.max_kl)" in verdicts[3].warning
    assert "step 3" in verdicts[3].warning


def test_that_it_sees_nothing_is_said_once() -> None:
    json_only, nothing = {"constrained/share": 1.0}, {"loss/policy": 0.0}
    steps = [nothing, IN | {"constrained/share": 0.5}, json_only, IN, json_only]
    verdicts = observe(Guard(guard_config("warn"), 4, patience=2), steps)
    assert [bool(verdict.warning) for verdict in verdicts] == [False, False, True, False, False]
    assert observe(Guard(guard_config("off"), 4, patience=2), [json_only]) == [GuardAction()]


def test_off_sees_nothing() -> None:
    assert observe(Guard(guard_config("off"), 4, patience=2), [LOW_ESS] * 9) == [GuardAction()] * 9


def test_stop_raises_after_patience_naming_metric_value_limit_and_step() -> None:
    guard = Guard(guard_config("stop"), 4, patience=2)
    observe(guard, [LOW_ESS, IN, LOW_ESS])
    with pytest.raises(PolicyDrifted, match=r"step 3\b.*correction/ess = 0\.1 < 0\.3 .*algorithm\.guard\.min_ess"):
        guard.observe(3, LOW_ESS)


def test_limits_are_in_band_and_not_a_number_is_not() -> None:
    guard = Guard(guard_config("stop"), 4, patience=1)
    observe(guard, [{"correction/ess": 0.3, "correction/k3": 0.3}, {"loss/policy": 1.0}])
    with pytest.raises(PolicyDrifted, match="k3 = nan"):
        guard.observe(2, {"correction/ess": 0.5, "correction/k3": math.nan})


def test_adapt_halves_while_out_of_band_and_gives_back_step_by_step() -> None:
    verdicts = observe(Guard(guard_config("adapt"), 4, patience=2), [*[LOW_ESS] * 7, *[IN] * 11])
    wanted = {step: verdict.max_staleness for step, verdict in enumerate(verdicts) if verdict.max_staleness is not None}
    assert wanted == {1: 2, 3: 1, 5: 0, 8: 1, 10: 2, 12: 3, 14: 4}
    assert [step for step, verdict in enumerate(verdicts) if verdict.warning] == [1]


def test_adapt_starts_counting_again_after_a_step_on_the_other_side() -> None:
    verdicts = observe(Guard(guard_config("adapt"), 4, patience=2), [LOW_ESS, LOW_ESS, IN, LOW_ESS, IN, IN, HIGH_KL])
    assert [verdict.max_staleness for verdict in verdicts] == [None, 2, None, None, None, 3, None]


class Source:
    """Remembers the bounds that the queue was asked for."""

    def __init__(self) -> None:
        self.bounds: list[int] = []

    def tighten(self, max_staleness: int) -> None:
        self.bounds.append(max_staleness)


@pytest.mark.parametrize(("rank", "bounds"), [(0, [2, 1]), (1, [])])
def test_only_rank_0_asks_the_queue_and_warns(rank: int, bounds: list[int], caplog: pytest.LogCaptureFixture) -> None:
    run = SimpleNamespace(rank=rank, guard=Guard(guard_config("adapt"), 4, patience=2), source=Source())
    for step in range(4):
        Run.watch(cast(Run, run), step, LOW_ESS)
    assert run.source.bounds == bounds
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (rank == 0) and all("correction/ess" in warning for warning in warnings)


def test_adapt_leaves_the_slots_that_rare_publication_needs() -> None:
    run = load_config(
        "calculator",
        ["queue.max_staleness=4", "weight_sync.every=3", "algorithm.guard.action=adapt"],
    )
    wanted = [verdict.max_staleness for verdict in observe(Guard.of(run), [LOW_ESS] * 5)]
    assert wanted == [None, None, 2, None, None]
