"""Sampling against a plain float64 reference, and greedy, seeded and truncated rows beside one another."""

import pytest
import torch

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.sampler import Sampler
from tests.support.rounding import assert_near, rounding

CPU = torch.device("cpu")


def reference(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Log-probabilities [V] of the processed distribution, token by token."""
    scaled = logits.double() / (s.temperature or 1.0)
    order = scaled.argsort(descending=True).tolist()
    if s.top_k:
        order = order[: s.top_k]
    p = torch.full_like(scaled, -torch.inf).index_copy(0, torch.tensor(order), scaled[order]).softmax(-1)
    kept: list[int] = []
    total = 0.0
    for token in order:
        if total >= s.top_p and kept:
            break
        kept.append(token)
        total += p[token].item()
    p = torch.full_like(scaled, -torch.inf).index_copy(0, torch.tensor(kept), scaled[kept]).softmax(-1)
    kept = [t for t in kept if p[t] >= s.min_p * p.max()]
    return torch.full_like(scaled, -torch.inf).index_copy(0, torch.tensor(kept), scaled[kept]).log_softmax(-1)


def rounded(logits: torch.Tensor, s: Sampling) -> float:
    """Bound the error of one of these log-probabilities: each is a logit less the logarithm of a sum over all."""
    return float(rounding(2 * logits.abs().max() / (s.temperature or 1.0), terms=logits.shape[-1]))


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7, top_k=3),
    Sampling(top_p=0.6),
    Sampling(temperature=0.8, top_p=0.9, top_k=7, min_p=0.05),
    Sampling(min_p=0.3),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logprobs_are_those_of_the_processed_distribution(settings: Sampling) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20) * 2
    expected = reference(logits, settings)
    sampler = Sampler([settings] * 2000, [None] * 2000, CPU)
    tokens, logprobs = sampler.sample(logits.expand(2000, -1))
    assert_near(logprobs, expected[tokens], rounded(logits, settings))
    seen, p = torch.bincount(tokens, minlength=20).double() / 2000, expected.exp()
    assert_near(seen, p, 6 * (p * (1 - p) / 2000).sqrt() + 1 / 2000, "frequencies, within six standard deviations")
    assert not seen[expected == -torch.inf].any()


def test_rows_of_different_settings_do_not_disturb_one_another() -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(SETTINGS) + 1, 20)
    rows = [*SETTINGS, Sampling(temperature=0.0)]
    tokens, logprobs = Sampler(rows, [None] * len(rows), CPU).sample(logits)
    for i, settings in enumerate(rows):
        expected = reference(logits[i], settings)[tokens[i]]
        assert_near(logprobs[i], expected, rounded(logits[i], settings), str(settings))
    assert tokens[-1] == logits[-1].argmax()


def test_a_row_of_nans_affects_no_other() -> None:
    logits = torch.zeros(2, 5)
    logits[1] = torch.nan
    tokens, logprobs = Sampler([Sampling()] * 2, [None] * 2, CPU).sample(logits)
    assert ((tokens >= 0) & (tokens < 5)).all()
    assert_near(logprobs[0], -torch.tensor(5.0).double().log(), rounding(1.7, terms=5))
    assert logprobs[1].isnan()


def test_a_seed_reproduces_whatever_shares_the_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 50).expand(4, -1)

    def draw(others: int) -> list[int]:
        generator = torch.Generator().manual_seed(7)
        rows = [generator] + [None] * others
        sampler = Sampler([Sampling()] * len(rows), rows, CPU)
        return [int(sampler.sample(logits[: len(rows)])[0][0]) for _ in range(10)]

    assert draw(0) == draw(3)


def test_a_large_vocabulary_is_sampled_as_its_probabilities_say_across_blocks() -> None:
    vocab, rows = 1000, 40_000
    p = torch.zeros(vocab, dtype=torch.float64)
    p[[3, 255, 256, 511, 999]] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    torch.manual_seed(0)
    tokens, _ = Sampler([Sampling()] * rows, [None] * rows, CPU).sample(p.log().float().expand(rows, -1))
    seen = torch.bincount(tokens, minlength=vocab).double() / rows
    assert not seen[p == 0].any()
    deviation = (p * (1 - p) / rows).sqrt()
    assert ((seen - p).abs() <= 5 * deviation).all()
