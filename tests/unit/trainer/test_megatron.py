"""The Megatron backend as far as it runs without Megatron."""

import importlib.util
import itertools
import warnings
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.attention import shared_places
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
from rl_async.trainer.packing import Tensors

# The mapping between Hugging Face's weights and Megatron's, without Megatron: there and back, and where things lie.


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


# Models that the Megatron backend was not taught, or that its ranks cannot share, are refused by name.


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
TINY: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """The module under test; importing Megatron-Core warns about what else it could use."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rl_async.trainer.megatron import model as megatron_model
    return megatron_model


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2Config(), "family 'gpt2'"),
        (LlamaConfig(hidden_act="gelu"), "activation 'gelu'"),
        (LlamaConfig(attention_bias=True), "biases"),
        (Qwen3Config(rope_parameters=YARN), "rotary embedding"),
        (Qwen2Config(use_sliding_window=True), "sliding window"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), "mixes dense and sparse"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_model_has_that_is_not_known_is_named(
    megatron: ModuleType, config: PretrainedConfig, named: str
) -> None:
    with pytest.raises(UserError, match=rf"model\.path: somewhere .*{named}"):
        megatron.shape_of(config, "somewhere")


def test_the_shape_of_a_model_is_that_of_its_config(megatron: ModuleType) -> None:
    shape = megatron.shape_of(Qwen2Config(**TINY, vocab_size=77, tie_word_embeddings=True), "somewhere")
    assert (shape.layers, shape.heads, shape.groups, shape.head_dim, shape.vocab) == (4, 4, 2, 16, 77)
    assert shape.tied and shape.qkv_bias and not shape.qk_norm and shape.experts == 0


def test_a_critic_has_no_output_to_tie_and_is_named_by_its_own_key(megatron: ModuleType) -> None:
    hf = Qwen2Config(**TINY, tie_word_embeddings=True)
    heads = {head: megatron.shape_of(hf, "somewhere", head) for head in ("policy", "both", "value")}
    assert [shape.tied for shape in heads.values()] == [True, True, False]
    assert [shape.has_output for shape in heads.values()] == [False, False, False]
    with pytest.raises(UserError, match=r"critic\.path: somewhere .*family 'gpt2'"):
        megatron.shape_of(GPT2Config(), "somewhere", "value")
    with pytest.raises(UserError, match=r"critic\.path: .*trainer\.tensor_parallel=4"):
        megatron.require_divisible(heads["value"], places(tensor=4))


@pytest.mark.parametrize(
    ("experts", "sizes", "named"),
    [
        (0, {"tensor": 4}, "4 heads and 2 key-value heads .* trainer.tensor_parallel=4"),
        (0, {"tensor": 2, "context": 4}, "4 heads .* trainer.tensor_parallel=2 .* trainer.sequence_parallel=4"),
        (0, {"pipeline": 3}, "4 layers do not divide among 3 stages"),
        (0, {"pipeline": 4, "virtual": 2}, "4 layers do not divide among 8 stages"),
        (0, {"expert": 2}, "0 experts .* trainer.expert_parallel=2"),
        (8, {"expert": 3}, "8 experts .* trainer.expert_parallel=3"),
        (8, {"tensor": 2}, "trainer.tensor_parallel=2 .* trainer.expert_parallel above 1"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(
    megatron: ModuleType, experts: int, sizes: dict[str, int], named: str
) -> None:
    config = Qwen3MoeConfig(**TINY, num_experts=experts) if experts else Qwen3Config(**TINY)
    parallel = places(**sizes)
    with pytest.raises(UserError, match=named):
        megatron.require_divisible(megatron.shape_of(config, "somewhere"), parallel)
    megatron.require_divisible(megatron.shape_of(config, "somewhere"), places())


@pytest.mark.parametrize(
    ("replay", "sizes", "replays"),
    [
        ("auto", {"pipeline": 2, "expert": 2}, True),
        ("always", {"pipeline": 2, "expert": 2}, True),
        ("never", {"expert": 2}, False),
        ("auto", {"tensor": 2, "expert": 2}, False),
        ("never", {"tensor": 2, "expert": 2}, False),
        ("always", {"tensor": 2, "expert": 2}, None),
    ],
)
def test_routers_do_not_replay_where_ranks_share_tokens(
    megatron: ModuleType, replay: str, sizes: dict[str, int], replays: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    from rl_async.trainer.megatron.backend import replays_routers

    shape = megatron.shape_of(Qwen3MoeConfig(**TINY, num_experts=8), "somewhere")
    config = convert({"router_replay": replay}, TrainerConfig)
    if replays is None:
        with pytest.raises(UserError, match=r"trainer\.router_replay=always .* trainer\.tensor_parallel=2"):
            replays_routers(shape, places(**sizes), config)
        return
    assert replays_routers(shape, places(**sizes), config) == replays
    assert bool(caplog.records) == (replay == "auto" and not replays)


def test_a_dense_model_has_no_routers_to_replay(megatron: ModuleType) -> None:
    from rl_async.trainer.megatron.backend import replays_routers

    shape = megatron.shape_of(Qwen3Config(**TINY), "somewhere")
    assert not replays_routers(shape, places(tensor=2), TrainerConfig())
    with pytest.raises(UserError, match=r"trainer\.router_replay=always .* no experts"):
        replays_routers(shape, places(), TrainerConfig(router_replay="always"))


def test_one_rank_of_those_that_train_the_same_rows_records_them(megatron: ModuleType) -> None:
    from rl_async.trainer.megatron.model import Axis, Parallel

    def records(tensor: int, context: int, pipeline: int) -> bool:
        ranks = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": 0, "expert": 0}
        axes = {name: Axis(2, rank, None) for name, rank in ranks.items()}  # type: ignore[arg-type]
        return Parallel(**axes, virtual_stages=1).data_parallel.is_recorder

    assert [ranks for ranks in itertools.product(range(2), repeat=3) if records(*ranks)] == [(0, 0, 0)]


def places(tensor: int = 1, pipeline: int = 1, expert: int = 1, virtual: int = 1, context: int = 1) -> Any:
    """The first of so many ranks, without groups."""
    from rl_async.trainer.megatron.model import Axis, Parallel

    axes = {
        name: Axis(size, 0, None)  # type: ignore[arg-type]
        for name, size in (
            ("tensor", tensor),
            ("context", context),
            ("pipeline", pipeline),
            ("data", 1),
            ("expert", expert),
        )
    }
    return Parallel(**axes, virtual_stages=virtual)


# Which tokens of packed rows each of the ranks that share them holds.


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_ranks_hold_every_token_once_and_two_parts_of_each_row(ranks: int, parts: list[int]) -> None:
    """A row of 2 S parts: rank r has part r, and part r from the back."""
    lengths = [2 * ranks * size for size in parts]
    rows, places = shared_places(torch.tensor([0, *accumulate(lengths)]), ranks)
    held = {pair for rank in range(ranks) for pair in zip(rows[rank].tolist(), places[rank].tolist(), strict=True)}
    assert held == {(row, place) for row, length in enumerate(lengths) for place in range(length)}
    assert len(held) == rows.numel() == places.numel()
    for rank in range(ranks):
        expected = []
        for row, (size, length) in enumerate(zip(parts, lengths, strict=True)):
            front = range(rank * size, (rank + 1) * size)
            back = range(length - (rank + 1) * size, length - rank * size)
            expected += [(row, place) for place in (*front, *back)]
        assert list(zip(rows[rank].tolist(), places[rank].tolist(), strict=True)) == expected


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_a_rank_alone_holds_rows_of_any_length_in_order(lengths: list[int]) -> None:
    rows, places = shared_places(torch.tensor([0, *accumulate(lengths)]), 1)
    assert rows.tolist() == [[row for row, length in enumerate(lengths) for _ in range(length)]]
    assert places.tolist() == [[place for length in lengths for place in range(length)]]


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 3)])
def test_padding_counts_as_no_token(ranks: int, multiple: int) -> None:
    """A full row, one that ends early, and one of a single token; padding has a row and a position that exist."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rl_async.trainer.megatron.backend import pack_rows
    lengths = [7, 5, 1]
    batch = Tensors(
        tokens=torch.zeros(3, 7, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        mask=torch.zeros(3, 6, dtype=torch.bool),
        temperature=torch.ones(3, 1, 1),
    )
    packed = pack_rows(batch, ranks, multiple)
    assert packed.rows.shape == packed.places.shape == packed.there.shape == (ranks, packed.rows.shape[1])
    assert packed.rows.shape[1] % multiple == 0
    assert packed.rows.max() < 3 and packed.places.max() < 7
    tokens = zip(packed.rows[packed.there].tolist(), packed.places[packed.there].tolist(), strict=True)
    assert sorted(tokens) == [(row, place) for row, length in enumerate(lengths) for place in range(length)]
