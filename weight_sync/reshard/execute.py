"""Carries out a plan: in each exchange a rank packs its slices, sends them, and copies what arrives into place."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, Layout, lengths, slices
from rl_async.weight_sync.reshard.model_layouts import fused_parts
from rl_async.weight_sync.reshard.plan import Message, Move, ReshardPlan, messages_of
from rl_async.weight_sync.reshard.wire import Wire

LocalShards = Mapping[tuple[str, Box], Tensor]  # a rank's part of a layout; each tensor has its box's shape


class Traffic(NamedTuple):
    """Bytes that one rank moved in a reshard."""

    sent: int
    received: int
    copied: int  # from its own shards into its own shards
    buffers: int  # allocated beside source and target


def reshard(
    made: ReshardPlan, rank: int, source: LocalShards, target: LocalShards, wire: Wire, timeout_s: float
) -> Traffic:
    """Fill ``target`` in place from ``source`` as ``made`` says; every rank of the plan calls it alike.

    Elements are converted to their spec's type before they are sent and to the target's on arrival. After ``timeout_s``
    it raises WeightSyncError naming the rank that failed; the wire is unusable then and ``target`` holds mixed weights.
    Raises WeightSyncError before anything moves if ``source`` or ``target`` lacks a shard.
    """
    deadline = time.monotonic() + timeout_s
    _check(made.source, rank, source, "source")
    _check(made.target, rank, target, "target")
    traffic = [messages_of(exchange, rank) for exchange in made.exchanges]
    outgoing = max((messages.outgoing_bytes for messages in traffic), default=0)
    wire.open(outgoing, max((messages.outgoing_bytes + messages.incoming_bytes for messages in traffic), default=0))
    copied = 0
    for move in made.local:
        if move.source.rank == rank:
            _slice(move, target, move.target.box).copy_(_slice(move, source, move.source.box))
            copied += move.nbytes
    for number, (exchange, messages) in enumerate(zip(made.exchanges, traffic, strict=True)):
        if not messages.outgoing and not messages.incoming:
            continue
        for span, buffer in zip(messages.outgoing, wire.send_buffers(messages), strict=True):
            _pack(exchange.messages[rank, span.peer], source, buffer, made.source)
        arrived = wire.exchange(messages, f"exchange {number + 1} of {len(made.exchanges)}", deadline)
        for span, buffer in zip(messages.incoming, arrived, strict=True):
            _unpack(exchange.messages[span.peer, rank], target, buffer, made.target)
        wire.release(messages, deadline)
    sent = sum(span.nbytes for messages in traffic for span in messages.outgoing)
    received = sum(span.nbytes for messages in traffic for span in messages.incoming)
    return Traffic(sent, received, copied, wire.held_bytes)


def one_box_each(
    layout: Layout, rank: int, tensors: Mapping[str, Tensor], names: Collection[str] | None = None
) -> dict[tuple[str, Box], Tensor]:
    """Return the shards of a rank that holds one box of each tensor, such as FSDP2's ``to_local()``."""
    return {(name, box): tensors[name] for name, box in layout.held(rank) if names is None or name in names}


def split_fused(fused: Tensor, layout: Layout, rank: int, names: Sequence[str]) -> dict[tuple[str, Box], Tensor]:
    """Return the boxes of ``names`` as views of the parameter [rows, ...] into which ``rank`` fuses them.

    Raises WeightSyncError if the boxes have another number of rows in total.
    """
    parts = fused_parts(layout, rank, names)
    rows = [lengths(box)[0] for _, box in parts]
    if sum(rows) != fused.shape[0]:
        raise WeightSyncError(
            f"a parameter of {fused.shape[0]} rows is fused from {names}, which have {sum(rows)} rows"
        )
    return dict(zip(parts, fused.split(rows), strict=True))


def _check(layout: Layout, rank: int, holding: LocalShards, what: str) -> None:
    for name, box in layout.held(rank):
        tensor = holding.get((name, box))
        if tensor is None or tuple(tensor.shape) != lengths(box):
            found = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise WeightSyncError(f"{what} of rank {rank} must have {box} of {name}, but has {found}")


def _slice(move: Move, holding: LocalShards, shard: Box) -> Tensor:
    return holding[move.tensor, shard][slices(move.box, shard)]


def _pack(message: Message, source: LocalShards, buffer: Tensor, layout: Layout) -> None:
    for move, place in _places(message, buffer, layout):
        place.copy_(_slice(move, source, move.source.box))


def _unpack(message: Message, target: LocalShards, buffer: Tensor, layout: Layout) -> None:
    for move, place in _places(message, buffer, layout):
        _slice(move, target, move.target.box).copy_(place)


def _places(message: Message, buffer: Tensor, layout: Layout) -> Iterator[tuple[Move, Tensor]]:
    """Yield each move with its part of a message, uint8[nbytes], as a tensor of the box's shape."""
    at = 0
    for move in message:
        dtype = getattr(torch, layout.tensors[move.tensor].dtype)
        yield move, buffer[at : at + move.nbytes].view(dtype).view(lengths(move.box))
        at += move.nbytes
