"""The trainer's ranks meet on the address that they were given, and execute nothing that arrives there."""

from pathlib import Path

from tests.support.forked import run_ranks


def test_ranks_listen_on_their_master_address_only_and_unpickle_nothing(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shown = run_ranks("tests.contracts.trainer.workers.rendezvous", str(tmp_path), ranks=2, timeout_s=120)
    found = " ".join(shown).split()
    assert len(found) >= 3, "the store of rank 0, and gloo of both"
    assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
