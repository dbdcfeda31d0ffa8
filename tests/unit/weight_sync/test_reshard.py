"""Reshards between any two layouts: plans, their execution, and gathering on rank 0."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.tensor import Shard as Dealt
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.errors import RanksLost, WeightSyncError
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.layout import (
    Box,
    Layout,
    Shard,
    TensorSpec,
    engine,
    expert_parts,
    fsdp2,
    fused_parts,
    joined,
    megatron,
    sharded_dimension,
    shards_of,
    single,
    single_layout,
    single_shards,
    single_specs,
    slices,
    whole,
    without,
)
from rl_async.weight_sync.reshard import (
    Gathering,
    ReshardPlan,
    ShardedWeights,
    messages_of,
    one_box_each,
    plan,
    reshard,
    split_fused,
)
from tests.support.resharding import SharedMemoryWire, figures
from tests.support.seed import examples
from tests.support.weights import make_buckets
from tests.unit.weight_sync.fleet_engines import specs

DTYPES = st.sampled_from(["float32", "bfloat16", "uint8"])


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, TensorSpec]:
    """A few tensors of any shape."""
    shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
    return {f"t{i}": TensorSpec(tuple(draw(shapes)), draw(DTYPES)) for i in range(draw(st.integers(1, 4)))}


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor in disjoint boxes, by cuts at random."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        start, stop = box[dimension]
        middle = draw(st.integers(start, stop))
        low = (*box[:dimension], (start, middle), *box[dimension + 1 :])
        boxes += [part for part in (low, *without(box, low)) if all(a < b for a, b in part)]
    return boxes


@st.composite
def any_layout(draw: st.DrawFn, specs_: dict[str, TensorSpec], *, complete: bool) -> Layout:
    """FSDP2, or boxes at random on random ranks; with ``complete`` somebody has everything."""
    if draw(st.booleans()):
        return fsdp2(specs_, draw(st.integers(1, 5)), draw(st.integers(1, 2))).placed(draw(st.permutations(range(12))))
    shards: dict[str, tuple[Shard, ...]] = {}
    for name, spec in specs_.items():
        held = []
        for rank in draw(st.lists(st.integers(0, 5), unique=True, max_size=4)):  # each has some boxes of its own cut
            held += [(rank, box) for box in draw(boxes_of(spec.shape)) if draw(st.booleans())]
        if complete:
            held += [(6 + draw(st.integers(0, 2)), box) for box in draw(boxes_of(spec.shape))]
        shards[name] = shards_of(held)
    return Layout(specs_, shards)


@st.composite
def model_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A trainer's layout of a model and an engine's or two, apart or on the same ranks."""
    tp, kv_heads, experts = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([0, 4])),
    )
    stacked = bool(experts) and draw(st.booleans())
    named = specs(
        heads=8,
        kv_heads=kv_heads,
        experts=experts,
        stacked=stacked,
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        dtype=draw(DTYPES),
    )
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if tp % ep == 0]))
    target = engine(named, tp=tp, ep=ep, kv_heads=kv_heads, vocab_multiple=draw(st.sampled_from([4, 64])))
    if draw(st.booleans()):
        source = fsdp2(named, draw(st.integers(1, 6)), draw(st.integers(1, 2)))
    else:
        dp, expert_tp = draw(st.sampled_from([1, 2])), 1
        source_tp = draw(st.sampled_from([size for size in (1, 2, 4) if kv_heads % size == 0]))
        if source_tp == 2 and draw(st.booleans()):
            expert_tp = 2
        ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if source_tp * dp % (ep * expert_tp) == 0]))
        source = megatron(
            named, kv_heads=kv_heads, tp=source_tp, pp=draw(st.sampled_from([1, 2])), ep=ep, dp=dp, expert_tp=expert_tp
        )
    target = target.placed(range(draw(st.sampled_from([0, 1, 30])), 100))
    if draw(st.booleans()):
        target = joined([target, target.placed(range(50, 200))])
    return source, target


def filled(layout: Layout) -> dict[str, np.ndarray]:
    """Whole tensors in which no two elements are equal."""
    return {name: np.arange(np.prod(spec.shape)).reshape(spec.shape) for name, spec in layout.tensors.items()}


