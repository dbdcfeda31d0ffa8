"""Trackers: what they write, what stops a run at its start, and that a later failure never does."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig, TrackerName, TrackingConfig
from rl_async.errors import ConfigError
from rl_async.trainer.trackers import TRACKERS, Destination, Tracking, mlflow_name


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
