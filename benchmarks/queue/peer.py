"""TransferQueue's side of ``transfer_queue.py``: put, get and clear of the same groups, in its own environment.

``python peer.py GROUPS`` prints one JSON line like ``queue/arms.py``. Its 0.1.11 keeps columns in storage
processes and has no notion of a group, so a row is a key; eight groups go in one call, its own advice for speed.
"""

import json
import sys
import time

import numpy as np
import ray
import torch
from tensordict import TensorDict

import transfer_queue as tq  # noqa: TID251 - the peer's package, in an environment without ours

ROWS, AT_ONCE = 8, 8


def columns(lengths: np.ndarray) -> TensorDict:
    """The fields of one call's rows, as ragged columns."""

    def ragged(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.nested.as_nested_tensor(
            [torch.full((int(n),), value, dtype=dtype) for n in lengths], layout=torch.jagged
        )

    fields = {
        "token_ids": ragged(7, torch.int32),
        "logprobs": ragged(-1.0, torch.float32),
        "loss_mask": ragged(1, torch.bool),
        "reward": torch.full((len(lengths), 1), 0.5),
    }
    return TensorDict(fields, batch_size=len(lengths))


def main(groups: int) -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)  # it asks for more than this machine's cores
    tq.init()
    lengths = np.random.default_rng(0).integers(1024, 2049, (64, ROWS))
    calls = [columns(lengths[i : i + AT_ONCE].reshape(-1)) for i in range(0, 64, AT_ONCE)]
    began, nbytes = 0.0, 0
    for number in range(groups // AT_ONCE):
        keys = [f"{number}.{row}" for row in range(ROWS * AT_ONCE)]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=calls[number % len(calls)])
        rows = tq.kv_batch_get(keys=keys, partition_id="train")
        tq.kv_clear(keys=keys, partition_id="train")
        assert len(rows) == len(keys)
        if began:
            nbytes += 9 * int(lengths[(number % 8) * 8 : (number % 8) * 8 + 8].sum())
        else:
            began = time.perf_counter()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "groups": groups - AT_ONCE, "bytes": nbytes}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
