"""Reshards between any two layouts: plans, their execution, and gathering on rank 0."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from rl_async.errors import RanksLost, WeightSyncError
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.layout import (
    Box,
    Layout,
    Shard,
    TensorSpec,
    engine,
    fsdp2,
    joined,
    megatron,
    shards_of,
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
)
from tests.support.effort import examples
from tests.support.resharding import SharedMemoryWire, figures
from tests.support.weights import make_buckets
from tests.unit.weight_sync.models import specs

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
