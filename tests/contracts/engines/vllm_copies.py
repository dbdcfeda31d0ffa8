"""Loads two updates into a rank of vLLM's own model, and counts the bytes that each copies. Run in vLLM's environment:

    .venv-vllm/bin/python vllm_copies.py MODEL RANK RANKS PORT

Prints as JSON, for each of three updates with weights times 1.5, 2 and 1.5, the bytes that were copied or filled,
whether the parameters are those of a fresh load, and the tensors that did not go straight into parameters. Each rank
gets the boxes that it asks for, in pieces as they lie in buckets, in the second update of 1,000 elements.
"""

import json
import os
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from rl_async.rollout_server.vllm.slices import WeightTransfer, _as_loaders_find_it, needed
from rl_async.weight_sync.buckets import Piece
from rl_async.weight_sync.layout import slices, volume, whole

WRITES = [getattr(torch.ops.aten, name) for name in ("copy_", "fill_", "_to_copy", "clone", "new_full")]
# Elements of a tensor that come at once.
MOST = 1000


class Written(TorchDispatchMode):
    """Adds up the bytes that copies and fills write."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket in WRITES:
            self.nbytes += 0 if found.is_meta else found.nbytes
        return found


def pieces_of(name: str, tensor: Tensor, boxes: list[Any], cut: bool) -> list[Piece]:
    """Return a tensor's boxes in one piece, or rows of the whole tensor in several if all of it is asked for."""
    if boxes == [whole(tensor.shape)]:
        flat, row = tensor.reshape(-1), tensor.numel() // tensor.shape[0]
        step = max(row, MOST // row * row) if cut else flat.numel()
        starts = range(0, len(flat), step)
        return [Piece(name, tuple(tensor.shape), at, part) for at, part in zip(starts, flat.split(step), strict=True)]
    outer = whole(tensor.shape)
    data = [tensor[slices(box, outer)].reshape(-1) for box in boxes]
    total = sum(volume(box) for box in boxes)
    return [Piece(name, tuple(tensor.shape), 0, torch.cat(data), tuple(boxes), total)] if boxes else []


def main(folder: str, rank: int, ranks: int, port: str) -> None:
    # The last names the shared memory of vLLM's ranks on a CPU.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "VLLM_DIST_IDENT": f"copies-{port}"}
    arguments = EngineArgs(
        model=folder, tensor_parallel_size=ranks, dtype="float32", enforce_eager=True, load_format="safetensors"
    )
    config = arguments.create_engine_config()
    # As vLLM's own worker does on a CPU, where loading ends with it.
    torch.accelerator.empty_cache = lambda: None
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(ranks)
        model = get_model(vllm_config=config)
        tensors = load_file(f"{folder}/model.safetensors")
        with _as_loaders_find_it(model):
            boxes = {name: needed(model, name, list(tensor.shape)) for name, tensor in tensors.items()}

        def engine() -> WeightTransfer:
            return WeightTransfer(WeightTransferConfig(backend="nccl"), config, torch.device("cpu"), model)

        def update(transfer: WeightTransfer, scale: float, cut: bool) -> int:
            transfer.start_weight_update()
            pieces = [
                piece for name, tensor in tensors.items() for piece in pieces_of(name, tensor * scale, boxes[name], cut)
            ]
            with Written() as written:
                for piece in pieces:
                    transfer._load([piece])
                transfer.finish_weight_update()
            return written.nbytes

        def held() -> dict[str, Tensor]:
            return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

        fresh = {}
        for scale in (1.5, 2.0):
            update(engine(), scale, False)
            fresh[scale] = held()
        kept, found = engine(), []
        for scale, cut in ((1.5, False), (2.0, True), (1.5, False)):
            nbytes = update(kept, scale, cut)
            equal = all(tensor.equal(fresh[scale][name]) for name, tensor in held().items())
            rest = sorted(tensors.keys() - kept._direct.keys())
            found.append({"bytes": nbytes, "equal": equal, "rest": rest})
        size = sum(tensor.nbytes for tensor in {id(p): p for p in model.parameters()}.values())
        print(json.dumps({"updates": found, "size": size}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
