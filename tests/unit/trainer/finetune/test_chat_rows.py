"""Encoded conversations: what is mapped is what was written, and every epoch trains each of them once."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_async.configs.schema.data import FinetuneConfig
from rl_async.errors import DataError
from rl_async.messages import Media
from rl_async.pictures import PictureProcessor
from rl_async.trainer.finetune.chat_rows import (
    IMAGES,
    MEDIA,
    ChatRows,
    EncodedRow,
    batch_of,
    steps_per_epoch,
    total_steps,
)
from rl_async.trainer.finetune.loop import collate, is_measured, keep_lines
from tests.support.vision_models import drawing, save_vision_model


def rows(*lengths: int) -> ChatRows:
    """Rows of these lengths whose second half is learned."""
    draw = np.random.default_rng(0)
    return ChatRows.of([EncodedRow(draw.integers(0, 50, n), np.arange(n) >= n // 2) for n in lengths])


def test_what_is_mapped_is_what_was_written(tmp_path: Path) -> None:
    made = rows(5, 1, 8)
    made.write(tmp_path)
    found = ChatRows.map(tmp_path)
    assert len(found) == 3 and [found.size(row).tokens for row in range(3)] == [5, 1, 8]
    assert np.array_equal(found.ids[found.span(2)], made.ids[6:14])
    assert [found.targets(row) for row in range(3)] == [3, 0, 4], "the first token of a row has nothing before it"


def test_no_rows_are_rows_too(tmp_path: Path) -> None:
    ChatRows.of([]).write(tmp_path)
    assert len(ChatRows.map(tmp_path)) == 0


def test_rows_of_a_version_without_images_are_read(tmp_path: Path) -> None:
    rows(2).write(tmp_path)
    (tmp_path / MEDIA).unlink()
    found = ChatRows.map(tmp_path)
    assert len(found) == 1 and found.media == {}


def test_a_micro_batch_has_the_tokens_and_what_is_learned_of_them() -> None:
    data = rows(5, 1, 8)
    batch = collate(data, [2, 0], "cpu")
    assert batch.tokens.shape == (2, 8) and batch.lengths.tolist() == [8, 5]
    assert batch.tokens[1].tolist() == [*data.ids[:5].tolist(), 0, 0, 0]
    assert batch.mask.tolist() == [[False] * 3 + [True] * 4, [False] + [True] * 3 + [False] * 3]
    assert not collate(data, [], "cpu").mask.any(), "a rank without rows trains nothing"


def test_a_micro_batch_has_the_images_of_its_rows(tmp_path: Path) -> None:
    save_vision_model("qwen2_5_vl", tmp_path / "model")
    pictures = PictureProcessor.load(str(tmp_path / "model"))
    assert pictures is not None
    ids, (place,) = pictures.expand([1, pictures.mark, 2, 3], [drawing(0)])
    medium = Media.of(drawing(0), "image/png", place)
    plain = EncodedRow(np.array([1, 2]), np.array([False, True]))
    made = ChatRows.of([plain, EncodedRow(np.array(ids), np.arange(len(ids)) > 5, [medium])])
    (tmp_path / "rows").mkdir()
    (tmp_path / IMAGES).mkdir()
    made.write(tmp_path / "rows")
    (tmp_path / IMAGES / medium.sha256).write_bytes(drawing(0))
    found = ChatRows.map(tmp_path / "rows")
    images = collate(found, [0, 1], "cpu", pictures).images
    assert images is not None and images.features.tolist() == [[-1] * len(ids), [-1, 0, 1, 2, 3, -1, -1]]
    assert collate(found, [0], "cpu", pictures).images is None
    with pytest.raises(DataError, match="reads no images"):
        collate(found, [1], "cpu")


@pytest.mark.parametrize(("count", "size"), [(10, 4), (3, 8), (8, 4), (9, 1)])
def test_every_epoch_trains_every_row_once_in_batches_of_like_size(count: int, size: int) -> None:
    per_epoch = steps_per_epoch(count, size)
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        batches = [batch_of(step, count, size, seed=3, shuffle=True) for step in steps]
        assert sorted(row for batch in batches for row in batch) == list(range(count))
        assert max(map(len, batches)) - min(map(len, batches)) <= 1 and max(map(len, batches)) <= size


def test_the_order_follows_the_seed_and_the_epoch() -> None:
    def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        return batch_of(epoch, 50, 50, seed=seed, shuffle=shuffle)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)
    assert order(0, 1, shuffle=False) == list(range(50))


def test_steps_are_those_of_the_epochs_unless_fewer_are_asked_for() -> None:
    assert total_steps(10, FinetuneConfig(out="x", batch_size=4, epochs=3)) == 9
    assert total_steps(10, FinetuneConfig(out="x", batch_size=4, epochs=3, steps=5)) == 5
    assert total_steps(10, FinetuneConfig(out="x", batch_size=4, epochs=3, steps=50)) == 9


def test_the_held_out_loss_is_measured_every_so_often_and_at_the_end() -> None:
    every4, never = FinetuneConfig(out="x", eval_every=4), FinetuneConfig(out="x", eval_every=0)
    assert [step for step in range(1, 11) if is_measured(every4, step, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_measured(never, step, 10)] == [10]


def test_lines_of_steps_that_are_trained_again_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keep_lines(path, "step", 1)
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)) + '{"step": 4, "lo')
    keep_lines(path, "step", 1)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
