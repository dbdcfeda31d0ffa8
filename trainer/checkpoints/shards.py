"""Stores tensors of all ranks in one folder: each rank writes what it holds, and any number of ranks can read it.

The format is that of torch.distributed.checkpoint's (DCP) safetensors storage, whose header tells which part of which
tensor a file has. Its ``save`` and ``load`` are not used: their plans go from rank to rank as pickles, which whoever
reaches a rank's socket could forge. Nothing here is pickled, and a rank knows by itself what it writes and reads.

A backend says what a rank holds as ``Part``s, boxes of whole tensors, whatever it calls that memory or fuses it with.
So what one backend writes the other reads, on any number of ranks.
"""

import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from rl_async.errors import CheckpointDamaged, CheckpointFailed, RlAsyncError
from rl_async.trainer.model.parts import own_part, read_part
from rl_async.weight_sync.experts import ExpertPart, expert_parts, published

DTYPES = {  # names as in a safetensors header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
SUFFIX = ".safetensors"
MOMENT = "|"  # separates the name of a parameter from that of a tensor of AdamW
STEPS = f"schedule{MOMENT}steps"  # the optimizer steps that were taken
SHARDING = "DCP_SHARDING_INFO"  # a key in the header's metadata
NO_NOTES: Mapping[str, str] = {}
FAILURES = (OSError, SafetensorError)  # a full disk raises either, depending on who was writing
UNREADABLE = (*FAILURES, ValueError, KeyError)  # a tensor of another shape, or none


class StoredPart(NamedTuple):
    """A part of a tensor in a file: where it begins in the whole, and its shape."""

    offset: Sequence[int]
    shape: Sequence[int]
    path: str


class Part(NamedTuple):
    """What a rank stores of the tensor ``name``: a box of it, and the numbers there, of the box's shape."""

    name: str
    where: tuple[slice, ...]
    numbers: Tensor


def own_parts(state: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield what of ``state``, sharded or whole, is for this rank to write, as views. Not a collective.

    Each part of a tensor is written by one rank, known without asking any.
    """
    for name, tensor in state.items():
        part = _part_to_write(name, tensor.detach())
        if part is not None:
            numbers, where = part
            yield Part(name, where, numbers)


def host_copy(parts: Iterable[Part]) -> list[Part]:
    """Copy this rank's parts to host memory, one after the other. Not a collective."""
    return [
        part._replace(numbers=part.numbers.to("cpu", copy=True, memory_format=torch.contiguous_format))
        for part in parts
    ]


def write_shards(parts: Sequence[Part], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write every rank's parts. A collective of ``group``; all files are complete when it returns.

    Raises CheckpointFailed on all ranks if one of them could not write.
    """
    on_all_ranks(lambda: _write_own(parts, folder), group, CheckpointFailed)


def _write_own(parts: Sequence[Part], folder: Path) -> None:
    """Write this rank's parts into one file, or, since a file has each name once, the second parts of tensors into
    another one, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[Part]] = []
    seen = Counter[str]()
    for part in parts:
        if seen[part.name] == len(files):
            files.append([])
        files[seen[part.name]].append(part)
        seen[part.name] += 1
    for number, held in enumerate(files, 1):
        sizes = {name: (DTYPES[numbers.dtype], list(numbers.shape)) for name, _, numbers in held}
        offsets = json.dumps({name: {"saved_offsets": [at.start for at in where]} for name, where, _ in held})
        target = folder / f"shard-{dist.get_rank() + 1:05d}-model-{number:05d}-of-{len(files):05d}{SUFFIX}"
        write_tensors(target, sizes, (part.numbers for part in held), {SHARDING: offsets})


def _part_to_write(name: str, tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]] | None:
    """Return the part of ``tensor`` that this rank writes, and its place; None if other ranks write what it holds.

    Of the ranks that hold the same part one writes it, another one for each name. Rank 0 writes what is not sharded.
    """
    if not isinstance(tensor, DTensor):
        return own_part(tensor) if dist.get_rank() == 0 else None
    mesh = tensor.device_mesh
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    writer = zlib.crc32(name.encode())
    for dim in copies:
        writer, chosen = divmod(writer, mesh.size(dim))
        if mesh.get_local_rank(dim) != chosen:
            return None
    part, where = own_part(tensor)
    return (part, where) if part.numel() else None


def read_shards(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of ``state``, sharded or whole, in place. A collective of all ranks.

    Stacked experts may be stored one by one (``weight_sync/experts.py``).
    Raises CheckpointDamaged on all ranks if one of them could not read.
    """
    try:
        on_all_ranks(lambda: _read_own(state, folder), None, CheckpointDamaged, UNREADABLE)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{folder}: {error}") from error


def _read_own(state: Mapping[str, Tensor], folder: Path) -> None:
    """Read this rank's parts, slice by slice."""
    shards = StoredShards(folder)
    for name, tensor in state.items():
        local, where = own_part(tensor.detach())
        parameter, separator, kind = name.partition(MOMENT)
        parts = [] if name in shards.sizes else expert_parts(parameter, tensor.shape)
        if not parts:
            shards.read_into(local, name, where, tensor.shape)
        for part in parts:
            if part.expert in range(where[0].start, where[0].stop):
                expert = local[part.expert - where[0].start, part.rows.start : part.rows.stop]
                shards.read_into(expert, f"{part.name}{separator}{kind}")


class StoredShards:
    """The tensors of a folder of shards, of which any part can be read. ``sizes`` has the shape of each by its name.

    An expert that is stored stacked with others can be read by the name of its own, too (``weight_sync/experts.py``).
    A file is open for one slice: mapped pages count as a rank's memory.
    """

    def __init__(self, folder: Path) -> None:
        found = stored(folder)
        self.sizes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, described in found.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata)
            self.sizes[name], self.dtypes[name] = described.size, described.properties.dtype
        self._parts: dict[str, list[StoredPart]] = defaultdict(list)
        for index, place in found.storage_data.items():
            self._parts[index.fqn].append(StoredPart(index.offset, place.shape, place.relative_path))
        self._stacked: dict[str, tuple[str, ExpertPart]] = {}
        for name, size in self.sizes.items():
            parameter, separator, kind = name.partition(MOMENT)
            for part in expert_parts(parameter, size):
                self._stacked[f"{part.name}{separator}{kind}"] = name, part

    def whole(self, name: str) -> Tensor:
        """Assemble a tensor. Raises KeyError if there is none of the name."""
        whole = torch.empty(self.sizes[name], dtype=self.dtypes[name])
        self.read_into(whole, name)
        return whole

    def read_into(
        self, local: Tensor, name: str, where: Sequence[slice] | None = None, size: Sequence[int] | None = None
    ) -> None:
        """Fill ``local`` with the part ``where`` of a tensor, by default all of it.

        Raises KeyError if there is no such tensor, and ValueError if it has not the shape ``size``, by default that
        of ``local``, or parts of it are missing.
        """
        where = [slice(0, count) for count in local.shape] if where is None else where
        found, expected = self._size_of(name), tuple(local.shape if size is None else size)
        if found != expected:
            raise ValueError(f"{name} is {list(found)} there, not {list(expected)}")
        if name in self._stacked:
            name, (_, expert, rows) = self._stacked[name]
            moved = slice(rows.start + where[0].start, rows.start + where[0].stop)
            local, where = local[None], [slice(expert, expert + 1), moved, where[1]]
        left = local.numel()
        for begin, shape, path in self._parts[name]:
            stops = [offset + count for offset, count in zip(begin, shape, strict=True)]
            common = [(max(at.start, b), min(at.stop, s)) for at, b, s in zip(where, begin, stops, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            piece = read_part(path, name, tuple(slice(i - b, j - b) for (i, j), b in zip(common, begin, strict=True)))
            at_home = tuple(slice(i - at.start, j - at.start) for (i, j), at in zip(common, where, strict=True))
            local[at_home].copy_(piece)
            left -= piece.numel()
        if left:
            raise ValueError(f"{name} lacks {left} of its numbers there")

    def _size_of(self, name: str) -> tuple[int, ...]:
        if name in self.sizes:
            return tuple(self.sizes[name])
        if name not in self._stacked:
            raise KeyError(f"there is no tensor {name}")
        stacked, part = self._stacked[name]
        return len(part.rows), self.sizes[stacked][2]


def on_all_ranks(
    work: Callable[[], None],
    group: dist.ProcessGroup | None,
    failed: type[RlAsyncError],
    causes: tuple[type[Exception], ...] = FAILURES,
) -> None:
    """Do ``work`` on all ranks of ``group``. Raises ``failed`` on all of them if one raises of ``causes``.

    A collective.
    """
    failure: Exception | None = None
    try:
        work()
    except causes as error:
        failure = error
    flag = torch.tensor([failure is not None], dtype=torch.int64)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failed(f"rank {dist.get_rank()}: {failure}") from failure
    if flag.item():
        raise failed("another rank failed to read or write its files; see that rank's log")


def stored(folder: Path) -> Metadata:
    """Read which tensors are in ``folder``, and in which files. Not a collective."""
    return HuggingFaceStorageReader(str(folder)).read_metadata()


def write_whole(folder: Path, target: Path, rename: Callable[[str], str | None], kind: str = "") -> None:
    """Assemble the tensors of ``folder`` into the safetensors file ``target``, one at a time.

    ``rename`` maps each tensor's name to its name in a model of Transformers, or to None to omit it; experts get the
    names of published files of ``kind``, a ``model_type`` (``weight_sync/experts.py``). Not a collective: one process
    does it.
    """
    shards = StoredShards(folder)
    names = {name: new for name in sorted(shards.sizes) if (new := rename(name)) is not None}
    empty = (
        (new, torch.empty(shards.sizes[name], dtype=shards.dtypes[name], device="meta")) for name, new in names.items()
    )
    sizes = {new: (DTYPES[tensor.dtype], list(tensor.shape)) for new, tensor in published(kind, empty)}
    wholes = ((new, shards.whole(name)) for name, new in names.items())
    write_tensors(target, sizes, (tensor for _, tensor in published(kind, wholes)))


def write_tensors(
    target: Path,
    sizes: Mapping[str, tuple[str, list[int]]],
    tensors: Iterable[Tensor],
    notes: Mapping[str, str] = NO_NOTES,
) -> None:
    """Write a safetensors file one tensor at a time; ``sizes`` has their dtypes and shapes, in the same order.

    ``notes`` are added to the metadata of the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    end = 0
    for name, (dtype, shape) in sizes.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8
    with target.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
