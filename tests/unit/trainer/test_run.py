"""What a trainer evaluates when it begins, after a restart and at the end, and what it reports of each step."""

import json
import logging
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rl_async import tracing
from rl_async.configs.load import load_config
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import EvalConfig, RunConfig
from rl_async.messages import ToolCall, Turn, Version, episode_rewards
from rl_async.process.run_files import read_progress
from rl_async.trainer.checkpoints import FORMAT, CheckpointState
from rl_async.trainer.monitoring import GuardAction
from rl_async.trainer.publishing import EngineUpdates, of_publication
from rl_async.trainer.ranks import StopRequest
from rl_async.trainer.records import append_evaluation
from rl_async.trainer.train import Run, batch_metrics, conversation_metrics, conversation_sums, publishes_after
from rl_async.weight_sync.protocol import SyncReport
from rl_async.weight_sync.wave import CUT_OFF
from tests.conftest import make_rows


class Begun:
    """An evaluator that only notes which versions it is to evaluate."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def begin(self, published: int) -> None:
        self.steps.append(published)


@pytest.mark.parametrize(
    ("start", "before", "every", "recorded", "begun"),
    [
        (0, True, 0, [], [0]),
        (0, False, 10, [], []),
        (0, True, 10, [0], []),
        (20, False, 10, [], [20]),
        (20, True, 10, [0, 10], [20]),
        (20, True, 10, [0, 10, 20], []),
        (25, True, 10, [], []),
        (20, True, 0, [], []),
    ],
)
def test_an_evaluation_that_was_lost_with_the_trainer_is_begun_again(
    tmp_path: Path, start: int, before: bool, every: int, recorded: list[int], begun: list[int]
) -> None:
    for step in recorded:
        append_evaluation(tmp_path / "evaluations.jsonl", 0, {"eval/step": float(step), "eval/reward": 1.0})
    evaluations: Any = Begun()
    run = make_run(tmp_path, EvalConfig(every=every, before=before), start_step=start, evaluations=evaluations)
    run.started(Version(1, start))
    assert evaluations.steps == begun


def make_run(folder: Path, settings: EvalConfig = EvalConfig(), **given: Any) -> Run:  # noqa: B008  frozen
    config = RunConfig(model=ModelConfig(path="none", dtype="float32"), data=DataConfig(path="none"), eval=settings)
    parts: dict[str, Any] = {field.name: None for field in fields(Run) if field.default is MISSING}
    return Run(**parts | {"config": config, "folder": folder} | given)


class Heard:
    """Takes any call, and notes it with what it was given."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            self.calls.append((name, *given))
            return self._answers.get(name)

        return called


@pytest.mark.parametrize("ended", [True, False])
def test_a_step_is_reported_with_an_evaluation_that_ended_during_it(
    one_rank: None, tmp_path: Path, ended: bool
) -> None:
    result = SimpleNamespace(metrics=lambda: {"eval/reward": 0.5}) if ended else None
    evaluations, tracking = Heard(after_step=result), Heard()
    own: Any = {"depth": SimpleNamespace(depth=lambda: {"depth": 1.0})}
    own |= {"engines": SimpleNamespace(metrics=lambda: {"engines": 2.0})}
    own |= {"models": SimpleNamespace(policy=SimpleNamespace(device="cpu")), "lineage": 3}
    run = make_run(tmp_path, evaluations=evaluations, tracking=tracking, **own)
    metrics = {"rollout/tokens": 30.0, "time/step_s": 2.0, "time/update_s": 1.0, "compute/model_flops": 4e12}
    run.report(7, Version(3, 8), metrics)
    ((name, step, logged),) = tracking.calls
    assert (name, step) == ("log", 7) and evaluations.calls == [("after_step", 8, 8)]
    expected = {"step": 7, "version": 8, "lineage": 3, "tokens/per_s": 15.0, "compute/tflops_per_s": 4.0}
    expected |= {"depth": 1.0, "engines": 2.0, "rollout/tokens": 30.0}
    assert expected.items() <= logged.items() and logged.get("eval/reward") == (0.5 if ended else None)


@pytest.mark.parametrize(("durable", "kept"), [(None, []), (20, [("checkpointed", 20)])])
def test_batches_before_a_durable_checkpoint_are_let_go(
    one_rank: None, tmp_path: Path, durable: int | None, kept: list[tuple[Any, ...]]
) -> None:
    source = Heard()
    make_run(tmp_path, source=source, saver=Heard(durable=durable)).retire()
    assert source.calls == kept


