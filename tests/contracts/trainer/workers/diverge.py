"""One rank that trains a batch with an infinite reward; started by test_training.py."""

import math
import sys

import torch.distributed as dist

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged
from rl_async.trainer.actor_critic import Models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.update import update
from tests.conftest import make_rows
from tests.support.weights import whole_weights

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = RunConfig(
        model=ModelConfig(path=sys.argv[1], dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(minibatches=1),
    )
    backend = Fsdp2Backend(sys.argv[1], "float32", "cpu", config.trainer)
    before = whole_weights(backend)
    rows = make_rows(7)
    rows[0].reward = math.inf
    headers = [row.header() for row in rows]
    batch = Batch(7, headers, plan_batch(headers, 7, config, 1, backend.row_cost), {row.key: row for row in rows})
    try:
        update(Models(backend), batch, build(config), config)
    except TrainingDiverged as error:
        assert all((tensor == before[name]).all() for name, tensor in whole_weights(backend).items()), "weights changed"
        print(error)
        sys.exit(3)