def part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[slices(box, whole(array.shape))]


def check(source: Layout, target: Layout, bucket_bytes: int) -> ReshardPlan:
    """All that a plan has to be, against arrays instead of boxes."""
    made = plan(source, target, bucket_bytes)
    weights = filled(source)
    held = {(r, n, b): part(weights[n], b) for r in source.ranks for n, b in source.held(r)}
    got = {(r, n, b): np.full([e - s for s, e in b], -1) for r in target.ranks for n, b in target.held(r)}
    times = {key: np.zeros(array.shape, int) for key, array in got.items()}
    travelling = [move for exchange in made.exchanges for message in exchange.messages.values() for move in message]
    for move in (*made.local, *travelling):
        end = (move.target.rank, move.tensor, move.target.box)
        into = slices(move.box, move.target.box)
        got[end][into] = held[move.source.rank, move.tensor, move.source.box][slices(move.box, move.source.box)]
        times[end][into] += 1
        assert move.nbytes == got[end][into].size * source.tensors[move.tensor].itemsize > 0
    for (rank, name, box), array in got.items():
        assert (times[rank, name, box] == 1).all(), "each element comes exactly once"
        assert (array == part(weights[name], box)).all(), "gather, then slice"
    check_figures(made, held, got)
    for exchange in made.exchanges:
        for rank in {rank for ends in exchange.messages for rank in ends}:
            messages = messages_of(exchange, rank)
            assert messages.outgoing_bytes + messages.incoming_bytes <= figures(made).peak_extra <= bucket_bytes
            ends = [0, *(span.start + span.nbytes for span in messages.outgoing)]
            assert all(end <= span.start for end, span in zip(ends, messages.outgoing, strict=False))
    return made


def check_figures(made: ReshardPlan, held: dict, got: dict) -> None:
    """Bytes counted element by element: what a rank wants, and what of that it holds."""
    minimal = local = gather = 0
    for rank in made.target.ranks:
        for name, spec in made.target.tensors.items():
            has, wants = np.zeros(spec.shape, bool), np.zeros(spec.shape, bool)
            for marks, holding in ((has, held), (wants, got)):
                for _, _, box in (key for key in holding if key[:2] == (rank, name)):
                    part(marks, box)[...] = True
            minimal += int((wants & ~has).sum()) * spec.itemsize
            local += int((wants & has).sum()) * spec.itemsize
            gather += int((~has).sum()) * spec.itemsize
    cost = figures(made)
    assert (cost.moved, cost.minimal, cost.local) == (minimal, minimal, local)
    assert cost.full_gather == gather >= cost.moved
    sent = Counter(dict.fromkeys(made.source.ranks, 0))
    for exchange in made.exchanges:
        for source, target in exchange.messages:
            assert source != target
            sent[source] += exchange.nbytes(source, target)
    assert sum(sent.values()) == cost.moved
    assert max(sent.values()) == cost.sent_by_busiest


@settings(max_examples=examples(200))
@given(st.data(), st.integers(64, 300))
def test_any_layout_from_any_other(data: st.DataObject, bucket_bytes: int) -> None:
    named = data.draw(tensors())
    source = data.draw(any_layout(named, complete=True))
    check(source, data.draw(any_layout(named, complete=False)), bucket_bytes)


@settings(max_examples=examples(60))
@given(model_layouts(), st.sampled_from([64, 1000, 1 << 20]))
def test_a_trainer_to_engines(layouts: tuple[Layout, Layout], bucket_bytes: int) -> None:
    check(*layouts, bucket_bytes)


def test_a_plan_is_the_same_on_every_rank() -> None:
    named = specs(experts=4)
    source, target = fsdp2(named, 3, 2), engine(named, tp=2, kv_heads=2)
    assert plan(source, target, 200).exchanges == plan(source, target, 200).exchanges