def test_the_final_weights_are_evaluated_before_the_end_which_says_so(one_rank: None, tmp_path: Path) -> None:
    results = [SimpleNamespace(step=step, metrics=lambda step=step: {"eval/step": step}) for step in (4, 10)]
    parts = {name: Heard() for name in ("profiler", "memory", "tracking", "recorder", "stop")}
    parts |= {"saver": Heard(), "source": Heard(), "evaluations": Heard(finish=results)}
    make_run(tmp_path, lineage=0, **parts).finish(Version(0, 10))
    assert [call[1] for call in parts["evaluations"].calls] == [10]
    evaluated = [("log_evaluation", 9, {"eval/step": 4}), ("log_evaluation", 10, {"eval/step": 10})]
    assert parts["tracking"].calls == [*evaluated, ("close",)]
    phase = "evaluating the final weights"
    assert parts["profiler"].calls == [("at", 9, phase), ("close",)] and parts["memory"].calls == [("at", phase)]
    beat = json.loads((tmp_path / "ranks" / "0.json").read_text())
    assert (beat["step"], beat["phase"]) == (9, phase)
    assert [call[0] for call in parts["saver"].calls] == ["wait", "durable"]
    assert parts["recorder"].calls == [("flush",)] and parts["stop"].calls == [("wait_for_step", False)]


# When weights are published, and the metrics of a batch.


@pytest.mark.parametrize(("overrides", "steps"), [([], [2, 4, 5]), (["rollout.replay=runs/before"], [1, 2, 3, 4, 5])])
def test_a_replay_announces_every_step_because_the_queue_waits_for_it(overrides: list[str], steps: list[int]) -> None:
    config = load_config(
        "calculator", ["trainer.steps=5", "weight_sync.every=2", "queue.max_staleness=1", *overrides],
        mode="disaggregated",
    )  # fmt: skip
    assert [step for step in range(1, 6) if publishes_after(config, step)] == steps


def metrics(groups: list[list[float | None]]) -> dict[str, float]:
    """Rewards by group; None: the scorer failed, and the recorded reward is garbage."""
    rows = make_rows(0, groups=len(groups), samples=len(groups[0]))
    for row, reward in zip(rows, [r for group in groups for r in group], strict=True):
        row.scored, row.reward = reward is not None, -99.0 if reward is None else reward
    return batch_metrics([row.header() for row in rows], 0, None)


def test_rows_without_a_reward_are_counted_and_left_out() -> None:
    got = metrics([[1.0, None], [0.0, 0.5]])
    assert got["reward/mean"] == pytest.approx(0.5)
    assert got["reward/std"] == pytest.approx((((0.5**2) * 2) / 3) ** 0.5)
    assert got["reward/unscored_fraction"] == 0.25
    assert got["reward/groups_without_signal"] == 0.5


@pytest.mark.parametrize(
    ("groups", "share"),
    [([[1.0, 1.0], [0.0, 0.0]], 1.0), ([[1.0, 0.0], [None, None]], 0.5), ([[0.0, 1.0], [1.0, 0.0]], 0.0)],
)
def test_a_group_without_scored_rows_has_no_signal(groups: list[list[float | None]], share: float) -> None:
    assert metrics(groups)["reward/groups_without_signal"] == share


def test_an_episode_of_several_rows_counts_once() -> None:
    rows = make_rows(0, groups=1, samples=2)
    rows[0].reward, rows[1].reward = 1.0, 0.0
    more = [msgspec.structs.replace(rows[0], segment=segment) for segment in (1, 2)]
    got = batch_metrics([row.header() for row in [rows[0], *more, rows[1]]], 0, None)
    assert (got["reward/mean"], got["batch/trajectories"], got["batch/episodes"]) == (0.5, 4.0, 2.0)
    assert got["reward/unscored_fraction"] == 0.0


