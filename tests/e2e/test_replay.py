"""Replaying recorded batches, an interrupted and an undisturbed trainer end with identical weights."""

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from rl_async.configs.load import dump
from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import DebugConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.recording import write_trajectories
from rl_async.trainer.checkpoints import list_checkpoints
from tests.conftest import make_rows
from tests.support.forked import Forked

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
    advantage: str = "grpo",
    min_train_s: float = 0.0,
    **options: Any,
) -> Forked:
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage=advantage),
        critic=critic,
        trainer=TrainerConfig(learning_rate=1e-3, steps=STEPS, checkpoint_every=2, **options),
        debug=DebugConfig(min_train_s=min_train_s),
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    return Forked("rl_async.trainer", "--run", str(folder), "--replay", str(recorded), *more)


def finish(trainer: Forked) -> None:
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors[-3000:]


@pytest.fixture(scope="module")
def plain(recorded: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a critic that nobody disturbed."""
    folder = tmp_path_factory.mktemp("plain")
    finish(start(folder, recorded, model_folder))
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Hash of every file's tensors in the last checkpoint; their order in a file means nothing."""
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    return {str(path.relative_to(last)): digest_of(load_file(path)) for path in sorted(last.rglob("*.safetensors"))}


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Of names and bytes."""
    sums = hashlib.sha256()
    for name in sorted(tensors):
        sums.update(name.encode() + tensors[name].numpy().tobytes())
    return sums.hexdigest()


SHARD = "shards/shard-00001-model-00001-of-00001.safetensors"
POLICY = {"model/model.safetensors", SHARD, "random-rank0.safetensors"}
CRITICS = {
    "none": ("grpo", None, set()),
    "own": (  # the checkpoint that is resumed from is of a step in which the policy had not begun to train
        "gae",
        CriticConfig(learning_rate=1e-3, warmup_steps=3),
        {f"critic/{name}" for name in ("model/model.safetensors", SHARD, "value_head.safetensors")},
    ),
    "shared": ("gae", CriticConfig(shared=True), {"value_head.safetensors"}),
    "process": (
        "prime",
        CriticConfig(learning_rate=1e-3),
        {f"critic/{name}" for name in ("model/model.safetensors", SHARD)},
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "none" else pytest.mark.slow) for kind in CRITICS]
)
def test_kill_and_resume_ends_with_identical_weights(
    recorded: Path, model_folder: Path, tmp_path: Path, plain: Path, kind: str
) -> None:
    advantage, critic, files = CRITICS[kind]
    undisturbed, interrupted = tmp_path / "a", tmp_path / "b"
    if critic is None:
        undisturbed = plain
    else:
        finish(start(undisturbed, recorded, model_folder, critic=critic, advantage=advantage))

    victim = start(interrupted, recorded, model_folder, critic=critic, advantage=advantage, min_train_s=0.3)
    deadline = time.monotonic() + 120
    metrics = interrupted / "metrics.jsonl"
    saved = interrupted / "checkpoints" / "step-000002"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3 or not saved.exists():
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.02)
    victim.kill()  # three steps are done, the checkpoint is of two
    victim.communicate()
    finish(start(interrupted, recorded, model_folder, "--resume", critic=critic, advantage=advantage))

    assert digests(interrupted) == digests(undisturbed)
    assert digests(undisturbed).keys() == POLICY | files
    steps = [(m["lineage"], m["step"]) for m in map(json.loads, metrics.read_text().splitlines())]
    assert steps[-4:] == [(1, 2), (1, 3), (1, 4), (1, 5)]


def test_killed_while_a_checkpoint_is_being_written(
    recorded: Path, model_folder: Path, tmp_path: Path, plain: Path
) -> None:
    interrupted = tmp_path / "b"
    checkpoints = interrupted / "checkpoints"
    victim = start(interrupted, recorded, model_folder, min_train_s=1.0)
    deadline = time.monotonic() + 120
    while not (checkpoints / ".step-000004.lineage0.tmp").exists():
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.001)
    victim.kill()
    victim.communicate()
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-000002"]
    finish(start(interrupted, recorded, model_folder, "--resume"))
    assert digests(interrupted) == digests(plain)
    kept = ["step-000002", "step-000004", "step-000006"]  # the two newest, and the one that was resumed from
    assert sorted(path.name for path in checkpoints.iterdir()) == kept


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    recorded: Path, model_folder: Path, tmp_path: Path, plain: Path
) -> None:
    expected = digests(plain)
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "checkpoints" / "step-000006" / SHARD
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = start(tmp_path, recorded, model_folder, "--resume")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors[-3000:]
    assert f"{damaged} has" in errors and "resuming at step 4" in errors
    assert digests(tmp_path) == expected
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / SHARD).unlink()
    last = start(tmp_path, recorded, model_folder, "--resume")
    _, errors = last.communicate(timeout=120)
    assert last.returncode == 2, errors[-3000:]
    assert f"{damaged} is missing" in errors and "Traceback" not in errors


def test_a_missing_batch_is_one_clear_error(recorded: Path, model_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    trainer = start(tmp_path / "run", empty, model_folder)
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 2
    assert "has no recorded batch of step 0" in errors
    assert "Traceback" not in errors