def test_replicas_share_the_sending_and_buckets_are_full() -> None:
    named = {f"t{i}": TensorSpec((64, 4), "float32") for i in range(8)}  # 8 KiB
    source, target = fsdp2(named, 1, 4), fsdp2(named, 1, 2).placed([8, 9])
    made = check(source, target, 2048)
    assert figures(made).sent_by_busiest == 2 * 8192 // 4
    assert len(made.exchanges) == 8192 // 2048, "both targets receive as much as they may in each bucket"


def test_what_stays_on_its_rank_is_not_sent() -> None:
    named = specs()
    layout = engine(named, tp=2, kv_heads=2)
    made = check(layout, layout, 64)
    assert not made.exchanges
    assert figures(made).minimal == 0 < figures(made).local


def test_what_no_source_holds_is_refused() -> None:
    named = {"t": TensorSpec((4, 2), "float32")}
    half = Layout(named, {"t": (Shard(0, ((0, 2), (0, 2))),)})
    with pytest.raises(WeightSyncError, match=r"t: .*\(\(2, 4\), \(0, 2\)\).* rank 1 "):
        plan(half, fsdp2(named, 1).placed([1]), 64)


def test_other_tensors_are_refused() -> None:
    wide, narrow = ({"t": TensorSpec((4, 2), dtype)} for dtype in ("float32", "bfloat16"))
    with pytest.raises(WeightSyncError, match=r"t: .*bfloat16.*float32"):
        plan(fsdp2(wide, 2), fsdp2(narrow, 1), 64)
    with pytest.raises(ValueError, match=r"63\b.*64"):
        plan(fsdp2(wide, 2), fsdp2(wide, 1), 63)


NAMED = {"t": TensorSpec((4, 2), "bfloat16")}
WHOLE: Box = ((0, 4), (0, 2))


def held(tensor: Tensor, box: Box = WHOLE) -> dict[tuple[str, Box], Tensor]:
    return {("t", box): tensor}


def test_what_a_rank_has_already_is_copied_and_converted() -> None:
    layout = fsdp2(NAMED, 1)
    source, target = torch.randn(4, 2), torch.zeros(4, 2, dtype=torch.bfloat16)
    done = reshard(plan(layout, layout, 64), 0, held(source), held(target), SharedMemoryWire(HashStore(), 0), 5)
    assert torch.equal(target, source.bfloat16())
    assert done == (0, 0, 16, 0)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ({}, held(torch.zeros(4, 2)), r"source of rank 0.* t\b"),
        (held(torch.zeros(4, 2)), held(torch.zeros(2, 4)), r"target of rank 0.*\(2, 4\)"),
        (held(torch.zeros(4, 2), ((0, 4), (0, 1))), held(torch.zeros(4, 2)), "source of rank 0"),
    ],
)
def test_a_holding_that_is_not_the_layouts_is_refused(
    source: dict[tuple[str, Box], Tensor], target: dict[tuple[str, Box], Tensor], message: str
) -> None:
    layout = fsdp2(NAMED, 1)
    with pytest.raises(WeightSyncError, match=message):
        reshard(plan(layout, layout, 64), 0, source, target, SharedMemoryWire(HashStore(), 0), 5)


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    made = plan(fsdp2(NAMED, 1).placed([3]), fsdp2(NAMED, 1), 64)
    with pytest.raises(WeightSyncError, match="rank 0 lost rank 3"):
        reshard(made, 0, {}, held(torch.zeros(4, 2, dtype=torch.bfloat16)), SharedMemoryWire(HashStore(), 0), 0.2)


SPECS = {"a": TensorSpec((5, 3)), "b": TensorSpec((4,)), "c": TensorSpec((7, 2, 3))}


def same(some: list[Bucket], others: list[Bucket]) -> bool:
    return [bucket.info for bucket in some] == [bucket.info for bucket in others]


def gathering(rank: int = 0) -> Gathering:
    return Gathering(SharedMemoryWire(HashStore(), rank), rank, 64, 0.2)


def parts(layout: Layout, scale: float) -> ShardedWeights:
    tensors = {
        name: torch.arange(torch.Size(spec.shape).numel()).view(spec.shape) * scale for name, spec in SPECS.items()
    }
    return ShardedWeights(layout, one_box_each(layout, 0, tensors))


