"""Bradley-Terry: the loss against a reference, and that training on pairs orders them."""

import math
import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from rl_async.errors import TrainingDiverged
from rl_async.reward_loop.server.classifier import score
from rl_async.trainer.finetune.reward_model import PairTraining, TokenPair, accuracy, bradley_terry, train_pairs

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
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=None,
    )
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
