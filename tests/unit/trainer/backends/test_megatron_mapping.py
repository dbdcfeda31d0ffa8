"""The mapping between Hugging Face's weights and Megatron's, without Megatron: there and back, and where things lie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.trainer.backends.megatron.mapping import (
    EMBEDDING,
    OUTPUT,
    Rule,
    Shape,
    expert_rules,
    join,
    layer_rules,
    padded_vocab,
    split,
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


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(1, 30), st.booleans())
def test_there_and_back_changes_no_bit(ranks: int, per_rank: int, queries: int, vocab: int, sparse: bool) -> None:
    shape = shape_of(ranks * per_rank, queries, vocab, experts=4 if sparse else 0)
    rules = [EMBEDDING, OUTPUT, *layer_rules(shape), *(expert_rules(0, 3) if sparse else [])]
    for rule in rules:
        whole = tensors_of(rule, shape)
        shards = split(rule, whole, shape, ranks)
        assert len({shard.shape for shard in shards}) == 1 and len(shards) == ranks
        back = join(rule, shards, shape)
        assert all(a.equal(b) for a, b in zip(whole, back, strict=True)), rule


def test_a_group_of_queries_lies_beside_its_key_and_value() -> None:
    shape = shape_of(groups=2, queries=2)
    rule = next(rule for rule in layer_rules(shape) if rule.megatron.endswith("linear_qkv.bias"))
    q, k, v = torch.arange(12), 100 + torch.arange(6), 200 + torch.arange(6)
    first, second = split(rule, [q, k, v], shape, 2)
    assert first.tolist() == [*range(6), 100, 101, 102, 200, 201, 202]
    assert second.tolist() == [*range(6, 12), 103, 104, 105, 203, 204, 205]


def test_every_rank_has_its_part_of_the_gate_beside_that_of_the_up_projection() -> None:
    (fc1, _) = expert_rules(0, 3)
    assert fc1.hugging_face == ("mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight")
    gate, up = torch.arange(4)[:, None], 10 + torch.arange(4)[:, None]
    first, second = split(fc1, [gate, up], shape_of(), 2)
    assert first.flatten().tolist() == [0, 1, 10, 11] and second.flatten().tolist() == [2, 3, 12, 13]


def test_a_vocabulary_that_does_not_divide_is_filled_up_with_zeros() -> None:
    shape = shape_of(vocab=5)
    shards = split(EMBEDDING, [torch.ones(5, HIDDEN)], shape, 4)
    assert padded_vocab(5, 4) == 8
    assert torch.cat(shards).sum(1).tolist() == [HIDDEN] * 5 + [0] * 3


@pytest.mark.parametrize(("flag", "ends"), [("qk_norm", "q_layernorm.weight"), ("qkv_bias", "linear_qkv.bias")])
def test_a_family_has_the_parameters_that_it_has(flag: str, ends: str) -> None:
    with_it, without = (layer_rules(shape_of(**{flag: value})) for value in (True, False))
    assert any(rule.megatron.endswith(ends) for rule in with_it)
    assert not any(rule.megatron.endswith(ends) for rule in without)
