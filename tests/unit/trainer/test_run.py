"""What a trainer evaluates when it begins, after a restart and at the end, and what it reports of each step."""

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import EvalConfig, RunConfig
from rl_async.messages import Version
from rl_async.trainer.records import append_evaluation
from rl_async.trainer.run import Run


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


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
def test_a_step_is_reported_with_an_evaluation_that_ended_during_it(alone: None, tmp_path: Path, ended: bool) -> None:
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
    alone: None, tmp_path: Path, durable: int | None, kept: list[tuple[Any, ...]]
) -> None:
    source = Heard()
    make_run(tmp_path, source=source, saver=Heard(durable=durable)).retire()
    assert source.calls == kept


def test_the_final_weights_are_evaluated_before_the_end_which_says_so(alone: None, tmp_path: Path) -> None:
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
