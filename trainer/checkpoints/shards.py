"""Stores tensors of all ranks in one folder: each rank writes what it holds, and any number of ranks can read it.

The format is that of torch.distributed.checkpoint's (DCP) safetensors storage, whose header tells which part of which
tensor a file has. Its ``save`` and ``load`` are not used: their plans go from rank to rank as pickles, which whoever
reaches a rank's socket could forge. Nothing here is pickled, and a rank knows by itself what it writes and reads.
"""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from rl_async.errors import CheckpointDamaged, CheckpointFailed, RlAsyncError

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
SHARDING = "DCP_SHARDING_INFO"  # a key in the header's metadata
NO_NOTES: Mapping[str, str] = {}
FAILURES = (OSError, SafetensorError)  # a full disk raises either, depending on who was writing
UNREADABLE = (*FAILURES, RuntimeError, ValueError, KeyError, AssertionError)  # what DCP raises for other tensors
ON_HOST = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def host_copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy this rank's shards to host memory. Not a collective."""
    copied = DefaultStager(ON_HOST).stage(dict(state))
    assert isinstance(copied, dict)
    return copied


def write_shards(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards. A collective of ``group``; all files are complete when it returns.

    Raises CheckpointFailed on all ranks if one of them could not write.
    """
    on_all_ranks(lambda: _write_own(state, folder), group, CheckpointFailed)


def _write_own(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write what is for this rank to write: each part of a tensor is written by one rank, known without asking any."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: part for name, tensor in state.items() if (part := _own_part(name, tensor)) is not None}
    if parts:
        sizes = {name: (DTYPES[part.dtype], list(part.shape)) for name, (part, _) in parts.items()}
        offsets = json.dumps({name: {"saved_offsets": offset} for name, (_, offset) in parts.items()})
        target = folder / f"shard-{dist.get_rank() + 1:05d}-model-00001-of-00001{SUFFIX}"
        write_tensors(target, sizes, (part for part, _ in parts.values()), {SHARDING: offsets})


def _own_part(name: str, tensor: Tensor) -> tuple[Tensor, list[int]] | None:
    """Return the part of ``tensor`` that this rank writes, and its offset; None if other ranks write all of it.

    Of the ranks that hold the same part one writes it, another one for each name. Rank 0 writes what is not sharded.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, [0] * tensor.dim()) if dist.get_rank() == 0 else None
    mesh = tensor.device_mesh
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    writer = zlib.crc32(name.encode())
    for dim in copies:
        writer, chosen = divmod(writer, mesh.size(dim))
        if mesh.get_local_rank(dim) != chosen:
            return None
    part = tensor.to_local()
    (chunk,) = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return (part, list(chunk.offsets)) if part.numel() else None


def read_shards(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of ``state``, sharded or whole, in place. A collective of all ranks.

    Raises CheckpointDamaged on all ranks if one of them could not read.
    """
    try:
        on_all_ranks(lambda: _read_own(state, folder), None, CheckpointDamaged, UNREADABLE)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{folder}: {error}") from error


def _read_own(state: Mapping[str, Tensor], folder: Path) -> None:
    """Read this rank's parts. A load plan is local: ``dcp.load`` would only send it around."""
    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    found = reader.read_metadata()
    planner.set_up_planner(dict(state), found, is_coordinator=True)
    reader.set_up_storage_reader(found, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


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


def write_whole(folder: Path, target: Path, rename: Callable[[str], str | None]) -> None:
    """Assemble the tensors of ``folder`` into the safetensors file ``target``, one at a time.

    ``rename`` maps each tensor's name to its name there, or to None to omit it. Not a collective: one process does it.
    """
    found = stored(folder)
    names = {name: new for name in sorted(found.state_dict_metadata) if (new := rename(name)) is not None}
    sizes = {}
    for name, new in names.items():
        size = found.state_dict_metadata[name]
        assert isinstance(size, TensorStorageMetadata)
        sizes[new] = (DTYPES[size.properties.dtype], list(size.size))
    parts = defaultdict(list)
    for index, place in found.storage_data.items():
        parts[index.fqn].append((index.offset, place.relative_path))
    write_tensors(target, sizes, (_whole(found, name, parts[name]) for name in names))


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


def _whole(found: Metadata, name: str, parts: Sequence[tuple[Sequence[int], str]]) -> Tensor:
    """Assemble one tensor from ``parts``: the offset of each part, and its file."""
    size = found.state_dict_metadata[name]
    assert isinstance(size, TensorStorageMetadata)
    whole = torch.empty(size.size, dtype=size.properties.dtype)
    for offset, path in parts:
        with safe_open(path, framework="pt") as file:
            part = file.get_tensor(name)
        whole[tuple(slice(begin, begin + count) for begin, count in zip(offset, part.shape, strict=True))] = part
    return whole
