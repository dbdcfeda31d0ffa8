"""Layouts of a model's weights: for every tensor, which rank holds which box of it. Pure.

A box is a hyper-rectangle of a whole tensor under its Hugging Face name, even if the holder names that part otherwise
or fuses it with others. A rank may hold several boxes of a tensor, and several ranks the same one (a replica). Source
and target of a transfer number their ranks in one process group, so that a rank that is in both is recognised.

``fsdp2`` cuts rows or experts. ``megatron`` and ``engine`` cut Llama, Qwen2, Qwen3 and Qwen3-MoE by tensor names, as
Megatron-Core and as vLLM do (``QKVParallelLinear``, ``MergedColumnParallelLinear``, ``RowParallelLinear``,
``VocabParallelEmbedding``, ``determine_expert_map``). Rows that pad a vocabulary are not weights, so no box holds them.
To add a model family, add its tensors' names to ``KINDS``.

Experts travel and are saved as in published checkpoints, a tensor per expert and projection. Transformers 5 holds all
experts of a layer in two tensors, ``experts.gate_up_proj`` [experts, gate and up, hidden] and
``experts.down_proj`` [experts, hidden, inner]. Published models of Qwen2-MoE, Qwen3-MoE and DeepSeek-V3 have
``experts.3.gate_proj.weight`` and so on, and so do Megatron's mapping, vLLM and SGLang. Mixtral's have names of their
own, which only its files get: vLLM's Mixtral takes the others too.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from rl_async.errors import WeightSyncError

# The launcher plans by layouts, without importing torch.
if TYPE_CHECKING:
    from torch import Tensor

# First element and end of each dimension.
Box = tuple[tuple[int, int], ...]

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class TensorSpec(NamedTuple):
    """A whole tensor. ``dtype`` is torch's name of the type that travels; the holder's may be wider."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element. Raises WeightSyncError for a type that cannot be sent."""
        if self.dtype not in ITEM_BYTES:
            raise WeightSyncError(f"weights of type {self.dtype} cannot be sent; only {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype]


class Shard(NamedTuple):
    """A box that a rank holds as one tensor of that shape."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Layout:
    """The boxes of each tensor, and the ranks that hold them; empty boxes are left out.

    A tensor's ``shards`` are in the order of a rank's memory, where that matters. Raises WeightSyncError if a shard is
    not within its tensor, or a rank holds an element twice.
    """

    tensors: Mapping[str, TensorSpec]
    shards: Mapping[str, tuple[Shard, ...]]

    def __post_init__(self) -> None:
        if self.tensors.keys() != self.shards.keys():
            raise WeightSyncError(
                f"a layout has only a shape, or only shards, of {sorted(self.tensors.keys() ^ self.shards.keys())[:3]}"
            )
        for name, shards in self.shards.items():
            _check(name, self.tensors[name], shards)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold at least one shard, in ascending order."""
        return tuple(sorted({shard.rank for shards in self.shards.values() for shard in shards}))

    def nbytes(self, name: str, box: Box) -> int:
        """Return the number of bytes of a box of the tensor ``name``."""
        return volume(box) * self.tensors[name].itemsize

    def held(self, rank: int) -> list[tuple[str, Box]]:
        """List the boxes that ``rank`` holds, with their tensors' names, in order."""
        return [(name, s.box) for name, shards in self.shards.items() for s in shards if s.rank == rank]

    def placed(self, ranks: Sequence[int]) -> "Layout":
        """Return this layout on other ranks: ``ranks[i]`` holds what rank i held."""
        moved = {
            name: tuple(Shard(ranks[shard.rank], shard.box) for shard in shards) for name, shards in self.shards.items()
        }
        return Layout(self.tensors, moved)


def joined(layouts: Sequence[Layout]) -> Layout:
    """Join layouts of the same tensors on disjoint ranks, such as those of all engines of a run, into one."""
    first = layouts[0]
    return Layout(
        first.tensors, {name: tuple(s for layout in layouts for s in layout.shards[name]) for name in first.tensors}
    )


# A stack of experts is divided by rows only into so many pieces: a publication plans each of them.
MOST_PIECES = 1 << 14


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension along which FSDP2 divides a tensor among ``ranks``.

    It is 0, unless whole experts of a stack [experts, rows, columns] would give a rank over a quarter more than its
    share, and rows divide evenly, into at most ``MOST_PIECES`` pieces of experts.
    """
    if len(shape) != 3:
        return 0
    experts, rows, _ = shape
    uneven = -(-experts // ranks) * ranks > 1.25 * experts
    return 1 if uneven and rows % ranks == 0 and experts * ranks <= MOST_PIECES else 0


# Numbers that share a scale in 8-bit moments (arXiv:2110.02861, section 2.1, and torchao's default for AdamW).
BLOCK = 256
# A parameter with fewer numbers keeps float32 moments, as in torchao and bitsandbytes.
LEAST_NUMBERS = 4096


def in_blocks(shape: Sequence[int], ranks: int, along: int) -> bool:
    """Whether ranks that divide a parameter along a dimension hold equal parts of whole blocks, for 8-bit moments."""
    return shape[along] % ranks == 0 and math.prod(shape[along:]) // ranks % BLOCK == 0


def fsdp2(tensors: Mapping[str, TensorSpec], ranks: int, replicas: int = 1) -> Layout:
    """Return the layout of our FSDP2 models, ``Shard(sharded_dimension)`` of torch's DTensor: as by ``torch.chunk``, so
    the last ranks may have none.

    With ``replicas`` (HSDP) rank ``replica * ranks + i`` holds what rank i does, as on a mesh (replicate, shard).
    """
    shards = {}
    for name, tensor in tensors.items():
        if not tensor.shape:
            raise WeightSyncError(f"{name} is a scalar, which FSDP2 does not shard")
        along = sharded_dimension(tensor.shape, ranks)
        size = tensor.shape[along]
        step = -(-size // ranks)
        parts = [range(min(i * step, size), min((i + 1) * step, size)) for i in range(ranks)]
        held = ((copy * ranks + i, part) for copy in range(replicas) for i, part in enumerate(parts))
        shards[name] = shards_of((rank, cut(tensor.shape, along, part)) for rank, part in held)
    return Layout(tensors, shards)


def shards_of(held: Iterable[tuple[int, Box]]) -> tuple[Shard, ...]:
    """Make shards of (rank, box) pairs, leaving out empty boxes."""
    return tuple(Shard(rank, box) for rank, box in held if volume(box))


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers all of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def cut(shape: Sequence[int], dimension: int, part: range) -> Box:
    """Return the box that covers ``part`` of one dimension and all of the others."""
    return tuple((part.start, part.stop) if d == dimension else (0, size) for d, size in enumerate(shape))


def volume(box: Box) -> int:
    """Return the number of elements of a box; 1 for a scalar's."""
    return math.prod(stop - start for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` minus ``hole``, which lies within it, as disjoint boxes: at most two per dimension."""
    rest, inner = [], list(box)
    for dimension, ((start, stop), (first, end)) in enumerate(zip(box, hole, strict=True)):
        for low, high in ((start, first), (end, stop)):
            if low < high:
                rest.append((*inner[:dimension], (low, high), *inner[dimension + 1 :]))
        inner[dimension] = (first, end)
    return rest


def slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of ``box`` within a tensor that holds the box ``outer``."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of a tensor that holds a box."""
    return tuple(stop - start for start, stop in box)


def _check(name: str, tensor: TensorSpec, shards: Sequence[Shard]) -> None:
    by_rank: dict[int, list[Box]] = {}
    for rank, box in shards:
        outside = len(box) != len(tensor.shape) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(box, tensor.shape, strict=False)
        )
        if outside:
            raise WeightSyncError(f"rank {rank} cannot hold {box} of {name}, whose shape is {tensor.shape}")
        by_rank.setdefault(rank, []).append(box)
    for rank, boxes in by_rank.items():
        boxes.sort()
        # Boxes are sorted by their first rows, so only the next few can overlap.
        for i, box in enumerate(boxes):
            for later in boxes[i + 1 :]:
                if box and later[0][0] >= box[0][1]:
                    break
                if common(box, later) is not None:
                    raise WeightSyncError(f"rank {rank} would hold elements of {name} twice: {box} and {later}")


# --- the layouts of engines and of Megatron-Core, by tensor names

# vLLM's DEFAULT_VOCAB_PADDING_SIZE.
VLLM_VOCAB_MULTIPLE = 64

Kind = Literal["copy", "vocab", "query", "key", "rows", "columns"]

KINDS: dict[str, Kind] = {
    "embed_tokens.weight": "vocab",
    "lm_head.weight": "vocab",
    "norm.weight": "copy",
    "input_layernorm.weight": "copy",
    "post_attention_layernorm.weight": "copy",
    "q_norm.weight": "copy",
    "k_norm.weight": "copy",
    "q_proj.weight": "query",
    "q_proj.bias": "query",
    "k_proj.weight": "key",
    "k_proj.bias": "key",
    "v_proj.weight": "key",
    "v_proj.bias": "key",
    "o_proj.weight": "columns",
    "gate_proj.weight": "rows",
    "up_proj.weight": "rows",
    "down_proj.weight": "columns",
    # The router of a mixture of experts.
    "gate.weight": "copy",
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYER = re.compile(r"\.layers\.(\d+)\.")


class Slot(NamedTuple):
    """Position ``number`` among the ``of`` ranks that divide something among themselves."""

    number: int
    of: int

    def part(self, size: int, what: str) -> range:
        """Return its equal share of ``size``. Raises WeightSyncError if ``size`` does not divide."""
        if size % self.of:
            raise WeightSyncError(f"{what}: {size} does not divide among {self.of} ranks")
        return self.uneven(size)

    def uneven(self, size: int) -> range:
        """Return its share of ``size``; the first positions take one more if ``size`` does not divide."""
        base, more = divmod(size, self.of)
        start = self.number * base + min(self.number, more)
        return range(start, start + base + (self.number < more))


class RankPosition(NamedTuple):
    """A rank's position in dense tensors, among the experts, within each expert, and among pipeline stages."""

    dense: Slot
    experts: Slot
    expert: Slot
    stage: Slot = Slot(0, 1)


def engine(
    tensors: Mapping[str, TensorSpec], *, tp: int, kv_heads: int, ep: int = 1, vocab_multiple: int = VLLM_VOCAB_MULTIPLE
) -> Layout:
    """Return the layout of an engine of ``tp`` ranks, whose ``ep`` groups divide the experts (in vLLM 1 or ``tp``).

    Kept for transfers to workers straight from the ranks that hold the weights, which every rank must be able to plan.
    With more ranks than ``kv_heads``, neighbours hold the same key and value head. Tensors are cut under their Hugging
    Face names; an engine that fuses them (``qkv_proj``, ``gate_up_proj``) holds these boxes as views of the fused one.
    Raises WeightSyncError for an unknown name and for sizes that do not divide.
    """
    _divides(tp, ep, "ep", "tp")
    inner = tp // ep
    places = [RankPosition(Slot(rank, tp), Slot(rank // inner, ep), Slot(rank % inner, inner)) for rank in range(tp)]
    model = _Model(tensors, kv_heads, vocab_multiple)

    def attention(name: str, heads: int, at: Slot) -> list[Box]:
        shape = tensors[name].shape
        if KINDS[_suffix(name)] == "key" and at.of > kv_heads:
            _divides(at.of, kv_heads, "kv_heads", "tp")
            at = Slot(at.number // (at.of // kv_heads), kv_heads)
        return [_whole_heads(shape, heads, at.part(heads, f"{name}, heads"))]

    return _layout(model, places, attention)


def megatron(
    tensors: Mapping[str, TensorSpec],
    *,
    kv_heads: int,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    expert_tp: int = 1,
    virtual_stages: int = 1,
    vocab_multiple: int = 1,
) -> Layout:
    """Return Megatron-Core's layout on ``tp * dp * pp`` ranks: tensor-parallel neighbours first, stages last.

    Within a stage, ``ep`` groups of ``expert_tp`` neighbours divide the experts. ``linear_qkv`` has the queries, the
    key and the value of one key head after another, so a rank holds one box of each per key head (in the order of
    ``fused_parts``). The last stage also holds a tied embedding. The vocabulary is padded to a multiple of
    ``vocab_multiple * tp``. Raises WeightSyncError as ``engine`` does.
    """
    per_stage = tp * dp
    _divides(per_stage, ep * expert_tp, "ep * expert_tp", "tp * dp")
    places = [
        RankPosition(
            dense=Slot(rank % tp, tp),
            experts=Slot(rank // expert_tp % ep, ep),
            expert=Slot(rank % expert_tp, expert_tp),
            stage=Slot(rank // per_stage, pp),
        )
        for rank in range(per_stage * pp)
    ]
    model = _Model(tensors, kv_heads, vocab_multiple * tp)
    _divides(model.experts, ep, "ep", "the experts")
    _divides(model.layers, pp * virtual_stages, "pp * virtual_stages", "the layers")

    def attention(name: str, heads: int, at: Slot) -> list[Box]:
        shape, per_group = tensors[name].shape, heads // kv_heads
        groups = at.part(kv_heads, f"{name}, groups of queries")
        return [_whole_heads(shape, heads, range(g * per_group, (g + 1) * per_group)) for g in groups]

    return _layout(model, places, attention, virtual_stages)


def fused_parts(layout: Layout, rank: int, names: Sequence[str]) -> list[tuple[str, Box]]:
    """List the boxes, top to bottom, of a parameter that ``rank`` fuses from ``names``.

    Examples are an engine's ``qkv_proj`` (queries, keys, values), Megatron's ``linear_qkv`` (the same once per key
    head), ``gate_up_proj`` and ``linear_fc1``.
    """
    boxes = [[shard.box for shard in layout.shards[name] if shard.rank == rank] for name in names]
    return [(name, box) for level in zip(*boxes, strict=True) for name, box in zip(names, level, strict=True)]


class _Model(NamedTuple):
    tensors: Mapping[str, TensorSpec]
    kv_heads: int
    vocab_multiple: int

    @property
    def layers(self) -> int:
        return 1 + max((int(found[1]) for found in map(LAYER.search, self.tensors) if found), default=-1)

    @property
    def experts(self) -> int:
        stacked = [tensor.shape[0] for name, tensor in self.tensors.items() if STACKED.search(name)]
        return max([0, *stacked, *(1 + int(found[1]) for found in map(EXPERT.search, self.tensors) if found)])

    def head_dim(self) -> int:
        """Return the size of a head, from the key projection and its known number of heads."""
        for name, tensor in self.tensors.items():
            if name.endswith("k_proj.weight"):
                _divides(tensor.shape[0], self.kv_heads, "kv_heads", name)
                return tensor.shape[0] // self.kv_heads
        raise WeightSyncError("no tensor is named k_proj.weight, so the layout of this model is not known")


# Returns the boxes of an attention tensor with so many heads at a position.
_Attention = Callable[[str, int, Slot], list[Box]]


def _layout(model: _Model, places: Sequence[RankPosition], attention: _Attention, virtual_stages: int = 1) -> Layout:
    experts, layers, head_dim = model.experts, model.layers, model.head_dim()
    tied = not any(name.endswith("lm_head.weight") for name in model.tensors)
    stages = places[0].stage.of

    def is_here(name: str, stage: int) -> bool:
        layer = LAYER.search(name)
        if layer:
            # Virtual stages are dealt to the pipeline's ranks in turn.
            return int(layer[1]) * stages * virtual_stages // layers % stages == stage
        is_input = name.endswith("embed_tokens.weight")
        return (is_input and stage == 0) or ((not is_input or tied) and stage == stages - 1)

    def boxes(name: str, at: RankPosition) -> Iterable[Box]:
        shape, number = model.tensors[name].shape, EXPERT.search(name)
        if not is_here(name, at.stage.number) or (number and int(number[1]) not in at.experts.uneven(experts)):
            return []
        if STACKED.search(name):
            return _stacked(name, shape, at)
        kind, slot = _kind(name), at.expert if number else at.dense
        if kind in ("query", "key"):
            return attention(name, shape[0] // head_dim, slot)
        return [_dense(kind, name, shape, slot, model.vocab_multiple)]

    return Layout(
        model.tensors,
        {
            name: shards_of((rank, box) for rank, at in enumerate(places) for box in boxes(name, at))
            for name in model.tensors
        },
    )


def _dense(kind: Kind, name: str, shape: Sequence[int], at: Slot, vocab_multiple: int) -> Box:
    if kind == "copy":
        return whole(shape)
    if kind == "vocab":
        part = at.part(-(-shape[0] // vocab_multiple) * vocab_multiple, f"{name}, padded")
        return cut(shape, 0, range(min(part.start, shape[0]), min(part.stop, shape[0])))
    dimension = 0 if kind == "rows" else 1
    return cut(shape, dimension, at.part(shape[dimension], name))


def _stacked(name: str, shape: Sequence[int], at: RankPosition) -> list[Box]:
    """Return the boxes of stacked experts: gate and up of [experts, gate and up, hidden], or of [experts, hidden,
    inner].
    """
    mine = cut(shape, 0, at.experts.uneven(shape[0]))
    if name.endswith("down_proj"):
        parts = [at.expert.part(shape[2], name)]
    else:
        gate = at.expert.part(shape[1] // 2, name)
        parts = [gate, range(gate.start + shape[1] // 2, gate.stop + shape[1] // 2)]
    cuts = [cut(shape, 2 if name.endswith("down_proj") else 1, part) for part in parts]
    return [both for both in (common(mine, box) for box in cuts) if both is not None]


def _whole_heads(shape: Sequence[int], heads: int, part: range) -> Box:
    size = shape[0] // heads
    return cut(shape, 0, range(part.start * size, part.stop * size))


def _kind(name: str) -> Kind:
    kind = KINDS.get(_suffix(name))
    if kind is None:
        raise WeightSyncError(f"{name}: there is no rule for how ranks divide this tensor; add its name to KINDS")
    return kind


def _suffix(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _divides(size: int, parts: int, what: str, of: str) -> None:
    if size % parts:
        raise WeightSyncError(f"{what}: {parts} does not divide {of}, {size}")


STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")
# For each model_type, the parts of our names that its published files replace, and their own.
NUMBERED = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "dots1": {},
    "ernie4_5_moe": {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "hunyuan_v1_moe": {},
    "lfm2_moe": NUMBERED,
    "minimax_m2": {".mlp.": ".block_sparse_moe."} | NUMBERED,
    "mixtral": {".mlp.": ".block_sparse_moe."} | NUMBERED,
    "olmoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
}
# The experts of these travel stacked, too: their engines know no others, since gate and up alternate in a matrix.
STACKED_FOR_ENGINES = ("gpt_oss",)


class ExpertPart(NamedTuple):
    """The tensor ``name`` [rows, columns] of one ``expert``: these ``rows`` of the expert's matrix in the stack."""

    name: str
    expert: int
    rows: range


def expert_parts(name: str, shape: Sequence[int]) -> list[ExpertPart]:
    """Return the tensors in a stacked one of this shape, in the order of its memory; an empty list for others."""
    found = STACKED.match(name)
    if found is None or len(shape) != 3:
        return []
    experts, rows, _ = shape
    parts = {"down_proj": range(rows)}
    if found[2] == "gate_up":
        parts = {"gate_proj": range(rows // 2), "up_proj": range(rows // 2, rows)}
    return [
        ExpertPart(f"{found[1]}.{expert}.{part}.weight", expert, of)
        for expert in range(experts)
        for part, of in parts.items()
    ]


def single(tensors: Iterable[tuple[str, "Tensor"]]) -> Iterator[tuple[str, "Tensor"]]:
    """Yield whole tensors by name, stacked ones as views of each expert's."""
    for name, tensor in tensors:
        parts = expert_parts(name, tensor.shape)
        if not parts:
            yield name, tensor
        for part in parts:
            yield part.name, tensor[part.expert, part.rows.start : part.rows.stop]


def published(kind: str, tensors: Iterable[tuple[str, "Tensor"]]) -> Iterator[tuple[str, "Tensor"]]:
    """Yield whole tensors by their names in files of models of this ``model_type``.

    Experts of other types than ``PUBLISHED`` has stay stacked, which Transformers reads too.
    """
    if kind not in PUBLISHED:
        yield from tensors
        return
    for name, tensor in single(tensors):
        for ours, theirs in PUBLISHED[kind].items():
            name = name.replace(ours, theirs)
        yield name, tensor


def single_specs(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the specs of tensors by name, of each expert apart."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        parts = expert_parts(name, spec.shape)
        if not parts:
            specs[name] = spec
        for part in parts:
            specs[part.name] = TensorSpec((len(part.rows), spec.shape[2]), spec.dtype)
    return specs


def single_layout(stacked: Layout) -> Layout:
    """Return a layout of the experts in stacked tensors, under the names of each."""
    shards: dict[str, tuple[Shard, ...]] = {}
    for name, spec in stacked.tensors.items():
        parts = expert_parts(name, spec.shape)
        if not parts:
            shards[name] = stacked.shards[name]
        for part in parts:
            boxes = ((rank, _box_of(part, box)) for rank, box in stacked.shards[name])
            shards[part.name] = tuple(Shard(rank, box) for rank, box in boxes if box is not None)
    return Layout(single_specs(stacked.tensors), shards)


def single_shards(layout: Layout, stacked: Mapping[tuple[str, Box], "Tensor"]) -> dict[tuple[str, Box], "Tensor"]:
    """Return this rank's shards of ``single_layout``, as views of those of the stacked ``layout``."""
    held: dict[tuple[str, Box], Tensor] = {}
    for (name, box), tensor in stacked.items():
        parts = expert_parts(name, layout.tensors[name].shape)
        if not parts:
            held[name, box] = tensor
        for part in parts:
            if (own := _box_of(part, box)) is not None:
                first = part.rows.start + own[0][0] - box[1][0]
                rows = slice(first, first + own[0][1] - own[0][0])
                held[part.name, own] = tensor[part.expert - box[0][0], rows]
    return held


def _box_of(part: ExpertPart, box: Box) -> Box | None:
    """Return what of an expert's tensor lies in a box of the stacked one, or None."""
    experts, rows, columns = box
    first, end = max(rows[0], part.rows.start), min(rows[1], part.rows.stop)
    if part.expert not in range(*experts) or first >= end:
        return None
    return ((first - part.rows.start, end - part.rows.start), columns)
