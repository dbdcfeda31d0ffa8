"""Packing: every real token once, and what was computed for it back in its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.trainer import attention
from rl_async.trainer.attention import packed_attention
from rl_async.trainer.packing import Tensors, empty_tensors, pack
from tests.support.rounding import assert_near, rounding


def padded(lengths: list[int]) -> Tensors:
    """Row b holds 100 b + 1, 100 b + 2, ...; its temperature is b + 1."""
    width = max(2, *lengths)
    batch = empty_tensors("cpu")
    batch.tokens = torch.zeros((len(lengths), width), dtype=torch.int64)
    for row, length in enumerate(lengths):
        batch.tokens[row, :length] = 100 * row + 1 + torch.arange(length)
    batch.lengths = torch.tensor(lengths)
    batch.temperature = torch.arange(1.0, len(lengths) + 1)[:, None, None]
    batch.experts = batch.tokens.to(torch.int16)[..., None, None].expand(-1, -1, 2, 3)
    return batch


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_what_is_computed_per_token_comes_back_where_the_token_is(lengths: list[int]) -> None:
    batch = padded(lengths)
    packed = pack(batch)
    assert packed.tokens.shape == packed.positions.shape == (1, sum(lengths))
    assert sum(length * sequences for length, sequences in packed.groups) == sum(lengths)
    assert [length for length, _ in packed.groups] == sorted(set(lengths), reverse=True)
    assert packed.positions[0].tolist() == [
        t for length, sequences in packed.groups for _ in range(sequences) for t in range(length)
    ]
    there = torch.arange(batch.tokens.shape[1] - 1) + 1 < batch.lengths[:, None]
    for flat, expected in (
        (packed.tokens[0], batch.tokens[:, :-1]),
        (packed.targets, batch.tokens[:, 1:]),
        (packed.temperature, batch.temperature[:, 0].expand(there.shape)),
        (packed.experts, batch.experts[:, :-1]),
        (packed.tokens[0, :, None] * torch.tensor([1, 2]), batch.tokens[:, :-1, None] * torch.tensor([1, 2])),
    ):
        back = packed.unpack(flat)
        assert back.shape == expected.shape
        assert back[there].equal(expected[there])
        assert not back[~there].any()


def by_borders(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    same: Tensor,
    longest: int,
    longest_too: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What PyTorch documents of ``varlen_attn``, which has no kernel for CPUs: a token sees so many before and behind
    it in its sequence, -1: all."""
    assert same is borders and borders.dtype == torch.int32
    assert longest == longest_too == borders.diff().max()
    sequence = torch.bucketize(torch.arange(len(q)), borders, right=True)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    back, ahead = window_size
    sees = (sequence[:, None] == sequence) & (distance >= -ahead) & ((distance <= back) | (back == -1))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_one_call_for_the_row_computes_what_one_for_each_sequence_does(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = pack(padded([2, 5, 5])).backbone_inputs()
    assert inputs["packed_borders"].tolist() == [0, 5, 10, 12]
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    given = {key: inputs[key] for key in ("packed_groups", "packed_borders")}
    given |= {"attention_mask": None, "scaling": 0.3, "sliding_window": window}
    expected, _ = packed_attention(module, q, k, v, **given)
    monkeypatch.setattr(attention, "_has_kernel", lambda query, value: True)
    monkeypatch.setattr(attention, "_kernel", by_borders)
    found, _ = packed_attention(module, q, k, v, **given)
    # Outputs are averages of values; the scores, sums of 8 products, change their weights.
    size = v.abs().max().item()
    scores = 0.3 * 8 * q.abs().max().item() * k.abs().max().item()
    assert_near(found, expected, 2 * rounding(size * max(1.0, 2 * scores), terms=8))


def test_pytorchs_kernel_takes_fewer_key_heads_than_query_heads() -> None:
    """Without elements, as a CPU has no kernel: what this version of PyTorch checks of its arguments."""
    q, k, v = (
        torch.empty(12, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (6, 2, 2)
    )
    borders = torch.empty(4, dtype=torch.int32, device="meta")
    out = attention._kernel(q, k, v, borders, borders, 5, 5, scale=0.3, window_size=(2, 0))
    assert out.shape == q.shape
    assert [part.shape for part in torch.autograd.grad(out, (q, k, v), out)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "asked",
    [
        {"packed_groups": None},
        {"packed_borders": None},
        {"attention_mask": torch.ones(1, 1, 4, 4)},
        {"s_aux": torch.zeros(2)},
        {"position_bias": torch.zeros(1)},
        {"causal": False},
    ],
)
def test_what_packed_attention_does_not_compute_is_refused(asked: dict) -> None:  # type: ignore[type-arg]
    borders = torch.tensor([0, 4], dtype=torch.int32)
    asked = {"packed_groups": ((4, 1),), "packed_borders": borders, "attention_mask": None} | asked
    module = torch.nn.Module()
    module.is_causal = asked.pop("causal", True)  # type: ignore[assignment]
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="families"):
        packed_attention(module, x, x, x, **asked)
