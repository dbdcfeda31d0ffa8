"""Stores tensors of all ranks in one folder: each rank writes what it holds, and any number of ranks can read it.

torch.distributed.checkpoint (DCP) plans who writes and reads what. Its safetensors storage records in each file's
header which part of which tensor the file has, so nothing is pickled.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rl_async.errors import CheckpointDamaged, CheckpointFailed

DTYPES = {  # names as in a safetensors header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
ON_HOST = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def host_copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy this rank's shards to host memory. Not a collective."""
    copied = DefaultStager(ON_HOST).stage(dict(state))
    assert isinstance(copied, dict)
    return copied


def write_shards(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards. A collective of ``group``; all files are complete and durable when it returns.

    Raises CheckpointFailed on all ranks if one of them could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(state), storage_writer=writer, process_group=group)
    except CheckpointException as error:  # not an Exception subclass, and its own text is a traceback
        raise CheckpointFailed(_causes(error)) from error


def read_shards(state: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors of ``state``, sharded or whole, in place. A collective of all ranks.

    Raises CheckpointDamaged on all ranks if one of them could not read.
    """
    try:
        dcp.load(dict(state), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise CheckpointDamaged(f"{folder}: {_causes(error)}") from error


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


def write_tensors(target: Path, sizes: Mapping[str, tuple[str, list[int]]], tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file one tensor at a time; ``sizes`` has their dtypes and shapes, in the same order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
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


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in sorted(error.failures.items()))
