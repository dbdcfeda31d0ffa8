"""Micro-batches as tensors: padded, packed, and as trees of shared prefixes."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.errors import DataError
from rl_async.messages import Trajectory
from rl_async.trainer import attention
from rl_async.trainer.attention import packed_attention
from rl_async.trainer.packing import Tensors, collate, empty_tensors, pack, pack_tree, prefix_tree, row_calls
from tests.conftest import make_rows
from tests.support.rounding import assert_near, rounding
from tests.support.varlen import by_borders


def test_collate_pads_rows_and_masks_what_was_not_sampled() -> None:
    rows = make_rows(0)[:3]
    batch = collate(rows, device="cpu")
    assert batch.lengths.tolist() == [len(row.token_ids) for row in rows]
    for i, row in enumerate(rows):
        assert np.array_equal(batch.tokens[i, : len(row.token_ids)].numpy(), row.token_ids)
        assert not batch.tokens[i, len(row.token_ids) :].any()
        assert np.array_equal(batch.mask[i, : len(row.token_ids) - 1].numpy(), row.loss_mask[1:])


def test_a_given_mask_stands() -> None:
    rows = make_rows(0)[:2]
    mask = torch.zeros((2, max(len(row.token_ids) for row in rows) - 1), dtype=torch.bool)
    assert torch.equal(collate(rows, device="cpu", mask=mask).mask, mask)


def with_experts(first: int, count: int, shape: tuple[int, int] = (2, 3)) -> Trajectory:
    row = make_rows(0)[first]
    experts = (np.arange(count * shape[0] * shape[1]) % 251).astype(np.uint8).reshape(count, *shape)
    return msgspec.structs.replace(row, routed_experts=experts)


def test_experts_are_padded_with_what_no_router_chooses() -> None:
    rows = [with_experts(0, 5), make_rows(0)[1], with_experts(2, len(make_rows(0)[2].token_ids) - 1)]
    batch = collate(rows, device="cpu", replay_routers=True)
    assert batch.experts is not None and batch.experts.shape == (*batch.tokens.shape, 2, 3)
    assert np.array_equal(batch.experts[0, :5].numpy(), rows[0].routed_experts)
    assert (batch.experts[0, 5:] == -1).all() and (batch.experts[1] == -1).all()
    assert np.array_equal(batch.experts[2, : batch.lengths[2] - 1].numpy(), rows[2].routed_experts)
    assert collate(rows, device="cpu").experts is None
    assert collate(rows[1:2], device="cpu", replay_routers=True).experts is None
    with pytest.raises(DataError):
        collate([rows[0], with_experts(1, 4, (2, 4))], device="cpu", replay_routers=True)


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


def checked(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, same: Tensor, longest: int, too: int, **named: Any
) -> Tensor:
    """The stand-in, given what a kernel relies on."""
    assert same is borders and borders.dtype == torch.int32
    assert longest == too >= borders.diff().max()
    return by_borders(q, k, v, borders, same, longest, too, **named)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_one_call_for_the_row_computes_what_one_for_each_sequence_does(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = pack(padded([2, 5, 5])).backbone_inputs()
    row = inputs["packed_row"]
    assert row.borders.tolist() == row.host_borders.tolist() == [0, 5, 10, 12] and row.longest >= 5
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    given = {"packed_row": row, "attention_mask": None, "scaling": 0.3, "sliding_window": window}
    expected, _ = packed_attention(module, q, k, v, **given)
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    monkeypatch.setattr(attention, "_kernel", checked)
    given["packed_row"] = replace(row, has_kernel=True)
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
        {"packed_row": None},
        {"attention_mask": torch.ones(1, 1, 4, 4)},
        {"position_bias": torch.zeros(1)},
        {"causal": False},
    ],
)
def test_what_packed_attention_does_not_compute_is_refused(asked: dict) -> None:  # type: ignore[type-arg]
    asked = {"packed_row": row_calls(((4, 1),), torch.device("cpu")), "attention_mask": None} | asked
    module = torch.nn.Module()
    module.is_causal = asked.pop("causal", True)  # type: ignore[assignment]
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="families"):
        packed_attention(module, x, x, x, **asked)


ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=12), st.sampled_from([1.0, 0.5])), min_size=1, max_size=7
)


def tree_batch(rows: list[list[int]]) -> np.ndarray:
    tokens = np.zeros((len(rows), max(2, *map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


@given(ROWS, st.integers(1, 4))
def test_a_row_is_a_path_and_its_tokens_see_that_path(drawn: list[tuple[list[int], float]], least: int) -> None:
    rows, temperatures = [row for row, _ in drawn], [temperature for _, temperature in drawn]
    tokens = tree_batch(rows)
    tree = prefix_tree(tokens, [len(row) for row in rows], temperatures, least)
    if tree is None:
        for (row, a), (other, b) in ((x, y) for i, x in enumerate(drawn) for y in drawn[:i]):
            assert a != b or row[:least] != other[:least] or min(len(row), len(other)) < least
        return
    assert len(tree.places) < sum(map(len, rows))
    assert [tree.nodes[0].start, *(node.stop for node in tree.nodes)] == [
        *(node.start for node in tree.nodes),
        len(tree.places),
    ]
    seen = [set[int]() for _ in tree.places]
    for start, stop, end in tree.nodes:
        for token in range(start, end):
            seen[token] |= set(range(start, min(token + 1, stop)))
    owners: dict[int, set[float]] = {}
    for number, (row, path) in enumerate(zip(rows, tree.paths, strict=True)):
        assert tokens.flatten()[tree.places[path]].tolist() == row
        assert tree.positions[path].tolist() == list(range(len(row)))
        assert tree.before[path].tolist() == [-1, *path[:-1]]
        for at, token in enumerate(path.tolist()):
            assert seen[token] == set(path[: at + 1].tolist())
            owners.setdefault(token, set()).add(temperatures[number])
    assert all(len(those) == 1 for those in owners.values()), "one distribution predicts a token"


@given(ROWS)
def test_what_is_computed_for_a_prediction_comes_back_in_every_row_that_makes_it(
    drawn: list[tuple[list[int], float]],
) -> None:
    batch = empty_tensors("cpu")
    batch.tokens = torch.from_numpy(tree_batch([row for row, _ in drawn]))
    batch.lengths = torch.tensor([len(row) for row, _ in drawn])
    batch.temperature = torch.tensor([temperature for _, temperature in drawn])[:, None, None]
    tree = prefix_tree(batch.tokens.numpy(), batch.lengths.tolist(), batch.temperature.flatten().tolist(), 1)
    if tree is None:
        return
    packed = pack_tree(batch, tree)
    there = torch.arange(batch.tokens.shape[1] - 1) + 1 < batch.lengths[:, None]
    for flat, expected in (
        (packed.targets, batch.tokens[:, 1:]),
        (packed.temperature, batch.temperature[:, 0].expand(there.shape)),
        (packed.predicting(packed.tokens[0]), batch.tokens[:, :-1]),
        (packed.predicting(packed.positions[0]), torch.arange(there.shape[1]).expand(there.shape)),
    ):
        back = packed.unpack(flat)
        assert back[there].equal(expected[there])
        assert not back[~there].any()


def test_rows_that_end_where_others_go_on_need_no_tokens_of_their_own() -> None:
    rows = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6], [5, 6, 7, 8, 9]]
    tree = prefix_tree(tree_batch(rows), [4, 4, 2, 5], [1.0] * 4, 1)
    assert tree is not None
    assert len(tree.places) == 5
    assert [len(path) for path in tree.paths] == [4, 4, 2, 5]


def test_nodes_are_as_few_as_pay() -> None:
    rows = [[1] * 9 + [2] * 3, [1] * 9 + [3] * 3, [1] * 4 + [4] * 8]
    tree = prefix_tree(tree_batch(rows), [12] * 3, [1.0] * 3, 5)
    assert tree is not None
    assert [tuple(node) for node in tree.nodes] == [(0, 9, 15), (9, 12, 12), (12, 15, 15), (15, 27, 27)]


def test_collate_makes_a_tree_only_when_it_is_asked_to() -> None:
    rows = make_rows(0)[:2]
    rows[1] = rows[0]
    assert collate(rows, device="cpu").tree is None
    shared = collate(rows, device="cpu", share_prefixes=True)
    assert shared.tree is not None
    assert shared.computed == len(rows[0].token_ids) == int(shared.lengths.sum()) / 2
