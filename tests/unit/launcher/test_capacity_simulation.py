"""The simulated run: its costs, what it takes, and which resource saturates first."""

from pathlib import Path

import msgspec
import pytest

from rl_async.configs.load import dump
from rl_async.errors import UserError
from rl_async.launcher import capacity
from rl_async.launcher.capacity import (
    FEWEST_STEPS,
    QUEUE_ROW_S,
    STEPS,
    Costs,
    Device,
    DeviceSplit,
    EpisodeShape,
    Fit,
    Pool,
    RunComparison,
    Saturation,
    SimulatedClock,
    SimulatedEngine,
    Simulation,
    SimulationResult,
    assumed,
    candidates,
    check_lines,
    fit_engine,
    fit_note,
    longest,
    measure,
    memory,
    plan_devices,
    recorded_steps,
    saturation,
    simulate,
    simulate_all,
    steps_to_simulate,
    table,
)
from rl_async.launcher.plan.memory import ModelSize
from rl_async.recording import write_trajectories
from rl_async.transfer_queue.admission import QueueSettings
from tests.conftest import make_rows
from tests.support.configs import float32_config

COSTS = Costs(
    iteration_base_s=0.01, iteration_sequence_s=0.001, turn_s=0.0, train_token_s=0.001, sync_s=0.5, other_s=0.25
)
SAME = [EpisodeShape(tokens=20, sampled=10, turns=1, outside_s=0.0)]
MIXED = [EpisodeShape(tokens=n + 4, sampled=n, turns=1 + n % 3, outside_s=0.02) for n in range(4, 60)]


def layout(engines: int = 1, ranks: int = 1, *, colocated: bool = False, max_batch: int = 64) -> DeviceSplit:
    return DeviceSplit(engines=engines, ranks=ranks, colocated=colocated, max_batch=max_batch, concurrency=1000)


def simulated(
    bound: int, where: DeviceSplit, episodes: list[EpisodeShape] = SAME, **changes: float
) -> SimulationResult:
    settings = QueueSettings(steps=20, batch_groups=4, group_size=4, max_staleness=bound)
    return Simulation(settings, where, msgspec.structs.replace(COSTS, **changes), episodes).run(warm=4, measured=10)


def test_sequences_of_a_batch_gain_tokens_together_and_the_rest_waits() -> None:
    clock, ends = SimulatedClock(), {}
    engine = SimulatedEngine(clock, COSTS, max_batch=2)
    for name, tokens in (("short", 10), ("long", 20), ("late", 10)):
        engine.add(tokens, lambda name=name: ends.update({name: clock.now}))  # type: ignore[misc]
    while clock.step():
        pass
    two, one = 0.012, 0.011
    assert ends == pytest.approx({"short": 10 * two, "long": 20 * two, "late": 20 * two})
    assert engine.busy_s == pytest.approx(20 * two) and engine.load == 0
    engine.add(3, lambda: ends.update(alone=clock.now))
    while clock.step():
        pass
    assert ends["alone"] == pytest.approx(20 * two + 3 * one)


def test_a_paused_engine_keeps_what_it_has() -> None:
    clock, ends = SimulatedClock(), []
    engine = SimulatedEngine(clock, COSTS, max_batch=2)
    engine.add(10, lambda: ends.append(clock.now))
    clock.after(0.055, lambda: engine.pause(True))
    clock.after(1.055, lambda: engine.pause(False))
    while clock.step():
        pass
    assert ends == pytest.approx([10 * 0.011 + 1.0])


def test_a_shorter_sequence_that_joins_ends_first_and_slows_the_others() -> None:
    clock, ends = SimulatedClock(), {}
    engine = SimulatedEngine(clock, COSTS, max_batch=2)
    engine.add(10, lambda: ends.update(long=clock.now))
    clock.after(5 * 0.011, lambda: engine.add(2, lambda: ends.update(short=clock.now)))
    while clock.step():
        pass
    assert ends == pytest.approx({"short": 5 * 0.011 + 2 * 0.012, "long": 8 * 0.011 + 2 * 0.012})


