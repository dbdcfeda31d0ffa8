"""What the trainer writes can be read back exactly, also after a crash in the middle of a line."""

import json
from pathlib import Path

import numpy as np

from rl_async import codec
from rl_async.messages import Trajectory
from rl_async.trainer.records import (
    append_evaluation,
    append_trained,
    next_lineage,
    read_trajectories,
    write_trajectories,
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


def test_what_is_recorded_as_trained_has_the_hash_that_the_worker_announced(tmp_path: Path) -> None:
    sampled = make_rows(0)[:2]
    received = [codec.decode(codec.encode(row), Trajectory) for row in sampled]
    append_trained(tmp_path / "trained.jsonl", 0, 0, received)
    trained = [json.loads(line)["tokens_sha256"] for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    assert trained == [row.header().tokens_sha256 for row in sampled]
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
