"""What the trainer writes can be read back exactly, also after a crash in the middle of a line."""

import gzip
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rl_async import codec
from rl_async.configs.schema.correction import RULES
from rl_async.errors import UserError
from rl_async.messages import Trajectory
from rl_async.recording import read_trajectories, write_trajectories
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.rows import Rows
from rl_async.trainer.batches import RecordedSource
from rl_async.trainer.records import (
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
    received = [codec.decoder(Trajectory)(codec.encode(row)) for row in sampled]
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
