"""One rank that trains rows with images, others without, and writes the weights; started by test_image_ranks.py."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.support.weights import whole_weights
from tests.unit.trainer.test_families import ROWS, row
from tests.unit.trainer.test_families import image_batch as batch

RATE, STEPS = 1e-3, 2


def run(family: str, model: Path, out: Path) -> None:
    """Take steps on a micro-batch with images and one without, in turn or on a rank each."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    backend = Fsdp2Backend(str(model), "float32", "cpu", TrainerConfig(learning_rate=RATE, grad_clip=1e6))
    assert backend.pictures is not None
    rows = [row(family, backend.pictures, number, *each) for number, each in enumerate(ROWS)]
    parts = [[each for each in rows if each.media], [each for each in rows if not each.media]]
    ranks, count = dist.get_world_size(), sum(len(each.token_ids) - 1 for each in rows)
    own = [batch(part, backend.pictures, share=False) for part in parts[dist.get_rank() :: ranks]]

    def loss(_: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -outputs.logprobs.sum() / count

    for _ in range(STEPS):
        backend.step(own, loss)
    weights = whole_weights(backend)
    if dist.get_rank() == 0:
        save_file(weights, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
