"""The part of a tensor that a rank holds, and the same part in a safetensors file."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the part of ``tensor`` that this rank holds, as a view, and its place in the whole. Not a collective."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    places = zip(chunk.offsets, chunk.sizes, strict=True)
    return tensor.to_local(), tuple(slice(offset, offset + size) for offset, size in places)


def read_part(path: Path | str, name: str, part: tuple[slice, ...]) -> Tensor:
    """Read a part of a tensor of a safetensors file: a slice of each dimension. Maps no more than that part's pages,
    until the result is dropped."""
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[part] if part else file.get_tensor(name)
