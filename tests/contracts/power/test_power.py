"""After a power cut, all that was acknowledged is there; the recorder finds what loses data, and nothing else.

``python -m tests.chaos.power`` tries many more cuts.
"""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.contracts.power import queue, trainer
from tests.contracts.power.writers import LINE, REPLACED
from tests.support.power.cuts import broken, build_recorder, record, states

POINTS = 15


@pytest.mark.timeout(600)
def test_a_queue_that_syncs_loses_nothing_that_it_acknowledged(recorder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.queue", ["full"], root, tmp_path / "log")
    promise = queue.sqlite_promise(changes, root, "full")
    found = states(changes, root, random.Random(0), points=POINTS)
    count, problems = broken(found, promise.check, tmp_path / "state")
    assert count > POINTS and not problems, problems


@pytest.mark.timeout(600)
def test_a_queue_that_does_not_sync_starts_again_with_a_state_that_there_was(recorder: Path, tmp_path: Path) -> None:
    """It refuses nothing and lacks no payload, whatever the cut took."""
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.queue", ["normal"], root, tmp_path / "log")
    promise = queue.sqlite_promise(changes, root, "normal")
    found = states(changes, root, random.Random(0), points=POINTS)
    count, problems = broken(found, promise.check, tmp_path / "state")
    assert count > POINTS and not problems, problems


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_loses_nothing_that_it_acknowledged(recorder: Path, tmp_path: Path) -> None:
    """The config, the lineage, rows told to the queue as trained, checkpoints and their trajectories."""
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.trainer", [], root, tmp_path / "log")
    count, problems = broken(states(changes, root, random.Random(0), points=POINTS), trainer.check, tmp_path / "state")
    assert count > POINTS and not problems, problems


RECORDED_POINTS = 40


def check_lines(folder: Path, marks: list[str]) -> None:
    path = folder / "lines"
    found = path.read_bytes() if path.exists() else b""
    assert found.startswith(b"".join(LINE % int(number) for number in marks)), "lost"


def check_replaced(folder: Path, marks: list[str]) -> None:
    path = folder / "file"
    if not path.exists():
        assert not marks, "lost"
        return
    content = path.read_bytes()
    assert content in REPLACED, "torn"
    assert REPLACED.index(content) >= len(marks) - 1, "lost"


def check_database(folder: Path, marks: list[str]) -> None:
    with closing(sqlite3.connect(folder / "db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)], "torn"
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        found = [number for (number,) in db.execute("SELECT number FROM rows ORDER BY number")] if tables else []
    assert found == list(range(len(found))), "torn"
    assert len(found) >= len(marks), "lost"


CHECKS = {"lines": check_lines, "replaced": check_replaced, "wal": check_database, "delete": check_database}


@pytest.mark.parametrize(
    ("writer", "expected"),
    [
        ("lines", set()),
        ("lines_without_fsync", {"lost"}),
        ("lines_without_folder", {"lost"}),
        ("replaced", set()),
        ("replaced_without_fsync", {"torn"}),
        ("replaced_without_folder", {"lost"}),
        ("wal_full", set()),
        ("wal_normal", {"lost"}),
        ("wal_off", {"lost", "torn"}),
        ("delete_full", {"lost"}),  # that the journal is deleted is not forced to disk, which synchronous=extra is for
        ("delete_extra", set()),
    ],
)
def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(
    recorder: Path, tmp_path: Path, writer: str, expected: set[str]
) -> None:
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.writers", [writer], root, tmp_path / "log")
    found = states(changes, root, random.Random(0), points=RECORDED_POINTS)
    count, problems = broken(found, CHECKS[writer.split("_")[0]], tmp_path / "state", most=10_000)
    kinds = {"lost" if ": lost" in problem else "torn" for problem in problems}
    # Which kinds are found depends on which changes the points fall on, and those on SQLite's version.
    assert count > 10 and kinds <= expected and bool(kinds) == bool(expected), problems[:10]


def test_a_program_that_changes_files_unseen_is_refused(recorder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    changes = record(recorder, "tests.contracts.power.writers", ["lines"], root, tmp_path / "log")
    (root / "lines").write_bytes(b"by another")
    with pytest.raises(AssertionError, match="lines"):
        list(states(changes, root, random.Random(0)))
    mapped = record(recorder, "tests.contracts.power.writers", ["mapped"], tmp_path / "mapped", tmp_path / "log2")
    with pytest.raises(AssertionError, match="mmap"):
        list(states(mapped, tmp_path / "mapped", random.Random(0)))


# The recorder, compiled once.


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_recorder(tmp_path_factory.mktemp("recorder"))
    except FileNotFoundError:
        pytest.skip("no C compiler here; install one with: apt-get install gcc")
