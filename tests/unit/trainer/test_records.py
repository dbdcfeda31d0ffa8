"""Records in the run folder: lineages, rows that were trained, evaluations, and trajectories with explanations."""

import gzip
import json
import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rl_async import messages
from rl_async.configs.schema.algorithm import RULES
from rl_async.errors import UserError
from rl_async.messages import Media, Trajectory
from rl_async.recording import read_images, read_trajectories, trained_file, write_trajectories
from rl_async.trainer import records as module
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.batches import Batch, RecordedSource
from rl_async.trainer.packing import Rows
from rl_async.trainer.records import (
    IN_FLIGHT,
    FinishedEvaluation,
    Recorder,
    TokenOutcomes,
    append_evaluation,
    append_trained,
    explain,
    next_lineage,
    require_newest,
)
from tests.conftest import make_rows


def test_trajectories_keep_every_bit(tmp_path: Path) -> None:
    rows = make_rows(3)
    write_trajectories(tmp_path / "x.jsonl.gz", rows)
    for before, after in zip(rows, read_trajectories(tmp_path / "x.jsonl.gz"), strict=True):
        assert np.array_equal(before.token_ids, after.token_ids)
        assert np.array_equal(before.loss_mask, after.loss_mask)
        assert before.logprobs.tobytes() == after.logprobs.tobytes()
        assert before.header() == after.header()


def outcomes(rows: list[Trajectory]) -> TokenOutcomes:
    """What became of the rows' tokens: row 0 in part zeroed and masked, the rest trained with weight 1/3.

    The advantages of row 1 differ from token to token.
    """
    packed = Rows(torch.tensor([len(row.token_ids) - 1 for row in rows]))
    keep = torch.from_numpy(np.concatenate([row.loss_mask[1:] for row in rows]))
    rule = torch.zeros(len(keep), dtype=torch.uint8)
    rule[4:6], rule[6] = RULES.index("band"), RULES.index("token_k3")
    keep[6:8] = False
    advantages = torch.full((len(keep),), -2 / 3)
    second = packed.positions([1])
    advantages[second] = torch.arange(len(second)) / 3
    corrected = Corrected(torch.where(keep & (rule == 0), 1 / 3, 0.0), keep, rule)
    return TokenOutcomes(packed, corrected, torch.full((len(keep),), -1 / 7), advantages)


def test_tokens_are_explained_beside_rows_that_replay_as_before(tmp_path: Path) -> None:
    rows = make_rows(3)[:4]
    verdicts = outcomes(rows)
    write_trajectories(tmp_path / "x.jsonl.gz", rows, [explain(row, index, verdicts) for index, row in enumerate(rows)])
    with gzip.open(tmp_path / "x.jsonl.gz", "rt") as file:
        first, second = (json.loads(line)["correction"] for line in list(file)[:2])
    sampled = int(rows[0].loss_mask.sum())  # positions 3 and on
    assert first["weights"] == [0.3333, *[0.0] * 4, *[0.3333] * (sampled - 5)]
    assert first["rules"] == [["band", 1, 3], ["token_k3", 3, 4]]
    assert first["advantages"] == [-0.6667], "one number, as all its tokens have it"
    trained = int(rows[1].loss_mask.sum())
    assert (second["weights"], second["rules"]) == ([0.3333] * trained, [])
    assert second["logprobs"] == [-0.1429] * trained
    positions = [t for t in range(len(rows[1].loss_mask) - 1) if rows[1].loss_mask[t + 1]]
    assert second["advantages"] == pytest.approx([t / 3 for t in positions], rel=1e-3)
    for before, after in zip(rows, read_trajectories(tmp_path / "x.jsonl.gz"), strict=True):
        assert before.header() == after.header() and np.array_equal(before.token_ids, after.token_ids)


@pytest.mark.parametrize(("weight", "told"), [(0.0, 0.0), (1.0, 1.0), (1.23456, 1.235), (1.23456e-7, 1.235e-7)])
def test_weights_are_told_with_four_digits(weight: float, told: float) -> None:
    row = make_rows(0)[0]
    n = len(row.token_ids) - 1
    keep = torch.from_numpy(row.loss_mask[1:])
    corrected = Corrected(torch.full((n,), weight), keep, torch.zeros(n, dtype=torch.uint8))
    verdicts = TokenOutcomes(Rows(torch.tensor([n])), corrected, torch.zeros(n), torch.zeros(n))
    assert explain(row, 0, verdicts).weights == [told] * int(row.loss_mask.sum())


