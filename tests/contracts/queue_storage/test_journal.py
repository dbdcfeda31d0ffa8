"""What every durable journal promises: another queue goes on from what was flushed, and only one at a time does."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_async.errors import JournalError
from rl_async.messages import Done, Resumed, Version
from tests.contracts.queue_storage.journals import Driver, OpenJournal, journals, payload


@pytest.fixture(params=["sqlite", "redis"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenJournal]:
    """Opens the same journal each time it is called."""
    with journals(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def driver(again: OpenJournal) -> Iterator[Driver]:
    made = Driver(again)
    made.store.publish(Version(0, 0), [])
    yield made
    made.journal.close()


def test_what_was_flushed_comes_back_and_the_rest_does_not(driver: Driver) -> None:
    run_id = driver.journal.run_id
    groups = driver.lease(2, b"question")
    driver.put(groups[0], 0, [b"first", b"second"])
    driver.journal.flush()
    flushed = driver.store.dump()
    driver.put(groups[0], 1, [b"never flushed"])
    assert driver.read(0, 1) == b"never flushed", "it can be read before it is durable"
    driver.restart()
    assert driver.journal.run_id == run_id
    assert driver.store.dump() == flushed
    assert driver.read(0, 0) == b"first" and driver.read(0, 0, 1) == b"second"
    assert driver.read(0, 1) is driver.read(0, 0, 2) is driver.read(0, 0, -1) is driver.read(7, 0) is None
    assert driver.lease(2, b"question") == groups, "a request that is repeated gets the same groups"


def test_requests_repeated_after_a_restart_change_nothing(driver: Driver) -> None:
    (group, other) = driver.lease(2)
    for each in (group, other):
        for sample in (0, 1):
            driver.put(each, sample)
    batch = driver.store.batches.reserve(0, 0.0)
    driver.store.batches.commit(0)
    driver.store.publish(Version(0, 1), [])
    driver.store.retire(0)
    driver.journal.flush()
    before = driver.store.dump()
    driver.restart()
    driver.put(group, 0)
    assert driver.store.batches.reserve(0, 0.0) == batch
    assert driver.store.batches.commit(0) == driver.store.publish(Version(0, 1), []) == driver.store.retire(0) == Done()
    assert driver.store.dump() == before


def test_many_restarts_with_compactions_lose_nothing(driver: Driver) -> None:
    compacted, trained, kept = 0, [], {}
    for step in range(8):
        groups = driver.train(step)
        trained += groups
        kept[step] = groups
        driver.store.retire(step - 1)
        kept.pop(step - 2, None)
        driver.journal.flush()
        if driver.journal.outgrown:
            compacted += 1
            driver.journal.compact(driver.store.dump())
            assert not driver.journal.outgrown
        before = driver.store.dump()
        driver.restart()
        assert driver.store.dump() == before
        for group in trained:
            for sample in (0, 1):
                here = any(group in groups for groups in kept.values())
                assert driver.read(group, sample) == (payload(group, sample) if here else None)
                assert driver.read(group, sample, 1) == (b"" if here else None)
                assert driver.read(group, sample, 2) == (b"tail" if here else None)
    assert compacted and sorted(trained) == list(range(16))
    assert isinstance(driver.store.resume(7, 1, b""), Resumed)
    assert sorted(driver.store.batches.reserve(7, 0.0).tasks) == kept[7]  # type: ignore[union-attr]


def test_a_fresh_start_frees_everything(driver: Driver) -> None:
    driver.train(0)
    snapshot = driver.store.batches.snapshot()
    driver.train(1)
    driver.store.retire(2)
    driver.journal.flush()
    assert driver.store.resume(1, 1, snapshot).readmitted == 2  # type: ignore[union-attr]
    driver.journal.flush()
    before = driver.store.dump()
    driver.restart()
    assert driver.store.dump() == before
    assert all(driver.read(group, sample) is None for group in range(6) for sample in (0, 1))
    driver.store.publish(Version(1, 1), [])
    assert [group.group_id for group in driver.lease(2)] == [2, 3]
    driver.put(driver.lease(1)[0], 0, [b"new"])
    driver.journal.flush()
    driver.restart()


def test_a_second_queue_is_kept_out_until_the_first_has_ended(driver: Driver, again: OpenJournal) -> None:
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.05):
            driver.journal.flush()

    first = threading.Thread(target=live)
    first.start()
    try:
        with pytest.raises(JournalError, match="another queue"):
            again()
    finally:
        ended.set()
        first.join()
    driver.restart()
