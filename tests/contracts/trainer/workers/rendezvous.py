"""One rank that joins the trainer's group and shows where it listens: ``… RUN_FOLDER [TIMEOUT_S]``.

It saves and loads a sharded and a whole tensor, and would fail if that unpickled anything of another rank; then it
waits for the file ``go on``, meets the others in a new group, and ends.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.checkpoints import host_copy, own_parts, read_shards, write_shards
from rl_async.trainer.ranks import ranks_joined
from tests.support.ports import listeners


def refused(*arguments: Any) -> NoReturn:
    raise AssertionError("a pickled object came from another rank")


def tensors(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(15.0).reshape(5, 3) * value
    return {"sharded": distribute_tensor(rows, mesh, [Shard(0)]), "whole": torch.tensor(value)}


def main(folder: Path, timeout_s: float = 100) -> None:
    distributed_c10d._tensor_to_object = refused
    trainer = TrainerConfig(collective_timeout_s=timeout_s)
    config = RunConfig(model=ModelConfig(path="none"), data=DataConfig(path="none"), trainer=trainer)
    with ranks_joined(config, folder):
        write_shards(host_copy(own_parts(tensors(2.0))), folder / "shards", None)
        read = tensors(0.0)
        read_shards(read, folder / "shards")
        assert all(torch.equal(full(a), full(b)) for a, b in zip(read.values(), tensors(2.0).values(), strict=True))
        print(" ".join(listeners([os.getpid()])), flush=True)
        while not (folder / "go on").exists():
            time.sleep(0.05)
        dist.barrier(dist.new_group())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