def test_what_is_recorded_as_trained_has_the_hash_that_the_worker_announced(tmp_path: Path) -> None:
    sampled = make_rows(0)[:2]
    received = [messages.decoder(Trajectory)(messages.encode(row)) for row in sampled]
    append_trained(tmp_path / "trained.jsonl", 0, 0, received)
    trained = [json.loads(line)["tokens_hash"] for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert trained == [row.header().tokens_hash for row in sampled]
    assert trained[0] != trained[1]


def test_a_torn_evaluation_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_bytes(b'{"lineage":0,"ev')
    for lineage in (1, 2):
        append_evaluation(path, lineage, {"eval/reward": 0.5})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["lineage"], row["eval/reward"]) for row in rows] == [(1, 0.5), (2, 0.5)]


def test_every_resume_is_a_lineage_of_its_own(tmp_path: Path) -> None:
    assert [next_lineage(tmp_path, resuming) for resuming in (False, True, True)] == [0, 1, 2]


@pytest.mark.parametrize("content", [None, b"", b"\n", b"1\x00", b"\xff", b"-1"])
def test_a_lost_or_damaged_lineage_is_known_from_the_records(tmp_path: Path, content: bytes | None) -> None:
    for lineage in range(3):
        assert next_lineage(tmp_path, lineage > 0) == lineage
    append_trained(tmp_path / "trained.jsonl", 1, 0, make_rows(0)[:2])

    def damage() -> None:
        (tmp_path / "lineage").unlink()
        if content is not None:
            (tmp_path / "lineage").write_bytes(content)

    damage()
    with pytest.raises(OSError, match="lineage"):
        require_newest(tmp_path, 2)
    assert next_lineage(tmp_path, True) == 2
    (tmp_path / "ledger.jsonl").write_text('{"event":"resume","step":0,"lineage":6,"fresh":false,"seq":3}\n')
    damage()
    assert next_lineage(tmp_path, True) == 7
    assert (tmp_path / "lineage").read_text() == "7\n"


def test_a_damaged_lineage_without_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "lineage").write_text("")
    with pytest.raises(UserError, match="lineage"):
        next_lineage(tmp_path, True)


def test_a_lineage_survives_a_power_cut(tmp_path, monkeypatch):
    """Else the next trainer would take the same one, and the fenced and the new one could not be told apart."""
    forced = []
    real = os.fsync

    def fsync(descriptor):
        forced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    next_lineage(tmp_path, False)
    content, names = forced
    assert Path(content).parent == tmp_path and names == str(tmp_path)


def test_rows_of_one_sample_are_recorded_and_replayed_one_by_one(tmp_path: Path) -> None:
    first, other = make_rows(0)[:2]
    rows = [first, msgspec.structs.replace(first, segment=1, token_ids=first.token_ids[::-1]), other]
    write_trajectories(tmp_path / "step-000000-lineage0-rank0.jsonl.gz", rows[1:])
    write_trajectories(tmp_path / "step-000000-lineage0-rank1.jsonl.gz", rows[:1])
    append_trained(tmp_path / "trained.jsonl", 0, 0, rows)
    lines = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert [(line["group"], line["sample"], line["segment"]) for line in lines] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    source = RecordedSource(tmp_path)
    batch = source.reserve(0, lambda: False)
    assert batch is not None
    assert [header.key for header in batch.headers] == [row.key for row in rows]
    found = source.fetch([batch.headers[1], batch.headers[0]])
    assert [row.tokens_hash() for row in found] == [rows[1].tokens_hash(), first.tokens_hash()]


def test_images_are_replayed_with_their_rows_from_every_ranks_file(tmp_path: Path) -> None:
    data = [b"first", b"second"]
    shown = [Media.of(each, "image/png", 1) for each in data]
    rows = [msgspec.structs.replace(row, media=[one]) for row, one in zip(make_rows(0)[:2], shown, strict=True)]
    for rank in (0, 1):
        file = tmp_path / f"step-000000-lineage0-rank{rank}.jsonl.gz"
        write_trajectories(file, rows[rank : rank + 1], media={shown[rank].sha256: data[rank]})
    source = RecordedSource(tmp_path)
    source.reserve(0, lambda: False)
    assert source.fetch_media(rows) == dict(zip((one.sha256 for one in shown), data, strict=True))
    assert source.fetch_media(make_rows(0)[2:4]) == {}
    (tmp_path / "step-000000-lineage0-rank1.images.zip").unlink()
    with pytest.raises(UserError, match="1 images"):
        source.fetch_media(rows)