def test_time_passes_where_rounding_leaves_a_sequence_a_part_of_a_token() -> None:
    clock, ends = SimulatedClock(), []
    clock.now = 1e9
    engine = SimulatedEngine(clock, msgspec.structs.replace(COSTS, iteration_base_s=1e-9), max_batch=3)
    for tokens in (1, 3, 7):
        engine.add(tokens, lambda: ends.append(clock.now))
    for _ in range(1000):
        clock.step()
    assert len(ends) == 3


def test_requests_go_where_the_fewest_are() -> None:
    clock, ends = SimulatedClock(), []
    pool = Pool(clock, COSTS, engines=2, max_batch=64)
    for tokens in (30, 10, 10, 10):
        pool.add(tokens, lambda: ends.append(clock.now))
    clock.step()
    pool.add(5, lambda: ends.append(clock.now))
    while clock.step():
        pass
    assert len(ends) == 5 and pool.busy_s() < 30 * 0.012


def test_an_on_policy_step_is_generation_then_training_then_weights() -> None:
    out = simulated(0, layout())
    generate, train = 10 * (0.01 + 16 * 0.001), 16 * 20 * 0.001
    assert out.step_s == pytest.approx(generate + train + 0.5, rel=1e-6)  # the queue is served before other_s ends
    assert out.engine_idle == pytest.approx(1 - generate / out.step_s)
    assert out.tokens_per_s == pytest.approx(320 / out.step_s)
    assert (out.staleness_mean, out.staleness_max) == (0.0, 0)


def test_one_step_off_policy_hides_generation_behind_training() -> None:
    out = simulated(1, layout())
    assert out.step_s == pytest.approx(16 * 20 * 0.001 + 0.5 + 0.25)
    assert out.trainer_idle == pytest.approx(0.0, abs=1e-9) and out.staleness_mean == 1.0


def test_engines_have_work_until_the_end_of_what_is_measured_and_not_until_that_of_a_run() -> None:
    settings = QueueSettings(steps=20, batch_groups=4, group_size=4, max_staleness=3)
    generate, train = 4 * 10 * 0.014, 1.4
    costs = msgspec.structs.replace(COSTS, train_token_s=train / 320, sync_s=0.0, other_s=0.0)
    middle, whole = (Simulation(settings, layout(max_batch=4), costs, SAME).run(4, n) for n in (8, None))
    assert middle.step_s == pytest.approx(train) == whole.step_s
    assert middle.engine_idle == pytest.approx(1 - generate / train)
    assert whole.engine_idle > middle.engine_idle + 0.05


@pytest.mark.parametrize("rows", [16, 4096, 1 << 20])
def test_measured_steps_are_whole_cycles_of_the_bound(rows: int) -> None:
    for bound in (0, 1, 2, 3, 7):
        warm, measured = steps_to_simulate(rows, bound)
        assert warm > bound and measured % (bound + 1) == 0
        assert FEWEST_STEPS <= measured <= STEPS + bound


def test_twice_the_ranks_train_in_half_the_time() -> None:
    slow, fast = (simulated(2, layout(ranks=n), sync_s=0.0, other_s=0.0, train_token_s=0.01) for n in (1, 2))
    assert slow.step_s == pytest.approx(2 * fast.step_s)


def test_colocated_engines_stand_while_the_trainer_works() -> None:
    shared, apart = (simulated(1, layout(colocated=c), MIXED, train_token_s=0.002) for c in (True, False))
    assert shared.step_s > apart.step_s
    assert shared.engine_idle > 0.5


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("colocated", [False, True])
def test_the_queue_keeps_its_bound_whatever_the_lengths(bound: int, colocated: bool) -> None:
    out = simulated(bound, layout(engines=2, max_batch=3, colocated=colocated), MIXED)
    assert out.staleness_max <= bound
    assert 0 <= out.engine_idle <= 1 and 0 <= out.trainer_idle <= 1


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulated(1, layout(), MIXED) == simulated(1, layout(), MIXED)


