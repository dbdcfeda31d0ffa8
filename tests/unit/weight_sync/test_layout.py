"""Layouts against what they describe: torch's DTensor, Megatron's fused parameters, vLLM's rules."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard as Dealt
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import (
    Box,
    Layout,
    Shard,
    TensorSpec,
    engine,
    fsdp2,
    fused_parts,
    megatron,
    sharded_dimension,
    slices,
    whole,
)
from rl_async.weight_sync.reshard import split_fused
from tests.unit.weight_sync.models import specs

LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{which}_proj.weight" for which in "qkv"]
GATE_UP = [f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"]


def boxes(layout: Layout, name: str) -> dict[int, list[Box]]:
    """By rank."""
    return {r: [shard.box for shard in layout.shards[name] if shard.rank == r] for r in layout.ranks}


def rows(layout: Layout, name: str) -> list[tuple[int, int] | None]:
    """Of each rank its rows, if it has some."""
    return [held[0][0] if held else None for held in boxes(layout, name).values()]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_fsdp2_deals_rows_as_torch_does(ranks: int) -> None:
    named = {f"t{size}": TensorSpec((size, 3), "float32") for size in (1, 2, 5, 7, 8, 9, 16, 17)}
    layout = fsdp2(named, ranks)
    for name, spec in named.items():
        for rank in range(ranks):
            shape, offset = _compute_local_shape_and_global_offset(spec.shape, (ranks,), [rank], [Dealt(0)])
            expected = [tuple((o, o + n) for o, n in zip(offset, shape, strict=True))] if shape[0] else []
            assert [shard.box for shard in layout.shards[name] if shard.rank == rank] == expected


@pytest.mark.parametrize(("experts", "ranks"), [(8, 16), (3, 2), (128, 96)])
def test_ranks_of_fsdp2_hold_equal_parts_of_experts_that_they_cannot_divide(experts: int, ranks: int) -> None:
    shape = (experts, 192, 5)
    layout = fsdp2({"t": TensorSpec(shape)}, ranks)
    for rank in range(ranks):
        size, offset = _compute_local_shape_and_global_offset(shape, (ranks,), [rank], [Dealt(1)])
        assert boxes(layout, "t")[rank] == [tuple((o, o + n) for o, n in zip(offset, size, strict=True))]
        assert size == (experts, 192 // ranks, 5)


@pytest.mark.parametrize("shape", [(60, 192, 5), (8, 191, 5), (256, 4096, 5), (5, 192)])
def test_other_tensors_are_divided_by_their_first_dimension(shape: tuple[int, ...]) -> None:
    """Experts that nearly divide, rows that do not, too many pieces, and a matrix."""
    ranks = {60: 64, 8: 16, 256: 512, 5: 2}[shape[0]]
    assert sharded_dimension(shape, ranks) == 0


def test_replicas_of_fsdp2_hold_the_same() -> None:
    held = boxes(fsdp2({"t": TensorSpec((5, 2))}, 3, replicas=2), "t")
    assert held[0] == held[3] == [((0, 2), (0, 2))]
    assert held[2] == held[5] == [((4, 5), (0, 2))]


def weights(named: dict[str, TensorSpec]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in named.items()}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_megatrons_fused_parameters_come_apart_into_boxes(tp: int) -> None:
    """linear_qkv, per group of queries its queries, its key and its value; linear_fc1, gate and up projection."""
    groups = 4
    named = specs(heads=8, kv_heads=groups)
    whole_ = weights(named)
    layout = megatron(named, kv_heads=groups, tp=tp)
    grouped = torch.cat([whole_[name].unflatten(0, (groups, -1)) for name in QKV], 1).flatten(0, 1)
    gate, up = (whole_[name].chunk(tp) for name in GATE_UP)
    for rank in range(tp):
        fused = grouped.chunk(tp)[rank]
        parts = split_fused(fused, layout, rank, QKV) | split_fused(
            torch.cat([gate[rank], up[rank]]), layout, rank, GATE_UP
        )
        for (name, box), part in parts.items():
            assert torch.equal(part, whole_[name][slices(box, whole(named[name].shape))])
        assert all((name, box) in parts for name, box in layout.held(rank) if name in (*QKV, *GATE_UP))
        qkv = split_fused(fused, layout, rank, QKV)
        assert all(view.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr() for view in qkv.values())


def test_a_fused_parameter_of_another_size_is_refused() -> None:
    layout = engine(specs(), tp=1, kv_heads=2)
    with pytest.raises(WeightSyncError, match="3 rows"):
        split_fused(torch.zeros(3, 8), layout, 0, QKV)


def test_megatron_numbers_tensor_parallel_neighbours_first_and_stages_last() -> None:
    layout = megatron(specs(layers=4), kv_heads=2, tp=2, dp=2, pp=2)
    assert layout.ranks == tuple(range(8))
    assert rows(layout, GATE_UP[0]) == [(0, 6), (6, 12), (0, 6), (6, 12), None, None, None, None]
    last = GATE_UP[0].replace(".0.", ".3.")
    assert rows(layout, last) == [None, None, None, None, (0, 6), (6, 12), (0, 6), (6, 12)]
    assert rows(layout, "model.embed_tokens.weight")[3:5] == [(5, 10), None]
    assert rows(layout, "lm_head.weight")[3:5] == [None, (0, 5)]
    assert rows(layout, "model.norm.weight")[3:5] == [None, (0, 8)]


def test_megatrons_virtual_stages_take_turns() -> None:
    layout = megatron(specs(layers=8), kv_heads=2, pp=2, virtual_stages=2)
    stage = [boxes(layout, f"model.layers.{number}.input_layernorm.weight") for number in range(8)]
    assert [0 if held[0] else 1 for held in stage] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_tied_embedding_is_on_megatrons_first_and_last_stage() -> None:
    layout = megatron(specs(layers=3, tied=True), kv_heads=2, pp=3)
    assert rows(layout, "model.embed_tokens.weight") == [(0, 10), None, (0, 10)]


@pytest.mark.thinned("ep", 2)
@pytest.mark.filterwarnings("ignore")  # of Megatron's own imports
@pytest.mark.parametrize(("tp", "dp", "pp"), [(2, 2, 2), (4, 1, 1), (1, 4, 2), (2, 4, 1)])
@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_ranks_are_numbered_as_by_megatron(tp: int, dp: int, pp: int, ep: int, expert_tp: int) -> None:
    reason = "install Megatron-Core with pip install 'rl-async[megatron]'"
    generator = pytest.importorskip("megatron.core.parallel_state", reason=reason).RankGenerator
    order, world = {"cp": 1, "order": "tp-cp-ep-dp-pp"}, tp * dp * pp
    dense = generator(tp=tp, ep=1, dp=dp, pp=pp, **order)
    sparse = generator(tp=expert_tp, ep=ep, dp=tp * dp // (ep * expert_tp), pp=pp, **order)
    layout = megatron(
        specs(experts=4, heads=8, kv_heads=4), kv_heads=4, tp=tp, dp=dp, pp=pp, ep=ep, expert_tp=expert_tp
    )

    def place(groups: list[list[int]]) -> dict[int, int]:
        return {rank: place for group in groups for place, rank in enumerate(group)}

    tensor, stage = place(dense.get_ranks("tp")), place(dense.get_ranks("pp"))
    expert, inner = place(sparse.get_ranks("ep")), place(sparse.get_ranks("tp"))
    for layer in range(2):
        here = [rank for rank in range(world) if stage[rank] == layer * pp // 2]
        found = boxes(layout, f"model.layers.{layer}.self_attn.o_proj.weight")
        step = 16 // tp
        assert {r: b for r, b in found.items() if b} == {
            r: [((0, 8), (tensor[r] * step, (tensor[r] + 1) * step))] for r in here
        }
        found = boxes(layout, f"model.layers.{layer}.mlp.experts.3.up_proj.weight")
        step = 12 // expert_tp
        assert {r: b for r, b in found.items() if b} == {
            r: [((inner[r] * step, (inner[r] + 1) * step), (0, 8))] for r in here if expert[r] == ep - 1
        }


def expert_ranks(layout: Layout, experts: int) -> list[list[int]]:
    names = [f"{LAYER}mlp.experts.{number}.down_proj.weight" for number in range(experts)]
    return [[rank for rank, held in boxes(layout, name).items() if held] for name in names]


def test_megatrons_experts_are_dealt_out_within_a_stage() -> None:
    named = specs(experts=4)
    assert expert_ranks(megatron(named, kv_heads=2, dp=4, ep=2), 4) == [[0, 2], [0, 2], [1, 3], [1, 3]]
    both = megatron(named, kv_heads=2, tp=2, dp=2, ep=2, expert_tp=2)
    assert expert_ranks(both, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert boxes(both, f"{LAYER}mlp.experts.3.down_proj.weight")[3] == [((0, 8), (6, 12))]


def test_an_engine_repeats_key_heads_for_neighbours() -> None:
    named = specs(heads=8, kv_heads=2, bias=True)
    wide = engine(named, tp=4, kv_heads=2)
    assert rows(wide, QKV[0]) == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert rows(wide, QKV[1]) == rows(wide, QKV[2]) == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert rows(wide, QKV[1].replace("weight", "bias")) == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert rows(engine(named, tp=2, kv_heads=2), QKV[1]) == [(0, 2), (2, 4)]
    assert fused_parts(wide, 3, QKV) == [(QKV[0], ((12, 16), (0, 8))), *((name, ((2, 4), (0, 8))) for name in QKV[1:])]


def test_an_engine_cuts_inputs_of_the_second_projections_and_repeats_norms() -> None:
    layout = engine(specs(qk_norm=True), tp=2, kv_heads=2)
    assert boxes(layout, f"{LAYER}self_attn.o_proj.weight")[1] == [((0, 8), (4, 8))]
    assert boxes(layout, f"{LAYER}mlp.down_proj.weight")[1] == [((0, 8), (6, 12))]
    assert rows(layout, GATE_UP[1]) == [(0, 6), (6, 12)]
    for name in ("input_layernorm", "self_attn.q_norm"):
        assert len(set(rows(layout, f"{LAYER}{name}.weight"))) == 1


def test_an_engine_pads_the_vocabulary_to_a_multiple_of_64() -> None:
    assert rows(engine(specs(vocab=130), tp=2, kv_heads=2), "lm_head.weight") == [(0, 96), (96, 130)]
    assert rows(engine(specs(vocab=40), tp=2, kv_heads=2), "lm_head.weight") == [(0, 32), (32, 40)]
    assert rows(engine(specs(vocab=10), tp=2, kv_heads=2), "lm_head.weight") == [(0, 10), None]


def test_an_engine_deals_experts_out_the_first_ranks_taking_one_more() -> None:
    named = specs(experts=6, heads=8, kv_heads=4)
    assert expert_ranks(engine(named, tp=4, ep=4, kv_heads=4), 6) == [[0], [0], [1], [1], [2], [3]]
    halves = engine(named, tp=4, ep=2, kv_heads=4)
    assert expert_ranks(halves, 6) == [[0, 1]] * 3 + [[2, 3]] * 3
    assert boxes(halves, f"{LAYER}mlp.experts.5.up_proj.weight")[3] == [((6, 12), (0, 8))]
    assert boxes(engine(named, tp=2, kv_heads=4), f"{LAYER}mlp.experts.5.up_proj.weight")[1] == [((6, 12), (0, 8))]


def test_experts_in_one_tensor_are_cut_in_gate_and_up() -> None:
    layout = engine(specs(experts=4, stacked=True, heads=8, kv_heads=4), tp=4, ep=2, kv_heads=4)
    gate_up, down = f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.experts.down_proj"
    assert boxes(layout, gate_up)[3] == [((2, 4), (6, 12), (0, 8)), ((2, 4), (18, 24), (0, 8))]
    assert boxes(layout, down)[3] == [((2, 4), (0, 8), (6, 12))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 3, "kv_heads": 2}, r"kv_heads.*3|3 ranks"),
        ({"tp": 4, "ep": 3, "kv_heads": 2}, r"ep.* 3 .*tp.* 4"),
        ({"tp": 2, "kv_heads": 3}, r"kv_heads.* 3 .*model.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_an_engine_of_sizes_that_do_not_divide_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        engine(specs(), **arguments)


def test_megatron_of_sizes_that_do_not_divide_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r" 2 .* 4 ranks"):
        megatron(specs(), kv_heads=2, tp=4)
    with pytest.raises(WeightSyncError, match=r"virtual_stages.* 3 .*layers.* 2"):
        megatron(specs(), kv_heads=2, pp=3)
    with pytest.raises(WeightSyncError, match=r"ep.* 2 .*experts.* 3"):
        megatron(specs(experts=3), kv_heads=2, dp=2, ep=2)


def test_a_name_without_a_rule_is_refused() -> None:
    named = specs() | {"model.layers.0.mlp.shared_expert_gate.weight": TensorSpec((1, 8))}
    with pytest.raises(WeightSyncError, match=r"shared_expert_gate\.weight.*KINDS"):
        engine(named, tp=2, kv_heads=2)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard(0, ((0, 5), (0, 2)))], r"rank 0 .*\(4, 2\)"),
        ([Shard(0, ((0, 4),))], r"rank 0 .*\(4, 2\)"),
        ([Shard(1, ((0, 3), (0, 2))), Shard(1, ((2, 4), (1, 2)))], "rank 1 .* t "),
    ],
)
def test_impossible_layouts_are_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        Layout({"t": TensorSpec((4, 2))}, {"t": tuple(shards)})


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="int4"):
        fsdp2({"t": TensorSpec((4, 2), "int4")}, 1).nbytes("t", whole((4, 2)))
