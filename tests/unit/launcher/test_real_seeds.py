"""examples/real_seeds.py: which runs it launches, and which it does not tabulate."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load.loader import dump, load_config

FILE = Path(__file__).parents[3] / "examples" / "real_seeds.py"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, with a program `rl-async` that only notes its first argument."""
    spec = importlib.util.spec_from_file_location("real_seeds", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = tmp_path / "rl-async"
    program.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/said"\n')
    program.chmod(0o700)
    monkeypatch.setattr(module, "RL_ASYNC", str(program))
    return module


def run(example: Any, tmp_path: Path, *, checkpoint: int, steps: list[int]) -> Any:
    """Have the example run a seed whose folder is there, with these records, and whose config wants two steps."""
    folder = tmp_path / "real-sums-disaggregated-seed1"
    (folder / f"checkpoints/step-{checkpoint:06d}").mkdir(parents=True)
    (folder / f"checkpoints/step-{checkpoint:06d}/state.json").touch()
    (folder / "config.yaml").write_text(dump(load_config("smollm2", ["trainer.steps=2"])))
    (folder / "ledger.jsonl").write_text('{"event":"finish"}\n')
    lines = [{"step": step, "time": 60.0 * n, "time/step_s": 60.0, "reward/mean": n} for n, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "evaluations.jsonl").write_text("")
    return example.run("sums", "disaggregated", 1, argparse.Namespace(runs=tmp_path, vllm=None, override=[]))


def test_an_interrupted_run_is_continued_and_audited(example: Any, tmp_path: Path) -> None:
    found = run(example, tmp_path, checkpoint=1, steps=[0, 1, 1])
    assert (tmp_path / "said").read_text().split() == ["launch", "audit"]
    assert found.rewards == [0, 2]  # step 1 was trained again


def test_a_run_that_has_ended_is_audited_alone(example: Any, tmp_path: Path) -> None:
    assert len(run(example, tmp_path, checkpoint=2, steps=[0, 1]).rewards) == 2
    assert (tmp_path / "said").read_text().split() == ["audit"]


def test_a_run_without_all_its_steps_is_not_tabulated(example: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 of 2 steps"):
        run(example, tmp_path, checkpoint=2, steps=[0])