def test_turn_rewards_belong_to_an_episodes_reward() -> None:
    rows = make_rows(0, groups=1, samples=2)
    rows[0].reward = rows[1].reward = 0.0
    rows[0].turns = [Turn(role="assistant", text="", reward=0.25), Turn(role="user", text="")]
    more = msgspec.structs.replace(rows[0], segment=1, turns=[Turn(role="assistant", text="", reward=0.5)])
    headers = [row.header() for row in (rows[0], more, rows[1])]
    assert episode_rewards(headers) == {(0, 0): 0.75, (0, 1): 0.0}
    got = batch_metrics(headers, 0, None)
    assert (got["reward/mean"], got["reward/groups_without_signal"]) == (0.375, 0.0)


def test_malformed_calls_are_counted_by_kind() -> None:
    rows = make_rows(0, groups=1, samples=2)
    calls = [ToolCall(name="", arguments="", problem=kind) for kind in ("bad_json", "unclosed", "bad_json", None)]
    calls[-1].cut = 10_000
    size = len(rows[0].token_ids)
    rows[0].turns = [Turn(role="assistant", text="", end=size, tool_calls=calls)]
    masked = np.zeros(size, bool)
    later = msgspec.structs.replace(rows[0], segment=1, loss_mask=masked)  # the same turn, as context of a later row
    rows = [*rows, later]
    got = conversation_metrics(conversation_sums([row.header() for row in rows], rows))
    kinds = {name: value for name, value in got.items() if "malformed" in name}
    assert kinds == {"rollout/malformed_calls/bad_json": 2.0, "rollout/malformed_calls/unclosed": 1.0}
    assert got["rollout/tool_calls_mean"] == 4 / 2, "per episode, not per row"
    assert got["rollout/cut_results_mean"] == 1 / 2


def test_turns_and_tokens_are_means_over_episodes() -> None:
    rows = make_rows(0, groups=1, samples=2)
    later = msgspec.structs.replace(rows[0], segment=1)
    for row in (rows[0], later, rows[1]):
        row.turns, row.error = [Turn(role="assistant", text="", start=4, end=len(row.token_ids))], "no"
    rows[1].error = ""
    rows = [rows[0], later, rows[1]]
    got = conversation_metrics(conversation_sums([row.header() for row in rows], rows))
    assert got["rollout/turns_mean"] == 3 / 2 and got["rollout/error_fraction"] == 1 / 2
    sampled = [int(row.loss_mask.sum()) for row in rows]
    tokens = batch_metrics([row.header() for row in rows], 0, None)
    assert tokens["rollout/response_tokens_mean"] == sum(sampled) / 2


# When a trainer ends on a signal: at the end of its step, or at once.


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    request = StopRequest()
    request.listen()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_step_it_ends_at_once(stop: StopRequest) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143, "steps are left, so it is not 0"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_request_whose_exit_python_drops_counts_at_the_next_step(stop: StopRequest) -> None:
    class Held:
        """Something that may be referred to weakly."""

    held = Held()
    reference = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGTERM))  # as in an import
    del held
    assert reference() is None
    assert stop.requested


def test_a_step_is_finished_however_often_a_scheduler_asks(stop: StopRequest) -> None:
    stop.wait_for_step(True)
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_ctrl_c_after_the_request_ends_it_at_once(stop: StopRequest, first: int) -> None:
    stop.wait_for_step(True)
    signal.raise_signal(first)
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130


# The spans of a publication: of the whole by the first rank, and of each engine's update.


class FakeSpans:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.added: list[tuple[str, str, str, str]] = []  # trace, name, parent, error
        self.about: list[dict[str, Any]] = []

    def traceparent(self, trace: str, key: str) -> str:
        return f"{trace} {key}"

    def add(
        self, trace: str, name: str, key: str, parent: str, times: tuple[int, int], error: str, about: dict[str, Any]
    ) -> None:
        assert 0 < times[0] <= times[1]
        self.added.append((trace, name, parent, error))
        self.about.append(about)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> FakeSpans:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    return fake


def report(*failures: str) -> SyncReport:
    return SyncReport(
        version=Version(0, 3),
        seconds=1.0,
        waiting_seconds=0.0,
        pause_seconds=0.5,
        nbytes=7,
        engines=["a"],
        failures=list(failures),
    )


def test_the_first_rank_alone_tells_of_a_publication(spans: FakeSpans) -> None:
    for first in (False, True):
        with of_publication(Version(0, 3), is_first_rank=first) as ended:
            ended(report())
    assert spans.added == [("publish 0.3", "publish", "", "")]
    assert spans.about[0]["rl_async.bytes"] == 7 and spans.about[0]["rl_async.engines"] == 1


