"""One rank that trains a policy and a critic on recorded rows, saves both, and loads them again; started by
test_ranks.py. Rank 0 leaves the tensors of both models, before and after the way over the disk, and metrics."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.actor_critic import Models, build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.checkpoints import FORMAT, CheckpointState, Saver, load_checkpoint
from rl_async.trainer.export import WHOLE
from rl_async.trainer.model import MODEL_FOLDER, VALUE_HEAD_FILE
from rl_async.trainer.update import update
from tests.conftest import make_rows
from tests.support.weights import whole_weights

CRITICS = {
    "own": CriticConfig(learning_rate=1e-3, warmup_steps=1),
    "shared": CriticConfig(shared=True),
    "process": CriticConfig(learning_rate=1e-3),
}


def run(model: Path, out: Path, tokens: int, kind: str, correction: str, sizes: str, resumed: str) -> None:
    """Three steps, then a checkpoint that fresh models read, then a fourth step of both.

    ``sizes`` and ``resumed`` are options of the trainer's, as JSON, of the first models and of the fresh ones.
    """
    made = [config_of(model, tokens, kind, correction, json.loads(options)) for options in (sizes, resumed)]
    config, config_again = made
    models = build_models(config, "cpu")
    metrics = [train(models, step, config) for step in range(3)]
    saver = Saver(out, keep=1, timeout_s=60)
    saver.save(models.trained(), CheckpointState(step=3, lineage=0, kl_coef=0.0, format=FORMAT), b"")
    saver.wait()
    again = build_models(config_again, "cpu")
    load_checkpoint(out / "step-000003", again.trained())
    tensors = {}
    for name, those, options in (("kept", models, config), ("loaded", again, config_again)):
        train(those, 3, options)
        tensors |= {f"{name}.{key}": value for key, value in state(those, out / name).items()}
    if dist.get_rank() == 0:
        save_file(tensors, out / "tensors.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))


def config_of(model: Path, tokens: int, kind: str, correction: str, options: dict[str, Any]) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage="prime" if kind == "process" else "gae", correction=correction),
        critic=CRITICS[kind],
        trainer=TrainerConfig(learning_rate=1e-3, minibatches=2, max_tokens_per_microbatch=tokens, **options),
    )


def train(models: Models, step: int, config: RunConfig) -> dict[str, float]:
    rows = make_rows(step)
    headers = [row.header() for row in rows]
    plan = plan_batch(headers, step, config, models.policy.data_parallel.size, models.row_cost)
    batch = Batch(step, headers, plan, {row.key: row for row in rows})
    return update(models, batch, build(config), config).metrics


def state(models: Models, folder: Path) -> dict[str, Tensor]:
    """What engines would get, and on rank 0 what checkpoints hold: both models in float32, with their value heads."""
    tensors = {f"export.{name}": tensor for name, tensor in whole_weights(models.policy).items()}
    for part, model in models.trained().items():
        target = folder / part
        target.mkdir(parents=True, exist_ok=True)
        model.save(target)
        if dist.get_rank() == 0:
            tensors |= {f"{part}.{name}": tensor for name, tensor in load_file(target / MODEL_FOLDER / WHOLE).items()}
            head = target / VALUE_HEAD_FILE
            stored = load_file(head) if head.is_file() else {}
            tensors |= {f"{part}.value_head.{name}": tensor for name, tensor in stored.items()}
    return tensors


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    sizes, resumed = sys.argv[6:] or ("{}", "{}")
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], sizes, resumed)
    dist.destroy_process_group()
