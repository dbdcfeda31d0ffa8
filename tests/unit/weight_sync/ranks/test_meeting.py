"""Ranks find each other's outlets, and none leaves while another one may still be needed."""

import threading
import time
from contextlib import closing, suppress

import pytest
import torch.distributed as dist

from rl_async.concurrency import in_daemon_thread
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.messages import Version
from rl_async.weight_sync.layout import fsdp2
from rl_async.weight_sync.sender import Outlet, OutletServer, followed, led
from rl_async.weight_sync.transports.process_groups import joined_store, listening_store
from tests.support.trainer_ranks import HOST, TOKEN, shards_of, specs_of
from tests.unit.weight_sync.ranks.test_shipment import named

SYNC = WeightSyncConfig(transport="ipc", timeout_s=30)


def outlets() -> list[Outlet]:
    """Of two ranks that have offered their shards."""
    made, layout = [Outlet(rank, SYNC, HOST, 30) for rank in range(2)], fsdp2(specs_of(named(1)), 2)
    for rank, outlet in enumerate(made):
        outlet.offer(shards_of(layout, rank, named(1)))
    return made


def test_a_rank_that_is_done_serves_rank_0_until_that_is_done_too() -> None:
    (mine, other), store, done = outlets(), dist.HashStore(), threading.Event()

    def follow() -> None:
        with followed(other, 1, HOST, TOKEN, store, 30):
            done.set()

    following = in_daemon_thread(follow, "rank 1")
    with led(mine, TOKEN, store, 2, 30, 30) as shards:
        assert done.wait(30)
        shards.begin(Version(0, 1), "no")
        shards.seal()  # as for an engine that came late
        assert not following.done()
    following.result(30)


def test_the_store_stays_until_the_slowest_rank_has_left() -> None:
    """Between hosts it is rank 0's, and ends with that."""
    (mine, other), begun = outlets(), threading.Event()
    store: list[dist.Store] = [listening_store(HOST, 0, 30)]
    joined = joined_store(HOST, store[0].port, 30)  # type: ignore[attr-defined]

    def follow() -> None:
        with followed(other, 1, HOST, TOKEN, joined, 30):
            begun.wait(30)
            time.sleep(0.3)  # the last lines of its records, say

    following = in_daemon_thread(follow, "rank 1")
    with led(mine, TOKEN, store[0], 2, 30, 30):
        begun.set()
    store.clear()
    following.result(30)


def test_a_rank_does_not_wait_for_ever() -> None:
    _, other = outlets()
    with pytest.raises(dist.DistStoreError), followed(other, 1, HOST, TOKEN, dist.HashStore(), 0.1):
        pass
    (mine, other), store = outlets(), dist.HashStore()
    with closing(OutletServer(other, HOST, TOKEN)) as server:
        store.set("outlets/1", server.address)
        with pytest.raises(dist.DistStoreError), led(mine, TOKEN, store, 2, 30, 0.1):
            pass


def test_a_rank_that_failed_leaves_at_once() -> None:
    _, other = outlets()
    with suppress(ZeroDivisionError), followed(other, 1, HOST, TOKEN, dist.HashStore(), 1e6):
        raise ZeroDivisionError
