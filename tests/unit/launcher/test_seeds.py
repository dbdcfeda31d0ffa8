"""examples/seeds.py and real_seeds.py: which runs they launch, and which they do not tabulate."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load import dump, load_config

SHOP = "examples/mcp_shop.yaml"
SMALL = ("trainer.steps=2", "model.path=models/small")  # the preset's own model may not be installed
OPTIONS = ("seed=1", *SMALL)
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, with a program `rl-async` that only notes its arguments."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("seeds")
    program = tmp_path / "rl-async"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/said"\n')
    program.chmod(0o700)
    monkeypatch.setattr(module, "RL_ASYNC", str(program))
    return module


def said(tmp_path: Path) -> list[str]:
    """The first word of each command, of those since the last call."""
    lines = (tmp_path / "said").read_text().splitlines()
    (tmp_path / "said").unlink()
    return [line.split()[0] for line in lines]


def make_run(
    folder: Path,
    *,
    checkpoint: int,
    steps: list[int],
    config: str = "smollm2",
    mode: str = "disaggregated",
    options: Sequence[str] = OPTIONS,
) -> None:
    """Make the folder of a run with these records, whose config wants two steps."""
    (folder / f"checkpoints/step-{checkpoint:06d}").mkdir(parents=True)
    (folder / f"checkpoints/step-{checkpoint:06d}/state.json").touch()
    resolved = load_config(config, [*options, f"launcher.run_dir={folder.parent}"], mode=mode)
    (folder / "config.yaml").write_text(dump(resolved))
    (folder / "ledger.jsonl").write_text('{"event":"finish"}\n')
    lines = [{"step": step, "time": 60.0 * n, "time/step_s": 60.0, "reward/mean": n} for n, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "evaluations.jsonl").write_text("")


def train(
    seeds: Any, tmp_path: Path, *, checkpoint: int, steps: list[int], mode: str = "disaggregated", more: str = ""
) -> Any:
    """Have the example train a run whose folder is there."""
    make_run(tmp_path / "mine", checkpoint=checkpoint, steps=steps)
    return seeds.train("smollm2", mode, "mine", tmp_path, [*OPTIONS, *more.split()])


@pytest.mark.parametrize(
    ("mode", "more", "named"),
    [
        ("disaggregated", "rollout.temperature=0.7", "rollout.temperature"),
        ("colocated", "queue.max_staleness=0", "mode"),
    ],
)
def test_a_run_of_another_config_is_not_taken_for_this_one(
    seeds: Any, tmp_path: Path, mode: str, more: str, named: str
) -> None:
    with pytest.raises(SystemExit, match=named):
        train(seeds, tmp_path, checkpoint=2, steps=[0, 1], mode=mode, more=more)
    assert not (tmp_path / "said").exists()


def test_an_interrupted_run_is_continued_and_audited(seeds: Any, tmp_path: Path) -> None:
    found = train(seeds, tmp_path, checkpoint=1, steps=[0, 1, 1])
    assert said(tmp_path) == ["launch", "audit"]
    assert found.rewards == [0, 2]  # step 1 was trained again


def test_a_run_that_has_ended_is_audited_alone(seeds: Any, tmp_path: Path) -> None:
    assert len(train(seeds, tmp_path, checkpoint=2, steps=[0, 1]).rewards) == 2
    assert said(tmp_path) == ["audit"]


def test_a_run_without_all_its_steps_is_not_tabulated(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 of 2 steps"):
        train(seeds, tmp_path, checkpoint=2, steps=[0])


def test_each_config_and_seed_is_a_row(
    seeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (3, 4):
        options = [f"seed={seed}", "trainer.steps=2"]
        make_run(tmp_path / f"seeds-mcp_shop-{seed}", checkpoint=2, steps=[0, 1], config=SHOP, options=options)
    words = [SHOP, "--seeds", "3", "4", "--runs", str(tmp_path), "trainer.steps=2"]
    monkeypatch.setattr(sys, "argv", ["seeds.py", *words])
    seeds.main()
    assert said(tmp_path) == ["audit", "audit"]
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| mcp_shop", "3"], ["| mcp_shop", "4"]]


def test_the_real_seeds_are_trained_by_it(seeds: Any, tmp_path: Path) -> None:
    options = ["queue.max_staleness=0", *OPTIONS]
    folder = tmp_path / "real-sums-colocated-seed1"
    make_run(folder, checkpoint=2, steps=[0, 1], mode="colocated", options=options)
    arguments = argparse.Namespace(runs=tmp_path, vllm=None, override=list(SMALL))
    found = importlib.import_module("real_seeds").run("sums", "colocated", 1, arguments)
    assert said(tmp_path) == ["audit"]
    assert found.records.rewards == [0, 1]
