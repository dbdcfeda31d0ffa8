"""Maps Hugging Face weights to Megatron-Core's, as pure functions of names and ranges. Imports nothing of Megatron.

A ``Rule`` says which Hugging Face tensors make up one parameter of a Megatron layer; its form says how the
parameter's shards on tensor-parallel ranks are cut out of them. The mapping only copies, so a round trip is exact,
and the same rules apply to an optimizer's moments.

    qkv       for each group of queries that share a key: its queries, key and value; ranks divide the groups
    gate_up   a rank's part of the gate, then its part of the up projection
    rows      cut along the input (dimension 1)
    vocab     cut along the output (dimension 0), padded with zeros to a divisible size
    copy      the whole parameter on every rank

Megatron-Core's distributed optimizer gives each data-parallel rank a range of the numbers of a parameter, regardless
of where that cuts rows and fused tensors. The numbers of one tensor come in the same order in the parameter as in the
tensor, so the range has one range of each tensor's: at most three boxes, the end of a row, whole rows, and the
beginning of a row.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from rl_async.trainer.model import VALUE_HEAD, Head

Form = Literal["copy", "rows", "vocab", "qkv", "gate_up"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a model that the mapping depends on.

    Attributes:
        groups: Number of groups of queries that share a key.
        tied: Whether embedding and output are one matrix.
        experts: Number of experts per layer, 0 in a dense model.
    """

    layers: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    experts: int = 0
    head: Head = "policy"

    @property
    def has_logits(self) -> bool:
        return self.head != "value"

    @property
    def has_values(self) -> bool:
        return self.head != "policy"

    @property
    def has_output(self) -> bool:
        """Whether logits have a matrix of their own."""
        return self.has_logits and not self.tied


def config_key(head: Head) -> str:
    """Return the config's key of the path of a model with this head."""
    return "critic.path" if head == "value" else "model.path"


EXPERTS = "mlp.experts"


class Rule(NamedTuple):
    """One Megatron parameter and the tensors that make it up. Names are relative to a layer, or to the model."""

    megatron: str
    hugging_face: tuple[str, ...]
    form: Form

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to an expert, which is whole on its rank."""
        return self.megatron.startswith(f"{EXPERTS}.")


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "copy")
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab")
# The last stage's own copy of the embedding.
TIED_OUTPUT = Rule("output_layer.weight", EMBEDDING.hugging_face, "vocab")
VALUES = tuple(
    Rule(f"output_layer.{VALUE_HEAD}{name}", (f"{VALUE_HEAD}{name}",), "copy") for name in ("weight", "bias")
)


def layer_rules(shape: Shape) -> list[Rule]:
    """Return the rules of a layer, without those of its experts."""
    attention = "self_attention"
    rules = [
        Rule("input_layernorm.weight", ("input_layernorm.weight",), "copy"),
        Rule(f"{attention}.linear_qkv.weight", _qkv("weight"), "qkv"),
        Rule(f"{attention}.linear_proj.weight", ("self_attn.o_proj.weight",), "rows"),
        Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "copy"),
    ]
    if shape.qkv_bias:
        rules.append(Rule(f"{attention}.linear_qkv.bias", _qkv("bias"), "qkv"))
    if shape.qk_norm:
        rules.append(Rule(f"{attention}.q_layernorm.weight", ("self_attn.q_norm.weight",), "copy"))
        rules.append(Rule(f"{attention}.k_layernorm.weight", ("self_attn.k_norm.weight",), "copy"))
    if shape.experts:
        return [*rules, Rule("mlp.router.weight", ("mlp.gate.weight",), "copy")]
    return rules + _mlp("mlp", "mlp")


def expert_rules(local: int, number: int) -> list[Rule]:
    """Return the rules of a rank's ``local``-th expert, which has ``number`` among all experts of the layer."""
    return _mlp(f"{EXPERTS}.local_experts.{local}", f"{EXPERTS}.{number}")


def _mlp(megatron: str, hugging_face: str) -> list[Rule]:
    return [
        Rule(
            f"{megatron}.linear_fc1.weight",
            (f"{hugging_face}.gate_proj.weight", f"{hugging_face}.up_proj.weight"),
            "gate_up",
        ),
        Rule(f"{megatron}.linear_fc2.weight", (f"{hugging_face}.down_proj.weight",), "rows"),
    ]


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{which}_proj.{kind}" for which in "qkv")