def batch(step: int) -> Batch:
    rows = make_rows(step, groups=1, samples=2)
    return Batch(step, [row.header() for row in rows], [], {row.key: row for row in rows})


def batch_outcomes(made: Batch) -> TokenOutcomes:
    rows = Rows(torch.tensor([h.tokens - 1 for h in made.headers]))
    tokens = int(rows.lengths.sum())
    kept, rule = torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.uint8)
    return TokenOutcomes(rows, Corrected(torch.ones(tokens), kept, rule), torch.zeros(tokens), torch.zeros(tokens))


def trained_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "trained.jsonl").read_text().splitlines()]


def test_trained_rows_are_on_disk_at_once_and_trajectories_after_a_flush(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 3, 1, is_recorder=True)
    made = batch(0)
    recorder.trained(made, batch_outcomes(made))
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
    recorder.trained(made, batch_outcomes(made), 1)
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
    recorder.trained(made, batch_outcomes(made))
    may_write.set()
    recorder.flush()
    assert [file.name for file in (tmp_path / "trajectories").iterdir()] == ["step-000000-lineage0-rank0.jsonl.gz"]


def kept(folder: Path) -> list[str]:
    return sorted(file.name.removesuffix(".jsonl.gz") for file in (folder / "trajectories").iterdir())


def test_trajectories_of_old_steps_are_deleted_and_what_the_audit_reads_is_not(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True, keep=2)
    for step in range(5):
        made = batch(step)
        recorder.trained(made, batch_outcomes(made))
        recorder.flush()
        assert kept(tmp_path) == [f"step-{at:06d}-lineage0-rank0" for at in range(max(0, step - 1), step + 1)]
    write_trajectories(tmp_path / "trajectories" / "eval-000001.jsonl.gz", [])
    write_trajectories(trained_file(tmp_path, 1, 0, 7), [])  # of a rank that there is no more
    resumed = Recorder(tmp_path, 1, 0, is_recorder=True, keep=2)
    for step in (4, 5):
        made = batch(step)
        resumed.trained(made, batch_outcomes(made))
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
    recorder.trained(made, batch_outcomes(made))
    recorder.flush()
    assert not list(tmp_path.iterdir())


def test_training_does_not_wait_until_too_many_files_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, began, submitted = threading.Event(), threading.Event(), list[int]()

    def write(path: Path, rows: list[Trajectory], explanations: object, media: object) -> None:
        began.set()
        assert may_write.wait(10)

    monkeypatch.setattr(module, "write_trajectories", write)
    recorder = Recorder(tmp_path, 0, 0, is_recorder=True)

    def run() -> None:
        for step in range(IN_FLIGHT + 1):
            made = batch(step)
            recorder.trained(made, batch_outcomes(made))
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
    recorder.trained(made, batch_outcomes(made))
    with pytest.raises(FileExistsError):
        if raises == "flush":
            recorder.flush()
        for _ in range(IN_FLIGHT):
            recorder.trained(made, batch_outcomes(made))
    assert "FileExistsError" in caplog.text


def test_an_evaluation_is_recorded_with_its_rows(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 2, 0, is_recorder=True)
    rows = make_rows(0, groups=1, samples=2)
    result = FinishedEvaluation(step=4, newest_step=4, reward=0.5, trajectories=2, roles={"a": 1.0})
    recorder.evaluated(result, rows, {"ab": b"image"})
    recorder.flush()
    file = tmp_path / "trajectories" / "eval-000004.jsonl.gz"
    assert [row.key for row in read_trajectories(file)] == [row.key for row in rows]
    assert read_images(file, ["ab", "cd"]) == {"ab": b"image"}
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["lineage"] == 2 and json.loads(line)["eval/reward"] == 0.5
    assert json.loads(line)["eval/reward/a"] == 1.0
