"""Recording: what is on disk when, and that no error of the writing thread is lost."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from rl_async.messages import Trajectory
from rl_async.recording import read_trajectories, trained_file, write_trajectories
from rl_async.trainer import records as module
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.rows import Rows
from rl_async.trainer.batches import Batch
from rl_async.trainer.evaluator import FinishedEvaluation
from rl_async.trainer.records import IN_FLIGHT, Recorder, TokenOutcomes
from tests.conftest import make_rows


def batch(step: int) -> Batch:
    rows = make_rows(step, groups=1, samples=2)
    return Batch(step, [row.header() for row in rows], [], {row.key: row for row in rows})


def outcomes(made: Batch) -> TokenOutcomes:
    rows = Rows(torch.tensor([h.tokens - 1 for h in made.headers]))
    tokens = int(rows.lengths.sum())
    kept, rule = torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.uint8)
    return TokenOutcomes(rows, Corrected(torch.ones(tokens), kept, rule), torch.zeros(tokens), torch.zeros(tokens))


def trained_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "trained.jsonl").read_text().splitlines()]


def test_trained_rows_are_on_disk_at_once_and_trajectories_after_a_flush(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 3, 1, is_recorder=True)
    made = batch(0)
    recorder.trained(made, outcomes(made))
    assert trained_steps(tmp_path) == [0, 0]
    recorder.flush()
    rows = read_trajectories(tmp_path / "trajectories" / "step-000000-lineage3-rank1.jsonl.gz")
    assert [row.key for row in rows] == sorted(made.rows)


def test_only_episodes_with_a_trace_get_a_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spanned: list[str] = []
    monkeypatch.setattr(module.tracing, "add", lambda episode, *_, **__: spanned.append(episode))
    made = batch(0)
    first, *_ = made.rows.values()
    first.traced = True
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True)
    recorder.trained(made, outcomes(made), 1)
    recorder.flush()
    assert spanned == [first.episode_id] and len(made.rows) == 2


def test_a_file_that_is_written_late_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()

    def explain(*_: object) -> None:
        assert may_write.wait(60)

    monkeypatch.setattr(module, "explain", explain)
    monkeypatch.setattr(module, "write_trajectories", lambda path, *_: path.write_bytes(b""))
    (tmp_path / "trajectories").mkdir()
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True)
    made = batch(0)
    recorder.trained(made, outcomes(made))
    may_write.set()
    recorder.flush()
    assert [file.name for file in (tmp_path / "trajectories").iterdir()] == ["step-000000-lineage0-rank0.jsonl.gz"]


def kept(folder: Path) -> list[str]:
    return sorted(file.name.removesuffix(".jsonl.gz") for file in (folder / "trajectories").iterdir())


def test_trajectories_of_old_steps_are_deleted_and_what_the_audit_reads_is_not(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True, keep=2)
    for step in range(5):
        made = batch(step)
        recorder.trained(made, outcomes(made))
        recorder.flush()
        assert kept(tmp_path) == [f"step-{at:06d}-lineage0-rank0" for at in range(max(0, step - 1), step + 1)]
    write_trajectories(tmp_path / "trajectories" / "eval-000001.jsonl.gz", [])
    write_trajectories(trained_file(tmp_path, 1, 0, 7), [])  # of a rank that there is no more
    resumed = Recorder(tmp_path, 1, 0, is_recorder=True, keep=2)
    for step in (4, 5):
        made = batch(step)
        resumed.trained(made, outcomes(made))
        resumed.flush()
    assert kept(tmp_path) == [
        "eval-000001",
        "step-000004-lineage0-rank0",
        "step-000004-lineage1-rank0",
        "step-000005-lineage1-rank0",
    ]
    assert trained_steps(tmp_path) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5]


def test_a_rank_that_does_not_record_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, 1, is_recorder=False)
    made = batch(0)
    recorder.trained(made, outcomes(made))
    recorder.flush()
    assert not list(tmp_path.iterdir())


def test_training_does_not_wait_until_too_many_files_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, began, submitted = threading.Event(), threading.Event(), list[int]()

    def write(path: Path, rows: list[Trajectory], explanations: object) -> None:
        began.set()
        assert may_write.wait(10)

    monkeypatch.setattr(module, "write_trajectories", write)
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True)

    def run() -> None:
        for step in range(IN_FLIGHT + 1):
            made = batch(step)
            recorder.trained(made, outcomes(made))
            submitted.append(step)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(10)
    deadline = time.monotonic() + 60
    while len(submitted) < IN_FLIGHT and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.join(0.2)
    assert thread.is_alive() and submitted == list(range(IN_FLIGHT))
    may_write.set()
    thread.join(60)
    recorder.flush()
    assert submitted == list(range(IN_FLIGHT + 1))


@pytest.mark.parametrize("raises", ["next step", "flush"])
def test_an_error_of_the_thread_is_logged_and_raised_by_the_next_call(
    tmp_path: Path, raises: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trajectories").write_text("a file where the folder should be")
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True)
    made = batch(0)
    recorder.trained(made, outcomes(made))
    with pytest.raises(FileExistsError):
        if raises == "flush":
            recorder.flush()
        for _ in range(IN_FLIGHT):
            recorder.trained(made, outcomes(made))
    assert "FileExistsError" in caplog.text


def test_an_evaluation_is_recorded_with_its_rows(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 2, 0, is_recorder=True)
    rows = make_rows(0, groups=1, samples=2)
    recorder.evaluated(FinishedEvaluation(step=4, newest_step=4, reward=0.5, trajectories=2, roles={"a": 1.0}), rows)
    recorder.flush()
    assert [row.key for row in read_trajectories(tmp_path / "trajectories" / "eval-000004.jsonl.gz")] == [
        row.key for row in rows
    ]
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["lineage"] == 2 and json.loads(line)["eval/reward"] == 0.5
    assert json.loads(line)["eval/reward/a"] == 1.0