def test_one_rank_fills_its_buckets_with_what_it_holds_now() -> None:
    layout, gather = fsdp2(SPECS, 1), gathering()
    for scale in (1.0, 2.0):  # checksums tell the two apart; the plan is the same
        held = parts(layout, scale)
        whole = [(name, held.held[name, box].bfloat16()) for name, box in layout.held(0)]
        assert same(gather.buckets(held), make_buckets(whole, 64))


def test_another_layout_gets_another_plan() -> None:
    gather, other = gathering(), fsdp2({"a": TensorSpec((2, 3))}, 1)
    gather.buckets(parts(fsdp2(SPECS, 1), 1.0))
    ((key, tensor),) = held = [(("a", box), torch.randn(2, 3)) for _, box in other.held(0)]
    assert same(gather.buckets(ShardedWeights(other, dict(held))), make_buckets([(key[0], tensor.bfloat16())], 64))


def test_a_rank_that_never_comes_is_named() -> None:
    layout = fsdp2({"a": TensorSpec((2, 8))}, 2)
    held = ShardedWeights(layout, {("a", box): torch.zeros(1, 8) for _, box in layout.held(0)})
    with pytest.raises(RanksLost, match="rank 0 lost rank 1"):
        gathering().buckets(held)


# Layouts against what they describe: torch's DTensor, Megatron's fused parameters, vLLM's rules.


LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{which}_proj.weight" for which in "qkv"]
GATE_UP = [f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"]


def boxes(layout: Layout, name: str) -> dict[int, list[Box]]:
    """Return the parts by rank."""
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


# Experts one by one: under the names of published checkpoints, and on the ranks that hold them.


SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_names_and_weights_are_those_of_a_published_checkpoint(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    found = dict(single(model.named_parameters()))
    assert found.keys() == published.keys()
    assert all(found[name].equal(tensor) for name, tensor in published.items())
    specs = single_specs({n: TensorSpec(tuple(p.shape), "float32") for n, p in model.named_parameters()})
    assert {name: spec.shape for name, spec in specs.items()} == {n: tuple(t.shape) for n, t in published.items()}


def test_views_write_through_to_the_stacked_tensor() -> None:
    stacked = torch.zeros(3, 4, 2)
    for number, (_, part) in enumerate(single([("m.experts.gate_up_proj", stacked)])):
        part.fill_(number)
    assert stacked[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]


def test_other_tensors_keep_their_names() -> None:
    assert not expert_parts("m.mlp.gate_up_proj.weight", (8, 4))
    assert not expert_parts("m.experts.gate_up_proj", (8, 4))
    assert not expert_parts("m.shared_expert.down_proj", (2, 8, 4))


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 1), (7, 1)])
def test_ranks_of_fsdp2_hold_experts_or_rows_of_them(ranks: int, replicas: int) -> None:
    tensors = {
        "m.experts.gate_up_proj": torch.arange(5 * 4 * 3.0).view(5, 4, 3),
        "m.experts.down_proj": torch.arange(100, 100 + 5 * 3 * 2.0).view(5, 3, 2),
        "m.gate.weight": torch.arange(10.0).view(5, 2),
    }
    stacked = fsdp2({name: TensorSpec(tuple(t.shape), "float32") for name, t in tensors.items()}, ranks, replicas)
    layout, wanted = single_layout(stacked), dict(single(tensors.items()))
    assert layout.tensors.keys() == wanted.keys()
    held: dict[str, int] = dict.fromkeys(wanted, 0)
    for rank in range(ranks * replicas):
        dealt = {name: t.chunk(ranks, sharded_dimension(t.shape, ranks)) for name, t in tensors.items()}
        chunks = {name: parts[rank % ranks] for name, parts in dealt.items() if rank % ranks < len(parts)}
        found = single_shards(stacked, one_box_each(stacked, rank, chunks))
        assert set(found) == set(layout.held(rank))
        for (name, box), part in found.items():
            rows, columns = (slice(*side) for side in box)
            assert part.equal(wanted[name][rows, columns])
            held[name] += part.numel()
    assert held == {name: replicas * t.numel() for name, t in wanted.items()}