def test_the_fit_finds_the_costs_that_made_the_times() -> None:
    episodes = [EpisodeShape(n + 4, n, 1 + n % 3, 0.0) for n in range(5, 60)]
    alive = [sum(e.sampled > k for e in episodes) / 2 for k in range(60)]
    timed = [(e, 0.3 * e.turns + sum(0.02 + 0.0005 * alive[k] for k in range(e.sampled))) for e in episodes]
    assert fit_engine([timed, timed], engines=2) == pytest.approx((0.02, 0.0005, 0.3, 1.0))


def test_no_cost_is_negative() -> None:
    timed = [(EpisodeShape(n + 4, n, 1, 0.0), 1.0 / n) for n in range(5, 60)]
    fit = fit_engine([timed], engines=1)
    assert min(fit[:3]) >= 0 and fit.explained < 0.5


def test_a_model_eight_times_as_large_costs_eight_times_as_much() -> None:
    small, large = (assumed(ModelSize(n * 10**9, 1000), Device(), tokens=1000) for n in (1, 8))
    assert large.train_token_s == pytest.approx(8 * small.train_token_s)
    assert large.iteration_base_s == pytest.approx(8 * small.iteration_base_s)
    assert small.iteration_base_s == pytest.approx(2e9 / (3350e9 * 0.6))


def test_every_split_uses_all_devices_and_one_device_is_shared() -> None:
    config = float32_config("calculator", ["queue.max_staleness=4"])
    found = list(candidates(config, 8))
    assert {bound for _, bound in found} == {0, 1, 4}
    assert all(at.engines + at.ranks == 8 for at, _ in found if not at.colocated)
    assert {(at.engines, at.ranks) for at, _ in found if at.colocated} == {(8, 8)}
    assert all(at.colocated for at, _ in candidates(config, 1))
    assert {(at.engines, at.ranks) for at, _ in candidates(config, 2) if not at.colocated} == {(1, 1)}


def test_the_table_has_a_line_per_split() -> None:
    config = float32_config("calculator", ["data.train_batch_groups=4", "rollout.group_size=2"])
    row = simulate(config, layout(2, 2), 1, COSTS, MIXED)
    assert (row.mode, row.trainers, row.engines, row.max_staleness) == ("disaggregated", 2, 2, 1)
    assert row.memory_bytes == memory(config, layout(2, 2)) and row.memory_bytes is not None
    assert table([row])[1].split()[:4] == ["disaggregated", "2", "2", "1"]


def test_an_error_is_a_share_of_what_was_recorded() -> None:
    check = RunComparison(
        run="r",
        step_s=3.0,
        recorded_step_s=4.0,
        own_step_s=3.8,
        trainer_idle=0.5,
        recorded_idle=0.4,
        staleness=1.0,
        recorded_staleness=0.9,
    )
    assert check.error == -0.25 and "recorded 4.00 s (-25%; -5% with its own training speed)" in check_lines([check])[0]


