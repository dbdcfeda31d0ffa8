"""One rank that trains recorded rows for some steps and writes the weights; started by test_training.py."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rl_async.configs.schema.algorithm import AlgorithmConfig, CorrectionOptions, KlConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.update import update
from tests.conftest import make_rows
from tests.support.weights import whole_weights

RATE, STEPS = 1e-3, 6  # three batches of two mini-batches


def run(model: Path, out: Path, minibatch_tokens: int, correction: str, sizes: dict[str, Any]) -> None:
    """Three steps with small micro-batches; rank 0 writes the weights, and all print the metrics."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(
            correction=correction,
            correction_options=CorrectionOptions(normalise=correction.startswith("decoupled")),
            kl=KlConfig(coef=0.05),
        ),
        trainer=TrainerConfig(learning_rate=RATE, minibatches=2, max_tokens_per_microbatch=minibatch_tokens, **sizes),
    )
    models = build_models(config, "cpu")
    metrics = {}
    for step in range(3):
        rows = make_rows(step)
        headers = [row.header() for row in rows]
        plan = plan_batch(headers, step, config, models.policy.data_parallel.size, models.row_cost)
        batch = Batch(step, headers, plan, {row.key: row for row in rows})
        metrics = update(models, batch, build(config), config).metrics
    weights = whole_weights(models.policy)
    if dist.get_rank() == 0:
        save_file(weights, out)
    print({k: round(v, 6) for k, v in metrics.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
