"""How ranks meet: by a file that strangers cannot open, or on the address that they were given; they execute nothing
that arrives."""

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from rl_async.concurrency import in_daemon_thread
from rl_async.process.private_folder import RENDEZVOUS
from rl_async.weight_sync.transports.process_groups import joined_store
from tests.support.forked import Forked, start_ranks
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(180)
WORKER = "tests.contracts.trainer.workers.rendezvous"
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


def test_a_stranger_finds_no_store_of_ranks_on_one_machine(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path) as found:
        assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
        assert len(found) >= 2, "gloo of both"
        assert not store_at_any(found, 1.0)


def test_ranks_of_several_machines_listen_on_their_master_address_only(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path, **BETWEEN_HOSTS) as found:
        assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
        assert len(found) >= 3, "the store of rank 0, and gloo of both"
        assert store_at_any(found, 30.0), "so meddle() would have found one"


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
