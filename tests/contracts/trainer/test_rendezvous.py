"""How ranks meet: by a file that strangers cannot open, or on the address that they were given; they execute nothing
that arrives."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from rl_async.concurrency import in_daemon_thread
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.process.private_folder import RENDEZVOUS
from rl_async.trainer.checkpoints import host_copy, own_parts, read_shards, write_shards
from rl_async.trainer.ranks import ranks_joined
from rl_async.weight_sync.process_groups import joined_store
from tests.support.forked import Forked, start_ranks
from tests.support.ports import free_port, listeners

# A rank of the trainer's group.


def refused(*arguments: Any) -> NoReturn:
    raise AssertionError("a pickled object came from another rank")


def tensors(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(15.0).reshape(5, 3) * value
    return {"sharded": distribute_tensor(rows, mesh, [Shard(0)]), "whole": torch.tensor(value)}


def joining_rank(run: str, timeout_s: str = "100") -> None:
    """Join the trainer's group and show where this rank listens.

    It saves and loads a sharded and a whole tensor, and would fail if that unpickled anything of another rank; then it
    waits for the file ``go on``, meets the others in a new group, and ends.
    """
    folder = Path(run)
    distributed_c10d._tensor_to_object = refused
    trainer = TrainerConfig(collective_timeout_s=float(timeout_s))
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


WORKER = "tests.contracts.trainer.test_rendezvous:joining_rank"
BETWEEN_HOSTS = {RENDEZVOUS: ""}


@contextmanager
def ranks_at_work(folder: Path, **environment: str) -> Iterator[list[str]]:
    """Where two ranks listen, while they wait; afterwards they must train on and end well."""
    (folder / "shards").mkdir()
    ranks = start_ranks(WORKER, str(folder), ranks=2, environment=environment)
    try:
        yield " ".join(rank.first_line(120) for rank in ranks).split()
        (folder / "go on").touch()
        ends = [rank.communicate(60) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], ends
    finally:
        for rank in ranks:
            rank.kill()


def meddle(address: str, timeout_s: float) -> bool:
    """Be a stranger who reads and writes what ranks tell one another; whether there was a store."""
    host, _, port = address.rpartition(":")
    try:
        store = joined_store(host, int(port), timeout_s)
        store.set("default_pg/0//cpu//0", "read " + str(store.num_keys()))
        return True
    except RuntimeError:
        return False


def store_at_any(addresses: Sequence[str], timeout_s: float) -> bool:
    """Meddle with all addresses at once, until the first store answers; gloo's own listeners never do."""
    strangers = [in_daemon_thread(partial(meddle, address, timeout_s), "stranger") for address in addresses]
    return any(stranger.result() for stranger in as_completed(strangers))


@pytest.mark.timeout(180)
def test_a_stranger_finds_no_store_of_ranks_on_one_machine(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path) as found:
        assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
        assert len(found) >= 2, "gloo of both"
        assert not store_at_any(found, 1.0)


@pytest.mark.timeout(180)
def test_ranks_of_several_machines_listen_on_their_master_address_only(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path, **BETWEEN_HOSTS) as found:
        assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
        assert len(found) >= 3, "the store of rank 0, and gloo of both"
        assert store_at_any(found, 30.0), "so meddle() would have found one"


@pytest.mark.timeout(180)
def test_a_rank_that_does_not_arrive_ends_the_other(tmp_path: Path) -> None:
    rank = Forked(
        WORKER,
        str(tmp_path),
        "1",
        environment={
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_PORT": str(free_port()),
            RENDEZVOUS: str(tmp_path / "meet"),
        },
    )
    errors = rank.communicate(120)[1]
    assert rank.returncode != 0 and "RanksLost" in errors
