"""Rank 1 of two trainer ranks for the tests of publications: an outlet behind its socket, and weights to offer.

``python -m tests.contracts.weights.outlet_rank TRANSPORT FOLDER LINEAGE [--fault kill|stop --at N]`` prints where it
is. It offers version LINEAGE.0, and the next one when a publication is over. The fault strikes at the N-th round (from
1).
"""

import argparse
import os
import signal
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.messages import Version
from rl_async.weight_sync.layout import fsdp2
from rl_async.weight_sync.protocol import UpdateInfo
from rl_async.weight_sync.sender import Outlet, OutletServer
from tests.support.weights import HOST, TOKEN, shards_of, specs_of

RANKS = 2
BUCKET_BYTES = 64 * 16 * 2
ROWS = (96, 32, 64)
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def sync_of(transport: str, folder: str, timeout_s: float) -> WeightSyncConfig:
    return WeightSyncConfig(  # type: ignore[arg-type]
        way=transport, folder=folder, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s
    )


def named(value: float) -> dict[str, Tensor]:
    """Whole tensors; the first needs two rounds."""
    return {f"layer.{i}": torch.full((rows, 16), value + i, dtype=torch.bfloat16) for i, rows in enumerate(ROWS)}


class FaultyOutlet(Outlet):
    """Offers version after version, and dies or hangs."""

    def __init__(self, sync: WeightSyncConfig, lineage: int, fault: str | None, at: int) -> None:
        super().__init__(1, sync, HOST, 30)
        self._layout_of_all = fsdp2(specs_of(named(0)), RANKS)
        self._versions: Iterator[Version] = (Version(lineage, step) for step in range(1000))
        self._fault, self._left = fault, at
        self._offer_next()

    def stage(self, key: str, number: int) -> list[UpdateInfo]:
        self._left -= 1
        if self._fault and self._left == 0:
            os.kill(os.getpid(), FAULTS[self._fault])
        return super().stage(key, number)

    def seal(self) -> None:
        super().seal()
        self._offer_next()

    def _offer_next(self) -> None:
        version = next(self._versions)
        self.offer(shards_of(self._layout_of_all, 1, named(10.0 * version.step)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("transport")
    parser.add_argument("folder")
    parser.add_argument("lineage", type=int)
    parser.add_argument("--fault", choices=list(FAULTS))
    parser.add_argument("--at", type=int, default=0)
    given = parser.parse_args()
    outlet = FaultyOutlet(sync_of(given.transport, given.folder, 30), given.lineage, given.fault, given.at)
    print(OutletServer(outlet, HOST, TOKEN).address, flush=True)
    threading.Event().wait()
