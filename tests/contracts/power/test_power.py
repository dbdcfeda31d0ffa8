"""After a power cut, what was acknowledged is there. ``python -m tests.chaos.power`` tries many more cuts."""

import random
from pathlib import Path

import pytest

from tests.contracts.power import queue, trainer
from tests.support.power.cuts import broken, record, states

pytestmark = pytest.mark.timeout(600)
POINTS = 15


def test_a_queue_that_syncs_loses_nothing_that_it_acknowledged(recorder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.queue", ["full"], root, tmp_path / "log")
    promise = queue.sqlite_promise(changes, root, "full")
    found = states(changes, root, random.Random(0), points=POINTS)
    count, problems = broken(found, promise.check, tmp_path / "state")
    assert count > POINTS and not problems, problems


def test_a_queue_that_does_not_sync_starts_again_with_a_state_that_there_was(recorder: Path, tmp_path: Path) -> None:
    """It refuses nothing and lacks no payload, whatever the cut took."""
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.queue", ["normal"], root, tmp_path / "log")
    promise = queue.sqlite_promise(changes, root, "normal")
    found = states(changes, root, random.Random(0), points=POINTS)
    count, problems = broken(found, promise.check, tmp_path / "state")
    assert count > POINTS and not problems, problems


def test_a_trainer_loses_nothing_that_it_acknowledged(recorder: Path, tmp_path: Path) -> None:
    """The config, the lineage, rows told to the queue as trained, checkpoints and their trajectories."""
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.trainer", [], root, tmp_path / "log")
    count, problems = broken(states(changes, root, random.Random(0), points=POINTS), trainer.check, tmp_path / "state")
    assert count > POINTS and not problems, problems
