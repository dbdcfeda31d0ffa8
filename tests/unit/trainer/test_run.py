"""What a trainer evaluates when it begins, at the start of a run and after a restart."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

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
    config = RunConfig(
        model=ModelConfig(path="none"), data=DataConfig(path="none"), eval=EvalConfig(every=every, before=before)
    )
    parts: dict[str, Any] = {field.name: None for field in fields(Run) if field.default is MISSING}
    evaluations: Any = Begun()
    run = Run(**parts | {"config": config, "folder": tmp_path, "start_step": start}, evaluations=evaluations)
    run.started(Version(1, start))
    assert evaluations.steps == begun
