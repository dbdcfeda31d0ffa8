"""How the trainer's ranks find each other's outlets when a run begins, and leave together when it is over.

Rank 0 ends its sending first, so that nothing under way is cut off, and leaves last, since it may have the store.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch.distributed as dist

from rl_async.weight_sync.ranks.outlet import Outlet
from rl_async.weight_sync.ranks.remote import OutletServer, RemoteOutlet
from rl_async.weight_sync.ranks.shipment import RankShards

OVER = "outlets/over"


@contextmanager
def led(
    outlet: Outlet, token: str, store: dist.Store, ranks: int, answer_s: float, offer_s: float
) -> Iterator[RankShards]:
    """On rank 0: all ranks' outlets, until it and then the other ranks have left the context.

    ``store`` is that of all ``ranks``; ``answer_s`` and ``offer_s`` are as of ``RemoteOutlet``. Raises torch's
    DistStoreError if a rank has not left within ``offer_s`` of the end of this one's context.
    """
    addresses = {rank: store.get(_key(rank)).decode() for rank in range(1, ranks)}
    others = {rank: RemoteOutlet(rank, at, token, answer_s, offer_s) for rank, at in addresses.items()}
    with closing(RankShards(outlet, others)) as shards:
        yield shards
    store.set(OVER, "")
    store.wait([_left(rank) for rank in others], timedelta(seconds=offer_s))


@contextmanager
def followed(outlet: Outlet, rank: int, host: str, token: str, store: dist.Store, leave_s: float) -> Iterator[None]:
    """On another rank: serve its outlet to rank 0, until that sends no more.

    Raises torch's DistStoreError if it still does ``leave_s`` after the end of the context.
    """
    with closing(OutletServer(outlet, host, token)) as server:
        store.set(_key(rank), server.address)
        yield
        store.wait([OVER], timedelta(seconds=leave_s))
        store.set(_left(rank), "")


def _key(rank: int) -> str:
    return f"outlets/{rank}"


def _left(rank: int) -> str:
    return f"outlets/left/{rank}"
