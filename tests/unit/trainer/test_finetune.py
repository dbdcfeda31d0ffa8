"""Fine-tuning: encoded conversations, reward models, and the warm start."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from rl_async.configs.schema.data import FinetuneConfig, WarmStartConfig
from rl_async.errors import DataError, TrainingDiverged
from rl_async.launcher.runs.reward_model import PairTraining, TokenPair, accuracy, bradley_terry, train_pairs
from rl_async.launcher.runs.tiny_model import Plateau, next_check
from rl_async.messages import Media
from rl_async.pictures import PictureProcessor
from rl_async.reward_loop.server.app import score
from rl_async.trainer.finetune import (
    IMAGES,
    MEDIA,
    ChatRows,
    EncodedRow,
    batch_of,
    steps_per_epoch,
    total_steps,
)
from rl_async.trainer.finetune.loop import collate, is_measured, keep_lines
from tests.conftest import tiny_config
from tests.support.tiny_models import drawing, save_vision_model

# Encoded conversations: what is mapped is what was written, and every epoch trains each of them once.


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


# Bradley-Terry: the loss against a reference, and that training on pairs orders them.


VOCAB = 32


def reference(chosen: list[float], rejected: list[float], margin: list[float]) -> float:
    """Equation 2 of arXiv:2307.09288, in float64, by plain loops: -log sigmoid(x) = log(1 + exp(-x))."""
    total = 0.0
    for better, worse, apart in zip(chosen, rejected, margin):
        x = better - worse - apart
        total += math.log1p(math.exp(-abs(x))) + max(0.0, -x)
    return total / len(chosen)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 1000.0])
def test_the_loss_is_the_negative_log_likelihood(scale: float) -> None:
    draw = random.Random(scale)
    parts = [[draw.gauss(0.0, scale) for _ in range(17)] for _ in range(2)] + [[draw.uniform(0, 2) for _ in range(17)]]
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    assert bradley_terry(*tensors).item() == pytest.approx(reference(*parts), rel=1e-12)
    assert bradley_terry(*(t.float() for t in tensors)).item() == pytest.approx(reference(*parts), rel=1e-4)


def test_only_differences_count_and_indifference_costs_log_2() -> None:
    chosen, rejected = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    none = torch.zeros(8, dtype=torch.float64)
    assert bradley_terry(chosen + 5, rejected + 5, none).item() == pytest.approx(
        bradley_terry(chosen, rejected, none).item()
    )
    assert bradley_terry(chosen, chosen, none).item() == pytest.approx(math.log(2))
    assert bradley_terry(chosen, rejected, none + 1) > bradley_terry(chosen, rejected, none)


def test_gradients() -> None:
    torch.manual_seed(0)
    chosen, rejected = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margin = torch.rand(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin), (chosen, rejected))


def tiny() -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    shape = tiny_config(vocab_size=VOCAB, num_hidden_layers=1, head_dim=16, pad_token_id=None)
    shape.num_labels = 1
    return Qwen3ForSequenceClassification(shape).eval()


def pairs(count: int, seed: int) -> list[TokenPair]:
    """Chosen rows hold token 1 somewhere, rejected ones token 2; lengths differ."""
    draw = random.Random(seed)

    def row(marked: int) -> list[int]:
        tokens = [draw.randrange(3, VOCAB) for _ in range(draw.randint(3, 9))]
        tokens[draw.randrange(len(tokens))] = marked
        return tokens

    return [TokenPair(row(1), row(2)) for _ in range(count)]


def test_training_orders_pairs_that_it_has_not_seen() -> None:
    model, held_out, lines = tiny(), pairs(100, 1), list[str]()
    before = accuracy(model, held_out, 32)
    train_pairs(model, pairs(400, 0), PairTraining(epochs=2, batch_size=32, learning_rate=3e-3, seed=0), lines.append)
    assert before < 0.8 and accuracy(model, held_out, 32) > 0.95
    assert lines[-1].startswith("26 of 26 steps: loss ")
    assert not model.training


def test_accuracy_is_counted_pair_by_pair_and_a_tie_is_wrong() -> None:
    model, some = tiny(), pairs(30, 2)
    scores = [(score(model, [p.chosen])[0], score(model, [p.rejected])[0]) for p in some]
    assert accuracy(model, some, 7) == pytest.approx(sum(a > b for a, b in scores) / 30)
    assert accuracy(model, [TokenPair([5, 6], [5, 6])], 4) == 0.0


def test_the_same_seed_trains_the_same_model() -> None:
    heads = []
    for seed in (0, 0, 1):
        model = tiny()
        train_pairs(model, pairs(40, 0), PairTraining(epochs=1, batch_size=8, learning_rate=1e-3, seed=seed), str)
        heads.append(model.score.weight.detach().clone())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_number_that_is_not_finite_ends_the_training() -> None:
    model = tiny()
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match=r"step 0.* nan"):
        train_pairs(model, pairs(4, 0), PairTraining(epochs=1, batch_size=4, learning_rate=1e-3, seed=0), str)


# The warm start's learning rate follows what the model can do.


def scales(rewards: list[float]) -> list[float]:
    plateau, seen = Plateau(), []
    for reward in rewards:
        plateau.observe(reward)
        seen.append(plateau.scale)
    return seen


def test_waiting_for_the_model_to_copy_keeps_the_learning_rate() -> None:
    assert scales([0.0, 0.1, 0.05, 0.1, 0.0, 0.1, 0.08]) == [1.0] * 7


def test_hovering_below_the_gate_halves_it_each_time() -> None:
    assert scales([0.5, 0.4, 0.5, 0.45, 0.6, 0.5, 0.5, 0.6]) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_copying_that_appears_late_starts_with_the_full_rate() -> None:
    assert scales([0.1, 0.1, 0.1, 0.1, 0.1, 0.8, 0.7, 0.7]) == [1.0] * 8


def test_the_next_check_is_the_first_step_at_which_the_reward_is_measured() -> None:
    config = WarmStartConfig(demos_path="d", out="o", min_steps=200, check_every=50, max_steps=320)
    for step, check in ((1, 200), (200, 200), (201, 250), (250, 250), (301, 320)):
        assert next_check(step, config) == check