def test_a_publication_that_cut_engines_off_has_an_error(spans: FakeSpans) -> None:
    with of_publication(Version(0, 3), is_first_rank=True) as ended:
        ended(report("b failed in resume"))
    assert spans.added[0][3] == "engines_cut_off"


def test_an_update_lasts_from_its_first_stage_to_its_last(spans: FakeSpans, tmp_path: Path) -> None:
    updates = EngineUpdates(tmp_path)
    for engine, version, stage in (
        ("a", "0.2", "probe"),  # not of an update
        ("a", "0.3", "pause"),
        ("b", "0.3", "pause"),
        ("a", "0.3", "update, bucket 1/2"),
        ("a", "0.3", ""),
        ("b", "0.3", "asleep"),  # nothing was updated
        ("b", "0.3", ""),
    ):
        updates(engine, version, stage)
    assert spans.added == [("publish 0.3", "update engine", "publish", "")]
    assert spans.about[0]["rl_async.engine"] == "a"


def test_the_update_of_an_engine_that_is_cut_off_has_an_error(spans: FakeSpans, tmp_path: Path) -> None:
    updates = EngineUpdates(tmp_path)
    for stage in ("pause", "update, bucket 3/9", CUT_OFF):
        updates("a", "0.3", stage)
    assert spans.added == [("publish 0.3", "update engine", "publish", "cut off")]


# What a trainer saves, lets go, tells of its passes, and does at the guard's word.


def trainer(folder: Path, **given: Any) -> tuple[Run, dict[str, Heard]]:
    """A run at lineage 3 whose other parts take any call."""
    parts = {name: Heard() for name in ("profiler", "memory", "tracking", "recorder", "stop", "source", "saver")}
    models = SimpleNamespace(trained=lambda: {".": "policy"})
    return make_run(folder, lineage=3, models=models, **parts | given), parts | given


def test_a_checkpoint_has_the_step_the_lineage_and_what_the_controller_and_the_queue_had_come_to(
    one_rank: None, tmp_path: Path
) -> None:
    run, parts = trainer(tmp_path, kl=SimpleNamespace(coef=0.25), source=Heard(snapshot=b"queue"))
    run.checkpoint(7)
    state = CheckpointState(step=7, lineage=3, kl_coef=0.25, format=FORMAT)
    assert parts["saver"].calls == [("save", {".": "policy"}, state, b"queue")]
    assert parts["recorder"].calls == [("flush",)], "rows before it are on the disk"


@pytest.mark.parametrize(("completed", "newest", "saves"), [(7, 4, True), (7, 7, False), (5, 0, False)])
def test_a_trainer_that_leaves_saves_what_no_checkpoint_has(
    one_rank: None, tmp_path: Path, completed: int, newest: int, saves: bool
) -> None:
    saver = Heard(durable=completed)
    saver.newest = newest  # type: ignore[attr-defined]
    own: dict[str, Any] = {"start_step": 5, "kl": SimpleNamespace(coef=0.0), "saver": saver}
    run, parts = trainer(tmp_path, **own)
    run.leave(completed)
    assert [call[0] for call in saver.calls] == ["save"] * saves + ["wait", "durable"]
    assert parts["source"].calls == [("snapshot",)] * saves + [("checkpointed", completed)]
    assert parts["tracking"].calls == parts["profiler"].calls == [("close",)]


def test_the_guards_word_reaches_the_queue_and_the_log(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts = {2: GuardAction(), 3: GuardAction(warning="the policy drifts"), 4: GuardAction(max_staleness=1)}
    run, parts = trainer(tmp_path, guard=SimpleNamespace(observe=lambda step, metrics: verdicts[step]))
    with caplog.at_level(logging.INFO, "rl_async.trainer"):
        for step in verdicts:
            run.watch(step, {})
    assert parts["source"].calls == [("tighten", 1)]
    assert caplog.messages[0] == "the policy drifts" and "1" in caplog.messages[1]


def test_micro_batches_are_counted_for_the_live_view(one_rank: None, tmp_path: Path) -> None:
    make_run(tmp_path).progress()("training", 3, 8)
    found = read_progress(tmp_path, "trainer-0")
    assert found is not None and (found.work, found.done, found.total, found.unit) == (
        "training",
        3,
        8,
        "micro-batches",
    )
