"""One rank that trains a step through recorded experts; started by test_replay.py.

``python -m tests.contracts.backends.replay SIZES FOLDER OUT``: the trainer's options as JSON, the model, and where rank
0 writes log-probabilities with and without a record, and the trained weights.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rl_async.trainer.packing import Tensors
from tests.contracts.backends.models import TRAINING, cell_rows, loss_of, micro_batches, whole_batch
from tests.contracts.backends.worker import ENTROPY, make
from tests.support.weights import whole_weights

LAYERS, EXPERTS, CHOSEN = 4, 4, 2


def recorded(batches: Sequence[Tensors]) -> list[Tensors]:
    """The batches with experts that depend on the token and its place, so that a row has the same in any batch."""
    found = []
    for batch in batches:
        places = torch.arange(batch.tokens.shape[1])
        kind = batch.tokens + 3 * places
        one = (kind[..., None] + torch.arange(LAYERS)) % EXPERTS
        experts = torch.stack([one, (one + 1 + kind[..., None] % (EXPERTS - 1)) % EXPERTS], -1).to(torch.int16)
        experts[places >= batch.lengths[:, None] - 2] = -1
        found.append(msgspec.structs.replace(batch, experts=experts))
    return found


def main() -> None:
    options, folder, out = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    backend = make(msgspec.structs.replace(TRAINING, **options), folder)
    assert backend.replays_routers
    plain = backend.forward(*whole_batch())
    outputs = backend.forward(*recorded(whole_batch()))
    assert plain.logprobs is not None and outputs.logprobs is not None
    found: dict[str, Tensor] = {"logprobs without": plain.logprobs, "logprobs": outputs.logprobs}
    if outputs.agreement is not None:
        found["agreement"] = outputs.agreement
    batches = recorded(micro_batches(cell_rows(backend.data_parallel.rank, backend.data_parallel.size)))
    backend.step(batches, loss_of(batches), ENTROPY)
    found |= whole_weights(backend)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