def test_a_run_whose_times_tell_nothing_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(float32_config("calculator")))
    times = {"time/step_s": 1.0, "time/wait_batch_s": 0.1, "time/train_s": 0.5, "time/sync_s": 0.1}
    line = msgspec.json.encode({"step": 0, "rollout/tokens": 100.0} | times).decode()
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n" * 5)
    for step in range(5):
        write_trajectories(tmp_path / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz", make_rows(step))
    with pytest.raises(UserError, match=r"--run: .*queue\.max_staleness=0"):
        measure(tmp_path, engines=1, ranks=1)


def test_what_a_fit_rests_on_is_said_with_what_would_make_it_better() -> None:
    fit = Fit(0.02, 0.0005, 0.3, explained=0.914)
    good = ["data.train_batch_groups=4", "rollout.group_size=4", "queue.max_staleness=0", "agent.concurrency=16"]
    note = fit_note(fit, float32_config("calculator", good))
    assert "91%" in note and "queue.max_staleness" not in note and "agent.concurrency" not in note
    worse = float32_config("calculator", [*good, "queue.max_staleness=1", "agent.concurrency=8", "agent.workers=1"])
    assert "queue.max_staleness=0 and agent.concurrency=16" in fit_note(fit, worse)


def test_each_row_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.train_batch_groups=2", "rollout.group_size=2", "queue.max_staleness=1"]
    assert plan_devices("calculator", small, 1, None, [], None) == 0
    out, errors = capsys.readouterr()
    assert errors.splitlines() == [
        "simulated 1 of 2: colocated on 1 devices, bound 0",
        "simulated 2 of 2: colocated on 1 devices, bound 1",
    ]
    assert out.startswith("costs assumed")


def test_processes_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = float32_config(
        "calculator", ["data.train_batch_groups=2", "rollout.group_size=2", "queue.max_staleness=1"]
    )
    monkeypatch.chdir(tmp_path)
    alone = list(simulate_all(config, 2, COSTS, MIXED))
    monkeypatch.setattr(capacity, "PARALLEL", 1)
    Path("random.py").write_text("raise ImportError('a file of the user')\n")
    monkeypatch.setattr(capacity, "cores", lambda: 2.0)
    assert list(simulate_all(config, 2, COSTS, MIXED)) == alone and len(alone) == 4


SATURATION_COSTS = Costs(
    iteration_base_s=0.01, iteration_sequence_s=0.001, turn_s=0.0, train_token_s=1e-6, sync_s=0.0, other_s=0.0
)
ROWS = 16


def used(engines: int = 1, bound: int = 3, outside_s: float = 0.0, longest: int = 10, **changes: float) -> Saturation:
    """Of a run of 16 rows a step, all of ten tokens but one in seventeen."""
    episodes = [EpisodeShape(tokens=20, sampled=10, turns=1, outside_s=outside_s)] * ROWS
    episodes.append(EpisodeShape(tokens=20, sampled=longest, turns=1, outside_s=outside_s))
    layout = DeviceSplit(engines=engines, ranks=1, colocated=False, max_batch=8, concurrency=1000)
    settings = QueueSettings(steps=12, batch_groups=4, group_size=4, max_staleness=bound)
    costs = msgspec.structs.replace(SATURATION_COSTS, **changes)
    return saturation(costs, episodes, layout, bound, ROWS, 1, Simulation(settings, layout, costs, episodes).run())


def test_the_trainer_saturates_where_a_token_is_dear() -> None:
    found = used(engines=4, train_token_s=0.01)
    assert found.first == "trainer" and found.trainer == pytest.approx(1.0, abs=0.02)


def test_engines_saturate_where_too_few_of_them_have_full_batches() -> None:
    found = used()
    assert found.first == "engines" and found.engines == pytest.approx(1.0, abs=0.05)


def test_one_long_answer_bounds_a_step_that_may_not_go_on_without_it() -> None:
    found = used(engines=64, bound=0, longest=2000)
    assert found.first == "longest answer" and found.longest_answer == pytest.approx(1.0, abs=0.3)
    assert found.engines < 0.2


def test_slow_tools_and_slow_weights_are_named() -> None:
    assert used(engines=16, outside_s=5.0).first == "tools"
    assert used(engines=16, sync_s=5.0).first == "publication"


def test_the_queue_saturates_with_rows_that_cost_nobody_else_anything() -> None:
    found = used(engines=1000, iteration_base_s=1e-7, iteration_sequence_s=0.0, train_token_s=1e-9)
    assert found.first == "queue" and found.queue > 1  # a single process could not do it
    assert QUEUE_ROW_S * ROWS < 1


def test_the_longest_of_more_draws_is_longer() -> None:
    assert longest([1.0, 2.0], 1) == pytest.approx(1.5)
    assert longest([1.0, 2.0], 2) == pytest.approx(1.75)
    assert longest(range(100), 10_000) == pytest.approx(99)


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    for lineage in (0, 1):
        file = tmp_path / "trajectories" / f"step-000001-lineage{lineage}-rank0.jsonl.gz"
        write_trajectories(file, make_rows(1, groups=1, samples=2 + lineage))
    assert {step: len(rows) for step, rows in recorded_steps(tmp_path).items()} == {1: 3}
