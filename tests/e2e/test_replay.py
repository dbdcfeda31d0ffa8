"""Replaying recorded batches, an interrupted and an undisturbed trainer end with identical weights."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_async.configs.algorithm import AlgorithmConfig
from rl_async.configs.critic import CriticConfig
from rl_async.configs.load import dump
from rl_async.configs.schema import DataConfig, ModelConfig, RunConfig, TrainerConfig
from rl_async.trainer.records import write_trajectories
from tests.conftest import make_rows

pytestmark = pytest.mark.e2e
STEPS = 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with recorded trajectories of STEPS steps."""
    folder = tmp_path_factory.mktemp("recorded")
    for step in range(STEPS):
        write_trajectories(folder / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz", make_rows(step))
    return folder


def start(
    folder: Path,
    recorded: Path,
    model: Path,
    *more: str,
    critic: CriticConfig | None = None,
    min_train_s: float = 0.0,
) -> subprocess.Popen[str]:
    config = RunConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage="gae" if critic else "grpo"),
        critic=critic,
        trainer=TrainerConfig(learning_rate=1e-3, steps=STEPS, checkpoint_every=2, min_train_s=min_train_s),
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    command = [sys.executable, "-m", "rl_async.trainer", "--run", str(folder), "--replay", str(recorded), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(trainer: subprocess.Popen[str]) -> None:
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors[-3000:]


def digests(folder: Path) -> dict[str, str]:
    """Hash of every tensor file in the last checkpoint."""
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    return {
        str(p.relative_to(last)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(last.rglob("*.safetensors"))
    }


POLICY = {"model/model.safetensors", "optimizer.safetensors", "random-rank0.safetensors"}
CRITICS = {
    "none": (None, set()),
    "own": (  # the checkpoint that is resumed from is of a step in which the policy had not begun to train
        CriticConfig(learning_rate=1e-3, warmup_steps=3),
        {f"critic/{name}" for name in ("model/model.safetensors", "optimizer.safetensors", "value_head.safetensors")},
    ),
    "shared": (CriticConfig(shared=True), {"value_head.safetensors"}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "none" else pytest.mark.slow) for kind in CRITICS]
)
def test_kill_and_resume_ends_with_identical_weights(
    recorded: Path, model_folder: Path, tmp_path: Path, kind: str
) -> None:
    critic, files = CRITICS[kind]
    undisturbed, interrupted = tmp_path / "a", tmp_path / "b"
    first = start(undisturbed, recorded, model_folder, critic=critic)

    victim = start(interrupted, recorded, model_folder, critic=critic, min_train_s=0.3)
    deadline = time.monotonic() + 120
    metrics = interrupted / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.02)
    victim.kill()  # three steps are done, the checkpoint is of two
    victim.communicate()
    finish(first)
    finish(start(interrupted, recorded, model_folder, "--resume", critic=critic))

    assert digests(interrupted) == digests(undisturbed)
    assert digests(undisturbed).keys() == POLICY | files
    steps = [(m["lineage"], m["step"]) for m in map(json.loads, metrics.read_text().splitlines())]
    assert steps[-4:] == [(1, 2), (1, 3), (1, 4), (1, 5)]


def test_a_missing_batch_is_one_clear_error(recorded: Path, model_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    trainer = start(tmp_path / "run", empty, model_folder)
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 2
    assert "has no recorded batch of step 0" in errors
    assert "Traceback" not in errors
