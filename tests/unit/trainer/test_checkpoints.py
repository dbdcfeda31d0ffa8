"""Checkpoints on disk: when they are written, and which of them a run resumes from."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import CheckpointDamaged
from rl_async.trainer.checkpoints import (
    FORMAT,
    CheckpointSchedule,
    CheckpointState,
    begin,
    digest,
    drop_unfinished,
    files_in,
    list_checkpoints,
    newest_whole,
    prune,
    publish,
    temporary_folder,
    write_manifest,
)


def due(steps: int, every: int, batch_bytes: int, max_bytes: int = 1000) -> list[int]:
    """The completed steps after which a run of ``steps`` writes a checkpoint."""
    schedule = CheckpointSchedule(
        RunConfig(
            model=ModelConfig(path="m"),
            data=DataConfig(path="d"),
            queue=QueueConfig(max_bytes=max_bytes),
            trainer=TrainerConfig(steps=steps, checkpoint_every=every),
        )
    )
    return [step for step in range(1, steps + 1) if schedule.is_due(step, batch_bytes)]


def test_checkpoints_are_regular_and_at_the_end() -> None:
    assert due(7, 3, batch_bytes=0) == [3, 6, 7]
    assert due(7, 0, batch_bytes=0) == [7]


def test_trained_payloads_never_fill_more_than_half_of_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert due(7, 0, batch_bytes=200) == [3, 6, 7]
    assert len(caplog.messages) == 2 and all("queue.max_bytes" in message for message in caplog.messages)
    assert due(7, 2, batch_bytes=200) == [2, 4, 6, 7]
    assert due(3, 0, batch_bytes=5000) == [1, 2, 3]


SHARD = "shards/shard-00001.safetensors"


def make(root: Path, step: int, keep: int = 9, version: int = FORMAT, lineage: int = 0, resumed: int = 0) -> Path:
    """A checkpoint in the place of tensors of which is text."""
    folder = temporary_folder(root, step, lineage)
    begin(folder, [".", "shards"])
    (folder / SHARD).write_bytes(b"weights of step %d" % step)
    state = CheckpointState(step=step, lineage=lineage, kl_coef=0.0, format=version)
    (folder / "state.json").write_bytes(msgspec.json.encode(state))
    write_manifest(folder, {name: digest(folder / name) for name in files_in(folder)})
    publish(folder, root, step)
    prune(root, keep, {step, resumed})
    return root / f"step-{step:06d}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write_no_utf_8(path: Path) -> None:
    path.write_bytes(b'{"\xff": {}}' if path.name == "manifest.json" else b'{"format": 2, "queue": "\xff"}')


def nest_deeply(path: Path) -> None:
    path.write_bytes(b'{"x": ' + b"[" * 100_000)


@pytest.mark.parametrize("harm", [flip_a_bit, truncate, Path.unlink, write_no_utf_8, nest_deeply])
@pytest.mark.parametrize("name", [SHARD, "manifest.json", "state.json"])
def test_damage_is_found_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], name: str
) -> None:
    older, newer = make(tmp_path, 2), make(tmp_path, 4)
    assert newest_whole(tmp_path) == newer
    harm(newer / name)
    listed = (newer / "state.json").exists()
    with caplog.at_level(logging.WARNING):
        assert newest_whole(tmp_path) == older
    if listed:
        assert str(newer) in caplog.text
        if name != "manifest.json":
            assert str(newer / name) in caplog.text
        assert (tmp_path / "step-000004.damaged" / "state.json").exists() and not newer.exists()
    harm(older / SHARD)
    with pytest.raises(CheckpointDamaged, match=str(older / SHARD)):
        newest_whole(tmp_path)


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = make(tmp_path, 2)
    whole = (folder / "manifest.json").read_bytes()
    for place in range(len(whole)):
        (folder / "manifest.json").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointDamaged):
            newest_whole(tmp_path)
    (folder / "manifest.json").write_bytes(whole)
    assert newest_whole(tmp_path) == folder


def test_only_the_newest_are_kept_and_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004", "step-000006"]
    (tmp_path / "step-000006" / "old").touch()
    make(tmp_path, 6, keep=2)
    assert not (tmp_path / "step-000006" / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000006"], "nothing else is left"


def test_a_damaged_checkpoint_displaces_no_good_one(tmp_path: Path) -> None:
    good, damaged = make(tmp_path, 10), make(tmp_path, 20)
    truncate(damaged / SHARD)
    assert newest_whole(tmp_path) == good
    written = make(tmp_path, 12, keep=1, lineage=1, resumed=10)
    assert list_checkpoints(tmp_path) == [good, written], "neither the one just written nor the one resumed from goes"
    written = make(tmp_path, 14, keep=1, lineage=1, resumed=10)
    assert list_checkpoints(tmp_path) == [good, written]
    truncate(make(tmp_path, 20, lineage=1) / SHARD)
    assert newest_whole(tmp_path) == written
    assert sorted(path.name for path in tmp_path.glob("*.damaged*")) == ["step-000020.damaged", "step-000020.damaged1"]


def test_all_damaged_ones_stay_where_they_are(tmp_path: Path) -> None:
    folders = [make(tmp_path, 10), make(tmp_path, 20)]
    for folder in folders:
        truncate(folder / SHARD)
    for _ in range(2):
        with pytest.raises(CheckpointDamaged):
            newest_whole(tmp_path)
    assert list_checkpoints(tmp_path) == folders


def test_one_of_a_newer_lineage_is_newer_whatever_its_step(tmp_path: Path) -> None:
    abandoned, newest = make(tmp_path, 20), make(tmp_path, 12, lineage=1)
    assert newest_whole(tmp_path) == newest
    assert list_checkpoints(tmp_path) == [abandoned, newest]
    make(tmp_path, 14, keep=2, lineage=1)
    assert not abandoned.exists()


def test_what_is_half_written_is_never_listed_and_goes_at_the_next_start(tmp_path: Path) -> None:
    whole = make(tmp_path, 2)
    half = temporary_folder(tmp_path, 4, 0)
    begin(half, [".", "critic"])
    (half / "state.json").write_bytes((whole / "state.json").read_bytes())
    assert newest_whole(tmp_path) == whole
    drop_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]


def test_the_first_format_is_taken_as_it_is_and_a_later_one_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path, 2)
    (first / "state.json").write_text('{"step":2,"lineage":0,"kl_coef":0.0}')
    (first / "manifest.json").unlink()
    assert newest_whole(tmp_path) == first
    later = make(tmp_path, 4, version=FORMAT + 1)
    with pytest.raises(CheckpointDamaged, match=f"{later}.* format {FORMAT + 1}"):
        newest_whole(tmp_path)


def test_there_need_not_be_any(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "checkpoints") is None
