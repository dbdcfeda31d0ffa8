"""The mapping between Hugging Face's weights and Megatron's, without Megatron: there and back, and where things lie."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.trainer.megatron.mapping import (
    EMBEDDING,
    OUTPUT,
    Place,
    Rule,
    Shape,
    Shard,
    expert_rules,
    fill,
    layer_rules,
    padded_vocab,
    parts_of,
)

HIDDEN, INNER = 10, 12


def shape_of(groups: int = 4, queries: int = 2, vocab: int = 13, **more: int | bool) -> Shape:
    plain = {"layers": 2, "tied": False, "qk_norm": True, "qkv_bias": True}
    return Shape(heads=groups * queries, groups=groups, head_dim=3, vocab=vocab, **(plain | more))  # type: ignore[arg-type]


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Of the Hugging Face tensors that rules name, by what their names end with."""
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    return {
        "q_proj.weight": (q, HIDDEN),
        "k_proj.weight": (kv, HIDDEN),
        "v_proj.weight": (kv, HIDDEN),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "o_proj.weight": (HIDDEN, q),
        "gate_proj.weight": (INNER, HIDDEN),
        "up_proj.weight": (INNER, HIDDEN),
        "down_proj.weight": (HIDDEN, INNER),
        "gate.weight": (shape.experts, HIDDEN),
        "embed_tokens.weight": (shape.vocab, HIDDEN),
        "lm_head.weight": (shape.vocab, HIDDEN),
        "norm.weight": (shape.head_dim,),
        "layernorm.weight": (HIDDEN,),
    }


def tensors_of(rule: Rule, shape: Shape) -> list[Tensor]:
    known = sizes(shape)
    found = [next(size for end, size in known.items() if name.endswith(end)) for name in rule.hugging_face]
    return [torch.randn(size) for size in found]


def lengths_of(rule: Rule, whole: list[Tensor], shape: Shape, ranks: int) -> tuple[int, ...]:
    """Of a tensor-parallel rank's shard."""
    rows, columns = sum(len(tensor) for tensor in whole), whole[0].shape[1:]
    if rule.form == "copy":
        return rows, *columns
    if rule.form == "rows":
        return rows, columns[0] // ranks
    return (padded_vocab(shape.vocab, ranks) if rule.form == "vocab" else rows) // ranks, *columns


def shards_of(rule: Rule, whole: list[Tensor], shape: Shape, ranks: int) -> list[Shard]:
    lengths = lengths_of(rule, whole, shape, ranks)
    return [Shard(rule, rule.hugging_face, lengths, rank, ranks) for rank in range(ranks)]


def filled(shard: Shard, whole: list[Tensor], shape: Shape, numbers: range | None = None) -> Tensor:
    """A shard, or a range of its numbers, from whole tensors."""
    named = dict(zip(shard.names, whole, strict=True))

    def source(target: Tensor, name: str, place: Place, size: tuple[int, ...]) -> None:
        assert size == tuple(named[name].shape)
        target.copy_(named[name][place])

    if numbers is None:
        found = whole[0].new_ones(tuple(shard.lengths))
        fill(shard, shape, 0, found.view(-1), source)
        return found
    found = whole[0].new_ones(len(numbers))
    fill(shard, shape, numbers.start, found, source)
    return found


def ranges_of(count: int, cuts: list[float]) -> list[range]:
    """Of so many numbers, cut at these fractions."""
    ends = [0, *sorted(int(cut * count) for cut in cuts), count]
    return [range(start, end) for start, end in itertools.pairwise(ends) if start < end]


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 30),
    st.booleans(),
    st.lists(st.floats(0, 1), max_size=4),
)
def test_ranges_of_all_ranks_hold_each_number_once_and_where_it_was(
    ranks: int, per_rank: int, queries: int, vocab: int, sparse: bool, cuts: list[float]
) -> None:
    shape = shape_of(ranks * per_rank, queries, vocab, experts=4 if sparse else 0)
    for rule in [EMBEDDING, OUTPUT, *layer_rules(shape), *(expert_rules(0, 3) if sparse else [])]:
        whole = tensors_of(rule, shape)
        back = {name: torch.zeros_like(tensor) for name, tensor in zip(rule.hugging_face, whole, strict=True)}
        held = {name: torch.zeros_like(tensor) for name, tensor in back.items()}
        for shard in shards_of(rule, whole, shape, ranks):
            flat = filled(shard, whole, shape).view(-1)
            for numbers in ranges_of(flat.numel(), cuts):
                assert filled(shard, whole, shape, numbers).equal(flat[numbers.start : numbers.stop])
                for part in parts_of(shard, shape, numbers):
                    assert len(part.boxes) <= 3
                    for place, found in part.split(part.numbers(flat[numbers.start : numbers.stop])):
                        back[part.name][place] = found
                        held[part.name][place] += 1
        copies = ranks if rule.form == "copy" else 1
        assert all((counts == copies).all() for counts in held.values()), rule
        assert all(a.equal(b) for a, b in zip(whole, back.values(), strict=True)), rule


def test_a_group_of_queries_lies_beside_its_key_and_value() -> None:
    shape = shape_of(groups=2, queries=2)
    rule = next(rule for rule in layer_rules(shape) if rule.megatron.endswith("linear_qkv.bias"))
    whole = [torch.arange(12), 100 + torch.arange(6), 200 + torch.arange(6)]
    first, second = (filled(shard, whole, shape) for shard in shards_of(rule, whole, shape, 2))
    assert first.tolist() == [*range(6), 100, 101, 102, 200, 201, 202]
    assert second.tolist() == [*range(6, 12), 103, 104, 105, 203, 204, 205]


def test_every_rank_has_its_part_of_the_gate_beside_that_of_the_up_projection() -> None:
    (fc1, _) = expert_rules(0, 3)
    assert fc1.hugging_face == ("mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight")
    whole = [torch.arange(4)[:, None], 10 + torch.arange(4)[:, None]]
    first, second = (filled(shard, whole, shape_of()) for shard in shards_of(fc1, whole, shape_of(), 2))
    assert first.flatten().tolist() == [0, 1, 10, 11] and second.flatten().tolist() == [2, 3, 12, 13]


def test_a_vocabulary_that_does_not_divide_is_filled_up_with_zeros() -> None:
    shape, whole = shape_of(vocab=5), [torch.ones(5, HIDDEN)]
    shards = [filled(shard, whole, shape) for shard in shards_of(EMBEDDING, whole, shape, 4)]
    assert padded_vocab(5, 4) == 8
    assert torch.cat(shards).sum(1).tolist() == [HIDDEN] * 5 + [0] * 3


@pytest.mark.parametrize(("flag", "ends"), [("qk_norm", "q_layernorm.weight"), ("qkv_bias", "linear_qkv.bias")])
def test_a_family_has_the_parameters_that_it_has(flag: str, ends: str) -> None:
    with_it, without = (layer_rules(shape_of(**{flag: value})) for value in (True, False))
    assert any(rule.megatron.endswith(ends) for rule in with_it)
    assert not any(rule.megatron.endswith(ends) for rule in without)
