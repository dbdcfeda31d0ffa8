"""Records in the run folder: lineages, rows that were trained, evaluations, and trajectories with explanations."""

import gzip
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rl_async import messages
from rl_async.configs.schema.algorithm import RULES
from rl_async.errors import RlAsyncError, UserError
from rl_async.evaluation import wilson
from rl_async.messages import Done, Media, NotReady, Reserved, RowKey, Task, Trajectory, Version, VersionRun
from rl_async.recording import read_images, read_trajectories, trained_file, write_trajectories
from rl_async.trainer import records as module
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.batches import Batch, RecordedSource
from rl_async.trainer.packing import Rows
from rl_async.trainer.records import (
    IN_FLIGHT,
    Evaluator,
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


# Evaluations are named by the version that was sampled, and every result is returned and recorded once.


ROWS = [msgspec.structs.replace(row, reward=0.5) for row in make_rows(0)[:2]]

IMAGES = {"ab": b"image"}


class Queue:
    """Evaluations that are done when the test says so, sampled by the versions ``steps``."""

    def __init__(self, done: bool, steps: tuple[int, ...] = (), unattended_s: float = 0.0) -> None:
        self.asked: list[int] = []
        self.unattended_s = unattended_s
        self.done, self.steps = done, steps

    def evaluate(self, eval_id: int) -> Done:
        self.asked.append(eval_id)
        return Done()

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        assert eval_id == self.asked[-1]
        headers = [row.header() for row in self.rows()]
        return Reserved(step=eval_id, headers=headers) if self.done else self.not_ready()

    def not_ready(self) -> NotReady:
        return NotReady(why="one is missing", unattended_s=self.unattended_s)

    def rows(self) -> list[Trajectory]:
        return ROWS

    def fetch(self, rows: Sequence[RowKey]) -> list[Trajectory]:
        versions = [VersionRun(Version(0, step), i, i + 1) for i, step in enumerate(self.steps or self.asked[-1:])]
        return [msgspec.structs.replace(row, versions=versions, reward=row.reward) for row in self.rows()]

    def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        return IMAGES


class Branching(Queue):
    """Its first episode has three rows."""

    def rows(self) -> list[Trajectory]:
        segments = [msgspec.structs.replace(ROWS[0], segment=segment, reward=1.0) for segment in range(3)]
        return [*segments, msgspec.structs.replace(ROWS[1], reward=0.0)]


class Results:
    """Collects the results that it is given."""

    def __init__(self) -> None:
        self.results: list[FinishedEvaluation] = []

    def __call__(self, result: FinishedEvaluation, rows: list[Trajectory], media: Mapping[str, bytes]) -> None:
        assert media is IMAGES
        assert len({row.episode_id for row in rows}) == result.trajectories
        self.results.append(result)


def test_the_name_is_the_published_step_and_no_version_is_evaluated_twice() -> None:
    queue, recorder = Queue(done=True), Results()
    evaluations = Evaluator(queue, 1, recorder)
    results = [
        evaluations.after_step(completed, published) for completed, published in ((3, 2), (4, 4), (5, 4), (6, 4))
    ]
    assert queue.asked == [2, 4]
    assert [result and result.step for result in results] == [None, 2, 4, None]
    assert [result.step for result in recorder.results] == [2, 4]
    assert results[1] is not None
    metrics = results[1].metrics()
    assert {name: value for name, value in metrics.items() if name.count("/") == 1} == {
        "eval/step": 2.0,
        "eval/newest_step": 2.0,
        "eval/reward": 0.5,
        "eval/trajectories": 2.0,
        "eval/failed": 0.0,
    }


def test_training_that_goes_on_meanwhile_shows_in_the_newest_step() -> None:
    evaluations = Evaluator(Queue(done=True, steps=(2, 3)), 1, Results())
    evaluations.after_step(2, 2)
    result = evaluations.after_step(3, 2)
    assert result is not None and (result.step, result.newest_step) == (2, 3)


def test_the_end_returns_the_pending_and_the_final_evaluation() -> None:
    queue, recorder = Queue(done=False), Results()
    evaluations = Evaluator(queue, 2, recorder)
    assert evaluations.after_step(4, 4) is None and evaluations.after_step(5, 5) is None
    queue.done = True
    assert [result.step for result in evaluations.finish(5, 10.0)] == [4, 5]
    assert [result.step for result in recorder.results] == [4, 5]


def test_the_end_does_not_ask_again_for_what_runs() -> None:
    queue = Queue(done=False)
    evaluations = Evaluator(queue, 2, Results())
    evaluations.after_step(4, 4)
    queue.done = True
    assert [result.step for result in evaluations.finish(4, 10.0)] == [4]
    assert queue.asked == [4]


def test_an_evaluation_that_does_not_end_is_named() -> None:
    with pytest.raises(RlAsyncError, match="version 7"):
        Evaluator(Queue(done=False), 0, Results()).finish(7, 0.0)


def test_an_episode_of_several_rows_counts_once() -> None:
    recorder = Results()
    (result,) = Evaluator(Branching(done=True), 0, recorder).finish(7, 1.0)
    assert (result.reward, result.trajectories) == (0.5, 2)


class Mixed(Queue):
    """Two samples each of two tasks of one source and of one of another; the last one could not be scored."""

    def rows(self) -> list[Trajectory]:
        places = [("math", 0, 1.0), ("math", 0, 0.0), ("math", 1, 1.0), ("math", 1, 1.0), ("code", 2, 0.5)]
        rows = [
            msgspec.structs.replace(
                ROWS[0], data_source=source, task_id=f"t:{group}", group_id=group, sample=at % 2, reward=reward
            )
            for at, (source, group, reward) in enumerate(places)
        ]
        return [*rows, msgspec.structs.replace(rows[-1], sample=1, reward=7.0, scored=False)]


def test_each_source_is_recorded_with_its_estimates_and_their_intervals() -> None:
    results: list[FinishedEvaluation] = []
    (result,) = Evaluator(Mixed(done=True), 0, lambda found, *_: results.append(found), solved=0.5).finish(3, 1.0)
    assert results == [result]
    metrics = result.metrics()
    # The tasks have rewards [1, 0] and [1, 1], and [0.5, 0].
    expected = {
        "math/avg": 0.75,
        "math/pass@1": 0.75,
        "math/pass@2": 1.0,
        "math/tasks": 2.0,
        "math/samples": 2.0,
        "code/avg": 0.25,
        "code/pass@1": 0.5,
        "code/pass@2": 1.0,
        "all/avg": 7 / 12,
        "all/pass@1": 2 / 3,
        "all/tasks": 3.0,
    }
    assert {name: metrics[f"eval/{name}"] for name in expected} == pytest.approx(expected)
    assert (metrics["eval/math/avg/low"], metrics["eval/math/avg/high"]) == wilson(0.75, 2)
    assert metrics["eval/reward"] == pytest.approx(3.5 / 6), "the mean over episodes keeps its name"


class Failing(Queue):
    """Four tasks with four samples, half of them right; ``failed`` ones have no row."""

    failed: frozenset[tuple[int, int]] = frozenset()

    def rows(self) -> list[Trajectory]:
        return [
            msgspec.structs.replace(
                ROWS[0],
                data_source="math",
                task_id=f"t{group}",
                group_id=group,
                sample=sample,
                reward=float(sample % 2),
            )
            for group in range(4)
            for sample in range(4)
            if (group, sample) not in self.failed
        ]

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        tasks = {g: Task(task_id=f"t{g}", data_source="math", prompt=[], ground_truth="") for g in range(4)}
        headers = [row.header() for row in self.rows()]
        return Reserved(step=eval_id, headers=headers, tasks=tasks, failed=sorted(self.failed))


WRONG = frozenset((group, sample) for group in range(4) for sample in (0, 2))
ALL = frozenset((group, sample) for group in range(4) for sample in range(4))


@pytest.mark.parametrize(
    ("failed", "reward"),
    [(frozenset(), 0.5), (WRONG, 0.5), (WRONG | {(3, 1), (3, 3)}, 0.375), (ALL, 0.0)],
)
def test_episodes_that_fail_for_good_count_as_zero(failed: frozenset[tuple[int, int]], reward: float) -> None:
    queue = Failing(done=True)
    queue.failed = failed
    recorded: list[Trajectory] = []
    (result,) = Evaluator(queue, 0, lambda _, rows, __: recorded.extend(rows)).finish(3, 1.0)
    metrics = result.metrics()
    names = ("reward", "trajectories", "failed", "math/avg", "math/pass@1", "math/samples", "math/tasks")
    assert [metrics[f"eval/{name}"] for name in names] == [reward, 16, len(failed), reward, reward, 4, 4]
    assert "eval/math/pass@4" in metrics
    assert {(row.group_id, row.sample) for row in recorded if not row.scored} == failed


def test_roles_are_recorded_by_source() -> None:
    class Game(Queue):
        def rows(self) -> list[Trajectory]:
            return [
                msgspec.structs.replace(ROWS[0], data_source="go", segment=at, role=role, reward=reward)
                for at, (role, reward) in enumerate([("black", 1.0), ("white", -1.0)])
            ]

    (result,) = Evaluator(Game(done=True), 0, lambda *_: None).finish(3, 1.0)
    metrics = result.metrics()
    assert (metrics["eval/go as black/avg"], metrics["eval/go as white/avg"]) == (1.0, -1.0)
    assert (metrics["eval/reward/black"], metrics["eval/reward/white"]) == (1.0, -1.0)


def test_the_initial_weights_can_be_evaluated_once_before_the_first_step() -> None:
    queue, recorder = Queue(done=False), Results()
    evaluator = Evaluator(queue, every=1, record=recorder)
    evaluator.begin(0)
    assert evaluator.after_step(1, 0) is None
    queue.done = True
    first = evaluator.after_step(2, 2)
    assert first is not None and first.step == 0
    assert queue.asked == [0, 2]


@pytest.mark.parametrize("every", [0, 1])
def test_an_evaluation_that_nobody_plays_is_skipped_at_the_end(every: int, caplog: pytest.LogCaptureFixture) -> None:
    queue, recorder = Queue(done=False, unattended_s=280.0), Results()
    evaluations = Evaluator(queue, every, recorder)
    evaluations.after_step(1, 1)
    assert evaluations.finish(2, 0.0) == [] and recorder.results == []
    assert queue.asked == ([1] if every else [2]), "behind a skipped one, none is asked for"
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


class Returning(Queue):
    """For two replies nobody plays; then somebody comes, and has played with the fifth."""

    replies = 0

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        self.replies += 1
        self.unattended_s, self.done = 280.0 if self.replies < 3 else 0.0, self.replies == 5
        return super().eval_result(eval_id, wait_s)


def test_a_program_that_comes_back_late_has_time_to_play() -> None:
    clock = iter([0.0, 0.0, 30.0, 60.0, 64.0, 66.0, 120.0])
    (result,) = Evaluator(Returning(done=False), 0, Results(), lambda: next(clock)).finish(7, 65.0)
    assert result.step == 7


class Slow(Queue):
    """One of ten groups is finished with each reply, the tenth with the last."""

    def __init__(self) -> None:
        super().__init__(done=False)
        self.finished = 0

    def not_ready(self) -> NotReady:
        self.finished += 1
        self.done = self.finished == 9
        return NotReady(why="some are missing", finished=self.finished, groups=10)


def test_the_deadline_is_for_the_next_group_not_for_all() -> None:
    clock, waits = map(float, range(0, 100_000, 60)).__next__, list[int]()
    (result,) = Evaluator(Slow(), 0, Results(), clock).finish(7, 65.0, lambda: waits.append(1))
    assert result.step == 7 and len(waits) == 10, "other ranks hear of each question"


class Losing(Slow):
    """After the sixth reply the rows of all groups are lost; they are played again."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = iter([1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])

    def not_ready(self) -> NotReady:
        finished = next(self.counts)
        self.done = finished == 9
        return NotReady(why="some are missing", finished=finished, groups=10)


def test_groups_that_are_played_again_are_progress() -> None:
    clock = map(float, range(0, 100_000, 60)).__next__
    (result,) = Evaluator(Losing(), 0, Results(), clock).finish(7, 125.0)
    assert result.step == 7


class Pausing(Queue):
    """Somebody plays for five replies, and nobody for the next five, again and again."""

    replies = 0

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        self.replies += 1
        assert self.replies < 1000, "it waits without end"
        self.unattended_s = 11.0 if self.replies // 5 % 2 else 0.0
        return super().eval_result(eval_id, wait_s)


def test_programs_that_come_and_go_do_not_keep_a_run_waiting() -> None:
    clock = map(float, range(100_000)).__next__
    with pytest.raises(RlAsyncError, match=r"trainer\.batch_timeout_s"):
        Evaluator(Pausing(done=False), 0, Results(), clock).finish(7, 65.0)
