"""Packing: every real token once, and what was computed for it back in its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.batches.packing import pack
from rl_async.trainer.batches.tensors import Tensors, empty_tensors
from rl_async.trainer.model.attention import packed_attention


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


def test_flash_attention_is_told_where_sequences_end() -> None:
    inputs = pack(padded([2, 5, 5])).backbone_inputs()
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 5, 10, 12]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5


@pytest.mark.parametrize(
    "asked",
    [
        {"packed_groups": None},
        {"attention_mask": torch.ones(1, 1, 4, 4)},
        {"s_aux": torch.zeros(2)},
        {"position_bias": torch.zeros(1)},
        {"causal": False},
    ],
)
def test_what_packed_attention_does_not_compute_is_refused(asked: dict) -> None:  # type: ignore[type-arg]
    asked = {"packed_groups": ((4, 1),), "attention_mask": None} | asked
    module = torch.nn.Module()
    module.is_causal = asked.pop("causal", True)  # type: ignore[assignment]
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="families"):
        packed_attention(module, x, x, x, **asked)