def padded_vocab(vocab: int, ranks: int) -> int:
    """Return the vocabulary's size, rounded up to a multiple of ``ranks``."""
    return -(-vocab // ranks) * ranks


# The place of a box in a whole tensor.
Place = tuple[slice, ...]
# Fills a tensor with the box at a place of the tensor with this name and whole shape.
Fill = Callable[[Tensor, str, Place, tuple[int, ...]], None]


class Shard(NamedTuple):
    """A tensor-parallel rank's shard of a parameter: the tensors that make it up, and its lengths."""

    rule: Rule
    names: Sequence[str]
    lengths: Sequence[int]
    rank: int
    ranks: int


class RangePart(NamedTuple):
    """The numbers of one tensor in a range of a shard's numbers.

    Attributes:
        size: Shape of the whole tensor.
        pieces: Slices of the range, in the order of the tensor's numbers; several if other tensors' lie between them.
        boxes: Places in the whole tensor, in the same order.
    """

    name: str
    size: tuple[int, ...]
    pieces: list[slice]
    boxes: list[Place]

    def numbers(self, flat: Tensor) -> Tensor:
        """Return the numbers in ``flat``, the range: a view, or a copy if there are several pieces."""
        return flat[self.pieces[0]] if len(self.pieces) == 1 else self.copy_to(flat.device, flat)

    def copy_to(self, device: torch.device, flat: Tensor) -> Tensor:
        """Return a copy of the numbers in ``flat``, the range, on ``device``."""
        lengths = [_length(piece) for piece in self.pieces]
        whole = torch.empty(sum(lengths), dtype=flat.dtype, device=device)
        for place, piece in zip(whole.split(lengths), self.pieces, strict=True):
            place.copy_(flat[piece])
        return whole

    def split(self, numbers: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """Yield the boxes with their part of ``numbers``, as views of a box's shape."""
        lengths = [[_length(at) for at in box] for box in self.boxes]
        for box, size, part in zip(self.boxes, lengths, numbers.split(list(map(math.prod, lengths))), strict=True):
            yield box, part.view(size)

    def put(self, flat: Tensor, numbers: Tensor) -> None:
        """Write back the changed result of ``numbers``, unless it is a view."""
        if len(self.pieces) > 1:
            for piece, part in zip(self.pieces, numbers.split([_length(piece) for piece in self.pieces]), strict=True):
                flat[piece].copy_(part)


def parts_of(shard: Shard, shape: Shape, numbers: range) -> list[RangePart]:
    """List the parts of tensors in ``numbers`` of the flattened ``shard``; the vocabulary's padding is left out."""
    columns = math.prod(shard.lengths[1:])
    # The numbers above the block, of each tensor and of the shard.
    before, at = [0] * len(shard.names), 0
    first: dict[int, int] = {}
    pieces: dict[int, list[slice]] = defaultdict(list)
    for tensor, rows in _blocks(shard, shape):
        begin, end = max(at, numbers.start), min(at + rows * columns, numbers.stop)
        if begin < end:
            first.setdefault(tensor, before[tensor] + begin - at)
            pieces[tensor].append(slice(begin - numbers.start, end - numbers.start))
        before[tensor] += rows * columns
        at += rows * columns
    found = []
    for tensor, slices in pieces.items():
        held = (before[tensor] // columns, *shard.lengths[1:])
        size, offset = _whole(shard, shape, held)
        own = range(first[tensor], first[tensor] + sum(map(_length, slices)))
        boxes = [
            tuple(slice(by + at.start, by + at.stop) for by, at in zip(offset, box, strict=True))
            for box in _boxes(own, held)
        ]
        found.append(RangePart(shard.names[tensor], size, slices, boxes))
    return found


def fill(shard: Shard, shape: Shape, start: int, flat: Tensor, source: Fill) -> None:
    """Fill ``flat`` [numbers], from number ``start`` on of the flattened ``shard``, from ``source``, box by box.

    The vocabulary's padding becomes zero.
    """
    flat.zero_()
    for part in parts_of(shard, shape, range(start, start + flat.numel())):
        numbers = part.numbers(flat)
        for box, target in part.split(numbers):
            source(target, part.name, box, part.size)
        part.put(flat, numbers)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _blocks(shard: Shard, shape: Shape) -> list[tuple[int, int]]:
    """List the blocks of a shard from top to bottom: the place of a tensor in the rule, and a number of rows."""
    rows = shard.lengths[0]
    if shard.rule.form == "qkv":
        group = [(0, shape.heads // shape.groups * shape.head_dim), (1, shape.head_dim), (2, shape.head_dim)]
        return group * (rows // sum(count for _, count in group))
    if shard.rule.form == "gate_up":
        return [(0, rows // 2), (1, rows // 2)]
    if shard.rule.form == "vocab":
        return [(0, max(0, min(rows, shape.vocab - shard.rank * rows)))]
    return [(0, rows)]


def _whole(shard: Shard, shape: Shape, held: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a whole tensor, and where in it the shard's part of the shape ``held`` begins."""
    form, size, offset = shard.rule.form, list(held), [0] * len(held)
    if form == "vocab":
        size[0], offset[0] = shape.vocab, shard.rank * shard.lengths[0]
    elif form != "copy":
        cut = 1 if form == "rows" else 0
        size[cut], offset[cut] = held[cut] * shard.ranks, held[cut] * shard.rank
    return tuple(size), tuple(offset)


def _boxes(numbers: range, size: Sequence[int]) -> list[Place]:
    """Return the boxes, in order, that a non-empty range of the numbers of a vector or matrix consists of."""
    if len(size) == 1:
        return [(slice(numbers.start, numbers.stop),)]
    columns = size[1]
    row, column = divmod(numbers.start, columns)
    last, end = divmod(numbers.stop, columns)
    if row == last:
        return [(slice(row, row + 1), slice(column, end))]
    boxes: list[Place] = []
    if column:
        boxes.append((slice(row, row + 1), slice(column, columns)))
        row += 1
    if row < last:
        boxes.append((slice(row, last), slice(0, columns)))
    if end:
        boxes.append((slice(last, last + 1), slice(0, end)))
    return boxes
