"""One rank that trains two steps, or continues from a checkpoint, saves, and takes a step; started by test_layouts.py.

``python -m tests.contracts.backends.layouts_worker OPTIONS DTYPE MODEL OUT [CHECKPOINT]`` with the trainer's options
as JSON. Rank 0 leaves the checkpoint in OUT/saved, and the weights after the step.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rl_async.trainer.backend import Backend
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.backends.models import STEPS, TRAINING
from tests.contracts.backends.worker import step
from tests.support.weights import whole_weights


def make(options: dict[str, object], dtype: str, model: str) -> Backend:
    config = msgspec.structs.replace(TRAINING, **options)
    if config.backend == "fsdp2":
        return Fsdp2Backend(model, dtype, "cpu", config)
    from rl_async.trainer.megatron.backend import MegatronBackend

    return MegatronBackend(model, dtype, "cpu", config)


def main() -> None:
    options, dtype, model, out, *checkpoint = sys.argv[1:]
    backend = make(json.loads(options), dtype, model)
    if checkpoint:
        backend.load(Path(checkpoint[0]))
    else:
        for _ in range(STEPS):
            step(backend)
    saved = Path(out) / "saved"
    saved.mkdir(parents=True, exist_ok=True)
    backend.save(saved)
    step(backend)
    weights = whole_weights(backend)
    if dist.get_rank() == 0:
        save_file(weights, Path(out) / "after.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
