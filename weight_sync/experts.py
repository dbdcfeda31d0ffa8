"""The names under which experts travel and are saved: a tensor per expert and projection, as in published checkpoints.

Transformers 5 holds all experts of a layer in two tensors, ``experts.gate_up_proj`` [experts, gate and up, hidden] and
``experts.down_proj`` [experts, hidden, inner]. Published models of Qwen2-MoE, Qwen3-MoE and DeepSeek-V3 have
``experts.3.gate_proj.weight`` and so on, and so do Megatron's mapping, vLLM and SGLang. Mixtral's have names of their
own, which only its files get: vLLM's Mixtral takes the others too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from rl_async.weight_sync.layout import Box, Layout, Shard, TensorSpec

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


def single(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by name, stacked ones as views of each expert's."""
    for name, tensor in tensors:
        parts = expert_parts(name, tensor.shape)
        if not parts:
            yield name, tensor
        for part in parts:
            yield part.name, tensor[part.expert, part.rows.start : part.rows.stop]


def published(kind: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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


def single_shards(layout: Layout, stacked: Mapping[tuple[str, Box], Tensor]) -> dict[tuple[str, Box], Tensor]:
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
